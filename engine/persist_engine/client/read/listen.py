"""Listen: updates appended after a time, batch by batch (spec 15.3). This module owns the listener's frontier and the since that follows
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from persist_engine.base.errors import Fenced, InvalidUsage, InvariantViolated, PersistError
from persist_engine.client.read.leased import LeasedPart, PartLeases, Pin
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import EMPTY, Antichain
from persist_engine.parts.fetch import ListenFilter, Matching, PartSource, RowFilter, read_parts
from persist_engine.parts.selection import Selection, Times, audit, select
from persist_engine.rows.filter import Filter
from persist_engine.shard.machine import Machine

if TYPE_CHECKING:
    from persist_engine.client.read.handle import ReadHandle


@dataclass(frozen=True, slots=True)
class Updates:
    """Rows (key, val, time, diff), unordered and not consolidated. All of them are before the next Progress."""

    table: pa.Table


@dataclass(frozen=True, slots=True)
class Progress:
    """Every update before `frontier` was yielded. If it is empty, the shard is closed and this is the last event."""

    frontier: Antichain


@dataclass(frozen=True, slots=True)
class LeasedParts:
    """The parts that a listener would have read up to `frontier`, for other processes to fetch. Each must be returned to the reader."""

    parts: tuple[LeasedPart, ...]
    frontier: Antichain


class Listen:
    """An iterator of Updates and Progress strictly after `as_of`, of rows that pass `where` if given. Not thread-safe. Ends when the shard
    is closed.

    `next` blocks until the shard's upper moves. Blobs of the batch being yielded stay pinned. The handle's since stays one batch behind the
    frontier, so that the times just yielded stay readable.
    """

    def __init__(
        self,
        handle: ReadHandle,
        machine: Machine,
        source: PartSource,
        *,
        as_of: int,
        leases: PartLeases,
        where: Filter | None = None,
    ) -> None:
        self._handle = handle
        self._machine = machine
        self._source = source
        self._as_of = as_of
        self._leases = leases
        self._where = where
        self._frontier = Antichain.of(as_of)
        self._started = False
        self._passed: Antichain | None = None
        self._events: Iterator[Updates | Progress] = iter(())
        self._is_closed = False
        self.needs = self._frontier
        """The earliest time that must stay distinguishable for the listener to continue. It is set atomically, and any thread may
        read it.
        """

    @property
    def frontier(self) -> Antichain:
        """Everything after `as_of` and before this frontier was yielded."""
        return self._frontier

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Updates | Progress:
        while True:
            event = next(self._events, None)
            if event is not None:
                return event
            if self._frontier.is_empty():
                raise StopIteration
            events = self.next_batch(timeout_s=None)
            assert events is not None, "waiting without a limit ends with a batch"
            self._events = events

    def close(self) -> None:
        """Stops reading. The handle's since no longer waits for this listener. Idempotent."""
        self._is_closed, self.needs = True, EMPTY
        self._events = iter(())

    def next_batch(self, *, timeout_s: float | None) -> Iterator[Updates | Progress] | None:
        """The events of the next batch, to be consumed before the next call. None when no batch came within `timeout_s`.

        If an error (Unavailable) occurs while they are consumed, the next call yields the batch from its beginning. The caller must then
        drop the events after the last Progress.
        """
        found = self._next(timeout_s)
        return None if found is None else self._give_out(*found)

    def next_parts(self, *, timeout_s: float | None) -> LeasedParts | None:
        """Like `next_batch`, but returns the parts for other processes to fetch (`LeasedPart.fetch`), in any order. The listener moves on
        at once. The blobs are kept until the parts are returned to the reader.
        """
        found = self._next(timeout_s)
        if found is None:
            return None
        batch, pin = found
        try:
            rows, selection = self._selected(batch)
            parts = tuple(self._leases.lease_all(pin, self._source, selection, rows=rows, where=self._where))
        finally:
            pin.release()
        return LeasedParts(parts, self._advance(batch).frontier)

    def _next(self, timeout_s: float | None) -> tuple[HollowBatch, Pin] | None:
        """The pinned batch that contains the frontier. None when no batch came within `timeout_s`."""
        if self._is_closed:
            raise InvalidUsage(f"the listener of {self._machine.shard_id} at {self._frontier} was closed")
        if self._passed is not None:
            # Do this here, and not when the frontier moves: there, an error would come between rows and the Progress that completes them.
            self._handle.maybe_downgrade_since(self._passed)
        frontier = self._frontier
        pin = self._handle.pin_when(lambda trace: frontier.is_empty() or frontier < trace.upper, timeout_s=timeout_s)
        if pin is None:
            return None
        try:
            batch = self._machine.next_listen_batch(frontier, timeout_s=0)
            assert batch is not None, "an upper never goes back"
            since = batch.desc.since
            if not (since < frontier or (since == frontier and not self._started)):
                raise self._advanced_beyond(batch)
            return batch, pin
        except BaseException:
            pin.release()
            raise

    def _advanced_beyond(self, batch: HollowBatch) -> PersistError:
        """The error for a `batch` whose times are no longer distinguishable: the lease was lost, or else an invariant is broken."""
        what = f"batch {batch.desc} of {self._machine.shard_id} is advanced beyond the listener at {self._frontier}"
        if self._handle.reader_id in self._machine.state.leased_readers:
            return InvariantViolated(what)
        return Fenced(f"{what}: the lease of reader {self._handle.reader_id} lapsed; open a new reader")

    def skip_to(self, frontier: Antichain) -> None:
        """Skips everything before `frontier`. This is for a caller that knows those updates because it appended them. It must not be called
        while events of a batch are outstanding.
        """
        if self._frontier < frontier:
            self._passed = self._frontier
            self._move_to(frontier)

    def _selected(self, batch: HollowBatch) -> tuple[ListenFilter, Selection]:
        lower = self._frontier.time
        assert lower is not None
        times = Times(first=max(self._as_of + 1, lower))
        batches = self._source.expanded([batch])
        selection = select(batches, where=self._where, times=times, audited=self._handle.audited)
        self._source.metrics.count("stats_skipped_parts", selection.skipped_parts, shard=self._source.shard_id)
        return ListenFilter(as_of=self._as_of, lower=lower), selection

    def _give_out(self, batch: HollowBatch, pin: Pin) -> Iterator[Updates | Progress]:
        try:
            rows, selection = self._selected(batch)
            row_filter: RowFilter = rows if self._where is None else Matching(rows, self._where)
            for skipped in selection.audits:
                audit(self._source, skipped, row_filter, self._where)
            for each in selection.batches:
                for table in read_parts(self._source, each, row_filter):
                    if table.num_rows:
                        yield Updates(table)
        finally:
            pin.release()
        yield self._advance(batch)

    def _advance(self, batch: HollowBatch) -> Progress:
        if self._frontier < batch.desc.upper:
            self._passed = self._frontier
        self._move_to(batch.desc.upper)  # only now, so that a batch that failed half way is yielded again
        return Progress(self._frontier)

    def _move_to(self, frontier: Antichain) -> None:
        self._started, self._frontier = True, frontier
        if not self._is_closed:
            # Never go past the readable times: otherwise no reader could read the shard again.
            self.needs = EMPTY if frontier.time is None else Antichain.of(frontier.newest_complete)
