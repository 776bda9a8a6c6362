"""Assigns rows to workers by a hash of (key, val). Rows with equal (key, val) go to the same worker. Pure, vectorised.

The hash is not durable: it may change with any release, and only the workers of one process share it. Equality is that
of `rows.columns` (one zero, one NaN).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import flatten_columns, text_offsets

_Words = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xD6E8FEB86659FD93)
#: Text is hashed in slices of this many bytes, because a word in flight takes several times its size.
_SLICE_BYTES = 4 << 20


def deal(updates: pa.Table, workers: int) -> list[pa.Table]:
    """The rows of each worker, one table each, in their order. Every row is in exactly one table."""
    if workers == 1:
        return [updates]
    if not updates.num_rows:
        return [updates] * workers
    owner = (hash_rows(updates) >> np.uint64(32)) % np.uint64(workers)
    order = np.argsort(owner.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(owner.astype(np.int64), minlength=workers))
    dealt = updates.combine_chunks()
    return [dealt.take(pa.array(rows)) for rows in np.split(order, ends[:-1])]


def hash_rows(updates: pa.Table) -> _Words:
    """A 64-bit hash of (key, val) for each row."""
    hashes = np.zeros(updates.num_rows, dtype=np.uint64)
    for column in flatten_columns(updates, ("key", "val")):
        words = np.concatenate([_hash(chunk) for chunk in column.chunks]) if column.num_chunks else hashes
        hashes = _mixed(hashes * np.uint64(31) + words)
    return hashes


def _hash(array: pa.Array) -> _Words:
    data_type = array.type
    is_text = pa.types.is_string(data_type) or pa.types.is_binary(data_type)
    words = _text_hashes(array) if is_text else _fixed_words(array)
    if array.null_count:
        words = np.where(array.is_null().to_numpy(zero_copy_only=False), _NULL, words)
    return _mixed(words)


def _fixed_words(array: pa.Array) -> _Words:
    """The values of a fixed-width column, one word each."""
    data_type = array.type
    if pa.types.is_boolean(data_type):
        return np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False)).astype(np.uint64)  # noqa: FBT003
    width = data_type.bit_width // 8
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype=np.uint64)
    if width > 8:
        pairs = np.frombuffer(buffer, dtype=np.uint64, count=2 * (array.offset + len(array)))[2 * array.offset :]
        return pairs[::2] * _MULTIPLIER + pairs[1::2]
    values = np.frombuffer(buffer, dtype=f"u{width}", count=array.offset + len(array))[array.offset :]
    return values.astype(np.uint64)


def _text_hashes(array: pa.Array) -> _Words:
    """The hash of each text: the sum of its eight-byte words, each mixed with its position, plus the remainder and the
    length.
    """
    offsets = text_offsets(array).astype(np.int64)
    data = array.buffers()[2]
    values = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    out = np.empty(len(array), dtype=np.uint64)
    start = 0
    while start < len(array):
        end = int(np.searchsorted(offsets, offsets[start] + _SLICE_BYTES, side="right")) - 1
        end = min(len(array), max(start + 1, end))
        low, high = int(offsets[start]), int(offsets[end])
        out[start:end] = _word_sums(values[low:high], offsets[start : end + 1] - low)
        start = end
    return out


def _word_sums(values: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> _Words:
    """See `_text_hashes`. `offsets` starts with 0."""
    padded = np.zeros(len(values) + 8, dtype=np.uint8)
    padded[:-8] = values
    word_at = np.ndarray((len(values) + 1,), dtype="<u8", buffer=padded.data, strides=(1,))
    lengths = np.diff(offsets)
    counts = lengths >> 3
    firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
    words = word_at[np.repeat(offsets[:-1], counts) + 8 * places]
    mixed = _mixed(words + _mixed(places.astype(np.uint64) + np.uint64(1)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    rest_bits = ((lengths & 7) << 3).astype(np.uint64)
    rest = word_at[offsets[:-1] + 8 * counts] & ((np.uint64(1) << rest_bits) - np.uint64(1))
    hashes: _Words = sums[firsts[1:]] - sums[firsts[:-1]] + _mixed(rest * _MULTIPLIER + lengths.astype(np.uint64))
    return hashes


def _mixed(words: _Words) -> _Words:
    """Mixes each word so that every bit depends on every other (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
