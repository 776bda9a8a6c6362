"""Streaming merge of sorted runs into one consolidated, sorted stream, under a memory bound (spec 13.7).

    run 0  ..[   .   window   .   | later tables]   round    = all rows before the boundary, from every window
    run 1  ....[   .   window | ...]                emitted  = the round, sorted and consolidated
    run 2  .[   .   window   .   .   .]             boundary = see below

Windows are marked (.) at equal distances. The boundary is the row at the n-th mark of all windows together, or the
least last row among the windows that have more behind them, whichever comes first: so rounds are of about the same
size however large windows are and wherever their rows lie. Everything before the boundary is in memory, and rows equal
to it stay in their windows until what follows them is there too: rounds are complete and share no row, so they are
merged in the background, several at once. Every row is sorted once. Python touches one row per mark, one per window
and round, and at most log2(window) rows to find the boundary in a window. The run that held the others up gets a
larger window next time, as long as the memory lasts.

Knows nothing of blobs, parts or times: runs are iterators of consolidated Arrow tables whose filters were applied.

Invariant: what is emitted rises strictly in (key, val, time) over the whole stream, or InvariantViolated is raised.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.codec import updates
from persist_engine.codec.columns import flatten_columns

#: Neither windows nor the distances of their marks are smaller: below this the cost of a round is its overhead, not its
#: rows.
WINDOW_ROWS_MIN = 1024
#: Half of the memory is for rows that wait to be merged. Of each run these are its window, a table behind it and one
#: being decoded; the fourth share is for windows to grow.
TABLES_HELD = 4
#: Half is for rounds, whose rows exist about this many times at once: in two that are sorted (each its sorted copy, and
#: less than that of sort keys and of the column being copied), in one that waits to be taken and in the one that the
#: consumer holds.
COPIES = 6
#: Marks per run and round, and one for what lies between two marks: the more, the less rounds differ in size, and the
#: more rows Python touches.
MARKS = 3
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
    """How much of each of `run_count` runs a window holds at first; tables that runs yield should be no larger, unless
    they are all that the run has.
    """
    return run_bytes(memory_bytes, run_count) // TABLES_HELD


def run_bytes(memory_bytes: int, run_count: int) -> int:
    """How much of each of `run_count` runs may wait to be merged."""
    return memory_bytes // (2 * max(1, run_count))


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
    for pieces in _rounds(cursors, memory_bytes):
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
    """Rows of one run, at least one, and the key of the first."""

    table: pa.Table
    first: RowKey

    def last(self) -> RowKey:
        """The key of the last."""
        return _last_key(self.table)


def _rounds(cursors: list[_Cursor], memory_bytes: int) -> Iterator[list[_Piece]]:
    """What may be merged on its own, in order."""
    marks = (MARKS - 1) * len(cursors)
    for cursor in cursors:
        cursor.window_bytes = window_bytes(memory_bytes, len(cursors))
        cursor.mark_bytes = memory_bytes // (2 * COPIES * MARKS * len(cursors))
    while True:
        cursors = [cursor for cursor in cursors if cursor.fill()]
        if not cursors:
            return
        boundary = next(itertools.islice(heapq.merge(*(cursor.marks for cursor in cursors)), marks - 1, None), None)
        holding_up = min((cursor for cursor in cursors if cursor.limit is not None), key=_limit, default=None)
        if holding_up is not None and (boundary is None or _limit(holding_up) <= boundary):
            boundary = _limit(holding_up)
            spare = memory_bytes // TABLES_HELD - sum(cursor.window_bytes for cursor in cursors)
            holding_up.window_bytes += min(holding_up.window_bytes, max(0, spare))
        yield [piece for cursor in cursors if (piece := cursor.take_before(boundary)) is not None]


def _limit(cursor: _Cursor) -> RowKey:
    return cursor.limit or ()


def _merged(pieces: list[_Piece]) -> pa.Table:
    """The union of `pieces`, consolidated. Not sorted where they lie one behind the other."""
    pieces.sort(key=lambda piece: piece.first)
    table = pa.concat_tables([piece.table for piece in pieces])
    if all(piece.last() < after.first for piece, after in itertools.pairwise(pieces)):
        return table
    return updates.consolidate_shuffled(table)


class _Cursor:
    """One run being read: the window of it that takes part in rounds, and the table behind the window."""

    def __init__(self, index: int, run: Iterator[pa.Table]) -> None:
        self._index = index
        self._run = run
        self._window: pa.Table | None = None
        self._start = 0  # rows of it that were taken
        self._columns: Sequence[pa.ChunkedArray] = ()
        self._behind: pa.Table | None = None
        self._is_begun = False
        self._first: RowKey = ()
        self._last: RowKey = ()
        self._reached: RowKey = ()
        self._row_bytes = 0.0
        self.window_bytes = 0
        self.mark_bytes = 0
        self.limit: RowKey | None = None
        """What a round may not reach: the window's last row, when more lies behind it."""
        self.marks: deque[RowKey] = deque()
        """Rows of the window at equal distances, none of them its first, ascending."""

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
                window = pa.concat_tables([window.slice(self._start), behind])
                window = consolidated(window) if is_shared else window
            self._window, self._start, is_changed = window, 0, True
            # Only the end of the run frees the others from waiting for its rows, so it must be known now.
            self._behind = next_rows(self._run)
        if self._window is None or not self._window.num_rows:
            return False
        if is_changed:
            self._survey(self._window)
        return True

    def take_before(self, boundary: RowKey | None) -> _Piece | None:
        """Remove and return the window's rows before `boundary` (None: all)."""
        window, start, first = self._window, self._start, self._first
        assert window is not None
        if boundary is not None and boundary <= first:
            return None
        if boundary is None or self._last < boundary:
            self._window, self._start, self._columns = None, 0, ()
            self.limit = None
            self.marks.clear()
            return _Piece(window.slice(start), first)
        self._start = lower_bound(self._columns, boundary, start)
        self._first = row_key(self._columns, self._start)
        while self.marks and self.marks[0] <= self._first:
            self.marks.popleft()
        return _Piece(window.slice(start, self._start - start), first)

    def _is_small(self) -> bool:
        """Whether more should be added: without a second row there is none before the boundary."""
        rows = 0 if self._window is None else self._window.num_rows - self._start
        return rows < max(2, WINDOW_ROWS_MIN) or bool(rows * self._row_bytes < self.window_bytes)

    def _survey(self, window: pa.Table) -> None:
        """What rounds are chosen by."""
        self._columns = columns = flatten_columns(window)
        self._first, self._last = row_key(columns, 0), row_key(columns, window.num_rows - 1)
        self.limit = None if self._behind is None else self._last
        distance = max(2, WINDOW_ROWS_MIN, int(self.mark_bytes / max(1.0, self._row_bytes)))
        self.marks = deque(row_keys(columns, range(distance, window.num_rows, distance)))

    def _follows(self, table: pa.Table) -> bool:
        """Whether its first row is the last that was reached. InvariantViolated when it lies before that."""
        if not self._reached:
            return False
        first = row_key(flatten_columns(table.slice(0, 1)), 0)
        check(self._reached <= first, f"rows arrived out of order in run {self._index}")
        return self._reached == first

    def _reach(self, table: pa.Table) -> None:
        if table.num_rows:  # what cancelled out was reached all the same
            self._reached = _last_key(table)


