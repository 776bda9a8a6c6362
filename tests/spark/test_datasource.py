"""`spark.read.format("persist")`: the shard's contents at a time. Spark plans and reads in other processes."""

from collections.abc import Iterator

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage, MissingBlob
from persist_engine.base.settings import BatchSettings, Settings
from persist_spark.datasource import PersistDataSource, PersistReader, register
from persist_spark.options import Options
from persist_spark.row_shape import row_type
from pyspark.sql import SparkSession
from pyspark.sql import types as T

SHARD = "s00000000-0000-0000-0000-000000000001"
GIVEN = {"shard": SHARD, "blob": "mem:", "consensus": "mem:"}


def test_options_are_checked_by_name():
    options = Options.parse({**GIVEN, "AS_OF": "7", "splits": "3", "updates": "True"})
    assert (options.as_of, options.splits, options.updates) == (7, 3, True)
    assert Options.parse(GIVEN).as_of is None


@pytest.mark.parametrize("text", ["1357095845006", "2013-01-02T03:04:05.006Z", "2013-01-02 04:04:05.0069+01:00"])
def test_a_time_is_milliseconds_or_iso_8601(text):
    assert Options.parse({**GIVEN, "as_of": text}).as_of == 1357095845006


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard": ""}, "option shard: required"),
        ({"shard": "x"}, "not a shard id"),
        ({"as_of": "-1"}, "option as_of: '-1' is not a time ago such as -1h"),
        ({"as_of": "now"}, "option as_of: 'now' is not a time: a whole number, ISO 8601"),
        ({"as_of": "9" * 5000}, "option as_of: '9+' is not a whole number"),
        ({"as_of": "1e3"}, "option as_of must be a whole number, .*ISO 8601 text .* not str '1e3'"),
        ({"as_of": "2013-01-02T03:04:05"}, "option as_of is '2013-01-02T03:04:05', which has no time zone"),
        ({"as_of": "1969-12-31T23:59:59Z"}, "option as_of: '1969-12-31T23:59:59Z' is before 1970"),
        ({"as_of": "1" + "x" * 5000}, "option as_of must be a whole number"),
        ({"splits": "0"}, "option splits: '0' is not a whole number"),
        ({"updates": "yes"}, "option updates: 'yes' is not true or false"),
        ({"asof": "1"}, "option asof: not known to format persist"),
        ({"columns": "a,,b"}, "option columns: 'a,,b' is not a list of names"),
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
    """A shard with 1000 rows at time 0. At time 5 row 7 is deleted and row 8 has three copies. The upper is 6."""
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
def test_a_frame_has_the_latest_contents_with_all_copies_of_a_row(spark, given):
    frame = spark.read.format("persist").options(**given, splits="4").load()
    assert frame.dtypes == [("id", "bigint"), ("at", "timestamp"), ("name", "string"), ("p", "struct<x:double>")]
    assert frame.rdd.getNumPartitions() > 1
    rows = frame.selectExpr("id", "unix_seconds(at) as s", "name", "p.x as x").collect()
    ids = sorted(row["id"] for row in rows)
    assert ids == sorted([*(i for i in range(1000) if i != 7), 8, 8])
    assert all((row["s"], row["name"], row["x"]) == (row["id"], f"n{row['id']}", row["id"] / 2) for row in rows)


@pytest.mark.spark
def test_a_frame_can_show_an_earlier_time_or_updates(spark, given):
    assert spark.read.format("persist").options(**given, as_of="4").load().where("id in (7, 8)").count() == 2
    frame = spark.read.format("persist").options(**given, updates="true").load()
    assert frame.columns == ["key", "val", "time", "diff"]
    row = frame.where("key.id = 8").first()
    assert (row["time"], row["diff"], row["val"]["name"]) == (5, 3, "n8")


@pytest.mark.spark
def test_a_frame_with_a_condition_has_only_the_rows_that_satisfy_it(spark, given):
    frame = spark.read.format("persist").options(**given, where="id BETWEEN 5 AND 8 AND p.x < 4").load()
    assert sorted(row["id"] for row in frame.collect()) == [5, 6]
    with pytest.raises(Exception, match="no column nope; there are id"):
        spark.read.format("persist").options(**given, where="nope = 1").load().count()


