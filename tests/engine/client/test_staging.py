"""Staged batches before and around their append: runs, rewrites, joining of inline parts, flushing, deletion."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Antichain, Appended, UpperMismatch, WriteHandle
from persist_engine.base.errors import (
    BatchExpired,
    InvalidRewrite,
    InvalidUsage,
    SchemaMismatch,
)
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.client.write.batch import Batch
from persist_engine.codec.batch import decode_transmittable, encode_transmittable
from persist_engine.model.batch import HollowBatch, HollowPart, HollowRun, InlinePart, RunMeta, rewritten
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_kit.depth import draws
from persist_kit.staged import named_keys, opened
from persist_kit.world import SCHEMA, contents, row

A = Antichain.of
PARQUET_MAGIC = b"PAR1"
#: With parts of 1 KiB: two runs when merged, one of three parts.
MANY = pa.table(
    {
        "key": [{"id": number * 7919 % 20_000} for number in range(20_000)],
        "val": pa.repeat(pa.scalar({"name": "x"}), 20_000),
        "time": pa.repeat(pa.scalar(0, pa.int64()), 20_000),
        "diff": pa.repeat(pa.scalar(1, pa.int64()), 20_000),
    }
)


def part_kinds(writer: WriteHandle) -> list[type]:
    return [type(part) for batch in writer.machine.state.trace.batches() for part in batch.parts]


# -- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_max", [2, 3, 5])
def test_a_builder_leaves_no_more_runs_than_it_may(runs_max: int):
    """Spec 10.4."""
    world, writer = opened(runs_max=runs_max, inline_part_bytes_max=0, target_part_bytes=1024)
    keys = [(number * 7919) % 1009 for number in range(1009)]
    batch = writer.batch([row(key, "x", 0) for key in keys], lower=A(0), upper=A(1))
    runs = list(batch.hollow.runs())
    assert len(batch.hollow.parts) > 1
    assert len(runs) <= runs_max
    assert sum(part.rows for part in batch.hollow.parts) == batch.rows == 1009
    assert [meta.rows for meta, _ in runs] == [sum(part.rows for part in parts) for _, parts in runs]
    whole = {f"{writer.shard_id}/{key}" for key in batch.hollow.blob_keys()}
    assert world.blob_keys(writer.shard_id, kind="part") == whole, "what was merged away is deleted"
    assert isinstance(writer.append_batch(batch, A(0), A(1)), Appended)
    assert contents(world.process(), writer.shard_id, 0) == [(key, "x", 1) for key in range(1009)]


@pytest.mark.slow
@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["blobs", "inline"])
@pytest.mark.parametrize("way", ["appended", "sent", "rewritten", "deleted"])
def test_long_runs_of_a_builder_are_replaced_by_listings(way: str, inline: int):
    """State then holds no more of a batch than of a compaction output. Everything else is unchanged."""
    world, writer = opened(
        runs_max=2, run_parts_max=2, inline_part_bytes_max=inline, target_part_bytes=1 << 16, combine_inline=False
    )
    batch = writer.batch(MANY, lower=A(0), upper=A(1))
    assert any(isinstance(part, HollowRun) for part in batch.hollow.parts)
    assert all(len(parts) <= 2 for _, parts in batch.hollow.runs())
    assert sum(part.rows for part in batch.hollow.parts) == batch.rows == len(MANY)
    if way == "deleted":
        batch.delete()
        assert world.blob_keys(writer.shard_id, kind="part") == set()
        return
    if way == "sent":
        batch = writer.batch_from_transmittable(batch.to_transmittable())
    if way == "rewritten":
        batch.rewrite_times(A(2), A(3))
    upper = batch.upper
    assert isinstance(writer.append_batch(batch, A(0), upper), Appended)
    assert HollowRun in part_kinds(writer)
    assert contents(world.process(), writer.shard_id, upper.time - 1) == [(key, "x", 1) for key in range(len(MANY))]
    assert verify_shard(writer.machine).findings == []


def test_a_part_that_is_a_run_of_its_own_needs_no_listing():
    _, writer = opened(run_parts_max=2, inline_part_bytes_max=0, target_part_bytes=1024)
    batch = writer.batch([row(key, "x", 0) for key in range(1000)], lower=A(0), upper=A(1))
    assert len(batch.hollow.parts) == len(list(batch.hollow.runs())) > 2
    assert not batch.hollow.has_hollow_runs
    batch.delete()


def test_a_builder_that_cannot_write_a_listing_leaves_no_blob():
    world, writer = opened(runs_max=2, run_parts_max=2, inline_part_bytes_max=0, target_part_bytes=1 << 16)
    put = world.blob.set

    def no_listings(key: str, value: bytes) -> None:
        if PARQUET_MAGIC not in value[:64] + value[-64:]:
            raise RuntimeError("disk on fire")
        put(key, value)

    world.blob.set = no_listings  # type: ignore[method-assign]  # an error that no adapter maps
    with pytest.raises(RuntimeError, match="disk on fire"):
        writer.batch(MANY, lower=A(0), upper=A(1))
    assert world.blob_keys(writer.shard_id, kind="part") == set()


def test_runs_that_cancel_leave_nothing():
    world, writer = opened(runs_max=2, inline_part_bytes_max=0, target_part_bytes=1024)
    updates = [row(key, "x", 0, diff) for diff in (1, -1) for key in range(300)]
    batch = writer.batch(updates, lower=A(0), upper=A(1))
    assert isinstance(writer.append_batch(batch, A(0), A(1)), Appended)
    assert contents(world.process(), writer.shard_id, 0) == []
    assert batch.rows < 600
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


def test_a_builder_that_fails_while_merging_leaves_no_blob():
    world, writer = opened(runs_max=2, inline_part_bytes_max=0, target_part_bytes=1024)
    get, calls = world.blob.get, []

    def fails_later(key: str) -> bytes | None:
        calls.append(key)
        if len(calls) == 4:
            raise RuntimeError("disk on fire")
        return get(key)

    world.blob.get = fails_later  # type: ignore[method-assign]  # an error that no adapter maps
    with pytest.raises(RuntimeError, match="disk on fire"):
        writer.batch([row(key, "x", 0) for key in range(1000)], lower=A(0), upper=A(1))
    assert world.blob_keys(writer.shard_id, kind="part") == set()


def test_a_builder_whose_parts_an_orphan_scan_deleted_raises_batch_expired():
    """Found by simulation: the error said that a live state had lost a blob, which was not so."""
    world, writer = opened(runs_max=2, inline_part_bytes_max=0, target_part_bytes=1024)
    get = world.blob.get

    def swept(key: str) -> bytes | None:
        world.blob.delete(key)
        return get(key)

    world.blob.get = swept  # type: ignore[method-assign]
    with pytest.raises(BatchExpired, match="is gone, as after an orphan scan: stage the batch again"):
        writer.batch([row(key, "x", 0) for key in range(1000)], lower=A(0), upper=A(1))
    assert world.blob_keys(writer.shard_id, kind="part") == set()


# -- rewrites ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 4096])
def test_a_rewritten_batch_is_read_at_its_new_times(inline: int):
    world, writer = opened(inline_part_bytes_max=inline)
    batch = writer.batch([row(1, "a", 2), row(1, "a", 3), row(2, "b", 4, -1)], lower=A(0), upper=A(5))
    batch.rewrite_times(A(4), A(9))
    batch.rewrite_times(A(4), A(9))
    batch.rewrite_times(A(7), A(9))
    assert (batch.lower, batch.upper) == (A(0), A(9))
    assert isinstance(writer.append([], lower=A(0), upper=A(6)), Appended)
    assert isinstance(writer.append_batch(batch, A(6), A(9)), Appended)
    assert contents(world.process(), writer.shard_id, 6) == []
    assert contents(world.process(), writer.shard_id, 7) == [(1, "a", 2), (2, "b", -1)]
    answer, _ = writer.machine.spine_exert(1000)
    assert [compact(writer.machine, request).applied for request in answer.requests] == [1]
    assert contents(world.process(), writer.shard_id, 8) == [(1, "a", 2), (2, "b", -1)]


def test_a_batch_rewritten_to_the_greatest_time_is_read_there_and_to_no_later_one():
    """A row of a later time would be read before its batch's lower, and be dropped as not appended."""
    world, writer = opened()
    batch = writer.batch([row(1, "a", 2)], lower=A(0), upper=A(5))
    with pytest.raises(InvalidRewrite):
        batch.rewrite_times(A(2**63), A(2**63 + 9))
    batch.rewrite_times(A(2**63 - 1), A(2**63 + 9))
    assert isinstance(writer.append([], lower=A(0), upper=A(2**63 - 1)), Appended)
    assert isinstance(writer.append_batch(batch, A(2**63 - 1), A(2**63 + 9)), Appended)
    assert contents(world.process(), writer.shard_id, 2**63 - 1) == [(1, "a", 1)]


