"""Code of 0.1.0 beside this one on one shard: it drops the fields it does not know, and neither is led astray."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.codec.envelope import Kind, opened, sealed
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model import commands as c
from persist_engine.model.state import ShardState
from persist_engine.model.state_diff import apply
from persist_engine.pb import diff_pb2, state_pb2
from persist_engine.testing.states import DEBUG, Stepper, append, batch, leased_id

BIRTH = b"\x0b" * 16
#: Numbers of the fields that 0.1.0 knew.
DIFF_FIELDS, STATE_FIELDS = range(1, 7), range(1, 17)


def without_unknown(message, known: range) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.number not in known:
            message.ClearField(field.name)


def diff_of_old_code(data: bytes) -> bytes:
    """As 0.1.0 would have written the same diff."""
    message = opened(Kind.STATE_DIFF, data, diff_pb2.StateDiff(), "k")
    without_unknown(message, DIFF_FIELDS)
    return sealed(Kind.STATE_DIFF, message)


def rollup_of_old_code(data: bytes) -> bytes:
    message = opened(Kind.ROLLUP, data, state_pb2.Rollup(), "k")
    without_unknown(message.state, STATE_FIELDS)
    return sealed(Kind.ROLLUP, message)


def without_birth(state: ShardState) -> ShardState:
    return replace(state, birth=b"")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["append", "reader", "exert", "rollup"])), max_size=20))
def test_old_and_new_code_take_turns_on_one_log(turns: list[tuple[bool, str]]) -> None:
    """Both replay everything the other wrote and come to the same state; new code never forgets what old code drops."""
    shard = Stepper()
    shard.state = replace(shard.state, birth=BIRTH)
    old, new = without_birth(shard.state), shard.state
    for number, (is_old, what) in enumerate(turns):
        shard.state = old if is_old else new
        if what == "append":
            upper = shard.state.trace.upper.time or 0
            shard.do(append(batch(upper, upper + 1, number), token_number=number))
        elif what == "reader":
            shard.do(c.RegisterLeasedReader(reader_id=leased_id(number), lease_ms=10_000, debug=DEBUG))
        elif what == "exert":
            shard.do(c.SpineExert(fuel=1 << number))
        else:
            data = encode_rollup(Rollup(new))
            assert decode_rollup(data, key="k").state == new
            assert decode_rollup(rollup_of_old_code(data), key="k").state == without_birth(new)
        for diff in shard.diffs:
            data = encode_state_diff(diff)
            if is_old:
                data = diff_of_old_code(data)
            old = without_birth(apply(old, decode_state_diff(diff_of_old_code(data), key="k")))
            new = apply(new, decode_state_diff(data, key="k"))
        shard.diffs.clear()
        assert new.birth == BIRTH
        assert without_birth(new) == old


def test_a_state_that_old_code_rolled_up_learns_its_birth_from_the_next_diff() -> None:
    shard = Stepper()
    shard.state = replace(shard.state, birth=BIRTH)
    forgotten = decode_rollup(rollup_of_old_code(encode_rollup(Rollup(shard.state))), key="k").state
    assert forgotten.birth == b""
    shard.do(append(batch(0, 1, 1), token_number=1))
    after = apply(forgotten, decode_state_diff(encode_state_diff(shard.diffs[0]), key="k"))
    assert after == shard.state
