"""Limits concurrent calls to one location, because a hanging store must not take all workers."""

from __future__ import annotations

import threading

from persist_engine.base.env import Env

#: A working store answers within this time. A caller waits no longer for a free place at a slow store, or for the answer of a store that
#: was down.
PROMPT_S = 1.0


class CallPlaces:
    """The places for concurrent calls to one location. Thread-safe."""

    def __init__(self, count: int, env: Env) -> None:
        self._count, self._env = count, env
        self._changed = threading.Condition()
        self._since_s: dict[object, float] = {}

    def take(self) -> object | None:
        """Take a place; the caller must `leave` it. Waits for a free place while the calls under way are young. Returns None when one
        is slow.
        """
        with self._changed:
            while len(self._since_s) >= self._count:
                left_s = min(self._since_s.values()) + PROMPT_S - self._env.monotonic_s()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            place = object()
            self._since_s[place] = self._env.monotonic_s()
            return place

    @property
    def are_taken(self) -> bool:
        """Whether `take` would return None at once."""
        with self._changed:
            taken = self._since_s.values()
            return len(taken) >= self._count and min(taken) + PROMPT_S <= self._env.monotonic_s()

    def leave(self, place: object) -> None:
        """Free the place. Idempotent."""
        with self._changed:
            self._since_s.pop(place, None)
            self._changed.notify()
