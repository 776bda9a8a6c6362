"""The port for news of commits: pushed, best effort, in any order, twice or never, and an optimisation only.

Whoever hears them must not believe them: a listener checks that an entry follows what it knows, and goes on polling.
`LocalPush` tells the clients of one process about each other's commits, for stores that tell nobody themselves.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from persist_engine.base.versioned import VersionedData

#: Larger entries are announced by their seqno alone: news must not cost more than a fetch.
NEWS_BYTES_MAX = 32 * 1024


class Listener(Protocol):
    """Who wants to know of one key. Called from any thread; must be quick and must not raise."""

    def hear(self, news: VersionedData | None) -> None:
        """An entry was committed (with no data: only its seqno is told). None: news may have been missed."""


class Push(Protocol):
    """Carries news of a location. Thread-safe; nothing here raises for a failing store."""

    def subscribe(self, key: str, listener: Listener) -> None:
        """Tell `listener` of commits to `key` for as long as somebody else refers to it. Idempotent."""

    def publish(self, key: str, new: VersionedData) -> None:
        """`new` was committed by us; tell others, unless the store has done so."""

    def is_live(self, key: str) -> bool:
        """Whether commits of all processes to `key` are being heard, as far as can be told."""

    def close(self) -> None:
        """Tell nobody any more; threads and connections end. Idempotent."""


class NoPush:
    """Tells nobody."""

    def subscribe(self, key: str, listener: Listener) -> None:
        """Nothing."""

    def publish(self, key: str, new: VersionedData) -> None:
        """Nothing."""

    def is_live(self, key: str) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing."""


class LocalPush:
    """Tells listeners of this process, in the thread that commits. Other processes are not heard, so never live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, WeakSet[Listener]] = {}

    def subscribe(self, key: str, listener: Listener) -> None:
        """See Push."""
        with self._lock:
            self._listeners.setdefault(key, WeakSet()).add(listener)

    def publish(self, key: str, new: VersionedData) -> None:
        """See Push."""
        with self._lock:
            listeners = list(self._listeners.get(key, ()))
        for listener in listeners:
            listener.hear(abridged(new))

    def is_live(self, key: str) -> bool:
        """See Push."""
        return False

    def close(self) -> None:
        """Nothing to release: it is shared by all clients of the store."""


def abridged(new: VersionedData) -> VersionedData:
    """What is told of an entry: all of it, or its seqno when it is large."""
    return new if len(new.data) <= NEWS_BYTES_MAX else VersionedData(new.seqno, b"")


_shared: WeakValueDictionary[str, LocalPush] = WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_local_push(address: str) -> LocalPush:
    """The one of this process for the store at `address`."""
    with _shared_lock:
        return _shared.setdefault(address, LocalPush())
