"""`persist read`: every row in every format, parts of them, and what changed."""

import csv
import io
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from persist_engine import connect
from persist_engine.cli import main as cli
from persist_engine.cli.export import flattened, writing
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain

at = Antichain.of


def expected_rows():
    return sorted([*range(30), 7])


def ids_of(data, form):
    match form:
        case "arrow":
            return pa.ipc.open_stream(data).read_all()["id"].to_pylist()
        case "parquet":
            return pq.read_table(io.BytesIO(data))["id"].to_pylist()
        case "csv":
            return pyarrow.csv.read_csv(io.BytesIO(data))["id"].to_pylist()
    return [json.loads(line)["id"] for line in data.decode().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["arrow", "parquet", "csv", "jsonl"])
def test_read_writes_every_row_in_every_format(monkeypatch, capfdbinary, shop, tmp_path, form):
    target = tmp_path / f"out.{form}"
    for output in (["--output", str(target)], []):
        monkeypatch.setattr(sys, "argv", ["persist", "read", shop.shard_id, "--format", form, *output, *shop.args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        out, _ = capfdbinary.readouterr()
        if output:
            assert out == b""
            out = target.read_bytes()
        assert ids_of(out, form) == expected_rows()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))) == [target.name]


@pytest.mark.slow
def test_read_writes_every_row_into_a_pipe(shop):
    form = "parquet"
    piped = subprocess.run(
        [sys.executable, "-m", "persist_engine.cli", "read", shop.shard_id, "--format", form, *shop.args],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert ids_of(piped.stdout, form) == expected_rows()


def test_a_pipe_gets_null_and_no_text_apart(capsys):
    """As PostgreSQL's COPY reads it: they were the same cell, and a backslash was none of the text's."""
    texts = ["", None, "\\N", "a\tb\nc\\d\r"]
    batch = pa.RecordBatch.from_pydict({"id": [1, 2, 3, 4], "text": texts})
    with writing("table", None, batch.schema) as write:
        write(batch)
    lines = capsys.readouterr().out.split("\n")
    assert lines == ["id\ttext", "1\t", "2\t\\N", "3\t\\\\N", "4\ta\\tb\\nc\\\\d\\r", ""]


@pytest.mark.parametrize("form", ["arrow", "parquet", "csv", "jsonl", "table"])
def test_regression_read_writes_a_null_struct_whose_fields_are_not_null(tmp_path, capsys, form):
    """Parquet takes it for a null in each of these fields, and refused the file."""
    x = pa.field("x", pa.int64(), nullable=False)
    p = pa.StructArray.from_arrays([pa.array([None, 5], pa.int64())], fields=[x], mask=pa.array([True, False]))
    val = pa.StructArray.from_arrays([p], names=["p"])
    batch = pa.RecordBatch.from_arrays(
        [pa.array([{"id": 1}, {"id": 2}]), val, pa.array([0, 0]), pa.array([1, 1])],
        names=["key", "val", "time", "diff"],
    )
    flat = flattened(batch)
    with writing(form, None if form == "table" else tmp_path / "out", flat.schema) as write:
        write(flat)
    if form == "table":
        assert "{'x': 5}" in capsys.readouterr().out
        return
    assert ids_of((tmp_path / "out").read_bytes(), form) == [1, 2]
    if form == "parquet":
        assert pq.read_table(tmp_path / "out")["p"].to_pylist() == [None, {"x": 5}]


@pytest.mark.slow
def test_jsonl_and_csv_hold_text_bytes_and_nested_fields(persist, shop):
    _, out, _ = persist("read", shop.shard_id, "--json", *shop.args)
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[3] == {"id": 3, "name": "näme 3", "x": 1.5, "raw": "03", "at": None, "nested": {"a": 3}}
    _, out, _ = persist("read", shop.shard_id, "--format", "csv", *shop.args)
    found = list(csv.DictReader(out.splitlines()))
    assert list(found[0]) == ["id", "name", "x", "raw", "at", "nested"]
    assert json.loads(next(row["nested"] for row in found if row["id"] == "3")) == {"a": 3}


@pytest.mark.slow
def test_read_as_of_an_older_time_limits_and_updates(persist, shop):
    _, out, _ = persist("read", shop.shard_id, "--as-of", 3, "--json", *shop.args)
    assert [json.loads(line)["id"] for line in out.splitlines()] == [i for i in range(30) if i % 12 <= 3]
    _, out, _ = persist("read", shop.shard_id, "--limit", 2, "--json", *shop.args)
    assert len(out.splitlines()) == 2
    _, out, _ = persist("read", shop.shard_id, "--updates", "--json", *shop.args)
    updates = [json.loads(line) for line in out.splitlines()]
    assert [u["diff"] for u in updates if u["key"]["id"] == 7] == [2]
    code, out, _ = persist("read", shop.shard_id, *shop.args)
    assert (code, out.splitlines()[0].split("\t")[:2]) == (0, ["id", "name"])


@pytest.mark.slow
def test_a_row_counted_less_than_nothing_is_refused_by_name(persist, shop):
    with (
        PersistClient.open(shop.location) as client,
        client.open_writer(shop.shard_id, shop.schema, purpose="t") as writer,
    ):
        gone = [(((99, "gone"), (None, None, None, None)), 12, -1)]
        writer.compare_and_append(gone, expected_upper=at(12), new_upper=at(13))
    code, _, err = persist("read", shop.shard_id, *shop.args)
    assert code == 73
    assert "99" in err
    assert persist("read", shop.shard_id, "--updates", *shop.args)[0] == 0


@pytest.mark.slow
def test_rows_are_filtered_cut_and_counted(persist, shop):
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--where", "id < 3 AND x >= 0.5", "--columns", "id,x")
    assert (code, out.splitlines()) == (0, ["id\tx", "1\t0.5", "2\t1.0"])
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--where", "id > 1000", "--format", "csv")
    assert (code, len(out.splitlines())) == (0, 1)
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--count")
    assert (code, out.splitlines()) == (0, ["rows", "31"])
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--count", "--json", "--where", "id = 7")
    assert (code, json.loads(out)) == (0, {"rows": 2})
    code, _, err = persist("read", shop.shard_id, *shop.args, "--where", "nope = 1")
    assert code == 64
    assert "no column nope; there are id, name, x" in err


def test_a_table_that_counts_its_writes_is_read_by_numbers(persist, tmp_path):
    """All of its times are before any instant: a read of its changes since then showed none."""
    with connect(tmp_path, maintain=False) as db:
        db.create("visits", key="id BIGINT", clock="counter", retain=100).append([{"id": 1}])
    stores = ("--blob", f"file://{tmp_path}/blobs", "--consensus", f"sqlite://{tmp_path}/consensus.db")
    for given in (["--from", "-1h"], ["--from", "1", "--to", "2026-01-01T00:00:00Z"], ["--as-of", "-1h"]):
        code, _, err = persist("read", "visits", *stores, *given)
        assert code == 64
        assert f"{given[-2]}: shard" in err
        assert "counts its writes, so a time is a number" in err
    code, out, _ = persist("read", "visits", *stores, "--from", "start", "--to", 1, "--format", "csv")
    assert (code, out.splitlines()[1:]) == (0, ['1,"insert",1'])


@pytest.mark.slow
def test_read_shows_what_changed_between_two_times(persist, shop):
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--from", 10, "--columns", "id")
    rows = [line.split("\t") for line in out.splitlines()]
    assert (code, rows[0]) == (0, ["_time", "_change", "id"])
    assert rows[1:] == [["11", "insert", "7"], ["11", "insert", "11"], ["11", "insert", "23"]]
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--from", "start", "--to", 0, "--json", "--updates")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["key"]["id"], line["time"], line["diff"]) for line in lines] == [(0, 0, 1), (12, 0, 1), (24, 0, 1)]
    for wrong, said in (
        (["--to", "5"], "--to needs --from"),
        (["--from", "5", "--as-of", "7"], "does not go with --as-of"),
        (["--from", "5", "--count"], "does not go with --count"),
        (["--from", "-none"], "--from takes a time, or `latest`; '-none' is not a time ago such as -1h"),
        (["--from", "now"], "--from takes a time, or `latest`; the time must be a whole number"),
        (["--from", "1h"], "not str '1h'; a time ago begins with a minus, as in -1h"),
        (["--to", "2013-01-01", "--from", "5"], "no time zone, so its instant is unknown: add one"),
        (["--from", "9", "--to", "8"], "after 9"),
        (["--from", "5", "--to", "99"], "is not written up to 99 yet"),
    ):
        code, _, err = persist("read", shop.shard_id, *shop.args, *wrong)
        assert code != 0
        assert said in err
