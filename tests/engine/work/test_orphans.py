"""The orphan scan deletes only blobs that no version names and none can name any more, however slow a writer is."""

import itertools

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import BatchExpired, InvalidUsage, InvariantViolated
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.client.write.outcomes import Appended
from persist_engine.codec.keys import blob_key
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import PartId, staged_ms
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.testing.faults import Faults, FaultyConsensus
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.references import CHUNK_BLOBS
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.rollup import write_rollup
from persist_kit.recorded import Killed, Meanwhile, Mortality
from persist_kit.world import SCHEMA, World, row

at = Antichain.of
DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
SETTINGS = Settings(
    batch=BatchSettings(inline_part_bytes_max=0),
    maintenance=MaintenanceSettings(gc_versions_min=1, gc_delete_concurrency=1),
    compaction=CompactionSettings(claim_ms=0),
)


class Site:
    """One shard with three rows, and one batch that was staged and forgotten."""

    def __init__(self):
        self.world = World(settings=SETTINGS)
        self.shard_id = self.world.shard_id()
        self.upper = 0
        self.append(3)

    def client(self):
        return self.world.process()

    def machine(self):
        return self.client().machine(self.shard_id)

    def append(self, times=1):
        with self.client().open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            for _ in range(times):
                lower, self.upper = self.upper, self.upper + 1
                done = writer.compare_and_append(
                    [row(lower, "a", lower)], expected_upper=at(lower), new_upper=at(self.upper)
                )
                assert isinstance(done, Appended)

    def stage(self):
        """A batch for the next append, its writer, and the keys of its parts."""
        writer = self.client().open_writer(self.shard_id, SCHEMA, purpose="slow")
        batch = writer.batch([row(self.upper, "slow", self.upper)], lower=at(self.upper), upper=at(self.upper + 1))
        return writer, batch, [blob_key(self.shard_id, key) for key in batch.hollow.blob_keys()]

    def later(self, milliseconds):
        """Time passes, and another process commits."""
        self.world.env.advance_ms(milliseconds)
        self.machine().heartbeat_leased_reader(next(iter([self.reader_id()])))

    def reader_id(self):
        from persist_engine.model.ids import LeasedReaderId

        return LeasedReaderId.from_bytes(self.world.env.random_bytes(16))

    def scan(self, *, commit=True, older_than_ms=WEEK_MS, **how):
        return scan_orphans(self.machine(), older_than_ms=older_than_ms, commit=commit, **how)

    def blobs(self):
        return {info.key for info in self.world.blob.list_prefix("")}

    def check(self):
        """Everything appended can be read."""
        with self.client().open_leased_reader(self.shard_id, SCHEMA, purpose="check") as reader:
            table = reader.snapshot(self.upper - 1).to_table()
        assert table["key"].to_pylist() == [{"id": index} for index in range(self.upper)]


@pytest.fixture
def site():
    return Site()


def test_part_ids_hold_their_staging_time():
    """Spec 2.9, 27.1."""
    part_id = PartId.staged_at(1_700_000_000_123, b"0123456789")
    assert (part_id.staged_ms, staged_ms(f"n0000100/{part_id}")) == (1_700_000_000_123,) * 2
    assert PartId.staged_at(-5, b"0123456789").staged_ms == 0
    assert PartId.staged_at(2**60, b"0123456789").staged_ms == 2**48 - 1
    early, late = (PartId.staged_at(ms, bytes(10)) for ms in (1_000, 1_001))
    assert early < late


def test_a_dry_run_lists_what_a_commit_deletes_and_changes_nothing(site):
    _, batch, stray = site.stage()
    site.later(WEEK_MS + DAY_MS)
    blobs, seqno = site.blobs(), site.machine().refresh().seqno
    planned = site.scan(commit=False)
    assert [orphan.key for orphan in planned.orphans] == stray
    assert (planned.found, planned.deleted, planned.floor_ms) == (1, 0, None)
    assert (site.blobs(), site.machine().refresh().seqno) == (blobs, seqno)
    done = site.scan()
    assert [orphan.key for orphan in done.orphans] == stray
    assert (done.deleted, done.deleted_bytes) == (planned.found, planned.found_bytes)
    assert blobs - site.blobs() == set(stray)
    site.check()
    batch.mark_spent("lost")


