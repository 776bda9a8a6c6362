"""A Mirror of a million rows of which 1 % changed, against Iceberg's MERGE of the same input, in two sessions of two cores; and the
first run of each in its own process, from its start to its end. Ratios compare the processor time of all processes (driver, JVM, Python
workers).

Iceberg's runtime does not load on our Spark, so it needs its own interpreter: ICEBERG_PYTHON has pyspark 4.1.4 (`uv venv`, `uv pip
install`), and ICEBERG_JAR is `org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0` (`mvn dependency:get`). ROWS= sets a size other
than a million rows, and ROUNDS= the number of measurements of each side. Each call is printed when it is done, so that an interrupted run
also has results.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.measure import Row, median
from bench.mirror import sink_process
from bench.spark import KEY, VALUE, Bench, cpu_s, session_in

SIDE = Path(__file__).with_name("iceberg_side.py")
#: The names in `iceberg_side` of Iceberg's merge modes.
MODES = {"cow": "copy on write", "mor": "merge on read"}


def run(folder: Path, quick: bool) -> Iterator[Row]:
    """Yields each row when it is measured."""
    rows = int(os.environ.get("ROWS") or (100_000 if quick else 1_000_000))
    repeat = int(os.environ.get("ROUNDS") or (2 if quick else 5))
    python, jar = (os.environ.get(name) for name in ("ICEBERG_PYTHON", "ICEBERG_JAR"))
    if not python or not jar:
        raise SystemExit("spark_iceberg: set ICEBERG_PYTHON and ICEBERG_JAR, see bench/spark_iceberg.py")
    source = _input(folder, rows, changed=None)
    command = [python, str(SIDE), jar]
    yield _first_runs(folder, command, source, rows, repeat=max(1, repeat // 2))
    yield from _changes(folder, command, source, rows, repeat=repeat)


def _input(folder: Path, rows: int, *, changed: int | None) -> str:
    """A Parquet file of all rows, in random order. With each number `changed` another 1 % of the rows have another amount."""
    ids = np.random.default_rng(7).permutation(rows)
    amounts = ids % 1000 + (0 if changed is None else np.where(ids % 100 <= changed, 10_000, 0))
    path = f"{folder}/input-{changed}"
    pq.write_table(pa.table({"id": ids, "name": np.char.mod("%032x", ids), "amount": amounts}), path)
    return path


def _first_runs(folder: Path, command: list[str], source: str, rows: int, *, repeat: int) -> Row:
    ours, theirs = list[tuple[float, float]](), list[tuple[float, float]]()
    for index in range(repeat):
        place = folder / f"first-{index}"
        place.mkdir()
        ours.append(_alone(sink_process(place, source, key=KEY, value=VALUE)))
        _say(f"first run {index}, ours", ours[-1])
        once = [*command, str(place), source, "once"]
        theirs.append(_alone(subprocess.Popen(once, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
        _say(f"first run {index}, Iceberg", theirs[-1])
    return _row(f"first run of {rows:,} rows in a new process, Mirror", ours, theirs, "Iceberg's CREATE TABLE AS")


def _alone(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """The seconds until the process ends, and its sampled processor time, because an ended JVM belongs to no process."""
    began_s, used_s, pause = time.perf_counter(), 0.0, threading.Event()
    while process.poll() is None:
        used_s = max(used_s, cpu_s(process.pid))
        pause.wait(0.1)
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    return time.perf_counter() - began_s, used_s


def _changes(folder: Path, command: list[str], source: str, rows: int, *, repeat: int) -> Iterator[Row]:
    session = session_in(folder)
    bench = Bench(session, folder)
    side = subprocess.Popen(
        [*command, str(folder), source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert side.stdin is not None
    assert side.stdout is not None
    try:
        shard = bench.shard()
        bench.sink(shard, source, run="run-0", envelope="Mirror")
        if side.stdout.readline() != "ready\n":
            raise SystemExit("spark_iceberg: Iceberg's session did not start")
        took: dict[str, list[tuple[float, float]]] = {"ours": [], **{name: [] for name in MODES}}
        for index in range(repeat + 1):
            changed = _input(folder, rows, changed=index)
            for name, measured in took.items():
                began_s, before_s = time.perf_counter(), _spent_s(side.pid, is_theirs=name != "ours")
                if name == "ours":
                    bench.sink(shard, changed, run=f"run-{index + 1}", envelope="Mirror")
                else:
                    side.stdin.write(f"{name} {changed}\n")
                    side.stdin.flush()
                    if not side.stdout.readline().startswith("done"):
                        raise SystemExit("spark_iceberg: a MERGE failed")
                used_s = _spent_s(side.pid, is_theirs=name != "ours") - before_s
                took_s = time.perf_counter() - began_s
                _say(f"round {index} of {repeat}, {name}", (took_s, used_s))
                if index:  # the first round warms up
                    measured.append((took_s, used_s))
            Path(changed).unlink()
        for name, mode in MODES.items():
            yield _row(
                f"Mirror of {rows:,} rows, 1 % of them changed", took["ours"], took[name], f"Iceberg's MERGE, {mode}"
            )
    finally:
        side.stdin.close()
        side.wait()
        session.stop()


def _spent_s(side: int, *, is_theirs: bool) -> float:
    """The processor time of Iceberg's processes, which are children of this one, or of all others."""
    return cpu_s(side) if is_theirs else cpu_s() - cpu_s(side)


def _say(what: str, took: tuple[float, float]) -> None:
    print(f"  {what}: {took[0]:.2f} s ({took[1]:.2f} s cpu)", file=sys.stderr, flush=True)


def _row(what: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]], against: str) -> Row:
    (ours_s, ours_cpu), (base_s, base_cpu) = (
        tuple(median([each[index] for each in side]) for index in (0, 1)) for side in (ours, theirs)
    )
    baseline = f"{base_s:.2f} s ({base_cpu:.2f}) by {against}"
    return Row(what, f"{ours_s:.2f} s ({ours_cpu:.2f} s cpu)", baseline, ours_cpu / max(base_cpu, 1e-9), "lower")
