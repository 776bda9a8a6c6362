"""A snapshot against a plain pyarrow Parquet read of the same rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Antichain, Location, PersistClient, ShardId

from bench.data import SCHEMA, flat, updates
from bench.measure import Row, median, ms, timings_s


def run(folder: Path, quick: bool) -> list[Row]:
    """One run (as after compaction) and 16 runs (as before it)."""
    rows = 100_000 if quick else 1_000_000
    return [_one(folder, rows, runs) for runs in (1, 16)]


def _one(folder: Path, rows: int, runs: int) -> Row:
    shard = ShardId.new()
    tables = [updates(rows // runs, time=index, seed=index, first=index * (rows // runs)) for index in range(runs)]
    pq.write_table(flat(pa.concat_tables(tables)).sort_by("id"), folder / "plain.parquet")
    with PersistClient.open(
        Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    ) as client:
        with client.open_writer(shard, SCHEMA, purpose="bench") as writer:
            for index, table in enumerate(tables):
                writer.compare_and_append(table, expected_upper=Antichain.of(index), new_upper=Antichain.of(index + 1))
        with client.open_leased_reader(shard, SCHEMA, purpose="bench") as reader:

            def ours(_: int) -> None:
                read = reader.snapshot(as_of=Antichain.of(runs - 1)).to_table().num_rows
                if read != rows // runs * runs:
                    raise SystemExit(f"read {read} rows, wrote {rows}")

            measured = timings_s(ours, repeat=7)
    base = timings_s(lambda _: pq.read_table(folder / "plain.parquet"), repeat=7)
    speed = median(base) / median(measured)
    return Row(
        f"snapshot of {rows:,} rows, {runs} runs",
        ms(median(measured)),
        ms(median(base)),
        speed,
        "higher (1 = as fast as plain Parquet)",
    )
