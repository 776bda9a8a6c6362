"""A part: updates as one Parquet file that any Parquet reader understands.

    columns   key struct, val struct (left out when the value has no fields: Parquet cannot store it), time int64, diff int64
    metadata  persist.format, persist.desc, persist.codecs, persist.rows, persist.diffs_sum, persist.check

`persist.check` is the CRC-32 of the whole file with its own eight digits as zeros, so that a file can be verified without its
descriptor. Invariant: decoding returns the encoded rows, bit for bit, or raises an error.

The options were measured on 1M sorted rows of (bigint, 32-byte string, time, diff). The defaults of pyarrow take 114 ms to
write 22 MB.

    zstd 1, dictionaries everywhere    write 178 ms  read 65 ms  11.1 MB
    zstd 1, where values repeat        write 130 ms  read 60 ms   9.8 MB
      and keys as deltas               write 111 ms  read 55 ms   8.8 MB     lz4  141, 60, 18.4     none  108, 52, 36.0

So parts use zstd level 1: it is as fast as no compression at a quarter of the size, and the size decides the time of an
upload. A column gets a dictionary when a sample of it repeats values. Columns of whole numbers without repeats are stored as
deltas. Other numbers that zstd hardly makes smaller are stored uncompressed. A row group is the unit of fetching a key range
of a part (`codec.row_groups`). Several row groups are decoded at once: DECODED_ROWS rows, or 16 MiB of wide rows.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from persist_engine.base.errors import (
    CorruptData,
    Incompatible,
    InvalidUsage,
    SchemaMismatch,
    check,
)
from persist_engine.codec.column_encodings import column_encodings
from persist_engine.codec.damage import checksum, decoding, is_known
from persist_engine.codec.row_groups import (
    Pieces,
    decoded_together,
    encoded_bytes,
    fill_checks,
    group_rows,
    groups_metadata,
    rows_of,
    span_of,
)
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.columns import constant, empty_struct, storable
from persist_engine.rows.evolution import adapted, needs_adapting
from persist_engine.rows.order import key_lower
from persist_engine.rows.part_stats import part_stats
from persist_engine.rows.schema import CODECS, Schema
from persist_engine.rows.updates import wrapped_diffs_sum

__all__ = [
    "PART_FORMAT",
    "DecodedPart",
    "checksum",
    "decode_part",
    "encode_part",
    "format_name_of",
    "key_lower",
    "part_stats",
    "verify_part",
]

#: The newest format version of the files. Parts without lists and maps have version 1, which differs only in the types. This code reads
#: no other versions.
PART_FORMAT = 2
#: The formats in descriptors of parts.
_FORMAT_NAMES = {f"parquet/{version}": version for version in (1, PART_FORMAT)}
#: The least number of rows decoded at a time. With fewer, the calls cost more than the saved memory is worth.
STREAM_ROWS_MIN = 4096
_ROW_BYTES_MIN = 24
#: Smaller files are decoded on the calling thread, because distributing columns over threads would cost more than it saves.
_THREADED_BYTES_MIN = 1 << 20

_MAGIC = b"PAR1"
_CHECK_MARK = b"persist-part-crc32="
_CHECK_DIGITS = 8
_CHECK_ZEROS = b"0" * _CHECK_DIGITS
_HEXADECIMAL = re.compile(rb"[0-9a-f]{8}")
_COLUMNS = ("key", "val", "time", "diff")


def as_it_is(value: int) -> int:
    """`value`: the identity function."""
    return value


@dataclass(frozen=True, slots=True)
class DecodedPart:
    """A part's rows, in the order in which they were written, and the description with which it was written."""

    table: pa.Table
    desc: Description


