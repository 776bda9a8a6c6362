"""The row groups of a part: cuts rows into row groups, and reads some of these without the rest of the file.

Besides what `codec.part` writes, the file's metadata has `persist.groups` (JSON: the first field of the key, and for each row group its
null count and bounds, in the form of statistics) and `persist.group_checks` (the CRC-32 of the bytes of each row group). The part's
descriptor has the size of the footer and its checksum. So a piece of the file can be verified: the descriptor proves the footer, and the
footer proves the row groups.

A row group is the unit of fetching within a part. Small row groups waste less when many readers each read a range of keys, but each takes
about 650 bytes of the footer. Measured on 1M rows of (bigint, 32-byte string, bigint): groups of 16 Ki rows make a file 0.5 % larger than
groups of 256 Ki, with a footer of 0.2 % of the file, and are written and read in the same time; groups of 8 Ki rows make it 2 % larger. On
50,000 rows with two more columns, groups of 4 Ki rows take a fifth more processor time than groups of 8 Ki, to write and to read.

Even a part of some thousand rows has four groups. With one or two, each of two adjacent ranges of keys that meet within the part would
fetch most of it. On 10,000 rows of the first kind, four groups take 3.96 ms to write and 0.90 ms to read; two take 3.54 ms and 0.77 ms.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist_engine.base.errors import CorruptData, check
from persist_engine.codec.damage import checksum, decoding
from persist_engine.model.batch import ColumnStats, Footing
from persist_engine.rows.part_stats import column_stats
from persist_engine.rows.schema import Schema

#: The rows of one row group, and its bytes in memory if rows are wide. A small part has `GROUPS_OF_SMALL` groups of at least
#: ROW_GROUP_ROWS_MIN rows. A part of few rows has `GROUPS_OF_FEW` groups of at least FEW_ROWS_MIN rows.
ROW_GROUP_ROWS = 16 * 1024
ROW_GROUP_ROWS_MIN, FEW_ROWS_MIN = 8192, 2048
ROW_GROUP_BYTES = 1 << 20
GROUPS_OF_SMALL, GROUPS_OF_FEW = 32, 4
_WIDE_ROWS_MIN = 64
#: The rows, and bytes, of the row groups that are decoded at once. With fewer, the calls cost more than the saved memory is worth.
DECODED_ROWS, DECODED_BYTES = 256 * 1024, 16 << 20

GROUPS, GROUP_CHECKS = "persist.groups", "persist.group_checks"
_CHECKS_MARK = b"persist-group-crc32s="
_DIGITS = 8
#: The bytes at the end of a file: the length of the footer, and PAR1.
_TAIL_BYTES = 8


def group_rows(table: pa.Table) -> int:
    """The number of rows of each row group but the last."""
    wide: int = max(_WIDE_ROWS_MIN, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
    return min(wide, _narrow_rows(table.num_rows))


def group_bytes(rows: int, size_bytes: int) -> int:
    """The approximate size in bytes of a row group in a part with `rows` rows and `size_bytes` bytes."""
    return min(ROW_GROUP_BYTES, size_bytes, size_bytes * _narrow_rows(rows) // max(1, rows))


def _narrow_rows(rows: int) -> int:
    few = max(FEW_ROWS_MIN, -(-rows // GROUPS_OF_FEW))
    return min(ROW_GROUP_ROWS, max(min(ROW_GROUP_ROWS_MIN, few), -(-rows // GROUPS_OF_SMALL)))


def rows_of(metadata: pq.FileMetaData, groups: Iterable[int]) -> int:
    """The number of rows of `groups`."""
    return sum(int(metadata.row_group(group).num_rows) for group in groups)


def span_of(metadata: pq.FileMetaData, groups: Sequence[int]) -> tuple[int, int]:
    """The offsets in the file at which the bytes of `groups` (at least one) begin and end."""
    spans = [_span(metadata.row_group(group)) for group in groups]
    return min(start for start, _ in spans), max(end for _, end in spans)


def encoded_bytes(metadata: pq.FileMetaData, groups: Iterable[int]) -> int:
    """The approximate size of the rows of `groups` in memory. It is too small for dictionaries and deltas: Parquet counts encoded bytes."""
    return sum(metadata.row_group(group).total_byte_size for group in groups)


def decoded_together(metadata: pq.FileMetaData, groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`groups`, divided into the groups that are decoded at once."""
    out: list[list[int]] = []
    narrow_rows = _narrow_rows(metadata.num_rows)
    rows = size_bytes = 0
    for number in groups:
        more_rows, more_bytes = rows_of(metadata, [number]), encoded_bytes(metadata, [number])
        # Wide rows cut such a group, at ROW_GROUP_BYTES in memory. Encoded, they may be far smaller.
        if more_rows < narrow_rows:
            more_bytes = max(more_bytes, ROW_GROUP_BYTES)
        if not out or rows + more_rows > DECODED_ROWS or size_bytes + more_bytes > DECODED_BYTES:
            out.append([])
            rows = size_bytes = 0
        out[-1].append(number)
        rows, size_bytes = rows + more_rows, size_bytes + more_bytes
    return tuple(map(tuple, out))


def groups_metadata(table: pa.Table, schema: Schema, rows: int) -> dict[str, str]:
    """The metadata of row groups of `rows` rows each. It has zeros for the checks, which `fill_checks` sets in the finished file."""
    field = schema.key.field(0)
    groups: list[tuple[int, str | None, str | None]] = []
    column = pa.chunked_array([chunk.field(0) for chunk in table.column("key").chunks], field.type)
    for start in range(0, max(1, table.num_rows), rows):  # a file without rows has one group
        stats = column_stats(column.slice(start, rows))
        groups.append((stats.null_count, stats.lower, stats.upper))
    zeros = "0" * _DIGITS * len(groups)
    return {
        GROUPS: json.dumps({"column": field.name, "groups": groups}, separators=(",", ":")),
        GROUP_CHECKS: _CHECKS_MARK.decode() + zeros,
    }


