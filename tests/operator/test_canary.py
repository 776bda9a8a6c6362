"""The canary goes from its resource to a commit and a read, and is late wherever that way is cut."""

import shutil
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.env import SeededEnv
from persist_operator.bridge import CANARY_KEY, Bridge
from persist_operator.cluster.port import PERSIST_SHARD
from persist_operator.settings import (
    AllowedNamespaces,
    CanarySettings,
    LoopSettings,
    OperatorSettings,
    StorageProfile,
)
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

LABELS = {"namespace": "team", "name": "canary"}
KEY = Key("PersistShard", "team", "canary")


class World:
    def __init__(self, folder, now, resource):
        self.folder, self.env = folder, SeededEnv(start_ms=now)
        self.location = Location(blob=f"file://{folder}/blob", consensus=f"sqlite://{folder}/consensus.db")
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        self.cluster.create(PERSIST_SHARD, resource)
        profile = StorageProfile(
            blob=self.location.blob,
            consensus=self.location.consensus,
            allowed_namespaces=AllowedNamespaces(names=("team",)),
        )
        self.settings = OperatorSettings(
            storage_profiles={"default": profile},
            canary=CanarySettings(resource="team/canary", interval_seconds=60),
            loop=LoopSettings(store_deadline_seconds=60, store_breaker_seconds=1),
        )
        self.bridge = Bridge(self.settings, env=self.env)
        self.registry = CollectorRegistry()
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, OperatorMetrics(self.registry))

    def go(self, times=1, *, after_s=61):
        waits = []
        for _ in range(times):
            self.env.advance_ms(1000 * after_s)
            waits.append(self.reconciler.reconcile(KEY))
        return waits[-1]

    def value(self, name):
        return self.registry.get_sample_value(f"persist_operator_canary_{name}", LABELS)

    @property
    def shard_id(self):
        return ShardId(self.cluster.get(PERSIST_SHARD, "team", "canary")["status"]["shardId"])


@pytest.fixture
def world(tmp_path, now, shard_resource):
    resource = shard_resource({"schema": {"key": CANARY_KEY}}, name="canary", uid="uid-canary")
    made = World(tmp_path / "stores", now, resource)
    yield made
    made.bridge.close()


def test_each_interval_has_a_commit_and_a_read_of_one_row(world):
    started_s = world.value("timestamp_seconds")
    assert started_s == world.env.now_ms() / 1000, "late from the start on, if it never succeeds"
    assert world.go(3) <= 60
    trips = world.value("seconds_count")
    assert trips >= 2
    assert world.value("timestamp_seconds") > started_s
    world.go(3, after_s=5)
    assert world.value("seconds_count") == trips, "no trip before its time"
    world.go(3)
    assert world.value("seconds_count") == trips + 3
    assert world.value("failures_total") is None
    with (
        PersistClient.open(world.location) as client,
        client.open_leased_reader(world.shard_id, purpose="test") as reader,
    ):
        upper = client.recent_upper(world.shard_id).time
        rows = reader.snapshot(Antichain.of(upper - 1)).to_table().to_pylist()
    assert [(row["key"]["at"], row["diff"]) for row in rows] == [(upper - 1, 1)], "the former rows are retracted"


def test_a_canary_whose_rows_since_has_passed_goes_on(world):
    world.go(3)
    trips = world.value("seconds_count")
    world.go(1, after_s=30 * 86_400)
    world.go(2)
    assert world.value("seconds_count") == trips + 3
    assert world.value("failures_total") is None


def test_stores_that_are_gone_make_it_late(world):
    world.go(3)
    last_s, trips = world.value("timestamp_seconds"), world.value("seconds_count")
    world.bridge.close()
    shutil.rmtree(world.folder)
    world.folder.write_text("no folder")
    world.bridge = world.reconciler._observer._bridge = Bridge(world.settings, env=world.env)
    world.reconciler._canary._bridge = world.bridge
    for _ in range(3):
        world.env.advance_ms(61_000)
        world.reconciler.reconcile(KEY)
    assert (world.value("timestamp_seconds"), world.value("seconds_count")) == (last_s, trips)


def test_a_shard_of_another_owner_is_a_failure_and_no_exception(world, monkeypatch):
    world.go(2)
    trips, original = world.value("seconds_count"), Bridge.round_trip

    def disowned(self, location, owner, shard_id, *, time_ms):
        return original(self, location, replace(owner, name="other"), shard_id, time_ms=time_ms)

    monkeypatch.setattr(Bridge, "round_trip", disowned)
    world.go(2)
    assert world.value("failures_total") == 2
    assert world.value("seconds_count") == trips


def test_other_shards_are_not_written(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource(name="flights"))
    for _ in range(4):
        world.env.advance_ms(61_000)
        world.reconciler.reconcile(Key("PersistShard", "team", "flights"))
    status = world.cluster.get(PERSIST_SHARD, "team", "flights")["status"]
    assert status["frontiers"]["upper"] == "0"
    assert world.value("seconds_count") is None
