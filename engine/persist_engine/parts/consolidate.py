"""Streaming merge of sorted runs into one consolidated, sorted stream, under a memory bound (spec 13.7).

    run 0  ..[   .   window   .   | later tables]   round    = all rows up to the next boundary, from every window
    run 1  ....[   .   window | ...]                emitted  = the round, sorted and consolidated
    run 2  .[   .   window   .   .   .]             boundary = see below

Windows carry marks (.) at equal distances. The row at every n-th mark, counted over all windows in row order, is a boundary. The last
boundary is the least of the last rows of the windows whose runs may have more rows. Rounds therefore have about the same size, however
large the windows are and wherever their rows lie. All rows before a boundary are in memory. Rows equal to it stay in their windows until
the rows after them are in memory, too. So rounds are complete and share no row, and several can be merged at once in the background. Every
row is sorted once. Python touches one row per mark, two per table, and at most log2(window) rows to find a boundary in a window. The run
that limits a round gets a larger window next time, as long as memory lasts.

This module knows nothing of blobs, parts or times. Runs are iterators of consolidated Arrow tables that are already filtered.

Invariant: the output is strictly ascending in (key, val, time) over the whole stream; otherwise InvariantViolated is raised.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.parts.pieces import consolidate_pieces
from persist_engine.rows import updates
from persist_engine.rows.columns import flatten_columns

#: The minimum number of rows of a window and between two marks. With fewer, a round costs more in overhead than in rows.
WINDOW_ROWS_MIN = 1024
#: Half of the memory is for rows that wait to be merged. Each run has three shares of this half: its window, a table being decoded, and
#: room for the window to grow.
TABLES_HELD = 3
#: The other half is for rounds. About this many copies of their rows exist at once: two rounds are being sorted (each has a sorted copy,
#: and a smaller amount of sort keys and of the column being copied), one waits, and the consumer holds one.
COPIES = 6
#: The limit on the size of a round. Larger rounds gain nothing: their sort keys do not fit the cache, and their columns are allocated from
#: the system anew each time.
ROUND_BYTES_MAX = 8 << 20
#: The marks per run and round, plus one for the rows between two marks. With more marks, rounds are more even in size, but Python touches
#: more rows.
MARKS = 3
#: The number of rounds that are being merged while the next one is cut.
ROUNDS_AHEAD = 1

#: One row as a Python tuple that compares in row order: numbers < NaN < null, per flattened column.
RowKey = tuple[tuple[int, Any], ...]


class Result(Protocol):
    """The outcome of a call given to a worker."""

    def result(self) -> Any: ...


class Submit(Protocol):
    """Gives a call to a worker, which makes it now or when its result is requested."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Result: ...


@dataclass(frozen=True, slots=True)
class Later:
    """A call that is made when its result is requested. It replaces a worker where a worker would cost more than it saves."""

    call: Callable[..., Any]
    args: tuple[Any, ...]

    def result(self) -> Any:
        """Makes the call and returns its result. Call it once."""
        return self.call(*self.args)


def later(call: Callable[..., Any], *args: Any) -> Later:
    """A `Submit` without workers."""
    return Later(call, args)


def window_bytes(memory_bytes: int, run_count: int) -> int:
    """The initial window size of each of `run_count` runs. Runs should yield tables no larger than this, unless one table is the
    whole run.
    """
    return run_bytes(memory_bytes, run_count) // TABLES_HELD


def run_bytes(memory_bytes: int, run_count: int) -> int:
    """The number of bytes of each of `run_count` runs that may wait to be merged."""
    return memory_bytes // (2 * max(1, run_count))


def consolidated(table: pa.Table) -> pa.Table:
    """Rows of one run in the form that `merge_runs` expects. Raises InvariantViolated when the rows are not in order."""
    out = updates.consolidate_sorted(table)
    if out is None:
        raise InvariantViolated("rows arrived out of order: a run is not sorted, although its batch says so")
    return out


def merge_runs(runs: Iterable[Iterator[pa.Table]], *, memory_bytes: int, submit: Submit = later) -> Iterator[pa.Table]:
    """The consolidated union of `runs`, sorted by (key, val, time), as non-empty tables.

    Each run yields tables that are `consolidated` and never go backwards from one table to the next. Equal rows may repeat within a run
    (across its tables) and across runs. A run that knows that it is exhausted may report this through `is_at_end`. Adds the diffs of equal
    (key, val, time) and drops zeros. Holds about `memory_bytes` when tables are no larger than `window_bytes`. Raises InvariantViolated
    when a run goes backwards or a sum overflows int64.
    """
    cursors = [_Cursor(index, run) for index, run in enumerate(runs)]
    if len(cursors) == 1:
        yield from cursors[0].rest()
        return
    merging: deque[Result] = deque()
    for pieces in _rounds(cursors, memory_bytes):
        merging.append(submit(consolidate_pieces, pieces))
        if len(merging) > ROUNDS_AHEAD:
            table = merging.popleft().result()
            if table.num_rows:
                yield table
    for left in merging:
        table = left.result()
        if table.num_rows:
            yield table


