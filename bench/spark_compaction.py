"""Compaction of 64 runs with interleaved keys on the executors of a session on two cores, against the same in one process, and against a
Parquet rewrite by Spark that sorts by ranges of the key.

The three alternate, so that they run under the same load. Ratios compare the processor time of all processes. The start of the session is
not counted. The start of the process counts with its processor time, which is one second.
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
from bench.spark import cpu_s, session_in

#: The memory of the process: the default of a compaction pod.
MEMORY = "1 GiB"


def run(folder: Path, quick: bool) -> list[Row]:
    """The medians of the repetitions, after one that does not count."""
    rows, repeat = (200_000, 1) if quick else (10_000_000, 3)
    write(folder / "written", rows)
    session = session_in(folder)
    sides: dict[str, Callable[[Path], float]] = {
        "spark": lambda place: _on_executors(session, place),
        "process": lambda place: measured(place, "ours", MEMORY)["seconds"],
        "parquet": lambda place: _ranged(session, place),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    try:
        for index in range(repeat + 1):
            for name, side in sides.items():
                place = shutil.copytree(folder / "written", folder / "at-hand")
                before_s = cpu_s()
                seconds = side(place)
                used_s = cpu_s() - before_s
                shutil.rmtree(place)
                if index:
                    took[name].append((seconds, used_s))
    finally:
        session.stop()
    (ours_s, ours_cpu), *others = ([median([each[at] for each in some]) for at in (0, 1)] for some in took.values())
    what = f"compaction of {rows:,} rows in {RUNS} runs on Spark"
    names = (f"in one process of {MEMORY}", "by Parquet in ranges")
    return [
        Row(
            what,
            f"{ours_s:.2f} s ({ours_cpu:.2f} s cpu)",
            f"{other_s:.2f} s ({cpu:.2f}) {name}",
            ours_cpu / cpu,
            "lower",
        )
        for name, (other_s, cpu) in zip(names, others, strict=True)
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
