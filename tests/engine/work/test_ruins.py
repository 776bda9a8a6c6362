"""Blobs that prove lost versions of a log are reported by verification, and stop the orphan scan before any deletion."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.errors import ShardLost
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, Settings
from persist_engine.storage.blob import BlobInfo
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.audit.finding import FindingKind
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.repair.force import force_compaction
from persist_engine.work.rollup import write_rollup
from persist_kit.disk import Disk
from persist_kit.world import SCHEMA, CountedConsensus, World, row

A = Antichain.of
SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0), maintenance=MaintenanceSettings(gc_versions_min=1))
DAY_MS = 86_400_000


class Site:
    """One shard whose consensus can lose entries."""

    def __init__(self) -> None:
        self.world = World(settings=SETTINGS)
        self.shard_id = self.world.shard_id()
        self.append(3)

    def machine(self):
        return self.world.process().machine(self.shard_id)

    def append(self, times: int, name: str = "a") -> None:
        with self.world.process().open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            upper = writer.fetch_recent_upper().time
            for time in range(upper, upper + times):
                writer.append([row(time, name, time)], lower=A(time), upper=A(time + 1))

    def backup(self) -> dict:
        return {key: list(log) for key, log in self.world.consensus._inner._logs.items()}

    def restore(self, logs: dict) -> None:
        consensus = MemConsensus()
        consensus._logs.update(logs)
        self.world.consensus = CountedConsensus(consensus)

    def blobs(self) -> set[str]:
        return {info.key for info in self.world.blob.list_prefix("")}

    def check_refused(self, kind: FindingKind) -> None:
        self.world.env.advance_ms(30 * DAY_MS)
        self.append(1)
        before = self.blobs()
        with pytest.raises(ShardLost, match="persist admin recover"):
            scan_orphans(self.machine(), older_than_ms=DAY_MS, commit=True)
        assert self.blobs() == before
        assert kind in {finding.kind for finding in verify_shard(self.machine()).findings}


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_log_that_ends_before_a_rollup_is_found(site: Site) -> None:
    """Spec 24.6."""
    backup = site.backup()
    site.append(20)
    write_rollup(site.machine())
    site.restore(backup)
    site.check_refused(FindingKind.LOG_BEHIND)


@pytest.mark.slow
@pytest.mark.parametrize("is_live", [True, False], ids=["its seqno is live", "its seqno was truncated"])
def test_a_log_that_was_rolled_back_and_grew_past_the_rollup_is_found(site: Site, is_live: bool) -> None:
    backup = site.backup()
    site.append(5)
    write_rollup(site.machine())
    site.restore(backup)
    site.append(20, "another")
    if not is_live:
        write_rollup(site.machine())
        gc_and_truncate(site.machine())
    site.check_refused(FindingKind.LOG_FORKED)


@pytest.mark.slow
def test_a_log_that_was_created_anew_and_grew_past_the_rollup_is_found(site: Site) -> None:
    """The ruins were moved away, which allowed the creation, and came back after it."""
    site.append(5)
    write_rollup(site.machine())
    ruins = {key: site.world.blob.get(key) for key in site.blobs()}
    for key in ruins:
        site.world.blob.delete(key)
    site.restore({})
    site.append(20)
    for key, data in ruins.items():
        site.world.blob.set(key, data or b"")
    site.check_refused(FindingKind.LOG_FORKED)


def test_leftovers_of_a_sound_shard_are_no_ruins(site: Site) -> None:
    """A second rollup of one version; and one whose link was lost in a crash and whose version was truncated long ago."""
    machine = site.machine()
    machine.refresh()
    assert machine.versions.write_rollup_for_state(machine.state) is not None
    for _ in range(3):
        site.append(5)
        write_rollup(site.machine())
        gc_and_truncate(site.machine())
    site.world.env.advance_ms(30 * DAY_MS)
    site.append(1)
    assert verify_shard(site.machine()).findings == []
    assert scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True).deleted == 1


def test_regression_parts_that_are_collected_after_a_listing_prove_no_lost_versions(site: Site) -> None:
    """Found by simulation: the rollup that a crash left unlinked named them, the log had begun after it, and the listing still had them."""
    machine = site.machine()
    assert machine.versions.write_rollup_for_state(machine.refresh()) is not None
    force_compaction(machine, full=True)
    write_rollup(machine)
    site.world.env.advance_ms(30 * DAY_MS)
    site.append(1)
    site.world.blob = CollectedOnceListed(site)
    scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True)
    assert site.world.blob.collected == 3
    assert verify_shard(site.machine()).findings == []


class CollectedOnceListed(MemBlob):
    """The blobs of a site, of which a collection deletes some between the first listing and what is done with it."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._objects = site.world.blob._objects
        self._site = site
        self.collected: int | None = None

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        found = super().list_prefix(prefix)
        if self.collected is None:
            self.collected = 0
            self.collected = gc_and_truncate(self._site.machine()).blobs_deleted
        return found


