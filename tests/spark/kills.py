"""Kills the drivers and the executors of two Streaming sinks at random points, and compares what the shards hold with what the source gave
(`make kills KILLS=200`).

Each driver is a real process with executors in processes of their own (`local-cluster`), killed by SIGKILL. Each next driver begins with an
empty disk: the checkpoint of the killed one is deleted. The source gives the same rows for the same offsets, so the contents follow from
the number of rows that were read.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persist_engine import Antichain, Location, PersistClient, Schema, Settings, ShardId

ROWS_PER_BATCH, KEYS = 100, 150
#: A driver that logs nothing for so long hangs.
SILENCE_S = 300.0
CONF = (
    "spark.master local-cluster[2,1,600]\nspark.executor.memory 600m\nspark.executor.cores 1\nspark.ui.enabled false\n"
    "spark.driver.memory 700m\nspark.log.level ERROR\nspark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    "spark.sql.shuffle.partitions 2\nspark.worker.cleanup.enabled true\n"
)
#: By envelope: the SQL over the source's `value`, and the contents after so many rows.
SQL = {
    "Append": "select value as id, value % 7 as n from input",
    "Upsert": f"select value % {KEYS} as id, value as n from input",
}


def expected(envelope: str, rows: int) -> Counter[tuple[int, int]]:
    """The contents after the first `rows` rows of the source."""
    if envelope == "Append":
        return Counter((id_, id_ % 7) for id_ in range(rows))
    return Counter((id_, max(range(id_, rows, KEYS))) for id_ in range(min(KEYS, rows)))


class Driver:
    """A driver under way. Reads its log in a thread."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        (folder / "sink.json").write_text(json.dumps(spec))
        (folder / "spark-defaults.conf").write_text(CONF)
        command = [sys.executable, "-m", "persist_spark.main", "driver", "--spec", str(folder / "sink.json")]
        command += ["--report", str(folder / "report.json"), "--properties", str(folder / "spark-defaults.conf")]
        self.disk = Path(tempfile.mkdtemp(prefix="disk-", dir=folder))
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            cwd=self.disk,
            env={**os.environ, "SPARK_LOCAL_DIRS": str(self.disk), "SPARK_WORKER_DIR": str(self.disk)},
        )
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.tail: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.tail = [*self.tail[-40:], line]
            if line.startswith("{"):
                with suppress(ValueError):
                    self.lines.put(json.loads(line))
        self.lines.put(None)

    def event(self) -> str | None:
        """The next event of the log; None after the end of the driver."""
        line = self.lines.get(timeout=SILENCE_S)
        return None if line is None else str(line["event"])

    def executors(self) -> list[int]:
        """The processes of its executors that run, Java and Python."""
        listed = subprocess.run(["ps", "-eo", "pid,sid,args"], capture_output=True, text=True, check=True).stdout
        found = [line.split(None, 2) for line in listed.splitlines()[1:]]
        own = [(int(pid), args) for pid, sid, args in found if int(sid) == self.process.pid]
        return [pid for pid, args in own if "CoarseGrainedExecutorBackend" in args or "pyspark.daemon" in args]

    def kill(self) -> None:
        """Kills the driver with all its processes, and deletes its disk."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.disk, ignore_errors=True)
        for checkpoint in Path("/dev/shm").glob(f"persist-stream-{self.process.pid}-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)


@dataclass
class Campaign:
    """The kills of one sink."""

    envelope: str
    folder: Path
    seed: int
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.shard = ShardId.new()
        self.location = {"blob": f"file://{self.folder}/blobs", "consensus": f"sqlite://{self.folder}/consensus.db"}
        with self._client() as client:
            client.initialise(self.shard, Schema.from_ddl("id BIGINT", "n BIGINT"))

    def run(self, kills: int) -> int:
        """Kills so many times, lets the last driver end, and returns the number of rows that the sink read. AssertionError when the
        contents are not those of these rows; also in between.
        """
        while sum(self.kills.values()) < kills:
            self._one_driver(kills)
            rows, done = self.check(), sum(self.kills.values())
            print(f"{self.envelope}: {done} of {kills} kills, {rows} rows are right", file=sys.stderr, flush=True)
        driver = Driver(self.folder, self._spec())
        try:
            self._until(driver, {"batch"}, self.random.randrange(1, 4))
            driver.process.send_signal(signal.SIGTERM)
            assert driver.process.wait(timeout=SILENCE_S) == 0, "".join(driver.tail)
        finally:
            driver.kill()
        return self.check()

    def _one_driver(self, kills: int) -> None:
        """One driver from its start to its death, and the deaths of some of its executors."""
        driver = Driver(self.folder, self._spec())
        try:
            if not self._until(driver, {"position", "batch"}, 1):
                self.kills["driver ended by itself"] += 1
                return
            while sum(self.kills.values()) < kills:
                # Any event: between them lie the reading, the staging, and the commit of a batch.
                if not self._until(driver, None, self.random.randrange(1, 9)):
                    self.kills["driver ended after the loss of executors"] += 1
                    return
                threading.Event().wait(self.random.uniform(0, 0.2))
                if self.random.random() < 0.5 or not (running := driver.executors()):
                    self.kills["driver"] += 1
                    return
                with suppress(ProcessLookupError):
                    os.kill(self.random.choice(running), signal.SIGKILL)
                self.kills["executor"] += 1
        finally:
            driver.kill()

    def _until(self, driver: Driver, names: set[str] | None, count: int) -> bool:
        """Waits for so many events of these names (None: of any). False when the driver ends first."""
        while count > 0:
            event = driver.event()
            if event is None:
                return False
            count -= names is None or event in names
        return True

    def check(self) -> int:
        """Compares the contents with the source. Returns the rows that were read."""
        with self._client() as client:
            upper = client.recent_upper(self.shard).time
            if not upper:
                return 0
            with client.open_leased_reader(self.shard, purpose="check") as reader:
                rows = reader.snapshot(Antichain.of(upper - 1)).to_table()
            position = client.progress(self.shard, "ns/s")
        keys, values, diffs = (rows.column(name).to_pylist() for name in ("key", "val", "diff"))
        found = Counter({(key["id"], val["n"]): diff for key, val, diff in zip(keys, values, diffs, strict=True)})
        read = max((id_ if self.envelope == "Append" else n for id_, n in found), default=-1) + 1
        assert read % ROWS_PER_BATCH == 0, f"{self.folder}: {read} rows are no whole batches"
        assert found == expected(self.envelope, read), (
            f"{self.folder}: {found - expected(self.envelope, read)} are too many"
        )
        assert position is not None
        return read

    def _client(self) -> PersistClient:
        return PersistClient.open(Location(**self.location), settings=Settings(retain_ms=None))

    def _spec(self) -> dict[str, Any]:
        options = {"rowsPerBatch": str(ROWS_PER_BATCH), "numPartitions": "2"}
        source = {"name": "rate-micro-batch", "options": options, "sql": SQL[self.envelope]}
        return {
            "sink_id": "ns/s",
            "run_id": "u-1",
            "shard_id": self.shard,
            "schema": {"key": "id BIGINT", "value": "n BIGINT"},
            "location": self.location,
            "input": {"type": "Format", "format": source},
            "envelope": {"type": self.envelope, **({"orderColumn": "n"} if self.envelope == "Upsert" else {})},
            "write": {"parallelism": 2},
            "stream": {"commitIntervalSeconds": 1, "stopSeconds": 60},
        }


def main() -> int:
    """The command line. Exit code 1 when rows were lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills in all, half of them for each envelope (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the random points (0)")
    given = parser.parse_args()
    for at, envelope in enumerate(SQL):
        with tempfile.TemporaryDirectory(prefix="persist-kills-") as folder:
            campaign = Campaign(envelope, Path(folder), given.seed + at)
            rows = campaign.run(given.kills // 2)
            counts = ", ".join(f"{count} {name}" for name, count in sorted(campaign.kills.items()))
            print(f"{envelope}: {counts}; {rows} rows were read, and the shard holds exactly them", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
