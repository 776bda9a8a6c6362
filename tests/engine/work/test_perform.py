"""Work that commits leave behind, done until nothing is left."""

from persist_engine.model.frontier import Antichain
from persist_engine.testing.recorded import SCHEMA, RecordedShard
from persist_engine.work.outcome import Ending
from persist_engine.work.perform import perform, perform_due

at = Antichain.of


def test_performing_what_appends_leave_behind_keeps_the_shard_small():
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
    assert len(stores.blobs()) < 150  # fewer than the parts appended alone
    stores.check_nothing_lost()
    stores.check_contents(149)


def test_perform_due_does_everything_for_a_shard_that_nobody_maintains():
    stores = RecordedShard()
    stores.append(times=40)
    machine = stores.client().machine(stores.shard_id)
    read: list[tuple[int, int]] = []
    collected: list[tuple[int, int, int]] = []
    outcomes = perform_due(
        machine, on_read=lambda *told: read.append(told), on_progress=lambda *told: collected.append(told)
    )
    assert 0 < sum(count for count, _ in read) <= read[-1][1], "who waits for it sees it go on"
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
