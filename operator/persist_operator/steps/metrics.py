"""The operator's own Prometheus series. The series of a resource end with the resource. Their only labels are its namespace and name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from persist_engine.model.inspection import Inspection
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from persist_operator.api import conditions, times
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.shard import ShardSpec
from persist_operator.api.shard_status import Debt, Frontiers, ShardStatus
from persist_operator.api.sink_status import SinkStatus
from persist_operator.steps import resource_metrics
from persist_operator.steps.resource_metrics import ResourceMetrics
from persist_operator.steps.shard_series import ShardSeries, TaskRuns

_OF_RESOURCE = ("namespace", "name")


class OperatorMetrics:
    """All series on one registry. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        gauge = partial(Gauge, registry=registry)
        self.reconciles = Counter(
            "persist_operator_reconcile", "Reconciles by kind and result.", ["kind", "result"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "persist_operator_reconcile_seconds", "Duration of reconciles.", ["kind"], registry=registry
        )
        self.queue_depth = gauge("persist_operator_queue_depth", "Keys that are due and wait for a worker.")
        self.queue_oldest = gauge("persist_operator_queue_oldest_seconds", "How long the oldest due key has waited.")
        self.leader = gauge(
            "persist_operator_leader",
            "1 while this replica leads; of replicas that share the resources, while it has the first slice.",
        )
        self.slices = gauge("persist_operator_slices", "Slices of the resources that this replica reconciles, of 64.")
        self.api_requests = Counter(
            "persist_operator_api_requests",
            "Requests to the API server by verb and code.",
            ["verb", "code"],
            registry=registry,
        )
        self.watch_restarts = Counter(
            "persist_operator_watch_restarts", "Restarts of the watches after they ended.", registry=registry
        )
        self.last_resync = gauge(
            "persist_operator_last_resync_timestamp_seconds",
            "Time of the last complete list of all resources.",
        )
        self.leaked_pods = gauge(
            "persist_operator_leaked_pods",
            "Pods of the operator whose resource or driver is gone, as of the last list of all resources.",
        )
        self._set_up_canary(registry)
        self.resources = ResourceMetrics(registry)
        self.jobs_started = Counter(
            "persist_operator_jobs_started", "Pods and Jobs started by type.", ["type"], registry=registry
        )
        self.refusals = Counter(
            "persist_operator_refusals",
            "Refused or failed actions, plans and status writes, by what it was.",
            ["what"],
            registry=registry,
        )
        self._shards = ShardSeries(registry)

    def _set_up_canary(self, registry: CollectorRegistry) -> None:
        self.canary_success = Gauge(
            "persist_operator_canary_timestamp_seconds",
            "Time of the canary's last round trip that succeeded, or of the start of the process before the first one.",
            _OF_RESOURCE,
            registry=registry,
        )
        self.canary_seconds = Histogram(
            "persist_operator_canary_seconds",
            "Duration of the canary's round trips that succeeded: a commit of rows and their read.",
            _OF_RESOURCE,
            registry=registry,
        )
        self.canary_failures = Counter(
            "persist_operator_canary_failures",
            "Round trips of the canary that failed.",
            _OF_RESOURCE,
            registry=registry,
        )

    def set_shard(
        self,
        namespace: str,
        name: str,
        status: Mapping[str, Any],
        *,
        spec: ShardSpec | None,
        now_ms: int,
        inspection: Inspection | None = None,
    ) -> None:
        """Export a PersistShard's status. `spec`: None for a resource that cannot be parsed. The numbers of `inspection` are newer than
        those of the status, which is written less often.
        """
        known = ShardStatus.of(status)
        frontiers, storage, debt = known.frontiers, known.storage, known.debt
        values: dict[str, float | None] = {
            "ready": 1 if conditions.is_true(status, "Ready") else 0,
            "upper_lag_seconds": _upper_lag_s(frontiers, now_ms, inspection),
            "since_lag_seconds": frontiers.since_lag_seconds,
            "batches": storage.batches,
            "live_bytes": storage.live_bytes,
            "debt_bytes": debt.compaction_bytes,
            "oldest_uncompacted_seconds": _owed_s(known, now_ms, inspection),
            "deadline_seconds": None if spec is None else spec.deadline_seconds,
            "live_diffs": storage.live_diffs,
            "last_rollup_seqno": storage.latest_rollup_seqno,
            "seqno": frontiers.seqno,
            "readers": known.holds.readers,
            **resource_metrics.of_shard(spec, status, known, now_ms=now_ms),
        }
        if inspection is not None and frontiers.seqno is not None:
            values |= {
                "batches": inspection.batches,
                "live_bytes": inspection.data_bytes,
                "debt_bytes": inspection.compaction_bytes,
                "live_diffs": inspection.live_diffs,
                "last_rollup_seqno": inspection.latest_rollup_seqno,
                "seqno": inspection.seqno,
            }
        tasks = tuple(
            TaskRuns(
                task,
                block.consecutive_failures or 0 if spec is None or _is_tried_again(spec, task) else None,
                None if success_ms is None else success_ms / 1000,
            )
            for task, block in (known.maintenance or {}).items()
            for success_ms in [times.to_ms(block.last_success_time)]
        )
        self._shards.set((namespace, name), values, tasks)

    def set_sink(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Export a SparkSink's status."""
        known = SinkStatus.of(status)
        is_comparing = known.progress.running.compared is not None and conditions.find(status, "Converged") is not None
        compared = known.progress.running if is_comparing else known.progress
        values = {
            "ready": 1 if conditions.is_true(status, "Ready") else 0,
            "attempts": known.attempt or 0,
            "consecutive_failures": known.consecutive_failures or 0,
            "executors": known.executors.running or 0,
            "rows_read": known.progress.rows_read,
            "errors": known.progress.errors,
            "updates_written": known.progress.updates_written,
            "missing": compared.missing,
            "extra": compared.extra,
            "running_rows_read": known.progress.running.rows_read,
            "running_errors": known.progress.running.errors,
            "running_bytes_read": known.progress.running.bytes_read,
            "running_task_seconds": known.progress.running.task_seconds,
            "running_gc_seconds": known.progress.running.gc_seconds,
            "running_shuffle_bytes": known.progress.running.shuffle_bytes,
            "running_batches": known.progress.running.batches,
            "rollout": 1 if known.rollout.is_active else 0,
            "rolled_back": 1 if known.rollout.state == "RolledBack" else 0,
            "rollout_lag_seconds": known.rollout.lag_seconds,
            "rollout_missing": known.rollout.missing,
            "rollout_extra": known.rollout.extra,
            "lag_seconds": known.progress.running.lag_seconds,
            "fresh": None if (fresh := conditions.find(status, "Fresh")) is None else int(fresh["status"] == "True"),
            "fresh_timestamp_seconds": None if (at := times.to_ms(known.freshness.time)) is None else at / 1000,
        }
        self.resources.sinks.update((namespace, name), values)

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """Drop every series of a resource that is gone. Idempotent."""
        self.resources.forget(kind, namespace, name)
        if kind == "PersistShard":
            self._shards.forget((namespace, name))


def _is_tried_again(spec: ShardSpec, task: MaintenanceKind) -> bool:
    """Whether a failed run is repeated without a request."""
    return not (spec.suspend or spec.switched_off(task))


def _upper_lag_s(frontiers: Frontiers, now_ms: int, inspection: Inspection | None) -> float | None:
    """The lag at `now_ms`, not at the time of the status, because the status of a shard without writes, or with a store that does not
    answer, is as old as its last change.
    """
    if frontiers.upper_lag_seconds is None or frontiers.upper is None:
        return None
    upper = int(frontiers.upper) if inspection is None or inspection.upper is None else inspection.upper
    return (now_ms - upper) // 1000


def _owed_s(known: ShardStatus, now_ms: int, inspection: Inspection | None) -> float | None:
    """The age of the oldest update that is owed a deletion, at `now_ms`. The status only has its age at the time of the status' numbers."""
    debt, seen_ms = known.debt, times.to_ms(known.frontiers.observed_time)
    if debt == Debt():
        return None
    if inspection is not None:
        owed_ms = inspection.owed_from_ms
        return 0 if owed_ms is None else max(0, (now_ms - owed_ms) // 1000)
    if debt.oldest_uncompacted_seconds is None or seen_ms is None:
        return debt.oldest_uncompacted_seconds or 0
    return debt.oldest_uncompacted_seconds + max(0, (now_ms - seen_ms) // 1000)
