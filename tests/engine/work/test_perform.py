"""The maintenance that commits return, performed until nothing is left."""

from functools import partial

import pytest
from persist_engine.base.errors import CorruptData, MissingBlob, Unavailable
from persist_engine.codec.keys import blob_key
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.work.attempts import Attempts
from persist_engine.work.compact import compact_due
from persist_engine.work.outcome import Ending
from persist_engine.work.perform import perform, perform_due
from persist_engine.work.repair.force import force_compaction
from persist_kit.recorded import SCHEMA, RecordedShard

at = Antichain.of


@pytest.mark.slow
def test_performing_the_maintenance_of_appends_keeps_the_shard_small():
    """Spec 14.8."""
    stores = RecordedShard()
    client = stores.client()
    with client.open_writer(stores.shard_id, SCHEMA, purpose="test") as writer:
        machine = client.machine(stores.shard_id)
        for i in range(150):
            updates = [(((j, "a"), (i % 2,)), i, 1) for j in range(10)]
            stores.history += updates
            stores.upper = i + 1
            appended = writer.compare_and_append(updates, expected_upper=at(i), new_upper=at(i + 1))
            perform(machine, appended.maintenance)
    state = machine.refresh()
    bounds = machine.versions.live_diff_bounds(stores.shard_id)
    assert bounds.count < 60
    assert state.trace.batch_count < 40
    assert len(stores.blobs()) < 150  # fewer than the appended parts alone
    stores.check_nothing_lost()
    stores.check_contents(149)


@pytest.mark.slow
def test_perform_due_performs_all_work_of_an_unmaintained_shard():
    """Spec 13.11."""
    stores = RecordedShard()
    stores.append(times=40)
    machine = stores.client().machine(stores.shard_id)
    read: list[tuple[int, int]] = []
    collected: list[tuple[int, int, int]] = []
    outcomes = perform_due(
        machine,
        on_read=lambda *progress: read.append(progress),
        on_progress=lambda *progress: collected.append(progress),
    )
    assert 0 < sum(count for count, _ in read) <= read[-1][1], "a waiting caller sees progress"
    assert collected[-1] == (
        collected[-1][1],
        collected[-1][1],
        sum(o.blobs_deleted for o in outcomes if o.type == "GC"),
    )
    kinds = {outcome.type for outcome in outcomes if outcome.ending is Ending.SUCCEEDED}
    assert kinds == {"Rollup", "GC", "Compaction"}
    assert [o for o in perform_due(machine) if o.type != "Compaction" and o.ending is Ending.SUCCEEDED] == []
    stores.check_nothing_lost()
    stores.check_contents()


def damaged(stores, *, count):
    """A shard with several compactions due, some of which meet a missing part; its machine, and the parts."""
    stores.append(times=56)
    machine = stores.client().machine(stores.shard_id)
    due = machine.refresh().trace.fueled_requests(claimed_before_ms=1 << 62)
    assert len(due) >= 3
    gone = [next(key for _, batch in req.inputs for key in batch.blob_keys()) for req in due[:count]]
    for key in gone:
        stores.blob.delete(blob_key(stores.shard_id, key))
    return machine, due, gone


@pytest.mark.slow
@pytest.mark.parametrize("work", [compact_due, perform_due, partial(force_compaction, full=False)])
def test_other_due_work_is_done_beside_a_failing_compaction_and_each_failure_is_named(work):
    stores = RecordedShard()
    machine, due, gone = damaged(stores, count=2)
    with pytest.raises(MissingBlob) as raised:
        work(machine)
    text = str(raised.value)
    assert text.startswith(f"2 of what was due on shard {stores.shard_id} failed, the rest was done: ")
    for req, key in zip(due, gone, strict=False):
        assert f"compaction {req.id} {req.desc}: MissingBlob: blob {stores.shard_id}/{key} is missing" in text
    assert isinstance(raised.value.__cause__, ExceptionGroup)
    left = {batch.id for batch in machine.refresh().trace.spine_batches() if not batch.is_compact}
    assert left == {req.id for req in due[:2]}
    bounds = machine.versions.live_diff_bounds(stores.shard_id)
    assert (bounds.count < 20) == (work is perform_due), "collected all the same"


@pytest.mark.slow
def test_maintenance_of_an_append_is_performed_beside_a_failing_compaction():
    stores = RecordedShard()
    machine, due, _ = damaged(stores, count=1)
    with pytest.raises(MissingBlob, match="1 of what was due"):
        perform(machine, Maintenance(rollup=machine.state.seqno, gc=None, requests=tuple(due)))
    left = {batch.id for batch in machine.refresh().trace.spine_batches() if not batch.is_compact}
    assert (due[0].id in left, due[1].id in left) == (True, False)


def test_an_unavailable_store_ends_the_round_and_a_bug_is_logged_as_one():
    attempts = Attempts(ShardId.new())
    with attempts.of("a"):
        raise CorruptData("x", key="k")
    with (
        pytest.raises(CorruptData, match="ended early: a: CorruptData: x; b: Unavailable: away") as raised,
        attempts.of("b"),
    ):
        raise Unavailable("away")
    assert raised.value.detail == {"key": "k"}
    attempts = Attempts(ShardId.new())
    for what, error in (("a", CorruptData("x", key="k")), ("b", ValueError("odd"))):
        with attempts.of(what):
            raise error
    with pytest.raises(ExceptionGroup, match="a: CorruptData: x; b: ValueError: odd"):
        attempts.end()
