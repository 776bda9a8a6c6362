"""Stores that are away, full, frozen, emptied or replaced: bounded, named by address without credentials, never written over,
and fine again once the store is.
"""

import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, InvariantViolated, PersistError, StoreLost, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.consensus_sqlite import SqliteConsensus
from persist_engine.storage.open import open_blob, open_consensus
from persist_kit.disk import SETTINGS, write
from persist_kit.servers import redis_server, s3_server
from persist_kit.world import SCHEMA, contents, row

A = Antichain.of
LOST = "lost"


def append(writer, time: int):
    return writer.compare_and_append([row(time, f"n{time}", time)], expected_upper=A(time), new_upper=A(time + 1))


def rows(count: int) -> list:
    return [(time, f"n{time}", 1) for time in range(count)]


def files_of(database):
    return list(database.parent.glob(f"{database.name}*"))


def unchecked(location) -> PersistClient:
    """A client that does not ask whether the stores are a pair: what would write over ruins if that check were gone."""
    env, metrics = SystemEnv(), NoMetrics()
    blob = open_blob(location.blob, env=env, metrics=metrics)
    consensus = open_consensus(location.consensus, env=env, metrics=metrics)
    return PersistClient(blob, consensus, settings=SETTINGS, env=env, metrics=metrics)


# -- the log is gone -----------------------------------------------------------------------------------------------------


def test_a_deleted_sqlite_file_is_never_written_on(disk, shard_id, tmp_path):
    """Open connections would go on committing into the deleted file, acknowledging what is gone with the process."""
    with disk.client() as client:
        write(client, shard_id, range(3))
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        append(writer, 3)
        aside = tmp_path / "aside"
        aside.mkdir()
        for path in files_of(disk.database):
            shutil.move(path, aside / path.name)
        for call in (
            lambda: append(writer, 4),
            writer.fetch_recent_upper,
            lambda: client.inspect(shard_id),
            lambda: list(client.shards()),
            lambda: contents(client, shard_id, 3),
        ):
            with pytest.raises(CorruptData, match=f"{disk.location.consensus}.*deleted.*{LOST}"):
                call()
        assert not disk.database.exists()
        for path in aside.iterdir():
            shutil.move(path, disk.database.parent / path.name)
        assert isinstance(append(writer, 4), Appended)
    with disk.client() as client:
        assert contents(client, shard_id, 4) == rows(5)


def deleted(disk):
    disk.database.with_name("consensus.db-wal").unlink()


def read_in_this_process(disk):
    """A copy of the file ends the locks of its process, and the last connection of another process then deletes the log."""
    shutil.copy(disk.database, disk.database.with_name("copy"))
    ending = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM consensus').fetchall(); c.close()"
    subprocess.run([sys.executable, "-c", ending, disk.database], check=True)


@pytest.mark.parametrize("lose", [deleted, read_in_this_process])
def test_regression_no_commit_is_lost_with_a_deleted_write_ahead_log(disk, shard_id, lose):
    """Later commits were acknowledged, and lost with the process."""
    with disk.client() as client:
        write(client, shard_id, range(3))
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        append(writer, 3)
        lose(disk)
        assert not disk.database.with_name("consensus.db-wal").exists()
        assert isinstance(append(writer, 4), Appended)
        reading = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM consensus').fetchone()[0])"
        seen = subprocess.run([sys.executable, "-c", reading, disk.database], check=True, stdout=subprocess.PIPE)
        with sqlite3.connect(disk.database) as connection:
            assert connection.execute("SELECT count(*) FROM consensus").fetchone() == (int(seen.stdout),)
        connection.close()
    with disk.client() as client:
        assert contents(client, shard_id, 4) == rows(5)


def test_regression_a_commit_to_a_write_ahead_log_that_is_deleted_meanwhile_is_not_acknowledged(
    disk, shard_id, monkeypatch
):
    with disk.client() as client:
        write(client, shard_id, range(3))
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        append(writer, 3)
        take = SqliteConsensus._take

        def then_deleted(self, *given):
            taken = take(self, *given)
            deleted(disk)
            return taken

        monkeypatch.setattr(SqliteConsensus, "_take", then_deleted)
        with pytest.raises(
            CorruptData, match=r"at sqlite:.*consensus.db-wal was deleted or replaced meanwhile; acknowledged"
        ):
            append(writer, 4)
        monkeypatch.undo()


