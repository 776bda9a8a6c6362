"""What is committed is looked at as others will see it, when that is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine import Antichain
from persist_engine.base.errors import InvariantViolated
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.keys import blob_key, rollup_key
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.batch import HollowRollup
from persist_engine.model.diff.state_diff import apply, between
from persist_engine.model.frontier import MINIMUM
from persist_engine.model.ids import RollupId
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.flatten import pushed
from persist_engine.model.spine.spine import MergeRes
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import CodecNames
from persist_engine.shard.roundtrip import validate_roundtrip
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.perform import perform_due
from persist_kit.states import Stepper, append, batch, first_state
from persist_kit.world import SCHEMA, World, row

A = Antichain.of


def test_a_sound_version_passes_the_round_trip_check() -> None:
    shard = Stepper()
    for index in range(5):
        before = shard.state
        shard.do(append(batch(index, index + 1, 3), token_number=index))
        validate_roundtrip(before, encode_state_diff(shard.diffs[-1]), shard.state)


def test_a_diff_that_forgets_a_field_is_named() -> None:
    shard = Stepper()
    before = shard.state
    shard.do(append(batch(0, 1, 3), token_number=1))
    for name, value in (("writers", ()), ("walltime_ms", 99)):
        broken = replace(shard.diffs[-1], **{name: value})
        with pytest.raises(InvariantViolated, match=f"leads to another state: {name}"):
            validate_roundtrip(before, encode_state_diff(broken), shard.state)


def test_a_trace_that_comes_out_otherwise_is_named() -> None:
    shard = Stepper()
    before = shard.state
    shard.do(append(batch(0, 1, 3), token_number=1))
    other = replace(shard.state, trace=before.trace.push_without_requests(batch(0, 1, 4)))
    with pytest.raises(InvariantViolated, match="leads to another state: trace"):
        validate_roundtrip(before, encode_state_diff(shard.diffs[-1]), other)


def test_regression_25_a_trace_rebuilt_into_other_levels_passes_when_it_was_flat() -> None:
    """The check was switched off for a while, since rebuilding changed levels where structure is not stored."""
    trace = Trace(pushed(MINIMUM, [batch(time, time + 1, 100) for time in range(4)]), structured=False)
    before = replace(first_state()[0], trace=trace)
    for time in (0, 1):  # two results in one diff: replicas rebuild by pushing, and small batches lie lower
        trace, outcome = trace.apply_merge_res(MergeRes(batch(time, time + 1, 1), None), checked=False)
        assert outcome.applied
    after = replace(before, seqno=SeqNo(2), walltime_ms=1, trace=trace)
    data = encode_state_diff(between(before, after))
    rebuilt = apply(before, decode_state_diff(data, key="k")).trace
    assert [each.level for each in rebuilt.spine_batches()] != [each.level for each in trace.spine_batches()]
    validate_roundtrip(before, data, after)
    lost = replace(after, trace=Trace(pushed(MINIMUM, [batch(0, 1, 1), batch(1, 4, 1)]), structured=False))
    with pytest.raises(InvariantViolated, match="trace"):
        validate_roundtrip(before, data, lost)


def test_the_round_trip_check_is_enabled_by_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(settings=Settings(maintenance=MaintenanceSettings(validate_roundtrip=True)))
    seen: list[SeqNo] = []
    monkeypatch.setattr(
        "persist_engine.shard.versions.validate_roundtrip", lambda before, data, after: seen.append(after.seqno)
    )
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    assert seen == [2]


@pytest.mark.parametrize("stays_flat", [True, False])
def test_a_shard_of_the_oldest_code_is_read_written_and_maintained(stays_flat: bool) -> None:
    """Its rollup and diffs know flat batches only; two processes share it."""
    settings = Settings(
        maintenance=MaintenanceSettings(
            structure_flat_traces=not stays_flat, validate_roundtrip=True, rollup_threshold=4
        )
    )
    world = World(settings=settings)
    shard_id = world.shard_id()
    first = world.process()
    with first.open_writer(shard_id, SCHEMA, purpose="seed") as writer:
        writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    # The same state, as flat code would have left it: one version, one rollup, no structure.
    state = first.machine(shard_id).refresh()
    key = rollup_key(SeqNo(1), RollupId.from_bytes(b"\x07" * 16))
    flat = replace(
        state,
        seqno=SeqNo(1),
        writers=SharedMap(),
        rollups=SharedMap({SeqNo(1): HollowRollup(key, None)}),
        trace=replace(state.trace, structured=False),
    )
    nothing = replace(
        first_state()[0],
        shard_id=shard_id,
        codecs=CodecNames("struct", "struct"),
        seqno=SeqNo(0),
        rollups=SharedMap(),
        schemas=SharedMap(),
        trace=Trace(structured=False),
    )
    entry = VersionedData(SeqNo(1), encode_state_diff(between(nothing, flat)))
    world.blob.set(blob_key(shard_id, key), encode_rollup(Rollup(replace(flat, tag=entry.tip.tag))))
    world.consensus._inner = MemConsensus()
    world.consensus.compare_and_set(shard_id, None, entry)
    clients = [world.process(), world.process()]
    writers = [client.open_writer(shard_id, SCHEMA, purpose="test") for client in clients]
    for time in range(1, 30):
        rows = [row(time, "b", time)] if time % 3 else []
        assert writers[time % 2].append(rows, lower=A(time), upper=A(time + 1)).upper == A(time + 1)
    perform_due(clients[0].machine(shard_id))
    structured = {client.machine(shard_id).refresh().trace.structured for client in [*clients, world.process()]}
    assert structured == {not stays_flat}
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        keys = [each["key"]["id"] for each in reader.snapshot(29).to_table().to_pylist()]
    assert keys == [1, *(time for time in range(1, 30) if time % 3)]
