"""The number of write tasks follows the bytes to write, without a Spark job that only counts."""

import functools
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId, connect
from persist_engine.base.env import SystemEnv
from persist_engine.base.settings import MIB
from persist_engine.base.wording import is_instant
from persist_spark import frames, session, sink
from persist_spark.envelopes import corrected
from persist_spark.report import Log
from persist_spark.spec import Envelope, EnvelopeType, Input, SinkSpec, Write
from persist_spark.table.attempt import minted_at
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
KEY, VALUE = "id BIGINT", "name STRING"
MIRROR, APPEND = Envelope(type=EnvelopeType.MIRROR), Envelope(type=EnvelopeType.APPEND)
TIMED = Envelope(type=EnvelopeType.APPEND, timestamp_column="t")
#: About 37 bytes a row in a shuffle: a key, and 32 hexadecimal characters.
ROWS = "select id, left(sha2(cast(id as string), 256), 32) as name from range({})"
FILES = 7
#: An input query with a shuffle of its own.
DISTINCT = "select id, max(name) as name from input group by id"


class SettingsLog(Log):
    """A log that records the advised size of tasks as the session has it when the tasks have run."""

    spark: SparkSession
    task_bytes: str | None = None

    def event(self, event, **fields):
        super().event(event, **fields)
        if event == "staged":
            self.task_bytes = self.spark.conf.get("spark.sql.adaptive.advisoryPartitionSizeInBytes", None)


class Writes:
    """A shard on files, and runs of sinks over Parquet files."""

    def __init__(self, folder, spark, inputs):
        self.spark, self.input = spark, inputs
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.id = ShardId.new()
        self.client = PersistClient.open(self.location)
        self.client.initialise(self.id, Schema.from_ddl(KEY, VALUE))
        self.runs = itertools.count()
        self.log: list[dict] = []
        self.jobs = 0
        self.task_bytes: str | None = None

    def run(self, source: Input, envelope: Envelope, write: Write = Write()):  # noqa: B008 - frozen
        """Runs a sink and returns its report. Afterwards `log`, `jobs` and `task_bytes`, the advised size of its tasks, are those of
        this run.
        """
        run = f"run-{next(self.runs)}"
        spec = SinkSpec(
            sink_id="ns/s", run_id=run, shard_id=self.id, key_ddl=KEY, value_ddl=VALUE, blob=self.location.blob,
            consensus=self.location.consensus, input=source, envelope=envelope, write=write,
        )  # fmt: skip
        lines = io.StringIO()
        group = f"{self.id} {run}"
        self.spark.sparkContext.setJobGroup(group, "a run under test")
        log = SettingsLog(lines, SystemEnv())
        log.spark = self.spark
        report = sink.run_sink(self.spark, spec, log=log)
        self.task_bytes = log.task_bytes
        self.log = [json.loads(line) for line in lines.getvalue().splitlines()]
        self.jobs = len(self.spark.sparkContext.statusTracker().getJobIdsForGroup(group))
        return report

    @property
    def batches(self) -> int:
        """The number of staged batches: one for each task that wrote something."""
        return next(line["batches"] for line in self.log if line["event"] == "staged")

    def contents(self) -> pa.Table:
        """The latest contents of the shard, as updates."""
        upper = self.client.recent_upper(self.id).time
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            return reader.snapshot(Antichain.of(upper - 1)).to_table()


@pytest.fixture(scope="module")
def inputs(local_spark, tmp_path_factory) -> Callable[[str], Input]:
    """Writes the result of a query into FILES files. Each query runs once."""

    @functools.cache
    def written(query: str) -> Input:
        path = str(tmp_path_factory.mktemp("input") / "rows")
        frame = local_spark.sql(query)
        frame.repartition(FILES).write.parquet(path)
        # With a schema: otherwise Spark runs a job to find it.
        ddl = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema)
        return Input(format="parquet", options={"path": path}, schema=ddl)

    return written


@pytest.fixture
def writes(tmp_path, local_spark, inputs) -> Writes:
    made = Writes(tmp_path, local_spark, inputs)
    yield made
    made.client.close()


@pytest.fixture
def conf(local_spark):
    """Sets a key of the session until the end of the test."""
    before: dict[str, str | None] = {}

    def set_(name, value):
        before.setdefault(name, local_spark.conf.get(name, None))
        local_spark.conf.set(name, value)

    yield set_
    for name, value in before.items():
        if value is None:
            local_spark.conf.unset(name)
        else:
            local_spark.conf.set(name, value)


@pytest.fixture
def by_ranges(monkeypatch):
    """No frame counts as small, so that a few rows are staged as many are."""
    monkeypatch.setattr(frames, "SMALL_BYTES", 0)


