"""Shards are created with a retention: a handle that releases times, such as an upsert handle, leaves those within the window readable."""

from __future__ import annotations

import pyarrow as pa
import pytest
from persist_engine import CriticalReaderId, Location, PersistClient, RetentionSet, Settings, ShardId, SinceAhead
from persist_engine.base.errors import FinalizationError, InvalidUsage
from persist_engine.base.settings import RETAIN_MS
from persist_engine.client.closing import close_shard, finalize_shard
from persist_engine.dataflow.open import open_sink, open_upsert
from persist_engine.model.frontier import EMPTY, Antichain
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.holds import holds_of
from persist_engine.work.repair.recover import recover_shard
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, AheadEnv, CountedConsensus, World, contents, row

DAY_MS = 24 * 3600 * 1000
A = Antichain.of


@pytest.fixture
def kept() -> World:
    """A world whose clients have the default retention."""
    return World(env=AheadEnv(), retain_ms=Settings().retain_ms)


def fields(table: pa.Table) -> list[tuple[int, str]]:
    return [(each["key"]["id"], each["val"]["name"]) for each in table.to_pylist()]


def commands(key: int, name: str) -> pa.Table:
    return pa.table(
        {"key": pa.array([{"id": key}], SCHEMA.key_type), "val": pa.array([{"name": name}], SCHEMA.val_type)}
    )


def test_the_default_is_seven_days_and_zero_is_none() -> None:
    assert Settings().retain_ms == RETAIN_MS == 7 * DAY_MS
    for off in (None, 0):
        with PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=Settings(retain_ms=off)) as client:
            shard_id = ShardId.new()
            client.initialise(shard_id, SCHEMA)
            assert client.inspect(shard_id).retain_ms is None
    for bad in (-1, 2**63):
        with pytest.raises(InvalidUsage, match="settings: retain_ms must be from 0"):
            Settings(retain_ms=bad)


@pytest.mark.parametrize("how", ["open_writer", "open_upsert", "open_sink"])
def test_a_shard_gets_its_retention_in_the_commit_that_creates_it(kept: World, how: str) -> None:
    client, shard_id = kept.process(), kept.shard_id()
    opened = {"open_upsert": open_upsert, "open_sink": open_sink}.get(how, getattr(PersistClient, how, None))
    assert opened is not None
    made = opened(client, shard_id, SCHEMA, purpose="test")
    assert client.inspect(shard_id).retain_ms == 7 * DAY_MS
    assert client.machine(shard_id).state.seqno == (1 if how in {"open_writer", "open_upsert"} else 2)
    made.__exit__(None, None, None)


def test_opening_a_shard_leaves_its_retention_as_it_is(world: World, kept: World) -> None:
    shard_id = world.shard_id()
    world.process().initialise(shard_id, SCHEMA)
    wanting = PersistClient(
        world.blob, world.consensus, settings=kept.settings, env=world.env, metrics=world.process().versions.metrics
    )
    with wanting.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=0, upper=1)
    assert wanting.inspect(shard_id).retain_ms is None


def test_a_time_that_an_upsert_handle_released_is_readable_until_since_passes_it(kept: World) -> None:
    """The promise of the README. A read of such a time returned SinceAhead as soon as an upsert handle had advanced."""
    env, client, shard_id = kept.env, kept.process(), kept.shard_id()
    assert isinstance(env, AheadEnv)
    with open_upsert(client, shard_id, SCHEMA, purpose="orders") as orders:
        first = orders.upsert(commands(1, "ada")).upper.time - 1
        for day in range(1, 7):
            env.advance_ms(DAY_MS)
            orders.upsert(commands(1, f"day {day}"))
            with client.open_leased_reader(shard_id, purpose="report") as reader:
                assert fields(reader.snapshot(first).to_table()) == [(1, "ada")]
        env.advance_ms(2 * DAY_MS)
        orders.upsert(commands(1, "day 8"))
        with client.open_leased_reader(shard_id, purpose="report") as reader:
            assert isinstance(reader.snapshot(first), SinceAhead)
            assert fields(reader.snapshot(orders.upper.time - 7 * DAY_MS).to_table()) == [(1, "day 1")]


def test_since_of_a_shard_without_readers_follows_its_upper(kept: World) -> None:
    """Then logical compaction also works on a shard without readers."""
    client, shard_id = kept.process(), kept.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        before = kept.consensus.calls["compare_and_set"]
        writer.append([row(1, "a", 0)], lower=0, upper=35 * DAY_MS)
        assert kept.consensus.calls["compare_and_set"] == before + 1, "in the diff of the append"
    assert client.inspect(shard_id).since == 28 * DAY_MS


def test_retention_is_set_for_all_processes_in_one_commit(kept: World) -> None:
    client, other, shard_id = kept.process(), kept.process(), kept.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=0, upper=35 * DAY_MS)
    seqno = client.machine(shard_id).state.seqno
    assert other.set_retention(shard_id, DAY_MS) == RetentionSet(DAY_MS, A(34 * DAY_MS))
    assert other.machine(shard_id).state.seqno == seqno + 1
    assert client.set_retention(shard_id, 9 * DAY_MS) == RetentionSet(9 * DAY_MS, A(34 * DAY_MS)), "nothing comes back"
    assert other.set_retention(shard_id, 0) == RetentionSet(None, A(34 * DAY_MS))
    assert client.inspect(shard_id).retain_ms is None
    for bad in (-1, 2**63, 1.5, True, "7d"):
        with pytest.raises(InvalidUsage, match="retain_ms"):
            client.set_retention(shard_id, bad)


def test_the_list_of_holds_shows_the_retention(kept: World) -> None:
    client, shard_id = kept.process(), kept.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=0, upper=35 * DAY_MS)
    found = holds_of(client.machine(shard_id))
    (hold,) = found.holds
    assert found.retain_ms == 7 * DAY_MS
    assert (hold.id, hold.kind, hold.since, hold.blocks_since) == ("retention", "retention", 28 * DAY_MS, True)
    client.set_retention(shard_id, None)
    assert holds_of(client.machine(shard_id)).holds == ()


def test_a_critical_hold_outlives_the_retention(kept: World) -> None:
    client, shard_id = kept.process(), kept.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 3)], lower=0, upper=10)
        client.open_critical_since(shard_id, CriticalReaderId.new(), opaque=b"me", purpose="history")
        writer.append([row(2, "b", 20 * DAY_MS)], lower=10, upper=35 * DAY_MS)
    assert contents(client, shard_id, 5) == [(1, "a", 1)]


def test_closing_a_shard_ends_its_retention_and_a_refused_finalization_names_the_holds(kept: World) -> None:
    client, shard_id = kept.process(), kept.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=0, upper=EMPTY)
    with pytest.raises(FinalizationError, match=r"held at \{0\} by the shard's retention of 604800000 ms"):
        finalize_shard(client, shard_id)
    close_shard(client, shard_id)
    finalize_shard(client, shard_id)
    assert client.is_finalized(shard_id)


def test_a_log_that_begins_anew_keeps_the_retention(kept: World) -> None:
    client, shard_id = kept.process(), kept.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=0, upper=35 * DAY_MS)
    client.set_retention(shard_id, DAY_MS)
    write_rollup(client.machine(shard_id))
    kept.consensus = CountedConsensus(MemConsensus())
    recover_shard(kept.process().versions, shard_id, commit=True)
    seen = kept.process().inspect(shard_id)
    assert (seen.retain_ms, seen.since) == (DAY_MS, 34 * DAY_MS)
