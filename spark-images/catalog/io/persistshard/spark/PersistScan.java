package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.Map;
import java.util.OptionalLong;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * One scan, with its own Python source. Scans of the same rows are equal, so that Spark reads them once. Equal names do not mean equal
 * rows, because a name may have meant two shards. The frame stays readable as long as this object or one of its reader factories is
 * reachable.
 */
final class PersistScan implements Scan, SupportsReportStatistics {
  /** The option that differs for every scan, as in persist_spark/catalog/tables.py. The other options identify the rows of its table. */
  private static final String FRAME = "persist.frame";

  private final String shown;
  private final Frame frame;
  private final StructType columns;
  private final long bytes;
  private final Map<String, String> source;
  private final Scan scan;

  /** `shown`: table, time and conditions. Together with the columns and the options of its table, they determine the rows of the scan. */
  PersistScan(String shown, Frame frame, JsonNode answer) {
    this.shown = shown;
    this.frame = frame;
    this.columns = (StructType) DataType.fromJson(answer.get("columns").toString());
    this.bytes = answer.get("bytes").asLong();
    Map<String, String> options = new HashMap<>();
    answer.get("options").properties().forEach(entry -> options.put(entry.getKey(), entry.getValue().asText()));
    this.source = new HashMap<>(options);
    source.remove(FRAME);
    this.scan = ((SupportsRead) Python.table(columns)).newScanBuilder(new CaseInsensitiveStringMap(options)).build();
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
    return new Rows(this, scan.toBatch());
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    return scan.supportedCustomMetrics();
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return scan.columnarSupportMode();
  }

  /** The stored bytes, by which Spark chooses joins. */
  @Override
  public Statistics estimateStatistics() {
    return new StoredBytes(bytes);
  }

  record StoredBytes(long bytes) implements Statistics {
    @Override
    public OptionalLong sizeInBytes() {
      return OptionalLong.of(bytes);
    }

    @Override
    public OptionalLong numRows() {
      return OptionalLong.empty();
    }
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof PersistScan that && shown.equals(that.shown) && columns.equals(that.columns)
        && source.equals(that.source);
  }

  @Override
  public int hashCode() {
    return shown.hashCode();
  }

  private record Rows(PersistScan of, Batch batch) implements Batch {
    @Override
    public InputPartition[] planInputPartitions() {
      return batch.planInputPartitions();
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Readers(batch.createReaderFactory(), of.frame);
    }

    @Override
    public boolean equals(Object other) {
      return other instanceof Rows that && of.equals(that.of);
    }

    @Override
    public int hashCode() {
      return of.hashCode();
    }
  }

  /** An RDD of the scan refers only to its factory. On executors the frame is null, because only the driver keeps frames. */
  private static final class Readers implements PartitionReaderFactory {
    private static final long serialVersionUID = 1L;
    private final PartitionReaderFactory inner;

    @SuppressWarnings("unused") // a reference to this object keeps the frame
    private final transient Frame frame;

    Readers(PartitionReaderFactory inner, Frame frame) {
      this.inner = inner;
      this.frame = frame;
    }

    @Override
    public boolean supportColumnarReads(InputPartition partition) {
      return inner.supportColumnarReads(partition);
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return inner.createReader(partition);
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
      return inner.createColumnarReader(partition);
    }
  }
}
