"""The peak memory of one write task of a Spark sink against its share of an executor's pod.

`python -m bench.write_task append FOLDER --rows ...` (or `corrections`) runs one task in its process, as a Python worker of Spark does, and
prints the measurements as JSON. tests/spark/test_memory.py asserts on them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_operator.manifests.sink_memory import PARTS_HELD, PROCESS_MIB

from bench.measure import Row, memory_bytes

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING, score DOUBLE")
#: An upsert is measured against a shard that `hold` wrote in another process.
KINDS, HOLD = ("append", "corrections", "upsert"), "hold"
#: The rows that the shard holds for each command of an upsert.
_HELD_FACTOR = 16
#: The limits of Arrow records from the JVM, as in `persist_spark.session`.
_RECORD_ROWS, _RECORD_BYTES = 65_536, 4 << 20
_SEED = 7


def run(folder: Path, quick: bool) -> list[Row]:
    """Five or more parts of the default size, and of a quarter of it. Keys are unordered, which needs the most memory."""
    found = []
    for kind in KINDS:
        for width in (32, 1024):
            for part_mib in (64,) if kind == "upsert" else (16,) if quick else (64, 16):
                given = PROCESS_MIB + PARTS_HELD * part_mib
                parts = 0.5 if kind == "upsert" else 5  # a task of an upsert has commands of half a part
                result = measured(folder, kind, width=width, part_mib=part_mib, parts=parts)
                what = f"peak of a write task, {kind}, {width} characters a row, parts of {part_mib} MiB"
                ours = f"{result['peak_mib']} MiB ({result['idle_mib']} idle), {result['seconds']:.1f} s"
                found.append(Row(what, ours, f"{given} MiB given", result["peak_mib"] / given, "lower"))
    return found


def measured(folder: Path, kind: str, *, width: int, part_mib: int, parts: float) -> dict[str, float]:
    """Runs one task in its own process. Returns `idle_mib` and `peak_mib` (all resident memory), `parts` and `seconds`."""
    rows = int(parts * (part_mib << 20)) // (width + 36)  # a number, an offset, a double, a time, a diff
    options = ["--width", str(width), "--part-mib", str(part_mib), "--rows", str(rows)]
    for step in (HOLD, kind) if kind == "upsert" else (kind,):
        command = [sys.executable, "-m", "bench.write_task", step, str(folder), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def records(kind: str, *, rows: int, width: int) -> Iterator[pa.RecordBatch]:
    """The input of a task as Spark passes it: flat columns, each record in bytes that Python read from a pipe."""
    source = np.random.default_rng(_SEED + (kind == HOLD))  # an upsert changes every value
    size = max(1, min(_RECORD_ROWS, _RECORD_BYTES // (width + 20)))
    for first in range(0, rows, size):
        count = min(size, rows - first)
        texts = pa.py_buffer(source.bytes(count * width // 2).hex().encode())
        offsets = pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32).tobytes())
        columns = {
            "k0": pa.array(_ids(first, count) if kind in ("upsert", HOLD) else source.integers(0, 2**62, count)),
            "v0": pa.StringArray.from_buffers(count, offsets, texts),
            "v1": pa.array(source.random(count)),
        }
        if kind == "corrections":
            columns["diff"] = pa.array(np.ones(count, dtype=np.int64))
            columns["desired"] = pa.array(np.ones(count, dtype=np.bool_))
            columns["h"] = pa.array(np.arange(first, first + count))
        if kind == "upsert":
            columns["k0"] = pc.multiply(columns["k0"], _HELD_FACTOR)
            columns["o"] = pa.nulls(count, pa.int64())
            columns["deleted"] = pa.array(np.zeros(count, np.bool_))
        record = pa.RecordBatch.from_pydict(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, record.schema) as stream:
            stream.write_batch(record)
        piped = sink.getvalue().to_pybytes()
        del columns, texts, record, sink
        yield pa.ipc.open_stream(piped).read_next_batch()


def _ids(first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Numbers from `first` on, each once, not in order."""
    return np.random.default_rng(first).permutation(np.arange(first, first + count))


def _hold(options: argparse.Namespace) -> None:
    """Writes a shard for upserts, and a file that says how to read it."""
    shard = ShardId.new()
    location = Location(blob=f"file://{options.folder}", consensus=f"sqlite://{options.folder}/consensus.db")
    with PersistClient.open(location) as client:
        client.initialise(shard, SCHEMA)
        with client.open_writer(shard, SCHEMA, purpose="bench") as writer, writer.builder(Antichain.of(0)) as builder:
            for record in records(HOLD, rows=options.rows * _HELD_FACTOR, width=options.width):
                sides = [
                    pa.StructArray.from_arrays(columns, fields=list(kind))
                    for columns, kind in ((record.columns[:1], SCHEMA.key_type), (record.columns[1:], SCHEMA.val_type))
                ]
                ones = pa.array(np.ones(len(record), np.int64))
                builder.add(pa.Table.from_arrays([*sides, ones, ones], schema=SCHEMA.updates_schema))
            batch = builder.finish(Antichain.of(2))
            writer.compare_and_append_batch([batch], expected_upper=Antichain.of(0), new_upper=Antichain.of(2))
        with client.open_leased_reader(shard, purpose="bench") as reader, reader.snapshot(1) as snapshot:
            (options.folder / "split").write_bytes(snapshot.splits(1)[0].to_bytes())


def _main() -> None:
    import pyspark.daemon
    import pyspark.worker  # noqa: F401 - a worker has loaded this before its first task
    from persist_engine.base.env import SystemEnv
    from persist_spark.envelopes.against import Decision, Held, StageUpdates
    from persist_spark.partitions import StageCorrections, StageRows, StageTask

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=(*KINDS, HOLD))
    parser.add_argument("folder", type=Path, help="folder for the parts")
    for name in ("width", "part-mib", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    if options.kind == HOLD:
        _hold(options)
        return
    task = StageTask(
        blob=f"file://{options.folder}",
        shard_id=ShardId.new(),
        schema=SCHEMA,
        schema_id=0,
        lower=0,
        upper=10,
        time=5,
        target_part_bytes=options.part_mib << 20,
    )
    if options.kind == "upsert":
        shard = Held(blob=task.blob, split=(options.folder / "split").read_bytes())
        stage: Any = StageUpdates(Decision(SCHEMA, shard, None, read_bytes=task.target_part_bytes), task)
    else:
        stage = StageRows(task) if options.kind == "append" else StageCorrections(task)
    env = SystemEnv()
    idle, _ = memory_bytes()
    began_s = env.monotonic_s()
    (staged,) = stage(records(options.kind, rows=options.rows, width=options.width))
    seconds = env.monotonic_s() - began_s
    assert staged.column("updates")[0].as_py() == options.rows * (2 if options.kind == "upsert" else 1)
    parts = sum(1 for path in options.folder.rglob("*") if path.is_file() and str(task.shard_id) in str(path))
    result = {"idle_mib": idle >> 20, "peak_mib": memory_bytes()[1] >> 20, "parts": parts, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    _main()