@pytest.mark.spark
def test_a_frame_of_some_columns_keeps_rows_that_differ_in_others_apart(spark, given):
    frame = spark.read.format("persist").options(**given, columns="p, id", where="name = 'n8'").load()
    assert frame.columns == ["id", "p"]
    assert [(row["id"], row["p"]["x"]) for row in frame.collect()] == [(8, 4.0)] * 3
    with pytest.raises(Exception, match="no column nope; there are id"):
        spark.read.format("persist").options(**given, columns="nope").load()


@pytest.fixture(params=["false", "true"])
def pushdown(spark, request) -> Iterator[None]:
    """Without and with Spark's filter pushdown to Python sources, which a user may switch on for other formats."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", request.param)
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.spark
def test_each_scan_of_one_frame_sees_its_own_rows(spark, given, pushdown):
    """Spark stores the pushed filters in an object that all scans of a frame share, so the last scan's filters applied to all."""
    frame = spark.read.format("persist").options(**given).load().select("id")
    one, two = frame.where("id = 1"), frame.where("id = 2")
    assert sorted(row["id"] for row in one.union(two).collect()) == [1, 2]
    assert one.union(frame).count() == 1002
    assert frame.join(frame.where("id < 10"), "id", "left_anti").count() == 990
    frame.createOrReplaceTempView("rows")
    assert (
        spark.sql("select id from rows where id < 500 and id in (select id from rows where id >= 100)").count() == 400
    )


@pytest.mark.spark
def test_errors_of_a_load_reach_the_user(spark, given):
    with pytest.raises(Exception, match=r"its upper is \{6\}, the latest readable time is 5"):
        spark.read.format("persist").options(**given, as_of="6").load().count()
    with pytest.raises(Exception, match="option as_off: not known"):
        spark.read.format("persist").options(**given, as_off="6").load().count()


@pytest.mark.spark
def test_a_frame_of_a_shard_without_writes_is_empty(spark, tmp_path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    with PersistClient.open(location) as client:
        shard = ShardId.new()
        client.initialise(shard, Schema.from_ddl("id BIGINT"))
    given = {"shard": shard, "blob": location.blob, "consensus": location.consensus}
    assert spark.read.format("persist").options(**given).load().count() == 0


SMALL = Schema.from_ddl("id BIGINT NOT NULL", "city STRING, name STRING, p STRUCT<x: INT>")


@pytest.fixture
def small(tmp_path) -> dict[str, str]:
    """A shard of schema SMALL with one row in a blob, at time 0. The upper is 1."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard, settings = ShardId.new(), Settings(batch=BatchSettings(inline_part_bytes_max=0))
    with (
        PersistClient.open(location, settings=settings) as client,
        client.open_writer(shard, SMALL, purpose="test") as writer,
    ):
        rows = [(((1,), ("c", "n", {"x": 2})), 0, 1)]
        writer.compare_and_append(rows, expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    return {"shard": shard, "blob": location.blob, "consensus": location.consensus}


def reader_of(given: dict[str, str], row: T.StructType | None = None, **more: str) -> PersistReader:
    """The reader that Spark creates in a session without a keeper."""
    source = PersistDataSource({**given, **more})
    shown = source.schema()
    return source.reader(shown if row is None else row)


def holds(given: dict[str, str]) -> int:
    """The number of readers that hold the shard's since."""
    with PersistClient.open(Location(blob=given["blob"], consensus=given["consensus"])) as client:
        return len(client.inspect(ShardId(given["shard"])).readers)


def test_a_plan_without_a_keeper_leaves_a_lease_only_when_it_succeeds(small):
    for wrong in ("nope = 1", "name =", "id = 'x'"):
        with pytest.raises(InvalidUsage, match="nope|name|id"):
            reader_of(small, where=wrong).partitions()
    assert holds(small) == 0
    (partition,) = reader_of(small).partitions()
    assert holds(small) == 1
    (rows,) = reader_of(small).read(partition)
    assert rows.to_pylist() == [{"id": 1, "city": "c", "name": "n", "p": {"x": 2}}]


def test_without_a_keeper_a_schema_of_the_user_requires_as_of(small):
    """With a user's schema Spark creates a source for each plan. Without as_of, scans of one frame could show different times."""
    own = row_type(SMALL, updates=False)
    with pytest.raises(InvalidUsage, match="needs the option as_of"):
        PersistDataSource(dict(small)).reader(own)
    assert len(PersistDataSource({**small, "as_of": "0"}).reader(own).partitions()) == 1


def test_a_plan_of_a_shard_without_writes_leaves_no_lease(tmp_path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard = ShardId.new()
    with PersistClient.open(location) as client:
        client.initialise(shard, SMALL)
    given = {"shard": shard, "blob": location.blob, "consensus": location.consensus}
    assert reader_of(given).partitions() == []
    assert holds(given) == 0


def changed(**fields: str | None) -> T.StructType:
    """The columns of SMALL, some of them with other DDL. None leaves a column out."""
    values = {"city": "city STRING", "name": "name STRING", "p": "p STRUCT<x: INT>"} | fields
    key = values.pop("id", SMALL.key_ddl)
    return row_type(Schema.from_ddl(str(key), ", ".join(ddl for ddl in values.values() if ddl)), updates=False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed(city="name STRING", name="city STRING"), "has column city string where .* column name string:"),
        (changed(name="nome STRING"), "has column name string where .* column nome string:"),
        (changed(id="id STRING NOT NULL"), "has column id bigint NOT NULL where .* column id string NOT NULL:"),
        (changed(name="name STRING NOT NULL"), "has column name string where .* column name string NOT NULL:"),
        (changed(p="p STRUCT<y: INT>"), r"has column p struct<x:int> where .* column p struct<y:int>:"),
        (changed(p=None), r"has column p struct<x:int> where .* no column:"),
        (changed(p="p STRUCT<x: INT>, q INT"), "has no column where .* column q int:"),
    ],
)
def test_a_plan_is_refused_when_the_frame_was_made_for_other_columns(small, row, message):
    """Spark matches columns by position, so two columns of one type could be confused."""
    with pytest.raises(InvalidUsage, match=f"shard {small['shard']} {message}.*load the frame again"):
        reader_of(small, row).partitions()
    assert holds(small) == 0


