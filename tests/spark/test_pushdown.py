"""Spark's filters as predicates: exactly the same rows, or none at all of them pushed."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from persist_engine.codec.filter import Filter
from persist_engine.codec.schema import Schema
from persist_engine.testing.strategies import updates_table
from persist_spark.pushdown import predicate_of
from pyspark.sql import datasource as spark

SCHEMA = Schema.from_ddl(
    "id BIGINT, key STRUCT<x: DOUBLE>, x DOUBLE",
    "m DECIMAL(38,2), s STRING, d DATE, t TIMESTAMP, w TIMESTAMP_NTZ, b BOOLEAN, r BINARY, `a.b` INT, a STRUCT<b: INT>",
)
SIDES = {field.name: side for side, fields in (("key", SCHEMA.key), ("val", SCHEMA.val)) for field in fields}
NAN, INSTANT = float("nan"), datetime(2013, 1, 1, 5, tzinfo=UTC)


def row(number: int | None) -> tuple[dict, dict]:
    if number is None:
        return {"id": None, "key": None, "x": None}, dict.fromkeys(SCHEMA.val.names)
    x = {0: -0.0, 3: NAN}.get(number, float(number))
    val = {"m": Decimal(number), "s": f"n{number}", "d": date(2013, 1, 1 + number), "t": INSTANT.replace(hour=number)}
    val |= {"w": datetime(2013, 1, 1, number), "b": number % 2 == 1, "r": bytes([number]), "a.b": 7, "a": {"b": number}}
    return {"id": number, "key": {"x": x}, "x": -x}, val


TABLE: pa.Table = updates_table(SCHEMA, [(*row(number), 0, 1) for number in (0, 1, 2, 3, None)])


def passing(found: spark.Filter, sides: dict[str, str] | None = SIDES) -> list[int | None] | None:
    predicate = predicate_of(found, SCHEMA, sides)
    if predicate is None:
        return None
    return [each["key"]["id"] for each in Filter(predicate, SCHEMA).apply(TABLE).to_pylist()]


@pytest.mark.parametrize(
    ("found", "ids"),
    [
        (spark.EqualTo(("id",), 2), [2]),
        (spark.Not(spark.EqualTo(("id",), 2)), [0, 1, 3]),
        (spark.EqualNullSafe(("id",), 2), [2]),
        (spark.Not(spark.EqualNullSafe(("id",), 2)), [0, 1, 3, None]),
        (spark.EqualNullSafe(("id",), None), [None]),
        (spark.IsNull(("s",)), [None]),
        (spark.IsNotNull(("key", "x")), [0, 1, 2, 3]),
        (spark.In(("id",), (1, 3, 9)), [1, 3]),
        (spark.Not(spark.In(("id",), (1, 3))), [0, 2]),
        (spark.LessThan(("key", "x"), 1.0), [0]),
        (spark.GreaterThan(("key", "x"), 1.0), [2, 3]),
        (spark.EqualTo(("key", "x"), NAN), [3]),
        (spark.EqualTo(("key", "x"), 0.0), [0]),
        (spark.LessThanOrEqual(("x",), -1.0), [1, 2]),
        (spark.GreaterThanOrEqual(("m",), Decimal("2.00")), [2, 3]),
        (spark.LessThan(("d",), date(2013, 1, 2)), [0]),
        (spark.GreaterThan(("t",), datetime(2013, 1, 1, 1, tzinfo=UTC)), [2, 3]),
        (spark.GreaterThan(("w",), datetime(2013, 1, 1, 1)), [2, 3]),
        (spark.EqualTo(("b",), True), [1, 3]),
        (spark.GreaterThan(("b",), False), [1, 3]),
        (spark.EqualTo(("r",), b"\x02"), [2]),
        (spark.LessThan(("r",), b"\x02"), [0, 1]),
    ],
    ids=str,
)
def test_the_rows_that_pass_are_those_of_spark(found, ids):
    assert passing(found) == ids


@pytest.mark.parametrize(
    "found",
    [
        spark.StringStartsWith(("s",), "n"),
        spark.Not(spark.StringContains(("s",), "n")),
        spark.In(("id",), (1, None)),
        spark.Not(spark.In(("id",), ())),
        spark.IsNotNull(("nope",)),
        spark.EqualTo(("m",), Decimal("123456789012345678901234567890.12")),
        spark.Not(spark.EqualTo(("m",), Decimal("123456789012345678901234567890.12"))),
        spark.GreaterThan(("w",), INSTANT),
        spark.EqualTo(("a", "b"), 7),
        spark.EqualTo(("a.b",), 7),
        spark.EqualTo(("a",), {"b": 1}),
    ],
    ids=str,
)
def test_what_has_no_exact_counterpart_is_left_to_spark(found):
    """As a value that would be rounded, or a path that might be two."""
    assert passing(found) is None


def test_updates_are_filtered_by_key_and_val_only():
    assert passing(spark.EqualTo(("key", "id"), 2), None) == [2]
    assert passing(spark.EqualTo(("key", "key", "x"), 2.0), None) == [2]
    assert passing(spark.EqualTo(("diff",), 1), None) is None
    assert passing(spark.EqualTo(("time",), 0), None) is None


def test_the_structs_of_updates_are_not_the_fields_called_so():
    """`key IS NOT NULL` holds of every row; the field key.key of SCHEMA is null in one."""
    assert passing(spark.IsNotNull(("key",)), None) is None
    assert passing(spark.IsNull(("val",)), None) is None
    assert passing(spark.IsNotNull(("key", "key")), None) == [0, 1, 2, 3]
