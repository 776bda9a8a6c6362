"""The ticks of a cron schedule in its own time zone. Pure: the caller passes the time.

When a clock change skips an hour, a tick in that hour comes at its end. When an hour comes twice, a schedule with fixed hours ticks only
the first time; a schedule with a `*` in its hour field ticks both times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from croniter import CroniterError, croniter
from persist_engine.base.errors import InvalidUsage

from persist_operator.api.sink import Schedule

#: The most ticks that a clock change can repeat. No zone sets its clock back by more than three hours.
_REPEATED_MAX = 180
#: The range in which croniter searches for a matching day.
_YEARS = 50
#: A field of croniter's own syntax with a random time, which would differ at each evaluation.
_CHANCE = re.compile(r"[rR](?:$|\()")


def next_tick_ms(schedule: Schedule, after_ms: int) -> int:
    """The first tick after `after_ms`. Raises InvalidUsage when the schedule is invalid or has no tick within 50 years."""
    return next(_ticks(schedule, after_ms, forward=True))


def last_tick_ms(schedule: Schedule, *, after_ms: int, until_ms: int) -> int | None:
    """The last tick in (after_ms, until_ms]; None when there is none. If several ticks were missed, only the last one is run.

    Raises InvalidUsage like `next_tick_ms`.
    """
    tick_ms = next(_ticks(schedule, until_ms + 1, forward=False))
    return tick_ms if after_ms < tick_ms <= until_ms else None


def _ticks(schedule: Schedule, at_ms: int, *, forward: bool) -> Iterator[int]:
    zone = _zone(schedule)
    fields = schedule.cron.split()
    if len(fields) != 5 or any(_CHANCE.match(one) for one in fields) or not croniter.is_valid(schedule.cron):
        raise InvalidUsage(f"schedule.cron {schedule.cron!r} is not five cron fields, such as '15 2 * * *'")
    iterator = croniter(schedule.cron, datetime.fromtimestamp(at_ms / 1000, tz=UTC).astimezone(zone))
    for _ in range(_REPEATED_MAX + 1):
        try:
            moment = iterator.get_next(datetime) if forward else iterator.get_prev(datetime)
        except CroniterError as error:
            raise InvalidUsage(
                f"schedule.cron {schedule.cron!r} never comes: no day within {_YEARS} years matches its fields"
            ) from error
        tick_ms = round(moment.timestamp() * 1000)
        is_repeated = datetime.fromtimestamp(tick_ms / 1000, tz=UTC).astimezone(zone).fold == 1
        if "*" in fields[1] or not is_repeated:
            yield tick_ms


def _zone(schedule: Schedule) -> ZoneInfo:
    try:
        return ZoneInfo(schedule.time_zone)
    except (KeyError, ValueError, OSError) as error:
        raise InvalidUsage(
            f"schedule.timeZone {schedule.time_zone!r} is not an IANA time zone, such as Europe/Berlin"
        ) from error
