"""State values of upsert and their arithmetic: XOR consolidation of updates in any order, and decoding with every check
(spec 16.2 to 16.6). Pure; all of it over columns.

A record is whole words: a header of four and a payload.

             Snapshotting          Value            Tombstone
    word 0   kind                  kind, ordered    kind, ordered      no record: absent
    word 1   diff_sum              order            order
    word 2   len_sum, in bytes     length           0
    word 3   checksum_sum          checksum         checksum of b""
    payload  xor of the values     the value        nothing

`ordered` is whether the order key is not null: a null sorts below all others, and Snapshotting, which has none, below that.

Sums wrap around in 64 bits. A key's updates may come in any order and any number; when each value was inserted once more
than it was retracted, or as often, what is left is that value, or nothing. Anything else is found by `decode`, which
never guesses.
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
#: Keys named in an error.
_NAMED_MAX = 5


class Kind(enum.IntEnum):
    """What a record is. 0 is none."""

    VALUE = 1
    TOMBSTONE = 2
    SNAPSHOTTING = 3


@dataclass(frozen=True, slots=True)
class Records:
    """State values of as many keys; rows that are not `present` are empty."""

    words: Words
    present: Bools

    @classmethod
    def from_arrow(cls, records: pa.LargeBinaryArray) -> Records:
        """As a store gives them."""
        valid = (
            records.is_valid().to_numpy(zero_copy_only=False) if records.null_count else np.ones(len(records), np.bool_)
        )
        return cls(Words.from_arrow(records), valid)

    def to_arrow(self) -> pa.LargeBinaryArray:
        """As a store takes them."""
        return self.words.to_arrow(self.present)

    def __len__(self) -> int:
        return len(self.present)

    @property
    def sizes(self) -> Int64s:
        """Bytes of each record, -1 for none: what a put is told about before."""
        return np.where(self.present, self.words.sizes * WORD_BYTES, -1)

    def header(self, word: int) -> Int64s:
        """One word of each header, 0 where there is no record."""
        out = np.zeros(len(self), np.int64)
        out[self.present] = self.words.data[self.words.starts[self.present] + word].view(np.int64)
        return out

    @property
    def kinds(self) -> Int64s:
        """The Kind of each record, 0 for none."""
        return self.header(0) & _KIND_MASK

    @property
    def ordered(self) -> Bools:
        """Whether each has an order key that is not null; `header(1)` is then the key."""
        return self.header(0) > _KIND_MASK

    @property
    def payload_sizes(self) -> Int64s:
        """Words of each payload."""
        return np.where(self.present, self.words.sizes - HEADER_WORDS, 0)

    @property
    def payloads(self) -> Words:
        """Each payload; empty where there is no record."""
        return gather(self.words.data, self.words.starts + np.where(self.present, HEADER_WORDS, 0), self.payload_sizes)


@dataclass(frozen=True, slots=True)
class PutStats:
    """What a put changed (spec 16.6)."""

    processed: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    values_diff: int = 0
    tombstones_diff: int = 0
    size_diff: int = 0


@dataclass(frozen=True, slots=True)
class MergeStats:
    """What a chunk of updates was, and what it changed (spec 16.5). Inserts are its updates with diff > 0, deletes those
    with diff < 0.
    """

    updates: int
    inserts: int
    deletes: int
    values_diff: int
    size_diff: int


@dataclass(frozen=True, slots=True)
class SnapshotTotals:
    """How far rehydration has come: gauges of what all chunks added up to. `clamped` when a sum was negative (the shard
    retracts what it never held, or the chunks are not all there yet) and shows as 0.
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
    """Keys whose sums are not those of one value or none."""
    seen_unsettled: list[UInt64s] = field(default_factory=list)
    """Some of them, for people: of each chunk the first that was left so."""


