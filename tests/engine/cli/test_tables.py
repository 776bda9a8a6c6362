"""Tables by name on the command line: what Python and the commands do is the same, from files of every format and from standard input."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine import connect
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.options import complete_named
from persist_engine.cli.tables import files
from persist_engine.cli.tables.commands import InputFormat, complete_table

ROWS = [
    {"id": 1, "name": "ada", "price": Decimal("1.50"), "at": None},
    {"id": 2, "name": None, "price": Decimal("-3.00"), "at": None},
    {"id": 3, "name": "", "price": None, "at": None},
]
ARROW = pa.Table.from_pylist(ROWS, schema=pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.decimal128(10, 2)), ("at", pa.timestamp("us", tz="UTC"))]))  # fmt: skip


@pytest.fixture
def store(tmp_path, persist):
    """Runs commands on the stores of the folder."""
    args = ["--blob", f"file://{tmp_path}/shop/blobs", "--consensus", f"sqlite://{tmp_path}/shop/consensus.db"]

    def run(*words, code=0):
        found, out, err = persist(*words, *args)
        assert found == code, err
        return out if not code else err

    run.args = args
    run.folder = tmp_path
    run("create", "orders", "--key", "id BIGINT", "--value", "name STRING, price DECIMAL(10,2), at TIMESTAMP")
    return run


def rows_of(store):
    with connect(store.folder / "shop", maintain=False) as db:
        return db["orders"].to_pylist()


def written_as(path, kind):
    if kind == "csv":
        path.write_text('id,name,price,at\n1,"ada",1.50,\n2,,-3.00,\n3,"",,\n')
    elif kind == "jsonl":
        path.write_text(
            '{"id": 1, "name": "ada", "price": 1.5, "at": null}\n{"id": 2, "price": -3}\n{"name": "", "id": 3}\n'
        )
    elif kind == "parquet":
        pq.write_table(ARROW, path)
    else:
        with path.open("wb") as file, pa.ipc.new_stream(file, ARROW.schema) as stream:
            stream.write_table(ARROW)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("command", ["append", "upsert", "overwrite"])
def test_rows_from_files(store, kind, command):
    path = written_as(store.folder / f"rows.{kind}", kind)
    done = json.loads(store(command, "orders", path, "--json"))
    assert (done["inserted"], done["deleted"]) == (3, 0)
    assert rows_of(store) == ROWS


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
def test_rows_from_standard_input(store, kind, monkeypatch):
    data = written_as(store.folder / "rows", kind).read_bytes()

    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Pipe(data)))
    assert "give --format" in store("append", "orders", "-", code=64)
    store("append", "orders", "-", "--format", kind)
    assert rows_of(store) == ROWS


def test_a_column_that_python_adds_while_rows_wait_in_a_pipe(store, monkeypatch):
    """The command has opened the table before. A later one deletes by that column."""
    store("create", "t", "--key", "id BIGINT", "--value", "name STRING")

    class Pipe(io.BytesIO):
        def read(self, *args):
            with connect(store.folder / "shop", maintain=False) as db:
                if "note" not in db["t"].schema.names:
                    db["t"].alter(add="note STRING")
            return super().read(*args)

        def __getattribute__(self, name):
            return self.read if name == "read1" else super().__getattribute__(name)

    rows = Pipe(b'{"id": 1, "name": "ada", "note": "new"}\n')
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=rows))
    store("append", "t", "-", "--format", "jsonl")
    with connect(store.folder / "shop", maintain=False) as db:
        assert db["t"].to_pylist() == [{"id": 1, "name": "ada", "note": "new"}]
        store("delete", "t", "--where", "note = 'new'")
        assert db["t"].count() == 0


def test_a_table_that_counts_its_writes(store):
    create = "create", "t", "--key", "id BIGINT", "--clock", "counter"
    assert "such as 1000, or none" in store(*create, "--retain", "7 days", code=64)
    store(*create)
    path = store.folder / "in.csv"
    path.write_text("id\n1\n")
    assert json.loads(store("append", "t", str(path), "--json"))["time"] == 1
    found = json.loads(store("describe", "t", "--json"))
    assert (found["clock"], found["retain"], found["last_write"]) == (
        "counter, one more with each write",
        "1000 writes",
        1,
    )
    assert store("read", "t", "--as-of", str(found["last_write"]), "--json").strip() == '{"id": 1}'


def test_nanoseconds_of_a_file_on_request(store):
    path = store.folder / "in.parquet"
    pq.write_table(ARROW.set_column(3, "at", pa.array([1001, None, -1], pa.timestamp("ns", "UTC"))), path)
    for command in ("append", "upsert", "overwrite"):
        assert "coerce='truncate' cuts digits off (in commands: --coerce)" in store(
            command, "orders", str(path), code=64
        )
        assert "would lose data" in store(command, "orders", str(path), "--coerce", "us", code=64)
        store(command, "orders", str(path), "--coerce", "truncate")
    assert [str(row["at"]) for row in rows_of(store)] == [
        "1970-01-01 00:00:00.000001+00:00",
        "None",
        "1969-12-31 23:59:59.999999+00:00",
    ]
    assert "columns at have nanoseconds" in store("create", "t", "--key", "id", "--like", str(path), code=64)
    store("create", "t", "--key", "id", "--like", str(path), "--coerce", "us")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_what_read_writes_can_be_written_again(store, kind):
    store("append", "orders", written_as(store.folder / "rows.parquet", "parquet"))
    path = store.folder / f"out.{kind}"
    store("read", "orders", "--output", path)
    assert json.loads(store("overwrite", "orders", path, "--json"))["time"] is None, "nothing differs"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_dates_and_bytes_that_read_writes_can_be_written_again(store, kind):
    value = "d DATE, b BINARY" + (", s STRUCT<d: DATE, b: BINARY>" if kind == "jsonl" else "")
    store("create", "days", "--key", "id BIGINT", "--value", value)
    rows = [(1, date(2024, 2, 29), b"\x00\xff"), (2, None, b""), (3, date(1, 1, 1), None), (4, None, None)]
    with connect(store.folder / "shop", maintain=False) as db:
        db["days"].append([
            {"id": id_, "d": d, "b": b} | ({"s": {"d": d, "b": b} if id_ < 4 else None} if kind == "jsonl" else {})
            for id_, d, b in rows
        ])  # fmt: skip
        before = db["days"].to_pylist()
    (store.folder / f"days.{kind}").write_text(store("read", "days", "--format", kind))
    assert "nothing" not in store("overwrite", "days", str(store.folder / f"days.{kind}"))
    store("append", "days", str(store.folder / f"days.{kind}"))
    with connect(store.folder / "shop", maintain=False) as db:
        assert db["days"].to_pylist() == [row for row in before for _ in range(2)]
        assert len(db["days"].history()) == 2, "the overwrite found nothing to write"


def test_a_file_of_nothing_removes_nothing(store):
    """What a broken export left. Beside it, a first line without rows empties the table."""
    file = store.folder / "rows.csv"
    store("append", "orders", str(written_as(file, "csv")))
    file.write_text("")
    refusal = store("overwrite", "orders", str(file), code=64)
    assert "rows.csv is empty: the first line of a CSV file names the columns" in refusal
    assert len(rows_of(store)) == 3
    file.write_text("id,name,price,at\n")
    store("overwrite", "orders", str(file))
    assert rows_of(store) == []


@pytest.mark.parametrize("name", ["rows.csv", "-"])
@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
@pytest.mark.parametrize(
    ("columns", "rows", "is_cut"),
    [
        ("id,name", '1,"a{end}2,b{end}3,c{end}', True),
        ("id,name", '1,a{end}2,"', True),
        ("id,name", '1,"a ""q""{end}', True),
        ("id,name", '1,"a{end}"{end}', False),
        ("id,name", '1,""""{end}', False),
        ("id,name", '1,5" disk{end}', False),
        ("id,name", '1,"a"{end}{end}', False),
        ("name", '"a{end}b', True),
        ("name", '"{end}"{end}', False),
    ],
)
def test_a_csv_that_ends_within_quotes_is_refused(name, end, columns, rows, is_cut, tmp_path, monkeypatch):
    """Arrow takes the rest of the file for one value: the rows in it would be lost."""
    line_end = end or "\n"
    text = (columns + line_end + rows.format(end=line_end)).removesuffix("" if end else "\n").encode()
    (tmp_path / "rows.csv").write_bytes(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))
    monkeypatch.chdir(tmp_path)
    wanted = pa.schema([("id", pa.int64()), ("name", pa.string())])
    read = files.batches_of([name], InputFormat.CSV, wanted, lambda *_: None)
    if is_cut:
        with pytest.raises(InvalidUsage, match="it ends within quotes that nothing closes"):
            list(read)
    else:
        assert sum(table.num_rows for table in read) == 1


