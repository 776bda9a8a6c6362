"""The Bloom filters of a part: which values of a column a row group certainly does not hold.

They are Parquet's own (split blocks, xxHash64 of a value's plain form), so other readers use them, too. pyarrow writes them between the row
groups and the footer, but cannot read them, so this module does. The part's descriptor has the number of bytes from the first filter to the
footer, and the columns with filters; the footer has the CRC-32 of these bytes.

Invariant: `lacks` is True only if no row of the group has the value. It is False when it cannot decide, and when a filter is damaged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist_engine.base.errors import CorruptData, check
from persist_engine.codec.damage import decoding
from persist_engine.model.batch import Footing
from persist_engine.model.state import FILTERED
from persist_engine.rows.comparable import EXACT, NAN, Comparable

#: The share of the row groups without a value that a filter does not rule out. A filter takes one to two and a half bytes for each row,
#: since its size is a power of two.
FALSE_POSITIVES = 0.01
#: The number of values that a verification looks up in each filter.
CHECKED_VALUES = 16
FILTERS_CHECK = "persist.filters_check"
_MARK, _DIGITS = b"persist-filters-crc32=", 8

#: Parquet's constants for a split block. A value sets one bit in each of its eight words.
_SALTS = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)
_BLOCK_BYTES = 32
#: The bytes after the size in the Thrift header of a filter: split blocks, xxHash, not compressed.
_HEADER_TAIL = b"\x1c\x1c\x00\x00" * 3 + b"\x00"
_INTS = {"INT32": 4, "INT64": 8}
_FLOATS = {"FLOAT": "<f4", "DOUBLE": "<f8"}


def is_filterable(kind: pa.DataType) -> bool:
    """Whether a column of this type may have filters."""
    return not (pa.types.is_nested(kind) or pa.types.is_boolean(kind))


def filtered_paths(stored: pa.Schema, wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns of `wanted` (`key.<field>` and `val.<field>`) for which a file with this schema can have filters."""
    kinds = {
        f"{side}.{each.name}": each.type
        for side in ("key", "val")
        if side in stored.names
        for each in stored.field(side).type
        if "." not in each.name  # dots make Parquet's paths ambiguous
    }
    return tuple(path for path in wanted if path in kinds and is_filterable(kinds[path]))


def filter_options(paths: Sequence[str], rows: int) -> dict[str, dict[str, float]]:
    """The argument of pyarrow's writer for filters of these columns, with row groups of at most `rows` rows."""
    return {path: {"ndv": rows, "fpp": FALSE_POSITIVES} for path in paths}


def encode_filtered(paths: Sequence[str]) -> bytes:
    """The bytes with which state records the columns for which new parts get filters (spec 17.14)."""
    return json.dumps(list(paths), ensure_ascii=False, separators=(",", ":")).encode()


def decode_filtered(stored: bytes) -> tuple[str, ...]:
    """Inverse of `encode_filtered`. Raises CorruptData for any other bytes."""
    try:
        paths = json.loads(stored)
    except (ValueError, RecursionError):
        paths = None
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise CorruptData("the list of columns with Bloom filters does not decode", key=FILTERED)
    return tuple(paths)


def filters_metadata() -> dict[str, str]:
    """The metadata of a file with filters. It has zeros for the check, which `fill_filters_check` sets in the finished file."""
    return {FILTERS_CHECK: (_MARK + b"0" * _DIGITS).decode()}


def fill_filters_check(data: bytearray) -> None:
    """Sets the check of the filters of a file."""
    at = data.rfind(_MARK) + len(_MARK)
    check(at >= len(_MARK), "a part without the check of its filters")
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[at : at + _DIGITS] = b"%08x" % zlib.crc32(memoryview(data)[end - filters_bytes(data) : end])


def filters_bytes(data: bytes | bytearray) -> int:
    """The number of bytes from the first filter of a file to its footer. 0 if it has no filters."""
    metadata = pq.read_metadata(pa.BufferReader(pa.py_buffer(data)))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    offsets = [group.column(index).bloom_filter_offset for group in groups for index in range(group.num_columns)]
    first = min((offset for offset in offsets if offset is not None), default=None)
    return 0 if first is None else len(data) - 8 - int.from_bytes(data[-8:-4], "little") - first


