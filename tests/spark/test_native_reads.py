"""Frames that Spark's own Parquet reader reads show the same rows as the reader in Python, and only where that is certain."""

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow.parquet as pq
import pytest
from collectors import are_gone
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, ShardId, filter_of
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_kit.depth import draws
from persist_spark.datasource import register
from persist_spark.source import native
from persist_spark.source.plain_conditions import _VALUES_MAX, as_column

pytestmark = pytest.mark.spark
SCHEMA = Schema.from_ddl(
    "id BIGINT NOT NULL, area STRING",
    "x DOUBLE, m DECIMAL(12,2), d DATE, t TIMESTAMP, w TIMESTAMP_NTZ, b BOOLEAN, r BINARY, f FLOAT, i SMALLINT, "
    "p STRUCT<x: INT, q: STRUCT<z: DOUBLE>>",
)
FIELDS = ("x", "m", "d", "t", "w", "b", "r", "f", "i", "p")


class Shard:
    def __init__(self, folder, spark, schema: Schema = SCHEMA, **batch):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        settings = Settings(batch=BatchSettings(**{"inline_part_bytes_max": 0, "target_part_bytes": 8 * KIB, **batch}))
        self.folder, self.spark, self.schema = folder, spark, schema
        self.client = PersistClient.open(self.location, settings=settings)
        self.id = ShardId.new()
        self.client.initialise(self.id, schema)

    def append(self, numbers, *, time: int, diff: int = 1, upper: int | None = None) -> None:
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            updates = [((key(n), value(n)), time, diff) for n in numbers]
            answer = writer.compare_and_append(
                updates, expected_upper=writer.fetch_recent_upper(), new_upper=Antichain.of(upper or time + 1)
            )
            assert isinstance(answer, Appended)

    def reader(self, **options):
        stores = {"blob": self.location.blob, "consensus": self.location.consensus}
        return self.spark.read.format("persist").options(**stores, **options)

    def load(self, **options):
        return self.reader(shard=self.id, **options).load()

    def readers(self) -> int:
        return len(self.client.inspect(self.id).readers)

    def check(self, *, is_native: bool, count: int, **options):
        """Compares the frame with the one that Python reads, and says which reader it has."""
        frame, other = self.load(**options), self.load(**options, splits="1")
        assert is_by_spark(frame) is is_native
        assert not is_by_spark(other)
        assert frame.schema == other.schema
        assert frame.count() == other.count() == count
        assert sorted(map(repr, frame.collect())) == sorted(map(repr, other.collect()))
        return frame


def key(n: int):
    return (n, None if n % 7 == 3 else f"ä{n % 5}")


def value(n: int):
    if n % 11 == 4:
        return (None,) * len(FIELDS)
    at = datetime(1500 if n % 2 else 2013, 1, 1, tzinfo=UTC) + timedelta(hours=n, microseconds=n)
    inner = None if n % 3 == 0 else {"z": (float("nan"), -0.0, 1.5)[n % 3]}
    x = (float("nan"), -0.0, float("inf"), n / 3)[n % 4]
    return (
        x, Decimal(n * 7 - 900).scaleb(-2), date(1400 + n % 700, 2, 3), at, at.replace(tzinfo=None), bool(n % 2),
        bytes([n % 256, 255]), float(n), n % 100, None if n % 5 == 1 else {"x": n, "q": inner},
    )  # fmt: skip


def is_by_spark(frame) -> bool:
    return "FileScan parquet" in frame._jdf.queryExecution().executedPlan().toString()


@pytest.fixture(scope="module")
def spark(local_spark):
    register(local_spark)
    return local_spark


@pytest.fixture
def shard(tmp_path, spark):
    made = Shard(tmp_path, spark)
    yield made
    made.client.close()


def test_inserts_of_every_type_are_read_by_spark_with_only_the_columns_that_a_query_needs(shard):
    shard.append(range(400), time=5)
    shard.append(range(300, 500), time=7)
    frame = shard.check(is_native=True, count=600)
    assert not frame.schema["id"].nullable
    query = frame.where("id >= 250 AND id < 260").select("x")
    plan = query._jdf.queryExecution().executedPlan().toString()
    assert "ReadSchema: struct<key:struct<id:bigint>,val:struct<x:double>>" in plan
    assert "GreaterThanOrEqual(key.id,250)" in plan
    assert query.count() == 10
    assert frame.union(frame.where("id < 10")).count() == 610
    shard.check(is_native=True, count=600, columns="x, id")


