"""Decides which compactions are worth doing, and how to split one into chunks that fit into memory and can be applied one by
one (spec 13.1 to 13.4, 13.10).

    request 0-5    [0-1 ..][1-2 .][2-3 ........ many runs ........][3-4 .][4-5 ..]
    fits           one chunk: all of it, applied by id range
    does not fit   [  0-2    ][ runs of 2-3 ][ runs of 2-3 ][  3-5     ]

Each chunk is applied as soon as it is written, so a compaction that dies keeps its finished chunks. The rest is smaller and is
planned again.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import CompactionSettings, Settings
from persist_engine.base.version import writer_key
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunMeta, RunOrder
from persist_engine.model.frontier import DATA_TIME_MAX, Description
from persist_engine.model.ids import RunId
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import IdBatch, MergeReq

#: Memory reserved for the output, in target parts: the part in memory and its encoded bytes.
WRITING_PARTS = 2
#: Memory for each further part written at once, in target parts: the allocator retains about half as much again.
MORE_WRITING_PARTS = 3
#: This share of the bound is for merging and for blobs fetched ahead.
MERGING_SHARE = 8
#: The memory of the process besides its data: 134 MiB before any work, plus what the first table loads. At most half of the bound
#: is reserved for it, so that a small bound leaves memory for runs. Measured with 10M rows in 64 runs (bench compaction): the peak
#: was 475 MiB for a bound of 512 MiB, and 618 MiB for 1 GiB. But 6M rows took 314 MiB for a bound of 256 MiB, which is too small
#: for the process and its libraries.
PROCESS_BYTES = 152 << 20
#: The memory for the decoded tables of a run: a few of half a MiB plus their pages, or a whole small part. Measured as resident memory.
DECODED_BYTES_MAX = 6 << 20
#: Decoded rows, including the memory to decode them, are about this many times as large as encoded rows.
DECODED_FACTOR = 4

_MIB = 1 << 20


def validate_request(request: MergeReq) -> None:
    """Raise InvalidUsage unless the inputs tile the request's description and no input is advanced beyond it (spec 13.1)."""
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
    """Whether the request has enough inputs, parts or updates (spec 13.2)."""
    least = settings.compaction
    parts = sum(part.part_count for _, batch in request.inputs for part in batch.parts)
    updates = sum(batch.rows for _, batch in request.inputs)
    return len(request.inputs) >= least.inputs_min or parts >= least.parts_min or updates >= least.updates_min


