"""BatchBuilder: how updates become parts."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, WriteHandle
from persist_engine.base.errors import InvalidBounds, InvalidUsage, UpdateBeyondUpper, UpdateNotBeyondLower
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.codec.inline_part import decode_inline
from persist_engine.codec.part import decode_part
from persist_engine.model.batch import HollowPart, RunOrder
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
SMALL_PARTS = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=1024))


@pytest.fixture
def world() -> World:
    return World(settings=SMALL_PARTS)


@pytest.fixture
def writer(world: World) -> WriteHandle:
    return world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")


def table(count: int) -> pa.Table:
    """Rows 0..count, in descending order of key."""
    keys = pa.array(range(count - 1, -1, -1), pa.int64())
    return pa.table(
        {
            "key": pa.StructArray.from_arrays([keys], ["id"]),
            "val": pa.StructArray.from_arrays([pa.array(["x"] * count)], ["name"]),
            "time": pa.array([0] * count, pa.int64()),
            "diff": pa.array([1] * count, pa.int64()),
        }
    ).cast(SCHEMA.updates_schema)


def test_a_part_is_cut_at_the_target_size_and_each_is_a_sorted_run(world: World, writer: WriteHandle):
    batch = writer.batch(table(1000), lower=A(0), upper=A(1))
    sizes = [part.rows for part in batch.hollow.parts]
    row_bytes = table(1000).nbytes / 1000
    assert sum(sizes) == batch.rows == 1000
    assert max(sizes) <= 1024 / row_bytes + 1
    assert len(sizes) >= 1000 * row_bytes // 1024
    runs = list(batch.hollow.runs())
    assert len(runs) == len(sizes)
    assert {meta.order for meta, _ in runs} == {RunOrder.STRUCTURED}
    assert len({meta.run_id for meta, _ in runs}) == len(runs)
    assert isinstance(writer.append_batch(batch, A(0), A(1)), Appended)
    with world.process().open_leased_reader(writer.shard_id, purpose="check") as reader:
        rows = reader.snapshot(A(0)).to_table()
    assert rows.column("key").combine_chunks().field("id").to_pylist() == list(range(1000))


def test_many_small_adds_fill_one_part(world: World, writer: WriteHandle):
    with writer.builder(A(0)) as builder:
        for number in range(20):
            builder.add([row(number, "x", number)])
        batch = builder.finish(A(20))
    assert [part.rows for part in batch.hollow.parts] == [20]


def test_uploads_in_flight_are_bounded(world: World, writer: WriteHandle):
    """Spec 10.3."""
    at_once, most, lock = 0, 0, threading.Lock()
    both = threading.Event()
    put = world.blob.set

    def slow_set(key: str, value: bytes) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            if at_once == SMALL_PARTS.batch.outstanding_parts_max:
                both.set()
        both.wait(60)
        put(key, value)
        with lock:
            at_once -= 1

    world.blob.set = slow_set  # type: ignore[method-assign]  # watch the uploads
    writer.batch(table(2000), lower=A(0), upper=A(1))
    assert most == SMALL_PARTS.batch.outstanding_parts_max


@pytest.mark.parametrize("count", [1, 500])
def test_an_abandoned_builder_leaves_no_blob(world: World, writer: WriteHandle, count: int):
    with writer.builder(A(0)) as builder:
        builder.add(table(count))
    assert world.blob_keys(writer.shard_id, kind="part") == set()
    for call in (lambda: builder.add([]), lambda: builder.finish(A(1))):
        with pytest.raises(InvalidUsage, match="has ended"):
            call()


@pytest.mark.slow
def test_errors_of_add_and_finish_delete_the_written_parts(world: World, writer: WriteHandle):
    """Spec 10.1."""

    def builder():
        out = writer.builder(A(5))
        out.add(pa.table({**{n: table(500).column(n) for n in ("key", "val", "diff")}, "time": pa.array([7] * 500)}))
        return out

    with pytest.raises(UpdateNotBeyondLower, match="time 4"):
        builder().add([row(1, "a", 4)])
    with pytest.raises(UpdateBeyondUpper, match="time 7"):
        builder().finish(A(7))
    with pytest.raises(InvalidBounds):
        builder().finish(A(4))
    assert world.blob_keys(writer.shard_id, kind="part") == set()


def test_a_failed_background_upload_reaches_the_caller_and_leaves_no_blob(world: World, writer: WriteHandle):
    put, calls = world.blob.set, []

    def second_fails(key: str, value: bytes) -> None:
        calls.append(key)
        if len(calls) == 2:
            raise RuntimeError("disk on fire")
        put(key, value)

    world.blob.set = second_fails  # type: ignore[method-assign]  # an error that no adapter maps
    with pytest.raises(RuntimeError, match="disk on fire"):
        writer.batch(table(3000), lower=A(0), upper=A(1))
    assert world.blob_keys(writer.shard_id, kind="part") == set()


def test_parts_survive_lost_answers_of_the_blob_store(world: World, writer: WriteHandle):
    """Spec 4.4."""
    world.faults.fail_next("set", happened=True, times=3)
    world.faults.fail_next("set", happened=False, answered=True, times=3)
    batch = writer.batch(table(1000), lower=A(0), upper=A(1))
    keys = {f"{writer.shard_id}/{part.key}" for part in batch.hollow.parts if isinstance(part, HollowPart)}
    assert world.blob_keys(writer.shard_id, kind="part") == keys
    world.faults.fail_next("delete", happened=True, times=2)
    batch.delete()
    assert world.blob_keys(writer.shard_id, kind="part") == set()


def test_flushing_keeps_order_rows_and_contents(world: World):
    """Spec 10.10."""
    world.settings = Settings(batch=BatchSettings(inline_part_bytes_max=1 << 20, target_part_bytes=1024))
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    batch = writer.batch(table(300), lower=A(0), upper=A(1))
    before = batch.hollow
    assert before.inline_bytes == before.size_bytes > 0
    batch.flush_inline_parts()
    assert batch.hollow.inline_bytes == 0
    assert batch.hollow.run_metas == before.run_metas
    for old, new in zip(before.parts, batch.hollow.parts, strict=True):
        assert isinstance(new, HollowPart)
        assert (old.rows, old.diffs_sum, old.schema_id) == (new.rows, new.diffs_sum, new.schema_id)
        data = world.blob.get(f"{writer.shard_id}/{new.key}")
        assert data is not None
        inline = decode_inline(old.data, format_name=old.format, key="inline", schema=SCHEMA)
        stored = decode_part(data, key=new.key, schema=SCHEMA, expected_checksum=new.checksum)
        assert stored.table.equals(inline.table)
        assert stored.desc == inline.desc


def test_a_batch_dropped_before_its_end_logs_the_blobs_it_leaves(
    world: World, writer: WriteHandle, caplog: pytest.LogCaptureFixture
):
    batch = writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1))
    (key,) = batch.hollow.blob_keys()
    del batch
    assert [key in record.getMessage() for record in caplog.records] == [True]
    writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1)).delete()
    assert len(caplog.records) == 1
