"""The spine: a shard's live batches, layered by size, so that every update takes part in O(log n) merges (spec 11).

Owns the frozen values: a spine batch, a level, the spine, merge requests (`MergeReq`) and merge results (`MergeRes`). `edit`
grows the spine; `merge` swaps in physical compactions; `flatten` converts it to flat collections and back. Must not know the
bytes of parts, clocks or storage.

    level 3   [0-4 ----------------]   older, larger: at most two per level; two are being merged, paid by fuel
    level 1                 [4-6 --]
    level 0                     [6-7]  newest

Invariants (`Spine.validate`): ids run from 0 to `next_id` and times from the minimum to `upper` without gaps; older batches are
at higher levels; a level holds two batches iff it merges; no batch's since is beyond the spine's.

SUBTLE: a spine batch is empty if it has zero rows; a hollow batch is empty if it has no parts (spec 11.14).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.model.batch import NOTHING_WAITS, HollowBatch
from persist_engine.model.frontier import MINIMUM, Antichain, Description
from persist_engine.model.ids import RunId
from persist_engine.model.spine.flat import SpineId, ThinSpineBatch
from persist_engine.model.spine.lazy_parts import DeferredParts, EncodedParts, outline_of

#: The limit on levels. It is far above what any number of rows needs (level_for(2**64) is 64), and so low that a damaged level costs
#: little.
LEVELS_MAX = 128
#: Enough fuel for every possible merge; more has no effect.
FUEL_MAX = 1 << 64

#: A hollow batch and its place in the order of arrival.
IdBatch = tuple[SpineId, HollowBatch]
#: The hollow batches of one spine batch, oldest first.
Parts = tuple[IdBatch, ...] | DeferredParts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sums over hollow batches, maintained incrementally so that counting never walks a trace.

    `rows` is an upper bound on updates. `runs` counts the runs that a compaction could merge. `blob_bytes` are in blob, `inline_bytes` in
    state.
    """

    rows: int = 0
    parts: int = 0
    runs: int = 0
    blob_bytes: int = 0
    inline_bytes: int = 0

    @classmethod
    def of(cls, batch: HollowBatch) -> Sizes:
        """Return the sums of one hollow batch; O(its parts)."""
        return cls._summed((batch,))

    @classmethod
    def total(cls, batches: Parts) -> Sizes:
        """Return the sums of several hollow batches; O(all their parts)."""
        return cls._summed(batch for _, batch in batches)

    @classmethod
    def _summed(cls, batches: Iterable[HollowBatch]) -> Sizes:
        # This runs for every spine batch that a diff touches. A plain loop avoids generators and intermediate values.
        rows = parts = runs = blob_bytes = inline_bytes = 0
        for batch in batches:
            rows += batch.rows
            runs += batch.mergeable_runs
            for part in batch.parts:
                parts += part.part_count
                blob_bytes += part.hollow_bytes
                inline_bytes += part.inline_bytes
        return cls(rows, parts, runs, blob_bytes, inline_bytes)

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.rows + other.rows,
            self.parts + other.parts,
            self.runs + other.runs,
            self.blob_bytes + other.blob_bytes,
            self.inline_bytes + other.inline_bytes,
        )

    def __sub__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.rows - other.rows,
            self.parts - other.parts,
            self.runs - other.runs,
            self.blob_bytes - other.blob_bytes,
            self.inline_bytes - other.inline_bytes,
        )


@dataclass(frozen=True, slots=True)
class MergeReq:
    """Batches that may become one, because the spine merged them logically. A worker may merge them physically and return a `MergeRes`.

    `inputs` are oldest first and tile `desc`. `id` is the spine batch that they form.
    """

    id: SpineId
    desc: Description
    inputs: Parts

    @property
    def size_bytes(self) -> int:
        """Bytes of the inputs, in blob and inline."""
        return sum(batch.size_bytes for _, batch in self.inputs)

    def covers(self, other: MergeReq) -> bool:
        """Whether carrying out this request makes `other` superfluous."""
        return self.id.covers(other.id) and self.desc.since == other.desc.since


@dataclass(frozen=True, slots=True)
class MergeRes:
    """The result of a merge: `output` may replace the batches from which it was made. `input` is the id range that was compacted;
    None matches by description. `inputs`, if the compactor knows them, are the batches that it read: only these may be replaced.
    With `runs`, the output replaces these runs of the one hollow batch `input` (spec 12.4), and `inputs` is one batch of just
    these runs.
    """

    output: HollowBatch
    input: SpineId | None
    inputs: tuple[HollowBatch, ...] | None = None
    runs: tuple[RunId, ...] | None = None