@pytest.mark.parametrize("remade", ["empty file", "by another process", "with the shard made anew"])
def test_a_replaced_sqlite_file_is_never_written_on(disk, shard_id, remade):
    with disk.client() as client:
        write(client, shard_id, range(3))
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        append(writer, 3)
        for path in files_of(disk.database):
            path.unlink()
        if remade == "empty file":
            disk.database.touch()
        else:
            with pytest.raises(StoreLost, match=f"{disk.location.consensus}.*{disk.location.blob}"):
                disk.client()
            with unchecked(disk.location) as rival:
                if remade == "with the shard made anew":
                    shutil.rmtree(disk.blobs / shard_id)  # the shard is not made anew over its blobs
                    rival.initialise(shard_id, SCHEMA)
        with pytest.raises((CorruptData, InvariantViolated), match=LOST):
            append(writer, 4)
        with pytest.raises((CorruptData, InvariantViolated), match=LOST):
            append(writer, 4)
        if remade == "by another process":
            assert disk.diffs(shard_id) == {}
        if remade == "with the shard made anew":
            assert max(disk.diffs(shard_id)) == 1


@pytest.mark.redis
@pytest.mark.parametrize("how", ["flushed", "flushed and made anew"])
def test_an_emptied_redis_is_never_written_on(how, shard_id, tmp_path):
    with redis_server() as server:
        location = Location(blob=f"file://{tmp_path}/blobs", consensus=server.url)
        with PersistClient.open(location, settings=SETTINGS) as client:
            write(client, shard_id, range(3))
            writer = client.open_writer(shard_id, SCHEMA, purpose="test")
            append(writer, 3)
            server.command("FLUSHALL")
            if how != "flushed":
                with unchecked(location) as rival:
                    shutil.rmtree(tmp_path / "blobs" / shard_id)  # the shard is not made anew over its blobs
                    rival.initialise(shard_id, SCHEMA)
            for call in (lambda: append(writer, 4), writer.fetch_recent_upper, lambda: client.inspect(shard_id)):
                with pytest.raises(
                    (CorruptData, InvariantViolated), match=f"{server.address}.*{LOST}|{LOST}.*{server.address}"
                ):
                    call()
        with pytest.raises(StoreLost, match=f"{server.address}.*does not know it"):
            PersistClient.open(location, settings=SETTINGS)


# -- the store does not answer ---------------------------------------------------------------------------------------------


def assert_named_without_secret(error: PersistError, address: str, secret: str) -> None:
    """The message and its whole chain have the address, and never the password."""
    text, link = str(error), error.__cause__
    assert address in text
    while link is not None:
        text, link = text + str(link), link.__cause__
    assert secret not in text


@pytest.mark.redis
def test_redis_away_at_open_and_in_the_middle_is_bounded_named_and_recovers(shard_id, tmp_path, persist):
    with redis_server(password="hunter2") as server:
        location = Location(blob=f"file://{tmp_path}/blobs", consensus=server.url)
        assert "hunter2" in location.consensus
        with PersistClient.open(location, settings=SETTINGS) as client:
            writer = client.open_writer(shard_id, SCHEMA, purpose="test")
            append(writer, 0)
            server.kill()
            for call in (
                lambda: append(writer, 1),
                writer.fetch_recent_upper,
                lambda: client.inspect(shard_id),
                lambda: PersistClient.open(location, settings=SETTINGS),
            ):
                with pytest.raises(Unavailable) as raised:
                    call()
                assert_named_without_secret(raised.value, server.address, "hunter2")
            args = ["--blob", location.blob, "--consensus", location.consensus, "--give-up", "0.3"]
            for command in (("inspect", "shards"), ("read", shard_id), ("maintain", "rollup", shard_id)):
                code, out, err = persist(*command, *args)
                assert (code, err.count("\n")) == (70, 1)
                assert err.startswith("error: Unavailable: ")
                assert server.address in err
                assert "hunter2" not in out + err
            server.start()
            # The answer shows what the failed append may have left; nothing is doubled.
            answer = append(writer, 1)
            assert isinstance(answer, Appended) or answer.current == A(2)
            assert contents(client, shard_id, 1) == rows(2)


@pytest.mark.redis
def test_a_wrong_password_is_a_bounded_error_without_the_password(tmp_path, persist):
    (tmp_path / "b" / ".tmp").mkdir(parents=True)
    with redis_server(password="hunter2") as server:
        url = server.url.replace("hunter2", "swordfish")
        args = ["--blob", f"file://{tmp_path}/b", "--consensus", url, "--give-up", "0.3"]
        code, out, err = persist("inspect", "shards", *args)
        assert code in (64, 70)
        assert server.address in err
        assert "swordfish" not in out + err


