"""Stages the updates of one frame of rows. This is the write step of a run, between mint and append. Executors stage the batches, and the
driver gets one descriptor for each task. Appends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import Batch, ReadHandle, StagingNotes, WriteHandle
from persist_engine.base.wording import dated
from persist_engine.flow.mint_run import Minted
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark import frames
from persist_spark.envelopes.against import KEYS, held, refusal, shown_updates, staged_updates
from persist_spark.envelopes.collected import collected, error_column, is_error, rows_schema
from persist_spark.envelopes.commands import key_text, null_faults, upsert_commands
from persist_spark.envelopes.compared import Difference, difference_of_commands, difference_of_rows
from persist_spark.envelopes.copied import Copied, copied
from persist_spark.envelopes.corrected import staged_corrections
from persist_spark.envelopes.debezium import debezium_commands
from persist_spark.envelopes.mirror import WantedRows, both_sides, hashed, scanned
from persist_spark.envelopes.persisted import persisted, tasks_for
from persist_spark.envelopes.run_keys import RunKeys
from persist_spark.envelopes.sketched import SketchedMirror
from persist_spark.frames import fields_of
from persist_spark.partitions import STAGED_DDL, StageRows, StageTask
from persist_spark.report import Log
from persist_spark.resume.earlier import added, earlier_batches, kept_of, sums_of
from persist_spark.resume.key_ranges import has_ranges
from persist_spark.resume.noting import JOB_BYTES, Noted
from persist_spark.session import READING_SHARE, executor_memory, planned_once, shuffled_by_bytes
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, OnError, SinkSpec

#: A frame of fewer bytes is staged without notes. It has so few tasks that all of them would be running when their driver is killed.
NOTED_BYTES = 1 << 30
#: The error of a run without rows.
EMPTY = "input is empty; if that is intended, set input.allowEmpty"


def part_bytes_of(spark: SparkSession, spec: SinkSpec, log: Log) -> int:
    """The part size for executors: the configured size, or a smaller one that fits the memory of their pods."""
    wanted, memory = spec.write.target_part_bytes, executor_memory(spark)
    fitting = wanted if memory is None else memory.fitting_part_bytes(wanted)
    if memory is not None and fitting < wanted:
        log.event("smaller_parts", wanted_bytes=wanted, part_bytes=fitting, **asdict(memory))
    return fitting


def is_worth_a_note(flat: DataFrame) -> bool:
    """Whether the frame is so large, by Spark's estimate, that its tasks note what they stage. True if the estimate may be too small."""
    size_bytes = frames.planned_bytes(flat)
    return size_bytes is None or size_bytes >= NOTED_BYTES


def rows_of(source: DataFrame, schema: Schema, envelope: Envelope) -> DataFrame:
    """The rows of `source` as the envelope reads them: commands on keys (envelopes/commands.py), or else flat rows, with a `fault` if the
    diff is null. If the envelope collects errors, rows with a fault are errors. Plans only. Raises ConfigurationError, which names every
    column that does not fit.
    """
    rows = _rows_of(source, rows_schema(schema, envelope), envelope)
    return rows if envelope.on_error is OnError.FAIL else collected(rows, schema, envelope)


def _rows_of(source: DataFrame, schema: Schema, envelope: Envelope) -> DataFrame:
    match envelope.type:
        case EnvelopeType.UPSERT:
            return upsert_commands(source, schema, envelope)
        case EnvelopeType.DEBEZIUM:
            return debezium_commands(source, schema, envelope)
    time, diff = envelope.timestamp_column, envelope.diff_column
    error = error_column(source, envelope)
    flat = frames.to_flat(source, schema, timestamp_column=time, diff_column=diff, error_column=error)
    needed = [("diffColumn", diff, frames.DIFF)]
    if envelope.on_error is OnError.COLLECT:  # otherwise `_greatest_time` counts them
        needed.append(("timestampColumn", time, frames.TIME))
    faults = [F.col(frames.FAULT)] if error else []
    for role, name, column in needed:
        if name is not None:
            text = F.concat(F.lit(f"envelope.{role}: {name} is null in the row with key "), key_text(fields_of(schema)))
            faults.append(F.when(F.col(column).isNull(), text))
    if envelope.on_error is OnError.COLLECT:  # otherwise the tasks refuse them
        faults += null_faults(schema, is_given=F.lit(True))  # noqa: FBT003
    return flat.withColumn(frames.FAULT, F.coalesce(*faults)) if faults else flat


