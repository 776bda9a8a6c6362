"""The maintenance runs that start now, with their intent on the status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from persist_engine.model.inspection import Inspection

from persist_operator.api import names, sink_pods, times
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.pod_template import PodRefused
from persist_operator.api.shard import Shard, StoreLocation
from persist_operator.api.shard_status import Runner, Upkeep
from persist_operator.plan import maintenance, refusals
from persist_operator.plan.actions import StartMaintenance, maintenance_key
from persist_operator.plan.keeping import auditing
from persist_operator.plan.maintenance import Due
from persist_operator.plan.observed import ShardObserved
from persist_operator.plan.waiting import deadline, next_run, windows
from persist_operator.settings import WorkloadSettings

#: The longest time from the intent of a run to its Job.
_BEGINNING_MS = 60_000


@dataclass(frozen=True, slots=True)
class Begun:
    """The due runs, `blocks` with their intents and with the hold on a compaction, and the requests that the runs handle."""

    started: tuple[StartMaintenance, ...]
    blocks: Mapping[MaintenanceKind, Upkeep]
    handled: Mapping[str, str]


def refused(shard: Shard, workload: WorkloadSettings, now_ms: int) -> tuple[str, str] | None:
    """The (reason, message) why the spec lets no run start; None when it lets runs start. It affects no other part of the plan."""
    try:
        sink_pods.check_maintenance(shard.spec, workload)
    except PodRefused as error:
        return error.reason, str(error)
    problem = windows.problem(shard.spec.windows, now_ms)
    return None if problem is None else ("InvalidWindow", problem)


def begun(
    shard: Shard,
    inspection: Inspection,
    blocks: Mapping[MaintenanceKind, Upkeep],
    observed: ShardObserved,
    *,
    ahead: next_run.Outlook,
    shard_id: str,
    location: StoreLocation,
    workload: WorkloadSettings,
    now_ms: int,
) -> Begun:
    """The runs to start. While a refused run waits for its next try, `blocks` keeps its earlier intent."""
    dues = maintenance.due(
        shard, inspection, blocks, observed.runs, now_ms, horizon_ms=ahead.horizon_ms, hold=ahead.hold
    )
    started, intended, handled = [], dict(blocks), {}
    if all(due.kind != "compaction" for due in dues) and ahead.hold is not None:
        intended["compaction"] = maintenance.held(shard, blocks.get("compaction", Upkeep()), ahead.hold, now_ms)
    for due in dues:
        block = blocks.get(due.kind, Upkeep())
        retry = maintenance.retry_number(block, int(inspection.seqno))
        refusal = observed.failures.get(maintenance_key(due.kind))
        is_refused = refusal is not None and not refusal.place
        runner = maintenance.runner_of(due.kind, shard, inspection, block, is_refused=is_refused, workload=workload)
        name = names.maintenance_name(shard.meta.name, due.kind, int(inspection.seqno), retry=retry)
        start = _start(
            shard, inspection, block, due, ahead, name=name, runner=runner, shard_id=shard_id, location=location
        )
        if refusal is None and block.job_name is not None and _is_beginning(block, observed, now_ms):
            name = block.job_name
            start = replace(start, name=name, seqno=block.last_seqno or start.seqno)
        started.append(start)
        if refusal is None or refusals.wait_s(refusal, generation=shard.meta.generation, now_ms=now_ms) <= 0:
            intended[due.kind] = replace(
                block,
                next_run_time=None,
                job_name=name,
                runner=runner,
                last_attempt_time=times.to_text(now_ms),
                last_seqno=start.seqno,
                last_reason=due.reason[:256],
                retry=retry,
                planned_bytes=_planned_bytes(inspection, start),
            )
            if due.request_token is not None:
                handled[names.REQUEST[due.kind]] = due.request_token
    return Begun(tuple(started), intended, handled)


def _is_beginning(block: Upkeep, observed: ShardObserved, now_ms: int) -> bool:
    """Whether a run was intended just now and has no Job yet. Another process may be about to create the Job, so the name must stay."""
    intended_ms = times.to_ms(block.last_attempt_time)
    if block.job_name == block.settled_job or any(run.name == block.job_name for run in observed.runs):
        return False
    return intended_ms is not None and abs(now_ms - intended_ms) < _BEGINNING_MS


def _planned_bytes(inspection: Inspection, start: StartMaintenance) -> int | None:
    if start.kind != "compaction":
        return None
    size = next_run.estimated_bytes(inspection, start.kind, full=start.full) or 0
    return size if start.max_bytes is None else min(size, start.max_bytes)


def _start(
    shard: Shard,
    inspection: Inspection,
    block: Upkeep,
    due: Due,
    ahead: next_run.Outlook,
    *,
    name: str,
    runner: Runner | None,
    shard_id: str,
    location: StoreLocation,
) -> StartMaintenance:
    spec, owed_ms, is_compaction = shard.spec, inspection.owed_from_ms, due.kind == "compaction"
    return StartMaintenance(
        kind=due.kind,
        name=name,
        shard_id=shard_id,
        location=location,
        seqno=int(inspection.seqno),
        reason=due.reason,
        memory=spec.memory_limit if due.kind in {"compaction", "verify"} else None,
        full=due.full,
        audit=auditing.audit_of(shard, due.kind),
        max_bytes=ahead.max_bytes if is_compaction and due.request_token is None else None,
        runner=runner,
        spark_executors=spec.spark_executors,
        due_ms=None if owed_ms is None or due.kind in names.AUDIT_KINDS else deadline.deadline_ms(shard, owed_ms),
        debt_bytes=inspection.compaction_bytes if is_compaction else 0,
        ended_driver=block.settled_job if block.runner == "Spark" else None,
        record_days=spec.record_days,
        queue_priority=spec.queue_priority,
        ttl_seconds=spec.ttl_seconds_after_finished,
        priority_class_name=spec.priority_class_name,
        service_account_name=spec.service_account_name,
        template=spec.maintenance_template,
    )
