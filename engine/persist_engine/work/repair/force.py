"""Maintenance on demand: what a person asks for, due or not, told exactly before it is done.

Plans are read from state (compaction) or from the log (collection) and change nothing; doing is the ordinary work, so
all that holds of it holds here: safe to repeat, to race and to kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import blob_key
from persist_engine.model.queries import latest_rollup, rollup_at_or_below, seqno_since
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeReq
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine
from persist_engine.work.attempts import Attempts
from persist_engine.work.compact import OnRead, compact, compact_due
from persist_engine.work.gc import OnProgress, collectable, gc_and_truncate
from persist_engine.work.outcome import Ending, Outcome
from persist_engine.work.rollup import write_rollup

#: One exertion completes what is being merged, the next sweeps everything into one level; a third finds nothing.
EXERTIONS_MAX = 3


@dataclass(frozen=True, slots=True)
class Planned:
    """One thing that would be done, to what, and how many bytes it concerns (None: unknown or none)."""

    do: str
    what: str
    size_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys as the fields are named."""
        return asdict(self)


# -- compaction --------------------------------------------------------------------------------------------------------


def plan_compaction(state: ShardState, *, full: bool) -> list[Planned]:
    """The merges that `force_compaction` would do on `state`, claimed by others or not."""
    trace = state.trace
    for fuel in _exertions(trace) if full else ():
        trace, _, _ = trace.exert(fuel)
    return [_planned(request) for request in trace.fueled_requests(claimed_before_ms=state.walltime_ms << 1)]


def force_compaction(machine: Machine, *, full: bool, on_read: OnRead | None = None) -> list[Outcome]:
    """Compact every spine batch that is not compact, however small; `full`: merge all of them into one first, so that
    one batch is left (parts stay within their target size).

    Claims of others count as abandoned as far as `settings.compaction.claim_ms` says. Nothing is done when compaction is
    disabled.
    """
    if not full or not machine.settings.compaction.enabled:
        return [*compact_due(machine, on_read=on_read)]
    ours: set[SpineId] = set()
    for fuel in _exertions(machine.refresh().trace):
        # What an exertion asks for is claimed for who exerted: `compact_due` would leave it alone.
        ours.update(request.id for request in machine.spine_exert(fuel)[1].requests)
    left = [batch for batch in machine.state.trace.spine_batches() if batch.id in ours and not batch.is_compact]
    attempts = Attempts(machine.shard_id)
    done: list[Outcome] = []
    for batch in left:
        with attempts.of(f"compaction {batch.id} {batch.desc}"):
            done.append(compact(machine, batch.request(), on_read=on_read))
    with attempts.of("claims of compactions"):
        done += compact_due(machine, on_read=on_read, attempts=attempts)
    attempts.end()
    return done


def _exertions(trace: Trace) -> Iterator[int]:
    """Fuel for a few exertions, each enough for every merge there is."""
    for _ in range(EXERTIONS_MAX):
        if sum(1 for batch in trace.spine_batches() if batch.sizes.rows) <= 1:
            return
        fuel = 2 * max(trace.rows, 1)
        yield fuel
        trace, _, worked = trace.exert(fuel)
        if not worked:
            return


def _planned(request: MergeReq) -> Planned:
    rows = sum(batch.rows for _, batch in request.inputs)
    runs = sum(len(batch.run_metas) for _, batch in request.inputs)
    size_bytes = sum(batch.size_bytes for _, batch in request.inputs)
    what = f"{request.id} {request.desc}: {len(request.inputs)} inputs, {runs} runs, {rows} rows"
    return Planned("compact", what, size_bytes)


# -- garbage collection ------------------------------------------------------------------------------------------------


def plan_gc(machine: Machine) -> list[Planned]:
    """What `force_gc` would do, blob by blob. Linearized; reads the log up to where it would be truncated."""
    state = machine.refresh()
    target, writes = _target(state)
    plan = [Planned("write rollup", str(state.seqno))] if writes else []
    if target is None:
        return plan
    sizes = _sizes(machine)
    for step in collectable(machine, target):
        for blob in step.blobs:
            key = blob_key(machine.shard_id, blob.partial_key)
            plan.append(Planned(f"delete {blob.kind}", key, sizes.get(key)))
        plan.append(Planned("truncate", f"{step.versions} versions, up to {step.to}"))
    gone = [seqno for seqno in state.rollups if seqno < target]
    return plan + [Planned("unlink rollup", str(seqno)) for seqno in sorted(gone)]


def force_gc(machine: Machine, *, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Write a rollup of the newest version if nobody's hold makes that useless, then collect as far as readers allow.

    The blobs of the rollups that this unlinks go with the next collection: only the version that unlinks them tells
    that they may.
    """
    outcomes: list[Outcome] = []
    _, writes = _target(machine.refresh())
    if writes:
        outcomes.append(write_rollup(machine))
    outcomes.append(gc_and_truncate(machine, on_progress=on_progress))
    return [outcome for outcome in outcomes if outcome.ending is not Ending.SKIPPED]


def _target(state: ShardState) -> tuple[SeqNo | None, bool]:
    """Where the log could be truncated to (None: it begins there), and whether a new rollup is needed for that."""
    newest, _ = latest_rollup(state)
    # The link of the newest rollup and the removal of older entries are versions too: they alone are no reason.
    writes = seqno_since(state) == state.seqno and state.seqno - newest > 1
    if writes:
        return state.seqno, True
    target = rollup_at_or_below(state, seqno_since(state))
    return (target if target is not None and target > min(state.rollups) else None), False


def _sizes(machine: Machine) -> dict[str, int]:
    prefix = f"{machine.shard_id}/"
    listing = machine.retry.external("list", lambda: list(machine.blob.list_prefix(prefix)), shard=machine.shard_id)
    return {info.key: info.size_bytes for info in listing}
