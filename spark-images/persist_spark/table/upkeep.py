"""`optimize()` and `vacuum()`: maintain one shard now, and report the work as a frame. The caller's process does the work, or executors
merge.

The work is that of `persist admin force-compaction` and `force-gc`. It may run beside writers, readers and an operator, be repeated, and be
killed at any point.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist_engine import Outcome, force_compaction, force_gc
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import CompactionSettings, RetrySettings, Settings
from pyspark.sql import DataFrame

from persist_spark.compaction.merger import OnExecutors
from persist_spark.partitions import STORE_GIVE_UP_MS
from persist_spark.table.shard import TableShard

#: The columns of the frame, each a field of the engine's report. `version`: the version on which the work was based.
WORK_DDL = (
    "type STRING, outcome STRING, message STRING, version BIGINT, duration_ms BIGINT, bytes_read BIGINT, bytes_written BIGINT, "
    "blobs_deleted BIGINT, versions_truncated BIGINT, rows_before BIGINT, rows_after BIGINT"
)
_FIELDS = ("type", "outcome", "message", "seqno", "duration_ms", "bytes_read", "bytes_written", "blobs_deleted")
_MORE = ("diffs_truncated", "rows_before", "rows_after")


def compacted(table: TableShard, *, full: bool, on_executors: bool) -> DataFrame:
    """Merges small batches; with `full`, all data into one batch. Returns one row for each merge. Raises InvalidUsage when the environment
    of the process disables compaction, or when executors have too little memory.
    """
    # Appends from Spark claim merges but do not do them. So a claim does not mean that work is in progress.
    settings = Settings(compaction=CompactionSettings(claim_ms=0), retry=RetrySettings(give_up_ms=STORE_GIVE_UP_MS))
    merger = OnExecutors.of(table.spark, blob=table.location.blob) if on_executors else None
    with table.opened(settings if merger is None else merger.settings) as client:
        machine = client.machine(table.id)
        if not machine.settings.compaction.enabled:
            raise InvalidUsage(f"compaction is disabled in this process, so shard {table.id} was not compacted")
        return _shown(table, force_compaction(machine, full=full, merger=merger))


def collected(table: TableShard) -> DataFrame:
    """Writes a rollup if more can be deleted after it, then deletes the versions and blobs that no reader needs. Returns one row for each
    piece of work.
    """
    with table.opened(Settings(retry=RetrySettings(give_up_ms=STORE_GIVE_UP_MS))) as client:
        return _shown(table, force_gc(client.machine(table.id)))


def _shown(table: TableShard, outcomes: Sequence[Outcome]) -> DataFrame:
    reports = [outcome.to_json() for outcome in outcomes]
    rows = [tuple(report[field] for field in (*_FIELDS, *_MORE)) for report in reports]
    return table.spark.createDataFrame(rows, WORK_DDL)
