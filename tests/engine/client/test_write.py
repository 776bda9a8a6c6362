"""WriteHandle: every form of append, every misuse, and the blobs of batches that were not appended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from persist_engine import (
    Antichain,
    Appended,
    Batch,
    PersistClient,
    ProgressMismatch,
    Schema,
    SourceProgress,
    UpperMismatch,
    WriteHandle,
)
from persist_engine.base.errors import (
    BatchNotFromThisShard,
    CorruptData,
    ErrorKind,
    Incompatible,
    InvalidBatchBounds,
    InvalidBounds,
    InvalidEmptyTimeInterval,
    InvalidRewrite,
    InvalidUsage,
    SchemaMismatch,
    UpdateBeyondUpper,
    UpdateNotBeyondLower,
)
from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.client.write import handle as write
from persist_engine.codec.batch import decode_transmittable, encode_transmittable
from persist_engine.model.batch import HollowPart, InlinePart
from persist_engine.model.frontier import EMPTY
from persist_engine.model.ids import ShardId
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of


@pytest.fixture
def world() -> World:
    """Stores where every part is a blob, so that leaked blobs show."""
    return World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))


@pytest.fixture
def shard_id(world: World) -> ShardId:
    return world.shard_id()


@pytest.fixture
def client(world: World) -> PersistClient:
    return world.process()


@pytest.fixture
def writer(client: PersistClient, shard_id: ShardId) -> WriteHandle:
    return client.open_writer(shard_id, SCHEMA, purpose="test")


def table(*rows: tuple[int, str, int, int], schema: Schema = SCHEMA) -> pa.Table:
    updates = [{"key": {"id": k}, "val": {"name": v}, "time": t, "diff": d} for k, v, t, d in rows]
    return pa.Table.from_pylist(updates, schema=schema.updates_schema)


# -- successful appends -------------------------------------------------------------------------------------------------


FORMS: dict[str, Callable[[], object]] = {
    "rows of tuples": lambda: [row(1, "a", 0), row(2, "b", 3)],
    "rows of dicts": lambda: [(({"id": 1}, {"name": "a"}), 0, 1), (({"id": 2}, {"name": "b"}), 3, 1)],
    "a generator": lambda: (r for r in [row(1, "a", 0), row(2, "b", 3)]),
    "a table": lambda: table((1, "a", 0, 1), (2, "b", 3, 1)),
    "a record batch": lambda: table((1, "a", 0, 1), (2, "b", 3, 1)).to_batches()[0],
    "a reader": lambda: table((1, "a", 0, 1), (2, "b", 3, 1)).to_reader(),
}


@pytest.mark.parametrize("form", FORMS)
def test_appends_every_form_of_updates(world: World, shard_id: ShardId, writer: WriteHandle, form: str):
    outcome = writer.compare_and_append(FORMS[form](), expected_upper=A(0), new_upper=A(5))
    assert outcome == Appended(A(5))
    assert contents(world.process(), shard_id, 4) == [(1, "a", 1), (2, "b", 1)]
    assert contents(world.process(), shard_id, 2) == [(1, "a", 1)]


def test_a_mismatch_is_a_value_and_leaves_no_blob(world: World, shard_id: ShardId, writer: WriteHandle):
    writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    before = world.blob_keys(shard_id, kind="part")
    outcome = writer.compare_and_append([row(2, "b", 3)], expected_upper=A(3), new_upper=A(9))
    assert outcome == UpperMismatch(current=A(5), expected=A(3))
    assert world.blob_keys(shard_id, kind="part") == before != set()


def test_append_skips_times_that_are_already_written_and_adds_the_rest(
    world: World, shard_id: ShardId, writer: WriteHandle
):
    rows = [row(time, "x", time) for time in range(6)]
    assert writer.append(rows[:4], lower=A(0), upper=A(4)) == Appended(A(4))
    other = world.process().open_writer(shard_id, SCHEMA, purpose="other")
    assert other.append(rows, lower=A(0), upper=A(6)) == Appended(A(6))
    assert contents(world.process(), shard_id, 5) == [(time, "x", 1) for time in range(6)]
    before = world.blob_keys(shard_id, kind="part")
    assert writer.append(rows, lower=A(0), upper=A(6)) == Appended(A(6))
    assert world.blob_keys(shard_id, kind="part") == before


def test_append_after_a_gap_is_a_mismatch_and_leaves_no_blob(world: World, shard_id: ShardId, writer: WriteHandle):
    assert writer.append([row(1, "a", 5)], lower=A(5), upper=A(6)) == UpperMismatch(current=A(0), expected=A(5))
    assert world.blob_keys(shard_id, kind="part") == set()


def test_many_staged_batches_become_one_append(world: World, shard_id: ShardId, writer: WriteHandle):
    """Spec 9.5."""
    stagers = [world.process().open_writer(shard_id, SCHEMA, purpose=f"stage {i}") for i in range(3)]
    sent = [w.batch([row(i, "x", i)], lower=A(0), upper=A(5)).to_transmittable() for i, w in enumerate(stagers)]
    batches = [writer.batch_from_transmittable(data) for data in sent]
    assert isinstance(writer.compare_and_append_batch(batches, expected_upper=A(0), new_upper=A(5)), Appended)
    assert contents(world.process(), shard_id, 4) == [(0, "x", 1), (1, "x", 1), (2, "x", 1)]
    (batch,) = writer.machine.state.trace.batches()
    assert (len(batch.parts), batch.run_splits) == (3, (1, 2))
    assert set(writer.machine.state.writers) == {writer.writer_id}


def test_a_batch_may_be_appended_under_narrower_bounds(world: World, shard_id: ShardId, writer: WriteHandle):
    writer.append([], lower=A(0), upper=A(3))
    batch = writer.batch([row(time, "x", time) for time in range(10)], lower=A(0), upper=A(10))
    assert writer.compare_and_append_batch([batch], expected_upper=A(3), new_upper=A(7)) == Appended(A(7))
    assert contents(world.process(), shard_id, 6) == [(time, "x", 1) for time in range(3, 7)]
    appended = list(writer.machine.state.trace.batches())[-1]
    assert all(meta.truncated for meta in appended.run_metas)


def test_empty_appends_and_no_batches_at_all_move_the_upper(world: World, shard_id: ShardId, writer: WriteHandle):
    assert writer.compare_and_append([], expected_upper=A(0), new_upper=A(5)) == Appended(A(5))
    assert writer.compare_and_append_batch([], expected_upper=A(5), new_upper=A(6)) == Appended(A(6))
    assert writer.compare_and_append([], expected_upper=A(6), new_upper=A(6)) == Appended(A(6))
    assert contents(world.process(), shard_id, 5) == []
    assert world.blob_keys(shard_id, kind="part") == set()


def test_updates_that_cancel_out_leave_no_part(world: World, shard_id: ShardId, writer: WriteHandle):
    writer.compare_and_append([row(1, "a", 0), row(1, "a", 0, -1)], expected_upper=A(0), new_upper=A(5))
    assert world.blob_keys(shard_id, kind="part") == set()


def test_a_shard_can_be_closed_and_then_takes_nothing(writer: WriteHandle):
    assert writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=EMPTY) == Appended(EMPTY)
    assert writer.compare_and_append([], expected_upper=A(5), new_upper=A(6)) == UpperMismatch(EMPTY, A(5))
    assert writer.append([row(2, "b", 5)], lower=A(5), upper=A(6)) == Appended(EMPTY)


def test_progress_is_committed_with_the_data(client: PersistClient, shard_id: ShardId, writer: WriteHandle):
    """Spec 17.12."""
    assert client.progress(shard_id, "sink") is None
    first = writer.compare_and_append([], expected_upper=A(0), new_upper=A(5), progress=("sink", b"one"))
    assert first == Appended(A(5))
    stored = client.progress(shard_id, "sink")
    assert stored is not None
    assert (stored.token, stored.upper) == (b"one", A(5))
    again = writer.compare_and_append([row(1, "a", 5)], expected_upper=A(5), new_upper=A(6), progress=("sink", b"two"))
    assert again == ProgressMismatch(stored)
    batch = writer.batch([row(1, "a", 5)], lower=A(5), upper=A(6))
    outcome = writer.compare_and_append_batch(
        [batch], expected_upper=A(5), new_upper=A(6), progress=("sink", b"two"), expected_progress=b"one"
    )
    assert outcome == Appended(A(6))
    assert client.inspect(shard_id).progress == {"sink": 6}


def test_an_expected_progress_with_its_upper_is_not_the_same_token_stored_again(
    client: PersistClient, shard_id: ShardId, writer: WriteHandle
):
    """Spec 17.12. By the token alone an append after "one", "two", "one" would be as good as after the first "one"."""
    seen: list[SourceProgress | None] = [None]
    for time, token in enumerate((b"one", b"two", b"one"), 1):
        bounds: dict[str, Any] = {"expected_upper": A(time - 1), "new_upper": A(time)}
        answer = writer.compare_and_append_batch([], **bounds, progress=("sink", token), expected_progress=seen[-1])
        assert answer == Appended(A(time))
        seen.append(client.progress(shard_id, "sink"))
    _, first, _, last = seen
    bounds = {"expected_upper": A(3), "new_upper": A(4), "progress": ("sink", b"three")}
    assert writer.compare_and_append_batch([], **bounds, expected_progress=first) == ProgressMismatch(last)
    batch = writer.batch_from_transmittable(writer.batch([row(1, "a", 3)], lower=A(1), upper=A(4)).to_transmittable())
    assert writer.compare_and_append_batch([batch], **bounds, expected_progress=first) == ProgressMismatch(last)
    batch.delete()
    assert writer.compare_and_append_batch([], **bounds, expected_progress=last) == Appended(A(4))


def test_a_writer_returns_the_cached_the_fetched_and_the_awaited_upper(
    world: World, shard_id: ShardId, writer: WriteHandle
):
    """Spec 9.6."""
    other = world.process().open_writer(shard_id, SCHEMA, purpose="other")
    writer.append([], lower=A(0), upper=A(5))
    assert (writer.upper, other.upper, other.shared_upper()) == (A(5), A(0), A(0))
    assert other.fetch_recent_upper() == A(5)
    assert writer.wait_for_upper_past(A(4), timeout=0)
    assert not writer.wait_for_upper_past(A(5), timeout=0.5)
    other.append([], lower=A(5), upper=A(9))
    assert writer.wait_for_upper_past(A(8), timeout=0)
    assert writer.upper == A(9)
    with pytest.raises(InvalidUsage, match="closed frontier"):
        writer.wait_for_upper_past(EMPTY)


def test_threads_of_one_handle_take_turns(world: World, shard_id: ShardId, writer: WriteHandle):
    """Threads that share one handle must not overwrite each other's idempotency tokens."""
    threads = [
        threading.Thread(target=writer.append, args=([row(0, "x", time) for time in range(8)],), kwargs=bounds)
        for bounds in [{"lower": A(0), "upper": A(8)}] * 4
    ]
    world.faults.fail_next("compare_and_set", happened=True, times=2)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(world.process(), shard_id, 7) == [(0, "x", 8)]


