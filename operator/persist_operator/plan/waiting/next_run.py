"""The run that the operator would start next, as status.plan shows it, and the reason that holds it back. Pure.

The id of a plan is a hash of its scope: the resource's uid (so that an approval is not valid for another resource, or for one that is
created again), the kind of work, the time of the last successful compaction, whether it covers all of the shard or only uncompacted
batches, the power of two that bounds the estimate, and the generation of the spec. So the same work has the same id for two operators and
after a crash, writes do not change the id, and an approval never covers two runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from persist_engine.model.inspection import Inspection

from persist_operator.api import names, times
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import PlannedRun, Runner, Upkeep, UpkeepRun, WorkType
from persist_operator.plan import maintenance
from persist_operator.plan.actions import Note
from persist_operator.plan.hints import Words
from persist_operator.plan.observed import Run
from persist_operator.plan.waiting import gate, windows
from persist_operator.plan.waiting.gate import Hold, Passed, Wanted
from persist_operator.settings import WorkloadSettings

#: The kinds that a plan names, in order. Compactions come first, because they may have to wait. Audits have times, not plans.
_TYPE: Mapping[MaintenanceKind, WorkType] = {"compaction": "Compaction", "rollup": "Rollup", "gc": "GC"}
#: All estimates below this number give the same id, so that a small shard that grows needs no new approval.
_LEAST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The next work. `gate` is the answer for the next compaction, and is open when none is due. `horizon_ms`: see waiting.windows."""

    plan: PlannedRun = PlannedRun()
    gate: Hold | Passed = Passed()
    horizon_ms: int

    @property
    def hold(self) -> Hold | None:
        """The hold on the next compaction; None when there is none."""
        return self.gate if isinstance(self.gate, Hold) else None

    @property
    def max_bytes(self) -> int | None:
        """The most bytes that the next compaction may read; None without a bound."""
        return self.gate.max_bytes if isinstance(self.gate, Passed) else None


def outlook(
    shard: Shard,
    inspection: Inspection,
    folded: maintenance.Folded,
    runs: Sequence[Run],
    *,
    is_refused: bool,
    is_renewed: bool,
    workload: WorkloadSettings,
    words: Words,
    now_ms: int,
) -> Outlook:
    """The next work for the shard. It leaves out kinds with a run under way. `is_refused`: see maintenance.runner_of. `is_renewed`: whether
    a plan that is already on the status gets new estimates.
    """
    owes = inspection.waits_from_ms is not None
    ahead = Outlook(horizon_ms=windows.horizon_ms(shard.spec.windows, now_ms) if owes else now_ms)
    if inspection.is_tombstone:
        return ahead
    going = {run.kind for run in runs if not run.phase.finished}
    blocks, known, automatic = folded.maintenance, shard.known.plan, maintenance.automatic_kinds(shard)
    for kind in _TYPE:
        wanted = maintenance.wanted(shard, inspection, blocks, kind, now_ms=now_ms, horizon_ms=ahead.horizon_ms)
        if wanted is None or kind in going or kind not in automatic:
            continue
        block = blocks.get(kind, Upkeep())
        runner = maintenance.runner_of(kind, shard, inspection, block, is_refused=is_refused, workload=workload)
        plan = _planned(shard, kind, wanted, after=block.last_success_time, runner=runner, inspection=inspection)
        took_s = _estimated_s(folded.history, kind, runner, plan.estimated_bytes)
        plan = replace(plan, created_time=times.to_text(now_ms), estimated_seconds=took_s)
        if plan.id == known.id:
            plan = (
                replace(plan, created_time=known.created_time) if is_renewed else replace(known, approved=plan.approved)
            )
        if kind != "compaction":
            return replace(ahead, plan=plan)
        found = gate.passes(
            shard,
            wanted,
            plan,
            blocks,
            folded.rewritten,
            least_bytes=None if wanted.full else inspection.smallest_request_bytes,
            words=words,
            now_ms=now_ms,
        )
        return replace(ahead, plan=plan, gate=found)
    return ahead


def answers(shard: Shard, ahead: Outlook) -> tuple[Mapping[str, str], tuple[Note, ...]]:
    """The approval that this plan handles, as an entry of status.lastHandledRequests. Also the Events of a plan that begins to wait for an
    approval, gets one, or gets a wrong one.
    """
    token, plan, hold, known = gate.approval_token(shard), ahead.plan, ahead.hold, shard.known.plan
    notes: tuple[Note, ...] = ()
    if hold is not None and hold.reason == "AwaitingApproval" and (known.id != plan.id or known.approved):
        notes = (Note("Normal", hold.reason, hold.message),)
    if not token or token == shard.known.handled(names.APPROVE):
        return {}, notes
    if shard.spec.needs_approval and token == plan.id:
        return {names.APPROVE: token}, (Note("Normal", "PlanApproved", f"plan {plan.id}: {plan.reason}"),)
    waits = f"the plan that waits is {plan.id}" if plan.id and not plan.approved else "no plan waits for an approval"
    text = f"{names.REQUEST_PREFIX}{names.APPROVE} is {redact(token)}, which names no plan that waits: {waits}"
    return {names.APPROVE: token}, (*notes, Note("Warning", "ApprovalRefused", text))


def estimated_bytes(inspection: Inspection, kind: MaintenanceKind, *, full: bool) -> int | None:
    """The bytes that a run would read; for a rollup, the bytes that it would write. None when there is no estimate."""
    if kind == "compaction":
        return inspection.data_bytes if full else inspection.compaction_bytes
    return inspection.latest_rollup_bytes if kind == "rollup" else None


def _planned(
    shard: Shard,
    kind: MaintenanceKind,
    wanted: Wanted,
    *,
    after: str | None,
    runner: Runner | None,
    inspection: Inspection,
) -> PlannedRun:
    """The plan without its times. `after`: the last success of the kind."""
    size = estimated_bytes(inspection, kind, full=wanted.full)
    plan_id = _id_of(shard, kind, after, full=wanted.full, size_bytes=size or 0)
    return PlannedRun(
        id=plan_id,
        type=_TYPE[kind],
        reason=clip(wanted.reason, 256),
        runner=runner,
        estimated_bytes=size,
        approved=kind != "compaction" or gate.is_approved(shard, plan_id),
    )


def _id_of(shard: Shard, kind: MaintenanceKind, after: str | None, *, full: bool, size_bytes: int) -> str:
    covers = [shard.meta.uid, kind, shard.meta.generation, after, full, max(size_bytes, _LEAST_BYTES).bit_length()]
    return f"{names.VERB[kind]}-{hashlib.sha256(json.dumps(covers).encode()).hexdigest()[:12]}"


def _estimated_s(
    history: Sequence[UpkeepRun], kind: MaintenanceKind, runner: Runner | None, size_bytes: int | None
) -> int | None:
    """The estimated duration: for a compaction, from the bytes per second of compactions on the same runner; for other kinds, the mean time
    of former runs. None without former runs.
    """
    took_s = read = count = 0
    for one in history:
        began_ms, ended_ms = times.to_ms(one.start_time), times.to_ms(one.end_time)
        is_like = one.type == _TYPE[kind] and one.runner == runner and one.outcome == "Succeeded"
        if is_like and began_ms is not None and ended_ms is not None:
            took_s, read, count = (
                took_s + max(1, (ended_ms - began_ms) // 1000),
                read + (one.bytes_read or 0),
                count + 1,
            )
    if kind != "compaction":
        return -(-took_s // count) if count else None
    return -(-(size_bytes or 0) * took_s // read) if read else None
