"""Regressions of garbage collection (spec 20)."""

import copy
from dataclasses import replace

import pytest
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import blob_key
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.spine import MergeRes
from persist_engine.work.audit.walk import PAGE_DIFFS
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.perform import perform, perform_due
from persist_engine.work.rollup import write_rollup
from persist_kit.recorded import SCHEMA, SETTINGS, Meanwhile, RecordedShard, aged

at = Antichain.of


def brought_back():
    """Two batches are merged, and a late result replaces the merged parts by the first parts again."""
    shard = RecordedShard()
    shard.append(times=8)
    machine = shard.client().machine(shard.shard_id)
    machine.refresh()
    (request, *_) = machine.claim_compactions(max_requests=10)[0].requests
    inputs = tuple(batch for _, batch in request.inputs)
    before = {blob_key(shard.shard_id, key) for batch in inputs for key in batch.blob_keys()}
    assert any(outcome.applied for outcome in compact_due(machine))
    (merged,) = [
        (spine.id, batch) for spine in machine.state.trace.spine_batches() for _, batch in spine.parts
        if batch.desc == request.desc
    ]  # fmt: skip
    joined = replace(
        merged[1],
        rows=sum(batch.rows for batch in inputs),
        parts=tuple(part for batch in inputs for part in batch.parts),
        run_splits=tuple(range(1, sum(len(batch.parts) for batch in inputs))),
        run_metas=tuple(meta for batch in inputs for meta in batch.run_metas),
    )
    return shard, machine, before, joined, merged


def test_regression_6_a_part_that_was_unlinked_and_linked_again_is_kept():
    """A late merge result linked it again. The diffs alone say that it was deleted."""
    shard, machine, before, joined, merged = brought_back()
    # No compactor does this any more, but an old log may contain it.
    answer, _ = machine.apply_merge_res(MergeRes(output=joined, input=merged[0], inputs=(merged[1],)))
    assert answer.applied
    write_rollup(machine)
    outcome = gc_and_truncate(machine)
    assert outcome.ending is Ending.SUCCEEDED
    assert outcome.blobs_deleted > 0, "the merged parts, and they alone"
    assert before <= shard.blobs()
    shard.check_nothing_lost()


def test_gc_keeps_a_blob_of_the_newest_state_although_a_diff_unlinked_it():
    """The state that it truncates to does not name the blob. A later version linked it again."""
    shard, machine, before, joined, merged = brought_back()
    write_rollup(machine)
    answer, _ = machine.apply_merge_res(MergeRes(output=joined, input=merged[0], inputs=(merged[1],)))
    assert answer.applied
    assert gc_and_truncate(machine).diffs_truncated > 0
    assert before <= shard.blobs()
    shard.check_nothing_lost()


class Scanned:
    """Consensus that notes how many versions each scan returned."""

    def __init__(self, inner):
        self._inner, self.sizes = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def scan(self, key, from_seqno, limit):
        entries = self._inner.scan(key, from_seqno, limit)
        self.sizes.append(len(entries))
        return entries


@pytest.mark.slow
def test_regression_7_a_long_hold_is_collected_page_by_page():
    """Everything that a reader had held back was fetched at once and kept in memory (spec 7.5)."""
    shard = RecordedShard()
    shard.append(times=1)
    versions = PAGE_DIFFS + 100
    with shard.client().open_leased_reader(shard.shard_id, SCHEMA, purpose="slow"):
        machine = shard.client().machine(shard.shard_id)
        for floor_ms in range(versions):
            machine.raise_staging_floor(floor_ms)
        write_rollup(machine)
        assert gc_and_truncate(machine).ending is Ending.SKIPPED
    scanned = Scanned(shard.consensus)
    shard.consensus = scanned
    few = replace(SETTINGS, maintenance=replace(SETTINGS.maintenance, recent_diffs_max=24))
    machine = shard.client(few).machine(shard.shard_id)
    scanned.sizes.clear()
    outcome = gc_and_truncate(machine)
    assert outcome.diffs_truncated > versions
    assert max(scanned.sizes) == PAGE_DIFFS
    assert sum(scanned.sizes) >= versions
    shard.check_nothing_lost()
    shard.check_contents()


def test_regression_5_an_overtaken_collector_stops_and_deletes_nothing():
    """Another collector truncates the versions that it is reading: spec 20, bug 5, found late."""
    shard, since = aged()
    earliest = shard.client().versions.live_diff_bounds(shard.shard_id).earliest
    overtaken = copy.copy(shard)
    overtaken.consensus = Meanwhile(
        shard.consensus,
        "scan",
        lambda: gc_and_truncate(shard.client().machine(shard.shard_id)),
        before=True,
        matching=lambda _, from_seqno, limit: from_seqno == earliest + 1,
    )
    blobs_deleted = []
    machine = overtaken.client().machine(shard.shard_id)
    outcome = gc_and_truncate(machine, on_progress=lambda *progress: blobs_deleted.append(progress))
    assert overtaken.consensus.is_done
    assert (outcome.ending, outcome.diffs_truncated, outcome.blobs_deleted) == (Ending.SKIPPED, 0, 0)
    shard.check_nothing_lost()
    shard.check_contents(since)


@pytest.mark.slow
def test_regression_11_empty_batches_do_not_pile_up_in_state():
    """Hundreds of empty appends leave a handful of batches, request no work, and leave no lasting cost in the log."""
    shard = RecordedShard()
    shard.append(times=3)
    client = shard.client()
    machine = client.machine(shard.shard_id)
    with client.open_writer(shard.shard_id, SCHEMA, purpose="idle") as writer:
        for _ in range(300):
            lower, shard.upper = shard.upper, shard.upper + 1
            done = writer.compare_and_append([], expected_upper=at(lower), new_upper=at(shard.upper))
            worked = perform(machine, done.maintenance)
            assert not [each for each in worked if each.type == "Compaction" and not each.bytes_read]
    assert machine.refresh().trace.batch_count < 20
    perform_due(machine)
    bounds = machine.versions.live_diff_bounds(shard.shard_id)
    assert bounds.count < 40
    assert bounds.earliest > SeqNo(250)
    shard.check_contents()
