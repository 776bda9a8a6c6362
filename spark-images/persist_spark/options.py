"""Checks the options of one load of the format `persist`. Owns their names and bounds. Knows no store and no session.

InvalidUsage names the option, its value and what it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from persist_engine import Location
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import DATA_TIME_MAX, time_of
from persist_engine.model.ids import ShardId

SPLITS_MAX = 10_000
_DIGITS_MAX = 19
_STORE = ("shard", "blob", "consensus")
_ROWS = ("as_of", "splits", "updates", "where", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one read, checked."""

    shard: ShardId
    location: Location
    as_of: int | None
    splits: int | None
    updates: bool
    where: str | None = None
    columns: tuple[str, ...] | None = None
    table: str | None = None
    """The metadata table to show in the place of rows."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """The options in `options`. InvalidUsage names an invalid, missing or unknown option. Names are case-insensitive, as in Spark."""
        given = {name.lower(): value for name, value in options.items()}
        known = {*_STORE, *_ROWS, "table"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise InvalidUsage(
                f"option {', '.join(unknown)}: not known to format persist, which has {', '.join(sorted(known))}"
            )
        missing = [name for name in _STORE if not given.get(name)]
        if missing:
            raise InvalidUsage(f"option {', '.join(missing)}: required by format persist")
        if "table" in given:
            _refuse_beside(given, "table", _ROWS, "a metadata table has none of the shard's rows")
        updates = given.get("updates", "false").lower()
        if updates not in ("true", "false"):
            raise InvalidUsage(f"option updates: {given['updates']!r} is not true or false")
        return cls(
            shard=ShardId(given["shard"]),
            location=Location(blob=given["blob"], consensus=given["consensus"]),
            as_of=_time(given, "as_of"),
            splits=_number(given, "splits", 1, SPLITS_MAX),
            updates=updates == "true",
            where=given.get("where"),
            columns=_names(given.get("columns")),
            table=given.get("table"),
        )


def _refuse_beside(given: Mapping[str, str], option: str, others: Sequence[str], why: str) -> None:
    """InvalidUsage names those of `others` that are given beside `option`."""
    if beside := [name for name in others if name in given]:
        raise InvalidUsage(f"option {option} does not go with {', '.join(beside)}: {why}")


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise InvalidUsage(f"option columns: {text!r} is not a list of names separated by commas")
    return names


def _time(given: Mapping[str, str], name: str) -> int | None:
    """A whole number, or ISO 8601 text with its zone."""
    text = given.get(name, "")
    if not text[:1].isdigit() or text.isdigit():
        return _number(given, name, 0, DATA_TIME_MAX)
    time = time_of(text, f"option {name}")
    if time < 0:
        raise InvalidUsage(f"option {name}: {text[:64]!r} is before 1970, where a shard's times begin")
    return time


def _number(given: Mapping[str, str], name: str, least: int, greatest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    # Check the length first: Python refuses to parse a number with thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    if not is_number or not least <= int(text) <= greatest:
        raise InvalidUsage(f"option {name}: {text[:64]!r} is not a whole number in [{least}, {greatest}]")
    return int(text)
