"""Keeps one leased reader alive. A thread beats every half lease until it is stopped, the reader is gone, its client is closed, or its
owner has been garbage-collected. The thread does not keep its owner alive.

This module knows nothing of the purpose of the lease. If the machine sleeps for longer than the lease, the reader expires. The thread then
ends and reports this through `is_lost`. The handle does not crash; it behaves as if its since were empty (spec 20, bug 23).
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

#: If a beat is late by more than this, the machine or the process was stopped.
OVERSHOOT_WARN_S = 60.0
#: The minimum interval, so that a very short lease does not flood the store with beats.
INTERVAL_S_MIN = 0.05
#: The maximum interval, because locks reject very long timeouts.
INTERVAL_S_MAX = 24 * 60 * 60.0


class Heartbeat:
    """Calls `beat`, a method of its owner, every `interval_s` in a daemon thread, from construction until `stop`. `beat` returns whether
    the reader is still registered. When the owner is garbage, the thread calls `give_up` instead, once and best-effort, and ends.
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
        # Held while the thread should beat; releasing it wakes the thread. SUBTLE: Python's garbage collector also releases it, and that
        # may run within any call of any thread. Of all ways to wake a thread, only the release of a bare lock takes no lock itself.
        self._reason = threading.Lock()
        self._reason.acquire()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"persist-heartbeat-{what}", daemon=True)
        self._thread.start()
        # When the process exits, leases are left to expire: the process must not wait, and the thread cannot continue.
        weakref.finalize(beat.__self__, self._end).atexit = False  # type: ignore[attr-defined]  # beat is a method

    @property
    def is_lost(self) -> bool:
        """Whether the reader was found expired."""
        return self._lost.is_set()

    def stop(self) -> None:
        """Ends the thread. No further beat can start after it returns. Idempotent."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._interval_s + OVERSHOOT_WARN_S)

    def _end(self) -> None:
        """Makes the thread stop beating. Never blocks. Idempotent."""
        try:
            self._reason.release()
        except RuntimeError:  # already released
            return

    def _run(self) -> None:
        while not self._has_ended():
            if not self._beat_once():
                return
        if self._beat() is None:
            self._give_up_at_best()

    def _has_ended(self) -> bool:
        """Waits between two beats. Returns whether the wait was ended early."""
        asleep_since_s = self._env.monotonic_s()
        if self._reason.acquire(timeout=self._interval_s):
            return True
        late_s = self._env.monotonic_s() - asleep_since_s - self._interval_s
        if late_s > OVERSHOOT_WARN_S:
            text = "heartbeat of %s on shard %s is %.0f s late: the machine slept or the process was stopped"
            _log.warning(text, self._what, self._shard, late_s, extra={"shard": self._shard})
        return False

    def _beat_once(self) -> bool:
        """Beats once and returns whether to continue. Only this frame refers to the owner, so there is no reference while the thread
        waits.
        """
        beat = self._beat()
        if beat is None:
            return True  # the next wait then ends at once
        try:
            registered = beat()
        except Exception as error:  # noqa: BLE001 - a thread has no caller, and the lease is held as before
            self._metrics.count("heartbeat", outcome="failed")
            # A closed client stays closed. But a store that was unreachable for longer than the retries may be back at the next beat, and
            # an unsafe store may be repaired by then.
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
        except Exception as error:  # noqa: BLE001 - the client may be closed; the lease expires anyway
            text = "%s on shard %s could not be expired: %s"
            _log.debug(text, self._what, self._shard, error, extra={"shard": self._shard})
