"""Rows of files for commands that write tables: CSV, JSON lines, Parquet and Arrow streams.

Owns how text becomes values of a table's columns. Arrow reads all of it, in batches where the format allows.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from math import isinf
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.tables.arrow_streams import stream_tables
from persist_engine.cli.tables.commands import InputFormat
from persist_engine.cli.tables.csv_checks import ends_in_quotes, infinite, refuse_overflow
from persist_engine.cli.tables.sources import STDIN, Source, codec_of, format_of, opened, shown
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.entries import holds_maps
from persist_engine.rows.nested.layout import is_list, list_of, map_of, mapped, values_type
from persist_engine.rows.nested.values import array_of
from persist_engine.table.columns import converted

#: Bytes that may come before the first value of a JSON file: white space, and the mark of UTF-8.
_BLANK = b" \t\r\n\xef\xbb\xbf"
#: Arrow reads CSV in blocks of this size, and refuses a longer line.
_BLOCK_BYTES = 1 << 20
#: The type for numbers of JSON in columns of decimals, with all digits that a decimal can have. By default Arrow reads them as floats.
_EXACT = pa.decimal256(76, 38)
#: JSON is read in blocks of whole lines of about this size.
JSON_BLOCK_BYTES = 16 << 20
#: A field as Arrow reads it: it is quoted if it begins with a quote, and two quotes within it stand for one. A carriage return at the end
#: of the data may be half of a line end. SUBTLE: in Python before 3.11.5 a possessive group keeps what the repetition that failed had
#: matched (https://github.com/python/cpython/issues/106052). So fields are atomic groups, and the loop over records, for which an atomic
#: group would take 30 times the memory of the data, looks ahead before each one.
_FIELD = rb'(?>(?:"[^"]*+(?>(?:""[^"]*+)*)"[^,\r\n]*+|[^",\r\n][^,\r\n]*+)?)'
_RECORD = rb"(?>(?>(?:" + _FIELD + rb",)*)" + _FIELD + rb"(?:\r\n|\n|\r(?!\Z)))"
_WHOLE_RECORDS = re.compile(rb"(?:(?=" + _RECORD + rb")" + _RECORD + rb")*+")
#: A line that is null, or that ends with null after an object. Arrow turns the null into a row of nulls.
_NULL_LINE = re.compile(rb"(?:^|\})[ \t]*null[ \t\r]*$", re.MULTILINE)
_UNCLOSED = "is not csv that the table accepts: it ends within quotes that nothing closes; it was cut off, or a quote is missing"
_EMPTY = "is empty: the first line of a CSV file names the columns, even when no row follows"


def batches_of(
    files: Sequence[str], chosen: InputFormat | None, wanted: pa.Schema, on_rows: Callable[[int, int, int], None]
) -> Iterator[pa.Table]:
    """The rows of all files, in their order; `-` is standard input. Columns of `wanted` are read as its types. `on_rows` receives how many
    rows and bytes of files were read so far, and the bytes of all files; a pipe counts as no bytes. Raises InvalidUsage, which names the
    file, when one does not exist or does not have its format.
    """
    rows = done = 0
    total = sum(Path(name).stat().st_size for name in files if Path(name).is_file())
    if files.count(STDIN) > 1:
        raise InvalidUsage(f"{STDIN} is named more than once, but standard input can be read only once")
    for name in files:
        kind, before = chosen or format_of(name), rows
        try:
            with opened(name) as (source, tell):
                size = Path(name).stat().st_size if Path(name).is_file() else 0
                has_count = size and kind is InputFormat.PARQUET and codec_of(name) is None
                count = pq.read_metadata(name).num_rows if has_count else 0
                for table in _READERS[kind](source, wanted):
                    rows += table.num_rows
                    # The position in the file says nothing here, since the end of a Parquet file is read first.
                    read = size * (rows - before) // count if count else min(size, tell()) if size else 0
                    on_rows(rows, done + read, total)
                    yield table
            done += size
        except InvalidUsage as error:
            raise InvalidUsage(f"{shown(name)} {error}") from error
        except (pa.ArrowException, UnicodeDecodeError) as error:
            text = _placed(str(error).splitlines()[0], rows - before)
            raise InvalidUsage(f"{shown(name)} is not {kind.value} that the table accepts: {text}") from error
        except OSError as error:
            raise InvalidUsage(f"cannot read {shown(name)}: {error.strerror or error}") from error


def _placed(text: str, rows: int) -> str:
    """Arrow's message about a piece, with the place of the error in the whole file. `rows` came before the piece. Arrow counts rows from 0,
    and does not always name one.
    """
    placed = re.sub(r"in row (\d+)$", lambda found: f"in row {rows + int(found[1]) + 1:,}", text)
    return placed if placed != text or not rows else f"{text}, after row {rows:,}"


def _csv(source: Source, wanted: pa.Schema) -> Iterator[pa.Table]:
    """Reads CSV whose first line names the columns. An empty cell is null, and empty text in quotes is empty text; structs, lists and maps
    are JSON. `persist read` writes all of them in this form. So for a table with one column that may be null, an empty line is a row.

    A file without the line of names is refused: the program that wrote it failed, and an overwrite with it would remove all rows.
    """
    kinds = {field.name: pa.string() if pa.types.is_nested(field.type) else _written(field.type) for field in wanted}
    options = pyarrow.csv.ConvertOptions(
        column_types=kinds, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    has_empty = len(wanted) == 1 and wanted.field(0).nullable
    whole = pyarrow.csv.ReadOptions(skip_rows=_blank_lines(source) if has_empty else 0)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=not has_empty)
    head = b""
    try:
        if _ends_a_line(source):
            with closing(pyarrow.csv.open_csv(source, whole, parse, options)) as reader:
                yield _read(_without_json(reader.schema.empty_table(), wanted), wanted)
                batch = None
                overflown: dict[str, pa.DataType] = {}
                for batch in reader:
                    table = pa.Table.from_batches([batch])
                    overflown |= infinite(table)
                    yield _read(_without_json(table, wanted), wanted)
            if batch is not None and ends_in_quotes(source, batch):
                raise InvalidUsage(_UNCLOSED)
            if overflown:
                source.seek(0)
                refuse_overflow(source, whole, parse, overflown)
            return
        names: list[str] | None = None
        for some in _records(source, has_empty=has_empty):
            records = some if head else some.lstrip(b"\r\n")
            head = head or records
            if names is not None and records.startswith(BOM_UTF8):
                records = BOM_UTF8 + records  # Arrow drops one, and here it belongs to a value
            read = pyarrow.csv.ReadOptions(column_names=names, block_size=len(records) + 1)
            table = pyarrow.csv.read_csv(
                pa.BufferReader(records), read_options=read, parse_options=parse, convert_options=options
            )
            if wrong := infinite(table):
                refuse_overflow(pa.BufferReader(records), read, parse, wrong)
            names = table.column_names
            yield _read(_without_json(table, wanted), wanted)
        if names is None:
            raise InvalidUsage(_EMPTY)
    except pa.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            raise InvalidUsage(_EMPTY) from error
        raise pa.ArrowInvalid(_with_name(str(error), kinds, source, head)) from error


def _ends_a_line(source: Source) -> bool:
    """Whether the source is a file of Arrow whose last line has an end. Arrow misreads the end of any other file: it takes an empty last
    cell for a quoted one if a cell before it was quoted, and calls a file that has only names empty. `_records` adds the line end.
    """
    if not isinstance(source, pa.NativeFile) or not (size := source.size()):
        return False
    source.seek(size - 1)
    last = source.read()
    source.seek(0)
    return last in (b"\n", b"\r")


def _blank_lines(source: Source) -> int:
    """How many empty lines a file of Arrow begins with. They name no columns. 0 for a pipe, whose empty lines the caller drops."""
    if not isinstance(source, pa.NativeFile):
        return 0
    head = source.read(_BLOCK_BYTES)
    source.seek(0)
    return len(head[: len(head) - len(head.lstrip(b"\r\n"))].splitlines())


def _with_name(text: str, kinds: Mapping[str, pa.DataType], source: Source, head: bytes) -> str:
    """Arrow's message about a value, with the name and type of its column in place of the column's position, which counts from 0. `head`
    begins with the names; without it a file of Arrow is read once more.
    """
    found = re.match(r"In CSV column #(\d+): (Row #\d+: )?(?:CSV conversion error to [^:]+: )?", text)
    if found is None:
        return text
    if not head:
        source.seek(0)
        head = source.read(_BLOCK_BYTES)
    names = next(filter(None, csv.reader(io.StringIO(head.decode("utf-8-sig", "replace"), newline=""))), [])
    name = next(iter(names[int(found[1]) :]), "")
    return text if name not in kinds else f"{name} is {print_type(kinds[name])}: {found[2] or ''}{text[found.end() :]}"


def _records(source: IO[bytes], *, has_empty: bool) -> Iterator[bytes]:
    """Whole records, some at a time. The first ones come as soon as they arrive, so that a bad pipe is refused before its writer ends.
    Drops pieces of empty lines, unless `has_empty` says that these are records. Raises InvalidUsage when a record is longer than Arrow
    accepts from a file.
    """
    held, has_begun = b"", False
    while data := source.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
        held += data
        if has_begun and len(held) < _BLOCK_BYTES:
            continue
        found = _WHOLE_RECORDS.match(held)
        assert found is not None, "the pattern matches empty text as well"
        whole, held = held[: found.end()], held[found.end() :]
        if whole.strip() or (has_empty and has_begun and whole):
            has_begun = True
            yield whole
        elif len(held) > _BLOCK_BYTES:
            raise InvalidUsage(
                "is not csv that the table accepts: its first record, or a later one, has more than a MiB"
            )
    if held.strip() or (has_empty and has_begun and held):
        # Arrow calls a file that has only names without a line end empty.
        ended = held if held.endswith(b"\n") else held + b"\n"
        found = _WHOLE_RECORDS.match(ended)
        if found is None or found.end() < len(ended):
            raise InvalidUsage(_UNCLOSED)
        yield ended


def _without_json(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The table with its columns of JSON converted to the types of `wanted`. Raises InvalidUsage, which names the column, for a text that
    does not fit.
    """
    for index, name in enumerate(table.column_names):
        if name in wanted.names and pa.types.is_nested(kind := wanted.field(name).type):
            texts = pc.fill_null(table.column(name).combine_chunks(), "null").to_pylist()
            try:
                values = list(map(_from_json, texts))
            except (ValueError, RecursionError) as error:
                raise InvalidUsage(
                    f"is not csv that the table accepts: {name} is {print_type(kind)} as JSON: {error}"
                ) from error
            table = table.set_column(index, name, pa.chunked_array([_from_python(name, values, kind)]))
    return table


