"""Compaction in pieces: what a result of single runs may replace, how it is encoded, and when it is given up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvariantViolated
from persist_engine.base.settings import CompactionSettings
from persist_engine.client.client import PersistClient
from persist_engine.client.write.outcomes import Appended
from persist_engine.codec.batch import decode_transmittable, encode_transmittable
from persist_engine.codec.keys import blob_key
from persist_engine.model.batch import HollowBatch, RunMeta
from persist_engine.model.diff.trace_diff import apply_structured, changes
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import RunId
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeOutcome, MergeRes
from persist_engine.model.spine.trace import Trace
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.outcome import Ending
from persist_engine.work.repair.force import force_compaction
from persist_kit.counted import CountedMetrics
from persist_kit.recorded import SCHEMA, SETTINGS, SPAN, RecordedShard
from persist_kit.states import batch, description, part

GREATEST = 2**63 - 1
at = Antichain.of


def run_id(number: int) -> RunId:
    return RunId.from_bytes(bytes([number] * 16))


def of_runs(numbers, *, rows=1, lower=0, upper=1, diffs_sum=1):
    runs = [(RunMeta(run_id=run_id(n)), (part(f"run {n}", rows=rows, diffs_sum=diffs_sum),)) for n in numbers]
    return HollowBatch.of_runs(description(lower, upper), rows * len(numbers), runs)


def three_runs():
    return Trace().push_without_requests(of_runs([1, 2, 3])).push_without_requests(batch(1, 2, 5))


def result(*numbers, output, read=None):
    return MergeRes(output, SpineId(0, 1), (read or of_runs(numbers),), tuple(map(run_id, numbers)))


def test_only_the_named_runs_are_replaced():
    """Spec 12.4."""
    trace = three_runs()
    output = of_runs([9], rows=2, diffs_sum=2)
    after, outcome = trace.apply_merge_res(result(1, 3, output=output))
    assert outcome is MergeOutcome.APPLIED_PARTIAL
    first = next(after.batches())
    assert [meta.run_id for meta in first.run_metas] == [run_id(2), run_id(9)]
    assert (first.rows, first.desc) == (3, description(0, 1))
    after.validate(deep=True)
    counted = []
    assert apply_structured(trace, changes(trace, after), counted.append) == after
    assert counted == ["structured"]


def test_missing_or_changed_runs_are_not_replaced():
    trace = three_runs()
    output = of_runs([9], rows=2, diffs_sum=2)
    once, _ = trace.apply_merge_res(result(1, 2, output=output))
    for late in (result(1, 2, output=output), result(1, 3, output=output)):
        assert once.apply_merge_res(late) == (once, MergeOutcome.NOT_APPLIED_NO_MATCH)
    other = replace(of_runs([1, 2]), parts=(part("other"), part("run 2")))
    assert trace.apply_merge_res(result(1, 2, output=output, read=other))[1] is MergeOutcome.NOT_APPLIED_NO_MATCH
    elsewhere = replace(output, desc=description(0, 1, 1))
    assert trace.apply_merge_res(result(1, 2, output=elsewhere))[1] is MergeOutcome.NOT_APPLIED_NO_MATCH


def test_runs_may_not_grow_nor_change_their_sum():
    trace = three_runs()
    grown = of_runs([9], rows=3, diffs_sum=2)
    assert trace.apply_merge_res(result(1, 2, output=grown))[1] is MergeOutcome.NOT_APPLIED_TOO_MANY_UPDATES
    with pytest.raises(InvariantViolated, match="from 2 to 3"):
        trace.apply_merge_res(result(1, 2, output=of_runs([9], rows=2, diffs_sum=3)))


def test_a_merge_result_may_be_empty():
    trace = Trace().push_without_requests(of_runs([1, 2], diffs_sum=0)).push_without_requests(batch(1, 2, 5))
    after, outcome = trace.apply_merge_res(
        result(1, 2, output=HollowBatch.empty(description(0, 1)), read=of_runs([1, 2], diffs_sum=0))
    )
    assert outcome.applied
    assert next(after.batches()) == HollowBatch.empty(description(0, 1))


def test_sums_beyond_int64_do_not_block_compaction():
    """Each row and each part fits. The part that holds both does not, and its sum wraps on both sides alike."""
    stores = RecordedShard()
    from persist_kit.recorded import SCHEMA

    with stores.client().open_writer(stores.shard_id, SCHEMA, purpose="test") as writer:
        for time in range(2):
            rows = [(((time, "a"), (1,)), time, GREATEST)]
            stores.history += rows
            at, stores.upper = Antichain.of(time), time + 1
            writer.compare_and_append(rows, expected_upper=at, new_upper=Antichain.of(time + 1))
    stores.downgrade(1)
    machine = stores.client().machine(stores.shard_id)
    machine.refresh()
    machine.spine_exert(1 << 20)
    (due,) = [each for each in machine.state.trace.spine_batches() if not each.is_compact]
    assert compact(machine, due.request()).ending is Ending.SUCCEEDED
    merged = next(each for each in machine.state.trace.batches() if each.parts)
    assert [each.diffs_sum for each in merged.parts] == [-2]
    stores.check_contents(1)


def test_a_compaction_past_its_time_limit_stops_and_deletes_its_output():
    stores = RecordedShard()
    stores.append(times=8)
    hasty = replace(SETTINGS, compaction=CompactionSettings(timeout_ms_min=-1, timeout_ms_per_mib=-1, claim_ms=0))
    machine = stores.client(hasty).machine(stores.shard_id)
    before = stores.blobs()
    outcomes = compact_due(machine)
    assert outcomes
    assert {outcome.ending for outcome in outcomes} == {Ending.FAILED}
    assert "given up" in outcomes[0].message
    assert stores.blobs() == before
    stores.check_contents()


@pytest.mark.parametrize(("memory_bytes_max", "exceeded"), [(1 << 20, False), (4096, True)])
def test_the_resources_of_a_compaction_are_counted(memory_bytes_max, exceeded):
    stores, metrics = RecordedShard(), CountedMetrics()
    stores.append(times=8)
    settings = replace(SETTINGS, compaction=CompactionSettings(memory_bytes_max=memory_bytes_max, claim_ms=0))
    client = PersistClient(stores.blob, stores.consensus, settings=settings, env=SystemEnv(), metrics=metrics)
    done = compact_due(client.machine(stores.shard_id))
    assert metrics.total("compaction_started") == len(done) == len(metrics.observed_s("compaction")) > 0
    assert metrics.total("compaction_schema", choice="newest_input") == len(done)
    chunks = metrics.total("compaction_chunks")
    assert (chunks > len(done)) is exceeded
    assert metrics.total("compaction_memory_exceeded") == (chunks if exceeded else 0)
    assert metrics.total("compaction_runs") >= 2 * chunks
    assert metrics.total("shard_compactions_applied") == chunks


@pytest.mark.parametrize("times", [3, 8, 13])
def test_a_forced_compaction_performs_the_merges_that_its_own_exertions_claimed(times):
    """It left them unmerged for as long as claims last."""
    stores = RecordedShard()
    stores.append(times=times)
    claims_last = replace(SETTINGS, compaction=CompactionSettings(memory_bytes_max=1 << 20))
    machine = stores.client(claims_last).machine(stores.shard_id)
    force_compaction(machine, full=True)
    held = [each for each in machine.refresh().trace.spine_batches() if each.rows]
    assert [each.is_compact for each in held] == [True]
    stores.check_nothing_lost()
    stores.check_contents()


def test_a_compaction_without_a_merge_is_counted_too():
    stores, metrics = RecordedShard(), CountedMetrics()
    stores.append()
    client = PersistClient(stores.blob, stores.consensus, settings=SETTINGS, env=SystemEnv(), metrics=metrics)
    machine = client.machine(stores.shard_id)
    (lone,) = machine.refresh().trace.spine_batches()
    assert compact(machine, lone.request()).ending is Ending.SKIPPED
    assert metrics.total("compaction", outcome="noop") == 1


def test_with_compaction_switched_off_nothing_is_compacted():
    stores = RecordedShard()
    stores.append(times=8)
    off = replace(SETTINGS, compaction=CompactionSettings(enabled=False))
    assert compact_due(stores.client(off).machine(stores.shard_id)) == []


def test_parts_of_older_code_are_rewritten_once():
    """Even if nothing is to be merged, and never again for parts of this code."""
    stores = RecordedShard()
    append_as_older_code(stores)
    machine = stores.client().machine(stores.shard_id)
    assert [batch for batch in machine.refresh().trace.spine_batches() if not batch.is_compact] == []
    assert compact_due(machine) == []
    retiring = replace(SETTINGS, compaction=replace(SETTINGS.compaction, claim_min_version="0.1.0"))
    other = stores.client(retiring).machine(stores.shard_id)
    (outcome,) = compact_due(other)
    assert (outcome.ending, outcome.applied) == (Ending.SUCCEEDED, 1)
    keys = {key for each in other.refresh().trace.batches() for key in each.blob_keys()}
    assert {key.partition("/")[0] for key in keys} == {"n0000100"}
    assert compact_due(other) == []
    stores.check_nothing_lost()
    stores.check_contents()


def append_as_older_code(stores):
    """Appends a batch of one part under a key of version 0.0.9."""
    updates = [(((number, "a"), (0,)), stores.upper, 1) for number in range(10)]
    lower, upper = at(stores.upper), at(stores.upper + SPAN)
    with stores.client().open_writer(stores.shard_id, SCHEMA, purpose="test") as writer:
        batch = writer.batch(updates, lower=lower, upper=upper)
        shard_id, _, hollow = decode_transmittable(batch.to_transmittable())
        ((meta, (part,)),) = hollow.runs()
        old = replace(part, key=part.key.replace("n0000100/", "n0000009/"))
        stores.blob.set(blob_key(shard_id, old.key), stores.blob.get(blob_key(shard_id, part.key)))
        stores.blob.delete(blob_key(shard_id, part.key))
        sent = encode_transmittable(shard_id, "0.0.9", HollowBatch.of_runs(hollow.desc, hollow.rows, [(meta, [old])]))
        assert isinstance(
            writer.append_batch(writer.batch_from_transmittable(sent, is_only_copy=True), lower, upper), Appended
        )
    stores.history += updates
    stores.upper += SPAN
