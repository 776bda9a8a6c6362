"""The keeper of a session's frames: its socket, and the end of frames, of the session and of the process. Sockets and processes are
real; the session is a stand-in that the test controls.
"""

import errno
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, Unavailable
from persist_engine.base.settings import Settings
from persist_spark import keeper
from persist_spark.held_frames import HeldFrames
from persist_spark.keeper import Keeper
from persist_spark.session_frames import ClassicSession
from py4j.protocol import Py4JNetworkError

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
PATIENCE_S = 60.0


class ControlledSession:
    """A session whose end and dead frames the test sets."""

    def __init__(self):
        self.over = False
        self.dead: list[str] = []

    def is_over(self):
        return self.over

    def dead_frames(self):
        found, self.dead = self.dead, []
        return found


@pytest.fixture
def make_given(tmp_path):
    """Makes shards, each in stores of this name, with one row at time 0."""

    def make(name: str) -> dict[str, str]:
        folder = tmp_path / name
        folder.mkdir()
        location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        shard = ShardId.new()
        with PersistClient.open(location) as client, client.open_writer(shard, SCHEMA, purpose="test") as writer:
            rows = [(((1,), ("n",)), 0, 1)]
            writer.compare_and_append(rows, expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
        return {"shard": shard, "blob": location.blob, "consensus": location.consensus}

    return make


@pytest.fixture
def given(make_given) -> dict[str, str]:
    return make_given("stores")


def readers(given: dict[str, str]) -> int:
    with PersistClient.open(Location(blob=given["blob"], consensus=given["consensus"])) as client:
        return len(client.inspect(ShardId(given["shard"])).readers)


def eventually(condition) -> bool:
    """Whether `condition` becomes true within PATIENCE_S."""
    pause = threading.Event()
    env, began = SystemEnv(), SystemEnv().monotonic_s()
    while not condition():
        if env.monotonic_s() - began > PATIENCE_S:
            return False
        pause.wait(0.02)
    return True


@pytest.fixture
def session():
    return ControlledSession()


@pytest.fixture
def kept(session):
    made = Keeper(session, HeldFrames(settings=Settings(), env=SystemEnv()))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("error", "is_over"),
    [
        (OSError(errno.EMFILE, "Too many open files"), False),
        (
            Py4JNetworkError("An error occurred while trying to connect", OSError(errno.ENFILE, "file table overflow")),
            False,
        ),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), True),
        (Py4JNetworkError("Answer from Java side is empty"), True),
        (AttributeError("'NoneType' object has no attribute 'sc'"), True),
    ],
)
def test_a_process_without_a_file_left_does_not_take_its_session_for_ended(error, is_over):
    """Its frames would be let go of, and every later use of them would fail."""

    def asked():
        raise error

    session = object.__new__(ClassicSession)
    session._context = SimpleNamespace(_jsc=SimpleNamespace(sc=asked))
    assert session.is_over() is is_over


def test_planners_load_and_split_frames_until_the_frames_are_dead(given, session, kept):
    loaded = [keeper.load(kept.address, name, given) for name in ("f", "g")]
    assert [each.as_of for each in loaded] == [0, 0]
    assert len(keeper.splits(kept.address, "f", loaded[0].row_type)) == 1
    session.dead = ["f"]
    assert eventually(lambda: _is_gone(kept, "f", loaded[0]))
    assert readers(given) == 1
    kept.forget("g")
    kept.forget("g")
    kept.forget("never loaded")
    assert eventually(lambda: readers(given) == 0)


def test_since_advances_although_frames_end_all_the_time(given, session, monkeypatch):
    """A session that loads and drops frames without a pause still lets go of the times before its oldest one."""
    monkeypatch.setattr(keeper, "ADVANCE_INTERVAL_S", 0.2)
    advanced, kept = threading.Event(), None

    class Held(HeldFrames):
        def advance(self, location):
            advanced.set()

        def drop(self, frame):
            if kept is not None:
                kept.forget(frame)  # another one has ended meanwhile

    kept = Keeper(session, Held(settings=Settings(), env=SystemEnv()))
    keeper.load(kept.address, "f", given)
    kept.forget("f")
    assert advanced.wait(PATIENCE_S)
    kept.close()


def test_stores_without_frames_have_no_thread(given, session, monkeypatch):
    monkeypatch.setattr(keeper, "ADVANCE_INTERVAL_S", 0.2)
    kept = Keeper(session, HeldFrames(settings=Settings(), env=SystemEnv()))
    try:
        for name in ("f", "g"):  # the next frame has one again
            keeper.load(kept.address, name, given)
            assert eventually(lambda: len(kept._dead) == 1)
            session.dead = [name]
            assert eventually(lambda: not kept._dead)
            assert readers(given) == 0
    finally:
        kept.close()


