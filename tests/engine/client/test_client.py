"""PersistClient: opening, sharing, inspecting, finalizing; and the embedded stores without any server."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.errors import FinalizationError, InvalidUsage, SchemaMismatch, ShardNotFound, Unavailable
from persist_engine.base.settings import MaintenanceSettings, RetrySettings
from persist_engine.client.closing import close_shard
from persist_engine.model.frontier import EMPTY
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
OTHER = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("title", pa.string())]))


def test_files_and_sqlite_keep_a_shard_between_processes(tmp_path: Path):
    """Spec 1.5."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard_id = ShardId.new()
    with PersistClient.open(location) as client:
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        assert isinstance(writer.append([row(1, "a", 0)], lower=A(0), upper=A(5)), Appended)
    with PersistClient.open(location) as client:
        assert client.schema(shard_id) == SCHEMA
        assert list(client.shards()) == [shard_id]
        with client.open_leased_reader(shard_id, purpose="check") as reader:
            rows = reader.snapshot(A(4)).to_table().to_pylist()
    assert rows == [{"key": {"id": 1}, "val": {"name": "a"}, "time": 4, "diff": 1}]


def test_initialise_is_idempotent_and_names_differing_columns():
    world = World()
    shard_id = world.shard_id()
    world.process().initialise(shard_id, SCHEMA)
    world.process().initialise(shard_id, SCHEMA)
    assert world.process().inspect(shard_id).seqno == 1
    for call in (
        lambda c: c.initialise(shard_id, OTHER),
        lambda c: c.open_writer(shard_id, OTHER, purpose="x"),
        lambda c: c.open_leased_reader(shard_id, OTHER, purpose="x"),
    ):
        with pytest.raises(SchemaMismatch, match="title"):
            call(world.process())
    assert world.process().inspect(shard_id).seqno == 1


def test_calls_that_need_an_existing_shard_refuse_a_missing_one():
    """Spec B.2."""
    world = World()
    client, shard_id = world.process(), world.shard_id()
    for call in (client.inspect, client.schema, client.recent_upper, client.finalize, client.machine):
        with pytest.raises(ShardNotFound, match=f"{shard_id} does not exist in mem:"):
            call(shard_id)
    with pytest.raises(ShardNotFound):
        client.open_leased_reader(shard_id, purpose="x")
    assert list(client.shards()) == []


def test_all_handles_of_a_process_share_one_state():
    world = World()
    client, shard_id = world.process(), world.shard_id()
    first, second = (client.open_writer(shard_id, SCHEMA, purpose="x") for _ in range(2))
    first.append([row(1, "a", 0)], lower=A(0), upper=A(5))
    assert second.shared_upper() == A(5)
    assert second.machine.state is first.machine.state


@pytest.mark.slow
def test_opening_more_handles_of_a_known_shard_costs_no_round_trip():
    world = World()
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    gc.collect()
    before = world.consensus.calls.copy()
    client.open_writer(shard_id, SCHEMA, purpose="x")
    client.initialise(shard_id, SCHEMA)
    assert world.consensus.calls == before


@pytest.mark.slow
def test_states_of_unused_shards_are_dropped():
    world = World()
    client = world.process()
    shards = [world.shard_id() for _ in range(80)]
    for shard_id in shards:
        client.initialise(shard_id, SCHEMA)
    gc.collect()
    assert 0 < len(client._appliers) < 80


def test_inspection_shows_what_state_holds():
    """Spec B.5."""
    world = World()
    client, shard_id = world.process(), world.shard_id()
    writer = client.open_writer(shard_id, SCHEMA, purpose="ingest")
    writer.append([row(1, "a", 0), row(2, "b", 1)], lower=A(0), upper=A(5))
    with client.open_leased_reader(shard_id, purpose="report"):
        seen = world.process().inspect(shard_id)
    assert (seen.shard_id, seen.seqno, seen.since, seen.upper) == (shard_id, 3, 0, 5)
    assert (seen.updates, seen.parts, seen.live_diffs, seen.earliest_seqno) == (2, 1, 3, 1)
    assert (seen.key_schema, seen.val_schema) == ("id BIGINT", "name STRING")
    assert [reader.purpose for reader in seen.readers] == ["report"]
    assert [writer.purpose for writer in seen.writers] == ["ingest"]
    assert seen.to_json()["seqno"] == 3


def test_an_inspection_of_a_known_shard_asks_the_log_twice():
    world = World()
    client, shard_id = world.process(), world.shard_id()
    writer = client.open_writer(shard_id, SCHEMA, purpose="ingest")
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(5))
    first = client.inspect(shard_id)
    before = world.consensus.calls.copy()
    again = client.inspect(shard_id, known_seqno=first.seqno)
    assert (again.known_tag, again.tag) == (first.tag, first.tag)
    assert world.consensus.calls - before == {"scan": 2}
    writer.append([row(2, "b", 5)], lower=A(5), upper=A(6))
    before = world.consensus.calls.copy()
    later = client.inspect(shard_id, known_seqno=first.seqno)
    assert (later.known_tag, later.live_diffs, later.earliest_seqno) == (first.tag, 3, 1)
    assert world.consensus.calls - before == {"scan": 4}, "the tag of an older version, and what was committed since"