def test_a_young_unlinked_part_is_kept_and_can_be_appended(site):
    writer, batch, keys = site.stage()
    site.later(WEEK_MS - DAY_MS)
    found = site.scan()
    assert (found.found, found.young, found.deleted) == (0, 1, 0)
    assert set(keys) <= site.blobs()
    assert isinstance(writer.append_batch(batch, at(site.upper), at(site.upper + 1)), Appended)


def test_a_batch_staged_before_the_floor_is_refused_and_nothing_is_committed(site):
    """The floor alone decides, whether its blobs were deleted or not (spec 27.2)."""
    writer, batch, _ = site.stage()
    site.later(WEEK_MS + DAY_MS)
    site.machine().raise_staging_floor(site.world.env.now_ms() - WEEK_MS)
    before = site.machine().refresh()
    with pytest.raises(BatchExpired, match="stage the batch again"):
        writer.append_batch(batch, at(site.upper), at(site.upper + 1))
    assert site.machine().refresh().seqno == before.seqno
    site.append()
    site.check()


def in_flight(site, meanwhile):
    """Appends a batch. `meanwhile` runs after the decision and before its compare-and-set reaches the store."""
    writer, batch, _ = site.stage()
    site.later(WEEK_MS + DAY_MS)
    real = site.world.consensus.compare_and_set
    pending = [meanwhile]

    def late(key, expected, new):
        if pending:
            pending.pop()()
        return real(key, expected, new)

    site.world.consensus.compare_and_set = late
    writer.fetch_recent_upper()
    return writer.append_batch(batch, at(site.upper), at(site.upper + 1))


def test_an_append_decided_before_the_floor_loses_to_it(site):
    """The core of the proof: the process slept between its decision and its compare-and-set."""
    with pytest.raises(BatchExpired):
        in_flight(site, site.scan)
    site.check()
    site.append()
    site.check()


@pytest.mark.parametrize(("pause_ms", "is_in_time"), [(600_000, True), (WEEK_MS, False)], ids=["in time", "lapsed"])
def test_an_append_with_a_lost_answer_is_recognised_after_the_floor_passed_it(site, pause_ms, is_in_time):
    """Its token proves it. If the writer's lease lapsed meanwhile, the error says that the outcome is unknown."""
    faults = Faults()
    client = PersistClient(
        site.world.blob,
        FaultyConsensus(site.world.consensus, faults),
        settings=SETTINGS,
        env=SleepyEnv(site.world.env, lambda: (site.later(pause_ms), site.scan(older_than_ms=0))),
        metrics=NoMetrics(),
    )
    writer = client.open_writer(site.shard_id, SCHEMA, purpose="unlucky")
    batch = writer.batch([row(site.upper, "a", site.upper)], lower=at(site.upper), upper=at(site.upper + 1))
    faults.fail_next("compare_and_set", happened=True)
    if is_in_time:
        assert isinstance(writer.append_batch(batch, at(site.upper), at(site.upper + 1)), Appended)
    else:
        with pytest.raises(InvariantViolated, match="may or may not have happened"):
            writer.append_batch(batch, at(site.upper), at(site.upper + 1))
    site.upper += 1
    site.check()


class SleepyEnv(SeededEnv):
    """Shares another's clock. While its process sleeps before a retry, other processes do `meanwhile`, once."""

    def __init__(self, other, meanwhile):
        super().__init__(99)
        self._other, self._meanwhile = other, meanwhile

    def now_ms(self):
        return self._other.now_ms()

    def sleep(self, seconds):
        work, self._meanwhile = self._meanwhile, None
        if work is not None:
            work()


