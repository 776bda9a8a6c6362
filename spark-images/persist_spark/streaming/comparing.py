"""The batches of a stream that writes nothing (`writeMode: ReadOnly`): of each one, the updates that it would have written. No position is
stored, so the next driver begins where this one did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from persist_engine import PersistClient, ReadHandle
from persist_engine.base.env import Env
from pyspark.sql import DataFrame

from persist_spark.inputs.shard import read_before
from persist_spark.progress.live import Stage
from persist_spark.report import Log, SinkReport
from persist_spark.session import executor_count
from persist_spark.spec import SinkSpec
from persist_spark.staging import difference
from persist_spark.streaming.checkpoint import Checkpoint, temporary_checkpoint
from persist_spark.streaming.position import Position


class NotCompared(Exception):
    """Ends Spark's query before Spark takes a batch for done."""


@dataclass(kw_only=True)
class ComparedBatches:
    """What one query has compared. Spark calls it in a thread of its own, one batch at a time. Each batch is compared with the shard as it
    is then, and `report` has the sums. It has the interface of Batches.
    """

    spec: SinkSpec
    client: PersistClient
    reader: ReadHandle
    checkpoint: Checkpoint
    env: Env
    log: Log
    on_failure: Callable[[], None]
    """Wakes the main thread."""
    failure: BaseException | None = None
    """Why the query must end."""
    planned_ms: int | None = None
    report: SinkReport = field(init=False)
    _has_ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.report = SinkReport(run_id=self.spec.run_id, missing=0, extra=0, batches=0)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Compares one batch. The caller finds an error in `failure`, and no later batch is compared. Raises only NotCompared."""
        with self._lock:
            if not self._has_ended and self.failure is None:
                try:
                    self._compare(frame, batch)
                    return
                except BaseException as error:  # noqa: BLE001 - kept for the main thread, which raises it
                    self.failure = error
                    self.on_failure()
        raise NotCompared(f"batch {batch} was not compared")

    def commit_idle(self) -> None:
        """Nothing is committed. Lets since follow the shard, for the newest contents are all that is read."""
        if self._lock.acquire(blocking=False):
            try:
                self.reader.maybe_downgrade_since(max(0, self.client.recent_upper(self.spec.shard_id).newest_complete))
            finally:
                self._lock.release()

    def end(self, timeout_s: float) -> bool:
        """Waits for the batch in flight. None is compared after that. False when it was still in flight after `timeout_s`."""
        self._has_ended = True
        is_done = self._lock.acquire(timeout=timeout_s)
        if is_done:
            self._lock.release()
        return is_done

    def _compare(self, frame: DataFrame, batch: int) -> None:
        offsets, planned_ms = self.checkpoint.offsets(batch), self.checkpoint.planned_ms(batch)
        upper = self.client.recent_upper(self.spec.shard_id)
        as_of = upper.newest_complete
        found = difference(frame.sparkSession, frame, self.spec, self.reader, None if as_of < 0 else as_of)
        total, self.planned_ms = self.report, planned_ms
        self.report = total = replace(
            total,
            upper=upper.time,
            input_upper=read_before(self.spec, offsets),
            rows_read=total.rows_read + found.rows,
            errors=total.errors + found.errors,
            missing=(total.missing or 0) + found.missing,
            extra=(total.extra or 0) + found.extra,
            executors=executor_count(frame.sparkSession),
            batches=(total.batches or 0) + 1,
        )
        is_equal = not (total.missing or total.extra)
        self.log.event(
            "compared_batch",
            stage=Stage.DIFFERS if not is_equal else Stage.PROVEN if total.rows_read else Stage.STANDING_BY,
            batch=batch,
            rows=found.rows,
            errors=found.errors,
            compared=total.rows_read,
            missing=total.missing,
            extra=total.extra,
            upper=upper.time,
            lag_ms=self.env.now_ms() - planned_ms,
        )


@contextmanager
def comparing(
    spec: SinkSpec,
    client: PersistClient,
    position: Position,
    *,
    file_age_ms: int | None,
    stop: threading.Event,
    env: Env,
    log: Log,
) -> Iterator[ComparedBatches]:
    """What compares the batches after `position`, with a lease and a checkpoint that end with the block. An error sets `stop`."""
    with (
        client.open_leased_reader(spec.shard_id, spec.schema, purpose=spec.purpose) as reader,
        temporary_checkpoint(file_age_ms=file_age_ms) as checkpoint,
    ):
        log.event("standing_by", stage=Stage.STANDING_BY, batch=position.batch)
        checkpoint.write(position)
        yield ComparedBatches(
            spec=spec, client=client, reader=reader, checkpoint=checkpoint, env=env, log=log, on_failure=stop.set
        )