@pytest.mark.parametrize("call", ["drop", "advance"])
def test_a_store_that_does_not_answer_keeps_no_lease_of_another_one(make_given, session, monkeypatch, call):
    monkeypatch.setattr(keeper, "ADVANCE_INTERVAL_S", 0.2)
    answers, asked = threading.Event(), threading.Event()
    silent, other = make_given("silent"), make_given("other")

    class Held(HeldFrames):
        def drop(self, frame):
            if call == "drop" and frame == "silent":
                asked.set()
                answers.wait()
            super().drop(frame)

        def advance(self, location):
            if call == "advance" and location.blob == silent["blob"]:
                asked.set()
                answers.wait()
            super().advance(location)

    kept = Keeper(session, Held(settings=Settings(), env=SystemEnv()))
    try:
        keeper.load(kept.address, "silent", silent)
        keeper.load(kept.address, "other", other)
        session.dead = ["silent"] if call == "drop" else []
        assert asked.wait(PATIENCE_S)
        session.dead = ["other"]
        assert eventually(lambda: readers(other) == 0)
        assert readers(silent) == 1
    finally:
        answers.set()
        kept.close()


def _is_gone(kept, name, loaded) -> bool:
    try:
        keeper.splits(kept.address, name, loaded.row_type)
    except InvalidUsage as error:
        return f"the session does not hold frame {name}: load it again" in str(error)
    return False


def test_a_planner_gets_the_errors_of_the_keeper_unchanged(given, kept):
    with pytest.raises(InvalidUsage, match="option as_off: not known"):
        keeper.load(kept.address, "f", {**given, "as_off": "1"})
    with pytest.raises(InvalidUsage, match="the latest readable time is 0") as raised:
        keeper.load(kept.address, "f", {**given, "as_of": "9"})
    assert type(raised.value) is InvalidUsage
    with pytest.raises(Unavailable, match="use the same release"):
        keeper._ask(kept.address, {"ask": "what", "frame": "f"})
    with pytest.raises(Exception, match="KeyError"):
        keeper._ask(kept.address, {"frame": "f"})


def test_concurrent_planners_share_one_lease(given, kept):
    with ThreadPoolExecutor(16) as pool:
        loaded = list(pool.map(lambda n: keeper.load(kept.address, f"f{n}", given), range(100)))
    assert {each.as_of for each in loaded} == {0}
    assert readers(given) == 1


def test_the_end_of_the_session_releases_all_leases_and_a_late_planner_gets_an_error(given, session, kept):
    loaded = keeper.load(kept.address, "f", given)
    session.over = True
    assert eventually(lambda: kept.is_closed)
    assert readers(given) == 0
    assert not Path(kept.address).parent.exists()
    for call in (
        lambda: keeper.load(kept.address, "g", given),
        lambda: keeper.splits(kept.address, "f", loaded.row_type),
    ):
        with pytest.raises(Unavailable, match="does not answer: it has ended"):
            call()
    kept.close()


def test_a_silent_or_malformed_connection_does_not_block_the_others(given, kept):
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as malformed:
        silent.connect(kept.address)
        malformed.connect(kept.address)
        malformed.sendall(b"\x00\x00\x00\x03{{{")
        assert keeper.load(kept.address, "f", given).as_of == 0


def test_only_this_user_can_access_the_socket_folder(kept):
    assert Path(kept.address).parent.stat().st_mode & 0o077 == 0


def test_a_temporary_folder_with_a_path_too_long_for_a_socket_is_not_used(given, tmp_path, monkeypatch, session):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    kept = Keeper(session, HeldFrames(settings=Settings(), env=SystemEnv()))
    try:
        assert keeper.load(kept.address, "f", given).as_of == 0
    finally:
        kept.close()


PROGRAM = """
import os, sys, threading
from persist_engine.base.env import SystemEnv
from persist_engine.base.settings import Settings
from persist_spark import keeper
from persist_spark.held_frames import HeldFrames
class Lasting:
    def is_over(self): return False
    def dead_frames(self): return []
kept = keeper.Keeper(Lasting(), HeldFrames(settings=Settings(), env=SystemEnv()))
keeper.load(kept.address, "f", dict(zip(("shard", "blob", "consensus"), sys.argv[2:])))
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs the exit handlers that it inherited
    os.waitpid(child, 0)
print("loaded", flush=True)
sys.stdin.readline()
"""


def program(how: str, given: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, how, given["shard"], given["blob"], given["consensus"]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "loaded\n"
    return process


def test_a_process_that_exits_releases_its_leases(given):
    with program("exit", given) as process:
        assert readers(given) == 1
        process.communicate("\n")
        assert process.returncode == 0
    assert readers(given) == 0


def test_a_forked_child_that_exits_releases_nothing(given):
    with program("fork", given) as process:
        assert readers(given) == 1
        process.communicate("\n")
    assert readers(given) == 0


def test_a_killed_process_leaves_its_lease_to_expire(given):
    with program("kill", given) as process:
        process.send_signal(signal.SIGKILL)
    assert readers(given) == 1
