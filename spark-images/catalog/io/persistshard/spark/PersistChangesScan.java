package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HashMap;
import java.util.Map;
import java.util.function.Supplier;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** One scan of changes: the changes between two times, or, as a stream, all later changes. Spark decides between the two only later. */
final class PersistChangesScan implements Scan, SupportsReportStatistics {
  private final String shown;
  private final String shard;
  private final Frame changes;
  private final StructType columns;
  private final long bytes;
  private final Map<String, String> options;
  private final Supplier<PersistScan> rows;

  /**
   * `loaded`: the answer of the process behind the catalog for the frame `changes`; `rows`: makes the scan of a batch; `options`: the
   * user's options.
   */
  PersistChangesScan(
      String shown, JsonNode loaded, Frame changes, StructType columns, Map<String, String> options, Supplier<PersistScan> rows) {
    this.shown = shown;
    this.shard = loaded.get("shard").asText();
    this.changes = changes;
    this.columns = columns;
    this.bytes = loaded.get("bytes").asLong();
    this.options = options;
    this.rows = rows;
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
  public Batch toBatch() {
    return rows.get().toBatch();
  }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
    ObjectNode request = Desk.JSON.createObjectNode().put("frame", changes.name);
    ObjectNode given = request.putObject("options");
    options.forEach(given::put);
    Map<String, String> found = new HashMap<>();
    changes.desk.ask("stream", request).properties().forEach(entry -> found.put(entry.getKey(), entry.getValue().asText()));
    return source(found).toMicroBatchStream(checkpointLocation);
  }

  private Scan source(Map<String, String> options) {
    return ((SupportsRead) Python.table(columns)).newScanBuilder(new CaseInsensitiveStringMap(options)).build();
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    return source(Map.of()).supportedCustomMetrics();
  }

  /** Rows, not columnar batches, like all Python sources. */
  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.UNSUPPORTED;
  }

  @Override
  public Statistics estimateStatistics() {
    return new PersistScan.StoredBytes(bytes);
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof PersistChangesScan that && shown.equals(that.shown) && columns.equals(that.columns)
        && shard.equals(that.shard);
  }

  @Override
  public int hashCode() {
    return shown.hashCode();
  }
}
