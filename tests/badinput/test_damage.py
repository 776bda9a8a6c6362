"""Durable bytes damaged behind the product's back: the error names their key, nothing is guessed or deleted, and all reads again once
the bytes are back.
"""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from persist_engine import Antichain, PersistClient, ShardId
from persist_engine.base.errors import (
    CorruptData,
    ErrorKind,
    ForkedLog,
    Incompatible,
    InvariantViolated,
    MissingBlob,
)
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, RetrySettings, Settings
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.client.write.outcomes import Appended
from persist_engine.work.rollup import write_rollup
from persist_kit.disk import SETTINGS, Disk, write
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of
TIMES = range(1, 5)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, ShardId, ShardId]:
    """The folder of a location with two shards: each test works on a copy."""
    folder, shards = tmp_path_factory.mktemp("disk"), (ShardId.new(), ShardId.new())
    with Disk(folder).client() as client:
        for shard_id in shards:
            client.initialise(shard_id, SCHEMA)
            with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
                writer.append([], lower=A(0), upper=A(1))
            write(client, shard_id, TIMES)
            write_rollup(client.machine(shard_id))
            write(client, shard_id, range(5, 6))
    return folder, *shards


@pytest.fixture
def shard(disk: Disk, written: tuple[Path, ShardId, ShardId], tmp_path: Path) -> ShardId:
    """Four appends, a rollup after them, one append more: parts, two rollups, and diffs before and after the second."""
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    return written[1]


@pytest.fixture
def other(shard: ShardId, written: tuple[Path, ShardId, ShardId]) -> ShardId:
    """Another shard of the location, with the same history."""
    return written[2]


EXPECTED = [(time, f"n{time}", 1) for time in range(1, 6)]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


DAMAGE = {
    "truncated": lambda data: data[:-7],
    "halved": lambda data: data[: len(data) // 2],
    "flipped": flipped,
    "first byte": lambda data: b"\x00" + data[1:],
    "emptied": lambda data: b"",
    "garbage": lambda data: b"\xde\xad\xbe\xef" * 64,
    "longer": lambda data: data + b"\x00" * 64,
    "missing": None,
}


#: Every command meets these; `read` meets all of them.
EVERY_COMMAND = ("flipped", "missing")


def damage(path, how) -> None:
    if DAMAGE[how] is None:
        path.unlink()
    else:
        path.write_bytes(DAMAGE[how](path.read_bytes()))


def refuses(persist, disk: Disk, shard: ShardId, key: str, kind: ErrorKind, code: int, *, command=("read",)) -> None:
    """The command line ends with `code` and one line that names the kind and the key, and changes no byte of the shard's data."""
    got, out, err = persist(*command, shard, *disk.args, "--json")
    assert (got, err.count("\n")) == (code, 1), err
    assert err.startswith(f"error: {kind.value}: ")
    assert key in err
    report = json.loads(out.splitlines()[-1])
    if command == ("read",):
        assert report == {"error": report["error"], "kind": kind.value, "exit_code": code}


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_part_is_named_and_everything_reads_again_when_it_is_restored(disk, shard, persist, how):
    """Spec A.4."""
    path = disk.paths(shard, kind="part")[1]
    good = path.read_bytes()
    damage(path, how)
    before = disk.files()
    kind, error = (ErrorKind.MISSING_BLOB, MissingBlob) if how == "missing" else (ErrorKind.CORRUPT, CorruptData)
    refuses(persist, disk, shard, disk.key(path), kind, 74)
    with disk.client() as client:
        with pytest.raises(error, match=disk.key(path)) as raised:
            contents(client, shard, 5)
        assert raised.value.detail["key"] == disk.key(path)
        # Appends do not need the damaged part, and go on.
        with client.open_writer(shard, SCHEMA, purpose="test") as writer:
            assert isinstance(writer.append([], lower=A(6), upper=A(7)), Appended)
    # Nothing that maintenance does deletes or replaces what it cannot read.
    code, _, err = persist("maintain", "compact", shard, *disk.args)
    assert code in (0, 74), err
    assert {key: data for key, data in disk.files().items() if key in before} == before
    path.write_bytes(good)
    with disk.client() as client:
        assert contents(client, shard, 5) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_rollup_is_named_and_everything_reads_again_when_it_is_restored(disk, shard, persist, how):
    path = disk.paths(shard, kind="rollup")[-1]
    good = path.read_bytes()
    damage(path, how)
    before = disk.everything(shard)
    kind, error = (ErrorKind.MISSING_BLOB, MissingBlob) if how == "missing" else (ErrorKind.CORRUPT, CorruptData)
    others = [
        ("inspect", "shard"),
        ("inspect", "state"),
        ("maintain", "rollup"),
        ("maintain", "gc"),
        ("maintain", "compact"),
    ]
    for command in [("read",), *(others if how in EVERY_COMMAND else [])]:
        refuses(persist, disk, shard, disk.key(path), kind, 74, command=command)
    with disk.client() as client:
        for call in (
            lambda: client.open_writer(shard, SCHEMA, purpose="test"),
            lambda: client.initialise(shard, SCHEMA),
            lambda: client.recent_upper(shard),
        ):
            with pytest.raises(error, match=disk.key(path)):
                call()
    assert disk.everything(shard) == before
    path.write_bytes(good)
    with disk.client() as client:
        assert contents(client, shard, 5) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "missing"])
