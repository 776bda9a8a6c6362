"""Laws of upsert state: rows as bytes, XOR consolidation in any order, and stores that are all the same map."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import CorruptData, InvariantViolated
from persist_engine.flow import upsert_memory
from persist_engine.flow.upsert_memory import MemoryStore
from persist_engine.flow.upsert_state import (
    HEADER_WORDS,
    Kind,
    Records,
    UpsertState,
    decode,
    group,
    last_of_each,
    merged,
)
from persist_engine.flow.upsert_store import KEY_WORDS, KeyValues, SpillingStore
from persist_engine.flow.word_rows import Words, hash_rows
from persist_engine.rows.updates import consolidate
from persist_engine.rows.words import RowCodec
from persist_engine.storage.upsert_rocks import RocksStore
from persist_kit import strategies
from persist_kit.depth import draws

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
quick = settings(max_examples=draws(25), deadline=None, suppress_health_check=SLOW)
SEED = np.array([11, 22, 33, 44], np.uint64)

#: Encoded values: whole words, some of them sharing words or ending in zeros.
values = st.lists(st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]), max_size=4).map(
    lambda words: np.array(words, np.uint64).tobytes()
)


def words(rows: list[bytes]) -> Words:
    return Words.from_arrow(pa.array(rows, pa.large_binary()))


def keys(numbers: list[int]) -> np.ndarray:
    """Keys as their hashes: small numbers share buckets, some share a first word."""
    column = pa.array([np.array([n], np.uint64).tobytes() for n in numbers], pa.large_binary())
    hashes = hash_rows(Words.from_arrow(column), SEED)
    hashes[:, 0] = np.array([n // 2 for n in numbers], np.uint64)
    return hashes


def fold(updates: list[tuple[bytes, int]]) -> Records:
    """What merging these updates of one key, in this order, in one go, comes to."""
    none = Records.from_arrow(pa.nulls(1, pa.large_binary()))
    diffs = np.array([diff for _, diff in updates], np.int64)
    return merged(none, np.zeros(len(updates), np.int64), words([value for value, _ in updates]), diffs, SEED[:1])


# -- rows as bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@quick
@given(st.data())
def test_rows_decode_to_what_was_encoded_and_equal_rows_alone_have_equal_bytes(data: Any) -> None:
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    codec = RowCodec(schema.key_type)
    encoded = codec.encode(table["key"])
    assert not encoded.null_count
    assert all(len(row) % 8 == 0 for row in encoded.to_pylist())
    alone = table.select(["key"]).append_column("val", pa.array([{}] * len(table), pa.struct([])))
    alone = alone.append_column("time", pa.array([0] * len(table), pa.int64()))
    alone = alone.append_column("diff", pa.array([1] * len(table), pa.int64()))
    assert len(set(encoded.to_pylist())) == consolidate(alone).num_rows
    decoded = codec.decode(encoded)
    assert decoded.type == schema.key_type
    canonical = repr(table["key"].to_pylist()).replace("-0.0", "0.0")
    assert repr(decoded.to_pylist()).replace("-0.0", "0.0") == canonical
    assert codec.encode(decoded).to_pylist() == encoded.to_pylist()


@pytest.mark.slow
@quick
@given(st.data())
def test_the_bytes_of_a_row_do_not_depend_on_its_neighbours(data: Any) -> None:
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    assume(table.num_rows > 1)
    codec = RowCodec(schema.key_type)
    cut = data.draw(st.integers(0, table.num_rows))
    together = codec.encode(table["key"])
    apart = [codec.encode(table["key"].slice(0, cut)), codec.encode(table["key"].slice(cut).combine_chunks())]
    assert pa.concat_arrays(apart).to_pylist() == together.to_pylist()
    hashes = [hash_rows(Words.from_arrow(piece), SEED) for piece in (*apart, together.slice(cut), together)]
    assert np.array_equal(np.concatenate(hashes[:2]), hashes[3])
    assert np.array_equal(hashes[2], hashes[1])


@given(st.binary(max_size=40))
def test_bytes_that_cannot_be_rows_are_refused(raw: bytes) -> None:
    codec = RowCodec(pa.struct([("a", pa.string()), ("b", pa.int64())]))
    try:
        codec.decode(pa.array([raw], pa.large_binary()))
    except CorruptData:
        return
    assert len(raw) >= 16


def test_values_under_nulls_do_not_show() -> None:
    """Two columns with the same values and nulls, and other bytes below the nulls, encode alike."""
    kind = pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.struct([("d", pa.int32())]))])
    mask = pa.array([True, False])

    def build(hidden: int) -> pa.Array:
        inner = pa.StructArray.from_arrays([pa.array([hidden, 7], pa.int32())], fields=list(kind[2].type), mask=mask)
        ints = pa.array(np.array([hidden, 5]), mask=np.array([True, False]))
        texts = pa.Array.from_buffers(
            pa.string(),
            2,
            [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(f"{hidden}x".encode())],
        )
        return pa.StructArray.from_arrays([ints, texts, inner], fields=list(kind))

    codec = RowCodec(kind)
    one, two = codec.encode(build(1)), codec.encode(build(2))
    assert one.to_pylist() == two.to_pylist()
    assert codec.decode(one).to_pylist() == [{"a": None, "b": None, "c": None}, {"a": 5, "b": "x", "c": {"d": 7}}]


# -- XOR consolidation -----------------------------------------------------------------------------------------------


@quick
@given(
    st.lists(st.tuples(values, st.integers(1, 4)), max_size=6),
    st.none() | values,
    st.randoms(use_true_random=False),
    st.lists(st.integers(0, 20), max_size=3),
)
def test_balanced_updates_come_to_the_same_value_in_any_order_and_any_chunks(
    noise: list[tuple[bytes, int]], last: bytes | None, random: Any, cuts: list[int]
) -> None:
    """Spec 16.2, 16.3."""
    updates = [(value, sign * diff) for value, diff in noise for sign in (1, -1)]
    updates += [] if last is None else [(last, 1)]
    random.shuffle(updates)
    state = UpsertState(MemoryStore(), seed=SEED)
    key = keys([1])
    edges = sorted({0, len(updates), *(cut for cut in cuts if cut < len(updates))})
    for start, end in zip(edges, edges[1:], strict=False):
        chunk = updates[start:end]
        state.merge(
            key[[0] * len(chunk)], words([value for value, _ in chunk]), np.array([d for _, d in chunk], np.int64)
        )
    state.check_settled()
    assert state.read(key).to_pylist() == [last]
    assert state.unsettled == 0


#: Values of zeros alone: they differ by their lengths only.
zeros = st.integers(0, 3).map(lambda size: b"\0" * 8 * size)


def merge_one_by_one(updates: list[tuple[bytes, int]]) -> UpsertState:
    state, key = UpsertState(MemoryStore(), seed=SEED), keys([1])
    longest = 0
    for value, diff in updates:
        state.merge(key, words([value]), np.array([diff], np.int64))
        record = state.multi_get(key)
        size = int(record.payload_sizes[0]) * 8 if record.present[0] else 0
        assert size >= longest or not record.present[0], "the buffer shrank"
        longest = size
    return state


def test_a_value_of_zeros_is_found_again_behind_a_shorter_one() -> None:
    """After the third update the sums are those of eight zero bytes; the value left is sixteen."""
    none, one, two = b"", b"\0" * 8, b"\0" * 16
    state = merge_one_by_one([(two, 1), (none, 1), (one, -1), (none, -1), (one, 1)])
    state.check_settled()
    assert state.read(keys([1])).to_pylist() == [two]


@pytest.mark.slow
@quick
@given(st.lists(st.tuples(zeros, st.integers(1, 2)), max_size=4), zeros, st.randoms(use_true_random=False))
def test_a_buffer_never_shrinks_while_its_key_is_there(
    noise: list[tuple[bytes, int]], last: bytes, random: Any
) -> None:
    updates = [(value, sign * diff) for value, diff in noise for sign in (1, -1)] + [(last, 1)]
    random.shuffle(updates)
    state = merge_one_by_one(updates)
    state.check_settled()
    assert state.read(keys([1])).to_pylist() == [last]
    assert (state.store.size_bytes == 0) == (last is None)


@quick
@given(st.lists(st.tuples(values, st.integers(-3, 3)), max_size=8))
def test_duplicate_or_missing_updates_are_caught(updates: list[tuple[bytes, int]]) -> None:
    """The sums of a multiset that is neither empty nor one value never decode."""
    sums: dict[bytes, int] = {}
    for value, diff in updates:
        sums[value] = sums.get(value, 0) + diff
    left = {value: diff for value, diff in sums.items() if diff}
    records = fold(updates)
    if not left:
        assert not records.present[0]
    elif list(left.values()) == [1]:
        assert decode(keys([1]), records, SEED[:1]).to_pylist() == list(left)
    else:
        with pytest.raises(InvariantViolated):
            decode(keys([1]), records, SEED[:1])


@pytest.mark.slow
@given(values.filter(len), st.integers(1, HEADER_WORDS + 2), st.integers(1, 2**63 - 1))
def test_a_record_that_was_changed_does_not_decode(value: bytes, word: int, flip: int) -> None:
    records = fold([(value, 1)])
    data = records.words.data.copy()
    assume(word < len(data))
    data[word] ^= np.uint64(flip)
    with pytest.raises(InvariantViolated, match=r"1 keys hold neither.*diff_sum.*len_sum.*checksum_sum"):
        decode(keys([1]), Records(Words(records.words.offsets, data), records.present), SEED[:1])


def record(diff_sum: int, len_sum: int, checksum_sum: int, payload: list[int]) -> Records:
    """A Snapshotting record as it may lie in a damaged store."""
    header = np.array([Kind.SNAPSHOTTING, diff_sum, len_sum, checksum_sum], np.int64).view(np.uint64)
    row = np.concatenate([header, np.array(payload, np.uint64)])
    return Records(Words(np.array([0, len(row)]), row), np.ones(1, np.bool_))


def checksum_of(payload: list[int]) -> int:
    return int(
        hash_rows(Words(np.array([0, len(payload)]), np.array(payload, np.uint64)), SEED[:1])[0, 0].view(np.int64)
    )


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(record(1, 16, checksum_of([0]), [0]), id="longer than its bytes"),
        pytest.param(record(1, -8, checksum_of([]), [0]), id="negative length"),
        pytest.param(record(1, 4, checksum_of([]), [0]), id="half a word"),
        pytest.param(record(1, 8, checksum_of([1]), [1, 5]), id="more than its length"),
        pytest.param(record(1, 8, checksum_of([2]), [1]), id="another checksum"),
        pytest.param(record(0, 8, 0, [0]), id="none, with a length"),
        pytest.param(record(0, 0, 1, [0]), id="none, with a checksum"),
        pytest.param(record(0, 0, 0, [1]), id="none, with bytes"),
        pytest.param(record(2, 8, checksum_of([1]), [1]), id="two"),
        pytest.param(record(-1, -8, -checksum_of([1]), [1]), id="less than none"),
    ],
)
def test_each_check_of_a_record_catches_its_damage(damaged: Records) -> None:
    """Spec 16.4."""
    with pytest.raises(
        InvariantViolated, match=r"^1 keys hold neither one value nor none: key [0-9a-f]{64} with diff_sum"
    ):
        decode(keys([1]), damaged, SEED[:1])


def test_a_key_whose_sums_are_zero_stays_while_its_bytes_are_not() -> None:
    """Taking away what was never there may bring the sums to zero; the bytes still show it."""
    value = [3]
    merging = Words(np.array([0, 1]), np.array(value, np.uint64)), np.array([1]), SEED[:1]
    exact = merged(record(-1, -8, -checksum_of(value), value), np.array([0]), *merging)
    assert not exact.present[0]
    other = merged(record(-1, -8, -checksum_of(value), [4]), np.array([0]), *merging)
    assert other.present[0]
    with pytest.raises(InvariantViolated):
        decode(keys([1]), other, SEED[:1])


def test_what_was_decoded_is_not_merged_into() -> None:
    state = UpsertState(MemoryStore(), seed=SEED)
    decoded = state.ordered_records(pa.array([b"8 bytes."], pa.large_binary()), np.array([1]), np.array([True]))
    state.multi_put(keys([1]), decoded, state.multi_get(keys([1])))
    with pytest.raises(InvariantViolated, match="decoded before"):
        state.merge(keys([1]), words([b"8 bytes."]), np.array([1]))


def test_what_puts_changed_is_counted() -> None:
    """Spec 16.6."""
    state = UpsertState(MemoryStore(), seed=SEED)
    some = keys([1, 2, 3, 1])
    nothing = state.multi_get(some)
    made = state.ordered_records(
        pa.array([b"8 bytes.", b"x" * 16, None, b"y" * 24], pa.large_binary()), np.arange(4), np.ones(4, np.bool_)
    )
    first = state.multi_put(some, made, nothing)  # of the repeated key the last counts
    assert (first.processed, first.inserts, first.updates, first.deletes) == (3, 2, 0, 0)
    assert (first.values_diff, first.tombstones_diff, first.size_diff) == (2, 1, state.store.size_bytes)
    assert state.read(some).to_pylist() == [b"y" * 24, b"x" * 16, None, b"y" * 24]
    some = keys([1, 2, 3, 4])
    before = state.multi_get(some)
    made = state.ordered_records(
        pa.array([b"z" * 8, None, b"z" * 8, None], pa.large_binary()), np.arange(4), np.ones(4, np.bool_)
    )
    second = state.multi_put(some, made, before)
    assert (second.processed, second.inserts, second.updates, second.deletes) == (4, 1, 1, 1)
    assert (second.values_diff, second.tombstones_diff) == (0, 1)
    assert first.size_diff + second.size_diff == state.store.size_bytes


def test_sums_wrap_around() -> None:
    """2**62 copies, four times: the diff sum comes back to 0, and so does everything else."""
    value = np.array([7], np.uint64).tobytes()
    assert not fold([(value, 2**62)] * 4).present[0]
    assert fold([(value, 2**62)] * 3).present[0]


@pytest.mark.slow
@given(st.lists(st.integers(0, 12), max_size=30))
def test_grouping_keeps_the_order_of_coming(numbers: list[int]) -> None:
    found = keys(numbers)
    firsts, groups = group(found)
    distinct = list(dict.fromkeys(numbers))
    assert [distinct[number] for number in groups.tolist()] == numbers
    assert [numbers[row] for row in (range(len(numbers)) if firsts is None else firsts)] == distinct
    last = {number: row for row, number in enumerate(numbers)}
    assert last_of_each(found).tolist() == sorted(last.values())


# -- stores ----------------------------------------------------------------------------------------------------------


@contextmanager
def opened(kind: str) -> Iterator[KeyValues]:
    with tempfile.TemporaryDirectory() as folder:
        store: KeyValues
        if kind == "memory":
            store = MemoryStore()
        elif kind == "rocksdb":
            store = RocksStore(Path(folder) / "db")
        else:
            store = SpillingStore(MemoryStore(), lambda: RocksStore(Path(folder) / "db"), spill_bytes=600)
        yield store
        store.close()


puts = st.lists(
    st.lists(st.tuples(st.integers(0, 25), st.none() | values), max_size=12, unique_by=lambda put: put[0]), max_size=8
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "examples"), [("memory", 60), ("rocksdb", 6), ("spilling", 8)])
def test_a_store_is_a_map(kind: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=SLOW)
    @given(puts)
    def check(batches: list[list[tuple[int, bytes | None]]]) -> None:
        with opened(kind) as store:
            paper: dict[int, bytes] = {}
            size = 0
            for batch in batches:
                numbers = [number for number, _ in batch]
                before = np.array([len(paper[n]) if n in paper else -1 for n in numbers], np.int64)
                records = pa.array([record for _, record in batch], pa.large_binary())
                size += store.multi_put(keys(numbers), records, before)
                for number, record in batch:
                    if record is None:
                        paper.pop(number, None)
                    else:
                        paper[number] = record
                asked = list(range(30))
                assert store.multi_get(keys(asked)).to_pylist() == [paper.get(number) for number in asked]
                assert size == store.size_bytes
            assert (store.size_bytes == 0) == (not paper)

    check()


@pytest.mark.slow
def test_the_table_in_memory_grows_and_forgets() -> None:
    """Many generations of keys through a table that is built anew, compacts its arena and reuses the room of the dead."""
    rng = np.random.default_rng(5)
    store = MemoryStore()
    paper: dict[bytes, bytes] = {}
    for generation in range(31):
        # The last one makes more slots than one chunk of a listing has.
        some = (rng.integers(0, 4000, 700) if generation < 30 else np.arange(2 * upsert_memory._ITEMS_CHUNK)).astype(
            np.uint64
        )
        some = np.unique(some)
        found = hash_rows(Words(np.arange(len(some) + 1), some), SEED)
        records = [None if rng.random() < 0.4 else rng.integers(0, 9, rng.integers(0, 40)).tobytes() for _ in some]
        store.multi_put(found, pa.array(records, pa.large_binary()), np.full(len(some), -1, np.int64))
        for name, record in zip(found, records, strict=True):
            if record is None:
                paper.pop(name.tobytes(), None)
            else:
                paper[name.tobytes()] = record
        asked = np.array([np.frombuffer(name, np.uint64) for name in paper]).reshape(-1, KEY_WORDS)
        assert store.multi_get(asked).to_pylist() == list(paper.values())
        assert len(store) == len(paper)
    listed = {k.tobytes(): r for some, records in store.items() for k, r in zip(some, records.to_pylist(), strict=True)}
    assert listed == paper


def test_slots_that_were_looked_up_are_not_used_after_the_table_was_built_anew() -> None:
    store = MemoryStore()
    some, none = keys([1, 2, 3]), np.full(3, -1, np.int64)
    store.multi_get(some)
    store.multi_put(some, pa.array([b"first..."] * 3, pa.large_binary()), none)
    store.multi_put(some, pa.nulls(3, pa.large_binary()), none)
    many = keys(list(range(10, 2000)))
    store.multi_put(many, pa.array([b"many...."] * 1990, pa.large_binary()), np.full(1990, -1, np.int64))
    store.multi_put(some, pa.array([b"second.."] * 3, pa.large_binary()), none)
    assert store.multi_get(many).to_pylist() == [b"many...."] * 1990
    assert store.multi_get(some).to_pylist() == [b"second.."] * 3


def test_a_bucket_that_overflows_sends_its_keys_on() -> None:
    """Hundreds of keys that all begin in one bucket."""
    store = MemoryStore()
    found = np.zeros((300, KEY_WORDS), np.uint64)
    found[:, 3] = np.arange(300)
    records = pa.array([np.array([n], np.uint64).tobytes() for n in range(300)], pa.large_binary())
    for part in range(0, 300, 50):
        store.multi_put(found[part : part + 50], records.slice(part, 50), np.full(50, -1, np.int64))
    assert store.multi_get(found).to_pylist() == records.to_pylist()
    missing = found.copy()
    missing[:, 2] = 1
    assert store.multi_get(missing).null_count == 300


def test_a_store_that_cannot_move_stays_whole_and_tries_again() -> None:
    """Spec 16.7."""
    opened_disks: list[MemoryStore] = []

    class Failing(MemoryStore):
        def multi_put(self, found: Any, records: Any, previous: Any) -> int:
            raise OSError("disk full")

    def open_disk() -> MemoryStore:
        opened_disks.append(Failing() if not opened_disks else MemoryStore())
        return opened_disks[-1]

    store = SpillingStore(MemoryStore(), open_disk, spill_bytes=10)
    record, nothing = pa.array([b"x" * 16], pa.large_binary()), np.full(1, -1, np.int64)
    with pytest.raises(OSError, match="disk full"):
        store.multi_put(keys([1]), record, nothing)
    assert not store.is_spilled
    assert store.multi_get(keys([1])).to_pylist() == [b"x" * 16]
    store.multi_put(keys([2]), record, nothing)
    assert store.is_spilled
    store.multi_put(keys([1, 2]), pa.nulls(2, pa.large_binary()), np.full(2, 16, np.int64))
    assert store.is_spilled, "what is on disk stays there, however small it becomes"
    assert len(opened_disks) == 2
    assert store.size_bytes == 0
