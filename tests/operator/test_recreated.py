"""A resource that is deleted and created again under its name before a reconcile came in between: nothing of the former one is shown."""

import pytest
from persist_operator.api import names
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK, ApiError
from prometheus_client import generate_latest
from reconcile_world import SHARD, SINK, World


@pytest.fixture
def world(tmp_path, now):
    made = World(tmp_path, now)
    yield made
    made.close()


def replaced(world, kind, manifest):
    """The resource goes, and another one of its name comes."""
    name = manifest["metadata"]["name"]
    world.cluster.edit(kind, "team", name, lambda one: one["metadata"].update(finalizers=[]))
    world.cluster.delete(kind, "team", name)
    world.cluster.create(kind, manifest)


def being_deleted(world, shard_resource, sink_resource, key):
    """A reconciled resource that a foreign finalizer keeps. Returns its kind, and what makes another one."""
    kind, make = (PERSIST_SHARD, shard_resource) if key is SHARD else (SPARK_SINK, sink_resource)
    world.cluster.create(kind, make(finalizers=["other/one"]))
    world.go(key, 1)
    world.cluster.delete(kind, "team", key.name)
    return kind, make


@pytest.mark.parametrize("key", [SHARD, SINK], ids=str)
def test_the_deletion_of_the_former_one_is_over(world, shard_resource, sink_resource, key):
    kind, make = being_deleted(world, shard_resource, sink_resource, key)
    world.go(key, 1)

    def deletion():
        labels = {"kind": key.kind, "namespace": "team", "name": key.name}
        return world.metrics.registry.get_sample_value("persist_resource_deletion_timestamp_seconds", labels)

    assert deletion() is not None
    replaced(world, kind, make(uid="uid-second"))
    world.go(key, 1)
    assert deletion() is None


@pytest.mark.parametrize("key", [SHARD, SINK], ids=str)
def test_the_series_of_a_deletion_end_although_a_watch_missed_the_end(world, shard_resource, sink_resource, key):
    kind, _ = being_deleted(world, shard_resource, sink_resource, key)
    again_s = world.reconciler.reconcile(key)
    assert again_s is not None, "no list would show that it is gone"
    world.cluster.edit(kind, "team", key.name, lambda one: one["metadata"].update(finalizers=[]))
    world.cluster.delete(kind, "team", key.name)
    assert world.reconciler.reconcile(key) is None
    assert b"persist_resource_deletion_timestamp_seconds{" not in generate_latest(world.metrics.registry)


def test_a_refusal_of_the_former_one_is_none_of_this_one(world, shard_resource, sink_resource):
    """Both have the generation 1. A permanent refusal stands for five minutes, or until the spec changes."""
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.cluster.create(SPARK_SINK, sink_resource())
    world.go(SHARD)
    world.cluster.deny[("create", "Pod")] = ApiError("spec.containers[0].image: Invalid value", status=422)
    world.go(SINK)
    assert world.ready(SINK) == ("False", "ActionRefused")
    world.cluster.deny.clear()
    replaced(world, SPARK_SINK, sink_resource(uid="uid-second"))
    world.go(SINK, 2)
    assert world.ready(SINK)[1] == "Running"
    assert [one["metadata"]["labels"][names.LABEL_OWNER_UID] for one in world.cluster.find(POD, "team", {})] == [
        "uid-second"
    ]
