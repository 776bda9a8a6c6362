"""The owner of a shard: the store decides it for all spellings, operators and namespaces. The API server is in memory, the stores
are real.
"""

import json
import re

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import StoreLost
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_kit.servers import redis_server, s3_server
from persist_operator.api import conditions, names, times
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

ANY_NAMESPACE = AllowedNamespaces(names=("*",))

SCHEMA = Schema.from_ddl("id BIGINT", "secret STRING")
SPEC = {"schema": {"key": "id BIGINT", "value": "secret STRING"}, "retention": {"sinceLagSeconds": 0}}
TAKE_OVER = "persistshard.io/take-over"


class Operators:
    """One API server, some pairs of stores, and operators by their ids."""

    def __init__(self, location, now, **profiles):
        self.env, self.location = SeededEnv(start_ms=now), location
        self.profiles = {"default": profile(location)} | profiles
        self.clusters, self.reconcilers, self.bridges = {}, {}, []

    def operator(self, operator_id="main"):
        """The reconciler of this operator. Each operator has its own cluster."""
        if operator_id not in self.reconcilers:
            settings = OperatorSettings(
                operator_id=operator_id,
                storage_profiles=self.profiles,
                loop=LoopSettings(store_deadline_seconds=20, store_breaker_seconds=5),
            )
            self.clusters.setdefault(operator_id, FakeCluster(now_ms=self.env.now_ms))
            self.bridges.append(Bridge(settings, env=self.env))
            metrics = OperatorMetrics(CollectorRegistry())
            self.reconcilers[operator_id] = Reconciler(
                self.clusters[operator_id], self.bridges[-1], settings, self.env, metrics
            )
        return self.reconcilers[operator_id]

    def restart(self):
        self.close()
        self.reconcilers = {}

    def close(self):
        for bridge in self.bridges:
            bridge.close()
        self.bridges = []

    def go(self, namespace, name, *, operator_id="main", times_=4, kind="PersistShard", step_ms=6000):
        """Reconcile `times_` times. Returns the status."""
        key = Key(kind, namespace, name)
        reconciler = self.operator(operator_id)
        for _ in range(times_):
            self.env.advance_ms(step_ms)
            self.requeue_s = reconciler.reconcile(key)
        found = self.clusters[operator_id].get(PERSIST_SHARD if kind == "PersistShard" else SPARK_SINK, namespace, name)
        return (found or {}).get("status") or {}

    def create(self, resource, operator_id="main", kind=PERSIST_SHARD):
        self.operator(operator_id)
        self.clusters[operator_id].create(kind, resource)

    def delete(self, namespace, name, operator_id="main"):
        self.clusters[operator_id].delete(PERSIST_SHARD, namespace, name)

    def annotate(self, namespace, name, value, operator_id="main"):
        def change(one):
            one["metadata"].setdefault("annotations", {})[TAKE_OVER] = value

        self.clusters[operator_id].edit(PERSIST_SHARD, namespace, name, change)

    def client(self):
        return PersistClient.open(self.location)


def profile(location, **changes):
    return StorageProfile(allowed_namespaces=ANY_NAMESPACE, blob=location.blob, consensus=location.consensus, **changes)


def files(folder):
    return Location(blob=f"file://{folder}/blob", consensus=f"sqlite://{folder}/consensus.db")


@pytest.fixture
def operators(tmp_path, now):
    made = Operators(
        files(tmp_path),
        now,
        again=StorageProfile(
            allowed_namespaces=ANY_NAMESPACE,
            blob=f"file://localhost{tmp_path}/blob",
            consensus=f"sqlite:////{tmp_path}/consensus.db?push=off",
        ),
        unowned=profile(files(tmp_path), take_over="Unowned"),
        any_owner=profile(files(tmp_path), take_over="Any"),
    )
    yield made
    made.close()


