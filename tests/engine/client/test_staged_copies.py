"""Copies of one staged batch: which copy owns the blobs, when they are deleted, and appending several copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from persist_engine import Antichain, Appended, PersistClient, UpperMismatch, WriteHandle
from persist_engine.base.errors import (
    BatchExpired,
    InvalidEmptyTimeInterval,
    InvalidUsage,
    Unavailable,
)
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, RetrySettings, Settings
from persist_engine.base.versioned import VersionedData
from persist_engine.client.write.outcomes import ProgressMismatch
from persist_engine.model.batch import HollowPart, InlinePart
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.model.ids import ShardId
from persist_engine.work.compact import compact
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.staged import named_keys, opened
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of


# -- deletion ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def twins() -> tuple[World, PersistClient, ShardId, bytes]:
    world, writer = opened(inline_part_bytes_max=0)
    data = writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1)).to_transmittable()
    return world, world.process(), writer.shard_id, data


def test_regression_deleting_a_copy_of_an_appended_batch_keeps_its_blobs(
    twins: tuple[World, PersistClient, ShardId, bytes],
):
    """Two processes made a batch of the same bytes. One appended it, the other deleted its copy."""
    world, client, shard_id, data = twins
    ours = client.open_writer(shard_id, SCHEMA, purpose="ours")
    theirs = world.process().open_writer(shard_id, SCHEMA, purpose="theirs")
    copy = ours.batch_from_transmittable(data)
    assert isinstance(theirs.append_batch(theirs.batch_from_transmittable(data), A(0), A(1)), Appended)
    copy.delete()
    assert contents(world.process(), shard_id, 0) == [(1, "a", 1)]
    with pytest.raises(InvalidUsage, match="already deleted"):
        copy.check_usable()


def test_regression_appending_a_second_copy_keeps_the_blobs_of_the_first(
    twins: tuple[World, PersistClient, ShardId, bytes],
):
    """The second append finds everything written and deletes its copy."""
    world, client, shard_id, data = twins
    for _ in range(2):
        with world.process().open_writer(shard_id, SCHEMA, purpose="driver") as driver:
            assert isinstance(driver.append_batch(driver.batch_from_transmittable(data), A(0), A(1)), Appended)
    assert contents(world.process(), shard_id, 0) == [(1, "a", 1)]


def test_deleting_a_copy_keeps_blobs_that_only_an_older_live_version_names(
    twins: tuple[World, PersistClient, ShardId, bytes],
):
    """The copy was appended and compacted away. A reader that holds the version before still reads its blobs."""
    world, client, shard_id, data = twins
    writer = client.open_writer(shard_id, SCHEMA, purpose="driver")
    assert isinstance(writer.append_batch(writer.batch_from_transmittable(data), A(0), A(1)), Appended)
    writer.append([row(2, "b", 1)], lower=A(1), upper=A(2))
    before = world.blob_keys(shard_id, kind="part")
    answer, _ = writer.machine.spine_exert(1000)
    for request in answer.requests:
        compact(writer.machine, request)
    assert not before & named_keys(writer)
    copy = writer.batch_from_transmittable(data)
    writer.delete_batches([copy])
    assert before <= world.blob_keys(shard_id, kind="part")


def test_copies_without_blobs_are_deleted_without_a_read_of_the_shard():
    """Each lost append of a sink's small batches cost an empty commit and a walk over all live versions."""
    world, writer = opened(inline_part_bytes_max=4096)
    copies = [
        writer.batch_from_transmittable(writer.batch([row(n, "a", 0)], lower=A(0), upper=A(1)).to_transmittable())
        for n in range(2)
    ]
    calls = dict(world.consensus.calls)
    writer.delete_batches(copies)
    assert dict(world.consensus.calls) == calls
    assert all(copy.is_deleted for copy in copies)


