"""`persist-spark compact`: the compactions of one shard that are due, on the executors of a session, with the report of a maintenance pod.

Knows no environment: `persist_spark.main` passes everything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from persist_engine import Location, PersistClient, compact_due, failure_report, force_compaction, summary
from persist_engine.base.env import Env, process_cpu_ns
from persist_engine.base.metrics import Metrics
from pyspark.sql import SparkSession

from persist_spark.compaction.merger import OnExecutors
from persist_spark.report import Log
from persist_spark.session import executor_count
from persist_spark.spec import CompactionSpec

#: The `type` of the report, the same as for `persist maintain compact`.
KIND = "Compaction"
_DAY_MS = 24 * 60 * 60 * 1000


def run_compaction(
    spark: SparkSession, spec: CompactionSpec, *, enabled: bool, env: Env, log: Log, metrics: Metrics | None = None
) -> dict[str, Any]:
    """Claims the compactions that are due, oldest first, does them, and returns the report of `persist maintain compact` with the field
    `executors`. Its `cpu_ms` is the CPU time of the Python processes of this driver and its tasks. May be killed at any point and repeated;
    finished chunks stay. The outcome is Skipped when nothing is due, and when it is not `enabled`.

    Raises InvalidUsage when executors have too little memory; ShardNotFound; the errors of the stores, of Spark, and of damaged data.
    """
    merger = OnExecutors.of(spark, blob=spec.blob)
    settings = replace(
        merger.settings,
        compaction=replace(merger.settings.compaction, enabled=enabled),
        maintenance=replace(merger.settings.maintenance, deletions_kept_ms=spec.record_days * _DAY_MS),
    )
    location = Location(blob=spec.blob, consensus=spec.consensus)
    with PersistClient.open(location, settings=settings, env=env, metrics=metrics, create=False) as client:
        machine = client.machine(spec.shard_id)
        outcomes = (
            force_compaction(machine, full=True, merger=merger)
            if spec.full
            else compact_due(machine, max_bytes=spec.max_bytes, merger=merger)
        )
        for outcome in outcomes:
            log.event("compacted", outcome=outcome.ending.value, what=outcome.message, duration_ms=outcome.duration_ms)
        report = summary(KIND, spec.shard_id, machine.state.seqno, outcomes)
    return report | {"executors": executor_count(spark), "cpu_ms": (process_cpu_ns() + merger.spent.ns) // 1_000_000}


def failed_report(spec: CompactionSpec, message: str, *, duration_ms: int) -> dict[str, Any]:
    """The report of a compaction that raised an error. Results that it had swapped in stay."""
    return failure_report(KIND, spec.shard_id, message, duration_ms=duration_ms) | {"executors": 0}
