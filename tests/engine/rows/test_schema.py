"""Schemas: DDL in and out, refusals that name position and field, differences that name columns."""

from __future__ import annotations

import pyarrow as pa
import pytest
from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.model.state import SchemaPair
from persist_engine.rows.projection import Projection
from persist_engine.rows.schema import Schema


def test_ddl_of_every_type() -> None:
    """Spec 26.1."""
    text = (
        "a BOOLEAN, b TINYINT, c SMALLINT, d INT, e BIGINT, f FLOAT, g DOUBLE, h DECIMAL(38,10), i STRING, j BINARY, "
        "k DATE, l TIMESTAMP, m TIMESTAMP_NTZ, n STRUCT<x: INT NOT NULL, `y z`: STRUCT<w: STRING>> NOT NULL"
    )
    schema = Schema.from_ddl(text)
    assert schema.key_ddl == text
    assert schema.val_ddl == ""
    assert schema.key.field("l").type == pa.timestamp("us", tz="UTC")
    assert schema.key.field("m").type == pa.timestamp("us")
    assert not schema.key.field("n").nullable


def test_ddl_is_free_in_case_space_and_synonyms() -> None:
    spelled = Schema.from_ddl(" `id`  long not  null,n numeric ( 5 , 2 ),s struct<a int,b:dec>\n", "t timestamp_ltz")
    assert spelled == Schema.from_ddl(
        "id BIGINT NOT NULL, n DECIMAL(5,2), s STRUCT<a: INT, b: DECIMAL(10,0)>", "t TIMESTAMP"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id BIGIT", "key schema at position 4, field 'id': type 'BIGIT' is not one of BOOLEAN"),
        ("id BIGINT,", "position 11: expected a field name, found 'end of text'"),
        ("id", "position 3, field 'id': expected a type"),
        ("id INT NOT", "field 'id': expected NULL after NOT"),
        ("s STRUCT<>", "position 10, field 's': expected a field name, found '>'"),
        ("s STRUCT<a: INT", "position 16, field 's': expected '>'"),
        ("s STRUCT<a: FOO>", "position 13, field 's.a': type 'FOO'"),
        ("d DECIMAL(39,0)", r"field 'd': DECIMAL\(39,0\) needs 1 <= precision <= 38"),
        ("d DECIMAL(5,6)", r"DECIMAL\(5,6\) needs"),
        ("d DECIMAL(x)", "expected a small number, found 'x'"),
        ("a INT b INT", "position 7: expected ',', found 'b'"),
        ("a ARRAY", "position 8, field 'a': expected '<'"),
        ("a ARRAY<INT NOT NULL>", "field 'a': an element of an ARRAY cannot be NOT NULL"),
        ("a MAP<INT>", "field 'a': expected ',', found '>'"),
        ("a MAP<STRING, INT NOT NULL>", "field 'a': a value of a MAP cannot be NOT NULL"),
        ("a ARRAY<INT>", "field key.a: a key holds no ARRAY: put the column into the value"),
        ("s STRUCT<m: MAP<STRING, INT>>", "field key.s.m: a key holds no MAP"),
        ("`` INT", "must not be empty"),
        ("a $", "expected a type, as in 'id BIGINT', found '\\$'"),
        ("a INT, a STRING", "field key.a: declared twice"),
        ("", "key schema has no fields"),
        ("a " + "STRUCT<a " * 40 + "INT" + ">" * 40, "structs, lists and maps nest deeper"),
    ],
)
def test_bad_ddl_is_refused_with_position_and_name(text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Schema.from_ddl(text)


def test_bad_value_ddl_says_that_it_is_the_value() -> None:
    with pytest.raises(InvalidUsage, match=r"^value schema at position 3"):
        Schema.from_ddl("a INT", "b FOO")


@pytest.mark.parametrize(
    ("data_type", "hint"),
    [
        (
            pa.uint64(),
            r"field key.x: type uint64 is not allowed, use DECIMAL\(20,0\), which is decimal128\(20, 0\) in pyarrow",
        ),
        (pa.large_string(), "use STRING, which is string"),
        (pa.timestamp("ns"), r"use TIMESTAMP_NTZ, which is timestamp\[us\]"),
        (pa.timestamp("us", tz="Europe/Berlin"), "tz=UTC"),
        (pa.list_(pa.int32()), "field key.x: a key holds no ARRAY"),
        (pa.large_list(pa.int32()), "field key.x: a key holds no ARRAY"),
        (pa.decimal256(50, 2), "field key.x: type decimal256"),
        (pa.decimal128(5, -1), "field key.x: type decimal128"),
        (pa.struct([("y", pa.uint8())]), "field key.x.y: type uint8 is not allowed, use SMALLINT, which is int16"),
        (pa.struct([]), "field key.x: a nested struct needs at least one field"),
    ],
)
def test_types_that_a_shard_cannot_hold_are_refused_by_field(data_type: pa.DataType, hint: str) -> None:
    with pytest.raises(InvalidUsage, match=hint):
        Schema(pa.schema([("x", data_type)]), pa.schema([]))


def test_ddl_of_lists_and_maps() -> None:
    """Spec 26.1."""
    text = "a ARRAY<STRING>, m MAP<STRING, ARRAY<DECIMAL(5,1)>>, s STRUCT<l: ARRAY<STRUCT<x: INT, y: MAP<DATE, INT>>>> NOT NULL"
    schema = Schema.from_ddl("id BIGINT", text)
    assert schema.val_ddl == text
    assert schema.val.field("a").type.equals(pa.list_(pa.field("element", pa.string())), check_metadata=True)
    assert Schema.from_ddl("id LONG", "a array < string >").val_ddl == "a ARRAY<STRING>"
    assert Schema.from_pair(schema.to_pair()) == schema
    other = pa.schema([("a", pa.list_(pa.field("item", pa.string())))])
    given = Schema(pa.schema([("id", pa.int64())]), other).val.field("a").type
    assert given.equals(schema.val.field("a").type, check_metadata=True)  # names within lists have no meaning


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (pa.large_list(pa.int32()), "field val.x: type large_list<item: int32> is not allowed, use pyarrow's list_"),
        (pa.list_(pa.uint8()), "field val.x.element: type uint8 is not allowed"),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), "field val.x: an element of an ARRAY cannot be NOT NULL"),
        (pa.list_(pa.struct([pa.field("y", pa.int8(), nullable=False)])), "field within an ARRAY or a MAP cannot be NOT NULL"),
        (pa.map_(pa.list_(pa.int8()), pa.int8()), "field val.x: the key of a MAP is .*, not ARRAY<TINYINT>"),
        (pa.map_(pa.string(), pa.list_(pa.uint8())), "field val.x.value.element: type uint8"),
    ],
)  # fmt: skip
def test_lists_and_maps_that_a_shard_cannot_hold_are_refused_by_field(kind: pa.DataType, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Schema(pa.schema([("id", pa.int64())]), pa.schema([("x", kind)]))


def test_arrow_metadata_is_no_part_of_a_schema() -> None:
    noisy = pa.schema([pa.field("a", pa.int32(), metadata={"x": "y"})], metadata={"z": "w"})
    assert Schema(noisy, pa.schema([])) == Schema.from_ddl("a INT")
    assert hash(Schema(noisy, pa.schema([]))) == hash(Schema.from_ddl("a INT"))


def test_differences_name_the_columns() -> None:
    ours = Schema.from_ddl("a INT, b STRUCT<c: INT, d: INT>", "v STRING NOT NULL")
    theirs = Schema.from_ddl("a BIGINT, b STRUCT<c: INT, e: INT>", "v STRING")
    assert ours.difference(theirs) == (
        "key.a is BIGINT, the shard's is INT; key.b.d is missing; key.b.e is not in the shard's schema; "
        "val.v is nullable, the shard's is NOT NULL"
    )
    assert Schema.from_ddl("a INT, b INT").difference(Schema.from_ddl("b INT, a INT")) == (
        "key has its fields in the order b, a, the shard's is a, b"
    )


def test_registered_garbage_is_corrupt() -> None:
    good = Schema.from_ddl("a INT").to_pair()
    with pytest.raises(CorruptData, match="registered schema"):
        Schema.from_pair(SchemaPair(b"nonsense", good.val))
    with pytest.raises(CorruptData, match="no fields"):
        Schema.from_pair(SchemaPair(good.val, good.val))


@pytest.mark.parametrize(
    ("columns", "beside", "problem"),
    [
        (["name", "id", "score"], {}, None),
        (["id", "name", "score", "at"], {"at": "timestampColumn"}, None),
        (
            ["ID", "name", "score"],
            {},
            "missing: id (key field); not in the shard's schema: ID (drop them with input.format.sql)",
        ),
        (["id", "name", "score", "name"], {}, "more than once: name"),
        (
            ["id"],
            {"at": "timestampColumn", "n": "diffColumn"},
            "missing: name (value field), score (value field), at (timestampColumn), n (diffColumn)",
        ),
        (["id", "name", "score"], {"id": "timestampColumn"}, None),
    ],
)
def test_columns_that_do_not_match_are_named(columns, beside, problem) -> None:
    schema = Schema.from_ddl("id BIGINT", "name STRING, score DOUBLE")
    expected = f"input columns do not match the shard's schema: {problem}; the input has: {', '.join(columns)}"
    assert schema.column_problem(columns, beside=beside.items()) == (problem and expected)


def test_a_field_that_is_named_as_a_side_is_shown_alone():
    """All fields of the side were shown in its place."""
    plain = Schema.from_ddl("id BIGINT, area STRING", "n INT")
    named = Schema.from_ddl("id BIGINT, area STRING", "key BIGINT, val BIGINT, n INT")
    shown = [Projection.of([name], schema).names for schema in (plain, named) for name in ("key", "val")]
    assert shown == [("key.id", "key.area"), ("val.n",), ("val.key",), ("val.val",)]