@pytest.mark.parametrize("which", ["head", "middle"])
def test_a_damaged_diff_is_named_and_everything_reads_again_when_it_is_restored(disk, shard, persist, how, which):
    good = disk.diffs(shard)
    seqno = max(good) if which == "head" else max(good) - 1
    disk.set_diffs(shard, {**good, seqno: DAMAGE[how](good[seqno])})
    before = disk.everything(shard)
    others = [("inspect", "shard"), ("inspect", "diffs"), ("maintain", "gc")]
    for command in [("read",), *(others if how in EVERY_COMMAND else [])]:
        refuses(persist, disk, shard, f"{shard} v{seqno}", ErrorKind.CORRUPT, 74, command=command)
    with disk.client() as client, pytest.raises(CorruptData, match=f"{shard} v{seqno}"):
        client.open_writer(shard, SCHEMA, purpose="test")
    assert disk.everything(shard) == before
    disk.set_diffs(shard, good)
    with disk.client() as client:
        assert contents(client, shard, 5) == EXPECTED


def test_a_live_writer_that_meets_a_damaged_diff_stops_and_goes_on_when_it_is_restored(disk, shard):
    with disk.client() as client, disk.client() as rival:
        writer = client.open_writer(shard, SCHEMA, purpose="test")
        write(rival, shard, range(6, 7))
        good = disk.diffs(shard)
        seqno = max(good)
        disk.set_diffs(shard, {**good, seqno: flipped(good[seqno])})
        with pytest.raises(CorruptData, match=f"{shard} v{seqno}"):
            writer.append([row(7, "n7", 7)], lower=A(7), upper=A(8))
        disk.set_diffs(shard, good)
        writer.append([row(7, "n7", 7)], lower=A(7), upper=A(8))
        assert contents(client, shard, 7) == [(time, f"n{time}", 1) for time in range(1, 8)]


def test_parts_that_changed_places_are_noticed(disk, shard, other):
    first, second = disk.paths(shard, kind="part")[:2]
    foreign = disk.paths(other, kind="part")[2]
    good = {path: path.read_bytes() for path in (first, second)}
    for wrong in (good[second], foreign.read_bytes(), disk.paths(shard, kind="rollup")[0].read_bytes()):
        first.write_bytes(wrong)
        with disk.client() as client, pytest.raises(CorruptData, match=disk.key(first)):
            contents(client, shard, 5)
    first.write_bytes(good[first])
    with disk.client() as client:
        assert contents(client, shard, 5) == EXPECTED


@pytest.mark.slow
def test_rollups_that_changed_places_are_noticed(disk, shard, other, persist):
    older, newest = disk.paths(shard, kind="rollup")[0], disk.paths(shard, kind="rollup")[-1]
    good = newest.read_bytes()
    for wrong in (
        older.read_bytes(),
        disk.paths(other, kind="rollup")[-1].read_bytes(),
        disk.paths(shard, kind="part")[0].read_bytes(),
    ):
        newest.write_bytes(wrong)
        refuses(persist, disk, shard, disk.key(newest), ErrorKind.CORRUPT, 74)
    newest.write_bytes(good)
    with disk.client() as client:
        assert contents(client, shard, 5) == EXPECTED


