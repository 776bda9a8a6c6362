"""Parses times and spans as people write them: `-1h`, `-1 day`, ISO 8601, datetimes, whole numbers; `7 days`.

Pure: the caller passes the current time. Raises InvalidUsage, which names the argument and what it may be.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import SupportsIndex

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated, is_instant
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain, time_of
from persist_engine.model.retention import in_words
from persist_engine.model.state import Clock

Time = SupportsIndex | datetime | timedelta | str
"""A time: a whole number, a datetime with its zone, ISO 8601 text with its zone, or a time ago as `-1h`, `-1 day` or a timedelta."""
Span = SupportsIndex | timedelta | str
"""A span of time: milliseconds, a timedelta, or text such as `7 days`, `12h`, `30m`; text `none` for no span."""
#: The value of `retain` that means the default of a new table.
DEFAULT = "default"
_RETAINED: dict[Clock, Span] = {"ms": "7 days", "counter": 1000}
#: A number before every time. It stands for the last write of a table that has none.
NEVER = -1

_MILLISECOND = timedelta(milliseconds=1)
_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "sec": 1000,
    "second": 1000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "week": 604_800_000,
}
#: Python refuses to parse thousands of digits, and no span is that long.
_SPAN = re.compile(r"([0-9]{1,18})\s*([a-z]+)", re.IGNORECASE)


def when(written: int) -> str:
    """The time of a write in words, also for NEVER."""
    return "never" if written == NEVER else f"at {written}"


def span_ms(given: Span | None, name: str) -> int | None:
    """The span in milliseconds; None for None and for `none`. Raises InvalidUsage for zero or less, and for anything else."""
    if given is None or given == "none":
        return None
    found = _span_ms(given)
    if found is None or not 0 < found <= DATA_TIME_MAX:
        raise InvalidUsage(
            f"{name} must be a span such as '7 days', '12h', '30m', a timedelta, or None, not {_shown(given)}"
        )
    return found


def retained(given: Span | None, clock: Clock) -> int | None:
    """Like `span_ms`, for `retain`. For a table that counts its writes, it is a number of writes, also as text. DEFAULT fits both
    clocks.
    """
    if given == DEFAULT:
        given = _RETAINED[clock]
    if clock == "ms" or given is None or given == "none":
        return span_ms(given, "retain")
    number = int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 20 else given
    if isinstance(number, str | timedelta):
        raise InvalidUsage(
            f"retain: a table that counts its writes keeps a number of them, such as 1000, or none, not {_shown(given)}"
        )
    return span_ms(number, "retain")


def retained_in_words(kept: int | None, clock: Clock) -> str:
    """The retention as text, in the form that `retained` parses."""
    return in_words(kept) if clock == "ms" or kept is None else f"{kept} writes"


def time_of_clock(given: Time, clock: Clock, *, now_ms: int, name: str) -> int:
    """Like `moment`. For a table that counts its writes, only a number is a time."""
    if clock == "counter" and not isinstance(given, SupportsIndex):
        raise InvalidUsage(
            f"{name}: the table counts its writes, so a time is a number as Written.time shows it, not {_shown(given)}"
        )
    return moment(given, now_ms=now_ms, name=name)


def moment(given: Time, *, now_ms: int, name: str) -> int:
    """`given` as a time. A time ago is counted from `now_ms`. Raises InvalidUsage for anything else, and for times before 1970."""
    if isinstance(given, timedelta) or (isinstance(given, str) and given.lstrip().startswith("-")):
        ago = _span_ms(given.strip()[1:].lstrip() if isinstance(given, str) else abs(given))
        if ago is None:
            raise InvalidUsage(f"{name} must be a time, or a time ago such as '-1h' or '-2 days', not {_shown(given)}")
        return max(0, now_ms - ago)
    try:
        time = time_of(given, name)
    except InvalidUsage as error:
        if not isinstance(given, str):
            raise
        raise InvalidUsage(f"{error}; a time ago begins with a minus, as in '-1h'", **error.detail) from error
    if not 0 <= time <= DATA_TIME_MAX:
        raise InvalidUsage(f"{name} must be a time in [0, {DATA_TIME_MAX}], not {_shown(given)}")
    return time


def readable(time: int, upper: Antichain, *, now_ms: int, name: str) -> int | None:
    """The written time whose contents are those at `time`; None when nothing was written at all.

    After the last write the contents stay the same until now, so a time between the two counts as the time of the last write. Raises
    InvalidUsage, with the newest time, for a time in the future.
    """
    newest = upper.newest_complete
    if time <= newest:
        return time
    if time > now_ms or (newest >= 0 and not is_instant(newest)):
        what = "nothing was written yet" if newest < 0 else f"the last write was at {dated(newest)}"
        raise InvalidUsage(f"{name} {dated(time)} is in the future: {what}", time=time, upper=upper.time)
    return None if newest < 0 else newest


def _span_ms(given: Span) -> int | None:
    if isinstance(given, timedelta):
        return given // _MILLISECOND
    if not isinstance(given, str):
        try:
            return None if isinstance(given, bool) else given.__index__()
        except AttributeError:
            return None
    found = _SPAN.fullmatch(given.strip())
    if found is None:
        return None
    unit = found[2] if found[2] in _UNITS_MS else found[2].lower().removesuffix("s") or "s"
    return int(found[1]) * _UNITS_MS[unit] if unit in _UNITS_MS else None


def _shown(given: object) -> str:
    text = repr(given)
    return f"{type(given).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
