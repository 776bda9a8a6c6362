"""Building and uploading a batch, without an append, against a plain pyarrow sort and Parquet write of the same rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from persist_engine import Antichain, Location, PersistClient, ShardId

from bench.data import SCHEMA, flat, updates
from bench.measure import Row, interleaved_s, median, ms


def run(folder: Path, quick: bool) -> list[Row]:
    """Ours sorts by key, value and time, consolidates, computes statistics, verifies the encoded part, and syncs it. The baseline sorts by
    the key.
    """
    rows = 100_000 if quick else 1_000_000
    table = updates(rows, time=1)
    plain = flat(table)
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    with (
        PersistClient.open(location) as client,
        client.open_writer(ShardId.new(), SCHEMA, purpose="bench") as writer,
    ):

        def ours(_: int) -> None:
            writer.batch(table, lower=Antichain.of(0), upper=Antichain.of(2)).delete()

        def bare(index: int) -> None:
            path = folder / f"plain-{index}.parquet"
            pq.write_table(plain.sort_by("id"), path)
            path.unlink()

        measured, base = interleaved_s(ours, bare, repeat=9)
    speed = median(base) / median(measured)
    what = f"batch of {rows:,} rows encoded and uploaded (file)"
    return [Row(what, ms(median(measured)), ms(median(base)), speed, "higher (1 = as fast as sort and write)")]
