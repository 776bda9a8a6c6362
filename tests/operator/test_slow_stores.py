"""Stores that hang or were down, behind the bridge: each location has its own client, threads and probe."""

import threading
import time

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.model.ids import ShardId
from persist_operator.api.shard import StoreLocation
from persist_operator.bridge import Bridge, BridgeFailure, StoreBusy
from persist_operator.handlers.controller import Controller
from persist_operator.plan.observed import StoreFailure
from persist_operator.settings import LoopSettings, OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key
from prometheus_client import CollectorRegistry


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


class Hanging:
    """A client whose calls return after `released` is set."""

    def __init__(self):
        self.calls, self.entered, self.released = 0, threading.Semaphore(0), threading.Event()

    def inspect(self, shard_id):
        self.calls += 1
        self.entered.release()
        assert self.released.wait(60)
        return "alive"

    def close(self):
        pass


SHARD_ID = ShardId("s00000000-0000-0000-0000-000000000001")
HERE, THERE = StoreLocation(blob="mem:a", consensus="mem:a"), StoreLocation(blob="mem:b", consensus="mem:b")


def answer_of(bridge, location, shard_id=SHARD_ID):
    """The answer of the store, or the failure of the bridge."""
    try:
        return bridge._call(location, lambda client: client.inspect(shard_id))
    except BridgeFailure as error:
        return error.failure


@pytest.mark.slow
def test_one_location_never_occupies_all_workers():
    hanging, answering = Hanging(), Hanging()
    answering.released.set()
    clients = {"mem:a": hanging, "mem:b": answering}
    settings = OperatorSettings(loop=LoopSettings(workers=4, store_deadline_seconds=3600))
    with Bridge(settings, open_client=lambda location: clients[location.blob]) as bridge:
        workers = [threading.Thread(target=answer_of, args=(bridge, HERE), daemon=True) for _ in range(3)]
        for worker in workers:
            worker.start()
        for _ in workers:
            assert hanging.entered.acquire(timeout=60)
        with pytest.raises(StoreBusy, match="mem:a") as busy:
            answer_of(bridge, HERE)
        assert not busy.value.is_over()
        assert answer_of(bridge, THERE) == "alive"
        hanging.released.set()
        for worker in workers:
            worker.join(60)
        assert busy.value.is_over()
        assert answer_of(bridge, HERE) == "alive"


def test_a_key_whose_store_is_busy_is_not_reconciled_before_the_store_has_room():
    class Busy:
        has_room, count = False, 0

        def reconcile(self, key):
            self.count += 1
            if self.count == 1:
                raise StoreBusy("mem:a: other calls to it are under way", lambda: self.has_room)
            return 300.0

    key, env, reconciler = Key("PersistShard", "team", "flights"), SeededEnv(), Busy()
    controller = Controller(
        reconciler, FakeCluster(now_ms=env.now_ms), OperatorSettings(), env, OperatorMetrics(CollectorRegistry())
    )

    def pass_the_time():
        """Until after the key was due once."""
        env.advance_ms(5_000)
        assert controller._queue.take(timeout_s=0) == key
        controller._one(key)

    controller._queue.add(key)
    pass_the_time()
    for _ in range(5):
        pass_the_time()
    assert reconciler.count == 1
    reconciler.has_room = True
    pass_the_time()
    assert reconciler.count == 2
    env.advance_ms(299_000)
    assert controller._queue.take(timeout_s=0) is None


@pytest.mark.slow
def test_one_background_call_probes_a_store_that_was_down(now):
    """The deadline is an hour. The caller waits a moment for the probe, and the store is available when that one call returns."""
    client, env = Hanging(), SeededEnv(start_ms=now)
    settings = OperatorSettings(loop=LoopSettings(store_deadline_seconds=3600, store_breaker_seconds=10))
    with Bridge(settings, env=env, open_client=lambda location: client) as bridge:
        bridge._store(HERE).last_failure = failure = StoreFailure(reason="StorageUnreachable", message="down")
        assert [answer_of(bridge, HERE) for _ in range(5)] == [failure] * 5
        assert client.calls == 1
        client.released.set()
        wait_until(lambda: bridge._store(HERE).last_failure is None)
        assert answer_of(bridge, HERE) == "alive"


def test_the_same_stores_with_other_credentials_open_another_client():
    opened, client = [], Hanging()
    client.released.set()
    at = {"blob": "s3://b", "consensus": "redis://r:6379/0", "secret_name": "s"}
    with Bridge(
        OperatorSettings(), open_client=lambda location: opened.append(location) or client, credentials_dir="/run/p"
    ) as bridge:
        for name in ("red", "blue", "red"):
            assert answer_of(bridge, StoreLocation(**at, profile=name)) == "alive"
    folders = [one.consensus.partition("credentials_dir=")[2] for one in opened]
    assert folders == ["/run/p/red", "/run/p/blue"]
