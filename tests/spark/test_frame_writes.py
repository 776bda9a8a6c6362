"""`df.write.format("persist")`, as a user's program calls it: append and overwrite, beside other writers, with tasks that fail."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_kit.depth import draws
from persist_spark.datasource import register
from persist_spark.source.write import WriteOptions, matched
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql import types as T

pytestmark = pytest.mark.spark

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT NOT NULL, area STRING", "n INT, p STRUCT<x: DOUBLE, s: STRING>")
COLUMNS = "id BIGINT, area STRING, n INT, p STRUCT<x: DOUBLE, s: STRING>"
GIVEN = {"shard": "s00000000-0000-0000-0000-000000000001", "blob": "mem:", "consensus": "mem:"}


class Shard:
    def __init__(self, folder, schema=SCHEMA):
        self.folder, self.schema = folder, schema
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4 * KIB))
        self.client, self.id = PersistClient.open(self.location, settings=settings), ShardId.new()
        self.client.open_writer(self.id, schema, purpose="test").expire()
        self.given = {"shard": str(self.id), "blob": self.location.blob, "consensus": self.location.consensus}

    def write(self, frame, mode="append", **options):
        frame.write.format("persist").options(**self.given, **options).mode(mode).save()

    def add(self, rows, diff=1):
        """What another writer appends."""
        with self.client.open_writer(self.id, self.schema, purpose="rival") as writer:
            upper = writer.fetch_recent_upper().time
            updates = [(row, upper, diff) for row in rows]
            writer.compare_and_append(updates, expected_upper=A(upper), new_upper=A(upper + 1))

    def rows(self):
        """The contents, each row with its count."""
        upper = self.client.recent_upper(self.id).time
        if upper == 0:
            return Counter()
        with self.client.open_leased_reader(self.id, purpose="test") as reader, reader.snapshot(A(upper - 1)) as found:
            table = found.to_table()
        flat = zip(*(table.column(name).to_pylist() for name in ("key", "val", "diff")), strict=True)
        return Counter({(tuple(key.values()), plain(val)): diff for key, val, diff in flat})

    def updates(self, start):
        """The number of updates at or after `start`."""
        upper = self.client.recent_upper(self.id).time
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            return reader.changes(start - 1, upper - 1).to_table().num_rows

    def blobs(self):
        return [path for path in (self.folder / "blobs").rglob("n*/*") if path.is_file()]


def plain(val):
    return tuple(tuple(each.values()) if isinstance(each, dict) else each for each in val.values())


def row(i, version=0):
    n = None if i % 7 == 3 else i + version
    return ((i, None if i % 5 == 0 else f"a{i % 3}"), (n, None if i % 4 == 0 else (i / 2, f"s{version}")))


def frame(spark, rows, columns=COLUMNS):
    return spark.createDataFrame([(*key, *val) for key, val in rows], columns)


@pytest.fixture(scope="module")
def spark(local_spark):
    register(local_spark)
    return local_spark


@pytest.fixture
def either(either_spark):
    """A classic session, and one over Spark Connect."""
    register(either_spark)
    return either_spark


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


# -- options and columns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "overwrites", "message"),
    [
        ({"as_of": "3"}, False, "option as_of: not known to a write in format persist"),
        ({"allow_empty": "true"}, False, "option allow_empty: needs mode overwrite"),
        ({"replace_where": "id = 1"}, False, "option replace_where: needs mode overwrite"),
        ({"allow_empty": "yes"}, True, "option allow_empty: 'yes' is not true or false"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(given, overwrites, message):
    with pytest.raises(InvalidUsage, match=message):
        WriteOptions.parse({**GIVEN, **given}, overwrites=overwrites)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("id BIGINT, area STRING, n INT", r"missing: p \(value field\)"),
        (f"{COLUMNS}, more INT", r"not in the shard's schema: more \(drop them with select\)"),
        (COLUMNS.replace("id BIGINT", "ID BIGINT"), r"missing: id \(key field\)"),
        (COLUMNS.replace("n INT", "n BIGINT"), "n is bigint, which does not fit int without loss"),
        (COLUMNS.replace("x: DOUBLE, s: STRING", "x: DOUBLE"), "p has the fields x, must have x, s"),
        (COLUMNS.replace("area STRING", "area BINARY"), "area is binary"),
    ],
)
def test_columns_that_do_not_fit_are_named(spark, columns, message):
    with pytest.raises(InvalidUsage, match=message):
        matched(T.StructType.fromDDL(columns), SCHEMA)


def test_a_write_that_does_not_fit_changes_nothing(spark, shard):
    with pytest.raises(Exception, match="missing: p"):
        shard.write(frame(spark, [row(1)]).drop("p"))
    with pytest.raises(AnalysisException, match='either the "Append" or "Overwrite" mode instead'):
        shard.write(frame(spark, [row(1)]), mode="error")
    assert shard.client.recent_upper(shard.id) == A(0)


# -- append --------------------------------------------------------------------------------------------------------------


def test_an_append_adds_each_row_and_its_copies(either, shard):
    given = [row(i) for i in range(200)] + [row(7)]
    shard.write(frame(either, given).repartition(3))
    assert shard.rows() == Counter(given)
    shard.write(frame(either, [row(i) for i in range(195, 203)]).select("p", "n", "id", "area"))
    assert shard.rows() == Counter(given) + Counter(row(i) for i in range(195, 203))
    assert sorted(either.read.format("persist").options(**shard.given).load().toPandas()["id"])[-1] == 202


def test_an_append_without_rows_changes_nothing(spark, shard):
    shard.write(frame(spark, [row(1)]).where("id < 0"))
    assert shard.client.recent_upper(shard.id) == A(0)


def test_a_null_where_the_shard_has_none_is_named(spark, shard):
    with pytest.raises(Exception, match=r"id.*null|null.*id"):
        shard.write(frame(spark, [((None, "a"), (1, None)), row(2)]))
    assert shard.rows() == Counter()
    assert shard.blobs() == []


def test_types_that_fit_without_loss_are_converted(spark, tmp_path):
    wide = Schema.from_ddl(
        "a BIGINT", "d DECIMAL(12,2), x DOUBLE, w TIMESTAMP_NTZ, t TIMESTAMP, q STRUCT<b: BIGINT, a: STRING>, z STRING"
    )
    shard = Shard(tmp_path, wide)
    query = (
        "SELECT 1S AS a, CAST(2.5 AS DECIMAL(5,1)) AS d, CAST(0.5 AS FLOAT) AS x, DATE'2013-01-02' AS w, "
        "TIMESTAMP'2013-01-02T03:04:05Z' AS t, named_struct('a', 'text', 'b', 3) AS q, NULL AS z"
    )
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        shard.write(spark.sql(query))
        shown = spark.read.format("persist").options(**shard.given).load()
        shown.createOrReplaceTempView("shown")
        [same] = spark.sql(
            "SELECT a = 1 AND d = 2.5 AND x = 0.5 AND w = TIMESTAMP_NTZ'2013-01-02 00:00:00' "
            "AND t = TIMESTAMP'2013-01-02T03:04:05Z' AND q.a = 'text' AND q.b = 3 AND z IS NULL FROM shown"
        ).first()
        assert same
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
        shard.client.close()


def test_appends_of_many_threads_beside_another_writer_lose_nothing(spark, shard):
    def write(start):  # Spark finds formats registered in Python only in threads that have used the session
        shard.write(frame(spark, [row(i) for i in range(start, start + 50)]))

    threads = [threading.Thread(target=write, args=(start,)) for start in range(0, 200, 50)]
    for thread in threads:
        thread.start()
    added = 0
    while any(thread.is_alive() for thread in threads):
        with shard.client.open_writer(shard.id, SCHEMA, purpose="rival") as writer:
            upper = writer.fetch_recent_upper().time
            rows = [(row(1000), upper, 1)]
            answer = writer.compare_and_append(rows, expected_upper=A(upper), new_upper=A(upper + 1))
            added += isinstance(answer, Appended)
    for thread in threads:
        thread.join()
    expected = Counter(row(i) for i in range(200))
    found = shard.rows()
    assert found.pop(row(1000)) == added
    assert found == expected


def test_a_thread_that_made_no_frame_of_rows_in_python_knows_the_format(spark, shard):
    """Spark has an active session in threads that called createDataFrame, and in no others."""
    columns = ("id", "'a' AS area", "1 AS n", "named_struct('x', 0.5D, 's', 't') AS p")
    made = spark.range(3).selectExpr(*columns)

    def write(first):
        shard.write(made if first == 0 else spark.range(first, first + 3).selectExpr(*columns))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, (0, 3, 6)))
        stream = threads.submit(
            lambda: spark.readStream.format("persist").options(**shard.given, rows="updates").load()
        )
        assert stream.result().isStreaming
    assert sorted(key[0] for key, _ in shard.rows()) == list(range(9))


# -- overwrite -----------------------------------------------------------------------------------------------------------


def test_an_overwrite_writes_only_what_differs(either, shard):
    shard.write(frame(either, [row(i) for i in range(300)]), "overwrite")
    assert shard.rows() == Counter(row(i) for i in range(300))
    start = shard.client.recent_upper(shard.id).time
    desired = [row(i, int(i % 100 == 0)) for i in range(10, 310)]
    shard.write(frame(either, desired).repartition(3), "overwrite")
    assert shard.rows() == Counter(desired)
    changed = sum((Counter(desired) - Counter(map(row, range(300)))).values())
    gone = sum((Counter(map(row, range(300))) - Counter(desired)).values())
    assert shard.updates(start) == changed + gone < 40
    start = shard.client.recent_upper(shard.id).time
    shard.write(frame(either, desired), "overwrite")
    assert shard.updates(start) == 0


def test_an_overwrite_with_its_own_rows_as_input(spark, shard):
    shard.write(frame(spark, [row(i) for i in range(50)]))
    own = spark.read.format("persist").options(**shard.given).load()
    shard.write(own.where("id >= 10").withColumn("n", F.lit(5)), "overwrite")
    assert shard.rows() == Counter(((key, (5, val[1]))) for key, val in map(row, range(10, 50)))


def test_an_overwrite_without_rows_needs_a_word(spark, shard):
    shard.write(frame(spark, [row(1)]))
    nothing = frame(spark, [row(1)]).where("id < 0")
    with pytest.raises(Exception, match="the frame has no rows, so shard .* was not changed"):
        shard.write(nothing, "overwrite")
    assert shard.rows() == Counter([row(1)])
    shard.write(nothing, "overwrite", allow_empty="true")
    assert shard.rows() == Counter()


def test_an_overwrite_of_some_rows_leaves_the_others(either, shard):
    shard.write(frame(either, [row(i) for i in range(100)]))
    shard.write(frame(either, [row(i, 1) for i in range(90, 95)]), "overwrite", replace_where="id >= 90")
    expected = Counter(row(i) for i in range(90)) + Counter(row(i, 1) for i in range(90, 95))
    assert shard.rows() == expected
    with pytest.raises(Exception, match=r"option replace_where: id >= 90 does not hold for the row with key .*89"):
        shard.write(frame(either, [row(89), row(91)]), "overwrite", replace_where="id >= 90")
    assert shard.rows() == expected


def test_a_condition_on_instants_without_a_zone_replaces_nothing(spark, tmp_path):
    """Spark means midnight of the session's zone by it, so in UTC other rows would go than those that the query named."""
    shard = Shard(tmp_path, Schema.from_ddl("at TIMESTAMP", "n INT"))
    given = spark.sql(
        "select timestamp'2024-03-10 02:00:00Z' as at, 1 as n union all select timestamp'2024-03-10 06:00:00Z', 2"
    )
    shard.write(given)
    before = shard.client.recent_upper(shard.id)
    with pytest.raises(
        AnalysisException, match="option replace_where: key.at holds instants, and 2024-03-10 00:00:00 has no time zone"
    ):
        shard.write(given.where("n = 2"), "overwrite", replace_where="at >= TIMESTAMP '2024-03-10 00:00:00'")
    with pytest.raises(AnalysisException, match="option where: key.at holds instants, and 2024-03-10 has no time zone"):
        spark.read.format("persist").options(**shard.given, where="at >= DATE '2024-03-10'").load()
    with pytest.raises(AnalysisException, match="option where: key.at holds instants"):
        spark.readStream.format("persist").options(**shard.given, rows="updates", where="at >= '2024-03-10'").load()
    assert shard.client.recent_upper(shard.id) == before
    shard.write(given.where("n = 2"), "overwrite", replace_where="at >= TIMESTAMP '2024-03-10 00:00:00-05:00'")
    assert sorted(values for (_, values) in shard.rows()) == [(1,), (2,)]