class UpsertState:
    """The state values of all keys of a shard, in a store. Not thread-safe.

    After an exception out of `merge` or `multi_put` the store may hold half of it: throw it away and hydrate again.
    """

    def __init__(self, store: KeyValues, *, seed: UInt64s) -> None:
        self._store = store
        self._seed = seed[:1]
        self._totals = _Totals()

    @property
    def store(self) -> KeyValues:
        """Where the records are."""
        return self._store

    @property
    def totals(self) -> SnapshotTotals:
        """What `merge_snapshot_chunk` has added up to."""
        values, size_bytes = self._totals.values, self._totals.size_bytes
        clamped = values < 0 or size_bytes < 0
        return SnapshotTotals(self._totals.updates, max(0, values), max(0, size_bytes), clamped)

    @property
    def unsettled(self) -> int:
        """How many keys have sums that are not those of one value or none: 0 whenever all updates of a time are in."""
        return self._totals.unsettled

    def multi_get(self, keys: UInt64s) -> Records:
        """The record of each key."""
        records = Records.from_arrow(self._store.multi_get(keys))
        check(len(records) == len(keys), f"the upsert store answered {len(records)} records for {len(keys)} keys")
        return records

    def multi_put(self, keys: UInt64s, records: Records, previous: Records) -> PutStats:
        """Store each record, delete the key where there is none; `previous` is what `multi_get` said of the same keys. Of
        a repeated key the last record counts.
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
        """The value of each key, null for none: `decode` of what is stored."""
        return self.decode(keys, self.multi_get(keys))

    def decode(self, keys: UInt64s, records: Records) -> pa.LargeBinaryArray:
        """See the function."""
        return decode(keys, records, self._seed)

    def settle(self, keys: UInt64s, values: pa.LargeBinaryArray, previous: Records) -> PutStats:
        """Let each of the distinct `keys` hold its value, or nothing where it is null: what `merge` makes of the updates
        that lead there from `previous`, without zeros behind the value. `previous` is settled, and what `multi_get` said of
        the same keys last.
        """
        return self._put_distinct(keys, settled_records(values, self._seed), previous)

    def ordered_records(self, values: pa.LargeBinaryArray, orders: Int64s, ordered: Bools) -> Records:
        """Value(value, order), or Tombstone(order) where the value is null; `ordered` is false where the order key is
        null.
        """
        return ordered_records(values, orders, ordered, self._seed)

    def merge_snapshot_chunk(self, keys: UInt64s, values: Words, diffs: Int64s, *, completed: bool) -> MergeStats:
        """Merge one chunk of the snapshot that state is rebuilt from. After the one with `completed` there is no other:
        InvariantViolated. An empty chunk may complete too.
        """
        check(not self._totals.completed, "a snapshot of upsert state was completed twice")
        stats = self.merge(keys, values, diffs)
        self._totals.updates += stats.updates
        self._totals.values += stats.values_diff
        self._totals.size_bytes += stats.size_diff
        self._totals.completed = completed
        return stats

    def merge(self, keys: UInt64s, values: Words, diffs: Int64s) -> MergeStats:
        """Add updates to what is known of their keys. The order in which updates come never matters."""
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
        """Raise InvariantViolated, with the number of bad keys and some of them with their sums, unless every key has one
        value or none. Call it when all updates of a time are in.
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
    """Row g of the result is `before[g]` with every update i of `groups[i] == g` added (spec 16.3): the diff, length times
    diff, checksum times diff; and the value's words xored in when the diff is odd, a shorter payload being as one
    continued by zeros. A payload never gets shorter; a key of which nothing is left is absent.

    Only Snapshotting and absent records can be merged into: InvariantViolated.
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
    # No other payload is cut, whatever zeros it ends in: they may be a value's own, of which the sums do not tell yet.
    if gone.any():
        words = gather(data, words.starts, np.where(gone, 0, words.sizes))
    return Records(words, ~gone)


def decode(keys: UInt64s, records: Records, seed: UInt64s) -> pa.LargeBinaryArray:
    """Each record's value, null for none (spec 16.4): Snapshotting must be exactly one value (its diffs add up to 1, the
    payload has the length and the checksum that were added up) or exactly none (to 0, and everything is zero).

    InvariantViolated names the number of keys that are neither, and some of them with their sums; nothing is guessed.
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
    """What a key's updates add up to when they leave the value; absent where it is null."""
    present = values.is_valid().to_numpy(zero_copy_only=False)
    kinds, ones = np.full(len(values), Kind.SNAPSHOTTING), np.ones(len(values), np.int64)
    return _records(values, kinds, ones, present, seed)


