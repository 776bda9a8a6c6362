"""Rows for the benches: an int64 key, a 32-byte text value, one time, diff 1."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from persist_engine import Schema

SCHEMA = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("name", pa.string())]))


def updates(rows: int, *, time: int, seed: int = 0, first: int = 0) -> pa.Table:
    """`rows` updates with distinct shuffled keys from `first` on, all at `time`."""
    rng = np.random.default_rng(seed)
    keys = rng.permutation(rows).astype(np.int64) + first
    texts = pa.array(np.char.mod("%032x", rng.integers(0, 2**62, rows)))
    names = (
        texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    )  # a large text array comes in chunks
    return pa.table(
        {
            "key": pa.StructArray.from_arrays([pa.array(keys)], ["id"]),
            "val": pa.StructArray.from_arrays([names], ["name"]),
            "time": pa.array(np.full(rows, time, dtype=np.int64)),
            "diff": pa.array(np.ones(rows, dtype=np.int64)),
        }
    )


def flat(table: pa.Table) -> pa.Table:
    """The same rows with plain columns, for plain Parquet."""
    return pa.table(
        {
            "id": table["key"].combine_chunks().field(0),
            "name": table["val"].combine_chunks().field(0),
            "time": table["time"],
            "diff": table["diff"],
        }
    )


def interleaved(rows: int, *, at: int, of: int, time: int) -> pa.Table:
    """Like `updates`, with the keys `at`, `at + of`, `at + 2 * of`, ..., so that the keys of `of` of these tables interleave."""
    table = updates(rows, time=time, seed=at)
    keys = table["key"].combine_chunks().field(0).to_numpy() * of + at
    return table.set_column(0, "key", pa.StructArray.from_arrays([pa.array(keys)], ["id"]))
