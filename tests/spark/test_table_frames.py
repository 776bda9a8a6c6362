"""Frames of format `persist` on S3: read as tables of the catalog, with the same rows as the reader in Python."""

import gc
import re
import threading
from datetime import date
from decimal import Decimal

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_kit.servers import s3_server
from persist_spark.datasource import register

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]
SCHEMA = Schema.from_ddl("id BIGINT, area STRING", "n INT, m DECIMAL(12,2), d DATE, `a.b` STRING, p STRUCT<x: INT>")
#: Queries of a frame named `rows`.
QUERIES = (
    "SELECT * FROM rows",
    "SELECT n, count(*), max(m) FROM rows GROUP BY n",
    "SELECT id, p.x FROM rows WHERE id BETWEEN 90 AND 110 AND area IS NOT NULL",
    "SELECT a.id, b.`a.b` FROM rows a JOIN rows b ON a.id = b.id + 1 WHERE a.n = 3",
    "SELECT count(*), count(n), min(id), max(id), min(d), max(m) FROM rows",
    "SELECT sum(n), count(DISTINCT area) FROM rows WHERE m > 0",
)


class Shard:
    """A shard on S3 with its rows in blobs."""

    def __init__(self, s3, folder, spark, prefix="frames", shard=None):
        keys = f"[default]\naws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
        (folder / "aws-credentials").write_text(keys)
        blob = f"{s3.location(prefix)}&credentials_dir={folder}"
        self.location = Location(blob=blob, consensus=f"sqlite://{folder}/{prefix}.db")
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=8 * KIB))
        self.client, self.id = PersistClient.open(self.location, settings=settings), shard or ShardId.new()
        self.client.initialise(self.id, SCHEMA)
        self.spark, self.s3, self.blobs = spark, s3, s3.object_path(prefix)

    def add(self, numbers, diff=1):
        with self.client.open_writer(self.id, SCHEMA, purpose="test") as writer:
            upper = writer.fetch_recent_upper()
            updates = [(row(n), upper.time, diff) for n in numbers]
            writer.compare_and_append(updates, expected_upper=upper, new_upper=Antichain.of(upper.time + 1))

    def load(self, **options):
        stores = {"shard": str(self.id), "blob": self.location.blob, "consensus": self.location.consensus}
        return self.spark.read.format("persist").options(**stores, **options).load()

    def parts(self):
        return [path for path in self.blobs.rglob("n*/*") if path.is_file()]

    def ends(self):
        """Whether all leases are released within a minute, while both garbage collectors run."""
        pause = threading.Event()
        for _ in range(600):
            if not self.client.inspect(self.id).readers:
                return True
            gc.collect()
            self.spark._jvm.java.lang.System.gc()
            pause.wait(0.1)
        return False


def row(n):
    value = (None if n % 5 == 4 else n % 5, Decimal(n * 7 - 500).scaleb(-2), date(2013, 1, 1 + n % 28), f"t{n % 3}")
    return (n, None if n % 7 == 3 else f"ä{n % 5}"), (*value, None if n % 6 == 1 else (n,))


@pytest.fixture
def shard(tmp_path, local_spark):
    register(local_spark)
    with s3_server() as s3:
        made = Shard(s3, tmp_path, local_spark)
        yield made
        made.client.close()


def answers(spark, frame):
    frame.createOrReplaceTempView("rows")
    try:
        return [sorted(map(repr, spark.sql(query).collect())) for query in QUERIES]
    finally:
        spark.catalog.dropTempView("rows")


def plan_of(frame):
    return frame._jdf.queryExecution().executedPlan().toString()


def test_a_frame_on_s3_shows_the_rows_that_the_reader_in_python_shows(shard, local_spark):
    """With rows that were taken away again, several times, and rows that several appends added."""
    shard.add(range(400))
    shard.add(range(100, 150), -1)
    shard.add(range(140, 160))
    frame, early, python = shard.load(), shard.load(as_of="0"), shard.load(splits="2")
    assert frame.schema == python.schema
    shard.add(range(900, 950))
    assert re.search(f"persist {shard.id} of tables[0-9]+ as_of 2", plan_of(frame))
    assert f"persist {shard.id}" not in plan_of(python)
    assert answers(local_spark, frame) == answers(local_spark, python)
    assert (frame.count(), early.count(), shard.load().count()) == (370, 400, 420)
    del frame, early, python
    assert shard.ends(), "leases of frames that nothing can read"


def test_counts_and_bounds_fetch_nothing_and_a_query_fetches_its_columns_alone(shard):
    shard.add(range(400))
    frame = shard.load()
    query = frame.where("id < 10").select("n")
    assert "[n#" in plan_of(query), "neither the condition's column nor another one"
    assert sorted(map(repr, query.collect())) == sorted(
        map(repr, shard.load(splits="1").where("id < 10").select("n").collect())
    )
    for part in shard.parts():
        part.unlink()
    found = frame.selectExpr("count(*)", "count(n)", "min(id)", "max(id)", "min(d)").collect()
    assert [tuple(each) for each in found] == [(400, 320, 0, 399, date(2013, 1, 1))]
    assert frame.count() == 400
    with pytest.raises(Exception, match="blob"):
        frame.selectExpr("sum(n)").collect()


def test_a_copy_of_the_shard_in_another_store_is_another_table(shard, tmp_path, local_spark):
    """A copy has the id of its original, and may have its times. Spark reads equal scans once, and finds what it cached by them."""
    copy = Shard(shard.s3, tmp_path, local_spark, "copies", shard.id)
    shard.add(range(10))
    copy.add(range(30))
    ours, theirs = shard.load().where("n >= 0").select("id").cache(), copy.load().where("n >= 0").select("id")
    assert (ours.count(), theirs.count(), ours.unionAll(theirs).count()) == (8, 24, 32)
    ours.unpersist()
    copy.client.close()


@pytest.mark.parametrize("options", [{"as_of": "99"}, {"columns": "nope"}, {"table": "holds"}, {"updates": "true"}])
def test_what_a_table_cannot_show_is_read_or_refused_as_before(shard, options):
    shard.add(range(3))
    if options.keys() & {"as_of", "columns"}:
        with pytest.raises(Exception, match="upper|no column nope"):
            shard.load(**options)
    else:
        assert shard.load(**options).count() in (1, 2, 3)


def test_a_session_without_the_jar_reads_in_python(shard, monkeypatch):
    shard.add(range(3))
    monkeypatch.setattr("persist_spark.catalog.session_tables._JAVA_CLASS", "io.persistshard.spark.Absent")
    frame = shard.load()
    assert f"persist {shard.id}" not in plan_of(frame)
    assert frame.count() == 3
