"""Backoff and the retry loop."""

from __future__ import annotations

import logging

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import Determinate, Indeterminate, StorageError, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.model.frontier import Antichain
from persist_kit.world import SCHEMA, World


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
    """Spec 5.2."""
    call = Failing(Determinate("a"), Indeterminate("b"), Determinate("c"))
    assert retry(SeededEnv()).external("op", call) == "answer"
    assert call.calls == 4


def test_other_errors_are_not_repeated():
    def call() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        retry(SeededEnv()).external("op", call)


def test_sleeps_double_up_to_the_clamp_within_the_jitter():
    """Spec 5.1."""
    env = SeededEnv()
    slept: list[float] = []
    env.sleep = slept.append  # type: ignore[method-assign]  # watch the sleeps
    call = Failing(*[Determinate("x")] * 6)
    retry(env, initial_ms=10, clamp_ms=80, jitter=0.1).external("op", call)
    assert len(slept) == 6
    for seconds, nominal_ms in zip(slept, [10, 20, 40, 80, 80, 80], strict=True):
        assert nominal_ms * 0.9 <= seconds * 1000 < nominal_ms * 1.1


def test_gives_up_at_the_deadline_naming_operation_shard_and_cause():
    """Spec 5.3."""
    env = SeededEnv()
    call = Failing(*[Indeterminate("redis://127.0.0.1:1 refused")] * 1000)
    with pytest.raises(Unavailable, match=r"scan of s1 gave up .* redis://127.0.0.1:1 refused") as raised:
        retry(env, give_up_ms=500).external("scan", call, shard="s1")
    assert isinstance(raised.value.__cause__, Indeterminate)
    assert raised.value.detail["attempts"] == call.calls > 3
    assert env.monotonic_s() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_wait_that_nothing_shows_is_logged_after_ten_seconds(caplog: pytest.LogCaptureFixture, is_shown: bool):
    """A program, or a pod, whose Redis refuses commits for want of a replica would say nothing for five minutes."""
    env, warned_s = SeededEnv(), list[float]()
    handler = logging.Handler()
    handler.emit = lambda record: warned_s.append(env.monotonic_s())  # type: ignore[method-assign]  # watch the time
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("persist_engine.base.retry")
    logger.addHandler(handler)
    try:
        on_wait = (lambda what, error: None) if is_shown else None
        Retry(env, RetrySettings(), NoMetrics(), on_wait=on_wait).external(
            "compare and set", Failing(*[Determinate("NOREPLICAS Not enough good replicas to write.")] * 14)
        )
    finally:
        logger.removeHandler(handler)
    assert bool(warned_s) is not is_shown
    assert all(10 <= each < 60 for each in warned_s)


def test_regression_29_warns_once_attempts_are_many(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "persist_engine.base.retry"):
        retry(SeededEnv(), warn_attempts=5).external("op", Failing(*[Determinate("x")] * 6), shard="s1")
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG] * 2 + [logging.INFO] * 2 + [logging.WARNING] * 2
    assert {record.__dict__["shard"] for record in caplog.records} == {"s1"}


@pytest.mark.parametrize("timeout_s", [0, 0.2, 30])
def test_a_wait_with_a_timeout_ends_about_then_while_the_store_is_down(timeout_s: float):
    """Without a setting that says how long to insist on failing stores, which then is for ever."""
    world = World(settings=Settings(retry=RetrySettings(give_up_ms=None)))
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    machine = client.machine(shard_id)
    world.faults.break_down()
    started_s = world.env.monotonic_s()
    with pytest.raises(Unavailable, match=f"of {shard_id} gave up after"):
        machine.wait_for_upper_past(Antichain.of(7), timeout_s)
    took_s = world.env.monotonic_s() - started_s
    assert max(timeout_s, 1) <= took_s < 1.1 * max(timeout_s, 1)
    world.faults.heal()
    assert not machine.wait_for_upper_past(Antichain.of(7), timeout_s)


def test_what_is_no_wait_with_a_timeout_insists_as_before():
    env = SeededEnv()
    call = Failing(*[Determinate("x")] * 12)
    some = retry(env, clamp_ms=16_000)
    with some.until(None), some.until(5), some.until(None):  # within one, too
        pass
    assert some.external("op", call) == "answer"
    assert env.monotonic_s() > 5
    with pytest.raises(Unavailable), some.until(5):
        some.external("op", Failing(*[Determinate("x")] * 1000))
    assert some.external("op", Failing(*[Determinate("x")] * 12)) == "answer"
    with some.until(5):  # as long as the settings say, where they do
        assert retry(env, give_up_ms=60_000).external("op", Failing(*[Determinate("x")] * 12)) == "answer"
