"""Rows of a struct as bytes and back, column by column: one binary value per row, for stores that hold only bytes.

    | fixed fields, widest first | u32 length of each string | presence bits | zeros to 8 | strings end to end | zeros to 8 |

A list or a map counts as a string: the number of its elements, the size of each, and the elements as rows of one field, or of key and
value.

Two rows have equal bytes exactly when they are equal, as `rows.columns` defines equality (one zero, one NaN; a null struct differs from a
struct of nulls). The bytes under nulls have no effect. Every row is a whole number of 64-bit words. This is not a durable format: it may
change with any release, and no data outlives the process that wrote it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import CorruptData
from persist_engine.rows.columns import canonical_floats, empty_struct
from persist_engine.rows.nested.layout import ELEMENT, ListColumn, is_list, values_type

WORD_BYTES = 8
#: Rows are decoded in chunks of this size. A column of strings can hold twice as much, which leaves room for one large row.
_CHUNK_BYTES = 1 << 30

_PADDING = tuple(b"\0" * count for count in range(WORD_BYTES))


@dataclass(frozen=True, slots=True)
class _Field:
    """One flat field: a leaf, or, with `is_struct`, the presence of a nested struct."""

    path: tuple[int, ...]
    type: pa.DataType
    is_struct: bool
    name: str
    """The name of its slot in the fixed part. For strings, the slot holds the length."""


class RowCodec:
    """Encodes and decodes rows of one struct type that a shard's schema allows. Immutable."""

    def __init__(self, struct_type: pa.DataType) -> None:
        self._type = struct_type
        self._fields = tuple(_flat_fields(struct_type, ()))
        leaves = [(field.name, np.dtype(_numpy_type(field.type))) for field in self._fields if not field.is_struct]
        leaves.sort(key=lambda leaf: -leaf[1].itemsize)
        ends = list(itertools.accumulate(leaf[1].itemsize for leaf in leaves))
        presence_start = ends[-1] if ends else 0
        self._presence = slice(presence_start, presence_start + -(-len(self._fields) // 8))
        self._fixed_bytes = _whole_words(self._presence.stop)
        self._slots: np.dtype[np.void] = np.dtype(
            {
                "names": [name for name, _ in leaves],
                "formats": [data_type for _, data_type in leaves],
                "offsets": [end - leaf[1].itemsize for end, leaf in zip(ends, leaves, strict=True)],
                "itemsize": self._fixed_bytes,
            }
        )
        self._lists = {field.name: _ListCodec(field.type) for field in self._fields if is_list(field.type)}

    def encode(self, rows: pa.ChunkedArray | pa.Array) -> pa.LargeBinaryArray:
        """The bytes of each row. The struct itself must not be null."""
        if isinstance(rows, pa.ChunkedArray):
            # Encode chunk by chunk, because all strings together may exceed the capacity of one string column.
            return pa.concat_arrays([self.encode(chunk) for chunk in rows.chunks] or [pa.array([], pa.large_binary())])
        array = rows
        count = len(array)
        fixed = np.zeros((count, self._fixed_bytes), np.uint8)
        slots = fixed.view(self._slots)[:, 0] if self._fixed_bytes else None
        present = np.zeros((count, len(self._fields)), np.bool_)
        strings: list[pa.Array] = []
        for index, field in enumerate(self._fields):
            column, there = _leaf(array, field.path)
            present[:, index] = there
            if field.is_struct:
                continue
            assert slots is not None
            if _is_string(field.type):
                own = self._lists.get(field.name)
                text = column.cast(pa.binary()).cast(pa.large_binary()) if own is None else own.encode(column)
                strings.append(text if there.all() else pc.if_else(pa.array(there), text, pa.scalar(b"", text.type)))
                slots[field.name] = pc.binary_length(strings[-1]).to_numpy()
            else:
                slots[field.name] = _bits(column, there, field.type)
        fixed[:, self._presence] = np.packbits(present, axis=1, bitorder="little")
        head = _binary(np.arange(count + 1, dtype=np.int64) * self._fixed_bytes, fixed)
        if not strings:
            return head
        lengths = sum(pc.binary_length(text).to_numpy() for text in strings)
        padding = pa.array(_PADDING, pa.large_binary()).take(pa.array(-np.asarray(lengths) % WORD_BYTES))
        return pc.binary_join_element_wise(head, *strings, padding, pa.scalar(b"", pa.large_binary()))

    def decode(self, rows: pa.LargeBinaryArray) -> pa.ChunkedArray:
        """Inverse of `encode`, with canonical floats. Raises CorruptData when the bytes cannot be of this type.

        The result is chunked, because a column of strings holds 2 GiB at most.
        """
        starts, ends, _ = _spans(rows)
        size_bytes = int(ends[-1] - starts[0]) if len(rows) else 0
        cuts = starts[0] + np.arange(_CHUNK_BYTES, size_bytes, _CHUNK_BYTES) if size_bytes > _CHUNK_BYTES else []
        edges = np.unique([0, *np.searchsorted(starts, cuts).tolist(), len(rows)]).tolist()
        chunks = [self._decode(rows.slice(a, b - a)) for a, b in itertools.pairwise(edges)]
        return pa.chunked_array(chunks, self._type)

    def _decode(self, rows: pa.LargeBinaryArray) -> pa.StructArray:
        count = len(rows)
        if not self._fields:
            return empty_struct(count)
        starts, ends, data = _spans(rows)
        sizes = ends - starts
        _need(bool((sizes >= self._fixed_bytes).all()), "a row is shorter than its fixed fields")
        fixed = data[starts[:, None] + np.arange(self._fixed_bytes)] if (sizes != sizes[0]).any() else None
        if fixed is None:
            fixed = np.ascontiguousarray(data[starts[0] : ends[-1]].reshape(count, -1)[:, : self._fixed_bytes])
        slots = fixed.view(self._slots)[:, 0]
        bits = np.unpackbits(fixed[:, self._presence], axis=1, count=len(self._fields), bitorder="little")
        present = bits.astype(np.bool_)
        texts = self._texts(rows, starts, ends, slots)
        leaves: dict[tuple[int, ...], tuple[Any, npt.NDArray[np.bool_]]] = {}
        for index, field in enumerate(self._fields):
            there = present[:, index]
            if field.is_struct:
                leaves[field.path] = (None, there)
            elif field.name in self._lists:
                leaves[field.path] = (self._lists[field.name].decode(texts[field.name], there), there)
            elif _is_string(field.type):
                leaves[field.path] = (texts[field.name], there)
            else:
                leaves[field.path] = (slots[field.name], there)
        return _struct(self._type, (), leaves, count)

    def _texts(
        self, rows: pa.LargeBinaryArray, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], slots: Any
    ) -> dict[str, pa.Array]:
        """The strings of each column. Every row is split into pieces (fixed part, each string, padding); the pieces of one column are
        gathered.
        """
        names = [field.name for field in self._fields if not field.is_struct and _is_string(field.type)]
        if not names:
            return {}
        edges = np.empty((len(starts), len(names) + 2), np.int64)
        edges[:, 0] = starts
        edges[:, 1] = starts + self._fixed_bytes
        for index, name in enumerate(names):
            edges[:, index + 2] = edges[:, index + 1] + slots[name]
        _need(bool((edges[:, -1] <= ends).all()), "strings extend past the end of their row")
        pieces = _binary(np.append(edges.ravel(), ends[-1]), rows.buffers()[2])
        return {
            name: pieces.take(pa.array(np.arange(index + 1, edges.size, len(names) + 2)))
            for index, name in enumerate(names)
        }


class _ListCodec:
    """Encodes and decodes the lists or maps of one type. Every value is a whole number of words."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._is_map = pa.types.is_map(kind)
        self._rows = values_type(kind) if self._is_map else pa.struct([pa.field(ELEMENT, values_type(kind))])
        self._codec = RowCodec(self._rows)

    def encode(self, array: pa.Array) -> pa.LargeBinaryArray:
        """The bytes of each list. The bytes of null are those of a list without elements."""
        pieces = ListColumn.of(array)
        values = pieces.values
        rows = values if self._is_map else pa.StructArray.from_arrays([values], fields=list(self._rows))
        elements = self._codec.encode(rows)
        edges, _, data = _spans(elements)
        edges = np.append(edges, len(data))
        offsets = pieces.offsets.astype(np.int64)
        heads = np.insert(np.diff(edges), offsets[:-1], np.diff(offsets)).astype(np.uint64)
        starts = WORD_BYTES * (offsets + np.arange(len(offsets)))
        bodies = _binary(edges[offsets], pa.py_buffer(data))
        return pc.binary_join_element_wise(_binary(starts, heads), bodies, pa.scalar(b"", pa.large_binary()))

    def decode(self, texts: pa.LargeBinaryArray, there: npt.NDArray[np.bool_]) -> pa.Array:
        """Inverse of `encode`; null where not `there`."""
        count = len(texts)
        starts, ends, data = _spans(texts)
        sizes = ends - starts
        _need(bool((sizes[there] >= WORD_BYTES).all() and (sizes % WORD_BYTES == 0).all()), "a list has no whole words")
        words = np.ascontiguousarray(data[starts[0] if count else 0 :][: int(sizes.sum())]).view(np.uint64)
        first = (starts - starts[0]) // WORD_BYTES if count else starts
        counts = np.zeros(count, np.uint64)
        counts[there] = words[first[there]]
        _need(bool((counts <= sizes.astype(np.uint64) // WORD_BYTES).all()), "a list has more elements than words")
        offsets = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
        _need(int(offsets[-1]) < 1 << 31, "lists have too many elements")
        lengths = np.diff(offsets)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        at = np.repeat(first + 1, lengths) + within
        _need(not len(at) or int(at[-1]) < len(words), "a list ends before its sizes")
        heads = np.where(there, WORD_BYTES * (1 + lengths), 0)
        steps = np.insert(words[at].view(np.int64), offsets[:-1], heads)
        edges = np.concatenate([[0], np.cumsum(steps)])
        rows = edges[offsets + np.arange(count + 1)]
        _need(
            bool((steps >= 0).all() and np.array_equal(rows, np.append(first, len(words)) * WORD_BYTES)),
            "a list's sizes",
        )
        is_element = np.ones(len(steps), np.bool_)
        is_element[offsets[:-1] + np.arange(count)] = False
        pieces = _binary(edges, pa.py_buffer(words)).take(pa.array(np.flatnonzero(is_element)))
        found = self._codec.decode(pieces)
        values = pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], self._rows)
        absent = None if there.all() else pa.array(~there)
        return ListColumn(offsets.astype(np.int32), values if self._is_map else values.field(0), absent).array(
            self._kind
        )


def _flat_fields(struct_type: pa.DataType, path: tuple[int, ...]) -> list[_Field]:
    out: list[_Field] = []
    for index in range(struct_type.num_fields):
        here = (*path, index)
        child = struct_type.field(index).type
        is_struct = pa.types.is_struct(child)
        out.append(_Field(here, child, is_struct, ".".join(map(str, here))))
        if is_struct:
            out += _flat_fields(child, here)
    return out


def _leaf(array: pa.StructArray, path: tuple[int, ...]) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The column at `path`, and where it and every struct around it is not null."""
    there = np.ones(len(array), np.bool_)
    for index in path:
        array = array.field(index)
        if array.null_count:
            there &= array.is_valid().to_numpy(zero_copy_only=False)
    return array, there


def _is_string(data_type: pa.DataType) -> bool:
    """Whether values have no fixed size."""
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type) or is_list(data_type))


