"""Streaming merge of sorted runs into one consolidated, sorted stream, under a memory bound (spec 13.7).

    run 0  ..[window      | later tables]     boundary = least last row among the windows that have more behind them
    run 1  ....[window    | ...]              round    = all rows before the boundary, from every window
    run 2  .[window]                          emitted  = the round, sorted and consolidated

Everything before the boundary is in memory, and rows equal to it stay in their windows until what follows them is
there too: rounds are complete and share no row, so they are merged in the background, several at once. Every row is
sorted once. Python touches one row per window and round (the boundary) and log2(window) rows to find it in the others.
The run that held the others up gets a larger window next time, as long as the memory lasts.

Knows nothing of blobs, parts or times: runs are iterators of consolidated Arrow tables whose filters were applied.

Invariant: what is emitted rises strictly in (key, val, time) over the whole stream, or InvariantViolated is raised.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.codec import updates
from persist_engine.codec.columns import flatten_columns

#: A window never has fewer rows while there are more: below this the cost of a round is its overhead, not its rows.
WINDOW_ROWS_MIN = 1024
#: The rows of all windows exist about this many times at once: in the windows, in tables decoded ahead of them (2), in
#: the round being sorted (its concatenation, sort keys and sorted copy), in a round that waits to be taken and in the
#: one that the consumer holds.
COPIES = 8
#: Rounds being merged while the next is cut off.
ROUNDS_AHEAD = 1

#: One row as a Python tuple that compares as rows are ordered: numbers < NaN < null, per flattened column.
RowKey = tuple[tuple[int, Any], ...]


class Result(Protocol):
    """What a worker will have done."""

    def result(self) -> Any: ...


class Submit(Protocol):
    """Have a worker do something, now or when its result is asked for."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Result: ...


@dataclass(frozen=True, slots=True)
class Later:
    """A call that is made when its result is asked for: what stands in for a worker where none is worth its while."""

    call: Callable[..., Any]
    args: tuple[Any, ...]

    def result(self) -> Any:
        """What the call returns; to be asked for once."""
        return self.call(*self.args)


def later(call: Callable[..., Any], *args: Any) -> Later:
    """A `Submit` without workers."""
    return Later(call, args)


def window_bytes(memory_bytes: int, run_count: int) -> int:
    """How much of each of `run_count` runs a window holds at first; tables that runs yield should be no larger."""
    return memory_bytes // (2 * COPIES * max(1, run_count))


def consolidated(table: pa.Table) -> pa.Table:
    """Rows of one run as `merge_runs` takes them. InvariantViolated when they do not lie in order."""
    out = updates.consolidate_sorted(table)
    if out is None:
        raise InvariantViolated("rows arrived out of order: a run is not sorted as its batch says")
    return out


