"""Updates as the flat columns that order and equality are defined on.

Arrow can neither sort nor compare structs. `flatten_columns` lays `key`, `val` and `time` out as plain columns, depth
first; a struct that may be null is preceded by a column that says whether it is, so that a null struct and a struct
of nulls differ. Order and equality of rows are those of these columns, from the first to the last: nulls last and
equal, NaN after all numbers and equal, -0.0 equal to 0.0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

#: What rows are ordered by, in this order. `diff` is what they hold.
ORDER_COLUMNS = ("key", "val", "time")


def empty_struct(rows: int) -> pa.Array:
    """`rows` valid values of the struct without fields: what `val` holds when the value schema is empty."""
    return pa.Array.from_buffers(pa.struct([]), rows, [None], children=[])


def flatten_columns(table: pa.Table, names: tuple[str, ...] = ORDER_COLUMNS) -> list[pa.ChunkedArray]:
    """The columns that rows of `table` are compared by, in order of weight. Zero-copy but for floats (one zero, one
    NaN).

    The number and meaning of the columns depend on the schema only, never on the rows: columns of two tables of one
    schema compare.
    """
    out: list[pa.ChunkedArray] = []
    for name in names:
        column = table.column(name)
        for child in column.flatten() if pa.types.is_struct(column.type) else [column]:
            _flatten_into(out, child)
    return out


def _flatten_into(out: list[pa.ChunkedArray], column: pa.ChunkedArray) -> None:
    if pa.types.is_struct(column.type):
        out.append(column.is_null())
        for child in column.flatten():
            _flatten_into(out, child)
    else:
        out.append(canonical_floats(column))


def canonical_floats(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with 0.0 for -0.0 and one bit pattern for all NaN; as it is when it holds no floats."""
    if pa.types.is_floating(column.type):
        plus_zero = pc.add(column, pa.scalar(0.0, column.type))
        return pc.if_else(pc.is_nan(plus_zero), pa.scalar(float("nan"), column.type), plus_zero)
    if not _holds_floats(column.type):
        return column
    return pa.chunked_array([_canonical_struct(chunk) for chunk in column.chunks], column.type)


def _holds_floats(data_type: pa.DataType) -> bool:
    if pa.types.is_struct(data_type):
        return any(_holds_floats(child.type) for child in data_type)
    return bool(pa.types.is_floating(data_type))


def _canonical_struct(array: pa.StructArray) -> pa.StructArray:
    children = [canonical_floats(pa.chunked_array([array.field(index)])) for index in range(array.type.num_fields)]
    merged = [child.combine_chunks() for child in children]
    return pa.StructArray.from_arrays(
        merged, fields=list(array.type), mask=array.is_null() if array.null_count else None
    )


def compare_adjacent(columns: list[pa.ChunkedArray], rows: int) -> tuple[bool, Bools]:
    """Whether rows lie in order, and for each row but the first whether it equals the one before.

    When they do not lie in order, the second answer is worthless. One pass over as few columns as decide.
    """
    equal = np.ones(max(rows - 1, 0), dtype=np.bool_)
    for column in columns:
        if not equal.any():
            break
        greater, same = _adjacent(column)
        if (equal & greater).any():
            return False, equal
        equal &= same
    return True, equal


def _adjacent(column: pa.ChunkedArray) -> tuple[Bools, Bools]:
    """(previous > this, previous == this) for each row but the first, under the order of the module's head."""
    before, after = column.slice(0, len(column) - 1), column.slice(1)
    if column.null_count == 0 and not pa.types.is_floating(column.type):
        return _bools(pc.greater(before, after)), _bools(pc.equal(before, after))
    before_rank, after_rank = _rank(before), _rank(after)
    plain = (before_rank == 0) & (after_rank == 0)
    greater = (before_rank > after_rank) | (plain & _bools(pc.greater(before, after)))
    same = (before_rank == after_rank) & (~plain | _bools(pc.equal(before, after)))
    return greater, same


def _rank(column: pa.ChunkedArray) -> npt.NDArray[np.int8]:
    """0 an ordinary value, 1 NaN, 2 null."""
    rank = _bools(column.is_null()).astype(np.int8) * 2
    if pa.types.is_floating(column.type):
        rank += _bools(pc.is_nan(column)).astype(np.int8)
    return rank


def _bools(column: pa.ChunkedArray) -> Bools:
    filled: Bools = pc.fill_null(column, False).to_numpy()  # noqa: FBT003 - Arrow's own signature
    return filled


def order_indices(columns: list[pa.ChunkedArray], rows: int) -> Indices:
    """Row numbers in order. A leading column of whole numbers is sorted alone, and only rows that tie on it are
    sorted by the rest: measured on 1M rows of (bigint, string, time): 0.2 s against 0.7 s for Arrow's sort by three
    keys.
    """
    if not columns:
        return np.arange(rows, dtype=np.int64)
    lead = columns[0]
    if not _is_whole(lead.type) or lead.null_count:
        return _arrow_indices(columns)
    values = (
        lead.cast(pa.int64()) if pa.types.is_temporal(lead.type) and lead.type.bit_width == 64 else lead
    ).to_numpy()
    order: Indices = np.argsort(values, kind="stable")
    ordered = values[order]
    ties = ordered[1:] == ordered[:-1]
    if len(columns) == 1 or not ties.any():
        return order
    tied = np.append(ties, False) | np.insert(ties, 0, False)
    tied_rows = order[tied]
    picked = pa.array(tied_rows)
    order[tied] = tied_rows[_arrow_indices([column.take(picked) for column in columns])]
    return order


def _is_whole(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(data_type) or pa.types.is_timestamp(data_type))


def _arrow_indices(columns: list[pa.ChunkedArray]) -> Indices:
    names = [str(index) for index in range(len(columns))]
    table = pa.table(columns, names=names)
    keys = [(name, "ascending") for name in names]
    indices: Indices = pc.sort_indices(table, sort_keys=keys).to_numpy().astype(np.int64)  # nulls at the end by default
    return indices
