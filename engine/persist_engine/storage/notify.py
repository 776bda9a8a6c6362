"""The port for news of commits. News is best effort: it may come in any order, twice or never. It is only an optimisation.

A listener must not trust news: it must check that an entry follows what it knows, and continue to poll. `LocalPush` distributes
news among the clients of one process, for stores that publish nothing themselves.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from persist_engine.base.versioned import VersionedData

#: News of a larger entry carries only its seqno, because news must not cost more than a fetch.
NEWS_BYTES_MAX = 32 * 1024


class Listener(Protocol):
    """Receives news of one key. Any thread may call it. It must be quick and must not raise an error."""

    def hear(self, news: VersionedData | None) -> None:
        """Receives an entry that was committed; without data, only its seqno is known. None means that news may have been missed."""


#: Keys without a listener are dropped when there are at least this many keys, and twice as many as were left the last time.
KEYS_MIN = 256


class Listeners(dict[str, "WeakSet[Listener]"]):
    """The listeners of each key, held weakly. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = KEYS_MIN

    def add(self, key: str, listener: Listener) -> list[str]:
        """Adds the listener. When there are many keys, drops the keys without listeners and returns them. A process that visits thousands
        of shards must not keep an entry for each, and a commit, which could clean up, may never come for a shard without listeners.
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
    """Carries news of a location. Thread-safe. Raises no error when the store fails."""

    def subscribe(self, key: str, listener: Listener) -> None:
        """Notify `listener` of commits to `key` for as long as another reference to it exists. Idempotent."""

    def publish(self, key: str, new: VersionedData) -> None:
        """Publish `new`, which this process committed, unless the store already published it."""

    def is_live(self, key: str) -> bool:
        """Whether, as far as this process knows, it receives the commits of all processes to `key`."""

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        """Waits at most `timeout_s` (None: for ever) until `is_live`, which a subscription makes true soon, and returns it. Does not wait
        where it can never become true. Before this returns True, each listener has heard None for the subscription.
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
    """Notifies listeners of this process, in the committing thread. It is never live, because it receives no news of other processes."""

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
