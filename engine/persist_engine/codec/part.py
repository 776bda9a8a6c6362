"""A part: updates as one Parquet file that any Parquet reader understands.

    columns   key struct, val struct (left out when the value has no fields: Parquet cannot store it), time int64,
    diff int64 metadata  persist.format, persist.desc, persist.codecs, persist.rows, persist.diffs_sum, persist.check

`persist.check` is the CRC-32 of the whole file with its own eight digits as zeros, so that an inline part, or a file
out of its context, proves itself. Invariant: decode gives the encoded rows, bit for bit, or raises.

Options were measured on 1M sorted rows of (bigint, 32-byte string, time, diff); plain pyarrow as it comes: write 114 ms,
22 MB:

    zstd 1, dictionaries everywhere    write 178 ms  read 65 ms  11.1 MB
    zstd 1, where values repeat        write 130 ms  read 60 ms   9.8 MB
      and keys as deltas               write 111 ms  read 55 ms   8.8 MB     lz4  141, 60, 18.4     none  108, 52, 36.0

So zstd level 1: as fast as none and a quarter of the size, and bytes are paid for by upload. A column gets a dictionary
when a sample of it repeats itself, whole numbers that do not are stored as deltas. Row groups are the unit of reading
ahead and of reading a key range inside a part: 256 Ki rows, or 16 MiB of wide ones.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist_engine.base.errors import (
    CorruptData,
    Incompatible,
    InvalidUsage,
    SchemaMismatch,
    check,
)
from persist_engine.codec.damage import checksum, decoding, is_known
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.columns import constant, empty_struct, storable
from persist_engine.rows.evolution import adapted, needs_adapting
from persist_engine.rows.order import key_lower
from persist_engine.rows.part_stats import part_stats
from persist_engine.rows.schema import CODECS, Schema
from persist_engine.rows.updates import wrapped_diffs_sum

__all__ = [
    "PART_FORMAT",
    "PART_FORMAT_NAME",
    "DecodedPart",
    "checksum",
    "decode_part",
    "encode_part",
    "key_lower",
    "part_stats",
    "verify_part",
]

#: Format of the files: this code writes it and reads no other.
PART_FORMAT = 1
#: As it stands in a part's descriptor.
PART_FORMAT_NAME = f"parquet/{PART_FORMAT}"
ROW_GROUP_ROWS = 256 * 1024
#: Rows decoded at a time, at least: fewer cost more in calls than they save in memory.
STREAM_ROWS_MIN = 4096
_ROW_BYTES_MIN = 24
_GROUP_BYTES = 16 << 20
_GROUP_ROWS_MIN = 1024
_SAMPLE_ROWS = 1024
#: Below this many bytes a file is decoded on the calling thread: handing columns to others costs more than it saves.
_THREADED_BYTES_MIN = 1 << 20

_MAGIC = b"PAR1"
_CHECK_MARK = b"persist-part-crc32="
_CHECK_DIGITS = 8
_CHECK_ZEROS = b"0" * _CHECK_DIGITS
_HEXADECIMAL = re.compile(rb"[0-9a-f]{8}")
_COLUMNS = ("key", "val", "time", "diff")


def as_it_is(value: int) -> int:
    """Itself."""
    return value


@dataclass(frozen=True, slots=True)
class DecodedPart:
    """A part's rows, in the order they were written, and the description it was written with."""

    table: pa.Table
    desc: Description


