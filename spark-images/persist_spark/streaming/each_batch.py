"""What Spark calls for each batch of a stream's query: one batch at a time, in order, and none after an error or after the end.

Owns the errors of batches, the sums of their reports, and the end. It must not know what is done with a batch: a `Work` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from persist_engine.base.env import Env
from pyspark.sql import DataFrame

from persist_spark.report import Log, SinkReport
from persist_spark.streaming.checkpoint import Checkpoint, Planned


class Work(Protocol):
    """What is done with the batches of one query. Called by one thread at a time."""

    def do(self, rows: DataFrame, planned: Planned) -> SinkReport | None:
        """Does one batch and reports it alone. `rows`: as the envelope reads them (`staging.rows_of`). None for a batch that was done
        before.
        """

    def line(self, done: SinkReport, total: SinkReport) -> tuple[str, Mapping[str, Any]]:
        """The event of the log for a batch, and the fields of its own."""

    def idle(self) -> None:
        """Does what is due while no batch is in flight."""

    def finish(self, timeout_s: float) -> None:
        """Does what is left after the last batch. Insists on a store that does not answer for `timeout_s`, at least a second."""


class NotDone(Exception):
    """Ends Spark's query before Spark takes a batch for done."""


@dataclass(kw_only=True)
class EachBatch:
    """The batches of one query. Spark calls it in a thread of its own; the other methods are for the main thread."""

    work: Work
    checkpoint: Checkpoint
    report: SinkReport
    """The sums of the batches that are done."""
    env: Env
    log: Log
    on_failure: Callable[[], None]
    """Wakes the main thread."""
    failure: BaseException | None = None
    """Why the query must end."""
    planned_ms: int | None = None
    """When Spark chose the newest batch that is done."""
    _has_ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Does one batch. The caller finds an error in `failure`, and no later batch is done.

        Raises only NotDone, so that Spark lets the source forget no row of a batch that was not done: an exception on its way through the
        JVM loses its class, and a long one overflows Spark's stack.
        """
        with self._lock:
            if not self._has_ended and self.failure is None:
                try:
                    self._do(rows, batch)
                    return
                except BaseException as error:  # noqa: BLE001 - kept for the main thread, which raises it
                    self.failure = error
                    self.on_failure()
        raise NotDone(f"batch {batch} was not done")

    def idle(self) -> None:
        """Does what is due between batches. Does nothing while a batch is in flight, and after one that failed, which may be committed all
        the same.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self.failure is None:
                    self.work.idle()
            finally:
                self._lock.release()

    def end(self, timeout_s: float) -> bool:
        """Waits for the batch in flight and does what is left. No batch is done after that. False when the batch was still in flight after
        `timeout_s`: it may be done or not. What is left has the rest of the time.
        """
        ends_s = self.env.monotonic_s() + timeout_s
        is_free = self._lock.acquire(timeout=timeout_s)
        self._has_ended = True
        if is_free:
            try:
                if self.failure is None:
                    self.work.finish(ends_s - self.env.monotonic_s())
            finally:
                self._lock.release()
        return is_free

    def _do(self, rows: DataFrame, batch: int) -> None:
        planned = self.checkpoint.planned(batch)
        done = self.work.do(rows, planned)
        if done is None:
            return
        self.report = total = self.report.with_batch(done)
        self.planned_ms = planned.at_ms
        event, fields = self.work.line(done, total)
        lag_ms = self.env.now_ms() - planned.at_ms
        self.log.event(event, batch=batch, rows=done.rows_read, errors=done.errors, lag_ms=lag_ms, **fields)
