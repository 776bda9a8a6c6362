"""The port for news of commits. News is pushed on a best-effort basis, in any order, twice or never; it is only an optimisation.

A listener must not trust it: it checks that an entry follows what it knows, and continues polling. `LocalPush` distributes news
among the clients of one process, for stores that publish nothing themselves.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from persist_engine.base.versioned import VersionedData

#: News of a larger entry carries only its seqno: news must not cost more than a fetch.
NEWS_BYTES_MAX = 32 * 1024


class Listener(Protocol):
    """Receives news of one key. Called from any thread; must be quick and must not raise."""

    def hear(self, news: VersionedData | None) -> None:
        """An entry was committed (without data: only its seqno is known). None: news may have been missed."""


#: Keys held before those without a listener are dropped. Twice the keys with one, at least this.
KEYS_MIN = 256


class Listeners(dict[str, "WeakSet[Listener]"]):
    """The listeners of each key, held weakly. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = KEYS_MIN

    def add(self, key: str, listener: Listener) -> list[str]:
        """Adds the listener. When there are many keys, drops those without any, and returns them: a process that visits thousands of shards
        must not keep something of each, and nothing more may ever be committed to a shard whose listeners are gone.
        """
        self.setdefault(key, WeakSet()).add(listener)
        if len(self) < self._sweep_at:
            return []
        unheard = [each for each, some in self.items() if not some]
        for each in unheard:
            del self[each]
        self._sweep_at = max(KEYS_MIN, 2 * len(self))
        return unheard

    def of(self, key: str) -> list[Listener]:
        """The listeners of the key."""
        return list(self.get(key, ()))


class Push(Protocol):
    """Carries news of a location. Thread-safe; a failing store never makes it raise."""

    def subscribe(self, key: str, listener: Listener) -> None:
        """Notify `listener` of commits to `key` for as long as another reference to it exists. Idempotent."""

    def publish(self, key: str, new: VersionedData) -> None:
        """Publish `new`, which this process committed, unless the store already published it."""

    def is_live(self, key: str) -> bool:
        """Whether commits of all processes to `key` are being received, as far as is known."""

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        """`is_live`, which a subscription makes true soon: waits for that at most `timeout_s` (None: for ever), and not where it never
        will be. Each listener has heard None for the subscription before this returns True.
        """

    def close(self) -> None:
        """Stop notifying; end threads and connections. Idempotent."""


class NoPush:
    """Carries no news."""

    def subscribe(self, key: str, listener: Listener) -> None:
        """Does nothing."""

    def publish(self, key: str, new: VersionedData) -> None:
        """Does nothing."""

    def is_live(self, key: str) -> bool:
        """Always False."""
        return False

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        """Always False, at once."""
        return False

    def close(self) -> None:
        """Does nothing."""


class LocalPush:
    """Notifies listeners of this process, in the committing thread. Never live, because it receives no news of other processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners = Listeners()

    def subscribe(self, key: str, listener: Listener) -> None:
        """See Push."""
        with self._lock:
            self._listeners.add(key, listener)

    def publish(self, key: str, new: VersionedData) -> None:
        """See Push."""
        with self._lock:
            listeners = self._listeners.of(key)
        for listener in listeners:
            listener.hear(abridged(new))

    def is_live(self, key: str) -> bool:
        """See Push."""
        return False

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        """See Push."""
        return False

    def close(self) -> None:
        """Releases nothing: all clients of the store share it."""


def abridged(new: VersionedData) -> VersionedData:
    """Return the published form of an entry: all of it, or only its seqno if it is large."""
    return new if len(new.data) <= NEWS_BYTES_MAX else VersionedData(new.seqno, b"")


_shared: WeakValueDictionary[str, LocalPush] = WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_local_push(address: str) -> LocalPush:
    """Return this process's instance for the store at `address`."""
    with _shared_lock:
        return _shared.setdefault(address, LocalPush())