def _from_python(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values of a JSON reader as an array. Raises InvalidUsage, which names the value, when one does not fit."""
    texts = [_with_texts(value, kind) for value in values]
    return _value(array_of(name, texts, _in_json(kind), may_lack=True), kind)


def _with_texts(value: Any, kind: pa.DataType) -> Any:
    """The value, with the numbers of decimals as text at any depth."""
    if pa.types.is_decimal(kind):
        return None if value is None else str(value)
    if isinstance(value, dict):
        if pa.types.is_map(kind):
            return {name: _with_texts(each, kind.item_type) for name, each in value.items()}
        fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
        return {name: _with_texts(each, fields.get(name, pa.null())) for name, each in value.items()}
    if isinstance(value, list) and is_list(kind) and not pa.types.is_map(kind):
        return [_with_texts(each, values_type(kind)) for each in value]
    return value


def _in_json(kind: pa.DataType) -> pa.DataType:
    """The type of values of `kind` as Python's JSON has them: text for numbers with a scale, times and bytes."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_json(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return map_of(pa.string(), _in_json(kind.item_type))
    if pa.types.is_list(kind):
        return list_of(_in_json(kind.value_type))
    return pa.string() if pa.types.is_decimal(kind) or pa.types.is_temporal(kind) or pa.types.is_binary(kind) else kind


def _from_json(text: str | bytes) -> Any:
    """The value. Raises ValueError when the text is not JSON, and when an object has a name twice, because one value would be lost."""
    return json.loads(text, object_pairs_hook=_object_of, parse_float=_Number)


class _Number(float):
    """A number with a point or an exponent. Its text is the text in the file, so that a decimal keeps all digits."""

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        if isinf(number):
            raise ValueError(f"{text[:40]} is larger than any number")
        number._text = text
        return number

    _text: str

    def __str__(self) -> str:
        return self._text


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice!r} more than once")
    return found


