"""The door for rows: what is taken, and what is refused by the name of the column."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.codec.part import decode_part, encode_part
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.ingest import ROWS_PER_TABLE
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import normalise

SCHEMA = Schema.from_ddl("id INT NOT NULL, s STRING", "v STRUCT<x: BIGINT NOT NULL, t: TIMESTAMP>")
ROWS = [(((1, "a"), ((5, None),)), 3, 1), ((({"id": 2, "s": None}), {"v": None}), 4, -1)]
EXPECTED = [
    {"key": {"id": 1, "s": "a"}, "val": {"v": {"x": 5, "t": None}}, "time": 3, "diff": 1},
    {"key": {"id": 2, "s": None}, "val": {"v": None}, "time": 4, "diff": -1},
]


def only(updates: Any, schema: Schema = SCHEMA) -> pa.Table:
    tables = list(normalise(updates, schema))
    assert all(table.schema == schema.updates_schema for table in tables)
    return pa.concat_tables(tables) if tables else schema.updates_schema.empty_table()


def test_tuples_and_dicts_become_columns() -> None:
    assert only(ROWS).to_pylist() == EXPECTED
    assert only(iter(ROWS)).to_pylist() == EXPECTED


def test_arrow_comes_in_all_its_forms() -> None:
    table = only(ROWS)
    assert next(normalise(table, SCHEMA)).equals(table)
    assert only(table.to_batches()[0]).equals(table)
    assert only(pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=1))).equals(table)


@pytest.mark.slow
def test_python_rows_are_gathered_lazily_in_bounded_tables() -> None:
    seen = 0

    def rows() -> Any:
        nonlocal seen
        for number in range(ROWS_PER_TABLE + 1):
            seen += 1
            yield ((number,), ()), 0, 1

    tables = normalise(rows(), Schema.from_ddl("id INT"))
    assert next(tables).num_rows == ROWS_PER_TABLE
    assert seen == ROWS_PER_TABLE
    assert [table.num_rows for table in tables] == [1]


def test_columns_are_found_by_name_and_other_representations_converted() -> None:
    key = pa.StructArray.from_arrays([pa.array(["a"]).dictionary_encode(), pa.array([1], pa.int32())], ["s", "id"])
    instant = pa.array([1_000], pa.timestamp("ms", tz="Europe/Berlin"))
    val = pa.StructArray.from_arrays([pa.StructArray.from_arrays([instant, pa.array([5])], ["t", "x"])], ["v"])
    table = pa.table({"diff": pa.array([1], pa.int8()), "time": pa.array([3], pa.uint64()), "val": val, "key": key})
    (row,) = only(table).to_pylist()
    assert row["key"] == {"id": 1, "s": "a"}
    assert row["val"]["v"]["t"].timestamp() == 1.0


def test_a_value_without_fields_may_be_left_out() -> None:
    schema = Schema.from_ddl("id BIGINT")
    key = pa.StructArray.from_arrays([pa.array([1])], ["id"])
    for table in (
        pa.table({"key": key, "time": [0], "diff": [1]}),
        pa.table({"key": key, "val": pa.array([{}], pa.struct([])), "time": [0], "diff": [1]}),
        pa.table({"key": key, "val": pa.nulls(1), "time": [0], "diff": [1]}),
    ):
        assert only(table, schema).to_pylist() == [{"key": {"id": 1}, "val": {}, "time": 0, "diff": 1}]


def test_nothing_yields_nothing() -> None:
    assert list(normalise([], SCHEMA)) == []
    assert list(normalise(SCHEMA.updates_schema.empty_table(), SCHEMA)) == []


def replaced(**columns: Any) -> pa.Table:
    table = only(ROWS)
    for name, column in columns.items():
        table = table.set_column(table.column_names.index(name), name, column)
    return table


ID_ONLY = pa.StructArray.from_arrays([pa.array([1, 2], pa.int32())], ["id"])
WIDE = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array(["a", "b"]), pa.array([0, 0])], ["id", "s", "more"])
NULL_ID = pa.StructArray.from_arrays([pa.array([1, None], pa.int32()), pa.array(["a", "b"])], ["id", "s"])
NULL_KEY = pa.array([{"id": 1, "s": "a"}, None], SCHEMA.key_type)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (pa.table({"a": [1]}), "columns a; expected key, val, time, diff"),
        (replaced(key=ID_ONLY), "key.s is missing"),
        (replaced(key=WIDE), "key.more is not in the shard's schema; key.id is BIGINT, the shard's is INT"),
        (replaced(key=NULL_ID), "key.id is NOT NULL and null in 1 rows"),
        (replaced(key=NULL_KEY), "key is null in 1 rows"),
        (replaced(val=pa.array([1, 2])), "val is BIGINT, the shard's is STRUCT"),
        ([(((1, "a", 2), ((5, None),)), 3, 1)], "key has 3 fields; expected 2: id, s"),
        ([(({"id": 1}, ((5, None),)), 3, 1)], "key has the fields id; expected id, s"),
        ([((("x", "a"), ((5, None),)), 3, 1)], "key.id does not fit INT"),
        ([((("1", "a"), ((5, None),)), 3, 1)], "key.id does not fit INT"),
        ([(((2**40, "a"), ((5, None),)), 3, 1)], "key.id does not fit INT"),
        ([(((1, "a"), ((None, None),)), 3, 1)], "val.v.x is NOT NULL and null in 1 rows"),
        ([((None, ((5, None),)), 3, 1)], "key is null in 1 rows"),
        ([((7, ((5, None),)), 3, 1)], "key is a int; expected a tuple or dict of id, s"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_by_column(updates: Any, message: str) -> None:
    """Spec 26.6."""
    with pytest.raises(SchemaMismatch, match=message):
        only(updates)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (7, "updates are a int"),
        ([7], "a row is not"),
        ([((1, "a"), 3, 1)], "a row is not|key"),
        (replaced(time=pa.array([-1, 0])), "time -1 is negative"),
        (replaced(time=pa.array([2**63, 0], pa.uint64())), "time does not fit int64"),
        (replaced(time=pa.array([1.0, 2.0])), "time is double"),
        (replaced(diff=pa.array([1, None])), "diff is null in 1 rows"),
        ([(((1, "a"), ((5, None),)), 2**63, 1)], "time is not a whole number in int64"),
        ([(((1, "a"), ((5, None),)), 1, "x")], "diff is not a whole number in int64"),
    ],
)
def test_bad_rows_times_and_diffs_are_refused(updates: Any, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        only(updates)


def test_values_for_a_schema_without_any_are_refused() -> None:
    schema = Schema.from_ddl("id INT")
    with pytest.raises(SchemaMismatch, match="val holds values"):
        only([(((1,), (2,)), 0, 1)], schema)
    key = pa.StructArray.from_arrays([pa.array([1], pa.int32())], ["id"])
    val = pa.StructArray.from_arrays([pa.array([1])], ["v"])
    with pytest.raises(SchemaMismatch, match=r"val.v is not in the shard's schema"):
        only(pa.table({"key": key, "val": val, "time": [0], "diff": [1]}), schema)


def of_one(values: pa.Array, ddl: str) -> pa.Table:
    """What the door makes of one column of values."""
    val = pa.StructArray.from_arrays([values], ["v"])
    key = pa.StructArray.from_arrays([pa.array(range(len(values)))], ["id"])
    ones = pa.array([1] * len(values))
    return only(
        pa.table({"key": key, "val": val, "time": ones, "diff": ones}), Schema.from_ddl("id BIGINT", f"v {ddl}")
    )


def text_of(raw: bytes, ends: list[int]) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, *ends], np.int32))
    return pa.Array.from_buffers(pa.string(), len(ends), [None, offsets, pa.py_buffer(raw)])


def test_nulls_among_the_values_of_a_dictionary_are_nulls() -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1]), pa.array(["a", None]))
    assert values.null_count == 0
    with pytest.raises(SchemaMismatch, match="val.v is NOT NULL and null in 2 rows"):
        of_one(values, "STRING NOT NULL")
    assert [row["val"]["v"] for row in of_one(values, "STRING").to_pylist()] == ["a", None, None]


@pytest.mark.parametrize("dictionary", [False, True])
def test_strings_that_are_not_utf8_are_refused_at_the_door(dictionary: bool) -> None:  # noqa: FBT001 - two cases
    bad = text_of(b"a\xc3\xffb", [1, 3, 4])
    with pytest.raises(SchemaMismatch, match="val.v: not valid Arrow data"):
        of_one(bad.dictionary_encode() if dictionary else bad, "STRING")


def test_strings_are_judged_one_by_one_and_only_those_that_are_given() -> None:
    cut = text_of("aé".encode(), [2, 3])  # each half of a letter
    with pytest.raises(SchemaMismatch, match="not valid Arrow data"):
        of_one(cut, "STRING")
    beside = text_of(b"\xff" + "é".encode() + b"\xff", [1, 3, 4]).slice(1, 1)
    assert of_one(beside, "STRING").to_pylist()[0]["val"] == {"v": "é"}


def test_decimals_past_their_precision_are_refused_at_the_door() -> None:
    wide = pa.array([Decimal("1234.5"), None, Decimal("-99999.9")], pa.decimal128(6, 1))
    past = wide.cast(pa.decimal128(5, 1), safe=False)
    with pytest.raises(SchemaMismatch, match="val.v: not valid Arrow data"):
        of_one(past, "DECIMAL(5,1)")
    assert of_one(past.slice(0, 2), "DECIMAL(5,1)").num_rows == 2


@pytest.mark.parametrize(
    ("ddl", "values"),
    [
        ("DATE", [date(2020, 1, 1), datetime(2020, 1, 1, 12)]),
        ("TIMESTAMP_NTZ", [datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC)]),
        ("FLOAT", [1e300]),
        ("FLOAT", [1.0, -3.5e38]),
    ],
)
def test_python_values_that_arrow_would_cut_without_a_word_are_refused(ddl: str, values: list[Any]) -> None:
    schema = Schema.from_ddl("id INT", f"v {ddl}")
    with pytest.raises(SchemaMismatch, match="val.v does not fit"):
        only([(((1,), (value,)), 0, 1) for value in values], schema)
    assert only([(((1,), (float("inf"),)), 0, 1)], Schema.from_ddl("id INT", "v FLOAT")).num_rows == 1


def hidden(values: pa.Array, name: str = "v", *, nullable: bool = True) -> pa.StructArray:
    """A struct of `values` that is null in its last row, whatever is there."""
    mask = pa.array([False] * (len(values) - 1) + [True])
    return pa.StructArray.from_arrays([values], fields=[pa.field(name, values.type, nullable=nullable)], mask=mask)


@pytest.mark.parametrize(
    ("ddl", "struct"),
    [
        ("v TIMESTAMP", hidden(pa.array([1000, 1], pa.timestamp("ns", "UTC")))),
        ("v STRING", hidden(pa.array(["a", "b"], pa.large_string()))),
        ("v TIMESTAMP NOT NULL", hidden(pa.array([1000, None], pa.timestamp("us", "UTC")), nullable=False)),
        ("v STRUCT<w: TIMESTAMP>", hidden(hidden(pa.array([1000, 1], pa.timestamp("ns", "UTC")), "w"))),
        (
            "v STRUCT<w: BIGINT NOT NULL>",
            hidden(
                pa.StructArray.from_arrays([pa.array([1, None])], fields=[pa.field("w", pa.int64(), nullable=False)])
            ),
        ),
    ],
)
def test_what_is_under_a_null_struct_is_no_value(ddl: str, struct: pa.StructArray) -> None:
    schema = Schema.from_ddl("id BIGINT", f"s STRUCT<{ddl.replace('v ', 'v: ', 1)}>")
    keys, val = pa.array([{"id": 1}, {"id": 2}]), pa.StructArray.from_arrays([struct], ["s"])
    (out,) = normalise(pa.table({"key": keys, "val": val, "time": [0, 0], "diff": [1, 1]}), schema)
    assert [row["s"] is None for row in out.column("val").to_pylist()] == [False, True]
    data = encode_part(out, desc=Description(Antichain.of(0), Antichain.of(1), Antichain.of(0)), schema=schema)
    assert decode_part(data, key="k", schema=schema).table.column("val").to_pylist() == out.column("val").to_pylist()