def _numpy_type(data_type: pa.DataType) -> str:
    if _is_string(data_type):
        return "u4"
    if pa.types.is_boolean(data_type):
        return "u1"
    if pa.types.is_decimal(data_type):
        return "V16"
    return f"i{data_type.bit_width // 8}"


def _bits(column: pa.Array, there: npt.NDArray[np.bool_], data_type: pa.DataType) -> Any:
    """The bits of each value; zero where the value is absent."""
    if pa.types.is_boolean(data_type):
        bits = column.cast(pa.uint8()).fill_null(0).to_numpy(zero_copy_only=False)
    else:
        canonical = canonical_floats(column) if pa.types.is_floating(data_type) else column
        width, buffer = _numpy_type(data_type), canonical.buffers()[1]
        if buffer is None:
            return np.zeros(len(column), width)
        bits = np.frombuffer(buffer, width, count=canonical.offset + len(canonical))[canonical.offset :]
    if there.all():
        return bits
    masked = bits.copy()
    masked[~there] = np.zeros(1, bits.dtype)[0]
    return masked


def _struct(
    struct_type: pa.DataType, path: tuple[int, ...], leaves: dict[tuple[int, ...], tuple[Any, Any]], count: int
) -> pa.StructArray:
    children: list[pa.Array] = []
    for index in range(struct_type.num_fields):
        here, child = (*path, index), struct_type.field(index).type
        values, there = leaves[here]
        if pa.types.is_struct(child):
            children.append(_struct(child, here, leaves, count))
        else:
            children.append(_column(values, there, child))
    mask = None if not path or leaves[path][1].all() else pa.array(~leaves[path][1])
    return pa.StructArray.from_arrays(children, fields=list(struct_type), mask=mask)