def test_rewrites_that_would_break_the_bounds_of_a_batch_are_refused():
    """Spec 10.7."""
    desc = Description(A(3), A(9), MINIMUM)
    part = InlinePart(b"", 1, 1, ts_rewrite=A(5))
    batch = HollowBatch(desc, 1, (part,), (), (RunMeta(),))
    for frontier, upper, text in [
        (A(9), A(9), "at or past its new upper"),
        (A(6), A(8), "before its own"),
        (A(2), A(9), "before its lower"),
        (A(4), A(9), "before an earlier {5}"),
        (Antichain.empty(), A(9), "at or past"),
        (A(2**63), A(2**63 + 9), "no update is later than 9223372036854775807"),
    ]:
        with pytest.raises(InvalidRewrite, match=text.replace("{", r"\{")):
            rewritten(batch, frontier, upper)
    with pytest.raises(InvalidRewrite, match="compacted"):
        rewritten(batch.with_desc(Description(A(3), A(9), A(1))), A(6), A(9))
    closed = rewritten(batch, A(6), Antichain.empty())
    assert closed.desc.upper.is_empty()
    assert rewritten(closed, A(6), Antichain.empty()) == closed


# -- inline parts of many batches ----------------------------------------------------------------------------------------


def test_small_batches_of_one_append_become_one_part():
    world, writer = opened()
    staged = [writer.batch([row(n, "x", n)], lower=A(0), upper=A(9)) for n in range(8)]
    staged.append(writer.batch([row(0, "x", 0, -1)], lower=A(0), upper=A(9)))
    outcome = writer.compare_and_append_batch(staged, expected_upper=A(0), new_upper=A(9))
    assert isinstance(outcome, Appended)
    assert part_kinds(writer) == [InlinePart]
    assert contents(world.process(), writer.shard_id, 8) == [(n, "x", 1) for n in range(1, 8)]
    for batch in staged:
        with pytest.raises(InvalidUsage, match="already appended"):
            batch.delete()


