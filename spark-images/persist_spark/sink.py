"""One run of a sink, on the driver: mint (choose the times) -> write (executors stage batches) -> append (one compare-and-append of all
batches).

Only the driver uses consensus. A run appends all of its updates or none. It appends them once per run id, however often it is repeated,
because the compare-and-set that appends the data also commits the run id as the sink's source progress. Losing an append to another writer
is normal. `landing` then reuses the staged batches.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

import pyarrow as pa
from persist_engine import Location, PersistClient, ReadHandle, SinceAhead, SourceProgress, StagingNotes, WriteHandle
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import Fenced, InvalidUsage, Unavailable
from persist_engine.base.metrics import Metrics
from persist_engine.flow.append_run import Late, Recompute, Staged
from persist_engine.flow.mint_run import AlreadyDone, Minted, RaiseUpper, RunToken, ShardView, Superseded, mint
from persist_engine.model.frontier import MINIMUM, Antichain
from pyspark.sql import DataFrame, SparkSession

from persist_spark.envelopes.persisted import opened
from persist_spark.failures import is_lost_copy
from persist_spark.inputs.shard import RunInput, named_input, opened_input
from persist_spark.landing import Landed, Landing, driver_settings, refuse_outgrown_schema
from persist_spark.partitions import sink_settings
from persist_spark.report import Log, SinkReport
from persist_spark.session import executor_count
from persist_spark.spec import ConfigurationError, EnvelopeType, SinkSpec, WriteMode
from persist_spark.staging import EMPTY, StagedRows, Staging, difference, part_bytes_of, rows_of
from persist_spark.streaming.position import check_no_stream, committer

#: The number of rounds of a run before it fails and leaves the work to the next run. A run starts another round when other writers raise
#: the upper first, or when since passes the rows that they wrote. Lost appends do not count (`landing.TRIES_MAX`).
ROUNDS_MAX = 16
#: The number of lost executors that a run survives by starting over, when Spark alone cannot go on.
LOST_COPIES_MAX = 4


def run_sink(
    spark: SparkSession,
    spec: SinkSpec,
    *,
    env: Env | None = None,
    log: Log | None = None,
    metrics: Metrics | None = None,
) -> SinkReport:
    """Brings the shard to the state that `spec` describes, or only compares it, and reports the run. Idempotent by `spec.run_id`. `metrics`
    count the driver's calls.

    Raises ConfigurationError when the input or the resource must change; Fenced when another run of this sink committed meanwhile;
    Unavailable when the store failed, or other writers won, for too long; Spark's errors for a failed job. After any error, either all
    updates were appended or none.
    """
    env = env or SystemEnv()
    log = log or Log(io.StringIO(), env)
    schema = spec.schema
    settings = driver_settings(sink_settings(spec.write.target_part_bytes))
    location = Location(blob=spec.blob, consensus=spec.consensus)
    with PersistClient.open(location, settings=settings, env=env, metrics=metrics) as client:
        difference = client.schema(spec.shard_id).difference(schema)
        if difference is not None:
            raise ConfigurationError(f"schema: differs from that of shard {spec.shard_id}: {difference}")
        with named_input(spec), opened_input(spark, spec, env=env) as source:
            if spec.write_mode is WriteMode.READ_ONLY:
                report = _compared(spark, spec, client, rows_of(source.read(), schema, spec.envelope), log)
            else:
                report = _written(spark, spec, client, source, env=env, log=log)
            report = replace(report, executors=executor_count(spark))
            return report if report.already_done else replace(report, input_upper=source.upper)


def _written(
    spark: SparkSession, spec: SinkSpec, client: PersistClient, source: RunInput, *, env: Env, log: Log
) -> SinkReport:
    schema = spec.schema
    with client.open_writer(spec.shard_id, schema, purpose=spec.purpose) as writer:
        part_bytes = part_bytes_of(spark, spec, log)
        notes = StagingNotes(writer.machine, spec.sink_id, spec.run_token)
        expected = client.progress(spec.shard_id, spec.sink_id)
        check_no_stream(expected, spec)
        staging = Staging(
            spark=spark,
            spec=spec,
            schema=schema,
            writer=writer,
            part_bytes=part_bytes,
            log=log,
            notes=notes,
            committed=MINIMUM if expected is None else expected.upper,
        )
        run = Run(
            spec=spec,
            client=client,
            writer=writer,
            staging=staging,
            env=env,
            log=log,
            token=spec.run_token,
            expected=expected,
            read=lambda: rows_of(source.read(), schema, spec.envelope),
        )
        report = run.until_done()
        if staging.has_notes or report.already_done:
            _forget(notes, log)
        return report


def _forget(notes: StagingNotes, log: Log) -> None:
    """Deletes the notes of a run that is done. If the store fails, the notes stay. They do no harm, and the orphan scan deletes them."""
    try:
        notes.forget()
    except Unavailable as error:
        log.event("kept_notes", reason=str(error))


def _compared(spark: SparkSession, spec: SinkSpec, client: PersistClient, rows: DataFrame, log: Log) -> SinkReport:
    """Reports what a run would change at the newest complete time of the shard. Opens no writer and stages nothing."""
    with client.open_leased_reader(spec.shard_id, spec.schema, purpose=spec.purpose) as reader:
        upper = client.recent_upper(spec.shard_id)
        as_of = upper.newest_complete
        log.event("comparing", as_of=as_of)
        compared = difference(spark, rows, spec, reader, None if as_of < 0 else as_of)
    if compared.rows == 0 and not spec.input.allow_empty:
        raise ConfigurationError(EMPTY)
    log.event("compared", rows=compared.rows, errors=compared.errors, missing=compared.missing, extra=compared.extra)
    return SinkReport(
        run_id=spec.run_id,
        upper=upper.time,
        rows_read=compared.rows,
        errors=compared.errors,
        missing=compared.missing,
        extra=compared.extra,
    )


@dataclass(kw_only=True)
class Run:
    """One run: a whole run of a batch sink, or one batch of a stream. For one use. Its only state is its handles."""

    spec: SinkSpec
    client: PersistClient
    writer: WriteHandle
    staging: Staging
    env: Env
    log: Log
    token: bytes
    """The sink's source progress that the run commits with its data."""
    expected: SourceProgress | None
    """The sink's progress when the run began."""
    read: Callable[[], DataFrame]
    """Reads the input as the envelope requires (`staging.rows_of`). Every call returns the same rows."""
    few: pa.Table | None = None
    """The same rows in memory, if the driver itself stages them."""
    lands_nothing: bool = True
    """Whether the run commits its progress even when there is nothing to append."""

    def until_done(self) -> SinkReport:
        """Mints, writes and appends. Starts over when the staged batches can no longer be used, and when a lost executor held the run's
        copy of its rows. The sink's progress shows whether an earlier append succeeded.
        """
        for _ in range(LOST_COPIES_MAX):
            try:
                return self._rounds()
            except Exception as error:
                if not is_lost_copy(error):
                    raise
                self.log.event("lost_copy")
        return self._rounds()

    def _rounds(self) -> SinkReport:
        for _ in range(ROUNDS_MAX):
            with self._reader() as reader:
                since = Antichain.minimum() if reader is None else reader.since
                view = ShardView(since=since, upper=self.writer.fetch_recent_upper(), progress=self.expected)
                if self.staging.reads_back:
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
                        # A mismatch means that another writer has raised the upper. The next round reads it in both cases.
                        self.writer.compare_and_append_batch([], expected_upper=lower, new_upper=upper)
                        continue
                    case Minted():
                        self.log.event("minted", lower=decision.lower.time, time=decision.time, as_of=decision.as_of)
                        report = self._append(decision, self._staged(decision, reader), reader)
                    case _:
                        assert_never(decision)
            if report is not None:
                return report
        raise Unavailable(
            f"shard {self.spec.shard_id} changed during the run {ROUNDS_MAX} times in a row; nothing was appended"
        )

    def _mint(self, view: ShardView) -> Minted | RaiseUpper | AlreadyDone | Superseded:
        try:
            now_ms = self.writer.clock_time(self.env.now_ms())
            return mint(view, run=self.token, now_ms=now_ms, reads_back=self.staging.reads_back)
        except InvalidUsage as error:
            raise ConfigurationError(f"shard {self.spec.shard_id}: {error}") from error

    @contextmanager
    def _reader(self) -> Iterator[ReadHandle | None]:
        """The lease under which executors read the persisted side. None when the envelope does not read it."""
        if not self.staging.reads_back:
            yield None
            return
        with self.client.open_leased_reader(
            self.spec.shard_id, self.staging.schema, purpose=self.spec.purpose
        ) as reader:
            yield reader

    def _staged(self, minted: Minted, reader: ReadHandle | None) -> StagedRows:
        if self.few is not None:
            return self.staging.stage_few(self.few, minted)
        rows = self.read()  # lists the files of the input, which takes as long as some jobs
        return self._unchanged(rows, minted, reader) or self.staging.stage(rows, minted, reader)

    def _unchanged(self, rows: DataFrame, minted: Minted, reader: ReadHandle | None) -> StagedRows | None:
        """The staged rows of a Mirror that has nothing to change: its input has the digest that the last run of this sink committed, and
        the shard has not changed since. Otherwise None. To an Upsert the same rows are commands, such as removals of their keys.
        """
        is_mirror = self.spec.envelope.type is EnvelopeType.MIRROR
        if not is_mirror or self.expected is None or reader is None or minted.as_of is None:
            return None
        digest, after = RunToken.decode(self.expected.token).rows, self.expected.upper.newest_complete
        if digest is None or not _is_unchanged(reader, after, minted.as_of):
            return None
        held_rows = partial(_rows_held, reader, minted.as_of)
        return self.staging.unchanged(rows, minted, digest, since=after, held_rows=held_rows)

    # -- append --------------------------------------------------------------------------------------------------------

    def _append(self, minted: Minted, stage: StagedRows, reader: ReadHandle | None) -> SinkReport | None:
        """The report of the finished run. None when the staged batches were deleted and the run must mint again."""
        if not (stage.batches or self.lands_nothing):
            return SinkReport(run_id=self.spec.run_id, rows_read=stage.rows, errors=stage.errors)
        times = stage.times
        if times.upper == times.lower:
            return self._appended(minted.lower, times.upper, stage)
        staged = Staged(
            lower=times.lower,
            upper=times.upper,
            time=times.time,
            least_time=stage.least_time,
            reads_back=self.staging.reads_back,
            as_of=minted.as_of,
        )
        landing = Landing(
            writer=self.writer,
            reader=reader,
            staged=staged,
            batches=stage.batches,
            sink_id=self.spec.sink_id,
            run_token=RunToken(self.token, stage.wanted),
            expected=self.expected,
            where=None if stage.keys is None else stage.keys.where,
            keys=stage.keys,
            seen=minted.lower,
            are_shared=stage.are_shared,
            env=self.env,
            log=self.log,
        )
        outcome = landing.land()
        match outcome:
            case Landed(lower, upper, updates):
                return self._appended(lower, upper, replace(stage, updates=updates))
            case AlreadyDone(upper):
                return self._done_before(upper)
            case Superseded(current):
                raise Fenced(
                    f"{committer(current)} of sink {self.spec.sink_id} appended to {self.spec.shard_id} "
                    f"while run {self.spec.run_id} was writing"
                )
            case Late(current):
                raise self.staging.late(None, stage.least_time, current)
            case Recompute():
                self.log.event("recompute")
                return None
            case _:
                assert_never(outcome)

    def _appended(self, lower: Antichain, upper: Antichain, stage: StagedRows) -> SinkReport:
        self.log.event("appended", lower=lower.time, upper=upper.time, updates=stage.updates)
        return SinkReport(
            run_id=self.spec.run_id,
            lower=lower.time,
            upper=upper.time,
            rows_read=stage.rows,
            errors=stage.errors,
            updates_written=stage.updates,
        )

    def _done_before(self, upper: Antichain) -> SinkReport:
        self.log.event("already_done", upper=upper.time)
        return SinkReport(run_id=self.spec.run_id, upper=upper.time, already_done=True)


def _rows_held(reader: ReadHandle, as_of: int) -> int:
    """An upper bound of the number of rows of the shard. Reads no parts, but fetches listings of parts, if there are any."""
    with opened(reader, as_of) as snapshot:
        return snapshot.rows_estimate


def _is_unchanged(reader: ReadHandle, after: int, upto: int) -> bool:
    """Whether no updates were written after `after`, up to `upto`. Uses only metadata, and returns False if they do not prove it."""
    if after == upto:
        return True
    changes = reader.changes(after, upto)
    if isinstance(changes, SinceAhead):
        return False
    with changes:
        return changes.bytes_estimate == 0
