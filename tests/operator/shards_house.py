"""An operator of one shard with everything that it asks for counted: for test_many_shards."""

import itertools
import threading

from fake_cluster import FakeCluster
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SeededEnv
from persist_kit.counted import CountedMetrics
from persist_operator.bridge import Bridge
from persist_operator.cluster.informed import Informed
from persist_operator.cluster.port import JOB, PERSIST_SHARD, SPARK_SINK
from persist_operator.handlers.controller import Controller
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

SHARD = Key("PersistShard", "team", "flights")
LOOP = LoopSettings()


MARKS = itertools.count()


class Mark:
    """Hears that its subscription has begun."""

    def __init__(self):
        self.is_heard = threading.Event()

    def hear(self, news):
        self.is_heard.set()


class House:
    """An operator whose watches bring what `deliver` is called for. Its clock moves when a test moves it."""

    def __init__(self, folder, redis_url, now):
        self.env, self.engine = SeededEnv(start_ms=now), CountedMetrics()
        self.location = Location(blob=f"file://{folder}/blob", consensus=redis_url)
        profile = StorageProfile(
            blob=self.location.blob,
            consensus=self.location.consensus,
            allowed_namespaces=AllowedNamespaces(names=("team",)),
        )
        self.settings = OperatorSettings(storage_profiles={"default": profile}, loop=LOOP)
        self.cluster, self.bridge = FakeCluster(now_ms=self.env.now_ms), None
        self.heard, self.is_heard = [], threading.Event()
        self.restart()

    def restart(self):
        """As after a crash: only the API server and the stores remain. The first lists are complete."""
        self.close()
        self.bridge = Bridge(self.settings, env=self.env, metrics=self.engine)
        self.informed, metrics = Informed(), OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(
            self.cluster, self.bridge, self.settings, self.env, metrics, informed=self.informed
        )
        self.controller = Controller(
            self.reconciler, self.cluster, self.settings, self.env, metrics, informed=self.informed
        )
        self.reconciler.on_news(self.hear)
        self.controller.resync()

    def hear(self, key, after_s):
        self.heard.append((key, after_s))
        self.is_heard.set()

    def hear_all(self):
        """Waits until the news of all commits so far has been heard. Redis confirms a subscription after the messages before it."""
        (store,) = self.bridge._stores.values()
        mark = Mark()
        store.client._push.subscribe(f"mark {next(MARKS)}", mark)
        assert mark.is_heard.wait(60)

    def close(self):
        if self.bridge is not None:
            self.bridge.close()

    def deliver(self):
        """Let the watches bring everything as it is."""
        for kind in (PERSIST_SHARD, SPARK_SINK, JOB):
            for one in self.cluster.find(kind, None, {}):
                self.controller.changed(one, is_gone=False)

    def go(self, times=1, seconds=20):
        wait_s = None
        for _ in range(times):
            self.env.advance_ms(seconds * 1000)
            wait_s = self.reconciler.reconcile(SHARD)
        return wait_s

    def status(self):
        return self.cluster.stored("PersistShard", "team", "flights")["status"]

    def commands(self, redis):
        text = redis.command("INFO", "commandstats").decode()
        calls = {
            line.split(":")[0][len("cmdstat_") :]: int(line.split("calls=")[1].split(",")[0])
            for line in text.splitlines()
            if line.startswith("cmdstat_")
        }
        # The lua scripts of the engine count as one command each, and what they call inside as others.
        return sum(calls.get(name, 0) for name in ("evalsha", "eval"))

    def blob_calls(self, verb):
        return self.engine.total("blob_calls", verb=verb)

    def append(self, number, diff=1):
        """Another process appends."""
        with PersistClient.open(self.location) as client:
            shard_id, schema = ShardId(self.status()["shardId"]), Schema.from_ddl("id BIGINT", "")
            with client.open_writer(shard_id, schema, purpose="test") as writer:
                rows = [(((1 if diff < 0 else number,), ()), number, diff)]
                writer.append(rows, lower=writer.shared_upper(), upper=Antichain.of(number + 1))
