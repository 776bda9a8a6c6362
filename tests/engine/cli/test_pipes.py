"""Rows that come through a pipe whose writer stays: what is refused ends at once, and what is taken is all of it."""

from __future__ import annotations

import csv
import gzip
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import connect
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.tables import files
from persist_engine.cli.tables.commands import InputFormat
from persist_engine.cli.tables.files import batches_of

pytestmark = pytest.mark.slow
LINES = b"".join(b"%d,a\n" % number for number in range(600_000))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A pipe that this process keeps open to write."""
    path = tmp_path / "rows.csv"
    os.mkfifo(path)
    keeper = os.open(path, os.O_RDWR)
    yield path, keeper
    os.close(keeper)


def append(path: Path | str, tmp_path: Path, **given: Any) -> subprocess.Popen[bytes]:
    stores = ["--blob", f"file://{tmp_path}/shop/blobs", "--consensus", f"sqlite://{tmp_path}/shop/consensus.db"]
    command = [sys.executable, "-m", "persist_engine.cli", "append", "orders", str(path), "--format", "csv", *stores]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **given)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"id,nam\n", b"name is missing; nam is no column of the table"),
        (b"id,name\n" + LINES + b"x,y\n" * 600_000, b"id is BIGINT: invalid value 'x'"),
    ],
    ids=["a wrong column", "a wrong value after megabytes"],
)
def test_a_refusal_waits_for_no_writer(pipe: tuple[Path, int], tmp_path: Path, text: bytes, words: bytes) -> None:
    path, keeper = pipe
    with connect(tmp_path / "shop") as db:
        db.create("orders", key="id BIGINT", value="name STRING")
    with append(path, tmp_path) as process:
        try:
            threading.Thread(target=os.write, args=(keeper, text), daemon=True).start()
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 64
    assert words in err


@pytest.mark.parametrize("is_pipe", [False, True])
def test_regression_a_stream_of_arrow_without_its_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pipe: bool
) -> None:
    """What a writer wrote before it was killed between two batches was taken for all there is, and an overwrite removed the rest."""
    rows = pa.table({"id": range(3000), "name": ["a"] * 3000})
    whole = io.BytesIO()
    with pa.ipc.new_stream(whole, rows.schema) as stream:
        for batch in rows.to_batches(max_chunksize=1000):
            stream.write_batch(batch)
        cut = whole.tell()
    name = tmp_path / "rows.arrow"

    def read(data: bytes) -> int:
        name.write_bytes(data)
        piped = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]  # its bytes are no file, like those of a pipe
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
        source = "-" if is_pipe else str(name)
        found = batches_of([source], InputFormat.ARROW, rows.schema, lambda *_: None)
        return sum(table.num_rows for table in found)

    assert read(whole.getvalue()) == 3000
    with pytest.raises(InvalidUsage, match="is not arrow that the table accepts: it has no mark of its end"):
        read(whole.getvalue()[:cut])


def test_lines_come_in_pieces(pipe: tuple[Path, int], tmp_path: Path) -> None:
    path, keeper = pipe
    text = b"id,name\n" + LINES
    with connect(tmp_path / "shop") as db:
        orders = db.create("orders", key="id BIGINT", value="name STRING")
        with append(path, tmp_path) as process:
            writer = os.open(path, os.O_WRONLY)
            for piece in (text[:3], text[3:9], text[9:9]):
                os.write(writer, piece)
            at = 9
            while at < len(text):
                at += os.write(writer, text[at : at + 1_000_003])
            os.close(writer)
            os.dup2(os.open(os.devnull, os.O_RDWR), keeper)  # the last writer leaves
            process.communicate(timeout=120)
        assert process.returncode == 0
        assert orders.count() == 600_000


def test_regression_a_refusal_while_the_writer_writes_on_ends_the_process_as_any_other(tmp_path: Path) -> None:
    """A thread of Arrow was still reading in Python when that ended: SIGABRT in every second run."""
    with connect(tmp_path / "shop") as db:
        db.create("orders", key="id BIGINT", value="name STRING")
    endless = "echo id,name; exec yes x,y"
    for _ in range(6):
        writer = subprocess.Popen(["sh", "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with writer, append("-", tmp_path, stdin=writer.stdout) as process:
            assert writer.stdout is not None
            writer.stdout.close()
            _, err = process.communicate(timeout=120)
        assert (process.returncode, err.count(b"\n")) == (64, 1), err


WANTED = pa.schema([("id", pa.int64()), ("name", pa.string())])


def rows_of(data: bytes, tmp_path: Path) -> list[dict[str, Any]]:
    """What is read of a pipe with these bytes."""
    path = tmp_path / "pipe"
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def write() -> None:
        with suppress(BrokenPipeError):
            path.write_bytes(data)

    threading.Thread(target=write, daemon=True).start()
    tables = list(batches_of([str(path)], InputFormat.CSV, WANTED, lambda *_: None))
    return pa.concat_tables(tables).to_pylist()


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"], ids=["cr", "lf", "crlf"])
def test_regression_each_line_of_a_pipe_is_one_row_whatever_ends_it(tmp_path: Path, end: str) -> None:
    """Lines that a carriage return ends were read twice."""
    text = f"id,name{end}1,a{end}2,b{end}"
    assert rows_of(text.encode(), tmp_path) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


class Pieces(io.BytesIO):
    """Gives a few bytes at a time, as a pipe may."""

    def __init__(self, data: bytes, sizes: Iterator[int]) -> None:
        super().__init__(data)
        self._sizes = sizes

    def read1(self, size: int | None = -1, /) -> bytes:
        return self.read(next(self._sizes))


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", "a", '5"', '"', "a\nb", "x\r\ny", ",", 'a,b\n"q"\r'])),
        max_size=9,
    ),
    end=st.sampled_from(["\r", "\n", "\r\n"]),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    is_ended=st.booleans(),
)
@settings(deadline=None)
def test_pieces_of_a_pipe_are_cut_between_records(
    rows: list[tuple[int, str]], end: str, sizes: list[int], is_ended: bool
) -> None:
    text = io.StringIO()
    written = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_NONNUMERIC)
    written.writerows([("id", "name"), *rows])
    data = text.getvalue().encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK_BYTES", 60)
        tables = list(files._csv(Pieces(data if is_ended else data.removesuffix(end.encode()), cycle(sizes)), WANTED))
    found = [(row["id"], row["name"]) for row in pa.concat_tables(tables).to_pylist()]
    assert found == rows


def test_regression_a_pipe_without_lines_is_refused_before_all_of_it_is_read(tmp_path: Path) -> None:
    """All was kept, and searched again with each piece."""
    with pytest.raises(InvalidUsage, match="its first record, or a later one, has more than a MiB"):
        rows_of(b"a" * (1 << 22), tmp_path)


def test_regression_lines_that_a_shell_has_read_are_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("made by hand\nid,name\n1,a\n")
    with connect(tmp_path / "shop") as db:
        orders = db.create("orders", key="id BIGINT", value="name STRING")
        with file.open("rb") as opened:
            os.lseek(opened.fileno(), len("made by hand\n"), os.SEEK_SET)
            with append("-", tmp_path, stdin=opened) as process:
                _, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, b"")
        assert orders.to_pylist() == [{"id": 1, "name": "a"}]


def test_standard_input_is_read_once_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUsage, match="- is named more than once"):
        list(batches_of(["-", "-"], InputFormat.CSV, WANTED, lambda *_: None))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidUsage, match="standard input is closed"):
        list(batches_of(["-"], InputFormat.CSV, WANTED, lambda *_: None))


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_regression_a_mark_of_utf_8_within_a_pipe_belongs_to_its_value(tmp_path: Path, name: str) -> None:
    """Arrow drops the mark at the beginning of each block that it reads, so which values lost theirs depended on the blocks."""
    names = [f"\ufeff{'x' * (number % 97)}{number}" for number in range(60_000)]
    text = "\ufeffname,id\n" + "".join(f"{name},{number}\n" for number, name in enumerate(names))
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    wanted = pa.schema([("name", pa.string()), ("id", pa.int64())])
    tables = list(batches_of([str(path)], None, wanted, lambda *_: None))
    assert len(tables) > 2, "the blocks are cut between records"
    assert pa.concat_tables(tables).to_pydict() == {"name": names, "id": list(range(60_000))}
