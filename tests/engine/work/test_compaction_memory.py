"""The process of a compaction, measured by the machine, stays within its memory, or refuses with the needed amount."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import MEMORY_BYTES_LEAST, MIB
from persist_kit.servers import redis_server, s3_server

A = Antichain.of
SCHEMA = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("text", pa.string())]))
#: Each of 6 MiB encoded, with keys between one another's: much more than fits into the memory at once.
RUNS, RUN_ROWS, TEXT_BYTES = 24, 50_000, 256
#: Runs the command line and prints the peak memory of its process, which Linux counts.
MEASURED = """
import sys
from pathlib import Path
from persist_engine.cli.main import main
try:
    main()
finally:
    print(*[line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")], file=sys.stderr)
"""


def written(location):
    shard_id, rng = ShardId.new(), np.random.default_rng(0)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    offsets = pa.py_buffer(np.arange(0, (RUN_ROWS + 1) * TEXT_BYTES, TEXT_BYTES, dtype=np.int32))
    with PersistClient.open(location) as client, client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for run in range(RUNS):
            text = pa.py_buffer(digits[rng.integers(0, 16, RUN_ROWS * TEXT_BYTES, np.uint8)])
            texts = pa.StringArray.from_buffers(RUN_ROWS, offsets, text)
            table = pa.table(
                {
                    "key": pa.StructArray.from_arrays([pa.array(np.arange(RUN_ROWS) * RUNS + run)], ["id"]),
                    "val": pa.StructArray.from_arrays([texts], ["text"]),
                    "time": pa.array(np.full(RUN_ROWS, run)),
                    "diff": pa.array(np.ones(RUN_ROWS, dtype=np.int64)),
                }
            )
            writer.compare_and_append(table, expected_upper=A(run), new_upper=A(run + 1))
    return shard_id


@pytest.mark.redis
@pytest.mark.s3
def test_regression_a_compaction_stays_within_its_memory(monkeypatch):
    memory_mib = MEMORY_BYTES_LEAST // MIB
    with redis_server() as redis, s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        location = Location(blob=s3.url, consensus=redis.url)
        shard_id = written(location)
        command = ["admin", "force-compaction", shard_id, "--full", "--commit", "--memory-mib", str(memory_mib)]
        stores = ["--blob", location.blob, "--consensus", location.consensus]
        whole = [sys.executable, "-c", MEASURED, *command, *stores]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with PersistClient.open(location) as client:
            state = client.machine(shard_id).refresh()
            assert sum(len(batch.run_metas) for batch in state.trace.batches()) < RUNS
            assert sum(batch.rows for batch in state.trace.batches()) == RUNS * RUN_ROWS
    peak_mib = int(re.search(r"VmHWM:\s+(\d+) kB", done.stderr)[1]) >> 10
    assert peak_mib <= memory_mib


@pytest.mark.slow
@pytest.mark.parametrize("command", [("maintain", "compact"), ("maintain", "auto"), ("admin", "force-compaction")])
def test_too_little_memory_is_refused_with_the_needed_amount(persist, tmp_path, command):
    least_mib = MEMORY_BYTES_LEAST // MIB
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/log.db")
    with PersistClient.open(location) as client:
        client.initialise(shard_id := ShardId.new(), SCHEMA)
    stores = ["--blob", location.blob, "--consensus", location.consensus]
    code, _, err = persist(*command, shard_id, *stores, "--memory-mib", least_mib - 1)
    assert (code, err.count("\n")) == (64, 1)
    assert f"a process that compacts needs at least {least_mib} MiB of memory, {least_mib - 1} MiB were given" in err
    assert persist(*command, shard_id, *stores, "--memory-mib", least_mib)[0] == 0