@dataclass(frozen=True, slots=True)
class OpenedPart:
    """A part whose bytes were verified and whose footer was read: its description and number of rows, and its rows by
    row group. Groups may be read in any order and by several threads at once.
    """

    desc: Description
    rows: int
    groups: int
    _key: str
    _data: memoryview
    _file: pq.ParquetFile
    _names: tuple[str, ...]
    _asked: Schema | None
    """Of what schema rows are to be shown, when it is not theirs."""

    def read_group(self, group: int, *, seen: Callable[[int], int] = as_it_is, use_threads: bool = False) -> pa.Table:
        """The rows of one group, in order; when all have one time, at what `seen` makes of it. CorruptData if damaged."""
        constants = self._constants([group], seen)
        names = [name for name in self._names if name not in constants]
        metadata, file = self._file.metadata, self._file
        if self.groups > 1:  # others may be reading other groups: files are cheap, their footer is shared
            file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(self._data)), metadata=metadata, pre_buffer=False)
        with decoding(self._key):
            table = file.read_row_group(group, columns=names, use_threads=use_threads)
        return self._shown(table, metadata.row_group(group).num_rows, constants)

    def stream(self, table_bytes: int, *, seen: Callable[[int], int] = as_it_is) -> Iterator[pa.Table]:
        """All rows in order, in tables of about `table_bytes`, but no less than a few rows; `seen` as for `read_group`.
        Groups are decoded as far as needed only.
        """
        rows = max(STREAM_ROWS_MIN, self.rows * table_bytes // max(1, self.decoded_bytes))
        if self.groups == 1 and self.rows <= 2 * rows:
            yield self.read_group(0, seen=seen)
            return
        constants = self._constants(range(self.groups), seen)
        names = [name for name in self._names if name not in constants]
        with decoding(self._key):
            batches = self._file.iter_batches(rows, columns=names, use_threads=False)
        while True:
            with decoding(self._key):
                batch = next(batches, None)
            if batch is None:
                return
            yield self._shown(pa.Table.from_batches([batch]), batch.num_rows, constants)

    @property
    def decoded_bytes(self) -> int:
        """About how large all rows are in memory."""
        # Parquet counts what is encoded before compression: dictionaries and deltas make it too small.
        encoded: int = sum(self._file.metadata.row_group(group).total_byte_size for group in range(self.groups))
        return encoded + self.rows * _ROW_BYTES_MIN

    def _shown(self, table: pa.Table, rows: int, constants: Mapping[str, int]) -> pa.Table:
        table = _with_columns(table, _COLUMNS, rows, constants)
        return table if self._asked is None else adapted(table, asked=self._asked, key=self._key)

    def _constants(self, groups: Iterable[int], seen: Callable[[int], int]) -> dict[str, int]:
        """Times (as `seen`) and diffs that are the same in all rows of `groups`, as the footer knows: not decoded."""
        metadata = self._file.metadata
        values: dict[str, set[int | None]] = {"time": set(), "diff": set()}
        for group in groups:
            columns = metadata.row_group(group)
            for name, index in (("time", metadata.num_columns - 2), ("diff", metadata.num_columns - 1)):
                stats = columns.column(index).statistics
                is_known = stats is not None and stats.has_min_max and stats.min == stats.max
                values[name].add(int(stats.min) if is_known else None)
        only = {name: found.pop() for name, found in values.items() if len(found) == 1}
        as_seen = {"time": seen, "diff": as_it_is}
        return {name: as_seen[name](value) for name, value in only.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PartInMemory:
    """Rows that are decoded already, to be read as an `OpenedPart` is."""

    desc: Description
    table: pa.Table

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.table.num_rows)

    @property
    def groups(self) -> int:
        """All rows are one."""
        return 1

    @property
    def decoded_bytes(self) -> int:
        """How large all rows are in memory."""
        return int(self.table.nbytes)

    def read_group(self, _group: int, *, seen: Callable[[int], int] = as_it_is, use_threads: bool = False) -> pa.Table:
        """All rows."""
        return self.table

    def stream(self, _table_bytes: int, *, seen: Callable[[int], int] = as_it_is) -> Iterator[pa.Table]:
        """All rows at once: they are in memory."""
        return iter([self.table])


def encode_part(table: pa.Table, *, desc: Description, schema: Schema) -> bytes:
    """The file's bytes; the same for the same input and Arrow release. `table` has `schema.updates_schema` (rows may
    lie in any order).

    InvariantViolated when a column that holds updates has nulls or the sum of diffs leaves int64.
    """
    if table.schema != schema.updates_schema:
        raise SchemaMismatch(
            "a part's table does not have the updates schema", requested=str(table.schema), actual=repr(schema)
        )
    for name in _COLUMNS:
        check(table.column(name).null_count == 0, f"column {name} of a part holds nulls")
    names = [name for name in _COLUMNS if name != "val" or len(schema.val)]
    metadata = {
        "persist.format": str(PART_FORMAT),
        "persist.desc": _desc_text(desc),
        "persist.codecs": json.dumps([CODECS.key, CODECS.val, CODECS.time, CODECS.diff]),
        "persist.rows": str(table.num_rows),
        "persist.diffs_sum": str(wrapped_diffs_sum(table)),
        "persist.check": (_CHECK_MARK + _CHECK_ZEROS).decode(),
    }
    fields = [pa.field(name, table.schema.field(name).type, nullable=False) for name in names]
    columns = [table.column(name) for name in names]
    if schema.required_fields is None:  # NOT NULL within structs, which may be null themselves
        columns = [storable(column) for column in columns]
    stored = pa.table(columns, schema=pa.schema(fields, metadata=metadata))
    repeating, deltas = _column_encodings(stored)
    sink = pa.BufferOutputStream()
    pq.write_table(
        stored,
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=repeating,
        column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
        row_group_size=_group_rows(stored),
        write_page_index=True,
        store_schema=True,
    )
    data = bytearray(sink.getvalue())
    at = _check_at(data)
    assert at is not None, "the footer that was just written holds the mark"
    data[at : at + _CHECK_DIGITS] = _check_digits(data, at)
    return bytes(data)


def _group_rows(table: pa.Table) -> int:
    rows: int = table.num_rows * _GROUP_BYTES // max(1, table.nbytes)
    return min(max(_GROUP_ROWS_MIN, rows), ROW_GROUP_ROWS)


def _column_encodings(table: pa.Table) -> tuple[list[str], list[str]]:
    """Paths of the columns whose values repeat, and of the whole numbers whose do not; by a sample, the same for the
    same table.
    """
    repeating: list[str] = []
    deltas: list[str] = []
    sample = pa.array(np.linspace(0, table.num_rows - 1, min(table.num_rows, _SAMPLE_ROWS)).astype(np.int64))
    for path, column in _leaves(table):
        picked = column.take(sample)
        if 2 * pc.count_distinct(picked, mode="all").as_py() <= len(picked):
            repeating.append(path)
        elif pa.types.is_integer(column.type) and column.type.bit_width >= 32:
            deltas.append(path)
    paths = [path for path, _ in _leaves(table)]  # a dot in a name may make two columns one path: then neither
    return repeating, [path for path in deltas if paths.count(path) == 1]


def _leaves(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The columns that Parquet stores, by path."""
    left = [(name, table.column(name)) for name in table.column_names]
    while left:
        path, column = left.pop()
        if pa.types.is_struct(column.type):
            left += [(f"{path}.{f.name}", child) for f, child in zip(column.type, column.flatten(), strict=True)]
        else:
            yield path, column


def decode_part(
    data: bytes | memoryview,
    *,
    key: str,
    schema: Schema,
    columns: Sequence[str] | None = None,
    expected_checksum: str | None = None,
    may_be_newer: bool = False,
) -> DecodedPart:
    """The rows and description of a part; `key` names it in errors.

    `columns` picks some of key, val, time, diff, or single fields of the structs as `key.<field>` (the struct then
    holds only these); the table has them in the schema's order. The bytes are verified against `expected_checksum`
    when it is given, else against the check in the file: one of the two, since each costs a pass. Raises CorruptData
    for any damage, Incompatible for a newer format, SchemaMismatch for a part of another schema. Rows of an older version
    of the schema (with `may_be_newer` of a newer one, too) are shown as `codec.evolution` says.
    """
    verify_part(data, key=key, expected_checksum=expected_checksum)
    picked = _picked(schema, columns)
    with decoding(key):
        return _decoded(data, key, schema, picked, may_be_newer=may_be_newer)


def open_part(
    data: bytes | memoryview,
    *,
    key: str,
    schema: Schema,
    format_name: str = PART_FORMAT_NAME,
    expected_checksum: str | None = None,
    may_be_newer: bool = False,
) -> OpenedPart:
    """As `decode_part` of all columns, but rows are decoded when they are asked for: memory is the encoded bytes until
    then. The bytes are verified before it returns. `format_name` is the format that the part's descriptor names.

    `may_be_newer`: a part of a schema that succeeded `schema` is shown without what came since; its rows then lie in any
    order.
    """
    if format_name != PART_FORMAT_NAME:
        raise Incompatible(f"part {key} has format {format_name!r}, this code reads {PART_FORMAT_NAME!r}", key=key)
    verify_part(data, key=key, expected_checksum=expected_checksum)
    with decoding(key):
        file, desc, written = _opened(data, key, schema, may_be_newer=may_be_newer)
    names = tuple(name for name in _COLUMNS if name != "val" or len(written.val))
    rows, groups = file.metadata.num_rows, file.num_row_groups
    return OpenedPart(desc, rows, groups, key, memoryview(data), file, names, None if written is schema else schema)


def verify_part(data: bytes | memoryview, *, key: str, expected_checksum: str | None = None) -> None:
    """Returns when the bytes are those that were written; CorruptData otherwise, Incompatible when the expected
    checksum is of a kind that this code does not know.
    """
    if expected_checksum is not None:
        if not is_known(expected_checksum):
            raise Incompatible(f"part {key}: this code cannot verify the checksum {expected_checksum!r}", key=key)
        if (found := checksum(data)) != expected_checksum:
            raise CorruptData(f"part {key}: checksum is {found}, the descriptor says {expected_checksum}", key=key)
        return
    at = _check_at(data)
    if at is None:
        raise CorruptData(f"part {key}: {len(data)} bytes that are no part", key=key)
    if bytes(data[at : at + _CHECK_DIGITS]) != _check_digits(data, at):
        raise CorruptData(f"part {key}: the bytes do not match the check in the file", key=key)


def _check_at(data: bytes | bytearray | memoryview) -> int | None:
    """Where the digits of the check stand: after the last mark in the footer (nothing of the user's follows it);
    None: not a part.
    """
    if len(data) < 12 or bytes(data[:4]) != _MAGIC or bytes(data[-4:]) != _MAGIC:
        return None
    footer_bytes = int.from_bytes(bytes(data[-8:-4]), "little")
    start = len(data) - 8 - footer_bytes
    found = bytes(data[start:-8]).rfind(_CHECK_MARK) if start >= 4 else -1
    at = start + found + len(_CHECK_MARK)
    if found < 0 or not _HEXADECIMAL.fullmatch(bytes(data[at : at + _CHECK_DIGITS])):
        return None
    return at


def _check_digits(data: bytes | bytearray | memoryview, at: int) -> bytes:
    view = memoryview(data)
    crc = zlib.crc32(view[at + _CHECK_DIGITS :], zlib.crc32(_CHECK_ZEROS, zlib.crc32(view[:at])))
    return b"%08x" % crc


def _opened(
    data: bytes | memoryview, key: str, schema: Schema, *, may_be_newer: bool
) -> tuple[pq.ParquetFile, Description, Schema]:
    """The file, of a format and schema that fit, what its metadata promises, and its schema: `schema` itself when equal."""
    file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)), pre_buffer=False)
    stored = file.schema_arrow
    metadata = {
        name.decode(): text.decode() for name, text in (stored.metadata or {}).items() if name.startswith(b"persist.")
    }
    if int(metadata["persist.format"]) != PART_FORMAT:
        raise Incompatible(
            f"part {key} has format {metadata['persist.format']}, this code reads format {PART_FORMAT}", key=key
        )
    desc = _parsed_desc(metadata["persist.desc"])
    written = schema
    if not _is_of(stored, schema):
        written = schema_of(stored)
        if not needs_adapting(written, schema, key=key, may_be_newer=may_be_newer):
            written = schema
    for name in ("time", "diff"):
        if stored.field(name).type != pa.int64():
            raise CorruptData(f"part {key}: column {name} is {stored.field(name).type}, not int64", key=key)
    rows = file.metadata.num_rows
    if rows != int(metadata["persist.rows"]):
        raise CorruptData(f"part {key} has {rows} rows, its metadata says {metadata['persist.rows']}", key=key)
    return file, desc, written


def _decoded(
    data: bytes | memoryview, key: str, schema: Schema, picked: list[str] | None, *, may_be_newer: bool
) -> DecodedPart:
    file, desc, written = _opened(data, key, schema, may_be_newer=may_be_newer)
    if written is not schema:
        whole = file.read(columns=[name for name in _COLUMNS if name != "val" or len(written.val)])
        table = adapted(_with_columns(whole, _COLUMNS, file.metadata.num_rows, {}), asked=schema, key=key)
        return DecodedPart(table if picked is None else _with_picked(table, picked), desc)
    names = [name for name in (_COLUMNS if picked is None else picked) if name != "val" or len(schema.val)]
    table = file.read(columns=names, use_threads=len(data) >= _THREADED_BYTES_MIN)
    rows = file.metadata.num_rows
    if names and table.num_rows != rows:
        raise CorruptData(f"part {key} has {table.num_rows} rows, its footer says {rows}", key=key)
    tops = [name for name in _COLUMNS if picked is None or any(path.split(".")[0] == name for path in picked)]
    return DecodedPart(_with_columns(table, tops, rows, {}), desc)


def _with_columns(table: pa.Table, tops: Sequence[str], rows: int, constants: Mapping[str, int]) -> pa.Table:
    """`table` with the columns `tops`: those of `constants` made up, and structs that are not stored for want of
    fields.
    """
    arrays = []
    for name in tops:
        if name in table.column_names:
            arrays.append(table.column(name))
        elif name in constants:
            arrays.append(pa.chunked_array([constant(constants[name], rows)]))
        else:
            arrays.append(pa.chunked_array([empty_struct(rows)]))
    fields = [pa.field(name, array.type) for name, array in zip(tops, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def _picked(schema: Schema, columns: Sequence[str] | None) -> list[str] | None:
    """The columns to read, checked; None for all."""
    if columns is None:
        return None
    known = {*_COLUMNS, *(f"key.{name}" for name in schema.key.names), *(f"val.{name}" for name in schema.val.names)}
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise InvalidUsage(f"a part has no column {', '.join(unknown)}")
    return list(columns)


def _with_picked(table: pa.Table, picked: list[str]) -> pa.Table:
    """Only the columns and single fields `picked`, in the schema's order."""
    arrays, fields = [], []
    for name in _COLUMNS:
        column = table.column(name)
        inner = [path.partition(".")[2] for path in picked if path.startswith(f"{name}.")]
        if inner and name not in picked:
            kind = pa.struct([field for field in column.type if field.name in inner])
            chunks = [
                pa.StructArray.from_arrays([chunk.field(field.name) for field in kind], fields=list(kind))
                for chunk in column.chunks
            ]
            column = pa.chunked_array(chunks, kind)
        elif name not in picked:
            continue
        arrays.append(column)
        fields.append(pa.field(name, column.type))
    return pa.table(arrays, schema=pa.schema(fields))


def _is_of(stored: pa.Schema, schema: Schema) -> bool:
    """Whether columns are plainly those of `schema`: much cheaper than to make the schema that they are of."""
    key = stored.field("key").type
    return bool(key == schema.key_type and "val" in stored.names and stored.field("val").type == schema.val_type)


def schema_of(stored: pa.Schema) -> Schema:
    """The schema of updates in columns `key` and `val`, the latter left out when it has no fields."""
    sides = {name: stored.field(name).type if name in stored.names else pa.struct([]) for name in ("key", "val")}
    return Schema(pa.schema(list(sides["key"])), pa.schema(list(sides["val"])))


def _desc_text(desc: Description) -> str:
    return json.dumps({name: getattr(desc, name).time for name in ("lower", "upper", "since")})


def _parsed_desc(text: str) -> Description:
    times: dict[str, Any] = json.loads(text)
    return Description(Antichain(times["lower"]), Antichain(times["upper"]), Antichain(times["since"]))