@dataclass(frozen=True, slots=True)
class OpenedPart:
    """A part with verified bytes and a decoded footer. It has its description, its number of rows, and its rows by group. A
    group is some row groups. Groups may be read in any order and by several threads at once.
    """

    desc: Description
    rows: int
    """The number of rows of the whole part, even when only some of its row groups were fetched."""
    spans: tuple[tuple[int, ...], ...]
    """The row groups of each group."""
    _key: str
    _data: memoryview
    _file: pq.ParquetFile
    _names: tuple[str, ...]
    _asked: Schema | None
    """The schema under which to show rows, if they were written with another."""

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.spans)

    def read_group(self, group: int, *, seen: Callable[[int], int] = as_it_is, use_threads: bool = False) -> pa.Table:
        """The rows of one group, in order. If `seen`, which must be monotone, maps all their times to one time, they have this time. Raises
        CorruptData if the bytes are damaged.
        """
        span = self.spans[group]
        constants = self._constants(span, seen)
        names = [name for name in self._names if name not in constants]
        metadata, groups = self._file.metadata, list(span)
        with decoding(self._key):
            if use_threads and len(self._data) >= _THREADED_BYTES_MIN:
                table = _in_threads(self._data, metadata, groups, names)
            else:
                # Each call makes its own file object, for the sake of threads. It is cheap and shares the footer.
                file = self._file if self.groups == 1 else _file(self._data, metadata)
                table = file.read_row_groups(groups, columns=names, use_threads=False)
        return self._shown(table, rows_of(metadata, span), constants)

    def stream(self, table_bytes: int, *, seen: Callable[[int], int] = as_it_is) -> Iterator[pa.Table]:
        """All rows in order, in tables of about `table_bytes` and at least STREAM_ROWS_MIN rows. `seen` is as in `read_group`.
        Groups are decoded only as far as the caller reads.
        """
        there = self._there
        count = rows_of(self._file.metadata, there)
        rows = max(STREAM_ROWS_MIN, count * table_bytes // max(1, self.decoded_bytes))
        if self.groups == 1 and count <= 2 * rows:
            yield self.read_group(0, seen=seen)
            return
        constants = self._constants(there, seen)
        names = [name for name in self._names if name not in constants]
        with decoding(self._key):
            batches = self._file.iter_batches(rows, row_groups=there, columns=names, use_threads=False)
        while True:
            with decoding(self._key):
                batch = next(batches, None)
            if batch is None:
                return
            yield self._shown(pa.Table.from_batches([batch]), batch.num_rows, constants)

    @property
    def decoded_bytes(self) -> int:
        """The approximate size in memory of all rows that were fetched."""
        metadata, there = self._file.metadata, self._there
        return encoded_bytes(metadata, there) + rows_of(metadata, there) * _ROW_BYTES_MIN

    @property
    def _there(self) -> list[int]:
        """The row groups that were fetched."""
        return [number for span in self.spans for number in span]

    def _shown(self, table: pa.Table, rows: int, constants: Mapping[str, int]) -> pa.Table:
        table = _with_columns(table, _COLUMNS, rows, constants)
        return table if self._asked is None else adapted(table, asked=self._asked, key=self._key)

    def _constants(self, groups: Iterable[int], seen: Callable[[int], int]) -> dict[str, int]:
        """The time (after `seen`) and the diff, if all rows of `groups` share them according to the footer's statistics. These
        columns need not be decoded.
        """
        metadata = self._file.metadata
        as_seen = {"time": seen, "diff": as_it_is}
        values: dict[str, set[int | None]] = {"time": set(), "diff": set()}
        for group in groups:
            columns = metadata.row_group(group)
            for name, index in (("time", metadata.num_columns - 2), ("diff", metadata.num_columns - 1)):
                stats = columns.column(index).statistics
                is_known = stats is not None and stats.has_min_max
                bounds = (stats.min, stats.max) if is_known else ()
                values[name] |= {as_seen[name](int(each)) for each in bounds} or {None}
        only = {name: found.pop() for name, found in values.items() if len(found) == 1}
        return {name: value for name, value in only.items() if value is not None}


def format_name_of(schema: Schema) -> str:
    """The format in the descriptor of a part with rows of `schema`."""
    return f"parquet/{_format_of(schema)}"


def _format_of(schema: Schema) -> int:
    return PART_FORMAT if schema.holds_lists else 1


def encode_part(table: pa.Table, *, desc: Description, schema: Schema, filtered: Sequence[str] = ()) -> bytes:
    """The bytes of the file. Equal inputs give equal bytes under the same Arrow release. `table` has
    `schema.updates_schema`; its rows may have any order. `filtered` names the columns that get Bloom filters
    (codec.bloom.filtered_paths).

    Raises InvariantViolated when a column of the updates has nulls.
    """
    if table.schema != schema.updates_schema:
        raise SchemaMismatch(
            "a part's table does not have the updates schema", requested=str(table.schema), actual=repr(schema)
        )
    for name in _COLUMNS:
        check(table.column(name).null_count == 0, f"column {name} of a part holds nulls")
    names = [name for name in _COLUMNS if name != "val" or len(schema.val)]
    metadata = {
        "persist.format": str(_format_of(schema)),
        "persist.desc": _desc_text(desc),
        "persist.codecs": json.dumps([CODECS.key, CODECS.val, CODECS.time, CODECS.diff]),
        "persist.rows": str(table.num_rows),
        "persist.diffs_sum": str(wrapped_diffs_sum(table)),
        "persist.check": (_CHECK_MARK + _CHECK_ZEROS).decode(),
    }
    fields = [pa.field(name, table.schema.field(name).type, nullable=False) for name in names]
    columns = [table.column(name) for name in names]
    if schema.required_fields is None:  # there are NOT NULL fields within structs that may be null
        columns = [storable(column) for column in columns]
    stored = pa.table(columns, schema=pa.schema(fields, metadata=metadata))
    encodings = column_encodings(stored)
    sink, group = pa.BufferOutputStream(), group_rows(stored)
    # This does not go into the schema's metadata, because the file holds that twice.
    described, filters = groups_metadata(table, schema, group), {}
    if filtered:
        from persist_engine.codec import bloom  # most parts have none

        filters = bloom.filter_options(filtered, max(1, min(group, table.num_rows)))
        described |= bloom.filters_metadata()
    with pq.ParquetWriter(
        sink,
        stored.schema,
        compression=encodings.compression,
        compression_level=encodings.level,
        use_dictionary=encodings.repeating,
        column_encoding=dict.fromkeys(encodings.deltas, "DELTA_BINARY_PACKED"),
        write_page_index=True,
        write_page_checksum=True,
        store_schema=True,
        bloom_filter_options=filters,
    ) as writer:
        writer.write_table(stored, group)
        writer.add_key_value_metadata(described)
    data = bytearray(sink.getvalue())
    fill_checks(data)
    if filtered:
        bloom.fill_filters_check(data)
    at = _check_at(data)
    assert at is not None, "the footer just written holds the mark"
    data[at : at + _CHECK_DIGITS] = _check_digits(data, at)
    return bytes(data)


def decode_part(
    data: bytes | memoryview,
    *,
    key: str,
    schema: Schema,
    columns: Sequence[str] | None = None,
    expected_checksum: str | None = None,
    may_be_newer: bool = False,
) -> DecodedPart:
    """The rows and description of a part. Errors name it by `key`.

    `columns` picks some of key, val, time, diff, or single fields of the structs as `key.<field>` (the struct then holds
    only these). The table has them in the schema's order. The bytes are verified against `expected_checksum` when it is
    given, otherwise against the check in the file. They are not verified against both, since each costs a pass. Raises
    CorruptData for any damage, Incompatible for another format, and SchemaMismatch for a part of an unrelated schema. Rows
    written under an older version of the schema are adapted by `rows.evolution`; with `may_be_newer`, also those of a newer
    version.
    """
    verify_part(data, key=key, expected_checksum=expected_checksum)
    picked = _picked(schema, columns)
    with decoding(key):
        return _decoded(data, key, schema, picked, may_be_newer=may_be_newer)


def open_part(
    data: bytes | memoryview | Pieces,
    *,
    key: str,
    schema: Schema,
    format_name: str | None = None,
    expected_checksum: str | None = None,
    may_be_newer: bool = False,
    columns: Sequence[str] | None = None,
) -> OpenedPart:
    """Like `decode_part`, but rows are decoded on demand. Until then, memory holds the encoded bytes. The bytes are verified
    before this returns, or were verified when `Pieces` of them were fetched. `format_name` is the format in the part's
    descriptor, if there is one. With `columns`, other columns and fields may be left out, but need not be; key and val are
    then structs with the remaining fields.

    With `may_be_newer`, a part of a schema that succeeded `schema` is shown without the fields added since. Its rows may then
    have any order.
    """
    if format_name is not None and format_name not in _FORMAT_NAMES:
        known = ", ".join(map(repr, _FORMAT_NAMES))
        raise Incompatible(f"part {key} has format {format_name!r}, this code reads {known}", key=key)
    groups = data.groups if isinstance(data, Pieces) else None
    if isinstance(data, Pieces):
        data = data.data
    else:
        verify_part(data, key=key, expected_checksum=expected_checksum)
    with decoding(key):
        file, desc, written = _opened(data, key, schema, may_be_newer=may_be_newer)
    names = tuple(name for name in _COLUMNS if name != "val" or len(written.val))
    if columns is not None and written is schema:  # to be adapted, rows of another schema need all their fields
        names = tuple(_picked(schema, columns) or ())
    rows, metadata = file.metadata.num_rows, file.metadata
    spans = decoded_together(metadata, range(file.num_row_groups) if groups is None else groups)
    return OpenedPart(desc, rows, spans, key, memoryview(data), file, names, None if written is schema else schema)


def verify_part(data: bytes | memoryview, *, key: str, expected_checksum: str | None = None) -> None:
    """Raises CorruptData unless the bytes are those that were written. Raises Incompatible when the expected checksum has a
    form that this code does not know.
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
    """The offset of the check's digits: after the last mark in the footer, which no user data follows. None if `data` is not a part."""
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
    """Returns the file, its description, and the schema with which it was written (`schema` itself if equal), after a check of
    the format and the schema.
    """
    file = _file(data)
    stored = file.schema_arrow
    metadata = {
        name.decode(): text.decode() for name, text in (stored.metadata or {}).items() if name.startswith(b"persist.")
    }
    version = int(metadata["persist.format"])
    if version not in _FORMAT_NAMES.values():
        known = " and ".join(map(str, _FORMAT_NAMES.values()))
        raise Incompatible(f"part {key} has format {version}, this code reads formats {known}", key=key)
    desc = _parsed_desc(metadata["persist.desc"])
    written = schema if _is_of(stored, schema) else schema_of(stored)
    if version != _format_of(written):
        raise CorruptData(f"part {key} has format {version}, and columns of format {_format_of(written)}", key=key)
    if written is not schema and not needs_adapting(written, schema, key=key, may_be_newer=may_be_newer):
        written = schema
    for name in ("time", "diff"):
        if stored.field(name).type != pa.int64():
            raise CorruptData(f"part {key}: column {name} is {stored.field(name).type}, not int64", key=key)
    rows = file.metadata.num_rows
    if rows != int(metadata["persist.rows"]):
        raise CorruptData(f"part {key} has {rows} rows, its metadata says {metadata['persist.rows']}", key=key)
    return file, desc, written


def _file(data: bytes | memoryview, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)), metadata=metadata, pre_buffer=False)