def test_bytes_that_are_no_digits(store):
    store("create", "bytes", "--key", "id BIGINT", "--value", "b BINARY")
    file = store.folder / "rows.csv"
    file.write_text("id,b\n1,abc\n")
    assert "bytes are pairs of hexadecimal digits" in store("append", "bytes", str(file), code=64)


def test_several_files_are_one_commit(store):
    one, two = written_as(store.folder / "a.csv", "csv"), written_as(store.folder / "b.parquet", "parquet")
    assert json.loads(store("append", "orders", one, two, "--json"))["inserted"] == 6
    two.write_bytes(b"no parquet")
    assert "b.parquet is not parquet" in store("append", "orders", one, two, code=64)
    assert "cannot read nowhere.csv" in store("append", "orders", one, "nowhere.csv", code=64)
    assert "its name does not show its format" in store("append", "orders", "rows.xls", code=64)
    assert len(rows_of(store)) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,name\n1,a\n", "table orders: price is missing; at is missing"),
        ("id,name,price,at,x\n1,a,,,1\n", "x is no column of the table"),
        ("id,name,price,at\none,a,,\n", "is not csv that the table accepts: id is BIGINT: invalid value 'one'"),
        ('"id",name,"price",at\n1,a,1.234,\n', "is not csv that the table accepts: price is DECIMAL(10,2): "),
        ("id,name,price,at\n1,a\n", "is not csv that the table accepts"),
    ],
)
def test_files_that_do_not_fit(store, text, message):
    path = store.folder / "rows.csv"
    path.write_text(text)
    for command in ("append", "upsert", "overwrite"):
        assert message in store(command, "orders", path, code=64)
    assert rows_of(store) == []


