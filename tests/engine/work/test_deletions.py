"""Every blob that maintenance deletes stands in a record, whatever ends the run; a run that deletes nothing writes nothing."""

import itertools
from dataclasses import replace

import pytest
from persist_engine.base.errors import CorruptData, Unavailable
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.deletions import KEYS_MAX, Cause, decode_deletions
from persist_engine.codec.keys import blob_key, parse_deletions_key, shard_prefix
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import DeletionId
from persist_engine.testing.faults import Faults, FaultyBlob
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.proof import prove
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.deletions import DeletionRecords, recorded
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.rollup import write_rollup
from persist_kit.recorded import SETTINGS, Killed, Meanwhile, Mortality, RecordedShard, connect
from persist_kit.world import SCHEMA, World, row

at = Antichain.of
DAY_MS = 86_400_000


class Site:
    """One shard in a world with a seeded clock. Parts are blobs, and nothing is maintained by itself."""

    def __init__(self, settings: Settings | None = None):
        self.world = World(settings=settings or replace(SETTINGS, compaction=replace(SETTINGS.compaction, claim_ms=0)))
        self.shard_id = self.world.shard_id()
        self.upper = 0

    def machine(self):
        return self.world.process().machine(self.shard_id)

    def append(self, times=1):
        with self.world.process().open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            for _ in range(times):
                lower, self.upper = self.upper, self.upper + 1
                writer.compare_and_append([row(1, "a", lower)], expected_upper=at(lower), new_upper=at(self.upper))

    def stage(self):
        """Stages a batch that no one appends. The whole keys of its parts."""
        writer = self.world.process().open_writer(self.shard_id, SCHEMA, purpose="slow")
        batch = writer.batch([row(1, "slow", self.upper)], lower=at(self.upper), upper=at(self.upper + 1))
        return {blob_key(self.shard_id, key) for key in batch.hollow.blob_keys()}

    def release(self):
        """Compacts and rolls up, so that there is garbage."""
        machine = self.machine()
        compact_due(machine)
        write_rollup(machine)

    def collect(self):
        """The outcome of a collection of new garbage."""
        self.release()
        return gc_and_truncate(self.machine())

    def blobs(self):
        """The keys of all blobs but records."""
        listed = {info.key for info in self.world.blob.list_prefix("")}
        return {key for key in listed if parse_deletions_key(key) is None}

    def records(self):
        return recorded(self.machine())

    def recorded(self):
        """The whole keys of the blobs that are recorded as gone."""
        return gone_of(self.machine())


def gone_of(machine):
    return {
        blob_key(machine.shard_id, key)
        for one in recorded(machine)
        if one.record.gone_ms is not None
        for key in one.record.keys
    }


@pytest.fixture
def site():
    made = Site()
    made.append(8)
    return made


def test_a_collection_records_exactly_what_it_deletes_before_it_truncates(site):
    """Spec 14.14."""
    site.release()
    before = site.blobs()
    site.world.env.advance_ms(DAY_MS)
    began_ms = site.world.env.now_ms()
    done = gc_and_truncate(site.machine())
    assert done.ending is Ending.SUCCEEDED
    gone = before - site.blobs()
    assert len(gone) == done.blobs_deleted > 1
    assert site.recorded() == gone
    (one,) = site.records()
    assert (one.key, one.record.cause, one.record.hostname) == (done.deletion_record, Cause.COLLECTION, "seeded")
    assert one.record.seqno == done.truncated_to
    assert began_ms <= one.record.begun_ms <= one.record.gone_ms <= site.world.env.now_ms()


def test_a_collection_that_deletes_nothing_calls_the_blob_store_not_once(site):
    site.collect()
    machine = site.machine()
    site.world.blob.set = site.world.blob.list_prefix = site.world.blob.delete = None
    assert gc_and_truncate(machine).ending is Ending.SKIPPED


