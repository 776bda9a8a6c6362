"""Delivers news of commits in simulated time. A message may be lost, late, duplicated or reordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from persist_engine.base.versioned import VersionedData
from persist_engine.storage.notify import Listener, abridged

from persist_kit.sim.scheduler import Process, Scheduler

_LOST, _TWICE = 0.3, 0.2
_DELAY_MS_MAX = 40


class Wire:
    """Carries news between the processes of one history."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._listeners: list[tuple[Process, str, Listener]] = []
        self.delivered = 0
        self.is_cut = False
        """Whether messages no longer arrive, because the store at the other end is gone."""

    def subscribe(self, process: Process, key: str, listener: Listener) -> None:
        """Delivers news to `listener` from now on, until its process dies."""
        if all(listener is not known for _, _, known in self._listeners):
            self._listeners.append((process, key, listener))

    def take_over(self, cut: Wire) -> None:
        """Cuts `cut`, and moves its listeners to this wire, as a reconnection would."""
        cut.is_cut = True
        for process, key, listener in cut._listeners:
            self.subscribe(process, key, listener)

    def send(self, key: str, new: VersionedData) -> None:
        """`new` was committed: sends it to the listeners, with faults."""
        rng = self._scheduler.rng
        self._listeners = [each for each in self._listeners if not each[0].is_dead]
        for process, subscribed, listener in self._listeners:
            if subscribed != key:
                continue
            for _ in range(0 if rng.random() < _LOST else 1 + (rng.random() < _TWICE)):
                news = None if rng.random() < _LOST / 10 else abridged(new)
                self._scheduler.later(rng.uniform(0, _DELAY_MS_MAX), partial(self._deliver, process, listener, news))

    def _deliver(self, process: Process, listener: Listener, news: VersionedData | None) -> None:
        """Delivers one message. Runs in its own task, because the listener may have to wait for a lock."""
        if process.is_dead or self.is_cut:
            return
        self.delivered += 1
        self._scheduler.spawn(process, "news", partial(listener.hear, news))


class SimPush:
    """See Push: the end of a wire in one process, for the store that the process talks to. The store publishes."""

    def __init__(self, wire: Callable[[], Wire], process: Process) -> None:
        self._wire, self._process = wire, process

    def subscribe(self, key: str, listener: Listener) -> None:
        """See Push."""
        self._wire().subscribe(self._process, key, listener)

    def publish(self, key: str, new: VersionedData) -> None:
        """See Push."""

    def is_live(self, key: str) -> bool:
        """See Push. Always true, which is wrong when messages are lost."""
        return True

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        """See Push and `is_live`."""
        return True

    def close(self) -> None:
        """See Push."""
