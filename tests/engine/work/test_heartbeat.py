"""A heartbeat alone: what it logs, and which errors it survives. With a reader: test_lease_lifetime."""

from __future__ import annotations

import threading

import pytest
from persist_engine.base.errors import UnsafeStore
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.work.heartbeat import Heartbeat
from persist_kit.world import AheadEnv
from prometheus_client import CollectorRegistry

PATIENCE_S = 60.0


def beating(beat, env) -> Heartbeat:
    """A heartbeat without pauses."""
    return Heartbeat(
        beat,
        give_up=lambda: None,
        interval_s=0,
        env=env,
        what="reader r",
        shard="s",
        metrics=PrometheusMetrics(CollectorRegistry()),
    )


class SleepyEnv(AheadEnv):
    """A machine that sleeps for `late_s` between each two reads of its clock."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._late_s, self._slept_s = late_s, 0.0

    def monotonic_s(self) -> float:
        self._slept_s += self._late_s
        return self._slept_s


class Owner:
    def __init__(self) -> None:
        self.beats = 0
        self.is_done = threading.Event()

    def beat(self) -> bool:
        self.beats += 1
        self.is_done.set()
        return False


@pytest.mark.parametrize(("late_s", "is_logged"), [(61, True), (59, False)])
def test_a_heartbeat_more_than_a_minute_late_is_logged(caplog, late_s, is_logged):
    owner = Owner()
    heartbeat = beating(owner.beat, SleepyEnv(late_s))
    assert owner.is_done.wait(PATIENCE_S)
    heartbeat.stop()
    assert owner.beats == 1
    late = [record for record in caplog.records if "s late: the machine slept" in record.message]
    assert len(late) == is_logged
    assert all(record.shard == "s" for record in late)


class Stumbling:
    """An owner whose first beat raises an error that no store is documented to raise."""

    def __init__(self) -> None:
        self.beats = 0
        self.has_renewed = threading.Event()

    def beat(self) -> bool:
        self.beats += 1
        if self.beats == 1:
            raise ValueError("the password file is no text")
        self.has_renewed.set()
        return True


def test_regression_heartbeats_continue_after_an_error_that_is_not_a_store_error(caplog):
    """The thread died of it. The lease lapsed under a reader that went on using it."""
    owner = Stumbling()
    heartbeat = beating(owner.beat, AheadEnv())
    assert owner.has_renewed.wait(PATIENCE_S)
    heartbeat.stop()
    (logged,) = [record for record in caplog.records if "the password file is no text" in record.message]
    assert logged.exc_info


def test_heartbeats_continue_while_a_store_refuses_as_unsafe():
    class Refused(Owner):
        def beat(self) -> bool:
            if self.beats == 0:
                self.beats += 1
                raise UnsafeStore("redis at host can lose acknowledged commits")
            return super().beat()

    owner = Refused()
    heartbeat = beating(owner.beat, AheadEnv())
    assert owner.is_done.wait(PATIENCE_S)
    heartbeat.stop()
    assert owner.beats >= 2
