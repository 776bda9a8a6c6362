"""Whole reconciles of a SparkSink, from a new resource to a finished run, on the in-memory API server and the real engine on files."""

import contextlib
import dataclasses
import itertools
import json

import pytest
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions, names
from persist_operator.cluster.port import CONFIG_MAP, PERSIST_SHARD, POD, SERVICE, SPARK_SINK, ApiError
from persist_operator.settings import StopSettings
from persist_operator.steps.reconcile import Key, Reconciler
from reconcile_world import SHARD, SINK, WRITES, FakeStops, World, calls_reported, reconciled_behind


@pytest.fixture
def world(tmp_path, now):
    with contextlib.closing(World(tmp_path, now)) as made:
        yield made


@pytest.fixture
def sink_world(world, shard_resource, sink_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    world.cluster.create(SPARK_SINK, sink_resource())
    return world


def test_a_sink_runs_its_driver_and_completes(sink_world, refused, sink_resource):
    status = sink_world.go(SINK, 2)
    name = status["driver"]["podName"]
    for kind in (POD, SERVICE, CONFIG_MAP):
        assert sink_world.cluster.get(kind, "team", name) is not None
    document = json.loads(sink_world.cluster.get(CONFIG_MAP, "team", name)["data"]["sink.json"])
    assert document["shard_id"] == sink_world.status(SHARD)["shardId"]
    sink_world.pod_phase(name, "Running")
    labels = {**sink_world.cluster.get(POD, "team", name)["metadata"]["labels"], names.LABEL_ROLE: "executor"}
    executor = {"metadata": {"namespace": "team", "name": "x-exec-1", "labels": labels}}
    sink_world.cluster.create(POD, executor)
    sink_world.cluster.edit(POD, "team", "x-exec-1", lambda pod: pod.update(status={"phase": "Running"}))
    assert sink_world.go(SINK, 1)["executors"]["running"] == 1
    report = {"type": "Sink", "outcome": "Succeeded", "rows_read": 9, "updates_written": 9, "upper": 5}
    report["stores"] = {"consensus": {"head": {"ok": 4}}}
    sink_world.pod_phase(name, "Succeeded", exitCode=0, message=json.dumps(report))
    status = sink_world.go(SINK, 2)
    assert calls_reported(sink_world, "Sink", "consensus", "head") == 4
    assert sink_world.ready(SINK) == ("True", "Completed")
    assert status["progress"]["rowsRead"] == 9
    for kind in (SERVICE, CONFIG_MAP):
        assert sink_world.cluster.get(kind, "team", name) is None
    assert refused(sink_resource(), status) == []
    sink_world.cluster.requests.clear()
    sink_world.go(SINK, 3)
    assert sink_world.cluster.requests == []


@pytest.mark.parametrize("label", [names.LABEL_ATTEMPT, names.LABEL_RUN])
@pytest.mark.parametrize("number", ["9" * 30, str(2**63 - 1), "-1", "two", ""])
def test_a_pod_whose_number_no_operator_wrote_is_not_a_driver(sink_world, refused, sink_resource, label, number):
    """A tenant's pod with such a label was taken over, and the API server refused the status of the sink."""
    status = sink_world.go(SINK, 2)
    name = status["driver"]["podName"]
    sink_world.pod_phase(name, "Running")
    labels = {**sink_world.cluster.get(POD, "team", name)["metadata"]["labels"], names.LABEL_ATTEMPT: "7"}
    forged = {"metadata": {"namespace": "team", "name": "forged", "labels": {**labels, label: number}}}
    sink_world.cluster.create(POD, forged)
    status = sink_world.go(SINK, 2)
    assert (status["attempt"], status["driver"]["podName"]) == (1, name)
    assert refused(sink_resource(), status) == []
    assert sink_world.cluster.get(POD, "team", "forged") is not None, "a pod that is not ours is left alone"
    sink_world.cluster.edit(POD, "team", name, lambda pod: pod["metadata"]["labels"].update({label: number}))
    status = sink_world.go(SINK, 2)
    assert (status["attempt"], status["driver"]["podName"]) == (1, name), "the status names this driver"
    assert refused(sink_resource(), status) == []


def test_a_sink_that_reads_a_shard_waits_for_its_first_rows(sink_world, shard_resource, sink_resource, refused):
    trips = Key("PersistShard", "team", "trips")
    sink_world.cluster.create(PERSIST_SHARD, shard_resource(name="trips", uid="uid-trips"))
    source = {"type": "Shard", "shard": {"name": "trips"}}
    chained = sink_resource({"input": source, "envelope": {"type": "Mirror"}}, name="chain", uid="uid-chain")
    sink_world.cluster.create(SPARK_SINK, chained)
    key = Key("SparkSink", "team", "chain")
    sink_world.go(key, 2)
    assert sink_world.ready(key) == ("False", "InputNotReady")
    sink_world.go(trips)
    sink_world.go(key, 1)
    assert sink_world.ready(key) == ("False", "InputNotWritten")
    shard_id, schema = ShardId(sink_world.status(trips)["shardId"]), Schema.from_ddl("id BIGINT", "")
    with (
        PersistClient.open(sink_world.location) as client,
        client.open_writer(shard_id, schema, purpose="test") as writer,
    ):
        writer.compare_and_append([(((1,), ()), 0, 1)], expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    sink_world.go(trips, 6)
    status = sink_world.go(key, 2)
    document = json.loads(sink_world.cluster.get(CONFIG_MAP, "team", status["driver"]["podName"])["data"]["sink.json"])
    location = {"blob": sink_world.location.blob, "consensus": sink_world.location.consensus}
    assert document["source"] == {"shard_id": shard_id, "location": location}
    assert document["input"]["shard"] == {"name": "trips"}
    assert refused(chained, status) == []


def test_a_crash_at_any_write_leaves_one_driver(world, shard_resource, sink_resource):
    """The API server fails at the n-th write, for every n. Then the operator restarts."""
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    for crash_at in itertools.count(1):
        name = f"load{crash_at}"
        key = Key("SparkSink", "team", name)
        world.cluster.create(SPARK_SINK, sink_resource(name=name, uid=f"uid-{name}"))
        following, writes = world.cluster.intercept, []

        def fail_once(request, *, limit=crash_at, writes=writes):
            writes.extend([request] if request.verb in WRITES else [])
            if request.verb in WRITES and len(writes) == limit:
                raise ApiError("no answer", status=0)
            return request.send()

        world.cluster.intercept = fail_once
        with contextlib.suppress(ApiError):
            world.go(key, 1)
        world.cluster.intercept = following
        world.restart()
        status = world.go(key, 3)
        pods = world.cluster.find(POD, "team", {names.LABEL_SINK: name, names.LABEL_ROLE: "driver"})
        assert [pod["metadata"]["name"] for pod in pods] == [status["driver"]["podName"]]
        assert status["attempt"] == 1
        if len(writes) < crash_at:
            break
    assert crash_at > 6, "status twice, Secret, ConfigMap, Service and pod at least"


def test_a_leader_that_slept_does_not_take_the_status_back(sink_world, sink_resource):
    """Two operators run during a rollout. The late write of the old one does not undo what the new one did."""
    world = sink_world
    sleeper = Reconciler(world.cluster, world.bridge, world.settings, world.env, world.metrics)

    def ends(status):
        name = status["driver"]["podName"]
        world.pod_phase(name, "Succeeded", exitCode=0, message=json.dumps({"outcome": "Succeeded", "upper": 5}))
        return world.go(SINK, 2)

    def the_new_leader_works():
        world.reconciler, sleeping = sleeper, world.reconciler
        ends(world.go(SINK, 2))
        world.cluster.edit(
            SPARK_SINK, "team", "load", lambda one: one["spec"]["input"]["format"]["options"].update(path="/other")
        )
        ends(world.go(SINK, 2))
        world.reconciler = sleeping

    reconciled_behind(world, SINK, the_new_leader_works, after="find")
    status = world.go(SINK, 3)
    assert (status["run"]["id"], status["run"]["state"], status["attempt"]) == ("uid-sink-2", "Succeeded", 2)
    assert world.cluster.find(POD, "team", {}) == []


@pytest.mark.parametrize("leftover", [CONFIG_MAP, SERVICE, POD])
def test_a_recreated_sink_waits_until_the_children_of_its_predecessor_are_gone(sink_world, sink_resource, leftover):
    """The ConfigMap has the old run id. The driver of the new sink would find that run done and write nothing."""
    world = sink_world
    name = world.go(SINK, 2)["driver"]["podName"]
    left = world.cluster.get(leftover, "team", name)
    world.cluster.delete(SPARK_SINK, "team", "load")
    assert world.cluster.get(leftover, "team", name) is None
    world.cluster.create(leftover, left)
    world.cluster.create(SPARK_SINK, sink_resource(uid="uid-new"))
    world.go(SINK)
    assert world.ready(SINK) == ("False", "ActionRefused")
    assert "does not belong to this load" in conditions.find(world.status(SINK), "Reconciling")["message"]
    assert leftover is POD or world.cluster.get(POD, "team", name) is None
    world.cluster.delete(leftover, "team", name)
    world.go(SINK, 5)
    document = json.loads(world.cluster.get(CONFIG_MAP, "team", name)["data"]["sink.json"])
    assert document["run_id"] == "uid-new-1"
    assert world.cluster.get(POD, "team", name)["metadata"]["labels"][names.LABEL_OWNER_UID] == "uid-new"


@pytest.mark.parametrize(
    ("words", "second"),
    [
        (
            "pods is forbidden: ValidatingAdmissionPolicy 'x' with binding 'x' denied request: not before noon",
            "Reconciling",
        ),
        ('admission webhook "x" denied the request: not before noon', "Reconciling"),
        ('Pod "x" is invalid: spec.containers[0].image: Required value', "Stalled"),
    ],
    ids=["policy", "webhook", "invalid"],
)
def test_only_an_object_that_is_itself_invalid_stalls_until_the_spec_changes(sink_world, words, second):
    """A policy without a reason of its own answers with the code of an invalid object, too, and may be gone a minute later."""
    world = sink_world
    world.cluster.deny["create", "Pod"] = ApiError(f"POST pods: 422 {words}", status=422)
    world.go(SINK, 2)
    assert world.ready(SINK) == ("False", "ActionRefused")
    shown = conditions.find(world.status(SINK), second)
    assert shown["status"] == "True"
    assert ("change the spec" in shown["message"]) is (second == "Stalled")
    del world.cluster.deny["create", "Pod"]
    world.env.advance_ms(6_000)
    world.go(SINK)
    assert (world.cluster.find(POD, "team", {}) == []) is (second == "Stalled")


def test_a_lost_driver_is_tried_again_and_leaves_nothing_behind(sink_world):
    name = sink_world.go(SINK, 2)["driver"]["podName"]
    sink_world.pod_phase(name, "Running")
    sink_world.go(SINK, 1)
    sink_world.cluster.delete(POD, "team", name)
    status = sink_world.go(SINK, 5)
    assert status["lastFailure"]["reason"] == "DriverLost"
    assert status["attempt"] == 2
    assert sink_world.cluster.get(SERVICE, "team", name) is None
    second = sink_world.cluster.get(POD, "team", status["driver"]["podName"])
    assert second["metadata"]["annotations"][names.ANNOTATION_RUN_ID] == "uid-sink-1"


def test_the_last_log_lines_are_part_of_the_failure(sink_world):
    name = sink_world.go(SINK, 2)["driver"]["podName"]
    lines = [f"line {index}" for index in range(100)]
    sink_world.cluster.log_texts[f"team/{name}"] = "\n".join([*lines, "aws_secret_access_key=abc boom"])
    sink_world.pod_phase(name, "Failed", exitCode=1, reason="Error", message="Traceback ...")
    failure = sink_world.go(SINK, 1)["lastFailure"]
    assert failure["exitCode"] == 1
    assert "boom" in failure["message"]
    assert "abc" not in failure["message"]
    assert "line 50" not in failure["message"]


def test_logs_of_a_recorded_failure_are_not_read_again(sink_world):
    """Failed drivers are retained. Each reconcile would read the logs of all of them from their kubelets."""
    world, requests, names_ = sink_world, sink_world.cluster.record(), []
    for _ in range(2):
        names_.append(world.go(SINK, 5)["driver"]["podName"])
        world.pod_phase(names_[-1], "Failed", exitCode=1, reason="Error")
    world.go(SINK, 5)
    assert len(set(names_)) == 2
    assert [request.arguments[1] for request in requests if request.verb == "logs"] == names_


def test_a_sink_of_a_missing_shard_names_the_missing_shard(world, sink_resource):
    world.cluster.create(SPARK_SINK, sink_resource())
    world.go(SINK)
    assert world.ready(SINK) == ("False", "ShardNotFound")
    assert world.cluster.find(POD, "team", {}) == []


def test_a_retained_driver_that_is_deleted_from_outside_leaves_nothing_behind(sink_world):
    """Pod garbage collection and the removal of nodes delete pods. Service and ConfigMap of each run would stay."""
    world = sink_world
    name = world.go(SINK, 2)["driver"]["podName"]
    world.pod_phase(name, "Failed", exitCode=72, reason="Error")
    world.go(SINK, 2)
    assert world.cluster.get(POD, "team", name) is not None
    world.cluster.delete(POD, "team", name)
    world.go(SINK, 2)
    assert world.cluster.get(SERVICE, "team", name) is None
    assert world.cluster.get(CONFIG_MAP, "team", name) is None


@pytest.fixture
def stoppable(sink_world):
    """The sink's driver runs and listens for a stop."""
    world = sink_world
    world.stops = FakeStops()
    world.settings = dataclasses.replace(world.settings, graceful_stop=StopSettings(port=7080))
    world.restart()
    name = world.go(SINK, 2)["driver"]["podName"]
    world.pod_phase(name, "Running")
    world.cluster.edit(POD, "team", name, lambda pod: pod["status"].update(podIP="10.1.2.3"))
    world.go(SINK, 1)
    return world


def suspend(world, *, value=True):
    world.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"].update(suspend=value))
    return world.status(SINK)["driver"]["podName"]


def test_a_driver_that_is_asked_to_stop_keeps_its_pod_until_it_is_cleaned_up(stoppable, refused, sink_resource):
    world = stoppable
    world.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"].update(cleanup={"retainDriver": "Always"}))
    name = suspend(world)
    args = world.cluster.get(POD, "team", name)["spec"]["containers"][0]["args"]
    assert args[args.index("--stop-digest") + 1] == world.stops.digest("uid-sink", name)
    world.cluster.requests.clear()
    world.go(SINK, 5)
    assert world.stops.asked == [("10.1.2.3", 7080, "uid-sink", name)]
    assert not [one for one in world.cluster.requests if one[0] == "delete"]
    assert world.cluster.events("team").count("DriverStopped") == 1
    assert world.ready(SINK) == ("False", "Stopping")
    report = {"type": "Sink", "outcome": "Stopped", "upper": 5, "message": "batches: 1, updates: 2; stopped"}
    world.pod_phase(name, "Succeeded", exitCode=0, message=json.dumps(report))
    status = world.go(SINK, 2)
    assert world.ready(SINK) == ("True", "Suspended")
    assert status["history"][0]["message"] == "stopped: suspended; batches: 1, updates: 2; stopped"
    assert world.cluster.get(POD, "team", name) is not None
    assert refused(sink_resource({"suspend": True}), status) == []
    world.env.advance_ms(3_600_000)
    world.go(SINK, 1)
    assert world.cluster.get(POD, "team", name) is None


def test_the_log_of_a_batch_run_that_was_stopped_is_not_read(stoppable):
    """Its pod stays, and its end is no failure. Each reconcile would read the log from the kubelet."""
    world = stoppable
    world.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"].update(cleanup={"retainDriver": "Always"}))
    name = suspend(world)
    world.go(SINK, 1)
    report = {"type": "Sink", "outcome": "Failed", "message": "stopped by SIGTERM; the run was not finished"}
    world.pod_phase(name, "Failed", exitCode=1, message=json.dumps(report))
    requests = world.cluster.record()
    status = world.go(SINK, 3)
    assert status["history"][0]["message"].endswith("the run was not finished")
    assert world.cluster.get(POD, "team", name) is not None
    assert [request for request in requests if request.verb == "logs"] == []


def test_a_driver_that_refuses_the_stop_is_deleted_at_once(stoppable):
    world = stoppable
    world.stops.accepts = False
    name = suspend(world)
    world.go(SINK, 1)
    assert len(world.stops.asked) == 1
    assert world.cluster.get(POD, "team", name) is None
    assert world.cluster.events("team").count("DriverStopped") == 1


@pytest.mark.parametrize("when", ["before the request", "after the request"])
def test_an_operator_that_ends_at_the_request_deletes_the_driver_at_its_time(stoppable, when):
    """No second driver starts meanwhile, and no second request is sent."""
    world, ask = stoppable, stoppable.stops.ask

    def dies(*given, **named):
        if when == "after the request":
            ask(*given, **named)
        raise SystemExit

    world.stops.ask = dies
    name = suspend(world)
    world.env.advance_ms(6000)
    with pytest.raises(SystemExit):
        world.reconciler.reconcile(SINK)
    world.stops.ask = ask
    world.restart()
    suspend(world, value=False)
    world.go(SINK, 9)
    assert [one["metadata"]["name"] for one in world.cluster.find(POD, "team", {})] == [name]
    world.go(SINK, 3)
    drivers = [one["metadata"]["name"] for one in world.cluster.find(POD, "team", {})]
    assert drivers == [world.status(SINK)["driver"]["podName"]] != [name]
    assert len(world.stops.asked) == (1 if when == "after the request" else 0)
