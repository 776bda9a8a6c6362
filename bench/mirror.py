"""Memory peak of a Mirror sink that writes many rows, driver JVM and Python workers together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Location, PersistClient, Schema, ShardId

from bench.measure import Row


def run(folder: Path, quick: bool) -> list[Row]:
    """Runs a whole sink process on local[2] over a Parquet input. The peak is the sampled sum of resident sets."""
    rows = 500_000 if quick else 10_000_000
    source = folder / "input.parquet"
    arrow_bytes = 0
    with pq.ParquetWriter(source, pa.schema([("id", pa.int64()), ("name", pa.string())])) as writer:
        for first in range(0, rows, 1_000_000):
            count = min(1_000_000, rows - first)
            names = pa.array(np.char.mod("%032x", np.random.default_rng(first).integers(0, 2**62, count)))
            table = pa.table({"id": np.arange(first, first + count), "name": names})
            arrow_bytes += table.nbytes
            writer.write_table(table)
    process = sink_process(folder, str(source), key="id BIGINT", value="name STRING")
    peak_bytes = _peak(process)
    report = json.loads((folder / "report.json").read_text())
    if report["outcome"] != "Succeeded" or report["updates_written"] != rows:
        raise SystemExit(f"the sink reported {report}")
    what = f"memory peak of a {rows:,}-row Mirror write, driver JVM and Python workers"
    ours = f"{peak_bytes / 2**30:.2f} GiB in {report['duration_ms'] / 1000:.0f} s"
    return [Row(what, ours, f"{arrow_bytes / 2**30:.2f} GiB of rows in Arrow", peak_bytes / arrow_bytes, "lower")]


def sink_process(folder: Path, source: str, *, key: str, value: str) -> subprocess.Popen[bytes]:
    """Starts a Mirror of the Parquet at `source` into a new shard, as a process with Spark on two cores. The process writes `report.json`
    into `folder`.
    """
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    shard = ShardId.new()
    with PersistClient.open(location) as client:
        client.initialise(shard, Schema.from_ddl(key, value))
    spec = {
        "sink_id": "bench/mirror", "run_id": "bench-1", "shard_id": str(shard), "schema": {"key": key, "value": value},
        "location": {"blob": location.blob, "consensus": location.consensus}, "purpose": "bench",
        "input": {"type": "Format", "format": {"name": "parquet", "options": {"path": source}}},
        "envelope": {"type": "Mirror"}, "write": {},
    }  # fmt: skip
    (folder / "sink.json").write_text(json.dumps(spec))
    (folder / "spark-defaults.conf").write_text(
        "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 2g\n"
    )
    files = ["--spec", "sink.json", "--properties", "spark-defaults.conf", "--report", "report.json"]
    paths = [each if each.startswith("--") else str(folder / each) for each in files]
    command = [sys.executable, "-m", "persist_spark.main", "driver", *paths]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _peak(process: subprocess.Popen[bytes]) -> int:
    """The largest sum of resident bytes of the process and its descendants. Returns when the process ends."""
    peak, done = 0, threading.Event()
    while process.poll() is None:
        peak = max(peak, sum(_resident(pid) for pid in process_tree(process.pid)))
        done.wait(0.2)
    return peak


def process_tree(root: int) -> list[int]:
    """The process `root` and its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
