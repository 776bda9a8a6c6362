"""Statistics of a part's rows: bounds and null counts of each field of key and val, at any depth, bounds of time, and the least diff.

Bounds are conservative: every row lies within them, or the bound is None (unknown). They are JSON texts: numbers and booleans as
themselves, strings as strings, decimals and floats that are not finite as strings, binary as hexadecimal, dates as days and timestamps as
microseconds since the epoch. `bound` decodes a bound. Structs, lists and maps have only a null count, and the values in lists and maps have
no statistics. A field within a struct is null wherever the struct is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import CorruptData
from persist_engine.model.batch import ColumnStats, PartStats
from persist_engine.rows.comparable import comparable_bound, scalar_of
from persist_engine.rows.schema import Schema

#: Longer strings and binaries are truncated. The lower bound becomes a prefix. The upper bound becomes the least text beyond all texts with
#: that prefix.
_TEXT_MAX = 64
#: The approximate cost of a column's entry besides its texts.
_ENTRY_BYTES = 8
#: The columns that nearly every filter names: when rows arrived or changed, and whether they are valid. Their bounds stay when all others
#: are trimmed (spec 15.7), up to `_KEPT_BYTES_MAX`.
_KEPT_NAMES = {"err", "ts", "receivedat", "createdat", "_fivetran_deleted"}
_KEPT_PREFIX = "last_"
_KEPT_SUFFIXES = ("timestamp", "time", "_at", "_tstamp")
_KEPT_BYTES_MAX = 16 << 10
#: The names from the side, `key` or `val`, down to a field.
Path = tuple[str, ...]
_LAST_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def part_stats(table: pa.Table, schema: Schema, bytes_max: int) -> PartStats:
    """The statistics of the rows, trimmed to about `bytes_max` bytes. Fields within structs are trimmed first, then the bounds of value
    fields, the widest first, then those of key fields. Columns that most filters name are trimmed only past a greater limit. Times and the
    least diff are never trimmed.
    """
    columns: list[tuple[Path, ColumnStats]] = []
    for side, fields in (("key", schema.key), ("val", schema.val)):
        columns += _walk((side,), fields, table.column(side))
    columns.sort(key=lambda column: len(column[0]) > 2)  # fields within structs come last
    times = pc.min_max(table.column("time")).as_py()
    return PartStats(_trimmed(columns, bytes_max), times["min"], times["max"], pc.min(table.column("diff")).as_py())


def stats_name(path: Path) -> str:
    """The name of the field at `path` in statistics: `val.a`, or `["val","a","b"]` within a struct. The second form cannot collide with any
    other field, whatever dots names contain and whatever fields are added later.
    """
    return ".".join(path) if len(path) == 2 else json.dumps(path, ensure_ascii=False, separators=(",", ":"))


def stats_path(name: str) -> Path:
    """Inverse of `stats_name`. Raises CorruptData when the text is not the name of a field."""
    if not name.startswith("["):
        return tuple(name.split(".", 1))
    try:
        path = json.loads(name)
    except (ValueError, RecursionError):
        path = None
    if not isinstance(path, list) or len(path) < 3 or not all(isinstance(each, str) for each in path):
        raise CorruptData(f"statistics: {name!r} names no field", key="stats")
    return tuple(path)


def bound(text: str, data_type: pa.DataType) -> pa.Scalar:
    """A bound as a scalar of the column's type. Raises CorruptData when the text is not a bound."""
    return scalar_of(comparable_bound(text, data_type), data_type).cast(data_type)


def _walk(path: Path, fields: Iterable[pa.Field], column: pa.ChunkedArray) -> Iterator[tuple[Path, ColumnStats]]:
    """The statistics of every field below the struct `column`, each before the fields within it."""
    for field, values in zip(fields, column.flatten(), strict=True):
        here = (*path, field.name)
        yield here, column_stats(values)
        if pa.types.is_struct(field.type):
            yield from _walk(here, field.type, values)


