"""ChangeFeed: what happened to a table between two times, or from a time on: inserts, updates with the row before and after, deletes.

This module owns the pairing of the rows that an update removed with those that it added, and the life of a feed that follows. Vectorised
over the rows; only `__iter__`, which is for Python loops, makes objects from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, Unavailable
from persist_engine.base.refusal import Bound
from persist_engine.base.wording import dated
from persist_engine.client.read.changes import Changes
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.model.frontier import Antichain
from persist_engine.rows.columns import compare_adjacent, flat_columns
from persist_engine.rows.nested.values import python_column
from persist_engine.rows.predicate import Predicate
from persist_engine.rows.row_changes import INSERT, UPDATE_AFTER
from persist_engine.shard.machine import Machine
from persist_engine.table.columns import Columns
from persist_engine.table.names import of_table
from persist_engine.table.scan import PREVIEW_ROWS, gone

Kind = Literal["insert", "update", "delete"]
#: How often a feed that follows checks whether it was closed. A commit wakes it sooner.
POLL_S = 0.25
_KINDS = ("insert", "update", "delete")
#: The columns of changes that are no columns of the key.
_TAKEN = ("_change", "_time", "_before", "_after")


@dataclass(frozen=True, slots=True, repr=False)
class Change:
    """One row that changed. `before` is None for an insert, `after` for a delete. Two rows of one key may change at one time.
    Prints its time with the date.

    >>> first, _ = orders.changes("start")
    >>> first.kind, first.before, first.after
    ('insert', None, {'id': 1, 'name': 'ada'})
    """

    kind: Kind
    time: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def __repr__(self) -> str:
        return f"Change({self.kind} at {dated(self.time)}, before={self.before!r}, after={self.after!r})"


class ChangeFeed(Bound, elsewhere="in another process, connect again and ask for the same changes"):
    """Changes after `since` (None: from the earliest readable time on, beginning with its rows), up to `upto`, or without end.

    Iteration yields `Change` after `Change`, ordered by time. It holds the changes of the range in memory; `to_reader` does not. A feed
    that follows waits for more until `close`, which any thread may call, or the end of the `with` block. Each use reads the range anew. The
    feed has the columns that the table had when it was made: later columns are left out, and a widened number that does not fit raises
    SchemaMismatch.

    >>> [change.after["name"] for change in orders.changes("start")]
    ['ada', 'lin']
    """

    def __init__(
        self,
        name: str,
        open_reader: Callable[[], ReadHandle],
        machine: Machine,
        columns: Columns,
        *,
        since: int | None,
        upto: int | None,
        follow: bool,
        where: Predicate | None,
    ) -> None:
        self._name, self._open, self._machine, self._columns = name, open_reader, machine, columns
        self._where, self._follow = where, follow
        self.since, self.upto = since, upto
        self._closed = threading.Event()

    @property
    def schema(self) -> pa.Schema:
        """`_change`, `_time`, the columns of the key, and the rows `_before` and `_after`, which are null if there is no such row. A column
        of the key that has one of these names is `key.<name>`.

        >>> orders.changes("start").schema.names
        ['_change', '_time', 'id', '_before', '_after']
        """
        row = pa.struct(list(self._columns.arrow))
        fields = [self._columns.arrow.field(name) for name in self._columns.key]
        key = [field.with_name(f"key.{field.name}") if field.name in _TAKEN else field for field in fields]
        return pa.schema(
            [
                pa.field("_change", pa.string()),
                pa.field("_time", pa.int64()),
                *key,
                pa.field("_before", row),
                pa.field("_after", row),
            ]
        )

    def to_arrow(self) -> pa.Table:
        """All changes as a table, ordered by time. Not for a feed that follows.

        >>> orders.changes("start").to_arrow().column("_change").to_pylist()
        ['insert', 'insert']
        """
        self._check_ends("to_arrow")
        with of_table(self._name), self._open() as reader:
            return self._ordered(reader, self.since, self.upto)

    def to_reader(self) -> pa.RecordBatchReader:
        """All changes as a stream of record batches, ordered by key, in bounded memory. Not for a feed that follows.

        >>> sum(batch.num_rows for batch in orders.changes("start").to_reader())
        2
        """
        self._check_ends("to_reader")
        return pa.RecordBatchReader.from_batches(self.schema, self._streamed())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """Ends every iteration, even one that waits in another thread. Idempotent.

        >>> feed = orders.changes("start", follow=True)
        >>> for change in feed:
        ...     print(change.after["name"])
        ...     if change.after["id"] == 2:
        ...         feed.close()
        ada
        lin
        """
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Change]:
        """The changes, one by one. A loop that ends early releases everything."""
        for batch in self.to_batches():
            with of_table(self._name):
                columns = [python_column(name, batch.column(name)) for name in _TAKEN]
            for kind, time, before, after in zip(*columns, strict=True):
                if self._closed.is_set():
                    return
                yield Change(kind, time, before, after)

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """The changes as record batches with the columns of `schema`, ordered by time. A feed that follows continues, as in a loop.

        >>> [batch.num_rows for batch in orders.changes("start").to_batches()]
        [2]
        """
        with of_table(self._name), self._open() as reader:
            since = self.since
            if since is not None and reader.since.less_equal(since):
                reader.downgrade_since(Antichain.of(since))  # earlier times are no longer needed
            while not self._closed.is_set():
                upper = self._machine.fetch_recent_upper()
                newest = upper.newest_complete if self.upto is None else self.upto
                if newest >= 0 and (since is None or newest > since):
                    yield from self._ordered(reader, since, newest).to_batches(max_chunksize=1024)
                    since = newest
                    reader.maybe_downgrade_since(Antichain.of(newest))
                if not self._follow or upper.is_empty():
                    return
                self._wait_past(since)

    def __repr__(self) -> str:
        start = "the start" if self.since is None else dated(self.since)
        end = "on" if self._follow else f"up to {'now' if self.upto is None else dated(self.upto)}"
        return f"ChangeFeed({self._name} from {start} {end})"

    def _repr_html_(self) -> str:
        """The first changes in the order of their keys, which costs little even for a large feed. For a feed that follows, its
        description.
        """
        from persist_engine.table.pictures.html import preview_html

        if self._follow:
            return f"<div>{escape(repr(self))}</div>"
        batches: list[pa.RecordBatch] = []
        with closing(self._streamed()) as found:
            for batch in found:
                batches.append(batch)
                if sum(each.num_rows for each in batches) > PREVIEW_ROWS:
                    break
        rows = pa.Table.from_batches(batches, self.schema).slice(0, PREVIEW_ROWS + 1)
        times = pa.array([dated(time) for time in rows.column("_time").to_pylist()], pa.string())
        return preview_html(repr(self), rows.set_column(1, "_time", times), rows_max=PREVIEW_ROWS)

    def _wait_past(self, since: int | None) -> None:
        at = Antichain.of(0 if since is None else since + 1)
        is_past = False
        while not is_past and not self._closed.is_set():
            try:
                is_past = self._machine.wait_for_upper_past(at, POLL_S)
            except Unavailable:  # the log did not answer for POLL_S, but a feed waits as long as any other call
                if self._machine.settings.retry.give_up_ms is not None:
                    raise

    def _ordered(self, reader: ReadHandle, since: int | None, upto: int | None) -> pa.Table:
        table = pa.Table.from_batches(self._read(reader, since, upto), schema=self.schema)
        order = pc.sort_indices(table.column("_time"))  # stable, so rows of one time stay in the order of their keys
        return table.take(order)

    def _streamed(self) -> Generator[pa.RecordBatch, None, None]:
        with of_table(self._name), self._open() as reader:
            yield from self._read(reader, self.since, self.upto)

    def _read(self, reader: ReadHandle, since: int | None, upto: int | None) -> Iterator[pa.RecordBatch]:
        upto = self._machine.fetch_recent_upper().newest_complete if upto is None else upto
        if upto < 0 or (since is not None and upto <= since):
            return
        answer = reader.changes(since, upto, shape="rows", where=self._where)
        if isinstance(answer, SinceAhead):
            raise InvalidUsage(gone(answer.as_of, answer))
        changes: Changes = answer
        with changes:
            for rows in _whole_groups(changes.to_batches(), changes.updates_schema):
                yield from self._paired(rows)

    def _paired(self, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Converts row changes of whole groups to changes. Pairs the nth row that an update removed with the nth that it added."""
        before, after = _pairs(rows)
        flat = self._columns.side_by_side(rows.combine_chunks().to_batches()[0])
        whole = pa.StructArray.from_arrays(flat.columns, fields=list(flat.schema))
        own = pa.array(np.where(before < 0, after, before))
        kinds = np.where(before < 0, 0, np.where(after < 0, 2, 1)).astype(np.int8)
        columns = [
            pa.DictionaryArray.from_arrays(pa.array(kinds), pa.array(_KINDS)).cast(pa.string()),
            rows.column("time").combine_chunks().take(own),
            *(flat.column(name).take(own) for name in self._columns.key),
            whole.take(pa.array(before, mask=before < 0)),
            whole.take(pa.array(after, mask=after < 0)),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _check_ends(self, method: str) -> None:
        if self._follow:
            raise InvalidUsage(
                f"table {self._name}: {method} would never end; iterate over the feed, or leave follow=True out"
            )


def _whole_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables in which all changes of one key and time are together. Holds one batch and the last group."""
    held = schema.empty_table()
    for batch in batches:
        rows = pa.concat_tables([held, pa.Table.from_batches([batch])]).combine_chunks()
        end = int(_starts(rows)[-1])
        held = rows.slice(end)
        if end:
            yield rows.slice(0, end)
    if held.num_rows:
        yield held


def _starts(rows: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The indices at which the groups of one key and time begin. Rows must be in the order of (key, time)."""
    _, same = compare_adjacent(flat_columns(rows, ("key",)), rows.num_rows)
    times = rows.column("time").to_numpy()
    return np.concatenate([[0], np.flatnonzero(~same | (times[1:] != times[:-1])) + 1])


def _pairs(rows: pa.Table) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """The index of the row before and of the row after each change, -1 for none. In a group, removed rows come before added ones."""
    starts = _starts(rows)
    count = rows.num_rows
    is_added = pc.is_in(rows.column("change").cast(pa.string()), value_set=pa.array([INSERT, UPDATE_AFTER])).to_numpy()
    sizes = np.diff(np.append(starts, count))
    added = np.add.reduceat(is_added.astype(np.int64), starts)
    removed = sizes - added
    group = np.repeat(np.arange(len(starts)), sizes)
    place = np.arange(count) - starts[group]
    # The partner of the nth removed row is the nth added row, `removed` rows further on.
    partner = np.where(place < added[group], np.arange(count) + removed[group], -1)
    is_pair = ~is_added & (partner >= 0)
    is_second = is_added & (place - removed[group] < removed[group])
    keep = ~is_second
    before = np.where(is_added, -1, np.arange(count))[keep]
    after = np.where(is_added, np.arange(count), np.where(is_pair, partner, -1))[keep]
    return before, after
