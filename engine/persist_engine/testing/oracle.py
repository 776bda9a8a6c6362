"""The simplest model of a shard: a list of updates and two frontiers.

It is slow and obviously right. Tests do everything twice, to a shard and to an oracle, and compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from persist_engine.client.write.outcomes import UpperMismatch
from persist_engine.model.frontier import MINIMUM, Antichain

Update = tuple[Hashable, int, int]
"""(data, time, diff), where data is any value that identifies a (key, value) pair."""


class Oracle:
    """The model of a shard."""

    def __init__(self) -> None:
        self.since = MINIMUM
        self.upper = MINIMUM
        self.updates: list[Update] = []

    def compare_and_append(
        self, updates: Iterable[Update], *, expected_upper: Antichain, new_upper: Antichain
    ) -> UpperMismatch | None:
        """Appends the updates. Returns UpperMismatch when the upper is not as expected."""
        if expected_upper != self.upper:
            return UpperMismatch(current=self.upper, expected=expected_upper)
        self.updates += [update for update in updates if not new_upper.less_equal(update[1])]
        self.upper = new_upper
        return None

    def append(self, updates: Sequence[Update], *, lower: Antichain, upper: Antichain) -> UpperMismatch | None:
        """Appends the part of [lower, upper) that is not written yet. Returns UpperMismatch when there is a gap before it."""
        if self.upper < lower:
            return UpperMismatch(current=self.upper, expected=lower)
        if self.upper < upper:
            self.updates += [update for update in updates if self.upper.less_equal(update[1])]
            self.upper = upper
        return None

    def contents(self, as_of: int) -> Counter[Hashable]:
        """How often each (key, value) is present at `as_of`: the sums of diffs without zeros."""
        sums: Counter[Hashable] = Counter()
        for data, time, diff in self.updates:
            if time <= as_of:
                sums[data] += diff
        return Counter({data: diff for data, diff in sums.items() if diff})
