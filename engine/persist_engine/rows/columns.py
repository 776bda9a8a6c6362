"""Updates laid out as the flat columns that define order and equality.

Arrow can neither sort nor compare structs. `flatten_columns` lays `key`, `val` and `time` out as plain columns, depth
first. A nullable struct is preceded by a column that holds its validity, so that a null struct differs from a struct of
nulls. Rows are ordered and compared by these columns, from the first to the last. Nulls sort last and equal each other.
NaN sorts after all numbers and equals NaN. -0.0 equals 0.0. A list or a map is one column of bytes (`rows.nested.ordered`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import check
from persist_engine.rows.nested.layout import has_required, is_list, mapped, values_type
from persist_engine.rows.nested.ordered import ordered

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

#: Rows are ordered by these columns, in this sequence. `diff` takes no part in the order.
ORDER_COLUMNS = ("key", "val", "time")
#: Rows that are undecided are copied when the column has at least this many times as many rows, because comparing all of them costs more.
_FEW_FACTOR = 8
#: The length of a shared array. It covers a row group or one round of a merge, and takes 2 MiB for each of at most eight values.
_SHARED_ROWS_MAX = 1 << 18


def empty_struct(rows: int) -> pa.Array:
    """`rows` valid values of the struct without fields. `val` holds these when the value schema is empty."""
    return pa.Array.from_buffers(pa.struct([]), rows, [None], children=[])


def constant(value: int, rows: int) -> pa.Array:
    """An array with `rows` copies of one int64. Arrays of up to `_SHARED_ROWS_MAX` rows share one buffer. So the times of one
    as_of, and the diffs of inserts, take no memory and no time to write in each table.
    """
    if rows > _SHARED_ROWS_MAX:
        return pa.array(np.full(rows, value, dtype=np.int64))
    return _shared(value, max(0, rows - 1).bit_length()).slice(0, rows)


@lru_cache(maxsize=8)
def _shared(value: int, size_bits: int) -> pa.Array:
    return pa.array(np.full(1 << size_bits, value, dtype=np.int64))


def flatten_columns(table: pa.Table, names: tuple[str, ...] = ORDER_COLUMNS) -> list[pa.ChunkedArray]:
    """The columns by which rows of `table` are compared, most significant first. Zero-copy except for floats, which get
    one zero and one NaN, and for lists and maps.

    The number and meaning of the columns depend only on the schema. Columns of two tables of one schema can therefore
    be compared.
    """
    return list(flat_columns(table, names))


def flat_columns(table: pa.Table, names: tuple[str, ...] = ORDER_COLUMNS) -> Iterator[pa.ChunkedArray]:
    """The columns of `flatten_columns`, each made when it is requested, because the first ones often decide."""
    for name in names:
        column = table.column(name)
        for child in column.flatten() if pa.types.is_struct(column.type) else [column]:
            yield from _flat(child)


def _flat(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    if pa.types.is_struct(column.type):
        yield column.is_null()
        for child in column.flatten():
            yield from _flat(child)
    elif is_list(column.type):
        yield ordered(column)
    else:
        yield canonical_floats(column)


def canonical_floats(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with 0.0 for -0.0 and one bit pattern for all NaN. Returns the column itself when it is like that already."""
    if pa.types.is_floating(column.type):
        if all(map(_is_canonical, column.chunks if isinstance(column, pa.ChunkedArray) else [column])):
            return column
        plus_zero = pc.add(column, pa.scalar(0.0, column.type))
        return pc.if_else(pc.is_nan(plus_zero), pa.scalar(float("nan"), column.type), plus_zero)
    if not _holds_floats(column.type):
        return column
    chunks = [_canonical(chunk) for chunk in column.chunks]
    is_same = all(ours is theirs for ours, theirs in zip(chunks, column.chunks, strict=True))
    return column if is_same else pa.chunked_array(chunks, column.type)


def _is_canonical(floats: pa.Array) -> bool:
    """Whether the values are known to be canonical already. This makes two passes without a copy, which decide most columns."""
    if floats.null_count:
        return False
    values = floats.to_numpy()
    bits = values.view(f"u{values.itemsize}")
    sign = bits.dtype.type(1 << (8 * values.itemsize - 1))
    return not (bits == sign).any() and not np.isnan(values).any()


def _holds_floats(data_type: pa.DataType) -> bool:
    if pa.types.is_struct(data_type):
        return any(_holds_floats(child.type) for child in data_type)
    if is_list(data_type):
        return _holds_floats(values_type(data_type))
    return bool(pa.types.is_floating(data_type))


