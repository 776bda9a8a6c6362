"""Requests from the command line: another run, one run of a schedule, a read by name; and problems found before Spark starts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine.model.ownership import Owner
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.times import to_text
from persist_operator.local import due, inputs
from persist_operator.local.hints import by_name, local_words
from persist_operator.plan.actions import Plan
from persist_operator.plan.hints import Recover, Request, Restart, TakeOver, cluster_words


def attempts_of(house, name="load"):
    return [one["outcome"] for one in house.status("SparkSink", name)["history"]]


def scheduled(house, cron="0 3 1 1 *", **schedule):
    """A scheduled sink, which by default is not due for months."""
    return house.sink(mode="Scheduled", schedule={"cron": cron, **schedule})


@pytest.mark.slow
def test_up_runs_a_scheduled_sink_once_and_ends(house):
    file = house.write(house.shard(), scheduled(house, cron="* * * * *", startingDeadlineSeconds=10))
    result = house.local("up", "-f", file)
    assert result.stderr.count("DriverStarted") == 1
    assert house.attempts() == 1
    house.local("up", "-f", house.write(house.shard(), scheduled(house)))
    assert house.attempts() == 1  # it is done and not due again


@pytest.mark.slow
def test_a_tick_that_falls_due_while_up_runs_is_left_to_the_next_up(house):
    """Otherwise `up` would never end under a schedule of every minute."""
    assert house.run(house.shard(), scheduled(house, cron="* * * * *")) == []
    ticks, document = due.Ticks(watch=False), house.objects.get("SparkSink", "load")
    now_ms = house.env.now_ms() + 600_000
    assert ticks.shown(document, now_ms=now_ms) is document  # it fell due before: it runs
    newer = {**document, "status": {**document["status"], "run": {**document["status"]["run"], "number": 2}}}
    assert ticks.is_over(newer)
    going = {**newer, "status": {**newer["status"], "run": {**newer["status"]["run"], "state": "Running"}}}
    shown = ticks.shown(going, now_ms=now_ms)
    assert shown["status"]["schedule"]["lastTime"] > going["status"]["schedule"]["lastTime"]
    plan = ticks.kept(Plan(status=shown["status"]), going, shown)
    assert plan.status["schedule"]["lastTime"] == going["status"]["schedule"]["lastTime"]


@pytest.mark.slow
def test_run_runs_a_sink_that_is_done_or_not_due(house):
    assert house.run(house.shard(), scheduled(house)) == []
    assert house.attempts() == 1
    result = house.local("run", "load")
    assert "RunSucceeded  SparkSink/load" in result.stderr
    assert (house.attempts(), house.rows()) == (2, 2)
    assert house.run(house.sink("other")) == []
    house.local("run", "other")
    assert house.rows() == 4


@pytest.mark.slow
def test_run_of_one_sink_leaves_the_others(house):
    (house.control / "refuse").touch()
    assert house.run(house.shard(), house.sink(), house.sink("other")) == ["SparkSink/load", "SparkSink/other"]
    (house.control / "refuse").unlink()
    house.local("run", "load")
    assert attempts_of(house) == ["Succeeded", "Failed"]
    assert attempts_of(house, "other") == ["Failed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "none"], "no SparkSink called 'none'; there are: load"),
        (["run", "load"], "sparksink/load is suspended"),
        (["up", "-f", "all.yaml", "--retry", "lode"], "--retry: no sink called lode; there are: load"),
        (["read", "thing"], "no PersistShard is called 'thing'; there are: things"),
        (["inspect"], "name a shard: `persist local inspect NAME`"),
        (["admin", "holds", "nothing"], "no PersistShard is called 'nothing'; there are: things"),
    ],
)
def test_wrong_names_are_refused_with_those_that_are_there(house, arguments, message):
    assert house.run(house.shard()) == []
    house.apply(house.sink(suspend=True))
    house.write(house.shard(), house.sink(suspend=True))
    assert message in house.local(*arguments, code=64).stderr


@pytest.mark.slow
def test_run_beside_another_runner_leaves_the_request_to_it(house):
    (house.control / "hold").touch()
    assert house.run(house.shard()) == []
    from persist_operator.local.runner import runner_lock

    house.apply(house.sink())
    with runner_lock(house.state):
        result = house.local("run", "load")
    assert "sparksink/load: a run is requested; another `persist local` (process" in result.stderr
    assert "persistshard.io/request-restart" in house.objects.get("SparkSink", "load")["metadata"]["annotations"]


@pytest.mark.slow
def test_regression_a_run_beside_an_attempt_is_another_run(house):
    """The attempt may have read the input before it changed. The request was dropped, although the answer was that a run is requested."""
    from persist_operator.local.runner import runner_lock

    house.apply(house.shard(), house.sink())
    driver = {"podName": "load-x-1", "phase": "Running", "startTime": to_text(house.env.now_ms())}
    house.objects.set_status("SparkSink", "load", {"attempt": 1, "run": {"state": "Running"}, "driver": driver})
    with runner_lock(house.state):
        house.local("run", "load")
    assert "persistshard.io/request-restart" in house.objects.get("SparkSink", "load")["metadata"]["annotations"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["Scheduled", "Streaming"])
def test_regression_an_up_does_not_end_before_a_run_that_was_requested_of_it(house, mode):
    """A Scheduled or Streaming sink runs once in an `up`. A request for another run was left to the next `up`, against what `run` says."""
    load = scheduled(house) if mode == "Scheduled" else house.sink(mode=mode)
    asked = []

    def on_note(owner, note):
        if note.reason == "RunSucceeded" and owner == "SparkSink/load" and not asked:
            asked.append(note)
            due.ask(house.objects, house.objects.get("SparkSink", "load"), now_ms=house.env.now_ms(), is_another=True)

    house.on_note = on_note
    assert house.run(house.shard(), load, house.shard("others"), house.sink("slow", shard="others"), drivers=1) == []
    assert attempts_of(house) == ["Succeeded", "Succeeded"]
    assert house.rows() == 2


def test_a_failed_sink_is_mended_when_its_input_is_newer(house):
    data = house.folder / "in.csv"
    data.write_text("id\nx\n")
    house.apply(house.shard(), csv_sink(house))
    document = house.objects.get("SparkSink", "load")
    began = inputs.changed_ms(document)
    failed = {"run": {"state": "Failed"}, "driver": {"startTime": to_text(began + 60_000)}}
    assert due.has_failed({**document, "status": failed})
    assert not due.is_mended({**document, "status": failed})
    data.write_text("id\n1\n")
    failed["driver"]["startTime"] = to_text(began - 60_000)
    assert due.is_mended({**document, "status": failed})
    assert not due.is_mended({**document, "status": {**failed, "run": {"state": "Succeeded"}}})


@pytest.mark.slow
def test_up_runs_a_failed_sink_again_when_its_input_changed_or_with_retry(house):
    (house.control / "refuse").touch()
    file = house.write(house.shard(), house.sink())
    result = house.local("up", "-f", file, code=1)
    assert "see `persist local logs load --state" in result.stderr
    assert "after the repair: `persist local run load --state" in result.stderr
    assert "mend the input, then `persist local run load`" in result.stdout
    (house.control / "refuse").unlink()  # the folder is the sink's input: it changed
    again = house.local("up", "-f", file)
    assert "sparksink/load failed, and its input changed since: it runs again" in again.stderr
    assert attempts_of(house) == ["Succeeded", "Failed"]
    house.local("up", "-f", file, "--retry", "load")
    assert attempts_of(house) == ["Succeeded", "Succeeded", "Failed"]


def csv_sink(house, **options):
    options = {"path": str(house.folder / "in.csv"), "header": "true", **options}
    return house.sink(input={"type": "Format", "format": {"name": "csv", "options": options}})


def found(house, sink, waits=False, key="id STRING"):
    shard = house.shard(schema={"key": key, "value": "name STRING"})
    return inputs.problems(load_schemas().default(sink), shard, waits=waits)


def test_paths_columns_and_schedules_are_checked_before_spark_starts(house, monkeypatch):
    monkeypatch.chdir(house.folder)
    (missing,) = found(house, csv_sink(house, path="nowhere/*.csv"))
    assert f"no such file or folder: nowhere/*.csv (looked for from {house.folder})" in missing
    (missing,) = found(house, csv_sink(house, path="a" * 5000))
    assert "no such file or folder: aaaa" in missing
    (house.folder / "in.csv").write_text("id;nam\n1;a\n")
    (wrong,) = found(house, csv_sink(house, sep=";", path="file:" + str(house.folder / "in.csv")))
    assert wrong.startswith(
        "spec.input: input columns do not match the shard's schema: missing: name (value field); not in"
    )
    assert wrong.endswith("schema: nam (drop them with input.format.sql); the input has: id, nam")
    (house.folder / "in.csv").write_text("id,name\n1,a\n")
    assert found(house, csv_sink(house)) == []
    pq.write_table(pa.table({"id": ["a"], "at": [1]}), house.folder / "in.parquet")
    parquet = house.sink(
        input={"type": "Format", "format": {"name": "parquet", "options": {"path": "in.parquet"}}},
        envelope={"type": "Append", "timestampColumn": "at"},
    )
    assert [one for one in found(house, parquet) if "missing: name (value field); the input has: id, at" in one]
    lacking = {"type": "Upsert", "orderColumn": "lsn", "deleteColumn": "gone"}
    (wrong,) = found(house, parquet | {"spec": parquet["spec"] | {"envelope": lacking}})
    assert "missing: name (value field), lsn (orderColumn), gone (deleteColumn); not in the shard's schema: at" in wrong
    assert found(house, parquet | {"spec": parquet["spec"] | {"envelope": {"type": "Debezium"}}}) == []
    collecting = {"type": "Append", "onError": "Collect"}
    (wrong,) = found(
        house,
        parquet | {"spec": parquet["spec"] | {"envelope": collecting}},
        key="id BIGINT, err STRING",
    )
    assert "missing: name (value field); not in the shard's schema: at" in wrong
    (wrong,) = found(house, scheduled(house, cron="99 * * * *"))
    assert "schedule.cron '99 * * * *' is not five cron fields" in wrong


@pytest.mark.parametrize(
    "source",
    [
        {"name": "csv", "options": {"path": "s3a://raw/airlines.csv"}},
        {"name": "jdbc", "options": {"path": "nowhere"}},
        {"name": "csv", "options": {"path": "{a,b}.csv"}},
        {"name": "csv", "options": {"path": "."}, "sql": "SELECT 1 AS id"},
        {"name": "csv", "options": {"path": "."}, "schema": "id STRING, name STRING"},
    ],
)
def test_inputs_that_only_spark_can_check_are_no_problem(house, source):
    assert found(house, house.sink(input={"type": "Format", "format": source})) == []


def test_an_input_that_comes_later_is_no_problem_while_watching(house):
    sink = scheduled(house) | {}
    sink["spec"]["input"] = csv_sink(house)["spec"]["input"]
    assert found(house, sink)
    assert found(house, sink, waits=True) == []


@pytest.mark.slow
def test_a_stopped_attempt_is_stopped_in_the_status_and_not_lost(house):
    from persist_operator.local.act import stop_everything

    house.apply(house.shard(), house.sink())
    house.processes.start("load-x-1", ["sleep", "600"], owner="SparkSink/load", labels={"kind": "driver"}, environ={})
    run = {"id": "r", "revision": "x", "number": 1, "state": "Running"}
    driver = {"podName": "load-x-1", "phase": "Running", "startTime": to_text(house.env.now_ms())}
    house.objects.set_status("SparkSink", "load", {"attempt": 1, "run": run, "driver": driver})
    assert stop_everything(house.processes, grace_s=5, objects=house.objects) == ["load-x-1"]
    status = house.status("SparkSink", "load")
    assert (status["driver"]["phase"], attempts_of(house)) == ("Deleted", ["Stopped"])
    ready = next(one for one in status["conditions"] if one["type"] == "Ready")
    assert (ready["reason"], "the next `persist local up` continues" in ready["message"]) == ("Stopped", True)
    assert house.run() == []
    assert attempts_of(house) == ["Succeeded", "Stopped"]
    assert "lost" not in json.dumps(house.status("SparkSink", "load"))


SHARD_ID = "s00000000-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("hint", "cluster", "local"),
    [
        (
            Restart(),
            "annotate the resource with persistshard.io/request-restart=<any new value>",
            "mend the input, then `persist local run things`",
        ),
        (
            Request("accept-log"),
            "annotate the resource with persistshard.io/request-accept-log=<any new value>",
            "run `persist local request accept-log things`",
        ),
        (Recover(SHARD_ID), f"`persist admin recover {SHARD_ID}`", "`persist local admin recover things`"),
        (
            TakeOver(SHARD_ID, Owner("local", "local", "things"), by_annotation=True),
            f"annotate this resource persistshard.io/take-over={SHARD_ID}, or run "
            f"`persist admin owner {SHARD_ID} --take-over local/local/things --commit`",
            f"add the annotation persistshard.io/take-over: {SHARD_ID} to this resource, and run `persist local up -f FILE`",
        ),
        (
            TakeOver(SHARD_ID, Owner("local", "local", "things"), by_annotation=False),
            f"run `persist admin owner {SHARD_ID} --take-over local/local/things --commit`",
            None,
        ),
    ],
)
def test_each_front_end_has_its_own_words_for_a_hint(hint, cluster, local):
    assert cluster_words(hint) == cluster
    assert local is None or local_words("things")(hint) == local


@pytest.mark.slow
def test_a_hint_to_take_a_shard_over_names_what_works_here(house):
    """`persist local admin owner NAME` would not: the resource has no shard yet."""
    assert house.run(house.shard()) == []
    shard_id = house.status("PersistShard", "things")["shardId"]
    other = house.shard("other", shardId=shard_id)
    assert house.run(other) == ["PersistShard/other"]
    ready = next(one for one in house.status("PersistShard", "other")["conditions"] if one["type"] == "Ready")
    assert ready["reason"] == "ShardIdConflict"
    annotation = f"persistshard.io/take-over: {shard_id}"
    assert f"to take it over add the annotation {annotation} to this resource" in ready["message"]
    other["metadata"]["annotations"] = dict([annotation.split(": ")])
    house.run(other)
    assert house.status("PersistShard", "other")["shardId"] == shard_id


def test_an_error_of_the_engine_names_a_shard_of_this_machine_by_its_name():
    text = f"shard {SHARD_ID} is lost; `persist admin recover {SHARD_ID}` shows what can be recovered"
    assert by_name(text, SHARD_ID, "things").endswith(
        "; `persist local admin recover things` shows what can be recovered"
    )
    assert by_name(text, None, "things") == text  # not yet the resource's: `persist local admin` would not find it


@pytest.mark.slow
def test_the_engines_commands_by_name(house):
    assert house.run(house.shard(), house.sink()) == []
    assert house.local("read", "things", "--format", "jsonl").stdout == '{"id": "a"}\n'
    assert json.loads(house.local("read", "--count", "things", "--json").stdout) == {"rows": 1}
    shard_id = house.status("PersistShard", "things")["shardId"]
    assert json.loads(house.local("inspect", "things", "--json").stdout)["shard_id"] == shard_id
    assert "rollup" in house.local("inspect", "blobs", "things").stdout
    assert shard_id in house.local("inspect", "shards").stdout
    assert house.local("admin", "things").returncode == 0
    for order in (["verify", "things"], ["things", "verify"]):
        assert json.loads(house.local("admin", *order, "--json").stdout)["shard_id"] == shard_id
    assert "--as-of takes a time" in house.local("read", "things", "--as-of", "soon", code=64).stderr
    assert house.local("read", "things", "--from", "-1h").stdout == "_time\t_change\tid\n"
    assert house.local("read", "things", "--nonsense", code=64).stdout == ""