def test_a_value_of_a_pipe_that_does_not_fit(store, monkeypatch):
    data = b"id,name,price,at\n" + b"1,a,,\n" * 400_000 + b"2,b,x,\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
    assert "price is DECIMAL(10,2): " in store("append", "orders", "-", "--format", "csv", code=64)
    assert rows_of(store) == []


def test_objects_that_do_not_fit(store):
    path = store.folder / "rows.jsonl"
    path.write_text('{"id": 1, "nam": "a"}\n')
    assert "name is missing; price is missing; at is missing; nam is no column" in store(
        "append", "orders", path, code=64
    )
    path.write_text("")
    assert json.loads(store("append", "orders", path, "--json"))["inserted"] == 0


def test_an_overwrite_with_a_file_without_a_line_removes_nothing_unless_it_is_meant(store):
    """What wrote an empty file has often failed. JSON lines have no header that would say otherwise."""
    rows, empty = store.folder / "rows.jsonl", store.folder / "empty.jsonl"
    rows.write_text('{"id": 1, "name": "a", "price": null, "at": null}\n')
    empty.write_text("\n")
    store("append", "orders", rows)
    assert "empty.jsonl holds no line, so overwrite would remove all rows: give --allow-empty" in store(
        "overwrite", "orders", empty, code=64
    )
    assert [row["id"] for row in rows_of(store)] == [1]
    store("overwrite", "orders", empty, rows)
    assert [row["id"] for row in rows_of(store)] == [1]
    store("overwrite", "orders", empty, "--allow-empty")
    assert rows_of(store) == []


