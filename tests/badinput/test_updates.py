"""Updates that cannot be taken: refused with the reason and the values, before anything is committed, and nothing is left behind."""

import itertools
import math
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Schema
from persist_engine.base.errors import (
    InvalidBounds,
    InvalidEmptyTimeInterval,
    InvalidUsage,
    InvariantViolated,
    SchemaMismatch,
    UpdateBeyondUpper,
    UpdateNotBeyondLower,
)
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.model.frontier import DATA_TIME_MAX
from persist_engine.rows.ingest import ROWS_PER_TABLE
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
INT64_MAX = 2**63 - 1
WIDE = Schema.from_ddl("x DOUBLE, s STRING", "b BINARY")


class Shard:
    """A shard with one row at time 0, upper 5, and a writer on it. Every part is a blob."""

    def __init__(self, schema=SCHEMA):
        self.world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
        self.id, self.client = self.world.shard_id(), self.world.process()
        self.writer = self.client.open_writer(self.id, schema, purpose="test")
        if schema is SCHEMA:
            self.append([row(0, "kept", 0)], 0, 5)

    def append(self, updates, lower, upper):
        answer = self.writer.compare_and_append(updates, expected_upper=A(lower), new_upper=A(upper))
        assert isinstance(answer, Appended)

    def rows(self, as_of):
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            return reader.snapshot(A(as_of)).to_table().drop_columns(["time"]).to_pylist()

    def state(self):
        """What a refused call must leave as it was: the versions, the contents, the blobs."""
        return (
            self.world.process().inspect(self.id).seqno,
            self.world.process().recent_upper(self.id),
            self.world.blob_keys(self.id, kind="part"),
        )


@pytest.fixture
def shard():
    return Shard()


def table(time=(6,), diff=(1,), key=None, val=None, **more):
    """An Arrow table of SCHEMA with some columns replaced."""
    columns = {
        "key": key if key is not None else pa.array([{"id": 1}] * len(time), pa.struct([("id", pa.int64())])),
        "val": val if val is not None else pa.array([{"name": "a"}] * len(time), pa.struct([("name", pa.string())])),
        "time": time if isinstance(time, pa.Array) else pa.array(time, pa.int64()),
        "diff": diff if isinstance(diff, pa.Array) else pa.array(diff, pa.int64()),
    }
    return pa.table(columns | more)


def twice(name):
    """A table that has the column `name` two times."""
    given = table()
    return pa.Table.from_arrays([*given.columns, given.column(name)], names=[*given.column_names, name])


def ids(*fields):
    """A key column whose rows hold these (name, array) fields."""
    return pa.StructArray.from_arrays([array for _, array in fields], names=[name for name, _ in fields])


