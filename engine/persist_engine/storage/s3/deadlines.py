"""Calls of a driver that bounds silence only, bounded as a whole: each runs in a thread of its own, and one that takes longer than
it may is left behind. A thread that hangs beats a writer that does, and is told: a warning, and two metrics.

Bounded: so many threads at once, those left behind among them. Where all hang no further call begins.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from persist_engine.base.env import Env
from persist_engine.base.metrics import Metrics

_log = logging.getLogger(__name__)
T = TypeVar("T")


class NotBegun(TimeoutError):
    """All threads were taken until the deadline: nothing was sent."""


class LeftBehind(TimeoutError):
    """The call still runs: whatever it does may happen yet."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How long a call may take: `base_s`, and as long as its bytes take at `bytes_per_s`. `threads_max`: of one process."""

    base_s: float
    bytes_per_s: int
    threads_max: int


class Allowance:
    """How long one call may take. Thread-safe."""

    def __init__(self, limits: CallLimits, deadline_s: float) -> None:
        self._limits = limits
        self.deadline_s = deadline_s

    def add(self, byte_count: int) -> None:
        """So many bytes more are to be moved than was known."""
        self.deadline_s += byte_count / self._limits.bytes_per_s


class Deadlines:
    """See the module. Thread-safe, and of use on both sides of a fork."""

    def __init__(self, limits: CallLimits, *, address: str, env: Env, metrics: Metrics) -> None:
        self._limits, self._address = limits, address
        self._env, self._metrics = env, metrics
        self._begin()

    def _begin(self) -> None:
        """No thread runs in this process yet: a fork takes none along."""
        self._pid = os.getpid()
        self._slots = threading.BoundedSemaphore(self._limits.threads_max)
        self._lock = threading.Lock()
        self._left_behind = 0

    def run(self, verb: str, call: Callable[[Allowance], T], *, byte_count: int = 0) -> T:
        """What `call` returns or raises. NotBegun, or LeftBehind, when it takes longer than `byte_count` bytes may, and those
        that it adds to its allowance.
        """
        if self._pid != os.getpid():
            self._begin()
        slots = self._slots
        if not slots.acquire(timeout=self._limits.base_s):
            raise NotBegun(f"all {self._limits.threads_max} threads hang in calls that were left behind, or are busy")
        allowance = Allowance(self._limits, self._env.monotonic_s() + self._limits.base_s)
        allowance.add(byte_count)
        answer: Future[T] = Future()

        def body() -> None:
            try:
                answer.set_result(call(allowance))
            except BaseException as error:  # noqa: BLE001 - raised to the caller
                answer.set_exception(error)
            finally:
                slots.release()

        try:
            threading.Thread(target=body, name=f"persist-{verb}", daemon=True).start()
        except BaseException:
            slots.release()
            raise
        return self._awaited(verb, answer, allowance)

    def _awaited(self, verb: str, answer: Future[T], allowance: Allowance) -> T:
        while True:
            left_s = allowance.deadline_s - self._env.monotonic_s()
            try:
                return answer.result(timeout=max(0.0, left_s))
            except TimeoutError:
                if answer.done():  # it was the call's own, or came just now
                    return answer.result()
                if self._env.monotonic_s() < allowance.deadline_s:
                    continue  # it was given more time
                self._leave(verb, answer)
                raise LeftBehind(
                    "no whole answer in the time that its bytes may take, the call was left behind"
                ) from None

    def _leave(self, verb: str, answer: Future[T]) -> None:
        text = "%s at %s takes longer than it may, and was left behind"
        _log.warning(text, verb, self._address, extra={"address": self._address})
        self._metrics.count("blob_left_behind", verb=verb)
        self._count_running(1)
        answer.add_done_callback(lambda _: self._count_running(-1))

    def _count_running(self, change: int) -> None:
        with self._lock:
            self._left_behind += change
            self._metrics.gauge("blob_left_behind_running", self._left_behind)
