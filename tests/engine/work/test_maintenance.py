"""Compaction on real in-memory stores: contents never change, whichever process is killed at whichever call."""

import contextlib
import itertools
from dataclasses import replace

import pytest
from persist_engine.base.settings import CompactionSettings, RetrySettings, Settings
from persist_engine.codec.keys import blob_key
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.frontier import Antichain
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.outcome import Ending
from persist_kit.recorded import SCHEMA, SETTINGS, InRanges, Killed, Mortality, RecordedShard, connect

at = Antichain.of


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes_max", [0, 4096, 1 << 30])
def test_compaction_keeps_contents_at_every_readable_time_and_merges_runs(memory_bytes_max):
    """Spec 13.5."""
    settings = Settings(
        batch=SETTINGS.batch,
        maintenance=SETTINGS.maintenance,
        compaction=CompactionSettings(memory_bytes_max=memory_bytes_max, claim_ms=0),
        retry=SETTINGS.retry,
    )
    stores = RecordedShard()
    stores.append(times=16)
    stores.downgrade(100)
    machine = stores.client(settings).machine(stores.shard_id)
    machine.refresh()
    runs_before = sum(len(batch.run_metas) for batch in machine.state.trace.batches())
    read = []
    outcomes = compact_due(machine, on_read=lambda count, total: read.append((count, total)))
    assert outcomes
    assert all(outcome.ending is Ending.SUCCEEDED for outcome in outcomes)
    assert sum(count for count, _ in read) == sum(outcome.bytes_read for outcome in outcomes)
    assert sum(len(batch.run_metas) for batch in machine.state.trace.batches()) < runs_before
    stores.check_contents(100)
    for batch in machine.state.trace.batches():
        assert sum(part.rows for part in batch.parts) == batch.rows
    # These merges came due after the last look at the spine. The second pass finds nothing.
    assert [o for o in compact_due(machine) if o.rows_after != o.rows_before] == []


