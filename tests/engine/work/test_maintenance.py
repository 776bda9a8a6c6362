"""Rollup, garbage collection and compaction on real in-memory stores: contents never change, whoever is killed wherever."""

import collections
import copy
import itertools
import random
import threading
from dataclasses import replace

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
)
from persist_engine.base.versioned import SCAN_ALL, SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.codec.keys import blob_key
from persist_engine.codec.schema import Schema
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.state_diff import live_blobs
from persist_engine.model.views import rollup_seqnos, seqno_since
from persist_engine.shard import consolidate
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.perform import perform, perform_due
from persist_engine.work.rollup import write_rollup

SCHEMA = Schema.from_ddl("id BIGINT, tag STRING", "x BIGINT")
SETTINGS = Settings(
    batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=0),
    maintenance=MaintenanceSettings(rollup_threshold=8, gc_versions_min=1, gc_delete_concurrency=1),
    compaction=CompactionSettings(memory_bytes_max=4096, claim_ms=0),
    retry=RetrySettings(initial_ms=0.1, clamp_ms=0.5),
)
at = Antichain.of


class Killed(BaseException):
    """The process is gone: nothing catches this, and no later call reaches a store."""


class Mortal:
    """Wraps a store; the shared clock kills the process at call `dies_at`, before or after the call takes effect."""

    def __init__(self, inner, clock):
        self._inner, self._clock = inner, clock

    def __getattr__(self, name):
        method = getattr(self._inner, name)
        if name in {"address", "close"}:
            return method

        def call(*args, **kwargs):
            with self._clock["lock"]:
                self._clock["calls"] += 1
                if self._clock["calls"] > self._clock["dies_at"]:
                    raise Killed
                answer = method(*args, **kwargs)
                if self._clock["calls"] == self._clock["dies_at"] and self._clock["after"]:
                    raise Killed
                return answer

        return call


def connect(blob, consensus, settings=SETTINGS):
    return PersistClient(blob, consensus, settings=settings, env=SystemEnv(), metrics=NoMetrics())


