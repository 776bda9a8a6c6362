"""A condition that every row with one of some given keys fulfils. With it, a read skips the parts and row groups that have none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.errors_column import ERR, holds_errors
from persist_engine.rows.predicate import And, Compare, In, IsNull, Or, Predicate
from persist_engine.rows.schema import Schema

#: A condition lists at most this many values. For more values it has their bounds instead.
VALUES_MAX = 256


def condition_of(keys: pa.ChunkedArray, schema: Schema) -> Predicate | None:
    """The condition on the first field of the key, and on each further field if all fields before it have one value. None when there is no
    useful condition. `keys` holds at least one struct.
    """
    terms: list[Predicate] = []
    has_errors = holds_errors(schema)
    for name, values in _leaves("key", schema.key, keys):
        if has_errors and name == f"key.{ERR}":
            continue  # a condition that does not name the error field lets all errors pass (rows.filter)
        term = _term(name, values)
        if term is None:
            continue
        terms.append(term)
        # Among many values, the first ones usually differ, so look at these first.
        if len(values.slice(0, VALUES_MAX).unique()) > 1 or len(values.unique()) > 1:
            break
    if not terms:
        return None
    return terms[0] if len(terms) == 1 else And(tuple(terms))


def _leaves(path: str, fields: Iterable[pa.Field], column: pa.ChunkedArray) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The fields below `column` by name, most significant first; null where a struct around them is null. Leaves out fields whose name
    would look like a path in a condition.
    """
    for field, values in zip(fields, column.flatten(), strict=True):
        name = f"{path}.{field.name}"
        if "." in field.name:
            continue
        if pa.types.is_struct(field.type):
            yield from _leaves(name, list(field.type), values)
        else:
            yield name, values


def _term(name: str, values: pa.ChunkedArray) -> Predicate | None:
    there = values.drop_null()
    if not len(there):
        return IsNull(name)
    within = _listed(name, there) or _between(name, there)
    return within if within is None or not values.null_count else Or((within, IsNull(name)))


def _listed(name: str, values: pa.ChunkedArray) -> Predicate | None:
    """The condition that lists a few values. None for many values, and for floats, because equal floats may have different bits."""
    if len(values) > VALUES_MAX or pa.types.is_floating(values.type):
        return None
    found = [_known(value) for value in values.unique()]
    return None if None in found else In(name, tuple(found))


def _between(name: str, values: pa.ChunkedArray) -> Predicate | None:
    """The condition with the bounds of the values, as far as Python can represent them. NaN is greater than all numbers."""
    has_greatest = True
    if pa.types.is_floating(values.type):
        is_nan = pc.is_nan(values)
        has_greatest = not pc.any(is_nan).as_py()
        values = values.filter(pc.invert(is_nan))
        if not len(values):
            return Compare(name, ">=", float("nan"))
    ends = pc.min_max(values)
    least, greatest = _known(ends["min"]), _known(ends["max"]) if has_greatest else None
    terms = ([] if least is None else [Compare(name, ">=", least)]) + (
        [] if greatest is None else [Compare(name, "<=", greatest)]
    )
    return And(tuple(terms)) if terms else None


def _known(value: pa.Scalar) -> Any:
    """`value` in Python. None for a date that Python cannot represent: before the year 1, or after 9999."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return None
