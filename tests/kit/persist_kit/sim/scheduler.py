"""Runs tasks one at a time, in an order drawn from a seed, on a virtual clock.

The scheduler owns the choice of the next task, the time, and the state of processes: dead, frozen or with a wrong clock. It knows nothing
about shards. Every task is a greenlet, so ordinary blocking code runs unchanged, and a switch takes less than a microsecond. A task runs
until it pauses, waits or ends, and then picks its successor itself.

Invariant: at most one task runs, and its next steps depend only on the seed. While a simulation runs, `threads` replaces everything that
would really block a thread (locks, events, pools).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from greenlet import greenlet

NEVER = math.inf


class Killed(BaseException):
    """Unwinds a task after its process has crashed or its history has ended. No engine code suppresses it."""


class Process:
    """A simulated operating-system process on its own machine: its tasks crash and freeze together, and share a clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.frozen_until_ms = 0.0
        self.skew_ms = 0


class Task:
    """One simulated thread. The witness attributes its store calls to `doing` and `command`."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = f"{process.name}.{name}"
        self.wake_ms = 0.0
        self.doing: object = None
        self.command = ""
        """The name of the engine command that the task began last."""
        self.is_finished = False
        self.on_finished: list[Callable[[], None]] = []
        self.thread: greenlet | None = None

    def ready_ms(self) -> float:
        """The time at which the task may run. A task of a dead process may run at once, to unwind."""
        return 0.0 if self.process.is_dead else max(self.wake_ms, self.process.frozen_until_ms)


class Scheduler:
    """Runs tasks until all have ended. The running task calls all methods except `run`."""

    def __init__(self, rng: random.Random, *, steps_max: int) -> None:
        self.rng = rng
        self.now_ms = 0.0
        self.steps = 0
        self.failure: str | None = None
        self.events: list[str] = []
        self.is_over = False
        self.acting: object = None
        """The `doing` of the task that made the current store call. A late call may run after its caller has ended."""
        self.command = ""
        """The `command` of that task."""
        self._steps_max = steps_max
        self._tasks: list[Task] = []
        self._outside: greenlet | None = None
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._later_count = 0
        self._current: Task | None = None

    @property
    def current(self) -> Task:
        """The running task."""
        assert self._current is not None, "no simulated thread runs"
        return self._current

    def note(self, text: str) -> None:
        """Adds a line to the event log, which must be equal for equal seeds."""
        name = self._current.name if self._current is not None else "-"
        self.events.append(f"{self.now_ms:8.0f} {name:<18} {text}")

    def spawn(self, process: Process, name: str, body: Callable[[], None]) -> Task:
        """Starts a task. It first runs when it is picked."""
        task = Task(process, name)
        task.wake_ms = self.now_ms
        self._tasks.append(task)
        task.thread = greenlet(lambda: self._run_task(task, body), self._outside)
        return task

    def run(self, process: Process, body: Callable[[], None]) -> None:
        """Runs `body` as the first task, and all tasks that it starts, to the end. Called once, from outside."""
        self._outside = greenlet.getcurrent()
        self.spawn(process, "root", body)
        while self._tasks:  # a task that has ended comes back here
            self._switch_to(self._pick())

    def pause(self, milliseconds: float) -> None:
        """A scheduling point: other tasks may run, and the caller does not run for `milliseconds`. Raises Killed."""
        self.wait_until(self.now_ms + milliseconds)

    def wait_until(self, wake_ms: float) -> None:
        """Suspends the task until `wake_ms` (NEVER: until another task sets its `wake_ms`). Raises Killed."""
        me = self.current
        if me.process.is_dead:
            raise Killed
        me.wake_ms = wake_ms
        chosen = self._pick()
        if chosen is not me:
            self._switch_to(chosen)
        if me.process.is_dead:
            raise Killed

    def later(self, milliseconds: float, call: Callable[[], object]) -> None:
        """Runs `call` in `milliseconds`, outside all tasks: between two of their steps, or after all have ended."""
        self._later_count += 1
        heapq.heappush(self._later, (self.now_ms + milliseconds, self._later_count, call))

    def kill(self, process: Process) -> None:
        """The process crashes: none of its tasks has any further effect."""
        process.is_dead = True

    def stop(self) -> None:
        """Ends the history: every task unwinds."""
        self.is_over = True
        self._later.clear()
        for task in self._tasks:
            task.process.is_dead = True

    def fail(self, text: str) -> NoReturn:
        """Reports a broken rule: keeps the first reason and ends the history. Raises Killed."""
        if self.failure is None:
            self.failure = text
            self.note(f"VIOLATION {text}")
        self.stop()
        raise Killed

    @contextmanager
    def doing(self, what: object) -> Iterator[None]:
        """In the block, store calls of the running task are attributed to `what`."""
        task = self.current
        before, task.doing = task.doing, what
        try:
            yield
        finally:
            task.doing = before

    # -- private ------------------------------------------------------------------------------------------------------

    def _run_task(self, task: Task, body: Callable[[], None]) -> None:
        try:
            if not task.process.is_dead:
                body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - every unexpected error is a finding
            self._fail_quietly(f"{task.name}: {type(error).__name__}: {error}", error)
        task.is_finished = True
        self._tasks.remove(task)
        for notify in task.on_finished:
            notify()

    def _fail_quietly(self, text: str, error: BaseException | None = None) -> None:
        try:
            if error is not None and self.failure is None:
                trace = error.__traceback__
                while trace is not None and trace.tb_next is not None:
                    trace = trace.tb_next
                if trace is not None:
                    text += f" ({trace.tb_frame.f_code.co_name}:{trace.tb_lineno})"
            self.fail(text)
        except Killed:
            pass

    def _switch_to(self, chosen: Task) -> None:
        self._current = chosen
        assert chosen.thread is not None, "spawned"
        chosen.thread.switch()

    def _pick(self) -> Task:
        """The task that runs next. Runs the late calls that are due."""
        while True:
            self.steps += 1
            if self.steps > self._steps_max and not self.is_over:
                self._fail_quietly(f"no end after {self._steps_max} steps: livelock")
            now_ms = self.now_ms
            ready = [
                task
                for task in self._tasks
                if (task.wake_ms <= now_ms and task.process.frozen_until_ms <= now_ms) or task.process.is_dead
            ]
            due = bool(self._later) and self._later[0][0] <= self.now_ms
            count = len(ready) + due
            if not count:
                self._pass_time()
                continue
            index = self.rng.randrange(count) if count > 1 else 0
            if index < len(ready):
                return ready[index]
            _, _, call = heapq.heappop(self._later)
            try:
                call()
            except Killed:
                continue
            except BaseException as error:  # noqa: BLE001 - as in _run_task
                self._fail_quietly(f"late call: {type(error).__name__}: {error}", error)

    def _pass_time(self) -> None:
        times = [task.ready_ms() for task in self._tasks]
        if self._later:
            times.append(self._later[0][0])
        next_ms = min(times)
        if next_ms == NEVER:
            waiting = ", ".join(task.name for task in self._tasks)
            self._fail_quietly(f"deadlock: {waiting} wait for each other")
            return
        self.now_ms = next_ms
