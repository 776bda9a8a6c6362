"""Compaction of 64 runs with interleaved keys against plain pyarrow, and its peak memory.

Each side runs in its own process, so that the peaks are separate. To compact more rows than fit into the baseline's memory:

    python -m bench.compaction write FOLDER --rows 100000000 && python -m bench.compaction ours FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.settings import Settings, within_memory
from persist_engine.model.spine.spine import MergeReq
from persist_engine.shard.machine import Machine
from persist_engine.work.compact import compact

from bench.data import SCHEMA, flat, interleaved
from bench.measure import Row, median, memory_bytes

RUNS = 64
#: The memory limits of a compaction pod: the default, and half of it, which is the minimum.
MEMORY_MIB = {"1 GiB": 1024, "512 MiB": 512}


def run(folder: Path, quick: bool) -> list[Row]:
    """Seconds (the median of the repetitions), and peak resident memory against the limit."""
    rows, repeat = (200_000, 1) if quick else (10_000_000, 3)
    out: list[Row] = []
    write(folder / "written", rows)
    for name, memory_mib in MEMORY_MIB.items():
        ours, base = [], []
        for _ in range(repeat):
            place = shutil.copytree(folder / "written", folder / "at-hand")
            ours.append(measured(place, "ours", name))
            base.append(measured(place, "baseline", name))
            shutil.rmtree(place)
        seconds, base_s = (median([each["seconds"] for each in side]) for side in (ours, base))
        what = f"compaction of {rows:,} rows in {RUNS} runs, {name}"
        out.append(
            Row(what, f"{seconds:.2f} s", f"{base_s:.2f} s", base_s / seconds, "higher (1 = as fast as pyarrow)")
        )
        peak = max(each["peak"] for each in ours)
        idle = max(each["idle"] for each in ours)
        mib = (
            f"{max(each['peak'] for each in base) >> 20} MiB of pyarrow, {idle >> 20} MiB idle, {memory_mib} MiB given"
        )
        out.append(
            Row(
                f"its peak of memory, {name}",
                f"{peak >> 20} MiB",
                mib,
                (peak >> 20) / memory_mib,
                "lower (1 = all of that)",
            )
        )
    return out


def location(folder: Path) -> Location:
    """The stores that `write` makes."""
    return Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")


def write(folder: Path, rows: int, *, plain: bool = True) -> None:
    """Writes the same runs as a shard and, if `plain`, as plain files."""
    folder.mkdir()
    shard = ShardId.new()
    (folder / "shard").write_text(shard)
    # Without retention, so that only the last time stays readable.
    with (
        PersistClient.open(location(folder), settings=Settings(retain_ms=None)) as client,
        client.open_writer(shard, SCHEMA, purpose="bench") as writer,
    ):
        for index in range(RUNS):
            table = interleaved(rows // RUNS, at=index, of=RUNS, time=index)
            writer.compare_and_append(table, expected_upper=Antichain.of(index), new_upper=Antichain.of(index + 1))
            if plain:
                pq.write_table(flat(table).sort_by("id"), folder / f"run-{index:02}.parquet")
        with client.open_leased_reader(shard, SCHEMA, purpose="bench") as reader:
            reader.downgrade_since(Antichain.of(RUNS - 1))


def measured(folder: Path, side: str, memory: str) -> dict[str, float]:
    """The report of one side on a compaction of `folder` in its own process: seconds, peak and idle memory."""
    command = [sys.executable, "-m", "bench.compaction", side, str(folder), memory]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    out: dict[str, float] = json.loads(done.stdout)
    return out


def _ours(folder: Path, memory: str) -> None:
    with PersistClient.open(location(folder), settings=within_memory(Settings(), MEMORY_MIB[memory] << 20)) as client:
        machine = client.machine(ShardId((folder / "shard").read_text()))
        outcome = compact(machine, whole_request(machine))
        left = sum(len(batch.run_metas) for batch in machine.refresh().trace.batches())
        if left != 1:
            raise SystemExit(f"{left} runs are left: {outcome.message}")


def whole_request(machine: Machine) -> MergeReq:
    """The request that merges the whole shard into one run, as the spine would make it after many more writes."""
    machine.refresh()
    for _ in range(8):
        held = [batch for batch in machine.state.trace.spine_batches() if batch.rows]
        if len(held) == 1:
            return held[0].request()
        machine.spine_exert(1 << 30)
    raise SystemExit("the spine does not become one batch")


def _baseline(folder: Path) -> None:
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("run-*.parquet"))])
    floor = pa.repeat(pa.scalar(RUNS - 1, pa.int64()), table.num_rows)
    table = table.set_column(2, "time", floor).sort_by([(name, "ascending") for name in ("id", "name", "time")])
    table = table.group_by(["id", "name", "time"], use_threads=False).aggregate([("diff", "sum")])
    pq.write_table(table, folder / "compacted.parquet")


def main() -> None:
    """Runs one side in this process. Prints seconds and resident bytes, idle and at the peak, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("write", "ours", "baseline"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("memory", choices=list(MEMORY_MIB), nargs="?", default="1 GiB")
    parser.add_argument("--rows", type=int, default=10_000_000, help="for write")
    options = parser.parse_args()
    if options.side == "write":
        write(options.folder, options.rows, plain=False)
        return
    idle, _ = memory_bytes()
    began = time.perf_counter()
    if options.side == "ours":
        _ours(options.folder, options.memory)
    else:
        _baseline(options.folder)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "idle": idle, "peak": memory_bytes()[1]}))


if __name__ == "__main__":
    main()