@pytest.fixture
def sent() -> tuple[World, WriteHandle, bytes]:
    """A shard of [0, 1), a writer to it, and the bytes of a batch of [1, 20) in several parts, one of them inline."""
    world = World(
        settings=Settings(
            batch=BatchSettings(inline_part_bytes_max=1200, target_part_bytes=4096),
            maintenance=MaintenanceSettings(gc_versions_min=1),
            compaction=CompactionSettings(claim_ms=0),
        )
    )
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="driver")
    writer.append([row(9, "z", 0)], lower=A(0), upper=A(1))
    batch = writer.batch([row(n, "x" * 40, n % 19 + 1) for n in range(100)], lower=A(1), upper=A(20))
    assert {type(part) for part in batch.hollow.parts} == {HollowPart, InlinePart}
    return world, writer, batch.to_transmittable()


def upto(time: int) -> list[tuple[int, str, int]]:
    """The contents of the shard of `sent` as of `time`, once the whole batch is appended."""
    rows = [(n, "x" * 40, 1) for n in range(100) if n % 19 + 1 <= time]
    return sorted([*rows, (9, "z", 1)])


def compact_and_collect(writer: WriteHandle, *, collects: bool) -> None:
    machine = writer.machine
    answer, _ = machine.spine_exert(1000)
    assert [compact(machine, request).applied for request in answer.requests] == [1]
    for _ in range(2 if collects else 0):
        write_rollup(machine)
        gc_and_truncate(machine)


@pytest.mark.parametrize("compacts", [False, True])
def test_regression_a_copy_appended_for_a_later_window_shares_no_blob_with_the_first(
    sent: tuple[World, WriteHandle, bytes], compacts: bool
):
    """The shard linked blobs again that it had unlinked. Collection had deleted them, or stopped for good."""
    world, writer, data = sent
    first = writer.batch_from_transmittable(data)
    assert isinstance(writer.compare_and_append_batch([first], expected_upper=A(1), new_upper=A(10)), Appended)
    linked = set(first.hollow.blob_keys())
    if compacts:
        compact_and_collect(writer, collects=False)
    second = writer.batch_from_transmittable(data)
    assert writer.append_batch(second, A(1), A(20)).upper == A(20)
    newest = list(writer.machine.state.trace.batches())[-1]
    assert newest.desc == Description(A(10), A(20), MINIMUM)
    assert linked.isdisjoint(newest.blob_keys())
    assert contents(world.process(), writer.shard_id, 9) == upto(9)
    assert contents(world.process(), writer.shard_id, 19) == upto(19)
    for _ in range(2):
        compact_and_collect(writer, collects=True)
        writer.append([], lower=writer.upper, upper=A(writer.upper.time + 1))
    assert contents(world.process(), writer.shard_id, 19) == upto(19)
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


def test_regression_a_copy_whose_blobs_were_collected_is_refused_and_may_be_staged_again(
    sent: tuple[World, WriteHandle, bytes],
):
    """It was linked and acknowledged, and its updates were lost."""
    world, writer, data = sent
    first = writer.batch_from_transmittable(data)
    assert isinstance(writer.compare_and_append_batch([first], expected_upper=A(1), new_upper=A(10)), Appended)
    compact_and_collect(writer, collects=True)
    second = writer.batch_from_transmittable(data)
    before = world.blob_keys(writer.shard_id, kind="part")
    with pytest.raises(
        BatchExpired, match=r"that may have been appended before is gone: stage the updates in \[10,20\)"
    ):
        writer.append_batch(second, A(1), A(20))
    second.mark_spent("given up")
    assert (writer.fetch_recent_upper(), world.blob_keys(writer.shard_id, kind="part")) == (A(10), before)
    again = [row(n, "x" * 40, n % 19 + 1) for n in range(100)]
    assert isinstance(writer.append(again, lower=A(1), upper=A(20)), Appended)
    assert contents(world.process(), writer.shard_id, 19) == upto(19)


