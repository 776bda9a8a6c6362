"""DataFrame -> DataFrame on a local session: columns are checked by name and type, equal rows of corrections meet in one partition,
and key ranges do not overlap.
"""

import threading
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from persist_engine.base.settings import MIB
from persist_engine.rows.schema import Schema
from persist_spark import frames
from persist_spark.envelopes.commands import upsert_commands
from persist_spark.envelopes.mirror import both_sides, corrections, hashed, scanned
from persist_spark.inputs.format import read_input
from persist_spark.partitions import StageTask, updates_of
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input
from persist_spark.streaming.few_rows import FEW_ROW_BYTES, FEW_ROWS, FewRows, constants_of
from persist_spark.streaming.query import in_one_projection
from py4j.clientserver import ClientServerConnection
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

pytestmark = pytest.mark.spark
SCHEMA = Schema.from_ddl("id BIGINT", "name STRING, score DOUBLE")


@pytest.fixture(scope="module")
def spark(local_spark) -> SparkSession:
    return local_spark


def test_columns_become_flat_in_the_order_and_types_of_the_shard(spark):
    frame = spark.sql("select float(0.5) as score, int(7) as id, 'x' as name, timestamp_millis(1234) as t")
    flat = frames.to_flat(frame, SCHEMA, timestamp_column="t")
    assert flat.dtypes == [("k0", "bigint"), ("v0", "string"), ("v1", "double"), ("time", "bigint")]
    assert [tuple(row) for row in flat.collect()] == [(7, "x", 0.5, 1234)]


def test_the_timestamp_column_may_be_a_field_and_a_number(spark):
    flat = frames.to_flat(spark.sql("select 5L as id, 'x' as name, 0d as score"), SCHEMA, timestamp_column="id")
    assert [tuple(row) for row in flat.collect()] == [(5, "x", 0.0, 5)]


def test_times_before_the_epoch_and_within_a_millisecond_round_down(spark):
    frame = spark.sql(
        "select timestamp_micros(id) as t, id, 'x' as name, 0d as score from values (-1L), (1999L) as v(id)"
    )
    flat = frames.to_flat(frame, SCHEMA, timestamp_column="t")
    assert {row["k0"]: row["time"] for row in flat.collect()} == {-1: -1, 1999: 1}