def test_keys_orders_and_transactions(store):
    path = store.folder / "rows.csv"
    path.write_text("id,name,price,at,seen\n1,old,,,1\n1,new,,,2\n")
    assert "seen is no column" in store("upsert", "orders", path, code=64)
    store("upsert", "orders", path, "--order-by", "seen", "--txn", "nightly:7")
    assert [row["name"] for row in rows_of(store)] == ["new"]
    assert json.loads(store("upsert", "orders", path, "--order-by", "seen", "--txn", "nightly:7", "--json"))[
        "is_repeat"
    ]
    assert "--txn takes APP:NUMBER" in store("append", "orders", path, "--txn", "7", code=64)
    seen = json.loads(store("delete", "orders", "--where", "id = 1", "--json"))
    assert seen["deleted"] == 1
    path.write_text("id,name,price,at\n1,a,,\n")
    store("overwrite", "orders", path, "--expected", seen["time"])
    for expected in (seen["time"], "never"):
        assert "was last written at" in store("overwrite", "orders", path, "--expected", expected, code=1)


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "shard", "orders"),
        ("inspect", "batches", "default.orders"),
        ("maintain", "auto", "orders"),
        ("admin", "holds", "--shard", "orders"),
        ("admin", "usage", "orders"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_commands_for_shards_take_names(store, words):
    shard_id = json.loads(store("ls", "--json"))[0]["id"]
    by_id = [shard_id if word.endswith("orders") else word for word in words]
    store("append", "orders", written_as(store.folder / "rows.csv", "csv"))
    store("maintain", "auto", "orders")
    named, by = (json.loads(store(*each, "--json")) for each in (words, by_id))
    if isinstance(named, dict):
        named, by = ({key: value for key, value in each.items() if key != "now_ms"} for each in (named, by))
    assert named == by
    nowhere = ["order" if word.endswith("orders") else word for word in words]
    assert "orders" in store(*nowhere, code=64), "a near name"


def test_looking_after_a_table(store):
    store("append", "orders", written_as(store.folder / "rows.csv", "csv"))
    store("create", "demo.more", "--key", "id", "--like", written_as(store.folder / "a.parquet", "parquet"))
    assert [each["name"] for each in json.loads(store("ls", "--json"))] == ["demo.more", "orders"]
    assert json.loads(store("ls", "demo", "--long", "--json"))[0]["retain"] == "7d"
    assert json.loads(store("describe", "orders", "--json"))["updates"] == 3
    assert json.loads(store("history", "orders", "--json"))[0]["operation"] == "append"
    assert "committed" in store("history", "orders", "--limit", "1")
    more = ("--commit-info", "job=a=b", "--commit-info", "by=")
    store("delete", "orders", "--where", "id = 1", *more)
    assert json.loads(store("history", "orders", "--json"))[0]["commit_info"] == {"job": "a=b", "by": ""}
    assert "takes NAME=TEXT" in store("delete", "orders", "--where", "id = 2", "--commit-info", "job", code=64)
    for command in ("optimize", "vacuum"):
        store(command, "orders")
        assert isinstance(json.loads(store(command, "orders", "--json")), list)
    store("rename", "demo.more", "less")
    assert "confirm it with --confirm less" in store("drop", "less", "--purge", code=64)
    assert "confirm it with --confirm 'a b'" in store("drop", "a b", "--purge", code=64)
    assert json.loads(store("drop", "less", "--purge", "--confirm", "less", "--json"))["rows"] == "deleted"
    kept = json.loads(store("drop", "orders", "--json"))["id"]
    assert store("ls").splitlines() == ["name\tid"]
    assert store("read", kept, "--count").split() == ["rows", "2"]
    assert "there is no table orders" in store("read", "orders", code=64)


def test_names_complete(store):
    context = SimpleNamespace(params={"blob": store.args[1], "consensus": store.args[3]})
    assert complete_table(context, "or") == ["orders"]
    assert complete_table(context, "x") == []
    assert complete_table(SimpleNamespace(params={}), "") == complete_named(SimpleNamespace(params={}), "") == []
    names = complete_named(context, "")
    assert names[0] == "orders"
    assert names[1].startswith("s")


def test_a_store_that_is_down_says_nothing_into_the_line(store, caplog):
    down = SimpleNamespace(params={"blob": store.args[1], "consensus": "redis://127.0.0.1:1/0"})
    assert complete_named(down, "") == []
    assert caplog.records == []
    logging.getLogger("persist_engine").warning("later")
    assert [record.message for record in caplog.records] == ["later"]


def test_regression_no_name_completes_that_a_shell_would_run(store):
    """Of these, zsh ran the first when it completed, and bash the second when its line was sent."""
    hostile = [
        "\\$(id)",
        "a;id",
        "a\\",
        "a`id`",
        "two words",
        "*",
        "q'q",
        'q"q',
        "a|id",
        "~root",
        "-x",
        "$HOME",
        "a&",
        "(id)",
    ]
    with connect(store.args[1], store.args[3], maintain=False) as db:
        for name in [*hostile, "été.2024_a-b"]:
            db.create(name, key="id BIGINT")
    context = SimpleNamespace(params={"blob": store.args[1], "consensus": store.args[3]})
    assert complete_table(context, "") == ["orders", "été.2024_a-b"]
    ids = complete_named(context, "")[2:]
    assert len(ids) == 16
    assert all(name.startswith("s") for name in ids)


@pytest.mark.slow
def test_a_store_that_hangs_does_not_hang_the_shell(store):
    """It accepts, and never answers: one call outlives all retries."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        line = ["read", "--blob", f"s3://b/p?endpoint=http://{url}", "--consensus", store.args[3], ""]
        env = os.environ | {
            "_PERSIST_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["persist", *line]),
            "COMP_CWORD": str(len(line)),
        }
        env |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        command = [sys.executable, "-m", "persist_engine.cli"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shell:
            # The system connects, and nothing ever closes: what ends has given up. On a busy machine it may do so before it connects.
            names, _ = shell.communicate(timeout=60)
    assert (names.strip(), shell.returncode) == (b"", 0)


def test_a_command_makes_no_stores_but_create(tmp_path, persist):
    args = ["--blob", f"file://{tmp_path}/x/blobs", "--consensus", f"sqlite://{tmp_path}/x/consensus.db"]
    assert persist("ls", *args)[0] == 64
    assert not (tmp_path / "x").exists()


def test_hints_are_commands_that_work_when_pasted(store):
    error = store("append", "ordres", written_as(store.folder / "rows.csv", "csv"), code=64)
    assert "near names are orders; create it, as in `" in error
    assert "db." not in error
    pasted = re.findall("`(persist [^`]*)`", error)
    assert [words.split()[1] for words in pasted] == ["create", "ls", "inspect", "local"]
    for words in pasted[:3]:
        store(*shlex.split(words)[1:])
    assert "there are orders, ordres; `persist ls`" in store("read", "xyz", code=64)
    error = store("create", "orders", "--key", "id BIGINT", code=64)
    assert error == "error: InvalidArgument: table orders: the name is taken: write to it, or give --exist-ok\n"


@pytest.mark.parametrize(
    ("kind", "first", "each", "bad", "says"),
    [
        ("jsonl", "", '{{"id": {0}, "name": "n{0:010}"}}\n', '{"id": "x"}\n', r"from number to string in row 600,001$"),
        ("jsonl", "", '{{"id": {0}, "name": "n{0:010}"}}\n', '{"id": 1\n', r"object member. in row 600,001$"),
        ("csv", "id,name\n", "{0},n{0:010}\n", "x,y\n", r"id is BIGINT: invalid value 'x', after row 5\d\d,\d\d\d$"),
        ("csv", "id,name\n", "{0},n{0:010}\n", "1,2,3\n", r"Expected 2 columns, got 3: 1,2,3, after row 5\d\d,\d\d\d$"),
    ],
)
def test_regression_a_refusal_says_where_in_a_large_file(tmp_path, kind, first, each, bad, says):
    """Of JSON it was the row in some block of it, and of CSV nothing."""
    path = tmp_path / f"rows.{kind}"
    path.write_text(first + "".join(map(each.format, range(600_000))) + bad + each.format(1))
    wanted = pa.schema([("id", pa.int64()), ("name", pa.string())])
    with pytest.raises(InvalidUsage, match=says):
        list(files.batches_of([str(path)], None, wanted, lambda *_: None))


def test_the_columns_of_a_file_that_is_no_parquet(store):
    path = written_as(store.folder / "rows.csv", "csv")
    assert "rows.csv is not a Parquet file" in store("create", "new", "--key", "id", "--like", path, code=64)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
def test_arrow_reads_a_file_without_the_interpreter(store, kind, monkeypatch):
    """A thread of Arrow in a file of Python, when the interpreter ends after a refusal, ends the process with SIGABRT."""
    seen = []
    reader = files._READERS[InputFormat(kind)]

    def noting(source, wanted):
        seen.append(source)
        return reader(source, wanted)

    monkeypatch.setitem(files._READERS, InputFormat(kind), noting)
    path = written_as(store.folder / f"rows.{kind}", kind)
    rows = pa.concat_tables(
        files.batches_of([str(path)], None, ARROW.schema, lambda *_: None), promote_options="default"
    )
    assert rows.num_rows == 3
    assert [type(source) for source in seen] == [pa.OSFile]


def test_a_table_with_bloom_filters(store):
    store("create", "users", "--key", "id BIGINT", "--value", "email STRING, name STRING", "--bloom", "email, name")
    assert json.loads(store("describe", "users", "--json"))["bloom"] == "email, name"
    assert json.loads(store("describe", "orders", "--json"))["bloom"] == ""
    err = store("create", "more", "--key", "id BIGINT", "--bloom", "mail", code=64)
    assert "table more: bloom: there is no column mail; the columns are id" in err
