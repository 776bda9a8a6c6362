package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Arrays;
import java.util.Collections;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsDeleteV2;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsDynamicOverwrite;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A shard at one time. The time is chosen when the table is loaded, once for each statement. Two loads at the same time are equal. */
final class PersistTable implements SupportsRead, SupportsWrite, SupportsDeleteV2 {
  private final String name;
  private final Frame frame;
  private final StructType schema;
  private final Map<String, String> properties;
  private final String time;
  private final String fixed;

  /** `fixed`: the reason why the table cannot be written, as part of a sentence; null for a table that can be written. */
  PersistTable(String name, Frame frame, JsonNode loaded, String fixed) {
    this.name = name;
    this.frame = frame;
    this.schema = (StructType) DataType.fromJson(loaded.get("columns").toString());
    Map<String, String> shown = new LinkedHashMap<>();
    loaded.get("properties").properties().forEach(entry -> shown.put(entry.getKey(), entry.getValue().asText()));
    this.properties = Collections.unmodifiableMap(shown);
    this.time = loaded.get("as_of").isNull() ? " (empty)" : " as_of " + loaded.get("as_of").asText();
    this.fixed = fixed;
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public Column[] columns() {
    return columns(schema);
  }

  static Column[] columns(StructType schema) {
    return Arrays.stream(schema.fields())
        .map(field -> Column.create(field.name(), field.dataType(), field.nullable()))
        .toArray(Column[]::new);
  }

  /** The properties that DESCRIBE EXTENDED and SHOW CREATE TABLE show. They contain no store. */
  @Override
  public Map<String, String> properties() {
    return properties;
  }

  @Override
  public Set<TableCapability> capabilities() {
    return fixed != null
        ? EnumSet.of(TableCapability.BATCH_READ)
        : EnumSet.of(TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.STREAMING_WRITE, TableCapability.TRUNCATE,
            TableCapability.OVERWRITE_DYNAMIC);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    if (!options.isEmpty())
      throw new IllegalArgumentException("table " + name + ": option " + String.join(", ", options.keySet())
          + " is not known to a table of the catalog; use the clauses of SQL, or format persist");
    return new PersistScanBuilder(name + time, frame, schema);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    Map<String, String> options = new HashMap<>(info.options().asCaseSensitiveMap());
    ObjectNode request = Desk.JSON.createObjectNode().put("frame", frame.name);
    frame.desk.ask("writing", request).properties().forEach(entry -> options.put(entry.getKey(), entry.getValue().asText()));
    return new Rows(((SupportsWrite) Python.table(info.schema())).newWriteBuilder(new LogicalWriteInfo() {
      @Override
      public CaseInsensitiveStringMap options() {
        return new CaseInsensitiveStringMap(options);
      }

      @Override
      public String queryId() {
        return info.queryId();
      }

      @Override
      public StructType schema() {
        return info.schema();
      }
    }));
  }

  /** A write in Python. A table has no partitions, so both modes of overwriting replace all of its rows. */
  private record Rows(WriteBuilder python) implements SupportsTruncate, SupportsDynamicOverwrite {
    @Override
    public Write build() {
      return python.build();
    }

    @Override
    public WriteBuilder truncate() {
      return ((SupportsTruncate) python).truncate();
    }

    @Override
    public WriteBuilder overwriteDynamicPartitions() {
      return truncate();
    }
  }

  @Override
  public boolean canDeleteWhere(Predicate[] predicates) {
    if (fixed != null) throw new UnsupportedOperationException(name + " " + fixed + " cannot be changed");
    for (JsonNode text : Conditions.answered(frame, predicates)) if (text.isNull()) return false;
    return true;
  }

  @Override
  public void deleteWhere(Predicate[] predicates) {
    delete(Conditions.answered(frame, predicates));
  }

  /** TRUNCATE TABLE, and DELETE without a condition. */
  @Override
  public boolean truncateTable() {
    canDeleteWhere(new Predicate[0]);
    delete(Desk.JSON.createArrayNode());
    return true;
  }

  private void delete(JsonNode where) {
    ObjectNode request = Desk.JSON.createObjectNode().put("frame", frame.name);
    request.set("where", where);
    frame.desk.ask("delete", request);
  }

  /** Lets Spark find its cached data of a table, as long as the table has not changed. */
  @Override
  public boolean equals(Object other) {
    return other instanceof PersistTable that && Objects.equals(fixed, that.fixed) && time.equals(that.time)
        && properties.equals(that.properties) && schema.equals(that.schema);
  }

  @Override
  public int hashCode() {
    return properties.hashCode();
  }

  @Override
  public String toString() {
    return name + time;
  }
}