def _rounds(cursors: list[_Cursor], memory_bytes: int) -> Iterator[list[pa.Table]]:
    """The rounds in order: groups of rows that can be merged independently. A group has one table for each run with rows in the round."""
    marks_of_round = (MARKS - 1) * len(cursors)
    for cursor in cursors:
        cursor.window_bytes = window_bytes(memory_bytes, len(cursors))
        cursor.mark_bytes = min(memory_bytes // (2 * COPIES), ROUND_BYTES_MAX) // (MARKS * len(cursors))
    while True:
        cursors = [cursor for cursor in cursors if cursor.fill()]
        if not cursors:
            return
        _survey([cursor for cursor in cursors if cursor.is_changed])
        boundaries: list[RowKey] = sorted(mark for cursor in cursors for mark in cursor.marks)
        boundaries = boundaries[marks_of_round - 1 :: marks_of_round]
        holding_up = min((cursor for cursor in cursors if cursor.limit is not None), key=_limit, default=None)
        if holding_up is not None:
            limit = _limit(holding_up)
            if not boundaries or limit <= boundaries[0]:
                spare = memory_bytes // TABLES_HELD - sum(cursor.window_bytes for cursor in cursors)
                holding_up.window_bytes += min(holding_up.window_bytes, max(0, spare))
            boundaries = [*(boundary for boundary in boundaries if boundary < limit), limit]
        boundaries = [boundary for boundary, _ in itertools.groupby(boundaries)]
        cuts = [cursor.cut(boundaries, takes_rest=holding_up is None) for cursor in cursors]
        while cuts and cuts[0]:
            pieces = [piece for cut in cuts if (piece := cut.popleft()).num_rows]
            if pieces:
                yield pieces


def _limit(cursor: _Cursor) -> RowKey:
    return cursor.limit or ()


def _survey(cursors: Sequence[_Cursor]) -> None:
    """Reads the marks and limits of all changed windows at once, because converting a few rows to Python values costs per call, not per
    row.
    """
    rows = [cursor.rows_to_survey() for cursor in cursors]
    keys = iter(_keys_of(list(itertools.chain.from_iterable(rows))))
    for cursor, some in zip(cursors, rows, strict=True):
        cursor.surveyed(list(itertools.islice(keys, len(some))))


class _Cursor:
    """One run that is being read, and its window, which takes part in rounds."""

    def __init__(self, index: int, run: Iterator[pa.Table]) -> None:
        self._index = index
        self._run = run
        self._window: pa.Table | None = None
        self._start = 0  # the number of rows of the window that were taken
        self._columns: Sequence[pa.ChunkedArray] = ()
        self._is_ended = False
        self._reached: RowKey | pa.Table | None = None
        """The last row that was read, as a table until its key is needed. None before the first row."""
        self._row_bytes = 0.0
        self.window_bytes = 0
        self.mark_bytes = 0
        self.is_changed = False
        """Whether the window was filled since the last survey."""
        self.marks: list[RowKey] = []
        """The keys of window rows at equal distances, ascending. `marks_at` holds the indices of these rows."""
        self.marks_at: Sequence[int] = ()

    @property
    def limit(self) -> RowKey | None:
        """The row that a round must not reach: the last row that was read. None when the run is known to have ended there. Valid only after
        the window was surveyed.
        """
        if self._is_ended:
            return None
        assert isinstance(self._reached, tuple)
        return self._reached

    def rest(self) -> Iterator[pa.Table]:
        """The rows of the whole run, for a run that is read alone."""
        window = next_rows(self._run)
        if window is not None:
            self._follows(window)
        while window is not None:
            behind = next_rows(self._run)
            # SUBTLE: the updates of a repeated row may have cancelled so far. If the window held no other row, it is empty now.
            if behind is not None and self._follows(behind) and window.num_rows:
                # Merge only the row that both tables share.
                behind = consolidated(pa.concat_tables([window.slice(window.num_rows - 1), behind]))
                window = window.slice(0, window.num_rows - 1)
            if window.num_rows:
                yield window
            window = behind

    def fill(self) -> bool:
        """Fills the window to its size. Returns False when the run has ended and all its rows were taken."""
        while not self._is_ended and self._is_small():
            table = next_rows(self._run)
            if table is None:
                self._is_ended = True
                break
            self._is_ended = getattr(self._run, "is_at_end", False)
            self._row_bytes = table.nbytes / table.num_rows
            is_shared = self._follows(table)
            if self._window is None:
                self._window = table
            else:
                window = pa.concat_tables([self._window.slice(self._start), table])
                self._window = consolidated(window) if is_shared else window
            self._start, self.is_changed = 0, True
        if self._window is None or not self._window.num_rows:
            return False
        if self.is_changed:
            self._columns = flatten_columns(self._window)
            distance = max(2, WINDOW_ROWS_MIN, int(self.mark_bytes / max(1.0, self._row_bytes)))
            self.marks_at = range(distance, self._window.num_rows, distance)
        return True

    def rows_to_survey(self) -> list[pa.Table]:
        """The rows at `marks_at`, and the last row that was read unless its key is known, each as a table of one row."""
        window = self._window
        assert window is not None
        limit = [self._reached] if isinstance(self._reached, pa.Table) and not self._is_ended else []
        return [*(window.slice(index, 1) for index in self.marks_at), *limit]

    def surveyed(self, keys: Sequence[RowKey]) -> None:
        """Stores the keys of `rows_to_survey`."""
        marks = len(self.marks_at)
        self.marks, self.is_changed = list(keys[:marks]), False
        if len(keys) > marks:
            self._reached = keys[marks]

    def cut(self, boundaries: Sequence[RowKey], *, takes_rest: bool) -> deque[pa.Table]:
        """Removes and returns the window's rows before each of `boundaries`, and the remaining rows if `takes_rest`. Returns one piece for
        each boundary and one for the rest; pieces may be empty.
        """
        window = self._window
        assert window is not None
        ends = lower_bounds(self._columns, boundaries, self._start)
        if takes_rest:
            ends.append(window.num_rows)
        pieces = deque(window.slice(start, end - start) for start, end in itertools.pairwise([self._start, *ends]))
        self._start = ends[-1]
        if self._start == window.num_rows:
            self._window, self._start, self._columns, self.marks, self.marks_at = None, 0, (), [], ()
        taken = bisect.bisect_right(self.marks_at, self._start)
        self.marks, self.marks_at = self.marks[taken:], self.marks_at[taken:]
        return pieces

    def _is_small(self) -> bool:
        """Whether the window needs more rows: with fewer than two rows, none lies before the boundary."""
        rows = 0 if self._window is None else self._window.num_rows - self._start
        return rows < max(2, WINDOW_ROWS_MIN) or bool(rows * self._row_bytes < self.window_bytes)

    def _follows(self, table: pa.Table) -> bool:
        """Whether the first row of `table` equals the last row that was read. Records the last row of `table` as the last row that was
        read. Raises InvariantViolated when `table` begins before the row that was last before. Computes keys only when needed, because most
        runs are one table.
        """
        reached, self._reached = self._reached, table.slice(table.num_rows - 1)
        if reached is None:
            return False
        *known, first = _keys_of([*([reached] if isinstance(reached, pa.Table) else []), table.slice(0, 1)])
        before = known[0] if known else reached
        check(before <= first, f"rows arrived out of order in run {self._index}")
        return bool(before == first)


def _keys_of(rows: Sequence[pa.Table]) -> list[RowKey]:
    """The keys of tables of one row each."""
    if not rows:
        return []
    columns = flatten_columns(pa.concat_tables(rows).combine_chunks())
    return list(zip(*map(_comparables, columns), strict=True))


def next_rows(run: Iterator[pa.Table]) -> pa.Table | None:
    """The next table of the run that has rows; None at the end."""
    return next((table for table in run if table.num_rows), None)


def lower_bounds(columns: Sequence[pa.ChunkedArray], boundaries: Sequence[RowKey], start: int = 0) -> list[int]:
    """For each of the ascending `boundaries`, the first index from `start` on whose row is not before it, or the number of rows. The rows
    must be sorted.
    """
    rows = len(columns[0])
    firsts = [boundary[0] for boundary in boundaries]
    if boundaries and _is_searchable(columns[0].type) and all(kind == 0 for kind, _ in firsts):
        values = pa.array([value for _, value in firsts], columns[0].type)
        # SUBTLE: nulls sort last and are cut off here, because Arrow's answers are wrong when nulls span several chunks.
        there = columns[0].slice(0, rows - columns[0].null_count)
        starts, ends = (pc.search_sorted(there, values, side=side).to_pylist() for side in ("left", "right"))
    else:
        starts, ends = [start] * len(firsts), [rows] * len(firsts)
    return [
        _found(columns, boundary, max(start, least), max(start, greatest))
        for boundary, least, greatest in zip(boundaries, starts, ends, strict=True)
    ]


def _found(columns: Sequence[pa.ChunkedArray], boundary: RowKey, start: int, end: int) -> int:
    """The first index in [start, end) whose row is not before `boundary`, or `end`."""
    while start < end:
        middle = (start + end) // 2
        if _is_before(columns, middle, boundary):
            start = middle + 1
        else:
            end = middle
    return start


def _is_searchable(data_type: pa.DataType) -> bool:
    """Whether Arrow can search sorted values of this type, nulls last. It has no order for NaN, and does not support all decimals."""
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


def _comparables(column: pa.ChunkedArray) -> list[tuple[int, Any]]:
    if pa.types.is_temporal(column.type):
        return [_comparable(scalar) for scalar in column]
    return [_comparable_value(value) for value in column.to_pylist()]


def _comparable(scalar: pa.Scalar) -> tuple[int, Any]:
    if scalar.is_valid and pa.types.is_temporal(scalar.type):
        return (0, scalar.value)  # an integer, because datetime cannot hold every timestamp
    return _comparable_value(scalar.as_py() if scalar.is_valid else None)


def _comparable_value(value: Any) -> tuple[int, Any]:
    if value is None:
        return (2, 0)
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)
