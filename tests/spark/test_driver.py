"""The driver as the operator starts it, configured by spark-defaults.conf. Tests check exit code and report."""

import json
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_kit.servers import redis_server, s3_server
from persist_spark import sink
from persist_spark.main import main
from pyspark.sql import SparkSession
from redis import Redis

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def arguments(folder: Path, spec: dict) -> list[str]:
    """The driver's arguments for `spec`. Its report goes to `report.json`."""
    (folder / "sink.json").write_text(json.dumps(spec))
    return ["driver", "--spec", str(folder / "sink.json"), "--report", str(folder / "report.json")]


def process(folder: Path, spec: dict, more: str = "", given: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A driver in a process of its own, with `more` lines of configuration and the arguments `given`."""
    (folder / "spark-defaults.conf").write_text(
        "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\n"
        f"spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n{more}"
    )
    # The shared session's arguments are in the environment; the file wins.
    properties = ["--properties", str(folder / "spark-defaults.conf")]
    command = [sys.executable, "-m", "persist_spark.main", *arguments(folder, spec), *properties, *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def run(folder: Path, spec: dict) -> tuple[int, dict, list[dict]]:
    """Exit code, report, log lines of a process of its own."""
    ended = process(folder, spec)
    written = json.loads((folder / "report.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == written
    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    return ended.returncode, written, lines


@pytest.fixture
def spec(tmp_path) -> dict:
    location = {"blob": f"file://{tmp_path}/blobs", "consensus": f"sqlite://{tmp_path}/consensus.db"}
    shard = ShardId.new()
    with PersistClient.open(Location(**location)) as client:
        client.initialise(shard, Schema.from_ddl("id BIGINT", "name STRING"))
    (tmp_path / "in.csv").write_text("id,name\n1,a\n2,b\n")
    options = {"path": f"{tmp_path}/in.csv", "header": "true", "mode": "FAILFAST", "api.token": "hunter2"}
    return {
        "sink_id": "ns/s",
        "run_id": "u-1",
        "shard_id": shard,
        "schema": {"key": "id BIGINT", "value": "name STRING"},
        "location": location,
        "input": {"type": "Format", "format": {"name": "csv", "schema": "id BIGINT, name STRING", "options": options}},
        "envelope": {"type": "Mirror"},
        "write": {"parallelism": 2},
    }


def test_a_successful_run_logs_each_step_and_writes_a_report(tmp_path, spec):
    code, report, lines = run(tmp_path, spec)
    assert code == 0
    assert (report["outcome"], report["rows_read"], report["updates_written"]) == ("Succeeded", 2, 2)
    assert (report["type"], report["class"], report["run_id"], report["executors"]) == ("Sink", None, "u-1", 1)
    events = [line["event"] for line in lines if line["event"] != "stage"]
    assert events == ["starting", "minted", "staged", "appended"]
    stores = report["stores"]
    assert sum(stores["commits"]) == stores["consensus"]["compare_and_set"]["ok"] > 0, "what the driver called itself"
    assert all(line["shard"] == spec["shard_id"] for line in lines)
    with (
        PersistClient.open(Location(**spec["location"])) as client,
        client.open_leased_reader(spec["shard_id"], purpose="test") as reader,
    ):
        table = reader.snapshot(Antichain.of(report["upper"] - 1)).to_table()
    assert [row["id"] for row in table.column("key").to_pylist()] == [1, 2]


def test_a_broken_input_is_a_configuration_failure_without_secrets(tmp_path, spec, local_spark, monkeypatch, capsys):
    """In this process and in the shared session, which the driver must not stop."""
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    spec["input"]["format"]["options"]["path"] = f"{tmp_path}/hunter2/none.csv"
    assert main(arguments(tmp_path, spec)) == 72
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["outcome"], report["class"]) == ("Failed", "Configuration")
    assert "PATH_NOT_FOUND" in report["message"]
    out, err = capsys.readouterr()
    assert json.loads(out) == report
    assert "hunter2" not in json.dumps(report) + err


class StopsAsItSends:
    """A socket. SIGTERM arrives while it sends."""

    def __init__(self, sends: Any) -> None:
        self._sends = sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sends, name)

    def sendall(self, data: bytes) -> None:
        signal.raise_signal(signal.SIGTERM)
        self._sends.sendall(data)


class StopsAsItEnds:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def stop_within_a_call(thread: int) -> None:
    """Sends SIGTERM to the thread once it is in a call of the JVM."""
    while not any("py4j" in frame.filename for frame in traceback.extract_stack(sys._current_frames()[thread])):
        pass
    signal.pthread_kill(thread, signal.SIGTERM)


@pytest.mark.parametrize("when", ["within a call", "as a call is sent", "as an object ends"])
def test_a_stop_is_never_lost(tmp_path, spec, local_spark, monkeypatch, capsys, when):
    """py4j took the exception for an error of its connection: the report had Py4JError, or py4j sent the call again and the run went on.
    Python drops the exceptions of a finalizer. In this process, as above.
    """
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    this_thread = threading.get_ident()

    def waits(spark: SparkSession, *_: Any, **__: Any) -> None:
        sleep = spark._jvm.java.lang.Thread.sleep
        match when:
            case "within a call":
                threading.Thread(target=stop_within_a_call, args=(this_thread,)).start()
            case "as a call is sent":
                connection = spark._jvm._gateway_client.get_thread_connection()
                connection.socket = StopsAsItSends(connection.socket)
            case _:
                StopsAsItEnds()
        sleep(60_000)

    monkeypatch.setattr(sink, "run_sink", waits)
    assert main(arguments(tmp_path, spec)) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["outcome"], report["class"]) == ("Failed", "Application")
    assert report["message"] == "Terminated: stopped by SIGTERM; the run was not finished"
    assert local_spark.range(3).count() == 3, "the next call gets its own answer"
    capsys.readouterr()


def test_a_function_that_drops_a_stop_does_not_keep_it_from_the_run(tmp_path, spec, local_spark, monkeypatch, capsys):
    """The run went on, and appended. In this process, as above."""
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "drops_a_stop.py").write_text(
        "import signal\n\ndef load(spark, arguments):\n    try:\n        signal.raise_signal(signal.SIGTERM)\n    except:\n"
        "        pass\n    return spark.range(1).selectExpr('id', 'cast(id as string) name')\n"
    )
    spec["input"] = {"type": "Python", "python": {"module": "drops_a_stop", "configMapName": "code"}}
    assert main([*arguments(tmp_path, spec), "--code", str(tmp_path / "code")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["message"] == "Terminated: stopped by SIGTERM; the run was not finished"
    with PersistClient.open(Location(**spec["location"])) as client:
        assert client.recent_upper(spec["shard_id"]).time == 0
    capsys.readouterr()


def test_a_function_that_shows_its_secret_arguments_shows_nothing(tmp_path, spec):
    """Prints, an exception, its line in the log, and a failure of one of its tasks."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "orders.py").write_text(
        "import sys\nfrom pyspark.sql import functions as F\n\n"
        "def load(spark, arguments):\n    password = arguments['password']\n    print('printed', password)\n"
        "    print('printed', password, file=sys.stderr)\n    def bad(number):\n        raise ValueError(f'on an executor {password}')\n"
        "    if arguments['where'] == 'task':\n"
        "        return spark.range(1).select('id', F.udf(bad, 'string')('id').alias('name'))\n"
        "    raise ValueError(f'login refused for {password}')\n"
    )
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "password").write_text("hunter2-function")
    given = ("--options", str(tmp_path / "secret"), "--code", str(tmp_path / "code"))
    for where, line in (
        ("driver", "in orders.py, line 12: ValueError: login refused for ***"),
        ("task", "on an executor ***"),
    ):
        python = {
            "module": "orders",
            "configMapName": "code",
            "optionsSecretName": "login",
            "arguments": {"where": where},
        }
        spec["input"] = {"type": "Python", "python": python}
        ended = process(tmp_path, spec, given=given)
        report = json.loads((tmp_path / "report.json").read_text())
        assert (ended.returncode, report["class"]) == (1, "Application")
        assert line in report["message"]
        assert "printed ***" in ended.stdout
        assert "printed ***" in ended.stderr
        assert "hunter2" not in ended.stdout + ended.stderr + json.dumps(report)