def test_timestamps_without_a_zone_are_utc(spark):
    frame = spark.sql("select timestamp_ntz'1970-01-01 00:00:01' as t, 1L as id, 'x' as name, 0d as score")
    assert frames.to_flat(frame, SCHEMA, timestamp_column="t").first()["time"] == 1000


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select 1L as id", r"missing: name \(value field\), score \(value field\)"),
        ("select 1L as ID, 'x' as name, 0d as score", r"missing: id \(key field\); not in the shard's schema: ID"),
        ("select 1L as id, 'x' as name, 0d as score, 2 as b, 3 as a", r"not in the shard's schema: a, b \(drop them"),
        ("select 1L as id, 'x' as name, 'y' as name, 0d as score", "more than once: name"),
        (
            "select '1' as id, 'x' as name, 2L as score",
            "id is string, which does not fit bigint.*score is bigint, which does not fit double",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(spark, query, message):
    with pytest.raises(ConfigurationError, match=message):
        frames.to_flat(spark.sql(query), SCHEMA)


def test_a_timestamp_column_must_hold_times(spark):
    with pytest.raises(ConfigurationError, match="timestampColumn: name is string"):
        frames.to_flat(spark.sql("select 1L as id, 'x' as name, 0d as score"), SCHEMA, timestamp_column="name")


BYTE, SHORT, INT, LONG, FLOAT, DOUBLE, STRING = (
    T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType(), T.StringType()
)  # fmt: skip
NTZ, LTZ, DATE = T.TimestampNTZType(), T.TimestampType(), T.DateType()
POINT = T.StructType([T.StructField("x", INT)])


@pytest.mark.parametrize(
    ("source", "target", "fits"),
    [
        (BYTE, LONG, True), (INT, LONG, True), (LONG, INT, False), (LONG, LONG, True), (T.BooleanType(), INT, False),
        (SHORT, FLOAT, True), (INT, FLOAT, False), (INT, DOUBLE, True), (LONG, DOUBLE, False),
        (FLOAT, DOUBLE, True), (DOUBLE, FLOAT, False),
        (T.DecimalType(10, 2), T.DecimalType(12, 4), True), (T.DecimalType(10, 2), T.DecimalType(11, 4), False),
        (T.DecimalType(10, 2), DOUBLE, False),
        (INT, T.DecimalType(10, 0), True), (INT, T.DecimalType(11, 2), False), (LONG, T.DecimalType(19, 0), True),
        (DATE, NTZ, True), (DATE, LTZ, False), (NTZ, LTZ, False), (LTZ, NTZ, False), (LTZ, DATE, False),
        (T.NullType(), INT, True), (INT, STRING, False), (STRING, T.BinaryType(), False), (T.VarcharType(3), STRING, True),
        (T.ArrayType(INT), STRING, False), (T.NullType(), POINT, True), (T.ArrayType(T.NullType()), T.ArrayType(POINT), True),
    ],
)  # fmt: skip
def test_only_casts_without_loss_are_made(source, target, fits):
    assert (frames.unfit("c", source, target) is None) == fits


def test_a_column_of_nulls_fits_every_type(spark):
    """It fitted all types but structs."""
    schema = Schema.from_ddl("id BIGINT", "p STRUCT<x: INT>, q ARRAY<STRUCT<x: INT>>, m MAP<STRING, STRUCT<x: INT>>")
    flat = frames.to_flat(spark.sql("select 1L as id, null as p, array(null) as q, null as m"), schema)
    assert flat.schema["v0"].dataType == frames.fields_of(schema)[1].type
    assert flat.collect() == [(1, None, [None], None)]


def test_fields_of_structs_are_matched_by_name_and_null_structs_stay_null(spark):
    schema = Schema.from_ddl("id BIGINT", "p STRUCT<x: DOUBLE, y: STRING>")
    frame = spark.sql(
        "select id, if(id = 1, null, struct('s' as y, float(0.5) as x)) as p from values (1L), (2L) as v(id)"
    )
    rows = {row["k0"]: row["v0"] for row in frames.to_flat(frame, schema).collect()}
    assert rows[1] is None
    assert rows[2].asDict() == {"x": 0.5, "y": "s"}
    with pytest.raises(ConfigurationError, match=r"p\.x is string"):
        frames.to_flat(spark.sql("select 1L as id, struct('s' as y, 'x' as x) as p"), schema)
    with pytest.raises(ConfigurationError, match="p has the fields y, must have x, y"):
        frames.to_flat(spark.sql("select 1L as id, struct('s' as y) as p"), schema)


def test_sql_reads_the_input_as_a_view_that_is_dropped_afterwards(spark, tmp_path):
    path = str(tmp_path / "in.csv")
    spark.sql("select id, id * 2 as twice from range(3)").write.option("header", "true").csv(path)
    source = Input(
        format="csv",
        options={"path": path, "header": "true"},
        schema="id BIGINT, twice BIGINT",
        sql="select twice from input where id > 0",
    )
    assert sorted(row["twice"] for row in read_input(spark, source).collect()) == [2, 4]
    assert not spark.catalog.tableExists("input")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("name,id\nada,1\n", {"header": "true"}),
        ("id,title,name\n1,dr,ada\n", {"header": "true"}),
        ("1,ada\n2\n", {}),
    ],
    ids=["columns in another order", "a new column", "a column is missing"],
)
def test_a_text_file_with_other_columns_is_an_error_unless_the_user_says_otherwise(spark, tmp_path, text, options):
    (tmp_path / "in.csv").write_text(text)
    given = {"path": str(tmp_path / "in.csv"), **options}
    with pytest.raises(Py4JJavaError):
        read_input(spark, Input(format="CSV", schema="id STRING, name STRING", options=given)).collect()
    for name in ("mode", "MODE"):
        lenient = {**given, name: "PERMISSIVE", "enforceSchema": "true"}
        assert read_input(spark, Input(format="csv", schema="id STRING, name STRING", options=lenient)).count()