def test_an_overwrite_removes_what_others_add_meanwhile(spark, shard):
    """The task of the write adds a rival's rows after the write was planned."""
    shard.write(frame(spark, [row(i) for i in range(20)]))
    given, location = row(500), shard.location

    def rivals(batches):
        with PersistClient.open(location) as client, client.open_writer(shard_id, SCHEMA, purpose="rival") as writer:
            upper = writer.fetch_recent_upper().time
            writer.compare_and_append([(given, upper, 1)], expected_upper=A(upper), new_upper=A(upper + 1))
        yield from batches

    shard_id = shard.id
    desired = frame(spark, [row(i) for i in range(5, 25)]).coalesce(1)
    shard.write(desired.mapInArrow(rivals, desired.schema), "overwrite")
    assert shard.rows() == Counter(row(i) for i in range(5, 25))


def test_a_task_that_fails_leaves_nothing_behind(either, shard):
    shard.write(frame(either, [row(1)]))
    before, blobs = shard.rows(), shard.blobs()

    def failing(batches):
        from pyspark import TaskContext

        yield from batches
        if TaskContext.get().partitionId() == 1:
            raise ValueError("bad row")

    for mode in ("append", "overwrite"):
        given = frame(either, [row(i) for i in range(100)]).repartition(2)
        with pytest.raises(Exception, match="bad row"):
            shard.write(given.mapInArrow(failing, given.schema), mode)
    assert shard.rows() == before
    assert shard.blobs() == blobs


