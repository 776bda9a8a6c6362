"""Computes in Arrow, with numpy, the hash that Spark's `xxhash64` computes for a row (`mirror.hashed`). Pure. Knows no Spark.

A task that reads rows of the shard can so hash them itself, and need not hand them to the JVM. The algorithm is XXH64 of Y. Collet
(xxHash specification 0.1.1), as Spark applies it: the hash of one value is the seed of the next one, and a null leaves the hash as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt
from persist_engine.rows.schema import Schema

_Words = npt.NDArray[np.uint64]
_Unsigned = np.uint8 | np.uint32 | np.uint64
_Numbers = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]
_Flags = npt.NDArray[np.bool_]
_Places = npt.NDArray[np.int64]
#: How many bytes are mixed into a hash at a time, as a type, and how.
_Mix = tuple[type[_Unsigned], Callable[[_Words, _Numbers], _Words]]

#: The seed of the first value, as in Spark.
_SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_ALL = (1 << 64) - 1
#: When fewer texts than this are still being read, each is read on its own, because numpy costs as much for one text as for many.
_FEW = 32
#: Decimals of at most this precision are numbers of 64 bits.
_DECIMAL_PRECISION_MAX = 18


def can_hash(schema: Schema) -> bool:
    """Whether `row_hashes` knows all types of the schema's fields: all types except lists, maps and decimals of more than 64 bits."""
    return all(_can_hash(field.type) for field in (*schema.key, *schema.val))


def _can_hash(kind: pa.DataType) -> bool:
    if pt.is_struct(kind):
        return all(_can_hash(field.type) for field in kind)
    if pt.is_decimal128(kind):
        return bool(kind.precision <= _DECIMAL_PRECISION_MAX)
    return not (pt.is_nested(kind) or pt.is_decimal(kind))


