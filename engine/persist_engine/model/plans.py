"""What to roll up, collect, truncate and compact: decisions only, made from a state and settings."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowBatch, HollowRollup, Part, RunMeta, RunOrder
from persist_engine.model.flat_trace import SpineId
from persist_engine.model.frontier import Description
from persist_engine.model.leases import is_live
from persist_engine.model.state import ShardState
from persist_engine.model.trace import MergeReq
from persist_engine.model.views import is_tombstone, latest_rollup, rollup_at_or_below, rollup_seqnos, seqno_since


def rollup_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int) -> SeqNo | None:
    """The state's seqno when a rollup should be written now and nobody is believed to be at it (spec 14.1).

    A tombstone rolls up at once, as soon as something but the last rollup's own link happened.
    """
    newest, _ = latest_rollup(state)
    passed = state.seqno - newest
    if is_tombstone(state):
        return state.seqno if passed > 1 else None
    if passed <= settings.rollup_threshold or is_live(state.active_rollup, now_ms, settings.rollup_claim_ms):
        return None
    return state.seqno


def gc_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int, is_write: bool) -> SeqNo | None:
    """Up to which seqno to collect garbage now, or None (spec 14.3).

    Due when `gc_versions_min` versions could be truncated, that is lie between the oldest rollup and the newest that
    no reader holds back: a request without that would find nothing removable and leave a claim behind. Left to
    writers while there are any, not repeated while somebody is believed to be at it, and bounded beyond the last
    request. Always due on tombstones.
    """
    rollups = rollup_seqnos(state)
    # At least to the next rollup: where rollups lie further apart than the bound, or others collected past it, nothing
    # would ever be due again.
    bound = max(SeqNo(state.last_gc_req + settings.gc_versions_max), *rollups[1:2], rollups[0])
    upto = min(seqno_since(state), bound)
    if is_tombstone(state):
        return max(upto, state.last_gc_req)
    if (state.writers and not is_write) or is_live(state.active_gc, now_ms, settings.gc_claim_ms):
        return None
    keep = rollup_at_or_below(state, upto)
    if keep is None or keep - rollups[0] < settings.gc_versions_min:
        return None
    return max(upto, state.last_gc_req)


def removable_rollups(state: ShardState, upto: SeqNo) -> tuple[tuple[SeqNo, HollowRollup], ...]:
    """Rollups that a collection up to `upto` makes superfluous, ascending: all at or below it but the newest of
    those.
    """
    keep = rollup_at_or_below(state, upto)
    if keep is None:
        return ()
    return tuple((seqno, state.rollups[seqno]) for seqno in rollup_seqnos(state) if seqno < keep)


def validate_request(request: MergeReq) -> None:
    """Raises InvalidUsage unless the inputs tile the request's description and none is advanced beyond it (spec
    13.1).
    """
    desc, end = request.desc, request.desc.lower
    for _, batch in request.inputs:
        if batch.desc.lower != end:
            raise InvalidUsage(f"compaction of {desc} has non-consecutive inputs: {batch.desc.lower} follows {end}")
        if not batch.desc.since <= desc.since:
            raise InvalidUsage(f"compaction of {desc} has an input advanced beyond it: {batch.desc}")
        end = batch.desc.upper
    if end != desc.upper:
        raise InvalidUsage(f"compaction of {desc} has inputs that end at {end}")


def compaction_worthwhile(request: MergeReq, settings: Settings) -> bool:
    """Whether there are enough inputs, parts or updates to bother (spec 13.2)."""
    least = settings.compaction
    parts = sum(part.part_count for _, batch in request.inputs for part in batch.parts)
    updates = sum(batch.rows for _, batch in request.inputs)
    return len(request.inputs) >= least.inputs_min or parts >= least.parts_min or updates >= least.updates_min


@dataclass(frozen=True, slots=True)
class InputRun:
    """One sorted run of one input. `desc` is its batch's registered description: rows outside are not to be seen."""

    id: SpineId
    desc: Description
    meta: RunMeta
    parts: tuple[Part, ...]

    @property
    def memory_bytes(self) -> int:
        """What merging it costs: one of its parts at a time, the largest."""
        return max((part.hollow_bytes + part.inline_bytes for part in self.parts), default=0)


@dataclass(frozen=True, slots=True)
class CompactionChunk:
    """Runs to merge at once. `outstanding_parts`: uploads that leftover memory allows. `over_budget`: two runs that
    do not fit were put together anyway, since a chunk of one run merges nothing.
    """

    runs: tuple[InputRun, ...]
    outstanding_parts: int
    over_budget: bool


def compaction_chunks(request: MergeReq, settings: Settings) -> tuple[CompactionChunk, ...]:
    """How to compact `request` within `compaction.memory_bytes_max` (spec 13.4): chunks of runs, in order of work.

    Two target parts are set aside for what is being written; the rest holds one part of every run. Inputs without
    parts cost nothing. Runs are taken round robin over inputs, first runs first.
    """
    target = settings.batch.target_part_bytes
    budget = max(settings.compaction.memory_bytes_max - 2 * target, 0)
    runs = _round_robin([_input_runs(spine_id, batch) for spine_id, batch in request.inputs])
    chunks: list[CompactionChunk] = []
    held: list[InputRun] = []
    used = 0
    for run in runs:
        if held and used + run.memory_bytes > budget and len(held) > 1:
            chunks.append(_chunk(held, used, budget, target))
            held, used = [], 0
        held.append(run)
        used += run.memory_bytes
    if held:
        chunks.append(_chunk(held, used, budget, target))
    return tuple(chunks)


def _chunk(runs: list[InputRun], used: int, budget: int, target: int) -> CompactionChunk:
    return CompactionChunk(tuple(runs), 1 + max(budget - used, 0) // target, used > budget and len(runs) > 1)


def _input_runs(spine_id: SpineId, batch: HollowBatch) -> list[InputRun]:
    """Its runs; those not in the order we merge by, part by part, since only a part can be sorted when fetched."""
    out = []
    for meta, parts in batch.part_runs():
        pieces = [parts] if meta.order is RunOrder.STRUCTURED else [(part,) for part in parts]
        out += [InputRun(spine_id, batch.desc, meta, piece) for piece in pieces if piece]
    return out


def _round_robin(inputs: list[list[InputRun]]) -> list[InputRun]:
    longest = max((len(runs) for runs in inputs), default=0)
    return [runs[index] for index in range(longest) for runs in inputs if index < len(runs)]
