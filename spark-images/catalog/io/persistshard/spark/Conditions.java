package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HexFormat;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.GeneralScalarExpression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.Predicate;

/** Spark's predicates as JSON for persist_spark/catalog/conditions.py, which decides which of them the engine answers. */
final class Conditions {
  private Conditions() {}

  /** For each predicate, the engine's text of it, or null if only Spark can answer it exactly. */
  static JsonNode answered(Frame table, Predicate[] predicates) {
    ObjectNode request = Desk.JSON.createObjectNode().put("frame", table.name);
    ArrayNode conditions = request.putArray("conditions");
    for (Predicate predicate : predicates) conditions.add(tree(predicate));
    return table.desk.ask("answers", request);
  }

  private static ObjectNode tree(Expression expression) {
    ObjectNode node = Desk.JSON.createObjectNode();
    if (expression instanceof NamedReference column) {
      ArrayNode path = node.putArray("column");
      for (String name : column.fieldNames()) path.add(name);
    } else if (expression instanceof Literal<?> literal) {
      put(node.put("type", literal.dataType().typeName()), literal.value());
    } else if (expression instanceof GeneralScalarExpression operation) {
      ArrayNode children = node.put("name", operation.name()).putArray("children");
      for (Expression child : operation.children()) children.add(tree(child));
    }
    return node; // without fields for an expression that has no form here: a cast, a function of the user
  }

  /** Numbers of a limited range unchanged, binary as hexadecimal digits, dates in days, times in microseconds, and all other values as
   * text. */
  private static void put(ObjectNode node, Object value) {
    if (value == null) return;
    if (value instanceof Boolean truth) node.put("value", truth);
    else if (value instanceof Float || value instanceof Double) node.put("value", Double.toString(((Number) value).doubleValue()));
    else if (value instanceof Byte || value instanceof Short || value instanceof Integer || value instanceof Long)
      node.put("value", ((Number) value).longValue());
    else if (value instanceof byte[] bytes) node.put("value", HexFormat.of().formatHex(bytes));
    else node.put("value", value.toString());
  }
}
