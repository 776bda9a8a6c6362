"""Backoff against failing stores. Owns how long to wait and when to give up; knows nothing of what is retried.

`Retry.external` repeats anything idempotent. A caller that must remember something between attempts, or decide anew,
writes its own loop around `Backoff`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from persist_engine.base.env import Env
from persist_engine.base.errors import StorageError, Unavailable
from persist_engine.base.metrics import Metrics
from persist_engine.base.settings import RetrySettings

_log = logging.getLogger(__name__)
_INFO_ATTEMPTS = 3
#: Who waits for less still asks the store more than once: most failures are over before.
INSIST_S = 1.0

#: Until when whoever waits in this thread does so; see `Retry.until`.
_DEADLINE_S: ContextVar[float | None] = ContextVar("deadline_s", default=None)

T = TypeVar("T")
#: Told what is waited for, and what failed, before each further attempt; by the thread that waits.
OnWait = Callable[[str, StorageError], None]


class Backoff:
    """The sleeps of one retry loop: initial, doubling, clamped, jittered. Not thread-safe: one per loop."""

    def __init__(
        self,
        env: Env,
        settings: RetrySettings,
        metrics: Metrics,
        *,
        what: str,
        shard: str,
        kind: str,
        deadline_s: float | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        self._on_wait = on_wait
        self._env, self._settings, self._metrics = env, settings, metrics
        self._deadline_s = deadline_s
        self._labels = {"kind": kind, "op": what}
        self._what, self._shard = what, shard
        self._subject = f"{what} of {shard}" if shard else what
        self._next_ms = settings.initial_ms
        self._started_s = env.monotonic_s()
        self.attempts = 0
        metrics.count("retry_started", **self._labels)

    def wait(self, error: StorageError) -> None:
        """Sleep before the next attempt. Raises Unavailable, chained to `error`, when `give_up_ms` have passed, or what is
        waited for with a timeout is due (`Retry.until`).
        """
        self.attempts += 1
        self._metrics.count("retry_attempts", **self._labels)
        elapsed_ms = (self._env.monotonic_s() - self._started_s) * 1000
        give_up_ms = self._settings.give_up_ms
        if give_up_ms is None and self._deadline_s is not None:
            give_up_ms = (self._deadline_s - self._started_s) * 1000
        if give_up_ms is not None and elapsed_ms >= give_up_ms:
            self._metrics.count("retry_finished", **self._labels, outcome="gave_up")
            raise Unavailable(
                f"{self._subject} gave up after {self.attempts} attempts in {elapsed_ms:.0f} ms: {error}",
                operation=self._what,
                shard_id=self._shard,
                attempts=self.attempts,
            ) from error
        self._log(error)
        if self._on_wait is not None:
            self._on_wait(self._subject, error)
        jitter = self._settings.jitter
        pause_ms = self._next_ms * self._env.uniform(1 - jitter, 1 + jitter)
        if give_up_ms is not None:
            pause_ms = min(pause_ms, give_up_ms - elapsed_ms)  # one last attempt at the deadline, not long after it
        self._metrics.count("retry_sleep_seconds", pause_ms / 1000, **self._labels)
        self._env.sleep(pause_ms / 1000)
        self._next_ms = min(self._next_ms * self._settings.factor, self._settings.clamp_ms)

    def answered(self) -> None:
        """An attempt answered: the loop is over."""
        self._metrics.count("retry_finished", **self._labels, outcome="answered")

    def _log(self, error: StorageError) -> None:
        level = logging.DEBUG
        if self.attempts >= self._settings.warn_attempts:
            level = logging.WARNING
        elif self.attempts >= _INFO_ATTEMPTS:
            level = logging.INFO
        text = "%s failed, attempt %d, retrying: %s"
        _log.log(level, text, self._subject, self.attempts, error, extra={"shard": self._shard})


class Retry:
    """The retry loop, and backoffs for others' loops. Thread-safe. `on_wait`: for who shows people what is waited for."""

    def __init__(self, env: Env, settings: RetrySettings, metrics: Metrics, *, on_wait: OnWait | None = None) -> None:
        self._env, self._settings, self._metrics = env, settings, metrics
        self.on_wait = on_wait

    @property
    def env(self) -> Env:
        """The clock it waits by."""
        return self._env

    def backoff(self, what: str, *, shard: str, kind: str = "command") -> Backoff:
        """A fresh backoff for a loop of the caller's own."""
        return Backoff(
            self._env,
            self._settings,
            self._metrics,
            what=what,
            shard=shard,
            kind=kind,
            deadline_s=_DEADLINE_S.get(),
            on_wait=self.on_wait,
        )

    @contextmanager
    def until(self, timeout_s: float | None) -> Iterator[None]:
        """In the block, in this thread: who would insist for ever on a failing store, as no `give_up_ms` says how long, does
        so for `timeout_s`, at least INSIST_S: then Unavailable. None changes nothing.
        """
        if timeout_s is None:
            yield
            return
        token = _DEADLINE_S.set(self._env.monotonic_s() + max(timeout_s, INSIST_S))
        try:
            yield
        finally:
            _DEADLINE_S.reset(token)

    def external(self, what: str, call: Callable[[], T], *, shard: str = "") -> T:
        """Call until it answers, on both kinds of storage error; for idempotent calls only. Unavailable at the
        deadline.
        """
        backoff: Backoff | None = None
        while True:
            try:
                answer = call()
            except StorageError as error:
                backoff = backoff or self.backoff(what, shard=shard, kind="external")
                backoff.wait(error)
            else:
                if backoff is not None:
                    backoff.answered()
                return answer