def test_an_append_costs_one_round_trip(world: World, writer: WriteHandle):
    """The fast path: one compare-and-set and no other call, independent of earlier appends."""
    for time in range(20):
        before = world.consensus.calls.copy()
        writer.compare_and_append([row(1, "a", time)], expected_upper=A(time), new_upper=A(time + 1))
        assert world.consensus.calls - before == {"compare_and_set": 1}


def test_an_append_returns_maintenance_and_does_not_perform_it(world: World, shard_id: ShardId, writer: WriteHandle):
    handed = [writer.append([row(1, "a", t)], lower=A(t), upper=A(t + 1)).maintenance for t in range(4)]
    assert any(maintenance.requests for maintenance in handed)
    assert world.blob_keys(shard_id, kind="rollup") == {
        key for key in world.blob_keys(shard_id, kind="rollup") if "/v1/" in key
    }


def test_expire_removes_the_writer_and_ends_the_handle(client: PersistClient, shard_id: ShardId):
    with client.open_writer(shard_id, SCHEMA, purpose="brief") as writer:
        writer.append([], lower=A(0), upper=A(1))
        (info,) = client.inspect(shard_id).writers
        assert (info.id, info.purpose, info.upper) == (writer.writer_id, "brief", 1)
    assert client.inspect(shard_id).writers == ()
    writer.expire()
    with pytest.raises(InvalidUsage, match="has expired"):
        writer.append([], lower=A(1), upper=A(2))