def test_small_batches_are_cut_and_rewritten_as_they_are_joined():
    world, writer = opened()
    assert isinstance(writer.append([], lower=A(0), upper=A(3)), Appended)
    one = writer.batch([row(1, "early", 1), row(2, "in", 4), row(3, "late", 7)], lower=A(0), upper=A(9))
    two = writer.batch([row(4, "in", 5)], lower=A(2), upper=A(6))
    outcome = writer.compare_and_append_batch([one, two], expected_upper=A(3), new_upper=A(6))
    assert isinstance(outcome, Appended)
    (meta,) = [meta for batch in writer.machine.state.trace.batches() for meta in batch.run_metas]
    assert not meta.truncated, "what is joined holds nothing that is not seen"
    assert contents(world.process(), writer.shard_id, 5) == [(2, "in", 1), (4, "in", 1)]
    moved = [writer.batch([row(n, "moved", 2)], lower=A(2), upper=A(8)) for n in (5, 6)]
    for batch in moved:
        batch.rewrite_times(A(7), A(8))
    assert isinstance(writer.compare_and_append_batch(moved, expected_upper=A(6), new_upper=A(8)), Appended)
    assert contents(world.process(), writer.shard_id, 6) == [(2, "in", 1), (4, "in", 1)]
    assert contents(world.process(), writer.shard_id, 7) == [
        (2, "in", 1),
        (4, "in", 1),
        (5, "moved", 1),
        (6, "moved", 1),
    ]


