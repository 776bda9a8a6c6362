"""The budget of bytes that compactions may read in any 24 hours. Pure.

The bytes are recorded by the hour in which a run ended. An hour counts until all of it is 24 hours ago, so the recorded sum is never less
than the sum over any 24 hours. status.history cannot be the record, because it holds only a few runs.
"""

from __future__ import annotations

from persist_operator.api import times
from persist_operator.api.shard_status import RewrittenHour

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
#: The number of hours that can count at once, and one more for a clock that was set back.
_HOURS_MAX = 26

Rewritten = tuple[RewrittenHour, ...]


def with_run(rewritten: Rewritten, size_bytes: int, ended_ms: int) -> Rewritten:
    """The record with one more run, newest hour first, without hours that no longer count."""
    if size_bytes <= 0:
        return rewritten
    hour_ms = ended_ms - ended_ms % _HOUR_MS
    sums = {at_ms: count for at_ms, count in _hours(rewritten) if _frees_ms(at_ms) > ended_ms}
    sums[hour_ms] = sums.get(hour_ms, 0) + size_bytes
    kept = sorted(sums.items(), reverse=True)[:_HOURS_MAX]
    return tuple(RewrittenHour(time=times.to_text(at_ms), bytes=count) for at_ms, count in kept)


def until_now(rewritten: Rewritten, now_ms: int) -> Rewritten:
    """The record with future hours counted as the present hour. Future hours come from before a clock was set back, and would count for
    more than a day.
    """
    hour_ms = now_ms - now_ms % _HOUR_MS
    if all(at_ms <= hour_ms for at_ms, _ in _hours(rewritten)):
        return rewritten
    past = tuple(one for one in rewritten if (times.to_ms(one.time) or 0) <= hour_ms)
    ahead = sum(count for at_ms, count in _hours(rewritten) if at_ms > hour_ms)
    return with_run(past, ahead, now_ms)


def used_bytes(rewritten: Rewritten, now_ms: int) -> int:
    """The bytes that count now."""
    return sum(count for at_ms, count in _hours(rewritten) if _frees_ms(at_ms) > now_ms)


def frees_ms(rewritten: Rewritten, now_ms: int, *, need_bytes: int, budget_bytes: int) -> int | None:
    """The time at which `need_bytes` more fit into the budget: `now_ms` when they fit now, None when they never fit."""
    if need_bytes > budget_bytes:
        return None
    ends = [now_ms, *sorted(at_ms for at_ms in (_frees_ms(hour) for hour, _ in _hours(rewritten)) if at_ms > now_ms)]
    return next(at_ms for at_ms in ends if used_bytes(rewritten, at_ms) + need_bytes <= budget_bytes)


def _hours(rewritten: Rewritten) -> list[tuple[int, int]]:
    return [(times.to_ms(one.time) or 0, one.bytes or 0) for one in rewritten]


def _frees_ms(hour_ms: int) -> int:
    return hour_ms + _HOUR_MS + _DAY_MS
