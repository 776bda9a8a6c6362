"""Consolidates the union of a few consolidated tables.

    large    1a  2a  3a  4a  5a              chains   2a 2a-1 2b+1   3.5c+1   5a 5a-1
    others     2a-1 2b+1  3.5c+1  5a-1       ends     2b             3.5c     -          1a  2b  3a  3.5c  4a

Usually one table has most of the rows, and the others are later commits. Then most rows of the large table have keys that the others lack,
and stay as they are. A *field* here is a value of the first field of the key, which is searched in the large table. The rows of a field, in
the large table and then in one table after the other, usually form a *chain*: an existing row is retracted exactly before another one is
added, as upserts, deletes and overwrites do. Then only the last row is left, unless it is a retraction, and it takes the place of the
field. The rows of the other fields are sorted. If these are more than half of all rows, everything is sorted. So the work grows with the
number of rows that the other tables touch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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

Diffs = npt.NDArray[np.int64]

#: A table is large when it has at least this many times the rows of the others. Below that, sorting everything is as fast.
LARGE_FACTOR = 2
#: With fewer rows than this, everything is sorted, because that takes fewer calls.
LARGE_ROWS_MIN = 4096
#: Rows in at most this many stretches are not copied. More stretches would cost a consumer more than a copy.
STRETCHES_MAX = 16


def consolidate_pieces(pieces: Sequence[pa.Table]) -> pa.Table:
    """Like `consolidate`, for the union of at least one table. Each table must be a result of `consolidate` or `consolidate_sorted`. Copies
    nothing when the tables are disjoint ranges.
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
    """The consolidated union of `pieces` tables, which are concatenated in `table`."""

    def columns() -> Iterator[pa.ChunkedArray]:
        nonlocal table
        yield from flat_columns(table, ("key",))
        table = table.combine_chunks()  # because taking rows from many chunks is several times slower
        yield from flat_columns(table, ("val", "time"))

    order, equal = order_and_equal(columns(), table.num_rows, is_in_runs=True)
    if not equal.any() and (uncopied := _stretches(table, order, pieces)) is not None:
        return uncopied
    return summed(table, order, equal)


def _patched(large: pa.Table, others: Sequence[pa.Table]) -> pa.Table | None:
    """The consolidated union of `large` and `others`. Sorts only the rows of fields without a chain. None when these are more than half of
    all rows, and when `_fields` returns None.
    """
    table, rows = pa.concat_tables([large, *others]), large.num_rows
    diffs = table.column("diff").to_numpy()
    is_added = diffs[rows:] > 0
    # The turn of a row orders the rows of a field: by table, and within a table retractions before additions.
    turns = np.repeat(np.arange(0, 2 * len(others), 2), [each.num_rows for each in others]) + is_added
    fields = _fields(large, table.slice(rows), turns)
    if fields is None:
        return None
    order, of = rows + fields.order, fields.of
    if fields.counts.any() or len(fields.starts) < len(order):
        table = table.combine_chunks()
    has_chain = _have_chains(table, order, fields, diffs)
    is_end = has_chain[of] & is_added[fields.order] & np.append(of[1:] != of[:-1], True)
    rest, of_rest = order[is_end], of[is_end]
    if not has_chain.all():
        is_mixed, counts = ~has_chain, np.where(has_chain, 0, fields.counts)
        mixed = np.concatenate([_ranges(fields.starts, counts), order[is_mixed[of]]])
        if 2 * len(mixed) > table.num_rows:
            return None
        of_mixed = np.concatenate([np.repeat(np.arange(len(counts)), counts), of[is_mixed[of]]])
        table, kept = _summed_within(table, mixed)
        rest, of_rest = np.concatenate([rest, mixed[kept]]), np.concatenate([of_rest, of_mixed[kept]])
        by = np.argsort(of_rest, kind="stable")
        rest, of_rest = rest[by], of_rest[by]
    order = _placed(rows, rest, of_rest, fields)
    uncopied = _stretches(table, order, STRETCHES_MAX)
    return rows_at(table, order) if uncopied is None else uncopied


def _have_chains(table: pa.Table, order: Indices, fields: _Fields, diffs: Diffs) -> Bools:
    """For each field, whether its rows form a chain. `order` holds the indices in `table` of the rows of the other tables, by field and
    turn. `diffs` holds the diffs of `table`.

    In a chain, each retraction has the same key, value and time as the row before it, and cancels all of its diff. Each addition comes
    first or after a retraction. If the large table has one row of the field, this row precedes the others. If it has several, there is no
    chain.
    """
    of, is_retraction = fields.of, diffs[order] < 0
    firsts = np.flatnonzero(np.insert(of[1:] != of[:-1], 0, True))
    is_well = np.zeros(len(order), np.bool_)
    if is_retraction.any():
        times = table.column("time").to_numpy()
        before = np.insert(order[:-1], 0, 0)
        before[firsts] = np.where(fields.counts == 1, fields.starts, order[firsts])
        is_undone = (diffs[before] > 0) & (diffs[before] == -diffs[order]) & (times[before] == times[order])
        is_well = is_retraction & is_undone
        at = np.flatnonzero(is_well)
        # If the key has one field, the keys are equal already.
        names = ("val",) if table.schema.field("key").type.num_fields == 1 else ("key", "val")
        is_well[at] = same_pairs(table, before[at], order[at], names)
        is_well[1:] |= ~is_retraction[1:] & is_well[:-1]
    is_well[firsts] = np.where(is_retraction[firsts], is_well[firsts], fields.counts == 0)
    return np.logical_and.reduceat(is_well, firsts)


