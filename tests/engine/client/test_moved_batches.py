"""Batches that lost appends and were moved: linked without restaging; read, compacted and verified at their new time."""

from __future__ import annotations

from typing import Any

import pytest
from persist_engine import Antichain, Appended, PersistClient, ShardId, UpperMismatch, WriteHandle
from persist_engine.base.errors import Unavailable
from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.client.write.batch import Batch
from persist_engine.client.write.joined import gathered
from persist_engine.client.write.outcomes import ProgressMismatch
from persist_engine.model.batch import HollowRun, InlinePart
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_kit.staged import named_keys, opened
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of
ROWS = 300


def sent(writer: WriteHandle, *, first: int = 0) -> bytes:
    """A batch of [0, 5) in several blobs, as a task sends it: every key at every time of `times`."""
    times = [2, 3, 2]
    updates = [row(key, "x" * 20, time) for key in range(first, first + ROWS) for time in times]
    batch = writer.batch(updates, lower=A(0), upper=A(5))
    assert batch.has_blobs
    return batch.to_transmittable()


def raced(writer: WriteHandle, rival: WriteHandle, batches: list[Batch], *, times: int, **progress: Any) -> int:
    """Loses the append of `batches` so often to a rival's commit, moves them each time, then wins. Returns the time."""
    lower, time = A(0), 4
    for turn in range(times):
        upper = rival.fetch_recent_upper()
        rival.compare_and_append(
            [row(-turn - 1, "rival", upper.time)], expected_upper=upper, new_upper=A(upper.time + 10)
        )
        answer = writer.compare_and_append_batch(batches, expected_upper=lower, new_upper=A(time + 1), **progress)
        assert isinstance(answer, UpperMismatch)
        lower, time = answer.current, answer.current.time + turn
        for batch in batches:
            batch.rewrite_times(A(time), A(time + 1))
    answer = writer.compare_and_append_batch(batches, expected_upper=lower, new_upper=A(time + 1), **progress)
    assert isinstance(answer, Appended)
    return time


