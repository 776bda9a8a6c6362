"""Which compactions are worth it, and how to do one within memory and so that it makes progress piece by piece: decisions
only (spec 13.1 to 13.4, 13.10).

    request 0-5    [0-1 ..][1-2 .][2-3 ........ many runs ........][3-4 .][4-5 ..]
    fits           one chunk: all of it, answered by id range
    does not fit   [  0-2    ][ runs of 2-3 ][ runs of 2-3 ][  3-5     ]

A chunk is answered as soon as it is written, so a compaction that dies keeps what it did; what is left is then smaller
and planned again.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import CompactionSettings, Settings
from persist_engine.base.version import writer_key
from persist_engine.model.batch import HollowBatch, Part, RunMeta, RunOrder
from persist_engine.model.frontier import Description
from persist_engine.model.ids import RunId
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import IdBatch, MergeReq

#: Target parts' worth of memory set aside for what is being written: one in memory and its encoded bytes.
WRITING_PARTS = 2
#: A part more to be written at once costs this many: the allocator keeps about half as much again.
MORE_WRITING_PARTS = 3
#: Share of the bound for merging and for blobs fetched ahead.
MERGING_SHARE = 8
#: What the process holds beside its data: 134 MiB before any work, and what the first table loads. Of a small bound no more
#: than half is set aside for it, so that something is left for runs. Measured, 10M rows in 64 runs (bench compaction): a
#: peak of 475 MiB for a bound of 512 MiB, 618 for 1 GiB, but of 6M rows 314 for 256 MiB, which is less than the process and
#: its libraries leave room in.
PROCESS_BYTES = 152 << 20
#: A run is decoded in tables: a few of half a MiB and the pages they come from, or all of a part that is small. Measured
#: as resident memory.
DECODED_BYTES_MAX = 6 << 20
#: Rows in memory, and what it takes to decode them, are about this many times as large as encoded.
DECODED_FACTOR = 4

_MIB = 1 << 20


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


def compaction_timeout_ms(request: MergeReq, settings: CompactionSettings) -> int:
    """After how long a compaction is given up: its claim lapses, others take it over (spec 13.3)."""
    size_bytes = sum(batch.size_bytes for _, batch in request.inputs)
    return max(settings.timeout_ms_min, settings.timeout_ms_per_mib * size_bytes // _MIB)


def newest_schema_id(request: MergeReq) -> int | None:
    """The newest schema among the inputs: output is never written in an older one (spec 13.9). None when one does not say."""
    found = {
        meta.schema_id if part.schema_id is None else part.schema_id
        for _, batch in request.inputs
        for meta, parts in batch.runs()
        for part in parts
    }
    known = [each for each in found if each is not None]
    return max(known) if known and len(known) == len(found) else None


@dataclass(frozen=True, slots=True)
class InputRun:
    """One run of one input. `desc` is its batch's registered description: rows outside are not to be seen."""

    desc: Description
    meta: RunMeta
    parts: tuple[Part, ...]

    @property
    def is_sorted(self) -> bool:
        """Whether its rows never go back; if not, each of its parts is sorted when it is fetched."""
        return self.meta.order is RunOrder.STRUCTURED

    @property
    def memory_bytes(self) -> int:
        """What merging it costs: one part at a time, the largest, and tables decoded of it. Of a run that is not sorted
        all parts at once, decoded.
        """
        sizes = [part.hollow_bytes + part.inline_bytes for part in self.parts]
        if not self.is_sorted:
            return sum(sizes) * (1 + DECODED_FACTOR)
        largest = max(sizes, default=0)
        return largest + min(largest * DECODED_FACTOR, DECODED_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class CompactionChunk:
    """Runs to merge at once, into one run of a batch under `desc`.

    `input`: the id range that the output replaces, all of it or, with `run_ids`, these runs of it. `outstanding_parts`:
    parts that leftover memory allows to be written at once. `over_budget`: two runs that do not fit were put together
    anyway, since a chunk of one run merges nothing.
    """

    input: SpineId
    desc: Description
    runs: tuple[InputRun, ...]
    run_ids: tuple[RunId, ...] | None
    outstanding_parts: int
    over_budget: bool

    def replaced(self, request: MergeReq) -> tuple[HollowBatch, ...]:
        """What of `request` it replaces: whole inputs, or one of only some runs. They may name parts through hollow runs
        where the request that was planned had them expanded.
        """
        covered = tuple(batch for spine_id, batch in request.inputs if self.input.covers(spine_id))
        if self.run_ids is None:
            return covered
        runs = [run for run in covered[0].runs() if run[0].run_id in self.run_ids]
        return (HollowBatch.of_runs(self.desc, sum(part.rows for _, parts in runs for part in parts), runs),)


def runs_budget_bytes(settings: Settings) -> int:
    """What the bound leaves for runs, beside merging, the process itself, and the parts being written (spec 13.4)."""
    bound = settings.compaction.memory_bytes_max
    reserved = bound // MERGING_SHARE + min(PROCESS_BYTES, bound // 2)
    return max(bound - reserved - WRITING_PARTS * settings.batch.target_part_bytes, 0)


def compaction_chunks(request: MergeReq, settings: Settings) -> tuple[CompactionChunk, ...]:
    """How to compact `request` within `compaction.memory_bytes_max` (spec 13.4): chunks of runs, in order of work.

    One chunk when everything fits. Else each covers whole inputs, one after the other, or some runs of one input that
    does not fit by itself; inputs that would be alone in a chunk are left as they are until their neighbours are
    smaller. Never a chunk of one run when another follows: two that do not fit go together. Inputs without parts cost
    nothing. Empty when there is nothing to gain: one run alone is written anew only when code before
    `compaction.claim_min_version` wrote it.
    """
    min_version = settings.compaction.claim_min_version
    min_writer = "" if min_version is None else writer_key(min_version)
    plan = _Plan(request, runs_budget_bytes(settings), settings.batch.target_part_bytes, min_writer)
    for chunk_inputs in plan.groups():
        plan.close(chunk_inputs)
    return tuple(plan.chunks)


class _Plan:
    """Scratch pad of one `compaction_chunks`."""

    def __init__(self, request: MergeReq, budget: int, target: int, min_writer: str) -> None:
        self._request, self._budget, self._target = request, budget, target
        self._min_writer = min_writer
        self.chunks: list[CompactionChunk] = []

    def groups(self) -> list[list[IdBatch]]:
        """The inputs, cut where the next does not fit with those before it."""
        groups: list[list[IdBatch]] = []
        used = runs = 0
        for item in self._request.inputs:
            found = _runs_of(item[1])
            cost = sum(run.memory_bytes for run in found)
            # Two runs go together whether they fit or not.
            fits = used + cost <= self._budget or runs + len(found) <= 2
            if not groups or not fits:
                groups.append([])
                used = runs = 0
            groups[-1].append(item)
            used, runs = used + cost, runs + len(found)
        return groups

    def close(self, inputs: list[IdBatch]) -> None:
        """Add what is to be done for inputs that go together."""
        runs = [run for _, batch in inputs for run in _runs_of(batch)]
        used = sum(run.memory_bytes for run in runs)
        if used > self._budget and len(inputs) == 1 and len(runs) > 2 and _are_named(runs):
            self._close_runs(inputs[0], runs)
        elif len(inputs) > 1 or len(runs) > 1 or inputs[0][1].oldest_writer < self._min_writer:
            (first, oldest), (last, newest) = inputs[0], inputs[-1]
            desc = Description(oldest.desc.lower, newest.desc.upper, self._request.desc.since)
            self.chunks.append(self._chunk(SpineId(first.lo, last.hi), desc, runs, None))

    def _close_runs(self, item: IdBatch, runs: list[InputRun]) -> None:
        """Chunks of the runs of one input that does not fit."""
        spine_id, batch = item
        held: list[InputRun] = []
        for run in [*runs, None]:
            used = sum(each.memory_bytes for each in held)
            if run is None or (len(held) > 1 and used + run.memory_bytes > self._budget):
                if len(held) > 1:
                    ids = tuple(each.meta.run_id for each in held if each.meta.run_id is not None)
                    self.chunks.append(self._chunk(spine_id, batch.desc, held, ids))
                held = []
            if run is not None:
                held.append(run)

    def _chunk(
        self,
        spine_id: SpineId,
        desc: Description,
        runs: list[InputRun],
        run_ids: tuple[RunId, ...] | None,
    ) -> CompactionChunk:
        used = sum(run.memory_bytes for run in runs)
        spare = max(self._budget - used, 0) // (MORE_WRITING_PARTS * self._target)
        return CompactionChunk(spine_id, desc, tuple(runs), run_ids, 1 + spare, used > self._budget)


def _runs_of(batch: HollowBatch) -> list[InputRun]:
    return [InputRun(batch.desc, meta, parts) for meta, parts in batch.part_runs() if parts]


def _are_named(runs: list[InputRun]) -> bool:
    """Whether each can be told by its id."""
    ids = {run.meta.run_id for run in runs}
    return len(ids) == len(runs) and None not in ids
