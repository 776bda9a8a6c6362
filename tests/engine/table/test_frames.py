"""What frames of everyday hold, and what a table makes of it: the same values, or an error that names the column."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage, SchemaMismatch

NAN = math.nan
D = Decimal


@pytest.mark.parametrize(
    ("kind", "values", "stored"),
    [
        ("DECIMAL(10,2)", [None, 1.5], [None, D("1.50")]),
        ("DECIMAL(10,2)", [D(1), 1.5, 2, 0.1], [D(1), D("1.5"), D(2), D("0.1")]),
        ("DECIMAL(10,2)", (1, np.float64(2.25)), [D(1), D("2.25")]),
        ("DECIMAL(10,2)", pd.Series([1, -99_999_999]), [D(1), D(-99_999_999)]),
        ("DECIMAL(10,2)", np.array([7], np.uint64), [D(7)]),
        ("DECIMAL(20,0)", np.array([2**64 - 1], np.uint64), [D(2**64 - 1)]),
        ("DECIMAL(38,10)", pl.Series([12], dtype=pl.Decimal(38, 0)), [D(12)]),
        ("FLOAT", np.array([1.5], np.float16), [1.5]),
        ("DOUBLE", np.array([1.5], np.float16), [1.5]),
        ("STRING", pl.Series(["x", None, "y"], dtype=pl.Categorical), ["x", None, "y"]),
        ("STRING", pl.Series(["y", None, "x"], dtype=pl.Enum(["x", "y"])), ["y", None, "x"]),
        ("STRING", pd.Series(["x", None]).astype("category"), ["x", None]),
    ],
)
@pytest.mark.parametrize("call", ["append", "upsert", "overwrite"])
def test_values_stay_the_same(db, call, kind, values, stored):
    table = db.create("t", key="id BIGINT", value=f"v {kind}")
    ids = list(range(len(stored)))
    frame = {"id": ids, "v": values}
    if isinstance(values, pl.Series):
        frame = pl.DataFrame(frame)
    getattr(table, call)(frame)
    assert table.to_arrow().column("v").to_pylist() == stored
    assert table.overwrite(frame).time is None, "it is there already"


ZONED, PLAIN = dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.datetime(2020, 1, 1)


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("DECIMAL(10,2)", [D(1), 0.125], "v: Rescaling Decimal value would cause data loss"),
        ("DECIMAL(10,2)", [1, NAN], "v: "),
        ("DECIMAL(10,2)", pd.Series([10**8]), r"v is DECIMAL\(20,0\)|v is BIGINT"),
        ("DECIMAL(38,30)", pd.Series([2**63 - 1]), r"v is BIGINT.*some have more digits than DECIMAL\(38,30\) holds"),
        ("DECIMAL(38,30)", pa.array([D(2**63)], pa.decimal128(38, 0)), r"v is .*: some have more digits"),
        ("TIMESTAMP", [ZONED, PLAIN], "v: some of its times have a zone, and some have none"),
        ("TIMESTAMP_NTZ", [PLAIN, ZONED], "v: some of its times have a zone, and some have none"),
        ("TIMESTAMP", [pd.Timestamp(1, tz="UTC")], "v: some of its times have nanoseconds"),
        ("DATE", [PLAIN.date(), PLAIN], "v: some of its values are dates, and some have a time of day"),
        ("ARRAY<TIMESTAMP>", [[ZONED, PLAIN]], r"v\[\].*: some of its times have a zone, and some have none"),
        ("ARRAY<TIMESTAMP>", [[PLAIN]], r"v\[\].*: its times have no zone"),
        ("ARRAY<BIGINT>", [[0.5]], r"v\[\] does not fit BIGINT"),
        ("STRUCT<a: TIMESTAMP>", [{"a": PLAIN}], "v.a does not fit TIMESTAMP: .*: its times have no zone"),
        ("STRUCT<a: TIMESTAMP>", [{"a": pd.Timestamp(1, tz="UTC")}], "v.a .*: some of its times have nanoseconds"),
        ("STRUCT<a: FLOAT>", [{"a": 0.1}], "v.a does not fit FLOAT: 0.1 would change"),
        ("MAP<STRING, TIMESTAMP>", [{"a": PLAIN}], r"v\[\].value does not fit TIMESTAMP: .*: its times have no zone"),
        ("BIGINT", {0: 7}, "v: it is a dict, not a list of values"),
        ("BIGINT", {7}, "v: it is a set, not a list of values"),
        ("DATE", pd.Series([pd.Timestamp("2020-01-01")]), r"v is .*: take the dates of its times, as in df\['at'\].dt.date"),
    ],
)  # fmt: skip
def test_values_that_would_change_are_refused(db, kind, values, text):
    table = db.create("t", key="id BIGINT", value=f"v {kind}")
    with pytest.raises(SchemaMismatch, match=f"table t: {text}"):
        table.append({"id": list(range(len(values))), "v": values})
    assert table.count() == 0


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("TIMESTAMP", [ZONED, PLAIN], "some of its times have a zone, and some have none"),
        ("TIMESTAMP_NTZ", [pd.NaT, PLAIN, ZONED], "some of its times have a zone, and some have none"),
        ("TIMESTAMP", [pd.Timestamp(1, tz="UTC"), ZONED], "some of its times have nanoseconds"),
        ("DATE", [PLAIN.date(), PLAIN], "some of its values are dates, and some have a time of day"),
        ("ARRAY<DATE>", [[PLAIN.date(), PLAIN]], "some of its values are dates, and some have a time of day"),
        ("STRUCT<a: TIMESTAMP>", [{"a": ZONED}, None, {"a": PLAIN}], "some of its times have a zone"),
        ("MAP<STRING, TIMESTAMP>", [{"a": pd.Timestamp(1, tz="UTC")}], "some of its times have nanoseconds"),
        ("MAP<DATE, STRING>", [[(PLAIN.date(), "x"), (PLAIN, "y")]], "some of its values are dates"),
    ],
)
def test_regression_objects_of_pandas_that_arrow_misreads_are_refused(db, kind, values, text):
    table = db.create("t", key="id BIGINT", value=f"v {kind}")
    objects = pd.Series(values, dtype=object)
    with pytest.raises(SchemaMismatch, match=f"table t: v: {text}"):
        table.append(pd.DataFrame({"id": range(len(values)), "v": objects}))
    if "<" not in kind and pd.NaT not in values:
        with pytest.raises(SchemaMismatch, match=f"table t: v: {text}"):
            table.append({"id": range(len(values)), "v": objects.to_numpy()})
    assert table.count() == 0


def test_values_within_others_are_converted_as_in_columns(db):
    table = db.create("t", key="id BIGINT", value="v STRUCT<n: BIGINT, d: ARRAY<DECIMAL(10,2)>, at: TIMESTAMP>")
    table.append([{"id": 1, "v": {"n": 2.0, "d": [0.1, D(1), None], "at": ZONED}}, {"id": 2, "v": None}])
    assert table.to_pylist() == [
        {"id": 1, "v": {"n": 2, "d": [D("0.1"), D(1), None], "at": ZONED}},
        {"id": 2, "v": None},
    ]


class DerivedFrame(pd.DataFrame):
    """As of geopandas."""


def test_regression_frames_of_derived_classes_are_frames_of_pandas(db):
    """The labels of their rows counted as a column."""
    table = db.create("t", key="id BIGINT", value="x DOUBLE, at TIMESTAMP")
    times = pd.Series([pd.NaT, ZONED], dtype=object, index=["a", "b"])
    table.append(DerivedFrame({"id": [1, 2], "x": [1.5, NAN], "at": times}, index=["a", "b"]))
    assert table.to_pylist() == [{"id": 1, "x": 1.5, "at": None}, {"id": 2, "x": None, "at": ZONED}]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (
            pd.DataFrame({"id": [1], "v": [2]}, index=pd.Index([5], name="id")),
            "id names a level of the index and a column",
        ),
        (pl.DataFrame({"id": [1], "v": [object()]}), "columns v hold Python objects"),
        (
            pl.DataFrame({"id": [1], "v": [1]}, schema={"id": pl.Int64, "v": pl.Int128}),
            "a DataFrame that Arrow cannot read",
        ),
        (pl.Series("id", [1]), "a Series that Arrow cannot read"),
    ],
)
def test_regression_frames_that_arrow_cannot_read_are_refused(db, frame, text):
    """Those of polars with objects were read as the addresses of the objects in memory."""
    table = db.create("t", key="id BIGINT", value="v BINARY")
    with pytest.raises(InvalidUsage, match=f"table t: .*{text}"):
        table.append(frame)


def test_a_table_like_a_frame_holds_its_decimals(db):
    frame = pa.table(
        {"id": [1], "v": pa.array([D("1.50")], pa.decimal32(5, 2)), "w": pa.array([D(3)], pa.decimal256(20, 0))}
    )
    table = db.create("t", "id", like=frame)
    table.append(frame)
    assert table.to_pylist() == [{"id": 1, "v": D("1.50"), "w": D(3)}]


@pytest.mark.parametrize(
    ("orders", "wins"),
    [
        ([5.0, NAN, 7.0], 1),
        ([None, -math.inf, None], 1),
        (pl.Series(["a", "c", "b"], dtype=pl.Categorical), 1),
        (pa.array(["a", "b", "c"], pa.string_view()), 2),
        (pa.array([None, None, 0.5], pa.float16()), 2),
    ],
)
def test_the_greatest_order_wins(db, orders, wins):
    table = db.create("t", key="id BIGINT", value="v BIGINT")
    column = orders.to_arrow() if isinstance(orders, pl.Series) else pa.array(orders)
    table.upsert(pa.table({"id": [1, 1, 1], "v": [0, 1, 2], "at": column}), order_by="at")
    assert table.to_pylist() == [{"id": 1, "v": wins}]


INTS = pa.int32()
ODD_VIEW = pa.ListViewArray.from_arrays(
    pa.array([3, 0, 1], INTS), pa.array([1, 3, 2], INTS), pa.array([1, 2, 3, 4], INTS)
)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (pa.array([[1, 2]], pa.large_list_view(INTS)), [[1, 2]]),
        (pa.array([[1, 2]], pa.list_view(INTS)), [[1, 2]]),
        (pa.array([[9], [1, None], None, [], [3]], pa.large_list_view(INTS)).slice(1), [[1, None], None, [], [3]]),
        (pa.array([[9], [1, None], None, [], [3]], pa.list_view(INTS)).slice(1, 2), [[1, None], None]),
        (ODD_VIEW, [[4], [1, 2, 3], [2, 3]]),
        (pa.array([[9], [1, None], None, [], [3]], pa.large_list(INTS)).slice(1), [[1, None], None, [], [3]]),
        (pa.array([[9, 9], [1, 2], None], pa.list_(INTS, 2)).slice(1), [[1, 2], None]),
    ],
    ids=["one large view", "one view", "large views", "views", "views out of order", "large lists", "fixed sizes"],
)
def test_lists_of_every_layout_keep_their_elements(db, given, stored):
    table = db.create("t", key="id BIGINT", value="v ARRAY<INT>, w ARRAY<ARRAY<INT>>")
    rows = len(given)
    within = pa.ListArray.from_arrays(pa.array(range(rows + 1), INTS), given)
    frame = pa.table({"id": pa.array(range(rows), pa.int64()), "v": given, "w": within})
    table.append(frame)
    found = table.to_arrow()
    assert found.column("v").to_pylist() == stored
    assert found.column("w").to_pylist() == [[each] for each in stored]
    assert table.overwrite(frame).time is None, "it is there already"


@pytest.mark.parametrize(
    ("dtype", "ddl", "values"),
    [
        (pl.Array(pl.String, 2), "ARRAY<STRING>", [["a", None], None]),
        (pl.Array(pl.Struct({"a": pl.Binary}), 1), "ARRAY<STRUCT<a: BINARY>>", [None, [{"a": b"x"}]]),
        (pl.List(pl.Array(pl.String, 1)), "ARRAY<ARRAY<STRING>>", [[["a"], None], None]),
    ],
)
def test_regression_lists_of_fixed_size_with_views_may_be_null(db, dtype, ddl, values):
    """Arrow cannot drop the views under a null."""
    table = db.create("t", key="id BIGINT", value=f"v {ddl}")
    table.append(pl.DataFrame({"id": [1, 2], "v": pl.Series(values, dtype=dtype)}))
    assert [row["v"] for row in table.to_pylist()] == values


@pytest.mark.parametrize("ddl", ["day DATE", "day TIMESTAMP", "day TIMESTAMP_NTZ"])
def test_keys_in_years_that_python_does_not_have(db, ddl):
    """Regression: the first upsert of a day ended in an OverflowError, and so did what names or shows such a key."""
    table = db.create("days", key=ddl, value="n BIGINT")
    kind = table.schema.field("day").type
    far = pa.array([3_000_000], pa.int32()).cast(kind) if pa.types.is_date(kind) else pa.array([2**62]).cast(kind)

    def row(n):
        return pa.table({"day": far, "n": pa.array([n])})

    for n in range(3):
        assert table.upsert(row(n)).inserted == 1
    with pytest.raises(InvalidUsage, match=r"\(day='<value out of range: \d+>'\)"):
        table.upsert(pa.concat_tables([row(4), row(5)]))
    table.append(row(9))
    assert table.upsert(row(6)).deleted == 2, "a handle that knows keys cannot know this one"
    assert "value out of range" in table.changes("start")._repr_html_()
    assert "value out of range" in table.scan()._repr_html_()


@pytest.mark.parametrize("call", ["append", "upsert", "overwrite"])
@pytest.mark.parametrize(
    ("values", "text"),
    [
        (pa.array([{"a": 1, "b": "x", "at": None, "p": None, "c": 2}]), "it must be STRUCT<"),
        (pa.array([{"a": 1}]), "it must be STRUCT<"),
        (pa.array([{"a": 1, "b": "x", "at": dt.datetime(2026, 1, 2), "p": D("1.00")}]), "its times have no zone"),
        (pa.array([{"a": "1", "b": "x", "at": None, "p": None}]), "convert it first"),
        (pa.array([{"a": 1.5, "b": "x", "at": None, "p": None}]), "truncated"),
        (pa.array([{"a": 1, "b": "x", "at": None, "p": 1.234}]), "1.234 would change"),
    ],
)
def test_a_struct_is_compared_field_by_field(db, call, values, text):
    """Regression: Arrow cast it, so that fields got lost, decimals lost digits, and times without a zone were in UTC."""
    table = db.create("t", key="id BIGINT", value="s STRUCT<a: BIGINT, b: STRING, at: TIMESTAMP, p: DECIMAL(10,2)>")
    with pytest.raises(SchemaMismatch, match=rf"table t: s is STRUCT<.*{text}"):
        getattr(table, call)(pa.table({"id": pa.array([1]), "s": values}))
    assert table.count() == 0


def test_a_struct_of_another_layout_keeps_its_values(db):
    table = db.create("t", key="id BIGINT", value="s STRUCT<a: BIGINT, b: STRING, p: DECIMAL(10,2)>")
    kind = pa.struct([("p", pa.float64()), ("b", pa.large_string()), ("a", pa.int16())])
    rows = pa.array([None, {"p": 1.25, "b": "x", "a": 7}, None], kind)
    table.append(pa.table({"id": pa.array([1, 2]), "s": rows.slice(1)}))
    assert [row["s"] for row in table.to_pylist()] == [{"a": 7, "b": "x", "p": D("1.25")}, None]


@pytest.mark.parametrize("kind", ["DECIMAL(20,2)", "DECIMAL(38,18)"])
def test_floats_become_the_decimals_that_they_show(db, kind):
    """Regression: Arrow's casts are not exact. One price in seven was refused, and 0.1 became 0.100000000000000006."""
    table = db.create("t", key="id BIGINT", value=f"price {kind}")
    cents = np.arange(-50_000_000, 50_000_000, 7919)
    table.append({"id": np.arange(len(cents)), "price": cents / 100})
    assert table.to_arrow()["price"].to_pylist() == [D(int(each)).scaleb(-2) for each in cents]
    special = [0.1, 655405.19, -522073.16, 9007199254740992.0, -0.0, None]
    table.overwrite({"id": range(len(special)), "price": special})
    assert table.to_arrow()["price"].to_pylist() == [None if each is None else D(repr(each)) for each in special]
    with pytest.raises(SchemaMismatch, match="1e-19 would change"):
        table.append({"id": [1, 2, 3, 4], "price": [1.5, 2.0, 1e-19, 1e-20]})
    with pytest.raises(SchemaMismatch, match="Cannot convert nan"):
        table.append(pa.table({"id": pa.array([1]), "price": pa.array([NAN])}))


