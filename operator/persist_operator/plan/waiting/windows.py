"""When the windows of maintenance are open. Pure.

A window opens at each tick of its schedule and stays open for a number of elapsed seconds, even when clocks change in between. Windows may
overlap. The schedule has its own time zone; plan/schedule.py decides the effect of a clock change on its ticks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from persist_engine.base.errors import InvalidUsage

from persist_operator.api.redact import redact
from persist_operator.api.shard import Window
from persist_operator.api.sink import Schedule
from persist_operator.plan import schedule

#: The most overlapping windows that are followed, one after the other. Beyond that, windows count as open.
_STEPS_MAX = 64
_MINUTE_MS = 60_000
#: Schedules and minutes whose ticks are remembered.
_CACHED = 4096


def problem(windows: Sequence[Window], now_ms: int) -> str | None:
    """The reason why a window never opens, with its place in the spec, for the first one; None when all windows open at some time."""
    for index, one in enumerate(windows):
        try:
            _next_tick_ms(one.schedule, now_ms // _MINUTE_MS)
        except InvalidUsage as error:
            return redact(f"spec.maintenance.windows[{index}]: {str(error).removeprefix('schedule.')}")
    return None


def is_open(windows: Sequence[Window], now_ms: int) -> bool:
    """Whether a compaction may start now. Always true without windows. The end of a window does not belong to it."""
    return not windows or _open_until_ms(windows, now_ms) is not None


def next_opening_ms(windows: Sequence[Window], now_ms: int) -> int:
    """The time at which the next window opens after `now_ms`. There must be a window."""
    return min(_next_tick_ms(one.schedule, now_ms // _MINUTE_MS) for one in windows)


def horizon_ms(windows: Sequence[Window], now_ms: int) -> int:
    """The time up to which a plan must look ahead. While a window is open, it is the next opening after the window closes, because work
    that becomes due in between can start only in the present window. Otherwise, and without windows, it is now.
    """
    at_ms = now_ms
    for _ in range(_STEPS_MAX if windows else 0):
        until_ms = _open_until_ms(windows, at_ms)
        if until_ms is None:
            return now_ms if at_ms == now_ms else next_opening_ms(windows, at_ms)
        at_ms = until_ms
    return at_ms


def _open_until_ms(windows: Sequence[Window], at_ms: int) -> int | None:
    """The time at which the last of the windows that are open at `at_ms` closes; None when none is open."""
    ends = []
    for one in windows:
        long_ms = 1000 * one.duration_seconds
        tick_ms = _last_tick_ms(one.schedule, at_ms // _MINUTE_MS)
        if tick_ms is not None and at_ms < tick_ms + long_ms:
            ends.append(tick_ms + long_ms)
    return max(ends, default=None)


# Ticks are whole minutes, so within a minute the last tick and the next one stay the same. Many shards have the same windows and are
# planned every minute, and finding a tick takes a tenth of the time of a plan.


@functools.lru_cache(maxsize=_CACHED)
def _next_tick_ms(one: Schedule, minute: int) -> int:
    return schedule.next_tick_ms(one, minute * _MINUTE_MS)


@functools.lru_cache(maxsize=_CACHED)
def _last_tick_ms(one: Schedule, minute: int) -> int | None:
    return schedule.last_tick_ms(one, after_ms=-1, until_ms=minute * _MINUTE_MS)