def test_small_batches_that_are_large_together_become_a_blob_which_a_lost_append_deletes():
    world, writer = opened()
    rival = world.process().open_writer(writer.shard_id, SCHEMA, purpose="rival")

    def stage() -> list[Batch]:
        rng = random.Random(1)
        return [
            writer.batch([row(n * 50 + m, rng.randbytes(16).hex(), 0) for m in range(40)], lower=A(0), upper=A(9))
            for n in range(6)
        ]

    staged = stage()
    assert all(type(part) is InlinePart for batch in staged for part in batch.hollow.parts)
    rival.append([], lower=A(0), upper=A(1))
    outcome = writer.compare_and_append_batch(staged, expected_upper=A(0), new_upper=A(9))
    assert outcome == UpperMismatch(current=A(1), expected=A(0))
    assert world.blob_keys(writer.shard_id, kind="part") == set()
    again = [writer.batch([row(n, "y" * 1500, 3) for n in (k, k + 1)], lower=A(1), upper=A(9)) for k in range(0, 8, 2)]
    assert isinstance(writer.compare_and_append_batch(again, expected_upper=A(1), new_upper=A(9)), Appended)
    assert len(part_kinds(writer)) == 1
    assert len(contents(world.process(), writer.shard_id, 8)) == 8


def test_small_batches_whose_diffs_no_single_row_can_hold_together_are_appended_as_they_are():
    _, writer = opened()
    staged = [writer.batch([row(1, "x", 0, 2**62)], lower=A(0), upper=A(1)) for _ in range(2)]
    assert isinstance(writer.compare_and_append_batch(staged, expected_upper=A(0), new_upper=A(1)), Appended)
    assert part_kinds(writer) == [InlinePart] * 2


def test_a_part_as_large_as_the_limit_is_no_longer_inline_however_small_its_blob_is():
    """The limit is exclusive (spec 10.11) and counts the record batch, which is not compressed."""
    updates = [row(1, "x" * 100_000, 0)]

    def part(limit: int) -> object:
        _, writer = opened(inline_part_bytes_max=limit)
        (part,) = writer.batch(updates, lower=A(0), upper=A(1)).hollow.parts
        return part

    inline = part(200_000)
    assert isinstance(inline, InlinePart)
    size = len(inline.data)
    assert isinstance(part(size + 1), InlinePart)
    blob = part(size)
    assert isinstance(blob, HollowPart)
    assert blob.size_bytes < size


def test_joining_can_be_switched_off():
    _, writer = opened(combine_inline=False)
    staged = [writer.batch([row(n, "x", 0)], lower=A(0), upper=A(1)) for n in range(3)]
    assert isinstance(writer.compare_and_append_batch(staged, expected_upper=A(0), new_upper=A(1)), Appended)
    assert part_kinds(writer) == [InlinePart] * 3


def test_parts_of_all_batches_are_flushed_at_once(monkeypatch: pytest.MonkeyPatch):
    world, writer = opened(combine_inline=False, inline_total_bytes_max=1)
    staged = [writer.batch([row(n, "x", 0)], lower=A(0), upper=A(1)) for n in range(4)]
    together = threading.Barrier(4)
    put = world.blob.set

    def meets_the_others(key: str, value: bytes) -> None:
        together.wait(60)
        put(key, value)

    world.blob.set = meets_the_others  # type: ignore[method-assign]  # watch the uploads
    assert isinstance(writer.compare_and_append_batch(staged, expected_upper=A(0), new_upper=A(1)), Appended)
    assert part_kinds(writer) == [HollowPart] * 4
    assert contents(world.process(), writer.shard_id, 0) == [(n, "x", 1) for n in range(4)]


