package io.persistshard.spark;

import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.DataSource;
import org.apache.spark.sql.types.StructType;
import scala.Option;

/**
 * Data sources in Python. Spark stores the plan of a scan in an object that all scans of one source share, so the last scan wins. Here
 * each scan and each write has its own source.
 */
final class Python {
  /** The name of the format, as in persist_spark/catalog/source.py. */
  private static final String FORMAT = "persist_catalog";

  private Python() {}

  /** A new table in Python with the columns `schema`. */
  static Table table(StructType schema) {
    Option<TableProvider> found = DataSource.lookupDataSourceV2(FORMAT, SparkSession.active().sessionState().conf());
    if (found.isEmpty())
      throw new IllegalStateException("Spark's Python workers do not have the package persist_spark: set PYSPARK_PYTHON to an "
          + "interpreter that has it, before the session starts");
    return found.get().getTable(schema, new Transform[0], java.util.Map.of());
  }
}
