"""Pods through whole reconciles: the Secret of an attempt lives as long as the attempt, and a refused template creates nothing."""

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_operator.api import conditions, names
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import CONFIG_MAP, EVENT, JOB, PERSIST_SHARD, POD, SECRET, SERVICE, SPARK_SINK
from persist_operator.settings import AllowedNamespaces, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

ANY_NAMESPACE = AllowedNamespaces(names=("*",))

SHARD, SINK = Key("PersistShard", "team", "flights"), Key("SparkSink", "team", "load")


class SecretsUnread(FakeCluster):
    """An API server under the Role of the operator, which may create and delete Secrets and not read them."""

    def get(self, kind, namespace, name):
        assert kind is not SECRET
        return super().get(kind, namespace, name)

    def find(self, kind, namespace, labels):
        assert kind is not SECRET
        return super().find(kind, namespace, labels)

    def secrets(self):
        return super().find(SECRET, "team", {})


@pytest.fixture
def world(tmp_path, now, shard_resource):
    """(step, cluster): a cluster with a ready shard, and a function that reconciles a key some times."""
    env = SeededEnv(start_ms=now)
    cluster = SecretsUnread(now_ms=env.now_ms)
    profile = StorageProfile(
        allowed_namespaces=ANY_NAMESPACE, blob=f"file://{tmp_path}/blob", consensus=f"sqlite://{tmp_path}/log.db"
    )
    settings = OperatorSettings(storage_profiles={"default": profile})
    with Bridge(settings, env=env) as bridge:
        reconciler = Reconciler(cluster, bridge, settings, env, OperatorMetrics(CollectorRegistry()))

        def step(key, times=3):
            for _ in range(times):
                env.advance_ms(6000)
                reconciler.reconcile(key)
            kind = PERSIST_SHARD if key.kind == "PersistShard" else SPARK_SINK
            return cluster.get(kind, key.namespace, key.name)["status"]

        cluster.create(PERSIST_SHARD, shard_resource())
        step(SHARD, 4)
        yield step, cluster


def test_the_secret_of_an_attempt_is_its_own_and_goes_with_it(world, sink_resource):
    step, cluster = world
    cluster.create(SPARK_SINK, sink_resource())
    name = step(SINK)["driver"]["podName"]
    (first,) = cluster.secrets()
    assert first["metadata"]["name"] == names.rpc_secret_name(name, "uid-sink")
    assert first["metadata"]["ownerReferences"][0]["uid"] == "uid-sink"
    cluster.delete(POD, "team", name)
    step(SINK, 1)
    assert cluster.secrets() == []
    second_name = step(SINK, 4)["driver"]["podName"]
    (second,) = cluster.secrets()
    assert second_name != name
    assert second["data"] != first["data"]


def test_an_existing_secret_is_kept_for_the_attempt_that_continues(world, sink_resource):
    """The operator crashed after it had created the Secret. The pod that it creates later mounts that Secret."""
    step, cluster = world
    cluster.create(SPARK_SINK, sink_resource())
    name = step(SINK, 1)["driver"]["podName"]
    (first,) = cluster.secrets()
    cluster.delete(POD, "team", name)
    cluster.edit(SPARK_SINK, "team", "load", lambda one: one["status"]["driver"].update(phase="Creating"))
    step(SINK, 1)
    assert cluster.secrets() == [first]
    assert cluster.get(POD, "team", name) is not None


@pytest.mark.parametrize(
    ("spark", "reason", "path"),
    [
        (
            {"driver": {"template": {"spec": {"hostNetwork": True}}}},
            "InvalidTemplate",
            "spec.spark.driver.template.spec.hostNetwork",
        ),
        (
            {"executor": {"template": {"spec": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}}}},
            "InvalidTemplate",
            "spec.spark.executor.template.spec.volumes[0].hostPath",
        ),
        (
            {"conf": {"spark.kubernetes.executor.secrets.other": "/x"}},
            "InvalidConf",
            "spark.kubernetes.executor.secrets.other",
        ),
        ({"serviceAccountName": "admin"}, "ServiceAccountNotAllowed", "spec.spark.serviceAccountName"),
        (
            {"driver": {"template": {"spec": {"\x1b[2J": 1}}}},
            "InvalidTemplate",
            "spec.spark.driver.template.spec. [2J",  # what a terminal would obey is text
        ),
    ],
)
def test_a_sink_with_a_refused_template_stalls_and_creates_nothing(world, sink_resource, refused, spark, reason, path):
    step, cluster = world
    cluster.create(SPARK_SINK, sink_resource({"spark": spark}))
    status = step(SINK)
    stalled = conditions.find(status, "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", reason)
    assert path in stalled["message"]
    assert refused(sink_resource(), status) == []
    for kind in (POD, SERVICE, CONFIG_MAP):
        assert cluster.find(kind, "team", {}) == []
    assert cluster.secrets() == []


@pytest.mark.parametrize(
    ("maintenance", "reason", "path"),
    [
        (
            {"template": {"spec": {"containers": [{"env": []}]}}},
            "InvalidTemplate",
            "spec.maintenance.template.spec.containers",
        ),
        ({"template": {"\x1b[2J": 1}}, "InvalidTemplate", "spec.maintenance.template. [2J"),
        ({"serviceAccountName": "admin"}, "ServiceAccountNotAllowed", "spec.maintenance.serviceAccountName"),
        ({"priorityClassName": "system-cluster-critical"}, "InvalidTemplate", "spec.maintenance.priorityClassName"),
    ],
)
def test_a_shard_with_a_refused_template_stalls_and_starts_no_job(world, shard_resource, maintenance, reason, path):
    step, cluster = world
    annotated = {"annotations": {"persistshard.io/request-gc": "now"}}
    cluster.create(
        PERSIST_SHARD, shard_resource({"maintenance": maintenance}, name="greedy", uid="uid-greedy", **annotated)
    )
    status = step(Key("PersistShard", "team", "greedy"))
    stalled = conditions.find(status, "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", reason)
    assert path in stalled["message"]
    assert [one for one in cluster.find(EVENT, "team", {}) if path in one["message"]]
    assert cluster.find(JOB, "team", {names.LABEL_OWNER_UID: "uid-greedy"}) == []
    assert conditions.find(status, "StorageReachable")["status"] == "True", "the template is of its maintenance alone"
