"""A snapshot against a plain pyarrow Parquet read of the same rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.work.compact import compact

from bench.compaction import whole_request
from bench.data import SCHEMA, flat, interleaved, updates
from bench.measure import Row, interleaved_s, median, ms


def run(folder: Path, quick: bool) -> list[Row]:
    """Snapshots of one run (compacted, where an append leaves several) and of 64 runs, with disjoint keys and with interleaved keys."""
    sizes = (100_000,) if quick else (1_000_000, 10_000_000)
    return [
        _one(folder / f"{rows}-{runs}-{mixed}", rows, runs, mixed=mixed)
        for rows in sizes
        for runs, mixed in ((1, False), (64, False), (64, True))
    ]


def _one(folder: Path, rows: int, runs: int, *, mixed: bool) -> Row:
    """The baseline reads one file of all rows in order, whatever the number of runs."""
    folder.mkdir()
    shard, each = ShardId.new(), rows // runs
    if mixed:
        tables = [interleaved(each, at=index, of=runs, time=index) for index in range(runs)]
    else:
        tables = [updates(each, time=index, seed=index, first=index * each) for index in range(runs)]
    pq.write_table(flat(pa.concat_tables(tables)).sort_by("id"), folder / "plain.parquet")
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    with PersistClient.open(location) as client:
        with client.open_writer(shard, SCHEMA, purpose="bench") as writer:
            for index, table in enumerate(tables):
                writer.compare_and_append(table, expected_upper=Antichain.of(index), new_upper=Antichain.of(index + 1))
        del tables
        machine = client.machine(shard)
        if runs == 1 and sum(len(batch.run_metas) for batch in machine.refresh().trace.batches()) > 1:
            compact(machine, whole_request(machine))  # unsorted rows make one run per part
        with client.open_leased_reader(shard, SCHEMA, purpose="bench") as reader:

            def ours(_: int) -> None:
                read = reader.snapshot(as_of=Antichain.of(runs - 1)).to_table().num_rows
                if read != each * runs:
                    raise SystemExit(f"read {read} rows, wrote {each * runs}")

            measured, base = interleaved_s(ours, lambda _: pq.read_table(folder / "plain.parquet"), repeat=9)
    kind = "" if runs == 1 else " with interleaved keys" if mixed else " with disjoint keys"
    return Row(
        f"snapshot of {rows:,} rows, {runs} run{'s' if runs > 1 else ''}{kind}",
        ms(median(measured)),
        ms(median(base)),
        median(base) / median(measured),
        "higher (1 = as fast as plain Parquet)",
    )
