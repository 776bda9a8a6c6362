"""A running sink with threads, on stores in memory: outside edits, replicas, failures, its end."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import CorruptData, InvalidUsage, SchemaMismatch, SinkFailed, UpdateNotBeyondLower
from persist_engine.dataflow.open import open_sink
from persist_engine.flow.refresh import Refresh
from persist_engine.rows.errors_column import split_errors, with_errors
from persist_kit.world import SCHEMA, row

A = Antichain.of
PATIENCE_S = 60.0


def settle(sink, frontier: int) -> None:
    assert sink.wait_for_upper(A(frontier), timeout_s=PATIENCE_S)


def wait_until(condition) -> None:
    waited = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError("it never came to be")


def advance(sink, frontier: int | None) -> None:
    for an_input in sink.inputs:
        an_input.advance(Antichain(frontier))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_the_shard_holds_the_desired_contents_at_every_time(stores, workers):
    stores.hold()
    with open_sink(stores.client(), stores.shard_id, SCHEMA, workers=workers) as sink:
        for key in range(20):
            sink.inputs[key % workers].insert([row(key, "a", key), row(key, "a", key + 5, -1), row(key, "b", key + 5)])
        advance(sink, 30)
        settle(sink, 30)
    for time in range(30):
        wanted = {(key, "a" if time < key + 5 else "b"): 1 for key in range(20) if key <= time}
        assert stores.contents(time) == Counter(wanted)


def test_an_edit_from_outside_is_corrected_at_the_next_append(stores):
    """Spec 17.8."""
    stores.hold()
    client = stores.client()
    with open_sink(client, stores.shard_id, SCHEMA, workers=2) as sink:
        sink.inputs[0].insert([row(1, "a", 0), row(2, "b", 0)])
        advance(sink, 5)
        settle(sink, 5)
        with stores.client().open_writer(stores.shard_id, SCHEMA, purpose="vandal") as vandal:
            vandal.compare_and_append([row(1, "a", 5, -1), row(3, "x", 5, 7)], expected_upper=A(5), new_upper=A(6))
        assert stores.contents(5) == Counter({(2, "b"): 1, (3, "x"): 7})
        advance(sink, 9)
        settle(sink, 9)
    assert stores.contents(8) == Counter({(1, "a"): 1, (2, "b"): 1})


def test_a_restarted_sink_with_the_same_input_writes_nothing(stores):
    def run() -> None:
        with open_sink(stores.client(), stores.shard_id, SCHEMA, workers=2) as sink:
            sink.inputs[0].insert([row(key, "a", key) for key in range(50)])
            advance(sink, 60)
            settle(sink, 60)
            wait_until(lambda: sink.status().read_back == A(60) and sink.status().buffered_rows == 0)

    run()
    blobs = stores.blobs()
    run()
    assert stores.blobs() == blobs


@pytest.mark.slow
def test_replicas_converge_and_leave_no_blob_behind(stores):
    stores.hold()
    sinks = [open_sink(stores.client(), stores.shard_id, SCHEMA, workers=2) for _ in range(3)]
    rows = [row(key, "ab"[key % 2], key % 40) for key in range(200)]

    def feed(sink) -> None:
        for until in range(5, 45, 5):
            sink.inputs[0].insert([r for r in rows if until - 5 <= r[1] < until])
            advance(sink, until)

    threads = [threading.Thread(target=feed, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sink in sinks:
        settle(sink, 40)
        wait_until(lambda sink=sink: sink.status().read_back == A(40) and sink.status().buffered_rows == 0)
    for sink in sinks:
        sink.close()
    for time in (0, 17, 39):
        assert stores.contents(time) == Counter({(key, "ab"[key % 2]): 1 for key in range(200) if key % 40 <= time})
    with stores.client() as client:
        state = client.machine(stores.shard_id).refresh()
        linked = {key for batch in state.trace.batches() for key in batch.blob_keys()}
    assert stores.blobs() == len(linked)


def test_a_read_only_sink_follows_and_is_promoted_once(stores):
    with (
        open_sink(stores.client(), stores.shard_id, SCHEMA) as blue,
        open_sink(stores.client(), stores.shard_id, SCHEMA, read_only=True, workers=2) as green,
    ):
        for sink in (blue, green):
            sink.inputs[0].insert([row(key, "a", 0) for key in range(10)])
        advance(green, 10)
        advance(blue, 5)
        settle(green, 5)
        wait_until(lambda: green.status().buffered_rows == 0 and green.status().read_back == A(5))
        assert green.status().read_only
        assert stores.client().recent_upper(stores.shard_id) == A(5)
        green.allow_writes()
        settle(blue, 10)
        assert not green.status().read_only
    assert stores.contents(9) == Counter({(key, "a"): 1 for key in range(10)})


def test_closing_the_desired_collection_closes_the_shard(stores):
    with open_sink(stores.client(), stores.shard_id, SCHEMA, workers=2) as sink:
        sink.inputs[1].insert([row(1, "a", 3)])
        advance(sink, None)
        assert sink.wait_for_upper(Antichain.empty(), timeout_s=PATIENCE_S)
    assert stores.contents(3) == Counter({(1, "a"): 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("since", "upper", "as_of"), [(0, 0, 7), (7, 0, 0), (7, 0, 7), (9, 4, 6), (4, 9, 6), (9, 4, 20)]
)
def test_no_relation_of_since_upper_and_as_of_hangs(stores, since, upper, as_of):
    """Bug 30, spec 17.9: a fresh shard behind as_of; a since ahead of the upper, with and without data."""
    client = stores.client()
    with client.open_writer(stores.shard_id, SCHEMA, purpose="before") as writer:
        if upper:
            writer.compare_and_append([row(1, "old", 0), row(2, "gone", 1)], expected_upper=A(0), new_upper=A(upper))
    stores.hold(since)
    with open_sink(client, stores.shard_id, SCHEMA, as_of=as_of, workers=2) as sink:
        sink.inputs[0].insert([row(1, "old", 0), row(3, "new", 5)])
        advance(sink, 10)
        advance(sink, 30)
        settle(sink, 30)
        wait_until(lambda: sink.status().buffered_rows == 0 and sink.status().read_back == A(30))
    for time in range(max(since, as_of, upper), 30):
        wanted = {(1, "old"): 1} | ({(3, "new"): 1} if time >= 5 else {})
        assert stores.contents(time) == Counter(wanted)


def test_errors_and_rows_share_one_shard_and_one_frontier(stores):
    client = stores.client()
    client.initialise(stores.shard_id, with_errors(SCHEMA))
    stores.holders.append(client.open_leased_reader(stores.shard_id, with_errors(SCHEMA), purpose="hold"))
    with open_sink(stores.client(), stores.shard_id, SCHEMA, errors=True, workers=2) as sink:
        sink.inputs[0].insert([row(1, "a", 0)])
        sink.inputs[1].insert_errors([("division by zero", 2, 1), ("division by zero", 4, -1)])
        advance(sink, 10)
        for an_input in sink.inputs:
            an_input.advance_errors(A(3))
        settle(sink, 3)
        assert stores.client().recent_upper(stores.shard_id) == A(3)
        for an_input in sink.inputs:
            an_input.advance_errors(A(10))
        settle(sink, 10)
    with stores.client().open_leased_reader(stores.shard_id, purpose="check") as reader:
        rows, errors = split_errors(reader.snapshot(3).to_table(), SCHEMA)
        assert rows.select(["key", "val"]).to_pylist() == [{"key": {"id": 1}, "val": {"name": "a"}}]
        assert errors.to_pylist() == [{"err": "division by zero", "time": 3, "diff": 1}]
        rows, errors = split_errors(reader.snapshot(5).to_table(), SCHEMA)
        assert (rows.num_rows, errors.num_rows) == (1, 0)


def test_a_refresh_schedule_shows_the_input_only_then(stores):
    stores.hold()
    with open_sink(stores.client(), stores.shard_id, SCHEMA, refresh=Refresh(every=10, aligned_to=3)) as sink:
        sink.inputs[0].insert([row(1, "a", 0), row(1, "a", 2, -1), row(2, "b", 3), row(3, "c", 4)])
        advance(sink, 5)
        settle(sink, 13)
        assert sink.status().desired == A(13)
    assert stores.contents(3) == stores.contents(12) == Counter({(2, "b"): 1})


def test_the_shard_is_closed_after_the_last_refresh(stores):
    stores.hold()
    with open_sink(stores.client(), stores.shard_id, SCHEMA, refresh=Refresh(at=(5, 8))) as sink:
        sink.inputs[0].insert([row(1, "a", 0), row(2, "b", 7), row(3, "c", 9)])
        advance(sink, 9)
        assert sink.wait_for_upper(Antichain.empty(), timeout_s=PATIENCE_S)
    assert stores.contents(7) == Counter({(1, "a"): 1})
    assert stores.contents(8) == Counter({(1, "a"): 1, (2, "b"): 1})


@pytest.mark.slow
def test_spilling_keeps_memory_bounded_and_the_directory_clean(stores, tmp_path: Path):
    rows, limit = 100_000, 2 << 20
    keys = np.random.default_rng(1).permutation(rows)
    table = pa.table(
        [
            pa.StructArray.from_arrays([pa.array(keys)], names=["id"]),
            pa.StructArray.from_arrays([pa.array([f"{key:024x}" for key in keys])], names=["name"]),
            pa.array(np.zeros(rows, dtype=np.int64)),
            pa.array(np.ones(rows, dtype=np.int64)),
        ],
        schema=SCHEMA.updates_schema,
    )
    with open_sink(
        stores.client(), stores.shard_id, SCHEMA, workers=2, memory_limit_bytes=limit, spill_directory=tmp_path
    ) as sink:
        peak = 0
        for start in range(0, rows, 10_000):
            sink.inputs[0].insert(table.slice(start, 10_000))
            peak = max(peak, sum(size.memory_bytes for size in sink.status().buffers))
        wait_until(lambda: sink.status().buffered_rows == rows)
        assert sum(size.spilled_bytes for size in sink.status().buffers) > limit
        assert 0 < peak <= limit
        advance(sink, 1)
        settle(sink, 1)
        wait_until(lambda: sink.status().read_back == A(1) and sink.status().buffered_rows == 0)
        assert sum(size.spilled_bytes for size in sink.status().buffers) == 0
    assert list(tmp_path.iterdir()) == []
    with stores.client().open_leased_reader(stores.shard_id, purpose="check") as reader:
        read = reader.snapshot(0).to_table()
    assert read.equals(table.take(pa.array(np.argsort(keys))))


def test_a_failing_worker_is_named_and_the_sink_stops(stores):
    sink = open_sink(stores.client(), stores.shard_id, SCHEMA)
    sink.inputs[0].insert([row(1, "a", 0)])
    stores.faults.fail_next("set", happened=False, matching="/n", times=1000)
    advance(sink, 5)
    with pytest.raises(SinkFailed, match=f"worker 0 of the sink on shard {stores.shard_id} failed") as failed:
        sink.wait_for_upper(A(5), timeout_s=PATIENCE_S)
    assert failed.value.__cause__ is not None
    with pytest.raises(SinkFailed):
        sink.inputs[0].insert([row(2, "a", 6)])
    stores.faults.heal()
    sink.close()


def test_a_failure_of_a_part_is_raised_by_close(stores):
    sink = open_sink(stores.client(), stores.shard_id, SCHEMA)
    stores.faults.break_down()
    sink.inputs[0].insert([row(1, "a", 0)])
    advance(sink, 5)
    wait_until(lambda: not any(t.is_alive() for t in threading.enumerate() if t.name.startswith("persist-sink-")))
    with pytest.raises(SinkFailed, match="of the sink on shard"):
        sink.close()  # its handles cannot be expired either
    sink.close()


def test_misuse_of_a_sink_is_refused_before_anything_happens(stores):
    client = stores.client()
    for wrong in ({"workers": 0}, {"memory_limit_bytes": 10}, {"as_of": -1}, {"as_of": 2**63}):
        with pytest.raises(InvalidUsage):
            open_sink(client, stores.shard_id, SCHEMA, **wrong)
    with open_sink(client, stores.shard_id, SCHEMA) as sink:
        advance(sink, 5)
        with pytest.raises(UpdateNotBeyondLower, match="time 4 after input 0 advanced to"):
            sink.inputs[0].insert([row(1, "a", 4)])
        with pytest.raises(InvalidUsage, match="goes back"):
            advance(sink, 4)
        with pytest.raises(InvalidUsage, match="without errors"):
            sink.inputs[0].insert_errors([("no", 7, 1)])
        with pytest.raises(InvalidUsage, match="without errors"):
            sink.inputs[0].advance_errors(A(7))
    with pytest.raises(InvalidUsage, match="was closed"):
        sink.inputs[0].insert([row(1, "a", 6)])


def test_closing_gives_up_reader_writer_and_staged_batches(stores):
    client = stores.client()
    with open_sink(client, stores.shard_id, SCHEMA, workers=2) as sink:
        sink.inputs[0].insert([row(1, "a", 0)])
        advance(sink, 3)
        settle(sink, 3)
    state = client.machine(stores.shard_id).refresh()
    assert not state.leased_readers
    assert not state.writers


def test_metrics_count_the_updates_in_the_buffers_and_past_them(stores):
    with open_sink(stores.client(), stores.shard_id, SCHEMA, workers=2) as sink:
        sink.inputs[0].insert([row(key, "a", 0) for key in range(100)])
        advance(sink, 3)
        settle(sink, 3)
        wait_until(lambda: sink.status().read_back == A(3) and sink.status().buffered_rows == 0)

        def value(name: str) -> float | None:
            labels = {} if name.endswith("_total") else {"shard": str(stores.shard_id)}
            return stores.registry.get_sample_value(name, labels)

        wait_until(lambda: value("persist_sink_correction_deletions_total") == 200)
        assert value("persist_sink_correction_insertions_total") == 200
        assert value("persist_sink_correction_rows") == 0
        assert value("persist_sink_correction_capacity_rows") is not None
        assert value("persist_sink_correction_rows_max_per_worker") == 0


def test_a_sink_opens_from_a_location(tmp_path: Path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard_id = ShardId.new()
    with PersistClient.open(location) as client, open_sink(client, shard_id, SCHEMA, workers=2) as sink:
        sink.inputs[0].insert([row(1, "a", 0)])
        advance(sink, 2)
        settle(sink, 2)
        assert sink.take_maintenance() is not None


def test_an_error_of_the_disk_names_the_worker(stores, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    sink = open_sink(
        stores.client(), stores.shard_id, SCHEMA, memory_limit_bytes=1 << 20, spill_directory=tmp_path / "file"
    )
    rows = pa.table(
        [
            pa.StructArray.from_arrays([pa.array(np.arange(40_000))], names=["id"]),
            pa.StructArray.from_arrays([pa.array(["x" * 20] * 40_000)], names=["name"]),
            pa.array(np.zeros(40_000, dtype=np.int64)),
            pa.array(np.ones(40_000, dtype=np.int64)),
        ],
        schema=SCHEMA.updates_schema,
    )

    def feed() -> None:
        for start in range(0, 1_000_000, 1000):  # until the error arrives
            sink.inputs[0].insert(rows.slice(start % 40_000, 1000))

    with pytest.raises(SinkFailed, match="worker 0 of the sink"):
        feed()
    sink.close()


def test_a_sink_refuses_a_shard_that_cannot_be_read_at_its_as_of(stores):
    client = stores.client()
    with client.open_writer(stores.shard_id, SCHEMA, purpose="before") as writer:
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(3))
    with client.open_leased_reader(stores.shard_id, SCHEMA, purpose="since") as reader:
        reader.downgrade_since(Antichain.empty())
    sink = open_sink(client, stores.shard_id, SCHEMA)
    with pytest.raises(SinkFailed, match="reader of the sink .* since of shard .* is empty"):
        sink.wait_for_upper(A(9), timeout_s=PATIENCE_S)
    sink.close()


def test_a_sink_with_an_outgrown_schema_is_refused(stores):
    """Rows read without their new fields would be retracted without them: the retractions cancel nothing."""
    client = stores.client()
    client.initialise(stores.shard_id, SCHEMA)
    grown = Schema(key=SCHEMA.key, val=SCHEMA.val.append(pa.field("note", pa.string())))
    stores.client().evolve_schema(stores.shard_id, grown)
    with pytest.raises(SchemaMismatch, match="evolved to schema 1"):
        open_sink(stores.client(), stores.shard_id, SCHEMA)
    open_sink(stores.client(), stores.shard_id, grown).close()


def test_regression_a_sink_ends_all_of_its_parts_although_one_of_them_raises(stores, monkeypatch):
    """It raised the first error at once. The reader's heartbeat went on for as long as a reference to the sink existed."""
    sink = open_sink(stores.client(), stores.shard_id, SCHEMA)
    thread = sink._parts.reader.handle._heartbeat._thread

    def damaged() -> None:
        raise CorruptData("the log lost versions", key="k")

    monkeypatch.setattr(sink._writer, "expire", damaged)
    with pytest.raises(CorruptData, match="the log lost versions"):
        sink.close()
    assert not thread.is_alive()
    assert not stores.client().machine(stores.shard_id).state.leased_readers


def test_regression_a_sink_that_cannot_start_leaves_no_thread_and_no_lease(stores, monkeypatch):
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "persist-sink-control":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        open_sink(stores.client(), stores.shard_id, SCHEMA)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("persist-sink-")]
    assert not stores.client().machine(stores.shard_id).state.leased_readers
