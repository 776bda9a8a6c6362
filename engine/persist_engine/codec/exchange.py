"""Which worker a row belongs to: a hash of its data, equal for equal (key, val). Pure, vectorised.

Not durable: it may change with any release; the workers of one process use the same. Equality is that of
`codec.columns` (one zero, one NaN).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.codec.columns import flatten_columns

_Words = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xD6E8FEB86659FD93)
#: Texts are hashed this many bytes at a time: each byte takes eight while it is.
_SLICE_BYTES = 4 << 20


def deal(updates: pa.Table, workers: int) -> list[pa.Table]:
    """The rows of each worker, in their order; every row in exactly one table."""
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
    """A 64-bit hash of (key, val) of each row."""
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
    """The values of a column of fixed width as one word each."""
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
    """Of each text the sum of its bytes, each weighted by a random function of its place, and its length."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1].astype(
        np.int64
    )
    lengths = np.diff(offsets)
    out: _Words = lengths.astype(np.uint64)
    data = array.buffers()[2]
    if data is None or not len(array):
        return out
    values = np.frombuffer(data, dtype=np.uint8)
    start = 0
    while start < len(array):
        end = int(np.searchsorted(offsets, offsets[start] + _SLICE_BYTES, side="right")) - 1
        end = min(len(array), max(start + 1, end))
        low, high = offsets[start], offsets[end]
        places = np.arange(high - low, dtype=np.int64) - np.repeat(offsets[start:end] - low, lengths[start:end])
        weighted = (values[low:high].astype(np.uint64) + np.uint64(1)) * _mixed(places.astype(np.uint64) + np.uint64(1))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
        out[start:end] += sums[offsets[start + 1 : end + 1] - low] - sums[offsets[start:end] - low]
        start = end
    return out


def _mixed(words: _Words) -> _Words:
    """Every bit of a word depends on every other (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