@pytest.fixture
def resource(shard_resource):
    def make(name="flights", namespace="team", *, uid=None, annotations=None, **spec):
        metadata = {"namespace": namespace} | ({} if annotations is None else {"annotations": annotations})
        return shard_resource({**SPEC, **spec}, name=name, uid=uid or f"uid-{namespace}-{name}", **metadata)

    return make


def ready(status):
    found = conditions.find(status, "Ready")
    return found["status"], found["reason"]


def message(status):
    return conditions.find(status, "Stalled")["message"]


def append(operators, shard_id, *, rows=1, schema=SCHEMA):
    with operators.client() as client, client.open_writer(ShardId(shard_id), schema, purpose="test") as writer:
        for _ in range(rows):
            upper = writer.fetch_recent_upper().time
            writer.compare_and_append(
                [(((upper,), ("x",)), upper, 1)], expected_upper=Antichain.of(upper), new_upper=Antichain.of(upper + 1)
            )


def inspect(operators, shard_id):
    with operators.client() as client:
        return client.inspect(ShardId(shard_id))


def unowned_shard(operators, rows=5):
    shard_id = ShardId.new()
    append(operators, shard_id, rows=rows)
    return str(shard_id)


def assert_untouched(operators, status, before):
    """The status shows nothing of the shard, and the shard has not changed."""
    assert not {"shardId", "schema", "frontiers", "storage", "holds"} & status.keys()
    assert "secret" not in json.dumps(status)
    after = inspect(operators, before.shard_id)
    assert (after.seqno, after.since, after.readers) == (before.seqno, before.since, before.readers)
    for cluster in operators.clusters.values():
        assert [one for one in cluster.find(JOB, None, {}) if before.shard_id in json.dumps(one)] == []


# -- one store, however it is spelled ---------------------------------------------------------------------------------------