@pytest.mark.parametrize("when", ["before_next", "after_next"])
def test_an_inspection_that_a_collection_overtakes_counts_no_version_twice(when: str):
    world = World(settings=Settings(maintenance=MaintenanceSettings(gc_versions_min=1)))
    client, other, shard_id = world.process(), world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    writer = other.open_writer(shard_id, SCHEMA, purpose="ingest")

    def moves_on() -> None:
        for time in range(3):
            writer.append([row(1, "a", time)], lower=A(time), upper=A(time + 1))
            write_rollup(other.machine(shard_id))
        gc_and_truncate(other.machine(shard_id))

    getattr(world.consensus, when)("scan", moves_on)
    seen = client.inspect(shard_id)
    assert seen.upper == 3
    assert seen.live_diffs == seen.seqno - seen.earliest_seqno + 1 > 0
    exact = client.inspect(shard_id)
    assert (exact.seqno, exact.earliest_seqno > 1) == (seen.seqno, True)


def test_a_snapshot_exports_arrow():
    world = World()
    client, shard_id = world.process(), world.shard_id()
    client.open_writer(shard_id, SCHEMA, purpose="x").append([row(1, "a", 0), row(2, "b", 1)], lower=A(0), upper=A(5))
    with client.open_leased_reader(shard_id, purpose="x") as reader, reader.snapshot(4) as snapshot:
        assert pa.table(snapshot) == snapshot.to_reader().read_all() == snapshot.to_table()
        assert pa.table(snapshot).num_rows == 2
        stream = pa.RecordBatchReader.from_stream(snapshot)
    with pytest.raises(pa.ArrowInvalid, match="was closed"):
        stream.read_all()


def test_a_closed_shard_is_finalized_and_an_open_one_refused():
    world = World()
    client, shard_id = world.process(), world.shard_id()
    writer = client.open_writer(shard_id, SCHEMA, purpose="x")
    for time in range(5):
        writer.append([row(1, "a", time)], lower=A(time), upper=A(time + 1))
    with pytest.raises(FinalizationError, match=r"\{5\}") as caught:
        client.finalize(shard_id)
    assert (caught.value.detail["since"], caught.value.detail["upper"]) == (A(0), A(5))
    with (
        client.open_leased_reader(shard_id, purpose="holds"),
        pytest.raises(FinalizationError, match=r"holds") as caught,
    ):
        close_shard(client, shard_id)
    assert (caught.value.detail["since"], caught.value.detail["upper"]) == (A(0), A(5))
    writer.append([], lower=A(5), upper=EMPTY)
    reader = client.open_leased_reader(shard_id, purpose="x")
    reader.downgrade_since(EMPTY)
    assert not client.is_finalized(shard_id)
    stale = world.process()
    stale.machine(shard_id)
    client.finalize(shard_id)
    client.finalize(shard_id)
    assert stale.is_finalized(shard_id)
    state = stale.machine(shard_id).state
    assert [batch.rows for batch in state.trace.batches()] == [0]


#: No server listens there.
UNREACHABLE = ["redis://:hush@127.0.0.1:1/0", "redis://:hush@127.0.0.1:1/0?unsafe=true"]


@pytest.mark.parametrize("url", UNREACHABLE)
def test_an_unreachable_store_gives_up_naming_its_address_and_no_credential(url: str):
    settings = Settings(retry=RetrySettings(give_up_ms=50))
    with pytest.raises(Unavailable, match="127.0.0.1:1") as raised:
        PersistClient.open(Location(blob="mem:", consensus=url), settings=settings).initialise(ShardId.new(), SCHEMA)
    error: BaseException | None = raised.value
    while error is not None:
        assert "hush" not in str(error)
        error = error.__cause__


def test_calls_on_a_broken_store_give_up_only_after_give_up_ms():
    world = World(settings=Settings(retry=RetrySettings(give_up_ms=200)))
    world.faults.break_down()
    with pytest.raises(Unavailable, match="mem:"):
        world.process().initialise(world.shard_id(), SCHEMA)
    patient = World()
    patient.faults.fail_next("scan", happened=False, times=100)
    patient.process().initialise(patient.shard_id(), SCHEMA)
    assert patient.faults.injected == 100


@pytest.mark.parametrize("url", ["", "ftp://x", "mem:?colour=red", "sqlite://relative.db"])
def test_invalid_urls_are_refused(url: str):
    with pytest.raises(InvalidUsage):
        PersistClient.open(Location(blob="mem:", consensus=url))


@pytest.mark.slow
def test_public_names_load_lazily_and_all_exist():
    """`persist --help` must not pay for Arrow."""
    probe = (
        "import sys, persist_engine\n"
        "assert 'pyarrow' not in sys.modules\n"
        "assert all(getattr(persist_engine, name) is not None for name in persist_engine.__all__)\n"
        "assert set(persist_engine.__all__) <= set(dir(persist_engine))\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    import persist_engine

    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        persist_engine.Nonsense  # noqa: B018
