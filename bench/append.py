"""A 50,000-row append against a plain pyarrow sort and Parquet write on the same disk."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from persist_engine import Antichain, Location, PersistClient, ShardId

from bench.data import SCHEMA, flat, updates
from bench.measure import Row, median, ms, timings_s


def run(folder: Path, quick: bool) -> list[Row]:
    """Times include building the batch, writing it and the compare-and-set. The baseline does not sync."""
    rows, repeat = (5_000, 5) if quick else (50_000, 20)
    tables = {index: updates(rows, time=index + 1, seed=index + 1) for index in range(-1, repeat)}
    with (
        PersistClient.open(
            Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        ) as client,
        client.open_writer(ShardId.new(), SCHEMA, purpose="bench") as writer,
    ):

        def ours(index: int) -> None:
            writer.compare_and_append(
                tables[index], expected_upper=Antichain.of(index + 1), new_upper=Antichain.of(index + 2)
            )

        measured = timings_s(ours, repeat=repeat)
    plain = {index: flat(table) for index, table in tables.items()}

    def bare(index: int) -> None:
        pq.write_table(plain[index].sort_by("id"), folder / f"plain-{index}.parquet")

    base = timings_s(bare, repeat=repeat)
    what = f"append of {rows:,} rows (file, sqlite)"
    return [Row(what, ms(median(measured)), ms(median(base)), median(measured) / median(base), "lower")]
