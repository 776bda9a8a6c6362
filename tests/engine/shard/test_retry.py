"""Backoff and the retry loop."""

from __future__ import annotations

import logging

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import Determinate, Indeterminate, StorageError, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import RetrySettings
from persist_engine.shard.retry import Retry


class Failing:
    """A call that fails with each of `errors` in turn, then answers."""

    def __init__(self, *errors: StorageError) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def retry(env: SeededEnv, **settings: float) -> Retry:
    return Retry(env, RetrySettings(**settings), NoMetrics())


def test_external_repeats_both_kinds_until_an_answer():
    call = Failing(Determinate("a"), Indeterminate("b"), Determinate("c"))
    assert retry(SeededEnv()).external("op", call) == "answer"
    assert call.calls == 4


def test_other_errors_are_not_repeated():
    def call() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        retry(SeededEnv()).external("op", call)


def test_sleeps_double_up_to_the_clamp_within_the_jitter():
    env = SeededEnv()
    slept: list[float] = []
    env.sleep = slept.append  # type: ignore[method-assign]  # watch the sleeps
    call = Failing(*[Determinate("x")] * 6)
    retry(env, initial_ms=10, clamp_ms=80, jitter=0.1).external("op", call)
    assert len(slept) == 6
    for seconds, nominal_ms in zip(slept, [10, 20, 40, 80, 80, 80], strict=True):
        assert nominal_ms * 0.9 <= seconds * 1000 < nominal_ms * 1.1


def test_gives_up_at_the_deadline_naming_operation_shard_and_cause():
    env = SeededEnv()
    call = Failing(*[Indeterminate("redis://127.0.0.1:1 refused")] * 1000)
    with pytest.raises(Unavailable, match=r"scan of s1 gave up .* redis://127.0.0.1:1 refused") as raised:
        retry(env, give_up_ms=500).external("scan", call, shard="s1")
    assert isinstance(raised.value.__cause__, Indeterminate)
    assert raised.value.detail["attempts"] == call.calls > 3
    assert env.monotonic_s() == pytest.approx(0.5, abs=0.05)


def test_regression_29_warns_once_attempts_are_many(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "persist_engine.shard.retry"):
        retry(SeededEnv(), warn_attempts=5).external("op", Failing(*[Determinate("x")] * 6), shard="s1")
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG] * 2 + [logging.INFO] * 2 + [logging.WARNING] * 2
    assert {record.__dict__["shard"] for record in caplog.records} == {"s1"}