def _object(number: int, line: bytes) -> dict[str, Any]:
    """The object on a line of a file. Raises InvalidUsage, which names the line, when there is none."""
    try:
        found = _from_json(line)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"is not jsonl that the table accepts: line {number}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidUsage(f"is not jsonl that the table accepts: line {number} is not an object")
    return found


def _jsonl_with_maps(data: bytes, wanted: pa.Schema, first: int) -> pa.Table:
    """Reads lines for a table with maps, which Arrow's reader of JSON does not know. `first`: the number of the first line."""
    rows = [_object(number, line) for number, line in enumerate(data.splitlines(), first) if line.strip()]
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    columns = {name: [row.get(name) for row in rows] for name in names}
    known = {field.name: field.type for field in wanted}
    arrays = [
        _from_python(name, columns[name], known[name]) if name in known else pa.nulls(len(rows)) for name in names
    ]
    return pa.table(arrays, names=names)


def _jsonl_plain(data: bytes, wanted: pa.Schema, first: int) -> pa.Table:
    fields = [field.with_type(_EXACT if pa.types.is_decimal(field.type) else _in_lines(field.type)) for field in wanted]
    table = _parsed(data, fields)
    if all(column.null_count for column in table.columns) and (found := _NULL_LINE.search(data)):
        number = first + data.count(b"\n", 0, found.end())
        raise InvalidUsage(f"is not jsonl that the table accepts: line {number} is null, which is not an object")
    given = [name for name in table.column_names if name in wanted.names]
    nulls = {name for name in given if table.column(name).null_count == table.num_rows}
    # The reader returns every column of its schema, but a column that no line has is missing.
    seen = _parsed(data, [field for field in fields if field.name not in nulls]).column_names if nulls else given
    for name in given:
        kind, index = wanted.field(name).type, table.column_names.index(name)
        if name not in seen:
            table = table.remove_column(index)
        elif pa.types.is_decimal(kind):
            try:
                table = table.set_column(index, name, converted(table.column(name), kind))
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"{name} is {print_type(kind)}: {error}") from error
    return _read(table, wanted, _in_lines)


