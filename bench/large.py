"""A first Append of 100M rows on two executors of 2 GiB, whose driver is killed in the middle, and the next driver.

It shows the peak memory of an executor (its Java and its Python) against the memory of its pod, and the rows that are staged a second time
against the rows that were already staged. ROWS and KILLED_AT (a share of the rows) in the environment set the size and the moment. It takes
some 20 minutes and 12 GB of disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from persist_engine import PersistClient, Schema, ShardId, StagingNotes

from bench.compaction import location
from bench.measure import Row
from bench.mirror import process_tree
from bench.spark import KEY, VALUE, session_in

POD_MIB, HEAP_MIB = 2048, 1024
SINK, RUN = "bench/large", "run-1"
#: An odd number that shares no factor with the numbers of rows used here, so that ids are in a mixed order without a shuffle.
_STEP = 48_271


def run(folder: Path, quick: bool) -> list[Row]:
    """A row for each figure. Raises SystemExit when the numbers of rows of the shard and the input differ, or when the first driver was
    done before it was killed.
    """
    rows = int(os.environ.get("ROWS", "10_000_000" if quick else "100_000_000"))
    killed_at = float(os.environ.get("KILLED_AT", "0.5"))
    _step("input", str(folder), str(rows))
    shard = ShardId.new()
    with PersistClient.open(location(folder)) as client:
        client.initialise(shard, Schema.from_ddl(KEY, VALUE))
        notes = StagingNotes(client.machine(shard), SINK, RUN.encode())
        first = _Driver(folder, shard, rows)
        while sum(note.rows for note in notes.read()) < killed_at * rows and first.process.poll() is None:
            time.sleep(1)
        first.kill()
        staged = sum(note.rows for note in notes.read())
        second = _Driver(folder, shard, rows)
        events = second.finished()
        with client.open_leased_reader(shard, purpose="bench") as reader:
            held = reader.snapshot(client.recent_upper(shard).newest_complete).count()
    if "already_done" in events:
        raise SystemExit("the first driver was done before it was killed: set a lower KILLED_AT")
    if held != rows:
        raise SystemExit(f"the shard holds {held} of {rows} rows")
    peak_mib = max([*first.peaks_mib.values(), *second.peaks_mib.values()])
    again = staged - events.get("resumed", {"rows": 0})["rows"]
    what = f"append of {rows:,} rows on two executors"
    return [
        Row(f"{what}: peak memory of one", f"{peak_mib:,.0f} MiB", f"{POD_MIB:,} MiB", peak_mib / POD_MIB, "lower"),
        Row(f"{what}, driver killed: staged again", f"{again:,}", f"{staged:,} staged", again / staged, "lower"),
    ]


class _Driver:
    """A driver in its own process group, with its executors, whose memory this object watches."""

    def __init__(self, folder: Path, shard: ShardId, rows: int) -> None:
        arguments = [sys.executable, "-m", "bench.large", "driver", str(folder), str(rows), str(shard)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.peaks_mib: dict[int, float] = {}
        """The peak memory by the process of the executor."""
        threading.Thread(target=self._watch, daemon=True).start()

    def kill(self) -> None:
        """Kills the driver and its executors by SIGKILL."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finished(self) -> dict[str, Any]:
        """The last event of each name, when the driver has ended. Raises SystemExit when it failed."""
        output, _ = self.process.communicate()
        if self.process.returncode:
            raise SystemExit(f"the driver ended with {self.process.returncode}")
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return {event["event"]: event for event in events}

    def _watch(self) -> None:
        while self.process.poll() is None:
            for pid in process_tree(self.process.pid):
                if "CoarseGrainedExecutorBackend" in _text(f"/proc/{pid}/cmdline"):
                    used_mib = sum(map(_proportional_mib, process_tree(pid)))
                    self.peaks_mib[pid] = max(used_mib, self.peaks_mib.get(pid, 0.0))
            time.sleep(1)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended
        return ""


def _proportional_mib(pid: int) -> float:
    lines = _text(f"/proc/{pid}/smaps_rollup").splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _step(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "bench.large", *arguments], check=True)


def _write_input(folder: Path, rows: int) -> None:
    session = session_in(folder)
    text = "concat(lower(hex(xxhash64(id))), lower(hex(xxhash64(id, 1L)))) AS name"
    ids = session.range(0, rows, 1, 32).selectExpr(f"(id * {_STEP}) % {rows} AS id")
    ids.selectExpr("id", text, "id % 1000 AS amount").write.parquet(f"{folder}/input")
    session.stop()


def _append(folder: Path, shard: str) -> None:
    from persist_engine import SystemEnv
    from persist_spark import staging
    from persist_spark.report import Log
    from persist_spark.sink import run_sink
    from persist_spark.spec import SinkSpec

    staging.NOTED_BYTES = 0  # so that the small frame of `--quick` has notes too
    conf = {
        "spark.master": f"local-cluster[2,1,{HEAP_MIB}]", "spark.executor.cores": "1", "spark.driver.memory": "1g",
        "spark.executor.memory": f"{HEAP_MIB}m", "spark.executor.memoryOverhead": f"{POD_MIB - HEAP_MIB}m",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "spark.local.dir": f"{folder}/scratch",
    }  # fmt: skip
    session = session_in(folder, conf)
    stores = location(folder)
    spec = {
        "sink_id": SINK, "run_id": RUN, "shard_id": shard, "schema": {"key": KEY, "value": VALUE},
        "location": {"blob": stores.blob, "consensus": stores.consensus}, "purpose": "bench",
        "input": {"type": "Format", "format": {"name": "parquet", "options": {"path": f"{folder}/input"}}},
        "envelope": {"type": "Append"}, "write": {},
    }  # fmt: skip
    run_sink(session, SinkSpec.parse(spec), log=Log(sys.stdout, SystemEnv()))
    session.stop()


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "input":
        _write_input(place, int(sys.argv[3]))
    else:
        _append(place, sys.argv[4])