def test_a_writer_without_an_append_never_appears_in_state(world: World, client: PersistClient, shard_id: ShardId):
    """Spec B.3."""
    client.initialise(shard_id, SCHEMA)
    before = world.consensus.calls["compare_and_set"]
    with client.open_writer(shard_id, SCHEMA, purpose="stage only") as writer:
        writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1)).delete()
    assert world.consensus.calls["compare_and_set"] == before


# -- inline parts --------------------------------------------------------------------------------------------------------


def test_small_parts_stay_in_state_until_they_are_too_many(shard_id: ShardId):
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=100_000, inline_total_bytes_max=8_000))
    world = World(settings=settings)
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    kinds = []
    for time in range(20):
        assert isinstance(writer.append([row(time, "x", time)], lower=A(time), upper=A(time + 1)), Appended)
    for batch in writer.machine.state.trace.batches():
        kinds += [type(part) for part in batch.parts]
    assert kinds.count(InlinePart) >= 2
    assert kinds.count(HollowPart) >= 2
    assert writer.machine.state.trace.inline_bytes < 8_000
    assert contents(world.process(), shard_id, 19) == [(time, "x", 1) for time in range(20)]
    assert len(world.blob_keys(shard_id, kind="part")) == kinds.count(HollowPart)


def test_batches_flushed_for_an_append_that_then_lost_are_deleted(shard_id: ShardId):
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=100_000, inline_total_bytes_max=1))
    world = World(settings=settings)
    writer, rival = (world.process().open_writer(shard_id, SCHEMA, purpose="test") for _ in range(2))
    flush = write.flush_inline_parts

    def flush_then_lose(batches: list[Batch]) -> None:
        flush(batches)
        rival.append([], lower=A(0), upper=A(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "flush_inline_parts", flush_then_lose)
        outcome = writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(1))
    assert outcome == UpperMismatch(current=A(1), expected=A(0))
    assert world.blob_keys(shard_id, kind="part") == set()


