"""Clock, sleep, randomness and ids, injected as a dependency. Only this file touches the real ones.

`SystemEnv` is the real world. `SeededEnv` is deterministic; its clock moves only through `sleep` and `advance_ms`.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from typing import Protocol

#: Draws n random bytes, for ids.
system_random_bytes = os.urandom


def process_cpu_ns() -> int:
    """The CPU time that all threads of this process have used so far, in user and system mode."""
    return time.process_time_ns()


class Env(Protocol):
    """The clock, the randomness and the hostname that code outside the pure rooms uses. Thread-safe."""

    def now_ms(self) -> int:
        """Wall clock in milliseconds since the epoch, at least 0. May step in both directions."""

    def monotonic_s(self) -> float:
        """Monotonic seconds, for deadlines and durations."""

    def sleep(self, seconds: float) -> None:
        """Block this thread for about `seconds`."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block this thread until `event` is set or about `seconds` have passed. Returns whether it is set."""

    def random_bytes(self, count: int) -> bytes:
        """Return `count` random bytes. Ids use 16."""

    def uniform(self, low: float, high: float) -> float:
        """Return a float in [low, high), for jitter."""

    def hostname(self) -> str:
        """Return the name of this machine, for debugging fields only."""


class SystemEnv:
    """The real clock, sleep, randomness and host name."""

    def now_ms(self) -> int:
        """See Env."""
        return max(0, time.time_ns() // 1_000_000)

    def monotonic_s(self) -> float:
        """See Env."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See Env."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    def random_bytes(self, count: int) -> bytes:
        """See Env."""
        return system_random_bytes(count)

    def uniform(self, low: float, high: float) -> float:
        """See Env."""
        return random.uniform(low, high)

    def hostname(self) -> str:
        """See Env."""
        return socket.gethostname()


class SeededEnv:
    """Deterministic: the same seed gives the same draws. Only `sleep` and `advance_ms` move the clock."""

    def __init__(self, seed: int = 0, *, start_ms: int = 1_700_000_000_000) -> None:
        self._random = random.Random(seed)
        self._now_ms = start_ms
        self._slept_s = 0.0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """See Env."""
        with self._lock:
            return max(0, self._now_ms)

    def monotonic_s(self) -> float:
        """See Env."""
        with self._lock:
            return self._slept_s

    def sleep(self, seconds: float) -> None:
        """See Env."""
        self.advance_ms(max(1, round(seconds * 1000)))

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.sleep(seconds)
        return event.is_set()

    def advance_ms(self, milliseconds: int) -> None:
        """Move the wall clock in either direction; a forward move also advances the monotonic clock."""
        with self._lock:
            self._now_ms += milliseconds
            self._slept_s += max(0, milliseconds) / 1000

    def random_bytes(self, count: int) -> bytes:
        """See Env."""
        with self._lock:
            return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """See Env."""
        with self._lock:
            return self._random.uniform(low, high)

    def hostname(self) -> str:
        """See Env."""
        return "seeded"
