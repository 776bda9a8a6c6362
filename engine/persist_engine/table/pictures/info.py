"""A table in numbers: what `Table.describe` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from persist_engine.base.wording import dated, is_instant
from persist_engine.model.state import Clock

_CLOCKS = {
    "ms": "wall clock, milliseconds since 1970",
    "counter": "counter, one more with each write",
    "theirs": "whole numbers that its writers choose",
}


@dataclass(frozen=True, slots=True, repr=False)
class TableInfo:
    """A table in numbers and words. Prints its times with their dates. `updates` bounds the number of rows from above until all is
    compacted.

    >>> info = orders.describe()
    >>> info.name, info.key, info.retain
    ('orders', 'id BIGINT', '7d')
    """

    name: str
    id: str
    owner: str | None
    key: str
    value: str
    clock: str
    retain: str
    bloom: str
    since: int | None
    """The earliest time that can be read. None when the table is closed."""
    last_write: int | None
    """The last time that can be read. None when nothing was written, or the table is closed."""
    updates: int
    parts: int
    bytes: int
    batches: int
    version: int
    holds: int

    def in_words(self) -> dict[str, Any]:
        """The fields, with times as people read them.

        >>> orders.describe().in_words()["last_write"]  # doctest: +ELLIPSIS
        '... (...Z)'
        """
        last = ("closed" if self.since is None else "never") if self.last_write is None else dated(self.last_write)
        return asdict(self) | {"since": dated(self.since), "last_write": last}

    def __repr__(self) -> str:
        return f"TableInfo({', '.join(f'{name}={value!r}' for name, value in self.in_words().items())})"

    def _repr_html_(self) -> str:
        from persist_engine.table.pictures.html import pairs_html

        return pairs_html(f"table {self.name}", self.in_words())


def clock_in_words(clock: Clock, last_write: int | None) -> str:
    """What the times of a table are, from its clock and the time of its last write. If handles choose the times, only these show it."""
    if clock == "ms" and last_write is not None and not is_instant(last_write):
        return _CLOCKS["theirs"]
    return _CLOCKS[clock]