def _parsed(data: bytes, fields: Sequence[pa.Field]) -> pa.Table:
    parse = pyarrow.json.ParseOptions(explicit_schema=pa.schema(fields))
    try:
        return pyarrow.json.read_json(pa.BufferReader(data), parse_options=parse)
    except pa.ArrowInvalid:
        # Arrow counts the rows of each of its blocks from 0. A single block has all rows, and accepts lines of any length.
        whole = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        return pyarrow.json.read_json(pa.BufferReader(data), read_options=whole, parse_options=parse)


def _jsonl(source: Source, wanted: pa.Schema) -> Iterator[pa.Table]:
    """Reads one object per line, in blocks of whole lines. Decimals are numbers or text, exact in both forms; maps are objects.

    Leaves out a column that no line has, at the end of the last block at the latest. Other code decides whether a table accepts that.
    """
    given: set[str] = set()
    owed: set[str] = set()
    has_maps = any(holds_maps(field.type) for field in wanted)
    for data, line, is_all in _blocks(source):
        if data.lstrip(_BLANK).startswith(b"null"):  # Arrow's reader ends the process
            raise InvalidUsage("is not jsonl that the table accepts: it begins with null, which is not an object")
        table = _jsonl_with_maps(data, wanted, line) if has_maps else _jsonl_plain(data, wanted, line)
        given |= set(table.column_names)
        if not is_all:  # a later block may have a column that this one lacks
            absent = [field for field in wanted if field.name not in table.column_names]
            owed |= {field.name for field in absent}
            for field in absent:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        yield table
    if owed - given:
        yield pa.schema([field for field in wanted if field.name in given]).empty_table()


def _blocks(source: Source) -> Iterator[tuple[bytes, int, bool]]:
    """Blocks of whole lines that are not all blank, each with the number of its first line and whether it holds all lines of the source."""
    held, line, is_first = b"", 1, True
    while data := source.read(JSON_BLOCK_BYTES):
        held += data
        end = held.rfind(b"\n") + 1
        if len(held) < JSON_BLOCK_BYTES or not end:
            continue
        whole, held = held[:end], held[end:]
        if whole.strip():
            yield whole, line, False
            is_first = False
        line += whole.count(b"\n")
    if held.strip():
        yield held, line, is_first


