package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Collects what one scan needs from a table: columns, the conditions that the engine answers, and the aggregates that it knows. */
class PersistScanBuilder implements SupportsPushDownV2Filters, SupportsPushDownRequiredColumns, SupportsPushDownAggregates {
  private final String name;
  private final Frame table;
  private final StructType all;
  private StructType wanted;
  private final List<String> where = new ArrayList<>();
  private Predicate[] pushed = new Predicate[0];
  private Aggregates known;

  PersistScanBuilder(String name, Frame table, StructType schema) {
    this.name = name;
    this.table = table;
    this.all = schema;
    this.wanted = schema;
  }

  /** Keeps the conditions that the engine answers exactly, and returns the others, which Spark evaluates. */
  @Override
  public Predicate[] pushPredicates(Predicate[] predicates) {
    JsonNode texts = Conditions.answered(table, predicates);
    List<Predicate> ours = new ArrayList<>();
    List<Predicate> theirs = new ArrayList<>();
    where.clear();
    for (int i = 0; i < predicates.length; i++) {
      if (texts.get(i).isNull()) {
        theirs.add(predicates[i]);
      } else {
        ours.add(predicates[i]);
        where.add(texts.get(i).asText());
      }
    }
    pushed = ours.toArray(new Predicate[0]);
    return theirs.toArray(new Predicate[0]);
  }

  @Override
  public Predicate[] pushedPredicates() {
    return pushed;
  }

  /** Keeps at least one column. Rows without columns would arrive as no rows, and count(*) would be 0. */
  @Override
  public void pruneColumns(StructType required) {
    wanted = required.isEmpty() ? new StructType(new StructField[] {all.apply(0)}) : required;
  }

  /** Spark calls this first, and only if no conditions are left to it. */
  @Override
  public boolean supportCompletePushDown(Aggregation asked) {
    known = Aggregates.known(shown(), table, where, all, asked);
    return known != null;
  }

  /** Either all aggregates are known, or Spark computes all of them. */
  @Override
  public boolean pushAggregation(Aggregation asked) {
    return known != null;
  }

  @Override
  public Scan build() {
    return known != null ? known : rows();
  }

  /** The scan with everything that the builder collected. */
  final PersistScan rows() {
    Frame scan = new Frame(table.desk);
    ObjectNode request = Desk.JSON.createObjectNode().put("frame", scan.name).put("of", table.name);
    ArrayNode columns = request.putArray("columns");
    for (String column : wanted.fieldNames()) columns.add(column);
    ArrayNode conditions = request.putArray("where");
    where.forEach(conditions::add);
    return new PersistScan(shown(), scan, table.desk.ask("scan", request));
  }

  final StructType wanted() {
    return wanted;
  }

  /** Table, time and conditions, as readable text. */
  final String shown() {
    return name + (where.isEmpty() ? "" : " where " + String.join(" and ", where));
  }
}
