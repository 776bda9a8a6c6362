"""The union of a few consolidated tables, consolidated.

    large    1a  2a  3a  4a  5a              gone     2a  5a             left in their order, the
    others     2a-1 2b+1  3.5c+1  5a-1       rest     2b  3.5c           rest between them         1a  2b  3a  3.5c  4a

Usually one table has nearly all rows, and the others are a few small commits since. Then most rows have keys that the others lack, and
stay as they are. Where the others have a key, they usually retract its row, as an upsert and a delete do. If they retract every such row,
the rest is put in its places, and the large table is not sorted. In all other cases, all rows are sorted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import (
    ORDER_COLUMNS,
    Bools,
    Indices,
    flat_columns,
    is_whole,
    same_rows,
    whole,
)
from persist_engine.rows.sorting import order_and_equal
from persist_engine.rows.updates import consolidate_small, rows_at, summed

#: A table is large when it has at least so many rows for each of the others. With less, sorting all is as fast.
LARGE_FACTOR = 16
#: Fewer rows are all sorted: that takes fewer calls.
LARGE_ROWS_MIN = 4096
#: Rows that stay in so few stretches are not copied. More of them would cost a consumer more than their copy.
STRETCHES_MAX = 16


def consolidate_pieces(pieces: Sequence[pa.Table]) -> pa.Table:
    """`consolidate` for the rows of at least one table, each of which came from it or from `consolidate_sorted`. Copies nothing when they
    are disjoint ranges.
    """
    if len(pieces) == 1:
        return pieces[0]
    table = pa.concat_tables(pieces)
    if (few := consolidate_small(table)) is not None:
        return few
    at = max(range(len(pieces)), key=lambda index: pieces[index].num_rows)
    large_rows = pieces[at].num_rows
    if large_rows >= max(LARGE_ROWS_MIN, LARGE_FACTOR * (table.num_rows - large_rows)):
        others = [piece for piece in (*pieces[:at], *pieces[at + 1 :]) if piece.num_rows]
        if not others:
            return pieces[at]
        patched = _patched(pieces[at], others)
        if patched is not None:
            return patched
    return _sorted(table, len(pieces))


def _sorted(table: pa.Table, pieces: int) -> pa.Table:
    """The union of so many tables, one after the other in `table`."""

    def columns() -> Iterator[pa.ChunkedArray]:
        nonlocal table
        yield from flat_columns(table, ("key",))
        table = table.combine_chunks()  # taking from many chunks is several times slower
        yield from flat_columns(table, ("val", "time"))

    order, equal = order_and_equal(columns(), table.num_rows, is_in_runs=True)
    if not equal.any() and (uncopied := _stretches(table, order, pieces)) is not None:
        return uncopied
    return summed(table, order, equal)


def _patched(large: pa.Table, others: Sequence[pa.Table]) -> pa.Table | None:
    """The union of `large` and others that retract each of its rows whose first key field they have. None when they do not."""
    left = np.ones(large.num_rows, np.bool_)
    is_met = np.zeros(large.num_rows, np.bool_)
    rest: list[pa.Table] = []
    for other in others:
        places = _places(large, other)
        if places is None:
            return None
        gone = _retracting(large, other, places, left)
        is_met[places.starts[places.is_met]] = True
        if not gone.all():
            rest.append(other.filter(pa.array(~gone)) if gone.any() else other)
    if (left & is_met).any():
        return None
    merged = consolidate_pieces(rest) if rest else large.slice(0, 0)
    places = _places(large, merged)
    assert places is not None, "values that were searched can be searched"
    return _between(large, left, merged, places.starts)


def _retracting(large: pa.Table, other: pa.Table, places: _Places, left: Bools) -> Bools:
    """Which rows of `other` retract a row of `large` that is `left`. Such a row no longer is when this returns."""
    gone = np.zeros(other.num_rows, np.bool_)
    at = np.flatnonzero(places.is_met)
    diffs = large.column("diff").to_numpy()[places.starts[at]]
    at = at[(other.column("diff").to_numpy()[at] == -diffs) & left[places.starts[at]]]
    if len(at):
        met = places.starts[at]
        same = same_rows(_few_at(large, met), _few_at(other, at), ORDER_COLUMNS)
        gone[at[same]] = True
        left[met[same]] = False
    return gone


def _few_at(table: pa.Table, indices: Indices) -> pa.Table:
    """Rows by index, of which there are few: does not join the chunks of all of them."""
    picked = pa.array(indices)
    if all(column.num_chunks == 1 for column in table.columns):
        return rows_at(table, indices)
    return table.take(picked)


def _between(large: pa.Table, left: Bools, rest: pa.Table, places: Indices) -> pa.Table:
    """The rows of `large` that are `left`, and the rest, of which each goes before the row of `large` at its place. Places ascend."""
    before = np.concatenate([[0], np.cumsum(left)])
    is_rest = np.zeros(int(before[-1]) + rest.num_rows, np.bool_)
    is_rest[before[places] + np.arange(rest.num_rows)] = True
    order = np.empty(len(is_rest), np.int64)
    order[is_rest] = np.arange(large.num_rows, large.num_rows + rest.num_rows)
    order[~is_rest] = np.flatnonzero(left)
    table = pa.concat_tables([large, rest])
    uncopied = _stretches(table, order, STRETCHES_MAX)
    return rows_at(table, order) if uncopied is None else uncopied


def _stretches(table: pa.Table, order: Indices, most: int) -> pa.Table | None:
    """The rows in `order`, uncopied, if they are at most so many stretches of `table`."""
    ends = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
    if len(ends) >= most or not len(order):
        return None
    bounds = itertools.pairwise([0, *ends.tolist(), len(order)])
    return pa.concat_tables([table.slice(int(order[start]), end - start) for start, end in bounds])


class _Places(NamedTuple):
    """Where rows belong in a large table: each before the row at its start, which has the same first key field if `is_met`."""

    starts: Indices
    is_met: Bools


def _places(large: pa.Table, others: pa.Table) -> _Places | None:
    """The places of `others`. None when several rows of `large` have the first key field of one of them, and for values that cannot be
    searched: nulls, and types that are ordered in another way than Arrow's.
    """
    there, sought = (next(flat_columns(table, ("key",)), None) for table in (large, others))
    if there is None or sought is None or there.null_count or sought.null_count:
        return None
    if is_whole(there.type):
        values, wanted = whole(there), whole(sought)
        starts, ends = (np.searchsorted(values, wanted, side) for side in ("left", "right"))
    elif pa.types.is_string(there.type) or pa.types.is_binary(there.type):
        starts, ends = (
            pc.search_sorted(there, sought, side=side).to_numpy().astype(np.int64) for side in ("left", "right")
        )
    else:
        return None
    return _Places(starts, ends > starts) if (ends - starts <= 1).all() else None
