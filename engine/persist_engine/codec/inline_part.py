"""An inline part: updates small enough for state, as one Arrow record batch.

    4 bytes magic "PSTI" | 2 bytes format | 4 bytes CRC-32 of everything else
    1 byte: which bounds are closed | 3 x 8 bytes: lower, upper, since | 2 x 2 bytes: lengths of the DDL texts
    key DDL | value DDL | Arrow IPC message of the batch, without its schema        (little-endian)

A Parquet file of ten rows is mostly metadata: it has 2.5 KB and takes 650 us to write, against 1.1 KB and 6 us for this
format. The DDL texts describe the columns, so that the bytes can be read without the shard's registered schemas. Inline
parts are never blobs: a flush rewrites them as Parquet. Invariant: decoding returns the encoded rows, bit for bit, or
raises an error.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from persist_engine.base.errors import CorruptData, Incompatible, SchemaMismatch, check
from persist_engine.codec.damage import decoding
from persist_engine.codec.part import DecodedPart, as_it_is
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.evolution import adapted, needs_adapting
from persist_engine.rows.schema import Schema

#: The newest format version of the bytes. Parts without lists and maps have version 1, which differs only in the types. This code reads
#: no other versions.
INLINE_FORMAT = 2
#: The formats in descriptors of parts.
_FORMAT_NAMES = {f"arrow/{version}": version for version in (1, INLINE_FORMAT)}

#: The least size of a row: its time and its diff. A table that cannot fit by this measure is not encoded.
ROW_BYTES_MIN = 16

_MAGIC = b"PSTI"
_FRONT = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_FRONT_BYTES = _FRONT.size + _CRC.size
_HEAD = struct.Struct("<BQQQHH")
_DDL_BYTES_MAX = 0xFFFF


def inline_format_name_of(schema: Schema) -> str:
    """The format in the descriptor of an inline part with rows of `schema`."""
    return f"arrow/{_format_of(schema)}"


def _format_of(schema: Schema) -> int:
    return INLINE_FORMAT if schema.holds_lists else 1


def encode_inline(table: pa.Table, *, desc: Description, schema: Schema, bytes_max: int) -> bytes | None:
    """The bytes of `table`, which has `schema.updates_schema` and at least one row. None when they would be `bytes_max` or
    more. Equal inputs give equal bytes under the same Arrow release.

    Raises InvariantViolated when a column of the updates has nulls.
    """
    if not table.schema.equals(schema.updates_schema):
        raise SchemaMismatch(
            "a part's table does not have the updates schema", requested=str(table.schema), actual=repr(schema)
        )
    batches = (table if table.column(0).num_chunks == 1 else table.combine_chunks()).to_batches()
    if len(batches) != 1:
        return None
    batch = batches[0]
    # Computing the size costs as much as serializing, so do it only when the buffers are large enough.
    if batch.get_total_buffer_size() >= bytes_max and pa.ipc.get_record_batch_size(batch) >= bytes_max:
        return None
    for column in batch.columns:
        check(column.null_count == 0, "a column of an inline part holds nulls")
    key_ddl, val_ddl = schema.key_ddl.encode(), schema.val_ddl.encode()
    if len(key_ddl) > _DDL_BYTES_MAX or len(val_ddl) > _DDL_BYTES_MAX:
        return None
    bounds = (desc.lower.time, desc.upper.time, desc.since.time)
    closed = sum(1 << index for index, time in enumerate(bounds) if time is None)
    head = _HEAD.pack(closed, *(time or 0 for time in bounds), len(key_ddl), len(val_ddl))
    rest = b"".join((head, key_ddl, val_ddl, batch.serialize()))
    if _FRONT_BYTES + len(rest) >= bytes_max:
        return None
    front = _FRONT.pack(_MAGIC, _format_of(schema))
    return front + _CRC.pack(zlib.crc32(rest, zlib.crc32(front))) + rest


def decode_inline(
    data: bytes, *, format_name: str, key: str, schema: Schema | None, may_be_newer: bool = False
) -> DecodedPart:
    """The rows and description of an inline part whose descriptor names the format `format_name`. Errors name it by `key`.

    Rows have `schema`, as in `decode_part` (None: the schema with which they were written). Raises CorruptData for any
    damage, Incompatible for another format, and SchemaMismatch for a part of an unrelated schema.
    """
    if format_name not in _FORMAT_NAMES:
        raise Incompatible(f"part {key}: this code cannot read inline parts of format {format_name!r}", key=key)
    version, rest = _verified(data, key)
    with decoding(key):
        closed, *bounds, key_bytes, val_bytes = _HEAD.unpack_from(rest)
        at = _HEAD.size + key_bytes
        texts = bytes(rest[_HEAD.size : at]).decode(), bytes(rest[at : at + val_bytes]).decode()
        written = _schema_of(*texts)
        check(version == _FORMAT_NAMES[format_name] == _format_of(written), "its format is not that of its columns")
        times = [None if closed >> index & 1 else time for index, time in enumerate(bounds)]
        desc = Description(*(Antichain(time) for time in times))
        adapts = schema is not None and needs_adapting(written, schema, key=key, may_be_newer=may_be_newer)
        # Copy the bytes, since Arrow needs aligned buffers.
        message = pa.py_buffer(bytes(rest[at + val_bytes :]))
        batch = pa.ipc.read_record_batch(message, written.updates_schema)
        batch.validate(full=True)
        check(all(column.null_count == 0 for column in batch.columns), "a column holds nulls")
    table = pa.Table.from_batches([batch])
    return DecodedPart(adapted(table, asked=schema, key=key) if schema is not None and adapts else table, desc)


def _verified(data: bytes, key: str) -> tuple[int, memoryview]:
    """Returns the format version and the bytes after the head. Raises CorruptData or Incompatible when the head is wrong."""
    if len(data) < _FRONT_BYTES or data[:4] != _MAGIC:
        raise CorruptData(f"part {key}: {len(data)} bytes that are no inline part", key=key)
    _, version = _FRONT.unpack_from(data)
    rest = memoryview(data)[_FRONT_BYTES:]
    if _CRC.unpack_from(data, _FRONT.size) != (zlib.crc32(rest, zlib.crc32(data[: _FRONT.size])),):
        raise CorruptData(f"part {key}: the bytes do not match their checksum", key=key)
    if version not in _FORMAT_NAMES.values():
        known = " and ".join(map(str, _FORMAT_NAMES.values()))
        raise Incompatible(f"part {key} has inline format {version}, this code reads formats {known}", key=key)
    return version, rest


@lru_cache(maxsize=64)
def _schema_of(key_ddl: str, val_ddl: str) -> Schema:
    """The schema of two DDL texts. It is cached, because parsing dominates decoding, and the parts of a shard share one or two schemas."""
    return Schema.from_ddl(key_ddl, val_ddl)


@dataclass(frozen=True, slots=True)
class PartInMemory:
    """Decoded rows with the interface of an `OpenedPart`."""

    desc: Description
    table: pa.Table

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.table.num_rows)

    @property
    def groups(self) -> int:
        """One group holds all rows."""
        return 1

    @property
    def decoded_bytes(self) -> int:
        """The size of all rows in memory."""
        return int(self.table.nbytes)

    def read_group(self, _group: int, *, seen: Callable[[int], int] = as_it_is, use_threads: bool = False) -> pa.Table:
        """All rows."""
        return self.table

    def stream(self, _table_bytes: int, *, seen: Callable[[int], int] = as_it_is) -> Iterator[pa.Table]:
        """All rows as one table."""
        return iter([self.table])
