"""The horizontal axis of pictures: times to positions. Pure.

Times of one shard may be decades apart (the minimum, 0, and instants of today) or a millisecond apart. The axis keeps their order, gives
half of its width to equal gaps and half to true distances, and cuts one gap that is longer than all others together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from persist_operator.console.texts import instant

#: The share of the width for equal gaps.
_EQUAL = 0.5
#: The width of a cut gap, as a share of the whole.
_CUT = 0.04
#: The approximate width of a character of a label, and the least space between two labels, in units of the picture.
_CHARACTER, _SPACE = 6.9, 10.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled time. `anchor` is the SVG text-anchor, so that labels stay within the picture."""

    x: float
    label: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Positions between `left` and `right` of times in ascending order."""

    times: tuple[int, ...]
    positions: tuple[float, ...]
    cut: tuple[float, float] | None
    """The ends of the cut gap."""

    @classmethod
    def over(cls, times: Iterable[int], *, left: float, right: float) -> Scale:
        """The scale that contains all these times. There must be at least one time."""
        known = tuple(sorted(set(times))) or (0,)
        gaps = [later - earlier for earlier, later in pairwise(known)]
        if not gaps:
            return cls(known, ((left + right) / 2,), None)
        longest = max(range(len(gaps)), key=gaps.__getitem__)
        is_cut = len(gaps) > 1 and gaps[longest] > sum(gaps) - gaps[longest]
        rest = [gap for index, gap in enumerate(gaps) if not (is_cut and index == longest)]
        room = (right - left) * ((1 - _CUT) if is_cut else 1)
        total = sum(rest)

        def width(index: int) -> float:
            if is_cut and index == longest:
                return (right - left) * _CUT
            return room * (_EQUAL / len(rest) + (1 - _EQUAL) * gaps[index] / total)

        positions = [left]
        for index in range(len(gaps)):
            positions.append(positions[-1] + width(index))
        cut = (positions[longest], positions[longest + 1]) if is_cut else None
        return cls(known, tuple(positions), cut)

    def x(self, time: int) -> float:
        """The position of a time: in proportion between two known times, and at the edge outside of them."""
        after = bisect_right(self.times, time)
        if after == 0:
            return self.positions[0]
        if after == len(self.times):
            return self.positions[-1]
        before = after - 1
        share = (time - self.times[before]) / (self.times[after] - self.times[before])
        return self.positions[before] + share * (self.positions[after] - self.positions[before])

    def ticks(self) -> list[Tick]:
        """Labels that do not touch: the last, the first, and as many between as fit, from the right."""
        last = len(self.times) - 1
        order = [last, 0, *range(last - 1, 0, -1)]
        taken: list[tuple[float, float]] = []
        chosen: dict[int, Tick] = {}
        for index in dict.fromkeys(order):
            tick, start, end = self._tick(index)
            if all(end + _SPACE <= other_start or other_end + _SPACE <= start for other_start, other_end in taken):
                taken.append((start, end))
                chosen[index] = tick
        return [chosen[index] for index in sorted(chosen)]

    def _tick(self, index: int) -> tuple[Tick, float, float]:
        """The label of a time and its left and right end. A label at an edge of the picture is aligned to it."""
        label = instant(self.times[index])
        at, width = self.positions[index], len(label) * _CHARACTER
        if at - self.positions[0] < width / 2 and index < len(self.times) - 1:
            return Tick(round(at, 1), label, "start"), at, at + width
        if self.positions[-1] - at < width / 2:
            return Tick(round(at, 1), label, "end"), at - width, at
        return Tick(round(at, 1), label, "middle"), at - width / 2, at + width / 2
