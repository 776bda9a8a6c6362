"""When rollup, compaction and GC are due, and how a finished run changes the status. Pure.

Invariant: at most one run of a kind is under way. After n failures in a row, the next run waits 10 s * 2**(n - 1), at most 10 minutes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from persist_engine.model.inspection import Inspection
from persist_engine.model.maintenance import is_collection_due, is_compaction_due, is_rollup_due

from persist_operator.api import names, times
from persist_operator.api.names import MAINTENANCE_KINDS, MaintenanceKind
from persist_operator.api.redact import clip, one_line, redact
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import Outcome, Runner, RunType, Upkeep, UpkeepRun
from persist_operator.plan.actions import Note
from persist_operator.plan.keeping import auditing
from persist_operator.plan.observed import Phase, Run
from persist_operator.plan.waiting import budget, deadline
from persist_operator.plan.waiting.gate import Hold, Wanted
from persist_operator.settings import WorkloadSettings

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 10, 600
_AFTER_CONFLICT_S, _AFTER_SKIPPED_S = 5, 60
#: The form of a key of a record of deletions. A report may contain any text, so this form is checked.
_RECORD = re.compile(r"d\d{15}/d[0-9a-f-]{36}", re.ASCII)
_TYPE: Mapping[MaintenanceKind, RunType] = {
    "compaction": "Compaction",
    "rollup": "Rollup",
    "gc": "GC",
    "verify": "Verify",
    "orphanScan": "OrphanScan",
}
#: The reason of a requested run begins with this text.
_REQUESTED = "requested by annotation: "
#: The number of failures in a row from which a condition shows them.
FAILURES_SHOWN_MIN = 3


@dataclass(frozen=True, slots=True)
class Due:
    """A run to start now. `full`: see StartMaintenance."""

    kind: MaintenanceKind
    reason: str
    request_token: str | None
    full: bool = False


@dataclass(frozen=True, slots=True)
class Folded:
    """The status blocks with every run recorded, and the Events of newly recorded runs. `rewritten` is the record of the budget."""

    maintenance: Mapping[MaintenanceKind, Upkeep]
    history: tuple[UpkeepRun, ...]
    notes: tuple[Note, ...]
    rewritten: budget.Rewritten = ()


def request_token(shard: Shard, kind: MaintenanceKind) -> str | None:
    """The token of the request annotation for this kind; None when there is none or it was already handled."""
    verb = names.REQUEST[kind]
    token = names.request_token(shard.meta.annotations, verb)
    return token if token and token != shard.known.handled(verb) else None


def debt_reason(
    shard: Shard, inspection: Inspection, maintenance: Mapping[MaintenanceKind, Upkeep], kind: MaintenanceKind
) -> str | None:
    """The reason why a run of this kind has work now, whether or not it is allowed; None when it has no work.

    `maintenance` is status.maintenance with every finished run recorded.
    """
    spec = shard.spec
    if kind == "rollup":
        seqno, rollup_seqno = inspection.seqno, inspection.latest_rollup_seqno
        if is_rollup_due(seqno=seqno, rollup_seqno=rollup_seqno, every=spec.rollup_every_seqnos):
            return f"{seqno - rollup_seqno} versions since the last rollup"
        return (
            "inputs of a compaction wait for a rollup to be collected" if _compacted_since_rollup(maintenance) else None
        )
    if kind == "gc":
        is_due = is_collection_due(inspection.gc_seqnos, at_least=1)
        return f"{inspection.gc_seqnos} versions can be truncated" if is_due else None
    if kind in names.AUDIT_KINDS:
        return None
    if is_compaction_due(inspection.uncompacted_batches, at_least=spec.max_uncompacted_batches):
        return f"{inspection.uncompacted_batches} uncompacted batches"
    return None


def wanted(
    shard: Shard,
    inspection: Inspection,
    maintenance: Mapping[MaintenanceKind, Upkeep],
    kind: MaintenanceKind,
    *,
    now_ms: int,
    horizon_ms: int,
) -> Wanted | None:
    """The work of this kind that is due now, whether or not it is allowed; for a compaction, the work that is due until `horizon_ms`
    (waiting.windows). None when there is none. Work for the deletion deadline comes first.
    """
    if kind == "compaction":
        owed = deadline.compaction_reason(shard, inspection, maintenance, horizon_ms)
        if owed is not None:
            return Wanted(reason=owed, full=True, owed_from_ms=inspection.waits_from_ms)
    elif kind == "gc":
        owed = deadline.collection_reason(shard, inspection, maintenance, now_ms)
        if owed is not None:
            return Wanted(reason=owed, full=True, owed_from_ms=inspection.uncollected_from_ms)
    reason = debt_reason(shard, inspection, maintenance, kind)
    if reason is not None:
        return Wanted(reason=reason)
    amplified = _amplification_reason(shard, inspection) if kind == "compaction" else None
    return None if amplified is None else Wanted(reason=amplified, full=True)


def _amplification_reason(shard: Shard, inspection: Inspection) -> str | None:
    """The reason why a merge of all batches is due for the space of retracted updates. The merge must cancel some of them at the present
    since, and enough updates must have come since the last merge. Otherwise retractions that since does not release would be merged for
    ever.
    """
    limit, updates = shard.spec.max_amplification_percent, inspection.updates
    if limit is None or not _cancels(inspection):
        return None
    if 100 * updates < limit * max(inspection.net_updates, inspection.merged_updates):
        return None
    return f"the stored updates are {limit}% or more of those that a merge would leave"


def _cancels(inspection: Inspection) -> bool:
    """Whether a merge of all batches at the present since would remove retracted updates."""
    owed_ms, left_ms = inspection.waits_from_ms, inspection.waits_after_merge_ms
    return owed_ms is not None and (left_ms is None or left_ms > owed_ms)


def runner_of(
    kind: MaintenanceKind,
    shard: Shard,
    inspection: Inspection,
    block: Upkeep,
    *,
    is_refused: bool,
    workload: WorkloadSettings,
) -> Runner | None:
    """Where the next compaction runs; None for other kinds. `block`: status.maintenance.compaction. `is_refused`: the API server refused
    the last try to start it. With Auto, a pod follows a failed or refused try on Spark.
    """
    spec = shard.spec
    if kind != "compaction":
        return None
    if spec.compaction_runner != "Auto":
        return spec.compaction_runner
    failed = is_refused or (block.runner == "Spark" and bool(block.consecutive_failures))
    is_large = inspection.compaction_bytes >= spec.spark_threshold_bytes
    return "Spark" if workload.spark_compaction and is_large and not failed else "Pod"


def _compacted_since_rollup(maintenance: Mapping[MaintenanceKind, Upkeep]) -> bool:
    """Whether a compaction was applied after the last rollup began. GC can delete the inputs of a compaction only after a later rollup."""
    compaction, rollup = maintenance.get("compaction", Upkeep()), maintenance.get("rollup", Upkeep())
    compacted_ms = times.to_ms(compaction.last_success_time)
    if compacted_ms is None or compaction.last_result != "Succeeded":
        return False
    if rollup.last_result not in {"Succeeded", "Skipped"}:
        return True
    # The start of the rollup counts, because a rollup that was running during the compaction may hold the state before it. Both times come
    # from the cluster's clock (see `_settled`), which may differ from the operator's.
    # Equal times (whole seconds) can mean either order. An extra rollup is harmless, but a missing one is not.
    return (times.to_ms(rollup.last_attempt_time) or 0) <= compacted_ms


def due(
    shard: Shard,
    inspection: Inspection,
    maintenance: Mapping[MaintenanceKind, Upkeep],
    runs: Sequence[Run],
    now_ms: int,
    *,
    horizon_ms: int,
    hold: Hold | None,
) -> list[Due]:
    """The runs to start now. There are none while the shard is suspended. There is none of a kind that has a run under way or whose wait is
    not over. Unless a run is requested, there is none of a kind that is switched off, and no compaction against `hold`.
    """
    if shard.spec.suspend or inspection.is_tombstone:
        return []
    automatic = automatic_kinds(shard)
    going = {run.kind for run in runs if not run.phase.finished}
    found = []
    for kind in MAINTENANCE_KINDS:
        if kind in going:
            continue
        block = maintenance.get(kind, Upkeep())
        token = request_token(shard, kind)
        if _is_waiting(shard, block, kind, now_ms, requested=token is not None):
            continue
        work = None
        if kind in automatic:
            work = wanted(shard, inspection, maintenance, kind, now_ms=now_ms, horizon_ms=horizon_ms)
        full = work is not None and work.full
        reason = auditing.due_reason(shard, block, kind, now_ms) if work is None else work.reason
        is_asked = (block.last_reason or "").startswith(_REQUESTED)
        # Only a due compaction has passed the gate, so a compaction that is not due must wait.
        may_repeat = work is not None if kind == "compaction" else not shard.spec.switched_off(kind)
        if _is_unfinished(block) and (is_asked or may_repeat):
            # The run was only intended, or its Job was removed from outside. There is no Job now, so the run is started again.
            reason = block.last_reason or ""
        if kind == "compaction" and (token is not None or (reason or "").startswith(_REQUESTED)):
            # No batch waits to be merged, but a merge would remove updates, because since has passed them after the last merge.
            full = full or (not inspection.compaction_requests and _cancels(inspection))
        if token is not None:
            found.append(Due(kind, f"{_REQUESTED}{one_line(token)}", token, full=full))
        elif reason is not None and (kind != "compaction" or hold is None or reason.startswith(_REQUESTED)):
            found.append(Due(kind, reason, None, full=full))
    return found


def automatic_kinds(shard: Shard) -> frozenset[MaintenanceKind]:
    """The kinds that become due by their debt, and not only by request or by time."""
    by_debt = frozenset(MAINTENANCE_KINDS).difference(names.AUDIT_KINDS)
    return frozenset(kind for kind in by_debt if not shard.spec.switched_off(kind))


def _is_waiting(shard: Shard, block: Upkeep, kind: MaintenanceKind, now_ms: int, *, requested: bool) -> bool:
    """Whether the wait after the last run is not over. A time beyond any possible wait comes from before a clock was set back. The limit is
    twice the longest wait, because ends of runs come from other clocks.
    """
    interval_s = auditing.interval_s(shard, kind) or deadline.collection_interval_s(shard)
    farthest_ms = now_ms + 2000 * max(_BACKOFF_MAX_S, interval_s)
    return now_ms < not_before_ms(block, requested=requested) <= farthest_ms


def held(shard: Shard, block: Upkeep, hold: Hold | None, now_ms: int) -> Upkeep:
    """The block of compactions with the reason that holds the next one back. While the wait after the last run is not over, it shows that
    wait.
    """
    if hold is None or _is_waiting(shard, block, "compaction", now_ms, requested=False):
        return block
    until = None if hold.until_ms is None else times.to_text(hold.until_ms)
    return replace(block, next_run_time=until, wait_reason=hold.reason)


def _is_unfinished(block: Upkeep) -> bool:
    return block.job_name is not None and block.job_name != block.settled_job


def not_before_ms(block: Upkeep, *, requested: bool = False) -> int:
    """The earliest time of the next run. A request skips the interval after a success, but not the backoff after failures."""
    if requested and not block.consecutive_failures:
        return 0
    return times.to_ms(block.next_run_time) or 0


def why_stuck(run: Run) -> str:
    """What a pending run waits for, if its pod shows it. The kubelet reports a missing Secret only in Events."""
    if run.reason:
        return f"{run.reason}: {run.message}"
    see = f"see `kubectl describe pod -l batch.kubernetes.io/job-name={run.name}`"
    return run.message or f"its pod waits for a node or for a volume, such as a Secret that is missing; {see}"


def retry_number(block: Upkeep, seqno: int) -> int:
    """The number of the next run at this version, from 0. It rises with each ended run. A run that was only intended keeps its number."""
    if block.last_seqno != seqno:
        return 0
    ended = block.settled_job is not None and block.settled_job == block.job_name
    return (block.retry or 0) + (1 if ended else 0)


def fold(shard: Shard, runs: Sequence[Run], now_ms: int) -> Folded:
    """Record every run in status.maintenance and every finished run in status.history, and set the times of the next audits. Idempotent: a
    run is recorded once.
    """
    known = shard.known
    blocks = {kind: _unheld(block) for kind, block in (known.maintenance or {}).items()}
    folded = Folded(blocks, known.history or (), (), budget.until_now(known.rewritten or (), now_ms))
    created_ms = {run.name: run.created_ms for run in runs}
    for run in sorted(runs, key=lambda one: one.created_ms):
        kind = next((one for one in MAINTENANCE_KINDS if one == run.kind), None)
        if kind is not None:
            folded = _entered(folded, shard, run, kind, now_ms, created_ms=created_ms)
    scheduled = auditing.scheduled(shard, folded.maintenance, now_ms)
    return replace(folded, maintenance=scheduled, history=folded.history[: max(shard.spec.history_limit, 0)])


def _unheld(block: Upkeep) -> Upkeep:
    """The block without the reason that held the next run back. Each plan finds this reason anew."""
    return block if block.wait_reason is None else replace(block, wait_reason=None, next_run_time=None)


def _entered(
    folded: Folded, shard: Shard, run: Run, kind: MaintenanceKind, now_ms: int, *, created_ms: Mapping[str, int]
) -> Folded:
    block = folded.maintenance.get(kind, Upkeep())
    entered = run.name in {item.id for item in folded.history} or _is_older(run, block, created_ms)
    if not entered and block.job_name != run.name:
        # The Job is newer than the status, so its intent was lost. The plan takes over the Job.
        block = replace(
            block,
            job_name=run.name,
            runner=run.runner,
            last_attempt_time=times.to_text(run.started_ms or run.created_ms),
            last_seqno=run.seqno,
            last_reason=run.planned_reason[:256],
        )
    if not run.phase.finished or entered or block.settled_job == run.name:
        return replace(folded, maintenance={**folded.maintenance, kind: block})
    item = ended_run(run, kind, now_ms)
    rewritten = folded.rewritten
    if kind == "compaction":
        # The cluster's clock may be ahead of the operator's.
        ended_ms = min(times.to_ms(item.end_time) or now_ms, now_ms)
        rewritten = budget.with_run(rewritten, _rewritten_bytes(run, item, block), ended_ms)
    block = _settled(block, shard, run, item, now_ms)
    notes = (*folded.notes, _note(item))
    return Folded({**folded.maintenance, kind: block}, (item, *folded.history), notes, rewritten)


def _rewritten_bytes(run: Run, item: UpkeepRun, block: Upkeep) -> int:
    """The bytes that a compaction read. A compaction that failed on Spark or left no report may have read all planned bytes."""
    is_unknown = item.outcome == "Failed" and (run.runner == "Spark" or not run.report)
    return max(item.bytes_read or 0, (block.planned_bytes or 0) if is_unknown and not run.podless else 0)


def _is_older(run: Run, block: Upkeep, created_ms: Mapping[str, int]) -> bool:
    """Whether the run came before the run that `block` names. This is true for the last settled run, for runs that are earlier by the
    cluster's clock, and for runs that ended at an earlier version. The time of an intent does not count, because it comes from the
    operator's clock, which may be behind. `created_ms`: the creation times of all observed runs, by name.
    """
    if block.job_name in {None, run.name}:
        return False
    if run.phase.finished and run.seqno < (block.last_seqno or 0):
        return True
    settled_ms = created_ms.get(block.settled_job or "", 0)
    last_ms = times.to_ms(block.last_attempt_time) or 0
    return run.name == block.settled_job or run.created_ms < max(settled_ms, last_ms)


def ended_run(run: Run, kind: MaintenanceKind, now_ms: int) -> UpkeepRun:
    """A run that ended as the history has it. `now_ms`: its end, if it does not say when that was."""
    report = run.report or {}
    outcome: Outcome | None = next((one for one in get_args(Outcome) if one == report.get("outcome")), None)
    if outcome is None or (run.phase is Phase.FAILED and outcome == "Succeeded"):
        outcome = "Succeeded" if run.phase is Phase.SUCCEEDED else "Failed"
    message = str(report.get("message") or run.message or run.reason or "")
    if not report and run.exit_code:
        message = f"{message or 'no report'} (exit code {run.exit_code})"
    if run.reason == "OOMKilled":
        raised = (
            "compaction.memoryLimit"
            if run.kind in {"compaction", "verify"}
            else "the operator's workload.maintenanceMemory"
        )
        # The driver holds no rows, and its size is fixed.
        advice = "compact with compaction.runner: Pod" if run.runner == "Spark" else f"raise {raised}"
        message = f"the pod ran out of memory: {advice}. {message}"
    end_ms = run.finished_ms or now_ms
    return UpkeepRun(
        id=run.name,
        type=_TYPE[kind],
        reason=run.planned_reason[:256],
        start_time=times.to_text(run.started_ms or run.created_ms),
        end_time=times.to_text(end_ms),
        outcome=outcome,
        runner=run.runner,
        bytes_read=auditing.count(report, "bytes_read"),
        bytes_written=auditing.count(report, "bytes_written"),
        blobs_deleted=auditing.count(report, "blobs_deleted"),
        deletion_record=_deletion_record(report),
        diffs_truncated=auditing.count(report, "diffs_truncated"),
        cpu_seconds=None if (cpu_ms := auditing.count(report, "cpu_ms")) is None else -(-cpu_ms // 1000),
        message=clip(redact(message), 512),
    )


def _deletion_record(report: Mapping[str, Any]) -> str | None:
    """The key of the record of deletions in a report. None when the report has none or an invalid one."""
    key = report.get("deletion_record")
    return key if isinstance(key, str) and _RECORD.fullmatch(key) is not None else None


def _settled(block: Upkeep, shard: Shard, run: Run, item: UpkeepRun, now_ms: int) -> Upkeep:
    end_ms, outcome = run.finished_ms or now_ms, item.outcome
    failures = (block.consecutive_failures or 0) + 1 if outcome == "Failed" else 0
    next_ms: int | None = None
    if outcome == "Failed":
        next_ms = now_ms + 1000 * times.backoff_s(failures, first_s=_BACKOFF_FIRST_S, max_s=_BACKOFF_MAX_S)
    elif outcome == "Conflict":
        next_ms = now_ms + 1000 * _AFTER_CONFLICT_S
    elif run.kind in names.AUDIT_KINDS:
        next_ms = auditing.next_ms(shard, run, end_ms)
    elif run.kind == "gc":
        next_ms = end_ms + 1000 * deadline.collection_interval_s(shard)
    elif outcome == "Skipped":
        next_ms = now_ms + 1000 * _AFTER_SKIPPED_S
    has_succeeded = outcome in {"Succeeded", "Skipped"}
    return replace(
        block,
        # The time of the intent came from the operator's clock.
        last_attempt_time=times.to_text(run.started_ms or run.created_ms),
        last_result=outcome,
        last_duration_seconds=max(0, (end_ms - (run.started_ms or run.created_ms)) // 1000),
        consecutive_failures=failures,
        last_success_time=times.to_text(end_ms) if has_succeeded else block.last_success_time,
        next_run_time=None if next_ms is None else times.to_text(next_ms),
        settled_job=run.name,
        message=item.message or "",
    )


def _note(item: UpkeepRun) -> Note:
    text = f"{item.type} {item.id}: {item.outcome}. {item.message or ''}".rstrip()
    return Note("Warning" if item.outcome == "Failed" else "Normal", f"{item.type}{item.outcome}", text)