@pytest.mark.parametrize("column", ["name", "nonsuch"])
def test_nothing_that_a_run_leaves_behind_shows_a_secret(tmp_path, spec, column):
    """Reports, logs, Spark's event log (all that its web interface shows: plans, settings, names of jobs), blobs and the shard's log; of
    a run that succeeds and of one that fails.
    """
    words = ("redis", "option", "jaas", "hadoop", "mounted", "login")
    secrets = [f"hunter{index}-{word}" for index, word in enumerate(words, 1)]
    in_redis, in_option, in_jaas, in_hadoop, in_mounted, in_login = secrets
    with redis_server(password=in_redis) as redis, s3_server() as s3:
        secrets.append(s3.secret_key)
        keys = f"[default]\naws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
        for name, text in (("aws-credentials", keys), ("redis-password", in_redis)):
            (tmp_path / name).write_text(text)
        spec["location"] = {
            "blob": f"{s3.location('sinks')}&credentials_dir={tmp_path}",
            "consensus": f"redis://{redis.address}/0?credentials_dir={tmp_path}",
        }
        with PersistClient.open(Location(**spec["location"])) as client:
            client.initialise(spec["shard_id"], Schema.from_ddl("id BIGINT", "name STRING"))
        spec["envelope"] = {"type": "Upsert"}
        spec["input"]["format"] |= {"sql": f"select id, {column} as name from input"}
        jaas = f'org.apache.kafka.LoginModule required username="u" password="{in_jaas}";'
        spec["input"]["format"]["options"] |= {"password": in_option, "kafka.sasl.jaas.config": jaas}
        (tmp_path / "events").mkdir()
        mounted = {
            "sasl.jaas.config": jaas.replace(in_jaas, in_login),
            "comment-of-mine": in_mounted,
            "timeZone": "UTC",
        }
        spec["input"]["format"]["optionsSecretName"] = "mounted"
        (tmp_path / "mounted").mkdir()
        for name, text in mounted.items():
            (tmp_path / "mounted" / name).write_text(text)
        ended = process(
            tmp_path,
            spec,
            f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir {tmp_path.as_uri()}/events\n"
            f"spark.hadoop.fs.s3a.secret.key {in_hadoop}\nspark.shown plainly\n",
            ("--options", str(tmp_path / "mounted"), "--progress", str(tmp_path / "progress.json")),
        )
        report = json.loads(ended.stdout.splitlines()[-1])
        assert (report["outcome"], column in report["message"]) == (
            ("Succeeded", False) if column == "name" else ("Failed", True)
        )
        logged = [path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file()]
        blobs = [path.read_bytes() for path in s3.object_path("sinks").rglob("*") if path.is_file()]
        log = Redis.from_url(redis.url, password=in_redis)
        log.config_set("rdbcompression", "no")
        entries = [log.dump(key) for key in log.keys("*")]
        assert any(spec["shard_id"].encode() in key for key in log.keys("*"))
        files = [path.read_bytes() for path in (tmp_path / "report.json", tmp_path / "progress.json") if path.exists()]
        left = [ended.stdout.encode(), ended.stderr.encode(), *files, *logged, *blobs, *entries]
        assert [b"".join(logged).count(text) > 0 for text in (b"plainly", b"SparkListenerApplicationEnd")] == [True] * 2
        assert [secret for secret in secrets if any(secret.encode() in one for one in left)] == []
