"""Rows that come through a pipe whose writer stays: what is refused ends at once, and what is taken is all of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from persist_engine import connect

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


def append(path: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    stores = ["--blob", f"file://{tmp_path}/shop/blobs", "--consensus", f"sqlite://{tmp_path}/shop/consensus.db"]
    command = [sys.executable, "-m", "persist_engine.cli", "append", "orders", str(path), *stores]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"id,nam\n", b"name is missing; nam is no column of the table"),
        (b"id,name\n" + LINES + b"x,y\n" * 600_000, b"conversion error"),
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
