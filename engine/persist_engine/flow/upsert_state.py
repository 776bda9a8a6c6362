"""State values of upsert and their arithmetic: XOR consolidation of updates in any order, and decoding with every check (spec
16.2 to 16.6). Pure; everything works on columns.

A record is a number of whole words: a header of four and a payload.

             Snapshotting          Value            Tombstone
    word 0   kind                  kind, ordered    kind, ordered      no record: absent
    word 1   diff_sum              order            order
    word 2   len_sum, in bytes     length           0
    word 3   checksum_sum          checksum         checksum of b""
    payload  xor of the values     the value        nothing

`ordered` is set if the order key is not null. A null sorts below all other order keys, and Snapshotting, which has no order key, below
null.

Sums wrap around in 64 bits. A key's updates may arrive in any order and number. If one value was inserted once more than
retracted, and every other value as often as it was retracted, that value remains; if all were balanced, nothing remains.
`decode` detects everything else and never guesses.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.flow.upsert_store import KEY_WORDS, KeyValues
from persist_engine.flow.word_rows import (
    WORD_BYTES,
    Bools,
    Int64s,
    UInt64s,
    Words,
    any_nonzero,
    gather,
    hash_rows,
    offsets_of,
    scatter,
    spread,
)

HEADER_WORDS = 4
_KIND_MASK = 0xFF
_ORDERED = 0x100
#: An error names at most this many keys.
_NAMED_MAX = 5


class Kind(enum.IntEnum):
    """The kind of a record. 0 means no record."""

    VALUE = 1
    TOMBSTONE = 2
    SNAPSHOTTING = 3


@dataclass(frozen=True, slots=True)
class Records:
    """State values, one per key. Rows that are not `present` are empty."""

    words: Words
    present: Bools

    @classmethod
    def from_arrow(cls, records: pa.LargeBinaryArray) -> Records:
        """Convert from the form of a store."""
        valid = (
            records.is_valid().to_numpy(zero_copy_only=False) if records.null_count else np.ones(len(records), np.bool_)
        )
        return cls(Words.from_arrow(records), valid)

    def to_arrow(self) -> pa.LargeBinaryArray:
        """Convert to the form of a store."""
        return self.words.to_arrow(self.present)

    def __len__(self) -> int:
        return len(self.present)

    @property
    def sizes(self) -> Int64s:
        """The bytes of each record, -1 for none: the `previous` argument of a put."""
        return np.where(self.present, self.words.sizes * WORD_BYTES, -1)

    def header(self, word: int) -> Int64s:
        """Return one word of each header, 0 where there is no record."""
        out = np.zeros(len(self), np.int64)
        out[self.present] = self.words.data[self.words.starts[self.present] + word].view(np.int64)
        return out

    @property
    def kinds(self) -> Int64s:
        """The Kind of each record, 0 for none."""
        return self.header(0) & _KIND_MASK

    @property
    def ordered(self) -> Bools:
        """Whether each record has a non-null order key; `header(1)` is then the key."""
        return self.header(0) > _KIND_MASK

    @property
    def payload_sizes(self) -> Int64s:
        """The words of each payload."""
        return np.where(self.present, self.words.sizes - HEADER_WORDS, 0)

    @property
    def payloads(self) -> Words:
        """Each payload; empty where there is no record."""
        return gather(self.words.data, self.words.starts + np.where(self.present, HEADER_WORDS, 0), self.payload_sizes)


@dataclass(frozen=True, slots=True)
class PutStats:
    """The changes of a put (spec 16.6)."""

    processed: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    values_diff: int = 0
    tombstones_diff: int = 0
    size_diff: int = 0


@dataclass(frozen=True, slots=True)
class MergeStats:
    """The size and the effect of a chunk of updates (spec 16.5). Inserts are updates with diff > 0, deletes those with diff < 0."""

    updates: int
    inserts: int
    deletes: int
    values_diff: int
    size_diff: int


@dataclass(frozen=True, slots=True)
class SnapshotTotals:
    """Progress of rehydration: gauges summed over all chunks. `clamped`: a sum was negative and shows as 0, because the shard
    retracts what it never held, or because chunks are still missing.
    """

    updates: int
    values: int
    size_bytes: int
    clamped: bool


@dataclass(slots=True)
class _Totals:
    updates: int = 0
    values: int = 0
    size_bytes: int = 0
    completed: bool = False
    unsettled: int = 0
    """The number of keys whose sums fit neither one value nor none."""
    seen_unsettled: list[UInt64s] = field(default_factory=list)
    """Some of these keys, for messages: the first ones of each chunk."""


class UpsertState:
    """The state values of all keys of a shard, in a store. Not thread-safe.

    After an exception from `merge` or `multi_put`, the store may hold part of the change: discard it and hydrate again.
    """

    def __init__(self, store: KeyValues, *, seed: UInt64s) -> None:
        self._store = store
        self._seed = seed[:1]
        self._totals = _Totals()

    @property
    def store(self) -> KeyValues:
        """The store of the records."""
        return self._store

    @property
    def totals(self) -> SnapshotTotals:
        """The sums over all calls of `merge_snapshot_chunk`."""
        values, size_bytes = self._totals.values, self._totals.size_bytes
        clamped = values < 0 or size_bytes < 0
        return SnapshotTotals(self._totals.updates, max(0, values), max(0, size_bytes), clamped)

    @property
    def unsettled(self) -> int:
        """The number of keys whose sums fit neither one value nor none. It is 0 whenever all updates of a time have arrived."""
        return self._totals.unsettled

    def multi_get(self, keys: UInt64s) -> Records:
        """Return the record of each key."""
        records = Records.from_arrow(self._store.multi_get(keys))
        check(len(records) == len(keys), f"the upsert store answered {len(records)} records for {len(keys)} keys")
        return records

    def multi_put(self, keys: UInt64s, records: Records, previous: Records) -> PutStats:
        """Store each record; delete the key if there is none. `previous` is what `multi_get` returned for the same keys. If a
        key occurs more than once, its last record counts.
        """
        check(len(keys) == len(records) == len(previous), "upsert keys, records and previous records differ in number")
        distinct = last_of_each(keys)
        if len(distinct) < len(keys):
            keys = keys[distinct]
            records, previous = _pick(records, distinct), _pick(previous, distinct)
        return self._put_distinct(keys, records, previous)

    def _put_distinct(self, keys: UInt64s, records: Records, previous: Records) -> PutStats:
        size_diff = self._store.multi_put(keys, records.to_arrow(), previous.sizes)
        was, is_ = previous.present, records.present
        was_tombstone, is_tombstone = (r.kinds == Kind.TOMBSTONE for r in (previous, records))
        was_value, is_value = was & ~was_tombstone, is_ & ~is_tombstone
        return PutStats(
            processed=len(keys),
            inserts=int((is_value & ~was_value).sum()),
            updates=int((is_value & was_value).sum()),
            deletes=int((~is_value & was_value).sum()),
            values_diff=int(is_value.sum()) - int(was_value.sum()),
            tombstones_diff=int(is_tombstone.sum()) - int(was_tombstone.sum()),
            size_diff=size_diff,
        )

    def read(self, keys: UInt64s) -> pa.LargeBinaryArray:
        """Return the value of each key, null for none: `decode` of the stored records."""
        return self.decode(keys, self.multi_get(keys))

    def decode(self, keys: UInt64s, records: Records) -> pa.LargeBinaryArray:
        """See the function `decode`."""
        return decode(keys, records, self._seed)

    def settle(self, keys: UInt64s, values: pa.LargeBinaryArray, previous: Records) -> PutStats:
        """Set each of the distinct `keys` to its value, or to nothing if null. The result equals a `merge` of the updates from
        `previous` to that value, without zeros after the value. `previous` is settled, and is what `multi_get` last returned
        for the same keys.
        """
        return self._put_distinct(keys, settled_records(values, self._seed), previous)

    def ordered_records(self, values: pa.LargeBinaryArray, orders: Int64s, ordered: Bools) -> Records:
        """See the function `ordered_records`."""
        return ordered_records(values, orders, ordered, self._seed)

    def merge_snapshot_chunk(self, keys: UInt64s, values: Words, diffs: Int64s, *, completed: bool) -> MergeStats:
        """Merge one chunk of the snapshot from which state is rebuilt. `completed` marks the last chunk, which may be empty; a
        further chunk raises InvariantViolated.
        """
        check(not self._totals.completed, "a snapshot of upsert state was completed twice")
        stats = self.merge(keys, values, diffs)
        self._totals.updates += stats.updates
        self._totals.values += stats.values_diff
        self._totals.size_bytes += stats.size_diff
        self._totals.completed = completed
        return stats

    def merge(self, keys: UInt64s, values: Words, diffs: Int64s) -> MergeStats:
        """Add updates to the records of their keys. The result does not depend on the order of arrival."""
        check(len(keys) == len(values) == len(diffs), "upsert keys, values and diffs differ in number")
        firsts, groups = group(keys)
        distinct = keys if firsts is None else keys[firsts]
        before = self.multi_get(distinct)
        after = merged(before, groups, values, diffs, self._seed)
        put = self.multi_put(distinct, after, before)
        self._count_unsettled(distinct, before, after)
        return MergeStats(
            updates=len(keys),
            inserts=int((diffs > 0).sum()),
            deletes=int((diffs < 0).sum()),
            values_diff=put.values_diff,
            size_diff=put.size_diff,
        )

    def check_settled(self) -> None:
        """Raise InvariantViolated unless every key has one value or none. The error states the number of bad keys and names
        some with their sums. It must be called when all updates of a time have arrived.
        """
        if not self._totals.unsettled:
            return
        keys = np.concatenate([np.zeros((0, KEY_WORDS), np.uint64), *self._totals.seen_unsettled])
        keys = keys[last_of_each(keys)]
        records = self.multi_get(keys)
        bad = np.flatnonzero(~_is_settled(records))
        raise InvariantViolated(
            f"{self._totals.unsettled} keys of the shard hold neither one value nor none, so it was not written by upserts "
            f"only: {_named(keys, records, bad)}",
            bad_keys=self._totals.unsettled,
            hashes=tuple(key.tobytes() for key in keys[bad[:_NAMED_MAX]]),
        )

    def _count_unsettled(self, keys: UInt64s, before: Records, after: Records) -> None:
        bad = ~_is_settled(after)
        self._totals.unsettled += int(bad.sum()) - int((~_is_settled(before)).sum())
        if not self._totals.unsettled:
            self._totals.seen_unsettled.clear()
        elif bad.any() and len(self._totals.seen_unsettled) < 1000:
            self._totals.seen_unsettled.append(keys[np.flatnonzero(bad)[:_NAMED_MAX]])


# -- arithmetic -------------------------------------------------------------------------------------------------------


def merged(before: Records, groups: Int64s, values: Words, diffs: Int64s, seed: UInt64s) -> Records:
    """Return `before` with all updates merged: row g receives every update i with `groups[i] == g` (spec 16.3). An update adds
    its diff, length times diff, and checksum times diff. If the diff is odd, it also xors the value's words into the payload;
    the shorter of the two counts as continued by zeros. A payload never shrinks. A key of which nothing remains is absent.

    Only Snapshotting and absent records accept merges; others raise InvariantViolated.
    """
    check(
        bool((before.kinds[before.present] == Kind.SNAPSHOTTING).all()),
        "an update was merged into an upsert state value that was decoded before",
    )
    checksums = hash_rows(values, seed)[:, 0].view(np.int64)
    diff_sums, len_sums, checksum_sums = before.header(1), before.header(2), before.header(3)
    np.add.at(diff_sums, groups, diffs)
    np.add.at(len_sums, groups, values.sizes * WORD_BYTES * diffs)
    np.add.at(checksum_sums, groups, checksums * diffs)

    odd = (diffs & 1) == 1
    sizes = before.payload_sizes
    if odd.all():
        odd_groups, odd_values = groups, values
    else:
        odd_groups, odd_values = groups[odd], values.take(np.flatnonzero(odd))
    np.maximum.at(sizes, odd_groups, odd_values.sizes)
    words = _blank(sizes)
    data = words.data
    scatter(data, words.starts + HEADER_WORDS, before.payloads)
    _xor_into(words, odd_groups, odd_values)

    sums_zero = (diff_sums == 0) & (len_sums == 0) & (checksum_sums == 0)
    gone = sums_zero.copy()
    gone[sums_zero] = ~any_nonzero(_payloads_of(words, np.flatnonzero(sums_zero)))
    for word, column in enumerate((np.full(len(before), Kind.SNAPSHOTTING), diff_sums, len_sums, checksum_sums)):
        data[words.starts + word] = column.view(np.uint64)
    # No other payload is cut, even if it ends in zeros: they may belong to a value that the sums do not show yet.
    if gone.any():
        words = gather(data, words.starts, np.where(gone, 0, words.sizes))
    return Records(words, ~gone)


def decode(keys: UInt64s, records: Records, seed: UInt64s) -> pa.LargeBinaryArray:
    """Return the value of each record, null for none (spec 16.4). A Snapshotting record must be exactly one value (its diffs
    add up to 1, and the payload matches the summed length and checksum) or exactly none (all sums and the payload are zero).

    Raises InvariantViolated for keys that are neither. The error states their number and names some with their sums. Nothing is
    guessed.
    """
    kinds = records.kinds
    diff_sums, lengths, checksums = (records.header(word) for word in (1, 2, 3))
    payloads = records.payloads
    limits = payloads.sizes * WORD_BYTES
    snapshotting = kinds == Kind.SNAPSHOTTING
    one = snapshotting & (diff_sums == 1)
    none = snapshotting & (diff_sums == 0)
    fits = (lengths >= 0) & (lengths <= limits) & (lengths % WORD_BYTES == 0)
    has_value = (kinds == Kind.VALUE) | (one & fits)
    sizes = np.where(has_value & fits, lengths, 0) // WORD_BYTES
    exact = bool((sizes == payloads.sizes).all())
    values = payloads if exact else gather(payloads.data, payloads.starts, sizes)
    hashes = hash_rows(values, seed)[:, 0].view(np.int64)
    bad = snapshotting & ~one & ~none
    bad |= has_value & (hashes != checksums)
    bad |= ~fits & ~none & snapshotting
    bad |= none & ((lengths != 0) | (checksums != 0))
    if not exact:
        bad |= snapshotting & any_nonzero(gather(payloads.data, payloads.starts + sizes, payloads.sizes - sizes))
    if bad.any():
        raise InvariantViolated(
            f"{int(bad.sum())} keys hold neither one value nor none: {_named(keys, records, np.flatnonzero(bad))}",
            bad_keys=int(bad.sum()),
            rows=np.flatnonzero(bad)[:_NAMED_MAX].tolist(),
        )
    return values.to_arrow(has_value)


def settled_records(values: pa.LargeBinaryArray, seed: UInt64s) -> Records:
    """Return, for each value, the record of a key whose updates add up to exactly this value; absent if the value is null."""
    present = values.is_valid().to_numpy(zero_copy_only=False)
    kinds, ones = np.full(len(values), Kind.SNAPSHOTTING), np.ones(len(values), np.int64)
    return _records(values, kinds, ones, present, seed)


def ordered_records(values: pa.LargeBinaryArray, orders: Int64s, ordered: Bools, seed: UInt64s) -> Records:
    """Return Value(value, order), or Tombstone(order) if the value is null. `ordered` is false if the order key is null."""
    is_value = values.is_valid().to_numpy(zero_copy_only=False)
    kinds = np.where(is_value, Kind.VALUE, Kind.TOMBSTONE) + ordered * _ORDERED
    return _records(values, kinds, orders, np.ones(len(values), np.bool_), seed)


def _records(values: pa.LargeBinaryArray, kinds: Int64s, first_words: Int64s, present: Bools, seed: UInt64s) -> Records:
    """Build records with each value as payload, with its length and checksum. `first_words` follow the kinds."""
    payloads = Words.from_arrow(values)
    offsets = offsets_of(np.where(present, payloads.sizes + HEADER_WORDS, 0))
    words = Words(offsets, np.empty(int(offsets[-1]), np.uint64))
    scatter(words.data, words.starts + HEADER_WORDS, payloads)
    lengths, starts = payloads.sizes * WORD_BYTES, words.starts[present]
    for word, column in enumerate((kinds, first_words, lengths, hash_rows(payloads, seed)[:, 0])):
        words.data[starts + word] = column[present].view(np.uint64)
    return Records(words, present)


def group(keys: UInt64s) -> tuple[Int64s | None, Int64s]:
    """Return (the first row of each distinct key, in order of first occurrence; the number of each row's key). The first rows
    are None if all keys are distinct.
    """
    everything = np.arange(len(keys))
    lead = np.sort(keys[:, 0])
    if not (lead[1:] == lead[:-1]).any():
        return None, everything
    order, new = _by_key(keys)
    starts = np.flatnonzero(new)
    firsts = np.minimum.reduceat(order, starts)
    rank = np.empty(len(starts), np.int64)
    rank[np.argsort(firsts)] = np.arange(len(starts))
    groups = np.empty(len(keys), np.int64)
    groups[order] = rank[np.cumsum(new) - 1]
    return np.sort(firsts), groups


def last_of_each(keys: UInt64s) -> Int64s:
    """Return the last row of each distinct key, in order."""
    lead = np.sort(keys[:, 0])
    if not (lead[1:] == lead[:-1]).any():
        return np.arange(len(keys))
    order, new = _by_key(keys)
    return np.sort(np.maximum.reduceat(order, np.flatnonzero(new)))


def _by_key(keys: UInt64s) -> tuple[Int64s, Bools]:
    """Return rows ordered so that equal keys are neighbours, and whether each begins a new key. Not stable: a stable sort takes
    five times as long.
    """
    order = np.argsort(keys[:, 0])
    new = _begins(keys[order])
    if (new[1:] & (keys[order[1:], 0] == keys[order[:-1], 0])).any():
        order = np.lexsort(keys.T)  # different keys share their first word, so sort by all words
        new = _begins(keys[order])
    return order, new


def _begins(ordered: UInt64s) -> Bools:
    """Whether each row differs from the previous one."""
    return np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))[: len(ordered)]


def _blank(payload_sizes: Int64s) -> Words:
    offsets = offsets_of(payload_sizes + HEADER_WORDS)
    return Words(offsets, np.zeros(int(offsets[-1]), np.uint64))


def _payloads_of(words: Words, rows: Int64s) -> Words:
    return gather(words.data, words.starts[rows] + HEADER_WORDS, words.sizes[rows] - HEADER_WORDS)


def _xor_into(words: Words, groups: Int64s, values: Words) -> None:
    """Xor each value into the payload of its group."""
    target = spread(words.starts[groups] + HEADER_WORDS, values.sizes)
    if len(groups) <= len(words) and len(groups) == int(np.count_nonzero(np.bincount(groups, minlength=len(words)))):
        words.data[target] ^= values.data  # every group occurs once
    else:
        np.bitwise_xor.at(words.data, target, values.data)


def _is_settled(records: Records) -> Bools:
    """Whether the sums can belong to one value or none. Cheap; `decode` checks the bytes too."""
    diff_sums, lengths = records.header(1), records.header(2)
    one = (diff_sums == 1) & (lengths >= 0) & (lengths <= records.payload_sizes * WORD_BYTES)
    none = (diff_sums == 0) & (lengths == 0) & (records.header(3) == 0)
    settled: Bools = ~records.present | one | none
    return settled


def _pick(records: Records, rows: Int64s) -> Records:
    return Records(records.words.take(rows), records.present[rows])


def _named(keys: UInt64s, records: Records, bad: Int64s) -> str:
    """Describe some of the bad records for a message: the key's hash and each sum by name."""
    texts = []
    for row in bad[:_NAMED_MAX].tolist():
        sums = [int(records.header(word)[row]) for word in (1, 2, 3)]
        payload_bytes = int(records.payload_sizes[row]) * WORD_BYTES
        texts.append(
            f"key {keys[row].tobytes().hex()} with diff_sum {sums[0]}, len_sum {sums[1]}, checksum_sum {sums[2]}, "
            f"{payload_bytes} bytes of xor"
        )
    return "; ".join(texts) + (f"; and {len(bad) - len(texts)} more" if len(bad) > len(texts) else "")
