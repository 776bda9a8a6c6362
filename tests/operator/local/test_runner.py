"""The loop of the local runner on real stores and with real children: starts, retries, notes and refusals."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_operator.api.schema_check import load_schemas
from persist_operator.local.act import Room, java_problem, stop_everything
from persist_operator.local.runner import Refused, checked, read_documents, runner_lock


def reason(house, kind, name):
    ready = next(one for one in house.status(kind, name)["conditions"] if one["type"] == "Ready")
    return ready["status"], ready["reason"]


@pytest.mark.slow
def test_a_sink_runs_once_and_again_only_when_it_changes(house):
    assert house.run(house.shard(), house.sink()) == []
    assert reason(house, "PersistShard", "things") == ("True", "Healthy")
    assert reason(house, "SparkSink", "load") == ("True", "Completed")
    assert (house.attempts(), house.rows()) == (1, 1)
    assert house.run(house.shard(), house.sink()) == []
    assert (house.attempts(), house.rows()) == (1, 1)
    assert house.run(house.shard(), house.sink(write={"targetBatchBytes": "32Mi"})) == []
    assert (house.attempts(), house.rows()) == (2, 2)


@pytest.mark.slow
def test_a_stream_runs_once_in_each_up_until_its_source_has_nothing_new(house):
    sink = house.sink(
        mode="Streaming", commitIntervalSeconds=2, restart={"backoffSeconds": 600, "maxBackoffSeconds": 600}
    )
    for count in (1, 2):
        assert house.run(house.shard(), sink) == []
        assert (house.attempts(), house.rows()) == (count, count)
        assert reason(house, "SparkSink", "load") == ("True", "Completed")
    asked = json.loads((house.control / "stream").read_text())
    assert asked == {"commitIntervalSeconds": 2, "bounded": True, "stopSeconds": 45}


@pytest.mark.slow
def test_a_sink_that_reads_a_shard_runs_after_the_sinks_that_write_it(house):
    """By name it would be the first one. All read what the sink before them wrote in the same `up`."""
    read = {"input": {"type": "Shard", "shard": {"name": "things"}}, "envelope": {"type": "Mirror"}}
    again = {"input": {"type": "Shard", "shard": {"name": "sums"}}, "envelope": {"type": "Diff", "diffColumn": "_diff"}}
    documents = [
        *(house.shard(name) for name in ("things", "sums", "copies")),
        house.sink("b-sums", "sums", **read),
        house.sink("a-copies", "copies", mode="Streaming", **again),
        house.sink(),
    ]
    assert house.run(*documents, drivers=3) == []
    for name in ("b-sums", "a-copies"):
        assert reason(house, "SparkSink", name) == ("True", "Completed")
        assert house.status("SparkSink", name)["progress"]["inputUpper"] == "1"
    assert "Reads      PersistShard/things" in house.local("describe", "ssink", "b-sums").stdout
    ended = {name: house.status("SparkSink", name)["driver"]["endTime"] for name in ("load", "b-sums", "a-copies")}
    assert ended["load"] <= ended["b-sums"] <= ended["a-copies"]


@pytest.mark.slow
def test_a_sink_whose_input_is_not_there_fails_and_up_ends(house):
    source = {"type": "Shard", "shard": {"name": "nothing"}}
    lonely = house.sink("lonely", input=source, envelope={"type": "Mirror"})
    assert house.run(house.shard(), lonely) == ["SparkSink/lonely"]
    assert reason(house, "SparkSink", "lonely") == ("False", "InputNotFound")
    assert house.run(house.shard("nothing")) == ["SparkSink/lonely"]
    assert reason(house, "SparkSink", "lonely") == ("False", "InputNotWritten")
    assert house.attempts() == 0


@pytest.mark.slow
def test_maintenance_runs_until_nothing_is_due_and_the_contents_stay(house):
    shard = house.shard(rollup={"everySeqnos": 4}, retention={"sinceLagSeconds": 0})
    assert house.run(shard, house.sink()) == []
    house.objects.annotate("PersistShard", "things", "persistshard.io/request-compact", "now")
    assert house.run(shard, house.sink(write={"targetBatchBytes": "32Mi"})) == []
    history = house.status("PersistShard", "things")["history"]
    assert {"Compaction", "Rollup", "GC"} == {one["type"] for one in history}
    assert not any(one["outcome"] == "Failed" for one in history)
    assert house.rows() == 2


@pytest.mark.slow
def test_a_driver_that_dies_is_tried_again_and_writes_once(house):
    (house.control / "crash").touch()
    assert house.run(house.shard(), house.sink()) == []
    assert (house.attempts(), house.rows()) == (2, 1)
    assert [one["outcome"] for one in house.status("SparkSink", "load")["history"]] == ["Succeeded", "Failed"]


@pytest.mark.slow
def test_a_wrong_configuration_ends_it_with_the_message(house):
    (house.control / "refuse").touch()
    assert house.run(house.shard(), house.sink()) == ["SparkSink/load"]
    failure = house.status("SparkSink", "load")["lastFailure"]
    assert failure["class"] == "Configuration"
    assert failure["message"].startswith("input is missing")
    assert "the driver speaks" in failure["message"]
    assert house.attempts() == 1


def test_a_sink_without_its_shard_ends_it_instead_of_waiting_for_ever(house):
    assert house.run(house.sink()) == ["SparkSink/load"]
    assert reason(house, "SparkSink", "load") == ("False", "ShardNotFound")


@pytest.mark.slow
def test_settings_of_pods_alone_have_no_effect_on_the_local_runner(house):
    """There are no pods here, so templates that an installation must allow and accounts of a cluster do no harm."""
    pod = {"template": {"spec": {"hostNetwork": True}}}
    sink = house.sink(spark={"serviceAccountName": "etl", "driver": {**pod}, "executor": {**pod}})
    assert house.run(house.shard(maintenance={"serviceAccountName": "etl", **pod}), sink) == []


def test_conf_that_a_cluster_refuses_is_refused_by_the_local_runner(house):
    with pytest.raises(Refused, match="conf sets a key the operator owns"):
        house.apply(house.shard(), house.sink(spark={"conf": {"spark.kubernetes.executor.secrets.other": "/x"}}))


def test_a_shard_with_an_unknown_profile_ends_it(house):
    failed = house.run(house.shard(storageProfile="other"), house.sink())
    assert failed == ["PersistShard/things", "SparkSink/load"]
    assert reason(house, "PersistShard", "things") == ("False", "UnknownStorageProfile")


@pytest.mark.slow
def test_only_one_of_two_shards_that_claim_an_id_is_served(house):
    same = {"shardId": "s00000000-0000-0000-0000-000000000001"}
    assert len(house.run(house.shard("one", **same), house.shard("two", **same))) == 1
    reasons = {reason(house, "PersistShard", name)[1] for name in ("one", "two")}
    assert reasons == {"Healthy", "ShardIdConflict"}


@pytest.mark.slow
@pytest.mark.parametrize("room", [{"drivers": 1}, {"memory_mib": 4000}], ids=["drivers", "memory"])
def test_sinks_wait_for_room_and_a_note_announces_each_start(house, room):
    """Each driver may take 2 GiB of heap and 1 GiB beside it."""
    sinks = [house.sink(f"load-{number}", f"things-{number}") for number in range(3)]
    shards = [house.shard(f"things-{number}") for number in range(3)]
    assert house.run(*shards, *sinks, **room) == []
    drivers = [one for one in house.processes.every() if one.labels["kind"] == "driver"]
    folders = [path.parent for path in (house.state / "children").glob("load-*/child.json")]
    assert len(folders) == 3
    assert len([note for note in house.notes if note[1] == "DriverStarted"]) == 3
    began = sorted((house.processes.get(path.name) for path in folders), key=lambda one: one.started_ms)
    for former, later in zip(began, began[1:], strict=False):
        assert former.ended_ms <= later.started_ms
    assert not [one for one in drivers if one.running]


@pytest.mark.slow
def test_a_driver_that_was_stopped_is_no_fault_of_the_sink(house):
    house.apply(house.shard(), house.sink(restart={"backoffSeconds": 1, "maxConsecutiveFailures": 1}))
    (house.control / "hold").touch()
    runner = subprocess_up(house)
    house.wait((house.control / "appended").exists, "the row is appended")
    runner.send_signal(signal.SIGINT)
    _, output = runner.communicate(timeout=180)
    assert runner.returncode == 130
    assert "stopped load-" in output
    assert not [one for one in house.processes.every() if one.running]
    (house.control / "hold").unlink()
    assert house.run() == []
    assert (house.attempts(), house.rows()) == (2, 1)
    assert reason(house, "SparkSink", "load") == ("True", "Completed")


def subprocess_up(house):
    file = house.write(house.shard(), house.sink(restart={"backoffSeconds": 1, "maxConsecutiveFailures": 1}))
    # A test process that a shell started in the background ignores SIGINT, and its children would inherit that.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            house.command("up", "-f", str(file)),
            env=house.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, ours)


@pytest.mark.slow
def test_a_killed_runner_leaves_its_driver_to_the_next_one(house):
    (house.control / "hold").touch()
    runner = subprocess_up(house)
    house.wait((house.control / "appended").exists, "the row is appended")
    runner.kill()
    runner.communicate(timeout=180)
    assert [one.running for one in house.processes.every()] == [True]
    (house.control / "hold").unlink()
    assert house.run() == []
    assert (house.attempts(), house.rows()) == (1, 1)


@pytest.mark.slow
def test_maintenance_that_was_stopped_is_started_again_under_its_name(house):
    assert house.run(house.shard(), house.sink()) == []
    house.objects.annotate("PersistShard", "things", "persistshard.io/request-rollup", "now")
    stopper = StopAtFirstMaintenance(house)
    house.on_note = stopper.on_note
    assert house.run() == []
    assert stopper.stopped
    history = house.status("PersistShard", "things")["history"]
    assert [one["outcome"] for one in history if one["id"] == stopper.stopped[0]] == ["Succeeded"]


class StopAtFirstMaintenance:
    """Stops the first maintenance run once, as an interrupt does, when its note arrives."""

    def __init__(self, house):
        self.house, self.stopped = house, []

    def on_note(self, owner, note):
        if note.reason == "MaintenanceStarted" and not self.stopped:
            name = note.message.partition(":")[0]
            pid = self.house.processes.folder(name) / "pid"
            self.house.wait(pid.exists, "the supervisor is up")
            os.killpg(int(pid.read_text()), signal.SIGKILL)
            self.house.wait(lambda: not self.house.processes.get(name).running, "end of the run")
            self.house.processes.discard(name, grace_s=0)
            self.stopped.append(name)


def test_stop_everything_on_a_quiet_folder(house):
    assert stop_everything(house.processes, grace_s=0) == []


# -- what is refused -----------------------------------------------------------------------------------------------------


def refusal(house, *documents):
    with pytest.raises(Refused) as caught:
        checked(documents, load_schemas(), house.objects)
    return caught.value.problems


def test_refusals_name_the_resource_the_field_and_what_to_change(house):
    unknown = house.sink(envelop={"type": "Append"})
    assert any("SparkSink/load: spec.envelop: unknown field; known here:" in one for one in refusal(house, unknown))
    wrong = house.sink(envelope={"type": "Upside"})
    assert any("spec.envelope.type" in one and "Append" in one for one in refusal(house, wrong))
    rule = house.sink(mode="Scheduled")
    assert refusal(house, rule) == (
        "SparkSink/load: spec.schedule: schedule must be set exactly when mode is Scheduled; add schedule.cron or change mode",
    )


def test_a_mistyped_schema_is_refused_before_it_can_no_longer_be_changed(house):
    wrong = house.shard(schema={"key": "id BIGNIT", "value": "name STRING"})
    (text,) = refusal(house, wrong)
    assert "PersistShard/things: spec.schema: key schema at position 4, field 'id': type 'BIGNIT' is not one of" in text
    house.apply(house.shard(schema={"key": "id BIGINT"}))


def test_one_refusal_names_every_problem(house):
    problems = refusal(
        house, house.shard(name="A"), house.sink(nonsense=1), {"kind": "Pod"}, "text", house.shard(), house.shard()
    )
    text = "\n".join(problems)
    assert "PersistShard/A" in text
    assert "spec.nonsense" in text
    assert "PersistShard/things: is defined twice; remove one of the two" in text
    assert len([one for one in problems if one.startswith("?/?")]) == 1


def test_a_change_of_an_immutable_field_is_refused(house):
    house.apply(house.sink())
    schedule = {"cron": "0 * * * *"}
    assert "mode is immutable" in refusal(house, house.sink(mode="Scheduled", schedule=schedule))[0]


@pytest.mark.parametrize("how", ["lists", "merges", "itself"])
def test_regression_a_document_that_aliases_make_huge_is_refused(tmp_path, how):
    """A few hundred bytes: to check them took minutes and all memory."""
    each = {"lists": "[{0}]", "merges": "{{<<: [{0}]}}"}.get(how, "{{a: *x9}}")
    names = [each.format(", ".join([f"*x{number - 1}"] * 9)) for number in range(1, 9)]
    lines = ["x0: &x0 {a: 1}", *(f"x{number}: &x{number} {text}" for number, text in enumerate(names, 1))]
    file = tmp_path / "bomb.yaml"
    file.write_text("x9: &x9 {a: *x9}" if how == "itself" else "\n".join(lines))
    with pytest.raises(InvalidUsage, match=r"bomb\.yaml: a document has more than 1,000,000 values"):
        read_documents([file])
    file.write_text("\n".join(lines[:4]) if how != "itself" else lines[0])
    assert read_documents([file])


@pytest.mark.parametrize("text", ["kind: A\nkind: B", "kind: A\nspec: {a: [{x: 1,\n  x: 1}]}"])
def test_a_key_that_is_named_twice_is_refused(tmp_path, text):
    """The last one won silently, and `kubectl apply` refuses such a document."""
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    with pytest.raises(InvalidUsage, match=r"twice\.yaml, line \d: (kind|x) is named twice; remove one of the two"):
        read_documents([file])
    file.write_text("a: &a {kind: A}\nb: {<<: *a, kind: B}\nc: {kind: *a}")
    assert read_documents([file])[0]["b"] == {"kind": "B"}


def test_documents_are_read_from_a_pipe(tmp_path):
    """As in `up -f <(kustomize build)`. The message said that there is no such file."""
    ours, theirs = os.pipe()
    os.write(theirs, b"kind: A")
    os.close(theirs)
    assert read_documents([Path(f"/dev/fd/{ours}")]) == [{"kind": "A"}]
    os.close(ours)


def test_documents_are_read_from_files_and_folders(house, tmp_path):
    folder = tmp_path / "yaml"
    folder.mkdir()
    with pytest.raises(InvalidUsage, match=r"no \*\.yaml or \*\.yml in"):
        read_documents([folder])
    (folder / "b.yml").write_text("kind: B\n---\n---\nkind: C\n")
    (folder / "a.yaml").write_text("kind: A\n")
    (folder / "c.txt").write_text("kind: D\n")
    assert [one["kind"] for one in read_documents([folder])] == ["A", "B", "C"]
    with pytest.raises(InvalidUsage, match="no such file or folder"):
        read_documents([tmp_path / "none"])
    (folder / "a.yaml").write_text("a: [")
    with pytest.raises(InvalidUsage, match=r"a\.yaml is not YAML"):
        read_documents([folder])
    (folder / "a.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidUsage, match=r"a\.yaml"):
        read_documents([folder])
    (folder / "empty.yaml").write_text("---\n")
    with pytest.raises(InvalidUsage, match="no resources in"):
        read_documents([folder / "empty.yaml"])


def test_one_runner_per_state_folder(tmp_path):
    with (
        runner_lock(tmp_path / "state"),
        pytest.raises(InvalidUsage, match=rf"process {os.getpid()}\) works in"),
        runner_lock(tmp_path / "state"),
    ):
        pass
    with runner_lock(tmp_path / "state"):
        pass


def test_a_state_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidUsage, match="cannot be written"), runner_lock(tmp_path / "file" / "state"):
        pass


# -- the machine ---------------------------------------------------------------------------------------------------------


def test_room_follows_cores_and_memory_of_the_machine():
    laptop = Room.of_machine(cores=2, memory_mib=7800)
    assert (laptop.drivers_max, laptop.maintenance_max) == (2, 2)
    assert Room.of_machine(cores=1, memory_mib=1000).drivers_max == 1
    assert Room.of_machine(cores=16, memory_mib=64_000).drivers_max == 16
    named = Room.of_machine(cores=2, memory_mib=7800, drivers_max=5)
    assert (named.drivers_max, named.memory_mib) == (5, None)


def test_drivers_run_side_by_side_while_their_memory_limits_fit():
    laptop = Room.of_machine(cores=2, memory_mib=7800)
    assert laptop.holds(3900, [3900])
    assert not laptop.holds(3901, [3900])
    assert not laptop.holds(1, [1, 1])  # at most one per core
    assert laptop.holds(20_000, [])  # a driver alone always fits
    assert Room.of_machine(cores=2, memory_mib=7800, drivers_max=3).holds(20_000, [20_000, 20_000])


def test_java_is_found_where_spark_finds_it(tmp_path):
    assert "none was found: install one" in java_problem({"PATH": str(tmp_path)})
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    assert f"JAVA_HOME is {tmp_path}" in java_problem({"JAVA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    java.touch(mode=0o755)
    assert java_problem({"JAVA_HOME": str(tmp_path), "PATH": ""}) is None
    assert java_problem({"PATH": str(java.parent)}) is None
