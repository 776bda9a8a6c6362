"""Frontiers: antichains over u64 times. Times are totally ordered, so an antichain holds one time or none.

A frontier states that all times before it are complete. The empty frontier is the greatest: it is closed and no time follows
it. Order: A <= B iff every element of B is at or beyond A (spec 1.2). The minimum frontier is {0}.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import SupportsIndex

from persist_engine.base.errors import InvalidUsage

TIME_MAX = 2**64 - 1
#: Parts store times as int64, so times of data must not exceed this.
DATA_TIME_MAX = 2**63 - 1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
#: An error quotes at most this much of an invalid time.
_SHOWN_CHARS_MAX = 60


@dataclass(frozen=True, slots=True, repr=False)
class Antichain:
    """One time, or none (`time is None`: the empty, closed frontier). Compare with the methods or with <, <=, meet, join."""

    time: int | None

    def __post_init__(self) -> None:
        if self.time is None:
            return
        if type(self.time) is not int:
            object.__setattr__(self, "time", time_of(self.time))
        if not 0 <= self.time <= TIME_MAX:
            raise InvalidUsage(f"time {self.time} outside [0, 2**64 - 1]")

    @classmethod
    def of(cls, time: Instant) -> Antichain:
        """Return the frontier {time}. Accepts what `time_of` accepts, and raises InvalidUsage for anything else."""
        return cls(time_of(time))

    @classmethod
    def empty(cls) -> Antichain:
        """Return the closed frontier."""
        return EMPTY

    @classmethod
    def minimum(cls) -> Antichain:
        """Return the frontier {0}: no time is complete yet."""
        return MINIMUM

    @property
    def elements(self) -> tuple[int, ...]:
        """The times: one or none."""
        return () if self.time is None else (self.time,)

    @property
    def newest_complete(self) -> int:
        """For an upper: the newest time at which the contents are complete and readable, or -1 if there is none yet."""
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
        """Return max(time, frontier), to which compaction advances `time` if this frontier is its since. None if the frontier is empty."""
        return None if self.time is None else max(time, self.time)

    def __repr__(self) -> str:
        return "{}" if self.time is None else f"{{{self.time}}}"

    __str__ = __repr__


EMPTY = Antichain(None)
MINIMUM = Antichain(0)

Instant = SupportsIndex | datetime | str
"""A time as an integer, a datetime with a time zone, or ISO 8601 text with a time zone."""
TimeLike = Instant | Antichain
"""What callers may pass where a time or a frontier is expected."""


def time_of(given: TimeLike, name: str = "time") -> int:
    """Return `given` as a time: an integer as it is, a frontier as its single time. A datetime or ISO 8601 text with a time
    zone becomes milliseconds since 1970, rounded down; most shards count their times in that unit.

    Raises InvalidUsage, which names `name` and the accepted forms, for fractions, booleans, texts of digits only, datetimes
    without a time zone, and the empty frontier, which has no time.
    """
    if type(given) is int:
        return given
    if isinstance(given, Antichain):
        if given.time is None:
            raise InvalidUsage(f"{name} must be a time; the given frontier is empty and has none")
        return given.time
    if isinstance(given, str):
        return _millisecond_of(_parsed(given, name), given, name)
    if isinstance(given, datetime):
        return _millisecond_of(given, given, name)
    if isinstance(given, bool):
        raise _no_time(given, name)
    try:
        return operator.index(given)
    except TypeError:
        raise _no_time(given, name) from None


def frontier_of(given: TimeLike, name: str = "frontier") -> Antichain:
    """Return `given` if it is a frontier (the empty one too), else the frontier of its time (`time_of`)."""
    if isinstance(given, Antichain):
        return given
    time = time_of(given, name)
    if not 0 <= time <= TIME_MAX:
        raise InvalidUsage(f"{name} is time {time}, outside [0, 2**64 - 1]")
    return Antichain(time)


def _parsed(text: str, name: str) -> datetime:
    if not text[:1].isdigit() or text.isdigit():  # Python would parse 20130102 as a date
        raise _no_time(text, name)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise _no_time(text, name) from None


def _millisecond_of(at: datetime, given: object, name: str) -> int:
    try:
        has_zone = at.utcoffset() is not None
    except ValueError:  # pandas' NaT is a datetime but has no offset
        raise _no_time(given, name) from None
    if not has_zone:
        raise InvalidUsage(
            f"{name} is {_shown(given)}, which has no time zone, so its instant is unknown: add one, as in "
            f"{at.isoformat()}+00:00 or {at.isoformat()}Z"
        )
    return (at - _EPOCH) // _MILLISECOND


def _no_time(given: object, name: str) -> InvalidUsage:
    wanted = "a whole number, a datetime with its time zone, or ISO 8601 text such as 2013-01-02T03:04:05Z"
    return InvalidUsage(f"{name} must be {wanted}, not {type(given).__name__} {_shown(given)}")


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."


@dataclass(frozen=True, slots=True, repr=False)
class Description:
    """The times that a batch covers: at or past `lower` and before `upper`, distinguishable from `since` on.

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