def shard_order(spec: SinkSpec) -> str | None:
    """The field of the shard's value by which a persisted value may win against a row of the input."""
    envelope = spec.envelope
    order = envelope.order_column
    return order if envelope.type is EnvelopeType.UPSERT and order in spec.schema.val.names else None


def difference(
    spark: SparkSession, rows: DataFrame, spec: SinkSpec, reader: ReadHandle, as_of: int | None
) -> Difference:
    """Compares the shard at `as_of` (None: nothing was written) with the contents that a run would give it. `rows` and errors: see
    `Staging.stage`. Also raises ConfigurationError when the shard's since is past `as_of`.
    """
    schema = spec.schema
    if as_of is not None and (since := reader.since.time) is not None and since > as_of:
        # A run that writes completes the time of since before it reads (mint_run.RaiseUpper).
        raise ConfigurationError(
            f"shard {spec.shard_id} cannot be compared: its since is {dated(since)} and the last complete time is {dated(as_of)}, so no "
            "complete time is readable; write to it first"
        )
    spark.sparkContext.setJobDescription(f"{spec.sink_id}: compare as {spec.envelope.type}")
    if spec.envelope.type.has_keys:
        commands = copied(rows, schema, shard_order(spec))
        with held(reader, as_of, commands, blob=spec.blob) as shard:
            return difference_of_commands(
                commands, shown_updates(commands, shard, read_bytes=spec.write.target_part_bytes)
            )
    if as_of is None:
        return difference_of_rows(rows, None, schema)
    with persisted(spark, reader, as_of, schema, blob=spec.blob) as contents:
        return difference_of_rows(rows, contents.rows(), schema)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of the updates of one frame."""

    lower: Antichain
    upper: Antichain
    time: int | None
    """The time of every update. None: the rows have their own times."""

    @classmethod
    def of(cls, minted: Minted) -> Times:
        """The times of a frame whose updates all have the time of the run."""
        return cls(minted.lower, minted.upper, minted.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """The staged batches of one frame, and the counts from their tasks."""

    times: Times
    """The times of the batches. An earlier driver of the run may have chosen them."""
    are_shared: bool = False
    """Whether another driver of the run may append the same batches (`Landing.are_shared`)."""
    batches: tuple[Batch, ...]
    rows: int
    errors: int = 0
    """How many of these rows are errors."""
    updates: int
    least_time: int | None
    keys: RunKeys | None = None
    """The only keys that the run changes. None: it may change all keys."""
    wanted: bytes | None = None
    """The digest of the rows that the shard holds after the run. None: the envelope is not a Mirror."""


@dataclass(kw_only=True)
class Staging:
    """Stages frames for one sink, one at a time. Its only state is its handles, `has_notes` and a sketch."""

    spark: SparkSession
    spec: SinkSpec
    schema: Schema
    writer: WriteHandle
    part_bytes: int
    """The part size for executors, from `part_bytes_of`."""
    log: Log
    notes: StagingNotes | None = None
    """The notes of the run. None: its tasks do not note what they stage."""
    committed: Antichain = MINIMUM
    """The upper of the sink's progress that the appends of this run expect."""
    has_notes: bool = False
    """Whether this run may have stored notes."""

    @cached_property
    def _sketched(self) -> SketchedMirror:
        return SketchedMirror(
            schema=self.schema,
            parallelism=self.spec.write.parallelism,
            delete=lambda tasks: self.writer.delete_batches(self._batches(tasks)),
            log=self.log,
        )

    @property
    def reads_back(self) -> bool:
        """Whether the envelope corrects what the shard holds, so that staging needs the persisted contents."""
        return self.spec.envelope.type.reads_back

    def stage(self, rows: DataFrame, minted: Minted, reader: ReadHandle | None) -> StagedRows:
        """Stages `rows` (from `rows_of`) at the times of `minted`, as the envelope requires. `reader`: the lease for the persisted side, if
        the envelope reads it.

        Raises ConfigurationError when rows cannot be stored, Fenced when the lease expired, and the errors of Spark and of the blob store.
        """
        write = self.spec.write
        # The name of the jobs in Spark's web interface and its event log.
        self.spark.sparkContext.setJobDescription(f"{self.spec.sink_id}: stage as {self.spec.envelope.type}")
        # Each task gets about one part of the configured size, even if memory requires smaller parts, because writing several
        # parts needs no more memory. When the user sets the number of tasks, Spark's settings stay as the user has them.
        by_bytes = shuffled_by_bytes(self.spark, part_bytes=write.target_part_bytes)
        if self.spec.envelope.type.has_keys:
            # A task holds the commands of its keys, and a copy while it sorts them. It reads more bytes than it holds.
            by_bytes = shuffled_by_bytes(self.spark, part_bytes=self.part_bytes // 2, share=READING_SHARE)
        with by_bytes if write.parallelism is None else nullcontext():
            match self.spec.envelope.type:
                case EnvelopeType.UPSERT | EnvelopeType.DEBEZIUM:
                    return self._write_commands(minted, reader, rows)
                case EnvelopeType.APPEND | EnvelopeType.DIFF:
                    return self._write_rows(minted, rows)
                case EnvelopeType.MIRROR:
                    if reader is None or minted.as_of is None:
                        return self._write_rows(minted, rows)  # the shard is empty
                    return self._write_corrections(minted, minted.as_of, reader, rows)

    def stage_few(self, rows: pa.Table, minted: Minted) -> StagedRows:
        """Stages rows of an Append or a Diff that the driver holds. Stages the same updates as `stage`, and raises the same errors."""
        times_of, column = Times.of(minted), self.spec.envelope.timestamp_column
        if column is not None:
            at = rows.schema.get_field_index(frames.TIME)
            is_bad = pa.repeat(pa.scalar(False), rows.num_rows)  # noqa: FBT003 - Arrow's name for it
            if self.spec.envelope.on_error is OnError.COLLECT:
                is_bad = rows.column(f"k{len(self.schema.key) - 1}").is_valid()
            times = pc.if_else(is_bad, minted.lower.time, rows.column(at))
            late = pc.filter(times, pc.less(times, minted.lower.time))
            counts = (rows.num_rows, rows.num_rows - times.null_count, len(late), pc.min(late).as_py())
            self._check_times(*counts, lower=minted.lower, column=column)
            greatest = pc.max(times).as_py()
            times_of = Times(minted.lower, Antichain.of(greatest + 1), None)
            rows = rows.set_column(at, rows.schema.field(at), pc.if_else(is_bad, greatest, times))
        task = self._stage_task(times_of)
        return self._staged(StageRows(task).staged(rows.to_batches()).to_pylist(), times_of)

    def unchanged(
        self, rows: DataFrame, minted: Minted, digest: bytes, *, since: int, held_rows: Callable[[], int]
    ) -> StagedRows | None:
        """The result of a Mirror whose rows have the `digest` of the rows that the shard already holds: no batches. None when the rows have
        another digest. `since`: the time of that digest. `held_rows`: returns about the number of rows of the shard. Does not read its
        rows.
        """
        self.spark.sparkContext.setJobDescription(f"{self.spec.sink_id}: compare with the last run")
        # The sums of a sketch are a digest too. They take longer than a digest alone, but if rows have changed, `stage` needs them.
        wanted = self._sketched.wanted(rows, held_rows, newer_than=since)
        if wanted is None:
            # The files of an input without SQL need no shuffle. The query of a user may need any.
            is_plain = self.spec.input.python is None and self.spec.input.sql is None
            with planned_once(self.spark) if is_plain else nullcontext():
                wanted = scanned(rows, self.schema)
        if wanted is None or wanted.digest(self.schema) != digest:
            return None
        self._refuse_empty(wanted.rows)
        self.log.event("unchanged", rows=wanted.rows)
        self.log.event("staged", batches=0, rows=wanted.rows, errors=wanted.errors, updates=0)
        return StagedRows(
            batches=(),
            rows=wanted.rows,
            errors=wanted.errors,
            updates=0,
            least_time=None,
            times=Times.of(minted),
            wanted=digest,
        )

    def _write_rows(self, minted: Minted, flat: DataFrame) -> StagedRows:
        times, column = Times.of(minted), self.spec.envelope.timestamp_column
        if column is not None:
            greatest = self._greatest_time(self._with_errors_at(minted.lower.time, flat), minted.lower, column)
            if greatest is None:
                self._refuse_empty(0)
                # SUBTLE: without rows there is no time. If the upper moved to now, the rows of the next run would be late.
                empty = Times(minted.lower, minted.lower, None)
                return StagedRows(batches=(), rows=0, updates=0, least_time=None, times=empty)
            times = Times(minted.lower, Antichain.of(greatest + 1), None)
            flat = self._with_errors_at(greatest, flat)
        is_noted = self.notes is not None and has_ranges(self.schema) and is_worth_a_note(flat)
        if self.spec.envelope.type is EnvelopeType.MIRROR or is_noted:
            beside = [name for name in (frames.TIME, frames.DIFF) if name in flat.columns]
            flat = hashed(flat, self.schema, beside=beside)
        if not is_noted:
            return self._staged(self._tasks(flat, times, is_noted=False), times)
        self.has_notes = True
        return self._resumed(flat, times) or self._staged(
            self._tasks(flat, times, is_noted=True), times, are_shared=True
        )

    def _tasks(self, rows: DataFrame, times: Times, *, is_noted: bool) -> list[Any]:
        """Stages `rows` in tasks and returns their rows of STAGED_SCHEMA."""
        noted = None
        if is_noted and self.notes is not None:
            noted = Noted(self.notes.sink_id, self.notes.run, self.writer.machine.env.random_bytes(JOB_BYTES))
        task = self._stage_task(times, noted)
        parts = frames.to_stage(rows, self.schema, self.spec.write.parallelism)
        staged: list[Any] = parts.mapInArrow(StageRows(task), STAGED_DDL).collect()
        return staged

    def _resumed(self, rows: DataFrame, times: Times) -> StagedRows | None:
        """Keeps the batches of earlier drivers of the run that have rows of `rows`, and stages the rest. `rows` have HASH. None when no
        such batch can be kept.
        """
        assert self.notes is not None
        earlier = earlier_batches(
            self.notes.read(),
            self.writer,
            committed=self.committed,
            lower=times.lower,
            upper=times.upper if times.time is None else None,
            may_move=not self.reads_back,
        )
        kept = None if earlier is None else kept_of(earlier, rows, self.schema, self.log)
        if earlier is None or kept is None:
            return None
        end = earlier.upper.time
        assert end is not None
        theirs = Times(earlier.lower, earlier.upper, None if times.time is None else end - 1)
        tasks = self._tasks(kept.rest, theirs, is_noted=True) if kept.rest_sums[0] else []
        if added(map(sums_of, tasks)) != kept.rest_sums:
            # The rest has changed since the batches were compared, so the batches may be wrong too.
            self.log.event("changed_input", rows=sum(task["rows"] for task in tasks), compared=kept.rest_sums[0])
            return None
        return self._staged([*kept.tasks, *tasks], theirs, are_shared=True)

    def _with_errors_at(self, time: int | None, flat: DataFrame) -> DataFrame:
        """Sets the time of the collected errors in `flat` to `time`, because their own times may be missing or late."""
        if self.spec.envelope.on_error is OnError.FAIL:
            return flat
        return flat.withColumn(frames.TIME, F.when(is_error(self.schema), F.lit(time)).otherwise(F.col(frames.TIME)))

    def _write_corrections(self, minted: Minted, as_of: int, reader: ReadHandle, flat: DataFrame) -> StagedRows:
        times = Times.of(minted)
        task = self._stage_task(times)
        with persisted(self.spark, reader, as_of, self.schema, blob=self.spec.blob) as contents:
            tasks = self._sketched.staged(flat, contents, task)
            if tasks is None:
                both, count = both_sides(flat, contents.rows(), self.schema), tasks_for(flat, contents)
                tasks = staged_corrections(both, task, count, wanted=self.spec.write.parallelism)
            return self._staged(tasks, times)

    def _write_commands(self, minted: Minted, reader: ReadHandle | None, rows: DataFrame) -> StagedRows:
        commands = copied(rows, self.schema, shard_order(self.spec))
        self._refuse_empty(commands.rows)
        times = Times.of(minted)
        task = self._stage_task(times)
        with held(reader, minted.as_of, commands, blob=self.spec.blob) as shard:
            staging = staged_updates(commands, shard, task, tasks=self.spec.write.parallelism)
            return self._staged(staging.collect(), times, commands)

    def _stage_task(self, times: Times, noted: Noted | None = None) -> StageTask:
        lower, end = times.lower.time, times.upper.time
        assert lower is not None
        assert end is not None
        return StageTask(
            blob=self.spec.blob,
            shard_id=self.spec.shard_id,
            schema=self.schema,
            schema_id=self.writer.schema_id,
            lower=lower,
            upper=end,
            time=times.time,
            target_part_bytes=self.part_bytes,
            staging_floor_ms=self.writer.machine.staging_floor_ms,
            noted=noted,
        )

    def _greatest_time(self, flat: DataFrame, lower: Antichain, column: str) -> int | None:
        """The greatest time of the rows; None without rows. Runs before anything is staged, so that ConfigurationError can report how many
        rows cannot be written, and an example.
        """
        time = F.col(frames.TIME)
        late = time < F.lit(lower.time)
        row = flat.agg(
            F.count(F.lit(1)), F.count(time), F.max(time), F.count_if(late), F.min(F.when(late, time))
        ).first()
        rows, timed, greatest, late_rows, first_late = row
        if rows == 0:
            return None
        self._check_times(rows, timed, late_rows, first_late, lower=lower, column=column)
        return int(greatest)

    def _check_times(
        self, rows: int, timed: int, late_rows: int, first_late: int | None, *, lower: Antichain, column: str
    ) -> None:
        """Raises ConfigurationError when rows have no time, or when rows are before `lower`. `first_late`: the least time before
        `lower`.
        """
        if timed < rows:
            raise ConfigurationError(f"envelope.timestampColumn: {column} is null in {rows - timed} of {rows} rows")
        if late_rows:
            raise self.late(late_rows, first_late, lower)

    def late(self, rows: int | None, first: int | None, upper: Antichain) -> ConfigurationError:
        """The error for rows with times that the shard has passed. `rows`: their number, None when it is unknown."""
        count = "some rows" if rows is None else f"{rows} rows"
        return ConfigurationError(
            f"{count} have a time before the shard's upper {upper.time}, the first at {first}: "
            f"the envelope {self.spec.envelope.type} cannot change written times; exclude these rows with input.format.sql"
        )

    def _staged(
        self, tasks: Sequence[Any], times: Times, commands: Copied | None = None, *, are_shared: bool = False
    ) -> StagedRows:
        """Collects the batches and counts of `tasks`. `commands`: the commands that the tasks decided, if the envelope has any. Raises the
        error of `against.refusal` after it has deleted the batches.
        """
        batches = self._batches(tasks)
        if commands is not None and (error := refusal(tasks, self.spec.shard_id)):
            self.writer.delete_batches(batches)
            raise error
        stage = StagedRows(
            times=times,
            are_shared=are_shared,
            batches=batches,
            rows=sum(row["rows"] for row in tasks) if commands is None else commands.rows,
            errors=sum(row["errors"] for row in tasks) if commands is None else commands.errors,
            updates=sum(row["updates"] for row in tasks),
            least_time=min((row["least_time"] for row in tasks if row["least_time"] is not None), default=None),
            keys=None if commands is None else _keys_of(commands, sum(row[KEYS] for row in tasks)),
            wanted=self._digest(tasks),
        )
        self.log.event(
            "staged", batches=len(stage.batches), rows=stage.rows, errors=stage.errors, updates=stage.updates
        )
        # An empty Mirror has staged retractions. They are deleted only if an empty input is an error.
        if stage.rows == 0 and not self.spec.input.allow_empty:
            self.writer.delete_batches(stage.batches)
            self._refuse_empty(stage.rows)
        return stage

    def _batches(self, tasks: Sequence[Any]) -> tuple[Batch, ...]:
        """The batches that the tasks staged."""
        return tuple(
            # Spark returns the row of one attempt of each task, and only here. A second driver of this run has its own
            # tasks, or it has these from their notes. Then every append of them expects the same progress, so that at
            # most one succeeds, and `Landing` deletes them as copies.
            self.writer.batch_from_transmittable(bytes(row["batch"]), is_only_copy=True)
            for row in tasks
            if row["batch"] is not None
        )

    def _digest(self, tasks: Sequence[Any]) -> bytes | None:
        if self.spec.envelope.type is not EnvelopeType.MIRROR:
            return None
        rows, low, high = (sum(row[name] for row in tasks) for name in ("rows", "low", "high"))
        return WantedRows(rows, low, high).digest(self.schema)

    def _refuse_empty(self, rows: int) -> None:
        if rows == 0 and not self.spec.input.allow_empty:
            raise ConfigurationError(EMPTY)


def _keys_of(commands: Copied, count: int) -> RunKeys:
    return RunKeys(
        count=count,
        fetch=lambda: commands.keys,
        where=commands.where,
        is_contestable=commands.order is not None,
    )
