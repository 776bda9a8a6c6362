"""Finds the order of rows column by column on machine words, instead of with Arrow's sort.

    column          word                                                        exact?
    integer, date   the value                                                   yes
    bool, float     the bits, arranged to compare as numbers                    yes
    text, binary    the eight bytes after the prefix that all values share      no: ties get dense ranks
    decimal         the lower half when no value needs the upper half           yes; else dense ranks
    nulls           a separate word before the value's word, nulls last

Rows are sorted by the first word. Only rows that tie go on to the next word, as groups. Group and word are packed into
one 64-bit word where they fit, so most sorts are one vectorised sort of integers. Measured on 1M rows of (bigint,
string, time) in random order: 0.02 s; Arrow's sort by three keys takes 0.7 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import Bools, Indices, text_offsets

Words = npt.NDArray[np.uint64]

_WORD_BYTES = 8
_BLOCK = 1024
#: If groups have fewer rows than this on average, the rows are nearly sorted, whatever the order within each group.
_GROUP_ROWS_FEW = 8
#: Distinct numbers whose range is at most this many times their count are put directly in their places. That takes a tenth of a sort.
_DENSE_FACTOR = 4
_SIGN = np.uint64(1 << 63)


def order_indices(columns: Iterable[pa.ChunkedArray], rows: int) -> Indices:
    """Row indices in order. Equal rows come in any order."""
    return order_and_equal(columns, rows)[0]


def order_and_equal(
    columns: Iterable[pa.ChunkedArray], rows: int, *, is_in_runs: bool = False
) -> tuple[Indices, Bools]:
    """Returns the row indices in order and, for each row of that order but the first, whether it equals the row before.

    `columns` yields columns as `flatten_columns` returns them; this requests only those that it needs. Equal rows come in any order.
    `is_in_runs` is a hint that the rows are a few sorted runs, one after the other. It makes the sort of such rows many times faster.
    """
    if rows < 2:
        return np.arange(rows), np.zeros(0, dtype=np.bool_)
    sorting = _Sorting(
        np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(rows, dtype=np.int64), is_in_runs=is_in_runs
    )
    for column in columns:
        _sort_by(sorting, column)
        if len(sorting.groups) < 2:
            break
    if not sorting.is_begun:
        return np.arange(rows), np.ones(rows - 1, dtype=np.bool_)
    equal = np.zeros(rows - 1, dtype=np.bool_)
    same = sorting.groups[1:] == sorting.groups[:-1]
    equal[sorting.tied[:-1][same]] = True
    return sorting.order, equal


@dataclass(slots=True)
class _Sorting:
    """The working state of one sort. `order` holds row indices, sorted by the columns processed so far. `tied` holds
    the ascending positions in `order` whose rows still tie with a neighbour. `groups` holds, for each of these, the
    ascending number of its group of ties. Until `is_begun`, all rows tie and only `groups` is filled.
    """

    order: Indices
    tied: Indices
    groups: Indices
    is_begun: bool = False
    is_in_runs: bool = False

    def values_of(self, column: pa.ChunkedArray) -> pa.Array:
        """The column's values at `tied`."""
        if self.is_begun:
            column = column.take(pa.array(self.order[self.tied]))
        if column.num_chunks == 1:
            return column.chunk(0)
        return pa.concat_arrays(column.chunks or [pa.array([], column.type)])

    def refine(self, words: Words) -> None:
        """Sorts the rows of each group by `words` (one for each of `tied`) and splits groups where words differ. Overwrites `words`."""
        if not len(words) or (words.min() == words.max()):
            return
        if not self.is_begun:
            self._sort(words)
            return
        if _agree(self.groups, words):
            return
        packed = np.subtract(words, words.min(), out=words if words.flags.writeable else None)
        cut_bits = int(packed.max()).bit_length() + self._group_bits - 64
        if cut_bits <= 0:
            self._sort(packed)
            return
        # Group and word do not fit into one word. The upper bits of the word nearly always decide.
        low = packed & np.uint64((1 << cut_bits) - 1)
        by, keep = self._sort(packed >> np.uint64(cut_bits))
        low = low[by][keep]
        if len(low) and not _agree(self.groups, low):
            self._sort(low)

    @property
    def _group_bits(self) -> int:
        return int(self.groups[-1] - self.groups[0]).bit_length()

    def _sort(self, words: Words) -> tuple[Indices, Bools]:
        """Like `refine`, for words that are not all equal and that fit into one word with the number of a group. Returns the new order of
        the rows of `tied`, and which of them, in this order, still tie.
        """
        is_nearly_sorted = self.is_in_runs
        if self.is_begun:
            is_nearly_sorted = len(self.groups) < _GROUP_ROWS_FEW * int(self.groups[-1] - self.groups[0] + 1)
        by, same = _order_within(self.groups, words, is_nearly_sorted=is_nearly_sorted)
        if self.is_begun:
            self.order[self.tied] = self.order[self.tied][by]
        else:
            self.order = by
        if not same.any():
            self.groups = self.tied = by[:0]
            self.is_begun = True
            return by, np.zeros(len(by), np.bool_)
        keep: Bools = np.append(same, False) | np.insert(same, 0, False)
        self.groups = np.cumsum(np.insert(~same, 0, False), dtype=np.int64)[keep]
        self.tied = self.tied[keep] if self.is_begun else np.flatnonzero(keep)
        self.is_begun = True
        return by, keep


