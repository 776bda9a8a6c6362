"""Stages the updates of one frame of rows: the write step of a run, between mint and append. Executors stage the batches; the driver
gets one descriptor for each task. Appends nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass

from persist_engine import Batch, ReadHandle, SinceAhead, WriteHandle
from persist_engine.base.errors import Fenced
from persist_engine.flow.mint_run import Minted
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark import frames
from persist_spark.partitions import STAGED_DDL, ReadParts, StageCorrections, StageRows, StageTask, grouped
from persist_spark.report import Log
from persist_spark.session import executor_memory, parallelism_of, shuffled_by_bytes
from persist_spark.spec import ConfigurationError, EnvelopeType, SinkSpec


def part_bytes_of(spark: SparkSession, spec: SinkSpec, log: Log) -> int:
    """The part size for executors: the configured one, or a smaller one that fits the memory of their pods."""
    wanted, memory = spec.write.target_part_bytes, executor_memory(spark)
    fitting = wanted if memory is None else memory.fitting_part_bytes(wanted)
    if memory is not None and fitting < wanted:
        log.event("smaller_parts", wanted_bytes=wanted, part_bytes=fitting, **asdict(memory))
    return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """The staged batches of one frame, and what was counted while they were staged."""

    batches: tuple[Batch, ...]
    rows: int
    updates: int
    least_time: int | None
    upper: Antichain


@dataclass(kw_only=True)
class Staging:
    """Stages frames for one sink. Its only state is the handles that it was given; one object may stage many frames, one at a time."""

    spark: SparkSession
    spec: SinkSpec
    schema: Schema
    writer: WriteHandle
    part_bytes: int
    """The part size for executors, from `part_bytes_of`."""
    log: Log

    @property
    def reads_back(self) -> bool:
        """Whether the envelope corrects what the shard holds, so that staging needs the persisted contents."""
        return self.spec.envelope.type is EnvelopeType.MIRROR

    def stage(self, source: DataFrame, minted: Minted, reader: ReadHandle | None) -> StagedRows:
        """Stages `source` as the envelope says, at the times of `minted`. `reader`: the lease for the persisted side, if the envelope
        reads it.

        ConfigurationError when rows cannot be stored; Fenced when the lease expired; the errors of Spark and of the blob store.
        """
        column = self.spec.envelope.timestamp_column
        flat = frames.to_flat(source, self.schema, timestamp_column=column)
        write = self.spec.write
        # Each task gets about one part of the configured size, even where memory requires smaller parts: writing several
        # parts needs no more memory. When the user sets the number of tasks, Spark's settings stay as the user has them.
        by_bytes = shuffled_by_bytes(self.spark, part_bytes=write.target_part_bytes)
        with by_bytes if write.parallelism is None else nullcontext():
            if reader is not None and minted.as_of is not None:
                return self._write_corrections(minted, minted.as_of, reader, flat)
            # The shard is empty, or the envelope does not read it back: the rows themselves are the updates.
            return self._write_rows(minted, flat, column)

    def _write_rows(self, minted: Minted, flat: DataFrame, column: str | None) -> StagedRows:
        upper = minted.upper
        if column is not None:
            greatest = self._greatest_time(flat, minted.lower, column)
            if greatest is None:
                self._refuse_empty(0)
                # SUBTLE: without rows there is no time. With the upper raised to now, the next run's rows would be late.
                return StagedRows(batches=(), rows=0, updates=0, least_time=None, upper=minted.lower)
            upper = Antichain.of(greatest + 1)
        task = self._stage_task(minted, upper, time=None if column else minted.time)
        parts = frames.to_stage(flat, self.schema, self.spec.write.parallelism)
        return self._collect(parts.mapInArrow(StageRows(task), STAGED_DDL), upper)

    def _write_corrections(self, minted: Minted, as_of: int, reader: ReadHandle, flat: DataFrame) -> StagedRows:
        task = self._stage_task(minted, minted.upper, time=minted.time)
        # mint ensures since <= as_of < upper, under this reader's own hold.
        snapshot = reader.snapshot(Antichain.of(as_of))
        if isinstance(snapshot, SinceAhead):
            raise Fenced(f"the lease of {reader} expired before its first use; run the sink again")
        with snapshot:
            groups = grouped(snapshot.lease_parts(), cores=parallelism_of(self.spark))
            both = frames.corrections(flat, self._persisted(groups), self.schema, self.spec.write.parallelism)
            return self._collect(both.mapInArrow(StageCorrections(task), STAGED_DDL), minted.upper)

    def _persisted(self, groups: tuple[tuple[bytes, ...], ...]) -> DataFrame:
        read = ReadParts(blob=self.spec.blob, groups=groups)
        flat_type = frames.flat_type(self.schema).add(frames.DIFF, T.LongType())
        return self.spark.range(0, len(groups), 1, max(1, len(groups))).mapInArrow(read, flat_type)

    def _stage_task(self, minted: Minted, upper: Antichain, *, time: int | None) -> StageTask:
        lower, end = minted.lower.time, upper.time
        assert lower is not None
        assert end is not None
        return StageTask(
            blob=self.spec.blob,
            shard_id=self.spec.shard_id,
            schema=self.schema,
            schema_id=self.writer.schema_id,
            lower=lower,
            upper=end,
            time=time,
            target_part_bytes=self.part_bytes,
            staging_floor_ms=self.writer.machine.staging_floor_ms,
        )

    def _greatest_time(self, flat: DataFrame, lower: Antichain, column: str) -> int | None:
        """The greatest time of the rows; None without rows. Runs before anything is staged, so that ConfigurationError can report the
        number of rows that cannot be written, and an example.
        """
        time = F.col(frames.TIME)
        late = time < F.lit(lower.time)
        row = flat.agg(
            F.count(F.lit(1)), F.count(time), F.max(time), F.count_if(late), F.min(F.when(late, time))
        ).first()
        rows, timed, greatest, late_rows, first_late = row
        if rows == 0:
            return None
        if timed < rows:
            raise ConfigurationError(f"envelope.timestampColumn: {column} is null in {rows - timed} of {rows} rows")
        if late_rows:
            raise self.late(late_rows, first_late, lower)
        return int(greatest)

    def late(self, rows: int | None, first: int | None, upper: Antichain) -> ConfigurationError:
        """The error for rows with times that the shard has passed. `rows`: their number, None when it is unknown."""
        count = "some rows" if rows is None else f"{rows} rows"
        return ConfigurationError(
            f"{count} have a time before the shard's upper {upper.time}, the first at {first}: "
            "an Append cannot change written times; exclude these rows with input.format.sql"
        )

    def _collect(self, staging: DataFrame, upper: Antichain) -> StagedRows:
        rows = staging.collect()
        stage = StagedRows(
            batches=tuple(
                # Spark returns the row of one attempt of each task, and only here. A second driver of this run has its own
                # tasks.
                self.writer.batch_from_transmittable(bytes(row["batch"]), is_only_copy=True)
                for row in rows
                if row["batch"] is not None
            ),
            rows=sum(row["rows"] for row in rows),
            updates=sum(row["updates"] for row in rows),
            least_time=min((row["least_time"] for row in rows if row["least_time"] is not None), default=None),
            upper=upper,
        )
        self.log.event("staged", batches=len(stage.batches), rows=stage.rows, updates=stage.updates)
        # The retractions of an empty mirror are staged too. They are deleted only when nothing will be appended.
        if stage.rows == 0 and not self.spec.input.allow_empty:
            self.writer.delete_batches(stage.batches)
            self._refuse_empty(stage.rows)
        return stage

    def _refuse_empty(self, rows: int) -> None:
        if rows == 0 and not self.spec.input.allow_empty:
            raise ConfigurationError("input is empty; if that is intended, set input.allowEmpty")