def test_a_malformed_record_is_an_error_unless_the_schema_has_a_column_for_it(spark, tmp_path):
    """Spark reads it as nulls, and an event of nulls looks like a tombstone of Debezium."""
    (tmp_path / "in.json").write_text('{"id": 1}\n{"id": 2\n{"id": 3}\n')
    options = {"path": str(tmp_path / "in.json")}
    with pytest.raises(Py4JJavaError):
        read_input(spark, Input(format="json", schema="id BIGINT", options=options)).collect()
    kept = Input(format="json", schema="id BIGINT, _corrupt_record STRING", options=options)
    assert [row["id"] for row in read_input(spark, kept).collect()] == [1, None, 3]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Input(format="csv", options={"path": "/no/such/file"}), "input.format: .*PATH_NOT_FOUND"),
        (Input(format="nonsuch"), "input.format: .*nonsuch"),
        (Input(format="csv", schema="id BIGONT"), "input.format: .*BIGONT"),
        (Input(format="persist_range_none", sql="select"), "input.format: "),
    ],
    ids=["missing path", "unknown format", "wrong schema", "format first"],
)
def test_an_input_that_cannot_be_opened_is_a_configuration_error(spark, source, message):
    with pytest.raises(ConfigurationError, match=message):
        read_input(spark, source)


def test_an_error_in_the_sql_names_the_field(spark, tmp_path):
    path = str(tmp_path / "in.csv")
    spark.range(1).write.csv(path)
    for sql in ("selec 1", "select nonsuch from input"):
        with pytest.raises(ConfigurationError, match=r"input\.format\.sql: "):
            read_input(spark, Input(format="csv", options={"path": path}, sql=sql))


def test_equal_rows_meet_in_one_partition_side_by_side(spark):
    """This includes nulls, NaN and both zeros, which either side may hold."""
    rows = "values (1L, 'a', double('NaN')), (2L, null, 0d), (3L, 'c', -0d), (4L, null, null) as v(k0, v0, v1)"
    desired = spark.sql(f"select * from {rows}")
    persisted = spark.sql(f"select k0, v0, if(k0 = 3, 0d, v1) as v1, -1L as diff from {rows}")
    both = corrections(both_sides(desired, persisted, SCHEMA), 3)
    assert both.rdd.getNumPartitions() == 3
    parts = both.rdd.glom().collect()
    for part in parts:
        assert [row["h"] for row in part] == sorted(row["h"] for row in part)
    met = [(row["h"], index) for index, part in enumerate(parts) for row in part]
    assert sorted(met) == sorted(pair for pair in set(met) for _ in range(2))
    assert {(row["desired"], row["diff"]) for part in parts for row in part} == {(True, 1), (False, -1)}