def test_a_record_that_cannot_be_written_keeps_the_versions_that_name_the_blobs(site):
    """Otherwise the next run would not know what to record."""
    site.release()
    before, faults = site.blobs(), Faults()
    client = connect(
        FaultyBlob(site.world.blob, faults),
        site.world.consensus,
        replace(SETTINGS, retry=RetrySettings(give_up_ms=0)),
    )
    limited = client.machine(site.shard_id)
    faults.fail_next("set", happened=False)
    with pytest.raises(Unavailable):
        gc_and_truncate(limited)
    assert before - site.blobs()
    assert site.recorded() == set()
    gc_and_truncate(site.machine())
    assert before - site.blobs() == site.recorded()


@pytest.mark.parametrize("after", [False, True])
def test_whenever_a_collection_is_killed_the_next_has_everything_recorded(after):
    """Killed at each call of the stores in turn. What is gone and in no record is found again, since its versions are still there."""
    made = RecordedShard()
    made.append(times=8)
    machine = made.client().machine(made.shard_id)
    compact_due(machine)
    write_rollup(machine)
    for calls in itertools.count(1):
        stores, mortality = made.copy(), Mortality(calls, after=after)
        before = stores.blobs()
        try:
            client = connect(mortality.wrap(stores.blob), mortality.wrap(stores.consensus))
            gc_and_truncate(client.machine(stores.shard_id))
        except Killed:
            ended = False
        else:
            ended = True
        gc_and_truncate(stores.client().machine(stores.shard_id))
        assert before - stores.blobs() == gone_of(stores.client().machine(stores.shard_id)), calls
        if ended:
            break
    assert calls > 5


def test_orphans_are_recorded_and_a_killed_scan_leaves_its_intention(site):
    """Spec 14.15. Nothing else knows of them."""
    strays = site.stage() | site.stage()
    site.world.env.advance_ms(DAY_MS)
    site.append()
    real, deleted = site.world.blob.delete, []

    def dies(key):
        deleted.append(key)
        if len(deleted) > 1:
            raise Killed
        return real(key)

    machine = site.machine()
    machine.versions.settings = machine.settings = replace(
        machine.settings, maintenance=replace(machine.settings.maintenance, gc_delete_concurrency=1)
    )
    site.world.blob.delete = dies
    with pytest.raises(Killed):
        scan_orphans(machine, older_than_ms=1000, commit=True)
    site.world.blob.delete = real
    (intention,) = site.records()
    assert intention.record.gone_ms is None
    assert {blob_key(site.shard_id, key) for key in intention.record.keys} == strays
    assert site.recorded() == set()
    done = scan_orphans(site.machine(), older_than_ms=1000, commit=True)
    unknown, known = site.records()
    assert (known.key, known.record.cause) == (done.deletion_record, Cause.ORPHAN_SCAN)
    assert site.recorded() == strays - {deleted[0]}
    assert {blob_key(site.shard_id, key) for key in unknown.record.keys} == {deleted[0]}
    assert unknown.record.gone_ms is None


def test_an_intention_goes_when_its_outcome_is_known(site):
    strays = site.stage()
    site.world.env.advance_ms(DAY_MS)
    site.append()
    scan_orphans(site.machine(), older_than_ms=1000, commit=True)
    (one,) = site.records()
    assert one.record.gone_ms is not None
    assert site.recorded() == strays


def test_output_that_was_not_linked_is_recorded(site):
    """Of a compaction that lost, and of a rollup."""
    machine = site.machine()
    request = machine.claim_compactions(max_requests=1)[0].requests[0]
    site.world.blob = Meanwhile(site.world.blob, "set", lambda: compact(site.machine(), request))
    lost = compact(site.machine(), request)
    assert (lost.ending, lost.blobs_deleted) == (Ending.CONFLICT, 1)
    site.world.blob = Meanwhile(site.world.blob, "set", lambda: write_rollup(site.machine()))
    second = write_rollup(site.machine())
    assert second.ending is Ending.CONFLICT
    assert {one.key: one.record.cause for one in site.records()} == {
        lost.deletion_record: Cause.COMPACTION,
        second.deletion_record: Cause.ROLLUP,
    }
    assert not site.recorded() & site.blobs()