def row_hashes(columns: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """The hash of each row of `columns`, which have the types of a shard (`can_hash`). Equals Spark's
    `xxhash64(a IS NULL, b IS NULL, ..., a, b, ...)` of all fields, where the fields of a struct follow it, in the place of its value.
    """
    fields = [field for column in columns for field in _fields_of(column)]
    nulls = [_bits(field.is_null()) if field.null_count else None for field in fields]
    hashed = np.full(1, _SEED, np.uint64)
    for each in nulls:
        hashed = _of_int(hashed, np.zeros(1, np.uint64) if each is None else each.astype(np.uint64))
    for field, each in zip(fields, nulls, strict=True):
        if not pt.is_struct(field.type):
            added = _of_value(hashed, field)
            hashed = added if each is None else np.where(each, hashed, added)
    return np.ascontiguousarray(np.broadcast_to(hashed, len(columns[0]))).view(np.int64)


def _fields_of(column: pa.Array) -> Iterator[pa.Array]:
    """The column and, if it is a struct, the fields within it. They are null where it is null."""
    yield column
    if pt.is_struct(column.type):
        for child in column.flatten():
            yield from _fields_of(child)


def _of_value(seed: _Words, column: pa.Array) -> _Words:
    kind = column.type
    if pt.is_string(kind) or pt.is_binary(kind):
        return _of_texts(seed, column)
    if pt.is_boolean(kind):
        return _of_int(seed, _bits(column).astype(np.uint64))
    if pt.is_decimal(kind):
        return _of_long(seed, _values(column, np.uint64, words=2)[::2])
    if pt.is_floating(kind):
        is_double = pt.is_float64(kind)
        values = _values(column, np.dtype(np.float64 if is_double else np.float32))
        values = np.where(
            values == 0, values.dtype.type(0), np.where(np.isnan(values), values.dtype.type(np.nan), values)
        )
        return _of_long(seed, values.view(np.uint64)) if is_double else _of_int(seed, values.view(np.uint32))
    if kind.bit_width == 64:
        return _of_long(seed, _values(column, np.uint64))
    signed = {8: np.int8, 16: np.int16, 32: np.int32}[kind.bit_width]
    return _of_int(seed, _values(column, signed).astype(np.int32).view(np.uint32))


def _bits(column: pa.BooleanArray) -> _Flags:
    bits: _Flags = column.cast(pa.uint8()).to_numpy(zero_copy_only=False).astype(np.bool_)
    return bits


def _values(column: pa.Array, dtype: npt.DTypeLike, *, words: int = 1) -> _Numbers:
    """The values of an array of fixed width, without copying. The values in place of nulls are arbitrary."""
    data = np.frombuffer(column.buffers()[1] or b"", dtype)
    return data[column.offset * words : (column.offset + len(column)) * words]


# -- XXH64 ---------------------------------------------------------------------------------------------------------------


def _rotated(words: _Words, bits: int) -> _Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _times(words: _Words, factor: int) -> _Words:
    return words * np.uint64(factor)


def _plus(words: _Words, number: int) -> _Words:
    return words + np.uint64(number & _ALL)


def _round(words: _Words) -> _Words:
    return _times(_rotated(_times(words, _P2), 31), _P1)


def _finished(words: _Words) -> _Words:
    words = _times(words ^ (words >> np.uint64(33)), _P2)
    words = _times(words ^ (words >> np.uint64(29)), _P3)
    return words ^ (words >> np.uint64(32))


def _with_8(hashed: _Words, word: _Words) -> _Words:
    return _plus(_times(_rotated(hashed ^ _round(word), 27), _P1), _P4)


def _with_4(hashed: _Words, word: _Numbers) -> _Words:
    return _plus(_times(_rotated(hashed ^ _times(word.astype(np.uint64), _P1), 23), _P2), _P3)


def _with_1(hashed: _Words, byte: _Numbers) -> _Words:
    return _times(_rotated(hashed ^ _times(byte.astype(np.uint64), _P5), 11), _P1)


def _of_long(seed: _Words, values: _Words) -> _Words:
    return _finished(_with_8(_plus(seed, _P5 + 8), values))


def _of_int(seed: _Words, values: _Numbers) -> _Words:
    return _finished(_with_4(_plus(seed, _P5 + 4), values))


def _of_texts(seed: _Words, column: pa.Array) -> _Words:
    rows, (_, offsets, data) = len(column), column.buffers()
    if not rows:
        return seed
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + rows + 1].astype(np.int64)
    at, lengths, text = ends[:-1].copy(), np.diff(ends), np.frombuffer(data or b"", np.uint8)
    seeds = np.broadcast_to(seed, rows)
    hashed = _plus(seeds, _P5)
    if len(stripes := np.flatnonzero(lengths >= 32)):
        hashed[stripes] = _of_stripes(seeds[stripes], text, at[stripes], lengths[stripes] // 32)
        at += lengths // 32 * 32
    hashed += lengths.astype(np.uint64)
    left = lengths % 32
    for words in range(8, 32, 8):
        _read_on(hashed, text, at, left >= words, (np.uint64, _with_8))
    _read_on(hashed, text, at, left % 8 >= 4, (np.uint32, _with_4))
    for size_bytes in range(1, 4):
        _read_on(hashed, text, at, left % 4 >= size_bytes, (np.uint8, _with_1))
    return _finished(hashed)


def _read_on(hashed: _Words, text: _Bytes, at: _Places, is_read: _Flags, mix: _Mix) -> None:
    """Mixes the next bytes of the texts into each hash where `is_read`, and moves `at` past them."""
    if not is_read.any():
        return
    where = slice(None) if is_read.all() else np.flatnonzero(is_read)
    kind, add = mix
    hashed[where] = add(hashed[where], _read(text, at[where], kind))
    at[where] += np.dtype(kind).itemsize


def _read(text: _Bytes, at: _Places, kind: type[_Unsigned]) -> _Numbers:
    """The little-endian values of `kind` that begin at the bytes `at`."""
    little = np.dtype(kind).newbyteorder("<")
    step = int(at[1] - at[0]) if len(at) > 1 else 0
    if step > 0 and (np.diff(at) == step).all():  # texts of one length, ten times as fast
        return np.ndarray(len(at), little, text, offset=int(at[0]), strides=(step,)).copy()
    return np.ndarray(len(text) - little.itemsize + 1, little, text, strides=(1,))[at]


def _of_stripes(seeds: _Words, text: _Bytes, at: _Places, stripes: _Places) -> _Words:
    """The hashes of texts after their whole `stripes` of 32 bytes, of which each text has one or more."""
    lanes = np.stack([_plus(seeds, number) for number in (_P1 + _P2, _P2, 0, -_P1)])
    reading = np.arange(len(seeds))
    for done in range(int(stripes.max())):
        if done:
            reading = reading[stripes[reading] > done]
        if len(reading) < _FEW:
            for row in reading:
                rest = text[at[row] + 32 * done : at[row] + 32 * stripes[row]]
                lanes[:, row] = _of_one(lanes[:, row].tolist(), rest)
            break
        where = slice(None) if len(reading) == len(seeds) else reading
        for lane, mixed in enumerate(lanes):
            words = _read(text, at[where] + (32 * done + 8 * lane), np.uint64)
            mixed[where] = _times(_rotated(mixed[where] + _times(words, _P2), 31), _P1)
    hashed: _Words = np.sum([_rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)], axis=0)
    for lane in lanes:
        hashed = _plus(_times(hashed ^ _round(lane), _P1), _P4)
    return hashed


def _of_one(lanes: list[int], rest: _Bytes) -> list[int]:
    """The four lanes of one text after its stripes in `rest`."""
    for words in struct.iter_unpack("<4Q", rest.tobytes()):
        for lane, word in enumerate(words):
            mixed = (lanes[lane] + word * _P2) & _ALL
            lanes[lane] = ((mixed << 31 | mixed >> 33) * _P1) & _ALL
    return lanes