def test_regression_a_message_names_some_of_very_many_columns(db):
    """It named all 20,000 of a wide file, and to find them took minutes."""
    table = db.create("t", key="id BIGINT", value="v BIGINT")
    wide = pa.table([pa.array([1])] * 20_001, names=["id", *(f"c{number}" for number in range(20_000))])
    with pytest.raises(
        SchemaMismatch, match="v is missing; c0 is no column of the table; .*; and 19,951 more. The table has id, v"
    ) as refused:
        table.append(wide)
    assert len(str(refused.value)) < 3000


def streams(*, fails: bool = False):
    """A RecordBatchReader and a generator of the same two tables. With `fails`, both raise before the second."""
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])

    def batches():
        yield pa.record_batch([[1], ["a"]], schema=schema)
        if fails:
            raise RuntimeError("the source broke")
        yield pa.record_batch([[2], ["b"]], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches()), batches()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("first", ["append", "upsert", "overwrite"])
def test_regression_a_stream_that_was_read_is_refused(db, which, first):
    """It gave no rows any more, so the second call added none, or removed all rows."""
    table = db.create("t", key="id BIGINT", value="v STRING")
    broken, whole = streams(fails=True)[which], streams()[which]
    with pytest.raises(RuntimeError, match="the source broke"):
        getattr(table, first)(broken)
    assert table.count() == 0
    assert getattr(table, first)(whole).inserted == 2
    for stream in (broken, whole):
        for call in (table.append, table.upsert, table.overwrite):
            with pytest.raises(InvalidUsage, match="table t: the rows are a .* that an earlier call has read"):
                call(stream)
    assert table.count() == 2


