package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.stream.StreamSupport;
import org.apache.spark.sql.connector.catalog.Changelog;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** The changes of a shard between two times. Its times are the versions of Spark's change feeds. */
final class PersistChanges implements Changelog {
  private final String name;
  private final Frame frame;
  private final JsonNode loaded;
  private final StructType schema;

  PersistChanges(String name, Frame frame, JsonNode loaded) {
    this.name = name;
    this.frame = frame;
    this.loaded = loaded;
    this.schema = (StructType) DataType.fromJson(loaded.get("columns").toString());
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public Column[] columns() {
    return PersistTable.columns(schema);
  }

  @Override
  public boolean containsCarryoverRows() {
    return false;
  }

  /** A row may change at several times. */
  @Override
  public boolean containsIntermediateChanges() {
    return true;
  }

  /** The values that a key lost and gained at one time are a pair of update_preimage and update_postimage. */
  @Override
  public boolean representsUpdateAsDeleteAndInsert() {
    return false;
  }

  @Override
  public NamedReference[] rowId() {
    return StreamSupport.stream(loaded.get("key").spliterator(), false)
        .map(column -> Expressions.column(column.asText()))
        .toArray(NamedReference[]::new);
  }

  @Override
  public NamedReference rowVersion() {
    return Expressions.column("_commit_version");
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    String shown = name + " changes in " + loaded.get("window").asText();
    return new PersistScanBuilder(shown, frame, schema) {
      @Override
      public Scan build() {
        return new PersistChangesScan(shown(), loaded, frame, wanted(), options.asCaseSensitiveMap(), this::rows);
      }
    };
  }
}