REFUSED = {
    "before lower": ([row(1, "a", 4)], UpdateNotBeyondLower, r"time 4 .* lower \{5\}"),
    "at upper": ([row(1, "a", 10)], UpdateBeyondUpper, r"time 10 .* upper \{10\}"),
    "one row of many beyond": ([row(i, "a", 5 + i) for i in range(9)], UpdateBeyondUpper, "time 13"),
    "negative time": ([row(1, "a", -1)], InvalidUsage, "time -1 is negative"),
    "time beyond int64": ([row(1, "a", 2**63)], InvalidUsage, "time is not a whole number in int64"),
    "unsigned time beyond int64": (table(pa.array([2**63], pa.uint64())), InvalidUsage, "time does not fit int64"),
    "greatest time, upper before it": ([row(1, "a", INT64_MAX)], UpdateBeyondUpper, str(INT64_MAX)),
    "null time": (table(pa.array([None, 6], pa.int64()), (1, 1)), InvalidUsage, "time is null in 1 rows"),
    "null diff": (table((6, 7), pa.array([None, None], pa.int64())), InvalidUsage, "diff is null in 2 rows"),
    "null time in a row": ([row(1, "a", None)], InvalidUsage, "time is null in 1 rows"),
    "fractional time": (table(pa.array([6.5])), InvalidUsage, "time is double, expected int64"),
    "fractional diff": ([row(1, "a", 6, 0.5)], InvalidUsage, "diff"),
    "textual diff": ([row(1, "a", 6, "1")], InvalidUsage, "diff"),
    "diff beyond int64": ([row(1, "a", 6, 2**63)], InvalidUsage, "diff is not a whole number in int64"),
    "diffs of one row sum beyond int64": ([row(1, "a", 6, INT64_MAX), row(1, "a", 6, 1)], InvalidUsage, "int64"),
    "diffs of one part sum beyond int64": ([row(1, "a", 6, INT64_MAX), row(2, "a", 6, 1)], InvalidUsage, "int64"),
    "null key": (table(key=pa.array([None], pa.struct([("id", pa.int64())]))), SchemaMismatch, "key is null in 1 rows"),
    "null value": (table(val=pa.nulls(1, pa.struct([("name", pa.string())]))), SchemaMismatch, "val is null in 1 rows"),
    "wrong type": (table(key=ids(("id", pa.array(["1"])))), SchemaMismatch, "key.id is STRING, the shard's is BIGINT"),
    "narrower type": (table(key=ids(("id", pa.array([1], pa.int32())))), SchemaMismatch, "key.id is INT"),
    "missing field": (table(key=ids(("other", pa.array([1])))), SchemaMismatch, "key.other is not .*key.id is missing"),
    "one field too many": (table(key=ids(("id", pa.array([1])), ("z", pa.array([1])))), SchemaMismatch, "key.z is not"),
    "field given twice": (
        table(key=ids(("id", pa.array([1])), ("id", pa.array([1])))),
        SchemaMismatch,
        "key.id is given twice",
    ),
    "key is no struct": (table(key=pa.array([1])), SchemaMismatch, "key is BIGINT"),
    "missing column": (
        table().drop_columns(["diff"]),
        SchemaMismatch,
        "columns key, val, time; expected key, val, time, diff",
    ),
    "missing values": (table().drop_columns(["val"]), SchemaMismatch, "columns key, time, diff"),
    "one column too many": (table(extra=pa.array([1])), SchemaMismatch, "columns key, val, time, diff, extra"),
    "flat columns": (pa.table({"id": [1], "name": ["a"]}), SchemaMismatch, "columns id, name"),
    "key twice": (twice("key"), SchemaMismatch, "key, val, time, diff, key"),
    "time twice": (twice("time"), SchemaMismatch, "key, val, time, diff, time"),
    "tuple too short": ([(((1,), ()), 6, 1)], SchemaMismatch, "val has 0 fields; expected 1: name"),
    "not a row": ([1, 2], InvalidUsage, "a row is not"),
    "text as a row of keys": ([(("ab", ("a",)), 6, 1)], SchemaMismatch, "key is a str"),
    "not updates": (17, InvalidUsage, "updates are a int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_updates_are_refused_by_name_and_change_nothing(shard, case):
    """Spec A.2."""
    updates, error, text = REFUSED[case]
    before = shard.state()
    for call in (
        lambda: shard.writer.compare_and_append(updates, expected_upper=A(5), new_upper=A(10)),
        lambda: shard.writer.append(updates, lower=A(5), upper=A(10)),
        lambda: shard.writer.batch(updates, lower=A(5), upper=A(10)),
    ):
        with pytest.raises(error, match=text):
            call()
    assert shard.state() == before
    shard.append([row(1, "a", 6)], 5, 10)  # the same writer goes on
    assert [each["key"]["id"] for each in shard.rows(9)] == [0, 1]


@pytest.mark.parametrize("case", ["at upper", "null time", "diffs of one row sum beyond int64", "missing column"])
def test_a_builder_that_met_bad_updates_deletes_the_good_ones_too(shard, case):
    updates, error, _ = REFUSED[case]
    before = shard.state()
    builder = shard.writer.builder(A(5))
    builder.add([row(7, "good", 7)])

    def go_on():
        builder.add(updates)
        builder.finish(A(10))

    with pytest.raises(error):
        go_on()
    assert shard.state() == before


@pytest.mark.slow
def test_rows_that_fail_half_way_leave_nothing(shard):
    def rows():
        for i in range(ROWS_PER_TABLE + 1):
            yield row(i, "a", 6)
        raise RuntimeError("the source broke")

    before = shard.state()
    with pytest.raises(RuntimeError, match="the source broke"):
        shard.writer.compare_and_append(rows(), expected_upper=A(5), new_upper=A(10))
    assert shard.state() == before


BOUNDS = {
    "upper before lower": (5, 4, [], InvalidBounds, r"upper \{4\} is before lower \{5\}"),
    "data for nothing": (5, 5, [row(1, "a", 5)], InvalidEmptyTimeInterval, r"\[\{5\}, \{5\}\)"),
    "data beyond an empty interval": (5, 5, [row(1, "a", 9)], InvalidEmptyTimeInterval, "empty interval"),
    "lower closed": (None, 5, [], InvalidBounds, r"before lower \{\}"),
    "both closed": (None, None, [], InvalidBounds, r"lower \{\}"),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_impossible_bounds_are_refused(shard, case):
    """Spec 1.3."""
    lower, upper, updates, error, text = BOUNDS[case]
    before = shard.state()
    with pytest.raises(error, match=text):
        shard.writer.compare_and_append(updates, expected_upper=Antichain(lower), new_upper=Antichain(upper))
    with pytest.raises(error, match=text):
        shard.writer.append(updates, lower=Antichain(lower), upper=Antichain(upper))
    assert shard.state() == before


@pytest.mark.parametrize("time", [-1, 2**64])
def test_a_frontier_outside_u64_cannot_be_made(time):
    with pytest.raises(InvalidUsage, match=str(time)):
        Antichain.of(time)


def test_the_greatest_time_is_a_time_like_any_other(shard):
    shard.append([row(1, "end", DATA_TIME_MAX)], 5, DATA_TIME_MAX + 1)
    assert [each["key"]["id"] for each in shard.rows(DATA_TIME_MAX)] == [0, 1]
    assert [each["key"]["id"] for each in shard.rows(DATA_TIME_MAX - 1)] == [0]
    with pytest.raises(InvalidUsage, match="time is not a whole number in int64"):
        shard.append([row(2, "beyond", 2**63)], DATA_TIME_MAX + 1, 2**64 - 1)
    assert shard.client.recent_upper(shard.id) == A(DATA_TIME_MAX + 1)


def test_the_greatest_diff_is_a_diff_like_any_other_and_what_they_sum_to_is_never_wrapped(shard):
    shard.append([row(1, "many", 5, INT64_MAX)], 5, 6)
    shard.append([row(1, "many", 6, 1)], 6, 7)
    assert shard.rows(5)[1]["diff"] == INT64_MAX
    with pytest.raises(InvariantViolated, match="int64"):
        shard.rows(6)
    shard.append([row(1, "many", 7, -1)], 7, 8)
    assert shard.rows(7)[1]["diff"] == INT64_MAX
    assert shard.rows(5)[1]["diff"] == INT64_MAX


@pytest.mark.slow
def test_a_refused_update_among_many_parts_leaves_none_of_them():
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=1024)))
    shard_id, client = world.shard_id(), world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    rows = [row(i, f"name {i}", 3) for i in range(2000)]
    with pytest.raises(UpdateBeyondUpper):
        writer.compare_and_append([*rows, row(1, "late", 9)] * 40, expected_upper=A(0), new_upper=A(5))
    assert world.blob_keys(shard_id, kind="part") == set()
    assert client.recent_upper(shard_id) == A(0)


