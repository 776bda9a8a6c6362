"""A shard whose log was lost begins anew from the newest rollup. Recovery reports the loss, and deletes and rewrites nothing."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
from persist_engine import Antichain, Appended, ShardId
from persist_engine.base.errors import (
    BatchExpired,
    InvalidUsage,
    MissingBlob,
    PersistError,
    ShardLost,
    ShardNotFound,
)
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, Settings
from persist_engine.codec.keys import blob_key, created_key
from persist_engine.model.ids import CriticalReaderId
from persist_engine.model.rebirth import SEQNOS_LEFT_OUT, is_recovered_from, recovered_birth
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.audit.finding import FindingKind
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.repair.recover import recover_shard
from persist_engine.work.rollup import write_rollup
from persist_kit.disk import Disk
from persist_kit.recorded import Killed, Mortality
from persist_kit.world import SCHEMA, CountedConsensus, World, contents, row

A = Antichain.of
SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0), maintenance=MaintenanceSettings(gc_versions_min=1))
DAY_MS = 86_400_000
HOLD = CriticalReaderId("c00000000-0000-0000-0000-000000000001")


class Site:
    """One shard with four rows, a rollup after them, and two rows after that."""

    def __init__(self) -> None:
        self.world = World(settings=SETTINGS)
        self.shard_id = self.world.shard_id()
        self.append(2)
        self.client().open_critical_since(self.shard_id, HOLD, opaque=b"mine")
        self.backup = {key: list(log) for key, log in self.world.consensus._inner._logs.items()}
        self.append(2)
        write_rollup(self.machine())
        self.base = max(self.machine().refresh().rollups)
        self.append(2)
        self.head = self.machine().refresh().seqno

    def client(self):
        return self.world.process()

    def machine(self):
        return self.client().machine(self.shard_id)

    def append(self, times: int, client=None) -> None:
        with (client or self.client()).open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            upper = writer.fetch_recent_upper().time
            for time in range(upper, upper + times):
                done = writer.append([row(time, "a", time)], lower=A(time), upper=A(time + 1))
                assert isinstance(done, Appended)

    def lose(self, logs: dict | None = None) -> None:
        """Consensus loses everything, or all but `logs`."""
        consensus = MemConsensus()
        consensus._logs.update(logs or {})
        self.world.consensus = CountedConsensus(consensus)

    def recover(self, **how):
        return recover_shard(self.client().versions, self.shard_id, **how)

    def blobs(self) -> dict[str, bytes]:
        return {info.key: self.world.blob.get(info.key) for info in self.world.blob.list_prefix("")}

    def rows(self, times: int) -> list:
        return [(time, "a", 1) for time in range(times)]


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_dry_run_of_recovery_reports_the_loss_and_changes_nothing(site: Site) -> None:
    site.lose()
    before = site.blobs()
    found = site.recover(commit=False, last_seqno=site.head)
    assert (found.base.seqno, found.gone_from, found.gone_through) == (site.base, site.base + 1, site.head)
    assert (found.needed, found.log, found.seqno, found.missing) == (True, None, None, [])
    assert found.left_over_count == len(found.left_over) == 2
    assert site.recover(commit=False).gone_through is None
    assert (site.blobs(), list(site.world.consensus.list_keys())) == (before, [])


@pytest.mark.parametrize("lost", ["everything", "the newest versions"])
def test_the_shard_begins_anew_from_its_newest_rollup(site: Site, lost: str) -> None:
    old = site.machine().refresh()
    site.lose(None if lost == "everything" else site.backup)
    before = site.blobs()
    if lost != "everything":
        with pytest.raises(InvalidUsage, match="--replace-log"):
            site.recover(commit=True)
        assert site.blobs() == before
    done = site.recover(commit=True, replace_log=lost != "everything", last_seqno=site.head)
    assert done.seqno == site.head + SEQNOS_LEFT_OUT
    assert is_recovered_from(bytes.fromhex(done.birth), old.birth)
    assert before.items() <= site.blobs().items()
    assert contents(site.client(), site.shard_id, 3) == site.rows(4)
    state = site.machine().refresh()
    assert state.critical_readers == old.critical_readers
    assert not state.writers
    assert site.recover(commit=True).seqno is None  # a second recovery has nothing to do
    site.append(3)
    assert contents(site.client(), site.shard_id, 6) == site.rows(7)


def test_the_shard_is_sound_afterwards_and_can_be_collected(site: Site) -> None:
    site.lose()
    left_over = site.recover(commit=True).left_over
    assert verify_shard(site.machine()).findings == []
    for _ in range(3):
        site.append(3)
        write_rollup(site.machine())
        gc_and_truncate(site.machine())
    assert verify_shard(site.machine()).findings == []
    assert set(left_over) <= site.blobs().keys()  # no version names them, so only the orphan scan may delete them
    site.world.env.advance_ms(DAY_MS * 2)
    site.append(1)
    assert {orphan.key for orphan in scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True).orphans} == set(
        left_over
    )
    assert contents(site.client(), site.shard_id, 13) == site.rows(14)


def test_what_an_orphan_scan_of_lost_versions_deleted_is_not_appended_afterwards(site: Site) -> None:
    """A driver may still have the batch, by the note of its task. The floor that kept it from being appended was lost."""
    with site.client().open_writer(site.shard_id, SCHEMA, purpose="task") as task:
        staged = task.batch([row(99, "z", 4)], lower=A(4), upper=A(5)).to_transmittable()
    site.world.env.advance_ms(DAY_MS * 2)
    site.append(1)
    assert scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True).deleted == 1
    site.lose()
    site.recover(commit=True)
    with site.client().open_writer(site.shard_id, SCHEMA, purpose="driver") as driver:
        late = driver.batch_from_transmittable(staged, is_only_copy=True)
        with pytest.raises(BatchExpired):
            driver.compare_and_append_batch([late], expected_upper=A(4), new_upper=A(5))
        late.mark_spent("it is gone")
    site.append(1)
    assert contents(site.client(), site.shard_id, 4) == site.rows(5)


def test_a_second_rollup_of_the_lost_log_is_no_ruin_once_the_shard_was_recovered(site: Site) -> None:
    """Two processes wrote one at once, and one of them died before it deleted its own."""
    first = next(key for key in site.world.blob_keys(site.shard_id, kind="rollup") if f"/{site.base}/" in key)
    site.world.blob.set(f"{first[:-4]}0000", site.world.blob.get(first))
    site.lose()
    site.recover(commit=True)
    assert verify_shard(site.machine()).findings == []
    scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True)


@pytest.mark.parametrize("lost", ["everything", "the newest versions"])
def test_processes_with_the_state_of_the_lost_log_are_refused(site: Site, lost: str) -> None:
    stale = site.client()
    writer = stale.open_writer(site.shard_id, SCHEMA, purpose="stale")
    writer.fetch_recent_upper()
    site.lose(None if lost == "everything" else site.backup)
    site.recover(commit=True, replace_log=True)
    stale._consensus._inner = stale._versions.consensus._inner = site.world.consensus
    upper = A(6)
    for call in (
        lambda: writer.append([row(6, "stale", 6)], lower=upper, upper=A(7)),
        writer.fetch_recent_upper,
        lambda: contents(stale, site.shard_id, 5),
        lambda: write_rollup(stale.machine(site.shard_id)),
    ):
        with pytest.raises(PersistError, match="wiped and written anew|is not the one"):
            call()
    assert contents(site.client(), site.shard_id, 3) == site.rows(4)


def test_a_complete_log_is_not_recovered(site: Site) -> None:
    found = site.recover(commit=True, replace_log=True)
    assert (found.needed, found.seqno) == (False, None)
    assert found.log is not None
    assert found.log.head == site.head == site.machine().refresh().seqno


def test_missing_parts_are_named_and_an_older_rollup_can_be_chosen(site: Site) -> None:
    site.lose()
    state = site.recover(commit=False)
    part = blob_key(
        site.shard_id, next(iter(sorted(k for k in site.world.blob_keys(site.shard_id, kind="part")))).split("/", 1)[1]
    )
    site.world.blob.delete(part)
    assert site.recover(commit=False).missing == [part]
    first = next(each.key for each in state.others if each.seqno == 1)
    done = site.recover(commit=True, rollup=first)
    assert (done.base.seqno, done.missing, done.base.parts) == (1, [], 0)
    assert site.machine().refresh().seqno == site.base + SEQNOS_LEFT_OUT
    with pytest.raises(InvalidUsage, match="no rollup"):
        site.recover(commit=True, rollup="nonsense")


def test_rollups_of_two_logs_are_distinguished_and_recoveries_share_their_origin(site: Site) -> None:
    site.lose()
    site.recover(commit=True)
    site.append(2)
    site.lose()
    again = site.recover(commit=True)
    assert again.base.seqno == site.base + SEQNOS_LEFT_OUT
    other = World(seed=9, settings=SETTINGS)
    with other.process().open_writer(site.shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(0, "other", 0)], lower=A(0), upper=A(1))
    write_rollup(other.process().machine(site.shard_id))
    for info in other.blob.list_prefix(""):
        site.world.blob.set(info.key, other.blob.get(info.key))
    site.lose()
    with pytest.raises(InvalidUsage, match="several logs.*--rollup"):
        site.recover(commit=True)


def test_a_recovery_that_is_not_possible_is_refused_with_its_reason(site: Site) -> None:
    with pytest.raises(ShardNotFound):
        recover_shard(site.client().versions, ShardId.new(), commit=True)
    for key in site.world.blob_keys(site.shard_id, kind="rollup"):
        site.world.blob.delete(key)
    site.lose()
    with pytest.raises(MissingBlob, match="no rollup"):
        site.recover(commit=True)
    with pytest.raises(ShardLost):
        site.client().initialise(site.shard_id, SCHEMA)


def test_a_recovery_killed_at_any_call_is_completed_by_the_next(site: Site) -> None:
    """Spec 24.8."""
    site.lose(site.backup)
    blobs, finished = site.blobs(), False
    for after in (False, True):
        for dies_at in range(1, 40):
            site.lose(site.backup)
            for key in site.blobs().keys() - blobs.keys():
                site.world.blob.delete(key)
            client = site.client()
            mortality = Mortality(dies_at, after=after)
            client.versions.blob, client.versions.consensus = (
                mortality.wrap(client.versions.blob),
                mortality.wrap(client.versions.consensus),
            )
            try:
                recover_shard(client.versions, site.shard_id, commit=True, replace_log=True)
                finished = True
            except Killed:
                pass
            site.recover(commit=True, replace_log=True)
            assert contents(site.client(), site.shard_id, 3) == site.rows(4)
            if finished:
                break
        assert finished
        finished = False


def killed_before_the_log_is_replaced(site: Site, **how: object) -> str:
    """The key of the rollup that a recovery left."""
    before = site.blobs().keys()
    client = site.client()

    def dies(*_: object) -> NoReturn:
        raise Killed

    client.versions.consensus.replace = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        recover_shard(client.versions, site.shard_id, commit=True, replace_log=True, **how)  # type: ignore[arg-type]
    (left,) = site.blobs().keys() - before
    return left


def test_what_a_killed_recovery_left_is_no_reason_to_give_the_log_up(site: Site) -> None:
    """Consensus was rolled back, and is restored after a recovery was killed. Its rollup is far newer than the log, and holds less."""
    whole = {key: list(log) for key, log in site.world.consensus._inner._logs.items()}
    site.lose(site.backup)
    left = killed_before_the_log_is_replaced(site)
    site.lose(whole)
    site.append(2)
    found = site.recover(commit=True, replace_log=True)
    assert (found.needed, found.seqno, found.base.key) == (False, None, left)
    assert contents(site.client(), site.shard_id, 7) == site.rows(8)


@pytest.mark.parametrize("delete", [False, True], ids=["begin from it", "delete it"])
def test_audits_say_what_to_do_about_the_rollup_that_a_killed_recovery_left(site: Site, delete: bool) -> None:
    """`recover` without `--rollup` has nothing to do, because the log is whole."""
    left = killed_before_the_log_is_replaced(site, rollup=site.recover(commit=False).base.key)
    said = f"delete this rollup in the store; otherwise `persist admin recover {site.shard_id} --rollup {left} --replace-log`"
    (finding,) = verify_shard(site.machine()).findings
    assert (finding.kind, finding.key) == (FindingKind.LOG_BEHIND, left)
    assert said in finding.message
    with pytest.raises(ShardLost, match=said):
        scan_orphans(site.machine(), older_than_ms=0, commit=True)
    assert not site.recover(commit=False).needed
    if delete:
        site.world.blob.delete(left)
    else:
        site.recover(commit=True, rollup=left, replace_log=True)
    assert verify_shard(site.machine()).findings == []
    assert contents(site.client(), site.shard_id, 3) == site.rows(4)
    assert scan_orphans(site.machine(), older_than_ms=0, commit=True).is_complete


def test_a_rollup_from_after_a_killed_recovery_is_newer(site: Site) -> None:
    site.lose(site.backup)
    killed_before_the_log_is_replaced(site)
    site.append(5)
    write_rollup(site.machine())
    site.lose()
    site.recover(commit=True)
    assert contents(site.client(), site.shard_id, 6) == site.rows(7)


def test_a_recovery_that_went_back_further_must_be_named_or_passed_over(site: Site) -> None:
    """Nothing shows whether it was killed, or its log was lost."""
    first = next(each.key for each in site.recover(commit=False).others if each.seqno == 1)
    left = killed_before_the_log_is_replaced(site, rollup=first)
    site.lose()
    newest = site.recover(commit=False).base
    assert newest.seqno == site.base
    with pytest.raises(InvalidUsage, match=f"{left} is of a later recovery, which copied {first}, .* --rollup"):
        site.recover(commit=True)
    site.recover(commit=True, rollup=newest.key)
    assert contents(site.client(), site.shard_id, 3) == site.rows(4)


@pytest.mark.parametrize("is_early", [False, True], ids=["sees its rollup", "looked before"])
def test_two_recoveries_at_once_end_in_one_log(site: Site, is_early: bool) -> None:
    """The one that loses leaves no rollup: of no log's history, it would be a ruin for verifications and orphan scans."""
    site.lose()
    client = site.client()
    verb = "set" if is_early else "compare_and_set"
    store = client.versions.blob if is_early else client.versions.consensus
    real = getattr(store, verb)

    def late(*args: object) -> object:
        site.recover(commit=True)
        return real(*args)

    setattr(store, verb, late)
    with pytest.raises(InvalidUsage, match="meanwhile"):
        recover_shard(client.versions, site.shard_id, commit=True)
    assert contents(site.client(), site.shard_id, 3) == site.rows(4)
    assert verify_shard(site.machine()).findings == []


