"""A work queue of keys. A key is in it at most once, at most one worker has a key, and failures repeat a key with growing delays.
Lanes take turns. Between two keys of one lane comes one key of each other lane, so a lane with thousands of keys hardly delays the others.

Invariant: a key that is added while a worker has it is due again afterwards. No change is lost.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from persist_engine.base.env import Env

K = TypeVar("K")


class WorkQueue(Generic[K]):
    """The queue. Thread-safe. Times are monotonic seconds of `env`."""

    def __init__(
        self, env: Env, *, backoff_initial_s: float, backoff_max_s: float, lane_of: Callable[[K], str] = lambda _: ""
    ) -> None:
        """`lane_of` gives the lane of a key. By default all keys share one lane."""
        self._env, self._lane_of = env, lane_of
        self._ready: dict[str, deque[tuple[float, K]]] = {}
        self._initial_s, self._max_s = backoff_initial_s, backoff_max_s
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._working: set[K] = set()
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: K, *, after_s: float = 0.0) -> None:
        """Make `key` due after `after_s`, unless it is due earlier. After a failure it is due no earlier than the end of its backoff."""
        with self._changed:
            # New events do not shorten the backoff. So a key that always fails and changes is not retried too often.
            due_s = max(self._env.monotonic_s() + max(0.0, after_s), self._not_before.get(key, 0.0))
            if self._due.get(key, float("inf")) <= due_s:
                return
            self._due[key] = due_s
            self._push(key, due_s)
            self._changed.notify()

    def take(self, *, timeout_s: float) -> K | None:
        """Take the key in the next lane that has been due longest and that no worker has. Waits for a key. Returns None after `timeout_s`,
        or when the queue is closed.

        The caller must call `done` with the key.
        """
        with self._changed:
            deadline_s = self._env.monotonic_s() + timeout_s
            while not self._closed:
                now_s = self._env.monotonic_s()
                key = self._pop(now_s)
                if key is not None:
                    if self._ready or self._heap:
                        # Workers are woken one by one. Each wakes the next, which takes a key or waits until the earliest key is due.
                        self._changed.notify()
                    return key
                wait_s = min(deadline_s, self._heap[0][0] if self._heap else deadline_s) - now_s
                if now_s >= deadline_s:
                    return None
                self._changed.wait(max(0.001, wait_s))
            return None

    def done(self, key: K, *, failed: bool = False, pause_s: float = 0.0, longest_s: float = float("inf")) -> None:
        """End the work on `key`. After a failure the key is due again after a delay, which doubles with each failure up to `longest_s`,
        with jitter, and is no shorter than `pause_s`.
        """
        with self._changed:
            self._working.discard(key)
            if failed:
                count = self._failures.get(key, 0)
                self._failures[key] = count + 1
                longest_s = min(longest_s, self._max_s)
                delay_s = min(longest_s, self._initial_s * 2 ** min(count, 30)) * self._env.uniform(0.8, 1.2)
                # The jitter is added to the pause, so that not all keys return to the API server at once.
                delay_s = max(delay_s, pause_s * self._env.uniform(1.0, 1.5))
                due_s = self._env.monotonic_s() + delay_s
                self._due[key] = self._not_before[key] = due_s
            else:
                self._failures.pop(key, None)
                self._not_before.pop(key, None)
            if key in self._due:
                self._push(key, self._due[key])
                self._changed.notify()

    def close(self) -> None:
        """Close the queue: `take` returns None from now on, also in workers that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def depth(self) -> int:
        """The number of due keys that no worker has."""
        with self._changed:
            now_s = self._env.monotonic_s()
            return sum(1 for key, due_s in self._due.items() if due_s <= now_s and key not in self._working)

    @property
    def oldest_s(self) -> float:
        """The wait of the oldest due key that no worker has; 0 when there is none."""
        with self._changed:
            now_s = self._env.monotonic_s()
            waits = [now_s - due_s for key, due_s in self._due.items() if key not in self._working]
            return max(0.0, *waits) if waits else 0.0

    def _push(self, key: K, due_s: float) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due_s, self._count, key))

    def _pop(self, now_s: float) -> K | None:
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, key = heapq.heappop(self._heap)
            self._ready.setdefault(self._lane_of(key), deque()).append((due_s, key))
        while self._ready:
            lane = next(iter(self._ready))
            waiting = self._ready.pop(lane)
            due_s, key = waiting.popleft()
            if waiting:
                self._ready[lane] = waiting  # behind all others
            if self._due.get(key) != due_s or key in self._working:
                # The key now has another time, or a worker has it and `done` will enqueue it again.
                continue
            del self._due[key]
            self._working.add(key)
            return key
        return None
