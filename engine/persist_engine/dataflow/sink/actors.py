"""The parts of a running sink, each with an inbox: N workers, one control (mint and append), one reader.

    inputs ──rows by hash──▶ worker 0 .. N-1 ──staged batches──▶ control ──compare-and-append──▶ shard
       └────frontiers──────────▲──────┴─────────────────────────────▲  │                          │
                               └────────── descriptions ───────────────┘                          │
                               └────────── persisted rows by hash, frontier ◀── reader ◀──────────┘

A part handles one event at a time and knows nothing of threads: `client.sink` gives each its own, a test may call
`handle` in any order it likes. The decisions are those of `flow`.
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
    """More of what should be there."""

    updates: pa.Table


@dataclass(frozen=True, slots=True)
class DesiredFrontier:
    """No more of `stream` before `frontier`, whatever the input."""

    stream: Stream
    frontier: Antichain


@dataclass(frozen=True, slots=True)
class Persisted:
    """More of what is there."""

    updates: pa.Table


@dataclass(frozen=True, slots=True)
class PersistedFrontier:
    """Everything that is there before `frontier` has come."""

    frontier: Antichain


@dataclass(frozen=True, slots=True)
class ShardUpper:
    """The shard's upper, as somebody saw it."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A worker's share of the description with this lower."""

    lower: Antichain
    batch: Batch


@dataclass(frozen=True, slots=True)
class StagedBefore:
    """Worker `worker` stages nothing before `frontier` any more."""

    worker: int
    frontier: Antichain


@dataclass(frozen=True, slots=True)
class AllowWrites:
    """Leave read-only mode."""


WorkerEvent: TypeAlias = Desired | DesiredFrontier | Persisted | PersistedFrontier | Describe
ControlEvent: TypeAlias = DesiredFrontier | ShardUpper | StagedBatch | StagedBefore | AllowWrites
Event: TypeAlias = WorkerEvent | ControlEvent


class Inbox:
    """Events in their order. Thread-safe. Rows wait outside while more than `bytes_max` of them are inside; all else
    comes in at once, so that parts that send to each other never wait in a circle.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, event: Event) -> None:
        """Append; dropped when the inbox is closed."""
        size_bytes = _size_bytes(event)
        with self._changed:
            while size_bytes and self._bytes and self._bytes + size_bytes > self._bytes_max and not self._closed:
                self._changed.wait()
            if not self._closed or isinstance(event, StagedBatch):  # a batch is blobs: somebody must delete them
                self._events.append(event)
                self._bytes += size_bytes
                self._changed.notify_all()

    def take(self) -> Event | None:
        """The next event; waits for one. None when the inbox is closed, whatever is left in it."""
        with self._changed:
            while not self._events and not self._closed:
                self._changed.wait()
            return None if self._closed else self._pop()

    def poll(self) -> Event | None:
        """The next event, closed or not; None when there is none."""
        with self._changed:
            return self._pop() if self._events else None

    def close(self) -> None:
        """Wake everybody; nothing is taken any more. Idempotent."""
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
    """Runs one Write machine: buffers its share of rows, stages its share of batches."""

    def __init__(self, index: int, write: Write, writer: WriteHandle, control: Inbox) -> None:
        self._index, self._write, self._writer, self._control = index, write, writer, control
        self.size: BufferSize = write.buffer.size()
        """As of the last event."""

    @property
    def persisted(self) -> Antichain:
        """How far it has seen the shard."""
        return self._write.persisted

    def handle(self, event: Event) -> None:
        """One step. Raises what staging raises; the worker is of no use then."""
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
                builder.abandon()  # nothing happens after `finish`


class Control:
    """Runs Mint and Append, and is the only part that writes to the shard's state."""

    def __init__(self, mint: Mint, writer: WriteHandle, workers: Sequence[Inbox]) -> None:
        self._mint, self._writer, self._workers = mint, writer, workers
        self._append: Append[Batch] = Append()
        self._staged_before = [MINIMUM] * len(workers)
        self._maintenance = NO_MAINTENANCE
        self._maintenance_lock = threading.Lock()
        self.persist_frontier = mint.persist_frontier
        """Where the next batch joins, as of the last event."""
        self.lapses = 0
        """Appends whose outcome nobody could tell any more, because the writer's lease had lapsed meanwhile."""

    def handle(self, event: Event) -> None:
        """One step. Unavailable: a commit's outcome is unknown, its blobs are left alone."""
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
        """What the appends since the last call left for later. Thread-safe."""
        with self._maintenance_lock:
            taken, self._maintenance = self._maintenance, NO_MAINTENANCE
        return taken

    def close(self, inbox: Inbox) -> None:
        """Delete what was staged and will not be appended, in here or on its way in `inbox`."""
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
            return self._lost_sight_of(commit, error)
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

    def _lost_sight_of(self, commit: Commit[Batch], error: AmbiguousAppend) -> list[Commit[Batch] | Delete[Batch]]:
        """Go on as a restart would: whatever became of `commit` is read back, and what is missing corrected."""
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
            self._writer.discard(batch)  # a sink does not end because of what it tidies up


class Reader:
    """Passes what is read back on to the workers, by hash, and every new upper to control."""

    def __init__(self, readback: ReadBack, workers: Sequence[Inbox]) -> None:
        self._readback, self._workers = readback, workers

    @property
    def has_ended(self) -> bool:
        """Whether the shard is closed: nothing comes any more."""
        return self._readback.frontier.is_empty()

    def step(self, *, timeout_s: float | None = None) -> None:
        """Wait for news (see ReadBack.events) and pass them on."""
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
        """How far the shard was read back."""
        return self._readback.frontier

    @property
    def handle(self) -> ReadHandle:
        """The reader whose lease it reads under now."""
        return self._readback.reader

    @property
    def lapses(self) -> int:
        """How often a lease lapsed and was replaced."""
        return self._readback.lapses

    def stop(self) -> None:
        """Let a waiting `step` end."""
        self._readback.stop()

    def close(self) -> None:
        """Let go of blobs. The handle is its owner's to expire."""
        self._readback.close()
