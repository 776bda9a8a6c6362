"""Converts Python values into arrays of a type that a shard may hold: structs from tuples or dicts, lists from lists or tuples, maps from
dicts or pairs. No value is truncated: a value that the type cannot hold is refused, and the error names its path. Also converts arrays into
Python values, for messages and for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.rows.columns import empty_struct
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.layout import is_list, values_type

Leaf: TypeAlias = Callable[[Sequence[Any], pa.DataType], pa.Array]
"""Converts values to a type that is not nested. Raises Arrow's errors and TypeError for what does not fit."""


def array_of(
    path: str, values: Sequence[Any], kind: pa.DataType, *, may_lack: bool = False, leaf: Leaf | None = None
) -> pa.Array:
    """`values` as an array of type `kind`. With `may_lack`, a field that a dict lacks is null. `leaf` converts the values at the end of
    each path; by default, `leaf_array` does. Raises SchemaMismatch, which names what does not fit.
    """
    if pa.types.is_struct(kind):
        return struct_array(path, values, kind, may_lack=may_lack, leaf=leaf)
    if is_list(kind):
        return _list_array(path, values, kind, may_lack=may_lack, leaf=leaf)
    try:
        return (leaf or leaf_array)(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise SchemaMismatch(f"{path} does not fit {print_type(kind)}: {error}") from error


def leaf_array(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """`values` as an array of type `target`. Raises Arrow's own errors. Raises TypeError where Arrow would silently truncate (fractions of
    numbers, the time of day of dates, zones and nanoseconds of instants), and OverflowError where Arrow would make a number infinite.
    """
    if not (pa.types.is_integer(target) or pa.types.is_floating(target) or pa.types.is_temporal(target)):
        return pa.array(values, target)  # Arrow checks these types strictly
    given = pa.array(values)
    if pa.types.is_temporal(target) and _would_cut(values, target):
        raise TypeError("some of the values have a time of day, or a zone, and some do not")
    if pa.types.is_temporal(target) and any(getattr(value, "nanosecond", 0) for value in values):
        raise TypeError("some of the values have nanoseconds that are no whole microseconds")
    if given.type == target:
        return given
    if pa.types.is_integer(given.type):
        fits = pa.types.is_integer(target) or pa.types.is_floating(target) or pa.types.is_timestamp(target)
    elif pa.types.is_timestamp(given.type):
        fits = pa.types.is_timestamp(target) and (given.type.tz is None or target.tz is not None)
    elif pa.types.is_floating(given.type):
        fits = pa.types.is_floating(target)
    else:
        fits = pa.types.is_null(given.type)
    if not fits:
        raise TypeError(f"the values are {print_type(given.type)}")
    fitted = pa.array(values, target)
    if target == pa.float32() and pc.any(pc.xor(pc.is_inf(fitted), pc.is_inf(given))).as_py():
        raise OverflowError("a value is too large")
    return fitted


def _would_cut(values: Sequence[Any], target: pa.DataType) -> bool:
    """Whether `target` would truncate some value. Arrow infers the type from the first value, and does not check later ones."""
    if pa.types.is_date(target):
        return any(isinstance(value, datetime) for value in values)
    return target.tz is None and any(isinstance(value, datetime) and value.tzinfo is not None for value in values)


def struct_array(
    path: str, values: Sequence[Any], kind: pa.DataType, *, may_lack: bool = False, leaf: Leaf | None = None
) -> pa.Array:
    """A struct array from tuples (in field order) or dicts (by name). None is null. The value of a struct without fields is ()."""
    if kind.num_fields == 0:
        if any(values):
            raise SchemaMismatch(f"{path} holds values, the shard's schema has none: expected (), {{}} or None")
        return empty_struct(len(values))
    fields = list(kind)
    absent = [value is None for value in values]
    split = _columns_of(path, values, [field.name for field in fields], may_lack=may_lack)
    columns = [
        array_of(f"{path}.{field.name}", column, field.type, may_lack=may_lack, leaf=leaf)
        for field, column in zip(fields, split, strict=True)
    ]
    return pa.StructArray.from_arrays(columns, fields=fields, mask=pa.array(absent) if any(absent) else None)


def python_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """The rows as dicts, with maps as dicts, too. Raises InvalidUsage, which names the column, for a date or an instant in a year that
    Python does not have.
    """
    try:
        found: list[dict[str, Any]] = rows.to_pylist(maps_as_pydicts="strict")
    except (OverflowError, ValueError):
        for name in rows.column_names:
            python_column(name, rows.column(name))
        raise
    return found


def python_column(name: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of one column, as `python_rows` returns them."""
    try:
        found: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    except (OverflowError, ValueError) as error:
        raise InvalidUsage(
            f"column {name} has a date or an instant before the year 1 or after 9999, which Python's datetime does not have: "
            "read it as Arrow (to_arrow) or polars, or leave it out (columns=)"
        ) from error
    return found


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values as Python objects, with maps as dicts. A date or an instant in a year that Python does not have becomes a text that says
    so and shows its number.
    """
    try:
        found: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    except (OverflowError, ValueError):
        return [python_value(each) for each in column]
    return found


def python_value(scalar: pa.Scalar) -> Any:
    """One value, as `python_values` returns it."""
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        if isinstance(scalar, pa.StructScalar):
            return {field.name: python_value(scalar[field.name]) for field in scalar.type}
        if isinstance(scalar, pa.ListScalar):
            return [python_value(each) for each in scalar.values]
        return f"<value out of range: {scalar.value}>"  # not Arrow's own text, which shows a wrong year


def _list_array(path: str, values: Sequence[Any], kind: pa.DataType, *, may_lack: bool, leaf: Leaf | None) -> pa.Array:
    is_map = pa.types.is_map(kind)
    rows = [_elements(path, value, is_map=is_map) for value in values]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    absent = [value is None for value in values]
    valid = pa.py_buffer(np.packbits(np.logical_not(absent), bitorder="little")) if any(absent) else None
    within = array_of(f"{path}[]", list(chain.from_iterable(rows)), values_type(kind), may_lack=may_lack, leaf=leaf)
    if is_map and within.field(0).null_count:
        raise SchemaMismatch(f"{path}: a map has a key that is null")
    return pa.Array.from_buffers(kind, len(rows), [valid, pa.py_buffer(offsets)], children=[within])


def _elements(path: str, value: Any, *, is_map: bool) -> Sequence[Any]:
    if value is None:
        return ()
    if is_map and isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | np.ndarray):
        return list(value)
    wanted = "a dict or a list of pairs" if is_map else "a list or a tuple"
    raise SchemaMismatch(f"{path} is a {type(value).__name__}; expected {wanted}")


def _columns_of(path: str, values: Sequence[Any], names: list[str], *, may_lack: bool) -> list[tuple[Any, ...]]:
    nothing = (None,) * len(names)
    wanted = set(names)
    rows: list[tuple[Any, ...]] = []
    for value in values:
        if isinstance(value, Mapping):
            if value.keys() - wanted or (not may_lack and value.keys() != wanted):
                raise SchemaMismatch(f"{path} has the fields {', '.join(map(str, value))}; expected {', '.join(names)}")
            rows.append(tuple(value.get(name) for name in names))
        elif isinstance(value, (tuple, list)):
            if len(value) != len(names):
                raise SchemaMismatch(f"{path} has {len(value)} fields; expected {len(names)}: {', '.join(names)}")
            rows.append(tuple(value))
        elif value is None:
            rows.append(nothing)
        else:
            raise SchemaMismatch(f"{path} is a {type(value).__name__}; expected a tuple or dict of {', '.join(names)}")
    return list(zip(*rows, strict=True)) or [()] * len(names)