@dataclass(frozen=True, slots=True)
class PartFilters:
    """The filters of one part. `start` is the offset in the file at which `data` begins."""

    data: bytes
    start: int
    metadata: pq.FileMetaData
    _columns: dict[str, int]
    _hashes: dict[tuple[str, Comparable], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes, *, start: int, metadata: pq.FileMetaData) -> PartFilters | None:
        """The filters in `data`, the bytes before the footer. None if they are not the bytes that were written."""
        stored = (metadata.metadata or {}).get(FILTERS_CHECK.encode(), b"")
        if stored != _MARK + b"%08x" % zlib.crc32(data) or not metadata.num_row_groups:
            return None
        group = metadata.row_group(0)
        paths = [group.column(index).path_in_schema for index in range(group.num_columns)]
        return cls(data, start, metadata, {path: index for index, path in enumerate(paths) if paths.count(path) == 1})

    def lacks(self, group: int, path: tuple[str, ...], value: Comparable) -> bool:
        """Whether no row of the row group has the value in the field at `path`."""
        name = ".".join(path)
        index = self._columns.get(name) if len(path) == 2 else None
        if index is None:
            return False
        column = self.metadata.row_group(group).column(index)
        bits = self._bits(column.bloom_filter_offset, column.bloom_filter_length)
        if bits is None:
            return False
        if (name, value) not in self._hashes:
            self._hashes[name, value] = tuple(map(_hash, plain_forms(value, self.metadata.schema.column(index))))
        hashes = self._hashes[name, value]
        return bool(hashes) and not any(_may_hold(bits, each) for each in hashes)

    def _bits(self, offset: int | None, length: int | None) -> memoryview | None:
        """The bits of a filter. None for a filter that this code does not read."""
        if (
            offset is None
            or length is None
            or not self.start <= offset <= offset + length <= self.start + len(self.data)
        ):
            return None
        whole = memoryview(self.data)[offset - self.start :][:length]
        for size in (1, 2, 3, 4, 5):
            count = length - 1 - size - len(_HEADER_TAIL)
            if count > 0 and count % _BLOCK_BYTES == 0 and bytes(whole[: length - count]) == _header(count):
                return whole[length - count :]
        return None


def wrong_filters(data: bytes, footing: Footing, *, key: str) -> Iterator[str]:
    """Yields what is wrong with the filters of the whole part `data`. Looks up CHECKED_VALUES existing values in each filter: if a filter
    lacked one, reads would miss its rows. Raises CorruptData with `key` for bytes that do not decode.
    """
    start, end = len(data) - footing.size_bytes - footing.filters_bytes, len(data) - footing.size_bytes
    with decoding(key):
        file = pq.ParquetFile(pa.BufferReader(data))
        filters = PartFilters.read(data[start:end], start=start, metadata=file.metadata)
        if filters is None:
            yield "the Bloom filters do not match their check"
            return
        for group in range(file.metadata.num_row_groups):
            for path in footing.filtered:
                side, _, name = path.partition(".")
                values = pc.struct_field(file.read_row_group(group, columns=[path]).column(side), [name]).drop_null()
                picked = np.unique(np.linspace(0, len(values), CHECKED_VALUES, endpoint=False).astype(np.int64))
                for value in _comparables(values.take(pa.array(picked[: len(values)]))):
                    if filters.lacks(group, (side, name), value):
                        yield f"the Bloom filter of {path} in row group {group} lacks a value that is there"


def _comparables(values: pa.ChunkedArray) -> list[Comparable]:
    if pa.types.is_temporal(values.type):
        values = values.cast(pa.int64() if values.type.bit_width == 64 else pa.int32())
    if pa.types.is_floating(values.type):
        return [NAN if value != value else (0, value) for value in values.to_pylist()]  # noqa: PLR0124 - NaN
    found: list[Comparable] = values.to_pylist()
    return found


def plain_forms(value: Comparable, column: pq.ColumnSchema) -> tuple[bytes, ...]:
    """The plain forms of all values that equal `value` in row order, as the file's column would hold them. Empty if it is unknown what to
    look for.
    """
    kind = column.physical_type
    if isinstance(value, tuple):
        return () if value == NAN or kind not in _FLOATS else _float_forms(value[1], _FLOATS[kind])
    if kind == "BYTE_ARRAY":
        return (value.encode(),) if isinstance(value, str) else (value,) if isinstance(value, bytes) else ()
    if isinstance(value, Decimal):
        value = int(value.scaleb(column.scale, EXACT))
    if type(value) is not int:
        return ()
    size = _INTS.get(kind, column.length if kind == "FIXED_LEN_BYTE_ARRAY" else 0)
    if not size or not -(1 << 8 * size - 1) <= value < 1 << 8 * size - 1:
        return ()
    return (value.to_bytes(size, "little" if kind in _INTS else "big", signed=True),)


def _float_forms(value: float, form: str) -> tuple[bytes, ...]:
    stored = np.array([value], "<f8").astype(form)
    if float(stored[0]) != value:
        return ()
    return tuple(np.array([each], form).tobytes() for each in ((0.0, -0.0) if value == 0 else (value,)))


def _hash(plain: bytes) -> int:
    import xxhash  # imported here, because only reads that use filters need it

    return xxhash.xxh64_intdigest(plain)


def _may_hold(bits: memoryview, hashed: int) -> bool:
    blocks = len(bits) // _BLOCK_BYTES
    start = ((hashed >> 32) * blocks >> 32) * _BLOCK_BYTES
    low = hashed & 0xFFFFFFFF
    for number, salt in enumerate(_SALTS):
        bit = (low * salt & 0xFFFFFFFF) >> 27
        at = start + 4 * number
        if not int.from_bytes(bits[at : at + 4], "little") >> bit & 1:
            return False
    return True


@cache
def _header(count: int) -> bytes:
    """The header of a filter with `count` bytes of bits, in Thrift's compact form."""
    left, size = 2 * count, b""
    while left >= 0x80:
        size += bytes([left & 0x7F | 0x80])
        left >>= 7
    return b"\x15" + size + bytes([left]) + _HEADER_TAIL