def test_a_frame_may_declare_a_not_null_column_nullable(small):
    reader = reader_of(small, changed(id="id BIGINT"))
    (partition,) = reader.partitions()
    assert next(reader.read(partition)).column("id").to_pylist() == [1]


def test_without_a_keeper_a_plan_has_the_columns_of_its_load_although_the_schema_evolved_since(small):
    frame, narrow = reader_of(small), reader_of(small, columns="id, name")
    with PersistClient.open(Location(blob=small["blob"], consensus=small["consensus"])) as client:
        grown = Schema.from_ddl(SMALL.key_ddl, "city STRING, country STRING, name STRING, p STRUCT<x: INT>")
        client.evolve_schema(ShardId(small["shard"]), grown)
    (partition,) = frame.partitions()
    (found,) = next(frame.read(partition)).to_pylist()
    assert (list(found), found["city"], found["name"]) == (["id", "city", "name", "p"], "c", "n")
    (partition,) = narrow.partitions()
    assert next(narrow.read(partition)).to_pylist() == [{"id": 1, "name": "n"}]


def test_the_error_for_a_blob_collected_after_the_plan_names_the_remedy(small, tmp_path):
    reader = reader_of(small)
    (partition,) = reader.partitions()
    for path in (tmp_path / "blobs" / small["shard"]).glob("n*/*"):
        path.unlink()
    with pytest.raises(
        MissingBlob, match=rf"{small['shard']}.* kept while its session lives.*load the frame again"
    ) as raised:
        list(reader.read(partition))
    assert small["shard"] in raised.value.detail["key"]


@pytest.mark.spark
def test_a_schema_of_the_user_must_be_that_of_the_shard(spark, small):
    swapped = "id BIGINT, name STRING, city STRING, p STRUCT<x: INT>"
    with pytest.raises(Exception, match="has column city string where the frame was made for column name string"):
        spark.read.format("persist").options(**small).schema(swapped).load().collect()
    assert [row["name"] for row in spark.read.format("persist").options(**small).load().collect()] == ["n"]
    updates = spark.read.format("persist").options(**small, updates="true").load().where("key IS NOT NULL")
    assert [row["key"]["id"] for row in updates.collect()] == [1]
