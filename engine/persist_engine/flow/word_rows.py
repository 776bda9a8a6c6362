"""Rows of whole 64-bit words, end to end in one array, and their hash. Upsert state is computed on this representation.

Knows nothing of keys, values or types. Everything here works on columns of words; the only loops are over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_engine.base.errors import check

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

WORD_BYTES = 8

#: Words hashed at once, so that a block's working memory stays in the processor's cache.
_BLOCK_WORDS = 1 << 14
#: Rows with at most this many words are summed word by word: numpy's sum along such short rows takes five times as long.
_FEW_WORDS = 12
_MULTIPLY_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_2 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_3 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Words:
    """Row i is `data[offsets[i]:offsets[i + 1]]`; `offsets` begins at 0 and has one entry more than there are rows."""

    offsets: Int64s
    data: UInt64s

    @classmethod
    def from_arrow(cls, rows: pa.LargeBinaryArray) -> Words:
        """Return the same bytes without a copy; nulls become empty rows. Raises InvariantViolated unless every row is whole words."""
        _, offsets, data = rows.buffers()
        edges: Int64s = np.frombuffer(offsets, np.int64, count=rows.offset + len(rows) + 1)[rows.offset :]
        first, last = (int(edges[0]), int(edges[-1])) if len(edges) else (0, 0)
        check(not (edges % WORD_BYTES).any(), "rows of upsert state are not whole 64-bit words")
        if first == last:
            return cls(np.zeros(len(rows) + 1, np.int64), np.zeros(0, np.uint64))
        words: UInt64s = np.frombuffer(data, np.uint64, count=(last - first) // WORD_BYTES, offset=first)
        return cls((edges - first) // WORD_BYTES, words)

    def to_arrow(self, present: Bools | None = None) -> pa.LargeBinaryArray:
        """Return the same bytes without a copy; null where not `present`."""
        validity = None if present is None or present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
        buffers = [validity, pa.py_buffer(self.offsets * WORD_BYTES), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def starts(self) -> Int64s:
        """The start of each row."""
        return self.offsets[:-1]

    @property
    def sizes(self) -> Int64s:
        """The number of words of each row."""
        return np.diff(self.offsets)

    def take(self, rows: Int64s) -> Words:
        """Return these rows, in this order."""
        return gather(self.data, self.starts[rows], self.sizes[rows])


def offsets_of(sizes: Int64s) -> Int64s:
    """Return the starts of rows with these sizes, laid end to end, and the end of the last one."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def spread(starts: Int64s, sizes: Int64s) -> Int64s:
    """Return the index of every word of rows that begin at `starts`: starts[0], starts[0] + 1, ..."""
    if len(sizes) == 0:
        return np.zeros(0, np.int64)
    if (sizes == sizes[0]).all():
        return (starts[:, None] + np.arange(sizes[0])).ravel()
    offsets = offsets_of(sizes)
    index = np.repeat(starts - offsets[:-1], sizes)
    index += np.arange(offsets[-1])
    return index


def gather(data: UInt64s, starts: Int64s, sizes: Int64s) -> Words:
    """Copy rows out of `data`, laid end to end."""
    size = _common_size(sizes)
    if size:
        return Words(offsets_of(sizes), _rows_anywhere(data, size)[starts].view(np.uint64))
    return Words(offsets_of(sizes), data[spread(starts, sizes)])


def scatter(data: UInt64s, starts: Int64s, rows: Words) -> None:
    """Copy rows into `data` at their starts; inverse of `gather`."""
    sizes = rows.sizes
    size = _common_size(sizes)
    if size:
        _rows_anywhere(data, size)[starts] = np.ascontiguousarray(rows.data).view(f"V{size * WORD_BYTES}")
    else:
        data[spread(starts, sizes)] = rows.data


def _common_size(sizes: Int64s) -> int:
    """Return the size common to all rows; 0 if sizes differ or there are no rows."""
    return int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else 0


def _rows_anywhere(data: UInt64s, size: int) -> npt.NDArray[np.void]:
    """View each run of `size` words as one item. A copy of the item costs a third of a copy of its words."""
    shape = (max(0, len(data) - size + 1),)
    return np.ndarray(shape, f"V{size * WORD_BYTES}", buffer=data, strides=(WORD_BYTES,))


def any_nonzero(words: Words) -> Bools:
    """Whether each row has a nonzero word."""
    running = np.zeros(len(words.data) + 1, np.int64)
    np.cumsum(words.data != 0, out=running[1:])
    differs: Bools = running[words.offsets[1:]] != running[words.offsets[:-1]]
    return differs


def hash_rows(words: Words, seed: UInt64s) -> UInt64s:
    """Return len(seed) independent 64-bit hashes of each row, one column each.

    Each word is mixed with its position and the seed; the row's words are summed and mixed with its size. With a secret random
    seed, an attacker cannot choose rows that collide.
    """
    out = np.empty((len(words), len(seed)), np.uint64)
    sizes = words.sizes
    longest = int(sizes.max(initial=0))
    uniform = len(words) > 0 and bool((sizes == longest).all())
    for lane, secret in enumerate(seed):
        salts = _mixed(np.arange(1, longest + 1, dtype=np.uint64) * _MULTIPLY_1 + secret)
        total = _sum_uniform(words, salts) if uniform else _sum_ragged(words, salts)
        total += (sizes.astype(np.uint64) + np.uint64(1)) * _MULTIPLY_2
        out[:, lane] = _mixed(total ^ secret)
    return out


def _sum_uniform(words: Words, salts: UInt64s) -> UInt64s:
    size = len(salts)
    rows = words.data.reshape(len(words), size)
    total = np.zeros(len(words), np.uint64)
    if size <= _FEW_WORDS:
        for first in range(0, len(words), _BLOCK_WORDS):
            block = slice(first, first + _BLOCK_WORDS)
            for word, salt in enumerate(salts):
                total[block] += _scrambled(rows[block, word] ^ salt)
        return total
    step = max(1, _BLOCK_WORDS // max(1, size))
    for first in range(0, len(words), step):
        mixed = _scrambled(rows[first : first + step] ^ salts)
        mixed.sum(axis=1, out=total[first : first + step])
    return total


def _sum_ragged(words: Words, salts: UInt64s) -> UInt64s:
    running = np.zeros(len(words.data) + 1, np.uint64)
    position = spread(np.zeros(len(words), np.int64), words.sizes)
    for first in range(0, len(words.data), _BLOCK_WORDS):
        block = slice(first, first + _BLOCK_WORDS)
        running[1:][block] = _scrambled(words.data[block] ^ salts[position[block]])
    np.cumsum(running, out=running)
    return running[words.offsets[1:]] - running[words.offsets[:-1]]


def _scrambled(values: UInt64s) -> UInt64s:
    """Applies a finalizer without its last shift, in place. `_mixed` finishes the sum of its outputs.

    SUBTLE: these outputs are added up. If a changed word could change its output in only a few ways, changes of two words could cancel. A
    product moves bits upwards only: without the first shift, a flipped upper bit, for example the sign of a double, would change the output
    in only two ways.
    """
    values ^= values >> np.uint64(30)
    values *= _MULTIPLY_2
    values ^= values >> np.uint64(27)
    values *= _MULTIPLY_3
    return values


def _mixed(values: UInt64s) -> UInt64s:
    """A bijection of 64-bit words in which every input bit affects every output bit."""
    values = values ^ (values >> np.uint64(30))
    values *= _MULTIPLY_2
    values ^= values >> np.uint64(27)
    values *= _MULTIPLY_3
    values ^= values >> np.uint64(31)
    return values
