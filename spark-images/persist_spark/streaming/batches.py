"""The batches of a stream: appends each one with the position after it, in one compare-and-set, under the position that this driver saw
last. Another driver of the same sink is therefore refused by the shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from persist_engine import PersistClient, ProgressMismatch, SourceProgress, WriteHandle
from persist_engine.base.env import Env
from persist_engine.base.errors import Fenced
from persist_engine.model.frontier import Antichain
from pyspark.sql import DataFrame

from persist_spark.frames import FEW_ROWS
from persist_spark.inputs.shard import read_before
from persist_spark.report import Log, SinkReport
from persist_spark.session import executor_count
from persist_spark.sink import Run
from persist_spark.spec import SinkSpec
from persist_spark.staging import Staging
from persist_spark.streaming.checkpoint import Checkpoint
from persist_spark.streaming.driver_upserts import DriverUpserts
from persist_spark.streaming.position import NO_BATCH, Position, committer, encode_position
from persist_spark.streaming.position_append import append_position

#: How long the position of batches without rows may stay uncommitted. They are read again after a loss of the driver and have no rows
#: then either, so nothing is wrong in between. But a source may delete what it believes to be old.
IDLE_COMMIT_S = 60.0
#: How often the driver reads what other writers of the shard wrote, between batches of an upsert.
KEEP_UP_S = 30.0


class NotCommitted(Exception):
    """Ends Spark's query before Spark takes a batch for committed."""


@dataclass(kw_only=True)
class Batches:
    """What one query has committed. Spark calls it in a thread of its own, one batch at a time."""

    spec: SinkSpec
    client: PersistClient
    writer: WriteHandle
    staging: Staging
    checkpoint: Checkpoint
    upserts: DriverUpserts
    committed: Position
    """The position in the shard, or the beginning."""
    expected: SourceProgress | None
    """The sink's progress in the shard as this driver last saw it."""
    env: Env
    log: Log
    on_failure: Callable[[], None]
    """Wakes the main thread."""
    failure: BaseException | None = None
    """Why the query must end."""
    planned_ms: int | None = None
    """When Spark chose the newest batch that this driver has committed."""
    report: SinkReport = field(init=False)
    _pending: Position | None = None
    _pending_s: float = 0.0
    _kept_up_s: float = 0.0
    _has_ended: bool = False
    _expects_few: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        upper = None if self.expected is None else self.expected.upper.time
        read = read_before(self.spec, self.committed.offsets)
        self.report = SinkReport(run_id=self.spec.run_id, upper=upper, input_upper=read, batches=0)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Commits one batch. The caller finds an error in `failure`, and no later batch is committed.

        Raises only NotCommitted, so that Spark lets the source forget no row of a batch that was not committed: an exception on its way
        through the JVM loses its class, and a long one overflows Spark's stack.
        """
        with self._lock:
            if batch <= self.committed.batch:
                return
            if not self._has_ended and self.failure is None:
                try:
                    self._commit(frame, batch)
                    return
                except BaseException as error:  # noqa: BLE001 - kept for the main thread, which raises it
                    self.failure = error
                    self.on_failure()
        raise NotCommitted(f"batch {batch} was not committed")

    def commit_idle(self) -> None:
        """Commits where the sources began, before the first batch, and the position of batches without rows after IDLE_COMMIT_S; lets the
        driver's upserts keep up. Does nothing while a batch is in flight.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.expected is None and self._pending is None and (logs := self.checkpoint.logs(None)):
                # A source that begins with what is newest has chosen now. The next driver must not choose again.
                self._commit_position(replace(self.committed, logs=logs))
            elif self._pending is not None and self.env.monotonic_s() - self._pending_s >= IDLE_COMMIT_S:
                self._commit_position(self._pending)
            if self.env.monotonic_s() - self._kept_up_s >= KEEP_UP_S:
                self._kept_up_s = self.env.monotonic_s()
                self.upserts.keep_up()
        finally:
            self._lock.release()

    def end(self, timeout_s: float) -> bool:
        """Waits for the batch in flight and commits what is pending. No batch is committed after that. False when the batch was still in
        flight after `timeout_s`: it may be committed or not.
        """
        if not self._lock.acquire(timeout=timeout_s):
            self._has_ended = True
            return False
        try:
            self._has_ended = True
            if self._pending is not None and self.failure is None:
                self._commit_position(self._pending)
        finally:
            self._lock.release()
        return True

    def _commit(self, frame: DataFrame, batch: int) -> None:
        offsets = self.checkpoint.offsets(batch)
        position = replace(self.committed, batch=batch, offsets=offsets, logs=self.checkpoint.logs(offsets))
        token = encode_position(position)
        done = self.upserts.commit(frame, token, expected=self.expected)
        if done is None:
            done = self._on_executors(frame, token)
            self.upserts.executors_did(done.rows_read)
        if done.upper is None:
            self._note(position)
        else:
            self._advance(position, SourceProgress(token=token, upper=Antichain.of(done.upper)))
        self._expects_few = done.rows_read <= FEW_ROWS
        total = self.report
        self.report = replace(
            total,
            lower=done.lower if total.lower is None else total.lower,
            upper=total.upper if done.upper is None else done.upper,
            input_upper=read_before(self.spec, offsets),
            rows_read=total.rows_read + done.rows_read,
            errors=total.errors + done.errors,
            updates_written=total.updates_written + done.updates_written,
            executors=executor_count(self.staging.spark),
            batches=(total.batches or 0) + 1,
        )
        self.planned_ms = self.checkpoint.planned_ms(batch)
        self.log.event(
            "batch",
            batch=batch,
            rows=done.rows_read,
            errors=done.errors,
            updates=done.updates_written,
            upper=self.report.upper,
            input_upper=self.report.input_upper,
            lag_ms=self.env.now_ms() - self.planned_ms,
        )

    def _on_executors(self, frame: DataFrame, token: bytes) -> SinkReport:
        run = Run(
            spec=self.spec,
            client=self.client,
            writer=self.writer,
            # The frame belongs to a session of the query's own, and so do the settings that concern it.
            staging=replace(self.staging, spark=frame.sparkSession, expects_few=self._expects_few),
            env=self.env,
            log=self.log,
            token=token,
            expected=self.expected,
            read=lambda: frame,
            lands_nothing=False,
        )
        return run.until_done()

    def _note(self, position: Position) -> None:
        """Remembers a batch without rows. The first one is committed at once: from then on the beginning of the stream is fixed."""
        if self.committed.batch == NO_BATCH and self._pending is None:
            self._commit_position(position)
            return
        if self._pending is None:
            self._pending_s = self.env.monotonic_s()
        self._pending = position

    def _advance(self, position: Position, progress: SourceProgress) -> None:
        self.committed, self.expected, self._pending = position, progress, None

    def _commit_position(self, position: Position) -> None:
        """Commits a position without rows. Fenced when another driver of the sink has committed."""
        answer = append_position(self.writer, self.spec, position, expected=self.expected)
        if isinstance(answer, ProgressMismatch):
            raise Fenced(
                f"{committer(answer.current)} of sink {self.spec.sink_id} appended to {self.spec.shard_id} while run "
                f"{self.spec.run_id} was reading"
            )
        self._advance(position, answer)
        self.log.event("position", batch=position.batch)
