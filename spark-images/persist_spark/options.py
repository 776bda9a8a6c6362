"""Checks the options of one load, or of one write, of the format `persist`. Owns their names and bounds. Knows no store and no session.

InvalidUsage names the option, its value and the accepted values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from persist_engine import Antichain, Location
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated
from persist_engine.model.frontier import DATA_TIME_MAX, time_of
from persist_engine.model.ids import ShardId

SPLITS_MAX = 10_000
_DIGITS_MAX = 19
#: The options that name the shard and its stores.
STORE = ("shard", "blob", "consensus")
_ROWS = ("as_of", "splits", "updates", "where", "columns", "from", "to", "rows")


@dataclass(frozen=True, slots=True)
class Ago:
    """A time that is relative to the load: this long before it."""

    ms: int


class Instant(int):
    """Milliseconds since 1970. The user gave the time as an instant and not as a number."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The changes to show instead of contents: those at times in [start, end)."""

    start: int | Ago
    end: int | Ago | None
    """None: the shard's upper when the frame is loaded."""
    shape: Literal["updates", "rows"]
    """rows: each change shows what happened to its row."""

    def window(self, upper: Antichain, *, now_ms: int) -> tuple[int, int]:
        """[start, end) for a load at `now_ms` that sees `upper`. Raises InvalidUsage for an end before start or past `upper`."""
        start = instant(self.start, now_ms)
        end = None if self.end is None else instant(self.end, now_ms)
        written = upper.newest_complete + 1
        if end is None:
            return start, max(start, written)  # nothing was written after a later start
        if end < start:
            raise InvalidUsage(f"option from: {dated(start)} is after option to: {dated(end)}")
        if end > written:
            raise InvalidUsage(
                f"option to: {dated(end)} is past the shard's upper {dated(written)}, where it ends so far"
            )
        return start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one read, checked."""

    shard: ShardId
    location: Location
    as_of: int | Ago | None
    splits: int | None
    updates: bool
    where: str | None = None
    columns: tuple[str, ...] | None = None
    table: str | None = None
    """The metadata table to show instead of rows."""
    feed: Feed | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether every load with these options shows the same times."""
        if self.feed is None:
            return isinstance(self.as_of, int)
        return isinstance(self.feed.start, int) and isinstance(self.feed.end, int)

    @property
    def is_of_plain_rows(self) -> bool:
        """Whether the load shows plain rows, all or some of them, so that it needs nothing that only the reader in Python can do."""
        return self.feed is None and self.table is None and not self.updates and self.splits is None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Checks `options`. Names are case-insensitive, as in Spark. Raises InvalidUsage, which names an invalid, missing or
        unknown option.
        """
        given = {name.lower(): value for name, value in options.items()}
        check_names(given, {*STORE, *_ROWS, "table"}, "format persist")
        if "table" in given:
            _refuse_beside(given, "table", _ROWS, "a metadata table has none of the shard's rows")
        feed = _feed(given)
        updates = given.get("updates", "false").lower()
        if updates not in ("true", "false"):
            raise InvalidUsage(f"option updates: {given['updates']!r} is not true or false")
        return cls(
            shard=ShardId(given["shard"]),
            location=Location(blob=given["blob"], consensus=given["consensus"]),
            as_of=moment(given, "as_of"),
            splits=number_in(given, "splits", 1, SPLITS_MAX),
            updates=updates == "true",
            where=given.get("where"),
            columns=names_in(given.get("columns")),
            table=given.get("table"),
            feed=feed,
        )


def check_names(given: Mapping[str, str], known: Set[str], what: str) -> None:
    """Raises InvalidUsage, which names the options that are not in `known`, or the missing options of the store."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidUsage(f"option {', '.join(unknown)}: not known to {what}, which has {', '.join(sorted(known))}")
    missing = [name for name in STORE if not given.get(name)]
    if missing:
        raise InvalidUsage(f"option {', '.join(missing)}: required by {what}")


def instant(time: int | Ago, now_ms: int) -> int:
    """The time, for a load at `now_ms`; never before 0."""
    return max(0, now_ms - time.ms) if isinstance(time, Ago) else int(time)


def refuse_instants(clock: str, shard: ShardId, *times: int | Ago | None) -> None:
    """Raises InvalidUsage for an instant or a relative time if the shard counts its writes. All of its times are before that, so a frame or
    a stream of changes would be empty.
    """
    if clock == "counter" and any(isinstance(time, Instant | Ago) for time in times):
        raise InvalidUsage(
            f"shard {shard} counts its writes, so a time of it is a number, not an instant and not a time ago"
        )


def _feed(given: Mapping[str, str]) -> Feed | None:
    if "from" not in given:
        if alone := [name for name in ("to", "rows") if name in given]:
            raise InvalidUsage(f"option {', '.join(alone)}: needs option from, the first time of the changes to show")
        return None
    _refuse_beside(given, "from", ("as_of", "updates"), "changes have times of their own; option rows says their shape")
    rows = given.get("rows", "updates").lower()
    if rows not in ("updates", "changes"):
        raise InvalidUsage(f"option rows: {given['rows'][:64]!r} is not updates or changes")
    start, end = moment(given, "from"), moment(given, "to")
    assert start is not None
    return Feed(start, end, "rows" if rows == "changes" else "updates")


def moment(given: Mapping[str, str], name: str) -> int | Ago | None:
    """A time, or a relative time such as -1h."""
    text = given.get(name)
    if text is None or not text.startswith("-"):
        return _time(given, name)
    from persist_engine.model.retention import retention_of

    try:
        ago_ms = retention_of(text[1:])
    except InvalidUsage:
        ago_ms = None
    if ago_ms is None:
        raise InvalidUsage(f"option {name}: {text[:64]!r} is not a time ago such as -1h, -30m or -7d")
    return Ago(ago_ms)


def _refuse_beside(given: Mapping[str, str], option: str, others: Sequence[str], why: str) -> None:
    """Raises InvalidUsage, which names those of `others` that are given beside `option`."""
    if beside := [name for name in others if name in given]:
        raise InvalidUsage(f"option {option} does not go with {', '.join(beside)}: {why}")


def names_in(text: str | None) -> tuple[str, ...] | None:
    """Names that are separated by commas."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise InvalidUsage(f"option columns: {text!r} is not a list of names separated by commas")
    return names


def _time(given: Mapping[str, str], name: str) -> int | None:
    """A whole number, or ISO 8601 text with its zone."""
    text = given.get(name)
    if text is not None and not text[:1].isdigit():
        raise InvalidUsage(
            f"option {name}: {text[:64]!r} is not a time: a whole number, ISO 8601 text with its zone, or a time ago such as -1h"
        )
    if text is None or text.isdigit():
        return number_in(given, name, 0, DATA_TIME_MAX)
    time = time_of(text, f"option {name}")
    if time < 0:
        raise InvalidUsage(f"option {name}: {text[:64]!r} is before 1970, where a shard's times begin")
    return Instant(time)


def number_in(given: Mapping[str, str], name: str, least: int, greatest: int) -> int | None:
    """The whole number of option `name`. None when it is not given. Raises InvalidUsage outside [least, greatest]."""
    text = given.get(name)
    if text is None:
        return None
    # The length comes first, because Python refuses to parse a number with thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    if not is_number or not least <= int(text) <= greatest:
        raise InvalidUsage(f"option {name}: {text[:64]!r} is not a whole number in [{least}, {greatest}]")
    return int(text)