def _written(kind: pa.DataType) -> pa.DataType:
    """The type as which Arrow's reader reads a value of a CSV file. Bytes are read as text: they are hexadecimal digits, as
    `persist read` writes them.
    """
    return pa.string() if pa.types.is_date(kind) or pa.types.is_binary(kind) else kind


def _in_lines(kind: pa.DataType) -> pa.DataType:
    """The type as which Arrow's reader reads a value in JSON lines. It is text for bytes, for dates, because Arrow would read numbers of
    days, and for instants, because Arrow would read those without a zone as UTC. It is DOUBLE for FLOAT, because Arrow would read a number
    that is too large as infinity.
    """
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_lines(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return list_of(_in_lines(kind.value_type))
    if pa.types.is_float32(kind):
        return pa.float64()
    return pa.string() if pa.types.is_temporal(kind) or pa.types.is_binary(kind) else kind


def _read(table: pa.Table, wanted: pa.Schema, written: Callable[[pa.DataType], pa.DataType] = _written) -> pa.Table:
    """The table with its columns, which have the types of `written`, converted to those of `wanted`."""
    for index, name in enumerate(table.column_names):
        kind = wanted.field(name).type if name in wanted.names else None
        if kind is not None and written(kind) != kind and table.column(name).type == written(kind):
            try:
                parts = [_value(part, kind) for part in table.column(name).chunks]
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"{name} is {print_type(kind)}: {error}") from error
            table = table.set_column(index, name, pa.chunked_array(parts, kind))
    return table


def _value(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_struct(kind):
        parts = [_value(values.field(index), field.type) for index, field in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=values.is_null())
    if is_list(kind):
        return mapped(values, kind, lambda within: _value(within, values_type(kind)))
    if pa.types.is_binary(kind):
        return _bytes(values)
    out = values.cast(kind)
    if pa.types.is_float32(kind):
        wrong = values.filter(pc.and_(pc.is_inf(out), pc.invert(pc.is_inf(values))))
        if len(wrong):
            raise pa.ArrowInvalid(f"{wrong[0].as_py()} is larger than any number of that type")
    return out


def _bytes(digits: pa.Array) -> pa.Array:
    """The bytes of hexadecimal digits. Converts all values at once."""
    if pc.all(pc.match_substring_regex(digits, "^([0-9a-fA-F]{2})*$")).as_py() is False:
        raise pa.ArrowInvalid("bytes are pairs of hexadecimal digits, as in 00ff")
    lengths = pc.fill_null(pc.binary_length(digits), 0).to_numpy()
    ends = pa.py_buffer(np.concatenate([[0], np.cumsum(lengths // 2)]).astype(np.int32))
    data = pa.py_buffer(bytes.fromhex("".join(digits.drop_null().to_pylist())))
    whole = pa.Array.from_buffers(pa.binary(), len(digits), [None, ends, data])
    return pc.if_else(digits.is_valid(), whole, None)


def _parquet(source: Source, _wanted: pa.Schema) -> Iterator[pa.Table]:
    """Reads Parquet. The end of a file says where its rows are, so a pipe is copied into a file first."""
    with ExitStack() as stack:
        if not isinstance(source, pa.NativeFile):
            kept = stack.enter_context(tempfile.TemporaryFile(prefix="persist-"))
            shutil.copyfileobj(source, kept, _BLOCK_BYTES)
            kept.flush()
            source = stack.enter_context(pa.OSFile(f"/dev/fd/{kept.fileno()}"))
        file = pq.ParquetFile(source)
        yield file.schema_arrow.empty_table()
        for batch in file.iter_batches():
            yield pa.Table.from_batches([batch])


def _arrow(source: Source, _wanted: pa.Schema) -> Iterator[pa.Table]:
    return stream_tables(source)


_READERS: dict[InputFormat, Callable[[Source, pa.Schema], Iterator[pa.Table]]] = {
    InputFormat.CSV: _csv,
    InputFormat.JSONL: _jsonl,
    InputFormat.PARQUET: _parquet,
    InputFormat.ARROW: _arrow,
}