class MergeOutcome(enum.Enum):
    """The outcome of a merge result. Only the APPLIED_* outcomes link the output's blobs."""

    APPLIED_EXACT = "applied exact"
    APPLIED_SUBSET = "applied subset"
    APPLIED_PARTIAL = "applied partial"
    NOT_APPLIED_NO_MATCH = "no match"
    NOT_APPLIED_INVALID_SINCE = "invalid since"
    NOT_APPLIED_TOO_MANY_UPDATES = "too many updates"

    @property
    def applied(self) -> bool:
        """Whether the output is now part of state."""
        return self in (MergeOutcome.APPLIED_EXACT, MergeOutcome.APPLIED_SUBSET, MergeOutcome.APPLIED_PARTIAL)


@dataclass(frozen=True, slots=True, repr=False)
class SpineBatch:
    """One logical batch: hollow batches (`parts`, oldest first) that count as merged. Prints as `0-4 [0,7)@2 L3 2 batches`.

    `active_compaction_start_ms` is when its compaction was last claimed.
    """

    id: SpineId
    desc: Description
    level: int
    parts: Parts
    sizes: Sizes
    active_compaction_start_ms: int | None = None
    _thin: ThinSpineBatch | None = field(default=None, init=False, compare=False)
    _encoded: EncodedParts | None = field(default=None, init=False, compare=False)
    _oldest_writer: str | None = field(default=None, init=False, compare=False)
    _waits_from_ms: int | None = field(default=None, init=False, compare=False)
    _net_updates: int | None = field(default=None, init=False, compare=False)

    @classmethod
    def single(cls, spine_id: SpineId, batch: HollowBatch, *, level: int = 0) -> SpineBatch:
        """Return a spine batch of one hollow batch."""
        return cls(spine_id, batch.desc, level, ((spine_id, batch),), Sizes.of(batch))

    @property
    def rows(self) -> int:
        """An upper bound on the number of updates, by which the spine balances its levels."""
        return self.sizes.rows

    @property
    def is_compact(self) -> bool:
        """Whether physical compaction could not reduce its number of runs."""
        return len(self.parts) <= 1 and self.sizes.runs <= 1

    @property
    def oldest_writer(self) -> str:
        """The least `HollowBatch.oldest_writer`; computed once in O(its parts)."""
        if self._oldest_writer is None:
            oldest = min((batch.oldest_writer for _, batch in self.parts), default="~")
            object.__setattr__(self, "_oldest_writer", oldest)
            return oldest
        return self._oldest_writer

    @property
    def waits_from_ms(self) -> int:
        """The least `HollowBatch.waits_from_ms`; computed once in O(its parts)."""
        if self._waits_from_ms is None:
            found = min((batch.waits_from_ms for _, batch in self.parts), default=NOTHING_WAITS)
            object.__setattr__(self, "_waits_from_ms", found)
            return found
        return self._waits_from_ms

    @property
    def net_updates(self) -> int:
        """The sum of the diffs of all updates; computed once in O(its parts). A part without a sum counts with its number of updates."""
        if self._net_updates is None:
            found = sum(batch.net_updates for _, batch in self.parts)
            object.__setattr__(self, "_net_updates", found)
            return found
        return self._net_updates

    def is_empty(self) -> bool:
        """Whether the batch has no updates."""
        return self.sizes.rows == 0

    def request(self) -> MergeReq:
        """Return the request for the compaction that would make it compact."""
        return MergeReq(self.id, self.desc, self.parts)

    def at_level(self, level: int) -> SpineBatch:
        """Return the same batch at `level`."""
        return self if self.level == level else self._again(level, self.active_compaction_start_ms)

    def claimed(self, start_ms: int | None) -> SpineBatch:
        """Return the same batch, with its compaction claimed at `start_ms` (None: unclaimed)."""
        return self._again(self.level, start_ms)

    def _again(self, level: int, start_ms: int | None) -> SpineBatch:
        out = SpineBatch(self.id, self.desc, level, self.parts, self.sizes, start_ms)
        object.__setattr__(out, "_encoded", self._encoded)  # it depends only on the parts, which are the same
        object.__setattr__(out, "_oldest_writer", self._oldest_writer)
        object.__setattr__(out, "_waits_from_ms", self._waits_from_ms)
        object.__setattr__(out, "_net_updates", self._net_updates)
        return out

    def encoded_parts(self, encode: Callable[[Parts], EncodedParts]) -> EncodedParts:
        """Return `encode(parts)`, cached while this batch lives, at any level, because the next rollup repeats most of the last
        one. `encode` must always be the same pure function.
        """
        if self._encoded is None:
            data = encode(self.parts)
            object.__setattr__(self, "_encoded", data)
            return data
        return self._encoded

    def thin(self) -> ThinSpineBatch:
        """Return the stored form; computed once in O(its parts). Computing it for every diff would dominate a commit."""
        if self._thin is None:
            thin = ThinSpineBatch(self.level, self.desc, *outline_of(self.parts))
            object.__setattr__(self, "_thin", thin)
            return thin
        return self._thin

    def known_as(self, thin: ThinSpineBatch) -> SpineBatch:
        """Return self, with `thin` cached as its stored form. The caller guarantees that it is."""
        object.__setattr__(self, "_thin", thin)
        return self

    def __repr__(self) -> str:
        return f"{self.id} {self.desc} L{self.level} {len(self.parts)} batches {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Fueling:
    """A merge in progress. `remaining_work` is a counter fixed at the start; it does not follow batches that shrink (spec 12.6)."""

    since: Antichain
    remaining_work: int