def test_attempts_that_are_repeated_count_once(spark, shard):
    """The first attempt of each task fails after it has read, and for some writers written, everything."""

    def failing_first(batches):
        from pyspark import TaskContext

        yield from batches
        if TaskContext.get().attemptNumber() == 0:
            raise ValueError("first attempt")

    given = frame(spark, [row(i) for i in range(100)]).repartition(2)
    shard.write(given.mapInArrow(failing_first, given.schema))
    assert shard.rows() == Counter(row(i) for i in range(100))
    assert len(shard.blobs()) == shard.client.inspect(shard.id).parts


@pytest.mark.parametrize("seed", range(draws(2)))
def test_random_writes_end_as_a_list_of_rows_would(spark, shard, seed):
    rng, held = random.Random(seed), Counter()
    for _ in range(4):
        mode, part = rng.choice(["append", "overwrite", "where"]), rng.randrange(60)
        rows = [row(rng.randrange(60), rng.randrange(2)) for _ in range(rng.randrange(1, 80))]
        given = frame(spark, rows).repartition(rng.randrange(1, 4))
        if mode == "where":
            rows = [each for each in rows if each[0][0] < part]
            shard.write(given.where(F.col("id") < part), "overwrite", replace_where=f"id < {part}", allow_empty="true")
            held = Counter({each: count for each, count in held.items() if each[0][0] >= part}) + Counter(rows)
        else:
            shard.write(given, mode)
            held = Counter(rows) + (held if mode == "append" else Counter())
        if rng.random() < 0.5:
            shard.add(more := [row(rng.randrange(60)) for _ in range(3)])
            held += Counter(more)
        assert shard.rows() == held