def merge_runs(runs: Iterable[Iterator[pa.Table]], *, memory_bytes: int, submit: Submit = later) -> Iterator[pa.Table]:
    """The consolidated union of `runs`, sorted by (key, val, time), as non-empty tables.

    Each run yields tables that are `consolidated` and, read one after the other, never go back; equal rows may repeat
    within (across its tables) and across runs. Diffs of equal (key, val, time) are added, zeros dropped. Holds about
    `memory_bytes`, when tables are no larger than `window_bytes`. Raises InvariantViolated when a run goes backwards or
    a sum leaves int64.
    """
    cursors = [_Cursor(index, run) for index, run in enumerate(runs)]
    if len(cursors) == 1:
        yield from cursors[0].rest()
        return
    merging: deque[Result] = deque()
    for pieces in _rounds(cursors, memory_bytes // COPIES):
        merging.append(submit(_merged, pieces))
        if len(merging) > ROUNDS_AHEAD:
            table = merging.popleft().result()
            if table.num_rows:
                yield table
    for left in merging:
        table = left.result()
        if table.num_rows:
            yield table


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one run, at least one, and the keys of the first and last."""

    table: pa.Table
    first: RowKey
    last: RowKey


def _rounds(cursors: list[_Cursor], budget_bytes: int) -> Iterator[list[_Piece]]:
    """What may be merged on its own, in order."""
    for cursor in cursors:
        cursor.window_bytes = budget_bytes // (2 * len(cursors))
    while True:
        cursors = [cursor for cursor in cursors if cursor.fill()]
        if not cursors:
            return
        holding_up = min((cursor for cursor in cursors if cursor.limit is not None), key=_limit, default=None)
        boundary = None if holding_up is None else holding_up.limit
        yield [piece for cursor in cursors if (piece := cursor.take_before(boundary)) is not None]
        if holding_up is not None:
            spare = budget_bytes - sum(cursor.window_bytes for cursor in cursors)
            holding_up.window_bytes += min(holding_up.window_bytes, max(0, spare))


def _limit(cursor: _Cursor) -> RowKey:
    return cursor.limit or ()


def _merged(pieces: list[_Piece]) -> pa.Table:
    """The union of `pieces`, consolidated. Not sorted where they lie one behind the other."""
    pieces.sort(key=lambda piece: piece.first)
    table = pa.concat_tables([piece.table for piece in pieces])
    if all(piece.last < after.first for piece, after in itertools.pairwise(pieces)):
        return table
    return updates.consolidate(table)


class _Cursor:
    """One run being read: the window of it that takes part in rounds, and the table behind the window."""

    def __init__(self, index: int, run: Iterator[pa.Table]) -> None:
        self._index = index
        self._run = run
        self._window: pa.Table | None = None
        self._columns: Sequence[pa.ChunkedArray] = ()
        self._behind: pa.Table | None = None
        self._is_begun = False
        self._first: RowKey = ()
        self._last: RowKey = ()
        self._reached: RowKey = ()
        self._row_bytes = 0.0
        self.window_bytes = 0
        self.limit: RowKey | None = None
        """What a round may not reach: the window's last row, when more lies behind it, or an earlier one, when the
        window holds more than it should because tables are large.
        """

    def rest(self) -> Iterator[pa.Table]:
        """The whole run, as one that needs no others."""
        window = next_rows(self._run)
        while window is not None:
            behind = next_rows(self._run)
            self._reach(window)
            if behind is not None and self._follows(behind):
                # Only the row that they share is merged.
                behind = consolidated(pa.concat_tables([window.slice(window.num_rows - 1), behind]))
                window = window.slice(0, window.num_rows - 1)
            if window.num_rows:
                yield window
            window = behind

    def fill(self) -> bool:
        """Make the window as large as it should be. False when the run is at its end."""
        if not self._is_begun:
            self._is_begun = True
            self._behind = next_rows(self._run)
        is_changed = False
        while self._behind is not None and self._is_small():
            window, behind = self._window, self._behind
            is_shared = self._follows(behind)
            self._reach(behind)
            self._row_bytes = behind.nbytes / behind.num_rows
            if window is None:
                window = behind
            else:
                window = pa.concat_tables([window, behind])
                window = consolidated(window) if is_shared else window
            self._window, is_changed = window, True
            # Only the end of the run frees the others from waiting for its rows, so it must be known now.
            self._behind = next_rows(self._run)
        if self._window is None or not self._window.num_rows:
            return False
        if is_changed:
            self._columns = flatten_columns(self._window)
            self._first = row_key(self._columns, 0)
            self._last = row_key(self._columns, self._window.num_rows - 1)
        self._limit()
        return True

    def take_before(self, boundary: RowKey | None) -> _Piece | None:
        """Remove and return the window's rows before `boundary` (None: all)."""
        window = self._window
        assert window is not None
        if boundary is not None and boundary <= self._first:
            return None
        first, last, end = self._first, self._last, window.num_rows
        if boundary is not None and boundary <= last:
            end = lower_bound(self._columns, boundary, 0, end)
            last = row_key(self._columns, end - 1)
        if end == window.num_rows:
            self._window, self._columns = None, ()
        else:
            self._window = window.slice(end)
            self._columns = [column.slice(end) for column in self._columns]
            self._first = row_key(self._columns, 0)
        return _Piece(window.slice(0, end), first, last)

    def _is_small(self) -> bool:
        """Whether more should be added: without a second row there is none before the boundary."""
        window = self._window
        if window is None or window.num_rows < max(2, WINDOW_ROWS_MIN):
            return True
        return bool(window.num_rows * self._row_bytes < self.window_bytes)

    def _limit(self) -> None:
        assert self._window is not None
        share = max(2, WINDOW_ROWS_MIN, int(self.window_bytes / max(1.0, self._row_bytes)))
        if share < self._window.num_rows:
            self.limit = row_key(self._columns, share)
        else:
            self.limit = None if self._behind is None else self._last

    def _follows(self, table: pa.Table) -> bool:
        """Whether its first row is the last that was reached. InvariantViolated when it lies before that."""
        first = row_key(flatten_columns(table.slice(0, 1)), 0)
        check(self._reached <= first, f"rows arrived out of order in run {self._index}")
        return self._reached == first

    def _reach(self, table: pa.Table) -> None:
        if table.num_rows:  # what cancelled out was reached all the same
            self._reached = row_key(flatten_columns(table.slice(table.num_rows - 1)), 0)


def next_rows(run: Iterator[pa.Table]) -> pa.Table | None:
    """The run's next table that has rows, or None at its end."""
    return next((table for table in run if table.num_rows), None)


def lower_bound(columns: Sequence[pa.ChunkedArray], boundary: RowKey, start: int, end: int) -> int:
    """The first index in [start, end) whose row is not before `boundary`, or `end`; rows must be sorted."""
    while start < end:
        middle = (start + end) // 2
        if _is_before(columns, middle, boundary):
            start = middle + 1
        else:
            end = middle
    return start


def _is_before(columns: Sequence[pa.ChunkedArray], index: int, boundary: RowKey) -> bool:
    for column, bound in zip(columns, boundary, strict=True):
        value = _comparable(column[index])
        if value != bound:
            return value < bound
    return False


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