@pytest.mark.s3
def test_s3_away_at_open_and_in_the_middle_is_bounded_named_and_recovers(disk, shard_id, monkeypatch, persist):
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        location = Location(blob=server.location("p"), consensus=disk.location.consensus)
        secrets = [value for name, value in server.environment.items() if "SECRET" in name]
        with PersistClient.open(location, settings=SETTINGS) as client:
            writer = client.open_writer(shard_id, SCHEMA, purpose="test")
            append(writer, 0)
            seqno = client.inspect(shard_id).seqno
            server.kill()
            for call in (
                lambda: append(writer, 1),
                lambda: contents(client, shard_id, 0),
                lambda: client.initialise(ShardId.new(), SCHEMA),
                lambda: PersistClient.open(
                    Location(blob=server.location("q"), consensus=location.consensus), settings=SETTINGS
                ),
            ):
                with pytest.raises(Unavailable) as raised:
                    call()
                assert_named_without_secret(raised.value, server.address, secrets[0])
            args = ["--blob", location.blob, "--consensus", location.consensus, "--give-up", "0.3"]
            code, out, err = persist("read", shard_id, *args)
            assert (code, server.address in err) == (70, True)
            assert secrets[0] not in out + err
            log = disk.diffs(shard_id)
            server.start()
            assert min(log) == 1
            assert client.recent_upper(shard_id) == A(1), f"nothing was appended after {seqno}"
            assert isinstance(append(writer, 1), Appended)
            assert contents(client, shard_id, 1) == rows(2)


# -- the disk is full or read-only -----------------------------------------------------------------------------------------

PROGRAM = textwrap.dedent(
    """
    import resource, sys
    from persist_engine import Antichain, Location, PersistClient, ShardId
    from persist_engine.base.errors import PersistError
    from persist_kit.disk import SETTINGS
    from persist_kit.world import SCHEMA, row

    blob, consensus, shard, limit = sys.argv[1:]
    A = Antichain.of
    with PersistClient.open(Location(blob=blob, consensus=consensus), settings=SETTINGS) as client:
        writer = client.open_writer(ShardId(shard), SCHEMA, purpose="full")
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
        rows = [row(key, f"n{key} {key * 7919 % 10007}", 1) for key in range(2_000)]
        try:
            writer.compare_and_append(rows, expected_upper=A(1), new_upper=A(2))
        except PersistError as error:
            print(type(error).__name__, error, sep="|")
        # There is room again: the same writer goes on.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(type(writer.compare_and_append([row(1, "n1", 1)], expected_upper=A(1), new_upper=A(2))).__name__)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 4096])
def test_a_full_disk_commits_nothing_and_is_used_again_when_there_is_room(disk, shard_id, limit):
    with disk.client() as client:
        write(client, shard_id, range(1))
        before = disk.files()
    arguments = [disk.location.blob, disk.location.consensus, shard_id, str(limit)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    failure, after = done.stdout.splitlines()
    assert failure.startswith("Unavailable|"), failure
    assert disk.location.blob in failure
    assert "File too large" in failure
    assert after == "Appended"
    with disk.client() as client:
        assert contents(client, shard_id, 1) == rows(2)
        parts = [path for path in disk.paths(shard_id, kind="part") if disk.key(path) not in before]
        assert len(parts) == 1, "the part that did not fit left nothing behind"
        assert not list((disk.blobs / ".tmp").iterdir())


@contextmanager
def unwritable(folder):
    """No file can be made in `folder`, not even by root: a file stands in its place, and it is put back."""
    aside = folder.with_name(folder.name + ".aside")
    folder.rename(aside)
    folder.write_text("in the way")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_named_and_used_again(disk, shard_id, persist):
    with disk.client() as client:
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")
        append(writer, 0)
        log = disk.diffs(shard_id)
        with unwritable(disk.blobs):
            with pytest.raises(Unavailable, match=disk.location.blob):
                append(writer, 1)
            assert disk.diffs(shard_id) == log
            code, _, err = persist("read", shard_id, *disk.args)
            assert (code, disk.location.blob in err) == (70, True)
        assert isinstance(append(writer, 1), Appended)
        assert contents(client, shard_id, 1) == rows(2)


URLS = [
    ("s3://", "redis://h", "s3://"),
    ("ftp://x/y", "redis://h", "ftp"),
    ("file:relative", "redis://h", "file:relative"),
    ("file:///tmp/x", "redis://h:notaport", "notaport|port"),
    ("file:///tmp/x", "postgres://u:secret@h/db", "postgres"),
    ("file:///tmp/x", "redis://u:secret@/0?nonsense=1", "redis"),
]


@pytest.mark.parametrize(("blob", "consensus", "text"), URLS)
def test_locations_that_make_no_sense_are_usage_errors_without_credentials(persist, blob, consensus, text, tmp_path):
    (tmp_path / ".tmp").mkdir()
    blob = blob.replace("/tmp/x", str(tmp_path))
    code, out, err = persist("inspect", "shards", "--blob", blob, "--consensus", consensus, "--give-up", "0.3")
    assert (code, err.count("\n")) == (64, 1), err
    assert re.search(text, err)
    assert "secret" not in out + err
