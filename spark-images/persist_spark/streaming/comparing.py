"""The batches of a stream that writes nothing (`writeMode: ReadOnly`). It counts the updates that each batch would have written. No
position is stored, so the next driver begins where this one began.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from persist_engine import PersistClient, ReadHandle
from persist_engine.base.env import Env
from pyspark.sql import DataFrame

from persist_spark.inputs.shard import read_before
from persist_spark.progress.live import Stage
from persist_spark.report import Log, SinkReport
from persist_spark.spec import SinkSpec
from persist_spark.staging import difference
from persist_spark.streaming.checkpoint import Checkpoints, Planned
from persist_spark.streaming.each_batch import EachBatch
from persist_spark.streaming.position import Position


@dataclass(kw_only=True)
class ComparedBatches:
    """Compares each batch with the shard's newest contents. A `Work` of `EachBatch`."""

    spec: SinkSpec
    client: PersistClient
    reader: ReadHandle

    def do(self, rows: DataFrame, planned: Planned) -> SinkReport:
        """Compares one batch."""
        upper = self.client.recent_upper(self.spec.shard_id)
        as_of = upper.newest_complete
        found = difference(rows.sparkSession, rows, self.spec, self.reader, None if as_of < 0 else as_of)
        return SinkReport(
            run_id=self.spec.run_id,
            upper=upper.time,
            input_upper=read_before(self.spec, planned.offsets),
            rows_read=found.rows,
            errors=found.errors,
            missing=found.missing,
            extra=found.extra,
        )

    def line(self, done: SinkReport, total: SinkReport) -> tuple[str, Mapping[str, Any]]:
        """The event of the batch, with the sums of all batches."""
        is_equal = not (total.missing or total.extra)
        return "compared_batch", {
            "stage": Stage.DIFFERS if not is_equal else Stage.PROVEN if total.rows_read else Stage.STANDING_BY,
            "compared": total.rows_read,
            "missing": total.missing,
            "extra": total.extra,
            "upper": done.upper,
        }

    def idle(self) -> None:
        """Lets the lease's since follow the shard, because only the newest contents are read."""
        self.reader.maybe_downgrade_since(max(0, self.client.recent_upper(self.spec.shard_id).newest_complete))

    def finish(self, timeout_s: float) -> None:
        """Does nothing, because no position is stored."""


@contextmanager
def comparing(
    spec: SinkSpec,
    client: PersistClient,
    position: Position,
    checkpoints: Checkpoints,
    *,
    stop: threading.Event,
    env: Env,
    log: Log,
) -> Iterator[EachBatch]:
    """Yields the comparison of the batches after `position`. Its lease and its checkpoint end with the block. An error sets `stop`."""
    with (
        client.open_leased_reader(spec.shard_id, spec.schema, purpose=spec.purpose) as reader,
        checkpoints() as checkpoint,
    ):
        log.event("standing_by", stage=Stage.STANDING_BY, batch=position.batch)
        checkpoint.write(position)
        yield EachBatch(
            work=ComparedBatches(spec=spec, client=client, reader=reader),
            checkpoint=checkpoint,
            report=SinkReport(run_id=spec.run_id, missing=0, extra=0, batches=0),
            env=env,
            log=log,
            on_failure=stop.set,
        )