def _last_key(table: pa.Table) -> RowKey:
    return row_key(flatten_columns(table.slice(table.num_rows - 1)), 0)


def next_rows(run: Iterator[pa.Table]) -> pa.Table | None:
    """The run's next table that has rows, or None at its end."""
    return next((table for table in run if table.num_rows), None)


def lower_bound(columns: Sequence[pa.ChunkedArray], boundary: RowKey, start: int = 0) -> int:
    """The first index from `start` on whose row is not before `boundary`, or their number; rows must be sorted."""
    end = len(columns[0])
    kind, value = boundary[0]
    if kind == 0 and _is_searchable(columns[0].type):
        scalar = pa.scalar(value, columns[0].type)
        start = max(start, pc.search_sorted(columns[0], scalar, side="left").as_py())
        if start == end or columns[0][start] != scalar:
            return start
        end = pc.search_sorted(columns[0], scalar, side="right").as_py()
    while start < end:
        middle = (start + end) // 2
        if _is_before(columns, middle, boundary):
            start = middle + 1
        else:
            end = middle
    return start


def _is_searchable(data_type: pa.DataType) -> bool:
    """Whether Arrow finds a value among sorted ones, nulls last: it knows no order of NaN, and not all decimals."""
    is_text = pa.types.is_string(data_type) or pa.types.is_binary(data_type)
    is_instant = pa.types.is_date32(data_type) or pa.types.is_timestamp(data_type)
    return bool(is_text or is_instant or pa.types.is_signed_integer(data_type))


def _is_before(columns: Sequence[pa.ChunkedArray], index: int, boundary: RowKey) -> bool:
    for column, bound in zip(columns, boundary, strict=True):
        value = _comparable(column[index])
        if value != bound:
            return value < bound
    return False


def row_key(columns: Sequence[pa.ChunkedArray], index: int) -> RowKey:
    """Row `index` in comparable form."""
    return tuple(_comparable(column[index]) for column in columns)


def row_keys(columns: Sequence[pa.ChunkedArray], indices: range) -> Iterator[RowKey]:
    """The rows `indices`, each as `row_key` has it."""
    if not indices:
        return iter(())
    picked = pa.array(indices, pa.int64())
    return zip(*(_comparables(column.take(picked)) for column in columns), strict=True)


def _comparables(column: pa.ChunkedArray) -> list[tuple[int, Any]]:
    if pa.types.is_temporal(column.type):
        return [_comparable(scalar) for scalar in column]
    return [_comparable_value(value) for value in column.to_pylist()]


def _comparable(scalar: pa.Scalar) -> tuple[int, Any]:
    if scalar.is_valid and pa.types.is_temporal(scalar.type):
        return (0, scalar.value)  # an integer: datetime cannot hold every timestamp
    return _comparable_value(scalar.as_py() if scalar.is_valid else None)


def _comparable_value(value: Any) -> tuple[int, Any]:
    if value is None:
        return (2, 0)
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)