class Uploads(MemBlob):
    """A store that notes the keys of the parts uploaded."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        if "/n" in key:
            self.keys.append(key)
        super().set(key, value)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_moved_batch_owes_no_deletion(rows: int) -> None:
    """Its bounds are narrower than staged, but hide no rows. It was taken for one with hidden rows, retracted since 1970."""
    world, writer = opened()
    client, shard_id = world.process(), writer.shard_id
    rival = client.open_writer(shard_id, SCHEMA, purpose="rival")
    batch = writer.batch([row(key, "x", 2) for key in range(rows)], lower=A(0), upper=A(5))
    raced(writer, rival, [batch], times=2)
    assert client.inspect(shard_id).owed_from_ms is None
    # A batch that is really cut hides rows.
    upper = writer.fetch_recent_upper()
    wide = writer.batch([row(1, "x", upper.time)], lower=upper, upper=A(99))
    answer = writer.compare_and_append_batch([wide], expected_upper=upper, new_upper=A(95))
    assert isinstance(answer, Appended)
    assert client.inspect(shard_id).owed_from_ms is not None


def noted(**batch: Any) -> tuple[World, WriteHandle, Uploads]:
    """A new world whose uploads are noted, and the writer of a new shard with the batch settings `batch`."""
    world, uploads = World(settings=Settings(batch=BatchSettings(**batch))), Uploads()
    world.blob = uploads
    return world, world.process().open_writer(world.shard_id(), SCHEMA, purpose="test"), uploads


def changed(client: PersistClient, shard_id: ShardId, since: int | None, upto: int) -> list[tuple[int, int, int]]:
    """The changes as (id, time, diff)."""
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        table = reader.changes(since, upto).to_table()
    return [(each["key"]["id"], each["time"], each["diff"]) for each in table.to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("listed", [False, True], ids=["parts", "listings"])
def test_the_only_copy_of_a_batch_is_linked_without_restaging_after_any_number_of_moves(times: int, listed: bool):
    """The driver downloaded, merged and uploaded all of it for every append that it lost."""
    runs = {"runs_max": 2, "run_parts_max": 2} if listed else {}
    world, writer, uploads = noted(inline_part_bytes_max=0, target_part_bytes=4096, **runs)
    rival = world.process(settings=Settings()).open_writer(writer.shard_id, SCHEMA, purpose="rival")
    staged = [sent(writer, first=first) for first in (0, ROWS)]
    batches = [writer.batch_from_transmittable(data, is_only_copy=True) for data in staged]
    assert all(any(isinstance(part, HollowRun) for part in each.hollow.parts) == listed for each in batches)
    keys = [key for batch in batches for key in batch.hollow.blob_keys()]
    uploads.keys.clear()
    time = raced(writer, rival, batches, times=times, progress=("sink", b"1"))
    assert uploads.keys == []
    newest = list(writer.machine.state.trace.batches())[-1]
    assert list(newest.blob_keys()) == keys

    ours = [(key, "x" * 20, 3) for key in range(2 * ROWS)]
    theirs = sorted((-turn - 1, "rival", 1) for turn in range(times))
    lower = newest.desc.lower.time

    def check(client: PersistClient) -> None:
        if lower < time:
            assert contents(client, writer.shard_id, time - 1) == theirs
        assert contents(client, writer.shard_id, time) == [*theirs, *ours]
        assert changed(client, writer.shard_id, lower - 1, time) == [(key, time, 3) for key in range(2 * ROWS)]
        assert len(changed(client, writer.shard_id, None, time)) == 2 * ROWS + times
        with client.open_leased_reader(writer.shard_id, purpose="test") as reader:
            assert reader.snapshot(time).count() == 6 * ROWS + times
            splits = reader.snapshot(time).splits(3)
            retry = writer.machine.retry
            rows = [rows.num_rows for split in splits for rows in split.to_batches(reader.blob, retry=retry)]
            assert sum(rows) == 2 * ROWS + times
        assert verify_shard(writer.machine).findings == []

    check(world.process())
    writer.append([row(9999, "later", time + 1)], lower=A(time + 1), upper=A(time + 2))
    applied = 0
    while (answer := writer.machine.spine_exert(100_000)[0]).requests:
        applied += sum(compact(writer.machine, request).applied for request in answer.requests)
    assert applied > 0
    assert not set(keys) & {key.partition("/")[2] for key in named_keys(writer)}
    check(world.process())


def test_a_moved_batch_with_other_copies_is_staged_anew():
    """The reason for `is_only_copy`: without it the shard may have unlinked the blobs already."""
    world, writer = opened(inline_part_bytes_max=0, target_part_bytes=4096)
    rival = world.process().open_writer(writer.shard_id, SCHEMA, purpose="rival")
    batch = writer.batch_from_transmittable(sent(writer))
    keys = set(batch.hollow.blob_keys())
    raced(writer, rival, [batch], times=1)
    assert keys.isdisjoint(list(writer.machine.state.trace.batches())[-1].blob_keys())


def test_the_only_copy_is_deleted_without_a_read_of_the_shard():
    world, writer = opened(inline_part_bytes_max=0, target_part_bytes=4096)
    batch = writer.batch_from_transmittable(sent(writer), is_only_copy=True)
    writer.append([row(1, "other", 0)], lower=A(0), upper=A(9))
    calls = dict(world.consensus.calls)
    writer.delete_batches([batch])
    assert dict(world.consensus.calls) == calls
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


def test_the_second_driver_of_a_run_deletes_only_its_own_staged_blobs():
    """Both stage the whole run. One appends it, the other finds it done. No blob of either belongs to the other."""
    world, writer = opened(inline_part_bytes_max=0, target_part_bytes=4096)
    second = world.process().open_writer(writer.shard_id, SCHEMA, purpose="second driver")
    rival = world.process().open_writer(writer.shard_id, SCHEMA, purpose="rival")
    batch = writer.batch_from_transmittable(sent(writer), is_only_copy=True)
    others = second.batch_from_transmittable(sent(second), is_only_copy=True)
    time = raced(writer, rival, [batch], times=2, progress=("sink", b"run"))
    others.rewrite_times(A(time), A(time + 1))
    answer = second.compare_and_append_batch(
        [others], expected_upper=A(0), new_upper=A(time + 1), progress=("sink", b"run")
    )
    assert isinstance(answer, ProgressMismatch)
    second.delete_batches([others])
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)
    assert len(contents(world.process(), writer.shard_id, time)) == ROWS + 2


@pytest.mark.parametrize("happened", [False, True])
def test_the_only_copy_is_treated_as_a_copy_after_an_append_of_unknown_outcome(happened: bool):
    settings = Settings(
        batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4096), retry=RetrySettings(give_up_ms=1)
    )
    world = World(settings=settings)
    writer = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    rival = world.process().open_writer(writer.shard_id, SCHEMA, purpose="rival")
    batch = writer.batch_from_transmittable(sent(writer), is_only_copy=True)
    rival.append([], lower=A(0), upper=A(10))
    assert isinstance(writer.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(5)), UpperMismatch)
    batch.rewrite_times(A(12), A(13))
    assert not batch.may_have_copies
    world.faults.fail_next("compare_and_set", happened=happened, times=1000)
    with pytest.raises(Unavailable):
        writer.compare_and_append_batch([batch], expected_upper=A(10), new_upper=A(13))
    world.faults.heal()
    assert batch.may_have_copies
    writer.delete_batches([batch])
    assert writer.fetch_recent_upper() == A(13 if happened else 10)
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)
    assert len(world.blob_keys(writer.shard_id, kind="part")) > 1 if happened else named_keys(writer) == set()


# -- small parts, gathered before they are tried -------------------------------------------------------------------------


def test_gathered_parts_are_appended_again_without_another_upload():
    """Each attempt joined the small parts, uploaded the result and deleted it again: slower than the rival writers."""
    world, writer, uploads = noted(target_part_bytes=1 << 20)
    rival = world.process().open_writer(writer.shard_id, SCHEMA, purpose="rival")
    updates = [[row(key * 9 + n, f"{key:x<900}{n}", 2) for n in range(2)] for key in range(8)]
    batches = [writer.batch(each, lower=A(0), upper=A(5)) for each in updates]
    assert not any(batch.has_blobs for batch in batches)
    uploads.keys.clear()
    machine, desc = writer.machine, Description(A(0), A(5), MINIMUM)
    one = gathered(batches, desc, store=machine, schema=SCHEMA, schema_id=writer.schema_id)
    assert [len(batch.hollow.parts) for batch in one] == [1]
    assert len(uploads.keys) == 1
    assert gathered(one, desc, store=machine, schema=SCHEMA, schema_id=writer.schema_id) == one
    time = raced(writer, rival, one, times=3)
    assert [f"{writer.shard_id}/{key}" for key in one[0].hollow.blob_keys()] == uploads.keys
    assert len(contents(world.process(), writer.shard_id, time)) == 16 + 3
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)


def test_gathering_joins_inline_parts_only():
    world, writer = opened(inline_part_bytes_max=1500, target_part_bytes=4096)
    mixed = [
        writer.batch([row(n, "x" * 40, n % 5) for n in range(first, first + 100)], lower=A(0), upper=A(5))
        for first in (0, 100)
    ]
    small = [writer.batch([row(n, "y", 1)], lower=A(0), upper=A(5)) for n in (200, 201)]
    blobs = {key for batch in mixed for key in batch.hollow.blob_keys()}
    assert blobs
    assert sum(isinstance(part, InlinePart) for batch in (*mixed, *small) for part in batch.hollow.parts) > 2
    for batch in (*mixed, *small):
        batch.rewrite_times(A(6), A(7))
    writer.append([], lower=A(0), upper=A(6))
    args: dict[str, Any] = {"store": writer.machine, "schema": SCHEMA, "schema_id": writer.schema_id}
    together = gathered([*mixed, *small], Description(A(6), A(7), MINIMUM), **args)
    assert blobs <= {key for batch in together for key in batch.hollow.blob_keys()}
    assert sum(isinstance(part, InlinePart) for batch in together for part in batch.hollow.parts) <= 1
    assert sum(batch.rows for batch in together) == 202
    assert isinstance(
        writer.compare_and_append_batch(together, expected_upper=A(6), new_upper=A(7)),
        Appended,
    )
    assert contents(world.process(), writer.shard_id, 6) == [
        *((n, "x" * 40, 1) for n in range(200)),
        (200, "y", 1),
        (201, "y", 1),
    ]
    assert verify_shard(writer.machine).findings == []


def test_batches_that_cannot_be_joined_are_appended_unchanged():
    _, writer = opened()
    batches = [writer.batch([row(1, "x", 0, 2**62)], lower=A(0), upper=A(1)) for _ in range(2)]
    args: dict[str, Any] = {"store": writer.machine, "schema": SCHEMA, "schema_id": writer.schema_id}
    assert gathered(batches, Description(A(0), A(1), MINIMUM), **args) == batches
    assert isinstance(writer.compare_and_append_batch(batches, expected_upper=A(0), new_upper=A(1)), Appended)
