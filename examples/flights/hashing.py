"""A hash of a table's contents. It depends neither on the order of rows nor on their batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pyarrow as pa
from pyarrow import csv


def content_hash(batches: Iterable[pa.RecordBatch], columns: list[str]) -> tuple[int, str]:
    """(rows, hash): the SHA-256 of each row's text, summed modulo 2**256; duplicates count. Takes `columns` by name, in this order."""
    total, rows = 0, 0
    for batch in batches:
        sink = pa.BufferOutputStream()
        csv.write_csv(
            pa.table(batch.select(columns)), sink, csv.WriteOptions(include_header=False, quoting_style="all_valid")
        )
        for line in sink.getvalue().to_pybytes().splitlines():
            total += int.from_bytes(hashlib.sha256(line).digest())
            rows += 1
    return rows, f"{total % 2**256:064x}"
