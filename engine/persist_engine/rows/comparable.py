"""Single values that compare as rows are ordered: bounds in statistics, and the literals that users compare columns with.

A comparable is a Python value of one kind per column type: bool; int (whole numbers, days of dates, microseconds of
timestamps); Decimal; str; bytes; and for floats (0, number) or (1, 0) for NaN, which lies past all numbers. Null has none.
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

#: See the module's head. Only values of one column compare.
Comparable = Any

NAN: Comparable = (1, 0.0)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Literals have any number of digits: one that were rounded would be equal to values that it is not.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
#: Literals of more digits before the point are past every column.
_DIGITS_MAX = 60
#: In the text of a time: a fraction that microseconds do not hold, which Python leaves out.
_FINER = re.compile(r"[.,]\d{6}\d*[1-9]")


class Floor(NamedTuple):
    """The greatest value of a column's type that is not past a literal; `exact`: it equals the literal. `value` is None
    where there is none: the literal lies before (`past` false) or past all values of the type.
    """

    value: Comparable | None
    exact: bool
    past: bool = False


def comparable_bound(text: str, data_type: pa.DataType) -> Comparable:
    """A bound as statistics hold it (codec.part_stats); CorruptData when it is none of the type's."""
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
    """The comparable as Arrow compares it with a column of the type: floats of any width as float64."""
    if pa.types.is_floating(data_type):
        return pa.scalar(math.nan if value == NAN else value[1], pa.float64())
    if pa.types.is_timestamp(data_type):
        return pa.scalar(value, pa.int64()).cast(data_type)
    if pa.types.is_date32(data_type):
        return pa.scalar(value, pa.int32()).cast(data_type)
    return pa.scalar(value, data_type)


def floor_of(literal: Any, data_type: pa.DataType, column: str) -> Floor:
    """Where `literal` lies among the values of `column`. Whole numbers and decimals are compared exactly, whatever the
    literal's type; one for a float column is rounded to float64. InvalidUsage names the column and the type.
    """
    try:
        found = _floor(literal, data_type)
    except (ValueError, ArithmeticError) as error:
        raise _misfit(literal, data_type, column) from error
    if found is None:
        raise _misfit(literal, data_type, column)
    return found


def _misfit(literal: Any, data_type: pa.DataType, column: str) -> InvalidUsage:
    hint = "; ask for nulls with IS NULL" if literal is None else ""
    return InvalidUsage(f"filter on {column}: {literal!r} is no value to compare {data_type} with{hint}", column=column)


def _floor(literal: Any, data_type: pa.DataType) -> Floor | None:
    """As `floor_of`; None or a ValueError for what does not fit."""
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
        literal.encode()  # what is no text at all has no place among texts
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
    """Among multiples of 10**-scale from `least` to `greatest` of them; scale 0 gives integers."""
    # The shortest text of a float is what its author meant: 0.1, not 0.1000000000000000055.
    exact = Decimal(float.__repr__(literal)) if isinstance(literal, float) else Decimal(literal)
    if exact.is_nan():
        return None
    if exact.is_infinite() or (exact and exact.adjusted() > _DIGITS_MAX):
        return Floor(None, exact=False, past=exact > 0)
    scaled = exact.scaleb(scale, _EXACT)
    unscaled = int(scaled.to_integral_value(ROUND_FLOOR))
    if not least <= unscaled <= greatest:
        return Floor(None, exact=False, past=unscaled > 0)
    value = Decimal(unscaled).scaleb(-scale, _EXACT) if scale else unscaled
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
    """Since the epoch. An instant without a zone is taken as UTC; a wall clock has none."""
    if isinstance(literal, str):
        literal = datetime.fromisoformat(literal)
    elif isinstance(literal, date) and not isinstance(literal, datetime):
        literal = datetime.combine(literal, time())
    if not isinstance(literal, datetime) or (literal.tzinfo is not None and not is_instant):
        return None
    passed = (literal if literal.tzinfo is not None else literal.replace(tzinfo=UTC)) - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