def column_stats(column: pa.ChunkedArray) -> ColumnStats:
    """The null count and the bounds of one column."""
    unknown = ColumnStats(column.null_count, None, None)
    if pa.types.is_nested(column.type) or column.null_count == len(column):
        return unknown
    bounds = pc.min_max(column)
    least, greatest = bounds["min"], bounds["max"]
    if pa.types.is_floating(column.type):
        has_nan = bool(pc.any(pc.is_nan(column)).as_py())
        return ColumnStats(column.null_count, _float_text(least), None if has_nan else _float_text(greatest))
    if pa.types.is_string(column.type):
        return ColumnStats(column.null_count, json.dumps(least.as_py()[:_TEXT_MAX]), _beyond_text(greatest.as_py()))
    if pa.types.is_binary(column.type):
        return ColumnStats(
            column.null_count, json.dumps(least.as_py()[:_TEXT_MAX].hex()), _beyond_binary(greatest.as_py())
        )
    return ColumnStats(column.null_count, _text(least), _text(greatest))


def _text(scalar: pa.Scalar) -> str:
    if pa.types.is_temporal(scalar.type):
        return json.dumps(scalar.value)
    value = scalar.as_py()
    return json.dumps(str(value) if isinstance(value, Decimal) else value)


def _float_text(scalar: pa.Scalar) -> str | None:
    value = scalar.as_py()
    if value is None or math.isnan(value):
        return None
    return json.dumps(value + 0.0 if math.isfinite(value) else str(value))


def _beyond_text(text: str) -> str | None:
    """The JSON of `text`. If it is long, the JSON of the least text beyond all texts with the same prefix."""
    if len(text) <= _TEXT_MAX:
        return json.dumps(text)
    head = text[:_TEXT_MAX]
    while head:
        code = ord(head[-1]) + 1
        if code in _SURROGATES:
            code = _SURROGATES.stop
        if code <= _LAST_CODE_POINT:
            return json.dumps(head[:-1] + chr(code))
        head = head[:-1]
    return None


def _beyond_binary(raw: bytes) -> str | None:
    if len(raw) <= _TEXT_MAX:
        return json.dumps(raw.hex())
    head = raw[:_TEXT_MAX].rstrip(b"\xff")
    return json.dumps((head[:-1] + bytes([head[-1] + 1])).hex()) if head else None


def _trimmed(columns: list[tuple[Path, ColumnStats]], bytes_max: int) -> tuple[tuple[str, ColumnStats], ...]:
    """Drops the entries of fields within structs first, then bounds, then null counts, until the estimate fits. Drops those of values
    before those of keys, because readers skip parts mostly by key.
    """
    kept = dict(columns)
    size = sum(_size(path, stats) for path, stats in columns)
    widest_values_first = sorted(columns, key=lambda item: (item[0][0] == "key", -_size(*item)))
    for path, _ in widest_values_first:
        if len(path) > 2 and size > _limit(path, bytes_max):
            size -= _size(path, kept.pop(path))
    for path, stats in widest_values_first:
        if path in kept and size > _limit(path, bytes_max):
            bare = ColumnStats(stats.null_count, None, None)
            size -= _size(path, stats) - _size(path, bare)
            kept[path] = bare
    for path in list(reversed(kept)):
        if size > _limit(path, bytes_max):
            size -= _size(path, kept.pop(path))
    return tuple((stats_name(path), stats) for path, stats in kept.items())


def _limit(path: Path, bytes_max: int) -> int:
    """The total size of statistics above which those of the field at `path` are trimmed."""
    name = path[-1].lower()
    is_kept = name in _KEPT_NAMES or name.startswith(_KEPT_PREFIX) or name.endswith(_KEPT_SUFFIXES)
    return max(bytes_max, _KEPT_BYTES_MAX) if is_kept else bytes_max


def _size(path: Path, stats: ColumnStats) -> int:
    name, bounds = stats_name(path), (stats.lower, stats.upper)
    return len(name.encode()) + _ENTRY_BYTES + sum(len(text) for text in bounds if text is not None)
