"""Whole reconciles of a rollout: the driver of a new revision beside the one that runs."""

import contextlib
import itertools

import pytest
from persist_operator.api import names
from persist_operator.cluster.port import CONFIG_MAP, PERSIST_SHARD, POD, SPARK_SINK, ApiError
from persist_operator.steps.reconcile import Key
from reconcile_world import SHARD, SINK, WRITES, World, reports


@pytest.fixture
def world(tmp_path, now):
    with contextlib.closing(World(tmp_path, now)) as made:
        yield made


def test_a_crash_at_any_write_of_a_rollout_leaves_one_writer(world, shard_resource, sink_resource, refused):
    """From the change of the spec to the end of the former driver, the API server fails at the n-th write, for every n. Then the operator
    restarts. A driver is ordered to take over only when the status says so.
    """
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    stream = {"mode": "Streaming", "rollout": {"strategy": "BlueGreen"}}
    for crash_at in itertools.count(1):
        name, writes = f"load{crash_at}", []
        key, resource = Key("SparkSink", "team", name), sink_resource(stream, name=name, uid=f"uid-{name}")
        world.cluster.create(SPARK_SINK, resource)
        blue = world.go(key, 2)["driver"]["podName"]
        reports(world, blue, stage="Streaming")
        world.go(key, 1)
        following = world.cluster.intercept

        def fail_once(request, *, limit=crash_at, writes=writes, key=key, blue=blue):
            if request.verb not in WRITES:
                return request.send()
            writes.append(request)
            if len(writes) == limit:
                raise ApiError("no answer", status=0)
            answer = request.send()
            if world.cluster.find(CONFIG_MAP, "team", {names.LABEL_SINK: key.name, names.LABEL_ROLE: "promotion"}):
                status = world.status(key)
                assert status.get("rollout", {}).get("state") == "Promoting" or status["driver"]["podName"] != blue
            return answer

        def going(key=key):
            for _ in range(4):
                with contextlib.suppress(ApiError):
                    world.go(key, 1)
                world.restart()
            return world.status(key)

        world.cluster.intercept = fail_once
        world.cluster.edit(SPARK_SINK, "team", name, lambda one: one["spec"].update(write={"parallelism": 7}))
        green = going()["rollout"]["driver"]["podName"]
        reports(world, green, stage="StandingBy", missing=0, extra=0)
        assert going()["rollout"]["state"] == "CatchingUp"
        assert world.cluster.get(CONFIG_MAP, "team", f"{green}-promote") is None
        reports(world, green, stage="Proven", compared=5, missing=0, extra=0, lag_ms=1500)
        status = going()
        assert (status["rollout"]["state"], status["rollout"]["lagSeconds"]) == ("Promoting", 1)
        assert world.cluster.get(CONFIG_MAP, "team", f"{green}-promote")["data"] == {"promoted": green}
        assert (world.ready(key), status["driver"]["podName"]) == (("True", "Running"), blue)
        assert refused(resource, status) == []
        reports(world, green, stage="Streaming")
        status = going()
        world.cluster.intercept = following
        assert (world.ready(key), status["driver"]["podName"], status.get("rollout")) == (
            ("True", "Running"),
            green,
            None,
        )
        pods = world.cluster.find(POD, "team", {names.LABEL_SINK: name, names.LABEL_ROLE: "driver"})
        assert [pod["metadata"]["name"] for pod in pods] == [green]
        assert status["attempt"] == 2
        if len(writes) < crash_at:
            break
    assert crash_at > 12, "four statuses, four objects of green, the order, and the four objects of blue at least"
    pod = world.cluster.get(POD, "team", green)
    (container,) = pod["spec"]["containers"]
    assert "/etc/persist-promotion/promoted" in container["args"]
    assert {"name": f"{green}-promote", "optional": True} in [one.get("configMap") for one in pod["spec"]["volumes"]]
    world.cluster.edit(SPARK_SINK, "team", name, lambda one: one["spec"].update(suspend=True))
    world.go(key, 3)
    assert world.cluster.get(CONFIG_MAP, "team", f"{green}-promote") is None
    assert {"RolloutStarted", "Promoted"} <= set(world.cluster.events("team"))


def test_a_rollout_has_its_metrics(world, shard_resource, sink_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    stream = {"mode": "Streaming", "rollout": {"strategy": "BlueGreen", "promotion": "Manual", "timeoutSeconds": 60}}
    world.cluster.create(SPARK_SINK, sink_resource(stream))
    reports(world, world.go(SINK, 2)["driver"]["podName"], stage="Streaming")
    world.go(SINK, 1)
    world.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"].update(write={"parallelism": 7}))
    green = world.go(SINK, 2)["rollout"]["driver"]["podName"]
    reports(world, green, stage="Differs", compared=5, missing=1, extra=2, lag_ms=7000)
    world.go(SINK, 1)
    labels = {"namespace": "team", "name": "load"}
    value = world.metrics.registry.get_sample_value
    found = {name: value(f"spark_sink_{name}", labels) for name in ("rollout", "rolled_back", "rollout_lag_seconds")}
    assert found == {"rollout": 1, "rolled_back": 0, "rollout_lag_seconds": 7}
    assert (value("spark_sink_rollout_missing", labels), value("spark_sink_rollout_extra", labels)) == (1, 2)
    world.env.advance_ms(60_000)
    world.go(SINK, 2)
    assert (value("spark_sink_rollout", labels), value("spark_sink_rolled_back", labels)) == (0, 1)
    assert "RolledBack" in world.cluster.events("team")
    assert world.ready(SINK) == ("True", "Running")
