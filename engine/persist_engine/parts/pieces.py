"""The union of a few consolidated tables, consolidated.

    large    1a  2a  3a  4a  5a              gone     2a  5a             left in their order, the
    others     2a-1 2b+1  3.5c+1  5a-1       rest     2b  3.5c           rest between them         1a  2b  3a  3.5c  4a

Usually one table has most rows, and the others are commits since. Then most rows have keys that the others lack, and
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
    Bools,
    Indices,
    flat_columns,
    is_whole,
    same_pairs,
    whole,
)
from persist_engine.rows.sorting import order_and_equal
from persist_engine.rows.updates import consolidate_small, rows_at, summed, sums_of_groups

#: A table is large when it has at least so many rows for each of the others. With less, sorting all is as fast.
LARGE_FACTOR = 2
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
    table = pa.concat_tables([large, *others])
    times = table.column("time").to_numpy()
    if (times != times[0]).any():  # then few rows cancel
        return None
    places = _places(large, table.slice(large.num_rows))
    if places is None:
        return None
    joined = table.combine_chunks() if places.is_met.any() else table
    left, gone = _retracted(joined, large.num_rows, places)
    if left[places.starts[places.is_met]].any():
        return None
    rest = _rest(joined, large.num_rows, places, np.flatnonzero(~gone))
    if rest is None:
        return None
    order = _between(left, large.num_rows + rest, places.starts[rest])
    uncopied = _stretches(table, order, STRETCHES_MAX)
    return rows_at(joined, order) if uncopied is None else uncopied


def _retracted(table: pa.Table, rows: int, places: _Places) -> tuple[Bools, Bools]:
    """Which of the first `rows` of `table` are left when the others retract what they can, and which of the others do so."""
    left, gone = np.ones(rows, np.bool_), np.zeros(table.num_rows - rows, np.bool_)
    at = np.flatnonzero(places.is_met)
    diffs = table.column("diff").to_numpy()
    at = at[diffs[rows + at] == -diffs[places.starts[at]]]
    if len(at):
        at = at[same_pairs(table, places.starts[at], rows + at, ("key", "val"))]
        met, first = np.unique(places.starts[at], return_index=True)  # a row can be retracted once
        left[met] = False
        gone[at[first]] = True
    return left, gone


def _rest(table: pa.Table, rows: int, places: _Places, rest: Indices) -> Indices | None:
    """Which of the rows `rest` behind the first `rows` of `table` remain when they are consolidated, in order. None when some of them add
    up to another diff.
    """
    order = rest[np.argsort(places.ranks[rest], kind="stable")]
    tie = places.ranks[order[1:]] == places.ranks[order[:-1]]
    if not tie.any():
        return order
    is_tied = np.append(tie, False) | np.insert(tie, 0, False)
    tied = order[is_tied]
    few = rows_at(table, rows + tied)
    by, equal = order_and_equal(flat_columns(few, ("key", "val")), few.num_rows)
    diffs = few.column("diff").to_numpy()[by]
    starts = np.flatnonzero(np.insert(~equal, 0, True))
    sums = sums_of_groups(diffs, starts)
    if ((sums != 0) & (sums != diffs[starts])).any():
        return None
    remaining = np.concatenate([order[~is_tied], tied[by[starts[sums != 0]]]])
    merged: Indices = remaining[np.argsort(places.ranks[remaining], kind="stable")]
    return merged


def _between(left: Bools, rest: Indices, places: Indices) -> Indices:
    """The rows that are `left` of a table, and the rows `rest`, of which each goes before the first row at its place. Places ascend."""
    before = np.concatenate([[0], np.cumsum(left)])
    is_rest = np.zeros(int(before[-1]) + len(rest), np.bool_)
    is_rest[before[places] + np.arange(len(rest))] = True
    order = np.empty(len(is_rest), np.int64)
    order[is_rest] = rest
    order[~is_rest] = np.flatnonzero(left)
    return order


def _stretches(table: pa.Table, order: Indices, most: int) -> pa.Table | None:
    """The rows in `order`, uncopied, if they are at most so many stretches of `table`."""
    ends = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
    if len(ends) >= most or not len(order):
        return None
    bounds = itertools.pairwise([0, *ends.tolist(), len(order)])
    return pa.concat_tables([table.slice(int(order[start]), end - start) for start, end in bounds])


class _Places(NamedTuple):
    """Where rows belong in a large table: each before the row at its start, which has the same first key field if `is_met`. Their ranks
    rise and tie as their first key fields do.
    """

    starts: Indices
    is_met: Bools
    ranks: Indices


def _places(large: pa.Table, others: pa.Table) -> _Places | None:
    """The places of `others`. None when several rows of `large` have the first key field of one of them, and for values that cannot be
    searched: nulls, and types that are ordered in another way than Arrow's.
    """
    there, sought = (next(flat_columns(table, ("key",)), None) for table in (large, others))
    if there is None or sought is None or there.null_count or sought.null_count:
        return None
    if is_whole(there.type):
        values, wanted = whole(there), whole(sought)
        starts, last = np.searchsorted(values, wanted), len(values) - 1
        is_met = values[np.minimum(starts, last)] == wanted
        following = starts[is_met] + 1
        is_repeated = values[np.minimum(following, last)] == wanted[is_met]
        if (is_repeated & (following <= last)).any():
            return None
        return _Places(starts, is_met, wanted.astype(np.int64, copy=False))
    if pa.types.is_string(there.type) or pa.types.is_binary(there.type):
        starts, ends = (
            pc.search_sorted(there, sought, side=side).to_numpy().astype(np.int64) for side in ("left", "right")
        )
        if (ends - starts > 1).any():
            return None
        ranks = pc.rank(sought, sort_keys="ascending", tiebreaker="dense").to_numpy().astype(np.int64)
        return _Places(starts, ends > starts, ranks)
    return None
