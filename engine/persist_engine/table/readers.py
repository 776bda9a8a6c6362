"""The leased reader that the reads of one table share, and its end when nothing reads any more.

A reader holds the shard's since, so a table that is merely kept, in a notebook for a week, must have none. This module owns when one opens
and when it expires. It knows nothing of what is read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from persist_engine.base.errors import PersistError
from persist_engine.client.read.handle import ReadHandle
from persist_engine.model.leases import expires_after_ms
from persist_engine.model.queries import retained_since
from persist_engine.shard.machine import Machine

_log = logging.getLogger(__name__)

#: A reader without reads expires after this: long enough for a notebook's next cell, short enough that no retention feels it.
IDLE_S = 20.0


class SharedReader:
    """Lends one leased reader with the shard's newest schema to any number of reads. Thread-safe.

    While reads go on for longer than the shard's retention, the reader lets go of the times that the retention has passed.
    """

    def __init__(self, open_reader: Callable[[], ReadHandle], machine: Machine) -> None:
        self._open, self._machine = open_reader, machine
        self._lock = threading.Lock()
        self._reader: ReadHandle | None = None
        self._users: dict[int, int] = {}
        self._timer: threading.Timer | None = None
        self._used_s = 0.0

    @contextmanager
    def lent(self) -> Iterator[ReadHandle]:
        """The reader, for the length of the block."""
        reader = self._borrow()
        try:
            yield reader
        finally:
            self._give_back(reader)

    def close(self) -> None:
        """Expires the reader. Reads under way fail. Idempotent."""
        with self._lock:
            reader, self._reader = self._reader, None
            if self._timer is not None:
                self._timer.cancel()
        if reader is not None:
            reader.expire()

    def _borrow(self) -> ReadHandle:
        with self._lock:
            reader = self._reader
            if reader is not None and self._is_stale(reader):
                self._retire(reader)
                reader = None
            if reader is None:
                reader = self._reader = self._open()
            self._users[id(reader)] = self._users.get(id(reader), 0) + 1
        held = retained_since(self._machine.state)
        if held is not None and reader.since < held:
            reader.maybe_downgrade_since(held)
        return reader

    def _give_back(self, reader: ReadHandle) -> None:
        with self._lock:
            left = self._users.pop(id(reader)) - 1
            if left:
                self._users[id(reader)] = left
                return
            self._used_s = self._machine.env.monotonic_s()
            is_retired = reader is not self._reader
            if not is_retired and self._timer is None:
                self._start_timer(IDLE_S)
        if is_retired:
            self._expire(reader)

    def _is_stale(self, reader: ReadHandle) -> bool:
        """Whether it shows an older schema, or lost its lease: after a machine slept, before its heartbeat has noticed."""
        known = self._machine.state.leased_readers.get(reader.reader_id)
        has_lapsed = known is None or expires_after_ms(known) < self._machine.env.now_ms()
        return has_lapsed or reader.since.is_empty() or reader.schema != self._machine.schema

    def _retire(self, reader: ReadHandle) -> None:
        """The last read that uses it expires it."""
        if id(reader) not in self._users:
            self._expire(reader)

    def _start_timer(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._on_timer)
        self._timer.daemon = True
        self._timer.start()

    def _on_timer(self) -> None:
        with self._lock:
            self._timer, reader = None, self._reader
            if reader is None or id(reader) in self._users:
                return  # the last read starts a timer again
            left = IDLE_S - (self._machine.env.monotonic_s() - self._used_s)
            if left > 0:
                self._start_timer(max(left, 0.05))
                return
            self._reader = None
        self._expire(reader)

    def _expire(self, reader: ReadHandle) -> None:
        try:
            reader.expire()
        except (PersistError, OSError) as error:  # the lease lapses by itself
            _log.warning("could not expire %s: %s", reader, error, extra={"shard": self._machine.shard_id})
