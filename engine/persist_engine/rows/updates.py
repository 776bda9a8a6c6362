"""The algebra of updates as pure functions over Arrow tables of `Schema.updates_schema`: order, consolidation, time.

A row says that at `time` the multiplicity of (key, val) changes by `diff`. Rows are ordered by the fields of key, then of val (structs
depth first), then time. Nulls sort last, and NaN sorts after numbers. A collection has one zero and one NaN: -0.0 and 0.0 are the same key,
as in Spark's grouping. `consolidate` writes the canonical value, so that a reader's result never depends on how rows were grouped before.
Encoding keeps every bit.

Everything is vectorised; no loop here runs over more than ROWS_MAX rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.spine.merge import wrapped
from persist_engine.rows.columns import (
    ORDER_COLUMNS,
    Bools,
    Indices,
    canonical_floats,
    compare_adjacent,
    constant,
    flat_columns,
    text_offsets,
)
from persist_engine.rows.ingest import normalise
from persist_engine.rows.sorting import order_and_equal, order_indices

__all__ = [
    "advance_times",
    "consolidate",
    "diffs_sum",
    "is_consolidated",
    "normalise",
    "sort",
    "time_filter",
    "times_at",
    "with_canonical_floats",
    "wrapped_diffs_sum",
]

_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
#: With fewer texts than this, finding out whether all have the same width costs more than it saves.
_ALIKE_ROWS_MIN = 4096


def sort(table: pa.Table) -> pa.Table:
    """The same rows in order. Returns the table itself when it is already in order."""
    in_order, _ = compare_adjacent(flat_columns(table), table.num_rows)
    return table if in_order else rows_at(table, order_indices(flat_columns(table), table.num_rows))


def is_consolidated(table: pa.Table) -> bool:
    """Whether rows are in order, no two have the same (key, val, time), and no diff is zero."""
    in_order, equal = compare_adjacent(flat_columns(table), table.num_rows)
    return in_order and not equal.any() and not (_diffs(table) == 0).any()


def consolidate(table: pa.Table) -> pa.Table:
    """Sorts rows and sums diffs: one row for each (key, val, time), zeros dropped, floats canonical. Idempotent.

    Raises InvariantViolated when a sum overflows int64. Sorted input without duplicates is detected in one pass and not sorted.
    """
    if (few := consolidate_small(table)) is not None:
        return few
    table = with_canonical_floats(table)
    in_order, equal = compare_adjacent(flat_columns(table), table.num_rows)
    if in_order:
        return summed(table, None, equal)
    order, equal = order_and_equal(flat_columns(table), table.num_rows)
    return summed(table, order, equal)


def consolidate_sorted(table: pa.Table) -> pa.Table | None:
    """Like `consolidate`, for rows that are in order. Returns None when they are not."""
    table = with_canonical_floats(table)
    in_order, equal = compare_adjacent(flat_columns(table), table.num_rows)
    return summed(table, None, equal) if in_order else None


def summed(table: pa.Table, order: Indices | None, equal: Bools) -> pa.Table:
    """The rows in `order` (None: as they are), with the diff of each row that `equal` marks added to that of the row before. Copies only
    the rows that remain.
    """
    diffs = _diffs(table)
    if not equal.any():
        keep = diffs != 0
        if not keep.all():
            return rows_at(table, np.flatnonzero(keep) if order is None else order[keep[order]])
        return table if order is None else rows_at(table, order)
    diffs = diffs if order is None else diffs[order]
    starts = np.flatnonzero(np.insert(~equal, 0, True))
    sums = sums_of_groups(diffs, starts)
    live = sums != 0
    picked = starts[live] if order is None else order[starts[live]]
    out = rows_at(table, picked)
    return out.set_column(
        out.schema.get_field_index("diff"), table.schema.field("diff"), pa.chunked_array([pa.array(sums[live])])
    )


def diffs_sum(table: pa.Table) -> int:
    """The sum of all diffs, as an unbounded integer."""
    diffs = _diffs(table)
    if len(diffs) <= ROWS_MAX:
        return sum(diffs.tolist())
    # The diffs are added in two halves of 32 bits, because the sum of each half fits into int64.
    return (int(np.add.reduce(diffs >> _LOW_BITS)) << _LOW_BITS) + int(np.add.reduce(diffs & _LOW_MASK))


def has_retraction(table: pa.Table) -> bool:
    """Whether some diff is negative."""
    return bool((_diffs(table) < 0).any())


def wrapped_diffs_sum(table: pa.Table) -> int:
    """The sum of all diffs modulo 2**64, in int64 arithmetic. A part's descriptor holds it.

    SUBTLE: each row is valid alone, but their sum may overflow int64 when a compaction puts them into one part. Wrapped sums still add and
    compare correctly, so the check of a compaction's result loses nothing.
    """
    return wrapped(diffs_sum(table))


def advance_times(table: pa.Table, frontier: Antichain) -> pa.Table:
    """Advances each time to max(time, frontier). For readers at or past `frontier`, this makes no difference.

    The empty frontier distinguishes no times, so no rows remain. A frontier past int64 is replaced by the greatest data time, because no
    update is later.
    """
    if frontier.time is None:
        return table.slice(0, 0)
    floor = min(frontier.time, DATA_TIME_MAX)
    if table.num_rows == 0:
        return table
    times = table.column("time")
    bounds = pc.min_max(times).as_py()
    if bounds["min"] >= floor:
        return table
    if bounds["max"] <= floor:
        return _with_times(table, constant(floor, table.num_rows))
    return _with_times(table, pc.max_element_wise(times, pa.scalar(floor, pa.int64())))


def times_at(table: pa.Table, as_of: int) -> pa.Table:
    """The rows at or before `as_of`, all at time `as_of`. Returns the table itself when all rows are already at that time."""
    if table.num_rows == 0:
        return table
    at = min(as_of, DATA_TIME_MAX)
    times = table.column("time")
    bounds = pc.min_max(times).as_py()
    if bounds["max"] > at:
        table = table.filter(pc.less_equal(times, pa.scalar(at, pa.int64())))
    if bounds["min"] >= at:
        return table
    return _with_times(table, constant(at, table.num_rows))


def time_filter(table: pa.Table, lower: Antichain, upper: Antichain) -> pa.Table:
    """Rows with a time at or past `lower` and before `upper`. Returns the table itself when all rows qualify."""
    if lower.time is None or lower.time > DATA_TIME_MAX:
        return table.slice(0, 0)
    if table.num_rows == 0:
        return table
    times = table.column("time")
    bounds = pc.min_max(times).as_py()
    end = DATA_TIME_MAX + 1 if upper.time is None else min(upper.time, DATA_TIME_MAX + 1)
    if lower.time <= bounds["min"] and bounds["max"] < end:
        return table
    if end == 0:
        return table.slice(0, 0)
    last = pa.scalar(end - 1, pa.int64())
    return table.filter(pc.and_(pc.greater_equal(times, pa.scalar(lower.time, pa.int64())), pc.less_equal(times, last)))


def _with_times(table: pa.Table, times: pa.Array | pa.ChunkedArray) -> pa.Table:
    index = table.schema.get_field_index("time")
    return table.set_column(index, table.schema.field(index), times)


def _diffs(table: pa.Table) -> npt.NDArray[np.int64]:
    diffs: npt.NDArray[np.int64] = table.column("diff").to_numpy()
    return diffs


def rows_at(table: pa.Table, indices: Indices) -> pa.Table:
    """Rows by index. Joins chunks first, because taking from many chunks is several times slower."""
    picked = pa.array(indices)
    columns = [_pick_column(column, picked) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _pick_column(column: pa.ChunkedArray, picked: pa.Array) -> pa.ChunkedArray:
    if column.type == pa.int64() and not column.null_count:
        bounds = pc.min_max(column)
        if len(column) and bounds["min"] == bounds["max"]:  # one value, as in times of one as_of or diffs of inserts
            return pa.chunked_array([constant(bounds["min"].as_py(), len(picked))])
    values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return pa.chunked_array([_taken(values, picked)], column.type)


def _taken(array: pa.Array, picked: pa.Array) -> pa.Array:
    """Values by index. The indices must be valid. A check of them, or a `take` from a whole struct, would make this a third slower."""
    if pa.types.is_struct(array.type) and array.type.num_fields and not array.null_count:
        children = [_taken(child, picked) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, fields=list(array.type))
    if (width := _width_of_all(array)) and len(picked) * width <= _INT32_MAX:
        return _taken_of_width(array, picked, width)
    return pc.take(array, picked, boundscheck=False)


def _width_of_all(array: pa.Array) -> int:
    """The number of bytes of each text or binary, if all have the same number and there are many of them; otherwise 0."""
    is_text = pa.types.is_string(array.type) or pa.types.is_binary(array.type)
    if not is_text or array.null_count or len(array) < _ALIKE_ROWS_MIN:
        return 0
    offsets = text_offsets(array)
    width = int(offsets[1] - offsets[0])
    if int(offsets[-1] - offsets[0]) != width * len(array):
        return 0
    return width if (offsets[1:] - offsets[:-1] == width).all() else 0


def _taken_of_width(array: pa.Array, picked: pa.Array, width: int) -> pa.Array:
    """Like `_taken`, for texts or binaries of `width` bytes each. In random order this takes a quarter of the time of Arrow's copy of text
    (docs/adr/0008-reading-less.md).
    """
    data = array.buffers()[2].slice(int(text_offsets(array)[0]))
    values = pa.Array.from_buffers(pa.binary(width), len(array), [None, data])
    taken = pc.take(values, picked, boundscheck=False)
    offsets = np.arange(len(picked) + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(array.type, len(picked), [None, pa.py_buffer(offsets), taken.buffers()[1]])


def with_canonical_floats(table: pa.Table) -> pa.Table:
    """The same rows with one zero and one NaN. Returns the table itself when its floats are canonical already."""
    for index, name in enumerate(table.column_names):
        if name in {"key", "val"}:
            column = table.column(index)
            canonical = canonical_floats(column)
            if canonical is not column:
                table = table.set_column(index, table.schema.field(index), canonical)
    return table


def sums_of_groups(diffs: npt.NDArray[np.int64], starts: Indices) -> npt.NDArray[np.int64]:
    """The sum of each group [starts[i], starts[i+1]). Raises InvariantViolated when a sum overflows int64.

    numpy wraps silently. Diffs are therefore added in two halves of 32 bits, unless all of them together are too small to overflow.
    """
    greatest = max(int(diffs.max()), -int(diffs.min()))
    if greatest <= _INT64_MAX // len(diffs):
        small: npt.NDArray[np.int64] = np.add.reduceat(diffs, starts)
        return small
    low = np.add.reduceat(diffs & _LOW_MASK, starts)
    high = np.add.reduceat(diffs >> _LOW_BITS, starts) + (low >> _LOW_BITS)
    if ((high < -(1 << 31)) | (high >= 1 << 31)).any():
        raise InvariantViolated("diffs sum to more than int64 holds")
    sums: npt.NDArray[np.int64] = (high << _LOW_BITS) | (low & _LOW_MASK)
    return sums


# Python's own sort consolidates a few rows. A kernel call costs 3 to 20 us for any number of rows, and sorting, comparing and picking take
# two dozen calls: 90 us for 10 rows of (bigint, string), out of 400 us for a whole small commit. Python tuples take 25 us. This is the only
# place that handles rows as Python values.

#: Larger tables are left to Arrow. Measured on (bigint, string): 27 us against 90 us at 10 rows, 50 us against 92 us at 100, equal at 256.
ROWS_MAX = 128

_INT64 = range(-(2**63), 2**63)
_AS_WHOLE_NUMBERS = {pa.date32().id: pa.int32(), pa.timestamp("us").id: pa.int64()}
_FLOATS = {pa.float32().id, pa.float64().id}
#: Python compares these types as Arrow does. For strings, code point order is UTF-8 order.
_AS_THEY_ARE = {
    data_type.id for data_type in (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.string(), pa.binary())
}


def consolidate_small(table: pa.Table) -> pa.Table | None:
    """Like `consolidate`, for a few rows. Returns None when the kernels must do it: there are too many rows, or a column has values that
    Python would order or rewrite differently (zeros and NaN among floats, decimals, nested structs).

    Returns the table itself when its rows are already consolidated. Raises InvariantViolated when a sum of diffs overflows int64.
    """
    if not 0 < table.num_rows <= ROWS_MAX:
        return None
    batches = (table if table.column(0).num_chunks == 1 else table.combine_chunks()).to_batches()
    if len(batches) != 1:
        return None
    batch = batches[0]
    columns: list[list[Any]] = []
    for name in ORDER_COLUMNS:
        column = batch.column(name)
        for leaf in column.flatten() if isinstance(column, pa.StructArray) else (column,):
            values = _comparable(leaf)
            if values is None:
                return None
            columns.append(values)
    return _consolidated(table, batch, list(zip(*columns, strict=True)))


def _consolidated(table: pa.Table, batch: pa.RecordBatch, rows: list[tuple[Any, ...]]) -> pa.Table:
    diffs: list[int] = batch.column("diff").to_pylist()
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if len(set(rows)) == len(rows) and 0 not in diffs:  # the usual commit, which has nothing to add up
        if order == list(range(len(rows))):
            return table
        return pa.Table.from_batches([batch.take(pa.array(order, pa.int64()))])
    kept: list[int] = []
    sums: list[int] = []
    for index in order:
        if kept and rows[index] == rows[kept[-1]]:
            sums[-1] += diffs[index]
        else:
            kept.append(index)
            sums.append(diffs[index])
    if any(total not in _INT64 for total in sums):
        raise InvariantViolated("diffs sum to more than int64 holds")
    kept = [index for index, total in zip(kept, sums, strict=True) if total]
    sums = [total for total in sums if total]
    out = pa.Table.from_batches([batch.take(pa.array(kept, pa.int64()))])
    index = batch.schema.get_field_index("diff")
    return out.set_column(index, batch.schema.field(index), pa.chunked_array([pa.array(sums, pa.int64())]))


def _comparable(column: pa.Array) -> list[Any] | None:
    """The values in a form that Python orders as Arrow does, nulls last; None when it would not."""
    kind = column.type.id
    if kind in _AS_WHOLE_NUMBERS:
        column = column.view(_AS_WHOLE_NUMBERS[kind])
    elif kind in _FLOATS:
        values = column.to_pylist()
        # In Python, NaN differs from itself and zeros keep their sign. So leave these to the kernels, which write the canonical values.
        return None if any(value is None or value != value or value == 0 for value in values) else values  # noqa: PLR0124
    elif kind not in _AS_THEY_ARE:
        return None
    values = column.to_pylist()
    return [(value is None, value) for value in values] if column.null_count else values