# -- misuse --------------------------------------------------------------------------------------------------------------


def test_misuse_of_times_is_refused_with_its_values_and_leaves_no_blob(
    world: World, shard_id: ShardId, writer: WriteHandle
):
    cases: list[tuple[type[InvalidUsage], ErrorKind, str, list[object], Antichain, Antichain]] = [
        (UpdateNotBeyondLower, ErrorKind.UPDATE_NOT_BEYOND_LOWER, "time 2 .* lower {3}", [row(1, "a", 2)], A(3), A(5)),
        (UpdateBeyondUpper, ErrorKind.UPDATE_BEYOND_UPPER, "time 5 .* upper {5}", [row(1, "a", 5)], A(3), A(5)),
        (InvalidBounds, ErrorKind.INVALID_BOUNDS, "upper {3} is before lower {5}", [], A(5), A(3)),
        (InvalidBounds, ErrorKind.INVALID_BOUNDS, "upper {5} is before lower {}", [], EMPTY, A(5)),
        (InvalidEmptyTimeInterval, ErrorKind.INVALID_EMPTY_TIME_INTERVAL, "{3}", [row(1, "a", 3)], A(3), A(3)),
    ]
    for error, kind, text, updates, lower, upper in cases:
        for call in (
            lambda u=updates, lo=lower, up=upper: writer.compare_and_append(u, expected_upper=lo, new_upper=up),
            lambda u=updates, lo=lower, up=upper: writer.append(u, lower=lo, upper=up),
            lambda u=updates, lo=lower, up=upper: writer.batch(u, lower=lo, upper=up),
        ):
            with pytest.raises(error, match=text.replace("{", r"\{")) as raised:
                call()
            assert raised.value.kind is kind
    assert world.blob_keys(shard_id, kind="part") == set()
    assert writer.fetch_recent_upper() == A(0)


def test_updates_of_another_schema_name_the_columns(world: World, shard_id: ShardId, writer: WriteHandle):
    other = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("title", pa.string())]))
    updates = pa.Table.from_pylist(
        [{"key": {"id": 1}, "val": {"title": "a"}, "time": 0, "diff": 1}], schema=other.updates_schema
    )
    with pytest.raises(SchemaMismatch, match="title"):
        writer.append(updates, lower=A(0), upper=A(1))
    assert world.blob_keys(shard_id, kind="part") == set()


