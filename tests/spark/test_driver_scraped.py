"""A real Prometheus scrapes the driver of a stream: the queries of the dashboards about stores find what it does."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from persist_engine import Location, PersistClient, Schema, Settings, ShardId
from persist_kit.prometheus import prometheus_server

pytestmark = [pytest.mark.spark, pytest.mark.slow]
FLEET = Path(__file__).resolve().parents[2] / "charts/persist-operator/files/monitoring/dashboards/fleet.json"
CONF = (
    "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\nspark.log.level ERROR\n"
    "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
)
#: As the PodMonitor of the chart labels a driver.
LABELS = {"namespace": "team", "pod": "load-1", "instance": "10.0.0.9:9464", "sink": "load"}
WAIT_S = 240.0


@pytest.fixture
def spec(tmp_path):
    location = {"blob": f"file://{tmp_path}/blobs", "consensus": f"sqlite://{tmp_path}/consensus.db"}
    rate = {"name": "rate-micro-batch", "options": {"rowsPerBatch": "10", "numPartitions": "1"}}
    rate["sql"] = "select value as id, value % 7 as n from input"
    shard = ShardId.new()
    with PersistClient.open(Location(**location), settings=Settings(retain_ms=None)) as client:
        client.initialise(shard, Schema.from_ddl("id BIGINT", "n BIGINT"))
    return {
        "sink_id": "team/load",
        "run_id": "u-1",
        "shard_id": shard,
        "schema": {"key": "id BIGINT", "value": "n BIGINT"},
        "location": location,
        "input": {"type": "Format", "format": rate},
        "envelope": {"type": "Append"},
        "write": {"parallelism": 1},
        "stream": {"commitIntervalSeconds": 1, "stopSeconds": 60},
    }


@pytest.fixture
def driver(tmp_path, spec):
    (tmp_path / "sink.json").write_text(json.dumps(spec))
    (tmp_path / "spark-defaults.conf").write_text(CONF)
    command = [sys.executable, "-m", "persist_spark.main", "driver", "--spec", str(tmp_path / "sink.json")]
    command += ["--report", str(tmp_path / "report.json"), "--properties", str(tmp_path / "spark-defaults.conf")]
    with subprocess.Popen(
        [*command, "--metrics-port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def event(driver, name):
    """The next event of this name in the driver's log."""
    for line in driver.stderr:
        if line.startswith("{") and (found := json.loads(line))["event"] == name:
            return found
    return pytest.fail("the driver ended")


def queries_of_stores():
    """By panel, those of the row Stores."""
    panels, found, row = json.loads(FLEET.read_text())["panels"], {}, ""
    for panel in panels:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", ()) if row == "Stores" else ():
            found[f"{panel['title']}: {target['refId']}"] = target["expr"].replace("$__rate_interval", "10s")
    return found


def test_the_dashboards_see_what_a_driver_calls(driver, tmp_path):
    port = event(driver, "metrics")["port"]
    with prometheus_server({f"127.0.0.1:{port}": LABELS}) as prometheus:
        event(driver, "batch")
        reader = threading.Thread(target=driver.stderr.read, daemon=True)
        reader.start()  # a full pipe would stop the driver
        queries = queries_of_stores()
        errors = {name: text for name, text in queries.items() if name.startswith("Errors of both stores")}
        assert len(queries) - len(errors) >= 5
        calls = {name: text for name, text in queries.items() if name not in errors}
        assert prometheus.without_series(calls, within_s=WAIT_S) == {}
        for text in errors.values():
            assert prometheus.query(text) == [], "no call failed"
        commits = prometheus.query('persist_consensus_calls_total{verb="compare_and_set",outcome="ok"}')
        assert [one["metric"]["sink"] for one in commits] == ["load"]
        memory = prometheus.query("process_resident_memory_bytes")
        assert float(memory[0]["value"][1]) > 1 << 20
        driver.terminate()
        assert driver.wait(timeout=120) == 0
        reader.join()
    stores = json.loads((tmp_path / "report.json").read_text())["stores"]
    assert sum(stores["commits"]) >= int(commits[0]["value"][1]) > 0, "the report has what no scrape saw, too"
    assert not re.search("error", json.dumps(stores))
