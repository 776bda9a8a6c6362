"""Fields of a laptop that other tests of this room do not need: each acts on real stores with real runs, or the resource says why not."""

import pytest
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions, names, times

pytestmark = pytest.mark.slow
#: Nothing but the field of the test makes a run due.
QUIET = {
    "compaction": {"mode": "Manual"},
    "gc": {"enabled": False, "orphans": {"mode": "Off"}},
    "verify": {"mode": "Off"},
    "rollup": {"everySeqnos": 100000},
}


def condition(house, of, kind="PersistShard", name="things"):
    found = conditions.find(house.status(kind, name), of)
    return None if found is None else (found["status"], found["reason"])


def runs(house, kind):
    return [one for one in house.status("PersistShard", "things").get("history", ()) if one["type"] == kind]


def write(house, batches):
    """So many batches of the same ten rows: inserted and retracted by turns."""
    shard_id, rows = (
        ShardId(house.status("PersistShard", "things")["shardId"]),
        [((f"{number}",), ()) for number in range(10)],
    )
    with PersistClient.open(house.location, settings=Settings(batch=BatchSettings(inline_part_bytes_max=0))) as client:
        upper = client.recent_upper(shard_id).time
        with client.open_writer(shard_id, Schema.from_ddl("id STRING", ""), purpose="test") as writer:
            for at in range(upper, upper + batches):
                updates = [(row, at, -1 if at % 2 else 1) for row in rows]
                writer.compare_and_append(updates, expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1))
    return shard_id


def age(house, block, seconds):
    """Let the next run of this kind have been due so many seconds ago."""
    status = house.status("PersistShard", "things")
    due = times.to_text(house.env.now_ms() - 1000 * seconds)
    maintenance = {**status["maintenance"], block: {**status["maintenance"].get(block, {}), "nextRunTime": due}}
    house.objects.set_status("PersistShard", "things", {**status, "maintenance": maintenance})


def test_a_column_is_added_and_a_change_that_loses_data_is_refused(house):
    assert house.run(house.shard(**QUIET)) == []
    write(house, 1)
    wider = {"key": "id STRING", "value": "note STRING"}
    assert house.run(house.shard(**QUIET, schema=wider)) == []
    assert house.status("PersistShard", "things")["schema"]["value"] == "note STRING"
    assert condition(house, "Ready") == ("True", "Healthy")
    assert house.run(house.shard(**QUIET, schema={"key": "id BIGINT"})) == ["PersistShard/things"]
    assert condition(house, "Ready") == ("False", "SchemaRefused")
    assert house.status("PersistShard", "things")["schema"] == {"key": "id STRING", "value": "note STRING"}
    assert house.rows() == 10


def test_the_deletion_deadline_compacts_a_shard_that_nothing_else_would(house):
    def shard(seconds):
        compaction = {"maxUncompactedBatches": 100000, "deadlineSeconds": seconds}
        return house.shard(**{**QUIET, "compaction": compaction}, retention={"sinceLagSeconds": 0})

    assert house.run(shard(86400)) == []
    write(house, 4)
    assert house.run(shard(86400)) == []
    assert "deadlineTime" in house.status("PersistShard", "things")["debt"]
    assert runs(house, "Compaction") == []
    assert house.run(shard(300)) == []
    (run,) = runs(house, "Compaction")
    assert (run["outcome"], "must be gone by" in run["reason"]) == ("Succeeded", True)


def test_orphans_and_verification_run_when_their_time_has_come(house):
    audits = {**QUIET, "gc": {"enabled": False, "orphans": {"mode": "Report"}}, "verify": {"mode": "Full"}}
    assert house.run(house.shard(**audits)) == []
    write(house, 1)
    assert runs(house, "Verify") + runs(house, "OrphanScan") == []
    for block in ("verify", "orphanScan"):
        assert "nextRunTime" in house.status("PersistShard", "things")["maintenance"][block]
        age(house, block, 1)
    assert house.run(house.shard(**audits)) == []
    (verify,), (scan,) = runs(house, "Verify"), runs(house, "OrphanScan")
    assert (verify["outcome"], scan["outcome"]) == ("Succeeded", "Succeeded")
    assert condition(house, "Verified") == ("True", "Verified")
    assert house.status("PersistShard", "things")["storage"]["orphanBlobs"] == 0
    assert house.run(house.shard(**audits)) == []
    assert (len(runs(house, "Verify")), len(runs(house, "OrphanScan"))) == (1, 1), "the next ones are due in a day"


def test_space_amplification_makes_a_compaction_due(house):
    def shard(**limit):
        compaction = {"maxUncompactedBatches": 100000, **limit}
        return house.shard(**{**QUIET, "compaction": compaction}, retention={"sinceLagSeconds": 0})

    assert house.run(shard()) == []
    write(house, 4)
    assert house.run(shard()) == []
    assert runs(house, "Compaction") == []
    assert house.run(shard(maxSpaceAmplificationPercent=150)) == []
    (run,) = runs(house, "Compaction")
    assert (run["outcome"], "150% or more" in run["reason"]) == ("Succeeded", True)


def test_a_sink_with_a_target_says_whether_its_rows_are_fresh(house):
    every_minute = {"mode": "Scheduled", "schedule": {"cron": "* * * * *"}, "freshness": {"targetSeconds": 3600}}
    assert house.run(house.shard(**QUIET), house.sink(**every_minute)) == []
    assert condition(house, "Fresh", "SparkSink", "load") == ("True", "Current")


def test_executors_of_dynamic_allocation_are_the_tasks_of_one_process(house):
    dynamic = {"dynamicAllocation": {"enabled": True, "minExecutors": 1, "maxExecutors": 9}, "executor": {"cores": 1}}
    assert house.run(house.shard(**QUIET), house.sink(spark=dynamic)) == []
    (file,) = (house.state / "children").glob("load-*/spark-defaults.conf")
    conf = dict(line.split("=", 1) for line in file.read_text().splitlines())
    assert conf["spark.master"] == "local[2]"
    assert not [key for key in conf if key.startswith("spark.dynamicAllocation")]


def test_a_paused_resource_is_left_alone_and_up_ends(house):
    pause = {"annotations": {names.ANNOTATION_PAUSED: "true"}}
    shard, sink = house.shard(**QUIET), house.sink()
    assert house.run(shard, {**sink, "metadata": {**sink["metadata"], **pause}}) == []
    assert condition(house, "Ready", "SparkSink", "load") == ("Unknown", "Paused")
    assert house.attempts() == 0
    house.objects.annotate("PersistShard", "things", names.ANNOTATION_PAUSED, "true")
    house.objects.annotate("SparkSink", "load", names.ANNOTATION_PAUSED, "false")
    assert house.run() == []
    assert condition(house, "Ready") == ("Unknown", "Paused")
    assert house.rows() == 1, "the sink of a paused shard runs"


def test_up_says_which_fields_have_no_effect_without_pods(house):
    pods = {"image": "r/i:1", "scheduler": {"name": "Volcano"}, "driver": {"template": {"spec": {}}, "cores": 1}}
    shard = house.shard(**QUIET, maintenance={"priorityClassName": "low"})
    shown = house.local("up", "-f", house.write(shard, house.sink(spark=pods), house.sink("plain"))).stderr.splitlines()
    outcome = "persistshard/things created; without effect here, because there are no pods: "
    assert f"{outcome}spec.maintenance.priorityClassName" in shown
    of_sink = "spec.spark.image, spec.spark.scheduler, spec.spark.driver.template"
    assert f"sparksink/load created; without effect here, because there are no pods: {of_sink}" in shown
    assert "sparksink/plain created" in shown
