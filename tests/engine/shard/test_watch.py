"""Waiting for a newer state."""

from __future__ import annotations

import threading

from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.base.settings import WatchSettings
from persist_engine.shard.watch import StateWatch, wait_until


def test_an_answer_that_is_there_needs_no_refresh():
    refreshes: list[int] = []
    answer = wait_until(
        lambda: "there",
        refresh=lambda: refreshes.append(1),
        watch=StateWatch(),
        env=SeededEnv(),
        settings=WatchSettings(),
        timeout_s=None,
    )
    assert (answer, refreshes) == ("there", [])


def test_a_timeout_of_zero_refreshes_once():
    seen: list[str] = []
    answer = wait_until(
        lambda: seen[0] if seen else None,
        refresh=lambda: seen.append("fetched"),
        watch=StateWatch(),
        env=SeededEnv(),
        settings=WatchSettings(),
        timeout_s=0,
    )
    assert answer == "fetched"


def test_polling_backs_off_and_ends_at_the_deadline():
    """Spec 5.4."""
    env = SeededEnv()
    times: list[float] = []
    answer = wait_until(
        lambda: None,
        refresh=lambda: times.append(env.monotonic_s()),
        watch=StateWatch(),
        env=env,
        settings=WatchSettings(initial_ms=100, factor=2, clamp_ms=400),
        timeout_s=1.0,
    )
    assert answer is None
    assert [round(time, 3) for time in times] == [0, 0.1, 0.3, 0.7, 1.0]


def test_notify_wakes_a_waiter_long_before_its_next_poll():
    watch, state, checked = StateWatch(), [0], threading.Event()
    answers: list[int | None] = []

    def check() -> int | None:
        checked.set()
        return state[0] or None

    waiter = threading.Thread(
        target=lambda: answers.append(
            wait_until(
                check,
                refresh=lambda: None,
                watch=watch,
                env=SystemEnv(),
                settings=WatchSettings(initial_ms=3_600_000, clamp_ms=3_600_000),
                timeout_s=None,
            )
        )
    )
    waiter.start()
    assert checked.wait(60)
    state[0] = 7
    watch.notify()
    waiter.join(60)
    assert not waiter.is_alive()
    assert answers == [7]
    watch.notify()  # no waiter is left to wake


def test_news_that_come_while_older_news_are_taken_in_are_not_slept_through():
    """Regression: the bell was cleared after looking at the news, so what came meanwhile waited for the next poll."""
    env, watch, settings = SeededEnv(), StateWatch(), WatchSettings(initial_ms=60_000, clamp_ms=60_000)
    mailbox, state = ["first"], []

    class Pushed:
        def subscribe(self):
            watch.notify()

        def catch_up(self):
            taken = mailbox.copy()
            mailbox.clear()
            state.extend(taken)
            if taken == ["first"]:  # while this was looked at, the next one comes
                mailbox.append("second")
                watch.notify()

        def is_live(self):
            return False

    answer = wait_until(
        lambda: "both" if len(state) == 2 else None,
        refresh=lambda: None,
        watch=watch,
        env=env,
        settings=settings,
        timeout_s=None,
        pushed=Pushed(),
    )
    assert answer == "both"
    assert env.monotonic_s() == 0
