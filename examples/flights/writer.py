"""Append the flights of 2013 to a shard, week by week, through the Python API alone. Prints a line after each acknowledged week.

After a kill at any point, the next start goes on after the last week in the shard. `demo.py` kills it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Appended, Location, PersistClient, Schema, ShardId

DATA = Path(__file__).resolve().parent / "data" / "flights.parquet"
KEY, VALUE = ["time_hour", "carrier", "flight", "origin"], ["dest", "dep_delay"]
WEEK_MS = 7 * 24 * 3600 * 1000


def flights() -> pa.Table:
    """The flights to append, in time order."""
    return pq.read_table(DATA, columns=[*KEY, *VALUE])


def schema_of(table: pa.Table) -> Schema:
    """Key and value of the shard."""
    return Schema(key=table.select(KEY).schema, val=table.select(VALUE).schema)


def updates(table: pa.Table, times_ms: pa.Array) -> pa.Table:
    """One update for each row, with diff 1, at the row's hour."""
    sides = [pa.StructArray.from_arrays([table[n].combine_chunks() for n in names], names) for names in (KEY, VALUE)]
    return pa.table({"key": sides[0], "val": sides[1], "time": times_ms, "diff": np.ones(len(table), np.int64)})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("blob", "consensus", "shard"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    table = flights()
    times_ms = table["time_hour"].cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_numpy()
    client = PersistClient.open(Location(blob=args.blob, consensus=args.consensus))
    with client, client.open_writer(ShardId(args.shard), schema_of(table), purpose="demo writer") as writer:
        written = writer.fetch_recent_upper()
        while written.time is not None and written.time <= times_ms[-1]:
            upper = max(written.time, int(times_ms[0]) // WEEK_MS * WEEK_MS) + WEEK_MS
            first, last = np.searchsorted(times_ms, [written.time, upper])
            week = updates(table.slice(first, last - first), pa.array(times_ms[first:last]))
            if not isinstance(writer.compare_and_append(week, expected_upper=written, new_upper=upper), Appended):
                raise SystemExit("error: another process writes this shard")
            written = writer.upper
            print(last, flush=True)  # the number of acknowledged flights


if __name__ == "__main__":
    main()
