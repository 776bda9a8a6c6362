"""Consolidation of a few rows, by Python's own sort: what `updates.consolidate` does by Arrow's kernels for many.

A kernel call costs 3 to 20 us whatever it is given, and sorting, comparing and picking take two dozen of them: 90 us
for 10 rows of (bigint, string), where a whole small commit has 400. Rows as Python tuples take 25 us and lose from some
250 rows on: so this is the one place where rows are handled as Python values, and `ROWS_MAX` bounds it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from persist_engine.base.errors import InvariantViolated
from persist_engine.rows.columns import ORDER_COLUMNS

#: More rows are left to Arrow. Measured on (bigint, string): 27 against 90 us at 10 rows, 50 against 92 at 100, equal
#: at 256.
ROWS_MAX = 128

_INT64 = range(-(2**63), 2**63)
_AS_WHOLE_NUMBERS = {pa.date32().id: pa.int32(), pa.timestamp("us").id: pa.int64()}
_FLOATS = {pa.float32().id, pa.float64().id}
#: Python compares these as Arrow does; strings too: code points are ordered as their UTF-8.
_AS_THEY_ARE = {
    data_type.id for data_type in (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.string(), pa.binary())
}


def consolidate_small(table: pa.Table) -> pa.Table | None:
    """`updates.consolidate(table)`, or None when it must be asked: too many rows, or a column whose values Python
    would order or rewrite otherwise (zeros and NaN among floats, decimals, nested structs).

    The table itself when its rows are consolidated already. InvariantViolated when a sum of diffs leaves int64.
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
    if len(set(rows)) == len(rows) and 0 not in diffs:  # the usual commit: nothing to add up
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
    """The values as Python orders them, nulls last; None when it would not order them as Arrow does."""
    kind = column.type.id
    if kind in _AS_WHOLE_NUMBERS:
        column = column.view(_AS_WHOLE_NUMBERS[kind])
    elif kind in _FLOATS:
        values = column.to_pylist()
        # NaN is equal to itself here, and has one zero: the kernels write the canonical ones.
        return None if any(value is None or value != value or value == 0 for value in values) else values  # noqa: PLR0124
    elif kind not in _AS_THEY_ARE:
        return None
    values = column.to_pylist()
    return [(value is None, value) for value in values] if column.null_count else values