class Stores:
    """One location and the history of one shard in it; every `client()` is a fresh process."""

    def copy(self):
        """The same contents in stores of their own."""
        other = copy.copy(self)
        other.blob, other.consensus, expected = MemBlob(), MemConsensus(), None
        for info in self.blob.list_prefix(""):
            other.blob.set(info.key, self.blob.get(info.key))
        for entry in self.consensus.scan(self.shard_id, SeqNo(0), SCAN_ALL):
            other.consensus.compare_and_set(self.shard_id, expected, entry)
            expected = entry.seqno
        return other

    def __init__(self, seed=0):
        self.blob, self.consensus = MemBlob(), MemConsensus()
        self.shard_id = ShardId.new()
        self.history = []
        self.upper = 0
        self._random = random.Random(seed)

    def client(self, settings=SETTINGS):
        return connect(self.blob, self.consensus, settings)

    def append(self, times=1, rows=20):
        with self.client().open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            for _ in range(times):
                updates = []
                for _ in range(rows):
                    key = (self._random.choice([None, *range(30)]), self._random.choice([None, "a", "b"]))
                    time = self.upper + self._random.randrange(10)
                    updates.append(((key, (self._random.randrange(2),)), time, self._random.choice([1, 1, -1])))
                self.history += updates
                writer.compare_and_append(updates, expected_upper=at(self.upper), new_upper=at(self.upper + 10))
                self.upper += 10

    def downgrade(self, since):
        with self.client().open_leased_reader(self.shard_id, purpose="test") as reader:
            reader.downgrade_since(at(since))

    def contents(self, as_of):
        with self.client().open_leased_reader(self.shard_id, purpose="test") as reader:
            table = reader.snapshot(as_of).to_table()
        return {(*r["key"].values(), *r["val"].values()): r["diff"] for r in table.to_pylist()}, table.num_rows

    def check_contents(self, since=0):
        for as_of in sorted({since, (since + self.upper) // 2, self.upper - 1}):
            sums = collections.Counter()
            for (key, val), time, diff in self.history:
                if time <= as_of:
                    sums[(*key, *val)] += diff
            expected = {row: diff for row, diff in sums.items() if diff}
            assert self.contents(as_of) == (expected, len(expected))

    def blobs(self):
        return {info.key for info in self.blob.list_prefix("")}

    def named_by_live_states(self):
        """Keys of the blobs that any live version names."""
        states = self.client().machine(self.shard_id).versions.fetch_all_live_states(self.shard_id)
        named = set()
        while True:
            named |= {blob_key(self.shard_id, blob.partial_key) for blob in live_blobs(states.state)}
            if states.advance() is None:
                return named

    def check_nothing_lost(self):
        """All that the newest state names exists: data, and the rollup at the earliest version."""
        machine = self.client().machine(self.shard_id)
        state = machine.refresh()
        needed = {blob_key(self.shard_id, blob.partial_key) for blob in live_blobs(state)}
        assert needed <= self.blobs()
        bounds = machine.versions.live_diff_bounds(self.shard_id)
        assert bounds.earliest in rollup_seqnos(state)
        assert bounds.earliest <= seqno_since(state)


@pytest.fixture
def stores():
    made = Stores()
    made.append(times=5)
    return made


# -- rollup ------------------------------------------------------------------------------------------------------------


def test_a_rollup_is_linked_readable_and_not_written_twice(stores):
    machine = stores.client().machine(stores.shard_id)
    outcome = write_rollup(machine)
    assert outcome.ending is Ending.SUCCEEDED
    assert outcome.bytes_written > 0
    assert machine.state.rollups[outcome.seqno].key == outcome.key
    assert stores.blob.get(blob_key(stores.shard_id, outcome.key)) is not None
    stores.check_contents()
    again = write_rollup(stores.client().machine(stores.shard_id))
    assert again.seqno > outcome.seqno  # the link itself was a version


def test_of_two_rollups_of_one_version_one_is_linked_and_the_other_removed(stores):
    mine, other = (stores.client().machine(stores.shard_id) for _ in range(2))
    mine.refresh()
    state = other.refresh()
    key, size = other.versions.write_rollup_for_state(state)
    before = len(stores.blobs())

    class Slow:
        """Lets the other link between our write and our link."""

        def __getattr__(self, name):
            return getattr(mine, name)

        def add_rollup(self, seqno, rollup):
            from persist_engine.model.batch import HollowRollup

            other.add_rollup(seqno, HollowRollup(key, size))
            return mine.add_rollup(seqno, rollup)

    outcome = write_rollup(Slow())
    assert outcome.ending is Ending.CONFLICT
    assert outcome.blobs_deleted == 1
    assert len(stores.blobs()) == before
    stores.check_nothing_lost()


def test_a_rollup_whose_link_had_an_unknown_outcome_is_kept(stores):
    """Regression for bug 1: the blob of a rollup that an unanswered attempt linked must not be deleted."""
    faults = Faults()
    client = connect(stores.blob, FaultyConsensus(stores.consensus, faults))
    machine = client.machine(stores.shard_id)
    faults.fail_next("compare_and_set", happened=True)
    outcome = write_rollup(machine)
    assert faults.injected == 1
    assert outcome.ending is Ending.SUCCEEDED
    assert stores.blob.get(blob_key(stores.shard_id, outcome.key)) is not None
    stores.check_nothing_lost()


# -- garbage collection --------------------------------------------------------------------------------------------------


def aged(seed=0):
    """A shard with several rollups, compacted batches, and so garbage of both kinds."""
    stores = Stores(seed)
    machine = None
    for since in (0, 60, 140):
        stores.append(times=8)
        if since:
            stores.downgrade(since)
        machine = stores.client().machine(stores.shard_id)
        assert any(outcome.applied for outcome in compact_due(machine))
        write_rollup(machine)
    return stores, 140


def test_gc_truncates_to_the_newest_rollup_and_leaves_exactly_what_is_named():
    stores, since = aged()
    before = len(stores.blobs())
    outcome = gc_and_truncate(stores.client().machine(stores.shard_id))
    assert outcome.ending is Ending.SUCCEEDED
    assert outcome.diffs_truncated > 10
    assert outcome.rollups_removed >= 2
    assert outcome.blobs_deleted == before - len(stores.blobs())
    stores.check_nothing_lost()
    stores.check_contents(since)
    state = stores.client().machine(stores.shard_id).state
    assert len(rollup_seqnos(state)) == 1
    # Rollups whose entries this run removed are the next run's garbage.
    write_rollup(stores.client().machine(stores.shard_id))
    second = gc_and_truncate(stores.client().machine(stores.shard_id))
    assert second.blobs_deleted >= outcome.rollups_removed
    assert stores.blobs() == stores.named_by_live_states()
    stores.check_contents(since)


def test_gc_without_a_newer_rollup_does_nothing(stores):
    machine = stores.client().machine(stores.shard_id)
    blobs = stores.blobs()
    outcome = gc_and_truncate(machine)
    assert outcome.ending is Ending.SKIPPED
    assert stores.blobs() == blobs
    assert outcome.to_json()["diffs_truncated"] == 0


def test_gc_keeps_every_version_that_a_reader_holds():
    stores, since = aged()
    with stores.client().open_leased_reader(stores.shard_id, purpose="slow") as reader:
        snapshot = reader.snapshot(stores.upper - 1)
        expected = snapshot.to_table()
        machine = stores.client().machine(stores.shard_id)
        for _ in range(3):
            stores.append(times=8)
            compact_due(machine)
            write_rollup(machine)
            gc_and_truncate(machine)
        assert snapshot.to_table() == expected
        held = seqno_since(machine.refresh())
        with pytest.raises(InvalidUsage, match="readers hold"):
            gc_and_truncate(machine, held.next())
        snapshot.close()
    outcome = gc_and_truncate(machine)
    assert outcome.diffs_truncated > 0
    stores.check_contents(since)


def test_regression_5_a_request_behind_what_was_collected_does_nothing():
    """Regression for bug 5."""
    stores, since = aged()
    machine = stores.client().machine(stores.shard_id)
    requests = rollup_seqnos(machine.state)
    gc_and_truncate(machine)
    for seqno in requests:
        assert gc_and_truncate(machine, seqno).diffs_truncated == 0
    stores.check_nothing_lost()
    stores.check_contents(since)


def test_a_worker_with_a_stale_state_and_one_that_runs_at_the_same_time_are_harmless():
    stores, since = aged()
    machines = [stores.client().machine(stores.shard_id) for _ in range(4)]
    for machine in machines:
        machine.refresh()
    gc_and_truncate(stores.client().machine(stores.shard_id))
    errors = []

    def work(machine):
        try:
            for _ in range(5):
                write_rollup(machine)
                gc_and_truncate(machine)
        except Exception as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(machine,)) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    stores.check_nothing_lost()
    stores.check_contents(since)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_regression_4_gc_killed_at_any_call_is_completed_by_the_next(after):
    """Regression for bug 4 among others: whatever the call after which the process dies, one more run collects everything."""
    finished = False
    prepared, since = aged(seed=1)
    for dies_at in itertools.count(1):
        stores = prepared.copy()
        clock = {"calls": 0, "dies_at": dies_at, "after": after, "lock": threading.Lock()}
        try:
            client = connect(Mortal(stores.blob, clock), Mortal(stores.consensus, clock))
            gc_and_truncate(client.machine(stores.shard_id))
            finished = True
        except Killed:
            pass
        stores.check_nothing_lost()
        machine = stores.client().machine(stores.shard_id)
        gc_and_truncate(machine)
        write_rollup(machine)
        gc_and_truncate(machine)
        assert stores.blobs() == stores.named_by_live_states()
        stores.check_nothing_lost()
        if dies_at % 7 == 0 or finished:
            stores.check_contents(since)
        if finished:
            break
    assert dies_at > 20


def test_gc_survives_unknown_outcomes():
    for seed in range(5):
        stores, since = aged(seed)
        faults = Faults(seed)
        client = connect(FaultyBlob(stores.blob, faults), FaultyConsensus(stores.consensus, faults))
        machine = client.machine(stores.shard_id)
        faults.set_rates(happens=0.8, answers=0.7)
        for _ in range(3):
            write_rollup(machine)
            gc_and_truncate(machine)
        faults.heal()
        assert faults.injected
        stores.check_nothing_lost()
        stores.check_contents(since)


def test_gc_refuses_to_delete_what_the_newest_state_names(monkeypatch):
    stores, since = aged()
    machine = stores.client().machine(stores.shard_id)
    named = next(iter(live_blobs(machine.state)))
    monkeypatch.setattr("persist_engine.work.gc.deleted_blobs", lambda _diff: iter([named]))
    real = live_blobs
    calls = itertools.count()
    monkeypatch.setattr(
        "persist_engine.work.gc.live_blobs", lambda state: real(state) if next(calls) == 0 else iter(())
    )
    blobs = stores.blobs()
    with pytest.raises(InvariantViolated, match="would delete"):
        gc_and_truncate(machine)
    assert stores.blobs() == blobs
    stores.check_contents(since)


# -- compaction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes_max", [0, 4096, 1 << 30])
def test_compaction_keeps_contents_at_every_readable_time_and_merges_runs(memory_bytes_max, monkeypatch):
    monkeypatch.setattr(consolidate, "WINDOW_ROWS_MIN", 5)
    settings = Settings(
        batch=SETTINGS.batch,
        maintenance=SETTINGS.maintenance,
        compaction=CompactionSettings(memory_bytes_max=memory_bytes_max, claim_ms=0),
        retry=SETTINGS.retry,
    )
    stores = Stores()
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
    # Nobody had asked for these since the spine had no new merges: the second pass finds nothing.
    assert [o for o in compact_due(machine) if o.rows_after != o.rows_before] == []


def test_what_cancels_leaves_a_batch_without_parts():
    stores = Stores()
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


def test_a_result_that_comes_too_late_is_removed_and_nothing_else_is():
    stores = Stores()
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


def test_an_output_whose_application_had_an_unknown_outcome_is_kept():
    """Regression for bug 1b: an unanswered attempt may have linked the output."""
    stores = Stores()
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


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_compaction_killed_at_any_call_is_repeated_by_the_next(after):
    finished = False
    prepared = Stores(seed=2)
    prepared.append(times=6, rows=8)
    for dies_at in itertools.count(1):
        stores = prepared.copy()
        clock = {"calls": 0, "dies_at": dies_at, "after": after, "lock": threading.Lock()}
        try:
            compact_due(connect(Mortal(stores.blob, clock), Mortal(stores.consensus, clock)).machine(stores.shard_id))
            finished = True
        except Killed:
            pass
        stores.check_nothing_lost()
        compact_due(stores.client().machine(stores.shard_id))
        stores.check_nothing_lost()
        stores.check_contents()
        if finished:
            break
    assert dies_at > 5


@pytest.mark.parametrize("memory_bytes_max", [4096, 1 << 20], ids=["in pieces", "at once"])
def test_a_failed_compaction_removes_what_it_wrote_but_what_was_swapped_in(memory_bytes_max):
    stores = Stores()
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


# -- performing ----------------------------------------------------------------------------------------------------------


def test_performing_what_appends_leave_behind_keeps_the_shard_small():
    stores = Stores()
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
    stores = Stores()
    stores.append(times=40)
    machine = stores.client().machine(stores.shard_id)
    outcomes = perform_due(machine)
    kinds = {outcome.type for outcome in outcomes if outcome.ending is Ending.SUCCEEDED}
    assert kinds == {"Rollup", "GC", "Compaction"}
    assert [o for o in perform_due(machine) if o.type != "Compaction" and o.ending is Ending.SUCCEEDED] == []
    stores.check_nothing_lost()
    stores.check_contents()
