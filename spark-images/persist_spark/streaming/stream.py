"""One driver of a Streaming sink, from its start to its end. It starts only from the position that the shard stores."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from persist_engine import Location, PersistClient, SourceProgress
from persist_engine.base.env import Env
from persist_engine.base.metrics import Metrics
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from persist_spark.inputs.shard import check_continues, named_input, read_before, resolved
from persist_spark.landing import driver_settings
from persist_spark.partitions import sink_settings
from persist_spark.report import Log, SinkReport
from persist_spark.session import executor_count
from persist_spark.spec import ConfigurationError, SinkSpec, Stream, WriteMode
from persist_spark.staging import Staging, part_bytes_of, rows_of
from persist_spark.streaming.batches import Batches
from persist_spark.streaming.checkpoint import configure, temporary_checkpoint
from persist_spark.streaming.comparing import comparing
from persist_spark.streaming.driver_upserts import DriverUpserts
from persist_spark.streaming.each_batch import EachBatch
from persist_spark.streaming.few_rows import FewRows
from persist_spark.streaming.file_log import check_goes_on
from persist_spark.streaming.freshness import Freshness
from persist_spark.streaming.position import NO_BATCH, Position, decode_position
from persist_spark.streaming.query import for_each_batch, in_one_projection, streaming_input
from persist_spark.streaming.sources import folders_of, lines_of, name_of, oldest_file_ms, reads_files, sources_of
from persist_spark.streaming.standby import Standby, take_over

#: The message of Kafka's connector for lost records. It recommends an option that skips them, which a sink refuses.
_LOST = re.compile(
    r"Some data may have been lost .*?Reason:\s*(.+?)(?=\s*\n\s+at |\s*\nCaused by|\s*\n\n|\s*\Z)", re.DOTALL
)
#: The interval at which the main thread checks whether the query has ended on its own.
POLL_S = 0.5


def run_stream(
    spark: SparkSession,
    spec: SinkSpec,
    *,
    stop: threading.Event,
    env: Env,
    log: Log,
    is_promoted: Callable[[], bool] = lambda: False,
    metrics: Metrics | None = None,
) -> SinkReport:
    """Appends batch after batch until `stop` is set, or until the source of a bounded stream has no new rows. Reports the totals. A stream
    on standby first follows the sink's other driver, until `is_promoted`, and then takes over from it. A ReadOnly stream compares each
    batch with the shard, and appends nothing. `metrics` count the stream's calls.

    Each batch is appended once, because the compare-and-set that appends its rows also commits the position after it. Raises
    ConfigurationError, before anything is written, when the input or the resource must change; Fenced when another driver has committed;
    Unavailable when the store failed, or other writers won, for too long; Spark's errors when the source failed. The next driver continues.
    """
    stream = spec.stream
    assert stream is not None
    # A batch without rows is not an error, because the next batch may have rows.
    spec = resolved(replace(spec, input=replace(spec.input, allow_empty=True)))
    with named_input(spec), _client(spec, env, metrics) as client:
        progress = client.progress(spec.shard_id, spec.sink_id)
        frame = streaming_input(spark, spec)
        sources = sources_of(spec.input, frame)
        # The rows are planned once for all batches. So rows that do not fit are refused before the first batch.
        rows = in_one_projection(rows_of(frame, spec.schema, spec.envelope))
        age_ms = oldest_file_ms(sources) if reads_files(frame) else None
        folders = partial(temporary_checkpoint, file_age_ms=age_ms, lines=lines_of(spec.input, frame))
        check = partial(check_goes_on, age_ms=age_ms or 0, folders=folders_of(spec.input, frame))
        start = partial(_checked_start, spec, name_of(spec.input, sources), env, check)
        position = start(progress)
        check_continues(spec, position.offsets)
        with _explaining_losses():
            standby = Standby(spark, spec, client, rows, folders, is_promoted=is_promoted, stop=stop, env=env, log=log)
            if stream.stands_by and not standby.until_promoted():
                return SinkReport(run_id=spec.run_id, batches=0, stopped=True)
        if spec.write_mode is WriteMode.READ_ONLY:
            comparison = comparing(spec, client, position, folders, stop=stop, env=env, log=log)
            with _explaining_losses(), comparison as compared:
                return _Driver(stream, rows, compared, stop, log, None).until_stopped(spark)
        with (
            client.open_writer(spec.shard_id, spec.schema, purpose=spec.purpose) as writer,
            folders() as checkpoint,
            DriverUpserts(spec=spec, client=client, log=log) as upserts,
        ):
            if stream.stands_by:
                position, progress = take_over(writer, spec, client, start, log)
            log.event("position", batch=position.batch)
            checkpoint.write(position)
            size, fresh = part_bytes_of(spark, spec, log), Freshness.of(stream, sources, env=env, log=log)
            batches = Batches(
                spec=spec,
                client=client,
                writer=writer,
                staging=Staging(spark=spark, spec=spec, schema=spec.schema, writer=writer, part_bytes=size, log=log),
                checkpoint=checkpoint,
                few=FewRows.of(spec, rows),
                upserts=upserts,
                committed=position,
                expected=progress,
                env=env,
                log=log,
            )
            upper, read = None if progress is None else progress.upper.time, read_before(spec, position.offsets)
            report = SinkReport(run_id=spec.run_id, upper=upper, input_upper=read, batches=0)
            each = EachBatch(work=batches, checkpoint=checkpoint, report=report, env=env, log=log, on_failure=stop.set)
            with _explaining_losses():
                return _Driver(stream, rows, each, stop, log, fresh).until_stopped(spark)


@contextmanager
def _client(spec: SinkSpec, env: Env, metrics: Metrics | None) -> Iterator[PersistClient]:
    """The client of the stores. Raises ConfigurationError when the shard and the sink have different schemas."""
    settings = driver_settings(sink_settings(spec.write.target_part_bytes))
    location = Location(blob=spec.blob, consensus=spec.consensus)
    with PersistClient.open(location, settings=settings, env=env, metrics=metrics) as client:
        difference = client.schema(spec.shard_id).difference(spec.schema)
        if difference is not None:
            raise ConfigurationError(f"schema: differs from that of shard {spec.shard_id}: {difference}")
        yield client


@contextmanager
def _explaining_losses() -> Iterator[None]:
    """Replaces the error of a source that lost rows by a ConfigurationError with a remedy."""
    try:
        yield
    except Exception as error:
        lost = _LOST.search(str(error))
        if lost is None or isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(_explained(" ".join(lost[1].split()))) from error


def _checked_start(
    spec: SinkSpec,
    source: str,
    env: Env,
    check: Callable[[Mapping[str, str]], None],
    progress: SourceProgress | None,
) -> Position:
    """The position from which the stream continues. Raises the ConfigurationError of `_start`, and that of `check` for the logs."""
    position = _start(spec, source, progress, env)
    check(position.logs)
    return position


def _start(spec: SinkSpec, source: str, progress: SourceProgress | None, env: Env) -> Position:
    """The position from which the stream continues, with unchecked logs. Raises ConfigurationError when it belongs to another source."""
    driver = env.random_bytes(8).hex()
    if progress is None:
        query = str(uuid.UUID(bytes=env.random_bytes(16), version=4))
        return Position(source=source, query=query, batch=NO_BATCH, run=spec.run_id, driver=driver, offsets=None)
    stored = decode_position(progress.token, sink_id=spec.sink_id)
    if stored.source.lower() != source:  # older releases kept the letters in which the resource had it
        raise ConfigurationError(
            f"input.format: sink {spec.sink_id} has read {stored.source} up to its batch {stored.batch}, and its positions have no "
            f"meaning in {source}; create another sink for another source"
        )
    return replace(stored, run=spec.run_id, driver=driver)


def _explained(lost: str) -> str:
    return (
        f"input.format: the source no longer has rows that the sink has not read, and the sink passes over nothing: {lost} Restore them in "
        "the source, or create a sink with another name, which begins where its options say"
    )


@dataclass(frozen=True)
class _Driver:
    """The query and its end."""

    stream: Stream
    rows: DataFrame
    batches: EachBatch
    stop: threading.Event
    log: Log
    freshness: Freshness | None

    def until_stopped(self, spark: SparkSession) -> SinkReport:
        """Runs the query. When it returns, the batch in flight is committed or `stop_s` is over."""
        query = self._started(spark)
        try:
            while query.isActive and not self.stop.wait(POLL_S):
                self.batches.idle()
                if self.freshness is not None:
                    self.freshness.look(query, self.batches.planned_ms)
            error = query.exception()
            is_committed = self.batches.end(self.stream.stop_s)
            if not is_committed:
                self.log.event("not_committed", waited_s=self.stream.stop_s)
        finally:
            self._stop(query)
        # A batch that was cut off may have failed only for that reason. The next driver repeats it.
        failure = (self.batches.failure or error) if is_committed else None
        if failure is not None:
            raise failure
        return replace(self.batches.report, stopped=self.stop.is_set(), executors=executor_count(spark))

    def _started(self, spark: SparkSession) -> StreamingQuery:
        configure(spark)
        interval = self.stream.commit_interval_s
        writer = for_each_batch(self.rows.writeStream, self.rows, self.batches).outputMode("append")
        writer = writer.option("checkpointLocation", self.batches.checkpoint.folder.as_uri())
        if self.stream.is_bounded:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{interval} seconds").start()

    def _stop(self, query: StreamingQuery) -> None:
        try:
            query.stop()
        except Exception as error:  # noqa: BLE001 - the process ends anyway, and all that matters is committed
            self.log.event("query_not_stopped", error=str(error)[:500])
