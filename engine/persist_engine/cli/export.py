"""Writers of record batches: a table on a terminal, tab-separated text elsewhere, Arrow IPC, Parquet, CSV and JSON lines. A file
appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from persist_engine.base.env import system_random_bytes
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.cli.output import print_rows
from persist_engine.rows.columns import storable
from persist_engine.rows.nested.layout import ListColumn, is_list, list_of, map_of, values_type
from persist_engine.rows.nested.values import python_value, python_values
from persist_engine.storage.directories import sync_directory

Write = Callable[[pa.RecordBatch], None]

#: Characters that would end a cell or a row of text, and the backslash that escapes them.
_ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_NULL = "\\N"
#: Arrow writes this in place of a date, or of a time without a zone, whose year its text cannot express.
_OUT_OF_RANGE = "<value out of range"


def flattened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the collection: key fields, then value fields. A row whose diff is n comes n times. A name that is in both gets the prefix
    `key.` or `val.`.

    Raises InvariantViolated when the diff of a row is negative: the writer retracted a row that was not there.
    """
    diffs = batch.column("diff").to_numpy(zero_copy_only=False)
    if (diffs < 0).any():
        at = int(np.argmax(diffs < 0))
        row = {name: python_value(batch.column(name)[at]) for name in ("key", "val", "diff")}
        raise InvariantViolated(f"the collection holds a row a negative number of times: {row}; see --updates")
    flat = _side_by_side(batch)
    return flat if (diffs == 1).all() else flat.take(pa.array(np.repeat(np.arange(len(diffs)), diffs)))


