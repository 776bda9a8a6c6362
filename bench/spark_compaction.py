"""Compaction of 64 runs with interleaved keys on the executors of a session on two cores, against the same in one process, and against a
Parquet rewrite by Spark that sorts by ranges of the key.

The three alternate, so that they run under the same load. The start of the session and of the process is not counted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persist_engine import PersistClient, ShardId

from bench.compaction import RUNS, location, measured, write
from bench.measure import Row, median
from bench.spark import session_in

#: The memory of the process, as of a compaction pod by default.
MEMORY = "1 GiB"


def run(folder: Path, quick: bool) -> list[Row]:
    """Seconds: the median of the repetitions, after one that does not count."""
    rows, repeat = (200_000, 1) if quick else (10_000_000, 3)
    write(folder / "written", rows)
    session = session_in(folder)
    sides: dict[str, Callable[[Path], float]] = {
        "spark": lambda place: _on_executors(session, place),
        "process": lambda place: measured(place, "ours", MEMORY)["seconds"],
        "parquet": lambda place: _ranged(session, place),
    }
    took: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for index in range(repeat + 1):
            for name, side in sides.items():
                place = shutil.copytree(folder / "written", folder / "at-hand")
                seconds = side(place)
                shutil.rmtree(place)
                if index:
                    took[name].append(seconds)
    finally:
        session.stop()
    spark_s, process_s, parquet_s = (median(each) for each in took.values())
    what = f"compaction of {rows:,} rows in {RUNS} runs on Spark"
    return [
        Row(what, f"{spark_s:.2f} s", f"{process_s:.2f} s in one process of {MEMORY}", spark_s / process_s, "lower"),
        Row(what, f"{spark_s:.2f} s", f"{parquet_s:.2f} s by Parquet in ranges", spark_s / parquet_s, "lower"),
    ]


def _on_executors(session: Any, place: Path) -> float:
    from persist_spark import PersistTable

    shard, stores = (place / "shard").read_text(), location(place)
    table = PersistTable.forShard(session, shard, blob=stores.blob, consensus=stores.consensus)
    began_s = time.perf_counter()
    table.optimize(full=True, on_executors=True)
    seconds = time.perf_counter() - began_s
    with PersistClient.open(stores) as client:
        left = sum(len(batch.run_metas) for batch in client.machine(ShardId(shard)).refresh().trace.batches())
    if left != 1:
        raise SystemExit(f"{left} runs are left")
    return seconds


def _ranged(session: Any, place: Path) -> float:
    began_s = time.perf_counter()
    frame = session.read.parquet(*sorted(map(str, place.glob("run-*.parquet"))))
    frame.repartitionByRange("id").sortWithinPartitions("id").write.parquet(f"{place}/ranged")
    return time.perf_counter() - began_s
