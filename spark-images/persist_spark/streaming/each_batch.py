"""The function that Spark calls for each batch of a stream's query. It does one batch at a time, in order, and none after an error or after
the end.

Owns the errors of batches, the sums of their reports, and the end. It must not know what is done with a batch. A `Work` knows that.
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
    """The work on the batches of one query. One thread at a time calls it."""

    def do(self, rows: DataFrame, planned: Planned) -> SinkReport | None:
        """Does one batch and returns the report of this batch alone. `rows`: as the envelope reads them (`staging.rows_of`). Returns None
        if the batch was already done.
        """

    def line(self, done: SinkReport, total: SinkReport) -> tuple[str, Mapping[str, Any]]:
        """The log event for a batch, and the event's own fields."""

    def idle(self) -> None:
        """Does what is due while no batch is in flight."""

    def finish(self, timeout_s: float) -> None:
        """Does the remaining work after the last batch. Retries a failing store for `timeout_s`, and for at least one second."""


class NotDone(Exception):
    """Ends Spark's query before Spark records a batch as done."""


@dataclass(kw_only=True)
class EachBatch:
    """The batches of one query. Spark calls the object in Spark's own thread. The other methods are for the main thread."""

    work: Work
    checkpoint: Checkpoint
    report: SinkReport
    """The sums of the batches that are done."""
    env: Env
    log: Log
    on_failure: Callable[[], None]
    """Wakes the main thread."""
    failure: BaseException | None = None
    """The error for which the query must end."""
    planned_ms: int | None = None
    """When Spark chose the newest batch that is done."""
    _has_ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Does one batch. After an error, `failure` has the error and no later batch is done.

        Raises only NotDone, which keeps the source from forgetting rows of a batch that was not done. It passes no other exception, because
        an exception loses its class on its way through the JVM, and a long one overflows Spark's stack.
        """
        with self._lock:
            if not self._has_ended and self.failure is None:
                try:
                    self._do(rows, batch)
                    return
                except BaseException as error:  # noqa: BLE001 - the main thread raises it
                    self.failure = error
                    self.on_failure()
        raise NotDone(f"batch {batch} was not done")

    def idle(self) -> None:
        """Does the work that is due between batches. Does nothing while a batch is in flight, and nothing after a failed batch, because
        that batch may be committed nevertheless.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self.failure is None:
                    self.work.idle()
            finally:
                self._lock.release()

    def end(self, timeout_s: float) -> bool:
        """Waits for the batch in flight and then does the remaining work in the rest of the time. No batch is done after that. Returns
        False when the batch was still in flight after `timeout_s`; it may be done or not.
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
