"""Rows of packed files: the name says how they are packed, and what is not whole is refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.export import writing
from persist_engine.cli.tables import files
from persist_engine.cli.tables.files import batches_of
from persist_engine.rows.ddl import parse_ddl

SCHEMA = parse_ddl("id BIGINT, name STRING")
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
ROWS = pa.table([range(20_000), [f"n{each}" for each in range(20_000)]], schema=SCHEMA)


def read(path: Path) -> pa.Table:
    return pa.concat_tables(batches_of([str(path)], None, SCHEMA, lambda *_: None))


def packed(path: Path, data: bytes) -> Path:
    """The file, packed as its name says, in two members where a format has members: `cat a.gz b.gz` is a file too."""
    with pa.OSFile(str(path), "wb") as file:
        for half in data[: len(data) // 2], data[len(data) // 2 :]:
            whole = pa.BufferOutputStream()
            with pa.output_stream(whole, compression=CODECS[path.suffix.lower()]) as out:
                out.write(half)
            file.write(whole.getvalue())
    return path


@pytest.mark.parametrize("codec", ["gz", "zst", "GZ", "bz2", "lz4"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
def test_a_packed_file_has_the_rows_of_the_file(tmp_path, kind, codec):
    """It was empty, or of no format."""
    plain = tmp_path / f"rows.{kind}"
    with writing(kind, plain, SCHEMA) as write:
        for batch in ROWS.to_batches(max_chunksize=5000):
            write(batch)
    seen: list[tuple[int, int, int]] = []
    path = packed(tmp_path / f"rows.{kind}.{codec}", plain.read_bytes())
    tables = batches_of([str(path)], None, SCHEMA, lambda *at: seen.append(at))
    assert pa.concat_tables(tables).equals(ROWS)
    size = path.stat().st_size
    assert seen[-1] == (ROWS.num_rows, size, size)


@pytest.mark.parametrize("codec", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_packed_file_that_was_cut_off_is_refused(tmp_path, kind, codec):
    text = "id,name\n1,a\n" * 9 if kind == "csv" else '{"id": 1, "name": "a"}\n' * 9
    path = packed(tmp_path / f"rows.{kind}.{codec}", text.encode())
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) * 3 // 4, len(whole) // 4):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidUsage, match=f"cannot read .*rows.{kind}.{codec}: Truncated compressed stream"):
            read(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidUsage, match=f"^.*rows.{kind}.{codec} is empty, but a packed file never is"):
        read(path)


@pytest.mark.parametrize("chosen", [None, "csv"])
def test_what_is_not_packed_as_its_name_says_is_refused(tmp_path, chosen):
    path = tmp_path / "rows.csv.gz"
    path.write_text("id,name\n1,a\n")
    with pytest.raises(InvalidUsage, match=r"^cannot read .*rows.csv.gz: zlib inflate failed: incorrect header check"):
        read(path)
    path = tmp_path / "rows.csv.xz"
    path.write_text("id,name\n1,a\n")
    with pytest.raises(InvalidUsage, match=r"^\S*rows.csv.xz is packed as .xz, which persist cannot read: unpack it"):
        list(batches_of([str(path)], chosen, SCHEMA, lambda *_: None))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_packed_file_is_read_in_bounded_memory(tmp_path, monkeypatch, kind):
    """A MiB of text is some MiB of values, at most a few blocks of them at once."""
    monkeypatch.setattr(files, "JSON_BLOCK_BYTES", 1 << 20)
    line = "1,a\n" if kind == "csv" else '{"id": 1, "name": "a"}\n'
    count = (32 << 20) // len(line)
    path = packed(tmp_path / f"rows.{kind}.zst", ("id,name\n" * (kind == "csv") + line * count).encode())
    pool, rows = pa.default_memory_pool(), 0
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        for table in batches_of([str(path)], None, SCHEMA, lambda *_: None):
            rows += table.num_rows
            assert pool.bytes_allocated() - before < 24 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert rows == count