def test_diffs_that_changed_places_are_noticed(disk, shard, other, persist):
    good, foreign = disk.diffs(shard), disk.diffs(other)
    head = max(good)
    assert good.keys() == foreign.keys()
    disk.set_diffs(shard, {**good, head: good[head - 1]})
    refuses(persist, disk, shard, f"{shard} v{head}", ErrorKind.CORRUPT, 74)
    disk.set_diffs(shard, {**good, head - 1: good[head], head: good[head - 1]})
    refuses(persist, disk, shard, f"{shard} v{head}", ErrorKind.CORRUPT, 74)
    for seqno in (head, head - 1):
        disk.set_diffs(shard, {**good, seqno: foreign[seqno]})
        before = disk.everything(shard)
        with disk.client() as client, pytest.raises((CorruptData, InvariantViolated), match=str(shard)):
            contents(client, shard, 5)
        assert disk.everything(shard) == before
    disk.set_diffs(shard, good)
    with disk.client() as client:
        assert contents(client, shard, 5) == EXPECTED


@pytest.mark.parametrize("change", ["data = 'text'", "sequence_number = 'new'"])
def test_regression_entries_of_other_types_are_noticed(disk, shard, persist, change):
    """SQLite takes any value in any column; the second one ended in a TypeError."""
    with sqlite3.connect(disk.database) as connection:
        newest = "SELECT max(rowid) FROM consensus WHERE shard = ?"
        connection.execute(f"UPDATE consensus SET {change} WHERE rowid = ({newest})", (shard,))
    connection.close()
    refuses(persist, disk, shard, str(shard), ErrorKind.CORRUPT, 74)


def test_regression_a_table_of_another_program_is_refused_at_once_and_left_as_it_is(disk, persist):
    """A command tried for a minute, and a program without end."""
    (disk.blobs / ".tmp").mkdir(parents=True)
    with sqlite3.connect(disk.database) as connection:
        connection.execute("CREATE TABLE consensus (id INTEGER, text TEXT)")
    connection.close()
    before = disk.database.read_bytes()
    code, out, err = persist("ls", *disk.args[:-1], "60")
    assert (code, out) == (70, "")
    assert err.startswith("error: StoreRefused: open at sqlite:")
    assert "this is not a log of persist, but it has a table named consensus: choose another file" in err
    assert disk.database.read_bytes() == before


def test_a_hole_in_the_log_is_noticed(disk, shard):
    good = disk.diffs(shard)
    head = max(good)
    disk.set_diffs(shard, {seqno: data for seqno, data in good.items() if seqno != head - 1})
    before = disk.everything(shard)
    with (
        disk.client() as client,
        pytest.raises((InvariantViolated, CorruptData), match=f"{shard}.* gap after v{head - 2}"),
    ):
        contents(client, shard, 5)
    assert disk.everything(shard) == before


def test_a_log_cut_short_under_a_live_writer_is_never_written_over(disk, shard):
    """As after a restore of yesterday's backup: the writer knows of versions that the log no longer has."""
    with disk.client() as client, client.open_writer(shard, SCHEMA, purpose="test") as writer:
        writer.append([row(6, "n6", 6)], lower=A(6), upper=A(7))
    good = disk.diffs(shard)
    for lost in (1, 2, len(good)):
        disk.set_diffs(shard, good)
        with disk.client() as client:
            writer = client.open_writer(shard, SCHEMA, purpose="test")
            writer.fetch_recent_upper()
            known = disk.diffs(shard)
            cut = dict(sorted(known.items())[: len(known) - lost])
            disk.set_diffs(shard, cut)
            for _ in range(2):
                with pytest.raises(ForkedLog, match=f"log of shard {shard} is not .* ends before it"):
                    writer.append([row(7, "n7", 7)], lower=A(7), upper=A(8))
            assert disk.diffs(shard) == cut
    disk.set_diffs(shard, good)
    with disk.client() as client, client.open_writer(shard, SCHEMA, purpose="test") as writer:
        assert isinstance(writer.append([row(7, "n7", 7)], lower=A(7), upper=A(8)), Appended)


# -- newer code ----------------------------------------------------------------------------------------------------------

MAJOR, MINOR, _ = (int(part) for part in APPLIER_VERSION.split("."))
NEWER = f"{MAJOR}.{MINOR + 2}.0"


def by_newer_code(monkeypatch: pytest.MonkeyPatch, disk: Disk, shard: ShardId, step) -> None:
    """Run `step(client)` as the code of version NEWER would."""
    with monkeypatch.context() as patch:
        patch.setattr("persist_engine.shard.applier.APPLIER_VERSION", NEWER)
        patch.setattr("persist_engine.base.version.APPLIER_VERSION", NEWER)
        with disk.client() as client:
            step(client)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["diff", "rollup"])