@pytest.mark.slow
def test_updates_that_cancel_compact_into_a_batch_without_parts():
    stores = RecordedShard()
    insert = [((i, "a"), (1,)) for i in range(50)]
    with stores.client().open_writer(stores.shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([], expected_upper=at(0), new_upper=at(1))
        stores.downgrade(5)
        for i in range(1, 5):
            updates = [(row, i, 1 if i % 2 == 0 else -1) for row in insert]
            writer.compare_and_append(updates, expected_upper=at(i), new_upper=at(i + 1))
        for i in range(5, 20):
            writer.compare_and_append([], expected_upper=at(i), new_upper=at(i + 1))
    roomy = replace(SETTINGS, compaction=CompactionSettings(memory_bytes_max=1 << 20, claim_ms=0))
    machine = stores.client(roomy).machine(stores.shard_id)
    merged = compact_due(machine)[0]
    assert (merged.rows_before, merged.rows_after, merged.bytes_written) == (100, 0, 0)
    emptied = next(batch for batch in machine.state.trace.batches() if batch.desc.lower == at(0))
    assert (emptied.parts, emptied.rows, emptied.desc.since) == ((), 0, at(5))
    assert stores.contents(5) == ({}, 0)


@pytest.mark.slow
def test_only_the_output_of_a_late_compaction_is_deleted():
    """Spec 13.6."""
    stores = RecordedShard()
    stores.append(times=8)
    first, second = (stores.client().machine(stores.shard_id) for _ in range(2))
    first.refresh(), second.refresh()
    requests = first.claim_compactions(max_requests=10)[0].requests
    assert requests
    stores.append(times=24)
    assert all(outcome.ending is Ending.SUCCEEDED for outcome in compact_due(second))
    blobs = stores.blobs()
    late = [compact(first, req) for req in requests]
    assert Ending.CONFLICT in {outcome.ending for outcome in late}
    conflict = next(outcome for outcome in late if outcome.ending is Ending.CONFLICT)
    assert conflict.blobs_deleted > 0
    assert conflict.applied == 0
    assert blobs <= stores.blobs()
    stores.check_nothing_lost()
    stores.check_contents()


def test_a_compaction_output_with_an_unknown_commit_is_kept():
    """Regression for bug 1b: an unanswered attempt may have linked the output."""
    stores = RecordedShard()
    stores.append(times=8)
    faults = Faults()
    machine = connect(stores.blob, FaultyConsensus(stores.consensus, faults)).machine(stores.shard_id)
    machine.refresh()
    requests = machine.claim_compactions(max_requests=10)[0].requests
    for req in requests:
        faults.fail_next("compare_and_set", happened=True)
        compact(machine, req)
    assert faults.injected == len(requests)
    stores.check_nothing_lost()
    stores.check_contents()


@pytest.mark.slow
@pytest.mark.parametrize("merger", [None, InRanges(3)], ids=["whole", "in-ranges"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_compaction_killed_at_any_call_is_repeated_by_the_next(after, merger):
    """Spec 1.10."""
    finished = False
    prepared = RecordedShard(seed=2)
    prepared.append(times=6, rows=8)
    for dies_at in itertools.count(1):
        stores = prepared.copy()
        mortality = Mortality(dies_at, after=after)
        try:
            mortal = connect(mortality.wrap(stores.blob), mortality.wrap(stores.consensus))
            compact_due(mortal.machine(stores.shard_id), merger=merger)
            finished = True
        except Killed:
            pass
        stores.check_nothing_lost()
        compact_due(stores.client().machine(stores.shard_id), merger=merger)
        stores.check_nothing_lost()
        stores.check_contents()
        if finished:
            break
    assert dies_at > 5


@pytest.mark.slow
@pytest.mark.parametrize("merger", [None, InRanges(3)], ids=["whole", "in-ranges"])
def test_a_killed_compaction_loses_at_most_the_chunk_that_it_was_at(merger):
    """Spec 13.10."""
    prepared = RecordedShard(seed=2)
    prepared.append(times=16, rows=8)
    left, outcomes = [], []
    for dies_at in itertools.count(1):
        stores = prepared.copy()
        mortality = Mortality(dies_at, after=False)
        mortal = mortality.wrap(stores.blob), mortality.wrap(stores.consensus)
        with contextlib.suppress(Killed):
            outcomes = compact_due(connect(*mortal).machine(stores.shard_id), merger=merger)
        state = stores.client().machine(stores.shard_id).refresh()
        left.append(sum(len(batch.run_metas) for batch in state.trace.batches()))
        if left[-1] < left[0]:
            assert left[-1] <= left[-2], "what was swapped in before an earlier kill is gone"
        if len(left) > 1 and left[-1] < left[-2]:
            leaked = stores.blobs() - stores.named_by_live_states()
            assert leaked == set(), "a chunk that was written waited for the next one"
        if outcomes:
            break
    assert len(set(left)) - 1 > len(outcomes), "no compaction had several chunks"


@pytest.mark.parametrize("memory_bytes_max", [4096, 1 << 20], ids=["in pieces", "at once"])
def test_a_failed_compaction_deletes_its_output_except_the_committed_part(memory_bytes_max):
    stores = RecordedShard()
    stores.append(times=8)
    stores.downgrade(70)
    faults = Faults()
    settings = Settings(
        batch=SETTINGS.batch,
        compaction=CompactionSettings(memory_bytes_max=memory_bytes_max, claim_ms=0),
        retry=RetrySettings(initial_ms=0.1, give_up_ms=5),
    )
    machine = connect(FaultyBlob(stores.blob, faults), stores.consensus, settings).machine(stores.shard_id)
    machine.refresh()
    (req, *_) = machine.claim_compactions(max_requests=10)[0].requests
    before = stores.blobs()
    lost = [part.key for _, batch in req.inputs for part in batch.parts][-1]
    data = stores.blob.get(blob_key(stores.shard_id, lost))
    stores.blob.delete(blob_key(stores.shard_id, lost))
    with pytest.raises(Exception, match=lost):
        compact(machine, req)
    stores.blob.set(blob_key(stores.shard_id, lost), data)
    swapped_in = {blob_key(stores.shard_id, blob.partial_key) for blob in live_blobs(machine.refresh())} - before
    assert bool(swapped_in) == (memory_bytes_max == 4096)
    assert stores.blobs() == before | swapped_in
    stores.check_contents(70)
