"""The trace: the spine within state, and all operations that other rooms may do with a shard's batches.

A `Trace` is a value. Each method that changes something returns a new trace that shares the rest. `structured` states whether
the spine's structure is stored with the state; only shards older than that feature lack it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from persist_engine.base.version import writer_key
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.spine import flatten
from persist_engine.model.spine import merge as merge_result
from persist_engine.model.spine.edit import SpineEdit
from persist_engine.model.spine.flat import FlatTrace, SpineId
from persist_engine.model.spine.spine import (
    FUEL_MAX,
    IdBatch,
    MergeOutcome,
    MergeReq,
    MergeRes,
    Sizes,
    Spine,
    SpineBatch,
)

__all__ = ["IdBatch", "MergeOutcome", "MergeReq", "MergeRes", "Sizes", "SpineBatch", "Trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """All live batches of a shard. A push costs O(log n) amortised; sums cost O(levels)."""

    spine: Spine = field(default_factory=Spine)
    structured: bool = True

    @property
    def since(self) -> Antichain:
        """The since: reads are exact only at times at or past it."""
        return self.spine.since

    @property
    def upper(self) -> Antichain:
        """The first time not yet written."""
        return self.spine.upper

    @property
    def next_id(self) -> int:
        """Number of batches ever pushed, including those of `exert`."""
        return self.spine.next_id

    def push(self, batch: HollowBatch) -> tuple[Trace, tuple[MergeReq, ...]]:
        """Append `batch` and return the new trace with the merges that fell due. Raises InvariantViolated unless the batch begins
        at `upper`, spans some time, and its since is not beyond the trace's.
        """
        edit = SpineEdit(self.spine)
        edit.push(batch)
        spine, requests = edit.finish()
        return Trace(spine, self.structured), requests

    def push_without_requests(self, batch: HollowBatch) -> Trace:
        """Like `push`, for replay: the resulting work was handed to the process that committed the batch."""
        return self.push(batch)[0]

    def downgrade_since(self, since: Antichain) -> Trace:
        """Set since to `since`. The caller must ensure that it does not move back. Batches keep their own since until they are merged."""
        return self if since == self.since else replace(self, spine=replace(self.spine, since=since))

    def batches(self) -> Iterator[HollowBatch]:
        """Yield all hollow batches, oldest first."""
        for batch in self.spine.batches():
            for _, part in batch.parts:
                yield part

    def spine_batches(self) -> Iterator[SpineBatch]:
        """Yield all spine batches, oldest first; there are O(log n)."""
        return self.spine.batches()

    def apply_merge_res(self, res: MergeRes, *, checked: bool = True) -> tuple[Trace, MergeOutcome]:
        """See `merge.apply_merge_res`. Returns self unless applied."""
        spine, outcome = merge_result.apply_merge_res(self.spine, res, checked=checked)
        return (replace(self, spine=spine) if outcome.applied else self), outcome

    def empty_out(self, desc: Description) -> Trace:
        """Replace the hollow batch under `desc` by an empty one, unchecked. For tombstones."""
        return replace(self, spine=merge_result.empty_out(self.spine, desc))

    def claim(self, id: SpineId, start_ms: int) -> Trace:  # noqa: A002 - the contract's name
        """Record a claim at `start_ms` on the compaction of spine batch `id`. Returns self if that spine batch no longer exists."""
        for batch in self.spine.batches():
            if batch.id == id:
                return replace(self, spine=self.spine.with_batch(batch.claimed(start_ms)))
        return self

    def fueled_requests(
        self, *, claimed_before_ms: int, claimed_until_ms: int | None = None, min_version: str | None = None
    ) -> tuple[MergeReq, ...]:
        """Return the compactions worth doing, oldest first: spine batches that are not compact, or that hold parts written by
        code older than `min_version`, and that have no claim later than `claimed_before_ms`. A claim later than
        `claimed_until_ms` comes from a broken clock and does not count.
        """
        min_writer = None if min_version is None else writer_key(min_version)

        def is_due(batch: SpineBatch) -> bool:
            return not batch.is_compact or (min_writer is not None and batch.oldest_writer < min_writer)

        def is_free(start_ms: int | None) -> bool:
            if start_ms is None or start_ms <= claimed_before_ms:
                return True
            return claimed_until_ms is not None and start_ms > claimed_until_ms

        return tuple(
            batch.request()
            for batch in self.spine.batches()
            if is_free(batch.active_compaction_start_ms) and is_due(batch)
        )

    def exert(self, fuel: int) -> tuple[Trace, tuple[MergeReq, ...], bool]:
        """Advance merges as if `fuel` updates had been pushed. The last item returned states whether anything changed.

        Without stored structure nothing changes, because zero-width batches would be indistinguishable there.
        """
        if fuel <= 0 or not self.structured:
            return self, (), False
        edit = SpineEdit(self.spine)
        if not edit.exert(min(fuel, FUEL_MAX)):
            return self, (), False
        spine, requests = edit.finish()
        return replace(self, spine=spine), requests, True

    def flatten(self) -> FlatTrace:
        """Return the stored form; O(live batches)."""
        return flatten.flatten(self.spine, structured=self.structured)

    @classmethod
    def unflatten(cls, flat: FlatTrace) -> Trace:
        """Inverse of `flatten`. Raises InvariantViolated if the collections are inconsistent."""
        return cls(*flatten.unflatten(flat))

    @property
    def sizes(self) -> Sizes:
        """Sums over all live batches; O(levels)."""
        total = Sizes()
        for batch in self.spine.batches():
            total += batch.sizes
        return total

    @property
    def inline_bytes(self) -> int:
        """Bytes of data inside state."""
        return sum(batch.sizes.inline_bytes for batch in self.spine.batches())

    @property
    def rows(self) -> int:
        """Upper bound on the number of updates."""
        return self.sizes.rows

    @property
    def part_count(self) -> int:
        """Number of parts, in blob or inline."""
        return self.sizes.parts

    @property
    def batch_count(self) -> int:
        """Number of hollow batches."""
        return sum(len(batch.parts) for batch in self.spine.batches())

    def validate(self, *, deep: bool = False) -> None:
        """See `Spine.validate`."""
        self.spine.validate(deep=deep)
