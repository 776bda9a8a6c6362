"""Series of resources that alerts and dashboards compare with others: conditions, targets from the spec, times, and the work of ended runs.

Owns the series `persist_resource_*` and `persist_maintenance_*`, and computes values for `shard_series` and `sink_series`. An unknown value
has no series. The series of a resource end with the resource. `persist_maintenance_*` are counters of this process and do not name
resources.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from persist_engine.base.errors import InvalidUsage
from prometheus_client import CollectorRegistry, Counter, Gauge

from persist_operator.api import conditions, pausing, times
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import ShardSpec
from persist_operator.api.shard_status import ShardStatus, UpkeepRun
from persist_operator.api.sink_status import SinkStatus
from persist_operator.plan import maintenance
from persist_operator.plan.observed import Run
from persist_operator.plan.waiting import budget
from persist_operator.steps.run_metrics import RunMetrics
from persist_operator.steps.sink_series import SinkSeries

_OF_RESOURCE = ("namespace", "name")
#: Series of a shard, with their descriptions.
OF_SHARD = {
    "stalled": "1 while Stalled is True: the operator waits for a change by a person.",
    "suspended": "1 while the resource is suspended.",
    "log_lost": "1 while the operator refuses the shard because its log lost versions, until it is recovered or accepted.",
    "storage_reachable": "1 while StorageReachable is True, 0 while it is False.",
    "compaction_current": "1 while CompactionCurrent is True, 0 while it is False.",
    "garbage_collected": "1 while GarbageCollected is True, 0 while it is False.",
    "reader_hold_seconds": "Seconds since the longest hold was first seen that keeps since from its target; 0 without one.",
    "verified": "1 while the last verification found nothing missing or wrong, 0 while it did.",
    "missing_blobs": "Blobs that live versions name and that the last verification did not find.",
    "orphan_blobs": "Blobs that no version will ever name, as the last scan left them.",
    "orphan_bytes": "Bytes of these blobs.",
    "since_lag_target_seconds": "spec.retention.sinceLagSeconds.",
    "rollup_every_seqnos": "spec.rollup.everySeqnos.",
    "amplification_ratio": "Stored updates divided by those that a merge of everything would leave at best.",
    "compaction_held": "1 while a compaction is due that waits for a window, the budget or an approval.",
    "plan_unapproved_seconds": "Age of the plan that waits for an approval; 0 without one.",
    "rewritten_bytes": "Bytes that compactions read in 24 hours, as maintenance.maxRewriteBytesPerDay counts them.",
    "rewrite_budget_bytes": "maintenance.maxRewriteBytesPerDay.",
}
_RESOURCE = {
    "generations_behind": "Generations of the spec that the stored status does not cover, where there are some.",
    "paused": "1 while the annotation paused is set, for resources that have it.",
    "deletion_timestamp_seconds": "Time at which the deletion of a resource was asked for that is still there.",
}
#: The most resources for which a gauge is shown that few resources should have. When the API server accepts no status, every resource is
#: behind.
_RESOURCES_MAX = 2000


class _Few:
    """A gauge by (kind, namespace, name) with at most _RESOURCES_MAX series. Thread-safe."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge, self._lock = gauge, threading.Lock()
        self._shown: set[tuple[str, str, str]] = set()

    def set(self, key: tuple[str, str, str], value: float) -> None:
        """Show the value, unless there are already too many values."""
        with self._lock:
            if key in self._shown or len(self._shown) < _RESOURCES_MAX:
                self._shown.add(key)
                self._gauge.labels(*key).set(value)

    def remove(self, key: tuple[str, str, str]) -> None:
        """Idempotent."""
        with self._lock:
            if key in self._shown:
                self._shown.discard(key)
                self._gauge.remove(*key)