def test_odd_keys_are_keys(shard):
    """Empty and unusual texts, numbers that are none, nulls: stored as distinct keys, read back whole and split."""
    shard = Shard(WIDE)
    numbers = [math.inf, -math.inf, math.nan, 0.0, 1e308, 5e-324, None]
    texts = ["", "\x00", " ", "ä\U0001f600", "a" * 10_000, None]
    keys = [(x, s) for x in numbers for s in texts]
    shard.append([((key, (b"",)), i, 1) for i, key in enumerate(keys)], 0, len(keys))
    # One zero and one not-a-number, however they are written.
    again = [((-0.0, ""), 3.0), ((-math.nan, ""), 2.0)]
    n = len(keys)
    shard.append([((key, (b"",)), n, -1) for key, _ in again], n, n + 1)
    with shard.client.open_leased_reader(shard.id, purpose="test") as reader:
        snapshot = reader.snapshot(A(n))
        rows = snapshot.to_table().to_pylist()
        pieces = [
            each
            for split in snapshot.splits(4)
            for batch in split.to_batches(reader.blob)
            for each in batch.to_pylist()
        ]
    read = sorted(repr((each["key"]["x"], each["key"]["s"])) for each in rows)
    expected = sorted(
        repr(key) for key in keys if key[1] != "" or not (key[0] == 0.0 or (key[0] is not None and math.isnan(key[0])))
    )
    assert read == expected
    assert sorted(map(repr, pieces)) == sorted(map(repr, rows))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("a BIGINT, a INT", "", "key.a: declared twice|a .*twice"),
        ("", "v INT", "key schema has no fields"),
        ("a ARRAY<INT>", "", "key.a"),
        ("a BIGINT", "v MAP<ARRAY<STRING>, INT>", "val.v"),
        ("a BIGINT", "v STRUCT<b: INT, b: INT>", "b.*twice"),
        ("a NONSENSE", "", "NONSENSE"),
    ],
)
def test_schemas_that_no_shard_can_have_name_the_field(key, value, text):
    with pytest.raises(InvalidUsage, match=text):
        Schema.from_ddl(key, value)


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("INT", 1.5),
        ("BIGINT", Decimal("1.5")),
        ("BIGINT", True),
        ("BIGINT", "1"),
        ("INT", 2**31),
        ("DOUBLE", 2**53 + 1),
        ("DOUBLE", True),
        ("DECIMAL(10, 1)", Decimal("1.55")),
        ("DATE", datetime(2013, 1, 1, 5)),
        ("DATE", 1.0),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1, tzinfo=UTC)),
        ("TIMESTAMP", 1.5),
        ("STRING", b"\xff"),
        ("STRING", 1),
        ("BOOLEAN", 1),
    ],
)
def test_a_python_value_is_never_cut_to_fit_its_column(ddl, value):
    shard = Shard(Schema.from_ddl(f"k {ddl}"))
    with pytest.raises(SchemaMismatch, match="key.k does not fit"):
        shard.append([(((value,), ()), 0, 1)], 0, 1)
    assert shard.client.recent_upper(shard.id) == A(0)


