"""`spark.read.format("persist")`: the shard's contents at a time, planned and read in other processes than this one."""

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.predicate import Compare
from persist_engine.codec.tagged import with_errors
from persist_spark.datasource import PUSHDOWN_SETTING, Options, PersistDataSource, PushingReader, register, row_type
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo

SHARD = "s00000000-0000-0000-0000-000000000001"
GIVEN = {"shard": SHARD, "blob": "mem:", "consensus": "mem:"}


def test_options_are_checked_by_name():
    options = Options.parse({**GIVEN, "AS_OF": "7", "splits": "3", "updates": "True"})
    assert (options.as_of, options.splits, options.updates) == (7, 3, True)
    assert Options.parse(GIVEN).as_of is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard": ""}, "option shard: required"),
        ({"shard": "x"}, "not a shard id"),
        ({"as_of": "-1"}, "option as_of: '-1' is not a whole number"),
        ({"as_of": "now"}, "option as_of: 'now' is not a whole number"),
        ({"splits": "0"}, "option splits: '0' is not a whole number"),
        ({"updates": "yes"}, "option updates: 'yes' is not true or false"),
        ({"asof": "1"}, "option asof: not known to format persist"),
        ({"columns": "a,,b"}, "option columns: 'a,,b' is no list of names"),
    ],
)
def test_wrong_options_are_refused(change, message):
    with pytest.raises(InvalidUsage, match=message):
        Options.parse({**GIVEN, **change})


def test_fields_of_one_name_need_the_updates_shape():
    schema = Schema.from_ddl("id BIGINT", "id BIGINT")
    with pytest.raises(InvalidUsage, match="both have id: read with option updates=true"):
        row_type(schema, updates=False)
    assert row_type(schema, updates=True).fieldNames() == ["key", "val", "time", "diff"]
    assert row_type(schema, updates=False, columns=["val.id"]).fieldNames() == ["id"]


@pytest.fixture(scope="module")
def spark(local_spark) -> SparkSession:
    register(local_spark)
    return local_spark