def test_records_are_kept_for_their_time_and_then_pruned_by_collections(site):
    """Spec 14.16. Also when another process keeps its own for another time."""
    kept_ms = 30 * DAY_MS
    maintenance = replace(site.world.settings.maintenance, deletions_kept_ms=kept_ms)
    site.world.settings = replace(site.world.settings, maintenance=maintenance)
    first = site.collect().deletion_record
    site.world.env.advance_ms(kept_ms - DAY_MS)
    site.world.settings = replace(site.world.settings, maintenance=replace(maintenance, deletions_kept_ms=DAY_MS))
    site.append(8)
    second = site.collect().deletion_record
    assert [one.key for one in site.records()] == [first, second]
    site.world.env.advance_ms(2 * DAY_MS)
    site.append(8)
    third = site.collect().deletion_record
    assert [one.key for one in site.records()] == [third]


def test_a_clock_that_is_ahead_prunes_nothing_early(site):
    first = site.collect().deletion_record
    machine = site.machine()
    records = DeletionRecords(machine, Cause.COLLECTION)
    records.gone(["n0000100/p"], seqno=SeqNo(1), begun_ms=0)
    site.world.env.advance_ms(400 * DAY_MS)
    records.prune()
    assert first in {one.key for one in site.records()}


def test_without_a_time_to_keep_them_no_records_are_written(site):
    maintenance = replace(site.world.settings.maintenance, deletions_kept_ms=0)
    site.world.settings = replace(site.world.settings, maintenance=maintenance)
    done = site.collect()
    assert done.blobs_deleted
    assert (done.deletion_record, site.records()) == ("", [])


def test_many_deletions_are_several_records(site):
    machine = site.machine()
    keys = [f"n0000100/p{index}" for index in range(KEYS_MAX + 1)]
    DeletionRecords(machine, Cause.COLLECTION).gone(keys, seqno=SeqNo(3), begun_ms=1)
    found = recorded(machine)
    assert sorted(len(one.record.keys) for one in found) == [1, KEYS_MAX]
    assert [key for one in sorted(found, key=lambda one: -len(one.record.keys)) for key in one.record.keys] == keys


def test_records_since_a_time_are_read_alone(site):
    site.collect()
    site.world.env.advance_ms(DAY_MS)
    since_ms = site.world.env.now_ms()
    site.append(8)
    second = site.collect().deletion_record
    assert [one.key for one in recorded(site.machine(), since_ms=since_ms)] == [second]


def test_a_damaged_record_is_named_and_harms_nothing_else(site):
    key = blob_key(site.shard_id, site.collect().deletion_record)
    site.world.blob.set(key, b"PSTX")
    with pytest.raises(CorruptData, match=key):
        site.records()
    site.append(8)
    assert site.collect().ending is Ending.SUCCEEDED


def test_audits_take_no_record_for_a_blob(site):
    """Neither as an orphan, nor as something that is left, nor as what another application wrote."""
    site.collect()
    site.world.env.advance_ms(DAY_MS)
    site.append()
    machine = site.machine()
    found = scan_orphans(machine, older_than_ms=1000, commit=True)
    assert (found.found, found.listed) == (0, len([key for key in site.blobs() if key.startswith(site.shard_id)]))
    assert len(site.records()) == 1
    assert {one.kind for one in prove(machine, before_ms=site.world.env.now_ms()).remains} <= {
        "log",
        "rollup",
        "part",
        "inline",
    }


def test_a_record_of_another_shard_is_refused(site):
    key = blob_key(site.shard_id, site.collect().deletion_record)
    with pytest.raises(CorruptData, match="it is of shard"):
        decode_deletions(site.world.blob.get(key), key=key, shard_id=site.world.shard_id())


@pytest.mark.parametrize("damage", ["x", "-", "/"])
def test_only_exact_keys_are_those_of_records(site, damage):
    """Spec 6.6."""
    key = blob_key(site.shard_id, site.collect().deletion_record)
    parsed = parse_deletions_key(key)
    assert blob_key(site.shard_id, parsed.partial) == key
    assert isinstance(parsed.record_id, DeletionId)
    for wrong in (key + damage, key.replace("/d", f"/d{damage}", 1), key.removeprefix(shard_prefix(site.shard_id))):
        assert parse_deletions_key(wrong) is None
