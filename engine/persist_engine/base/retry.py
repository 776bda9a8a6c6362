"""Backoff against failing stores. Decides how long to wait and when to give up. Knows nothing of the retried operation.

`Retry.external` repeats idempotent calls. A caller that keeps state between attempts, or decides anew at each one, writes its
own loop around `Backoff`.
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
#: After this time, a wait that nothing else shows is logged at warning, because thirty attempts can take five minutes.
_QUIET_MS = 10_000.0
#: A timed wait retries the store for at least this long, even if its timeout is shorter, because most failures are brief.
INSIST_S = 1.0

#: The deadline in seconds of this thread's timed wait, and whether it applies even if `give_up_ms` is set; see `Retry.until`.
_DEADLINE: ContextVar[tuple[float, bool] | None] = ContextVar("deadline", default=None)

T = TypeVar("T")
#: Called before each further attempt, by the retrying thread, with the operation and its error.
OnWait = Callable[[str, StorageError], None]


class Backoff:
    """The sleeps of one retry loop: exponential, clamped, jittered. Not thread-safe: use one per loop."""

    def __init__(
        self,
        env: Env,
        settings: RetrySettings,
        metrics: Metrics,
        *,
        what: str,
        shard: str,
        kind: str,
        deadline: tuple[float, bool] | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        self._on_wait = on_wait
        self._env, self._settings, self._metrics = env, settings, metrics
        self._deadline = deadline
        self._labels = {"kind": kind, "op": what}
        self._what, self._shard = what, shard
        self._subject = f"{what} of {shard}" if shard else what
        self._next_ms = settings.initial_ms
        self._started_s = env.monotonic_s()
        self.attempts = 0
        metrics.count("retry_started", **self._labels)

    def wait(self, error: StorageError) -> None:
        """Sleep before the next attempt. Raises Unavailable, chained to `error`, once `give_up_ms` have passed, or the
        deadline of `Retry.until` where it applies.
        """
        self.attempts += 1
        self._metrics.count("retry_attempts", **self._labels)
        elapsed_ms = (self._env.monotonic_s() - self._started_s) * 1000
        give_up_ms = self._settings.give_up_ms
        if self._deadline is not None and (give_up_ms is None or self._deadline[1]):
            left_ms = (self._deadline[0] - self._started_s) * 1000
            give_up_ms = left_ms if give_up_ms is None else min(give_up_ms, left_ms)
        if give_up_ms is not None and elapsed_ms >= give_up_ms:
            self._metrics.count("retry_finished", **self._labels, outcome="gave_up")
            raise Unavailable(
                f"{self._subject} gave up after {self.attempts} attempts in {elapsed_ms:.0f} ms: {error}",
                operation=self._what,
                shard_id=self._shard,
                attempts=self.attempts,
            ) from error
        self._log(error, elapsed_ms)
        if self._on_wait is not None:
            self._on_wait(self._subject, error)
        jitter = self._settings.jitter
        pause_ms = self._next_ms * self._env.uniform(1 - jitter, 1 + jitter)
        if give_up_ms is not None:
            pause_ms = min(pause_ms, give_up_ms - elapsed_ms)  # the last attempt falls on the deadline
        self._metrics.count("retry_sleep_seconds", pause_ms / 1000, **self._labels)
        self._env.sleep(pause_ms / 1000)
        self._next_ms = min(self._next_ms * self._settings.factor, self._settings.clamp_ms)

    def answered(self) -> None:
        """End the loop: an attempt succeeded."""
        self._metrics.count("retry_finished", **self._labels, outcome="answered")

    def _log(self, error: StorageError, elapsed_ms: float) -> None:
        level = logging.DEBUG
        is_long = self._on_wait is None and elapsed_ms >= _QUIET_MS
        if is_long or self.attempts >= self._settings.warn_attempts:
            level = logging.WARNING
        elif self.attempts >= _INFO_ATTEMPTS:
            level = logging.INFO
        text = "%s failed, attempt %d, retrying: %s"
        _log.log(level, text, self._subject, self.attempts, error, extra={"shard": self._shard})


class Retry:
    """The retry loop, and backoffs for callers' own loops. Thread-safe. `on_wait` can show users what the process waits for."""

    def __init__(self, env: Env, settings: RetrySettings, metrics: Metrics, *, on_wait: OnWait | None = None) -> None:
        self._env, self._settings, self._metrics = env, settings, metrics
        self.on_wait = on_wait

    @property
    def env(self) -> Env:
        """The clock of the waits."""
        return self._env

    def backoff(self, what: str, *, shard: str, kind: str = "command") -> Backoff:
        """Return a fresh backoff for the caller's own loop."""
        return Backoff(
            self._env,
            self._settings,
            self._metrics,
            what=what,
            shard=shard,
            kind=kind,
            deadline=_DEADLINE.get(),
            on_wait=self.on_wait,
        )

    @contextmanager
    def until(self, timeout_s: float | None, *, at_most: bool = False) -> Iterator[None]:
        """Limit the retries of this thread inside the block to `timeout_s`, but at least INSIST_S; then they raise Unavailable.
        If `give_up_ms` is set, it applies instead; with `at_most`, the earlier of the two limits applies. A `timeout_s` of None
        changes nothing.
        """
        if timeout_s is None:
            yield
            return
        token = _DEADLINE.set((self._env.monotonic_s() + max(timeout_s, INSIST_S), at_most))
        try:
            yield
        finally:
            _DEADLINE.reset(token)

    def external(self, what: str, call: Callable[[], T], *, shard: str = "") -> T:
        """Call `call` until it returns. Retries on Determinate and Indeterminate alike, so `call` must be idempotent. Raises
        Unavailable at the deadline.
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
