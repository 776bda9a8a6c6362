"""Converts updates from callers into tables of the shard's updates schema, or refuses them and names the cause.

Accepts Arrow tables, record batches, record batch readers, and iterables of `((key, val), time, diff)` with tuples or dicts. Columns are
matched by name. Types must be those of the schema. Other representations of the same values (large or view strings, dictionaries, other
units or zones of an instant, integers of another width for time and diff) are converted, but never with a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.rows.columns import empty_struct, field_of
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.entries import KeyProblem, sorted_entries
from persist_engine.rows.nested.layout import as_plain_list, holds_lists, is_any_list, is_list, mapped, values_type
from persist_engine.rows.nested.values import leaf_array, struct_array
from persist_engine.rows.schema import Schema

#: Python rows are gathered into tables of this many rows.
ROWS_PER_TABLE = 65_536
#: Up to this many rows, Python finds bounds faster than numpy.
_FEW = 64
_COLUMNS = ("key", "val", "time", "diff")

Rows = Iterable[tuple[tuple[Any, Any], int, int]]
#: What callers may pass. Arrow's types have no stubs, so a type checker sees only the iterable.
Updates: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | Rows


def normalise(updates: Updates, schema: Schema) -> Iterator[pa.Table]:
    """Non-empty tables of exactly `schema.updates_schema` with the rows of `updates` in their order, lazily.

    Raises SchemaMismatch, which names every column that differs, holds a null where the schema forbids it, or is not valid Arrow data (text
    that is not UTF-8). Raises InvalidUsage for times and diffs that are null, not integers, outside int64, or (times) negative. Both may be
    raised after earlier tables were yielded.
    """
    if isinstance(updates, pa.Table):
        tables: Iterable[pa.Table] = map(_sound, [updates])
    elif isinstance(updates, pa.RecordBatch):
        tables = map(_sound, [pa.Table.from_batches([updates])])
    elif isinstance(updates, pa.RecordBatchReader):
        tables = (_sound(pa.Table.from_batches([batch])) for batch in updates)
    elif isinstance(updates, Iterable):
        tables = _from_rows(updates, schema)
    else:
        raise InvalidUsage(
            f"updates are a {type(updates).__name__}; expected an Arrow table, batch or reader, "
            "or ((key, val), time, diff) rows"
        )
    for table in tables:
        conforming = table if _conforms(table, schema) else _conforming(table, schema)
        if conforming.num_rows:
            yield conforming


def _sound(table: pa.Table) -> pa.Table:
    """Returns `table` after a check that its buffers are valid for its types. No later step checks this, so readers would find the
    damage.
    """
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        paths = [path for name in table.column_names for path in _unsound(table.column(name), name)]
        raise SchemaMismatch(
            f"{', '.join(paths)}: not valid Arrow data: {error}", requested=str(table.schema), actual=tuple(paths)
        ) from error
    return table


def _unsound(column: pa.ChunkedArray, path: str) -> list[str]:
    """The paths of the column's innermost fields that do not validate."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        is_struct = pa.types.is_struct(column.type)
        within = zip(column.flatten(), column.type, strict=True) if is_struct else ()
        return [path_ for values, field in within for path_ in _unsound(values, f"{path}.{field.name}")] or [path]
    return []


def time_bounds(table: pa.Table) -> tuple[int, int]:
    """The least and the greatest time of a table that is not empty."""
    if table.num_rows <= _FEW:
        few: list[int] = table.column("time").to_pylist()
        return min(few), max(few)
    times = table.column("time").to_numpy()
    return int(times.min()), int(times.max())


def _conforms(table: pa.Table, schema: Schema) -> bool:
    """Whether `table` is already what `_conforming` would return. False when in doubt: then `_conforming` examines the table and names what
    is wrong.
    """
    required = schema.required_fields
    if required is None or not table.schema.equals(schema.updates_schema, check_metadata=True):
        return False
    if any(column.null_count for column in table.columns):
        return False
    if any(chunk.field(index).null_count for side, index in required for chunk in table.column(side).chunks):
        return False
    return table.num_rows == 0 or time_bounds(table)[0] >= 0


