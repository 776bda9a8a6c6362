"""Kills the drivers and the executors of two Streaming sinks at random points, and compares what the shards hold with what the source gave
(`make kills KILLS=200`).

Each driver is a real process with executors in processes of their own (`local-cluster`), killed by SIGKILL. After half of the drivers the
disk and the checkpoint are deleted, and the next driver begins with nothing; after the others it finds what the killed one left. The source
gives the same rows for the same offsets, so the contents follow from the number of rows that were read. Each driver draws how many rows a
batch has: few, which the driver stages or decides by itself, or so many that executors must.

The two sinks run side by side, because a driver often waits. A kill falls into the life of a batch: after some event of the driver's log,
and a part of the time that the step before took.
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
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from persist_engine import Antichain, Location, PersistClient, Schema, Settings, ShardId
from persist_kit import jvm

KEYS = 150
#: Rows of a batch: all batches have a multiple of this.
ROWS_LEAST = 100
#: A driver that logs nothing for so long hangs. On a machine with a load of twenty, a start takes minutes.
SILENCE_S = 1800.0
#: The longest wait between an event and a kill.
PAUSE_MOST_S = 1.0
CONF = (
    "spark.master local-cluster[2,1,600]\nspark.executor.memory 600m\nspark.executor.cores 1\nspark.ui.enabled false\n"
    "spark.driver.memory 700m\nspark.log.level ERROR\nspark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    f"spark.sql.shuffle.partitions 2\nspark.worker.cleanup.enabled true\n{jvm.executor_properties()}"
)


@dataclass(frozen=True)
class Kind:
    """One of the two sinks."""

    sql: str
    """Over the source's `value`."""
    rows: tuple[int, int]
    """Of a batch that the driver stages or decides, and of one that executors do."""


KINDS = {
    "Append": Kind("select value as id, value % 7 as n from input", (ROWS_LEAST, 2_500)),
    "Upsert": Kind(f"select value % {KEYS} as id, value as n from input", (ROWS_LEAST, 200_000)),
}


