"""Pods whose resource or driver is gone are counted, and those of what runs are not."""

import logging

import pytest
from fake_cluster import FakeCluster
from persist_operator.api import names
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.steps.leaked import leaked_pods, our_pods


@pytest.fixture
def cluster(now, shard_resource, sink_resource):
    made = FakeCluster(now_ms=lambda: now)
    made.create(PERSIST_SHARD, shard_resource())
    made.create(SPARK_SINK, sink_resource())
    return made


def pod(cluster, name, uid, *, phase="Running", component="sink", managed=True, **labels):
    own = {names.LABEL_MANAGED_BY: names.MANAGER} if managed else {}
    head = {
        "namespace": "team",
        "name": name,
        "labels": {**own, names.LABEL_OWNER_UID: uid, names.LABEL_COMPONENT: component, **labels},
    }
    cluster.create(POD, {"metadata": head})
    cluster.edit(POD, "team", name, lambda one: one.update(status={"phase": phase}))


def leaked(cluster, *namespaces):
    pods = our_pods(cluster, namespaces or (None,))
    found = [*cluster.find(PERSIST_SHARD, None, {}), *cluster.find(SPARK_SINK, None, {})]
    return leaked_pods(pods, {one["metadata"]["uid"] for one in found})


def member(role, attempt):
    return {names.LABEL_ROLE: role, names.LABEL_ATTEMPT: str(attempt)}


def test_pods_of_resources_and_drivers_that_exist_are_not_leaked(cluster):
    assert leaked(cluster) == 0
    pod(cluster, "load-1", "uid-sink", **member("driver", 1))
    pod(cluster, "load-1-exec-1", "uid-sink", **member("executor", 1))
    pod(cluster, "load-0-exec-1", "uid-sink", phase="Succeeded", **member("executor", 0))
    pod(cluster, "gc", "uid-shard", component="maintenance")
    pod(cluster, "compact", "uid-shard", component="maintenance", **{names.LABEL_ROLE: "driver"})
    pod(cluster, "compact-exec-1", "uid-shard", component="maintenance", **{names.LABEL_ROLE: "executor"})
    pod(cluster, "others", "uid-unknown", managed=False)
    assert leaked(cluster) == 0
    assert leaked(cluster, "team", "else") == 0


def test_pods_without_resource_or_driver_are_leaked_and_named(cluster, caplog):
    pod(cluster, "orphan", "uid-gone", component="maintenance", phase="Succeeded")
    pod(cluster, "load-1", "uid-sink", **member("driver", 1))
    pod(cluster, "load-1-exec-1", "uid-sink", **member("executor", 1))
    pod(cluster, "load-2", "uid-sink", phase="Failed", **member("driver", 2))
    pod(cluster, "load-2-exec-1", "uid-sink", **member("executor", 2))
    pod(cluster, "compact-exec-1", "uid-shard", component="maintenance", **{names.LABEL_ROLE: "executor"})
    with caplog.at_level(logging.WARNING):
        assert leaked(cluster) == 3
    assert caplog.records[0].pods == ["team/compact-exec-1", "team/load-2-exec-1", "team/orphan"]
    cluster.delete(PERSIST_SHARD, "team", "flights")
    assert leaked(cluster) == 3, "the executor of the shard is counted once"
    assert leaked(cluster, "else") == 0
