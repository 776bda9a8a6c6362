"""Since when released content waits: what an inspection says of rollups that no version needs any more."""

from __future__ import annotations

import pytest
from persist_engine import Antichain, PersistClient, ShardId
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.codec.keys import blob_key
from persist_engine.work.audit.proof import prove
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of
SETTINGS = Settings(maintenance=MaintenanceSettings(gc_versions_min=1))


def unlinked_rollups(client: PersistClient, world: World, shard_id: ShardId) -> set[str]:
    """Whole keys of rollups that are there and that the newest version does not name. The next collection deletes them."""
    named = {blob_key(shard_id, rollup.key) for rollup in client.machine(shard_id).refresh().rollups.values()}
    there = {info.key for info in world.blob.list_prefix(f"{shard_id}/v")}
    return there - named


@pytest.mark.parametrize("damage", [b"", b"PSTR\xff\xff", b"no rollup"])
def test_a_damaged_rollup_that_no_version_needs_hides_no_shard(damage: bytes) -> None:
    """Nothing reads it but this question, and the next collection deletes it. Until then nothing bounds what waits in it."""
    world = World(settings=SETTINGS)
    shard_id = world.shard_id()
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    machine = client.machine(shard_id)
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(3):
            writer.append([row(time, "a", time)], lower=A(time), upper=A(time + 1))
            write_rollup(machine)
    gc_and_truncate(machine)
    (*_, key) = sorted(unlinked_rollups(client, world, shard_id))
    world.blob.set(key, damage)

    fresh = world.process()
    assert fresh.inspect(shard_id).uncollected_from_ms == 0
    remains = prove(fresh.machine(shard_id), before_ms=world.env.now_ms()).remains
    assert key in {one.where for one in remains}
    assert f"log {shard_id}, v6 to v9" in {one.where for one in remains}
    assert contents(fresh, shard_id, 2) == [(0, "a", 1), (1, "a", 1), (2, "a", 1)]

    write_rollup(machine)
    gc_and_truncate(machine)
    assert world.blob.get(key) is None
    assert fresh.inspect(shard_id).uncollected_from_ms is None


@pytest.mark.parametrize("before_s", [1, 5])
def test_a_retraction_by_a_clock_that_is_ahead_is_not_proven_to_be_carried_out(before_s: int) -> None:
    """Regression: it counted as one that came after the time, so that for an hour all was proven to be gone that was still there."""
    world = World(settings=SETTINGS)
    shard_id = world.shard_id()
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
        world.env.advance_ms(3_600_000)
        writer.append([row(1, "a", 1, -1)], lower=A(1), upper=A(2))
    world.env.advance_ms(10_000 - 3_600_000)
    machine = world.process().machine(shard_id)
    proof = prove(machine, before_ms=world.env.now_ms() - 1000 * before_s)
    assert not proof.proven
    assert {one.kind for one in proof.remains} == {"inline"}
    world.env.advance_ms(7_200_000)
    assert prove(machine, before_ms=0).proven, "it was retracted after that"
