"""Keeps one leased reader alive: a thread that beats every half lease until stopped, until the reader is gone, until its
client was closed, or until nobody refers to its owner any more, whom the thread does not keep alive.

Knows nothing of what the lease is for. A machine that slept past its lease finds the reader expired: the thread ends
and says so through `is_lost`; the handle then behaves as if its since were empty (spec 20, bug 23), it does not
crash.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage, PersistError, UnsafeStore
from persist_engine.base.metrics import Metrics

_log = logging.getLogger(__name__)

#: A beat that comes this much later than planned means that the machine or the process was stopped.
OVERSHOOT_WARN_S = 60.0
#: A lease so short that half of it rounds to nothing still leaves the store in peace.
INTERVAL_S_MIN = 0.05
#: However long a lease is: locks take no time-out of centuries.
INTERVAL_S_MAX = 24 * 60 * 60.0


class Heartbeat:
    """Calls `beat` (True: still registered), a method of its owner, every `interval_s` in a daemon thread, from
    construction until `stop`. When the owner is garbage the thread calls `give_up` instead, once and at best, and ends.
    """

    def __init__(
        self,
        beat: Callable[[], bool],
        *,
        give_up: Callable[[], object],
        interval_s: float,
        env: Env,
        what: str,
        shard: str,
        metrics: Metrics,
    ) -> None:
        """`give_up` must not refer to the owner."""
        self._beat = weakref.WeakMethod(beat)
        self._give_up = give_up
        self._metrics = metrics
        self._interval_s = min(max(INTERVAL_S_MIN, interval_s), INTERVAL_S_MAX)
        self._env = env
        self._what, self._shard = what, shard
        # Held while there is reason to beat. SUBTLE: the garbage collector, which may run within any call of any thread,
        # ends the rest too. Of all that wakes a thread only the release of a bare lock takes no lock itself.
        self._reason = threading.Lock()
        self._reason.acquire()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"persist-heartbeat-{what}", daemon=True)
        self._thread.start()
        # At exit leases are left to run out: nothing may be waited for, and the thread cannot go on.
        weakref.finalize(beat.__self__, self._end).atexit = False  # type: ignore[attr-defined]  # it is a method

    @property
    def is_lost(self) -> bool:
        """Whether the reader was found expired."""
        return self._lost.is_set()

    def stop(self) -> None:
        """End the thread; returns when no further beat can start. Idempotent."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._interval_s + OVERSHOOT_WARN_S)

    def _end(self) -> None:
        """No reason to beat any more. Never blocks; idempotent."""
        try:
            self._reason.release()
        except RuntimeError:  # it was released
            return

    def _run(self) -> None:
        while not self._has_ended():
            if not self._beat_once():
                return
        if self._beat() is None:
            self._give_up_at_best()

    def _has_ended(self) -> bool:
        """Rest between two beats; whether the rest was ended."""
        asleep_since_s = self._env.monotonic_s()
        if self._reason.acquire(timeout=self._interval_s):
            return True
        late_s = self._env.monotonic_s() - asleep_since_s - self._interval_s
        if late_s > OVERSHOOT_WARN_S:
            text = "heartbeat of %s on shard %s is %.0f s late: the machine slept or the process was stopped"
            _log.warning(text, self._what, self._shard, late_s, extra={"shard": self._shard})
        return False

    def _beat_once(self) -> bool:
        """Whether to go on. The owner is referred to from this frame only, which is gone while the thread rests."""
        beat = self._beat()
        if beat is None:
            return True  # and the rest ends at once
        try:
            registered = beat()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to, and the lease is held as before
            self._metrics.count("heartbeat", outcome="failed")
            # A client that was closed stays so. But a store that was away for longer than its retries may be back for the
            # next beat, and one that came back unsafe may be mended by then.
            is_final = isinstance(error, InvalidUsage) and not isinstance(error, UnsafeStore)
            text = "heartbeat of %s on shard %s ends: %s" if is_final else "heartbeat of %s on shard %s failed: %s"
            is_known = isinstance(error, PersistError)
            _log.warning(text, self._what, self._shard, error, extra={"shard": self._shard}, exc_info=not is_known)
            return not is_final
        self._metrics.count("heartbeat", outcome="renewed" if registered else "lost")
        if not registered:
            self._lost.set()
            text = "%s on shard %s has expired: its lease was not renewed in time"
            _log.warning(text, self._what, self._shard, extra={"shard": self._shard})
        return registered

    def _give_up_at_best(self) -> None:
        text = "%s on shard %s was dropped without being expired"
        _log.debug(text, self._what, self._shard, extra={"shard": self._shard})
        try:
            self._give_up()
        except Exception as error:  # noqa: BLE001 - its client may be closed; the lease runs out all the same
            text = "%s on shard %s could not be expired: %s"
            _log.debug(text, self._what, self._shard, error, extra={"shard": self._shard})