def fill_checks(data: bytearray) -> None:
    """Sets the checks of the row groups of a file that `groups_metadata` describes."""
    metadata = pq.read_metadata(pa.BufferReader(pa.py_buffer(data)))
    at = data.rfind(_CHECKS_MARK) + len(_CHECKS_MARK)
    check(at >= len(_CHECKS_MARK), "a part without the checks of its row groups")
    view = memoryview(data)
    for group in range(metadata.num_row_groups):
        start, end = _span(metadata.row_group(group))
        first = at + group * _DIGITS
        data[first : first + _DIGITS] = b"%08x" % zlib.crc32(view[start:end])


def footing_of(data: bytes, filtered: Sequence[str] = ()) -> Footing:
    """The size and checksum of a part's footer, and the size of the filters of its columns `filtered`."""
    size_bytes = int.from_bytes(bytes(data[-8:-4]), "little") + _TAIL_BYTES
    footing = Footing(size_bytes, checksum(memoryview(data)[-size_bytes:]))
    if not filtered:
        return footing
    from persist_engine.codec.bloom import filters_bytes

    return replace(footing, filters_bytes=filters_bytes(data), filtered=tuple(filtered))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The position of one row group in its file, the check of its bytes, and bounds of the first field of the key."""

    start: int
    end: int
    crc: str
    stats: ColumnStats


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some verified row groups of a part, as a file: their bytes are in their places, and zeros are elsewhere. The zeros take no memory
    until they are read. Its length is the number of bytes that were fetched.
    """

    data: memoryview
    groups: tuple[int, ...]
    fetched_bytes: int

    def __len__(self) -> int:
        return self.fetched_bytes


@dataclass(frozen=True, slots=True)
class Footer:
    """A verified footer. `column` is the first field of the key."""

    data: bytes
    metadata: pq.FileMetaData
    column: str
    groups: tuple[RowGroup, ...]

    @classmethod
    def read(cls, data: bytes, *, key: str, expected_checksum: str) -> Footer:
        """Decodes the last bytes of a part. Raises CorruptData with `key` unless they match the checksum."""
        if (found := checksum(data)) != expected_checksum:
            raise CorruptData(
                f"part {key}: the checksum of its footer is {found}, state says {expected_checksum}", key=key
            )
        with decoding(key):
            metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + data))
            texts = metadata.metadata
            named = json.loads(texts[GROUPS.encode()])
            digits = texts[GROUP_CHECKS.encode()].removeprefix(_CHECKS_MARK).decode()
            crcs = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
            spans = [_span(metadata.row_group(group)) for group in range(metadata.num_row_groups)]
            stats = [ColumnStats(*each) for each in named["groups"]]
            groups = [RowGroup(*span, crc, each) for span, crc, each in zip(spans, crcs, stats, strict=True)]
        return cls(data, metadata, str(named["column"]), tuple(groups))

    def fetched(self, wanted: Sequence[int], get: Callable[[int, int], bytes], *, size_bytes: int, key: str) -> Pieces:
        """Fetches the row groups `wanted`, in order. `get(start, size)` fetches bytes of the part; it is called once for each stretch of
        adjacent row groups. Raises CorruptData with `key` unless the bytes match their checks. `size_bytes` is the size of the part.
        """
        data = np.zeros(size_bytes, np.uint8)
        data[size_bytes - len(self.data) :] = np.frombuffer(self.data, np.uint8)
        fetched_bytes = len(self.data)
        for first, last in _neighbours(wanted):
            start, end = self.groups[first].start, self.groups[last].end
            piece = memoryview(get(start, end - start))
            for number in range(first, last + 1):
                group = self.groups[number]
                found = f"{zlib.crc32(piece[group.start - start : group.end - start]):08x}"
                if found != group.crc:
                    raise CorruptData(
                        f"part {key}: the CRC-32 of row group {number} is {found}, not {group.crc}", key=key
                    )
            data[start:end] = np.frombuffer(piece, np.uint8)
            fetched_bytes += end - start
        return Pieces(data.data, tuple(wanted), fetched_bytes)


def check_row_groups(data: bytes, footing: Footing, *, key: str) -> Iterator[tuple[RowGroup, pa.ChunkedArray]]:
    """Yields each row group of the whole part `data`, and its values of the first field of the key. Raises CorruptData with `key` unless
    the part has the footer that its descriptor says, and the row groups match the checks in the footer.
    """
    footer = Footer.read(data[-footing.size_bytes :], key=key, expected_checksum=footing.checksum)
    every = range(len(footer.groups))
    footer.fetched(every, lambda start, size: data[start : start + size], size_bytes=len(data), key=key)
    with decoding(key):
        file = pq.ParquetFile(pa.BufferReader(data))
        tables = [file.read_row_group(number, columns=[f"key.{footer.column}"]) for number in every]
        values = [pc.struct_field(table.column("key"), [footer.column]) for table in tables]
    yield from zip(footer.groups, values, strict=True)


def _neighbours(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The ascending `numbers` as stretches without gaps, each as its first and last number."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and out[-1][1] + 1 == number:
            out[-1] = (out[-1][0], number)
        else:
            out.append((number, number))
    return out


def _span(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """The offsets in the file at which the pages of a row group begin and end."""
    columns = [group.column(index) for index in range(group.num_columns)]
    starts = [
        column.data_page_offset
        if not column.has_dictionary_page
        else min(column.data_page_offset, column.dictionary_page_offset)
        for column in columns
    ]
    ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return min(starts), max(ends)
