"""The driver as the operator starts it, configured by spark-defaults.conf. Tests check exit code and report."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_spark.main import main
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def arguments(folder: Path, spec: dict) -> list[str]:
    """The driver's arguments for `spec`. Its report goes to `report.json`."""
    (folder / "sink.json").write_text(json.dumps(spec))
    return ["driver", "--spec", str(folder / "sink.json"), "--report", str(folder / "report.json")]


def run(folder: Path, spec: dict) -> tuple[int, dict, list[dict]]:
    """Exit code, report, log lines of a process of its own."""
    (folder / "spark-defaults.conf").write_text(
        "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\n"
        "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    )
    # The shared session's arguments are in the environment; the file wins.
    properties = ["--properties", str(folder / "spark-defaults.conf")]
    command = [sys.executable, "-m", "persist_spark.main", *arguments(folder, spec), *properties]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    written = json.loads((folder / "report.json").read_text())
    assert json.loads(process.stdout.splitlines()[-1]) == written
    lines = [json.loads(line) for line in process.stderr.splitlines() if line.startswith("{")]
    return process.returncode, written, lines


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
    handler = signal.getsignal(signal.SIGTERM)
    spec["input"]["format"]["options"]["path"] = f"{tmp_path}/hunter2/none.csv"
    try:
        assert main(arguments(tmp_path, spec)) == 72
    finally:
        signal.signal(signal.SIGTERM, handler)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["outcome"], report["class"]) == ("Failed", "Configuration")
    assert "PATH_NOT_FOUND" in report["message"]
    out, err = capsys.readouterr()
    assert json.loads(out) == report
    assert "hunter2" not in json.dumps(report) + err
