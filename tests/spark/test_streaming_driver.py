"""The driver of a stream as a process: killed with its Java, stopped by SIGTERM, and asked to stop."""

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, Settings, ShardId

pytestmark = [pytest.mark.spark, pytest.mark.slow]
CONF = (
    "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\nspark.log.level ERROR\n"
    "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
)


@pytest.fixture
def spec(tmp_path):
    """Ten rows a second, the same ones after each start."""
    location = {"blob": f"file://{tmp_path}/blobs", "consensus": f"sqlite://{tmp_path}/consensus.db"}
    sql = "select value as id, value % 7 as n from input"
    rate = {"name": "rate-micro-batch", "options": {"rowsPerBatch": "10", "numPartitions": "1"}, "sql": sql}
    return {
        "sink_id": "ns/s",
        "run_id": "u-1",
        "shard_id": ShardId.new(),
        "schema": {"key": "id BIGINT", "value": "n BIGINT"},
        "location": location,
        "input": {"type": "Format", "format": rate},
        "envelope": {"type": "Append"},
        "write": {"parallelism": 1},
        "stream": {"commitIntervalSeconds": 1, "stopSeconds": 60},
    }


TOKEN = "a5" * 32


def start(folder, spec, *given):
    (folder / "sink.json").write_text(json.dumps(spec))
    (folder / "spark-defaults.conf").write_text(CONF)
    arguments = ["driver", "--spec", str(folder / "sink.json"), "--report", str(folder / "report.json")]
    arguments += ["--properties", str(folder / "spark-defaults.conf")]
    return subprocess.Popen(
        [sys.executable, "-m", "persist_spark.main", *arguments, *given],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def until(driver, event, count):
    """Reads the driver's log up to the event that is logged for the n-th time, and returns that event."""
    for line in driver.stderr:
        if line.startswith("{") and (found := json.loads(line))["event"] == event:
            count -= 1
            if count == 0:
                return found
    return pytest.fail("the driver ended")


def ask(port, token):
    """The code of the answer to the request to stop."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/stop", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status


def ended(driver, *, within_s=120):
    """The exit code, and the rest of the log."""
    try:
        _, log = driver.communicate(timeout=within_s)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    return driver.returncode, log


def stored(client, shard_id):
    """How often the shard has each row."""
    upper = client.recent_upper(shard_id).time
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        rows = reader.snapshot(Antichain.of(upper - 1)).to_table().to_pylist()
    return Counter({(row["key"]["id"], row["val"]["n"]): row["diff"] for row in rows})


def test_a_driver_that_is_asked_to_stop_commits_its_batch_and_ends_well(tmp_path, spec):
    """The listener is there before Spark. Requests without the token, clients that send nothing, and a repeated request change nothing."""
    given = ("--stop-port", "0", "--stop-digest", hashlib.sha256(TOKEN.encode()).hexdigest())
    with PersistClient.open(Location(**spec["location"]), settings=Settings(retain_ms=None)) as client:
        client.initialise(spec["shard_id"], Schema.from_ddl("id BIGINT", "n BIGINT"))
        driver = start(tmp_path, spec, *given)
        try:
            port = until(driver, "stop_served", 1)["port"]
            assert ask(port, "0" * 64) == 401
            silent = socket.create_connection(("127.0.0.1", port))
            until(driver, "minted", 2)  # in the middle of a batch
            assert ask(port, TOKEN) == 202
            with contextlib.suppress(OSError):
                assert ask(port, TOKEN) == 202
        finally:
            code, log = ended(driver)
        silent.close()
        assert code == 0
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["outcome"], report["batches"], report["class"]) == ("Stopped", 2, None)
        assert TOKEN not in log
        assert stored(client, spec["shard_id"]) == Counter((id_, id_ % 7) for id_ in range(20))
        assert client.inspect(spec["shard_id"]).writers == ()


def test_a_run_that_is_asked_to_stop_ends_as_with_sigterm(tmp_path, spec):
    """A run over a batch source cannot end halfway: it appends nothing, and fails without a fault of its own."""
    del spec["stream"]
    options = {"path": f"{tmp_path}/in.csv"}
    sql = "select id, length(java_method('java.lang.Thread', 'sleep', n)) as n from input"
    spec["input"]["format"] = {"name": "csv", "schema": "id BIGINT, n BIGINT", "options": options, "sql": sql}
    (tmp_path / "in.csv").write_text("1,30000\n")
    given = ("--stop-port", "0", "--stop-digest", hashlib.sha256(TOKEN.encode()).hexdigest())
    with PersistClient.open(Location(**spec["location"]), settings=Settings(retain_ms=None)) as client:
        client.initialise(spec["shard_id"], Schema.from_ddl("id BIGINT", "n BIGINT"))
        driver = start(tmp_path, spec, *given)
        try:
            port = until(driver, "stop_served", 1)["port"]
            until(driver, "minted", 1)
            assert ask(port, TOKEN) == 202
        finally:
            code, _ = ended(driver)
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["outcome"], report["class"]) == ("Failed", "Application")
        assert code == 1
        assert client.recent_upper(spec["shard_id"]).time == 0


def test_a_killed_driver_is_followed_by_one_that_ends_when_it_is_asked_to(tmp_path, spec):
    settings = Settings(retain_ms=None)
    with PersistClient.open(Location(**spec["location"]), settings=settings) as client:
        client.initialise(spec["shard_id"], Schema.from_ddl("id BIGINT", "n BIGINT"))
        driver = start(tmp_path, spec)
        try:
            until(driver, "staged", 2)
            os.killpg(driver.pid, signal.SIGKILL)  # about when it commits
            driver.wait()
            driver = start(tmp_path, spec)
            until(driver, "minted", 2)  # in the middle of a batch
            driver.terminate()
        finally:
            code, _ = ended(driver)
        assert code == 0
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["outcome"], report["batches"], report["class"]) == ("Stopped", 2, None)
        found = stored(client, spec["shard_id"])
    assert len(found) in (30, 40)
    assert found == Counter((id_, id_ % 7) for id_ in range(len(found)))