@pytest.fixture
def given(tmp_path) -> dict[str, str]:
    """A shard with 1000 rows at time 0, row 7 gone and row 8 there thrice at time 5; upper 6."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard = ShardId.new()
    with PersistClient.open(location) as client:
        schema = Schema.from_ddl("id BIGINT, at TIMESTAMP", "name STRING, p STRUCT<x: DOUBLE>")
        with client.open_writer(shard, schema, purpose="test") as writer:

            def write(lower, upper, rows):
                updates = [(((i, i * 1_000_000), (f"n{i}", {"x": i / 2})), time, diff) for i, time, diff in rows]
                writer.compare_and_append(updates, expected_upper=Antichain.of(lower), new_upper=Antichain.of(upper))

            write(0, 1, [(i, 0, 1) for i in range(1000)])
            write(1, 6, [(7, 5, -1), (8, 5, 2)])
    return {"shard": shard, "blob": location.blob, "consensus": location.consensus}


@pytest.mark.spark
def test_reads_the_latest_contents_rows_as_often_as_they_are_there(spark, given):
    frame = spark.read.format("persist").options(**given, splits="4").load()
    assert frame.dtypes == [("id", "bigint"), ("at", "timestamp"), ("name", "string"), ("p", "struct<x:double>")]
    assert frame.rdd.getNumPartitions() > 1
    rows = frame.selectExpr("id", "unix_seconds(at) as s", "name", "p.x as x").collect()
    ids = sorted(row["id"] for row in rows)
    assert ids == sorted([*(i for i in range(1000) if i != 7), 8, 8])
    assert all((row["s"], row["name"], row["x"]) == (row["id"], f"n{row['id']}", row["id"] / 2) for row in rows)


@pytest.mark.spark
def test_reads_as_of_a_time_and_as_updates(spark, given):
    assert spark.read.format("persist").options(**given, as_of="4").load().where("id in (7, 8)").count() == 2
    frame = spark.read.format("persist").options(**given, updates="true").load()
    assert frame.columns == ["key", "val", "time", "diff"]
    row = frame.where("key.id = 8").first()
    assert (row["time"], row["diff"], row["val"]["name"]) == (5, 3, "n8")


@pytest.mark.spark
def test_reads_only_the_rows_of_which_a_condition_holds(spark, given):
    frame = spark.read.format("persist").options(**given, where="id BETWEEN 5 AND 8 AND p.x < 4").load()
    assert sorted(row["id"] for row in frame.collect()) == [5, 6]
    with pytest.raises(Exception, match="no column nope; there are key.id"):
        spark.read.format("persist").options(**given, where="nope = 1").load().count()


@pytest.mark.spark
def test_shows_only_the_columns_asked_for_of_rows_that_are_told_apart_by_all(spark, given):
    frame = spark.read.format("persist").options(**given, columns="p, id", where="name = 'n8'").load()
    assert frame.columns == ["id", "p"]
    assert [(row["id"], row["p"]["x"]) for row in frame.collect()] == [(8, 4.0)] * 3
    with pytest.raises(Exception, match="no column nope; there are key.id"):
        spark.read.format("persist").options(**given, columns="nope").load()


QUERY = (
    "id < 9 AND id NOT IN (1, 2) AND at >= TIMESTAMP '1970-01-01T00:00:00Z' AND name <=> concat('n', 3 + 5) "
    "AND p.x IS NOT NULL AND p.x <= 4.0 AND (p.x > 3.0 OR id = 0) AND name LIKE '%8'"
)


@pytest.mark.spark
def test_what_a_query_asks_is_pushed_into_the_read_and_what_cannot_be_stays_sparks(spark, given):
    frame = spark.read.format("persist").options(**given).load().where(QUERY)
    plan = frame._jdf.queryExecution().executedPlan().toString()
    kept = next(line for line in plan.splitlines() if "Filter" in line)
    assert "OR" in kept
    assert "EndsWith" in kept
    assert not any(text in kept for text in ("at#", "IN (1", "isnotnull", "<=>"))
    assert [row["id"] for row in frame.collect()] == [8, 8, 8]
    updates = spark.read.format("persist").options(**given, updates="true").load()
    assert [row["diff"] for row in updates.where("key.id = 8 AND diff = 3 AND time = 5").collect()] == [3]
    named = spark.read.format("persist").options(**given, where="id > 5", columns="id").load().where("id < 7")
    assert [row["id"] for row in named.collect()] == [6]


@pytest.mark.parametrize("errors", [False, True])
def test_conditions_of_a_query_stay_sparks_too_where_the_engine_lets_errors_pass(tmp_path, errors):
    """Spark derives more from its conditions than the rows: those of which they do not hold must not come out."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard, schema = ShardId.new(), Schema.from_ddl("id BIGINT", "name STRING")
    with PersistClient.open(location) as client:
        client.initialise(shard, with_errors(schema) if errors else schema)
    options = Options.parse({"shard": shard, "blob": location.blob, "consensus": location.consensus})
    reader = PushingReader(options, row_type(schema, updates=False))
    found = EqualTo(("id",), 12)
    assert list(reader.pushFilters([found])) == ([found] if errors else [])
    assert reader.pushed == (Compare("key.id", "=", 12),), "parts are skipped either way"


@pytest.mark.spark
def test_a_session_that_pushes_no_filters_reads_as_before(spark, given):
    spark.conf.set(PUSHDOWN_SETTING, "false")
    spark.dataSource.register(PersistDataSource)
    try:
        frame = spark.read.format("persist").options(**given).load().where(QUERY)
        assert [row["id"] for row in frame.collect()] == [8, 8, 8]
    finally:
        register(spark)


@pytest.mark.spark
def test_times_that_cannot_be_read_are_told(spark, given):
    with pytest.raises(Exception, match=r"its upper is \{6\}, the latest readable time is 5"):
        spark.read.format("persist").options(**given, as_of="6").load().count()
    with pytest.raises(Exception, match="option as_off: not known"):
        spark.read.format("persist").options(**given, as_off="6").load().count()


@pytest.mark.spark
def test_a_shard_never_written_is_empty(spark, tmp_path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    with PersistClient.open(location) as client:
        shard = ShardId.new()
        client.initialise(shard, Schema.from_ddl("id BIGINT"))
    given = {"shard": shard, "blob": location.blob, "consensus": location.consensus}
    assert spark.read.format("persist").options(**given).load().count() == 0
