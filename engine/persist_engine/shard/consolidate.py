"""Streaming merge of sorted runs into one consolidated, sorted stream, under a memory bound (spec 13.7).

    run 0  ..[window | rest of the part, later parts]      boundary = least last row among the windows that have more
    behind them run 1  ....[window | ...]                              round    = rows at or before the boundary, from
    every window run 2  .[window]                                       emitted  = the round, sorted and consolidated
    by Arrow

Everything at or before the boundary is in memory, so a round is complete but for rows equal to the boundary itself: a
run may hold more of them behind its window. That one row (after consolidation) is carried into the next round. Every
row is sorted once. Python touches one row per window and round (the boundary) and log2(window) rows to find it in the
others.

Knows nothing of blobs, parts or times: runs are iterators of Arrow tables whose filters have been applied.

Invariant: what is emitted rises strictly in (key, val, time) over the whole stream, or InvariantViolated is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from persist_engine.base.errors import check
from persist_engine.codec import updates
from persist_engine.codec.columns import flatten_columns

#: A window never has fewer rows: below this the cost of a round is its overhead, not its rows.
WINDOW_ROWS_MIN = 1024
#: A round's rows exist about this many times at once: the windows, their concatenation, its sort keys, the sorted copy.
COPIES = 4

#: One row as a Python tuple that compares as Arrow sorts: numbers < NaN < null, per flattened column.
RowKey = tuple[tuple[int, Any], ...]


def merge_runs(runs: Iterable[Iterator[pa.Table]], *, memory_bytes: int) -> Iterator[pa.Table]:
    """The consolidated union of `runs`, sorted by (key, val, time), as non-empty tables.

    Each run yields tables that are sorted and, read one after the other, never go back; equal rows may repeat within
    and across runs. Diffs of equal (key, val, time) are added, zeros dropped. Holds about `memory_bytes` beside what
    the runs themselves hold (one table each, two at a table's end). Raises InvariantViolated when a run goes
    backwards or a sum leaves int64.
    """
    cursors = [_Cursor(index, run) for index, run in enumerate(runs)]
    window_bytes = memory_bytes // (COPIES * max(1, len(cursors)))
    carry: pa.Table | None = None
    last_emitted: RowKey | None = None
    while True:
        cursors = [cursor for cursor in cursors if cursor.fill(window_bytes)]
        if not cursors:
            if carry is not None and carry.num_rows:
                yield carry
            return
        boundary = min((cursor.last_key for cursor in cursors if cursor.has_more), default=None)
        pieces = [cursor.take_through(boundary) for cursor in cursors]
        if carry is not None:
            pieces.append(carry)
        table = updates.consolidate(pa.concat_tables([piece for piece in pieces if piece.num_rows]))
        carry = None
        if not table.num_rows:
            continue
        columns = flatten_columns(table)
        first, last = row_key(columns, 0), row_key(columns, table.num_rows - 1)
        check(
            last_emitted is None or last_emitted < first,
            "rows arrived out of order: a run is not sorted as its batch says",
        )
        check(boundary is None or last <= boundary, "rows arrived out of order: a run is not sorted as its batch says")
        if boundary is not None and last == boundary:
            # Copied by take: a slice would keep the whole round alive.
            carry = table.take(pa.array([table.num_rows - 1]))
            table = table.slice(0, table.num_rows - 1)
            if not table.num_rows:
                continue
            last = row_key(columns, table.num_rows - 1)
        last_emitted = last
        yield table


class _Cursor:
    """One run being read: the table at hand, the window of it that takes part in rounds, and whether more lies
    behind.
    """

    def __init__(self, index: int, run: Iterator[pa.Table]) -> None:
        self._index = index
        self._run = run
        self._table: pa.Table | None = None
        self._columns: Sequence[pa.ChunkedArray] = ()
        self._next: pa.Table | None = None
        self._start = 0
        self._end = 0
        self.has_more = False
        self.last_key: RowKey = ()

    def fill(self, window_bytes: int) -> bool:
        """Make the window non-empty. False when the run is at its end."""
        if self._start < self._end:
            return True
        if self._table is None or self._end == self._table.num_rows:
            table = self._next if self._next is not None else next_rows(self._run)
            self._next = None
            if table is None:
                self._table, self._columns = None, ()
                return False
            self._table, self._columns, self._start = table, flatten_columns(table), 0
        table = self._table
        rows = max(WINDOW_ROWS_MIN, window_bytes * table.num_rows // max(1, table.nbytes))
        self._end = min(table.num_rows, self._start + rows)
        if self._end == table.num_rows:
            # Only the end of the run frees the others from waiting for its rows, so it must be known now.
            self._next = next_rows(self._run)
        self.has_more = self._end < table.num_rows or self._next is not None
        previous = self.last_key
        self.last_key = row_key(self._columns, self._end - 1)
        backwards = bool(previous) and row_key(self._columns, self._start) < previous
        check(not backwards and previous <= self.last_key, f"rows arrived out of order in run {self._index}")
        return True

    def take_through(self, boundary: RowKey | None) -> pa.Table:
        """Remove and return the window's rows at or before `boundary` (None: all)."""
        assert self._table is not None
        start, end = self._start, self._end
        if boundary is not None and boundary < self.last_key:
            end = upper_bound(self._columns, boundary, start, end)
        self._start = end
        return self._table.slice(start, end - start)


def next_rows(run: Iterator[pa.Table]) -> pa.Table | None:
    """The run's next table that has rows, or None at its end."""
    return next((table for table in run if table.num_rows), None)


def upper_bound(columns: Sequence[pa.ChunkedArray], boundary: RowKey, start: int, end: int) -> int:
    """The first index in [start, end) whose row is past `boundary`, or `end`; rows must be sorted."""
    while start < end:
        middle = (start + end) // 2
        if boundary < row_key(columns, middle):
            end = middle
        else:
            start = middle + 1
    return start


def row_key(columns: Sequence[pa.ChunkedArray], index: int) -> RowKey:
    """Row `index` in comparable form."""
    return tuple(_comparable(column[index]) for column in columns)


def _comparable(scalar: pa.Scalar) -> tuple[int, Any]:
    if not scalar.is_valid:
        return (2, 0)
    if pa.types.is_temporal(scalar.type):
        return (0, scalar.value)  # an integer: datetime cannot hold every timestamp
    value = scalar.as_py()
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)