def test_a_joined_part_is_flushed_as_one_when_state_takes_no_more():
    world, writer = opened(inline_total_bytes_max=1)
    staged = [writer.batch([row(n, "x", 0)], lower=A(0), upper=A(1)) for n in range(4)]
    assert isinstance(writer.compare_and_append_batch(staged, expected_upper=A(0), new_upper=A(1)), Appended)
    assert part_kinds(writer) == [HollowPart]
    assert len(world.blob_keys(writer.shard_id, kind="part")) == 1


@pytest.mark.slow
@given(st.data())
@settings(max_examples=draws(40), deadline=None)
def test_an_append_of_many_batches_is_all_their_updates(data: st.DataObject):
    """For every way to spread the updates over batches that are inline, joined, cut or rewritten."""
    world, writer = opened(
        inline_part_bytes_max=data.draw(st.sampled_from([0, 1100, 4096])),
        combine_inline=data.draw(st.booleans()),
        runs_max=data.draw(st.sampled_from([1, 2])),
        target_part_bytes=1024,
    )
    update = st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from([-1, 1, 2]))
    groups = data.draw(st.lists(st.lists(update, max_size=40), min_size=1, max_size=4))
    staged = [
        writer.batch([row(key, "x", time, diff) for key, time, diff in group], lower=A(0), upper=A(10))
        for group in groups
    ]
    lower, upper = sorted(data.draw(st.lists(st.integers(0, 10), min_size=2, max_size=2, unique=True)))
    writer.append([], lower=A(0), upper=A(lower)) if lower else None
    outcome = writer.compare_and_append_batch(staged, expected_upper=A(lower), new_upper=A(upper))
    assert isinstance(outcome, Appended)
    sums: dict[int, int] = {}
    for key, time, diff in [each for group in groups for each in group]:
        if lower <= time < upper:
            sums[key] = sums.get(key, 0) + diff
    expected = [(key, "x", total) for key, total in sorted(sums.items()) if total]
    assert contents(world.process(), writer.shard_id, upper - 1) == expected
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


def test_a_transmitted_batch_of_an_unknown_schema_is_refused():
    _, writer = opened()
    shard_id, _, hollow = decode_transmittable(
        writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1)).to_transmittable()
    )
    foreign = replace(hollow, parts=tuple(replace(part, schema_id=7) for part in hollow.parts))
    with pytest.raises(SchemaMismatch, match=f"schema 7, which shard {shard_id} does not have"):
        writer.batch_from_transmittable(encode_transmittable(shard_id, APPLIER_VERSION, foreign))


def test_arrow_readers_are_staged_in_bounded_memory():
    """A reader of many batches is cut into parts as it arrives. Memory holds at most the target and the parts in flight."""
    world, writer = opened(inline_part_bytes_max=0, target_part_bytes=4096)
    table = pa.table(
        {
            "key": pa.StructArray.from_arrays([pa.array(range(1000), pa.int64())], ["id"]),
            "val": pa.StructArray.from_arrays([pa.array(["x"] * 1000)], ["name"]),
            "time": pa.array([0] * 1000, pa.int64()),
            "diff": pa.array([1] * 1000, pa.int64()),
        }
    )
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=100))
    batch = writer.batch(reader, lower=A(0), upper=A(1))
    row_bytes = table.nbytes / 1000
    assert max(part.rows for part in batch.hollow.parts) <= 4096 / row_bytes + 1
    assert isinstance(writer.append_batch(batch, A(0), A(1)), Appended)
    assert len(contents(world.process(), writer.shard_id, 0)) == 1000