def _in_threads(data: bytes | memoryview, metadata: pq.FileMetaData, groups: list[int], names: list[str]) -> pa.Table:
    """The given row groups, decoded by Arrow's threads from a copy of their bytes in Arrow's own memory. Other row groups are not copied.

    SUBTLE: a thread may release the bytes some milliseconds after Arrow returned the rows (this was seen in half of the reads). The release
    of a Python object needs the interpreter's lock. If the process exits meanwhile, the request for the lock aborts it with code 134,
    because Python ends the thread within C++ code.
    """
    own, (start, end) = pa.allocate_buffer(len(data)), span_of(metadata, groups)
    memoryview(own).cast("B")[start:end] = memoryview(data)[start:end]
    file = pq.ParquetFile(pa.BufferReader(own), metadata=metadata, pre_buffer=False)
    return file.read_row_groups(groups, columns=names, use_threads=True)


def _decoded(
    data: bytes | memoryview, key: str, schema: Schema, picked: list[str] | None, *, may_be_newer: bool
) -> DecodedPart:
    file, desc, written = _opened(data, key, schema, may_be_newer=may_be_newer)
    if written is not schema:
        whole = file.read(columns=[name for name in _COLUMNS if name != "val" or len(written.val)])
        table = adapted(_with_columns(whole, _COLUMNS, file.metadata.num_rows, {}), asked=schema, key=key)
        return DecodedPart(table if picked is None else _with_picked(table, picked), desc)
    names = [name for name in (_COLUMNS if picked is None else picked) if name != "val" or len(schema.val)]
    if len(data) >= _THREADED_BYTES_MIN:
        table = _in_threads(data, file.metadata, list(range(file.num_row_groups)), names)
    else:
        table = file.read(columns=names, use_threads=False)
    rows = file.metadata.num_rows
    if names and table.num_rows != rows:
        raise CorruptData(f"part {key} has {table.num_rows} rows, its footer says {rows}", key=key)
    tops = [name for name in _COLUMNS if picked is None or any(path.split(".")[0] == name for path in picked)]
    return DecodedPart(_with_columns(table, tops, rows, {}), desc)


def _with_columns(table: pa.Table, tops: Sequence[str], rows: int, constants: Mapping[str, int]) -> pa.Table:
    """`table` with the columns `tops`. Adds the columns of `constants`, and structs that are not stored because they have
    no fields.
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
    """The columns to read; None for all. Raises InvalidUsage for an unknown column."""
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
    """Whether the columns are exactly those of `schema`. This is much cheaper than building the schema of the columns."""
    key = stored.field("key").type
    return bool(key == schema.key_type and "val" in stored.names and stored.field("val").type == schema.val_type)


def schema_of(stored: pa.Schema) -> Schema:
    """The schema of updates in columns `key` and `val`. `val` is absent when it has no fields."""
    sides = {name: stored.field(name).type if name in stored.names else pa.struct([]) for name in ("key", "val")}
    return Schema(pa.schema(list(sides["key"])), pa.schema(list(sides["val"])))


def _desc_text(desc: Description) -> str:
    return json.dumps({name: getattr(desc, name).time for name in ("lower", "upper", "since")})


def _parsed_desc(text: str) -> Description:
    times: dict[str, Any] = json.loads(text)
    return Description(Antichain(times["lower"]), Antichain(times["upper"]), Antichain(times["since"]))