def test_a_compaction_older_than_the_floor_is_not_applied_and_loses_nothing(site):
    site.append(8)
    machine = site.machine()
    machine.refresh()
    (request, *_) = machine.claim_compactions(max_requests=10)[0].requests
    real = machine.apply_merge_res

    class Slow:
        def __getattr__(self, name):
            return getattr(machine, name)

        def apply_merge_res(self, res):
            site.later(WEEK_MS + DAY_MS)
            assert site.scan().deleted > 0
            return real(res)

    outcome = compact(Slow(), request)
    assert outcome.ending is Ending.CONFLICT
    site.check()


def test_a_blob_linked_between_the_listing_and_the_check_is_kept(site):
    """Staged just after the floor, and appended while the scan has it on its list (spec 27.4)."""
    site.later(WEEK_MS + DAY_MS)
    writer, batch, keys = site.stage()
    appended = []

    def append():
        appended.append(writer.append_batch(batch, at(site.upper), at(site.upper + 1)))

    site.world.blob = Meanwhile(site.world.blob, "list_prefix", append)
    site.scan(older_than_ms=0)
    assert isinstance(appended[0], Appended)
    site.upper += 1
    assert set(keys) <= site.blobs()
    site.check()


def test_a_rollup_is_an_orphan_once_the_log_begins_after_it(site):
    """Until then a process may still link it (spec 27.3)."""
    machine = site.machine()
    lost, _ = machine.versions.write_rollup_for_state(machine.refresh())
    site.append()
    assert site.scan(commit=False, older_than_ms=0).orphans == []
    write_rollup(site.machine())
    gc_and_truncate(site.machine())
    assert [orphan.key for orphan in site.scan().orphans] == [blob_key(site.shard_id, lost)]
    site.check()


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, CHUNK_BLOBS])
def test_regression_nothing_is_an_orphan_to_a_log_that_was_rolled_back(site, others):
    """The scan deleted what the lost versions name, so that the log could not be restored. It must notice before any deletion,
    however many blobs it lists before the rollup that proves the loss: in a bucket, all parts of a shard.
    """
    entries = site.world.consensus.scan(site.shard_id, SeqNo(0), 100)
    site.append(5)
    staged_ms = site.world.env.now_ms() + 30 * DAY_MS
    for number in range(others):
        part_id = PartId.staged_at(staged_ms, number.to_bytes(10, "big"))
        site.world.blob.set(blob_key(site.shard_id, f"n0000100/{part_id}"), b"")
    write_rollup(site.machine())
    rolled_back = MemConsensus()
    for entry in entries[:4]:
        rolled_back.compare_and_set(site.shard_id, rolled_back_to(rolled_back, site.shard_id), entry)
    client = PersistClient(site.world.blob, rolled_back, settings=SETTINGS, env=site.world.env, metrics=NoMetrics())
    site.world.env.advance_ms(WEEK_MS + DAY_MS)
    machine = client.machine(site.shard_id)
    machine.heartbeat_leased_reader(site.reader_id())
    before = site.blobs()
    for commit in (False, True):
        with pytest.raises(InvariantViolated, match="the log lost versions or is not the one"):
            scan_orphans(machine, older_than_ms=WEEK_MS, commit=commit)
    assert site.blobs() == before
    assert site.scan().deleted == 0
    site.check()


def rolled_back_to(consensus, shard_id):
    head = consensus.head(shard_id)
    return None if head is None else head.tip


def test_a_second_rollup_of_a_version_is_an_orphan_at_once(site):
    from persist_engine.model.batch import HollowRollup

    first, second = site.machine(), site.machine()
    state = first.refresh()
    mine, size = first.versions.write_rollup_for_state(state)
    theirs, _ = second.versions.write_rollup_for_state(state)
    first.add_rollup(state.seqno, HollowRollup(mine, size))
    found = site.scan()
    assert [orphan.key for orphan in found.orphans] == [blob_key(site.shard_id, theirs)]
    assert blob_key(site.shard_id, mine) in site.blobs()
    site.check()


def test_deletes_are_bounded_and_the_next_run_goes_on(site):
    staged = [site.stage() for _ in range(7)]
    site.later(WEEK_MS + DAY_MS)
    runs = [site.scan(max_deletes=3) for _ in range(3)]
    assert [(run.deleted, run.is_complete) for run in runs] == [(3, False), (3, False), (1, True)]
    assert [run.found for run in runs] == [7, 4, 1]
    site.check()
    for _, batch, _ in staged:
        batch.mark_spent("lost")


