"""Conditions of the SQL catalog as conditions of the engine: what has no exact text is left to Spark. No session."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine import Filter, Schema, predicate_of
from persist_spark.catalog.conditions import answered, conjunction

SCHEMA = Schema.from_ddl(
    "id BIGINT, `a.b` STRING, key INT",
    "x DOUBLE, s STRING, `q``q` INT, d DECIMAL(38,10), raw BINARY, at TIMESTAMP, clock TIMESTAMP_NTZ, day DATE, place STRUCT<x: INT>",
)


def column(*path):
    return {"column": list(path)}


def literal(data_type, value):
    return {"type": data_type, "value": value}


def op(name, *children):
    return {"name": name, "children": list(children)}


def value_of(data_type, name, value):
    """The value that the engine compares with, None when Spark has to compare."""
    text = answered(op("=", column(name), literal(data_type, value)), SCHEMA)
    return None if text is None else predicate_of(text).value


@given(st.text())
def test_every_text_is_compared_as_it_is_or_left_to_spark(text):
    assert value_of("string", "s", text) in {text, None}


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_characters="\x7f")))
def test_common_texts_are_compared_here(text):
    assert value_of("string", "s", text) == text


@given(st.floats())
def test_every_float_is_compared_bit_by_bit(value):
    found = value_of("double", "x", repr(value))
    assert math.isnan(found) == math.isnan(value)
    assert math.isnan(value) or float(found).hex() == value.hex() or value == 0


@given(st.integers(-(2**63), 2**63 - 1), st.decimals(allow_nan=False, allow_infinity=False, places=10), st.binary())
def test_numbers_and_bytes_are_compared_exactly(whole, exact, raw):
    assert value_of("long", "id", whole) == whole
    assert value_of("decimal(38,10)", "d", str(exact)) == Decimal(str(exact))
    assert value_of("binary", "raw", raw.hex()) == raw


@given(st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999))
def test_times_are_compared_to_the_microsecond(us):
    for data_type, name in (("timestamp", "at"), ("timestamp_ntz", "clock")):
        text = answered(op("<=", column(name), literal(data_type, us)), SCHEMA)
        rule = Filter(predicate_of(text), SCHEMA)
        assert rule._bound.value == us
    days = us // 86_400_000_000
    text = answered(op("<=", column("day"), literal("date", days)), SCHEMA)
    assert Filter(predicate_of(text), SCHEMA)._bound.value == days


@pytest.mark.parametrize(
    "condition",
    [
        op("=", column("s"), literal("string", None)),
        op("=", column("at"), literal("timestamp", 10**18)),
        op("=", column("day"), literal("date", 10**9)),
        op("=", column("q`q"), literal("integer", 1)),
        op("=", column("x"), column("id")),
        op("=", {}, literal("integer", 1)),
        op("=", column("s"), literal("interval", "x")),
        op("=", column("nope"), literal("integer", 1)),
        op("=", column("id"), literal("string", "x")),
        op("STARTS_WITH", column("s"), literal("string", None)),
        op("CONTAINS", column("s"), column("s")),
        op("CONTAINS", column("id"), literal("string", "1")),
        op("<=>", column("id"), column("x")),
        op("OR", op("=", column("id"), literal("integer", 1)), op("LIKE", column("s"), literal("string", "x"))),
        op("AND"),
        op("IN", column("id")),
        {},
    ],
)
def test_what_has_no_exact_text_is_left_to_spark(condition):
    assert answered(condition, SCHEMA) is None


def test_a_null_among_values_and_a_constant_choose_as_in_sql():
    """`DELETE ... WHERE id IN (1, NULL)` and `WHERE false` were refused. A null matters only where its condition is negated."""
    null, one = {"type": "long"}, literal("long", 1)
    some = op("IN", column("id"), one, null)
    none, every = "`id` IS NULL AND `id` IS NOT NULL", "`id` IS NULL OR `id` IS NOT NULL"
    assert answered(some, SCHEMA) == "`id` IN (1)"
    assert answered(op("OR", some, op("=", column("key"), one)), SCHEMA) == "(`id` IN (1)) OR (`key`.`key` = 1)"
    assert answered(op("IN", column("id"), null, null), SCHEMA) == none
    assert answered(op("NOT", some), SCHEMA) is None
    assert answered(op("NOT", op("AND", some, some)), SCHEMA) is None
    assert answered(literal("boolean", False), SCHEMA) == none == answered({"type": "boolean"}, SCHEMA)
    assert answered(literal("boolean", True), SCHEMA) == every
    assert answered(op("NOT", literal("boolean", False)), SCHEMA) == f"NOT ({none})"
    assert answered(op("NOT", {"type": "boolean"}), SCHEMA) is None
    assert answered(op("IN", column("id"), one, column("key")), SCHEMA) is None
    is_one = "`id` IS NOT NULL AND `id` = 1"
    assert answered(op("<=>", column("id"), one), SCHEMA) == is_one == answered(op("<=>", one, column("id")), SCHEMA)
    assert answered(op("NOT", op("<=>", column("id"), one)), SCHEMA) == f"NOT ({is_one})"
    assert answered(op("<=>", column("id"), null), SCHEMA) == "`id` IS NULL"


@pytest.mark.parametrize(("name", "form"), [("STARTS_WITH", "{}%"), ("ENDS_WITH", "%{}"), ("CONTAINS", "%{}%")])
@given(st.text(st.sampled_from("%_\\'\"ab\n") | st.characters(exclude_categories=["Cs"]), max_size=8))
def test_parts_of_texts_stand_for_themselves(name, form, text):
    read = answered(op(name, column("s"), literal("string", text)), SCHEMA)
    meant = form.format("".join(f"\\{char}" if char in "%_\\" else char for char in text))
    assert predicate_of(read).pattern == meant


def test_names_that_look_like_a_side_and_fields_of_structs():
    one = literal("integer", 1)
    assert answered(op("=", column("key"), one), SCHEMA) == "`key`.`key` = 1"
    assert answered(op("=", column("a.b"), literal("string", "u")), SCHEMA) == "`a.b` = 'u'"
    assert answered(op("<", one, column("place", "x")), SCHEMA) == "1 < `place`.`x`"
    assert conjunction(["a = 1", "b = 2"]) == "(a = 1) AND (b = 2)"
    assert conjunction([]) is None


def test_a_struct_that_is_named_as_a_side_is_never_taken_for_the_side():
    one, schema = literal("integer", 1), Schema.from_ddl("id BIGINT", "key STRUCT<id: BIGINT>, m STRUCT<id: BIGINT>")
    texts = [answered(op("=", column(*path), one), schema) for path in (("id",), ("key", "id"), ("m", "id"))]
    assert texts == ["`id` = 1", "`val`.`key`.`id` = 1", "`m`.`id` = 1"]
    assert [Filter(predicate_of(text), schema).columns for text in texts] == [("key.id",), ("val.key",), ("val.m",)]
    both = Schema.from_ddl("id BIGINT", "key STRUCT<id: BIGINT>, val STRUCT<key: STRUCT<id: BIGINT>>")
    assert answered(op("=", column("key", "id"), one), both) is None
    assert answered(op("=", column("val", "key", "id"), one), both) == "`val`.`val`.`key`.`id` = 1"


def test_a_collection_with_errors_is_left_to_spark():
    is_one = op("=", column("id"), literal("integer", 1))
    assert answered(is_one, Schema.from_ddl("id BIGINT, err STRING")) is None
    assert answered(op("IS_NULL", column("err")), Schema.from_ddl("id BIGINT, err STRING")) == "`err` IS NULL"
    assert answered(is_one, Schema.from_ddl("err STRING, id BIGINT")) == "`id` = 1"
