"""Reclaiming a shard: what is deleted, what stops it, and that a repetition completes it."""

import json

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.main import application
from persist_engine.client import closing
from persist_engine.client.reclaiming import reclaim
from persist_engine.model.ids import CriticalReaderId, PartId, ShardId
from persist_engine.model.ownership import Owner
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.orphans import scan_orphans
from persist_kit.disk import Disk, write
from persist_kit.world import SCHEMA
from typer.testing import CliRunner

MINE, OTHER = Owner("op", "team", "flights"), Owner("op", "team", "other")
HOLD = CriticalReaderId("c01234567-89ab-cdef-0123-456789abcdef")


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    made.shard_id = ShardId.new()
    with made.client() as client:
        client.adopt(MINE, None, made.shard_id)
        write(client, made.shard_id, range(8))
        client.open_critical_since(made.shard_id, HOLD, opaque=b"op", purpose="operator retention")
    return made


def run(disk, *, purge=True, owner=MINE, max_deletes=100):
    with disk.client() as client:
        return reclaim(client, disk.shard_id, owner, own_hold=HOLD, purge=purge, max_deletes=max_deletes)


def parts(disk):
    return [path for path in (disk.blobs / disk.shard_id).glob("n*/p*") if path.is_file()]


def strays(disk, count):
    folder = disk.blobs / disk.shard_id / "n0000099"
    folder.mkdir(parents=True)
    with disk.client() as client:
        now_ms = client.machine(disk.shard_id).env.now_ms()
    for index in range(count):
        (folder / PartId.staged_at(now_ms + index, bytes(10))).write_bytes(b"staged just now")


def test_a_tombstone_has_no_data_and_keeps_its_name(disk):
    assert parts(disk)
    outcome = run(disk, purge=False)
    assert (outcome.verdict, outcome.blobs_deleted > 0, parts(disk)) == ("Reclaimed", True, [])
    with disk.client() as client:
        assert client.is_finalized(disk.shard_id)
        assert client.owner_of(disk.shard_id) == MINE
        assert client.recent_upper(disk.shard_id).is_empty(), "nothing can be appended"
    assert run(disk, purge=False).verdict == "Reclaimed", "a repetition changes nothing"


def test_a_purge_removes_what_was_never_linked_in_bounded_runs_and_then_the_name(disk):
    strays(disk, 5)
    first = run(disk, max_deletes=3)
    assert first.verdict == "Incomplete"
    assert len(parts(disk)) == 2
    with disk.client() as client:
        assert client.owner_of(disk.shard_id) == MINE, "the name is free only when nothing is left"
    assert run(disk, max_deletes=3).verdict == "Reclaimed"
    assert parts(disk) == []
    with disk.client() as client:
        assert client.owner_of(disk.shard_id) is None
        assert client.registered(MINE) is None
        assert client.recent_upper(disk.shard_id).is_empty(), "nothing can be appended"
    assert run(disk).verdict == "NotOwned", "and a repetition leaves the tombstone alone"


def test_an_owner_that_takes_the_shard_over_meanwhile_keeps_its_name(disk, monkeypatch):
    def taken_over(machine, **options):
        with disk.client() as other:
            other.adopt(OTHER, disk.shard_id, disk.shard_id, take_over=True)
        return scan_orphans(machine, **options)

    monkeypatch.setattr("persist_engine.client.reclaiming.scan_orphans", taken_over)
    assert run(disk).verdict == "Reclaimed"
    with disk.client() as client:
        assert client.owner_of(disk.shard_id) == OTHER
        assert client.registered(OTHER) == disk.shard_id


def test_nothing_is_deleted_while_a_reader_holds_the_shard(disk):
    with disk.client() as client, client.open_leased_reader(disk.shard_id, SCHEMA, purpose="report") as reader:
        held = run(disk)
        assert held.verdict == "Held"
        assert reader.reader_id in held.message
        assert "report" in held.message
        assert reader.snapshot(7).to_table().num_rows > 0
        assert client.recent_upper(disk.shard_id).time == 8, "writers go on"
    assert run(disk).verdict == "Reclaimed"


