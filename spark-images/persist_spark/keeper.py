"""The keeper keeps the frames of a session readable. It consists of threads in the driver's Python process and a socket on which the
short-lived planner processes of Spark send requests.

Spark loads and plans a Python data source in workers that end, or serve other sessions, afterwards, so a lease cannot live there. The
driver's process lives as long as the session. It registers the readers, renews their leases, and releases them when the JVM can no longer
reach a frame, when the session ends, and when the process exits. When a driver is killed, its leases expire.

The socket is in a folder that only this user can enter. Requests are JSON. Answers are pickled; they go from the driver to its own workers.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import PersistError, Unavailable
from persist_engine.storage.addresses import folder_of
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.options import Options
from persist_spark.source.loaded import LoadedFrame

if TYPE_CHECKING:  # a planner imports this module only for its requests
    from persist_engine import Location

    from persist_spark.held_frames import HeldFrames
    from persist_spark.source.native import PlainFiles

#: The interval at which the keeper checks whether a frame or the session has ended.
WATCH_INTERVAL_S = 0.5
#: The interval at which the keeper advances since to the oldest frame.
ADVANCE_INTERVAL_S = 30.0
#: How long the exit of the process waits for the release of its leases. If the store does not answer in time, the leases expire later.
EXIT_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1
#: The longest path, without the socket's own name, that fits the address of a Unix socket.
_PATH_BYTES_MAX = 100

_log = logging.getLogger(__name__)


class Session(Protocol):
    """The part of a session that its keeper uses."""

    def is_over(self) -> bool:
        """Whether the session has ended, so that none of its frames can be read."""

    def dead_frames(self) -> Sequence[str]:
        """Frames that can no longer be read, each reported once."""


class Keeper:
    """Keeps the frames of `session` until the session ends. The constructor starts the threads, and `close` ends them."""

    def __init__(self, session: Session, held: HeldFrames) -> None:
        self._session, self._held = session, held
        self.on_close: Callable[[], None] = lambda: None
        """Called once, before the frames are dropped."""
        self._folder = Path(tempfile.mkdtemp(prefix="persist-"))
        if len(os.fsencode(self._folder)) > _PATH_BYTES_MAX:
            shutil.rmtree(self._folder)
            self._folder = Path(tempfile.mkdtemp(prefix="persist-", dir="/tmp"))
        self.address = str(self._folder / "frames")
        """The path of the socket."""
        self._listener = Listener(self.address, family="AF_UNIX", backlog=64)
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._dead: dict[Location, queue.SimpleQueue[str]] = {}
        self._dead_lock = threading.Lock()
        for name, work in (("accept", self._accept), ("watch", self._watch)):
            threading.Thread(target=work, name=f"persist-keeper-{name}", daemon=True).start()
        atexit.register(self.close_at_exit)

    @property
    def is_closed(self) -> bool:
        """Whether `close` has finished."""
        return self._closed.is_set()

    def plain(self, frame: str, options: Mapping[str, str]) -> PlainFiles | None:
        """Loads `frame` like `load`, in this process. Returns the files that Spark itself can read for the frame, or None when there are
        none. Loads nothing when the options already rule such files out.
        """
        parsed = Options.parse(options)
        if not parsed.is_of_plain_rows or folder_of(parsed.location.blob) is None:
            return None
        self._held.load(frame, parsed)
        return self._held.plain(frame)

    def forget(self, frame: str) -> None:
        """Schedules the release of a frame that can no longer be read. Does not wait. Idempotent. The frame need not have been loaded."""
        location = self._held.location_of(frame)
        if location is not None:
            self._dead_at(location).put(frame)

    def close(self) -> None:
        """Drops all frames and releases their leases. Idempotent: the first call does the work, and other calls wait for it."""
        if self._closing.is_set():
            self._closed.wait()
            return
        self._closing.set()
        atexit.unregister(self.close_at_exit)
        try:
            # Wakes the accepting thread. Closing the listener would not wake it.
            with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
                knock.connect(self.address)
            self.on_close()
            self._held.close()
        finally:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._closed.set()

    def close_at_exit(self) -> None:
        """Closes within EXIT_TIMEOUT_S. Leases that are not released by then will expire. The process must end after this call.
        Idempotent.
        """
        if os.getpid() != self._pid:  # in a forked child: the leases belong to the parent
            return
        closer = threading.Thread(target=self.close, name="persist-keeper-exit", daemon=True)
        closer.start()
        closer.join(EXIT_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_INTERVAL_S):
            if self._session.is_over():
                self.close()
                return
            for frame in self._session.dead_frames():
                self.forget(frame)
            for location in self._held.locations:
                self._dead_at(location)

    def _dead_at(self, location: Location) -> queue.SimpleQueue[str]:
        """The queue of dead frames of a location. Each location with frames has its own thread. So a store that does not answer delays no
        lease of another store, and `_watch` still notices the end of the session.
        """
        with self._dead_lock:
            if location not in self._dead:
                dead = self._dead[location] = queue.SimpleQueue()
                threading.Thread(
                    target=self._tidy, args=(location, dead), name="persist-keeper-tidy", daemon=True
                ).start()
            return self._dead[location]

    def _tidy(self, location: Location, dead: queue.SimpleQueue[str]) -> None:
        env = SystemEnv()
        due_s = env.monotonic_s() + ADVANCE_INTERVAL_S
        while not self._closing.is_set():
            left_s = due_s - env.monotonic_s()
            if left_s <= 0:  # even if frames end all the time
                if self._has_ended(location, dead):
                    return
                self._held.advance(location)
                due_s = env.monotonic_s() + ADVANCE_INTERVAL_S
                continue
            with suppress(queue.Empty):
                self._held.drop(dead.get(timeout=left_s))

    def _has_ended(self, location: Location, dead: queue.SimpleQueue[str]) -> bool:
        """Whether the location has no frame left. Its next frame then starts another thread."""
        with self._dead_lock:
            if not dead.empty() or location in self._held.locations:
                return False
            del self._dead[location]
            return True

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # a planner disconnected, or this process has too many open files
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="persist-keeper-request", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):
            request = connection.recv_bytes()
            try:
                answer = self._answer(json.loads(request))
            except PersistError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - the planner must get an answer to every request
                _log.exception("a planner's request failed")
                answer = PersistError(f"{type(error).__name__}: {error}")
            connection.send(answer)

    def _answer(self, request: Mapping[str, Any]) -> Any:
        frame = request["frame"]
        match request["ask"]:
            case "load":
                return self._held.load(frame, Options.parse(request["options"]))
            case "splits":
                return self._held.splits(frame, T.StructType.fromJson(request["row_type"]))
            case unknown:
                raise Unavailable(
                    f"a planner requested {unknown!r}, which this driver does not know: use the same release of "
                    "persist_spark on both sides"
                )


def load(address: str, frame: str, options: Mapping[str, str]) -> LoadedFrame:
    """Calls HeldFrames.load at the keeper at `address`. Raises Unavailable when no keeper answers there."""
    answer = _ask(address, {"ask": "load", "frame": frame, "options": dict(options)})
    assert isinstance(answer, LoadedFrame)
    return answer


def splits(address: str, frame: str, row_type: T.StructType) -> list[bytes]:
    """Calls HeldFrames.splits at the keeper at `address`. Raises Unavailable when no keeper answers there."""
    answer = _ask(address, {"ask": "splits", "frame": frame, "row_type": row_type.jsonValue()})
    assert isinstance(answer, list)
    return answer


def _ask(address: str, request: Mapping[str, Any]) -> object:
    try:
        with Client(address, family="AF_UNIX") as connection:
            connection.send_bytes(json.dumps(request).encode())
            answer = connection.recv()
    except (OSError, EOFError) as error:
        raise Unavailable(
            "the session that keeps this frame does not answer: it has ended, or its driver runs on another machine; "
            "register the format and load the frame in a running session"
        ) from error
    if isinstance(answer, PersistError):
        raise answer
    return answer