def expected(envelope: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The contents after the first `rows` rows of the source: the ids in order, and `n` of each."""
    if envelope == "Append":
        ids = np.arange(rows)
        return ids, ids % 7
    ids = np.arange(min(KEYS, rows))
    return ids, rows - 1 - (rows - 1 - ids) % KEYS


class Driver:
    """A driver under way. Reads its log in a thread."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir(exist_ok=True)
        (folder / "sink.json").write_text(json.dumps(spec))
        (folder / "spark-defaults.conf").write_text(CONF)
        command = [sys.executable, "-m", "persist_spark.main", "driver", "--spec", str(folder / "sink.json")]
        command += ["--report", str(folder / "report.json"), "--properties", str(folder / "spark-defaults.conf")]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            cwd=self.disk,
            env={**os.environ, **jvm.environ(), "SPARK_LOCAL_DIRS": str(self.disk), "SPARK_WORKER_DIR": str(self.disk)},
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

    def executors(self) -> list[tuple[int, str]]:
        """The processes of its executors that run, with what they are: Java or Python."""
        listed = subprocess.run(["ps", "-eo", "pid,sid,args"], capture_output=True, text=True, check=True).stdout
        found = [line.split(None, 2) for line in listed.splitlines()[1:]]
        own = [(int(pid), args) for pid, sid, args in found if int(sid) == self.process.pid]
        java = [(pid, "executor") for pid, args in own if "CoarseGrainedExecutorBackend" in args]
        return java + [(pid, "Python of an executor") for pid, args in own if "pyspark.daemon" in args]

    def kill(self) -> None:
        """Kills the driver with all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def delete(self) -> None:
        """Deletes its disk and its checkpoint, after its end. Idempotent."""
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
    """By what was killed, and after which event."""
    ended: Counter[str] = field(default_factory=Counter)
    """Drivers that ended by themselves, by the reason that they reported."""
    left: Counter[str] = field(default_factory=Counter)
    """Drivers by what was left of them for the next one."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.drivers: list[Driver] = []
        """Those whose disk or checkpoint may be left."""
        self.shard = ShardId.new()
        self.location = {"blob": f"file://{self.folder}/blobs", "consensus": f"sqlite://{self.folder}/consensus.db"}
        with self._client() as client:
            client.initialise(self.shard, Schema.from_ddl("id BIGINT", "n BIGINT"))

    def run(self, kills: int) -> int:
        """Kills so many times, lets the last driver end, and returns the number of rows that the sink read. AssertionError when the
        contents are not those of these rows; also in between.
        """
        while self.kills.total() < kills:
            self._one_driver(kills)
            rows = self.check()
            print(
                f"{self.envelope}: {self.kills.total()} of {kills} kills, {rows} rows are right",
                file=sys.stderr,
                flush=True,
            )
        driver = self._started()
        try:
            self._until(driver, {"batch"}, self.random.randrange(1, 4))
            driver.process.send_signal(signal.SIGTERM)
            assert driver.process.wait(timeout=SILENCE_S) == 0, "".join(driver.tail)
        finally:
            driver.kill()
        return self.check()

    def _started(self) -> Driver:
        self.drivers.append(Driver(self.folder, self._spec()))
        return self.drivers[-1]

    def delete(self) -> None:
        """Deletes what is left of ended drivers. Idempotent."""
        for driver in self.drivers:
            driver.delete()
        self.drivers.clear()

    def _one_driver(self, kills: int) -> None:
        """One driver from its start to its death, and the deaths of some of its executors."""
        driver = self._started()
        try:
            event = self._until(driver, {"position"}, 1)
            while event is not None:
                # Any event: between them lie the reading, the staging, and the commit of a batch.
                began_s = time.monotonic()
                event = self._until(driver, None, self.random.randrange(1, 7))
                took_s = min(PAUSE_MOST_S, time.monotonic() - began_s)
                threading.Event().wait(self.random.uniform(0, took_s))
                if event is None:
                    break
                if self.random.random() < 0.4 or not (running := driver.executors()):
                    self.kills[f"driver after {event}"] += 1
                    return
                pid, what = self.random.choice(running)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills[f"{what} after {event}"] += 1
                if self.kills.total() == kills:
                    return
            self.ended[self._reported(driver)] += 1
        finally:
            driver.kill()
            is_deleted = self.random.random() < 0.5
            self.left["nothing" if is_deleted else "its disk and its checkpoint"] += 1
            if is_deleted:
                self.delete()

    def _reported(self, driver: Driver) -> str:
        """Why a driver ended by itself."""
        driver.process.wait(timeout=SILENCE_S)
        with suppress(OSError, ValueError):
            return str(json.loads((self.folder / "report.json").read_text())["message"])[:200]
        return f"exit code {driver.process.returncode}"

    def _until(self, driver: Driver, names: set[str] | None, count: int) -> str | None:
        """Waits for so many events of these names (None: of any step), and returns the last one. None when the driver ends first."""
        event = None
        while count > 0:
            event = driver.event()
            if event is None:
                return None
            # `stage` is no step: it comes every few seconds, so on a busy machine no long batch would reach its end.
            count -= event != "stage" if names is None else event in names
        return event

    def check(self) -> int:
        """Compares the contents with the source. Returns the rows that were read."""
        with self._client() as client:
            upper = client.recent_upper(self.shard).time
            if not upper:
                return 0
            with client.open_leased_reader(self.shard, purpose="check") as reader:
                rows = reader.snapshot(Antichain.of(upper - 1)).to_table().combine_chunks()
            position = client.progress(self.shard, "ns/s")
        assert position is not None
        ids, n = (rows.column(side).chunk(0).field(0).to_numpy() for side in ("key", "val"))
        order = np.argsort(ids, kind="stable")
        ids, n, diffs = ids[order], n[order], rows.column("diff").to_numpy()
        read = int((ids if self.envelope == "Append" else n).max()) + 1
        assert read % ROWS_LEAST == 0, f"{self.folder}: {read} rows are no whole batches"
        wanted_ids, wanted = expected(self.envelope, read)
        lost, doubled = np.setdiff1d(wanted_ids, ids)[:9], ids[1:][np.diff(ids) == 0][:9]
        assert len(ids) == len(wanted_ids), (
            f"{self.folder}: of {read} rows, lost the ids {lost}, doubled the ids {doubled}"
        )
        wrong = np.flatnonzero((ids != wanted_ids) | (n != wanted) | (diffs[order] != 1))[:9]
        assert not len(wrong), (
            f"{self.folder}: of {read} rows, wrong: {[(ids[i], n[i], diffs[order][i]) for i in wrong]}"
        )
        return read

    def _client(self) -> PersistClient:
        return PersistClient.open(Location(**self.location), settings=Settings(retain_ms=None))

    def _spec(self) -> dict[str, Any]:
        kind = KINDS[self.envelope]
        options = {"rowsPerBatch": str(self.random.choice(kind.rows)), "numPartitions": "2"}
        source = {"name": "rate-micro-batch", "options": options, "sql": kind.sql}
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

    def campaign(at: int, envelope: str) -> None:
        # A folder with wrong rows stays, to be looked at.
        folder = Path(tempfile.mkdtemp(prefix="persist-kills-"))
        one = Campaign(envelope, folder, given.seed + at)
        try:
            rows = one.run(given.kills // 2)
        finally:
            one.delete()
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{envelope}: {one.kills.total()} kills; {rows} rows were read, and the shard holds exactly them")
        counted = (("killed", one.kills), ("ended by itself", one.ended), ("left to the next driver", one.left))
        for what, counts in counted:
            for name, count in counts.most_common():
                print(f"  {count} times {what}: {name}", flush=True)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        running = [pool.submit(campaign, at, envelope) for at, envelope in enumerate(KINDS)]
    for one in running:
        one.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
