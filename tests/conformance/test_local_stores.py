"""What a machine does to files: crashes, other processes, wrong places."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, Determinate, Indeterminate, InvalidUsage, NotKept, StoreRefused
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo
from persist_engine.storage.blob_file import FileBlob
from persist_engine.storage.consensus_sqlite import LENGTHEN_EVERY, LOG_BYTES, SqliteConsensus
from persist_engine.testing.conformance import entry, fill
from persist_engine.work.compact import compact
from persist_engine.work.outcome import Ending
from persist_kit.disk import files_bounded
from persist_kit.world import SCHEMA, row

RACER = """
import sys
from pathlib import Path
from persist_engine.base.versioned import CasResult, SeqNo, VersionedData
from persist_engine.storage.consensus_sqlite import SqliteConsensus

path, name, last = Path(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
consensus = SqliteConsensus(path)
print("ready", flush=True)
sys.stdin.readline()
for seqno in range(1, last + 1):
    expected = None if seqno == 1 else consensus.scan("s1", SeqNo(seqno - 1), 1)[0].tip
    if consensus.compare_and_set("s1", expected, VersionedData(SeqNo(seqno), name)) is CasResult.COMMITTED:
        print(seqno, flush=True)
    while (head := consensus.head("s1")) is None or head.seqno < seqno:
        pass
"""

ENDLESS_SETTER = """
import sys
from pathlib import Path
from persist_engine.base.env import SystemEnv
from persist_engine.storage.blob_file import FileBlob

blob = FileBlob(Path(sys.argv[1]), env=SystemEnv())
for index in range(1_000_000):
    blob.set(f"s1/n1/p{index}", b"%06d" % index * 50_000)
    print(index, flush=True)
"""

ENDLESS_APPENDER = """
import sys
from pathlib import Path
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.storage.consensus_sqlite import SqliteConsensus

consensus = SqliteConsensus(Path(sys.argv[1]))
tip = None
for seqno in range(1, 1_000_000):
    entry = VersionedData(SeqNo(seqno), b"%d" % seqno)
    consensus.compare_and_set("s1", tip, entry)
    tip = entry.tip
    print(seqno, flush=True)
"""


def python(program, *args):
    words = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill_after(process, lines):
    """Read `lines` lines, kill -9, and return the last acknowledged number, that may have been printed meanwhile."""
    for _ in range(lines):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    rest = [line for line in process.stdout.read().split("\n")[:-1] if line]
    process.wait()
    process.stdin.close()
    process.stdout.close()
    return int(rest[-1]) if rest else None


@pytest.fixture
def blob(tmp_path):
    return FileBlob(tmp_path / "blobs", env=SystemEnv())


@pytest.fixture
def consensus(tmp_path):
    consensus = SqliteConsensus(tmp_path / "consensus.db")
    yield consensus
    consensus.close()


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_one_process_wins_each_seqno(tmp_path, consensus):
    """Four processes race for the same 40 seqnos: each seqno is acknowledged to one, whose data stands."""
    racers = [python(RACER, tmp_path / "consensus.db", f"p{number}", 40) for number in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    answers = []
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    for number, racer in enumerate(racers):
        out, _ = racer.communicate(timeout=120)
        assert racer.returncode == 0
        answers += [(int(line), f"p{number}".encode()) for line in out.split()]
    assert Counter(seqno for seqno, _ in answers) == dict.fromkeys(range(1, 41), 1)
    assert sorted(answers) == [(int(row.seqno), row.data) for row in consensus.scan("s1", SeqNo(0), SCAN_ALL)]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    """SQLite's own error for it looks like one that passes."""
    connect = sqlite3.connect

    def read_only(*args, **more):
        connection = connect(*args, **more)
        connection.execute("PRAGMA query_only=ON")
        return connection

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(StoreRefused, match=r"log\.db: attempt to write a readonly database: every process"):
        SqliteConsensus(tmp_path / "log.db")


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_file_without_rights_is_refused_at_once(tmp_path, monkeypatch, mode):
    """One that it may only read failed with the first commit, a minute later; SQLite calls one that it may not read unavailable."""
    path = tmp_path / "log.db"
    SqliteConsensus(path).close()
    path.chmod(mode)
    # Root has every right.
    monkeypatch.setattr(os, "access", lambda path, wanted: (wanted & ~(path.stat().st_mode >> 6)) == 0)
    with pytest.raises(
        StoreRefused, match=r"log\.db: Permission denied; give this user the right to read and write the file"
    ):
        SqliteConsensus(path, create=False)


def test_commits_survive_kill_9(tmp_path):
    writer = python(ENDLESS_APPENDER, tmp_path / "consensus.db")
    last = kill_after(writer, 30) or 30
    consensus = SqliteConsensus(tmp_path / "consensus.db")
    log = consensus.scan("s1", SeqNo(0), SCAN_ALL)
    assert [row.data for row in log] == [b"%d" % seqno for seqno in range(1, len(log) + 1)]
    assert len(log) in (last, last + 1)
    assert consensus.compare_and_set("s1", log[-1].tip, entry(len(log) + 1)) is CasResult.COMMITTED
    consensus.close()


def test_the_log_file_is_lengthened_for_frequent_commits(tmp_path, consensus):
    """No reader sees the filler, and the commits that follow fit into the space."""
    wal = tmp_path / "consensus.db-wal"
    fill(consensus, "s1", 1, LENGTHEN_EVERY - 1)
    assert wal.stat().st_size < LOG_BYTES
    fill(consensus, "s1", LENGTHEN_EVERY, LENGTHEN_EVERY)
    size_bytes = wal.stat().st_size
    assert size_bytes >= LOG_BYTES
    assert list(consensus.list_keys()) == ["s1"]
    fill(consensus, "s1", LENGTHEN_EVERY + 1, 4 * LENGTHEN_EVERY)
    assert wal.stat().st_size == size_bytes
    crashed = tmp_path / "as-a-crash-leaves-it"
    crashed.mkdir()
    for path in tmp_path.glob("consensus.db*"):
        if not path.name.endswith("-shm"):
            (crashed / path.name).write_bytes(path.read_bytes())
    again = SqliteConsensus(crashed / "consensus.db")
    assert [row.data for row in again.scan("s1", SeqNo(0), SCAN_ALL)] == [
        b"data %d" % seqno for seqno in range(1, 4 * LENGTHEN_EVERY + 1)
    ]
    assert list(again.list_keys()) == ["s1"]
    again.close()


def test_a_log_that_cannot_be_lengthened_takes_commits_all_the_same(tmp_path, consensus):
    with files_bounded(LOG_BYTES // 2):
        fill(consensus, "s1", 1, 2 * LENGTHEN_EVERY + 1)
    assert (tmp_path / "consensus.db-wal").stat().st_size <= LOG_BYTES // 2
    assert len(consensus.scan("s1", SeqNo(0), SCAN_ALL)) == 2 * LENGTHEN_EVERY + 1


def test_a_killed_set_leaves_no_partial_object(tmp_path):
    """Spec 4.2."""
    writer = python(ENDLESS_SETTER, tmp_path / "blobs")
    last = kill_after(writer, 20) or 19
    blob = FileBlob(tmp_path / "blobs", env=SystemEnv())
    keys = {row.key for row in blob.list_prefix("")}
    assert keys >= {f"s1/n1/p{index}" for index in range(last + 1)}
    for key in keys:
        assert blob.get(key) == b"%06d" % int(key.removeprefix("s1/n1/p")) * 50_000


def test_a_failed_write_leaves_nothing_and_is_determinate(tmp_path, blob):
    with files_bounded(4096), pytest.raises(Determinate, match=r"set s1/p1 at file://.*File too large"):
        blob.set("s1/p1", b"x" * 5000)
    assert files_below(tmp_path / "blobs") == [".tmp"]


def test_a_directory_that_is_away_is_an_error_not_an_empty_store(tmp_path, blob):
    """Not mounted, say: what it lacks may well exist, and is neither missing nor deleted."""
    blob.set("s1/p1", b"x")
    (tmp_path / "blobs").rename(tmp_path / "elsewhere")
    calls = {
        "get": lambda: blob.get("s1/p1"),
        "set": lambda: blob.set("s1/p2", b"x"),
        "list": lambda: list(blob.list_prefix("s1/")),
        "delete": lambda: blob.delete("s1/p1"),
        "restore": lambda: blob.restore("s1/p1"),
    }
    for verb, call in calls.items():
        with pytest.raises(Determinate, match=f"{verb} s1/.* at file://") as caught:
            call()
        assert not isinstance(caught.value, NotKept)
    (tmp_path / "elsewhere").rename(tmp_path / "blobs")
    assert blob.get("s1/p1") == b"x"


def test_empty_folders_go_with_their_last_object(tmp_path, blob):
    blob.set("s1/v1/r1", b"x")
    blob.set("s1/v2/r2", b"x")
    blob.delete("s1/v1/r1")
    assert files_below(tmp_path / "blobs") == [".tmp", "s1", "s1/v2", "s1/v2/r2"]
    blob.delete("s1/v2/r2")
    assert files_below(tmp_path / "blobs") == [".tmp"]


def test_old_temporary_files_are_dropped_at_open_and_never_listed(tmp_path, blob):
    temps = tmp_path / "blobs" / ".tmp"
    (temps / "young").write_bytes(b"x")
    (temps / "old").write_bytes(b"x")
    two_days_ago_s = SystemEnv().now_ms() / 1000 - 2 * 24 * 60 * 60
    os.utime(temps / "old", (two_days_ago_s, two_days_ago_s))
    assert list(blob.list_prefix("")) == []
    FileBlob(tmp_path / "blobs", env=SystemEnv())
    assert files_below(temps) == ["young"]


def test_what_cannot_be_dropped_there_does_not_close_the_store(tmp_path, blob):
    """As files of another user, for a process that may only read."""
    blob.set("s1/p1", b"x")
    odd = tmp_path / "blobs" / ".tmp" / "old"
    odd.mkdir()
    os.utime(odd, (0, 0))
    assert FileBlob(tmp_path / "blobs", env=SystemEnv(), create=False).get("s1/p1") == b"x"


def test_no_key_leaves_the_root(tmp_path, blob):
    (tmp_path / "secret").write_bytes(b"secret")
    for key in ("../secret", "a/../../secret", str(tmp_path / "secret")):
        with pytest.raises(InvalidUsage):
            blob.get(key)
        with pytest.raises(InvalidUsage):
            blob.delete(key)
    with pytest.raises(InvalidUsage):
        list(blob.list_prefix("../"))
    assert (tmp_path / "secret").exists()


def test_a_folder_is_not_an_object(blob):
    blob.set("s1/n1/p1", b"x")
    assert blob.get("s1/n1") is None
    assert blob.delete("s1/n1") is None
    assert blob.get("s1/n1/p1/below") is None
    assert blob.delete("s1/n1/p1/below") is None
    for key in ("s1/n1", "s1/n1/p1/below"):
        with pytest.raises(Determinate, match=key):
            blob.set(key, b"y")
    assert blob.get("s1/n1/p1") == b"x"


def test_a_place_that_cannot_be_a_store_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 5000)
    with pytest.raises(StoreRefused, match="file/blobs"):
        FileBlob(tmp_path / "file" / "blobs", env=SystemEnv())
    with pytest.raises(StoreRefused, match=r"file/c\.db"):
        SqliteConsensus(tmp_path / "file" / "c.db")
    with pytest.raises(CorruptData, match="not a database"):
        SqliteConsensus(tmp_path / "file")
    with pytest.raises(StoreRefused, match="sqlite://.*: Is a directory"):
        SqliteConsensus(tmp_path)


def test_a_database_held_by_another_is_determinate(tmp_path, consensus):
    """A writer is stuck in its transaction: nothing of ours happened, and it works when the lock is gone."""
    waiting = SqliteConsensus(tmp_path / "consensus.db", busy_timeout_s=0.1)
    fill(waiting, "s1", 1, 1)
    holder = sqlite3.connect(tmp_path / "consensus.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Determinate, match=r"s1 at sqlite://.*locked"):
        waiting.compare_and_set("s1", entry(1).tip, entry(2))
    assert waiting.head("s1") == entry(1)
    holder.execute("ROLLBACK")
    assert waiting.compare_and_set("s1", entry(1).tip, entry(2)) is CasResult.COMMITTED
    holder.close()
    waiting.close()


def test_a_failed_commit_is_indeterminate_and_its_connection_is_not_used_again(tmp_path):
    """Spec 3.7. The write-ahead log is first written to at COMMIT."""
    consensus = SqliteConsensus(tmp_path / "consensus.db")
    written_bytes = (tmp_path / "consensus.db-wal").stat().st_size
    with (
        files_bounded(written_bytes),
        pytest.raises(Indeterminate, match=r"compare_and_set s1 at sqlite://.*disk I/O error"),
    ):
        consensus.compare_and_set("s1", None, entry(1))
    assert consensus.head("s1") is None
    assert consensus.compare_and_set("s1", None, entry(1)) is CasResult.COMMITTED
    consensus.close()


@pytest.mark.parametrize("room_bytes", [4096, 1 << 30])
def test_a_full_disk_is_named_whatever_sqlite_says(tmp_path, monkeypatch, consensus, room_bytes):
    """It was "disk I/O error" alone: SQLite finds no room for the files that it keeps beside the log."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=room_bytes // 4096, f_frsize=4096))
    written_bytes = (tmp_path / "consensus.db-wal").stat().st_size
    with files_bounded(written_bytes), pytest.raises(Indeterminate, match="disk I/O error") as refused:
        consensus.compare_and_set("s1", None, entry(1, b"x" * 100_000))
    named = f"sqlite://{tmp_path}/consensus.db: disk I/O error: the disk of {tmp_path} is full, make room on it"
    assert str(refused.value).endswith(named) == (room_bytes == 4096)


def test_a_full_disk_is_determinate_and_leaves_the_log_as_it_was(consensus):
    fill(consensus, "s1", 1, 1)
    with consensus._borrow("test") as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + 1}")
    with pytest.raises(Determinate, match=r"s1 at sqlite://.*full"):
        consensus.compare_and_set("s1", entry(1).tip, entry(2, b"x" * 100_000))
    assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(1)]
    assert consensus.compare_and_set("s1", entry(1).tip, entry(2)) is CasResult.COMMITTED


def test_a_write_holds_the_lock_before_it_reads(tmp_path, consensus):
    """Otherwise two processes could both read the head they expect, and one of them fails instead of mismatching (spec 3.8)."""
    holder = sqlite3.connect(tmp_path / "consensus.db", isolation_level=None, timeout=0)
    with consensus._write("test"), pytest.raises(sqlite3.OperationalError, match="locked"):
        holder.execute("BEGIN IMMEDIATE")
    holder.execute("BEGIN IMMEDIATE")
    holder.close()


def test_commits_are_synced(consensus):
    """Every connection needs synchronous=FULL: the write-ahead log alone loses the last commits at a power loss."""
    with consensus._borrow("test") as one, consensus._borrow("test") as another:
        for connection in (one, another):
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_closed_store_refuses_calls(tmp_path):
    consensus = SqliteConsensus(Path(tmp_path / "consensus.db"))
    consensus.close()
    with pytest.raises(InvalidUsage, match="was closed"):
        consensus.head("s1")


def test_handles_of_a_closed_client_end_instead_of_trying_for_ever(tmp_path):
    client = PersistClient.open(
        Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    )
    writer = client.open_writer(ShardId.new(), SCHEMA, purpose="test")
    client.close()
    with pytest.raises(InvalidUsage, match="was closed"):
        writer.fetch_recent_upper()
    with pytest.raises(InvalidUsage, match="was closed"):
        writer.append([row(1, "a", 0)], lower=Antichain.of(0), upper=Antichain.of(1))


def fail_stat_after_commit(monkeypatch, path):
    """The next compare-and-set cannot see, once it has committed, which file is at `path`."""
    stats, real_stat, real_call = [], Path.stat, SqliteConsensus.compare_and_set

    def stat(self, **options):
        if self == path and stats:
            stats.append("stat")
            if len(stats) == 3:  # the first was that of taking a connection
                stats.clear()
                raise PermissionError(13, "Permission denied")
        return real_stat(self, **options)

    def compare_and_set(self, *args):
        monkeypatch.setattr(SqliteConsensus, "compare_and_set", real_call)
        stats.append("armed")
        return real_call(self, *args)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(SqliteConsensus, "compare_and_set", compare_and_set)


def test_regression_1_a_commit_whose_check_fails_is_indeterminate(tmp_path, consensus, monkeypatch):
    """It was said not to have happened, though it had."""
    fill(consensus, "s1", 1, 1)
    fail_stat_after_commit(monkeypatch, tmp_path / "consensus.db")
    with pytest.raises(Indeterminate, match=r"compare_and_set s1 at sqlite://.*Permission denied"):
        consensus.compare_and_set("s1", entry(1).tip, entry(2))
    assert consensus.head("s1") == entry(2)


def test_regression_1_a_merge_result_whose_commit_check_fails_counts_as_applied(tmp_path, monkeypatch):
    """The output's blobs were deleted, which state named."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0))
    at, shard_id = Antichain.of, ShardId.new()
    with PersistClient.open(location, settings=settings) as client:
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        requests = []
        for time in range(3):
            updates = [row(time * 100 + number, "a", time) for number in range(8)]
            appended = writer.compare_and_append(updates, expected_upper=at(time), new_upper=at(time + 1))
            requests += appended.maintenance.requests
        fail_stat_after_commit(monkeypatch, tmp_path / "consensus.db")
        assert compact(writer.machine, requests[0]).ending is Ending.SUCCEEDED
    with PersistClient.open(location) as client, client.open_leased_reader(shard_id, purpose="check") as reader:
        assert reader.snapshot(at(2)).to_table().num_rows == 24
