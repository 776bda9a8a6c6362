"""The row groups of a part: how its rows are cut into them, and reading some of them without the rest of the file.

The file's metadata has, beside what `codec.part` writes, `persist.groups` (JSON: the first field of the key, and for each row group its
null count and bounds, as statistics have them) and `persist.group_checks` (the CRC-32 of the bytes of each). The part's descriptor has
the size of the footer and its checksum. So bytes that were fetched alone prove themselves: the descriptor proves the footer, and the
footer the row groups.

A row group is the unit of fetching within a part. Small ones waste less when many readers take a range of keys each, and cost more of the
footer, some 650 bytes each. Measured on 1M rows of (bigint, 32-byte string, bigint): groups of 16 Ki rows make a file 0.5 % larger than
groups of 256 Ki, with a footer of 0.2 % of the file, and are written and read in the same time; groups of 8 Ki rows make it 2 % larger.
On 50,000 rows with two columns more, groups of 4 Ki rows take a fifth more processor time, to write and to read, than groups of 8 Ki.

A part of some thousand rows has four groups all the same. With one or two, each of two ranges of keys that meet within the part fetches
most of it. On 10,000 rows of the first kind, four groups take 3.96 ms to write and 0.90 ms to read, two take 3.54 and 0.77 ms.
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

#: Rows of one group, and the bytes in memory of wide ones. A small part has `GROUPS_OF_SMALL` groups, of at least ROW_GROUP_ROWS_MIN rows.
#: One of few rows has `GROUPS_OF_FEW` groups, of at least FEW_ROWS_MIN rows.
ROW_GROUP_ROWS = 16 * 1024
ROW_GROUP_ROWS_MIN, FEW_ROWS_MIN = 8192, 2048
ROW_GROUP_BYTES = 1 << 20
GROUPS_OF_SMALL, GROUPS_OF_FEW = 32, 4
_WIDE_ROWS_MIN = 64
#: Rows, and bytes, of the row groups that are decoded at once: fewer cost more in calls than they save in memory.
DECODED_ROWS, DECODED_BYTES = 256 * 1024, 16 << 20

GROUPS, GROUP_CHECKS = "persist.groups", "persist.group_checks"
_CHECKS_MARK = b"persist-group-crc32s="
_DIGITS = 8
#: The length of the footer, and PAR1.
_TAIL_BYTES = 8


def group_rows(table: pa.Table) -> int:
    """The number of rows of each row group but the last."""
    wide: int = max(_WIDE_ROWS_MIN, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
    return min(wide, _narrow_rows(table.num_rows))


def group_bytes(rows: int, size_bytes: int) -> int:
    """About the size of a row group in a part of so many rows and bytes."""
    return min(ROW_GROUP_BYTES, size_bytes, size_bytes * _narrow_rows(rows) // max(1, rows))


def _narrow_rows(rows: int) -> int:
    few = max(FEW_ROWS_MIN, -(-rows // GROUPS_OF_FEW))
    return min(ROW_GROUP_ROWS, max(min(ROW_GROUP_ROWS_MIN, few), -(-rows // GROUPS_OF_SMALL)))


def rows_of(metadata: pq.FileMetaData, groups: Iterable[int]) -> int:
    """The number of rows of `groups`."""
    return sum(int(metadata.row_group(group).num_rows) for group in groups)


def span_of(metadata: pq.FileMetaData, groups: Sequence[int]) -> tuple[int, int]:
    """Where the bytes of `groups`, at least one, begin and end in the file."""
    spans = [_span(metadata.row_group(group)) for group in groups]
    return min(start for start, _ in spans), max(end for _, end in spans)


def encoded_bytes(metadata: pq.FileMetaData, groups: Iterable[int]) -> int:
    """About the size of their rows in memory. Parquet counts bytes before compression; dictionaries and deltas make that too small."""
    return sum(metadata.row_group(group).total_byte_size for group in groups)


def decoded_together(metadata: pq.FileMetaData, groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`groups` as the groups that are decoded at once."""
    out: list[list[int]] = []
    rows = size_bytes = 0
    for number in groups:
        more_rows, more_bytes = rows_of(metadata, [number]), encoded_bytes(metadata, [number])
        if not out or rows + more_rows > DECODED_ROWS or size_bytes + more_bytes > DECODED_BYTES:
            out.append([])
            rows = size_bytes = 0
        out[-1].append(number)
        rows, size_bytes = rows + more_rows, size_bytes + more_bytes
    return tuple(map(tuple, out))


def groups_metadata(table: pa.Table, schema: Schema, rows: int) -> dict[str, str]:
    """The metadata of row groups of `rows` rows each, with zeros for the checks, which `fill_checks` sets in the finished file."""
    field = schema.key.field(0)
    groups: list[tuple[int, str | None, str | None]] = []
    column = pa.chunked_array([chunk.field(0) for chunk in table.column("key").chunks], field.type)
    for start in range(0, max(1, table.num_rows), rows):  # without rows there is one group
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
    """Where the footer of a part is, and the filters of its columns `filtered`."""
    size_bytes = int.from_bytes(bytes(data[-8:-4]), "little") + _TAIL_BYTES
    footing = Footing(size_bytes, checksum(memoryview(data)[-size_bytes:]))
    if not filtered:
        return footing
    from persist_engine.codec.bloom import filters_bytes

    return replace(footing, filters_bytes=filters_bytes(data), filtered=tuple(filtered))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The place of one row group in its file, the check of its bytes, and bounds of the first field of the key."""

    start: int
    end: int
    crc: str
    stats: ColumnStats


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some row groups of a part, each verified: the file's bytes in their places, and zeros elsewhere, which take no memory until they are
    read. Its length is that of the bytes that were fetched.
    """

    data: memoryview
    groups: tuple[int, ...]
    fetched_bytes: int

    def __len__(self) -> int:
        return self.fetched_bytes


@dataclass(frozen=True, slots=True)
class Footer:
    """A verified footer: `column`, the first field of the key, and the row groups of the part."""

    data: bytes
    metadata: pq.FileMetaData
    column: str
    groups: tuple[RowGroup, ...]

    @classmethod
    def read(cls, data: bytes, *, key: str, expected_checksum: str) -> Footer:
        """Decodes the last bytes of a part. CorruptData with `key` unless they match the checksum."""
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
        """The row groups `wanted`, in order. `get(start, size)` fetches bytes of the part; it is called once for each row of neighbours.
        CorruptData with `key` unless the bytes match their checks. `size_bytes` is the size of the part.
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
    """Yields each row group of the whole part `data`, and its values of the first field of the key. CorruptData with `key` unless the part
    has the footer of its descriptor, and that the checks of its row groups.
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
    """The rising `numbers` as stretches without gaps: first and last of each."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and out[-1][1] + 1 == number:
            out[-1] = (out[-1][0], number)
        else:
            out.append((number, number))
    return out


def _span(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Where the pages of a row group begin and end in the file."""
    columns = [group.column(index) for index in range(group.num_columns)]
    starts = [
        column.data_page_offset
        if not column.has_dictionary_page
        else min(column.data_page_offset, column.dictionary_page_offset)
        for column in columns
    ]
    ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return min(starts), max(ends)
