"""The rules by which the spine grows: push, fuel, roll up, tidy, exert (spec 11.2 to 11.9).

Owns only these rules. A `SpineEdit` is a scratch pad for one call: it takes a spine apart into levels, edits them, and returns
a new frozen spine and the resulting merge requests. It must not outlive that call.
"""

from __future__ import annotations

from persist_engine.base.errors import InvariantViolated
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Description
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import Fueling, Level, MergeReq, Spine, SpineBatch, level_for

#: Fuel per pushed update (spec 11.3).
FUEL_FACTOR = 8


class SpineEdit:
    """A scratch pad over one spine. Calls may be chained; `finish` ends the edit."""

    def __init__(self, spine: Spine) -> None:
        self._since = spine.since
        self._upper = spine.upper
        self._next_id = spine.next_id
        self._levels = list(spine.levels)
        self._requests: list[MergeReq] = []

    def finish(self) -> tuple[Spine, tuple[MergeReq, ...]]:
        """Return the edited spine and the requests that no other request covers."""
        spine = Spine(self._since, self._upper, self._next_id, tuple(self._levels))
        return spine, without_covered(self._requests)

    def push(self, batch: HollowBatch) -> None:
        """Append `batch`, which must begin where the spine ends and span some time. Amortised O(log n)."""
        if batch.desc.lower == batch.desc.upper:
            raise InvariantViolated(f"pushed batch {batch.desc} spans no time")
        if batch.desc.lower != self._upper:
            raise InvariantViolated(f"pushed batch {batch.desc} does not begin at upper {self._upper}")
        if not batch.desc.since <= self._since:
            raise InvariantViolated(f"pushed batch {batch.desc} is beyond since {self._since}")
        new = SpineBatch.single(self._take_id(), batch)
        self._upper = batch.desc.upper
        if new.is_empty():
            lowest = next((index for index, level in enumerate(self._levels) if level.batches), None)
            if (
                lowest is not None
                and len(self._levels[lowest].batches) == 1
                and self._levels[lowest].batches[0].is_empty()
            ):
                # Without this merge, idle shards would accumulate empty batches (spec 20, bug 11).
                self._insert_at(lowest, new)
                self._insert_at(lowest, self._complete(lowest))
                return
        self._introduce(new, level_for(new.rows))

    def exert(self, fuel: int) -> bool:
        """Advance merges as if `fuel` updates had been pushed. Returns whether anything changed."""
        self._tidy()
        batches = [batch for level in self._levels for batch in level.batches]
        if sum(len(batch.parts) for batch in batches) < 2 and not any(self._is_behind(batch) for batch in batches):
            return False
        if any(level.merge for level in self._levels):
            self._apply_fuel(fuel)
            return True
        if self._upper.is_empty():  # no batch can follow a closed upper, not even one of zero width
            return False
        desc = Description(self._upper, self._upper, self._since)
        self._introduce(SpineBatch.single(self._take_id(), HollowBatch.empty(desc)), level_for(fuel))
        return True

    def _is_behind(self, batch: SpineBatch) -> bool:
        """Whether `batch` has rows that only a merge at the spine's since can cancel."""
        return not batch.is_empty() and batch.desc.since != self._since

    def _take_id(self) -> SpineId:
        self._next_id += 1
        return SpineId(self._next_id - 1, self._next_id)

    def _introduce(self, new: SpineBatch, index: int) -> None:
        self._apply_fuel(FUEL_FACTOR << index)
        self._roll_up(index)
        self._insert_at(index, new)
        self._tidy()

    def _apply_fuel(self, fuel: int) -> None:
        """Give each merge the full `fuel`, lowest level first. The walk goes upward, so a merge that this pass starts at an
        existing level gets fuel, too (spec 11.3 a).
        """
        for index in range(len(self._levels)):
            level = self._levels[index]
            if level.merge is None:
                continue
            work = max(level.merge.remaining_work - fuel, 0)
            self._levels[index] = Level(level.batches, Fueling(level.merge.since, work))
            if work == 0:
                self._insert_at(index + 1, self._complete(index))

    def _roll_up(self, index: int) -> None:
        """Move everything below `index` into that level, so that older batches stay above younger ones."""
        self._grow(index)
        if not any(level.batches for level in self._levels[:index]):
            return
        carried: SpineBatch | None = None
        for below in range(index):
            if carried is not None:
                self._insert_at(below, carried)
            carried = self._complete(below) if self._levels[below].batches else None
        if carried is not None:
            self._insert_at(index, carried)
        if self._levels[index].merge is not None:
            # Only here is a merge at the target level forced: the following insertion must not find the level full.
            self._insert_at(index + 1, self._complete(index))

    def _grow(self, index: int) -> None:
        while len(self._levels) <= index:
            self._levels.append(Level())

    def _insert_at(self, index: int, new: SpineBatch) -> None:
        """Append `new` to the level `index`. A second batch starts a merge."""
        self._grow(index)
        old = self._levels[index].batches
        if len(old) >= 2:
            raise InvariantViolated(f"level {index} is full, no place for {new.id}")
        batches = (*old, new.at_level(index))
        if not old:
            self._levels[index] = Level(batches)
            return
        first = old[0]
        if first.id.hi != new.id.lo or first.desc.upper != new.desc.lower:
            raise InvariantViolated(f"{new} does not follow {first}")
        since = first.desc.since.join(new.desc.since).join(self._since)
        self._levels[index] = Level(batches, Fueling(since, first.rows + new.rows))

    def _complete(self, index: int) -> SpineBatch:
        """Empty a level and return its single batch, or the logical merge of its two, regardless of remaining work."""
        level, self._levels[index] = self._levels[index], Level()
        if level.merge is None:
            return level.batches[0]
        first, second = level.batches
        desc = Description(first.desc.lower, second.desc.upper, level.merge.since)
        if first.is_empty() and second.is_empty():
            return SpineBatch.single(level.merge_id, HollowBatch.empty(desc), level=index)
        merged = SpineBatch(level.merge_id, desc, index, first.parts + second.parts, first.sizes + second.sizes)
        self._requests.append(merged.request())
        return merged

    def _tidy(self) -> None:
        """Let a lone batch at the top sink to the level that fits its size (spec 11.6)."""
        if not self._levels or len(self._levels[-1].batches) != 1:
            return
        top = self._levels[-1].batches[0]
        while level_for(top.rows) < len(self._levels) - 1:
            count = len(self._levels)
            below = self._levels[-2]
            if len(below.batches) == 2:
                return
            if len(below.batches) == 1:
                smaller = sum(len(level.batches) << index for index, level in enumerate(self._levels[:-2]))
                if smaller > (1 << count) // 8:
                    return
            del self._levels[-2:]
            self._insert_at(count - 2, top)
            if below.batches:
                self._insert_at(count - 2, below.batches[0])
                return


def without_covered(requests: list[MergeReq]) -> tuple[MergeReq, ...]:
    """Return the requests that no other request covers, last first: later requests span more (spec 11.7)."""
    kept: list[MergeReq] = []
    for request in reversed(requests):
        if not any(other.covers(request) for other in kept):
            kept = [other for other in kept if not request.covers(other)]
            kept.append(request)
    return tuple(kept)
