"""Schemas of tables: from DDL, from Arrow schemas, inferred from a frame, and altered.

This module owns what the types of a frame become in a table. It knows no shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.ddl import parse_ddl
from persist_engine.rows.nested.layout import is_any_list, list_of, map_of
from persist_engine.rows.schema import HELD_AS, Schema
from persist_engine.table.columns import NANOSECONDS_HINT, Coerce, Columns, holds_nanoseconds
from persist_engine.table.frames import Frame, streamed, table_of

Fields: TypeAlias = str | pa.Schema
"""Columns with their types: DDL such as `id BIGINT, name STRING`, or a pyarrow schema."""

#: The greatest number of digits of a table's decimals.
DIGITS_MAX = 38


def declared(key: Fields, value: Fields) -> Schema:
    """The schema with these columns. Raises InvalidUsage, which names the side and the field, if no table can hold them."""
    return Schema(_fields(key, "key"), _fields(value, "value"))


def inferred(like: Frame | pa.Schema, key: str | Sequence[str], coerce: Coerce | None = None) -> Schema:
    """The schema of a frame, or of a pyarrow schema, with the columns `key` as the key. A type that no table holds becomes the next type
    that holds its values: large text, views and dictionaries become text, unsigned numbers wider ones, instants of coarser units
    microseconds and, with `coerce`, so do nanoseconds. Reads no rows of a stream.

    Raises InvalidUsage, which names a column of the key that does not exist, and a column of any other type.
    """
    names = [name.strip() for name in key.split(",")] if isinstance(key, str) else list(key)
    schema = like if isinstance(like, pa.Schema) else _shown(like)
    missing = [str(name) for name in names if name not in schema.names] or [
        str(each) for each in names if names.count(each) > 1
    ]
    if missing or not names:
        raise InvalidUsage(
            f"key {', '.join(missing) or '()'} is no column, or is there twice; the columns are {', '.join(schema.names)}"
        )
    fine = [field.name for field in schema if holds_nanoseconds(field.type)]
    if fine and coerce is None:
        raise InvalidUsage(f"columns {', '.join(fine)} have nanoseconds, and tables microseconds: {NANOSECONDS_HINT}")
    fields = {field.name: pa.field(field.name, _stored(field), nullable=field.nullable) for field in schema}
    return Schema(
        pa.schema([fields[name] for name in names]),
        pa.schema([fields[name] for name in schema.names if name not in names]),
    )


def altered(schema: Schema, *, add: Fields | None, widen: Mapping[str, str] | None) -> Schema:
    """`schema` with more columns in the value, and with wider numbers. Raises InvalidUsage for a column to add that exists, and for one to
    widen that does not.
    """
    columns = Columns(schema)
    val = {field.name: field for field in schema.val}
    for field in () if add is None else _fields(add, "add"):
        if field.name in columns.places:
            raise InvalidUsage(f"add: there is a column {field.name} already")
        val[field.name] = field
    for name, kind in ({} if widen is None else widen).items():
        if name not in columns.places or not columns.places[name].startswith("val."):
            raise InvalidUsage(
                f"widen: {name} is no column of the value; those are {', '.join(schema.val.names) or 'none'}"
            )
        field = columns.arrow.field(name)
        (wider,) = parse_ddl(f"wider {kind}") if isinstance(kind, str) else (pa.field("wider", kind),)
        val[columns.places[name].removeprefix("val.")] = field.with_type(wider.type).with_name(
            columns.places[name].removeprefix("val.")
        )
    return Schema(schema.key, pa.schema(list(val.values())))


def _shown(like: Frame) -> pa.Schema:
    """The columns of a frame; of a stream, without reading its rows."""
    stream = streamed(like)
    if stream is None:
        return table_of(like).schema
    if not isinstance(stream, pa.RecordBatchReader):
        raise InvalidUsage(
            "like: an iterator gives its tables once, so it cannot show its columns: give one of its tables"
        )
    return stream.schema


def _fields(given: Any, name: str) -> pa.Schema:
    if isinstance(given, pa.Schema):
        return given
    if not isinstance(given, str):
        raise InvalidUsage(
            f"{name} must be DDL such as 'id BIGINT, name STRING', or a pyarrow schema, not a {type(given).__name__}"
        )
    try:
        return parse_ddl(given)
    except InvalidUsage as error:
        raise InvalidUsage(f"{name} {error}", **error.detail) from error


def _stored(field: pa.Field) -> pa.DataType:
    kind = field.type
    if pa.types.is_dictionary(kind):
        return _stored(field.with_type(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if pa.types.is_null(kind):
        raise InvalidUsage(
            f"column {field.name} holds only nulls, so its type is not known: create the table with key= and value="
        )
    if pa.types.is_decimal(kind) and kind.precision <= DIGITS_MAX and kind.scale >= 0:
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _stored(each), nullable=each.nullable) for each in kind])
    if pa.types.is_map(kind):
        return map_of(_stored(kind.key_field), _within(f"{field.name}.value", kind.item_type))
    if is_any_list(kind):
        return list_of(_within(f"{field.name}.element", kind.value_type))
    return HELD_AS.get(kind, kind)


def _within(name: str, kind: pa.DataType) -> pa.DataType:
    """The table's type for values within a list or a map, where nothing is NOT NULL."""
    stored = _stored(pa.field(name, kind))
    if not pa.types.is_struct(stored):
        return stored
    return pa.struct([pa.field(each.name, _within(f"{name}.{each.name}", each.type)) for each in stored])
