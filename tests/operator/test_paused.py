"""The annotation `paused`: nothing of the resource and its children changes but the status, which is neither failed nor done."""

from pathlib import Path

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.cluster.port import BY_KIND, JOB, PERSIST_SHARD, POD, SPARK_SINK
from reconcile_world import SHARD, SINK, WRITES, World, reconciled_behind

PAUSED = ("Unknown", "Paused")


@pytest.fixture
def world(tmp_path, now):
    made = World(tmp_path, now)
    yield made
    made.close()


def annotate(world, key, value, annotation=names.ANNOTATION_PAUSED):
    def change(resource):
        annotations = resource["metadata"].setdefault("annotations", {})
        annotations.pop(annotation, None)
        if value is not None:
            annotations[annotation] = value

    world.cluster.edit(BY_KIND[key.kind], key.namespace, key.name, change)


def written(world, key, times_=4):
    """The verbs of the requests that change something, of so many reconciles."""
    requests = world.cluster.record()
    world.go(key, times_)
    return [one.verb for one in requests if one.verb in WRITES]


def is_paused(world, key):
    status = world.status(key)
    return (
        world.ready(key) == PAUSED
        and conditions.is_true(status, "Reconciling")
        and not conditions.is_true(status, "Stalled")
    )


def test_a_paused_shard_is_left_alone_until_the_annotation_goes(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    before = world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")
    annotate(world, SHARD, "true")
    annotate(world, SHARD, "now", f"{names.REQUEST_PREFIX}gc")
    assert written(world, SHARD) == ["apply_status"], "the first look writes the status, and the others change nothing"
    assert is_paused(world, SHARD)
    after = world.status(SHARD)
    outcome = {*conditions.OUTCOME}
    assert [one for one in after["conditions"] if one["type"] not in outcome] == [
        one for one in before["conditions"] if one["type"] not in outcome
    ]
    assert {**after, "conditions": ()} == {**before, "conditions": ()}
    annotate(world, SHARD, None)
    assert "create" in written(world, SHARD), "the request waited"
    assert world.status(SHARD)["lastHandledRequests"] == {"gc": "now"}
    assert not conditions.is_true(world.status(SHARD), "Reconciling")


def test_a_new_shard_that_is_paused_is_not_made(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource(annotations={names.ANNOTATION_PAUSED: "true"}))
    world.go(SHARD)
    assert is_paused(world, SHARD)
    assert "shardId" not in world.status(SHARD)
    assert not [one for one in Path(world.location.blob.removeprefix("file://")).rglob("*") if one.is_file()]
    annotate(world, SHARD, None)
    world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")


def test_the_driver_of_a_paused_sink_runs_on_and_is_not_replaced(world, shard_resource, sink_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    world.cluster.create(SPARK_SINK, sink_resource())
    world.go(SINK)
    (driver,) = [one["metadata"]["name"] for one in world.cluster.find(POD, "team", {})]
    world.pod_phase(driver, "Running")
    world.go(SINK)
    annotate(world, SINK, "true")
    world.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"].update(suspend=True))
    assert written(world, SINK) == ["apply_status"]
    assert is_paused(world, SINK)
    world.pod_phase(driver, "Failed", exitCode=1)
    assert written(world, SINK) == []
    assert [one["metadata"]["name"] for one in world.cluster.find(POD, "team", {})] == [driver]
    annotate(world, SINK, "false")
    world.go(SINK)
    assert world.ready(SINK) == ("True", "Suspended")


def test_the_deletion_of_a_paused_shard_waits(world, shard_resource):
    spec = {"reclaimPolicy": "Tombstone"}
    world.cluster.create(PERSIST_SHARD, shard_resource(spec))
    world.go(SHARD)
    annotate(world, SHARD, "true")
    world.cluster.edit(
        PERSIST_SHARD,
        "team",
        "flights",
        lambda one: one["metadata"].update(deletionTimestamp=times.to_text(world.env.now_ms())),
    )
    assert written(world, SHARD) == ["apply_status"]
    assert "its deletion waits" in conditions.find(world.status(SHARD), "Ready")["message"]
    annotate(world, SHARD, None)
    assert set(written(world, SHARD)) > {"apply_status"}


@pytest.mark.parametrize(
    ("value", "words"), [("true", "paused is set: the"), ("yes", "is set (to 'yes': only false"), ("", "to ''")]
)
def test_every_value_but_false_pauses_and_an_odd_one_is_quoted(world, shard_resource, value, words):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    annotate(world, SHARD, value)
    world.go(SHARD)
    assert is_paused(world, SHARD)
    assert words in conditions.find(world.status(SHARD), "Ready")["message"]
    annotate(world, SHARD, "false")
    world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")


def test_a_pause_that_comes_while_a_run_is_decided_holds_it_back(world, shard_resource):
    """The write of the intent names the version that was read, so it fails, and the next reconcile sees the annotation."""
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    annotate(world, SHARD, "now", f"{names.REQUEST_PREFIX}gc")
    reconciled_behind(world, SHARD, lambda: annotate(world, SHARD, "true"), after="get", nth=2)  # the last read
    assert written(world, SHARD) == ["apply_status"]
    assert world.cluster.find(JOB, "team", {}) == []
    assert is_paused(world, SHARD)
    assert world.status(SHARD)["lastHandledRequests"] == {}


def test_metrics_show_what_is_paused(world, shard_resource):
    def shown():
        labels = {"kind": "PersistShard", "namespace": "team", "name": "flights"}
        return world.metrics.registry.get_sample_value("persist_resource_paused", labels)

    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    assert shown() is None
    annotate(world, SHARD, "true")
    world.go(SHARD)
    assert shown() == 1
    annotate(world, SHARD, None)
    world.go(SHARD)
    assert shown() is None