def test_the_digest_of_a_mirror_tells_rows_apart_and_knows_no_order(spark):
    """Where a hash that skips nulls, or sums that forget copies, would not."""
    schema = Schema.from_ddl("k BIGINT", "a BIGINT, b BIGINT, s STRUCT<x: BIGINT, y: STRING>, d DOUBLE")
    kind = "k0 BIGINT, v0 BIGINT, v1 BIGINT, v2 STRUCT<x: BIGINT, y: STRING>, v3 DOUBLE"
    one = (1, 2, 3, (4, "x"), 0.0)

    def digest(*rows, over=schema):
        return scanned(spark.createDataFrame(list(rows), kind).repartition(3), over).digest(over)

    known = digest(one, (2, None, 5, None, None))
    assert known.decode() == "6e2bea74cfcb1fbfa4edce238d4c1825"
    assert known == digest((2, None, 5, None, None), (1, 2, 3, (4, "x"), -0.0))
    others = [
        digest(one),
        digest(one, one),
        digest(one, one, one, one),
        digest(),
        digest((1, 3, 2, (4, "x"), 0.0)),
        digest((1, None, 2, (4, "x"), 0.0)),
        digest((1, 2, None, (4, "x"), 0.0)),
        digest((1, 2, 3, None, 0.0)),
        digest((1, 2, 3, (None, None), 0.0)),
        digest((1, 2, 3, (None, "x"), 0.0)),
        digest((1, 2, 3, (4, ""), 0.0)),
        digest((1, 2, 3, (4, None), 0.0)),
        digest((1, 2, 3, (4, "x"), None)),
        digest((1, 2, 3, (4, "x"), float("nan"))),
        digest(one, over=Schema.from_ddl("k BIGINT", "b BIGINT, a BIGINT, s STRUCT<x: BIGINT, y: STRING>, d DOUBLE")),
    ]
    assert len(set(others)) == len(others)


def test_sums_without_room_are_no_digest(spark):
    """Those of more than 2^31 rows. The sum of a query of the user's is as good: its next job says what overflows."""
    flat = spark.sql("select id as k0, 9223372036854775806 + id as v0 from range(3)")
    assert scanned(flat, Schema.from_ddl("k BIGINT", "v BIGINT")) is None
    assert scanned(flat.where("k0 < 2"), Schema.from_ddl("k BIGINT", "v BIGINT")).rows == 2


def looks(constants=None):
    return FewRows(rows_max=FEW_ROWS, row_bytes_max=FEW_ROW_BYTES, constants=constants or {})


def few_rows(flat, few=None):
    """One look at `flat`, made into a frame as Spark gives it to `foreachBatch`. `few`: the looks at a query, else new ones."""
    execution, session = flat._jdf.queryExecution(), flat.sparkSession
    frame = session._jsparkSession.internalCreateDataFrame(execution.toRdd(), flat._jdf.schema(), False)  # noqa: FBT003
    return (few or looks()).rows(DataFrame(frame, session))


def test_the_hash_of_a_row_costs_as_many_calls_of_the_jvm_for_any_number_of_fields(spark, monkeypatch):
    """An unchanged Mirror is little more than its calls."""
    calls, send, here = [], ClientServerConnection.send_command, threading.get_ident()

    def sent(self, command):
        if threading.get_ident() == here:  # the threads of a session ask the JVM too
            calls.append(command)
        return send(self, command)

    monkeypatch.setattr(ClientServerConnection, "send_command", sent)

    def calls_of(fields):
        flat = spark.range(1).selectExpr("id as k0", *(f"'x' as v{n}" for n in range(fields)))
        value = ", ".join(f"f{n} STRING" for n in range(fields))
        calls.clear()
        hashed(flat, Schema.from_ddl("k BIGINT", value))
        return len([command for command in calls if not command.startswith("m\nd")])  # not what Python forgets

    assert calls_of(1) == calls_of(30)


def assert_few_as_on_executors(flat, task, *, rows):
    """The updates that the driver makes of `flat`, whose number is `rows`, and those of executors are the same, in the same types."""

    def encoded(batches):
        for batch in batches:
            table = pa.Table.from_batches([batch])
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield pa.RecordBatch.from_pydict({"bytes": [sink.getvalue().to_pybytes()]})

    few = updates_of(few_rows(flat), task)
    sent = [row["bytes"] for row in flat.mapInArrow(encoded, "bytes binary").collect()]
    there = pa.concat_tables([updates_of(pa.ipc.open_stream(each).read_all(), task) for each in sent])
    assert few.schema == there.schema
    assert few.num_rows == rows
    assert sorted(map(repr, few.to_pylist())) == sorted(map(repr, there.to_pylist()))


