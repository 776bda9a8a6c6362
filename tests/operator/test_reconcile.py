"""Whole reconciles of a PersistShard on the in-memory API server and the real engine on files: from a new resource to maintained data."""

import contextlib
import copy
import json

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner
from persist_operator.api import conditions, names
from persist_operator.cluster.port import BY_KIND, JOB, PERSIST_SHARD, SECRET, ApiError
from persist_operator.steps.reconcile import Key
from prometheus_client import generate_latest
from reconcile_world import SHARD, SINK, World, append, calls_reported, finish_job, reconciled_behind


@pytest.fixture
def world(tmp_path, now):
    with contextlib.closing(World(tmp_path, now)) as made:
        yield made


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


def test_a_shard_to_purge_in_a_namespace_that_is_deleted_says_how_to_let_it_go(world, shard_resource):
    """No quota and no role was at fault, which the message named."""
    purge = {"reclaimPolicy": "Purge", "deletionConfirmation": "purge-this-shard"}
    world.cluster.create(PERSIST_SHARD, shard_resource(purge))
    world.go(SHARD)
    ends = "unable to create new content in namespace team because it is being terminated"
    world.cluster.deny["create", "Job"] = ApiError(f"jobs.batch is forbidden: {ends}", status=403)
    world.cluster.delete(PERSIST_SHARD, "team", "flights")
    message = conditions.find(world.go(SHARD), "DeletionBlocked")["message"]
    assert ("reclaimPolicy: Retain" in message, "quota" in message) == (True, False)
    world.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(reclaimPolicy="Retain"))
    world.go(SHARD)
    assert world.cluster.get(PERSIST_SHARD, "team", "flights") is None


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
    finish_job(world, second["jobName"], type="Compaction", outcome="Succeeded", message="", bytes_written=10)
    world.go(SHARD, 1)
    # The namespace is no longer one in which sinks may run.
    world.cluster.deny["delete", "Secret"] = ApiError("cannot delete resource secrets", status=403)
    world.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"]["compaction"].update(runner="Pod"))
    third = request("c")
    assert world.cluster.get(JOB, "team", third["jobName"]) is not None
    assert world.ready(SHARD) == ("True", "Healthy")


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