def test_a_stream_that_was_refused_by_its_schema_was_not_read(db):
    table = db.create("t", key="id BIGINT", value="at TIMESTAMP")
    rows = pa.table({"id": [1], "at": pa.array([1000], pa.timestamp("ns", "UTC"))})
    with pytest.raises(SchemaMismatch, match="coerce='us'"):
        table.append(stream := rows.to_reader())
    assert table.append(stream, coerce="us").inserted == 1


def test_regression_a_stream_shows_its_columns_without_its_rows(db):
    """`create` read it to its end, and the next append added nothing."""
    reader, generator = streams()
    assert db.create("t", "id", like=reader).append(reader).inserted == 2
    with pytest.raises(InvalidUsage, match="table u: like: an iterator gives its tables once"):
        db.create("u", "id", like=generator)
    assert db["t"].append(generator).inserted == 2
    assert db.create("v", "id", like=db["t"].schema).schema == db["t"].schema


def test_the_tables_of_an_iterator_may_differ_where_each_is_converted_alone(db):
    table = db.create("t", key="id BIGINT", value="v STRING")
    pieces = [pa.table({"id": [1], "v": ["a"]}), pa.table({"v": pa.nulls(1), "id": pa.array([2], pa.int8())})]
    table.append(iter(pieces))
    assert table.to_pylist() == [{"id": 1, "v": "a"}, {"id": 2, "v": None}]
    with pytest.raises(SchemaMismatch, match="table t: the tables of the iterator differ: .* int64 vs int8"):
        table.upsert(iter(pieces))


@pytest.mark.parametrize("values", [[NAN, NAN], []])
def test_regression_a_column_of_pandas_without_a_value_fits_any_type(db, values):
    """pandas holds it as floats."""
    table = db.create("t", key="id BIGINT", value="v STRING, at TIMESTAMP")
    table.append(pd.DataFrame({"id": range(len(values)), "v": values, "at": values}, dtype=float))
    assert [row["v"] for row in table.to_pylist()] == [None] * len(values)