def _conforming(table: pa.Table, schema: Schema) -> pa.Table:
    has_val = len(schema.val) > 0
    unknown = [name for name in table.column_names if name not in _COLUMNS]
    missing = [name for name in _COLUMNS if name not in table.column_names and (name != "val" or has_val)]
    if unknown or missing or len(set(table.column_names)) != table.num_columns:
        raise SchemaMismatch(
            f"updates have the columns {', '.join(table.column_names) or 'none'}; expected key, val, time, diff",
            requested=tuple(table.column_names),
            actual=_COLUMNS,
        )
    problems: list[str] = []
    key = _side(table, "key", schema.key_type, problems)
    val = (
        _side(table, "val", schema.val_type, problems) if has_val else pa.chunked_array([empty_struct(table.num_rows)])
    )
    if not has_val and "val" in table.column_names:
        problems += _unexpected(table.column("val").type)
    if problems:
        raise SchemaMismatch("; ".join(problems), requested=str(table.schema), actual=repr(schema))
    return pa.table([key, val, _whole(table, "time"), _whole(table, "diff")], schema=schema.updates_schema)


def _unexpected(val_type: pa.DataType) -> list[str]:
    if pa.types.is_null(val_type):
        return []
    if not pa.types.is_struct(val_type):
        return [f"val is {print_type(val_type)}, the shard's schema has no values"]
    return [f"val.{child.name} is not in the shard's schema" for child in val_type]


def _side(table: pa.Table, name: str, target: pa.DataType, problems: list[str]) -> pa.ChunkedArray:
    column = table.column(name)
    if column.null_count:
        problems.append(f"{name} is null in {column.null_count} rows")
    field = pa.field(name, target, nullable=True)
    chunks = [_conform(chunk, field, name, problems) for chunk in (column.chunks or [pa.array([], column.type)])]
    if problems:
        problems[:] = dict.fromkeys(problems)  # several chunks may have the same problem
        return pa.chunked_array([], target)
    return pa.chunked_array(chunks, target)


def _conform(array: pa.Array, field: pa.Field, path: str, problems: list[str]) -> pa.Array:
    """Converts `array` to `field`. Adds each obstacle to `problems`; then the returned array is meaningless."""
    if pa.types.is_struct(field.type):
        return _conform_struct(array, field, path, problems)
    if is_list(field.type):
        return _conform_list(array, field, path, problems)
    if array.type == field.type:
        return array
    if _same_values(array.type, field.type):
        try:
            return array.cast(field.type)
        except pa.ArrowInvalid as error:
            problems.append(f"{path} is {print_type(array.type)} and does not fit {print_type(field.type)}: {error}")
            return array
    problems.append(f"{path} is {print_type(array.type)}, the shard's is {print_type(field.type)}")
    return array


def _conform_struct(array: pa.Array, field: pa.Field, path: str, problems: list[str]) -> pa.Array:
    if not pa.types.is_struct(array.type):
        problems.append(f"{path} is {print_type(array.type)}, the shard's is {print_type(field.type)}")
        return array
    given = [child.name for child in array.type]
    wanted = {child.name for child in field.type}
    problems += [f"{path}.{name} is not in the shard's schema" for name in given if name not in wanted]
    problems += [f"{path}.{name} is given twice" for name in dict.fromkeys(given) if given.count(name) > 1]
    absent = array.is_null() if array.null_count else None
    children: list[pa.Array] = []
    for child in field.type:
        if given.count(child.name) != 1:
            if child.name not in given:
                problems.append(f"{path}.{child.name} is missing")
            continue
        # Count nulls after the conversion: a dictionary may have nulls among its values, which its null_count does not include.
        values = _conform(field_of(array, given.index(child.name), child.type), child, f"{path}.{child.name}", problems)
        children.append(values)
        if not child.nullable and values.null_count:
            nulls = values.is_null() if absent is None else pc.and_not(values.is_null(), absent)
            if count := pc.sum(nulls).as_py():
                problems.append(f"{path}.{child.name} is NOT NULL and null in {count} rows")
    if problems or (array.type == field.type and not holds_lists(field.type)):
        return array
    return pa.StructArray.from_arrays(children, fields=list(field.type), mask=absent)


