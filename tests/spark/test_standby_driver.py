"""Drivers of one stream as processes: one writes, one stands by, and either is killed with its Java."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, Settings, ShardId

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
CONF = (
    "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\nspark.log.level ERROR\n"
    "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
)
WAIT_S = 240


class Driver:
    """A driver's process. Its log is read as it comes."""

    def __init__(self, folder, spec, *, standby):
        folder.mkdir()
        self.promote, self.report = folder / "promoted", folder / "report.json"
        stream = {"commitIntervalSeconds": 1, "stopSeconds": 60, **({"standby": True} if standby else {})}
        (folder / "sink.json").write_text(json.dumps({**spec, "run_id": folder.name, "stream": stream}))
        (folder / "spark-defaults.conf").write_text(CONF)
        arguments = ["driver", "--spec", str(folder / "sink.json"), "--report", str(self.report)]
        arguments += ["--properties", str(folder / "spark-defaults.conf"), "--promote", str(self.promote)]
        arguments += ["--progress", str(folder / "progress.json")]
        self.progress = folder / "progress.json"
        self.seen, self.heard = [], threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "persist_spark.main", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stderr:
            if line.startswith("{"):
                self._hear(json.loads(line))
        self._hear({"event": "end"})

    def _hear(self, event):
        with self.heard:
            self.seen.append(event)
            self.heard.notify_all()

    def until(self, name, count=1, **fields):
        def found():
            return [one for one in self.seen if one["event"] == name and fields.items() <= one.items()]

        with self.heard:
            self.heard.wait_for(lambda: len(found()) >= count or self.seen[-1:] == [{"event": "end"}], WAIT_S)
            assert len(found()) >= count, self.seen[-5:]

    def more(self, name, count):
        """Waits until the event has come so often more than now."""
        self.until(name, sum(one["event"] == name for one in self.seen) + count)

    def shown(self, stage):
        """Waits until the driver reports this stage."""
        deadline = time.monotonic() + WAIT_S
        while json.loads(self.progress.read_text())["stage"] != stage:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self):
        """Its exit code."""
        return self.process.wait(timeout=WAIT_S)

    def stopped(self):
        self.process.terminate()
        return self.ended()


class Place:
    def __init__(self, folder):
        self.folder, self.drivers = folder, []
        location = {"blob": f"file://{folder}/blobs", "consensus": f"sqlite://{folder}/consensus.db"}
        self.shard, self.client = (
            ShardId.new(),
            PersistClient.open(Location(**location), settings=Settings(retain_ms=None)),
        )
        self.client.initialise(self.shard, Schema.from_ddl("id BIGINT", "n BIGINT"))
        sql = "select value as id, value % 7 as n from input"
        rate = {"name": "rate-micro-batch", "options": {"rowsPerBatch": "10", "numPartitions": "1"}, "sql": sql}
        self.spec = {
            "sink_id": "ns/s",
            "shard_id": self.shard,
            "schema": {"key": "id BIGINT", "value": "n BIGINT"},
            "location": location,
            "input": {"type": "Format", "format": rate},
            "envelope": {"type": "Append"},
            "write": {"parallelism": 1},
        }

    def start(self, *, standby=False):
        driver = Driver(self.folder / f"u-{len(self.drivers) + 1}", self.spec, standby=standby)
        self.drivers.append(driver)
        return driver

    def check(self):
        """Every number once, from 0 on, in whole batches. Returns how many."""
        upper = self.client.recent_upper(self.shard).time
        with self.client.open_leased_reader(self.shard, purpose="test") as reader:
            rows = reader.snapshot(Antichain.of(upper - 1)).to_table().to_pylist()
        found = Counter({(row["key"]["id"], row["val"]["n"]): row["diff"] for row in rows})
        assert len(found) % 10 == 0
        assert found == Counter((id_, id_ % 7) for id_ in range(len(found)))
        return len(found)


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for driver in made.drivers:
        if driver.process.poll() is None:
            driver.kill()
    made.client.close()


def test_a_driver_on_standby_takes_the_place_of_one_that_was_killed(place):
    blue = place.start()
    blue.until("batch", 2)
    green = place.start(standby=True)
    green.until("followed", stage="Proven")
    blue.more("minted", 1)
    blue.kill()
    before = place.check()
    green.promote.touch()
    green.until("batch", 2)
    assert green.stopped() == 0
    report = json.loads(green.report.read_text())
    assert (report["outcome"], report["batches"] >= 2) == ("Stopped", True)
    assert place.check() >= before + 20


def test_a_driver_on_standby_that_is_killed_costs_nothing_before_its_takeover_nor_after_it(place):
    blue = place.start()
    blue.until("batch", 2)
    green = place.start(standby=True)
    green.until("followed", stage="Proven")
    green.kill()
    blue.more("batch", 2)

    second = place.start(standby=True)
    second.until("followed", stage="Proven")
    second.shown("Proven")
    second.promote.touch()
    second.until("taken_over")
    second.kill()
    assert blue.ended() == 71
    report = json.loads(blue.report.read_text())
    assert (report["class"], "of run u-3" in report["message"]) == ("Fenced", True)
    before = place.check()
    third = place.start()
    third.until("batch", 2)
    assert third.stopped() == 0
    assert place.check() >= before + 20