def ordered_records(values: pa.LargeBinaryArray, orders: Int64s, ordered: Bools, seed: UInt64s) -> Records:
    """Value(value, order), or Tombstone(order) where the value is null; `ordered` is false where the order key is null."""
    is_value = values.is_valid().to_numpy(zero_copy_only=False)
    kinds = np.where(is_value, Kind.VALUE, Kind.TOMBSTONE) + ordered * _ORDERED
    return _records(values, kinds, orders, np.ones(len(values), np.bool_), seed)


def _records(values: pa.LargeBinaryArray, kinds: Int64s, first_words: Int64s, present: Bools, seed: UInt64s) -> Records:
    """With each value as payload, its length and its checksum; `first_words` are those that follow the kinds."""
    payloads = Words.from_arrow(values)
    offsets = offsets_of(np.where(present, payloads.sizes + HEADER_WORDS, 0))
    words = Words(offsets, np.empty(int(offsets[-1]), np.uint64))
    scatter(words.data, words.starts + HEADER_WORDS, payloads)
    lengths, starts = payloads.sizes * WORD_BYTES, words.starts[present]
    for word, column in enumerate((kinds, first_words, lengths, hash_rows(payloads, seed)[:, 0])):
        words.data[starts + word] = column[present].view(np.uint64)
    return Records(words, present)


def group(keys: UInt64s) -> tuple[Int64s | None, Int64s]:
    """(the first row of each distinct key, in the order in which they first come; for each row the number of its key).
    No first rows when all keys are distinct.
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
    """The last row of each distinct key, in order."""
    lead = np.sort(keys[:, 0])
    if not (lead[1:] == lead[:-1]).any():
        return np.arange(len(keys))
    order, new = _by_key(keys)
    return np.sort(np.maximum.reduceat(order, np.flatnonzero(new)))


def _by_key(keys: UInt64s) -> tuple[Int64s, Bools]:
    """Rows so that equal keys are neighbours, and for each whether it begins a new key. Not stable: that takes five times
    as long.
    """
    order = np.argsort(keys[:, 0])
    new = _begins(keys[order])
    if (new[1:] & (keys[order[1:], 0] == keys[order[:-1], 0])).any():
        order = np.lexsort(keys.T)  # different keys share their first word: sort by all of them
        new = _begins(keys[order])
    return order, new


def _begins(ordered: UInt64s) -> Bools:
    """Whether each row differs from the one before."""
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
        words.data[target] ^= values.data  # every group once
    else:
        np.bitwise_xor.at(words.data, target, values.data)


def _is_settled(records: Records) -> Bools:
    """Whether the sums can be those of one value or of none. Cheap: `decode` looks at the bytes too."""
    diff_sums, lengths = records.header(1), records.header(2)
    one = (diff_sums == 1) & (lengths >= 0) & (lengths <= records.payload_sizes * WORD_BYTES)
    none = (diff_sums == 0) & (lengths == 0) & (records.header(3) == 0)
    settled: Bools = ~records.present | one | none
    return settled


def _pick(records: Records, rows: Int64s) -> Records:
    return Records(records.words.take(rows), records.present[rows])


def _named(keys: UInt64s, records: Records, bad: Int64s) -> str:
    """Some of the bad ones, for people: the key's hash and each sum by its own name."""
    texts = []
    for row in bad[:_NAMED_MAX].tolist():
        sums = [int(records.header(word)[row]) for word in (1, 2, 3)]
        payload_bytes = int(records.payload_sizes[row]) * WORD_BYTES
        texts.append(
            f"key {keys[row].tobytes().hex()} with diff_sum {sums[0]}, len_sum {sums[1]}, checksum_sum {sums[2]}, "
            f"{payload_bytes} bytes of xor"
        )
    return "; ".join(texts) + (f"; and {len(bad) - len(texts)} more" if len(bad) > len(texts) else "")