def _canonical(array: pa.Array) -> pa.Array:
    if is_list(array.type):
        return mapped(array, array.type, _canonical)
    if not pa.types.is_struct(array.type):
        column = pa.chunked_array([array])
        canonical = canonical_floats(column)
        return array if canonical is column else canonical.combine_chunks()
    fields = [array.field(index) for index in range(array.type.num_fields)]
    children = [_canonical(field) for field in fields]
    if all(ours is theirs for ours, theirs in zip(children, fields, strict=True)):
        return array
    return pa.StructArray.from_arrays(
        children, fields=list(array.type), mask=array.is_null() if array.null_count else None
    )


def field_of(array: pa.StructArray, index: int, wanted: pa.DataType) -> pa.Array:
    """A field of `array`, to be converted to `wanted`. The bytes under a null struct are not values and may not fit `wanted`. Where that
    could matter, the returned field is null under null structs.
    """
    values = array.field(index)
    is_fitting = values.type == wanted and not has_required(wanted)
    return values if is_fitting or not array.null_count else array.flatten()[index]


def storable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in a form that Parquet accepts: see `without_hidden_nulls`."""
    if not pa.types.is_struct(column.type):
        return column
    return pa.chunked_array([without_hidden_nulls(chunk) for chunk in column.chunks], column.type)


def without_hidden_nulls(array: pa.StructArray, there: pa.Array | None = None) -> pa.StructArray:
    """The same values without nulls in NOT NULL fields of null structs. These nulls have no meaning, but Parquet refuses
    them. `there` is true where all structs around `array` are not null; None means everywhere.

    Raises InvariantViolated for a null in a NOT NULL field whose surrounding structs are all not null.
    """
    present = array.is_valid() if there is None else pc.and_(there, array.is_valid())
    children: list[pa.Array] = []
    for index, field in enumerate(array.type):
        child = array.field(index)
        if pa.types.is_struct(field.type):
            child = without_hidden_nulls(child, present)
        if child.null_count and not field.nullable:
            check(not pc.any(pc.and_(child.is_null(), present)).as_py(), f"NOT NULL field {field.name} holds nulls")
            child = _all_valid(child)
        children.append(child)
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(array.type), mask=mask)


def _all_valid(array: pa.Array) -> pa.Array:
    """The array with its validity removed: the bytes under former nulls become values."""
    if pa.types.is_struct(array.type):
        children = [array.field(index) for index in range(array.type.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(array.type))
    if is_list(array.type):
        buffers, values = [None, array.buffers()[1]], [array.values]
        return pa.Array.from_buffers(array.type, len(array), buffers, 0, array.offset, children=values)
    _, *data = array.buffers()
    return pa.Array.from_buffers(array.type, len(array), [None, *data], null_count=0, offset=array.offset)


def same_rows(left: pa.Table, right: pa.Table, names: tuple[str, ...]) -> Bools:
    """For each index, whether the two tables, which have one length, have equal rows there. Null equals null, NaN equals NaN, -0.0 equals
    0.0.
    """
    same = np.ones(left.num_rows, np.bool_)
    for one, other in zip(flat_columns(left, names), flat_columns(right, names), strict=True):
        if not one.equals(other):  # a fast check that compares whole buffers
            same &= _same_values(one, other)
    return same


def same_pairs(table: pa.Table, one: Indices, other: Indices, names: tuple[str, ...]) -> Bools:
    """For each i, whether the rows one[i] and other[i] of `table` are equal, as in `same_rows`."""
    same = np.ones(len(one), np.bool_)
    ours, theirs = pa.array(one), pa.array(other)
    for column in flat_columns(table, names):
        same &= _same_values(column.take(ours), column.take(theirs))
    return same


def same_as_before(columns: Iterable[pa.ChunkedArray], rows: int) -> Bools:
    """For each row but the first, whether it equals the row before. Reads only as many columns as decide the result."""
    same = np.ones(max(rows - 1, 0), np.bool_)
    for column in columns:
        left = np.flatnonzero(same)
        if not len(left):
            break
        if _FEW_FACTOR * len(left) < rows:
            same[left] = _same_values(column.take(pa.array(left)), column.take(pa.array(left + 1)))
        else:
            same &= _same_values(column.slice(0, rows - 1), column.slice(1))
    return same


def _same_values(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Bools:
    if not one.null_count and not other.null_count and is_whole(one.type):
        equal_numbers: Bools = whole(one) == whole(other)
        return equal_numbers
    equal = pc.equal(one, other)
    if pa.types.is_floating(one.type):
        equal = pc.or_kleene(equal, pc.and_kleene(pc.is_nan(one), pc.is_nan(other)))
    if one.null_count or other.null_count:
        equal = pc.or_(pc.fill_null(equal, False), pc.and_(pc.is_null(one), pc.is_null(other)))  # noqa: FBT003 - Arrow's own signature
    same: Bools = equal.to_numpy()
    return same


def compare_adjacent(columns: Iterable[pa.ChunkedArray], rows: int) -> tuple[bool, Bools]:
    """Returns whether the rows are in order and, for each row but the first, whether it equals the row before.

    The second answer is meaningless when the rows are not in order. Reads only as many columns as decide the result.
    Columns after the first are compared only for rows that are still equal.
    """
    equal = np.zeros(max(rows - 1, 0), dtype=np.bool_)
    if rows < 2:
        return True, equal
    undecided: Indices | None = None  # the rows that equal the row after them in all columns so far; None means all
    for column in columns:
        if undecided is None and _rises_strictly(column):
            return True, equal
        before, after = _pairs(column, undecided)
        greater, same = _compared(before, after)
        if greater.any():
            return False, equal
        undecided = np.flatnonzero(same) if undecided is None else undecided[same]
        if not len(undecided):
            return True, equal
    equal[slice(None) if undecided is None else undecided] = True
    return True, equal


def _rises_strictly(column: pa.ChunkedArray) -> bool:
    """Whether each value is less than the next. Returns False for types that one pass cannot decide. The first column of most
    runs is strictly ascending, because each row has another key.
    """
    if column.null_count or not is_whole(column.type):
        return False
    values = whole(column)
    return bool((values[:-1] < values[1:]).all())


def _pairs(column: pa.ChunkedArray, undecided: Indices | None) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """The rows `undecided`, and the row after each: the two sides of the comparison."""
    if undecided is None or 2 * len(undecided) > len(column):
        before, after = column.slice(0, len(column) - 1), column.slice(1)
        if undecided is None or len(undecided) == len(before):
            return before, after
        mask = np.zeros(len(before), dtype=np.bool_)
        mask[undecided] = True
        picked = pa.array(mask)
        return before.filter(picked), after.filter(picked)
    return column.take(pa.array(undecided)), column.take(pa.array(undecided + 1))


def _compared(before: pa.ChunkedArray, after: pa.ChunkedArray) -> tuple[Bools, Bools]:
    """(before > after, before == after) for each row, in the order that the module docstring defines."""
    is_float = pa.types.is_floating(before.type)
    if before.null_count == 0 and after.null_count == 0 and not is_float:
        if is_whole(before.type):
            ours, theirs = whole(before), whole(after)
            return ours > theirs, ours == theirs
        return _bools(pc.greater(before, after)), _bools(pc.equal(before, after))
    before_rank, after_rank = _rank(before), _rank(after)
    plain = (before_rank == 0) & (after_rank == 0)
    greater = (before_rank > after_rank) | (plain & _bools(pc.greater(before, after)))
    same = (before_rank == after_rank) & (~plain | _bools(pc.equal(before, after)))
    return greater, same


def _rank(column: pa.ChunkedArray) -> npt.NDArray[np.int8]:
    """0 for an ordinary value, 1 for NaN, 2 for null."""
    rank = _bools(column.is_null()).astype(np.int8) * 2
    if pa.types.is_floating(column.type):
        rank += _bools(pc.is_nan(column)).astype(np.int8)
    return rank


def _bools(column: pa.ChunkedArray) -> Bools:
    filled: Bools = pc.fill_null(column, False).to_numpy()  # noqa: FBT003 - Arrow's own signature
    return filled


def is_whole(data_type: pa.DataType) -> bool:
    """Whether `whole` takes the type."""
    return bool(
        pa.types.is_signed_integer(data_type) or pa.types.is_timestamp(data_type) or pa.types.is_date32(data_type)
    )


def whole(column: pa.ChunkedArray) -> npt.NDArray[np.signedinteger]:
    """Integers, dates and timestamps as numpy integers. The column has no nulls."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int64() if column.type.bit_width == 64 else pa.int32())
    values: npt.NDArray[np.signedinteger] = column.to_numpy()
    return values


def text_offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    """The offset in the bytes of `array` at which each text or binary begins, and the end of the last one."""
    offsets: npt.NDArray[np.int32] = np.frombuffer(array.buffers()[1], np.int32)
    return offsets[array.offset : array.offset + len(array) + 1]
