"""Looking for one value of a column that does not order the rows: a table with a Bloom filter of the column against a table without one.

Measures the processor time of a call, and what it fetches. `python -m bench lookup`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from persist_engine import Settings, Table, connect
from persist_engine.base.settings import BatchSettings
from persist_kit.counted import CountedMetrics

from bench.measure import Row

BATCHES = 20


def run(folder: Path, quick: bool) -> list[Row]:
    """20 appends, and one run after a compaction; values that exist, and values that do not; and the cost of a write."""
    rows, repeat = (5_000, 5) if quick else (50_000, 9)
    out: list[Row] = []
    for name, wide in (("narrow", 0), ("wide", 60)):
        batches = [_rows(number * rows, rows, wide) for number in range(BATCHES)]
        metrics = CountedMetrics()
        with connect(
            folder / name,
            maintain=False,
            settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)),
            metrics=metrics,
        ) as db:
            tables = [
                db.create(
                    label, key="id BIGINT", value="email STRING, amount DOUBLE, text STRING", bloom=bloom, retain=None
                )
                for label, bloom in (("with", ["email"]), ("without", []))
            ]
            costs = [[_cpu_s(lambda t=table, b=batch: t.append(b)) for table in tables] for batch in batches]
            ours, theirs = (median(each) for each in zip(*costs, strict=True))
            out.append(Row(f"append of {rows:,} {name} rows", *_ms(ours, theirs), ours / theirs, "lower"))
            ours, theirs = (table.describe().bytes for table in tables)
            out.append(
                Row(f"their bytes, {name}", f"{ours / 1e6:.1f} MB", f"{theirs / 1e6:.1f} MB", ours / theirs, "lower")
            )
            for shape in (f"{BATCHES} appends", "one run"):
                for what, where in (
                    ("a value", f"email = 'user{7919 * 3}@example.org'"),
                    ("no value", "email = 'user5x@example.org'"),
                ):
                    out += _compared(f"{what} in {shape} of {name} rows", tables, where, metrics, repeat)
                for table in tables:
                    table.optimize()
    return out


def _compared(what: str, tables: list[Table], where: str, metrics: CountedMetrics, repeat: int) -> list[Row]:
    times: list[list[float]] = [[], []]
    fetched: list[tuple[float, float]] = []
    for turn in range(repeat + 1):
        for side, table in enumerate(tables):
            before = _fetched(metrics)
            took = _cpu_s(lambda t=table: t.scan(where).to_arrow())
            if turn:
                times[side].append(took)
            else:
                after = _fetched(metrics)
                fetched.append((after[0] - before[0], after[1] - before[1]))
    ours, theirs = map(median, times)
    (our_bytes, our_gets), (bytes_, gets) = fetched
    return [
        Row(f"{what}, processor time", *_ms(ours, theirs), ours / theirs, "lower"),
        Row(
            f"{what}, bytes fetched", f"{our_bytes / 1e6:.2f} MB", f"{bytes_ / 1e6:.2f} MB", our_bytes / bytes_, "lower"
        ),
        Row(f"{what}, requests", f"{our_gets:.0f}", f"{gets:.0f}", our_gets / gets, "lower"),
    ]


def _rows(start: int, count: int, wide: int) -> pa.Table:
    rng = np.random.default_rng(start)
    ids = np.arange(start, start + count)
    emails = [f"user{number * 7919 % 100_000_007}@example.org" for number in ids]
    texts = [rng.bytes(wide).hex() for _ in range(count)]
    return pa.table({"id": ids, "email": emails, "amount": rng.random(count), "text": texts})


def _fetched(metrics: CountedMetrics) -> tuple[float, float]:
    return metrics.total("fetched_bytes", path="snapshot"), metrics.total("shard_blob_gets")


def _cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _ms(ours: float, theirs: float) -> tuple[str, str]:
    return f"{1000 * ours:.1f} ms", f"{1000 * theirs:.1f} ms"
