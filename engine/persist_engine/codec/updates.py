"""Laws of updates as pure functions over Arrow tables of `Schema.updates_schema`: order, consolidation, time.

A row says: at `time` the multiplicity of (key, val) changes by `diff`. Order of rows: the fields of key, then of val
(structs depth first), then time; nulls last, NaN after numbers. A collection knows one zero and one NaN: -0.0 and 0.0
are the same key (as Spark groups them), and `consolidate` writes the canonical one, so that what a reader sees never
depends on how rows were grouped before. Encoding keeps every bit.

Everything is vectorised; nothing here loops over rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated
from persist_engine.codec.columns import Indices, canonical_floats, compare_adjacent, flatten_columns, order_indices
from persist_engine.codec.ingest import normalise
from persist_engine.codec.small import ROWS_MAX, consolidate_small
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain

__all__ = ["advance_times", "consolidate", "diffs_sum", "is_consolidated", "normalise", "sort", "time_filter"]

_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1
_INT64_MAX = 2**63 - 1


def sort(table: pa.Table) -> pa.Table:
    """The same rows in order; the table itself when they are already."""
    columns = flatten_columns(table)
    in_order, _ = compare_adjacent(columns, table.num_rows)
    return table if in_order else _pick(table, order_indices(columns, table.num_rows))


def is_consolidated(table: pa.Table) -> bool:
    """Whether rows lie in order, no two have the same (key, val, time), and no diff is zero."""
    in_order, equal = compare_adjacent(flatten_columns(table), table.num_rows)
    return in_order and not equal.any() and not (_diffs(table) == 0).any()


def consolidate(table: pa.Table) -> pa.Table:
    """In order, one row for each (key, val, time) with the sum of diffs, zeros dropped, floats canonical. Idempotent.

    InvariantViolated when a sum leaves int64. Sorted input without duplicates is recognised in one pass and not sorted.
    """
    if (few := consolidate_small(table)) is not None:
        return few
    table = _with_canonical_floats(table)
    columns = flatten_columns(table)
    in_order, equal = compare_adjacent(columns, table.num_rows)
    if not in_order:
        table = _pick(table, order_indices(columns, table.num_rows))
        _, equal = compare_adjacent(flatten_columns(table), table.num_rows)
    diffs = _diffs(table)
    if not equal.any():
        keep = diffs != 0
        return table if keep.all() else table.filter(pa.array(keep))
    starts = np.flatnonzero(np.insert(~equal, 0, True))
    sums = _sums(diffs, starts)
    live = sums != 0
    out = _pick(table, starts[live])
    return out.set_column(
        out.schema.get_field_index("diff"), table.schema.field("diff"), pa.chunked_array([pa.array(sums[live])])
    )


def diffs_sum(table: pa.Table) -> int:
    """Sum of all diffs. InvariantViolated when it leaves int64."""
    diffs = _diffs(table)
    if len(diffs) <= ROWS_MAX:
        total: int = sum(diffs.tolist())
        if not -_INT64_MAX - 1 <= total <= _INT64_MAX:
            raise InvariantViolated("diffs sum to more than int64 holds")
        return total
    return int(_sums(diffs, np.zeros(1, dtype=np.int64))[0])


def advance_times(table: pa.Table, frontier: Antichain) -> pa.Table:
    """Each time as it is indistinguishable from beyond `frontier`: max(time, frontier).

    The empty frontier distinguishes nothing: no rows are left. Beyond int64 the greatest data time stands in; no
    update lies past it.
    """
    if frontier.time is None:
        return table.slice(0, 0)
    index = table.schema.get_field_index("time")
    times = table.column(index)
    floor = pa.scalar(min(frontier.time, DATA_TIME_MAX), pa.int64())
    if table.num_rows == 0 or pc.min(times).as_py() >= floor.as_py():
        return table
    return table.set_column(index, table.schema.field(index), pc.max_element_wise(times, floor))


def time_filter(table: pa.Table, lower: Antichain, upper: Antichain) -> pa.Table:
    """Rows with a time at or beyond `lower` and not at or beyond `upper`; the table itself when that is all of them."""
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


def _diffs(table: pa.Table) -> npt.NDArray[np.int64]:
    diffs: npt.NDArray[np.int64] = table.column("diff").to_numpy()
    return diffs


def _pick(table: pa.Table, indices: Indices) -> pa.Table:
    """Rows by number. Chunks are joined first: taking from many chunks is several times slower."""
    return table.combine_chunks().take(pa.array(indices))


def _with_canonical_floats(table: pa.Table) -> pa.Table:
    for index, name in enumerate(table.column_names):
        if name in {"key", "val"}:
            column = table.column(index)
            canonical = canonical_floats(column)
            if canonical is not column:
                table = table.set_column(index, table.schema.field(index), canonical)
    return table


def _sums(diffs: npt.NDArray[np.int64], starts: Indices) -> npt.NDArray[np.int64]:
    """Sum of each group [starts[i], starts[i+1]); InvariantViolated when one leaves int64.

    numpy wraps silently, so diffs are added as two halves of 32 bits unless they are too small, all together, to
    overflow.
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
