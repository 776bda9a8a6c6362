"""The parts of a running sink, each with an inbox: N workers, one control (mint and append), one reader.

    inputs ──rows by hash──▶ worker 0 .. N-1 ──staged batches──▶ control ──compare-and-append──▶ shard
       └────frontiers──────────▲──────┴─────────────────────────────▲  │                          │
                               └────────── descriptions ───────────────┘                          │
                               └────────── persisted rows by hash, frontier ◀── reader ◀──────────┘

A part handles one event at a time and knows nothing of threads. `dataflow.sink.handle` gives each part its own thread.
A test may call `handle` in any order. The decisions are those of `flow`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias, assert_never

import pyarrow as pa

from persist_engine.base.errors import AmbiguousAppend
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.listen import Progress
from persist_engine.client.write.batch import Batch, BatchBuilder
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, UpperMismatch
from persist_engine.dataflow.sink.readback import ReadBack
from persist_engine.flow.append import Append, Commit, Delete
from persist_engine.flow.correction import BufferSize
from persist_engine.flow.desired import Stream
from persist_engine.flow.mint import Describe, Mint, MintInstruction, RaiseUpper
from persist_engine.flow.write import Stage, Staged, Write, WriteInstruction
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.model.maintenance import Maintenance
from persist_engine.rows.partitioning import deal
from persist_engine.shard.applier import NO_MAINTENANCE

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desired:
    """More rows of the desired collection."""

    updates: pa.Table


@dataclass(frozen=True, slots=True)
class DesiredFrontier:
    """`stream` has no more rows before `frontier`, from any input."""

    stream: Stream
    frontier: Antichain


@dataclass(frozen=True, slots=True)
class Persisted:
    """More rows of the persisted collection."""

    updates: pa.Table


@dataclass(frozen=True, slots=True)
class PersistedFrontier:
    """All persisted rows before `frontier` were sent."""

    frontier: Antichain


@dataclass(frozen=True, slots=True)
class ShardUpper:
    """The shard's upper, as some part observed it."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A worker's share of the description with this lower."""

    lower: Antichain
    batch: Batch


@dataclass(frozen=True, slots=True)
class StagedBefore:
    """Worker `worker` will stage nothing more before `frontier`."""

    worker: int
    frontier: Antichain


@dataclass(frozen=True, slots=True)
class AllowWrites:
    """Leaves read-only mode."""


WorkerEvent: TypeAlias = Desired | DesiredFrontier | Persisted | PersistedFrontier | Describe
ControlEvent: TypeAlias = DesiredFrontier | ShardUpper | StagedBatch | StagedBefore | AllowWrites
Event: TypeAlias = WorkerEvent | ControlEvent


class Inbox:
    """Events in order. Thread-safe. `put` blocks rows while more than `bytes_max` of them are queued. All other events
    are queued at once, so that parts that send to each other never deadlock.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, event: Event) -> None:
        """Appends the event. Drops it when the inbox is closed."""
        size_bytes = _size_bytes(event)
        with self._changed:
            while size_bytes and self._bytes and self._bytes + size_bytes > self._bytes_max and not self._closed:
                self._changed.wait()
            if not self._closed or isinstance(event, StagedBatch):  # a staged batch has blobs, which must be deleted
                self._events.append(event)
                self._bytes += size_bytes
                self._changed.notify_all()

    def take(self) -> Event | None:
        """Waits for the next event and returns it. Returns None when the inbox is closed, even if it still holds events."""
        with self._changed:
            while not self._events and not self._closed:
                self._changed.wait()
            return None if self._closed else self._pop()

    def poll(self) -> Event | None:
        """The next event, even if the inbox is closed; None when there is none."""
        with self._changed:
            return self._pop() if self._events else None

    def close(self) -> None:
        """Wakes all waiters; `take` returns None from now on. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._events)

    def _pop(self) -> Event:
        event = self._events.popleft()
        self._bytes -= _size_bytes(event)
        self._changed.notify_all()
        return event


def _size_bytes(event: Event) -> int:
    return max(1, event.updates.nbytes) if isinstance(event, Desired | Persisted) else 0


class Worker:
    """Runs one Write machine: buffers its share of the rows and stages its share of the batches."""

    def __init__(self, index: int, write: Write, writer: WriteHandle, control: Inbox) -> None:
        self._index, self._write, self._writer, self._control = index, write, writer, control
        self.size: BufferSize = write.buffer.size()
        """The size of the buffer as of the last event."""

    @property
    def persisted(self) -> Antichain:
        """The frontier up to which it has received the rows of the shard."""
        return self._write.persisted

    def handle(self, event: Event) -> None:
        """Handles one event. Raises the errors of staging; the worker must not be used after an error."""
        match event:
            case Desired(updates):
                self._write.on_desired(updates)
            case Persisted(updates):
                self._write.on_persisted(updates)
            case DesiredFrontier(stream, frontier):
                self._follow(self._write.on_desired_frontier(stream, frontier))
            case PersistedFrontier(frontier):
                self._follow(self._write.on_persisted_frontier(frontier))
            case Describe():
                self._follow(self._write.on_description(event))
            case _:
                raise AssertionError(f"a worker knows nothing of {event}")
        self.size = self._write.buffer.size()

    def _follow(self, instructions: list[WriteInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Stage():
                    self._stage(instruction)
                case Staged(before):
                    self._control.put(StagedBefore(self._index, before))
                case _:
                    assert_never(instruction)

    def _stage(self, stage: Stage) -> None:
        builder: BatchBuilder | None = None
        try:
            for table in self._write.corrections(stage):
                builder = builder or self._writer.builder(stage.lower)
                builder.add(table)
            if builder is not None:
                self._control.put(StagedBatch(stage.lower, builder.finish(stage.upper)))
        finally:
            if builder is not None:
                builder.abandon()  # has no effect after `finish`


class Control:
    """Runs Mint and Append. It is the only part that writes to the shard's state."""

    def __init__(self, mint: Mint, writer: WriteHandle, workers: Sequence[Inbox]) -> None:
        self._mint, self._writer, self._workers = mint, writer, workers
        self._append: Append[Batch] = Append()
        self._staged_before = [MINIMUM] * len(workers)
        self._maintenance = NO_MAINTENANCE
        self._maintenance_lock = threading.Lock()
        self.persist_frontier = mint.persist_frontier
        """The lower of the next batch, as of the last event."""
        self.lapses = 0
        """Appends whose outcome could not be determined, because the writer's lease had lapsed meanwhile."""

    def handle(self, event: Event) -> None:
        """Handles one event. Raises Unavailable when the outcome of a commit is unknown; its blobs are then kept."""
        match event:
            case DesiredFrontier(stream, frontier):
                self._minted(self._mint.on_desired_frontier(stream, frontier))
            case ShardUpper(upper):
                self._minted(self._mint.on_shard_upper(upper))
            case AllowWrites():
                self._minted(self._mint.allow_writes())
            case StagedBatch(lower, batch):
                self._appended(self._append.on_batch(lower, batch))
            case StagedBefore(worker, frontier):
                self._staged_before[worker] = self._staged_before[worker].join(frontier)
                self._appended(self._append.on_batches_frontier(reduce(Antichain.meet, self._staged_before)))
            case _:
                raise AssertionError(f"the control knows nothing of {event}")
        self.persist_frontier = self._mint.persist_frontier

    def take_maintenance(self) -> Maintenance:
        """The maintenance that appends since the last call left. Thread-safe."""
        with self._maintenance_lock:
            taken, self._maintenance = self._maintenance, NO_MAINTENANCE
        return taken

    def close(self, inbox: Inbox) -> None:
        """Deletes staged batches that will not be appended, here or in `inbox`."""
        while (event := inbox.poll()) is not None:
            if isinstance(event, StagedBatch):
                self._delete((event.batch,))
        for instruction in self._append.on_close():
            if isinstance(instruction, Delete):
                self._delete(instruction.batches)

    def _minted(self, instructions: list[MintInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case RaiseUpper(to):
                    self._raise_upper(to)
                case Describe():
                    for worker in self._workers:
                        worker.put(instruction)
                    self._appended(self._append.on_description(instruction))
                case _:
                    assert_never(instruction)

    def _appended(self, instructions: list[Commit[Batch] | Delete[Batch]]) -> None:
        todo = deque(instructions)
        while todo:
            instruction = todo.popleft()
            match instruction:
                case Delete(batches):
                    self._delete(batches)
                case Commit():
                    todo.extend(self._commit(instruction))
                case _:
                    assert_never(instruction)

    def _commit(self, commit: Commit[Batch]) -> list[Commit[Batch] | Delete[Batch]]:
        metrics = self._writer.machine.metrics
        if commit.raise_first:
            self._raise_upper(commit.lower)
        try:
            outcome = self._writer.compare_and_append_batch(
                commit.batches, expected_upper=commit.lower, new_upper=commit.upper
            )
        except AmbiguousAppend as error:
            return self._on_unknown(commit, error)
        match outcome:
            case Appended(upper, maintenance):
                self._keep(maintenance)
                metrics.count("sink_append", outcome="appended")
                answer, current = self._append.on_appended(), upper
            case UpperMismatch(current=current):
                metrics.count("sink_append", outcome="lost")
                answer = self._append.on_mismatch(current)
            case _:
                raise AssertionError(f"an append without progress answered {outcome}")
        self._minted(self._mint.on_shard_upper(current))
        return answer

    def _on_unknown(self, commit: Commit[Batch], error: AmbiguousAppend) -> list[Commit[Batch] | Delete[Batch]]:
        """Continues as after a restart: the result of `commit`, if any, is read back, and the rest is corrected."""
        current = self._writer.fetch_recent_upper()
        if not commit.lower < current:
            raise error
        self._count_lapse(error)
        for batch in commit.batches:
            batch.mark_spent("maybe appended")
        answer = self._append.on_unknown(current)
        self._minted(self._mint.on_shard_upper(current))
        return answer

    def _count_lapse(self, error: AmbiguousAppend) -> None:
        self.lapses += 1
        self._writer.machine.metrics.count("sink_lapses", handle="writer")
        _log.warning("a sink goes on: %s", error, extra={"shard": self._writer.shard_id})

    def _raise_upper(self, to: Antichain) -> None:
        """See flow.mint.RaiseUpper."""
        current = self._writer.fetch_recent_upper()
        while current < to:
            try:
                outcome = self._writer.compare_and_append_batch([], expected_upper=current, new_upper=to)
            except AmbiguousAppend as error:
                self._count_lapse(error)
                current = self._writer.fetch_recent_upper()
                continue
            if isinstance(outcome, Appended):
                self._keep(outcome.maintenance)
                return
            assert isinstance(outcome, UpperMismatch), "an append without progress"
            current = outcome.current

    def _keep(self, maintenance: Maintenance) -> None:
        with self._maintenance_lock:
            self._maintenance = self._maintenance.merge(maintenance)

    def _delete(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._writer.discard(batch)  # a failed deletion must not end the sink


class Reader:
    """Sends the rows read back to the workers, by hash, and every new upper to control."""

    def __init__(self, readback: ReadBack, workers: Sequence[Inbox]) -> None:
        self._readback, self._workers = readback, workers

    @property
    def has_ended(self) -> bool:
        """Whether the shard is closed, so that no more events come."""
        return self._readback.frontier.is_empty()

    def step(self, *, timeout_s: float | None = None) -> None:
        """Waits for events (see ReadBack.events) and forwards them."""
        for event in self._readback.events(timeout_s=timeout_s):
            if isinstance(event, Progress):
                for inbox in self._workers:
                    inbox.put(PersistedFrontier(event.frontier))
                continue
            for inbox, share in zip(self._workers, deal(event.table, len(self._workers)), strict=True):
                if share.num_rows:
                    inbox.put(Persisted(share))

    @property
    def frontier(self) -> Antichain:
        """The frontier up to which the shard was read back."""
        return self._readback.frontier

    @property
    def handle(self) -> ReadHandle:
        """The reader whose lease is in use."""
        return self._readback.reader

    @property
    def lapses(self) -> int:
        """The number of leases that lapsed and were replaced."""
        return self._readback.lapses

    def stop(self) -> None:
        """Makes a waiting `step` return."""
        self._readback.stop()

    def close(self) -> None:
        """Releases the blobs. The owner of the handle expires it."""
        self._readback.close()