def test_no_filter_loses_rows_with_nan(tmp_path, spark):
    """The statistics of a file leave NaN out, and for Spark NaN is greater than any number."""
    schema = Schema.from_ddl("f FLOAT", "x DOUBLE NOT NULL, p STRUCT<i: INT, q: STRUCT<z: DOUBLE>>")
    made = Shard(tmp_path, spark, schema)
    values = (1.0, float("nan"), 0.0, -2.0)
    rows = [((x,), (x, (n, (x,)))) for n, x in enumerate(values)] + [((None,), (5.0, None))]
    with made.client.open_writer(made.id, schema, purpose="test") as writer:
        updates = [(row, 0, 1) for row in rows]
        assert isinstance(writer.compare_and_append(updates, expected_upper=0, new_upper=1), Appended)
    frame = made.check(is_native=True, count=5)
    for name in ("f", "x", "p.q.z"):
        for condition in (
            "{} = double('NaN')",
            "{} > 6",
            "{} >= double('NaN')",
            "{} <=> double('NaN')",
            "{} > 6 and p.i = 1",
        ):
            assert [one["p"]["i"] for one in frame.where(condition.format(name)).collect()] == [1]
    made.client.close()


def test_rows_that_count_other_than_once_or_later_are_read_by_python(shard):
    shard.append(range(50), time=5)
    shard.check(is_native=True, count=50)
    shard.append(range(10), time=8, diff=2)
    shard.check(is_native=False, count=70)
    shard.append(range(5), time=9, diff=-1)
    shard.check(is_native=False, count=65)
    shard.check(is_native=True, count=50, as_of="7")
    shard.check(is_native=True, count=50, as_of="5")


def test_a_part_with_rows_after_as_of_is_read_by_python(shard):
    with shard.client.open_writer(shard.id, SCHEMA, purpose="test") as writer:
        updates = [((key(n), value(n)), n, 1) for n in range(40)]
        assert isinstance(writer.compare_and_append(updates, expected_upper=0, new_upper=40), Appended)
    shard.check(is_native=True, count=40)
    shard.check(is_native=False, count=31, as_of="30")


def test_diffs_whose_sum_is_the_number_of_rows_are_not_taken_for_ones(shard):
    with shard.client.open_writer(shard.id, SCHEMA, purpose="test") as writer:
        updates = [((key(1), value(1)), 0, 3), ((key(1), value(1)), 1, -1)]
        assert isinstance(writer.compare_and_append(updates, expected_upper=0, new_upper=2), Appended)
    shard.check(is_native=False, count=2)


def test_inline_rows_and_older_schemas_are_read_by_python(tmp_path, spark):
    schema = Schema.from_ddl("id BIGINT", "Name STRING")
    shard = Shard(tmp_path, spark, schema, inline_part_bytes_max=4096)
    rows = [(((n,), (f"n{n}",)), 0, 1) for n in range(3)]
    with shard.client.open_writer(shard.id, schema, purpose="test") as writer:
        assert isinstance(writer.compare_and_append(rows, expected_upper=0, new_upper=1), Appended)
    shard.check(is_native=False, count=3)
    shard.client.close()


def test_columns_that_differ_in_case_alone_and_added_columns_are_read_by_python(tmp_path, spark):
    schema, grown = Schema.from_ddl("id BIGINT", "name STRING"), Schema.from_ddl("id BIGINT", "name STRING, Id INT")
    shard = Shard(tmp_path, spark, schema)
    for upper, (more, asked) in enumerate([((), schema), ((7,), grown)], start=1):
        if upper == 2:
            shard.client.evolve_schema(shard.id, grown)
        rows = [(((n,), (f"n{n}", *more)), upper - 1, 1) for n in range(100)]
        with shard.client.open_writer(shard.id, asked, purpose="test") as writer:
            assert isinstance(writer.compare_and_append(rows, expected_upper=upper - 1, new_upper=upper), Appended)
        if upper == 1:
            shard.check(is_native=True, count=100)
    frame = shard.load(columns="key.id, name")
    assert not is_by_spark(frame)
    assert frame.count() == 200
    shard.client.close()


