"""`history()` and `detail()`: the metadata of one shard, with the column names of other table formats."""

from __future__ import annotations

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.secrets import shown_url
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.source.loaded import FORMAT
from persist_spark.table.shard import TableShard

_DETAIL_DDL = (
    "format STRING, id STRING, name STRING, location STRING, consensus STRING, version BIGINT, lastModified TIMESTAMP, "
    "since BIGINT, upper BIGINT, numFiles BIGINT, numBatches BIGINT, numUpdates BIGINT, sizeInBytes BIGINT, "
    "keySchema STRING, valueSchema STRING, properties MAP<STRING, STRING>"
)


def history(table: TableShard, limit: int | None) -> DataFrame:
    """The live versions, newest first, at most `limit`: `version`, `timestamp`, `changed` (how many entries of each collection of the state
    changed), `bytes`. Reads only metadata.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidUsage(f"limit: {limit!r} is not a whole number of at least 1; leave it out for all versions")
    versions = table.frame(table="versions")
    shown = versions.select(
        F.col("seqno").alias("version"), _instant("walltime_ms").alias("timestamp"), "changed", "bytes"
    ).orderBy(F.col("version").desc())
    return shown if limit is None else shown.limit(limit)


def detail(table: TableShard) -> DataFrame:
    """One row about the present state of the shard. Reads only metadata. Shows no credentials."""
    with table.opened() as client:
        report = client.inspect(table.id)
        owner = client.owner_of(table.id)
    properties = {} if report.retain_ms is None else {"retain_ms": str(report.retain_ms)}
    row = (
        *(FORMAT, str(table.id), None if owner is None else f"{owner.namespace}/{owner.name}"),
        *(shown_url(table.location.blob), shown_url(table.location.consensus)),
        *(report.seqno, None, report.since, report.upper),
        *(report.parts, report.batches, report.updates, report.live_bytes + report.inline_bytes),
        *(report.key_schema, report.val_schema, properties),
    )
    frame = table.spark.createDataFrame([row], _DETAIL_DDL)
    return frame.withColumn("lastModified", F.timestamp_millis(F.lit(report.walltime_ms)))


def _instant(column: str) -> Column:
    return F.timestamp_millis(F.col(column))