def test_arrow_schemas_that_no_shard_can_have_name_the_field():
    for fields, text in (
        ([("a", pa.int64()), ("a", pa.int64())], "key.a: declared twice"),
        ([("", pa.int64())], "must not be empty"),
        ([("a", pa.list_(pa.int64()))], "key.a"),
        ([("a", pa.uint64())], r"key.a: type uint64 is not allowed, use DECIMAL\(20,0\), which is decimal128\(20, 0\)"),
    ):
        with pytest.raises(InvalidUsage, match=text):
            Schema(key=pa.schema(fields), val=pa.schema([]))


def _no_text(rows):
    """Updates of SCHEMA at time 5, one of whose names is no UTF-8."""
    names = [b"name"] * rows
    names[rows // 2] = b"\xff"
    ends = list(itertools.accumulate(map(len, names), initial=0))
    text = pa.Array.from_buffers(
        pa.string(), rows, [None, pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(b"".join(names))]
    )
    key = pa.StructArray.from_arrays([pa.array(range(rows), pa.int64())], fields=list(SCHEMA.key))
    val = pa.StructArray.from_arrays([text], fields=list(SCHEMA.val))
    whole = pa.array([5] * rows, pa.int64())
    return pa.table([key, val, whole, whole], schema=SCHEMA.updates_schema)


@pytest.mark.parametrize("rows", [3, 300, 10_000])
def test_bytes_that_are_no_text_are_refused_before_any_reader_meets_them(shard, rows):
    """From 129 rows on no value was looked at: readers and compactions failed, or not, by where their windows ended."""
    table = _no_text(rows)
    (batch,) = table.to_batches()
    for updates in (table, batch, pa.RecordBatchReader.from_batches(table.schema, [batch])):
        with pytest.raises(SchemaMismatch, match=r"val\.name: not valid Arrow data: .*UTF8"):
            shard.append(updates, 5, 6)
    assert isinstance(shard.writer.append([], lower=A(5), upper=A(6)), Appended)
