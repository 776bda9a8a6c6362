package io.persistshard.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import scala.Option;

/** A frame of format persist as a table of the catalog. The driver's own Python process keeps the frame, and calls this class. */
public final class PersistFrame {
  private PersistFrame() {}

  /** `desk`: the address at which that process answers; `name`: the loaded frame; `loaded`: the answer to its load, as JSON. */
  public static Dataset<Row> of(SparkSession session, String desk, String name, String loaded) throws JsonProcessingException {
    var frame = new Frame(Desk.of(desk), name);
    var answer = Desk.JSON.readTree(loaded);
    var properties = answer.get("properties");
    var shown = "persist " + properties.get("shard").asText() + " of " + properties.get("store").asText();
    var table = new PersistTable(shown, frame, answer, "is a frame and");
    return Dataset.ofRows(session, DataSourceV2Relation.create(table, Option.empty(), Option.empty()));
  }
}
