"""A shard at its limits: 100,000 readers, leases of zero, clocks that jump, the last uppers there are."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, ShardId
from persist_engine.base.errors import Fenced
from persist_engine.base.settings import LeaseSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import CasResult, VersionedData
from persist_engine.client.export import export_shard
from persist_engine.client.read.listen import Progress
from persist_engine.client.read.snapshot import Snapshot
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.dataflow.open import open_sink, open_upsert
from persist_engine.model.diff.state_diff import between
from persist_engine.model.frontier import DATA_TIME_MAX, EMPTY, TIME_MAX
from persist_engine.model.ids import LeasedReaderId
from persist_engine.model.queries import seqno_since
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import LeasedReader
from persist_engine.work.perform import perform, perform_due
from persist_kit.states import DEBUG
from persist_kit.upserts import commands
from persist_kit.world import SCHEMA, AheadEnv, World, contents, row

A = Antichain.of
READERS = 10_000
YEARS_MS = 10 * 365 * 24 * 3_600_000


def ids(client: PersistClient, shard_id: ShardId, as_of: int) -> list[int]:
    """The keys at `as_of`, by a reader of its own."""
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        snapshot = reader.snapshot(as_of, timeout_s=0)
        assert isinstance(snapshot, Snapshot)
        with snapshot:
            return sorted(each["key"]["id"] for each in snapshot.to_table().to_pylist())


@pytest.mark.slow
def test_ten_thousand_readers_are_waited_for_and_expire_together():
    """In one version each: registering them by a commit each would take minutes, and take the same way from there."""
    world = World()
    shard_id, client, other = world.shard_id(), world.process(), world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    state = client.machine(shard_id).refresh()
    rng = random.Random("crowd")
    lease_ms = 900_000
    crowd = {
        LeasedReaderId.from_bytes(rng.randbytes(16)): LeasedReader(
            state.seqno, A(0), world.env.now_ms(), lease_ms, DEBUG
        )
        for _ in range(READERS)
    }
    crowded = replace(state, seqno=state.seqno.next(), leased_readers=SharedMap(crowd))
    entry = VersionedData(crowded.seqno, encode_state_diff(between(state, crowded)))
    assert world.consensus.compare_and_set(shard_id, state.tip, entry) is CasResult.COMMITTED

    assert isinstance(writer.append([row(2, "b", 1)], lower=A(1), upper=A(2)), Appended)
    with client.open_leased_reader(shard_id, purpose="one more") as reader:
        reader.downgrade_since(A(1))
        perform_due(client.machine(shard_id))
        held = other.machine(shard_id).refresh()
        assert len(held.leased_readers) == READERS + 1
        assert (held.trace.since, seqno_since(held)) == (A(0), state.seqno)

    world.env.advance_ms(lease_ms + 1)
    assert isinstance(writer.append([row(3, "c", 2)], lower=A(2), upper=A(3)), Appended)
    assert len(other.machine(shard_id).refresh().leased_readers) == 0
    assert ids(other, shard_id, 2) == [1, 2, 3]


def test_leases_of_zero_lapse_at_once_and_lose_nothing():
    settings = Settings(lease=LeaseSettings(reader_lease_ms=0, writer_lease_ms=0))
    world = World(settings=settings, env=AheadEnv())
    shard_id, client = world.shard_id(), world.process()
    writer, rival = (client.open_writer(shard_id, SCHEMA, purpose="test") for _ in range(2))
    reader = client.open_leased_reader(shard_id, purpose="test")
    for time in range(6):
        world.env.advance_ms(1)
        each = rival if time % 2 else writer
        assert isinstance(each.append([row(time, "x", time)], lower=A(time), upper=A(time + 1)), Appended)
        perform_due(client.machine(shard_id))
    assert reader.reader_id not in client.machine(shard_id).refresh().leased_readers
    with suppress(Fenced), reader.snapshot(3, timeout_s=0) as snapshot:
        assert snapshot.to_table().num_rows == 4
    reader.expire()
    assert ids(world.process(), shard_id, 5) == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("jumps_ms", [(YEARS_MS,), (-YEARS_MS,), (YEARS_MS, -2 * YEARS_MS, YEARS_MS), (1, -1)])
def test_clocks_that_jump_lose_nothing_and_stop_nothing(jumps_ms: tuple[int, ...]):
    """The whole life of a shard, with the clock of every process jumping between any two steps."""
    settings = Settings(maintenance=MaintenanceSettings(rollup_threshold=4, gc_versions_min=4))
    world = World(settings=settings)
    shard_id, client, other = world.shard_id(), world.process(), world.process()
    for at in range(24):
        world.env.advance_ms(jumps_ms[at % len(jumps_ms)])
        writer = (client, other)[at % 2].open_writer(shard_id, SCHEMA, purpose="test")
        outcome = writer.append([row(at, "x", at)], lower=A(at), upper=A(at + 1))
        assert isinstance(outcome, Appended)
        world.env.advance_ms(jumps_ms[(at + 1) % len(jumps_ms)])
        perform(writer.machine, outcome.maintenance)
        perform_due(other.machine(shard_id))
        assert ids(client, shard_id, at) == list(range(at + 1))
    state = world.process().machine(shard_id).refresh()
    assert len(list(state.trace.batches())) < 24, "nothing was compacted"
    assert len(world.consensus.scan(shard_id, state.seqno.__class__(0), 10_000)) < 60, "nothing was collected"


@pytest.mark.parametrize("upper", [DATA_TIME_MAX, DATA_TIME_MAX + 1, TIME_MAX])
def test_a_shard_written_past_all_data_still_yields_its_contents(tmp_path, upper):
    """Uppers are u64, times of data and as_of int64: the time before the upper is none that can be asked for."""
    shard_id = ShardId.new()
    with PersistClient.open(Location(blob="mem:", consensus=f"sqlite://{tmp_path}/consensus.db")) as client:
        with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
            writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(upper))
        assert export_shard(client, shard_id, tmp_path / "export", as_of="latest").rows == 1
        for _ in range(2):  # one that hydrates, and one that finds what the other wrote
            with open_upsert(client, shard_id, SCHEMA, purpose="test") as upserts:
                assert upserts.hydrate() >= A(upper)
                done = upserts.upsert_at(commands((2, "late"), time=[0]), upper=A(TIME_MAX))
                assert (done.late, done.inserted, done.upper) == (1, 0, A(TIME_MAX))
        with open_sink(client, shard_id, SCHEMA) as sink:
            sink.inputs[0].insert([row(1, "a", 0)])
            sink.inputs[0].advance(EMPTY)
            assert sink.wait_for_upper(EMPTY, timeout_s=60)
        assert contents(client, shard_id, DATA_TIME_MAX) == [(1, "a", 1)]


@pytest.mark.parametrize("follower", ["listener", "upserts"])
def test_regression_following_a_shard_past_all_data_leaves_a_readable_time(follower: str):
    """Its since trailed the upper past the last time that can be asked for, and the shard could never be read again."""
    world = World()
    shard_id, client = world.shard_id(), world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    upserts, reader = (
        open_upsert(client, shard_id, SCHEMA, purpose="test"),
        client.open_leased_reader(shard_id, purpose="test"),
    )
    listen = reader.listen(4)
    assert next(listen) == Progress(A(5))
    for upper in (DATA_TIME_MAX, DATA_TIME_MAX + 10, DATA_TIME_MAX + 20, TIME_MAX):
        if follower == "listener":
            writer.compare_and_append([], expected_upper=writer.fetch_recent_upper(), new_upper=A(upper))
            assert next(listen) == Progress(A(upper))
            upserts.expire()
        else:
            upserts.upsert_at(commands(time=[]), upper=A(upper))
            reader.expire()
        world.env.advance_ms(Settings().lease.reader_lease_ms // 3)
    assert client.machine(shard_id).refresh().trace.since >= A(DATA_TIME_MAX - 1), "nothing was given up"
    assert contents(world.process(), shard_id, DATA_TIME_MAX) == [(1, "a", 1)]
