"""Lists and maps as bytes that compare in row order, so that Arrow and numpy can sort and compare them as one column.

Lists compare element by element; a list that begins another comes before it. Maps compare as lists of their entries, key before value, and
structs field by field. Null comes last, NaN after all numbers, and -0.0 equals 0.0. Rows have equal bytes exactly when they are equal.

    list      elements, then 00                     element   01 and the value, or 02 for null
    struct    its fields, each as an element        text      its bytes with 00 as 00 FF, then 00 00
    numbers   big-endian, arranged to compare as unsigned

The bytes exist in memory only and may change with any release. The order may not change, because parts are sorted by it (spec 26.2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.nested.layout import ListColumn, is_list

Bytes = npt.NDArray[np.uint8]

#: The limit on the bytes of one chunk, because the offsets of binary columns have 32 bits.
_BYTES_MAX = 2**31 - 1
_BINARY = pa.large_binary()


def ordered(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column of lists or maps as binary values of the same order, null where it is null. A chunk with too many bytes becomes
    several.
    """
    chunks = [piece for chunk in column.chunks for piece in _ordered_chunks(chunk)]
    return pa.chunked_array(chunks, pa.binary())


def _ordered_chunks(array: pa.Array) -> list[pa.Array]:
    found = _lists(array)
    if found.buffers()[2] is None or found.buffers()[2].size <= _BYTES_MAX or len(array) < 2:
        return [found.cast(pa.binary())]
    half = len(array) // 2
    return [*_ordered_chunks(array.slice(0, half)), *_ordered_chunks(array.slice(half))]


def _lists(array: pa.Array) -> pa.LargeBinaryArray:
    """The bytes of each list or map; null for null."""
    pieces = ListColumn.of(array)
    elements = _elements(pieces.values)
    _, edges, data = elements.buffers()
    starts = np.frombuffer(edges, np.int64, len(elements) + 1, 8 * elements.offset)[pieces.offsets]
    # The elements of a row are adjacent, so together they are one value.
    bodies = _binary(starts, data)
    ended = _joined(bodies, b"\x00")
    return ended if pieces.absent is None else pc.if_else(pieces.absent, pa.scalar(None, _BINARY), ended)


def _elements(values: pa.Array) -> pa.LargeBinaryArray:
    """The bytes of each value, after a mark for null or for a value. No result is null."""
    kind = values.type
    if pa.types.is_struct(kind):
        there = _joined(b"\x01", *(_elements(values.field(index)) for index in range(kind.num_fields)))
    elif is_list(kind):
        there = _joined(b"\x01", pc.fill_null(_lists(values), b""))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        text = pc.fill_null(values.cast(pa.binary()).cast(_BINARY), b"")
        there = _joined(b"\x01", pc.replace_substring(text, pattern=b"\x00", replacement=b"\x00\xff"), b"\x00\x00")
    else:
        there = _fixed(values)
    return there if not values.null_count else pc.if_else(values.is_null(), pa.scalar(b"\x02", _BINARY), there)


def _fixed(values: pa.Array) -> pa.LargeBinaryArray:
    """The bytes of values that all have the same size. The bytes under a null have no meaning."""
    digits = _digits(values)
    rows = np.empty((len(values), 1 + digits.shape[1]), np.uint8)
    rows[:, 0] = 1
    rows[:, 1:] = digits
    return _binary(np.arange(len(values) + 1, dtype=np.int64) * rows.shape[1], pa.py_buffer(rows))


def _digits(values: pa.Array) -> Bytes:
    """The bytes of each value, most significant first, one row for each value."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return _rows(values.cast(pa.uint8()).fill_null(0).to_numpy(zero_copy_only=False), 1)
    if pa.types.is_floating(kind):
        numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0
        bits = np.where(np.isnan(numbers), np.float64("nan"), numbers).view(np.uint64)
        sign = np.uint64(1 << 63)
        return _rows(np.where(bits >> np.uint64(63), ~bits, bits | sign).byteswap(), 8)
    width = kind.bit_width // 8
    buffer = values.buffers()[1]
    found = np.zeros((len(values), width), np.uint8)
    if buffer is not None:
        found = np.frombuffer(buffer, np.uint8, width * len(values), width * values.offset).reshape(-1, width)
    digits = found[:, ::-1].copy()
    digits[:, 0] ^= 0x80
    return digits


def _rows(numbers: npt.NDArray[np.generic], width: int) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, width)


def _joined(*parts: pa.Array | bytes) -> pa.LargeBinaryArray:
    """The concatenation of the parts, row by row. At least one part must be an array."""
    some = [pa.scalar(part, _BINARY) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*some, pa.scalar(b"", _BINARY))


def _binary(offsets: npt.NDArray[np.int64], data: pa.Buffer | None) -> pa.LargeBinaryArray:
    return pa.Array.from_buffers(
        _BINARY, len(offsets) - 1, [None, pa.py_buffer(np.ascontiguousarray(offsets)), data or pa.py_buffer(b"")]
    )