def _agree(groups: Indices, words: Words) -> bool:
    """Whether all words of each group are equal."""
    differ = words[1:] != words[:-1]
    differ &= groups[1:] == groups[:-1]
    return not differ.any()


def _sort_by(sorting: _Sorting, column: pa.ChunkedArray) -> None:
    """Refines the order by one column."""
    values = sorting.values_of(column)
    if values.null_count:
        sorting.refine(values.is_null().to_numpy(zero_copy_only=False).astype(np.uint64))
        values = sorting.values_of(column)  # values of the rows that still tie, in their new order
    if values.null_count == len(values):
        return
    if values.null_count:
        # Nulls are already in groups of their own, where they tie, so any value may replace them.
        values = pc.fill_null(values, values.drop_null()[0])
    words = _exact_words(values)
    if words is not None:
        sorting.refine(words)
        return
    if pa.types.is_decimal(values.type):
        sorting.refine(_dense_ranks(values))
        return
    sorting.refine(_prefix_words(values))
    values = sorting.values_of(column)
    if not _groups_are_equal(sorting.groups, values):
        sorting.refine(_dense_ranks(values))


def _order_within(groups: Indices, words: Words, *, is_nearly_sorted: bool) -> tuple[Indices, Bools]:
    """Returns the positions sorted by (group, word) and, for each but the first, whether group and word equal those before.
    Groups must be ascending, the words not all equal, and both must fit into one word. Overwrites `words`.

    `is_nearly_sorted` chooses a sort that detects sorted stretches. On rows in random order it takes a fifth longer.

    SUBTLE: arrays are reused for speed, not to save memory. The allocator takes arrays of a megabyte from the system and
    returns them. The first access to their pages takes longer than sorting them.
    """
    packed = np.subtract(words, words.min(), out=words if words.flags.writeable else None)
    word_bits = int(packed.max()).bit_length()
    group_bits = int(groups[-1] - groups[0]).bit_length()
    if not group_bits and not is_nearly_sorted and (places := _in_places(packed)) is not None:
        return places, np.zeros(len(places) - 1, np.bool_)
    if group_bits:
        packed |= (groups - groups[0]).astype(np.uint64) << np.uint64(word_bits)
    at_bits = (len(words) - 1).bit_length()
    kind: Literal["stable", "quick"] = "stable" if is_nearly_sorted else "quick"
    by: Indices
    if word_bits + group_bits + at_bits <= 64:
        # With the position in the same word, the numbers can be sorted in place, which is several times faster than argsort.
        packed <<= np.uint64(at_bits)
        _add_positions(packed)
        packed.sort(kind=kind)
        by = (packed & np.uint64((1 << at_bits) - 1)).view(np.int64)
        packed >>= np.uint64(at_bits)
    else:
        by = np.argsort(packed, kind=kind)
        packed = packed[by]
    return by, packed[1:] == packed[:-1]


def _in_places(words: Words) -> Indices | None:
    """The positions sorted by word, for distinct words that fill the range from 0 densely. None for other words."""
    span = int(words.max()) + 1
    if span > _DENSE_FACTOR * len(words):
        return None
    places = np.full(span, -1, np.int64)
    places[words.view(np.int64)] = np.arange(len(words))
    by: Indices = places[places >= 0]
    return by if len(by) == len(words) else None


