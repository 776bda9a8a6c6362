"""The store of upsert state in memory: a hash table over numpy arrays, which looks up one batch of keys at a time.

    buckets   [b]     8 entries of (tag: upper 32 bits of the key's second word | slot + 1), 0 if free; one cache line
    fill      [b]     entries in use; a key whose bucket is full is in the next bucket with space
    keys      [slot]  the whole key
    starts    [slot]  offset of its record in `arena`
    sizes     [slot]  words of the record, -1 if the key was deleted
    arena             words of all records, and garbage between them

A deleted key keeps its slot until the table is rebuilt, which happens when slots run out. The rebuilt table is twice as large
unless a quarter of the slots is dead. A record that does not fit into its old place goes to the end of the arena. When more
than half of the arena is garbage, the records are copied together.

Invariant: `size_bytes` counts what was put and not deleted, whatever else the table holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_engine.base.errors import check
from persist_engine.flow.upsert_store import KEY_WORDS, check_keys
from persist_engine.flow.word_rows import WORD_BYTES, Int64s, UInt64s, Words, gather, scatter

_ENTRIES = 8
#: The share of the entries that may be in use. At a half, one bucket in fifty overflows.
_LOAD = 0.5
_BUCKETS_MIN = 64
#: A slot takes 32 bits of an entry, and 0 means free.
_SLOTS_MAX = (1 << 32) - 2
_ITEMS_CHUNK = 1 << 16
#: The memory of a key besides its record: key, start, size, and two entries at the load above.
ENTRY_BYTES = KEY_WORDS * WORD_BYTES + 8 + 8 + 2 * 8

#: The number of keys looked up at once. It bounds the memory for comparing their buckets (64 bytes per key, a few times over).
_FIND_BLOCK = 1 << 15
_NOTHING_FOUND = (np.zeros((0, KEY_WORDS), np.uint64), np.zeros(0, np.int64))
_SLOT_BITS = np.uint64(32)
_SLOT_MASK = np.uint64((1 << 32) - 1)
_TAG_MASK = np.uint64(((1 << 32) - 1) << 32)


class MemoryStore:
    """See KeyValues. Keys must be hashes, because their bits are used directly."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._found = _NOTHING_FOUND
        self._count = 0
        self._dead = 0
        self._live_words = 0
        self._set_table(_BUCKETS_MIN)
        slots = self._slots_max
        self._keys: UInt64s = np.empty((slots, KEY_WORDS), np.uint64)
        self._starts: Int64s = np.empty(slots, np.int64)
        self._sizes: Int64s = np.empty(slots, np.int64)
        self._arena: UInt64s = np.empty(1 << 10, np.uint64)
        self._arena_end = 0

    @property
    def size_bytes(self) -> int:
        """The size of the records, plus the table's memory for each."""
        return self._live_words * WORD_BYTES + len(self) * ENTRY_BYTES

    def __len__(self) -> int:
        return self._count - self._dead

    def multi_get(self, keys: UInt64s) -> pa.LargeBinaryArray:
        """See KeyValues."""
        check_keys(keys)
        slots = self._find(keys)
        self._found = (keys, slots)
        starts, sizes = self._spans(slots)
        return gather(self._arena, starts, np.maximum(sizes, 0)).to_arrow(sizes >= 0)

    def multi_put(self, keys: UInt64s, records: pa.LargeBinaryArray, previous: Int64s) -> int:
        """See KeyValues. The sizes are known here, so `previous` is not needed."""
        check_keys(keys, records)
        before = self.size_bytes
        words = Words.from_arrow(records)
        present = (
            records.is_valid().to_numpy(zero_copy_only=False) if records.null_count else np.ones(len(keys), np.bool_)
        )
        # A caller usually puts the keys that it has just looked up.
        slots = self._found[1] if self._found[0] is keys else self._find(keys)
        self._found = _NOTHING_FOUND
        fresh = np.flatnonzero((slots < 0) & present)
        if self._count + len(fresh) > self._slots_max:
            # A rebuild moves slots and reuses those of deleted keys.
            self._make_room(int((present & (self._spans(slots)[1] < 0)).sum()))
            slots = self._find(keys)
            fresh = np.flatnonzero((slots < 0) & present)
        if len(fresh):
            slots[fresh] = np.arange(self._count, self._count + len(fresh))
            self._append(keys[fresh])
        self._delete(slots[~present & (slots >= 0)])
        self._write(slots, words, present)
        return self.size_bytes - before

    def items(self) -> Iterator[tuple[UInt64s, pa.LargeBinaryArray]]:
        """See MovableKeyValues."""
        for first in range(0, self._count, _ITEMS_CHUNK):
            live = first + np.flatnonzero(self._sizes[first : min(self._count, first + _ITEMS_CHUNK)] >= 0)
            yield self._keys[live], gather(self._arena, self._starts[live], self._sizes[live]).to_arrow()

    def close(self) -> None:
        """See KeyValues."""
        self._clear()

    # -- the table ----------------------------------------------------------------------------------------------------

    @property
    def _slots_max(self) -> int:
        return int(len(self._fill) * _ENTRIES * _LOAD)

    def _set_table(self, buckets: int) -> None:
        self._buckets: UInt64s = np.zeros((buckets, _ENTRIES), np.uint64)
        self._fill: npt.NDArray[np.int8] = np.zeros(buckets, np.int8)

    def _find(self, keys: UInt64s) -> Int64s:
        """Return the slot of each key, -1 for none. Includes slots of deleted keys."""
        out = np.empty(len(keys), np.int64)
        for first in range(0, len(keys), _FIND_BLOCK):
            out[first : first + _FIND_BLOCK] = self._find_block(keys[first : first + _FIND_BLOCK])
        return out

    def _find_block(self, keys: UInt64s) -> Int64s:
        out = np.full(len(keys), -1, np.int64)
        mask = np.uint64(len(self._fill) - 1)
        rows = np.arange(len(keys))
        buckets = (keys[:, 0] & mask).astype(np.int64)
        tags = keys[:, 1] >> _SLOT_BITS
        while len(rows):
            # `take` copies whole rows; indexing rows would copy them word by word.
            entries = self._buckets.take(buckets, axis=0)
            hits = np.flatnonzero((entries >> _SLOT_BITS) == tags[rows, None])
            probed = rows[hits // _ENTRIES]
            slots = (entries.ravel()[hits] & _SLOT_MASK).astype(np.int64) - 1
            same = slots >= 0  # a free entry has the tag 0
            held, wanted = self._keys.take(np.maximum(slots, 0), axis=0), keys.take(probed, axis=0)
            for word in range(KEY_WORDS):
                same &= held[:, word] == wanted[:, word]
            out[probed[same]] = slots[same]
            # A bucket that was ever full may have passed the key on to the next bucket.
            on = self._fill[buckets] == _ENTRIES
            if not on.any():
                break
            on &= out[rows] < 0
            rows, buckets = rows[on], (buckets[on] + 1) & np.int64(mask)
        return out

    def _make_room(self, fresh: int) -> None:
        """Rebuild the table without deleted keys, with room for `fresh` more slots."""
        buckets = len(self._fill)
        # A table three quarters full without deleted keys would need another rebuild soon, so grow it.
        while len(self) + fresh > int(buckets * _ENTRIES * _LOAD) * 3 // 4:
            buckets *= 2
        check(buckets * _ENTRIES <= _SLOTS_MAX, f"upsert state in memory holds at most {_SLOTS_MAX} keys")
        if self._dead:
            live = np.flatnonzero(self._sizes[: self._count] >= 0)
            self._keys[: len(live)] = self._keys[live]
            self._starts[: len(live)] = self._starts[live]
            self._sizes[: len(live)] = self._sizes[live]
            self._count, self._dead = len(live), 0
        self._set_table(buckets)
        slots = self._slots_max
        if slots > len(self._sizes):
            _grow(self._keys, slots)
            _grow(self._starts, slots)
            _grow(self._sizes, slots)
        self._enter(np.arange(self._count))

    def _append(self, keys: UInt64s) -> None:
        """Add slots for new keys, without records yet."""
        slots = np.arange(self._count, self._count + len(keys))
        self._keys[slots] = keys
        self._sizes[slots] = -1
        self._starts[slots] = 0
        self._count += len(keys)
        self._dead += len(keys)
        self._enter(slots)

    def _enter(self, slots: Int64s) -> None:
        """Write the entries of slots that have none, side by side in their bucket. Entries that do not fit go to the next bucket."""
        mask = len(self._fill) - 1
        keys = self._keys[slots]
        buckets = (keys[:, 0] & np.uint64(mask)).astype(np.int64)
        entries = (keys[:, 1] & _TAG_MASK) | (slots + 1).astype(np.uint64)
        while len(entries):
            order = np.argsort(buckets)
            buckets, entries = buckets[order], entries[order]
            firsts = np.flatnonzero(np.append(True, buckets[1:] != buckets[:-1]))
            counts = np.diff(np.append(firsts, len(buckets)))
            at = np.arange(len(buckets)) - np.repeat(firsts, counts) + self._fill[buckets]
            fits = at < _ENTRIES
            self._buckets[buckets[fits], at[fits]] = entries[fits]
            taken = self._fill[buckets[firsts]] + counts
            self._fill[buckets[firsts]] = np.minimum(taken, _ENTRIES)
            buckets, entries = (buckets[~fits] + 1) & mask, entries[~fits]

    # -- the records --------------------------------------------------------------------------------------------------

    def _spans(self, slots: Int64s) -> tuple[Int64s, Int64s]:
        """Return (start, words) of each slot's record; -1 words for a missing slot and for a deleted key."""
        if self._count == 0:
            return np.zeros(len(slots), np.int64), np.full(len(slots), -1, np.int64)
        return self._starts[slots], np.where(slots >= 0, self._sizes[slots], -1)

    def _delete(self, slots: Int64s) -> None:
        sizes = self._sizes[slots]
        self._live_words -= int(sizes[sizes >= 0].sum())
        self._dead += int((sizes >= 0).sum())
        self._sizes[slots] = -1

    def _write(self, slots: Int64s, words: Words, present: npt.NDArray[np.bool_]) -> None:
        if not present.all():
            slots, words = slots[present], words.take(np.flatnonzero(present))
        sizes = words.sizes
        old = self._sizes[slots]
        self._dead -= int((old < 0).sum())
        self._live_words += int(sizes.sum() - old[old >= 0].sum())
        self._sizes[slots] = sizes
        moved = sizes > old
        if moved.any():
            rows = np.flatnonzero(moved)
            self._extend(slots[rows], words if len(rows) == len(slots) else words.take(rows))
        if not moved.all():
            rows = np.flatnonzero(~moved)
            scatter(self._arena, self._starts[slots[rows]], words if len(rows) == len(slots) else words.take(rows))
        if self._arena_end > 2 * self._live_words + (1 << 16):
            self._copy_together()

    def _extend(self, slots: Int64s, words: Words) -> None:
        """Append records at the end of the arena."""
        end = self._arena_end + len(words.data)
        if end > len(self._arena):
            _grow(self._arena, max(end, len(self._arena) * 3 // 2))
        self._arena[self._arena_end : end] = words.data
        self._starts[slots] = self._arena_end + words.starts
        self._arena_end = end

    def _copy_together(self) -> None:
        arena: UInt64s = np.empty(self._live_words * 5 // 4, np.uint64)
        end = 0
        for first in range(0, self._count, _ITEMS_CHUNK):
            live = first + np.flatnonzero(self._sizes[first : min(self._count, first + _ITEMS_CHUNK)] >= 0)
            words = gather(self._arena, self._starts[live], self._sizes[live])
            arena[end : end + len(words.data)] = words.data
            self._starts[live] = end + words.starts
            end += len(words.data)
        self._arena, self._arena_end = arena, end


def _grow(array: npt.NDArray[Any], rows: int) -> None:
    """Resize in place: the kernel moves large blocks instead of copying them. No other view of the array may exist."""
    array.resize((rows, *array.shape[1:]), refcheck=False)
