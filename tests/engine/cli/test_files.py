"""Files that `persist read` writes are whole, durable and nobody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from persist_engine.cli.export import writing

BATCH = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})


def test_two_processes_of_the_same_number_write_beside_each_other(tmp_path: Path) -> None:
    """As containers that share a directory have them, and one that was killed may have had it before."""
    (tmp_path / f".rows.{os.getpid()}.partial").write_bytes(b"theirs")
    path = tmp_path / "rows"
    with writing("jsonl", path, BATCH.schema) as first, writing("jsonl", path, BATCH.schema) as second:
        first(BATCH)
        second(BATCH.slice(0, 1))
        first(BATCH)
    assert path.read_text().count("\n") == 6
    assert (tmp_path / f".rows.{os.getpid()}.partial").read_bytes() == b"theirs"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_is_durable_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = [], os.fsync

    def fsync(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink(), (tmp_path / "rows").exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with writing("parquet", tmp_path / "rows", BATCH.schema) as write:
        write(BATCH)
    (file, early), (directory, late) = synced
    assert (file.parent, early) == (tmp_path, False)
    assert (directory, late) == (tmp_path, True)