def test_damage_and_loss_are_errors_whatever_the_session_ignores(shard, spark):
    shard.append(range(400), time=5)
    frame = shard.load()
    file = max((shard.folder / "blobs" / shard.id).glob("n*/p*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        for at in (60, 200):
            damaged = bytearray(data)
            damaged[at] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(Exception, match=r"CRC|corrupt|FAILED_READ_FILE|checksum"):
                frame.collect()
        file.unlink()
        with pytest.raises(Exception, match="FILE_NOT_EXIST|does not exist"):
            frame.collect()
        assert not is_by_spark(shard.load()), "Python names the blob that is lost"
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")


def test_a_part_in_the_place_of_another_one_is_read_by_python_which_names_the_key(shard):
    """Each of its pages has a right checksum, so Spark would show its rows."""
    shard.append(range(400), time=5)
    shard.append(range(400, 800), time=6)
    assert is_by_spark(shard.load())
    first, second = sorted((shard.folder / "blobs" / shard.id).glob("n*/p*"))[:2]
    first.write_bytes(second.read_bytes())
    frame = shard.load()
    assert not is_by_spark(frame)
    with pytest.raises(Exception, match=f"{first.name}.* checksum"):
        frame.count()


def test_spark_trusts_no_bloom_filter_that_is_damaged(shard):
    """Spark skips each row group whose filter lacks a value, and no checksum of Parquet covers a filter."""
    shard.client.set_filtered(shard.id, ["key.area"])
    shard.append(range(400), time=5)
    assert is_by_spark(shard.load())
    for file in (shard.folder / "blobs" / shard.id).glob("n*/p*"):
        metadata = pq.read_metadata(file)
        names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        column = metadata.row_group(0).column(names.index("key.area"))
        with file.open("r+b") as opened:
            opened.seek(column.bloom_filter_offset + 32)
            opened.write(bytes(column.bloom_filter_length - 32))
    frame = shard.load()
    assert not is_by_spark(frame)
    with pytest.raises(Exception, match="/p.* checksum"):
        frame.where("area = 'ä2'").count()


@pytest.mark.parametrize("how", ["derived", "rdd", "cached"])
def test_the_lease_lives_as_long_as_anything_reads_the_files(shard, spark, tmp_path, how):
    """That nothing reads another shard any more shows that the collectors have run."""
    control = Shard(tmp_path / "control", spark)
    for each in (control, shard):
        each.append(range(100), time=5)
    frame, other = shard.load(), control.load()
    match how:
        case "derived":
            rest = frame.where("id >= 0").select("id")
        case "rdd":
            rest = frame.rdd
        case "cached":
            rest = frame.where("id >= 0").cache()
    assert is_by_spark(frame)
    assert is_by_spark(other)
    del frame, other
    assert are_gone(spark, control.readers)
    assert shard.readers() == 1
    assert rest.count() == 100
    if how == "cached":
        rest.unpersist(blocking=True)
    del rest
    assert are_gone(spark, shard.readers)
    control.client.close()


def test_a_load_by_name_of_options_of_the_session_and_of_a_path_are_native_too(shard, spark):
    shard.append(range(20), time=5)
    register(spark, blob=shard.location.blob, consensus=shard.location.consensus)
    try:
        assert is_by_spark(spark.read.format("persist").load(str(shard.id)))
        assert is_by_spark(spark.read.load(format="persist", shard=shard.id))
        assert spark.read.format("persist").option("SHARD", shard.id).load().count() == 20
        with_schema = shard.reader(shard=shard.id).schema(shard.load().schema).load()
        assert not is_by_spark(with_schema)
        assert with_schema.count() == 20
    finally:
        register(spark)
    assert native._NEVER


def test_loads_of_several_threads_leave_the_settings_of_the_session(shard, spark):
    shard.append(range(9), time=5)
    before = spark.conf.get(native._LISTED_BY_JOBS)
    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(lambda _: shard.load(), range(32)))
    assert all(map(is_by_spark, frames))
    assert spark.conf.get(native._LISTED_BY_JOBS) == before


#: Conditions of option `where` on the first field of the key, some of them on the bounds of what the shard holds: whole numbers, and texts.
_TERMS = {
    "id BIGINT, area STRING": (
        "id = 7", "id != 7.0", "id < 60", "id <= 60", "key.id > 399", "460 <= id", "id IN (0, 61, 499, 500)", "id NOT IN (3, 4)",
        "id BETWEEN -5 AND 9", "id > -9223372036854775807", "id IS NULL", "id IS NOT NULL",
    ),
    "area STRING, id SMALLINT": (
        "area = 'ä1'", "area != 'ä1'", "area > 'ä2'", "area <= ''", "area > 'ä\\u0000'", "area IN ('ä0', 'o''b', 'ä4')",
        "area NOT IN ('ä0', '')", "area IS NULL",
    ),
}  # fmt: skip


def _condition(dice: random.Random, terms: tuple[str, ...], depth: int = 2) -> str:
    if depth == 0 or dice.random() < 0.3:
        return dice.choice(terms)
    one, other = (_condition(dice, terms, depth - 1) for _ in range(2))
    return dice.choice([f"({one}) AND ({other})", f"({one}) OR ({other})", f"NOT ({one})"])


@pytest.fixture(scope="module", params=_TERMS)
def filled(request, tmp_path_factory, spark):
    """Five appends, and one key with nulls."""
    made = Shard(tmp_path_factory.mktemp("filled"), spark, Schema.from_ddl(request.param, "x DOUBLE"))
    is_by_id = made.schema.key.names[0] == "id"
    for time, first in enumerate(range(0, 500, 100)):
        keys = [key(n) if is_by_id else key(n)[::-1] for n in range(first, first + 120)] + [(None, None)]
        with made.client.open_writer(made.id, made.schema, purpose="test") as writer:
            updates = [((each, (float(number),)), time, 1) for number, each in enumerate(keys)]
            assert isinstance(writer.compare_and_append(updates, expected_upper=time, new_upper=time + 1), Appended)
    yield made, _TERMS[request.param]
    made.client.close()


def test_spark_lets_the_rows_of_a_condition_pass_that_the_engine_lets_pass(filled):
    shard, terms = filled
    drawn = (_condition(random.Random(seed), terms) for seed in range(draws(8)))
    for where in dict.fromkeys([*terms, *drawn]):
        frame, other = shard.load(where=where), shard.load(where=where, splits="1")
        by_engine = sorted(map(repr, other.collect()))
        assert not is_by_spark(other)
        assert is_by_spark(frame) or not by_engine, "no part may hold such rows"
        assert frame.schema == other.schema
        assert sorted(map(repr, frame.collect())) == by_engine, where


@pytest.mark.parametrize(
    "where",
    [
        "id < 2.5", "id < 1e30", "id = 9223372036854775808", "id > -9223372036854775808", "area = 'ä1'", "x > 1", "i = 3", "b = TRUE",
        "id = 3 AND i = 1", "id = 3 OR NOT (m < 2)", f"id IN ({', '.join(map(str, range(_VALUES_MAX + 1)))})",
    ],
)  # fmt: skip
def test_other_conditions_are_left_to_python(shard, where):
    shard.append(range(400), time=5)
    assert is_by_spark(shard.load(where="id < 400"))
    assert not is_by_spark(shard.load(where=where))


@pytest.mark.parametrize(
    ("key_ddl", "where"),
    [
        ("f FLOAT", "f = 3"), ("m DECIMAL(12,2)", "m >= 2"), ("d DATE", "d > DATE '2013-01-01'"), ("b BOOLEAN", "b = TRUE"),
        ("t TIMESTAMP", "t < TIMESTAMP '2013-01-01 05:00:00Z'"), ("r BINARY", "r = X'05ff'"), ("p STRUCT<x: INT>", "p.x = 3"),
        ("s STRING", "s LIKE 'a%'"),
    ],
)  # fmt: skip
def test_a_condition_that_spark_might_answer_otherwise_has_no_column(key_ddl, where):
    assert as_column(filter_of(where, Schema.from_ddl(key_ddl, "n INT"))) is None


def test_a_condition_reaches_the_files_and_their_row_groups(shard):
    for time, first in enumerate(range(0, 500, 100)):
        shard.append(range(first, first + 100), time=time)
    whole, some = shard.load(), shard.load(where="id >= 450")
    assert 0 < len(some.inputFiles()) < len(whole.inputFiles())
    plan = some._jdf.queryExecution().executedPlan().toString()
    assert "GreaterThanOrEqual(key.id,450)" in plan
    assert some.where("id < 460").count() == 10


def test_a_condition_keeps_the_errors_of_a_collection_that_can_hold_them(tmp_path, spark):
    schema = Schema.from_ddl("id BIGINT, err STRING", "name STRING")
    shard = Shard(tmp_path, spark, schema)
    with shard.client.open_writer(shard.id, schema, purpose="test") as writer:
        rows = [(((n, None), (f"n{n}",)), 0, 1) for n in range(100)] + [(((None, "bad"), (None,)), 0, 1)]
        assert isinstance(writer.compare_and_append(rows, expected_upper=0, new_upper=1), Appended)
    shard.check(is_native=False, count=11, where="id < 10")
    shard.client.close()