@dataclass(frozen=True, slots=True)
class Level:
    """0, 1 or 2 spine batches, oldest first. `merge` is set iff there are two."""

    batches: tuple[SpineBatch, ...] = ()
    merge: Fueling | None = None

    @property
    def merge_id(self) -> SpineId:
        """Id of the merge's result. Requires batches."""
        return SpineId(self.batches[0].id.lo, self.batches[-1].id.hi)


def level_for(rows: int) -> int:
    """Return the smallest level whose 2**level is at least `rows`: 0 and 1 -> 0, 2 -> 1, 3 and 4 -> 2, 100 -> 7."""
    return max(rows - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Spine:
    """All levels, smallest first. A value: every edit creates a new spine that shares the untouched spine batches."""

    since: Antichain = MINIMUM
    upper: Antichain = MINIMUM
    next_id: int = 0
    levels: tuple[Level, ...] = ()

    def batches(self) -> Iterator[SpineBatch]:
        """Yield the spine batches, oldest first; at most two per level."""
        for level in reversed(self.levels):
            yield from level.batches

    def with_batch(self, new: SpineBatch) -> Spine:
        """Replace the spine batch with the same level and id by `new`. Merges in progress continue."""
        level = self.levels[new.level]
        batches = tuple(new if old.id == new.id else old for old in level.batches)
        levels = (*self.levels[: new.level], replace(level, batches=batches), *self.levels[new.level + 1 :])
        return replace(self, levels=levels)

    def validate(self, *, deep: bool = False) -> None:
        """Raise InvariantViolated unless the invariants hold. O(log n); `deep` also checks every hollow batch."""
        next_id, upper, since = 0, MINIMUM, self.since
        check(not self.levels or bool(self.levels[-1].batches), "the spine's top level is vacant")
        check(len(self.levels) <= LEVELS_MAX, "the spine has more levels than are read back")
        # This runs on every commit, so messages are formatted, and frontiers compared by method, only on failure.
        for index in range(len(self.levels) - 1, -1, -1):
            batches, merge = self.levels[index].batches, self.levels[index].merge
            if len(batches) > 2 or (len(batches) == 2) != (merge is not None):
                raise InvariantViolated(f"level {index} holds {len(batches)} batches, and must merge iff it is full")
            if merge is not None and merge.remaining_work < 0:
                raise InvariantViolated(f"level {index} has negative work")
            for batch in batches:
                desc = batch.desc
                follows = batch.id.lo == next_id and desc.lower.time == upper.time and batch.level == index
                if not (follows and (desc.since is since or desc.since <= since)):
                    raise InvariantViolated(
                        f"spine batch {batch} at level {index} does not follow id {next_id} and upper {upper} "
                        f"with a since not beyond {since}"
                    )
                next_id, upper = batch.id.hi, desc.upper
                if deep:
                    validate_parts(batch)
        if next_id != self.next_id or upper != self.upper:
            text = f"spine batches end at id {next_id} and {upper}, not at id {self.next_id} and {self.upper}"
            raise InvariantViolated(text)


def validate_parts(batch: SpineBatch) -> None:
    """Raise InvariantViolated unless the hollow batches of `batch` tile it and add up to its sums. O(parts)."""
    validate_tiling(batch)
    check(batch.sizes == Sizes.total(batch.parts), f"sums of spine batch {batch.id} are wrong: {batch.sizes}")


def validate_tiling(batch: SpineBatch) -> None:
    """Raise InvariantViolated unless the hollow batches of `batch` tile it. O(hollow batches)."""
    next_id, upper = batch.id.lo, batch.desc.lower
    for part_id, part in batch.parts:
        if part_id.lo != next_id:
            raise InvariantViolated(f"part {part_id} of spine batch {batch.id} does not follow id {next_id}")
        if part.desc.lower != upper:
            raise InvariantViolated(f"part {part_id} {part.desc} of spine batch {batch.id} does not follow {upper}")
        next_id, upper = part_id.hi, part.desc.upper
    check(next_id == batch.id.hi, f"parts of spine batch {batch.id} end at id {next_id}")
    check(upper == batch.desc.upper, f"parts of spine batch {batch.id} {batch.desc} end at {upper}")
