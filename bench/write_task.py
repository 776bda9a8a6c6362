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

import numpy as np
import pyarrow as pa
from persist_engine import Schema, ShardId
from persist_operator.manifests.sink_memory import PARTS_HELD, PROCESS_MIB

from bench.measure import Row, memory_bytes

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING, score DOUBLE")
KINDS = ("append", "corrections")
#: The limits of Arrow records from the JVM, as in `persist_spark.session`.
_RECORD_ROWS, _RECORD_BYTES = 65_536, 4 << 20
_SEED = 7


def run(folder: Path, quick: bool) -> list[Row]:
    """Five or more parts of the default size, and of a quarter of it. Keys are unordered, which needs the most memory."""
    found = []
    for kind in KINDS:
        for width in (32, 1024):
            for part_mib in (16,) if quick else (64, 16):
                given = PROCESS_MIB + PARTS_HELD * part_mib
                result = measured(folder, kind, width=width, part_mib=part_mib, parts=5)
                what = f"peak of a write task, {kind}, {width} characters a row, parts of {part_mib} MiB"
                ours = f"{result['peak_mib']} MiB ({result['idle_mib']} idle), {result['seconds']:.1f} s"
                found.append(Row(what, ours, f"{given} MiB given", result["peak_mib"] / given, "lower"))
    return found


def measured(folder: Path, kind: str, *, width: int, part_mib: int, parts: int) -> dict[str, float]:
    """Runs one task in its own process. Returns `idle_mib` and `peak_mib` (all resident memory), `parts` and `seconds`."""
    rows = parts * (part_mib << 20) // (width + 36)  # a number, an offset, a double, a time, a diff
    options = ["--width", str(width), "--part-mib", str(part_mib), "--rows", str(rows)]
    command = [sys.executable, "-m", "bench.write_task", kind, str(folder), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def records(kind: str, *, rows: int, width: int) -> Iterator[pa.RecordBatch]:
    """The input of a task as Spark passes it: flat columns, each record in bytes that Python read from a pipe."""
    source = np.random.default_rng(_SEED)
    size = max(1, min(_RECORD_ROWS, _RECORD_BYTES // (width + 20)))
    for first in range(0, rows, size):
        count = min(size, rows - first)
        texts = pa.py_buffer(source.bytes(count * width // 2).hex().encode())
        offsets = pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32).tobytes())
        columns = {
            "k0": pa.array(source.integers(0, 2**62, count)),
            "v0": pa.StringArray.from_buffers(count, offsets, texts),
            "v1": pa.array(source.random(count)),
        }
        if kind == "corrections":
            columns["diff"] = pa.array(np.ones(count, dtype=np.int64))
            columns["desired"] = pa.array(np.ones(count, dtype=np.bool_))
            columns["h"] = pa.array(np.arange(first, first + count))
        record = pa.RecordBatch.from_pydict(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, record.schema) as stream:
            stream.write_batch(record)
        piped = sink.getvalue().to_pybytes()
        del columns, texts, record, sink
        yield pa.ipc.open_stream(piped).read_next_batch()


def _main() -> None:
    import pyspark.daemon
    import pyspark.worker  # noqa: F401 - a worker has loaded this before its first task
    from persist_engine.base.env import SystemEnv
    from persist_spark.partitions import StageCorrections, StageRows, StageTask

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path, help="folder for the parts")
    for name in ("width", "part-mib", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
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
    stage = StageRows(task) if options.kind == "append" else StageCorrections(task)
    env = SystemEnv()
    idle, _ = memory_bytes()
    began_s = env.monotonic_s()
    (staged,) = stage(records(options.kind, rows=options.rows, width=options.width))
    seconds = env.monotonic_s() - began_s
    assert staged.column("updates")[0].as_py() == options.rows
    parts = sum(1 for path in options.folder.rglob("*") if path.is_file() and str(task.shard_id) in str(path))
    result = {"idle_mib": idle >> 20, "peak_mib": memory_bytes()[1] >> 20, "parts": parts, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    _main()
