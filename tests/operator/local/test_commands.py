"""The command line: output and exit codes, for a terminal and for programs."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_kit.servers import redis_server
from persist_operator.local.commands import REQUESTS, app
from typer.testing import CliRunner


def in_process(house, *arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--state", str(house.state)])


@pytest.fixture
def done(house):
    """A state folder in which a sink has run."""
    assert house.run(house.shard(), house.sink()) == []
    return house


@pytest.mark.slow
def test_up_applies_runs_and_shows_the_tables(house):
    file = house.write(house.shard(), house.sink())
    result = house.local("up", "-f", file)
    assert "persistshard/things created\nsparksink/load created\n" in result.stderr
    assert re.search(
        r"^ +\d+s  DriverStarted  SparkSink/load: load-\w{8}-1: run 1, attempt 1$", result.stderr, re.MULTILINE
    )
    assert re.search(r"^ +\d+s  RunSucceeded  SparkSink/load: ", result.stderr, re.MULTILINE)
    assert re.search(r"^things +True +Healthy", result.stdout, re.MULTILINE)
    assert re.search(r"^load +things +Once +True +Completed", result.stdout, re.MULTILINE)
    assert "\x1b" not in result.stdout + result.stderr
    again = house.local("up", "-f", file)
    assert "sparksink/load unchanged" in again.stderr
    assert "DriverStarted" not in again.stderr
    assert house.rows() == 1


def test_names_that_no_resource_has_are_refused_without_what_a_terminal_obeys(house):
    for name in ("a" * 300, "../../a", "a\x1b[31mred", "a\0b"):
        result = house.local("up", "-f", house.write(house.shard(name)), code=64)
        assert "metadata.name must be at most 40 lower-case letters" in result.stderr
        assert "\x1b" not in result.stderr


@pytest.mark.parametrize("value", ["2013-13-45", "9" * 5000, "[" * 20_000])
def test_a_file_with_a_value_that_yaml_cannot_hold_is_refused_by_its_name(house, value):
    file = house.folder / "bad.yaml"
    file.write_text(f"kind: {value}\n")
    assert "bad.yaml is not YAML: " in house.local("up", "-f", file, code=64).stderr


@pytest.mark.parametrize("kind", [[], {"a": 1}, 7, None])
def test_a_kind_that_is_no_text_is_refused(house, kind):
    result = house.local("up", "-f", house.write(house.shard() | {"kind": kind}), code=64)
    assert f"kind: must be one of PersistShard, SparkSink, not {kind!r}" in result.stderr


def test_a_refusal_shows_no_password_of_an_address_in_the_wrong_place(house):
    storage = {"blob": "s3://b/p", "consensus": "redis://:hunter2@h:1/0"}
    document = house.shard()
    document["spec"]["storage"] = storage
    result = house.local("up", "-f", house.write(document), code=64)
    assert "spec.storage.consensus: 'redis://" in result.stderr
    assert "hunter2" not in result.stderr


@pytest.mark.slow
def test_up_with_stores_that_ask_for_a_password(house):
    """The password is in a file, as in a mounted Secret. Runner, driver and maintenance read it there, and no output shows it."""
    password, keys = "p@ss/word", house.folder / "keys" / "default"
    keys.mkdir(parents=True)
    (keys / "redis-password").write_text(password)
    file = house.write(house.shard(compaction={"maxUncompactedBatches": 1}), house.sink())
    with redis_server(password=password) as server:
        profile = {
            "blob": f"file://{house.folder}/blobs",
            "consensus": f"redis://127.0.0.1:{server.port}/0",
            "secretName": "store",
            "allowedNamespaces": {"names": ["local"]},
        }
        config = house.folder / "config.yaml"
        config.write_text(json.dumps({"operatorId": "local", "storageProfiles": {"default": profile}}))
        result = house.local("up", "-f", file, "--config", config, "--credentials", "keys")
        requested = house.local("request", "rollup", "things")
        again = house.local("up", "-f", file, "--config", config, "--credentials", "keys")
    assert re.search(r"^load +things +Once +True +Completed", result.stdout, re.MULTILINE)
    assert "RollupSucceeded" in again.stderr or "GCSucceeded" in again.stderr
    shown = result.stdout + result.stderr + requested.stdout + again.stdout + again.stderr
    kept = [path.read_text(errors="replace") for path in house.state.rglob("*") if path.is_file()]
    assert not [text for text in (shown, *kept) if password in text or "p%40ss" in text]


@pytest.mark.slow
def test_the_options_of_an_input_come_from_a_folder_with_the_name_of_their_secret(house):
    (house.folder / "keys" / "orders-db").mkdir(parents=True)
    (house.folder / "keys" / "orders-db" / "password").write_text("hunter2-local")
    options = {"path": str(house.control)}
    source = {"type": "Format", "format": {"name": "parquet", "options": options, "optionsSecretName": "orders-db"}}
    result = house.local("up", "-f", house.write(house.shard(), house.sink(input=source)), "--credentials", "keys")
    assert (house.control / "options").read_text() == "lacol-2retnuh"
    kept = [path.read_text(errors="replace") for path in house.state.rglob("*") if path.is_file()]
    assert not [text for text in (result.stdout + result.stderr, *kept) if "hunter2" in text]


@pytest.mark.slow
def test_the_files_of_a_function_are_a_folder_with_the_name_of_their_config_map(house):
    python = {"module": "orders.recent", "configMapName": "orders-input"}
    file = house.write(house.shard(), house.sink(input={"type": "Python", "python": python}))
    refused = house.local("up", "-f", file, code=64).stderr
    assert "spec.input.python.configMapName: no such folder: orders-input (looked for from" in refused
    (house.folder / "orders-input").mkdir()
    refused = house.local("up", "-f", file, code=64).stderr
    assert "spec.input.python.module: no file orders.py in the folder orders-input; correct the module" in refused
    (house.folder / "orders-input" / "orders.py").touch()
    (house.control / "refuse").touch()
    house.local("up", "-f", file, code=1)
    assert (house.control / "code").read_text() == "orders.py"
    (house.control / "refuse").unlink()
    (house.folder / "orders-input" / "orders.py").write_text("mended = True")
    again = house.local("up", "-f", file)
    assert "sparksink/load failed, and its input changed since: it runs again" in again.stderr
    assert re.search(
        r"^Reads +orders.recent.load of ConfigMap orders-input",
        house.local("describe", "ssink", "load").stdout,
        re.MULTILINE,
    )


@pytest.mark.slow
def test_up_that_fails_names_the_resource_and_its_log(house):
    (house.control / "refuse").touch()
    result = house.local("up", "-f", house.write(house.shard(), house.sink()), code=1)
    assert f"error: SparkSink/load failed; see `persist local logs load --state {house.state}`" in result.stderr
    assert re.search(r"^load .*input is missing", result.stdout, re.MULTILINE)


def test_refused_resources_are_listed_and_nothing_is_applied(house):
    file = house.write(house.shard(), house.sink(nonsense=1), house.shard("B"))
    result = house.local("up", "-f", file, code=64)
    assert "refused: SparkSink/load: spec.nonsense: unknown field; known here:" in result.stderr
    assert "refused: PersistShard/B: " in result.stderr
    assert "nothing was applied: correct 2 errors in" in result.stderr
    assert not (house.state / "objects" / "PersistShard").exists()


@pytest.mark.slow
def test_up_without_java_names_java_home(house):
    house.environ = {**house.environ, "JAVA_HOME": str(house.folder)}
    result = house.local("up", "-f", house.write(house.shard(), house.sink()), code=64)
    assert f"JAVA_HOME is {house.folder}, which has no bin/java" in result.stderr
    assert house.objects.get("SparkSink", "load") is None
    house.local("up", "-f", house.write(house.shard()))  # shards need no Java


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "-f", "nowhere.yaml"], "no such file or folder: nowhere.yaml"),
        (["up", "-f", "."], "no *.yaml or *.yml in ."),
        (["get"], "start with `persist local up -f FILE`"),
        (["get", "pods"], "unknown kind 'pods'; use pshard, ssink, runs or all"),
        (["describe", "pshard", "none"], "no PersistShard called 'none'; there are: none"),
        (["describe", "pods", "x"], "unknown kind 'pods'; use pshard or ssink"),
        (["logs", "none"], "no run and no sink with runs called 'none'"),
        (["request", "gc", "none"], "no PersistShard called 'none'"),
        (
            ["request", "dance", "none"],
            "unknown request 'dance'; use rollup, compact, gc, verify, orphan-scan, accept-log, approve, restart",
        ),
        (["down"], "no state folder"),
    ],
)
def test_a_wrong_call_names_its_mistake(house, arguments, message, monkeypatch):
    monkeypatch.chdir(house.control)
    result = in_process(house, *arguments)
    assert isinstance(result.exception, InvalidUsage)
    assert message in str(result.exception)
    assert result.stdout == ""


def test_help_names_every_request(house):
    result = in_process(house, "request", "--help")
    words = re.sub(r"[\s│]+", " ", result.stdout)
    assert [verb for verb in REQUESTS if not re.search(rf"\b{verb}\b", words)] == []


def test_errors_as_json(house):
    result = house.local("get", "pods", "--json", code=64)
    assert json.loads(result.stdout)["exit_code"] == 64
    assert result.stderr == "error: InvalidArgument: unknown kind 'pods'; use pshard, ssink, runs or all\n"


@pytest.mark.slow
def test_regression_a_folder_whose_name_has_a_meaning_in_a_url(house, tmp_path):
    """The stores are at `#`, `?` and `%23` of the folder's name, not before them, and all commands find them there."""
    house = type(house)(tmp_path / "50%23 #1 ?x=y")
    house.local("up", "-f", house.write(house.shard(), house.sink()))
    assert (house.state / "store" / "consensus.db").is_file()
    assert house.rows() == 1
    assert "\nupdates\t1\n" in house.local("inspect", "things").stdout