def test_all_looks_of_a_query_have_one_plan_and_each_shows_its_own_batch(spark):
    few = looks()
    for ids, partitions in [((0, 3), 2), ((3, 3), 1), ((3, 3), 2), ((5, 9), 1), ((9, 9), 1), ((9, 10), 4)]:
        batch = spark.range(*ids, numPartitions=partitions).selectExpr("id as k0", "cast(id as string) as v0")
        shown = few_rows(batch, few)
        assert shown.to_pydict() == {"k0": list(range(*ids)), "v0": list(map(str, range(*ids)))}
        assert shown.schema == to_arrow_schema(batch.schema, timezone="UTC")
        few.had(shown.num_rows)
    long = spark.range(3).selectExpr("id as k0", f"repeat('x', int(if(id = 1, {FEW_ROW_BYTES + 1}, 1))) as v0")
    assert few_rows(long, few) is None


def test_a_look_leaves_columns_in_the_jvm_that_are_the_same_in_all_rows(spark):
    """And takes none for such a column that another batch may have another value in."""
    pairs = spark.range(7, numPartitions=2).selectExpr("id", "nullif(id, 3) as n")
    commands = in_one_projection(
        upsert_commands(pairs, Schema.from_ddl("id BIGINT", "n BIGINT"), Envelope(type=EnvelopeType.UPSERT))
    )
    few = looks(constants_of(commands))
    assert few.constants == {"o": None, "weight": 1, "fault": None}
    assert few_rows(commands, few).equals(few_rows(commands))
    assert few._look.shown.names == ["k0", "v0", "deleted"]
    others = (
        "unix_millis(current_timestamp()) as o, 1L + k as weight, isnull(rand()) as deleted, if(k = 1, 'x', null) as fault, "
        "cast('x' as bigint) as time, cast(300 as tinyint) as diff"
    )
    assert constants_of(spark.sql(f"select 1d as k0, {others} from (select id as k from range(2))")) == {}


def test_a_look_at_a_batch_runs_code_that_an_earlier_one_has_compiled(spark):
    """The compiler of Java takes longer than the rows of a small batch."""
    compiled = spark._jvm.org.apache.spark.metrics.source.CodegenMetrics.METRIC_COMPILATION_TIME()
    for columns in (["id as k0"], ["id as k0", "cast(id as string) as v0"]):
        counts = []
        for first in range(3):
            batch = spark.range(first, first + 5).selectExpr(*columns).localCheckpoint()
            before = compiled.getCount()
            assert few_rows(batch).num_rows == 5
            counts.append(compiled.getCount() - before)
        assert counts[1:] == [0, 0]


def test_the_projections_of_a_stream_become_one_and_choose_nothing_for_later_batches(spark):
    spark.range(7).createOrReplaceTempView("numbers")
    text = "select id + 1 as id, name, current_timestamp() as at, rand() as x from (select id, string(id) as name from numbers)"
    frame = spark.sql(text).where("id > 3").selectExpr("id as k0", "name as v0", "at as v1", "x as v2")
    joined = in_one_projection(frame.selectExpr("k0 + 1 as k0", "v0", "v1", "v2"))
    plan = joined._jdf.queryExecution().analyzed().toString()
    assert [plan.count(name) for name in ("Project", "SubqueryAlias", "View", "current_timestamp(", "rand(")] == [
        2,
        0,
        0,
        1,
        1,
    ]
    assert sorted(tuple(row) for row in joined.select("k0", "v0").collect()) == [(n + 2, str(n)) for n in range(3, 7)]


