"""Plans on a laptop: what is next, an approval, a window, and a budget, with real stores and real runs."""

import pytest
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions
from persist_operator.local.hints import local_words
from persist_operator.plan.hints import Approve, cluster_words

FEW = {"compaction": {"maxUncompactedBatches": 2}}
#: An opening a year.
RARELY = {"windows": [{"schedule": "0 0 29 2 *", "durationSeconds": 300, "timeZone": "Etc/UTC"}]}


def write(house, times=6):
    """So many batches with blobs."""
    shard_id = ShardId(house.status("PersistShard", "things")["shardId"])
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0))
    with PersistClient.open(house.location, settings=settings) as client:
        upper = client.recent_upper(shard_id).time
        with client.open_writer(shard_id, Schema.from_ddl("id STRING", ""), purpose="test") as writer:
            for at in range(upper, upper + times):
                rows = [(((f"{at}-{number}",), ()), at, 1) for number in range(100)]
                writer.compare_and_append(rows, expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1))


def compactions(house):
    return [one for one in house.status("PersistShard", "things").get("history", ()) if one["type"] == "Compaction"]


def current(house):
    return conditions.find(house.status("PersistShard", "things"), "CompactionCurrent")


@pytest.mark.slow
def test_a_plan_waits_for_its_approval_and_up_does_not_wait_for_it(house):
    file = house.write(house.shard(**FEW, maintenance={"approval": "Required"}))
    house.local("up", "-f", file)
    assert "no plan of things waits" in house.local("request", "approve", "things", code=64).stderr
    write(house)
    assert "AwaitingApproval  PersistShard/things: plan compact-" in house.local("up", "-f", file).stderr
    plan = house.status("PersistShard", "things")["plan"]
    assert (compactions(house), current(house)["reason"]) == ([], "AwaitingApproval")
    assert f"`persist local request approve things --plan {plan['id']}`" in current(house)["message"]
    assert f"Compaction {plan['id']}: " in (shown := house.local("describe", "pshard", "things").stdout)
    assert "waits for an approval" in shown
    wrong = house.local("request", "approve", "things", "--plan", "compact-0", code=64).stderr
    assert plan["id"] in wrong
    assert "--plan is for approve" in house.local("request", "gc", "things", "--plan", "x", code=64).stderr
    house.local("request", "approve", "things", "--plan", plan["id"])
    house.local("up", "-f", file)
    (run,) = compactions(house)
    assert (run["outcome"], run["runner"]) == ("Succeeded", "Pod")
    assert run["cpuSeconds"] > 0
    assert run["bytesRead"] > 0
    status = house.status("PersistShard", "things")
    assert sum(one["bytes"] for one in status["rewritten"]) == run["bytesRead"]
    shown = house.local("get", "runs").stdout
    assert "CPU" in shown
    assert f"{run['cpuSeconds']}s" in shown


@pytest.mark.slow
def test_windows_and_budget_hold_and_a_request_passes(house):
    assert house.run(house.shard(**FEW, maintenance=RARELY)) == []
    write(house)
    assert house.run(house.shard(**FEW, maintenance=RARELY)) == []
    assert (compactions(house), current(house)["reason"]) == ([], "WindowClosed")
    assert house.run(house.shard(**FEW, maintenance={"maxRewriteBytesPerDay": 1})) == []
    assert (compactions(house), current(house)["reason"]) == ([], "BudgetExhausted")
    house.local("request", "compact", "things")
    assert house.run() == []
    (run,) = compactions(house)
    assert run["reason"].startswith("requested by annotation")
    assert current(house)["status"] == "True"


def test_the_approval_is_told_in_the_words_of_the_front_end():
    assert cluster_words(Approve("compact-1")) == "annotate the resource with persistshard.io/request-approve=compact-1"
    assert local_words("a")(Approve("compact-1")) == "run `persist local request approve a --plan compact-1`"