def test_state_of_newer_code_is_refused_and_left_as_it_is(disk, shard, persist, monkeypatch, what):
    def step(client: PersistClient) -> None:
        write(client, shard, range(6, 7))
        if what == "rollup":
            write_rollup(client.machine(shard))

    with disk.client() as client:
        live = client.open_writer(shard, SCHEMA, purpose="test")
        by_newer_code(monkeypatch, disk, shard, step)
        before = disk.everything(shard)
        with pytest.raises(Incompatible, match=f"{NEWER}.*upgrade"):
            live.append([row(7, "n7", 7)], lower=A(7), upper=A(8))
        blobs, log = disk.everything(shard)
        assert log == before[1]
        assert before[0].items() <= blobs.items()
        before = blobs, log
    for command in (
        ("read",),
        ("inspect", "shard"),
        ("maintain", "rollup"),
        ("maintain", "gc"),
        ("maintain", "compact"),
    ):
        refuses(persist, disk, shard, NEWER, ErrorKind.INCOMPATIBLE, 75, command=command)
    with disk.client() as client:
        for call in (lambda: client.open_writer(shard, SCHEMA, purpose="test"), lambda: client.recent_upper(shard)):
            with pytest.raises(Incompatible):
                call()
    assert disk.everything(shard) == before
    by_newer_code(monkeypatch, disk, shard, lambda client: write(client, shard, range(7, 8)))


# -- the same on memory stores, through the handles alone ------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", ["part", "rollup"])
def test_damaged_blobs_in_memory_stores_are_named_too(how, kind):
    world = World(settings=SETTINGS)
    shard_id = world.shard_id()
    write(world.process(), shard_id, range(3))
    write_rollup(world.process().machine(shard_id))
    key = max(
        world.blob_keys(shard_id, kind=kind),
        key=lambda key: int(key.split("/v")[1].split("/")[0]) if kind == "rollup" else key,
    )
    good = world.blob.get(key)
    if DAMAGE[how] is None:
        world.blob.delete(key)
    else:
        world.blob.set(key, DAMAGE[how](good))
    with pytest.raises(MissingBlob if how == "missing" else CorruptData, match=key):
        contents(world.process(), shard_id, 2)
    world.blob.set(key, good)
    assert contents(world.process(), shard_id, 2) == [(0, "n0", 1), (1, "n1", 1), (2, "n2", 1)]


def test_gc_and_compaction_over_damage_delete_nothing_of_it():
    """Maintenance that runs into damage stops with the key, and the data that is whole stays."""
    settings = Settings(
        retry=RetrySettings(give_up_ms=300),
        batch=BatchSettings(inline_part_bytes_max=0),
        maintenance=MaintenanceSettings(rollup_threshold=4, gc_versions_min=1),
        compaction=CompactionSettings(claim_ms=1),
    )
    world = World(settings=settings)
    shard_id = world.shard_id()
    write(world.process(), shard_id, range(8))
    machine = world.process().machine(shard_id)
    write_rollup(machine)
    from persist_engine.work.compact import compact_due
    from persist_engine.work.gc import gc_and_truncate

    state = world.process().machine(shard_id).refresh()
    part = f"{shard_id}/{next(iter(next(iter(state.trace.batches())).blob_keys()))}"
    good = world.blob.get(part)
    world.blob.set(part, flipped(good))
    parts = world.blob_keys(shard_id, kind="part")
    for process in (
        lambda: compact_due(world.process().machine(shard_id)),
        lambda: contents(world.process(), shard_id, 7),
    ):
        world.env.sleep(0.01)
        with pytest.raises(CorruptData, match=part):
            process()
    assert parts <= world.blob_keys(shard_id, kind="part")
    world.blob.set(part, good)
    earliest = min(world.blob_keys(shard_id, kind="rollup"), key=lambda key: int(key.split("/v")[1].split("/")[0]))
    whole = world.blob.get(earliest)
    world.blob.set(earliest, whole[:-3])
    blobs = {key: world.blob.get(key) for kind in ("part", "rollup") for key in world.blob_keys(shard_id, kind=kind)}
    with pytest.raises(CorruptData, match=earliest):
        gc_and_truncate(world.process().machine(shard_id))
    assert blobs == {key: world.blob.get(key) for key in blobs}
    world.blob.set(earliest, whole)
    assert gc_and_truncate(world.process().machine(shard_id)).diffs_truncated > 0
    assert contents(world.process(), shard_id, 7) == [(time, f"n{time}", 1) for time in range(8)]
