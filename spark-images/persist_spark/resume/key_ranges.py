"""The ranges of keys of write tasks. A task notes the least and the greatest of its keys. From them the next driver finds the rows that the
task had.

Ranges only decide how many rows are staged again. If Spark and Arrow order keys differently, or print a value differently, the rows of a
range are not those of its task, and their sums differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import holds_errors
from persist_engine.rows.schema import Schema
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.frames import spark_type

#: The most ranges in one Spark expression. An append of 100 million rows had 163 tasks.
RANGES_MAX = 1024
_HAVE_TEXTS = (
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_timestamp,
)

Key = tuple[str, ...]
"""The fields of a key as texts that SQL casts to their types."""


def has_ranges(schema: Schema) -> bool:
    """Whether keys of this schema have a range: each field must have an order and an exact text. The column of errors does not count,
    because errors have null in all other fields of the key.
    """
    fields = _fields(schema)
    return bool(fields) and all(any(is_one(field.type) for is_one in _HAVE_TEXTS) for field in fields)


class KeyRange:
    """The range of the keys in a stream of flat rows. Rows with a null in the key are ignored."""

    def __init__(self, schema: Schema) -> None:
        self._names = [f"k{index}" for index in range(len(_fields(schema)))]
        self._least: pa.Table | None = None
        self._greatest: pa.Table | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Extends the range by the keys of these rows."""
        keys = pa.Table.from_batches([rows.select(self._names)]).drop_null()
        if keys.num_rows:
            self._least = self._first(keys, self._least, "ascending")
            self._greatest = self._first(keys, self._greatest, "descending")

    def _first(self, keys: pa.Table, before: pa.Table | None, order: str) -> pa.Table:
        if len(self._names) == 1:  # takes a third of the time of sorting all rows
            ends = pc.min_max(keys.column(0))
            end = ends["min" if order == "ascending" else "max"]
            keys = pa.table({self._names[0]: pa.repeat(end, 1)})
        every = keys if before is None else pa.concat_tables([before, keys])
        options = pc.SelectKOptions(k=1, sort_keys=[(name, order) for name in self._names])
        return every.take(pc.select_k_unstable(every, options=options))

    def texts(self) -> tuple[Key, Key] | None:
        """The least key and the greatest. None when every key had a null, or when one of the two does not survive the round trip through
        text, for example a year past 9999 or invalid UTF-8.
        """
        if self._least is None or self._greatest is None:
            return None
        least, greatest = _texts(self._least), _texts(self._greatest)
        return None if least is None or greatest is None else (least, greatest)


def range_number(ranges: Mapping[int, tuple[Key, Key]], schema: Schema) -> Column:
    """A column with the number of the range that contains the key of a flat row, or null. There must be between one and RANGES_MAX ranges,
    and they should be disjoint. If ranges overlap, a row with a key in several gets the number of one of them or null, and always the same.
    Raises ArrowException for a text that is not a value of its field.
    """
    numbers, bounds = list(ranges), list(ranges.values())
    fields = _fields(schema)
    names = [f"k{index}" for index in range(len(fields))]
    types = [field.type for field in fields]
    starts, _ends = (
        pa.table({name: pa.array([key[at] for key in keys]).cast(types[at]) for at, name in enumerate(names)})
        for keys in zip(*bounds, strict=True)
    )
    order = pc.sort_indices(starts, sort_keys=[(name, "ascending") for name in names]).to_pylist()
    key = F.col(names[0]) if len(names) == 1 else F.struct(*names)

    def literal(texts: Key) -> Column:
        parts = [F.lit(text).cast(spark_type(kind)) for text, kind in zip(texts, types, strict=True)]
        return (
            parts[0]
            if len(parts) == 1
            else F.struct(*(part.alias(name) for part, name in zip(parts, names, strict=True)))
        )

    def tree(low: int, high: int) -> Column:
        if high - low == 1:
            least, greatest = bounds[order[low]]
            return F.when((key >= literal(least)) & (key <= literal(greatest)), F.lit(numbers[order[low]]))
        middle = (low + high) // 2
        return F.when(key < literal(bounds[order[middle]][0]), tree(low, middle)).otherwise(tree(middle, high))

    return tree(0, len(order))


def _fields(schema: Schema) -> list[pa.Field]:
    """The key's fields without the column of errors, which is the last one."""
    fields = list(schema.key)
    return fields[:-1] if holds_errors(schema) else fields


def _texts(row: pa.Table) -> Key | None:
    try:
        texts = pa.table([column.cast(pa.string()) for column in row.columns], row.column_names)
        return tuple(texts.to_pylist()[0].values()) if texts.cast(row.schema) == row else None
    except (pa.ArrowException, UnicodeDecodeError):
        return None