def _summed_within(table: pa.Table, at: Indices) -> tuple[pa.Table, Indices]:
    """Consolidates the rows `at` of `table`. Returns the table, in which one of each group of equal rows has the sum of their diffs, and
    the indices into `at` of the rows that are left, in order.
    """
    few = rows_at(table, at)
    by, equal = order_and_equal(flat_columns(few), few.num_rows)
    starts = np.flatnonzero(np.insert(~equal, 0, True))
    sums = sums_of_groups(few.column("diff").to_numpy()[by], starts)
    kept = by[starts[sums != 0]]
    diffs = table.column("diff").to_numpy().copy()
    diffs[at[kept]] = sums[sums != 0]
    index = table.schema.get_field_index("diff")
    return table.set_column(index, table.schema.field(index), pa.array(diffs)), kept


def _placed(rows: int, rest: Indices, of: Indices, fields: _Fields) -> Indices:
    """The order of the result: the rows of the large table, which has `rows` rows, without those of the fields, and the rows `rest` of the
    fields `of` in their places.
    """
    order, left = np.arange(rows), np.ones(rows, np.bool_)
    left[_ranges(fields.starts, fields.counts)] = False
    # The first row of a field replaces a row of the large table if it can, which is faster than an insertion.
    is_put = (fields.counts[of] > 0) & (np.diff(of, prepend=-1) > 0)
    places = fields.starts[of[is_put]]
    order[places], left[places] = rest[is_put], True
    order, places = order[left], fields.ends[of[~is_put]]
    if not len(places):
        return order
    gone = np.flatnonzero(~left)
    return np.insert(order, places - np.searchsorted(gone, places), rest[~is_put])


def _stretches(table: pa.Table, order: Indices, most: int) -> pa.Table | None:
    """The rows of `table` in `order`, without a copy, if they are at most `most` stretches of it; otherwise None."""
    ends = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
    if len(ends) >= most or not len(order):
        return None
    bounds = itertools.pairwise([0, *ends.tolist(), len(order)])
    return pa.concat_tables([table.slice(int(order[start]), end - start) for start, end in bounds])


class _Fields(NamedTuple):
    """The distinct first key fields of some rows, in order, and the rows of a large table that have them."""

    order: Indices
    """The indices of the rows, by field and then by turn."""
    of: Indices
    """For each row in that order, the index of its field."""
    starts: Indices
    """For each field, the index of the first row of the large table that is not before it."""
    counts: Indices
    """For each field, the number of rows of the large table that have it, from that index on."""

    @property
    def ends(self) -> Indices:
        """For each field, the index of the first row of the large table that is after it."""
        return self.starts + self.counts


def _fields(large: pa.Table, others: pa.Table, turns: Indices) -> _Fields | None:
    """The fields of `others`, whose rows have the given turns. None for values that cannot be searched: nulls, and types whose order is not
    Arrow's.
    """
    there, sought = (next(flat_columns(table, ("key",)), None) for table in (large, others))
    if there is None or sought is None or there.null_count or sought.null_count:
        return None
    if is_whole(there.type):
        values, ranks = whole(there), whole(sought)
    elif pa.types.is_string(there.type) or pa.types.is_binary(there.type):
        values, ranks = None, pc.rank(sought, sort_keys="ascending", tiebreaker="dense").to_numpy()
    else:
        return None
    order = np.argsort(ranks, kind="stable")
    ranks, turns = ranks[order], turns[order]
    is_first = np.insert(ranks[1:] != ranks[:-1], 0, True)
    # One exchange of neighbours is enough for a table with one retraction and one addition. If it has more, they are no chain anyway.
    wrong = np.flatnonzero(~is_first[1:] & (turns[1:] < turns[:-1]))
    order[wrong], order[wrong + 1] = order[wrong + 1], order[wrong]
    if values is not None:
        each = ranks[is_first]
        starts = np.searchsorted(values, each)
        ends = starts + (values[np.minimum(starts, len(values) - 1)] == each)
        if (values[np.minimum(ends, len(values) - 1)] == each)[ends < len(values)].any():
            ends = np.searchsorted(values, each, side="right")
    else:
        each = sought.take(pa.array(order[is_first]))
        starts, ends = (
            pc.search_sorted(there, each, side=side).to_numpy().astype(np.int64) for side in ("left", "right")
        )
    return _Fields(order, np.cumsum(is_first) - 1, starts, ends - starts)


def _ranges(starts: Indices, counts: Indices) -> Indices:
    """The concatenation of ranges: `counts[i]` consecutive numbers from `starts[i]` on, for each i."""
    return np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
