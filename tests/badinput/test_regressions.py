"""Bugs that a system of this kind has had in production, replayed through the public surface. The numbers are those of the
specification's list; bugs 1, 2, 3 and 34 have theirs in tests/fault and tests/engine/shard.
"""

import io

import pyarrow.parquet as pq
import pytest
from persist_engine import Antichain, Appended, Settings
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings
from persist_engine.client.client import PersistClient
from persist_engine.client.read.listen import Progress, Updates
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.perform import perform_due
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of


def world(**batch) -> World:
    """Parts are blobs, maintenance falls due soon."""
    settings = Settings(
        batch=BatchSettings(**{"inline_part_bytes_max": 0, **batch}),
        maintenance=MaintenanceSettings(rollup_threshold=4, gc_versions_min=1),
        compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1, claim_ms=1),
    )
    return World(settings=settings)


@pytest.fixture
def shop() -> World:
    return world()


def write(client, shard_id, times, *, rows=lambda time: [row(time, f"n{time}", time)]):
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in times:
            answer = writer.compare_and_append(rows(time), expected_upper=A(time), new_upper=A(time + 1))
            assert isinstance(answer, Appended)


def compacted(shop, shard_id) -> int:
    """Do every compaction there is, those claimed by writers that never did them included; return how many were applied."""
    applied = 0
    while True:
        shop.env.sleep(0.01)
        done = compact_due(shop.process().machine(shard_id))
        if not done:
            return applied
        applied += sum(outcome.applied for outcome in done)


def collected(shop, shard_id):
    write_rollup(shop.process().machine(shard_id))
    return gc_and_truncate(shop.process().machine(shard_id))


def live(shop, shard_id) -> set[str]:
    state = shop.process().machine(shard_id).refresh()
    return {f"{shard_id}/{key}" for batch in state.trace.batches() for key in batch.blob_keys()}


def test_regression_6_a_part_that_is_deleted_and_put_back_is_not_collected(shop):
    """A stale merge result re-inserted what another had replaced; garbage must not hold what is live at the end."""
    shard_id = shop.shard_id()
    write(shop.process(), shard_id, range(8))
    compacted(shop, shard_id)
    outcome = collected(shop, shard_id)
    assert outcome.blobs_deleted > 0
    assert shop.blob_keys(shard_id, kind="part") == live(shop, shard_id)
    again = collected(shop, shard_id)
    assert again.blobs_deleted <= 1, "a second collection finds nothing but the rollup before"
    assert contents(shop.process(), shard_id, 7) == [(time, f"n{time}", 1) for time in range(8)]


def test_regression_9_a_reader_that_is_only_kept_does_not_hold_back_collection():
    """Its hold on versions stayed where it was opened, however long it beat."""
    blob, consensus = MemBlob(), MemConsensus()
    client, other = (
        PersistClient(blob, consensus, settings=Settings(), env=SystemEnv(), metrics=NoMetrics()) for _ in range(2)
    )
    shard_id = World(7).shard_id()
    write(client, shard_id, range(1))
    with client.open_leased_reader(shard_id, SCHEMA, purpose="kept") as reader:
        snapshot = reader.snapshot(0)
        pinned = client.inspect(shard_id).seqno
        write(client, shard_id, range(1, 30))
        assert all(reader._beat() for _ in range(3))  # what its thread does every half lease
        assert other.inspect(shard_id).seqno_since <= pinned, "an open snapshot is held"
        assert snapshot.to_table().num_rows == 1
        snapshot.close()
        assert reader._beat()
        assert other.inspect(shard_id).seqno_since > pinned + 29
        assert reader.since == A(0), "times stay until they are given up"
        assert reader.snapshot(0).to_table().num_rows == 1


@pytest.mark.slow
def test_regression_11_empty_appends_do_not_pile_up(shop):
    """An idle sink that only says that time passes left a batch for each."""
    shard_id = shop.shard_id()
    write(shop.process(), shard_id, range(200), rows=lambda _: [])
    assert shop.process().inspect(shard_id).batches == 1, "empty after empty costs nothing"
    write(shop.process(), shard_id, range(200, 201))
    write(shop.process(), shard_id, range(201, 400), rows=lambda _: [])
    compacted(shop, shard_id)
    assert shop.process().inspect(shard_id).batches <= 4
    assert contents(shop.process(), shard_id, 399) == [(200, "n200", 1)]