def test_a_reader_that_comes_while_the_shard_is_closed_stops_it_too(disk, monkeypatch):
    """Found by simulation (seed 285): the run raised FinalizationError instead of answering what holds the shard."""
    looked = closing.obstacles
    with disk.client() as other:
        readers = []

        def then_a_reader_comes(*args, **options):
            found = looked(*args, **options)
            if not readers:
                readers.append(other.open_leased_reader(disk.shard_id, SCHEMA, purpose="report"))
            return found

        monkeypatch.setattr(closing, "obstacles", then_a_reader_comes)
        held = run(disk)
        assert (held.verdict, readers[0].reader_id in held.message) == ("Held", True)
        assert readers[0].snapshot(7).to_table().num_rows > 0
        readers[0].expire()
    assert run(disk).verdict == "Reclaimed"


def test_an_owner_that_moves_its_hold_at_the_same_time_stops_it_too(disk, monkeypatch):
    """Found by simulation (seed 1879): the run raised Fenced."""
    move = Machine.compare_and_downgrade_since
    moved = []

    def first_by_the_owner(machine, *args, **options):
        if not moved:
            moved.append(HOLD)
            with disk.client() as other:
                other.open_critical_since(disk.shard_id, HOLD, opaque=b"op").compare_and_downgrade_since(
                    b"op", (b"new", 3)
                )
        return move(machine, *args, **options)

    monkeypatch.setattr(Machine, "compare_and_downgrade_since", first_by_the_owner)
    held = run(disk)
    assert (held.verdict, HOLD in held.message, bool(parts(disk))) == ("Held", True, True)
    assert run(disk).verdict == "Reclaimed"


def test_another_critical_reader_stops_it_too(disk):
    other = CriticalReaderId.new()
    with disk.client() as client:
        client.open_critical_since(disk.shard_id, other, opaque=b"t", purpose="archive")
    held = run(disk)
    assert (held.verdict, other in held.message, bool(parts(disk))) == ("Held", True, True)


@pytest.mark.parametrize("purge", [False, True])
def test_a_shard_of_another_owner_is_left_alone(disk, purge):
    before = disk.everything(disk.shard_id)
    assert run(disk, owner=OTHER, purge=purge).verdict == "NotOwned"
    with disk.client() as client:
        client.disown(disk.shard_id)
    assert run(disk, purge=purge).verdict == "NotOwned"
    assert disk.everything(disk.shard_id) == before


def test_a_name_without_a_shard_is_freed(disk):
    owner, shard_id = Owner("op", "team", "empty"), ShardId.new()
    with disk.client() as client:
        client.adopt(owner, None, shard_id)
        outcome = reclaim(client, shard_id, owner, own_hold=HOLD, purge=True, max_deletes=1)
        assert (outcome.verdict, client.registered(owner)) == ("NoShard", None)


def test_an_owner_that_does_not_know_its_shard_gives_up_the_one_that_its_name_leads_to(disk, tmp_path):
    """Such as a resource that a backup brought back without its status."""
    file = tmp_path / "report.json"
    args = ["maintain", "reclaim", "--purge", "--report", str(file), *disk.args, "--owner"]
    assert CliRunner().invoke(application(), [*args, str(MINE)]).exit_code == 0
    assert json.loads(file.read_text())["verdict"] == "Held", "another token than its name"
    with disk.client() as client:
        reader = client.open_critical_since(disk.shard_id, HOLD, opaque=b"op", purpose="operator retention")
        reader.compare_and_downgrade_since(b"op", (str(MINE).encode(), reader.since))
    assert CliRunner().invoke(application(), [*args, str(MINE)]).exit_code == 0
    report = json.loads(file.read_text())
    assert (report["shard_id"], report["verdict"], parts(disk)) == (disk.shard_id, "Reclaimed", [])
    assert CliRunner().invoke(application(), [*args, str(OTHER)]).exit_code == 0
    assert json.loads(file.read_text())["verdict"] == "NoShard"


def test_the_command_reports_how_far_it_came(disk, tmp_path):
    file = tmp_path / "report.json"
    args = ["maintain", "reclaim", disk.shard_id, "--own-hold", HOLD, "--purge", "--report", str(file), *disk.args]
    assert CliRunner().invoke(application(), [*args, "--owner", str(MINE)]).exit_code == 0
    report = json.loads(file.read_text())
    assert (report["type"], report["verdict"], report["blobs_deleted"] > 0) == ("Reclaim", "Reclaimed", True)
    result = CliRunner().invoke(application(), [*args, "--owner", "nonsense"])
    assert isinstance(result.exception, InvalidUsage)