def test_the_blobs_of_a_batch_appended_in_windows_are_kept_until_the_last_window(
    sent: tuple[World, WriteHandle, bytes],
):
    """Until then the holder of another copy may append the rest, even rewritten."""
    world, writer, data = sent
    writer.append([row(8, "other", 1)], lower=A(1), upper=A(5))
    one, two, three = (writer.batch_from_transmittable(data) for _ in range(3))
    two.rewrite_times(A(12), A(20))
    assert isinstance(writer.compare_and_append_batch([one], expected_upper=A(5), new_upper=A(9)), Appended)
    own = writer.batch([row(200, "own", 12)], lower=A(9), upper=A(20))
    outcome = writer.compare_and_append_batch([two, own], expected_upper=A(9), new_upper=A(20))
    assert isinstance(outcome, Appended)
    early = [(n, "x" * 40, 1) for n in range(100) if 5 <= n % 19 + 1 < 9]
    doubled = [(n, "x" * 40, 2) for n in range(100) if 5 <= n % 19 + 1 < 9]
    others = [(n, "x" * 40, 1) for n in range(100) if not 5 <= n % 19 + 1 < 9]
    assert contents(world.process(), writer.shard_id, 11) == sorted([*early, (8, "other", 1), (9, "z", 1)])
    assert (
        contents(world.process(), writer.shard_id, 12)[:5]
        == sorted([*doubled, *others, (8, "other", 1), (9, "z", 1)])[:5]
    )
    for batch in (one, two, own):
        with pytest.raises(InvalidUsage, match="already appended"):
            batch.check_usable()
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)
    three.delete()
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


@contextmanager
def damaged_log(world: World, shard_id: ShardId) -> Iterator[None]:
    """Meanwhile the oldest live version of the shard does not decode. Processes that know a newer one do not read it."""
    log = world.consensus._inner._logs[str(shard_id)]  # type: ignore[attr-defined]
    oldest = log[0]
    log[0] = VersionedData(oldest.seqno, b"damaged")
    yield
    log[0] = oldest


def test_regression_an_append_is_acknowledged_although_its_surplus_blobs_cannot_be_deleted(
    sent: tuple[World, WriteHandle, bytes], caplog: pytest.LogCaptureFixture
):
    """It was committed, and then its caller got only an error of the clean-up."""
    world, writer, data = sent
    first, second = (writer.batch_from_transmittable(data) for _ in range(2))
    assert isinstance(writer.compare_and_append_batch([first], expected_upper=A(1), new_upper=A(10)), Appended)
    with damaged_log(world, writer.shard_id):
        assert writer.append_batch(second, A(1), A(20)).upper == A(20)
    assert "behind: " in caplog.text
    assert contents(world.process(), writer.shard_id, 19) == upto(19)


def test_a_refused_append_stages_nothing_anew(sent: tuple[World, WriteHandle, bytes]):
    world, writer, data = sent
    other = world.process().open_writer(writer.shard_id, SCHEMA, purpose="other")
    other.append([], lower=A(1), upper=A(15))
    batch = writer.batch_from_transmittable(data)
    world.faults.fail_next("set", happened=False)
    outcome = writer.compare_and_append_batch([batch], expected_upper=A(5), new_upper=A(20))
    assert outcome == UpperMismatch(current=A(15), expected=A(5))
    with pytest.raises(InvalidEmptyTimeInterval):
        writer.compare_and_append_batch([batch], expected_upper=A(15), new_upper=A(15))
    assert world.faults.injected == 0, "no blob was written"
    batch.delete()


def test_a_sink_appends_again_without_staging_anew_unless_it_appended_past_the_batchs_lower(
    sent: tuple[World, WriteHandle, bytes],
):
    """Its progress proves that no copy was appended: an append would have changed the token, or its upper past the lower."""
    world, writer, data = sent

    def append(lower: int, upper: int, token: bytes, expected: bytes | None) -> set[str]:
        batch = writer.batch_from_transmittable(data)
        outcome = writer.compare_and_append_batch(
            [batch], expected_upper=A(lower), new_upper=A(upper), progress=("sink", token), expected_progress=expected
        )
        if isinstance(outcome, Appended):
            named = set(list(writer.machine.state.trace.batches())[-1].blob_keys())
            return named & set(batch.hollow.blob_keys())
        batch.mark_spent("left alone")
        assert isinstance(outcome, ProgressMismatch)
        return set()

    world.process().open_writer(writer.shard_id, SCHEMA, purpose="other").append([], lower=A(1), upper=A(3))
    assert append(3, 10, b"1", None), "linked as it lies"
    assert append(10, 15, b"2", None) == set(), "refused"
    assert writer.fetch_recent_upper() == A(10)
    assert append(10, 20, b"2", b"1") == set()
    assert writer.fetch_recent_upper() == A(20)
    assert len(contents(world.process(), writer.shard_id, 19)) == len([n for n in range(100) if n % 19 + 1 >= 3]) + 1