def test_few_rows_are_those_that_executors_would_see(spark):
    """In all types, with nulls at all levels; and none where there are many rows, or a long one."""
    kinds = (
        "BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL(38,9)", "STRING", "BINARY", "DATE", "TIMESTAMP",
        "TIMESTAMP_NTZ", "STRUCT<`a``b`: STRING, c: STRUCT<d: BINARY NOT NULL>>",
    )  # fmt: skip
    schema = Schema.from_ddl("k BIGINT", ", ".join(f"f{n} {kind}" for n, kind in enumerate(kinds)))
    values = (
        "true, 1Y, 2S, 3, 4L, float('nan'), -0d, 5.5, 'text', X'00ff', date'2020-02-29', timestamp'1969-12-31 23:59:59.999999Z', "
        "timestamp_ntz'2020-01-01 00:00:00', named_struct('a`b', 'x', 'c', named_struct('d', X'01'))"
    )
    made = spark.sql(f"select 1L as k, {values}").toDF("k", *(f"f{n}" for n in range(len(kinds))))
    nested = "if(id % 3 = 1, named_struct('a`b', null, 'c', null), f13) as f13"
    columns = [f"if(id % 3 = 2, null, f{n}) as f{n}" for n in range(len(kinds) - 1)]
    many = made.join(spark.range(12, numPartitions=3)).selectExpr("id as k", *columns, nested)
    flat = frames.to_flat(many, schema)
    task = StageTask(
        blob="mem://", shard_id="", schema=schema, schema_id=0, lower=0, upper=8, time=7, target_part_bytes=1
    )
    assert_few_as_on_executors(flat, task, rows=12)
    assert few_rows(flat.limit(0)).num_rows == 0
    strict = spark.sql("select id as k0, if(id = 1, null, named_struct('a', id)) as v0 from range(2)")
    schema = Schema.from_ddl("k BIGINT", "s STRUCT<a: BIGINT NOT NULL>")
    assert_few_as_on_executors(strict, replace(task, schema=schema), rows=2)
    numbers = spark.range(1001).selectExpr("id as k0")
    assert few_rows(numbers) is None
    assert few_rows(numbers.limit(1000)).num_rows == 1000
    halves = "select id as k0, repeat('x', {0}) as v0, named_struct('a', repeat('y', {0}), 'b', cast(null as string)) as v1 from range(2)"
    assert few_rows(spark.sql(halves.format(1 << 13))).num_rows == 2
    assert few_rows(spark.sql(halves.format((1 << 13) + 1))) is None


def test_key_ranges_do_not_overlap(spark):
    frame = spark.sql("select (id * 7919) % 1000 as k0, 'x' as v0, 0d as v1 from range(1000)")
    parts = [[row["k0"] for row in part] for part in frames.by_key_range(frame, SCHEMA, 4).rdd.glom().collect()]
    ranges = [(min(part), max(part)) for part in parts if part]
    assert len(ranges) == 4
    assert all(before[1] < after[0] for before, after in pairwise(ranges))


def test_a_small_frame_is_staged_without_a_shuffle_and_a_large_one_by_ranges(spark):
    small = spark.range(100_000, numPartitions=4).selectExpr("id AS k0", "'x' AS v0", "0d AS v1")
    large = spark.range(1 << 40).selectExpr("id AS k0", "'x' AS v0", "0d AS v1")
    assert frames.planned_bytes(small) < frames.SMALL_BYTES < frames.planned_bytes(large)
    assert frames.to_stage(small, SCHEMA, None).rdd.getNumPartitions() == 1
    more = spark.range(6_000_000, numPartitions=40).selectExpr("id AS k0", "'x' AS v0", "0d AS v1")
    assert 64 * MIB < frames.planned_bytes(more) < frames.SMALL_BYTES
    assert frames.to_stage(more, SCHEMA, None).rdd.getNumPartitions() == frames.SMALL_TASKS_MAX
    grown = small.withColumn("v0", F.explode(F.split(F.lit("a b c"), " ")))
    assert frames.planned_bytes(grown) is None, "one row of the input makes many"
    cases = ((small, None, False), (large, None, True), (small, 3, True), (grown, None, True))
    for frame, tasks, is_shuffled in cases:
        plan = frames.to_stage(frame, SCHEMA, tasks)._jdf.queryExecution().executedPlan().toString()
        assert ("Exchange rangepartitioning" in plan) is is_shuffled
