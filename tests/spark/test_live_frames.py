"""Frames over a shard that keeps changing. A frame's contents stay the same, and its lease lasts exactly as long as it can be read.

In real sessions, because the JVM's garbage collector decides when a frame can no longer be read.
"""

import subprocess
import sys

import pytest
from collectors import are_gone
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.work.repair.force import force_compaction, force_gc
from persist_kit.depth import draws
from persist_spark.datasource import register
from pyspark.logger import PySparkLogger

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")


class Shard:
    """A shard with its rows in blobs, at first 0 to 9."""

    def __init__(self, folder, spark):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client = PersistClient.open(self.location, settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
        self.id, self.spark = ShardId.new(), spark
        self.writer = self.client.open_writer(self.id, SCHEMA, purpose="test")
        self.rows = 0
        self.grow(10)

    def grow(self, count: int = 10) -> None:
        upper = self.writer.fetch_recent_upper()
        rows = [(((id_,), (f"n{id_}",)), upper.time, 1) for id_ in range(self.rows, self.rows + count)]
        self.writer.compare_and_append(rows, expected_upper=upper, new_upper=Antichain.of(upper.time + 1))
        self.rows += count

    @property
    def options(self) -> dict[str, str]:
        return {"shard": self.id, "blob": self.location.blob, "consensus": self.location.consensus}

    def load(self, **more: str):
        return self.spark.read.format("persist").options(**self.options, **more).load()

    def readers(self) -> int:
        return len(self.client.inspect(self.id).readers)

    def ends(self) -> bool:
        """Whether all leases are released."""
        return are_gone(self.spark, self.readers)


@pytest.fixture(scope="module")
def spark(local_spark):
    register(local_spark)
    return local_spark


@pytest.fixture
def shard(tmp_path, spark):
    made = Shard(tmp_path, spark)
    yield made
    made.client.close()


def test_a_frame_shows_the_contents_of_the_time_of_its_load(shard, spark):
    frame = shard.load()
    own_schema = spark.read.format("persist").options(**shard.options).schema("id BIGINT, name STRING").load()
    options = ", ".join(f"{name} '{value}'" for name, value in shard.options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW made_by_sql USING persist OPTIONS ({options})")
    shard.grow()
    frame.createOrReplaceTempView("made_of_frame")
    for _ in range(2):
        assert frame.count() == own_schema.count() == 10
        assert frame.where("id >= 5").count() == own_schema.where("id >= 5").count() == 5
        assert frame.rdd.count() == len(list(frame.toLocalIterator())) == 10
        assert frame.union(frame.where("id < 3")).count() == 13
        for view in ("made_by_sql", "made_of_frame"):
            assert spark.sql(f"SELECT count(*) FROM {view} WHERE id >= 5").first()[0] == 5
        shard.grow()
    assert shard.load().count() == 40
    for view in ("made_by_sql", "made_of_frame"):
        spark.catalog.dropTempView(view)


def test_many_queries_of_a_frame_and_many_frames_leave_one_reader(shard):
    frame = shard.load()
    for number in range(draws(100)):
        query = frame.where(f"id = {number}").union(frame.where(f"id > {number}"))
        query._jdf.queryExecution().executedPlan().toString()  # planned, as for an action
    for number in (0, 9, 10):
        assert frame.where(f"id = {number}").count() == (number < 10)
    frame.explain(extended=True)
    assert shard.readers() == 1
    for _ in range(10):
        shard.load().explain()
    assert shard.load().count() == 10
    assert shard.readers() == 1
    del frame, query
    assert shard.ends()


@pytest.mark.parametrize("how", ["derived", "rdd", "view", "cached"])
def test_the_lease_lives_as_long_as_anything_reads_the_frame(shard, spark, tmp_path, how):
    """The frame itself is dropped. Compaction and collection run, and its blobs stay."""
    control = Shard(tmp_path / "control", spark)
    frame, elsewhere = shard.load(splits="4"), control.load()
    match how:
        case "derived":
            rest = frame.where("id >= 0").select("id")
        case "rdd":
            rest = frame.rdd
        case "view":
            frame.createOrReplaceTempView("kept")
            rest = spark.table("kept")
        case "cached":
            rest = frame.where("id >= 0").cache()
    assert elsewhere.count() == 10
    other = shard.load(columns="id")
    del frame, other, elsewhere
    shard.grow()
    assert control.ends(), "the collectors have run"
    force_compaction(shard.client.machine(shard.id), full=True)
    force_gc(shard.client.machine(shard.id))
    assert rest.count() == 10
    assert shard.readers() == 1
    if how == "cached":
        rest.unpersist(blocking=True)
    if how == "view":
        spark.catalog.dropTempView("kept")
    del rest
    assert shard.ends()
    control.client.close()


def test_failed_loads_and_failed_queries_leave_no_lease(shard, spark, monkeypatch):
    # Spark logs the exception of a query. Pytest keeps the log record and so the traceback, which refers to the frame.
    monkeypatch.setattr(PySparkLogger.getLogger("DataFrameQueryContextLogger"), "disabled", True)
    for wrong in ({"as_of": "99"}, {"columns": "nope"}, {"where": "id ="}):
        with pytest.raises(Exception, match="as_of|nope|id ="):
            shard.load(**wrong)
    assert shard.readers() == 0
    with pytest.raises(Exception, match="load the frame again"):
        spark.read.format("persist").options(**shard.options).schema("name STRING, id BIGINT").load()
    with pytest.raises(Exception, match="nope"):
        shard.load().select("nope").count()
    with pytest.raises(Exception, match="missing: name"):
        spark.range(3).write.format("persist").options(**shard.options).mode("append").save()
    assert shard.ends()


PROGRAM = """
import sys
from persist_spark.datasource import register
from persist_engine import Location, PersistClient, ShardId
from pyspark.sql import SparkSession
shard, blob, consensus = sys.argv[1:]
client = PersistClient.open(Location(blob=blob, consensus=consensus))
readers = lambda: len(client.inspect(ShardId(shard)).readers)
load = lambda spark: spark.read.format("persist").options(shard=shard, blob=blob, consensus=consensus).load()
for last in (False, True):
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    frames = [load(spark), load(spark)]
    register(spark)
    frames.append(load(spark))
    assert [frame.count() for frame in frames] == [10] * 3
    print("held", readers(), flush=True)
    if last:
        break
    spark.stop()
    while readers():
        pass
    print("ended", flush=True)
"""


def test_the_end_of_a_session_releases_its_readers(shard):
    """A program stops its session, starts another, and exits without stopping that one. The sessions are configured as the shared one."""
    command = [sys.executable, "-c", PROGRAM, *shard.options.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["held", "1", "ended", "held", "1"]
    assert shard.readers() == 0
