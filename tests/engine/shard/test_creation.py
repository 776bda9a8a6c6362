"""A shard is created where there never was one, and nowhere else."""

from __future__ import annotations

import pytest
from persist_engine import Antichain, PersistClient, ShardId
from persist_engine.base.errors import ShardLost, ShardNotFound
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.codec.keys import created_key
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.rollup import write_rollup
from persist_kit.recorded import Killed
from persist_kit.world import SCHEMA, CountedConsensus, World, contents, row

A = Antichain.of
NO_INLINE = Settings(batch=BatchSettings(inline_part_bytes_max=0))


def appended(client: PersistClient, shard_id: ShardId, times: int) -> None:
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(times):
            writer.append([row(time, "a", time)], lower=A(time), upper=A(time + 1))


def flushed(world: World) -> None:
    """Consensus lost all it had."""
    world.consensus = CountedConsensus(MemConsensus())


def blobs(world: World) -> dict[str, bytes | None]:
    return {info.key: world.blob.get(info.key) for info in world.blob.list_prefix("")}


@pytest.mark.parametrize("kind", ["nothing but small appends", "parts", "a rollup"])
def test_nothing_is_created_over_a_shard_that_consensus_lost(kind: str) -> None:
    """Spec 7.1."""
    world = World(settings=NO_INLINE if kind == "parts" else None)
    shard_id = world.shard_id()
    client = world.process()
    appended(client, shard_id, 3)
    if kind == "a rollup":
        write_rollup(client.machine(shard_id))
    if kind == "parts":
        world.blob.delete(created_key(shard_id))  # any of them is proof enough
    before = blobs(world)
    flushed(world)
    fresh = world.process()
    for create in (
        lambda: fresh.open_writer(shard_id, SCHEMA, purpose="test"),
        lambda: fresh.initialise(shard_id, SCHEMA),
    ):
        with pytest.raises(ShardLost, match=f"persist admin recover {shard_id}") as raised:
            create()
        assert raised.value.detail["shard_id"] == shard_id
        assert raised.value.detail["key"] in before
    for look in (fresh.inspect, lambda shard_id: fresh.open_leased_reader(shard_id, SCHEMA, purpose="test")):
        with pytest.raises(ShardNotFound, match=f"persist admin recover {shard_id}"):
            look(shard_id)
    assert (blobs(world), list(world.consensus.list_keys())) == (before, [])


def test_no_reader_creates_a_shard() -> None:
    """Spec B.2. Also one that knows the schema: a shard that was ended for good, or an id with a slip, would begin anew."""
    world = World()
    shard_id = world.shard_id()
    for schema in (SCHEMA, None):
        with pytest.raises(ShardNotFound, match=shard_id):
            world.process().open_leased_reader(shard_id, schema, purpose="test")
    assert (blobs(world), list(world.consensus.list_keys())) == ({}, [])


@pytest.mark.parametrize("verb", ["before", "after"])
def test_a_creator_that_died_blocks_no_other_creator(verb: str) -> None:
    """Its rollup is there; its log is not (before), or is and has no mark yet (after)."""
    world = World()
    shard_id = world.shard_id()
    real = world.consensus.compare_and_set

    def dies(*args: object) -> object:
        if verb == "after":
            real(*args)
        raise Killed

    world.consensus.compare_and_set = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        world.process().initialise(shard_id, SCHEMA)
    world.consensus.compare_and_set = real  # type: ignore[method-assign]
    assert len(world.blob_keys(shard_id, kind="rollup")) == 1
    assert created_key(shard_id) not in blobs(world)
    appended(world.process(), shard_id, 2)
    assert contents(world.process(), shard_id, 1) == [(0, "a", 1), (1, "a", 1)]
    # What it appended is no blob: without the mark the loss of its log would go unseen.
    flushed(world)
    with pytest.raises(ShardLost):
        world.process().initialise(shard_id, SCHEMA)


def test_a_faster_rival_is_not_taken_for_a_loss() -> None:
    """The log and its mark appear between the look at consensus and the listing."""
    world = World()
    shard_id = world.shard_id()
    rival, client = world.process(), world.process()
    real = client.versions.blob.list_prefix

    def late(prefix: str) -> object:
        appended(rival, shard_id, 1)
        return real(prefix)

    client.versions.blob.list_prefix = late  # type: ignore[method-assign]
    client.initialise(shard_id, SCHEMA)
    assert client.inspect(shard_id).upper == 1


def test_the_mark_is_asked_for_while_the_first_rollup_is_the_only_one() -> None:
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    appended(client, shard_id, 1)
    world.blob.delete(created_key(shard_id))
    world.process().initialise(shard_id, SCHEMA)
    assert created_key(shard_id) in blobs(world)
    write_rollup(client.machine(shard_id))
    world.blob.delete(created_key(shard_id))
    world.process().initialise(shard_id, SCHEMA)
    assert created_key(shard_id) not in blobs(world)


@pytest.mark.parametrize("has_looked", [False, True])
def test_a_writer_leaves_the_mark_that_the_creator_left_out_before_it_appends(has_looked: bool) -> None:
    """Spec 7.1, also where the process knows the shard's state before it opens the writer. The appended row is no blob, so only the mark
    proves that the log was there.
    """
    world = World()
    shard_id = world.shard_id()
    world.process().initialise(shard_id, SCHEMA)
    world.blob.delete(created_key(shard_id))  # as if the creator had died before it wrote the mark
    client = world.process()
    if has_looked:
        assert client.schema(shard_id) == SCHEMA
    appended(client, shard_id, 1)
    assert created_key(shard_id) in blobs(world)
    flushed(world)
    with pytest.raises(ShardLost):
        world.process().initialise(shard_id, SCHEMA)


def test_a_process_asks_for_the_mark_of_a_shard_once() -> None:
    world = World()
    shard_id = world.shard_id()
    world.process().initialise(shard_id, SCHEMA)
    client = world.process()
    asked: list[str] = []
    real = client.versions.blob.get

    def get(key: str) -> bytes | None:
        asked.append(key)
        return real(key)

    client.versions.blob.get = get  # type: ignore[method-assign]
    assert client.schema(shard_id) == SCHEMA
    assert created_key(shard_id) not in asked, "a process that reads writes nothing, and asks for nothing"
    for _ in range(3):
        client.initialise(shard_id, SCHEMA)
    assert asked.count(created_key(shard_id)) == 1
