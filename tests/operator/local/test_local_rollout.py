"""A rollout on one machine with real Spark: the driver runs on, the new revision proves itself and takes over."""

import copy
import json
import threading
from collections import Counter

import pytest
from persist_engine import Antichain, PersistClient, ShardId
from persist_operator.bridge import Bridge
from persist_operator.local.act import LocalActor, Room, child_environ
from persist_operator.local.runner import LocalRunner

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


class Ended(Exception):
    """The test has seen enough."""


@pytest.fixture
def watching(house):
    """`up --watch` in a thread. Resources may change meanwhile."""
    house.environ.pop("PYTHONPATH")  # the real driver instead of its stand-in
    end = threading.Event()

    def after_pass():
        if end.is_set():
            raise Ended

    def watch():
        with Bridge(house.settings, env=house.env) as bridge:
            room = Room(cores=2, drivers_max=2, maintenance_max=1)
            actor = LocalActor(house.processes, bridge, environ=child_environ(house.environ), room=room)
            runner = LocalRunner(
                house.objects,
                house.processes,
                bridge,
                actor,
                settings=house.settings,
                env=house.env,
                on_note=house.on_note,
            )
            with pytest.raises(Ended):
                runner.run(watch=True, after_pass=after_pass)

    thread = threading.Thread(target=watch)
    yield thread.start
    end.set()
    thread.join()


def rows(house):
    shard_id = ShardId(house.status("PersistShard", "things")["shardId"])
    with PersistClient.open(house.location) as client, client.open_leased_reader(shard_id, purpose="test") as reader:
        upper = client.recent_upper(shard_id).time
        table = reader.snapshot(as_of=Antichain.of(upper - 1)).to_table().to_pylist()
    return Counter({row["key"]["id"]: row["diff"] for row in table})


def test_a_new_revision_takes_over_and_another_one_that_differs_does_not(house, watching, wait_until):
    rate = {"name": "rate-micro-batch", "options": {"rowsPerBatch": "10", "numPartitions": "1"}}
    rate["sql"] = "select cast(value as string) as id from input"
    sink = house.sink(
        mode="Streaming",
        commitIntervalSeconds=1,
        input={"type": "Format", "format": rate},
        write={"parallelism": 1},
        rollout={"strategy": "BlueGreen"},
        spark={"driver": {"memory": "512Mi"}, "executor": {"memory": "512Mi"}},
    )
    house.apply(house.shard(), sink)
    watching()

    def status():
        return house.status("SparkSink", "load")

    def stage():
        return status().get("progress", {}).get("running", {}).get("stage")

    def names():
        return [reason for _, reason, _ in house.notes]

    wait_until(lambda: stage() == "Streaming", "the first driver streams")
    blue = status()["driver"]["podName"]
    changed = copy.deepcopy(sink)
    changed["spec"]["input"]["format"]["sql"] = "select string(value) as id from input where value >= 0"
    house.apply(changed)
    wait_until(lambda: status()["driver"]["podName"] != blue, "the new revision takes over")
    wait_until(lambda: "Promoted" in names(), "the event")
    assert names().index("RolloutStarted") < names().index("Promoted")
    assert [(one["attempt"], one["outcome"]) for one in status()["history"]] == [(1, "Stopped")]
    wait_until(lambda: "rollout" not in status() and stage() == "Streaming", "the new revision streams")

    green = status()["driver"]["podName"]
    differs = copy.deepcopy(sink)
    differs["spec"]["input"]["format"]["sql"] = "select string(value) as id from input where value % 10 <> 5"
    house.apply(differs)
    wait_until(lambda: status().get("rollout", {}).get("missing") is not None, "it is compared")
    wait_until(lambda: status()["rollout"].get("extra"), "it differs")
    assert (status()["rollout"]["state"], status()["rollout"]["missing"]) == ("CatchingUp", 0)
    assert status()["driver"]["podName"] == green
    house.local("request", "promote", "load")
    wait_until(lambda: status()["driver"]["podName"] != green, "the request promotes it")
    wait_until(lambda: stage() == "Streaming", "it streams")
    found = rows(house)
    assert set(found.values()) == {1}
    first = next(number for number in range(5, 10**6, 10) if str(number) not in found)
    expected = [number for number in range(max(map(int, found)) + 1) if number < first or number % 10 != 5]
    assert sorted(map(int, found)) == expected
    assert json.loads(json.dumps(status()))["lastHandledRequests"].keys() == {"promote"}
