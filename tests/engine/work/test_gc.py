"""Garbage collection on in-memory stores: contents never change, whichever process is killed at whichever call."""

import itertools
import threading
from dataclasses import replace

import pytest
from persist_engine import PersistClient
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, InvariantViolated, Unavailable
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.base.settings import RetrySettings
from persist_engine.codec import stored_spine
from persist_engine.codec.batch import decode_run_listing, encode_run_listing
from persist_engine.codec.keys import blob_key
from persist_engine.model.batch import HollowPart
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.queries import rollup_seqnos, seqno_since
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from persist_engine.work.audit.walk import live_keys
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.rollup import write_rollup
from persist_kit.counted import CountedMetrics
from persist_kit.recorded import SETTINGS, Killed, Mortality, RecordedShard, aged, connect
from prometheus_client import CollectorRegistry


@pytest.fixture
def stores():
    made = RecordedShard()
    made.append(times=5)
    return made


@pytest.mark.slow
def test_gc_truncates_to_the_newest_rollup_and_leaves_exactly_the_named_blobs():
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


@pytest.mark.parametrize("later", [False, True], ids=["the newest", "one before the newest"])
def test_gc_does_not_truncate_to_a_rollup_that_is_missing(stores, caplog, later):
    machine = stores.client().machine(stores.shard_id)
    write_rollup(machine)
    missing, at = machine.state.rollups[max(machine.state.rollups)].key, max(machine.state.rollups)
    if later:
        stores.append(times=5)
        write_rollup(machine)
    key = blob_key(stores.shard_id, missing)
    blob = stores.blob.get(key)
    stores.blob.delete(key)
    outcome = gc_and_truncate(machine)
    assert outcome.truncated_to == (max(machine.state.rollups) if later else None)
    assert [missing in record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [True]
    assert (at in machine.state.rollups) is not later
    if not later:
        stores.blob.set(key, blob)
        assert gc_and_truncate(machine).truncated_to == at
    stores.check_contents(0)


def test_gc_without_a_newer_rollup_does_nothing(stores):
    machine = stores.client().machine(stores.shard_id)
    blobs = stores.blobs()
    outcome = gc_and_truncate(machine)
    assert outcome.ending is Ending.SKIPPED
    assert stores.blobs() == blobs
    assert outcome.to_json()["diffs_truncated"] == 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_stale_worker_and_a_concurrent_worker_are_harmless():
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


@pytest.fixture(scope="module")
def garbage():
    """Garbage of both kinds behind three rollups, in as few blobs as compaction allows."""
    shard = RecordedShard(seed=1)
    for since in (0, 30, 70):
        shard.append(times=4, rows=6)
        shard.downgrade(since)
        machine = shard.client().machine(shard.shard_id)
        assert any(outcome.applied for outcome in compact_due(machine))
        write_rollup(machine)
    return shard


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_regression_4_gc_killed_at_any_call_is_completed_by_the_next(garbage, after):
    """Regression for bug 4 among others: after a kill at any call, one more run collects everything."""
    finished = False
    for dies_at in itertools.count(1):
        stores = garbage.copy()
        mortality = Mortality(dies_at, after=after)
        try:
            client = connect(mortality.wrap(stores.blob), mortality.wrap(stores.consensus))
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
            stores.check_contents(70)
        if finished:
            break
    assert dies_at > 20


@pytest.mark.slow
def test_gc_survives_unknown_outcomes():
    for seed in range(5):
        stores, since = aged()
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


@pytest.mark.slow
def test_gc_refuses_to_delete_a_blob_that_the_version_it_truncates_to_names():
    """An unlinked listing names a part that the state there still has. This breaks an invariant. Nothing is deleted (spec 14.7)."""
    stores = RecordedShard()
    merged = replace(SETTINGS.compaction, sift_bytes_min=1 << 30)
    listing = replace(SETTINGS, batch=replace(SETTINGS.batch, run_parts_max=2), compaction=merged)
    stores.append(times=8)
    machine = stores.client(listing).machine(stores.shard_id)
    assert any(outcome.applied for outcome in compact_due(machine))
    listings = {blob.partial_key for blob in live_blobs(machine.state) if blob.kind == "run"}
    stores.append(times=24)
    machine.refresh()
    assert any(outcome.applied for outcome in compact_due(machine))
    unlinked = listings - {blob.partial_key for blob in live_blobs(machine.state)}
    key = blob_key(stores.shard_id, min(unlinked))
    live = next(part for batch in machine.state.trace.batches() for part in batch.parts if isinstance(part, HollowPart))
    entries = decode_run_listing(stores.blob.get(key), key=key, shard_id=stores.shard_id)
    stores.blob.set(key, encode_run_listing(stores.shard_id, [*entries, live]))
    write_rollup(machine)
    blobs = stores.blobs()
    with pytest.raises(InvariantViolated, match="would delete blobs that live states name"):
        gc_and_truncate(machine)
    assert stores.blobs() == blobs
    stores.check_contents()


def test_a_collection_that_raises_is_counted():
    stores, _ = aged()
    faults, metrics = Faults(), CountedMetrics()
    client = PersistClient(
        stores.blob,
        FaultyConsensus(stores.consensus, faults),
        settings=replace(SETTINGS, retry=RetrySettings(give_up_ms=0)),
        env=SystemEnv(),
        metrics=metrics,
    )
    machine = client.machine(stores.shard_id)
    write_rollup(machine)
    faults.fail_next("truncate", happened=False)
    with pytest.raises(Unavailable):
        gc_and_truncate(machine)
    assert metrics.total("gc", outcome="Failed") == 1


@pytest.mark.slow
def test_gc_reports_the_blobs_that_readers_of_older_versions_hold():
    stores, _ = aged()
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    client = PersistClient(stores.blob, stores.consensus, settings=SETTINGS, env=SystemEnv(), metrics=metrics)

    def held_parts() -> float | None:
        return registry.get_sample_value("persist_gc_held_parts", {"shard": str(stores.shard_id)})

    machine = client.machine(stores.shard_id)
    write_rollup(machine)
    held = live_keys(machine.state)
    with client.open_leased_reader(stores.shard_id, purpose="slow") as reader, reader.snapshot(stores.upper - 1):
        stores.append(times=4)
        compact_due(machine)
        assert gc_and_truncate(machine).diffs_truncated > 0
        gone = {key for key in held - live_keys(machine.refresh()) if not key.startswith("v")}
        assert held_parts() == len(gone) > 0
    write_rollup(machine)
    assert gc_and_truncate(machine).diffs_truncated > 0
    assert held_parts() == 0


@pytest.mark.slow
def test_gc_decodes_few_live_batches_if_none_was_compacted(monkeypatch):
    """Otherwise a collection every hundred versions costs as much as all live batches: with ten thousand, more than the commits."""
    stores = RecordedShard()
    stores.append(times=70, rows=1)
    write_rollup(stores.client().machine(stores.shard_id))
    stores.append(times=2, rows=1)
    write_rollup(stores.client().machine(stores.shard_id))
    assert stores.client().machine(stores.shard_id).refresh().trace.batch_count == 72
    decoded: list[object] = []
    decode = stored_spine.batch_from_pb
    monkeypatch.setattr(stored_spine, "batch_from_pb", lambda message: decoded.append(message) or decode(message))
    assert gc_and_truncate(stores.client().machine(stores.shard_id)).diffs_truncated > 70
    assert len(decoded) < 20


@pytest.mark.slow
def test_a_collection_fetches_the_state_from_which_it_begins_and_not_the_newest_one_again(stores):
    metrics = CountedMetrics()
    client = PersistClient(stores.blob, stores.consensus, settings=SETTINGS, env=SystemEnv(), metrics=metrics)
    machine = client.machine(stores.shard_id)
    for _ in range(2):
        stores.append(times=5)
        write_rollup(machine)
    before = metrics.total("shard_blob_gets"), metrics.total("fetch_recent_diffs")
    assert gc_and_truncate(machine).ending is Ending.SUCCEEDED
    assert metrics.total("shard_blob_gets") - before[0] == 1
    assert metrics.total("fetch_recent_diffs") == before[1]


def test_gc_continues_if_the_newest_state_has_no_rollup_at_the_earliest_version(caplog):
    """This code never leaves such a state. The collection logs it, and the truncation repairs it."""
    stores, since = aged()
    machine = stores.client().machine(stores.shard_id)
    earliest = machine.versions.live_diff_bounds(stores.shard_id).earliest
    machine.remove_rollups([(earliest, machine.state.rollups[earliest])])
    outcome = gc_and_truncate(machine)
    assert outcome.ending is Ending.SUCCEEDED
    assert (
        f"the earliest version {earliest} of shard {stores.shard_id} has no rollup in its newest state" in caplog.text
    )
    stores.check_nothing_lost()
    stores.check_contents(since)
    caplog.clear()
    stores.append(times=5)
    write_rollup(machine)
    gc_and_truncate(machine)
    assert "has no rollup" not in caplog.text
