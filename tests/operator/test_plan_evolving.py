"""Schema evolution through the resource: what is applied, what is refused, and that a refusal changes nothing."""

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions, names
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import PERSIST_SHARD
from persist_operator.plan.actions import EvolveSchema, StartMaintenance
from persist_operator.plan.observed import ActionFailure, ShardObserved, ShardView
from persist_operator.plan.shard import plan_shard
from persist_operator.settings import AllowedNamespaces, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

SHARD_ID = names.shard_id_of("uid-shard")
SERVED = {"shardId": SHARD_ID, "schema": {"key": "id BIGINT", "value": "x INT"}}


@pytest.fixture
def plan(make_shard, settings, make_inspection, now):
    def make(key, value, *, status=SERVED, failure=None, at=now, **changes):
        shard = make_shard({"schema": {"key": key, "value": value}}, status=status, generation=2)
        found = make_inspection(key_schema="id BIGINT", val_schema="x INT", **changes)
        failures = {} if failure is None else {"EvolveSchema": failure}
        observed = ShardObserved(inspected=found, shard_id=SHARD_ID, failures=failures)
        return plan_shard(shard, observed, now_ms=at, settings=settings)

    return make


def evolved(plan):
    return [one.schema for one in plan.actions if isinstance(one, EvolveSchema)]


def reason(plan, name):
    found = conditions.find(plan.status, name)
    return None if found is None else (found["status"], found["reason"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id BIGINT", "x INT, note STRING"),
        ("id BIGINT", "x BIGINT"),
        ("id BIGINT, region STRING", "x INT"),
        ("id BIGINT", "first STRING, x BIGINT"),
    ],
)
def test_a_schema_that_grows_is_applied(plan, key, value):
    planned = plan(key, value)
    (schema,) = evolved(planned)
    assert (schema.key, schema.value) == (key, value)
    assert reason(planned, "Reconciling") == ("True", "EvolvingSchema")
    assert planned.status["schema"] == {"key": "id BIGINT", "value": "x INT"}, "what is stored, until it is another"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("id BIGINT", "", "val.x is dropped"),
        ("id BIGINT", "y INT", "val.x is dropped"),
        ("id BIGINT", "x SMALLINT", "val.x"),
        ("id BIGINT", "x STRING", "cannot become"),
        ("id BIGINT", "x INT NOT NULL", "cannot become NOT NULL"),
        ("id BIGINT", "x INT, y INT NOT NULL", "NOT NULL: stored rows have no value"),
        ("id INT", "x INT", "key.id"),
        ("id BIGINT", "x WHATEVER", "spec.schema"),
    ],
)
def test_a_change_that_is_refused_says_why_and_stops_nothing(plan, make_shard, settings, key, value, words):
    planned = plan(key, value, gc_seqnos=20)
    assert evolved(planned) == []
    assert reason(planned, "Stalled") == ("True", "SchemaRefused")
    assert reason(planned, "Ready") == ("False", "SchemaRefused")
    assert words in conditions.find(planned.status, "Stalled")["message"]
    assert planned.status["schema"] == SERVED["schema"]
    assert [one.kind for one in planned.actions if isinstance(one, StartMaintenance)] == ["gc"]
    shard = make_shard({"schema": {"key": key, "value": value}}, status=planned.status)
    view = ShardView.of("flights", shard, settings)
    assert (view.usable, view.schema.value) == (True, "x INT"), "sinks go on with the schema of the shard"


def test_a_shard_that_was_never_served_is_not_changed(plan):
    planned = plan("id BIGINT", "x INT, note STRING", status={"shardId": SHARD_ID})
    assert planned.actions == ()
    assert reason(planned, "Stalled") == ("True", "SchemaMismatch")


def test_a_refusal_of_the_engine_stands_until_the_resource_changes(plan, now):
    failure = ActionFailure(reason="Refused", message="finalized", permanent=True, at_ms=now, generation=2)
    refused = plan("id BIGINT", "x BIGINT", failure=failure, at=now + 3_600_000)
    assert evolved(refused) == []
    assert "finalized" in conditions.find(refused.status, "Stalled")["message"]
    older = ActionFailure(reason="Refused", message="finalized", permanent=True, at_ms=now, generation=1)
    assert len(evolved(plan("id BIGINT", "x BIGINT", failure=older))) == 1


def test_a_failure_that_passes_is_tried_again(plan, now):
    failure = ActionFailure(reason="StorageUnreachable", message="down", permanent=False, at_ms=now, generation=2)
    soon = plan("id BIGINT", "x BIGINT", failure=failure, at=now + 5000)
    assert (evolved(soon), reason(soon, "Reconciling")) == ([], ("True", "StorageUnreachable"))
    assert len(evolved(plan("id BIGINT", "x BIGINT", failure=failure, at=now + 31_000))) == 1


def test_the_operator_evolves_a_shard_with_rows_and_they_are_read_under_the_new_schema(tmp_path, now, shard_resource):
    env, urls = SeededEnv(start_ms=now), {"blob": f"file://{tmp_path}/b", "consensus": f"sqlite://{tmp_path}/c.db"}
    stores = StorageProfile(**urls, allowed_namespaces=AllowedNamespaces(names=("team",)))
    settings, cluster = OperatorSettings(storage_profiles={"default": stores}), FakeCluster(now_ms=env.now_ms)
    cluster.create(PERSIST_SHARD, shard_resource({"schema": {"key": "id BIGINT", "value": "x INT"}}))
    key, shard_id = Key("PersistShard", "team", "flights"), ShardId(SHARD_ID)
    with Bridge(settings, env=env) as bridge, PersistClient.open(Location(**urls)) as client:
        reconciler = Reconciler(cluster, bridge, settings, env, OperatorMetrics(CollectorRegistry()))

        def settle(value):
            def change(one):
                one["spec"]["schema"]["value"] = value

            cluster.edit(PERSIST_SHARD, "team", "flights", change)
            for _ in range(5):
                env.advance_ms(20_000)
                reconciler.reconcile(key)
            status = cluster.stored("PersistShard", "team", "flights")["status"]
            stalled = conditions.find(status, "Stalled")
            return status["schema"]["value"], conditions.find(status, "Ready")["reason"], stalled is not None

        assert settle("x INT") == ("x INT", "Healthy", False)
        with client.open_writer(shard_id, Schema.from_ddl("id BIGINT", "x INT"), purpose="test") as writer:
            writer.compare_and_append([(((7,), (70,)), 0, 1)], expected_upper=0, new_upper=1)
        assert settle("x BIGINT, note STRING") == ("x BIGINT, note STRING", "Healthy", False)
        wider = Schema.from_ddl("id BIGINT", "x BIGINT, note STRING")
        with client.open_leased_reader(shard_id, wider, purpose="test") as reader, reader.snapshot(0) as snapshot:
            (batch,) = snapshot.to_batches()
            assert batch.column("val").to_pylist() == [{"x": 70, "note": None}]
        before = client.machine(shard_id).refresh().schemas
        assert settle("x BIGINT") == ("x BIGINT, note STRING", "SchemaRefused", True)
        assert client.machine(shard_id).refresh().schemas == before
        assert settle("x BIGINT, note STRING") == ("x BIGINT, note STRING", "Healthy", False)
        assert client.machine(shard_id).refresh().schemas == before, (
            "putting the former spec back changes nothing in the shard"
        )
        with client.open_leased_reader(shard_id, wider, purpose="test") as reader, reader.snapshot(0) as snapshot:
            (batch,) = snapshot.to_batches()
            assert batch.column("val").to_pylist() == [{"x": 70, "note": None}]
