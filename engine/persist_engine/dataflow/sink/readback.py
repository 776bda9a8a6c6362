"""Reads back what a shard holds, as it grows: the persisted side of desired minus persisted.

    since < upper    a snapshot at upper - 1, then a listen from there                    the usual case
    upper <= since   every batch in state, and again when the upper moves                 no time is readable yet

SUBTLE: in the second case, a snapshot at since would wait for the upper to pass it. But only the sink itself would move the upper, and it
waits for the snapshot (spec 17.9). No reader can read before since, so the times of updates before the upper do not matter: all of them are
yielded at time 0. Once the upper has moved, the updates yielded before are read again, from the version that is still pinned, and are
retracted. Then the new contents are yielded.

Invariant: the frontier is never beyond the shard's upper. Otherwise a description that is still valid could be dropped.

This module owns the reader. When its lease lapses (the machine slept), reading continues under a new lease at the same position: after the
frontier, or after the rows of a snapshot that were already yielded (snapshots are sorted). It cannot continue when since has passed the
frontier meanwhile, nor when rows of a listen were yielded without their Progress. The missing updates are then unknown, and a new sink must
receive all inputs again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import Fenced, InvalidUsage, MissingBlob, Unavailable
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.listen import Listen, Progress, Updates
from persist_engine.client.read.snapshot import SinceAhead, Snapshot
from persist_engine.client.write.handle import WriteHandle
from persist_engine.model.frontier import MINIMUM, Antichain

_log = logging.getLogger(__name__)

#: The memory for reading a snapshot, in addition to the sink's own (see Snapshot.to_batches).
SNAPSHOT_MEMORY_BYTES = 64 << 20
#: The limit on consecutive lapses without progress. After more, the leases are too short to make progress at all.
LAPSES_IN_A_ROW_MAX = 8


class ReadBack:
    """The events of one shard from its beginning on. One thread calls `events`; any thread may call `stop`."""

    def __init__(
        self, open_reader: Callable[[], ReadHandle], writer: WriteHandle, *, on_upper: Callable[[Antichain], None]
    ) -> None:
        """`on_upper` receives every new upper before the updates below it are read. `writer` is the sink's writer."""
        self._open_reader = open_reader
        self.reader = open_reader()
        """The current reader. The owner of the sink expires it."""
        self.lapses = 0
        """The number of leases that lapsed and were replaced."""
        self._lapses_in_a_row = 0
        self._writer, self._machine = writer, writer.machine
        self._on_upper = on_upper
        self._stopped = threading.Event()
        self._frontier: Antichain | None = None
        self._listen: Listen | None = None
        self._fresh = True
        """Whether no updates were yielded, or all yielded updates were retracted."""
        self._loose = False
        """Whether rows were yielded since the last Progress, and a new reader could not tell them from later rows."""
        self._snapshot: tuple[int, int] | None = None
        """The as_of of the snapshot that is being yielded, and the number of its rows that were yielded."""
        self._whole: Snapshot | None = None
        """The pinned contents that were yielded at time 0, as long as the upper is not past since."""

    @property
    def frontier(self) -> Antichain:
        """The frontier before which everything that the shard holds was yielded."""
        return self._frontier or MINIMUM

    def stop(self) -> None:
        """Makes `events` end at its next check. Idempotent."""
        self._stopped.set()
        self._machine.watch.notify()

    def events(self, *, timeout_s: float | None = None) -> Iterator[Updates | Progress]:
        """Waits for updates and yields those since the last call, followed by Progress. Yields nothing when stopped, when closed, or when
        `timeout_s` passed first. The diff of an update is its change of the contents; it is negative for retractions. The caller must
        consume all events before the next call.

        A lapsed lease is replaced: events yielded before the lapse was noticed stay valid, and the next call continues. Raises Fenced or
        MissingBlob when reading cannot continue (see the module docstring). Raises SchemaMismatch when the shard's schema has evolved past
        the sink's. Raises storage errors when retries end.
        """
        if self.frontier.is_empty() or not self._wait(timeout_s):
            return
        try:
            yield from self._news()
        except (Fenced, MissingBlob) as error:
            self._reopen(error)

    def _news(self) -> Iterator[Updates | Progress]:
        upper = self._machine.state.trace.upper
        self._on_upper(upper)
        if upper.is_empty():
            self.close()
            yield self._progress(upper)
        elif self._snapshot is not None:
            yield from self._readable(*self._snapshot)
        elif self._listen is not None:
            yield from self._listened(self._listen)
        else:
            yield from self._contents()

    def _reopen(self, error: Fenced | MissingBlob) -> None:
        """Continues under a new lease, or raises `error` when that is impossible."""
        lost = self.reader
        self._lapses_in_a_row += 1
        if self._loose or self._lapses_in_a_row > LAPSES_IN_A_ROW_MAX:
            raise error
        text = "the lease %s of a sink at %s lapsed, reading on under a new one: %s"
        _log.warning(text, lost.reader_id, self.frontier, error, extra={"shard": self._machine.shard_id})
        try:
            lost.expire()
        except Unavailable as unavailable:
            _log.warning("could not expire it: %s", unavailable, extra={"shard": self._machine.shard_id})
        self.reader, self._listen = self._open_reader(), None
        self.lapses += 1
        self._machine.metrics.count("sink_lapses", handle="reader")
        if self._snapshot is not None:
            as_of, given = self._snapshot
            if not given:
                self._snapshot = None  # no row was yielded, so a snapshot at another time is fine
            elif not self.reader.since.less_equal(as_of):
                raise _passed(SinceAhead(since=self.reader.since, as_of=as_of))
        elif not self._fresh and self._whole is None:
            assert self._frontier is not None
            assert self._frontier.time, "below the first time there is nothing to listen for"
            self._listen = self._listen_from(self._frontier.newest_complete)

    def close(self) -> None:
        """Releases the blobs. The owner of the reader expires it. Idempotent."""
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _wait(self, timeout_s: float | None) -> bool:
        """Waits and returns whether there are new events. The first call always returns True."""
        if self._frontier is None or self._fresh or self._snapshot is not None:
            self._machine.refresh()
            return not self._stopped.is_set()
        machine, frontier = self._machine, self._frontier

        def look() -> bool | None:
            if self._stopped.is_set():
                return False
            return True if frontier < machine.state.trace.upper else None

        return bool(machine.wait(look, timeout_s))

    def _contents(self) -> Iterator[Updates | Progress]:
        """Yields everything before the upper, in place of what was yielded before."""
        since = self.reader.since
        if since.time is None:
            self.reader.check_open()
            raise InvalidUsage(
                f"the since of shard {self._machine.shard_id} is empty: "
                "its contents can no longer be read, so they cannot be corrected"
            )
        whole, upper = self.reader.whole()
        before, self._whole = self._whole, None
        if before is not None:
            self._loose = True
            with before:
                for table in _tables(before):
                    yield Updates(_at_zero(_negated(table)))
            self._loose, self._fresh = False, True
        if upper.time is None:
            whole.close()
            yield self._progress(upper)
        elif upper <= since:
            for table in _tables(whole):
                yield self._given(_at_zero(table))
            self._whole = whole
            yield self._progress(upper)
        else:
            whole.close()
            yield from self._readable(upper.newest_complete, 0)

    def _readable(self, as_of: int, given: int) -> Iterator[Updates | Progress]:
        """The contents at `as_of` without the first `given` rows."""
        self._snapshot = as_of, given
        snapshot = self.reader.snapshot(as_of)
        if isinstance(snapshot, SinceAhead):
            raise _passed(snapshot)
        with snapshot:
            self._listen = self._listen_from(as_of)
            skipped = 0
            for table in _tables(snapshot):
                fresh = table.slice(given - skipped)
                skipped += table.num_rows - fresh.num_rows
                self._snapshot = as_of, self._snapshot[1] + fresh.num_rows
                if fresh.num_rows:
                    yield Updates(fresh)
        self._snapshot = None
        yield self._progress(Antichain.of(as_of + 1))

    def _listen_from(self, as_of: int) -> Listen:
        listen = self.reader.listen(as_of)
        if isinstance(listen, SinceAhead):
            raise _passed(listen)
        return listen

    def _listened(self, listen: Listen) -> Iterator[Updates | Progress]:
        for event in listen.next_batch(timeout_s=0) or ():
            yield self._progress(event.frontier) if isinstance(event, Progress) else self._given(event.table)

    def _given(self, table: pa.Table) -> Updates:
        self._loose = True
        return Updates(table)

    def _progress(self, frontier: Antichain) -> Progress:
        # This process knows the versions from which all rows so far were read, and so their schemas, too.
        self._writer.check_newest_schema()
        self._fresh, self._loose, self._lapses_in_a_row = False, False, 0
        self._frontier = frontier
        return Progress(frontier)


def _passed(answer: SinceAhead) -> Fenced:
    return Fenced(
        f"the sink had read back times up to {answer.as_of} when its lease lapsed, and since went to {answer.since}: the "
        "updates between can no longer be read; open a new sink and send it all inputs again"
    )


def _tables(snapshot: Snapshot) -> Iterator[pa.Table]:
    for batch in snapshot.to_batches(memory_bytes=SNAPSHOT_MEMORY_BYTES):
        yield pa.Table.from_batches([batch])


def _negated(table: pa.Table) -> pa.Table:
    index = table.schema.get_field_index("diff")
    return table.set_column(index, table.schema.field(index), pc.negate_checked(table.column(index)))


def _at_zero(table: pa.Table) -> pa.Table:
    index = table.schema.get_field_index("time")
    zeros = pa.chunked_array([pa.array(np.zeros(table.num_rows, dtype=np.int64))])
    return table.set_column(index, table.schema.field(index), zeros)
