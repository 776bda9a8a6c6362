"""Merges that are cut by ranges of keys give what one process gives, and leave no blob behind when they are given up."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Antichain, Merged, MergeJob, Schema
from persist_engine.base.errors import MissingBlob
from persist_engine.base.settings import CompactionSettings
from persist_engine.model.spine.compaction_plan import compaction_chunks
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_engine.work.outcome import Ending
from persist_engine.work.repair.force import force_compaction
from persist_kit.depth import draws
from persist_kit.recorded import SETTINGS, InRanges, RecordedShard
from persist_kit.strategies import schemas, updates, updates_table

A = Antichain.of
SPAN = 4
ROOMY = replace(SETTINGS, compaction=CompactionSettings(memory_bytes_max=64 << 20, claim_ms=0))


def written(schema, batches) -> RecordedShard:
    """A shard of `schema` with one append for each of `batches`, whose times are from 0 to SPAN - 1."""
    shard = RecordedShard()
    with shard.client().open_writer(shard.shard_id, schema, purpose="test") as writer:
        for number, table in enumerate(batches):
            times = pa.array([number * SPAN + time % SPAN for time in table.column("time").to_pylist()], pa.int64())
            timed = table.set_column(2, table.schema.field("time"), times)
            writer.compare_and_append(timed, expected_upper=A(number * SPAN), new_upper=A((number + 1) * SPAN))
    shard.upper = len(batches) * SPAN
    return shard


def tables(shard, since):
    """The contents at each readable time, and all updates at their times, as text: NaN equals nothing, and 0.0 equals -0.0."""
    with shard.client().open_leased_reader(shard.shard_id, purpose="test") as reader:
        found = [reader.snapshot(as_of).to_table() for as_of in range(since, shard.upper)]
        found.append(reader.changes(since, shard.upper - 1).to_table())
        return [repr(table.to_pylist()) for table in found]


@st.composite
def histories(draw):
    schema = draw(schemas().filter(lambda each: len(each.key) > 0))
    return schema, draw(st.lists(updates(schema), min_size=2, max_size=6))


@pytest.mark.slow
@given(histories(), st.integers(1, 5), st.sampled_from([SETTINGS, ROOMY]), st.data())
@settings(max_examples=draws(40), deadline=None)
def test_ranges_of_keys_give_what_one_process_gives(history, count, limits, data):
    schema, batches = history
    shard = written(schema, batches)
    since = data.draw(st.integers(0, shard.upper - 1))
    shard.downgrade(since)
    twin = shard.copy()
    force_compaction(shard.client(limits).machine(shard.shard_id), full=True)
    force_compaction(twin.client(limits).machine(twin.shard_id), full=True, merger=InRanges(count))
    assert tables(twin, since) == tables(shard, since)
    machines = [each.client().machine(each.shard_id) for each in (shard, twin)]
    rows, rows_of_twin = ([batch.rows for batch in machine.refresh().trace.batches()] for machine in machines)
    assert rows_of_twin == rows
    assert [batch.mergeable_runs for batch in machines[1].state.trace.batches() if batch.parts] in ([], [1])
    assert verify_shard(machines[1]).findings == []


def random_shard() -> RecordedShard:
    shard = RecordedShard()
    shard.append(times=12, rows=60)
    shard.downgrade(100)
    return shard


def whole(machine):
    """The request that merges the whole shard, as the spine would make it after many more writes."""
    while sum(1 for each in machine.refresh().trace.spine_batches() if each.rows) > 1:
        machine.spine_exert(1 << 30)
    (held,) = [each for each in machine.state.trace.spine_batches() if each.rows]
    return held.request()


def test_a_chunk_is_cut_into_disjoint_ranges_that_fetch_little_twice():
    schema = Schema.from_ddl("id BIGINT", "x BIGINT")
    # Each append writes many parts, which follow one another in the order of keys.
    batches = [
        updates_table(schema, [({"id": key * 4 + number}, {"x": key}, 0, 1) for key in range(400)])
        for number in range(4)
    ]
    shard = written(schema, batches)
    merger = InRanges(4)
    machine = shard.client(ROOMY).machine(shard.shard_id)
    (outcome,) = force_compaction(machine, full=True, merger=merger)
    assert outcome.ending is Ending.SUCCEEDED
    assert len(merger.tasks) == 4
    fetched = sum(task.bytes_estimate for task in merger.tasks)
    assert outcome.bytes_read <= fetched <= 2 * outcome.bytes_read
    (batch,) = [each for each in machine.refresh().trace.batches() if each.parts]
    assert (batch.rows, len(batch.run_metas)) == (1600, 1)


def test_small_parts_with_all_keys_are_not_fetched_for_many_ranges():
    shard = random_shard()
    merger = InRanges(64)
    machine = shard.client(ROOMY).machine(shard.shard_id)
    force_compaction(machine, full=True, merger=merger)
    assert 1 <= len(merger.tasks) <= 2
    shard.check_contents(100)


class OneIsMissing:
    """Merges in ranges, but finds that the inputs of the last chunk are gone."""

    def merged(self, job: MergeJob) -> Generator[Merged, None, None]:
        for chunk in job.chunks[:-1]:
            yield chunk, job.joined(task.run_remote(job.store) for task in job.task(chunk).split(3))
        yield job.chunks[-1], MissingBlob("gone", key="gone")


def test_a_missing_input_that_state_still_names_is_an_error_after_the_other_chunks():
    shard = random_shard()
    machine = shard.client().machine(shard.shard_id)
    due = whole(machine)
    chunks = len(compaction_chunks(due, SETTINGS))
    assert chunks > 1
    runs = sum(len(batch.run_metas) for batch in machine.state.trace.batches())
    with pytest.raises(MissingBlob):
        compact(machine, due, merger=OneIsMissing())
    assert sum(len(batch.run_metas) for batch in machine.refresh().trace.batches()) < runs
    shard.check_contents(100)


def test_a_task_that_is_told_to_stop_deletes_what_it_wrote():
    shard = random_shard()
    before = shard.blobs()
    machine = shard.client(ROOMY).machine(shard.shard_id)
    due = whole(machine)
    (chunk,) = compaction_chunks(due, ROOMY)
    schema = Schema.from_pair(machine.state.schemas[machine.schema_id])
    task = MergeJob(machine, (chunk,), schema, machine.schema_id, lambda: None).task(chunk)

    class StoppedError(Exception):
        pass

    def check():
        if len(shard.blobs() - before) > 0:
            raise StoppedError

    try:
        parts = task.run(machine, check=check).parts
    except StoppedError:
        parts = ()
    assert len(shard.blobs() - before) == len(parts)
