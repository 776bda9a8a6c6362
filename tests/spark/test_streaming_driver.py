"""The driver of a stream as a process: killed with its Java, and stopped by SIGTERM."""

import json
import os
import signal
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


def start(folder, spec):
    (folder / "sink.json").write_text(json.dumps(spec))
    (folder / "spark-defaults.conf").write_text(CONF)
    arguments = ["driver", "--spec", str(folder / "sink.json"), "--report", str(folder / "report.json")]
    arguments += ["--properties", str(folder / "spark-defaults.conf")]
    return subprocess.Popen(
        [sys.executable, "-m", "persist_spark.main", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def until(driver, event, count):
    """Reads the driver's log up to the event that is logged for the n-th time."""
    for line in driver.stderr:
        count -= line.startswith("{") and json.loads(line)["event"] == event
        if count == 0:
            return
    pytest.fail("the driver ended")


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
            _, _ = driver.communicate(timeout=120)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
        assert driver.returncode == 0
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["outcome"], report["batches"], report["class"]) == ("Stopped", 2, None)
        upper = client.recent_upper(spec["shard_id"]).time
        with client.open_leased_reader(spec["shard_id"], purpose="test") as reader:
            rows = reader.snapshot(Antichain.of(upper - 1)).to_table().to_pylist()
    found = Counter({(row["key"]["id"], row["val"]["n"]): row["diff"] for row in rows})
    assert len(found) in (30, 40)
    assert found == Counter((id_, id_ % 7) for id_ in range(len(found)))
