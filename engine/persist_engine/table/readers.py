"""The handles that the calls of one table share. They expire when nothing uses them any more.

A leased reader holds the shard's since. So a table object that stays unused, for example in a notebook for a week, must have no reader.
This module owns when these handles open and when they expire. It knows nothing of what is read or written through them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from persist_engine.base.errors import PersistError
from persist_engine.client.expiring import Expiring
from persist_engine.model.leases import expires_after_ms
from persist_engine.model.queries import retained_since
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine

if TYPE_CHECKING:
    from persist_engine.client.read.handle import ReadHandle
    from persist_engine.rows.schema import Schema

_log = logging.getLogger(__name__)

#: The purpose with which tables register their handles.
PURPOSE = "table"
#: An unused handle expires after this time. It is long enough for a notebook's next cell, and too short to matter for retention.
IDLE_S = 20.0

H = TypeVar("H", bound=Expiring)


class Shared(Generic[H]):
    """Lends one handle to any number of users. Thread-safe. Opens it when it is needed, replaces it when `is_stale` is true of it, and
    expires it when it was not used for IDLE_S.
    """

    def __init__(self, open_handle: Callable[[], H], is_stale: Callable[[H], bool], machine: Machine) -> None:
        self._open, self._is_stale, self._machine = open_handle, is_stale, machine
        self._lock = threading.Lock()
        self._handle: H | None = None
        self._users: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        self._used_s = 0.0

    @contextmanager
    def lent(self) -> Iterator[H]:
        """The handle, for the length of the block."""
        handle = self._borrow()
        try:
            yield handle
        finally:
            self._give_back(handle)

    @property
    def is_open(self) -> bool:
        """Whether there is a handle now."""
        return self._handle is not None

    def let_go(self) -> None:
        """Expires the handle now, unless it is in use."""
        with self._lock:
            handle = self._handle
            if handle is None or id(handle) in self._users:
                return
            self._handle = None
        self._expire(handle)

    def close(self) -> None:
        """Expires the handle. Uses under way fail. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if handle is not None:
            handle.expire()

    def _borrow(self) -> H:
        with self._lock:
            handle = self._handle
            if handle is not None and self._is_stale(handle):
                if id(handle) not in self._users:  # otherwise its last user expires it
                    self._expire(handle)
                handle = None
            if handle is None:
                handle = self._handle = self._open()
            self._users[id(handle)] = self._users.get(id(handle), 0) + 1
            return handle

    def _give_back(self, handle: H) -> None:
        with self._lock:
            left = self._users.pop(id(handle)) - 1
            if left:
                self._users[id(handle)] = left
                return
            self._used_s = self._machine.env.monotonic_s()
            is_retired = handle is not self._handle
            if not is_retired and self._timer is None:
                self._start_timer(IDLE_S)
        if is_retired:
            self._expire(handle)

    def _start_timer(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._on_timer)
        self._timer.daemon = True
        self._timer.start()

    def _on_timer(self) -> None:
        with self._lock:
            self._timer, handle = None, self._handle
            if handle is None or id(handle) in self._users:
                return  # its last user starts a timer again
            left = IDLE_S - (self._machine.env.monotonic_s() - self._used_s)
            if left > 0:
                self._start_timer(max(left, 0.05))
                return
            self._handle = None
        self._expire(handle)

    def _expire(self, handle: H) -> None:
        try:
            handle.expire()
        except (PersistError, OSError) as error:  # its lease lapses later
            _log.warning("could not expire %s: %s", handle, error, extra={"shard": self._machine.shard_id})


class SharedReader(Shared["ReadHandle"]):
    """Lends a leased reader with the shard's newest schema.

    If reads go on for longer than the shard's retention, the reader releases the times that the retention has passed.
    """

    def __init__(self, open_reader: Callable[..., ReadHandle], machine: Machine) -> None:
        """`open_reader` opens a reader with the newest schema, or with the schema that it is given."""
        super().__init__(open_reader, lambda reader: has_lapsed(reader, machine), machine)
        self._open_with = open_reader

    @contextmanager
    def lent_with(self, schema: Schema) -> Iterator[ReadHandle]:
        """A reader with `schema`, which the table has or had. If the table has a later schema by now, this is a separate reader."""
        with self.lent() as reader:
            if reader.schema == schema:
                yield reader
                return
        with self._open_with(schema) as reader:
            yield reader

    @contextmanager
    def lent(self) -> Iterator[ReadHandle]:
        """The reader, for the length of the block."""
        with super().lent() as reader:
            held = retained_since(self._machine.state)
            if held is not None and reader.since < held:
                reader.maybe_downgrade_since(held)
            yield reader


def has_lapsed(reader: ReadHandle, machine: Machine) -> bool:
    """Whether a reader shows an older schema, or lost its lease. Its heartbeat may not have noticed that yet, after a machine slept."""
    known = machine.state.leased_readers.get(reader.reader_id)
    is_late = known is None or expires_after_ms(known) < machine.env.now_ms()
    return is_late or reader.since.is_empty() or reader.schema != machine.schema


def can_let_since_go(state: ShardState, *, is_ours: bool) -> bool:
    """Whether `TableWriter.let_since_go` would move since, if no reader holds it."""
    held, since, upper = retained_since(state), state.trace.since, state.trace.upper
    if upper.time is None:
        return False
    if held is not None:
        return since < held
    return is_ours and upper.newest_complete > 0 and since.less_equal(upper.newest_complete - 1)
