"""Invalid filters and columns are refused by name, before anything is read. Literals beyond a column's type compare."""

import json
from datetime import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, In, from_json, to_json
from persist_engine.rows.predicate_text import parse_predicate
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import normalise
from persist_kit.world import AheadEnv, World

SCHEMA = Schema.from_ddl("id BIGINT, tag STRING", "x DOUBLE, d DATE, place STRUCT<a: INT>, `o.dd` INT")


@pytest.fixture
def reader():
    world = World(env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    with client.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:
        yield reader


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nope = 1", r"no column nope; there are id, tag, x, d, place, o.dd"),
        ("key.x = 1", r"no column key.x; there are key.id"),
        ("val.place.b = 1", "no column val.place.b"),
        ("id = 'a'", r"key.id.*'a' cannot be compared with BIGINT"),
        ("id = NULL", "IS NULL"),
        ("id IN (1, NULL)", "IS NULL"),
        ("tag > 5", "cannot be compared with STRING"),
        ("d = 'yesterday'", "val.d"),
        ("place = 1", "val.place"),
        (In("place", ()), "val.place.*name a field within it"),
        ("id >", "not complete"),
        ("", "empty"),
        ("1 = 1", "where a column is expected"),
        ("f(id) = 1", "where a column is expected"),
        ("id LIKE '1%'", "LIKE compares texts"),
        ("id RLIKE '1'", "cannot express"),
        ("id BETWEEN SYMMETRIC 5 AND 1", "cannot express"),  # without SYMMETRIC it is always false
        ("id IN (SELECT 1)", "cannot express"),
        ("id = 1; DROP TABLE x", "id = 1; DROP TABLE x"),
        ("(" * 3000 + "id = 1" + ")" * 3000, "too deep|not complete"),
        ("id = 1 OR " * 20000 + "id = 2", "more than 100000"),
        ([], "not empty"),
        ([("id", "~", 1)], "'~' is none of"),
        ([("id", "in", "abc")], "takes a list"),
        (["id"], "a term of a filter"),
        (7, "a list of"),
        (And(()), "at least one term"),
        (Compare(7, "=", 1), "named by a text"),
        (Compare("id", "=", float("nan")), "nan"),
        (Compare("id", "=", True), "True"),
        ("d < CAST('2013-01-02 10:00:00' AS DATE)", "where a date is expected"),
        ("d = CAST(20130102 AS DATE)", "where a value is expected"),
        ("tag = DATE '2013-01-02'", "cannot be compared with STRING"),
        ("tag = X'abc'", "where a value is expected"),
    ],
)
def test_an_invalid_filter_is_refused_before_anything_is_read(reader, where, message):
    for read in (lambda: reader.snapshot(79, where=where), lambda: reader.listen(79, where=where)):
        with pytest.raises(InvalidUsage, match=message):
            read()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["nope"], "there are id"),
        (["val.place.a"], "lies within val.place"),
        ("id", "not the text"),
        ([7], "named by a text"),
    ],
)
def test_invalid_columns_are_refused(reader, columns, message):
    with pytest.raises(InvalidUsage, match=message):
        reader.snapshot(79, columns=columns)


def test_a_name_in_key_and_value_needs_its_side():
    schema = Schema.from_ddl("id INT, `a.b` INT, a STRUCT<b: INT>", "id INT")
    for text, message in (("id = 1", "key.id, val.id"), ("key.a.b = 1", "may be any of")):
        with pytest.raises(InvalidUsage, match=message):
            Filter(parse_predicate(text), schema)
    assert Filter(parse_predicate("val.id = 1"), schema).columns == ("val.id",)


def test_a_literal_outside_the_type_of_a_column_is_below_or_above_all_its_values():
    schema = Schema.from_ddl("i TINYINT, m DECIMAL(4,2)")
    table = pa.table(
        {
            "key": pa.array(
                [{"i": v, "m": Decimal(v)} for v in (-128, 0, 127)][1:2] + [{"i": None, "m": None}], schema.key_type
            ),
        }
    )
    answers = {
        "i < 1000": [True, False],
        "i > 1000": [False, False],
        "i > -1e99999": [True, False],
        "i <> 1e40": [True, False],
        "i = 0.5": [False, False],
        "NOT (i = 0.5)": [True, False],
        "i < 0.5": [True, False],
        "i >= 0.5": [False, False],
        "i > -0.5": [True, False],
        "m <= 0.001": [True, False],
        "m < 0": [False, False],
        "m = 0": [True, False],
        "m > -100000": [True, False],
    }
    for text, expected in answers.items():
        assert Filter(parse_predicate(text), schema).mask(table).to_pylist() == expected, text


