"""Sink: keeps a shard equal to a desired collection, with N workers in this process (spec 17).

    with open_sink(client, shard_id, schema, workers=4) as sink:
        sink.inputs[0].insert([(((1,), ("one",)), 5, +1)])      # the row exists from time 5 on
        sink.inputs[0].insert([(((1,), ("one",)), 9, -1)])      # and is gone at 9
        for an_input in sink.inputs:
            an_input.advance(Antichain.of(10))                  # no more updates before 10
        sink.wait_for_upper(Antichain.of(10))

The sink writes desired minus persisted. If another process changed the shard, the next append corrects it. A restarted sink
that receives the same inputs again writes nothing. Replicas of one sink together write each change once.

This module owns the threads (one for each worker, one for mint and append, one that reads back), the public handle, and the
shutdown. The parts are in `dataflow.sink.actors`, and their decisions in `flow`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, PersistError, SinkFailed, Unavailable, UpdateNotBeyondLower
from persist_engine.client.arguments import expect, expect_count, expect_seconds, unexpected
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.write.handle import WriteHandle
from persist_engine.dataflow.sink.actors import (
    AllowWrites,
    Control,
    Desired,
    DesiredFrontier,
    Inbox,
    Reader,
    ShardUpper,
    Worker,
)
from persist_engine.dataflow.sink.readback import ReadBack
from persist_engine.dataflow.sink.spill import ArrowLaws, SpillFiles
from persist_engine.flow.correction import BufferPolicy, BufferSize, CorrectionBuffer
from persist_engine.flow.desired import DesiredFrontiers, Stream
from persist_engine.flow.mint import Mint
from persist_engine.flow.refresh import Refresh
from persist_engine.flow.write import Write
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain, TimeLike, frontier_of
from persist_engine.model.maintenance import Maintenance
from persist_engine.rows.errors_column import Errors, tag_errors, tag_rows
from persist_engine.rows.ingest import Updates, normalise
from persist_engine.rows.partitioning import deal
from persist_engine.rows.schema import Schema
from persist_engine.shard.watch import wait_until

_log = logging.getLogger(__name__)

WORKERS_MAX = 256
#: The least memory of a worker. With less, there is no room even for the windows of its merges.
WORKER_MEMORY_BYTES_MIN = 1 << 20
#: A worker's inbox may hold this fraction (one in `_INBOX_SHARE`) of its memory.
_INBOX_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The configuration of a sink."""

    workers: int = 1
    """The number of threads that buffer and stage rows. Each has its share of the rows."""
    as_of: int = 0
    """The first time to write. Desired updates at earlier times count as updates at this time."""
    read_only: bool = False
    """Whether the sink only follows both sides and writes nothing until `allow_writes`."""
    errors: bool = False
    """Whether the collection may be in error (rows.errors_column). The shard then has the schema
    `with_errors(schema)`.
    """
    refresh: Refresh | None = None
    """The times at which the shard shows the desired collection. None: at all times."""
    memory_limit_bytes: int = 256 << 20
    """The approximate memory bound of all correction buffers together. The excess is spilled."""
    spill_directory: Path | None = None
    """The directory in which the sink makes its own spill directory, which it deletes at the end. None: the system's temporary
    directory.
    """

    def __post_init__(self) -> None:
        for name in ("read_only", "errors"):
            expect(getattr(self, name), bool, name, "True or False")
        expect_count(self.workers, "workers", least=1)
        expect_count(self.as_of, "as_of", least=0)
        expect_count(self.memory_limit_bytes, "memory_limit_bytes", least=1)
        if not isinstance(self.refresh, Refresh | None):
            raise unexpected(self.refresh, "refresh", "a Refresh, or None")
        if not isinstance(self.spill_directory, Path | None):
            raise unexpected(self.spill_directory, "spill_directory", "a Path, or None")
        if not 1 <= self.workers <= WORKERS_MAX:
            raise InvalidUsage(f"a sink has 1 to {WORKERS_MAX} workers, not {self.workers}")
        if not 0 <= self.as_of <= DATA_TIME_MAX:
            raise InvalidUsage(f"as_of must be a time in [0, {DATA_TIME_MAX}], not {self.as_of}")
        least = self.workers * WORKER_MEMORY_BYTES_MIN
        if self.memory_limit_bytes < least:
            raise InvalidUsage(
                f"memory_limit_bytes {self.memory_limit_bytes} is too little for {self.workers} workers: at least {least}"
            )

    def no_frontiers(self) -> DesiredFrontiers:
        """The frontiers before anything is known."""
        return DesiredFrontiers() if self.errors else DesiredFrontiers.without_errors()


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkParts:
    """A sink without threads: every part and its inbox."""

    workers: list[Worker]
    worker_inboxes: list[Inbox]
    control: Control
    control_inbox: Inbox
    reader: Reader


