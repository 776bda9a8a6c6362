"""Streams that are larger than what a write may hold: the memory of the process stays bounded, or the stream is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine import connect
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.tables import files
from persist_engine.cli.tables.commands import InputFormat
from persist_engine.rows.schema import Schema
from persist_engine.table import frames, writing
from persist_engine.table.columns import Columns

#: Batches of 8 MB of texts which do not compress to nothing in memory. The peak of a process is that of its whole life, so a small write of
#: the same kind comes first, which loads all that loads once.
STREAMED = """
import json, resource, sys
import pyarrow as pa
from persist_engine import connect
from persist_engine.base.errors import InvalidUsage

call, batches = sys.argv[2], int(sys.argv[3])
schema = pa.schema([("id", pa.int64()), ("text", pa.string())])

def rows(start, batches):
    for number in range(start, start + batches):
        ids = range(number * 1000, (number + 1) * 1000)
        yield pa.record_batch([pa.array(ids), pa.array([f"{each} " * 1000 for each in ids])], schema)

def stream(start, batches):
    return pa.RecordBatchReader.from_batches(schema, rows(start, batches))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

with connect(sys.argv[1], maintain=False) as db:
    table = db.create("big", key="id BIGINT", value="text STRING")
    getattr(table, call)(stream(0, 2))
    before, refused = peak(), None
    try:
        getattr(table, call)(stream(2, batches))
    except InvalidUsage as error:
        refused = str(error)
    print(json.dumps({"grown": peak() - before, "rows": table.count(), "refused": refused}))
"""


def run(tmp_path, call, batches):
    command = [sys.executable, "-c", STREAMED, (tmp_path / "shop").as_uri(), call, str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "most_mib"), [("append", 1300), ("overwrite", 1700)])
def test_a_stream_never_stands_in_memory(tmp_path, call, most_mib):
    """2.6 GB of rows. What a write grows by is its buffers: some 500 MB, and as much again to compare what is staged with what is there. Of
    half the rows it is the same; the more the faster the machine reads ahead.
    """
    found = run(tmp_path, call, 400)
    assert (found["rows"], found["refused"]) == (402_000 if call == "append" else 400_000, None)
    assert found["grown"] < most_mib << 20


@pytest.mark.slow
def test_an_upsert_refuses_a_stream_that_memory_might_not_hold(tmp_path):
    """10 GB, of which it takes little more than one."""
    found = run(tmp_path, "upsert", 1600)
    assert found["rows"] == 2000, "nothing of it was written"
    assert (
        "upsert holds its rows in memory, and the stream has more than 1.1 GB: upsert it in pieces" in found["refused"]
    )
    assert found["grown"] < 1600 << 20


def test_an_upsert_takes_a_stream_up_to_its_limit(orders, monkeypatch):
    rows = pa.table({"id": range(1000), "name": ["x"] * 1000, "price": pa.nulls(1000, pa.decimal128(10, 2))})
    monkeypatch.setattr(frames, "UPSERT_BYTES_MAX", 2 * rows.nbytes)
    assert orders.upsert(rows.to_reader(100)).inserted == 1000
    more = pa.concat_tables([rows] * 3)
    with pytest.raises(InvalidUsage, match="^table orders: upsert holds its rows in memory"):
        orders.upsert(more.to_reader(100))
    assert orders.upsert(more) == writing.Written(None), "a table that the caller holds is no stream"
    assert orders.upsert(iter([])) == writing.Written(None)


class Piped:
    """A pipe, which cannot seek, and which notes how much was read at once."""

    def __init__(self, data):
        self._data, self._at, self.most = data, 0, 0

    def read(self, size=-1):
        taken = self._data[self._at :] if size < 0 else self._data[self._at : self._at + size]
        self._at += len(taken)
        self.most = max(self.most, len(taken))
        return taken


PLAIN = Columns(Schema.from_ddl("id BIGINT", "name STRING, price DECIMAL(10,2)")).arrow
MAPPED = Columns(Schema.from_ddl("id BIGINT", "name STRING, tags MAP<STRING, BIGINT>")).arrow


@pytest.mark.parametrize("wanted", [PLAIN, MAPPED], ids=["plain", "maps"])
@pytest.mark.parametrize("block", [1, 7, 40, 1000, 1 << 20])
def test_json_lines_are_read_in_blocks(monkeypatch, wanted, block):
    monkeypatch.setattr(files, "JSON_BLOCK_BYTES", block)
    last = wanted.names[2]
    lines = [
        {"id": 1, "name": "a"},
        {"id": 2, "name": "b", last: 5 if last == "price" else {"x": 1}},
        {"id": 3},
        {"name": "é"},
    ]
    data = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode() + b"\n\n  \n"
    source = Piped(data)
    tables = list(files._jsonl(source, wanted))
    found = [row for table in tables for row in table.select(wanted.names).to_pylist(maps_as_pydicts="strict")]
    assert [(row["id"], row["name"]) for row in found] == [(1, "a"), (2, "b"), (3, None), (None, "é")]
    assert [row[last] is None for row in found] == [True, False, True, True]
    assert source.most <= block


@pytest.mark.parametrize("wanted", [PLAIN, MAPPED], ids=["plain", "maps"])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_column_that_no_line_has_is_missing_at_the_end(monkeypatch, wanted, block):
    monkeypatch.setattr(files, "JSON_BLOCK_BYTES", block)
    lines = b'{"id": 1, "name": "a"}\n{"id": 2, "name": "b"}\n'
    assert wanted.names[2] not in list(files._jsonl(Piped(lines), wanted))[-1].column_names
    bad = b'{"id": 1, "name": "a"}\n\n[]\n'
    if wanted is MAPPED:
        with pytest.raises(InvalidUsage, match="line 3 is not an object"):
            list(files._jsonl(Piped(bad), wanted))


def test_parquet_from_a_pipe(tmp_path):
    rows = pa.table({"id": range(300_000)})
    pq.write_table(rows, tmp_path / "in.parquet", row_group_size=1000)
    source = Piped((tmp_path / "in.parquet").read_bytes())
    tables = list(files._READERS[InputFormat.PARQUET](source, PLAIN))
    assert pa.concat_tables(tables) == rows
    assert len(tables) > 2
    assert source.most <= 1 << 20


def test_json_that_lacks_a_column_writes_nothing(tmp_path, persist, monkeypatch):
    monkeypatch.setattr(files, "JSON_BLOCK_BYTES", 30)
    with connect(tmp_path / "shop", maintain=False) as db:
        table = db.create("t", key="id BIGINT", value="name STRING")
        (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {number}}}\n' for number in range(100)))
        stores = ["--blob", f"file://{tmp_path}/shop/blobs", "--consensus", f"sqlite://{tmp_path}/shop/consensus.db"]
        code, _, error = persist("append", "t", str(tmp_path / "in.jsonl"), *stores)
        assert (code, "name is missing" in error, table.count()) == (64, True, 0)
