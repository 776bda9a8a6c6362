"""The batches of a stream. One compare-and-set appends a batch with the position after it, and expects the position that this driver saw
last. So the shard refuses another driver of the same sink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from persist_engine import PersistClient, ProgressMismatch, SourceProgress, WriteHandle
from persist_engine.base.env import Env
from persist_engine.base.errors import Fenced
from persist_engine.model.frontier import Antichain
from pyspark.sql import DataFrame

from persist_spark.inputs.shard import read_before
from persist_spark.report import Log, SinkReport
from persist_spark.sink import Run
from persist_spark.spec import SinkSpec
from persist_spark.staging import Staging
from persist_spark.streaming.checkpoint import Checkpoint, Planned
from persist_spark.streaming.driver_upserts import DriverUpserts
from persist_spark.streaming.few_rows import FewRows
from persist_spark.streaming.file_log import check_times
from persist_spark.streaming.files_gone import check_files
from persist_spark.streaming.position import NO_BATCH, Position, committer, encode_position
from persist_spark.streaming.position_append import append_position

#: How long the position of batches without rows may stay uncommitted. After a loss of the driver they are read again, still without rows,
#: so the delay is harmless. But a source may delete rows that it believes to be old.
IDLE_COMMIT_S = 60.0
#: The interval at which the driver reads the changes of other writers, between batches of an upsert.
KEEP_UP_S = 30.0


@dataclass(kw_only=True)
class Batches:
    """Appends the batches of one query. A `Work` of `EachBatch`."""

    spec: SinkSpec
    client: PersistClient
    writer: WriteHandle
    staging: Staging
    checkpoint: Checkpoint
    few: FewRows
    upserts: DriverUpserts
    committed: Position
    """The position that the shard stores, or the beginning."""
    expected: SourceProgress | None
    """The sink's progress in the shard as this driver last saw it."""
    env: Env
    log: Log
    _pending: Position | None = None
    _pending_s: float = 0.0
    _kept_up_s: float = 0.0

    def do(self, rows: DataFrame, planned: Planned) -> SinkReport | None:
        """Commits one batch, together with the position after it. Only notes a batch without rows."""
        if planned.batch <= self.committed.batch:
            return None
        logs = self.checkpoint.logs(planned.offsets)
        if (age_ms := self.checkpoint.file_age_ms) is not None:
            before = self._pending or self.committed
            check_times(logs, after=before.logs, now_ms=self.env.now_ms(), age_ms=age_ms)
            check_files(self.staging.spark, self.committed.query, logs, after=before.logs)
        position = replace(self.committed, batch=planned.batch, offsets=planned.offsets, logs=logs, has_rows=True)
        few = self.few.rows(rows) if self.few.rows_max else None
        if few is not None and not few.num_rows:
            done = SinkReport(run_id=self.spec.run_id)
            self._note(position)
        else:
            token = encode_position(position)
            done = self._written(rows, few, token)
            if done.upper is None:
                self._note(position)
            else:
                self._advance(position, SourceProgress(token=token, upper=Antichain.of(done.upper)))
        self.few.had(done.rows_read)
        return replace(done, input_upper=read_before(self.spec, planned.offsets))

    def line(self, done: SinkReport, total: SinkReport) -> tuple[str, Mapping[str, Any]]:
        """The event of the batch, with the counts of what it wrote."""
        return "batch", {"updates": done.updates_written, "upper": total.upper, "input_upper": total.input_upper}

    def idle(self) -> None:
        """Before the first batch, commits where the sources began. After IDLE_COMMIT_S, commits the position of batches without rows. Also
        lets the driver's upserts follow other writers.
        """
        if self.expected is None and self._pending is None and (logs := self.checkpoint.logs(None)):
            # A source that begins with the newest rows has now chosen them. The next driver must not choose again.
            self._commit_position(replace(self.committed, logs=logs))
        elif self._pending is not None and self.env.monotonic_s() - self._pending_s >= IDLE_COMMIT_S:
            self._commit_position(self._pending)
        if self.env.monotonic_s() - self._kept_up_s >= KEEP_UP_S:
            self._kept_up_s = self.env.monotonic_s()
            self.upserts.keep_up()

    def finish(self, timeout_s: float) -> None:
        """Commits the pending position. Raises Unavailable after `timeout_s`; only the position of batches without rows is lost then."""
        if self._pending is not None:
            with self.client.versions.retry.until(timeout_s, at_most=True):
                self._commit_position(self._pending)

    def _written(self, rows: DataFrame, few: pa.Table | None, token: bytes) -> SinkReport:
        """Appends the rows of one batch. `few`: all rows of the batch, if the driver stages them."""
        if self.spec.envelope.type.has_keys:
            done = None if few is None else self.upserts.commit(few, token, expected=self.expected)
            if done is not None:
                return done
            self.few.rows_max, few = min(self.few.rows_max, self.upserts.commands_max), None
        run = Run(
            spec=self.spec,
            client=self.client,
            writer=self.writer,
            # The query has its own session, which has the settings that concern the frame.
            staging=replace(self.staging, spark=rows.sparkSession),
            env=self.env,
            log=self.log,
            token=token,
            expected=self.expected,
            read=lambda: rows,
            few=few,
            lands_nothing=False,
        )
        return run.until_done()

    def _note(self, position: Position) -> None:
        """Remembers a batch without rows. Commits the first batch at once, because it fixes the beginning of the stream."""
        if self.committed.batch == NO_BATCH and self._pending is None:
            self._commit_position(position)
            return
        if self._pending is None:
            self._pending_s = self.env.monotonic_s()
        self._pending = position

    def _advance(self, position: Position, progress: SourceProgress) -> None:
        self.committed, self.expected, self._pending = position, progress, None

    def _commit_position(self, position: Position) -> None:
        """Commits a position without rows. Raises Fenced when another driver of the sink has committed."""
        answer = append_position(self.writer, self.spec, position, expected=self.expected)
        if isinstance(answer, ProgressMismatch):
            raise Fenced(
                f"{committer(answer.current)} of sink {self.spec.sink_id} appended to {self.spec.shard_id} while run "
                f"{self.spec.run_id} was reading"
            )
        self._advance(position, answer)
        self.log.event("position", batch=position.batch)
