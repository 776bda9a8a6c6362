"""A log that was wiped and written anew is not taken for the one a process knows."""

from __future__ import annotations

import dataclasses

import pytest
from persist_engine import Antichain, PersistClient, ShardId
from persist_engine.base.errors import CorruptData, ForkedLog
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.diff.state_diff import between
from persist_engine.storage.consensus_mem import MemConsensus
from persist_kit.states import Stepper, append, batch
from persist_kit.world import SCHEMA, CountedConsensus, World, row

A = Antichain.of


def appended(client: PersistClient, shard_id: ShardId, upto: int) -> None:
    """Write one row at each time below `upto` that is not written yet."""
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(writer.fetch_recent_upper().time or 0, upto):
            writer.append([row(time, "a", time)], lower=A(time), upper=A(time + 1))


def regrown(versions: int) -> tuple[PersistClient, PersistClient, ShardId]:
    """A client that knows a log of 3 appends, and one on the log that stands in its place and is longer."""
    world = World()
    shard_id = world.shard_id()
    stale = world.process()
    appended(stale, shard_id, 3)
    world.consensus = CountedConsensus(MemConsensus())
    for info in list(world.blob.list_prefix("")):  # a shard is not made anew over its blobs
        world.blob.delete(info.key)
    fresh = world.process()
    appended(fresh, shard_id, versions)
    stale._consensus._inner = stale._versions.consensus._inner = world.consensus
    return stale, fresh, shard_id


@pytest.mark.parametrize("versions", [12, 5000], ids=["diff by diff", "from a rollup"])
def test_a_process_that_knows_the_wiped_log_is_stopped_with_both_births_named(versions: int) -> None:
    stale, fresh, shard_id = regrown(min(versions, 12))
    if versions > 12:
        stale._versions.settings = dataclasses.replace(
            stale._versions.settings,
            maintenance=dataclasses.replace(stale._versions.settings.maintenance, recent_diffs_max=4),
        )
    births = [client.machine(shard_id).state.birth.hex() for client in (stale, fresh)]
    with pytest.raises(ForkedLog, match="was wiped and written anew") as caught:
        stale.machine(shard_id).refresh()
    assert all(birth in str(caught.value) for birth in births)
    assert [caught.value.detail[name] for name in ("known_birth", "found_birth")] == births
    with pytest.raises(ForkedLog, match="was wiped and written anew"):
        appended(stale, shard_id, 20)
    appended(fresh, shard_id, 20)  # processes that know the new log go on


def test_a_diff_or_a_rollup_without_a_birth_is_damaged() -> None:
    shard = Stepper()
    shard.do(append(batch(0, 1, 1), token_number=1))
    (diff,) = shard.diffs
    assert diff.birth == shard.state.birth
    with pytest.raises(CorruptData, match="the-key: the state diff breaks a rule: a birth of 0 bytes"):
        decode_state_diff(encode_state_diff(dataclasses.replace(diff, birth=b"")), key="the-key")
    with pytest.raises(CorruptData, match="the-key: the rollup breaks a rule: a birth of 0 bytes"):
        decode_rollup(encode_rollup(Rollup(dataclasses.replace(shard.state, birth=b""))), key="the-key")


def test_the_birth_stands_in_every_diff() -> None:
    """Spec 24.2."""
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    appended(client, shard_id, 3)
    versions = client.machine(shard_id).versions
    states = versions.fetch_all_live_states(shard_id)
    assert states is not None
    births = {states.initial_diff.birth}
    while (diff := states.advance()) is not None:
        births.add(diff.birth)
    assert births == {client.machine(shard_id).state.birth}
    assert len(*births) == 16
    assert between(states.state, dataclasses.replace(states.state, seqno=states.seqno.next())).birth in births