def assemble(
    options: SinkOptions,
    *,
    open_reader: Callable[[], ReadHandle],
    writer: WriteHandle,
    spill_directory: Callable[[int], Path],
) -> SinkParts:
    """Makes the parts of a sink on one shard. Registers a reader. `spill_directory` makes a directory for the worker with the
    given number.
    """
    share = options.memory_limit_bytes // options.workers
    as_of = Antichain.of(options.as_of)
    inboxes = [Inbox(share // _INBOX_SHARE) for _ in range(options.workers)]
    control_inbox = Inbox(1)
    mint = Mint(options.no_frontiers(), as_of=as_of, read_only=options.read_only)
    policy = BufferPolicy(memory_bytes=share)

    def worker(index: int) -> Worker:
        spill = SpillFiles(partial(spill_directory, index))
        buffer = CorrectionBuffer(ArrowLaws(), since=as_of, policy=policy, spill=spill)
        return Worker(index, Write(options.no_frontiers(), buffer), writer, control_inbox)

    def on_upper(upper: Antichain) -> None:
        control_inbox.put(ShardUpper(upper))

    return SinkParts(
        workers=[worker(index) for index in range(options.workers)],
        worker_inboxes=inboxes,
        control=Control(mint, writer, inboxes),
        control_inbox=control_inbox,
        reader=Reader(ReadBack(open_reader, writer, on_upper=on_upper), inboxes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStatus:
    """The state of a sink at one moment. Its parts may be one step apart."""

    read_only: bool
    desired: Antichain
    """The frontier before which all desired updates are known, after rounding to refreshes."""
    persist_frontier: Antichain
    """The lower of the next batch: the shard's upper, or as_of while that is greater."""
    read_back: Antichain
    """The frontier before which every worker has received everything that the shard holds."""
    buffers: tuple[BufferSize, ...]
    """The buffer (desired minus persisted) of each worker. If all are without rows, the shard is as desired, as far as both
    sides are known.
    """
    lapses: int = 0
    """The number of times that a lease of its reader or writer lapsed and was replaced."""

    @property
    def buffered_rows(self) -> int:
        """The number of rows in all buffers. Some of them may still cancel."""
        return sum(buffer.rows for buffer in self.buffers)


class SinkInput:
    """The input of one source to a sink. Calls on one input are serialized. Inputs are independent of each other."""

    def __init__(self, sink: Sink, index: int) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._frontiers = sink.options.no_frontiers()
        self._index = index

    def insert(self, updates: Updates) -> None:
        """Changes the desired collection by `updates`, at or past this input's frontier. Blocks while workers are behind. Keeps
        the arrays under `updates`, which must not change while the sink runs. Raises UpdateNotBeyondLower and SchemaMismatch;
        then nothing of the wrong table was accepted. Raises SinkFailed.
        """
        with self._lock:
            lower = self._frontiers.by_stream[Stream.OK]
            for table in normalise(updates, self._sink.schema):
                self._sink.insert(self._checked(table, lower))

    def insert_errors(self, errors: Errors) -> None:
        """Changes the errors of the collection. Raises InvalidUsage for a sink without errors. Otherwise like `insert`."""
        with self._lock:
            lower = self._frontiers.by_stream[Stream.ERR]
            table = self._sink.tagged_errors(errors)
            if table.num_rows:
                self._sink.insert_tagged(self._checked(table, lower))

    def advance(self, frontier: TimeLike) -> None:
        """Declares that no more updates come before `frontier`. The empty frontier means no more updates at all. Idempotent.
        Raises InvalidUsage when the frontier goes back.
        """
        self._advance(Stream.OK, frontier_of(frontier))

    def advance_errors(self, frontier: TimeLike) -> None:
        """Declares that no more updates of errors come before `frontier`. Only times that both frontiers have passed
        are written.
        """
        if not self._sink.options.errors:
            raise InvalidUsage("this sink was opened without errors")
        self._advance(Stream.ERR, frontier_of(frontier))

    def _advance(self, stream: Stream, frontier: Antichain) -> None:
        with self._lock:
            self._frontiers.advance(stream, frontier)
            self._sink.advance(self._index, stream, frontier)

    def _checked(self, table: pa.Table, lower: Antichain) -> pa.Table:
        least = pc.min(table.column("time")).as_py()
        if not lower.less_equal(least):
            raise UpdateNotBeyondLower(
                f"update at time {least} after input {self._index} advanced to {lower}", ts=least, lower=lower
            )
        return table


class Sink:
    """See the module docstring. Thread-safe. A context manager that closes the sink on exit.

    When a part fails, all parts stop, and every further call raises SinkFailed with the name of the part. Appended batches
    stay. A lapsed lease (the machine slept) is not a failure as long as no updates were missed: see dataflow.sink.readback.
    """

    def __init__(
        self, schema: Schema, *, open_reader: Callable[[], ReadHandle], writer: WriteHandle, options: SinkOptions
    ) -> None:
        """Takes ownership of `writer` and of the readers that `open_reader` opens. All of them must use the shard's schema, with
        errors if the sink has them. Starts the threads.
        """
        self.schema, self.options = schema, options
        self._writer = writer
        self._machine = writer.machine
        self._directory: Path | None = None
        self._read_only = options.read_only
        self._lock, self._report_lock = threading.Lock(), threading.Lock()
        self._frontiers = [options.no_frontiers() for _ in range(options.workers)]
        self._desired = options.no_frontiers()
        self._failure: SinkFailed | None = None
        self._was_raised = False
        self._closed = False
        self._sizes_reported = (0, 0)
        self._parts = assemble(options, open_reader=open_reader, writer=writer, spill_directory=self._spill_directory)
        self.inputs = tuple(SinkInput(self, index) for index in range(options.workers))
        """One input per worker. Any row may come through any input."""
        self._threads = [
            *(self._thread(f"worker {i}", partial(self._work, i)) for i in range(options.workers)),
            self._thread("control", self._run_control),
            self._thread("reader", self._read),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise

    # -- public calls --------------------------------------------------------------------------------------------------

    def allow_writes(self) -> None:
        """Leaves read-only mode permanently. Idempotent."""
        self._check()
        self._read_only = False
        self._parts.control_inbox.put(AllowWrites())

    def status(self) -> SinkStatus:
        """The current state of its parts. Raises SinkFailed."""
        self._check()
        with self._lock:
            desired = self._desired.frontier
        return SinkStatus(
            read_only=self._read_only,
            desired=desired,
            persist_frontier=self._parts.control.persist_frontier,
            read_back=reduce(Antichain.meet, [worker.persisted for worker in self._parts.workers]),
            buffers=tuple(worker.size for worker in self._parts.workers),
            lapses=self._parts.reader.lapses + self._parts.control.lapses,
        )

    def wait_for_upper(self, frontier: TimeLike, *, timeout_s: float | None = None) -> bool:
        """Waits until the shard's upper is at or past `frontier`, whichever process writes it. Returns False when `timeout_s`
        passed first. Raises SinkFailed.
        """
        target = frontier_of(frontier)
        expect_seconds(timeout_s, "timeout_s")
        return self._wait(lambda: target <= self._machine.state.trace.upper, timeout_s)

    def take_maintenance(self) -> Maintenance:
        """The maintenance that appends since the last call left. The caller may perform it."""
        return self._parts.control.take_maintenance()

    def close(self) -> None:
        """Stops the sink. Deletes staged batches that were not appended, and spill files. Expires the reader and the
        writer. Does not wait for pending updates to be appended, but waits for store calls in progress. Idempotent.
        Raises SinkFailed unless it was already raised.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop()
        for thread in self._threads:
            thread.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        reader = self._parts.reader
        trouble: PersistError | None = None
        forget = partial(self._parts.control.close, self._parts.control_inbox)
        for end in (forget, reader.close, self._writer.expire, reader.handle.expire):
            try:
                end()
            except PersistError as error:
                # End the other parts, too. The lease lapses later, and the sink's own failure is more important.
                _log.warning("could not end a part of a sink: %s", error, extra={"shard": self._writer.shard_id})
                trouble = trouble or (None if isinstance(error, Unavailable) else error)
        if self._failure is not None and not self._was_raised:
            self._was_raised = True
            raise self._failure
        if trouble is not None:
            raise trouble

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.close()
        except PersistError:
            if error is None:
                raise

    def __repr__(self) -> str:
        return (
            f"Sink({self._writer.shard_id}, {self.options.workers} workers, at {self._parts.control.persist_frontier})"
        )

    # -- calls of inputs -----------------------------------------------------------------------------------------------

    def tagged_errors(self, errors: Errors) -> pa.Table:
        """`errors` as updates of the shard."""
        if not self.options.errors:
            raise InvalidUsage("this sink was opened without errors")
        return tag_errors(errors, self._writer.schema)

    def insert(self, updates: pa.Table) -> None:
        """Inserts checked updates of rows."""
        self.insert_tagged(tag_rows(updates, self._writer.schema) if self.options.errors else updates)

    def insert_tagged(self, updates: pa.Table) -> None:
        """Sends checked updates of the shard to their workers."""
        refresh = self.options.refresh
        shown = updates if refresh is None else refresh.apply(updates)
        self._check()
        for inbox, share in zip(self._parts.worker_inboxes, deal(shown, len(self._parts.worker_inboxes)), strict=True):
            if share.num_rows:
                inbox.put(Desired(share))
        self._check()

    def advance(self, index: int, stream: Stream, frontier: Antichain) -> None:
        """Declares that input `index` inserts nothing more before `frontier` into `stream`."""
        refresh = self.options.refresh
        rounded = frontier if refresh is None else refresh.frontier(frontier)
        self._check()
        with self._lock:  # the lock makes frontiers reach every inbox in order
            self._frontiers[index].advance(stream, rounded)
            common = reduce(Antichain.meet, [of.by_stream[stream] for of in self._frontiers])
            if common == self._desired.by_stream[stream]:
                return
            self._desired.advance(stream, common)
            for inbox in (*self._parts.worker_inboxes, self._parts.control_inbox):
                inbox.put(DesiredFrontier(stream, common))

    # -- threads -------------------------------------------------------------------------------------------------------

    def _spill_directory(self, index: int) -> Path:
        """The spill directory of a worker, made at its first spill."""
        with self._lock:
            if self._directory is None:
                parent = self.options.spill_directory
                if parent is not None:
                    parent.mkdir(parents=True, exist_ok=True)
                self._directory = Path(tempfile.mkdtemp(prefix="persist-sink-", dir=parent))
        directory = self._directory / f"worker-{index}"
        directory.mkdir()
        return directory

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - the next call raises it
                self._fail(name, error)

        return threading.Thread(target=guarded, name=f"persist-sink-{name.replace(' ', '-')}", daemon=True)

    def _work(self, index: int) -> None:
        worker, inbox = self._parts.workers[index], self._parts.worker_inboxes[index]
        while (event := inbox.take()) is not None:
            worker.handle(event)
            self._report()

    def _run_control(self) -> None:
        while (event := self._parts.control_inbox.take()) is not None:
            self._parts.control.handle(event)

    def _read(self) -> None:
        while not (self._parts.reader.has_ended or self._stopping):
            self._parts.reader.step()

    def _report(self) -> None:
        """Updates the metrics of all buffers with their sizes after their last events (spec 18). The last worker that reports
        has seen the sizes of all.
        """
        metrics, shard = self._machine.metrics, self._writer.shard_id
        with self._report_lock:
            sizes = [worker.size for worker in self._parts.workers]
            metrics.gauge("sink_correction_rows", sum(s.rows for s in sizes), shard=shard)
            metrics.gauge("sink_correction_capacity_rows", sum(s.capacity_rows for s in sizes), shard=shard)
            metrics.gauge("sink_correction_rows_max_per_worker", max(s.rows for s in sizes), shard=shard)
            metrics.gauge("sink_correction_memory_bytes", sum(s.memory_bytes for s in sizes), shard=shard)
            metrics.gauge("sink_correction_spilled_bytes", sum(s.spilled_bytes for s in sizes), shard=shard)
            inserted, cancelled = sum(s.inserted_rows for s in sizes), sum(s.cancelled_rows for s in sizes)
            before, self._sizes_reported = self._sizes_reported, (inserted, cancelled)
            metrics.count("sink_correction_insertions", inserted - before[0])
            metrics.count("sink_correction_deletions", max(0, cancelled - before[1]))

    # -- shutdown ------------------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return self._closed or self._failure is not None

    def _stop(self) -> None:
        for inbox in (*self._parts.worker_inboxes, self._parts.control_inbox):
            inbox.close()
        self._parts.reader.stop()

    def _fail(self, name: str, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                failure = SinkFailed(f"{name} of the sink on shard {self._writer.shard_id} failed: {error}", part=name)
                failure.__cause__ = error
                self._failure = failure
        self._stop()

    def _check(self) -> None:
        if self._failure is not None:
            self._was_raised = True
            raise self._failure
        if self._closed:
            raise InvalidUsage(f"the sink on shard {self._writer.shard_id} was closed")

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        def look() -> bool | None:
            return True if self._stopping or condition() else None

        machine = self._machine
        found = wait_until(
            look,
            refresh=lambda: None,  # the reader thread refreshes
            watch=machine.watch,
            env=machine.env,
            settings=machine.settings.watch,
            timeout_s=timeout_s,
        )
        self._check()
        return found is not None
