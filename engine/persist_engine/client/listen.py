"""Listen: what is appended after a time, batch by batch (spec 15.3). Owns the listener's frontier and the since that
trails it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from persist_engine.base.errors import Fenced, InvariantViolated, PersistError
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain
from persist_engine.shard.fetch import ListenFilter, PartSource, read_parts
from persist_engine.shard.machine import Machine

if TYPE_CHECKING:
    from persist_engine.client.read import ReadHandle


@dataclass(frozen=True, slots=True)
class Updates:
    """Rows (key, val, time, diff), in no order and not consolidated; all before the next Progress."""

    table: pa.Table


@dataclass(frozen=True, slots=True)
class Progress:
    """Every update before `frontier` has been given out; empty: the shard is closed and this is the last event."""

    frontier: Antichain


class Listen:
    """An iterator of Updates and Progress strictly after `as_of`. Not thread-safe. Ends when the shard is closed.

    `next` blocks until the shard's upper moves. Blobs of the batch being given out stay pinned; the handle's since
    trails the frontier by one batch, so that the times just given out can still be told apart.
    """

    def __init__(self, handle: ReadHandle, machine: Machine, source: PartSource, *, as_of: int) -> None:
        self._handle = handle
        self._machine = machine
        self._source = source
        self._as_of = as_of
        self._frontier = Antichain.of(as_of)
        self._started = False
        self._events: Iterator[Updates | Progress] = iter(())

    @property
    def frontier(self) -> Antichain:
        """Everything before it has been given out (and nothing at or before `as_of` ever is)."""
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

    def next_batch(self, *, timeout_s: float | None) -> Iterator[Updates | Progress] | None:
        """The events of the next batch, to be consumed before the next call; None when none came within `timeout_s`.

        When consuming them raises (Unavailable), the next call gives out the batch from its beginning: what came after
        the last Progress is to be dropped.
        """
        release = self._handle.pin()
        try:
            batch = self._machine.next_listen_batch(self._frontier, timeout_s=timeout_s)
        except BaseException:
            release()
            raise
        if batch is None:
            release()
            return None
        since, frontier = batch.desc.since, self._frontier
        if not (since < frontier or (since == frontier and not self._started)):
            release()
            raise self._advanced_beyond(batch)
        return self._give_out(batch, release)

    def _advanced_beyond(self, batch: HollowBatch) -> PersistError:
        """What it means that the times of `batch` can no longer be told apart: nobody held them for us, or a broken rule."""
        what = f"batch {batch.desc} of {self._machine.shard_id} is advanced beyond the listener at {self._frontier}"
        if self._handle.reader_id in self._machine.state.leased_readers:
            return InvariantViolated(what)
        return Fenced(f"{what}: the lease of reader {self._handle.reader_id} ran out, open a new reader")

    def skip_to(self, frontier: Antichain) -> None:
        """Give out nothing before `frontier`: the caller knows those updates, because it appended them itself. Not while
        events of a batch are outstanding.
        """
        lower = self._frontier
        if lower < frontier:
            self._frontier, self._started = frontier, True
            self._handle.maybe_downgrade_since(lower)

    def _give_out(self, batch: HollowBatch, release: Callable[[], None]) -> Iterator[Updates | Progress]:
        lower = self._frontier
        assert lower.time is not None
        try:
            row_filter = ListenFilter(as_of=self._as_of, lower=lower.time)
            for table in read_parts(self._source, batch, row_filter):
                if table.num_rows:
                    yield Updates(table)
        finally:
            release()
        self._started = True  # only now: a batch that failed half-way is given out again
        self._frontier = batch.desc.upper
        if lower < batch.desc.upper:
            self._handle.maybe_downgrade_since(lower)
        yield Progress(self._frontier)
