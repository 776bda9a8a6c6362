package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.math.BigDecimal;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.Count;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.expressions.aggregate.Max;
import org.apache.spark.sql.connector.expressions.aggregate.Min;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.StructType;

/** The one row of aggregates over all rows of a scan, if the metadata of the shard prove each of them. Reads no rows. */
final class Aggregates implements LocalScan {
  private final String shown;
  private final StructType columns;
  private final InternalRow row;

  private Aggregates(String shown, StructType columns, InternalRow row) {
    this.shown = shown;
    this.columns = columns;
    this.row = row;
  }

  /** Null when Spark must compute an aggregate. `where`: conditions as texts of the engine; `all`: the columns of the table. */
  static Aggregates known(String shown, Frame table, List<String> where, StructType all, Aggregation asked) {
    if (asked.groupByExpressions().length > 0) return null;
    ObjectNode request = Desk.JSON.createObjectNode().put("of", table.name);
    ArrayNode conditions = request.putArray("where");
    where.forEach(conditions::add);
    ArrayNode questions = request.putArray("asked");
    StructType columns = new StructType();
    for (AggregateFunc function : asked.aggregateExpressions()) {
      String column = function.children().length == 0 ? null : column(function.children()[0], all);
      boolean isCount = function instanceof CountStar || function instanceof Count count && !count.isDistinct();
      if (!isCount && !(function instanceof Min) && !(function instanceof Max)) return null;
      if (column == null && !(function instanceof CountStar)) return null;
      ArrayNode question = questions.addArray().add(isCount ? "count" : function instanceof Min ? "min" : "max");
      if (column != null) question.add(column);
      columns = columns.add(function.describe(), isCount ? DataTypes.LongType : all.apply(column).dataType());
    }
    JsonNode values = table.desk.ask("aggregates", request);
    if (values.isNull()) return null;
    Object[] row = new Object[columns.length()];
    for (int i = 0; i < row.length; i++) row[i] = value(values.get(i), columns.apply(i).dataType());
    return new Aggregates(shown, columns, new GenericInternalRow(row));
  }

  /** The name of a top-level column; null for any other expression. */
  private static String column(Expression expression, StructType all) {
    if (!(expression instanceof NamedReference reference) || reference.fieldNames().length != 1) return null;
    String name = reference.fieldNames()[0];
    return all.getFieldIndex(name).isDefined() ? name : null;
  }

  /** Reads a value in the form of persist_spark/catalog/aggregates.py, which knows no other types. */
  private static Object value(JsonNode value, DataType type) {
    if (value.isNull()) return null;
    if (type.equals(DataTypes.BooleanType)) return value.asBoolean();
    if (type.equals(DataTypes.ByteType)) return (byte) value.asInt();
    if (type.equals(DataTypes.ShortType)) return (short) value.asInt();
    if (type.equals(DataTypes.IntegerType) || type.equals(DataTypes.DateType)) return value.asInt();
    if (type.equals(DataTypes.FloatType)) return (float) number(value.asText());
    if (type.equals(DataTypes.DoubleType)) return number(value.asText());
    if (type instanceof DecimalType decimal)
      return Decimal.apply(new BigDecimal(value.asText()), decimal.precision(), decimal.scale());
    return value.asLong();
  }

  private static double number(String text) {
    return switch (text) {
      case "inf" -> Double.POSITIVE_INFINITY;
      case "-inf" -> Double.NEGATIVE_INFINITY;
      default -> Double.parseDouble(text);
    };
  }

  @Override
  public StructType readSchema() {
    return columns;
  }

  @Override
  public String description() {
    return shown;
  }

  @Override
  public InternalRow[] rows() {
    return new InternalRow[] {row};
  }
}