def flattened_changes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Changes as rows: the columns `_time` and `_change`, then the columns of `flattened`."""
    flat = _side_by_side(batch, taken=("_time", "_change"))
    change = batch.column("change").cast(pa.string())
    return pa.RecordBatch.from_arrays(
        [batch.column("time"), change, *flat.columns], names=["_time", "_change", *flat.schema.names]
    )


def _side_by_side(batch: pa.RecordBatch, *, taken: Sequence[str] = ()) -> pa.RecordBatch:
    """The fields of key and then of val as columns. A name that both have, or that is in `taken`, gets its side as a prefix."""
    sides = {name: batch.column(name) for name in ("key", "val")}
    names = {name: [field.name for field in column.type] for name, column in sides.items()}
    columns: list[pa.Array] = []
    fields: list[pa.Field] = []
    for side, other in (("key", "val"), ("val", "key")):
        for field, column in zip(sides[side].type, sides[side].flatten(), strict=True):
            is_taken = field.name in names[other] or field.name in taken
            fields.append(pa.field(f"{side}.{field.name}" if is_taken else field.name, field.type))
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


@contextmanager
def writing(format_name: str, path: Path | None, schema: pa.Schema) -> Iterator[Write]:
    """Yields the function to call with every batch. `path` None means standard output. The file is moved into place when the block
    ends without an error, and it is durable then. A link is followed; a device or a pipe is written to in place.
    """
    if path is None:
        if format_name in ("arrow", "parquet") and sys.stdout.isatty():
            raise InvalidUsage(f"{format_name} is binary: give --output FILE, or pipe it")
        with _writer(format_name, sys.stdout.buffer, schema) as write:
            yield write
        sys.stdout.flush()
        return
    if _is_device_or_pipe(path):  # moving a file into its place would remove it, such as /dev/null of the whole machine
        try:
            with path.open("wb") as file, _writer(format_name, file, schema) as write:
                yield write
        except OSError as error:
            raise InvalidUsage(f"cannot write {path}: {error.strerror}") from error
        return
    path = Path(os.path.realpath(path))
    # A random name is unique. A process id may also belong to a process of another container, or to one that was killed here.
    partial = path.with_name(f".{path.name}.{system_random_bytes(8).hex()}.partial")
    try:
        with partial.open("xb") as file:
            with _writer(format_name, file, schema) as write:
                yield write
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise InvalidUsage(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # it may be moved already, or it could not be made
            partial.unlink()


def _is_device_or_pipe(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # it does not exist yet, or opening it reports the reason
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def _writer(format_name: str, file: IO[bytes], schema: pa.Schema) -> Iterator[Write]:
    match format_name:
        case "arrow":
            with pa.ipc.new_stream(file, schema) as stream:
                yield stream.write_batch
        case "parquet":
            with pq.ParquetWriter(file, schema, compression="zstd") as parquet:
                yield lambda batch: parquet.write_table(_storable(batch))
        case "csv":
            cells = _csv_cells(pa.RecordBatch.from_pylist([], schema=schema)).schema
            with pyarrow.csv.CSVWriter(file, cells) as csv:
                yield lambda batch: csv.write_batch(_csv_cells(batch))
        case "jsonl":
            yield lambda batch: _write_lines(file, batch)
        case "table" if file is sys.stdout.buffer and sys.stdout.isatty():
            held: list[pa.RecordBatch] = []
            yield held.append
            rows = _cells(pa.Table.from_batches(held, schema=schema))
            # Only the user knows which of the user's numbers are counts.
            print_rows(schema.names, rows, counts=lambda _name: False, times=lambda name: name == "_time")
        case _:
            file.write(_copied(schema.names))
            yield lambda batch: file.writelines(map(_copied, _cells(batch)))


def _storable(batch: pa.RecordBatch) -> pa.Table:
    table = pa.Table.from_batches([batch])
    return pa.table([storable(column) for column in table.columns], schema=table.schema)


def _csv_cells(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns as CSV can hold them: bytes become hexadecimal text, and structs, lists and maps become JSON, as in JSON lines. Raises
    InvalidUsage, which names the column, for a time that Arrow would write with another year.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_timestamp(column.type) and column.type.tz and (far := column.filter(_is_far(column))):
            raise InvalidUsage(
                f"{name} holds the time {far[0].value:,} microseconds after 1970, whose year csv cannot hold: write parquet, arrow or jsonl"
            )
    columns = [_csv_ready(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _csv_ready(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type):
        return _hexadecimal(column)
    if not pa.types.is_nested(column.type):
        return column
    return pa.array(
        [None if value is None else _json(value) for value in python_values(_json_ready(column))], pa.string()
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_json_value)


def _hexadecimal(column: pa.Array) -> pa.Array:
    return pa.array([None if raw is None else raw.hex() for raw in column.to_pylist()], pa.string())


def _write_lines(file: IO[bytes], batch: pa.RecordBatch) -> None:
    file.write(json_lines(batch).encode())


def json_lines(batch: pa.RecordBatch) -> str:
    """The rows as JSON objects, one on each line, with times as ISO 8601 and NaN as null. Arrow has no writer of JSON, so this text for
    people and small tools is made row by row.
    """
    plain = [_json_ready(column) for column in batch.columns]
    names = batch.schema.names
    rows = zip(*(python_values(column) for column in plain), strict=True)
    lines = (_json(dict(zip(names, row, strict=True))) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _json_ready(column: pa.Array) -> pa.Array:
    if pa.types.is_floating(column.type):
        finite = pc.is_finite(column)
        return pc.if_else(finite, column, pa.scalar(None, column.type))
    if pa.types.is_struct(column.type):
        children = [_json_ready(column.field(index)) for index in range(column.type.num_fields)]
        fields = [pa.field(field.name, child.type) for field, child in zip(column.type, children, strict=True)]
        if not fields:
            return column
        return pa.StructArray.from_arrays(children, fields=fields, mask=column.is_null())
    if is_list(column.type):
        lists = ListColumn.of(column)
        if not pa.types.is_map(column.type):
            values = _json_ready(lists.values)
            return lists.array(list_of(values.type), values)
        keys, items = lists.values.flatten()
        keys, items = _key_texts(keys), _json_ready(items)
        kind = map_of(pa.string(), items.type)
        return lists.array(kind, pa.StructArray.from_arrays([keys, items], fields=list(values_type(kind))))
    return column


def _key_texts(keys: pa.Array) -> pa.Array:
    """The keys of a map as text: names in JSON are texts."""
    if pa.types.is_binary(keys.type):
        return _hexadecimal(keys)
    if not pa.types.is_timestamp(keys.type) or not keys.type.tz:
        return keys.cast(pa.string())
    texts = _without_zone(keys)
    return pc.if_else(pc.starts_with(texts, _OUT_OF_RANGE), texts, pc.binary_join_element_wise(texts, "Z", ""))


def _is_far(instants: pa.Array) -> pa.Array:
    """Which instants are in years that Arrow's text cannot express.

    SUBTLE: Arrow writes an instant with a zone with another year in this case, or fails.
    """
    return pc.starts_with(_without_zone(instants), _OUT_OF_RANGE)


def _without_zone(instants: pa.Array) -> pa.Array:
    return instants.view(pa.timestamp(instants.type.unit)).cast(pa.string())


def _json_value(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else value.isoformat() if hasattr(value, "isoformat") else str(value)


def _cells(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[object, ...]]:
    """The rows as cells for people to read."""
    return zip(*(map(_shown, python_values(column)) for column in rows.columns), strict=True)


def _copied(cells: Sequence[object]) -> bytes:
    """A line in the text format of PostgreSQL's COPY, which distinguishes null from empty text."""
    return ("\t".join(_NULL if cell is None else str(cell).translate(_ESCAPED) for cell in cells) + "\n").encode()


def _shown(value: Any) -> object:
    return value.hex() if isinstance(value, bytes) else value
