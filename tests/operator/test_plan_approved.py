"""A plan under an operator: it waits on the resource over restarts, an approval by annotation starts its Job, with the budget's bound."""

import pytest
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import names
from persist_operator.cluster.port import JOB, PERSIST_SHARD

SPEC = {"compaction": {"maxUncompactedBatches": 2}, "maintenance": {"approval": "Required"}}


@pytest.fixture
def flights(tmp_path, operated):
    """An operated shard with batches that wait for a compaction."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    made = operated(location, spec=SPEC)
    shard_id = ShardId(made.settle(6)["shardId"])
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0))
    with (
        PersistClient.open(location, settings=settings) as client,
        client.open_writer(shard_id, Schema.from_ddl("id BIGINT"), purpose="test") as writer,
    ):
        for at in range(14):
            rows = [(((at,), ()), at, 1)]
            writer.compare_and_append(rows, expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1))
    return made


def compactions(made):
    return made.cluster.find(JOB, "team", {names.LABEL_KIND: "compaction"})


def events(made, reason):
    return [one for one in made.cluster.events("team") if reason in one]


def approve(made, token):
    note = {f"{names.REQUEST_PREFIX}approve": token}
    made.cluster.edit(
        PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].setdefault("annotations", {}).update(note)
    )


def test_a_plan_waits_over_restarts_and_its_approval_starts_the_job(flights, refused):
    plan = flights.settle()["plan"]
    assert flights.condition("CompactionCurrent")["reason"] == "AwaitingApproval"
    assert refused(flights.cluster.get(PERSIST_SHARD, "team", "flights"), flights.status) == []
    assert (plan["type"], plan["approved"], plan["estimatedBytes"] > 0) == ("Compaction", False, True)
    flights.restart()
    assert flights.settle()["plan"] == plan, "another operator finds the same plan"
    approve(flights, "compact-0")
    flights.settle()
    assert compactions(flights) == []
    assert len(events(flights, "ApprovalRefused")) == 1
    approve(flights, plan["id"])
    flights.restart()
    flights.settle()
    (job,) = compactions(flights)
    assert job["metadata"]["annotations"][names.ANNOTATION_REASON].endswith("uncompacted batches")
    assert "plan" not in flights.status or flights.status["plan"]["type"] != "Compaction"
    assert flights.condition("CompactionCurrent")["reason"] == "Compacting"


def test_the_job_has_what_is_left_of_the_budget_as_its_bound(flights):
    estimate = flights.settle()["plan"]["estimatedBytes"]

    def bounded(one):
        one["spec"]["maintenance"] = {"maxRewriteBytesPerDay": estimate - 1}

    flights.cluster.edit(PERSIST_SHARD, "team", "flights", bounded)
    flights.settle()
    (job,) = compactions(flights)
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--max-bytes") + 1] == str(estimate - 1)