def test_a_small_input_is_one_task_for_any_number_of_files(writes):
    writes.run(writes.input(ROWS.format(1000)), APPEND)
    assert writes.batches == 1
    writes.run(writes.input(ROWS.format(1500)), MIRROR)
    assert writes.batches == 1


def test_the_number_of_tasks_follows_the_shuffled_bytes(writes, by_ranges):
    """About 11 MiB are shuffled. With parts of 1 MiB a task gets 1 MiB. With parts of 32 MiB a task would get 16 MiB, and gets less, down
    to 4 MiB, while cores are free. With parts of 64 MiB a second task is not worth its start.
    """
    source = writes.input(ROWS.format(300_000))
    writes.run(source, APPEND, Write(target_part_bytes=1 * MIB))
    assert 8 <= writes.batches <= 16
    # Corrections also shuffle the contents of the shard, and nothing compresses: about 28 MiB, 4 MiB a task.
    writes.run(
        replace(source, sql="select id, upper(name) as name from input"), MIRROR, Write(target_part_bytes=8 * MIB)
    )
    assert 6 <= writes.batches <= 10
    assert writes.contents().column("diff").unique().to_pylist() == [1]
    writes.run(source, APPEND, Write(target_part_bytes=32 * MIB))
    assert writes.batches == 2  # the session's cores
    writes.run(source, APPEND, Write(target_part_bytes=64 * MIB))
    assert writes.batches == 1


@pytest.mark.parametrize("tasks", [1, 5])
def test_write_parallelism_is_the_number_of_tasks(writes, tasks):
    source = writes.input(ROWS.format(2000))
    writes.run(source, APPEND, Write(parallelism=tasks))
    assert writes.batches == tasks
    writes.run(replace(source, sql="select id, upper(name) as name from input"), MIRROR, Write(parallelism=tasks))
    assert writes.batches == tasks


@pytest.mark.parametrize(("parallelism", "is_changed"), [(None, True), (1, False)])
def test_a_run_changes_the_settings_of_spark_only_without_write_parallelism(writes, parallelism, is_changed):
    writes.run(writes.input(ROWS.format(10)), APPEND, Write(parallelism=parallelism))
    assert (writes.task_bytes is not None) == is_changed


def test_a_run_with_parts_smaller_than_configured_logs_it_once(writes):
    """The pod has 1 GiB of heap and 512 MiB of overhead. That leaves 128 MiB beside the JVM, less than a worker alone needs."""
    conf = writes.spark.sparkContext._conf
    pod = {"spark.executor.memory": "1g", "spark.executor.memoryOverhead": "512m", "spark.executor.cores": "1"}
    before = {name: conf.get(name, None) for name in pod}
    try:
        for name, value in pod.items():
            conf.set(name, value)
        writes.run(writes.input(ROWS.format(1000)), MIRROR)
        writes.run(writes.input(ROWS.format(1500)), MIRROR)
    finally:
        for name, value in before.items():
            conf._jconf.remove(name) if value is None else conf.set(name, value)
    logged = [line for line in writes.log if line["event"] == "smaller_parts"]
    assert [(line["wanted_bytes"], line["part_bytes"], line["overhead_mib"]) for line in logged] == [
        (64 * MIB, 4 * MIB, 512)
    ]
    assert conf.get("spark.executor.memoryOverhead", None) is None
    writes.run(writes.input(ROWS.format(10)), APPEND)
    assert "smaller_parts" not in {line["event"] for line in writes.log}


def test_without_adaptive_execution_shuffle_partitions_is_the_number_of_tasks(writes, conf, by_ranges, monkeypatch):
    conf("spark.sql.adaptive.enabled", "false")
    writes.run(writes.input(ROWS.format(1000)), APPEND)
    assert writes.batches == 2  # spark.sql.shuffle.partitions of this session
    writes.run(writes.input(ROWS.format(2000)), MIRROR)
    assert writes.batches == 1, "few corrections"
    for module in (frames, corrected):
        monkeypatch.setattr(module, "SMALL_TASK_BYTES", 0)
    writes.run(writes.input(ROWS.format(3000)), MIRROR)
    assert writes.batches == 2


def test_all_copies_of_a_row_meet_in_one_task(writes):
    """Their partition is far larger than a task. It is neither split nor joined with others."""
    hot = "select if(id % 2 = 0, 0L, id) as id, if(id % 2 = 0, repeat('hot', 10), cast(id as string)) as name from range({})"
    writes.run(writes.input(hot.format(60_000)), MIRROR, Write(target_part_bytes=1 * MIB))
    # Half of the copies are retracted, and the next run has nothing to correct.
    source = writes.input(hot.format(30_000))
    report = writes.run(source, MIRROR, Write(target_part_bytes=1 * MIB))
    assert report.updates_written == 1 + 15_000
    rows = writes.contents()
    assert sorted(rows.column("diff").to_pylist())[-2:] == [1, 15_000]
    assert rows.num_rows == 15_001
    assert writes.run(source, MIRROR, Write(target_part_bytes=1 * MIB)).updates_written == 0


