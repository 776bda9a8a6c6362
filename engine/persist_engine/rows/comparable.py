"""Single values that compare in row order: bounds in statistics, and literals in predicates.

A comparable is a Python value whose kind depends on the column type: bool; int for integers, dates (days) and timestamps (microseconds);
Decimal; str; bytes. A float is (0, number), and NaN is (1, 0), which is greater than every number. Null has no comparable.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, date, datetime, time
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

import pyarrow as pa

from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.rows.ddl import print_type

#: See the module docstring. Only values of one column can be compared.
Comparable = Any

NAN: Comparable = (1, 0.0)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The context for literals, which may have any number of digits. A rounded literal would equal values that the original does not equal.
EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
#: A literal with more digits before the point is greater than every value of every column.
_DIGITS_MAX = 60
#: Matches time text whose fraction is finer than microseconds. Python drops the excess digits.
_FINER = re.compile(r"[.,]\d{6}\d*[1-9]")


class Floor(NamedTuple):
    """The greatest value of a column's type that is not greater than a literal. `exact` is true when it equals the literal. `value` is None
    when the literal is less than all values of the type (`past` is false) or greater than all of them (`past` is true).
    """

    value: Comparable | None
    exact: bool
    past: bool = False


def comparable_bound(text: str, data_type: pa.DataType) -> Comparable:
    """Decodes a bound from statistics (rows.part_stats). Raises CorruptData when the text is not a value of the type."""
    try:
        value = json.loads(text)
        scalar_of(converted := _from_json(value, data_type), data_type)
    except (ValueError, TypeError, ArithmeticError, RecursionError, pa.ArrowException) as error:
        raise CorruptData(f"statistics: {text!r} is no bound of type {data_type}: {error}", key="stats") from error
    return converted


def _from_json(value: Any, data_type: pa.DataType) -> Comparable:
    if pa.types.is_decimal(data_type):
        return Decimal(value)
    if pa.types.is_floating(data_type):
        return _float(float(value))
    if pa.types.is_binary(data_type):
        return bytes.fromhex(value)
    return value


def scalar_of(value: Comparable, data_type: pa.DataType) -> pa.Scalar:
    """The comparable as a scalar that Arrow can compare with a column of the type. Floats of any width become float64."""
    if pa.types.is_floating(data_type):
        return pa.scalar(math.nan if value == NAN else value[1], pa.float64())
    if pa.types.is_timestamp(data_type):
        return pa.scalar(value, pa.int64()).cast(data_type)
    if pa.types.is_date32(data_type):
        return pa.scalar(value, pa.int32()).cast(data_type)
    return pa.scalar(value, data_type)


def floor_of(literal: Any, data_type: pa.DataType, column: str) -> Floor:
    """Locates `literal` among the values of `column`. Integers and decimals are compared exactly, whatever the type of the literal. A
    literal for a float column is rounded to float64. Raises InvalidUsage, which names the column and the type, when it does not fit.
    """
    try:
        found = _floor(literal, data_type)
    except (ValueError, ArithmeticError) as error:
        raise _misfit(literal, data_type, column) from error
    if found is None:
        raise _misfit(literal, data_type, column)
    return found


def _misfit(literal: Any, data_type: pa.DataType, column: str) -> InvalidUsage:
    hint = "; to find nulls, use IS NULL" if literal is None else ""
    if pa.types.is_nested(data_type):
        hint = (
            "; name a field within it" if pa.types.is_struct(data_type) else "; a condition can only say IS NULL of it"
        )
    shown = print_type(data_type)
    return InvalidUsage(f"filter on {column}: {literal!r} cannot be compared with {shown}{hint}", column=column)


def _floor(literal: Any, data_type: pa.DataType) -> Floor | None:
    """Like `floor_of`, but returns None or raises ValueError when the literal does not fit."""
    is_number = isinstance(literal, int | float | Decimal) and not isinstance(literal, bool)
    if pa.types.is_integer(data_type):
        least = -(2 ** (data_type.bit_width - 1))
        return _whole(literal, 0, least, -least - 1) if is_number else None
    if pa.types.is_decimal(data_type):
        greatest = 10**data_type.precision - 1
        return _whole(literal, data_type.scale, -greatest, greatest) if is_number else None
    if pa.types.is_floating(data_type):
        return Floor(_float(_to_float(literal)), exact=True) if is_number else None
    value: Comparable | None = None
    if pa.types.is_boolean(data_type) and isinstance(literal, bool):
        value = literal
    elif pa.types.is_string(data_type) and isinstance(literal, str):
        literal.encode()  # raises for lone surrogates, which are not valid text
        value = literal
    elif pa.types.is_binary(data_type) and isinstance(literal, bytes):
        value = literal
    elif pa.types.is_date32(data_type):
        value = _days(literal)
    elif pa.types.is_timestamp(data_type):
        value = _microseconds(literal, is_instant=data_type.tz is not None)
        is_finer = _FINER.search(literal) if isinstance(literal, str) else getattr(literal, "nanosecond", 0)
        return None if value is None else Floor(value, exact=not is_finer)
    return None if value is None else Floor(value, exact=True)


def _whole(literal: float | Decimal, scale: int, least: int, greatest: int) -> Floor | None:
    """The floor among the multiples of 10**-scale between `least` and `greatest` of them. Scale 0 gives integers."""
    # A float literal means its shortest text: 0.1, not 0.1000000000000000055.
    exact = Decimal(float.__repr__(literal)) if isinstance(literal, float) else Decimal(literal)
    if exact.is_nan():
        return None
    if exact.is_infinite() or (exact and exact.adjusted() > _DIGITS_MAX):
        return Floor(None, exact=False, past=exact > 0)
    scaled = exact.scaleb(scale, EXACT)
    unscaled = int(scaled.to_integral_value(ROUND_FLOOR))
    if not least <= unscaled <= greatest:
        return Floor(None, exact=False, past=unscaled > 0)
    value = Decimal(unscaled).scaleb(-scale, EXACT) if scale else unscaled
    return Floor(value, exact=scaled == unscaled)


def _to_float(literal: float | Decimal) -> float:
    try:
        return float(literal)
    except OverflowError:
        return math.inf if literal > 0 else -math.inf


def _float(value: float) -> Comparable:
    return NAN if math.isnan(value) else (0, value)


def _days(literal: Any) -> int | None:
    if isinstance(literal, str):
        literal = date.fromisoformat(literal)
    if not isinstance(literal, date) or isinstance(literal, datetime):
        return None
    return literal.toordinal() - _EPOCH.toordinal()


def _microseconds(literal: Any, *, is_instant: bool) -> int | None:
    """Microseconds since the epoch. An instant without a zone counts as UTC. A wall clock column accepts no zone."""
    if isinstance(literal, str):
        literal = datetime.fromisoformat(literal)
    elif isinstance(literal, date) and not isinstance(literal, datetime):
        literal = datetime.combine(literal, time())
    if not isinstance(literal, datetime) or (literal.tzinfo is not None and not is_instant):
        return None
    passed = (literal if literal.tzinfo is not None else literal.replace(tzinfo=UTC)) - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def lacks_zone(literal: object) -> bool:
    """Whether `literal` is a date or a time without a zone, so that its instant depends on one. False if it is neither."""
    if isinstance(literal, str):
        try:
            literal = datetime.fromisoformat(literal)
        except ValueError:
            return False
    return isinstance(literal, date) and getattr(literal, "tzinfo", None) is None