@pytest.mark.slow
def test_regression_12_merges_go_on_after_a_compaction_shrank_their_inputs(shop):
    """Progress was taken from current sizes, which compaction makes smaller: it went below zero (spec 12.6)."""
    shard_id = shop.shard_id()
    for round_ in range(12):
        times = range(round_ * 4, round_ * 4 + 4)
        # Every second append takes back what the one before gave: compaction leaves nothing of both.
        write(
            shop.process(),
            shard_id,
            times,
            rows=lambda time: [row(k, "x", time, 1 - 2 * (time % 2)) for k in range(50)],
        )
        compacted(shop, shard_id)
    assert contents(shop.process(), shard_id, 47) == []
    assert len(contents(shop.process(), shard_id, 46)) == 50


def test_regression_16_compaction_writes_the_since_it_was_asked_for(shop):
    """Outputs said that they were not advanced, so that later merges and readers took their times for the true ones."""
    shard_id = shop.shard_id()
    write(shop.process(), shard_id, range(4))
    with shop.process().open_leased_reader(shard_id, SCHEMA, purpose="since") as reader:
        reader.downgrade_since(A(3))
        write(shop.process(), shard_id, range(4, 16))  # the merges that these bring about are asked for since 3
        assert compacted(shop, shard_id) > 0
        advanced = [
            batch for batch in shop.process().machine(shard_id).refresh().trace.batches() if batch.desc.since == A(3)
        ]
        assert any(batch.desc.lower < A(3) for batch in advanced)
        for batch in advanced:
            for key in batch.blob_keys():
                table = pq.read_table(io.BytesIO(shop.blob.get(f"{shard_id}/{key}")))
                assert min(table["time"].to_pylist()) >= 3
        assert contents(shop.process(), shard_id, 15) == [(time, f"n{time}", 1) for time in range(16)]


def test_regression_17_times_are_ordered_as_numbers(shop):
    """Little-endian bytes put 257 before 2: compacted rows lay out of order, and readers stopped too early."""
    shard_id = shop.shard_id()
    times = [2, 255, 256, 257, 65_536, 2**40]
    with shop.process().open_writer(shard_id, SCHEMA, purpose="test") as writer:
        lower = 0
        for time in times:
            writer.compare_and_append([row(1, "same", time)], expected_upper=A(lower), new_upper=A(time + 1))
            lower = time + 1
    assert compacted(shop, shard_id) > 0
    for time in times:
        assert contents(shop.process(), shard_id, time) == [(1, "same", times.index(time) + 1)]
    assert contents(shop.process(), shard_id, 1) == []
    state = shop.process().machine(shard_id).state
    parts = [shop.blob.get(f"{shard_id}/{key}") for batch in state.trace.batches() for key in batch.blob_keys()]
    stored = [pq.read_table(io.BytesIO(data)).column("time").to_pylist() for data in parts if data is not None]
    assert [time for part in stored for time in part] == times
    assert len(stored[0]) > 2, "nothing was compacted"


@pytest.mark.slow
def test_regression_18_parts_that_do_not_follow_one_another_are_runs_of_their_own():
    """Parts of one batch were taken for one sorted run: rows of the same key were not brought together."""
    small = world(target_part_bytes=1024)
    shard_id, n = small.shard_id(), 2_000
    with small.process().open_writer(shard_id, SCHEMA, purpose="test") as writer:
        builder = writer.builder(A(0))
        for start in range(n, 0, -100):  # keys go down from part to part
            builder.add([row(key, "x", 1) for key in range(start - 100, start)])
        for start in range(0, n, 100):  # and up again, at another time, taking every second one back
            builder.add([row(key, "x", 2, -1) for key in range(start, start + 100) if key % 2])
        batch = builder.finish(A(5))
        assert len(batch.hollow.parts) > 10
        assert len(list(batch.hollow.runs())) == len(batch.hollow.parts)
        writer.append_batch(batch, A(0), A(5))
        write(small.process(), shard_id, range(5, 9), rows=lambda time: [row(0, "x", time)])
    expected = [(key, "x", 1) for key in range(0, n, 2)]
    assert contents(small.process(), shard_id, 4) == expected
    compacted(small, shard_id)
    assert contents(small.process(), shard_id, 4) == expected
    assert contents(small.process(), shard_id, 1) == [(key, "x", 1) for key in range(n)]


