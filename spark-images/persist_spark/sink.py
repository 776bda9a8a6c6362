"""One run of a sink, on the driver: mint (choose the times) -> write (executors stage batches) -> append (one compare-and-append of all
batches).

Only the driver uses consensus. A run appends all of its updates or none, and once per run id, however often it is repeated: the
compare-and-set that appends the data also commits the run id as the sink's source progress. Losing an append to another writer is normal.
`landing` then reuses the staged batches.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import assert_never

from persist_engine import Batch, Location, PersistClient, ReadHandle, SinceAhead, SourceProgress, WriteHandle
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import Fenced, InvalidUsage, Unavailable
from persist_engine.flow.append_run import Late, Recompute, Staged
from persist_engine.flow.mint_run import AlreadyDone, Minted, RaiseUpper, ShardView, Superseded, mint
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark import frames
from persist_spark.landing import Landed, Landing, driver_settings, refuse_outgrown_schema
from persist_spark.partitions import (
    STAGED_DDL,
    ReadParts,
    StageCorrections,
    StageRows,
    StageTask,
    grouped,
    sink_settings,
)
from persist_spark.report import Log, SinkReport
from persist_spark.session import executor_count, executor_memory, parallelism_of, shuffled_by_bytes
from persist_spark.spec import ConfigurationError, EnvelopeType, SinkSpec

#: How often a run starts over before it fails and leaves the work to the next run. It starts over when other writers raise the upper
#: first, or when since passes what they wrote. Lost appends do not count (`landing.TRIES_MAX`).
ROUNDS_MAX = 16


def run_sink(spark: SparkSession, spec: SinkSpec, *, env: Env | None = None, log: Log | None = None) -> SinkReport:
    """Brings the shard to the state that `spec` describes, and reports the run. Idempotent by `spec.run_id`.

    ConfigurationError when the input or the object must change; Fenced when another run of this sink committed meanwhile; Unavailable when
    the store failed, or other writers won, for too long; Spark's errors for a failed job. After any error, either all updates were appended
    or none.
    """
    env = env or SystemEnv()
    log = log or Log(io.StringIO(), env)
    schema = spec.schema
    settings = driver_settings(sink_settings(spec.write.target_part_bytes))
    with PersistClient.open(Location(blob=spec.blob, consensus=spec.consensus), settings=settings, env=env) as client:
        difference = client.schema(spec.shard_id).difference(schema)
        if difference is not None:
            raise ConfigurationError(f"schema: differs from that of shard {spec.shard_id}: {difference}")
        with client.open_writer(spec.shard_id, schema, purpose=spec.purpose) as writer:
            return _Run(
                spark=spark,
                spec=spec,
                schema=schema,
                client=client,
                writer=writer,
                part_bytes=_part_bytes(spark, spec, log),
                env=env,
                log=log,
            ).until_done()


def _part_bytes(spark: SparkSession, spec: SinkSpec, log: Log) -> int:
    """The part size for executors: the configured one, or a smaller one that fits the memory of their pods."""
    wanted, memory = spec.write.target_part_bytes, executor_memory(spark)
    fitting = wanted if memory is None else memory.fitting_part_bytes(wanted)
    if memory is not None and fitting < wanted:
        log.event("smaller_parts", wanted_bytes=wanted, part_bytes=fitting, **asdict(memory))
    return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The result of the write tasks."""

    batches: tuple[Batch, ...]
    rows: int
    updates: int
    least_time: int | None
    upper: Antichain