def test_a_batch_whose_append_has_an_unknown_end_is_not_linked_a_second_time():
    """The append took place without an answer. The rest is staged anew, and its deletion deletes no linked blob."""
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0), retry=RetrySettings(give_up_ms=1)))
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    again, deleted = (writer.batch([row(n, "a", 0), row(n, "b", 9)], lower=A(0), upper=A(20)) for n in (1, 2))
    world.faults.fail_next("compare_and_set", happened=True, times=1000)
    with pytest.raises(Unavailable):
        writer.compare_and_append_batch([again, deleted], expected_upper=A(0), new_upper=A(5))
    world.faults.heal()
    linked = {*again.hollow.blob_keys(), *deleted.hollow.blob_keys()}
    deleted.delete()
    assert isinstance(writer.append_batch(again, A(0), A(20)), Appended)
    assert linked.isdisjoint(list(writer.machine.state.trace.batches())[-1].blob_keys())
    assert contents(world.process(), writer.shard_id, 19) == [(1, "a", 1), (1, "b", 1), (2, "a", 1)]


def test_several_unappended_copies_are_deleted_with_one_read_of_the_shard():
    world, writer = opened(inline_part_bytes_max=0)
    copies = [
        writer.batch_from_transmittable(writer.batch([row(n, "a", 0)], lower=A(0), upper=A(1)).to_transmittable())
        for n in range(5)
    ]
    writer.append([row(9, "other", 0)], lower=A(0), upper=A(1))
    scans = world.consensus.calls["scan"]
    writer.delete_batches(copies)
    writer.delete_batches(copies)
    assert world.consensus.calls["scan"] - scans <= 6
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


def test_regression_an_append_stands_although_the_check_of_its_surplus_blobs_fails(
    sent: tuple[World, WriteHandle, bytes], caplog: pytest.LogCaptureFixture
):
    """The check which batches link the copy's blobs failed. The answer was lost, and the clean-up deleted linked blobs."""
    world, writer, data = sent
    writer.append([row(8, "other", 1)], lower=A(1), upper=A(5))
    copy = writer.batch_from_transmittable(data)
    own = writer.batch([row(n, "y" * 40, 5) for n in range(200, 300)], lower=A(5), upper=A(20))
    assert own.has_blobs
    with damaged_log(world, writer.shard_id):
        outcome = writer.compare_and_append_batch([copy, own], expected_upper=A(5), new_upper=A(20))
    assert isinstance(outcome, Appended)
    for batch in (copy, own):
        with pytest.raises(InvalidUsage, match="already"):
            batch.delete()
    assert named_keys(writer) <= world.blob_keys(writer.shard_id, kind="part")
    assert "behind: " in caplog.text


# -- deletion that is interrupted ---------------------------------------------------------------------------------------


def test_regression_a_partly_deleted_batch_is_refused_by_an_append():
    """Some of its blobs were deleted already. The append was acknowledged and could never be read."""
    settings = Settings(
        batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4096), retry=RetrySettings(give_up_ms=1)
    )
    world = World(settings=settings)
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    batch = writer.batch([row(n, "x" * 40, 0) for n in range(100)], lower=A(0), upper=A(1))
    first, *_, last = batch.hollow.blob_keys()
    assert first != last
    world.faults.fail_next("delete", happened=False, matching=last, times=1000)
    with pytest.raises(Unavailable):
        batch.delete()
    with pytest.raises(InvalidUsage, match="already deleted in part"):
        writer.append_batch(batch, A(0), A(1))
    with pytest.raises(InvalidUsage, match="already deleted in part"):
        batch.to_transmittable()
    world.faults.heal()
    writer.delete_batches([batch])
    assert batch.is_deleted
    assert not world.blob_keys(writer.shard_id, kind="part")