def test_one_clock_ahead_refuses_no_append(site):
    writer, batch, _ = site.stage()
    ahead = SeededEnv(5, start_ms=site.world.env.now_ms() + 3650 * DAY_MS)
    client = PersistClient(site.world.blob, site.world.consensus, settings=SETTINGS, env=ahead, metrics=NoMetrics())
    found = scan_orphans(client.machine(site.shard_id), older_than_ms=WEEK_MS, commit=True)
    assert found.deleted == 0
    assert isinstance(writer.append_batch(batch, at(site.upper), at(site.upper + 1)), Appended)


def test_regression_a_floor_from_clocks_ahead_refuses_appends_only_once(site):
    """Nothing could be appended until the time of those clocks had come."""
    stale, batch, _ = site.stage()
    ahead = SeededEnv(5, start_ms=site.world.env.now_ms() + 3650 * DAY_MS)
    client = PersistClient(site.world.blob, site.world.consensus, settings=SETTINGS, env=ahead, metrics=NoMetrics())
    machine = client.machine(site.shard_id)
    machine.heartbeat_leased_reader(site.reader_id())
    floor_ms = scan_orphans(machine, older_than_ms=WEEK_MS, commit=True).floor_ms
    assert floor_ms > site.world.env.now_ms() + 3000 * DAY_MS

    with pytest.raises(BatchExpired):  # a writer that has not seen the floor gets one refusal
        stale.append_batch(batch, at(site.upper), at(site.upper + 1))
    again = stale.batch([row(site.upper, "a", site.upper)], lower=at(site.upper), upper=at(site.upper + 1))
    assert isinstance(stale.append_batch(again, at(site.upper), at(site.upper + 1)), Appended)
    site.upper += 1
    site.append(9)
    write_rollup(site.machine())
    assert [outcome.ending for outcome in compact_due(site.machine())].count(Ending.SUCCEEDED) >= 1
    gc_and_truncate(site.machine())
    site.later(WEEK_MS)
    assert site.scan(older_than_ms=0).deleted == 0, "what was staged at the floor is as old as that"
    site.check()


def test_the_floor_never_goes_back(site):
    machine = site.machine()
    floors = [machine.raise_staging_floor(floor)[0].floor_ms for floor in (100, 50, 200)]
    assert floors == [100, 100, 200]
    assert site.machine().refresh().staging_floor_ms == 200


def test_an_orphan_scan_leaves_foreign_keys(site):
    odd = {f"{site.shard_id}/odd", f"{site.shard_id}/n0000100/x", "elsewhere"}
    for key in odd:
        site.world.blob.set(key, b"x")
    site.later(WEEK_MS + DAY_MS)
    assert site.scan().deleted == 0
    assert odd <= site.blobs()


def test_a_negative_age_is_refused(site):
    with pytest.raises(InvalidUsage):
        site.scan(older_than_ms=-1)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_scan_killed_at_any_call_loses_nothing_and_is_completed_by_the_next(after):
    finished = False
    for dies_at in itertools.count(1):
        site = Site()
        strays = [site.stage() for _ in range(2)]
        site.later(WEEK_MS + DAY_MS)
        mortality = Mortality(dies_at, after=after)
        world = site.world
        client = PersistClient(
            mortality.wrap(world.blob),
            mortality.wrap(world.consensus),
            settings=SETTINGS,
            env=world.env,
            metrics=NoMetrics(),
        )
        try:
            scan_orphans(client.machine(site.shard_id), older_than_ms=WEEK_MS, commit=True)
            finished = True
        except Killed:
            pass
        site.check()
        site.scan()
        assert not site.blobs() & {key for _, _, keys in strays for key in keys}
        site.append()
        site.check()
        for _, batch, _ in strays:
            batch.mark_spent("lost")
        if finished:
            break
    assert dies_at > 8
