"""A collection that may be in error, as one collection: rows, or messages that say why there are none (ADR 6). Pure.

    schema         key (id BIGINT NOT NULL)          val (name STRING)
    with errors    key (id BIGINT, err STRING)       val (name STRING)      every field may be null

A row has `err` null; an error has the message in `err` and null in every field of the user. So both lie in one shard,
are appended in one step, and share their frontiers; statistics of the user's columns stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.rows.columns import empty_struct
from persist_engine.rows.schema import Schema

ERR = "err"
"""The column. A filter that does not name it keeps errors (codec.filter), so its statistics go last: without them no part
can be skipped (spec 15.7).
"""

Errors: TypeAlias = pa.Table | Iterable[tuple[str, int, int]]
"""(message, time, diff), or a table of columns err, time, diff."""


def with_errors(schema: Schema) -> Schema:
    """The schema of a shard that holds rows of `schema` and errors. InvalidUsage when a key is called `err`."""
    if ERR in schema.key.names:
        raise InvalidUsage(f"field key.{ERR}: the name is taken by the errors of a collection")
    key = [pa.field(field.name, field.type) for field in schema.key]
    val = [pa.field(field.name, field.type) for field in schema.val]
    return Schema(pa.schema([*key, pa.field(ERR, pa.string())]), pa.schema(val))


def holds_errors(schema: Schema) -> bool:
    """Whether `with_errors` made it, or might have: errors are then among the rows."""
    fields = [*schema.key, *schema.val]
    return schema.key.names[-1:] == [ERR] and schema.key.types[-1] == pa.string() and all(f.nullable for f in fields)


def tag_rows(updates: pa.Table, tagged: Schema) -> pa.Table:
    """Updates of rows as updates of the tagged collection."""
    key = updates.column("key").combine_chunks()
    val = updates.column("val").combine_chunks()
    columns = [*key.flatten(), pa.nulls(updates.num_rows, pa.string())]
    return _table(tagged, columns, val.flatten(), updates.column("time"), updates.column("diff"))


def tag_errors(errors: Errors, tagged: Schema) -> pa.Table:
    """Updates of errors as updates of the tagged collection. SchemaMismatch, InvalidUsage name what does not fit."""
    table = errors if isinstance(errors, pa.Table) else _error_table(errors)
    if table.column_names != [ERR, "time", "diff"]:
        raise SchemaMismatch(f"errors have the columns {', '.join(table.column_names)}; expected err, time, diff")
    if any(table.column(name).null_count for name in table.column_names):
        raise InvalidUsage("an error has a message, a time and a diff, none of them null")
    rows = table.num_rows
    key = [pa.nulls(rows, field.type) for field in tagged.key][:-1]
    val = [pa.nulls(rows, field.type) for field in tagged.val]
    try:
        message = table.column(ERR).cast(pa.string()).combine_chunks()
        time, diff = table.column("time").cast(pa.int64()), table.column("diff").cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(f"errors are not (string, int64, int64): {error}") from error
    return _table(tagged, [*key, message], val, time, diff)


def split_errors(updates: pa.Table, schema: Schema) -> tuple[pa.Table, pa.Table]:
    """Inverse: the updates of rows (of `schema`) and of errors (err, time, diff) among those of the tagged collection."""
    err = pc.struct_field(updates.column("key"), ERR)
    is_row = err.is_null()
    rows, errors = updates.filter(is_row), updates.filter(pc.invert(is_row))
    key = rows.column("key").combine_chunks().flatten()[:-1]
    val = rows.column("val").combine_chunks().flatten()
    messages = pc.struct_field(errors.column("key"), ERR)
    return (
        _table(schema, key, val, rows.column("time"), rows.column("diff")),
        pa.table({ERR: messages, "time": errors.column("time"), "diff": errors.column("diff")}),
    )


def _error_table(errors: Iterable[tuple[str, int, int]]) -> pa.Table:
    try:
        messages, times, diffs = zip(*errors, strict=True) if (errors := list(errors)) else ((), (), ())
        columns = [pa.array(messages, pa.string()), pa.array(times, pa.int64()), pa.array(diffs, pa.int64())]
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidUsage(f"an error is not (message, time, diff): {error}") from error
    return pa.table(columns, names=[ERR, "time", "diff"])


def _table(
    schema: Schema, key: list[pa.Array], val: list[pa.Array], time: pa.ChunkedArray, diff: pa.ChunkedArray
) -> pa.Table:
    rows = len(time)
    sides = [_struct(schema.key_type, key, rows), _struct(schema.val_type, val, rows)]
    return pa.table([*sides, time, diff], schema=schema.updates_schema)


def _struct(target: pa.StructType, children: list[pa.Array], rows: int) -> pa.Array:
    return pa.StructArray.from_arrays(children, fields=list(target)) if target.num_fields else empty_struct(rows)
