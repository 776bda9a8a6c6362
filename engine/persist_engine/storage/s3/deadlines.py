"""Bounds the total time of calls to a driver that itself bounds only silence. Each call runs in a thread of its own. A call that takes too
long is left behind: a hanging thread is better than a hanging writer. A warning and two metrics report it.

The number of threads is bounded, including those left behind. If all of them hang, no further call starts. A thread waits for the next call
for a while after it finished one, because starting a thread costs a tenth of a small call.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from persist_engine.base.env import Env
from persist_engine.base.metrics import Metrics

_log = logging.getLogger(__name__)
#: How long a thread waits for the next call before it ends.
IDLE_S = 10.0
_IDLE_NAME = "persist-idle"
T = TypeVar("T")


class NotBegun(TimeoutError):
    """All threads were busy until the deadline. Nothing was sent."""


class LeftBehind(TimeoutError):
    """The call is still running and may still take effect."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The time limit of a call: `base_s`, plus the time that its bytes take at `bytes_per_s`. `threads_max` applies per process."""

    base_s: float
    bytes_per_s: int
    threads_max: int


class Allowance:
    """The time limit of one call. Thread-safe."""

    def __init__(self, limits: CallLimits, deadline_s: float) -> None:
        self._limits = limits
        self.deadline_s = deadline_s

    def add(self, byte_count: int) -> None:
        """Extends the limit for `byte_count` bytes that were not known before."""
        self.deadline_s += byte_count / self._limits.bytes_per_s


@dataclass(frozen=True, slots=True)
class _Call:
    verb: str
    call: Callable[[], Any]
    answer: Future[Any]

    def run(self) -> Callable[[], None]:
        """Makes the call. Returns a function that passes its result, or its error, to the caller."""
        try:
            return partial(self.answer.set_result, self.call())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            try:
                return partial(self.answer.set_exception, error)
            finally:
                del self  # the error refers to this frame, so it would keep itself and the bytes of the call alive


class _Threads:
    """The threads of one process. A forked child needs its own: a fork copies no threads, and copies locks in their momentary state."""

    def __init__(self, threads_max: int) -> None:
        self.pid = os.getpid()
        self.slots = threading.BoundedSemaphore(threads_max)
        self.lock = threading.Lock()
        self.left_behind = 0
        #: The queues of the threads that wait.
        self.idle: list[queue.SimpleQueue[_Call]] = []


class Deadlines:
    """See the module. Thread-safe, and usable on both sides of a fork."""

    def __init__(self, limits: CallLimits, *, address: str, env: Env, metrics: Metrics) -> None:
        self._limits, self._address = limits, address
        self._env, self._metrics = env, metrics
        self._threads = _Threads(limits.threads_max)

    def run(self, verb: str, call: Callable[[Allowance], T], *, byte_count: int = 0) -> T:
        """Returns or raises what `call` returns or raises. Raises NotBegun if no thread is free. Raises LeftBehind if the call
        takes longer than allowed for `byte_count` bytes and the bytes that it adds to its allowance.
        """
        threads = self._threads
        if threads.pid != os.getpid():
            # SUBTLE: no lock of the parent can be trusted. If two threads of a child begin at once, each may create its own `_Threads`.
            threads = self._threads = _Threads(self._limits.threads_max)
        if not threads.slots.acquire(timeout=self._limits.base_s):
            raise NotBegun(f"all {self._limits.threads_max} threads are busy or hang in calls that were left behind")
        allowance = Allowance(self._limits, self._env.monotonic_s() + self._limits.base_s)
        allowance.add(byte_count)
        answer: Future[T] = Future()
        try:
            _hand(threads, _Call(verb, lambda: call(allowance), answer))
        except BaseException:
            threads.slots.release()
            raise
        try:
            return self._awaited(threads, verb, answer, allowance)
        finally:
            del answer  # as in `_Call.run`

    def _awaited(self, threads: _Threads, verb: str, answer: Future[T], allowance: Allowance) -> T:
        try:
            while True:
                left_s = allowance.deadline_s - self._env.monotonic_s()
                try:
                    return answer.result(timeout=max(0.0, left_s))
                except TimeoutError:
                    if answer.done():  # the call itself raised TimeoutError, or its answer came just now
                        return answer.result()
                    if self._env.monotonic_s() < allowance.deadline_s:
                        continue  # the call extended its limit
                    self._leave(threads, verb, answer)
                    raise LeftBehind(
                        "no whole answer in the time allowed for its bytes, the call was left behind"
                    ) from None
        finally:
            del answer  # as in `_Call.run`

    def _leave(self, threads: _Threads, verb: str, answer: Future[T]) -> None:
        text = "%s at %s exceeded its time limit and was left behind"
        _log.warning(text, verb, self._address, extra={"address": self._address})
        self._metrics.count("blob_left_behind", verb=verb)
        self._count_running(threads, 1)
        answer.add_done_callback(lambda _: self._count_running(threads, -1))

    def _count_running(self, threads: _Threads, change: int) -> None:
        with threads.lock:
            threads.left_behind += change
            self._metrics.gauge("blob_left_behind_running", threads.left_behind)


def _hand(threads: _Threads, call: _Call) -> None:
    """Makes a thread run `call`: the one that began to wait last, or a new one if none waits."""
    with threads.lock:
        calls = threads.idle.pop() if threads.idle else None
    if calls is None:
        calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(threads, calls), name=_IDLE_NAME, daemon=True).start()
    calls.put(call)


def _serve(threads: _Threads, calls: queue.SimpleQueue[_Call]) -> None:
    while True:
        try:
            call = calls.get(timeout=IDLE_S)
        except queue.Empty:
            with threads.lock:
                if calls in threads.idle:
                    threads.idle.remove(calls)
                    return
            continue  # a call is on its way
        threading.current_thread().name = f"persist-{call.verb}"
        settle = call.run()
        threading.current_thread().name = _IDLE_NAME
        # Do this before the caller continues, because it may make another call.
        with threads.lock:
            threads.idle.append(calls)
        threads.slots.release()
        settle()
        del call, settle  # they refer to the answer, which may be large


def race(run: Callable[[int], str], count: int) -> list[str]:
    """Runs `run(0)` to `run(count - 1)` concurrently. Raises the first error after all have ended."""
    outcomes: list[str | BaseException] = [""] * count
    start = threading.Barrier(count)

    def racer(index: int) -> None:
        start.wait()
        try:
            outcomes[index] = run(index)
        except Exception as error:  # noqa: BLE001 - carried to the calling thread and raised there
            outcomes[index] = error

    threads = [threading.Thread(target=racer, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [str(outcome) for outcome in outcomes]