def test_regression_19_a_listener_gets_no_row_twice_when_batches_merge_behind_it(shop):
    """Compaction put rows it had given out into the batch it asked for next."""
    shard_id = shop.shard_id()
    write(shop.process(), shard_id, range(8))
    client = shop.process()
    with client.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:
        listener = reader.listen(0)
        got = []
        for stop in (3, 8):
            while listener.frontier < A(stop):
                event = next(listener)
                assert isinstance(event, (Updates, Progress))
                got += [each["key"]["id"] for each in event.table.to_pylist()] if isinstance(event, Updates) else []
            if stop == 3:
                assert compacted(shop, shard_id) > 0
                client.recent_upper(shard_id)  # the listener's process learns of the merge
        merged = [batch.desc for batch in shop.process().machine(shard_id).refresh().trace.batches()]
    assert any(desc.lower < A(3) < desc.upper for desc in merged)
    assert sorted(got) == list(range(1, 8))


def test_regression_20_rows_cut_off_by_truncation_are_neither_read_nor_counted_against_a_compaction(shop):
    """The sums of truncated parts count rows outside the bounds: a correct compaction was refused (spec 10.9)."""
    shard_id = shop.shard_id()
    everything = [row(key, "x", key) for key in range(10)]
    with shop.process().open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for upper in range(1, 11):  # ten batches, each holding all ten rows, registered for one of them
            batch = writer.batch(everything, lower=A(0), upper=A(10))
            writer.compare_and_append_batch([batch], expected_upper=A(upper - 1), new_upper=A(upper))
    assert compacted(shop, shard_id) > 0
    assert contents(shop.process(), shard_id, 9) == [(key, "x", 1) for key in range(10)]


def test_regression_26_blobs_of_a_shard_unknown_to_consensus_disturb_no_other_shard(shop):
    """An interrupted reset left them; looking at what is there crashed."""
    shard_id, ghost = shop.shard_id(), shop.shard_id()
    write(shop.process(), shard_id, range(2))
    shop.blob.set(f"{ghost}/v1/r{'0' * 8}-0000-0000-0000-{'0' * 12}", b"left behind")
    shop.blob.set("not/of/ours", b"?")
    client = shop.process()
    assert list(client.shards()) == [shard_id]
    with pytest.raises(InvalidUsage, match=f"{ghost} does not exist"):
        client.inspect(ghost)
    perform_due(client.machine(shard_id))
    write(shop.process(), ghost, range(2))  # and the id may be used
    assert contents(shop.process(), ghost, 1) == [(0, "n0", 1), (1, "n1", 1)]
    assert shop.blob.get("not/of/ours") == b"?"


#: Several parts of 1 KB.
ROWS = 700


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [1, 1 << 12, 1 << 30])
def test_regression_33_reading_in_little_memory_still_consolidates_everything(memory_bytes):
    """Under small bounds rows came out of chunks that had not met, and readers took them for a set."""
    small = world(target_part_bytes=1024)
    shard_id = small.shard_id()

    def rows(time: int) -> list:
        return [row(key, "x", time, 1 - 2 * (time % 2)) for key in range(ROWS)]

    writing = small.process(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
    write(writing, shard_id, range(9), rows=rows)
    assert compacted(small, shard_id) > 0
    write(writing, shard_id, range(9, 12), rows=rows)
    runs = [run for batch in small.process().machine(shard_id).state.trace.batches() for _, run in batch.runs()]
    assert max(map(len, runs)) > 1, "a run of which little memory holds but the beginning, beside others"
    with small.process().open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:
        batches = list(reader.snapshot(11).to_batches(memory_bytes=memory_bytes))
        assert sum(batch.num_rows for batch in batches) == 0
        odd = list(reader.snapshot(10).to_batches(memory_bytes=memory_bytes))
    keys = [key["id"] for batch in odd for key in batch.column("key").to_pylist()]
    assert keys == list(range(ROWS))


def test_a_blob_that_a_lease_should_keep_is_named_when_it_is_gone(shop):
    shard_id = shop.shard_id()
    write(shop.process(), shard_id, range(2))
    with shop.process().open_leased_reader(shard_id, SCHEMA, purpose="test") as reader, reader.snapshot(1) as snapshot:
        for key in shop.blob_keys(shard_id, kind="part"):
            shop.blob.delete(key)
        with pytest.raises(CorruptData, match=f"blob {shard_id}/n.* is missing"):
            snapshot.to_table()