def _column(values: Any, there: npt.NDArray[np.bool_], data_type: pa.DataType) -> pa.Array:
    if is_list(data_type):
        return values
    if _is_string(data_type):
        column = values.cast(pa.binary()).view(data_type)
        return column if there.all() else pc.if_else(pa.array(there), column, pa.scalar(None, data_type))
    validity = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    bits = (
        np.packbits(values != 0, bitorder="little") if pa.types.is_boolean(data_type) else np.ascontiguousarray(values)
    )
    return pa.Array.from_buffers(data_type, len(there), [validity, pa.py_buffer(bits)])


def _spans(
    rows: pa.LargeBinaryArray,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The start and end offset of each row in the data, and the data."""
    _, offsets, data = rows.buffers()
    edges = np.frombuffer(offsets, np.int64, count=rows.offset + len(rows) + 1)[rows.offset :]
    bytes_ = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return edges[:-1], edges[1:], bytes_


def _binary(offsets: npt.NDArray[np.int64], data: Any) -> pa.LargeBinaryArray:
    buffers = [
        None,
        pa.py_buffer(np.ascontiguousarray(offsets)),
        data if isinstance(data, pa.Buffer) else pa.py_buffer(data),
    ]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _whole_words(size_bytes: int) -> int:
    return -(-size_bytes // WORD_BYTES) * WORD_BYTES


def _need(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise CorruptData(f"encoded rows: {message}", key="rows")