GREATEST = "99999999999999999999999999999999999999"


@pytest.mark.parametrize(
    ("kind", "value", "text", "passes"),
    [
        ("DECIMAL(38,0)", Decimal("-" + GREATEST), f"v = -{GREATEST}", True),
        ("DECIMAL(38,0)", Decimal("-" + GREATEST), f"v < -{GREATEST[:-1]}8", True),
        ("DECIMAL(38,0)", Decimal("-" + GREATEST), f"v >= -{GREATEST[:-1]}8", False),
        ("INT", 1, "v = 0." + "9" * 150, False),
        ("INT", 1, "v <= 0." + "9" * 150, False),
        ("INT", 1, "v = 1." + "0" * 150 + "1", False),
        ("INT", 1, "v < 1." + "0" * 150 + "1", True),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1), "v = '2013-01-01 00:00:00.0000009'", False),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1), "v < '2013-01-01 00:00:00.0000009'", True),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1), "v >= '2013-01-01T00:00:00.0000009'", False),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1), "v = '2013-01-01 00:00:00.0000000'", True),
        ("TIMESTAMP", datetime(1969, 12, 31, 23, 59, 59), "v < TIMESTAMP '1969-12-31 23:59:59.0000001Z'", True),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1, 5), "v < TIMESTAMP_NTZ '2013-01-01 05:00:00.000001'", True),
        ("TIMESTAMP", datetime(2013, 1, 1, 5), "v < TIMESTAMP_LTZ '2013-01-01 06:00:00+01:00'", False),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1, 5), "v < DATE '2013-01-02'", True),
        ("TIMESTAMP_NTZ", datetime(2013, 1, 1, 5), "v < DATE '2013-01-01'", False),
    ],
)
def test_literals_finer_than_python_values_are_compared_exactly(kind, value, text, passes):
    schema = Schema.from_ddl(f"v {kind}")
    (table,) = normalise([(((value,), ()), 0, 1)], schema)
    assert Filter(parse_predicate(text), schema).mask(table).to_pylist() == [passes]


@pytest.mark.parametrize(
    ("text", "zoneless"),
    [
        ("v < TIMESTAMP '2013-01-01 00:00:00Z' OR v = '2013-01-01T00:00:00+02:00'", {}),
        ("v < '2013-01-01 00:00:00'", {"key.v": "2013-01-01 00:00:00"}),
        (
            "NOT (v IS NULL OR v IN (TIMESTAMP '2013-01-01 00:00:00Z', TIMESTAMP_NTZ '2013-01-01 00:00:00'))",
            {"key.v": "2013-01-01 00:00:00"},
        ),
        ("DATE '2013-01-01' <= v", {"key.v": "2013-01-01"}),
        ("w < TIMESTAMP '2013-01-01 00:00:00' AND d = DATE '2013-01-01' AND s = '2013-01-01'", {}),
    ],
)
def test_a_filter_names_the_instants_that_it_takes_as_utc(text, zoneless):
    schema = Schema.from_ddl("v TIMESTAMP", "w TIMESTAMP_NTZ, d DATE, s STRING")
    assert Filter(parse_predicate(text), schema).zoneless == zoneless


def test_a_filter_with_numpy_floats_can_be_sent_and_parsed():
    """Their repr is `np.float64(0.5)`: a split with such a filter could not be read in another process."""
    schema = Schema.from_ddl("i INT", "x DOUBLE")
    table = pa.table({"key": pa.array([{"i": 0}, {"i": 1}], schema.key_type)})
    predicate = Compare("i", ">", np.float64(0.5))
    assert from_json(json.loads(json.dumps(to_json(predicate)))) == predicate
    assert Filter(predicate, schema).mask(table).to_pylist() == [False, True]


@pytest.mark.parametrize(
    "digits", ["12345678901234567890123456789012345678", "0.1234567890123456789012345678901234567"]
)
@pytest.mark.parametrize("sign", ["", "-", "- "])
def test_a_literal_of_many_digits_keeps_all_of_them(sign, digits):
    parsed = parse_predicate(f"id = {sign}{digits}")
    assert parsed == Compare("id", "=", Decimal(f"{sign.strip()}{digits}"))
