"""Keeps one leased reader alive: a thread that beats every half lease until stopped or until the reader is gone.

Knows nothing of what the lease is for. A machine that slept past its lease finds the reader expired: the thread ends
and says so through `is_lost`; the handle then behaves as if its since were empty (spec 20, bug 23), it does not
crash.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from persist_engine.base.env import Env
from persist_engine.base.errors import PersistError
from persist_engine.base.metrics import Metrics, NoMetrics

_log = logging.getLogger(__name__)

#: A beat that comes this much later than planned means that the machine or the process was stopped.
OVERSHOOT_WARN_S = 60.0
#: A lease so short that half of it rounds to nothing still leaves the store in peace.
INTERVAL_S_MIN = 0.05


class Heartbeat:
    """Calls `beat` (True: still registered) every `interval_s` in a daemon thread, from construction until `stop`."""

    def __init__(
        self,
        beat: Callable[[], bool],
        *,
        interval_s: float,
        env: Env,
        what: str,
        shard: str,
        metrics: Metrics | None = None,
    ) -> None:
        self._beat = beat
        self._metrics = metrics or NoMetrics()
        self._interval_s = max(INTERVAL_S_MIN, interval_s)
        self._env = env
        self._what, self._shard = what, shard
        self._stopped = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"persist-heartbeat-{what}", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the reader was found expired."""
        return self._lost.is_set()

    def stop(self) -> None:
        """End the thread; returns when no further beat can start. Idempotent."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._interval_s + OVERSHOOT_WARN_S)

    def _run(self) -> None:
        while True:
            asleep_since_s = self._env.monotonic_s()
            if self._stopped.wait(self._interval_s):
                return
            late_s = self._env.monotonic_s() - asleep_since_s - self._interval_s
            if late_s > OVERSHOOT_WARN_S:
                text = "heartbeat of %s on shard %s is %.0f s late: the machine slept or the process was stopped"
                _log.warning(text, self._what, self._shard, late_s, extra={"shard": self._shard})
            try:
                registered = self._beat()
            except PersistError as error:
                self._metrics.count("heartbeat", outcome="failed")
                # The store was away for longer than its retries: the lease may yet be renewed by the next beat.
                text = "heartbeat of %s on shard %s failed: %s"
                _log.warning(text, self._what, self._shard, error, extra={"shard": self._shard})
                continue
            self._metrics.count("heartbeat", outcome="renewed" if registered else "lost")
            if not registered:
                self._lost.set()
                text = "%s on shard %s has expired: its lease was not renewed in time"
                _log.warning(text, self._what, self._shard, extra={"shard": self._shard})
                return