def _add_positions(packed: Words) -> None:
    """Writes the position of each word into its free low bits, block by block for cache locality."""
    blocks = packed[: len(packed) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    blocks |= np.arange(_BLOCK, dtype=np.uint64)
    blocks |= np.arange(0, blocks.size, _BLOCK, dtype=np.uint64)[:, np.newaxis]
    packed[blocks.size :] |= np.arange(blocks.size, len(packed), dtype=np.uint64)


def _exact_words(values: pa.Array) -> Words | None:
    """Words that order and distinguish values exactly; None when the type has none. The values have no nulls."""
    data_type = values.type
    if pa.types.is_boolean(data_type):
        flags: Words = values.to_numpy(zero_copy_only=False).astype(np.uint64)
        return flags
    if pa.types.is_floating(data_type):
        return _float_words(values.cast(pa.float64()).to_numpy())
    if pa.types.is_decimal(data_type):
        return _decimal_words(values)
    if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
        return None
    if pa.types.is_temporal(data_type):
        values = values.cast(pa.int64() if data_type.bit_width == 64 else pa.int32())
    words: Words = values.to_numpy().astype(np.int64, copy=False).view(np.uint64) ^ _SIGN
    return words


def _float_words(values: npt.NDArray[np.float64]) -> Words:
    """Words of the IEEE total order. Columns have one zero and one NaN, so this is numeric order with NaN last."""
    bits = values.view(np.uint64)
    words: Words = np.where(bits >> np.uint64(63), ~bits, bits | _SIGN)
    return words


def _decimal_words(values: pa.Array) -> Words | None:
    """The lower halves of decimals (two's complement), if all upper halves are only their sign extension; otherwise None."""
    halves = np.frombuffer(values.buffers()[1], dtype=np.int64)[2 * values.offset : 2 * (values.offset + len(values))]
    low, high = halves[0::2].copy(), halves[1::2]
    if not np.array_equal(high, low >> 63):
        return None
    words: Words = low.view(np.uint64) ^ _SIGN
    return words


def _prefix_words(values: pa.Array) -> Words:
    """The eight bytes after the common prefix of text or binary without nulls, zero-padded. They are in the order of the
    values, but different values may tie.
    """
    offsets = text_offsets(values)
    data = np.frombuffer(values.buffers()[2] or b"", dtype=np.uint8)
    if len(data) < _WORD_BYTES:
        data = np.concatenate([data, np.zeros(_WORD_BYTES, dtype=np.uint8)])
    starts = offsets[:-1].astype(np.int64) + _common_prefix_bytes(values)
    used = np.minimum(offsets[1:] - starts, _WORD_BYTES)
    # A view with one unaligned word at every byte of the data. The last word starts eight bytes before the end.
    every = np.ndarray(len(data) - _WORD_BYTES + 1, dtype="<u8", buffer=data, strides=(1,))
    at = np.minimum(starts, len(every) - 1)
    words: Words = every[at].byteswap()
    _shift_left(words, starts - at)
    if int(used.min()) < _WORD_BYTES:
        words >>= (8 * np.minimum(_WORD_BYTES - used, _WORD_BYTES - 1)).astype(np.uint64)
        words[used <= 0] = 0
        _shift_left(words, _WORD_BYTES - used)
    return words


def _shift_left(words: Words, by_bytes: Indices) -> None:
    """Shifts in place. A shift by eight bytes or more gives zero."""
    if by_bytes.any():
        words <<= (8 * np.minimum(by_bytes, _WORD_BYTES - 1)).astype(np.uint64)
        words[by_bytes >= _WORD_BYTES] = 0


def _common_prefix_bytes(values: pa.Array) -> int:
    bounds = pc.min_max(values)
    least, greatest = bounds["min"].as_buffer(), bounds["max"].as_buffer()
    limit = min(least.size, greatest.size)
    if limit == 0:
        return 0
    differs = np.frombuffer(least, np.uint8, limit) != np.frombuffer(greatest, np.uint8, limit)
    return int(np.argmax(differs)) if differs.any() else limit


def _groups_are_equal(groups: Indices, values: pa.Array) -> bool:
    """Whether all values of each group are equal. Ties on the prefix are then true ties. Nulls are in groups of their
    own.
    """
    if len(values) < 2:
        return True
    equal = pc.equal(values.slice(0, len(values) - 1), values.slice(1))
    same = pc.fill_null(equal, True).to_numpy(zero_copy_only=False)  # noqa: FBT003 - Arrow's own signature
    return bool(same[groups[1:] == groups[:-1]].all())


def _dense_ranks(values: pa.Array) -> Words:
    words: Words = pc.rank(values, sort_keys="ascending", tiebreaker="dense").to_numpy()
    return words