def test_a_batch_of_another_shard_is_refused(world: World, client: PersistClient, writer: WriteHandle):
    other_id = world.shard_id()
    other = client.open_writer(other_id, SCHEMA, purpose="other")
    batch = other.batch([row(1, "a", 0)], lower=A(0), upper=A(1))
    with pytest.raises(BatchNotFromThisShard, match=f"{other_id}.*{writer.shard_id}"):
        writer.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(1))
    with pytest.raises(BatchNotFromThisShard):
        writer.append_batch(batch, A(0), A(1))
    assert isinstance(other.append_batch(batch, A(0), A(1)), Appended)
    sent = other.batch([row(1, "a", 1)], lower=A(1), upper=A(2)).to_transmittable()
    with pytest.raises(BatchNotFromThisShard):
        writer.batch_from_transmittable(sent)


def test_a_batch_that_does_not_cover_its_append_is_refused_and_remains_usable(writer: WriteHandle):
    """Spec 10.6."""
    batch = writer.batch([row(1, "a", 3)], lower=A(2), upper=A(5))
    for lower, upper in [(A(0), A(5)), (A(2), A(6)), (A(0), A(9))]:
        with pytest.raises(InvalidBatchBounds, match=r"\[2,5\)"):
            writer.compare_and_append_batch([batch], expected_upper=lower, new_upper=upper)
    writer.append([], lower=A(0), upper=A(2))
    assert isinstance(writer.append_batch(batch, A(2), A(5)), Appended)


def test_a_batch_can_be_ended_once_only(writer: WriteHandle):
    """Spec 10.5."""
    sent, deleted, appended = (writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1)) for _ in range(3))
    data = sent.to_transmittable()
    deleted.delete()
    deleted.delete()
    writer.append_batch(appended, A(0), A(1))
    for batch, how in [(sent, "sent elsewhere"), (deleted, "deleted"), (appended, "appended")]:
        with pytest.raises(InvalidUsage, match=f"was already {how}"):
            writer.compare_and_append_batch([batch], expected_upper=A(1), new_upper=A(1))
    with pytest.raises(InvalidUsage, match="was already appended"):
        appended.delete()
    writer.batch_from_transmittable(data).delete()


def test_the_same_data_is_not_appended_twice_in_one_call(writer: WriteHandle):
    batch = writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1))
    with pytest.raises(InvalidUsage, match="twice"):
        writer.compare_and_append_batch([batch, batch], expected_upper=A(0), new_upper=A(1))
    data = batch.to_transmittable()
    twins = [writer.batch_from_transmittable(data) for _ in range(2)]
    with pytest.raises(InvalidUsage, match="twice"):
        writer.compare_and_append_batch(twins, expected_upper=A(0), new_upper=A(1))


def test_transmitted_batches_are_checked_for_damage_and_version(writer: WriteHandle):
    """Spec B.6."""
    data = writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1)).to_transmittable()
    with pytest.raises(CorruptData):
        writer.batch_from_transmittable(data[:-1])
    shard_id, _, hollow = decode_transmittable(data)
    with pytest.raises(Incompatible, match="99"):
        writer.batch_from_transmittable(encode_transmittable(shard_id, "99.0.0", hollow))


def test_regression_21_a_rewritten_batch_may_not_be_cut(writer: WriteHandle):
    """Regression for bug 21 of the specification: rewrites and truncation cannot be validated together."""
    batch = writer.batch([row(1, "a", 3)], lower=A(0), upper=A(9))
    hollow = batch.hollow
    rewritten = replace(hollow, parts=tuple(replace(part, ts_rewrite=A(4)) for part in hollow.parts))
    batch = writer.batch_from_transmittable(encode_transmittable(writer.shard_id, APPLIER_VERSION, rewritten))
    with pytest.raises(InvalidRewrite, match=r"upper \{8}"):
        writer.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(8))
    with pytest.raises(InvalidRewrite, match=r"before the lower \{5}"):
        writer.compare_and_append_batch([batch], expected_upper=A(5), new_upper=A(9))


def test_an_append_returns_its_answer_although_blobs_cannot_be_deleted(caplog: pytest.LogCaptureFixture):
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0), retry=RetrySettings(give_up_ms=100))
    world = World(settings=settings)
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    world.faults.fail_next("delete", happened=False, times=1000)
    outcome = writer.compare_and_append([row(1, "a", 5)], expected_upper=A(5), new_upper=A(6))
    assert outcome == UpperMismatch(current=A(0), expected=A(5))
    (key,) = world.blob_keys(writer.shard_id, kind="part")
    (record,) = [record for record in caplog.records if record.name == "persist_engine.client.write.handle"]
    assert key.partition("/")[2] in record.getMessage()