@dataclass(kw_only=True)
class _Run:
    """One run. Its only state is its handles."""

    spark: SparkSession
    spec: SinkSpec
    schema: Schema
    client: PersistClient
    writer: WriteHandle
    part_bytes: int
    """The part size for executors."""
    env: Env
    log: Log

    @property
    def _reads_back(self) -> bool:
        return self.spec.envelope.type is EnvelopeType.MIRROR

    def until_done(self) -> SinkReport:
        """Mints, writes and appends. Starts over when the staged batches can no longer be used."""
        expected = self.client.progress(self.spec.shard_id, self.spec.sink_id)
        for _ in range(ROUNDS_MAX):
            with self._reader() as reader:
                since = Antichain.minimum() if reader is None else reader.since
                view = ShardView(since=since, upper=self.writer.fetch_recent_upper(), progress=expected)
                if self._reads_back:
                    refuse_outgrown_schema(self.writer)
                decision = self._mint(view)
                match decision:
                    case AlreadyDone(upper):
                        return self._done_before(upper)
                    case Superseded():
                        raise Fenced(
                            f"a newer run of sink {self.spec.sink_id} than {self.spec.run_id} has appended to shard "
                            f"{self.spec.shard_id}: it is unknown whether this run appended before; nothing was written now"
                        )
                    case RaiseUpper(lower, upper):
                        # After a mismatch another writer has raised the upper. Look again in both cases.
                        self.writer.compare_and_append_batch([], expected_upper=lower, new_upper=upper)
                        continue
                    case Minted():
                        self.log.event("minted", lower=decision.lower.time, time=decision.time, as_of=decision.as_of)
                        staged = self._write(decision, reader)
                        report = self._append(decision, staged, reader, expected)
                    case _:
                        assert_never(decision)
            if report is not None:
                return report
        raise Unavailable(
            f"shard {self.spec.shard_id} changed during the run {ROUNDS_MAX} times in a row; nothing was appended"
        )

    def _mint(self, view: ShardView) -> Minted | RaiseUpper | AlreadyDone | Superseded:
        try:
            return mint(view, run=self.spec.run_token, now_ms=self.env.now_ms(), reads_back=self._reads_back)
        except InvalidUsage as error:
            raise ConfigurationError(f"shard {self.spec.shard_id}: {error}") from error

    @contextmanager
    def _reader(self) -> Iterator[ReadHandle | None]:
        """The lease under which executors read the persisted side. None when the envelope does not read it."""
        if not self._reads_back:
            yield None
            return
        with self.client.open_leased_reader(self.spec.shard_id, self.schema, purpose=self.spec.purpose) as reader:
            yield reader

    # -- write ---------------------------------------------------------------------------------------------------------

    def _write(self, minted: Minted, reader: ReadHandle | None) -> _Stage:
        source = frames.read_input(self.spark, self.spec.input)
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

    def _write_rows(self, minted: Minted, flat: DataFrame, column: str | None) -> _Stage:
        upper = minted.upper
        if column is not None:
            greatest = self._greatest_time(flat, minted.lower, column)
            if greatest is None:
                self._refuse_empty(0)
                # SUBTLE: without rows there is no time. With the upper raised to now, the next run's rows would be late.
                return _Stage(batches=(), rows=0, updates=0, least_time=None, upper=minted.lower)
            upper = Antichain.of(greatest + 1)
        task = self._stage_task(minted, upper, time=None if column else minted.time)
        ranged = frames.by_key_range(flat, self.schema, self.spec.write.parallelism)
        return self._collect(ranged.mapInArrow(StageRows(task), STAGED_DDL), upper)

    def _write_corrections(self, minted: Minted, as_of: int, reader: ReadHandle, flat: DataFrame) -> _Stage:
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
            raise self._late(late_rows, first_late, lower)
        return int(greatest)

    def _late(self, rows: int | None, first: int | None, upper: Antichain) -> ConfigurationError:
        count = "some rows" if rows is None else f"{rows} rows"
        return ConfigurationError(
            f"{count} have a time before the shard's upper {upper.time}, the first at {first}: "
            "an Append cannot change written times; exclude these rows with input.format.sql"
        )

    def _collect(self, staging: DataFrame, upper: Antichain) -> _Stage:
        rows = staging.collect()
        stage = _Stage(
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

    # -- append --------------------------------------------------------------------------------------------------------

    def _append(
        self, minted: Minted, stage: _Stage, reader: ReadHandle | None, expected: SourceProgress | None
    ) -> SinkReport | None:
        """The report of the finished run. None when the staged batches were deleted and the run must mint again."""
        if stage.upper == minted.lower:
            return self._appended(minted.lower, stage.upper, stage)
        own_times = self.spec.envelope.timestamp_column is not None
        staged = Staged(
            lower=minted.lower,
            upper=stage.upper,
            time=None if own_times else minted.time,
            least_time=stage.least_time,
            reads_back=self._reads_back,
            as_of=minted.as_of,
        )
        landing = Landing(
            writer=self.writer,
            reader=reader,
            staged=staged,
            batches=stage.batches,
            sink_id=self.spec.sink_id,
            run_token=self.spec.run_token,
            expected=expected,
            env=self.env,
            log=self.log,
        )
        outcome = landing.land()
        match outcome:
            case Landed(lower, upper, updates):
                return self._appended(lower, upper, replace(stage, updates=updates))
            case AlreadyDone(upper):
                return self._done_before(upper)
            case Superseded():
                raise Fenced(
                    f"another run of sink {self.spec.sink_id} appended to {self.spec.shard_id} "
                    f"while run {self.spec.run_id} was writing"
                )
            case Late(current):
                raise self._late(None, stage.least_time, current)
            case Recompute():
                self.log.event("recompute")
                return None
            case _:
                assert_never(outcome)

    def _appended(self, lower: Antichain, upper: Antichain, stage: _Stage) -> SinkReport:
        self.log.event("appended", lower=lower.time, upper=upper.time, updates=stage.updates)
        return SinkReport(
            run_id=self.spec.run_id,
            lower=lower.time,
            upper=upper.time,
            rows_read=stage.rows,
            updates_written=stage.updates,
            executors=executor_count(self.spark),
        )

    def _done_before(self, upper: Antichain) -> SinkReport:
        self.log.event("already_done", upper=upper.time)
        return SinkReport(
            run_id=self.spec.run_id, upper=upper.time, executors=executor_count(self.spark), already_done=True
        )
