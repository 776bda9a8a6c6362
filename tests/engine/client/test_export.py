"""An export is complete and durable: it reads one version from beginning to end, whatever happens to the shard meanwhile.
It never touches files that it did not write.
"""

from __future__ import annotations

import os

import pyarrow.parquet as pq
import pytest
from persist_engine import Antichain, PersistClient, Schema
from persist_engine.base.errors import Fenced, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, Settings
from persist_engine.client import export
from persist_engine.work.repair.force import force_compaction, force_gc
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, AheadEnv, World, row

A = Antichain.of
APPENDS = 20


class Watched(PersistClient):
    """A client that keeps the readers it opened."""

    def open_leased_reader(self, *args, **kwargs):
        self.readers = [*getattr(self, "readers", ()), super().open_leased_reader(*args, **kwargs)]
        return self.readers[-1]


@pytest.mark.slow
@pytest.mark.parametrize("run_parts_max", [None, 2])
def test_an_export_is_complete_while_other_processes_compact_and_collect(tmp_path, run_parts_max):
    """The reader's heartbeats release what it has not pinned: the first of them cost a long export its blobs."""
    settings = Settings(
        batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=1024, run_parts_max=run_parts_max),
        maintenance=MaintenanceSettings(gc_versions_min=1),
    )
    world = World(settings=settings, env=AheadEnv())
    client, other, shard_id = world.process(), world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(APPENDS):
            rows = [row(100 * time + key, "x" * 40, time) for key in range(30)]
            writer.compare_and_append(rows, expected_upper=A(time), new_upper=A(time + 1))
    if run_parts_max is not None:
        force_compaction(other.machine(shard_id), full=True)
        batches = other.machine(shard_id).refresh().trace.batches()
        assert any(batch.has_hollow_runs for batch in batches)
    exporting = Watched(world.blob, world.consensus, settings=world.settings, env=world.env, metrics=NoMetrics())
    reads = 0

    def on_read(_read: int, _total: int) -> None:
        nonlocal reads
        reads += 1
        if reads == 1:
            with other.open_writer(shard_id, SCHEMA, purpose="late") as late:
                late.compare_and_append([row(7, "late", APPENDS)], expected_upper=A(APPENDS), new_upper=A(APPENDS + 1))
            force_compaction(other.machine(shard_id), full=True)
            write_rollup(other.machine(shard_id))
            exporting.machine(shard_id).refresh()
            assert exporting.readers[0]._beat()
            force_gc(other.machine(shard_id))

    # With so little memory nothing is fetched before it is needed.
    manifest = export.export_shard(exporting, shard_id, tmp_path / "out", as_of=None, on_read=on_read, memory_bytes=1)
    assert (reads > 10, manifest.rows) == (True, 30 * APPENDS)
    table = pq.read_table(tmp_path / "out")
    assert [key["id"] for key in table["key"].to_pylist()] == [
        100 * time + key for time in range(APPENDS) for key in range(30)
    ]
    assert table["time"].to_pylist() == [time for time in range(APPENDS) for _ in range(30)]


@pytest.mark.parametrize("as_of", [None, 0])
def test_an_export_whose_lease_ended_says_so_and_not_that_data_is_missing(tmp_path, as_of):
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)), env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    real = client.versions.blob.get

    def collected(key: str) -> bytes | None:
        if "/n" in key:
            machine = world.process().machine(shard_id)
            for reader_id in machine.state.leased_readers:
                machine.expire_leased_reader(reader_id)
            world.blob.delete(key)
        return real(key)

    client.versions.blob.get = collected
    with pytest.raises(Fenced, match="ran out"):
        export.export_shard(client, shard_id, tmp_path / "out", as_of=as_of)
    assert not (tmp_path / "out").exists()


def test_a_time_that_is_not_complete_is_not_exported(tmp_path):
    world = World()
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    with pytest.raises(Unavailable, match="is not written at 1"):
        export.export_shard(client, shard_id, tmp_path / "out", as_of=1)


@pytest.fixture
def small():
    """A client and a shard of one row at time 0."""
    world = World()
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(1))
    return client, shard_id


def test_regression_an_export_leaves_the_files_of_another_process_with_the_same_pid(small, tmp_path):
    """Containers have equal process ids. The export failed and deleted the files of the other process."""
    client, shard_id = small
    theirs = tmp_path / f".out.{os.getpid()}.partial"
    theirs.mkdir()
    (theirs / "part-00000.parquet").write_bytes(b"theirs")
    manifest = export.export_shard(client, shard_id, tmp_path / "out", as_of=0)
    assert (manifest.rows, pq.read_table(tmp_path / "out").num_rows) == (1, 1)
    assert (theirs / "part-00000.parquet").read_bytes() == b"theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"out", theirs.name}


def test_regression_a_finished_export_outlives_a_power_loss(small, tmp_path, monkeypatch):
    """The files were on disk, but not the directory entries that lead to them. The shard may be deleted by then."""
    client, shard_id = small
    out = tmp_path / "new" / "out"
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append((os.fstat(handle).st_ino, out.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    export.export_shard(client, shard_id, out, as_of=0)
    inodes = [path.stat().st_ino for path in (tmp_path, out / "part-00000.parquet", out / "_manifest.json", out)]
    assert {(inode, False) for inode in inodes} <= set(synced)
    assert synced.index((inodes[3], False)) > synced.index((inodes[2], False))
    assert synced[-1] == (out.parent.stat().st_ino, True)


@pytest.mark.parametrize("as_of", [None, 0])
def test_regression_a_null_struct_with_non_null_fields_is_exported(tmp_path, as_of):
    """Arrow and Parquet take the null struct for a null in each of its fields. Such a shard could not be exported."""
    world = World()
    client, shard_id = world.process(), world.shard_id()
    schema = Schema.from_ddl(
        "id BIGINT, at STRUCT<x: INT NOT NULL>", "place STRUCT<in: STRUCT<y: STRING NOT NULL> NOT NULL>"
    )
    rows = [(((1, None), (None,)), 0, 1), (((1, (5,)), ((("a",),),)), 0, 1)]
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        writer.compare_and_append(rows, expected_upper=A(0), new_upper=A(1))
    export.export_shard(client, shard_id, tmp_path / "out", as_of=as_of)
    table = pq.read_table(tmp_path / "out")
    assert table["key"].to_pylist() == [{"id": 1, "at": {"x": 5}}, {"id": 1, "at": None}]
    assert table["val"].to_pylist() == [{"place": {"in": {"y": "a"}}}, {"place": None}]
