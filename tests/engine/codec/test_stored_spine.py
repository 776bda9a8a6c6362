"""Rollups: hollow batches are decoded at the first look, and not before; and all damage is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import CorruptData
from persist_engine.codec import stored_spine
from persist_engine.codec.envelope import Kind, sealed
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.spine.lazy_parts import EncodedParts, JoinedParts, LazyParts, joined, outline_of
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState
from persist_engine.pb import state_pb2
from persist_kit import strategies
from persist_kit.depth import draws
from persist_kit.states import Stepper, append, batch


def state_of(batches: int) -> ShardState:
    trace = Trace()
    for index in range(batches):
        trace = trace.push_without_requests(batch(index, index + 1, 1))
    return replace(Stepper().state, trace=trace)


STATE = state_of(37)
MANY = state_of(300)
DATA = encode_rollup(Rollup(STATE))
PACKED = encode_rollup(Rollup(MANY))


class Loads:
    """Counts the hollow batches that are decoded and encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = self.encoded = 0
        decode, encode = stored_spine.batch_from_pb, stored_spine.batch_to_pb

        def counted_decode(message):
            self.decoded += 1
            return decode(message)

        def counted_encode(content):
            self.encoded += 1
            return encode(content)

        monkeypatch.setattr(stored_spine, "batch_from_pb", counted_decode)
        monkeypatch.setattr(stored_spine, "batch_to_pb", counted_encode)


def test_opening_looks_at_no_hollow_batch_and_the_next_append_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    state = decode_rollup(DATA, key="k", lazily=True).state
    assert (state.trace.rows, state.trace.batch_count, state.trace.part_count) == (37, 37, 37)
    assert state.trace.upper == STATE.trace.upper
    state.trace.validate()
    assert loads.decoded == 0
    shard = Stepper()
    shard.state = state
    shard.do(append(batch(37, 38, 1), token_number=1))
    assert loads.decoded < 8
    again = encode_rollup(Rollup(shard.state))
    assert loads.decoded < 8
    assert loads.encoded < 16, "what did not change is written as the bytes it came from"
    assert decode_rollup(again, key="k").state == shard.state
    assert loads.decoded > 37


def test_a_second_rollup_encodes_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Stepper()
    shard.state = state_of(512)
    encode_rollup(Rollup(shard.state))
    loads = Loads(monkeypatch)
    for index in range(8):
        shard.do(append(batch(512 + index, 513 + index, 1), token_number=1 + index))
    encode_rollup(Rollup(shard.state))
    assert loads.encoded <= 64


@pytest.mark.slow
@given(st.data())
@settings(max_examples=draws(25), deadline=None)
def test_lazily_and_at_once_give_the_same_and_come_back(data: st.DataObject) -> None:
    state = replace(STATE, trace=data.draw(strategies.traces()))
    stored = encode_rollup(Rollup(state))
    lazy, eager = decode_rollup(stored, key="k", lazily=True), decode_rollup(stored, key="k")
    assert encode_rollup(lazy) == encode_rollup(eager) == stored
    assert lazy == eager == Rollup(state)
    assert list(lazy.state.trace.batches()) == list(state.trace.batches())


def test_diffs_move_what_was_not_looked_at_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Stepper()
    shard.state = STATE
    replica = decode_rollup(DATA, key="k", lazily=True).state
    for index in range(40):
        shard.do(append(batch(37 + index, 38 + index, 1), token_number=1 + index))
    loads = Loads(monkeypatch)
    for diff in shard.diffs:
        replica = apply(replica, diff)
    assert any(isinstance(each.parts, JoinedParts) for each in replica.trace.spine_batches())
    assert encode_rollup(Rollup(replica)) == encode_rollup(Rollup(shard.state))
    assert loads.decoded == 0
    assert replica == shard.state
    assert loads.decoded == 37
    replica.trace.validate(deep=True)


@pytest.mark.parametrize("damage", ["a description", "ids"])
def test_a_diff_does_not_move_what_is_not_as_it_says(damage: str) -> None:
    shard = Stepper()
    shard.state = STATE
    for index in range(3):
        shard.do(append(batch(37 + index, 38 + index, 1), token_number=1 + index))

    def change(trace: state_pb2.Trace) -> None:
        held = state_pb2.StoredBatches()
        held.ParseFromString(trace.stored[-1].batches)
        if damage == "ids":
            del held.ids[0]
        else:
            held.batches[0].desc.lower.elements[0] += 1
        trace.stored[-1].batches = held.SerializeToString()

    replica = decode_rollup(damaged(change), key="the-key", lazily=True).state
    with pytest.raises(CorruptData, match="the-key: spine batch 36-37 breaks a rule"):
        reduce(apply, shard.diffs, replica)


