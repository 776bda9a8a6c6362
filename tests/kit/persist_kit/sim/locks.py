"""Replacements for the locks, events, threads and timers of `threading`. They block only in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

from persist_kit.sim.scheduler import NEVER, Scheduler, Task

T = TypeVar("T")

#: The probability that another task runs first when a lock is taken, as among real threads.
PREEMPT_RATE = 0.1


class _Waiters:
    """Tasks that wait for something to change."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tasks: list[Task] = []

    def wait_until(self, deadline_ms: float) -> None:
        task = self._scheduler.current
        self._tasks.append(task)
        try:
            self._scheduler.wait_until(deadline_ms)
        finally:
            if task in self._tasks:
                self._tasks.remove(task)

    def wake(self) -> None:
        for task in self._tasks:
            task.wake_ms = self._scheduler.now_ms
        self._tasks.clear()


class SimLock:
    """As threading.Lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiters = _Waiters(scheduler)
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as threading.Lock
        """See threading.Lock."""
        scheduler = self._scheduler
        if scheduler.is_over:
            self._is_held = True
            return True
        if scheduler.rng.random() < PREEMPT_RATE:
            scheduler.pause(0)
        deadline_ms = NEVER if timeout < 0 else scheduler.now_ms + timeout * 1000
        while self._is_held:
            if not blocking or scheduler.now_ms >= deadline_ms:
                return False
            self._waiters.wait_until(deadline_ms)
        self._is_held = True
        return True

    def locked(self) -> bool:
        """See threading.Lock."""
        return self._is_held

    def release(self) -> None:
        """See threading.Lock: pins count on the RuntimeError of a second release."""
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        self._waiters.wake()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_held:  # false when the process died while it waited
            self.release()


class SimRLock(SimLock):
    """As threading.RLock."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as threading.RLock
        """See threading.RLock."""
        me = self._scheduler.current
        if self._owner is not me and not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        """See threading.RLock."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class SimCondition:
    """Like threading.Condition, with its own lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = SimLock(scheduler)
        self._waiters = _Waiters(scheduler)

    def wait(self) -> None:
        """See threading.Condition. No task runs between the release and the wait."""
        self._lock.release()
        self._waiters.wait_until(NEVER)
        self._lock.acquire()

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """See threading.Condition."""
        deadline_ms = NEVER if timeout is None else self._scheduler.now_ms + timeout * 1000
        while not (answer := predicate()) and self._scheduler.now_ms < deadline_ms:
            self._lock.release()
            self._waiters.wait_until(deadline_ms)
            self._lock.acquire()
        return answer

    def notify_all(self) -> None:
        """See threading.Condition."""
        self._waiters.wake()

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()


class SimEvent:
    """As threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiters = _Waiters(scheduler)
        self._is_set = False

    def is_set(self) -> bool:
        """See threading.Event."""
        return self._is_set

    def set(self) -> None:
        """See threading.Event."""
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        """See threading.Event."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See threading.Event."""
        scheduler = self._scheduler
        deadline_ms = NEVER if timeout is None else scheduler.now_ms + timeout * 1000
        while not self._is_set and scheduler.now_ms < deadline_ms:
            self._waiters.wait_until(deadline_ms)
        return self._is_set


class SimThread:
    """Like threading.Thread: another task of the same process, with the `doing` of the task that starts it."""

    def __init__(self, scheduler: Scheduler, *, target: Callable[[], None], name: str) -> None:
        self._scheduler = scheduler
        self._target, self._name = target, name
        self._finished = SimEvent(scheduler)
        self._process = scheduler.current.process
        self.task: Task | None = None

    def start(self) -> None:
        """See threading.Thread."""
        self.task = self._scheduler.spawn(self._process, "thread", self._target)
        self.task.doing = self._scheduler.current.doing
        self.task.on_finished.append(self._finished.set)

    def join(self, timeout: float | None = None) -> None:
        """See threading.Thread."""
        self._finished.wait(timeout)


class SimTimer(SimThread):
    """As threading.Timer."""

    def __init__(self, scheduler: Scheduler, interval: float, function: Callable[[], None]) -> None:
        super().__init__(scheduler, target=self._wait, name="timer")
        self._interval_s, self._function = interval, function
        self._cancelled = SimEvent(scheduler)

    def cancel(self) -> None:
        """See threading.Timer."""
        self._cancelled.set()

    def _wait(self) -> None:
        if not self._cancelled.wait(self._interval_s):
            self._function()


class SimThreading:
    """Replaces the module `threading` in the engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> SimLock:  # noqa: N802 - as threading.Lock
        """See threading."""
        return SimLock(self._scheduler)

    def RLock(self) -> SimRLock:  # noqa: N802 - as threading.RLock
        """See threading."""
        return SimRLock(self._scheduler)

    def Timer(self, interval: float, function: Callable[[], None]) -> SimTimer:  # noqa: N802 - as threading.Timer
        """See threading."""
        return SimTimer(self._scheduler, interval, function)

    def Event(self) -> SimEvent:  # noqa: N802 - as threading.Event
        """See threading."""
        return SimEvent(self._scheduler)

    def Condition(self) -> SimCondition:  # noqa: N802 - as threading.Condition
        """See threading."""
        return SimCondition(self._scheduler)

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> SimThread:  # noqa: N802 - as threading.Thread
        """See threading."""
        return SimThread(self._scheduler, target=target, name=name)

    def current_thread(self) -> Task:
        """The running task. It equals no SimThread, so a heartbeat never takes itself for its owner."""
        return self._scheduler.current
