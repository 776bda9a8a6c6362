"""Whole reconciles on the in-memory API server and the real engine on files: from a new resource to a finished run."""

import contextlib
import copy
import itertools
import json

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions, names, times
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import (
    BY_KIND,
    CONFIG_MAP,
    JOB,
    PERSIST_SHARD,
    POD,
    SECRET,
    SERVICE,
    SPARK_SINK,
    ApiError,
)
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry, generate_latest

TEAM = AllowedNamespaces(names=("team",))
WRITES = {"create", "replace", "delete", "apply_status"}
SHARD, SINK = Key("PersistShard", "team", "flights"), Key("SparkSink", "team", "load")


class World:
    """One operator. After `restart`, as after a crash, only the API server and the stores remain."""

    def __init__(self, folder, now):
        self.env = SeededEnv(start_ms=now)
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        self.location = Location(blob=f"file://{folder}/blob", consensus=f"sqlite://{folder}/consensus.db")
        self.settings = OperatorSettings(
            storage_profiles={
                "default": StorageProfile(
                    blob=self.location.blob, consensus=self.location.consensus, allowed_namespaces=TEAM
                ),
                "dead": StorageProfile(
                    blob=self.location.blob, consensus="redis://127.0.0.1:1/0", allowed_namespaces=TEAM
                ),
            },
            loop=LoopSettings(store_deadline_seconds=2, store_breaker_seconds=5),
        )
        self.bridge = None
        self.restart()

    def restart(self, open_client=None):
        self.close()
        self.bridge = Bridge(self.settings, env=self.env, open_client=open_client)
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, self.metrics)

    def close(self):
        if self.bridge is not None:
            self.bridge.close()

    def go(self, key, times_=4):
        for _ in range(times_):
            self.env.advance_ms(6000)
            self.reconciler.reconcile(key)
        return self.status(key)

    def status(self, key):
        kind = PERSIST_SHARD if key.kind == "PersistShard" else SPARK_SINK
        found = self.cluster.get(kind, key.namespace, key.name)
        return (found or {}).get("status") or {}

    def ready(self, key):
        found = conditions.find(self.status(key), "Ready")
        return (found["status"], found["reason"])

    def pod_phase(self, name, phase, **terminated):
        def change(pod):
            state = {"running": {"startedAt": times.to_text(self.env.now_ms())}}
            if terminated:
                state = {"terminated": {"finishedAt": times.to_text(self.env.now_ms()), **terminated}}
            pod["status"] = {"phase": phase, "containerStatuses": [{"name": "driver", "state": state}]}

        self.cluster.edit(POD, "team", name, change)


@pytest.fixture
def world(tmp_path, now):
    made = World(tmp_path, now)
    yield made
    made.close()


def test_a_shard_becomes_ready_and_exists_in_the_stores(world, shard_resource, refused):
    world.cluster.create(PERSIST_SHARD, shard_resource({"schema": {"key": "id BIGINT", "value": "v STRING"}}))
    requests = world.cluster.record()
    world.reconciler.reconcile(SHARD)
    written = [conditions.find(one.arguments[3], "Ready")["reason"] for one in requests if one.verb == "apply_status"]
    assert written == ["Healthy"], "the claim in the stores is the intent of the creation"
    status = world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")
    assert status["schema"] == {"key": status["schema"]["key"], "value": status["schema"]["value"]}
    with PersistClient.open(world.location) as client:
        inspection = client.inspect(ShardId(status["shardId"]))
    assert names.critical_id_of(status["shardId"]) in {reader.id for reader in inspection.readers}
    assert refused(shard_resource(), status) == []


@pytest.mark.parametrize("kind", ["shard", "sink"])
def test_a_resource_whose_definition_gives_it_no_status_gets_one_first(world, shard_resource, sink_resource, kind):
    key, made = {"shard": (SHARD, shard_resource()), "sink": (SINK, sink_resource())}[kind]
    made.pop("status", None)
    world.cluster.create(BY_KIND[key.kind], made)
    requests = world.cluster.record()
    world.reconciler.reconcile(key)
    reasons = [conditions.find(one.arguments[3], "Ready")["reason"] for one in requests if one.verb == "apply_status"]
    assert reasons[0] == "Accepted"