def test_lazy_parts_are_the_tuple_they_stand_for() -> None:
    items = tuple(part for each in STATE.trace.spine_batches() for part in each.parts)

    def made() -> LazyParts:
        return LazyParts(len(items), EncodedParts(b""), lambda _: items, lambda _: outline_of(items))

    lazy = made()
    assert (len(lazy), tuple(lazy), lazy[0], lazy[-3:]) == (len(items), items, items[0], items[-3:])
    assert lazy == items
    assert items == lazy
    assert lazy == made()
    assert lazy != items[1:]
    assert (lazy + items, items + lazy, lazy + lazy) == (items * 2, items * 2, items * 2)
    assert hash(lazy) == hash(items)
    both = joined([items[:2], joined([lazy, items[:1]]), items[:1]])
    assert isinstance(both, JoinedParts)
    assert (len(both), both, both.pieces) == (len(items) + 4, items[:2] + items + items[:1] * 2, both.pieces)
    assert both.pieces[1] is lazy
    assert outline_of(both) == outline_of(tuple(both))
    assert joined([items, items[:1]]) == items + items[:1]
    assert joined([lazy]) is lazy


def test_many_hollow_batches_are_stored_compressed_and_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = decode_rollup(PACKED, key="k", lazily=True)
    assert lazy == decode_rollup(PACKED, key="k") == Rollup(MANY)
    assert encode_rollup(lazy) == PACKED
    monkeypatch.setattr(stored_spine, "PACK_BYTES_MIN", 1 << 30)
    plain = encode_rollup(Rollup(state_of(300)))
    assert len(PACKED) * 2 < len(plain)
    monkeypatch.undo()
    loads = Loads(monkeypatch)
    assert encode_rollup(decode_rollup(plain, key="k", lazily=True)) == PACKED, (
        "what was stored as it was is packed by the next rollup"
    )
    assert loads.decoded == 0


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (lambda _: 1 << 60, "do not hold"),
        (lambda size: size + 1, "do not unpack"),
        (lambda size: size - 1, "do not unpack"),
    ],
)
def test_compressed_bytes_of_another_size_are_refused_when_they_are_looked_at(
    claim: Callable[[int], int], message: str
) -> None:
    def change(trace: state_pb2.Trace) -> None:
        assert trace.stored[0].unpacked_bytes
        trace.stored[0].unpacked_bytes = claim(trace.stored[0].unpacked_bytes)

    state = decode_rollup(damaged(change, PACKED), key="the-key", lazily=True).state
    with pytest.raises(CorruptData, match=f"the-key: spine batch 0-128 breaks a rule: .*{message}"):
        list(state.trace.batches())


def damaged(change: Callable[[state_pb2.Trace], None], data: bytes = DATA) -> bytes:
    message = state_pb2.Rollup()
    message.ParseFromString(data[10:])
    change(message.state.trace)
    return sealed(Kind.ROLLUP, message)


def _other_batches(trace: state_pb2.Trace) -> None:
    trace.stored[0].batches = trace.stored[1].batches


def _fewer(trace: state_pb2.Trace) -> None:
    held = state_pb2.StoredBatches()
    held.ParseFromString(trace.stored[0].batches)
    del held.batches[0]
    trace.stored[0].batches = held.SerializeToString()


def _a_merge_twice(trace: state_pb2.Trace) -> None:
    for _ in range(2):
        entry = trace.merges.add(id=trace.stored[0].id)
        entry.merge.since.elements.append(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trace: trace.stored[0].ClearField("id"), "without id"),
        (lambda trace: trace.stored[0].ClearField("desc"), "without desc"),
        (lambda trace: trace.stored.pop(0), "does not follow|above the oldest|merges? of no"),
        (lambda trace: setattr(trace.stored[0], "count", 0), "holds nothing"),
        (lambda trace: trace.legacy_batches.add(), "stored in two ways"),
        (_a_merge_twice, "comes twice"),
    ],
)
def test_heads_that_break_a_rule_are_refused_on_opening(
    change: Callable[[state_pb2.Trace], None], message: str
) -> None:
    data = damaged(change)
    with pytest.raises(CorruptData, match=f"the-key.*({message})"):
        decode_rollup(data, key="the-key", lazily=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trace: setattr(trace.stored[0], "batches", b"\xff"), "does not decode|rule"),
        (lambda trace: setattr(trace.stored[0], "rows", 1), "sums of spine batch"),
        (lambda trace: setattr(trace.stored[0], "count", 5), "where 5 belong"),
        (_other_batches, "where|follow"),
        (_fewer, "batches with"),
    ],
)
def test_hollow_batches_that_break_a_rule_are_refused_when_they_are_looked_at(
    change: Callable[[state_pb2.Trace], None], message: str
) -> None:
    data = damaged(change)
    with pytest.raises(CorruptData, match=f"the-key.*({message})"):
        decode_rollup(data, key="the-key")
    state = decode_rollup(data, key="the-key", lazily=True).state
    for _ in range(2):
        with pytest.raises(CorruptData, match=f"the-key.*({message})"):
            list(state.trace.batches())
