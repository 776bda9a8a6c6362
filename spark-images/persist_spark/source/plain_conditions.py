"""Converts conditions of option `where` to Spark columns, for frames whose files Spark's own reader reads. Pure plans.

Spark's reader uses the column to skip row groups and pages, and drops the other rows itself. A condition is converted only if exactly the
same rows pass in Spark and in the engine. These are comparisons of whole numbers with whole numbers and of texts with texts, null, and
their junctions, which have the logic of SQL on both sides. The condition must also be on the first field of the key. The rows are ordered
by this field, so Spark decodes little. The reader in Python handles all other conditions. It decodes faster, but takes longer to start.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
from persist_engine import Filter
from persist_engine.rows.predicate import And, Compare, In, IsNull, Not, Or, Predicate
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
#: The greatest value that Spark takes for a whole number.
_GREATEST = (1 << 63) - 1
#: Each value is a call of the JVM, and Spark's optimizer descends into each term.
_VALUES_MAX = 64


class _Inexpressible(Exception):
    """Spark might let other rows pass."""


def as_column(rule: Filter) -> Column | None:
    """`rule` over the column `key`. None when the reader in Python must apply it."""
    first = next(iter(rule.schema.key), None)
    if (
        first is None
        or rule.columns != (f"key.{first.name}",)
        or rule.passes_errors
        or _size(rule.predicate) > _VALUES_MAX
    ):
        return None
    is_text = bool(pa.types.is_string(first.type))
    if not is_text and not pa.types.is_signed_integer(first.type):
        return None
    try:
        return _column(rule.predicate, F.col("key").getField(first.name), is_text=is_text)
    except _Inexpressible:
        return None


def _column(predicate: Predicate, field: Column, *, is_text: bool) -> Column:
    """`predicate`, all of whose terms are on `field`."""
    match predicate:
        case Compare(_, op, value):
            return _COMPARISONS[op](field, _literal(value, is_text=is_text))
        case In(_, values) if values:
            return field.isin([_literal(value, is_text=is_text) for value in values])
        case IsNull(_):
            return field.isNull()
        case And(terms):
            return reduce(operator.and_, (_column(term, field, is_text=is_text) for term in terms))
        case Or(terms):
            return reduce(operator.or_, (_column(term, field, is_text=is_text) for term in terms))
        case Not(term):
            return ~_column(term, field, is_text=is_text)
    raise _Inexpressible


def _size(predicate: Predicate) -> int:
    """The number of values in the predicate. Each term counts as at least one."""
    match predicate:
        case And(terms) | Or(terms):
            return sum(map(_size, terms))
        case Not(term):
            return 1 + _size(term)
        case In(_, values):
            return len(values)
    return 1


def _literal(value: object, *, is_text: bool) -> Column:
    """The value as a literal of a type that Spark compares with the field without casting the field."""
    if is_text and isinstance(value, str):
        return F.lit(value)
    if is_text or isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise _Inexpressible
    # The bounds are checked before `int`, because a short text can stand for a number with a billion digits.
    if -_GREATEST <= value <= _GREATEST and value == int(value):
        return F.lit(int(value))
    raise _Inexpressible
