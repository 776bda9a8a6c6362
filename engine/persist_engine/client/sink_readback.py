"""What a shard holds, told to a sink as it grows: the persisted side of desired minus persisted.

    since < upper    snapshot at upper - 1, then listen from there                       the usual way
    upper <= since   every batch as it lies in state, and again when the upper moves     nothing is readable at a time

SUBTLE: in the second case a snapshot at since would wait for the upper to pass it, which only the sink itself would do,
which waits for the snapshot (spec 17.9). But nobody can read before since either, so that it does not matter at which
time before the upper an update lies: all of them are given out as of 0. Once the upper has moved, what was given out
before is taken back, read again from the version that is still pinned, and the new contents are given out.

Invariant: the frontier is never beyond the shard's upper; else a description could be given up that is still valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import Fenced, InvalidUsage
from persist_engine.client.listen import Listen, Progress, Updates
from persist_engine.client.read import ReadHandle
from persist_engine.client.snapshot import SinceAhead, Snapshot
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.shard.machine import Machine

#: Memory of reading a snapshot beside the sink's own (see Snapshot.to_batches).
SNAPSHOT_MEMORY_BYTES = 64 << 20


class ReadBack:
    """Events of one shard from its beginning on. One thread calls `events`; any may call `stop`."""

    def __init__(self, reader: ReadHandle, machine: Machine, *, on_upper: Callable[[Antichain], None]) -> None:
        """`on_upper` is told every new upper before it is read what was written below it."""
        self._reader, self._machine = reader, machine
        self._on_upper = on_upper
        self._stopped = threading.Event()
        self._frontier: Antichain | None = None
        self._listen: Listen | None = None
        self._whole: Snapshot | None = None
        """What was given out as of 0, pinned, as long as the upper is not past since."""

    @property
    def frontier(self) -> Antichain:
        """Everything the shard holds before it was given out."""
        return self._frontier or MINIMUM

    def stop(self) -> None:
        """Let `events` end at the next look. Idempotent."""
        self._stopped.set()
        self._machine.watch.notify()

    def events(self, *, timeout_s: float | None = None) -> Iterator[Updates | Progress]:
        """What came since the last call, ending with Progress; waits for it. Nothing when stopped, closed, or when
        `timeout_s` passed first. An update's diff says how the contents change: it is negative where they were taken
        back. To be consumed before the next call.

        Fenced when the reader's lease was lost; storage errors that end retries.
        """
        if self.frontier.is_empty() or not self._wait(timeout_s):
            return
        upper = self._machine.state.trace.upper
        self._on_upper(upper)
        if upper.is_empty():
            self.close()
            yield self._progress(upper)
        elif self._listen is not None:
            yield from self._listened(self._listen)
        else:
            yield from self._contents()

    def close(self) -> None:
        """Let go of the blobs; the reader is its owner's. Idempotent."""
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _wait(self, timeout_s: float | None) -> bool:
        """Whether there is something new: at first there always is."""
        if self._frontier is None:
            self._machine.refresh()
            return not self._stopped.is_set()
        machine, frontier = self._machine, self._frontier

        def look() -> bool | None:
            if self._stopped.is_set():
                return False
            return True if frontier < machine.state.trace.upper else None

        return bool(machine.wait(look, timeout_s))

    def _contents(self) -> Iterator[Updates | Progress]:
        """Instead of what was given out before: all that lies before the upper."""
        since = self._reader.since
        if since.time is None:
            raise InvalidUsage(
                f"the since of shard {self._machine.shard_id} is empty, or the reader's lease ran out: "
                "its contents can no longer be read, so they cannot be corrected"
            )
        whole, upper = self._reader.whole()
        before, self._whole = self._whole, None
        if before is not None:
            with before:
                for table in _tables(before):
                    yield Updates(_at_zero(_negated(table)))
        if upper <= since:
            self._whole = whole
            for table in _tables(whole):
                yield Updates(_at_zero(table))
        else:
            whole.close()
            if upper.time is not None:
                yield from self._readable(upper.time - 1)
        yield self._progress(upper)

    def _readable(self, as_of: int) -> Iterator[Updates]:
        snapshot, listen = self._reader.snapshot(as_of), self._reader.listen(as_of)
        if isinstance(snapshot, SinceAhead) or isinstance(listen, SinceAhead):
            raise Fenced(f"the lease of {self._reader} ran out while the shard was read back")
        with snapshot:
            for table in _tables(snapshot):
                yield Updates(table)
        self._listen = listen

    def _listened(self, listen: Listen) -> Iterator[Updates | Progress]:
        events = listen.next_batch(timeout_s=0)
        for event in events or ():
            if isinstance(event, Progress):
                self._frontier = event.frontier
            yield event

    def _progress(self, frontier: Antichain) -> Progress:
        self._frontier = frontier
        return Progress(frontier)


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