def test_the_birth_of_a_recovered_log_names_its_origin() -> None:
    """Spec 24.7."""
    old = b"\x01" * 16
    new = recovered_birth(old, b"\x02" * 8)
    assert (len(new), is_recovered_from(new, old)) == (16, True)
    assert not is_recovered_from(old, new)
    assert not is_recovered_from(old, old)
    assert not is_recovered_from(new, b"")
    assert not is_recovered_from(recovered_birth(new, b"\x03" * 8), old)


@pytest.mark.slow
def test_the_recover_command_is_a_dry_run_until_commit(tmp_path, persist) -> None:
    disk, shard_id = Disk(tmp_path), ShardId.new()
    with disk.client() as client:
        with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
            for time in range(3):
                writer.append([row(time, "a", time)], lower=A(time), upper=A(time + 1))
        write_rollup(client.machine(shard_id))
        base = max(client.machine(shard_id).refresh().rollups)
        with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
            writer.append([row(3, "a", 3)], lower=A(3), upper=A(4))
    code, _, err = persist("admin", "recover", shard_id, *disk.args)
    assert (code, "nothing to do" in err) == (0, True)
    disk.set_diffs(shard_id, {})
    code, out, err = persist("admin", "recover", shard_id, "--last-seqno", base + 2, *disk.args)
    assert (code, "--commit" in err, disk.diffs(shard_id)) == (0, True, {})
    shown = dict(line.split("\t")[:2] for line in out.splitlines())
    assert shown["gone for good"] == f"versions from v{base + 1} to v{base + 2}"
    assert shown["log in consensus"] == "none"
    code, out, _ = persist("admin", "recover", shard_id, "--json", "--commit", *disk.args)
    report = json.loads(out)
    assert (code, report["committed"], report["base"]["seqno"]) == (0, True, base)
    assert list(disk.diffs(shard_id)) == [report["seqno"]]
    with disk.client() as client:
        assert contents(client, shard_id, 2) == [(time, "a", 1) for time in range(3)]
    assert created_key(shard_id) in disk.files()