def test_a_gap_in_the_log_is_found(site: Site) -> None:
    site.append(10)
    write_rollup(site.machine())
    logs = site.backup()
    del logs[str(site.shard_id)][3]
    site.restore(logs)
    found = verify_shard(site.machine())
    assert [finding.kind for finding in found.findings] == [FindingKind.LOG_GAP]
    assert found.findings[0].key == f"{site.shard_id} v3"


def test_parts_newer_than_the_newest_version_are_reported(site: Site) -> None:
    backup = site.backup()
    site.world.env.advance_ms(1000)
    site.append(2)
    site.restore(backup)
    assert verify_shard(site.machine()).findings == []  # their append may be in flight
    site.world.env.advance_ms(DAY_MS)
    found = verify_shard(site.machine())
    assert ([each.kind for each in found.findings], found.is_corrupt) == ([FindingKind.PARTS_AHEAD], False)
    assert "2 parts" in found.findings[0].message


@pytest.mark.slow
def test_a_shard_without_a_log_is_found_by_name_and_among_all(tmp_path, persist) -> None:
    disk, shard_id, sound, never = Disk(tmp_path), ShardId.new(), ShardId.new(), ShardId.new()
    with disk.client() as client:
        for each in (shard_id, sound):
            with client.open_writer(each, SCHEMA, purpose="test") as writer:
                writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    disk.set_diffs(shard_id, {})
    code, out, _ = persist("admin", "verify", shard_id, "--json", *disk.args)
    report = json.loads(out)
    assert (code, report["findings"][0]["kind"]) == (74, "LogLost")
    assert "persist admin recover" in report["findings"][0]["message"]
    code, out, _ = persist("admin", "verify", "--json", *disk.args)
    assert (code, {each["shard_id"]: each["corrupt"] for each in json.loads(out)}) == (
        74,
        {shard_id: True, sound: False},
    )
    code, _, err = persist("admin", "verify", never, *disk.args)
    assert (code, "does not exist" in err) == (64, True)
    with PersistClient.open(Location(blob=disk.location.blob, consensus=disk.location.consensus)) as client:
        assert list(client.shards()) == [sound]


def test_an_entry_that_follows_another_history_is_found(site: Site) -> None:
    """Two halves of two logs, as a fork leaves them: reported as a fork, and the named blobs are still checked."""
    site.append(2)
    backup = site.backup()
    site.append(4)
    write_rollup(site.machine())
    ours = site.backup()[str(site.shard_id)]
    site.restore(backup)
    site.append(4, "another")
    theirs = site.backup()[str(site.shard_id)]
    cut = len(backup[str(site.shard_id)]) + 2
    site.restore({str(site.shard_id): theirs[:cut] + ours[cut:]})
    found = verify_shard(site.machine())
    assert FindingKind.LOG_FORKED in {finding.kind for finding in found.findings}
