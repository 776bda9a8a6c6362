"""The keeper holds what the frames of a session read: threads of the driver's Python process, and the socket by which the
short-lived processes that plan for Spark ask them.

Spark loads and plans a Python data source in workers that end or serve others afterwards, so no lease can live there. The
driver's own process lives as long as the session: it registers the readers, renews their leases, and gives them back when
the JVM has no use for a frame any more, when the session ends, and when the process exits. A driver that is killed leaves
its leases to run out.

The socket lies in a folder that only this user can enter. Requests are JSON; answers are pickled, from the driver to its own
workers.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

from persist_engine.base.errors import PersistError, Unavailable
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.held_frames import HeldFrames, LoadedFrame
from persist_spark.options import Options

#: How soon the end of a frame or of the session is seen.
WATCH_INTERVAL_S = 0.5
#: How often since is let follow the oldest frame.
ADVANCE_INTERVAL_S = 30.0
#: How long the exit of the process waits for leases to be given back; a store that does not answer lets them run out.
EXIT_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.1
#: Longer paths are no names of sockets.
_PATH_BYTES_MAX = 100

_log = logging.getLogger(__name__)


class Session(Protocol):
    """What a keeper asks of the session whose frames it keeps."""

    def is_over(self) -> bool:
        """Whether it ended: no frame of it can be read any more."""

    def dead_frames(self) -> Sequence[str]:
        """Frames that cannot be read any more, each told once."""


class Keeper:
    """Keeps the frames of `session` until it ends. Starts its threads at once; `close` ends them."""

    def __init__(self, session: Session, held: HeldFrames) -> None:
        self._session, self._held = session, held
        self._folder = Path(tempfile.mkdtemp(prefix="persist-"))
        if len(os.fsencode(self._folder)) > _PATH_BYTES_MAX:
            shutil.rmtree(self._folder)
            self._folder = Path(tempfile.mkdtemp(prefix="persist-", dir="/tmp"))
        self.address = str(self._folder / "frames")
        """Where planners find it."""
        self._listener = Listener(self.address, family="AF_UNIX", backlog=64)
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._dead: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name, work in (("accept", self._accept), ("watch", self._watch), ("tidy", self._tidy)):
            threading.Thread(target=work, name=f"persist-keeper-{name}", daemon=True).start()
        atexit.register(self._close_at_exit)

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, with all leases given back."""
        return self._closed.is_set()

    def forget(self, frame: str) -> None:
        """Nothing reads the frame any more: it is let go soon. Does not wait; idempotent, also for one that was never loaded."""
        self._dead.put(frame)

    def close(self) -> None:
        """Drop all frames and give their leases back. Idempotent; the first call does the work, others wait for it."""
        if self._closing.is_set():
            self._closed.wait()
            return
        self._closing.set()
        atexit.unregister(self._close_at_exit)
        try:
            # Wakes the thread that accepts: closing what it waits for would not.
            with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
                knock.connect(self.address)
            self._held.close()
        finally:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._closed.set()

    def _close_at_exit(self) -> None:
        if os.getpid() != self._pid:  # a child made by fork: the leases are its parent's
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

    def _tidy(self) -> None:
        """Apart from the watch, which must see the end of the session also while a store does not answer."""
        while not self._closing.is_set():
            try:
                self._held.drop(self._dead.get(timeout=ADVANCE_INTERVAL_S))
            except queue.Empty:
                self._held.advance()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # a planner that went away, or this process has too many files open
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="persist-keeper-request", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):
            asked = connection.recv_bytes()
            try:
                answer = self._answer(json.loads(asked))
            except PersistError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the planner must not wait for ever
                _log.exception("a request of a planner failed")
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
                raise Unavailable(f"a planner asks for {unknown!r}: driver and planner are not of one release")


def load(address: str, frame: str, options: Mapping[str, str]) -> LoadedFrame:
    """Ask the keeper at `address`; see HeldFrames.load."""
    answer = _ask(address, {"ask": "load", "frame": frame, "options": dict(options)})
    assert isinstance(answer, LoadedFrame)
    return answer


def splits(address: str, frame: str, row_type: T.StructType) -> list[bytes]:
    """Ask the keeper at `address`; see HeldFrames.splits."""
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
            "register the format and load the frame in a session that lives"
        ) from error
    if isinstance(answer, PersistError):
        raise answer
    return answer
