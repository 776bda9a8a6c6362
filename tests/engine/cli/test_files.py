"""Files that `persist read` writes are whole, durable and never shared with another process."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage
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


def test_regression_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """A file was moved into the place of a device: as root, of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with writing("jsonl", pipe, BATCH.schema) as write:
            write(BATCH)
        assert os.read(reader, 4096).count(b"\n") == 3
    finally:
        os.close(reader)
    assert (pipe.is_fifo(), list(tmp_path.iterdir())) == (True, [pipe])


def test_a_pipe_that_closes_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    closes = writing("csv", pipe, BATCH.schema)
    write = closes.__enter__()
    os.close(reader)
    write(BATCH)
    with pytest.raises(InvalidUsage, match="Broken pipe"):
        closes.__exit__(None, None, None)
    assert pipe.is_fifo()


def test_an_output_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidUsage, match="cannot write"), writing("csv", tmp_path / "loop" / "rows", BATCH.schema):
        pass


def test_an_output_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "rows"
    link.symlink_to(target)
    with writing("jsonl", link, BATCH.schema) as write:
        write(BATCH)
    assert (link.is_symlink(), target.read_text().count("\n")) == (True, 3)
    assert list(target.parent.iterdir()) == [target]