def test_a_state_folder_that_cannot_be_written(house):
    house.state = house.write(house.shard()) / "state"
    result = in_process(house, "up", "-f", house.folder / "all.yaml")
    assert "cannot be written" in str(result.exception)


@pytest.mark.parametrize(
    "command", ["up", "run", "get", "describe", "logs", "request", "down", "read", "inspect", "admin"]
)
def test_every_command_has_help(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--state" in re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.mark.slow
def test_get_shows_resources_as_table_and_json(done):
    assert "Healthy" in in_process(done, "get", "pshard").output
    only = in_process(done, "get", "ssink", "load").output
    assert "Completed" in only
    assert "Healthy" not in only
    assert "no ssink called 'x'" in str(in_process(done, "get", "ssink", "x").exception)
    everything = json.loads(in_process(done, "get", "--json").output)
    assert [one["kind"] for one in everything["items"]] == ["PersistShard", "SparkSink"]
    assert "SHARD" in in_process(done, "get", "pshard", "--wide").output


@pytest.mark.slow
def test_get_runs_names_what_logs_takes(done):
    runs = json.loads(in_process(done, "get", "runs", "--json").output)["items"]
    assert {one["outcome"] for one in runs} == {"Succeeded"}
    for run in runs:
        assert in_process(done, "logs", run["name"]).exit_code == 0
        assert run["name"] in in_process(done, "get", "runs").output
    assert "the driver speaks" in in_process(done, "logs", "load").output
    assert in_process(done, "logs", "load", "--tail", "1").output.count("\n") == 1


@pytest.mark.slow
def test_describe_shows_a_sink_with_its_numbers(done):
    output = in_process(done, "describe", "ssink", "load").output
    assert "SparkSink/load is ready: Completed" in output
    assert "1 row read, 1 update written" in output
    shard = json.loads(in_process(done, "describe", "persistshards", "things", "--json").output)
    assert shard["metadata"]["name"] == "things"


@pytest.mark.slow
def test_a_request_is_carried_out_once(done):
    assert "gc requested" in in_process(done, "request", "gc", "things").output
    done.local("up", "-f", done.write(done.shard(), done.sink()))
    done.local("up", "-f", done.write(done.shard(), done.sink()))
    reasons = [one.get("reason", "") for one in done.status("PersistShard", "things")["history"]]
    assert len([one for one in reasons if one.startswith("requested by annotation")]) == 1


@pytest.mark.slow
def test_restart_runs_a_finished_sink_again(done):
    assert in_process(done, "request", "restart", "load").exit_code == 0
    assert done.run() == []
    assert (done.attempts(), done.rows()) == (2, 2)


@pytest.mark.slow
def test_down_stops_children_keeps_data_and_purges_on_demand(house, wait_until):
    (house.control / "hold").touch()
    file = house.write(house.shard(), house.sink())
    runner = subprocess.Popen(house.command("up", "-f", str(file)), env=house.environ, stderr=subprocess.DEVNULL)
    wait_until((house.control / "appended").exists, "the row is appended")
    busy = house.local("down", code=64)
    assert f"process {runner.pid}) works in" in busy.stderr
    runner.kill()
    runner.wait()
    assert "stopped load-" in house.local("down").stdout
    assert not [one for one in house.processes.every() if one.running]
    assert house.rows() == 1
    (house.state / "mine").touch()
    assert "nothing was running" in house.local("down", "--purge").stdout
    assert sorted(path.name for path in house.state.iterdir()) == ["lock", "mine"]


@pytest.mark.slow
def test_a_terminal_sees_progress_and_lines_that_fit(house):
    file = house.write(house.shard(), house.sink())
    ours, theirs = pty.openpty()
    environ = {**house.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "40"}
    runner = subprocess.Popen(
        house.command("up", "-f", str(file)), env=environ, stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        output += data
    os.close(ours)
    assert runner.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    assert "\x1b[" in output.decode()
    assert re.search(r"load-\w{8}-1 +sink +\d+s", text)
    table = text[text.rindex("NAME   SHARD") :]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 60


@pytest.mark.slow
def test_names_of_resources_and_runs_complete(done, tmp_path):
    """The shell got no names for any command of the local runner."""

    def completed(*words, state=done.state):
        line = ["persist", "local", *words, ""]
        asked = {"_PERSIST_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
        environ = os.environ | asked | {"PERSIST_LOCAL_STATE": str(state)}
        command = [sys.executable, "-m", "persist_engine.cli"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()

    assert completed("run") == ["load"]
    assert completed("describe", "pshard") == ["things"]
    assert completed("delete", "ssink") == ["load"]
    assert completed("get", "all") == ["load", "things"]
    assert completed("get") == ["pshard", "ssink", "runs", "all"]
    assert set(completed("request")) == set(REQUESTS)
    assert completed("read") == completed("read", "--limit", "5") == completed("admin", "verify") == ["things"]
    assert {"things", "shard", "batches"} <= set(completed("inspect"))
    assert "verify" in completed("admin", "things")
    assert completed("read", state=tmp_path / "none") == []
    assert completed("request", "restart") == ["load", "things"]
    (sink, run, *_) = completed("logs")
    assert (sink, run[:5]) == ("load", "load-")
    assert completed("run", state=tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    (done.state / "objects" / "SparkSink" / "load.json").unlink()
    (
        done.state / "objects" / "SparkSink" / "load.json"
    ).mkdir()  # a file that this user cannot read, even if it is root
    assert completed("run") == []
