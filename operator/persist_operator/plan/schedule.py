"""Ticks of a cron schedule in its own time zone. Pure: time comes in."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from croniter import croniter
from persist_engine.base.errors import InvalidUsage

from persist_operator.api.sink import Schedule


def next_tick_ms(schedule: Schedule, after_ms: int) -> int:
    """The first tick after `after_ms`. InvalidUsage for a schedule that cannot be read or never comes."""
    return _milliseconds(_iterator(schedule, after_ms).get_next(datetime))


def last_tick_ms(schedule: Schedule, *, after_ms: int, until_ms: int) -> int | None:
    """The last tick in (after_ms, until_ms], or None: of several missed ones only the last is worth running."""
    iterator = _iterator(schedule, until_ms + 1)
    tick_ms = _milliseconds(iterator.get_prev(datetime))
    return tick_ms if after_ms < tick_ms <= until_ms else None


def _iterator(schedule: Schedule, at_ms: int) -> croniter:
    try:
        zone = ZoneInfo(schedule.time_zone)
    except (KeyError, ValueError, OSError) as error:
        raise InvalidUsage(
            f"schedule.timeZone {schedule.time_zone!r} is not an IANA time zone, such as Europe/Berlin"
        ) from error
    if len(schedule.cron.split()) != 5 or not croniter.is_valid(schedule.cron):
        raise InvalidUsage(f"schedule.cron {schedule.cron!r} is not five cron fields, such as '15 2 * * *'")
    start = datetime.fromtimestamp(at_ms / 1000, tz=UTC).astimezone(zone)
    return croniter(schedule.cron, start)


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
