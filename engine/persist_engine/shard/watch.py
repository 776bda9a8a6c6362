"""Waits for a newer state. Progress within this process wakes the wait; progress of others is polled. This module knows
nothing of states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from persist_engine.base.env import Env
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.settings import WatchSettings

T = TypeVar("T")


class StateWatch:
    """Wakes all waiters on `notify`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: set[threading.Event] = set()

    def notify(self) -> None:
        """Wakes all waiters; each rechecks its condition."""
        with self._lock:
            for event in self._events:
                event.set()

    @contextmanager
    def subscribed(self) -> Iterator[threading.Event]:
        """An event that every notify sets until the block ends."""
        event = threading.Event()
        with self._lock:
            self._events.add(event)
        try:
            yield event
        finally:
            with self._lock:
                self._events.discard(event)


class Pushed(Protocol):
    """News that other processes push. It is an optimisation: without it, or when it fails, waiters poll."""

    def subscribe(self) -> None:
        """Starts to receive news; each item notifies the watch."""

    def catch_up(self) -> None:
        """Applies the received news and fetches what it lacks. Makes no round trip without news."""

    def is_live(self) -> bool:
        """Whether all commits are being pushed, so that polling may be rare."""


def once_after(seconds: float, env: Env) -> Callable[[], bool]:
    """A function that returns true once: at the first call made `seconds` from now or later."""
    due_s: float | None = env.monotonic_s() + seconds

    def is_due() -> bool:
        nonlocal due_s
        if due_s is None or env.monotonic_s() < due_s:
            return False
        due_s = None
        return True

    return is_due


def wait_until(
    check: Callable[[], T],
    *,
    refresh: Callable[[], None],
    watch: StateWatch,
    env: Env,
    settings: WatchSettings,
    timeout_s: float | None,
    pushed: Pushed | None = None,
    metrics: Metrics | None = None,
) -> T:
    """Returns the first answer of `check` that is not None, or None when `timeout_s` passed without one. With a `timeout_s` of
    None, it waits for ever.

    `check` reads local state only. It runs at once, then after one `refresh`, then after every notify (with pushed
    news, if any) and every poll (with a refresh). So even a timeout of 0 sees what other processes did before the call.
    """
    deadline_s = None if timeout_s is None else env.monotonic_s() + timeout_s
    poll_ms = settings.initial_ms
    metrics = metrics or NoMetrics()
    by = "at_once"
    with watch.subscribed() as event:
        answer = check()
        if answer is not None:
            metrics.count("watch_resolved", by=by)
            return answer
        if pushed is not None:
            pushed.subscribe()
        refresh()
        while True:
            event.clear()  # before reading news and state, so that a notify in between is not lost
            if pushed is not None:
                pushed.catch_up()
            answer = check()
            if answer is not None:
                metrics.count("watch_resolved", by=by)
                return answer
            poll_ms = min(poll_ms, settings.pushed_clamp_ms if pushed and pushed.is_live() else settings.clamp_ms)
            pause_s = poll_ms / 1000
            if deadline_s is not None:
                remaining_s = deadline_s - env.monotonic_s()
                if remaining_s <= 0:
                    metrics.count("watch_resolved", by="timeout")
                    return answer
                pause_s = min(pause_s, remaining_s)
            by = "notify" if env.wait(event, pause_s) else "poll"
            metrics.count("watch_woken", by=by)
            if by == "poll":
                refresh()
                poll_ms *= settings.factor