def test_another_spelling_of_the_stores_in_another_namespace_is_no_way_around(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    append(operators, shard_id, rows=5)
    before = inspect(operators, shard_id)
    operators.create(resource("stolen", "rivals", shardId=shard_id, storageProfile="again"))
    status = operators.go("rivals", "stolen")
    assert ready(status) == ("False", "ShardIdConflict")
    assert "team/flights of operator main owns shard" in message(status)
    assert_untouched(operators, status, before)
    assert ready(operators.go("team", "flights")) == ("True", "Healthy")


@pytest.mark.redis
@pytest.mark.s3
def test_another_spelling_of_servers_is_no_way_around(resource, now, monkeypatch):
    with redis_server() as redis, s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        location = Location(blob=s3.location("p"), consensus=f"{redis.url}?prefix=p:")
        spellings = {
            "host": StorageProfile(
                allowed_namespaces=ANY_NAMESPACE,
                blob=location.blob.replace("127.0.0.1", "localhost"),
                consensus=location.consensus.replace("127.0.0.1", "localhost"),
            ),
            "parameters": StorageProfile(
                allowed_namespaces=ANY_NAMESPACE,
                blob=location.blob.replace("p?", "/p/?").replace("&path_style=true", "") + "&path_style=true",
                consensus=location.consensus.replace("/0?", "?") + "&push=off",
            ),
            "region": StorageProfile(
                allowed_namespaces=ANY_NAMESPACE,
                blob=re.sub(r"region=[^&]*", "region=eu-central-1", location.blob),
                consensus=location.consensus.replace("prefix=p:", "prefix=p%3A"),
            ),
        }
        operators = Operators(location, now, **spellings)
        try:
            operators.create(resource())
            shard_id = operators.go("team", "flights")["shardId"]
            for name in spellings:
                operators.create(resource(name, "rivals", shardId=shard_id, storageProfile=name))
                status = operators.go("rivals", name, times_=2)
                assert ready(status) == ("False", "ShardIdConflict"), (name, status)
        finally:
            operators.close()


def test_a_blob_store_beside_another_consensus_store_stalls_with_both_named(operators, resource, tmp_path):
    operators.create(resource())
    operators.go("team", "flights")
    wrong = Location(blob=f"file://{tmp_path}/elsewhere", consensus=operators.location.consensus)
    operators.profiles["wrong"] = profile(wrong)
    operators.create(resource("other", storageProfile="wrong"))
    status = operators.go("team", "other")
    assert ready(status) == ("False", "StoreLost")
    assert f"{tmp_path}/elsewhere" in message(status)
    assert "shardId" not in status


def test_an_emptied_consensus_store_stalls_old_and_new_resources(operators, resource, tmp_path):
    operators.create(resource())
    operators.go("team", "flights")
    operators.restart()
    for path in tmp_path.glob("consensus.db*"):
        path.unlink()
    operators.create(resource("new"))
    for name in ("flights", "new"):
        status = operators.go("team", name)
        assert ready(status) == ("False", "StoreLost")
    with pytest.raises(StoreLost, match="does not know it"):
        operators.client()


# -- unowned shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotated", [False, True], ids=["plain", "annotated"])
@pytest.mark.parametrize("profile_name", ["default", "unowned", "any_owner"])
def test_a_namespace_takes_an_unowned_shard_only_with_annotation_and_profile(
    operators, resource, profile_name, annotated
):
    shard_id = unowned_shard(operators)
    before = inspect(operators, shard_id)
    annotations = {TAKE_OVER: shard_id} if annotated else None
    operators.create(resource("grab", "rivals", shardId=shard_id, storageProfile=profile_name, annotations=annotations))
    status = operators.go("rivals", "grab")
    if annotated and profile_name != "default":
        assert ready(status) == ("True", "Healthy")
        assert status["shardId"] == shard_id
        return
    assert ready(status) == ("False", "ShardUnowned")
    assert f"persist admin owner {shard_id} --take-over main/rivals/grab --commit" in message(status)
    assert (TAKE_OVER in message(status)) == (profile_name != "default")
    assert_untouched(operators, status, before)


def test_credentials_of_the_stores_suffice_to_give_an_unowned_shard_an_owner(operators, resource, persist):
    shard_id = unowned_shard(operators)
    operators.create(resource(shardId=shard_id))
    assert ready(operators.go("team", "flights"))[1] == "ShardUnowned"
    assert operators.requeue_s <= 30
    assert inspect(operators, shard_id).since == 0
    code, *_ = persist(
        "admin", "owner", shard_id, "--take-over", "main/team/flights", "--commit",
        "--blob", operators.location.blob, "--consensus", operators.location.consensus,
    )  # fmt: skip
    assert code == 0
    assert ready(operators.go("team", "flights", times_=1)) == ("True", "Healthy")
    assert inspect(operators, shard_id).since == 4


def test_an_annotation_for_another_shard_takes_nothing(operators, resource):
    shard_id = unowned_shard(operators)
    other = {TAKE_OVER: str(ShardId.new())}
    operators.create(resource(shardId=shard_id, storageProfile="any_owner", annotations=other))
    assert ready(operators.go("team", "flights"))[1] == "ShardUnowned"


def test_a_new_shard_id_belongs_to_its_first_claimant(operators, resource):
    shard_id = str(ShardId.new())
    operators.create(resource(shardId=shard_id))
    operators.create(resource("late", shardId=shard_id))
    assert ready(operators.go("team", "flights")) == ("True", "Healthy")
    status = operators.go("team", "late")
    assert ready(status) == ("False", "ShardIdConflict")
    with operators.client() as client:
        assert str(client.owner_of(ShardId(shard_id))) == "main/team/flights"


# -- deleted and applied again ----------------------------------------------------------------------------------------------


def test_a_resource_that_is_applied_again_keeps_its_shard_and_its_hold(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    append(operators, shard_id, rows=5)
    operators.go("team", "flights", times_=8)
    assert inspect(operators, shard_id).since == 4
    operators.delete("team", "flights")
    operators.go("team", "flights", times_=1)
    operators.restart()
    operators.create(resource(uid="another"))
    status = operators.go("team", "flights", times_=2, step_ms=10)
    assert (status["shardId"], ready(status)) == (shard_id, ("True", "Healthy"))
    append(operators, shard_id, rows=5)
    status = operators.go("team", "flights", times_=8)
    found = inspect(operators, shard_id)
    assert found.since == 9, "the earlier hold does not hold since back"
    assert [reader.id for reader in found.readers] == [names.critical_id_of(shard_id)]
    with operators.client() as client:
        assert list(client.shards()) == [ShardId(shard_id)]


@pytest.mark.parametrize("name", ["flights", "renamed"])
def test_a_shard_id_is_usable_at_once_after_its_resource_was_deleted(operators, resource, name):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    append(operators, shard_id, rows=5)
    operators.delete("team", "flights")
    operators.create(resource(name, uid="another", shardId=shard_id))
    status = operators.go("team", name, times_=2, step_ms=10)
    assert (status["shardId"], ready(status)) == (shard_id, ("True", "Healthy"))
    operators.go("team", name, times_=8)
    assert inspect(operators, shard_id).since == 4


def test_an_annotation_takes_over_a_neighbours_shard_and_the_neighbour_stalls(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    operators.create(resource("heir", shardId=shard_id))
    status = operators.go("team", "heir")
    assert (ready(status)[1], f"{TAKE_OVER}={shard_id}" in message(status)) == ("ShardIdConflict", True)
    operators.annotate("team", "heir", shard_id)
    assert ready(operators.go("team", "heir")) == ("True", "Healthy")
    append(operators, shard_id, rows=5)
    operators.go("team", "heir", times_=8)
    status = operators.go("team", "flights")
    assert ready(status) == ("False", "ShardIdConflict")
    assert "team/heir of operator main" in message(status)
    found = inspect(operators, shard_id)
    assert (found.since, len(found.readers)) == (4, 1)
    # The shard does not flip back: only the heir has the annotation.
    assert ready(operators.go("team", "heir")) == ("True", "Healthy")


def test_a_shard_of_a_deleted_resource_stays_with_its_namespace(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    operators.delete("team", "flights")
    before = inspect(operators, shard_id)
    annotations = {TAKE_OVER: shard_id}
    for profile_name in ("default", "unowned"):
        name = f"grab-{profile_name}"
        operators.create(
            resource(name, "rivals", shardId=shard_id, storageProfile=profile_name, annotations=annotations)
        )
        status = operators.go("rivals", name)
        assert ready(status) == ("False", "ShardIdConflict")
        assert_untouched(operators, status, before)


def test_a_disowned_shard_is_not_taken_again_and_a_new_resource_gets_another(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    append(operators, shard_id, rows=5)
    with operators.client() as client:
        client.disown(ShardId(shard_id))
    status = operators.go("team", "flights")
    assert ready(status) == ("False", "ShardUnowned")
    assert inspect(operators, shard_id).since == 0
    operators.delete("team", "flights")
    operators.create(resource(uid="another"))
    status = operators.go("team", "flights")
    assert ready(status) == ("True", "Healthy")
    assert status["shardId"] == names.shard_id_of("another") != shard_id


# -- two operators ----------------------------------------------------------------------------------------------------------


def test_two_operators_with_one_store_never_serve_one_shard(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    append(operators, shard_id, rows=5)
    before = inspect(operators, shard_id)
    # The same namespace and name in another cluster are another resource.
    operators.create(resource(uid="elsewhere", shardId=shard_id), "second")
    status = operators.go("team", "flights", operator_id="second")
    assert ready(status) == ("False", "ShardIdConflict")
    assert "team/flights of operator main" in message(status)
    assert_untouched(operators, status, before)
    operators.create(resource("own", uid="uid-own"), "second")
    own = operators.go("team", "own", operator_id="second")["shardId"]
    operators.create(resource("own", uid="uid-own-2"), "main")
    assert operators.go("team", "own")["shardId"] != own


def test_two_operators_that_watch_one_resource_do_not_replace_its_status_for_ever(operators, resource):
    """Two releases, and the watches of both see each write. The one that owns the shard serves it; its status stands nearly all the time."""
    operators.create(resource())
    operators.go("team", "flights")
    cluster = operators.clusters["rival"] = operators.clusters["main"]
    written = []
    for _ in range(20):
        for one in ("rival", "main"):
            before = cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["resourceVersion"]
            status = operators.go("team", "flights", operator_id=one, times_=1, step_ms=15_000)
            after = cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["resourceVersion"]
            if after != before:
                written.append((one, *ready(status)))
    # Ten minutes: at once, after 60 s, after 120 s more, after 240 s more.
    assert written.count(("rival", "False", "ShardIdConflict")) == 4
    assert written.count(("main", "True", "Healthy")) >= 4
    assert ready(status) == ("True", "Healthy")
    operators.delete("team", "flights")
    operators.create(resource(uid="anew", shardId="s00000000-0000-4000-8000-000000000001"))
    assert ready(operators.go("team", "flights", operator_id="rival", times_=1)) == ("True", "Healthy")


def test_an_annotation_moves_a_shard_to_another_operator_where_the_profile_allows_it(operators, resource):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    annotations = {TAKE_OVER: shard_id}
    operators.create(
        resource("moved", uid="m", shardId=shard_id, storageProfile="any_owner", annotations=annotations), "second"
    )
    assert ready(operators.go("team", "moved", operator_id="second")) == ("True", "Healthy")
    append(operators, shard_id, rows=5)
    status = operators.go("team", "flights")
    assert ready(status) == ("False", "ShardIdConflict")
    assert "team/moved of operator second" in message(status)
    assert inspect(operators, shard_id).since == 0, "the former owner advances nothing"
    operators.go("team", "moved", operator_id="second", times_=8)
    assert inspect(operators, shard_id).since == 4


# -- sinks ------------------------------------------------------------------------------------------------------------------


def finished_once(operators, sink_resource):
    """The status of a Once sink whose run has succeeded."""
    operators.create(sink_resource({"mode": "Once"}), kind=SPARK_SINK)
    succeed(operators)
    status = operators.go("team", "load", kind="SparkSink")
    assert (status["run"]["number"], status["run"]["state"]) == (1, "Succeeded")
    return status


def succeed(operators):
    pod = operators.go("team", "load", kind="SparkSink", times_=2)["driver"]["podName"]

    def change(one):
        state = {"terminated": {"finishedAt": times.to_text(operators.env.now_ms()), "exitCode": 0,
                                "message": json.dumps({"outcome": "Succeeded", "upper": 5})}}  # fmt: skip
        one["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "driver", "state": state}]}

    operators.clusters["main"].edit(POD, "team", pod, change)


def test_a_once_sink_runs_again_for_another_shard_and_not_for_the_same(operators, resource, sink_resource, refused):
    operators.create(resource())
    shard_id = operators.go("team", "flights")["shardId"]
    status = finished_once(operators, sink_resource)
    assert status["run"]["shardId"] == shard_id
    assert refused(sink_resource(), status) == []
    operators.delete("team", "flights")
    assert operators.go("team", "load", kind="SparkSink")["run"]["number"] == 1
    operators.create(resource(uid="again"))
    assert operators.go("team", "flights")["shardId"] == shard_id
    assert operators.go("team", "load", kind="SparkSink")["run"]["number"] == 1
    operators.delete("team", "flights")
    another = str(ShardId.new())
    operators.create(resource(uid="anew", shardId=another))
    assert operators.go("team", "flights")["shardId"] == another
    succeed(operators)
    status = operators.go("team", "load", kind="SparkSink")
    assert (status["run"]["number"], status["run"]["state"], status["run"]["shardId"]) == (2, "Succeeded", another)
    assert status["attempt"] == 2
