"""One replica leads, and its workers take the keys."""

import threading

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_operator.cluster.lease import Election
from persist_operator.cluster.port import LEASE, ApiError
from persist_operator.handlers import controller as controller_module
from persist_operator.handlers.controller import Controller, Pressure
from persist_operator.settings import LeaderSettings, LoopSettings, OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry


@pytest.fixture
def env(now):
    return SeededEnv(start_ms=now)


@pytest.fixture
def cluster(env):
    return FakeCluster(now_ms=env.now_ms)


@pytest.fixture
def candidate(cluster, env):
    return lambda name: Election(cluster, LeaderSettings(lease_seconds=15, renew_seconds=5), name, env)


def test_a_leader_leads_while_it_renews_and_a_standby_takes_over_when_it_stops(candidate, env):
    first, second = candidate("a"), candidate("b")
    assert first.tick()
    for _ in range(10):
        env.advance_ms(5000)
        assert (first.tick(), second.tick()) == (True, False)
    env.advance_ms(14_000)
    assert not second.tick()
    env.advance_ms(1000)
    assert not first.is_leader
    assert second.tick()
    assert (first.tick(), second.is_leader) == (False, True)


def test_a_released_lease_is_taken_at_once(candidate, env):
    first, second = candidate("a"), candidate("b")
    assert first.tick()
    first.release()
    assert (first.is_leader, second.tick()) == (False, True)


def test_a_leader_survives_failures_only_until_its_lease_is_over(candidate, cluster, env):
    first = candidate("a")
    assert first.tick()
    cluster.fail_next = [ApiError("no answer", status=0)] * 3
    env.advance_ms(5000)
    assert first.tick()
    env.advance_ms(10_000)
    assert not first.tick()


def test_one_of_two_candidates_that_take_the_lease_at_once_wins(candidate, cluster, env):
    first, second = candidate("a"), candidate("b")
    following = cluster.intercept

    def second_takes_after_the_read(request):
        answer = request.send()
        cluster.intercept = following
        assert second.tick()
        return answer

    cluster.intercept = second_takes_after_the_read
    assert not first.tick()
    assert cluster.get(LEASE, "persist-operator", "persist-operator")["spec"]["holderIdentity"] == "b"


@pytest.mark.slow
def test_a_standby_reconciles_no_key_and_loses_none(cluster):
    """A process that slept for longer than its Lease is a standby before it notices."""
    done, leads, refused, acted = [], threading.Event(), threading.Semaphore(0), threading.Event()

    class Recorder:
        def reconcile(self, key):
            done.append(key)
            acted.set()

    def may_act():
        refused.release()
        return leads.is_set()

    settings = OperatorSettings(loop=LoopSettings(workers=1))
    metrics = OperatorMetrics(CollectorRegistry())
    controller = Controller(Recorder(), cluster, settings, SystemEnv(), metrics, may_act=may_act)
    controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": "a"}})
    controller.start()
    try:
        assert refused.acquire(timeout=60)
        assert refused.acquire(timeout=60), "the controller takes the key again: it was neither lost nor reconciled"
        assert done == []
        leads.set()
        assert acted.wait(60)
    finally:
        controller.stop()
    assert [str(key) for key in done] == ["SparkSink/n/a"]


def test_a_sink_waits_behind_no_shards_of_its_namespace(cluster):
    order, both = [], threading.Event()

    class Recorder:
        def reconcile(self, key):
            order.append(key.kind)
            if set(order) == {"PersistShard", "SparkSink"}:
                both.set()

    settings = OperatorSettings(loop=LoopSettings(workers=1))
    controller = Controller(Recorder(), cluster, settings, SystemEnv(), OperatorMetrics(CollectorRegistry()))
    for number in range(1000):
        controller.changed({"kind": "PersistShard", "metadata": {"namespace": "n", "name": f"shard-{number}"}})
    controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": "sink"}})
    controller.start()
    try:
        assert both.wait(60)
    finally:
        controller.stop()
    assert "SparkSink" in order[:2]


def taken_by(cluster, monkeypatch, *, is_high, workers=6):
    """The names of the workers that took the keys of a controller, each of which waits until as many as can have one."""
    monkeypatch.setattr(controller_module, "PAUSE_S", 3600)
    meet, names = threading.Barrier(controller_module.BUSY_WORKERS if is_high else workers), []
    all_taken = threading.Event()

    class Recorder:
        def reconcile(self, key):
            names.append(threading.current_thread().name)
            if len(names) == 60:
                all_taken.set()
            meet.wait(60)

    settings = OperatorSettings(loop=LoopSettings(workers=workers))
    controller = Controller(Recorder(), cluster, settings, SystemEnv(), OperatorMetrics(CollectorRegistry()))
    controller._pressure.is_high = lambda: is_high
    for number in range(60):
        controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": f"sink-{number}"}})
    controller.start()
    try:
        assert all_taken.wait(60)
    finally:
        controller.stop()
    return set(names)


def test_workers_beyond_the_first_pause_while_no_processor_is_left(cluster, monkeypatch):
    assert taken_by(cluster, monkeypatch, is_high=True) == {f"worker-{number}" for number in range(4)}


def test_all_workers_take_keys_while_processor_is_left(cluster, monkeypatch):
    assert taken_by(cluster, monkeypatch, is_high=False) == {f"worker-{number}" for number in range(6)}


def test_pressure_is_the_use_of_processor_over_the_last_interval():
    env, used = SeededEnv(), [0.0]
    pressure = Pressure(env, lambda: used[0])
    assert not pressure.is_high()
    used[0] += 0.5
    env.advance_ms(499)
    assert not pressure.is_high(), "the interval is not complete"
    env.advance_ms(1)
    assert pressure.is_high()
    used[0] += 0.1
    env.advance_ms(499)
    assert pressure.is_high()
    env.advance_ms(1)
    assert not pressure.is_high()


def test_a_change_of_a_shard_concerns_the_sinks_that_write_or_read_it(cluster):
    metrics = OperatorMetrics(CollectorRegistry())
    controller = Controller(None, cluster, OperatorSettings(), SystemEnv(), metrics, may_act=lambda: True)
    spec = {"shardRef": {"name": "target"}, "input": {"type": "Shard", "shard": {"name": "source"}}}
    controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": "a"}, "spec": spec})
    for shard, concerned in (("target", True), ("source", True), ("other", False)):
        keys = controller._concerned({"kind": "PersistShard", "metadata": {"namespace": "n", "name": shard}})
        assert ("SparkSink/n/a" in map(str, keys)) is concerned