def test_a_settled_shard_costs_no_writes_and_its_spec_is_never_touched(world, shard_resource):
    made = shard_resource()
    world.cluster.create(PERSIST_SHARD, made)
    world.go(SHARD, 12)
    world.cluster.requests.clear()
    world.go(SHARD, 5)
    assert world.cluster.requests == []
    stored = world.cluster.get(PERSIST_SHARD, "team", "flights")
    assert stored["spec"] == made["spec"]
    assert stored["metadata"]["generation"] == 1
    assert "annotations" not in stored["metadata"]
    assert "finalizers" not in stored["metadata"]


def test_a_restart_makes_no_second_shard(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.reconciler.reconcile(SHARD)
    world.restart()
    world.go(SHARD, 2)
    world.restart()
    world.go(SHARD, 4)
    with PersistClient.open(world.location) as client:
        assert len(list(client.shards())) == 1


@pytest.mark.slow
def test_an_unreachable_store_is_on_the_status_with_its_address_and_recovers(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource({"storageProfile": "dead"}))
    world.go(SHARD, 2)
    assert world.ready(SHARD)[0] == "False"
    found = conditions.find(world.status(SHARD), "StorageReachable")
    assert (found["status"], "127.0.0.1:1" in found["message"]) == ("False", True)
    world.settings.storage_profiles["dead"] = world.settings.storage_profiles["default"]
    world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")


def test_only_the_first_of_two_resources_serves_their_shard(world, shard_resource):
    shard_id = "s01234567-89ab-cdef-0123-456789abcdef"
    world.cluster.create(PERSIST_SHARD, shard_resource({"shardId": shard_id}))
    world.go(SHARD)
    late = {"uid": "uid-2", "name": "late", "creationTimestamp": "2026-09-21T00:00:00Z"}
    world.cluster.create(PERSIST_SHARD, shard_resource({"shardId": shard_id}, **late))
    key = Key("PersistShard", "team", "late")
    world.go(key)
    world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")
    assert world.ready(key) == ("False", "ShardIdConflict")
    world.cluster.delete(PERSIST_SHARD, "team", "flights")
    world.go(key)
    assert world.ready(key) == ("True", "Healthy")


def append(world, shard_id, count):
    schema = Schema.from_ddl("id BIGINT")
    with (
        PersistClient.open(world.location) as client,
        client.open_writer(ShardId(shard_id), schema, purpose="test") as writer,
    ):
        for _ in range(count):
            upper = writer.fetch_recent_upper().time
            updates = [(((upper,), ()), upper, 1)]
            writer.compare_and_append(updates, expected_upper=Antichain.of(upper), new_upper=Antichain.of(upper + 1))


def finish_job(world, name, **report):
    def end(job):
        now = times.to_text(world.env.now_ms())
        failed = report.get("outcome") == "Failed"
        ended = "Failed" if failed else "Complete"
        reason = "BackoffLimitExceeded" if failed else "Completed"
        job["status"] = {
            "startTime": now,
            "completionTime": None if failed else now,
            "conditions": [{"type": ended, "status": "True", "reason": reason, "lastTransitionTime": now}],
        }

    job = world.cluster.get(JOB, "team", name)
    labels = {**job["spec"]["template"]["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
    pod = {"metadata": {"namespace": "team", "name": f"{name}-x", "labels": labels}}
    world.cluster.create(POD, pod)
    world.pod_phase(f"{name}-x", "Succeeded", exitCode=0, message=json.dumps(report))
    world.cluster.edit(JOB, "team", name, end)


def test_a_compaction_on_spark_has_a_secret_until_the_next_one_starts(world, shard_resource):
    spark = {"compaction": {"mode": "Manual", "runner": "Spark"}}
    world.cluster.create(PERSIST_SHARD, shard_resource(spark))
    world.go(SHARD)

    def request(token):
        note = {f"{names.REQUEST_PREFIX}compact": token}
        world.cluster.edit(
            PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].setdefault("annotations", {}).update(note)
        )
        world.go(SHARD, 2)
        return world.status(SHARD)["maintenance"]["compaction"]

    def secrets():
        return {one["metadata"]["name"] for one in world.cluster.find(SECRET, "team", {})}

    first = request("a")
    assert (first["runner"], first["jobName"]) == ("Spark", world.cluster.find(JOB, "team", {})[0]["metadata"]["name"])
    assert secrets() == {names.rpc_secret_name(first["jobName"], "uid-shard")}
    world.restart()
    world.go(SHARD)
    assert len(world.cluster.find(JOB, "team", {})) == 1
    finish_job(world, first["jobName"], type="Compaction", outcome="Succeeded", message="", bytes_written=10)
    world.go(SHARD, 1)
    assert world.status(SHARD)["history"][0]["runner"] == "Spark"
    second = request("b")
    assert second["jobName"] != first["jobName"]
    assert secrets() == {names.rpc_secret_name(second["jobName"], "uid-shard")}


def test_where_the_operator_may_make_no_secrets_a_large_debt_is_compacted_in_a_pod(world, shard_resource):
    """With the runner Auto."""
    world.cluster.create(PERSIST_SHARD, shard_resource({"compaction": {"mode": "Manual", "sparkThreshold": 0}}))
    world.go(SHARD)
    world.cluster.deny["create", "Secret"] = ApiError("cannot create resource secrets", status=403)
    note = {f"{names.REQUEST_PREFIX}compact": "a"}
    world.cluster.edit(
        PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].setdefault("annotations", {}).update(note)
    )
    world.go(SHARD, 1)
    assert world.cluster.find(JOB, "team", {}) == []
    world.go(SHARD, 60)
    (job,) = world.cluster.find(JOB, "team", {})
    assert job["metadata"]["labels"][names.LABEL_RUNNER] == "Pod"
    assert world.status(SHARD)["maintenance"]["compaction"]["runner"] == "Pod"


def test_due_maintenance_becomes_a_job_and_its_report_reaches_the_status(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource({"rollup": {"everySeqnos": 4}}))
    shard_id = world.go(SHARD)["shardId"]
    append(world, shard_id, 6)
    world.go(SHARD)
    (job,) = world.cluster.find(JOB, "team", {names.LABEL_KIND: "rollup"})
    name = job["metadata"]["name"]
    assert world.status(SHARD)["maintenance"]["rollup"]["jobName"] == name
    world.restart()
    world.go(SHARD)
    assert len(world.cluster.find(JOB, "team", {})) == 1
    finish_job(world, name, type="Rollup", outcome="Failed", message="lost the store")
    world.go(SHARD, 1)
    block = world.status(SHARD)["maintenance"]["rollup"]
    assert (block["lastResult"], block["message"]) == ("Failed", "lost the store")
    world.go(SHARD, 3)
    retries = [one["metadata"]["name"] for one in world.cluster.find(JOB, "team", {})]
    assert retries == [name, f"{name}-r1"]
    calls = {"blob": {"set": {"ok": 2}}}
    finish_job(world, f"{name}-r1", type="Rollup", outcome="Succeeded", message="", bytes_written=10, stores=calls)
    world.go(SHARD, 3)
    assert calls_reported(world, "Rollup", "blob", "set") == 2, "once, however often it is seen"
    assert world.status(SHARD)["maintenance"]["rollup"]["lastResult"] == "Succeeded"
    assert [one["outcome"] for one in world.status(SHARD)["history"]] == ["Succeeded", "Failed"]
    assert "RollupSucceeded" in world.cluster.events("team")


def calls_reported(world, kind, store, verb):
    labels = {"type": kind, "store": store, "verb": verb, "outcome": "ok"}
    return world.metrics.registry.get_sample_value("persist_run_store_calls_total", labels)


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


def reconciled_behind(world, key, happens, *, after):
    """Reconcile as an operator that slept before its write: `happens` runs after the answer to its first request of the verb `after`."""
    following = world.cluster.intercept

    def sleep(request):
        answer = request.send()
        if request.verb == after:
            world.cluster.intercept = following
            happens()
        return answer

    world.cluster.intercept = sleep
    with pytest.raises(ApiError, match="modified"):
        world.reconciler.reconcile(key)


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


def test_a_recreated_resource_does_not_inherit_the_old_status(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())

    def made_anew():
        world.cluster.delete(PERSIST_SHARD, "team", "flights")
        world.cluster.create(PERSIST_SHARD, shard_resource(uid="uid-new"))

    reconciled_behind(world, SHARD, made_anew, after="get")
    assert world.status(SHARD) == {"observedGeneration": 0}
    shard_id = world.go(SHARD)["shardId"]
    assert world.ready(SHARD) == ("True", "Healthy")
    with PersistClient.open(world.location) as client:
        assert client.owner_of(ShardId(shard_id)) == Owner(world.settings.operator_id, "team", "flights")
        assert list(client.shards()) == [shard_id]


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


def test_the_lag_of_a_shard_without_writes_grows_and_ends_when_it_closes(world, shard_resource):
    """The status of an idle shard does not change, but its series must."""

    def lag():
        return world.metrics.registry.get_sample_value(
            "persist_shard_upper_lag_seconds", {"namespace": "team", "name": "flights"}
        )

    world.cluster.create(PERSIST_SHARD, shard_resource())
    shard_id = ShardId(world.go(SHARD)["shardId"])
    with (
        PersistClient.open(world.location) as client,
        client.open_writer(shard_id, client.schema(shard_id), purpose="test") as writer,
    ):
        upper = Antichain.of(world.env.now_ms())
        writer.compare_and_append([], expected_upper=Antichain.of(0), new_upper=upper)
        world.go(SHARD, 8)
        assert lag() == 48
        world.env.advance_ms(3_600_000)
        world.go(SHARD, 1)
        assert lag() == 3654
        writer.compare_and_append([], expected_upper=upper, new_upper=Antichain.empty())
    world.go(SHARD, 8)
    assert lag() is None


class RefusingClient:
    """A client of the engine that refuses to initialise a shard."""

    def __init__(self, location):
        self._client = PersistClient.open(location)

    def __getattr__(self, name):
        return getattr(self._client, name)

    def initialise(self, *_, **__):
        raise InvalidUsage("redis://user:hunter2@r:6379 is not usable")


def test_secrets_in_the_error_of_an_action_do_not_reach_the_status(world, shard_resource):
    world.restart(open_client=RefusingClient)
    world.cluster.create(PERSIST_SHARD, shard_resource())
    status = world.go(SHARD, 3)
    assert "is not usable" in json.dumps(status)
    assert "hunter2" not in json.dumps(status)


def test_a_deleted_resource_is_forgotten_with_its_series(world, shard_resource):
    world.cluster.create(PERSIST_SHARD, shard_resource())
    world.go(SHARD)
    assert b'persist_shard_ready{name="flights",namespace="team"} 1.0' in generate_latest(world.metrics.registry)
    world.cluster.delete(PERSIST_SHARD, "team", "flights")
    assert world.reconciler.reconcile(SHARD) is None
    assert b'name="flights"' not in generate_latest(world.metrics.registry)


def test_a_definition_older_than_the_operator_is_served(world, shard_resource):
    made = copy.deepcopy(shard_resource())
    del made["spec"]["gc"], made["spec"]["suspend"]
    world.cluster.create(PERSIST_SHARD, made)
    world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")


def reports(world, name, **reported):
    """The driver runs and reports this."""
    world.pod_phase(name, "Running")
    note = {names.ANNOTATION_PROGRESS: json.dumps(reported)}
    world.cluster.edit(POD, "team", name, lambda pod: pod["metadata"].setdefault("annotations", {}).update(note))


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
