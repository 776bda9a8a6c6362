"""Frontiers: antichains over u64 times. Totally ordered times make an antichain one time, or empty.

A frontier says "progress has passed everything before these times". The empty frontier is the greatest: closed, no time ever.
Order: A <= B iff every element of B is at or beyond A (spec 1.2). The minimum frontier is {0}.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage

TIME_MAX = 2**64 - 1
#: Times inside parts are stored as int64: data times stay below this.
DATA_TIME_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, repr=False)
class Antichain:
    """One time, or none (`time is None`: the empty, closed frontier). Compare with the methods or with <, <=, meet, join."""

    time: int | None

    def __post_init__(self) -> None:
        if self.time is not None and not 0 <= self.time <= TIME_MAX:
            raise InvalidUsage(f"time {self.time} outside [0, 2**64 - 1]")

    @classmethod
    def of(cls, time: int) -> Antichain:
        """The frontier {time}."""
        return cls(int(time))

    @classmethod
    def empty(cls) -> Antichain:
        """The closed frontier."""
        return EMPTY

    @classmethod
    def minimum(cls) -> Antichain:
        """The frontier {0}: nothing has passed."""
        return MINIMUM

    @property
    def elements(self) -> tuple[int, ...]:
        """The times: one or none."""
        return () if self.time is None else (self.time,)

    @property
    def newest_complete(self) -> int:
        """Of an upper: the newest time at which contents are complete and can be asked for; -1: there is none yet."""
        return DATA_TIME_MAX if self.time is None else min(self.time - 1, DATA_TIME_MAX)

    def is_empty(self) -> bool:
        """Whether this is the closed frontier."""
        return self.time is None

    def less_equal(self, time: int) -> bool:
        """Whether `time` is at or beyond this frontier."""
        return self.time is not None and self.time <= time

    def less_than(self, time: int) -> bool:
        """Whether `time` is strictly beyond this frontier."""
        return self.time is not None and self.time < time

    def __le__(self, other: Antichain) -> bool:
        if other.time is None:
            return True
        return self.time is not None and self.time <= other.time

    def __lt__(self, other: Antichain) -> bool:
        return self <= other and self != other

    def __ge__(self, other: Antichain) -> bool:
        return other <= self

    def __gt__(self, other: Antichain) -> bool:
        return other < self

    def meet(self, other: Antichain) -> Antichain:
        """Greatest lower bound: the lesser of the two."""
        return self if self <= other else other

    def join(self, other: Antichain) -> Antichain:
        """Least upper bound: the greater of the two."""
        return other if self <= other else self

    def advance(self, time: int) -> int | None:
        """`time` as indistinguishable from it beyond this frontier: max(time, frontier); None when the frontier is empty."""
        return None if self.time is None else max(time, self.time)

    def __repr__(self) -> str:
        return "{}" if self.time is None else f"{{{self.time}}}"

    __str__ = __repr__


EMPTY = Antichain(None)
MINIMUM = Antichain(0)


@dataclass(frozen=True, slots=True, repr=False)
class Description:
    """What times a batch covers: at or past `lower`, not past `upper`, distinguishable only from `since` on.

    Invariant: `lower` is not empty and lower <= upper. Prints as `[3,7)@2`.
    """

    lower: Antichain
    upper: Antichain
    since: Antichain

    def __post_init__(self) -> None:
        if self.lower.is_empty():
            raise InvalidUsage("a description cannot have an empty lower")
        if not self.lower <= self.upper:
            raise InvalidUsage(f"description with lower {self.lower} beyond upper {self.upper}")

    def __repr__(self) -> str:
        end = "∞" if self.upper.is_empty() else str(self.upper.time)
        since = "∞" if self.since.is_empty() else str(self.since.time)
        return f"[{self.lower.time},{end})@{since}"

    __str__ = __repr__