def _conform_list(array: pa.Array, field: pa.Field, path: str, problems: list[str]) -> pa.Array:
    """Converts a list or a map. A map may come as a list of structs of key and value. The entries of maps are sorted."""
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), field.type)
    kind, given = field.type, array.type
    entry = values_type(kind)
    fits = is_any_list(given) and (pa.types.is_map(given) <= pa.types.is_map(kind))
    if fits and pa.types.is_map(kind) and not pa.types.is_map(given):
        fits = pa.types.is_struct(given.value_type) and [each.name for each in given.value_type] == ["key", "value"]
    if not fits:
        problems.append(f"{path} is {print_type(given)}, the shard's is {print_type(kind)}")
        return array
    within = pa.field("element", entry)
    before = len(problems)
    try:
        out = mapped(as_plain_list(array), kind, lambda values: _conform(values, within, f"{path}[]", problems))
        return sorted_entries(out) if pa.types.is_map(kind) and len(problems) == before else out
    except (pa.ArrowInvalid, KeyProblem) as error:
        problems.append(f"{path}: {error}")
        return array


def _same_values(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether `given` is another representation of the values of `wanted`. A safe cast then loses nothing or fails."""
    if pa.types.is_null(given):
        return True
    if pa.types.is_dictionary(given):
        return given.value_type == wanted or _same_values(given.value_type, wanted)
    if pa.types.is_string(wanted):
        return bool(pa.types.is_large_string(given) or pa.types.is_string_view(given))
    if pa.types.is_binary(wanted):
        return bool(
            pa.types.is_large_binary(given) or pa.types.is_binary_view(given) or pa.types.is_fixed_size_binary(given)
        )
    if pa.types.is_timestamp(wanted):
        return bool(pa.types.is_timestamp(given)) and (given.tz is None) == (wanted.tz is None)
    return bool(pa.types.is_date32(wanted) and pa.types.is_date64(given))


def _whole(table: pa.Table, name: str) -> pa.ChunkedArray:
    column = table.column(name)
    if column.null_count:
        raise InvalidUsage(f"{name} is null in {column.null_count} rows")
    if not (pa.types.is_integer(column.type) or (pa.types.is_null(column.type) and not len(column))):
        raise InvalidUsage(f"{name} is {column.type}, expected int64")
    try:
        whole = column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise InvalidUsage(f"{name} does not fit int64: {error}") from error
    if name == "time" and len(whole) and (least := int(whole.to_numpy().min())) < 0:
        raise InvalidUsage(f"time {least} is negative")
    return whole


def _from_rows(rows: Rows, schema: Schema) -> Iterator[pa.Table]:
    """Python rows in tables of bounded size. Each field becomes a column; Arrow checks the types."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, ROWS_PER_TABLE)):
        try:
            pairs, times, diffs = zip(*chunk, strict=True)
            keys, vals = zip(*pairs, strict=True)
        except (TypeError, ValueError) as error:
            raise InvalidUsage(f"a row is not ((key, val), time, diff): {error}") from error
        columns = [struct_array("key", keys, schema.key_type), struct_array("val", vals, schema.val_type)]
        yield pa.table([*columns, _ints_of("time", times), _ints_of("diff", diffs)], names=list(_COLUMNS))


def _ints_of(name: str, values: tuple[Any, ...]) -> pa.Array:
    try:
        return leaf_array(values, pa.int64())
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidUsage(f"{name} is not a whole number in int64: {error}") from error