class ResourceMetrics:
    """The series on one registry. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"persist_maintenance_{name}", text, ["type", *labels], registry=registry)

        self.sinks = SinkSeries(registry)
        few = {
            name: _Few(Gauge(f"persist_resource_{name}", text, ["kind", *_OF_RESOURCE], registry=registry))
            for name, text in _RESOURCE.items()
        }
        self._behind, self._paused = few["generations_behind"], few["paused"]
        self._deletion = few["deletion_timestamp_seconds"]
        self._reports = RunMetrics(registry)
        self._runs = counter("runs", "Maintenance runs that ended.", "runner", "outcome")
        self._seconds = counter("run_seconds", "Duration of maintenance runs that ended.", "runner")
        self._read = counter("read_bytes", "Bytes that maintenance runs read, as they reported.")
        self._written = counter("written_bytes", "Bytes that maintenance runs wrote, as they reported.")
        self._deleted = counter("deleted_blobs", "Blobs that maintenance runs deleted, as they reported.")

    def show(self, resource: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Export `status`, which will be written on `resource`. The resource shows its stored generation until `written`."""
        kind, namespace, name = _key(resource)
        if kind == "SparkSink":
            self.sinks.update((namespace, name), _of_sink(resource.get("spec") or {}, status))
            last = SinkStatus.of(status).last_failure
            failed_ms = times.to_ms(last.time)
            failure = None if failed_ms is None else (last.failure_class or "Unknown", failed_ms / 1000)
            self.sinks.failed((namespace, name), failure)
        if pausing.is_paused(resource):
            self._paused.set(_key(resource), 1)
        else:
            self._paused.remove(_key(resource))
        self._show_behind(resource, resource.get("status") or {})

    def written(self, resource: Mapping[str, Any], status: Mapping[str, Any], runs: Sequence[Run] = ()) -> None:
        """Count what is new in `status`, which has replaced the status of `resource`. `runs` have the reports."""
        self._show_behind(resource, status)
        reports = {run.name: run.report for run in runs}
        if resource.get("kind") != "PersistShard":
            ended = _ended_driver(SinkStatus.of(resource.get("status") or {}), SinkStatus.of(status))
            self._reports.count(reports.get(ended))
            return
        if not status.get("maintenance") and not status.get("history"):
            return
        for run in _ended_runs(ShardStatus.of(resource.get("status") or {}), ShardStatus.of(status), runs):
            self._count(run)
            self._reports.count(reports.get(run.id or ""))

    def deleting(self, resource: Mapping[str, Any]) -> None:
        """Replace the series of a resource that is being deleted by the time of the deletion request, because its status is no longer
        updated.
        """
        kind, namespace, name = _key(resource)
        self.forget(kind, namespace, name)
        asked_ms = times.to_ms(resource["metadata"].get("deletionTimestamp"))
        if asked_ms is not None:
            self._deletion.set((kind, namespace, name), asked_ms / 1000)

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """Drop every series of a resource that is gone. Idempotent."""
        if kind == "SparkSink":
            self.sinks.forget((namespace, name))
        for few in (self._behind, self._paused, self._deletion):
            few.remove((kind, namespace, name))

    def _show_behind(self, resource: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Shows the generations only of a resource that is behind, because most resources are not."""
        behind = max(0, int(resource["metadata"].get("generation", 1)) - int(status.get("observedGeneration") or 0))
        if behind:
            self._behind.set(_key(resource), behind)
        else:
            self._behind.remove(_key(resource))

    def _count(self, run: UpkeepRun) -> None:
        kind, runner = run.type or "Unknown", run.runner or "Pod"
        self._runs.labels(kind, runner, run.outcome or "Unknown").inc()
        start_ms, end_ms = times.to_ms(run.start_time), times.to_ms(run.end_time)
        if start_ms is not None and end_ms is not None:
            self._seconds.labels(kind, runner).inc(max(0, end_ms - start_ms) / 1000)
        for counter, amount in (
            (self._read, run.bytes_read),
            (self._written, run.bytes_written),
            (self._deleted, run.blobs_deleted),
        ):
            counter.labels(kind).inc(max(0, amount or 0))


def _ended_runs(before: ShardStatus, after: ShardStatus, runs: Sequence[Run]) -> Iterator[UpkeepRun]:
    """The runs whose end `after` records and `before` does not. A short history may not have the last ones: those are among `runs`."""
    known, listed = {one.id for one in before.history or ()}, {one.id for one in after.history or ()}
    yield from (one for one in after.history or () if one.id not in known)
    for kind, block in (after.maintenance or {}).items():
        settled = block.settled_job
        if settled not in {None, before.upkeep(kind).settled_job, *known, *listed}:
            run = next((one for one in runs if one.name == settled), None)
            if run is not None:
                yield maintenance.ended_run(run, kind, run.finished_ms or run.created_ms)


def _ended_driver(before: SinkStatus, after: SinkStatus) -> str:
    """The name of the driver whose end `after` records and `before` does not; empty when there is none."""
    name = before.driver.pod_name or ""
    return name if before.is_under_way and not (after.is_under_way and after.driver.pod_name == name) else ""


def _key(resource: Mapping[str, Any]) -> tuple[str, str, str]:
    return resource["kind"], resource["metadata"]["namespace"], resource["metadata"]["name"]


def _truth(status: Mapping[str, Any], condition: str) -> int | None:
    """1 for True, 0 for False, None for Unknown and for a condition that the status does not have."""
    found = conditions.find(status, condition)
    return None if found is None else {"True": 1, "False": 0}.get(found.get("status", ""))


def _hold_s(status: Mapping[str, Any], known: ShardStatus, now_ms: int) -> float | None:
    """The age of the longest hold. The condition's time does not show it: the condition stays False while one reader follows another, or
    after another cause, and begins anew after an outage of the stores.
    """
    found = conditions.find(status, "SinceAdvancing")
    if found is None:
        return None
    is_held = found.get("status") == "False" and found.get("reason") == "HeldByReader"
    held_ms = [at_ms for one in known.holds.blocking or () if (at_ms := times.to_ms(one.held_from)) is not None]
    return max(0, now_ms - min(held_ms)) / 1000 if is_held and held_ms else 0


def spec_of(resource: Mapping[str, Any]) -> ShardSpec | None:
    """The spec of a shard; None when it cannot be parsed, which the conditions show."""
    try:
        return ShardSpec.of(load_schemas().default({**resource, "status": {}})["spec"])
    except (AttributeError, LookupError, TypeError, ValueError, InvalidUsage):
        return None


def of_shard(
    spec: ShardSpec | None, status: Mapping[str, Any], known: ShardStatus, *, now_ms: int
) -> dict[str, float | None]:
    """The values of OF_SHARD. A value is None if it is unknown, or if it needs a missing `spec`. `known`: the parsed `status`."""
    return {
        "stalled": _truth(status, "Stalled") or 0,
        "suspended": _truth(status, "Suspended") or 0,
        "log_lost": int((conditions.find(status, "Ready") or {}).get("reason") == "ShardLost"),
        "storage_reachable": _truth(status, "StorageReachable"),
        "compaction_current": _truth(status, "CompactionCurrent"),
        "garbage_collected": _truth(status, "GarbageCollected"),
        "reader_hold_seconds": _hold_s(status, known, now_ms),
        **_of_audits(known),
        "since_lag_target_seconds": None if spec is None else spec.since_lag_seconds,
        "rollup_every_seqnos": None if spec is None else spec.rollup_every_seqnos,
        **_of_plan(spec, known, now_ms=now_ms),
    }


def _of_plan(spec: ShardSpec | None, known: ShardStatus, *, now_ms: int) -> dict[str, float | None]:
    percent = known.storage.amplification_percent
    created_ms = times.to_ms(known.plan.created_time)
    waits = known.plan.approved is False and created_ms is not None
    return {
        "amplification_ratio": None if percent is None else percent / 100,
        "compaction_held": int(known.upkeep("compaction").wait_reason is not None),
        "plan_unapproved_seconds": max(0, now_ms - (created_ms or 0)) / 1000 if waits else 0,
        "rewritten_bytes": budget.used_bytes(known.rewritten or (), now_ms),
        "rewrite_budget_bytes": None if spec is None else spec.max_rewrite_bytes_per_day,
    }


def _of_audits(known: ShardStatus) -> dict[str, float | None]:
    verdict, storage = known.verification.verdict, known.storage
    return {
        "verified": None if verdict is None else int(verdict == "Verified"),
        "missing_blobs": storage.missing_blobs,
        "orphan_blobs": storage.orphan_blobs,
        "orphan_bytes": storage.orphan_bytes,
    }


def _of_sink(spec: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, float | None]:
    known = SinkStatus.of(status)
    suspended = bool(spec.get("suspend"))
    executor = (spec.get("spark") or {}).get("executor") or {}
    next_ms = times.to_ms(known.schedule.next_time)
    return {
        "stalled": _truth(status, "Stalled") or 0,
        "suspended": int(suspended),
        "running": _truth(status, "Running"),
        "driver_pending": int(known.driver.phase in {"Creating", "Pending"}),
        "executors_wanted": executor.get("instances") if known.driver.phase == "Running" else None,
        "fresh_target_seconds": (spec.get("freshness") or {}).get("targetSeconds"),
        "next_run_timestamp_seconds": None if next_ms is None or suspended else next_ms / 1000,
    }
