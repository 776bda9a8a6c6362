"""Rows and errors in one collection: an error is a message that says why the rows are missing (ADR 6). Pure.

    schema         key (id BIGINT NOT NULL)          val (name STRING)
    with errors    key (id BIGINT, err STRING)       val (name STRING)      every field may be null

A row has a null `err`. An error has its message in `err`, and null in every field of the user. Both are in one shard, are appended in one
step and share its frontiers. The statistics of the user's columns do not change.
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
"""The name of the errors column. A filter that does not name it lets errors pass (rows.filter). Its statistics are therefore trimmed last:
without them no part can be skipped (spec 15.7).
"""

Errors: TypeAlias = pa.Table | Iterable[tuple[str, int, int]]
"""(message, time, diff) tuples, or a table with the columns err, time, diff."""


def with_errors(schema: Schema) -> Schema:
    """The schema of a shard that holds rows of `schema` and errors. Raises InvalidUsage when a key field has the name `err`."""
    if ERR in schema.key.names:
        raise InvalidUsage(f"field key.{ERR}: this name is reserved for the errors of a collection; rename the field")
    key = [pa.field(field.name, field.type) for field in schema.key]
    val = [pa.field(field.name, field.type) for field in schema.val]
    return Schema(pa.schema([*key, pa.field(ERR, pa.string())]), pa.schema(val))


def holds_errors(schema: Schema) -> bool:
    """Whether the schema has the shape that `with_errors` gives. Its collection may then hold errors among the rows."""
    fields = [*schema.key, *schema.val]
    return schema.key.names[-1:] == [ERR] and schema.key.types[-1] == pa.string() and all(f.nullable for f in fields)


def without_errors(schema: Schema) -> Schema:
    """The schema of the rows in a shard that may hold errors: its fields without `err`. Raises InvalidUsage when it cannot hold errors."""
    if not holds_errors(schema):
        raise InvalidUsage(
            f"the shard cannot hold errors: its key must end with the column {ERR} STRING, and no column may be NOT NULL; "
            f"its schema is {schema.key_ddl} -> {schema.val_ddl or 'no value'}"
        )
    return Schema(pa.schema([*schema.key][:-1]), schema.val)


def tag_rows(updates: pa.Table, tagged: Schema) -> pa.Table:
    """Turns updates of rows into updates of the tagged collection."""
    key = updates.column("key").combine_chunks()
    val = updates.column("val").combine_chunks()
    columns = [*key.flatten(), pa.nulls(updates.num_rows, pa.string())]
    return _table(tagged, columns, val.flatten(), updates.column("time"), updates.column("diff"))


def tag_errors(errors: Errors, tagged: Schema) -> pa.Table:
    """Turns updates of errors into updates of the tagged collection. Raises SchemaMismatch and InvalidUsage, which name what does not
    fit.
    """
    table = errors if isinstance(errors, pa.Table) else _error_table(errors)
    if table.column_names != [ERR, "time", "diff"]:
        raise SchemaMismatch(f"errors have the columns {', '.join(table.column_names)}; expected err, time, diff")
    if any(table.column(name).null_count for name in table.column_names):
        raise InvalidUsage("an error has a message, a time and a diff; none of them may be null")
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
    """Inverse of tagging: splits updates of the tagged collection into updates of rows (of `schema`) and of errors (err, time, diff)."""
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
