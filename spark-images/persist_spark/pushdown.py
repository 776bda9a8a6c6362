"""Spark's filters as the engine's predicates, so that parts are skipped and rows dropped before Spark sees them. Pure.

Both compare alike: NaN equals itself and lies past all numbers, texts go by their bytes, null is neither true nor false.
What has no exact counterpart is left to Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.filter import Filter
from persist_engine.codec.predicate import And, Compare, In, IsNull, Not, Op, Predicate
from persist_engine.codec.schema import Schema
from pyspark.sql import datasource as spark

#: Spark hands decimals over through arithmetic of so many digits, which rounds longer ones.
DECIMAL_DIGITS_MAX = 28
_COMPARISONS: dict[type, Op] = {
    spark.EqualTo: "=",
    spark.LessThan: "<",
    spark.LessThanOrEqual: "<=",
    spark.GreaterThan: ">",
    spark.GreaterThanOrEqual: ">=",
}


def predicate_of(found: spark.Filter, schema: Schema, sides: Mapping[str, str] | None) -> Predicate | None:
    """What holds of exactly the rows of `schema` of which `found` holds; None when the engine cannot say it. `sides`: for
    each flat column whether it is the `key`'s or the `val`'s; None where Spark sees key, val, time and diff.
    """
    try:
        predicate = _translated(found, sides)
        if predicate is not None:
            Filter(predicate, schema)
    except InvalidUsage:  # a column that is not the collection's, or a value that it is not compared with
        return None
    return predicate


def _translated(found: spark.Filter, sides: Mapping[str, str] | None) -> Predicate | None:
    if isinstance(found, spark.Not):
        term = _translated(found.child, sides)
        return None if term is None else Not(term)
    column = _column(found.attribute, sides)
    match found:
        case spark.IsNull() | spark.EqualNullSafe(value=None):
            return IsNull(column)
        case spark.IsNotNull():
            return Not(IsNull(column))
        case spark.EqualNullSafe(value=value) if _is_exact(value):
            return And((Not(IsNull(column)), Compare(column, "=", value)))
        # Without values Spark's is false for nulls, too.
        case spark.In(value=values) if values and all(map(_is_exact, values)):
            return In(column, tuple(values))
    op = _COMPARISONS.get(type(found))
    return Compare(column, op, found.value) if op is not None and _is_exact(found.value) else None


def _column(path: tuple[str, ...], sides: Mapping[str, str] | None) -> str:
    """How the engine names what Spark calls `path`. InvalidUsage for what is no field of the key or the value: a frame's
    own columns of updates, and the structs `key` and `val` themselves, by whose names the engine knows fields called so.
    """
    side = path[0] if sides is None else sides.get(path[0])
    whole = path if sides is None else (str(side), *path)
    if side not in ("key", "val") or len(whole) == 1:
        raise InvalidUsage(f"{whole[0]} is no part of the collection's rows", column=whole[0])
    return ".".join(whole)


def _is_exact(value: object) -> bool:
    return not isinstance(value, Decimal) or len(value.as_tuple().digits) < DECIMAL_DIGITS_MAX
