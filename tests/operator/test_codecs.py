"""Codecs of a shard: the names that the spec pins, the names that the state records, and shards that this release cannot read."""

import contextlib
import dataclasses

import pytest
from persist_engine.client.client import PersistClient
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner
from persist_engine.model.state import CodecNames
from persist_engine.rows.schema import CODECS, Schema
from persist_operator.api import conditions
from persist_operator.api.shard import ShardCodecs
from persist_operator.cluster.port import EVENT, JOB, PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.plan.actions import InitialiseShard
from persist_operator.plan.observed import ShardMissing, ShardObserved
from persist_operator.plan.shard import plan_shard
from reconcile_world import SHARD, SINK, World

ROWS, SHARD_ID = CodecNames(key="row", val="struct"), ShardId("s00000000-0000-0000-0000-00000000c0de")
PINNED = {"codecs": {"key": "struct", "value": "struct"}}
RECORDED = {"key": "struct", "value": "struct", "time": "u64", "diff": "i64"}


@pytest.fixture
def world(tmp_path, now):
    with contextlib.closing(World(tmp_path, now)) as made:
        yield made


@pytest.fixture
def other(world):
    """A shard of the resource, as another release with other codecs creates it."""
    with PersistClient.open(world.location) as client:
        client.adopt(Owner(world.settings.operator_id, "team", "flights"), SHARD_ID, SHARD_ID)
        client.versions.maybe_init_shard(SHARD_ID, ROWS, Schema.from_ddl("id BIGINT").to_pair())


def stalled(world):
    return conditions.find(world.status(SHARD), "Stalled")


@pytest.mark.parametrize("spec", [PINNED, {}], ids=["pinned", "default"])
def test_a_shard_is_created_with_the_codecs_of_the_spec_and_the_status_has_those_it_records(
    world, shard_resource, refused, spec
):
    resource = shard_resource(spec)
    world.cluster.create(PERSIST_SHARD, resource)
    status = world.go(SHARD)
    assert world.ready(SHARD) == ("True", "Healthy")
    assert status["codecs"] == RECORDED
    assert refused(resource, status) == []
    with PersistClient.open(world.location) as client:
        assert client.inspect(ShardId(status["shardId"])).codecs == CODECS


@pytest.mark.parametrize("spec", [PINNED, {}], ids=["pinned", "default"])
def test_a_shard_that_records_other_codecs_stalls_with_both_named_and_nothing_works_on_it(
    world, other, shard_resource, sink_resource, refused, spec
):
    resource = shard_resource({"shardId": str(SHARD_ID), "rollup": {"everySeqnos": 4}, **spec})
    world.cluster.create(PERSIST_SHARD, resource)
    world.cluster.create(SPARK_SINK, sink_resource())
    status = world.go(SHARD, 8)
    world.go(SINK)
    assert world.ready(SHARD) == ("False", "CodecMismatch")
    found = stalled(world)
    assert (found["status"], found["reason"]) == ("True", "CodecMismatch")
    assert all(one in found["message"] for one in (str(SHARD_ID), "key row", str(CODECS), "use a release")), found
    assert world.ready(SINK) == ("False", "ShardStalled")
    assert [world.cluster.find(kind, None, {}) for kind in (JOB, POD)] == [[], []]
    assert len([one for one in world.cluster.find(EVENT, None, {}) if one["reason"] == "CodecMismatch"]) == 1
    assert refused(resource, status) == []
    world.cluster.requests.clear()
    world.go(SHARD, 3)
    assert world.cluster.requests == [], "no loop of writes"


def test_codecs_that_this_release_does_not_have_create_nothing(world, shard_resource):
    """The definition of a later release allows them, and an older operator reads the resource."""
    world.cluster.create(PERSIST_SHARD, shard_resource({"codecs": {"key": "row", "value": "struct"}}))
    status = world.go(SHARD)
    assert world.ready(SHARD) == ("False", "CodecMismatch")
    assert all(one in stalled(world)["message"] for one in ("key row", str(CODECS)))
    with PersistClient.open(world.location) as client:
        assert not client.has_log(ShardId(status["shardId"]))


def test_the_spec_of_a_plan_is_compared_with_the_state(make_shard, make_inspection, settings, now):
    shard_id = make_inspection().shard_id
    shard = make_shard(PINNED, status={"shardId": shard_id})

    def planned(found):
        return plan_shard(shard, ShardObserved(inspected=found, shard_id=shard_id), now_ms=now, settings=settings)

    (action,) = planned(ShardMissing()).actions
    assert isinstance(action, InitialiseShard)
    assert action.codecs == ShardCodecs(key="struct", value="struct")
    differs = planned(make_inspection(codecs=dataclasses.replace(CODECS, val="row"), compaction_requests=9))
    found = conditions.find(differs.status, "Stalled")
    assert (found["status"], found["reason"], differs.actions) == ("True", "CodecMismatch", ())
    assert all(
        one in found["message"]
        for one in (shard_id, "value row", "wants key struct, value struct", "create the resource anew")
    )
    same = planned(make_inspection())
    assert conditions.find(same.status, "Ready")["reason"] == "Healthy"
