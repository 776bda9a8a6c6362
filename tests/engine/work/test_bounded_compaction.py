"""How much space retractions take, as an inspection says it, and compactions that may read so many bytes only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.settings import CompactionSettings
from persist_engine.model.frontier import Antichain
from persist_engine.work.compact import compact_due
from persist_engine.work.repair.force import force_compaction
from persist_kit.recorded import SCHEMA, SETTINGS, RecordedShard


def written(*appends):
    """A shard with one append for each list of (id, diff)."""
    stores = RecordedShard()
    with stores.client().open_writer(stores.shard_id, SCHEMA, purpose="test") as writer:
        for time, rows in enumerate(appends):
            updates = [(((number, "a"), (1,)), time, diff) for number, diff in rows]
            stores.history += updates
            at, stores.upper = Antichain.of(time), time + 1
            writer.compare_and_append(updates, expected_upper=at, new_upper=Antichain.of(time + 1))
    return stores


def inspected(stores):
    return stores.client().inspect(stores.shard_id)


@pytest.mark.parametrize(
    ("retracted", "updates", "percent", "updates_merged"),
    [(0, 40, 100, 40), (20, 60, 300, 20), (40, 80, None, 0)],
)
def test_amplification_is_true_at_the_commit_of_a_retraction_and_after_the_merge(
    retracted, updates, percent, updates_merged
):
    stores = written([(number, 1) for number in range(40)], [(number, -1) for number in range(retracted)])
    before = inspected(stores)
    assert (before.updates, before.amplification_percent) == (updates, percent)
    stores.downgrade(1)
    force_compaction(stores.client().machine(stores.shard_id), full=True)
    after = inspected(stores)
    assert (after.updates, after.amplification_percent, after.merged_updates) == (updates_merged, 100, updates_merged)
    stores.check_contents(1)


def test_rows_that_count_several_times_are_no_amplification():
    stores = written([(number, 5) for number in range(10)])
    assert inspected(stores).amplification_percent == 20
    assert inspected(written([(1, -1)])).amplification_percent is None


def test_a_bounded_compaction_reads_no_more_and_later_ones_do_the_rest():
    stores = RecordedShard()
    stores.append(times=14)
    # Enough memory for one pass.
    settings = replace(SETTINGS, compaction=CompactionSettings(claim_ms=0))
    machine = stores.client(settings).machine(stores.shard_id)
    before = inspected(stores)
    least, total = before.smallest_request_bytes, before.compaction_bytes
    assert before.compaction_requests > 1
    assert 0 < least < total
    assert compact_due(machine, max_bytes=least - 1) == []
    assert inspected(stores).seqno == before.seqno, "nothing was claimed"
    left, runs = before, 0
    while left.compaction_requests and runs < before.compaction_requests:
        bound = left.compaction_bytes - 1 if left.compaction_requests > 1 else left.compaction_bytes
        done = compact_due(machine, max_bytes=bound)
        assert 0 < sum(outcome.bytes_read for outcome in done) <= bound
        left, runs = inspected(stores), runs + 1
    assert (left.compaction_requests, left.smallest_request_bytes, runs > 1) == (0, None, True)
    stores.check_contents()


def test_a_full_compaction_reaches_since_whatever_merges_are_in_progress():
    """It took four exertions, and three were made: what was retracted stayed until the next full compaction."""
    stores = RecordedShard()
    client = stores.client()
    with client.open_writer(stores.shard_id, SCHEMA, purpose="test") as writer:
        for time in range(4):
            rows = [(((1, "a"), (time,)), time, 1)] + ([(((1, "a"), (time - 1,)), time, -1)] if time else [])
            writer.compare_and_append(rows, expected_upper=Antichain.of(time), new_upper=Antichain.of(time + 1))
            machine = client.machine(stores.shard_id)
            if time >= 2:
                force_compaction(machine, full=True)
                stores.downgrade(time)
    force_compaction(machine, full=True)
    assert sum(batch.rows for batch in machine.refresh().trace.batches()) == 1