def compaction_timeout_ms(request: MergeReq, settings: CompactionSettings) -> int:
    """Return the time after which a compaction is given up; its claim lapses, and another process takes it over (spec 13.3)."""
    size_bytes = sum(batch.size_bytes for _, batch in request.inputs)
    return max(settings.timeout_ms_min, settings.timeout_ms_per_mib * size_bytes // _MIB)


def newest_schema_id(request: MergeReq) -> int | None:
    """Return the newest schema among the inputs, since output is never written in an older one (spec 13.9); None if an input has none."""
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
    """One run of one input. `desc` is its batch's registered description: rows outside it are invisible."""

    desc: Description
    meta: RunMeta
    parts: tuple[Part, ...]

    @property
    def is_sorted(self) -> bool:
        """Whether its rows are in order. If not, each part is sorted when it is fetched."""
        return self.meta.order is RunOrder.STRUCTURED

    @property
    def last_time(self) -> int:
        """A time at or past that of every row. It is the greatest time if neither statistics nor the description bound it."""
        ends = [
            part.stats.time_max if isinstance(part, HollowPart) and part.stats and part.ts_rewrite is None else None
            for part in self.parts
        ]
        known = [end for end in ends if end is not None]
        if known and len(known) == len(ends):
            return max(known)
        upper, since = self.desc.upper.time, self.desc.since.time
        return DATA_TIME_MAX if upper is None or since is None else max(upper - 1, since)

    @property
    def memory_bytes(self) -> int:
        """The memory to merge the run. A sorted run needs its largest part and the tables decoded from it. An unsorted run needs
        all decoded parts at once.
        """
        sizes = [part.hollow_bytes + part.inline_bytes for part in self.parts]
        if not self.is_sorted:
            return sum(sizes) * (1 + DECODED_FACTOR)
        largest = max(sizes, default=0)
        return largest + min(largest * DECODED_FACTOR, DECODED_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class CompactionChunk:
    """Runs to merge together into one run of a batch under `desc`, or into one run and balanced runs.

    `input` is the id range that the output replaces: all of it or, with `run_ids`, only these runs of it. `is_last` means that the
    output is all that the request leaves. `outstanding_parts` is the number of parts that the remaining memory allows to write at
    once. `over_budget` means that two runs do not fit but are merged anyway, since a chunk of one run merges nothing.
    """

    input: SpineId
    desc: Description
    runs: tuple[InputRun, ...]
    is_last: bool
    run_ids: tuple[RunId, ...] | None
    outstanding_parts: int
    over_budget: bool

    def replaced(self, request: MergeReq) -> tuple[HollowBatch, ...]:
        """Return what the chunk replaces in `request`: whole inputs, or one input with only some of its runs. `request` may name
        parts through hollow runs, although the planned request had them expanded.
        """
        covered = tuple(batch for spine_id, batch in request.inputs if self.input.covers(spine_id))
        if self.run_ids is None:
            return covered
        runs = [run for run in covered[0].runs() if run[0].run_id in self.run_ids]
        return (HollowBatch.of_runs(self.desc, sum(part.rows for _, parts in runs for part in parts), runs),)


def runs_budget_bytes(settings: Settings) -> int:
    """Return the memory that the bound leaves for runs, after merging, the process itself, and the parts being written (spec 13.4)."""
    bound = settings.compaction.memory_bytes_max
    reserved = bound // MERGING_SHARE + min(PROCESS_BYTES, bound // 2)
    return max(bound - reserved - WRITING_PARTS * settings.batch.target_part_bytes, 0)


def compaction_chunks(request: MergeReq, settings: Settings) -> tuple[CompactionChunk, ...]:
    """Split the compaction of `request` into chunks of runs that fit `compaction.memory_bytes_max` (spec 13.4), in order of work.

    If everything fits, there is one chunk. Otherwise each chunk covers consecutive whole inputs, or some runs of one input that
    alone does not fit. An input that would be alone in a chunk is left until its neighbours are smaller. A chunk never has only
    one run if another run follows: two runs that do not fit go together. Inputs without parts cost nothing. The result is empty
    if a compaction gains nothing: a single run is rewritten only if code older than `compaction.claim_min_version` wrote it.
    """
    min_version = settings.compaction.claim_min_version
    min_writer = "" if min_version is None else writer_key(min_version)
    plan = _Plan(request, runs_budget_bytes(settings), settings.batch.target_part_bytes, min_writer)
    for chunk_inputs in plan.groups():
        plan.close(chunk_inputs)
    return tuple(plan.chunks)


class _Plan:
    """Scratch pad of one `compaction_chunks` call."""

    def __init__(self, request: MergeReq, budget: int, target: int, min_writer: str) -> None:
        self._request, self._budget, self._target = request, budget, target
        self._min_writer = min_writer
        self.chunks: list[CompactionChunk] = []

    def groups(self) -> list[list[IdBatch]]:
        """Split the inputs where the next one does not fit with those before it."""
        groups: list[list[IdBatch]] = []
        used = merged = 0
        for item in self._request.inputs:
            found = _runs_of(item[1])
            cost = sum(run.memory_bytes for run in found)
            # A balanced run goes with the run from which it was sifted. Otherwise such inputs would be left for ever.
            count = max(item[1].mergeable_runs, 1) if found else 0
            # Two runs go together even if they do not fit.
            fits = used + cost <= self._budget or merged + count <= 2
            if not groups or not fits:
                groups.append([])
                used = merged = 0
            groups[-1].append(item)
            used, merged = used + cost, merged + count
        return groups

    def close(self, inputs: list[IdBatch]) -> None:
        """Add the chunks for inputs that go together."""
        runs = [run for _, batch in inputs for run in _runs_of(batch)]
        used = sum(run.memory_bytes for run in runs)
        if used > self._budget and len(inputs) == 1 and len(runs) > 2 and _are_named(runs):
            self._close_runs(inputs[0], runs)
        elif len(inputs) > 1 or inputs[0][1].mergeable_runs > 1 or inputs[0][1].oldest_writer < self._min_writer:
            (first, oldest), (last, newest) = inputs[0], inputs[-1]
            desc = Description(oldest.desc.lower, newest.desc.upper, self._request.desc.since)
            self.chunks.append(self._chunk(SpineId(first.lo, last.hi), desc, runs, None))

    def _close_runs(self, item: IdBatch, runs: list[InputRun]) -> None:
        """Add chunks for the runs of one input that does not fit."""
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
        is_last = spine_id == self._request.id and run_ids is None
        return CompactionChunk(spine_id, desc, tuple(runs), is_last, run_ids, 1 + spare, used > self._budget)


def _runs_of(batch: HollowBatch) -> list[InputRun]:
    return [InputRun(batch.desc, meta, parts) for meta, parts in batch.part_runs() if parts]


def _are_named(runs: list[InputRun]) -> bool:
    """Whether every run has an id of its own."""
    ids = {run.meta.run_id for run in runs}
    return len(ids) == len(runs) and None not in ids