@pytest.mark.parametrize(
    ("envelope", "small_bytes", "jobs"),
    [
        (APPEND, frames.SMALL_BYTES, 1),  # write
        (TIMED, frames.SMALL_BYTES, 3),  # before that, find the greatest time: by task, and over all
        (APPEND, 0, 3),  # sample the key ranges, shuffle the input, write
        (TIMED, 0, 5),
        (MIRROR, 0, 3),  # compare with the last run in one job; shuffle input and shard together, write
    ],
    ids=["small append", "small timed", "append", "timed", "mirror"],
)
@pytest.mark.parametrize("shuffles", [0, 1], ids=["plain", "with a shuffle"])
def test_a_run_starts_no_needless_job(writes, envelope, small_bytes, jobs, shuffles, monkeypatch):
    """With adaptive execution each shuffle is a job. A shuffle in the input query adds one for each reading of the input."""
    monkeypatch.setattr(frames, "SMALL_BYTES", small_bytes)
    if envelope is MIRROR:
        writes.run(writes.input(ROWS.format(10)), MIRROR)  # the first run writes its rows like an append
    query = ROWS.format(1000)
    if envelope is TIMED:
        query = query.replace(" from", ", id as t from")
    source = writes.input(query)
    if shuffles:
        source = replace(source, sql=DISTINCT.replace(" from", ", max(t) as t from") if envelope is TIMED else DISTINCT)
    writes.run(source, envelope)
    readings = 1 if envelope is APPEND else 2  # sampling and writing share one shuffle of the input
    compared = shuffles if envelope is MIRROR else 0  # with SQL, by task and over all
    assert writes.jobs == jobs + shuffles * readings + compared


def test_a_run_keeps_the_settings_of_the_user_and_restores_the_others(writes, conf):
    """During the run, a setting for adaptive execution that the user has made stays too."""
    names = [
        "advisoryPartitionSizeInBytes",
        "coalescePartitions.minPartitionSize",
        "coalescePartitions.parallelismFirst",
    ]
    keys = [f"spark.sql.adaptive.{name}" for name in (*names, "coalescePartitions.initialPartitionNum")]
    keys.append("spark.sql.execution.rangeExchange.sampleSizePerPartition")
    conf(keys[0], "3m")
    before = [writes.spark.conf.get(key, None) for key in keys]
    assert before == ["3m", None, None, None, None]
    with session.shuffled_by_bytes(writes.spark, part_bytes=64 * MIB):
        within = [writes.spark.conf.get(key) for key in keys]
    assert within == ["3m", f"{8 * MIB}b", "true", "512", "20"]
    with pytest.raises(ZeroDivisionError), session.shuffled_by_bytes(writes.spark, part_bytes=64 * MIB):
        raise ZeroDivisionError
    assert [writes.spark.conf.get(key, None) for key in keys] == before


@pytest.mark.parametrize("clock", ["ms", "counter"])
def test_writes_of_spark_have_the_times_of_the_tables_clock(tmp_path, clock):
    with connect(tmp_path / "shop", maintain=False) as db:
        table = db.create("t", key="id BIGINT", clock=clock, retain=None)
        for expected in (1, 2):
            with db.client.open_writer(table.id, db.client.schema(table.id), purpose="test") as writer:
                minted = minted_at(writer, writer.fetch_recent_upper(), Antichain.minimum(), reads_back=False)
            assert is_instant(minted.time) if clock == "ms" else minted.time == expected
            table.append([{"id": expected}])


@pytest.mark.parametrize("earlier", [None, "true", "false"])
def test_a_query_is_planned_once_within_the_block_alone(writes, conf, earlier):
    name = "spark.sql.adaptive.enabled"
    if earlier is not None:
        conf(name, earlier)

    def is_planned_again():
        plan = writes.spark.range(10).groupBy().count()._jdf.queryExecution().executedPlan()
        return str(plan.nodeName()).startswith("Adaptive")

    with session.planned_once(writes.spark):
        assert not is_planned_again()
    with pytest.raises(ZeroDivisionError), session.planned_once(writes.spark):
        raise ZeroDivisionError
    assert writes.spark.conf.get(name, None) == earlier
    assert is_planned_again() is (earlier != "false")
