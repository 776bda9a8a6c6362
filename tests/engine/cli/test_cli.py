"""The command line on file and SQLite stores, in this process (`main`) and, where the process itself matters, in another."""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import sqlite3
import subprocess
import sys
import types

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import typer
from persist_engine.base.errors import (
    CorruptData,
    Determinate,
    ErrorKind,
    Fenced,
    Incompatible,
    InvalidBounds,
    InvariantViolated,
    MissingBlob,
    PersistError,
    Unavailable,
)
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.cli import main as cli
from persist_engine.cli import no_pandas
from persist_engine.cli.export import flattened, writing
from persist_engine.cli.inspect.rollup import complete_rollup
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

SCHEMA = Schema.from_ddl("id BIGINT, name STRING", "x DOUBLE, raw BINARY, at TIMESTAMP, nested STRUCT<a: INT>")
at = Antichain.of


class Shop:
    """A location with one shard of 30 rows appended in 12 batches, one row twice."""

    def __init__(self, folder):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.shard_id = ShardId.new()
        self.args = ["--blob", self.location.blob, "--consensus", self.location.consensus]
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None)
        with (
            PersistClient.open(self.location, settings=settings) as client,
            client.open_writer(self.shard_id, SCHEMA, purpose="test") as writer,
        ):
            for i in range(12):
                rows = [
                    (((j, f"näme {j}"), (j / 2, bytes([j]), None, {"a": j})), i, 1) for j in range(30) if j % 12 == i
                ]
                rows += [(((7, "näme 7"), (3.5, b"\x07", None, {"a": 7})), i, 1)] if i == 11 else []
                writer.compare_and_append(rows, expected_upper=at(i), new_upper=at(i + 1))


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


def test_shards_are_listed_plainly_and_as_json(persist, shop):
    code, out, _ = persist("inspect", "shards", *shop.args)
    assert (code, out.splitlines()) == (0, ["shard", shop.shard_id])
    code, out, _ = persist("inspect", "shards", "--long", "--json", *shop.args)
    (only,) = json.loads(out)
    assert (only["shard"], only["upper"], only["updates"]) == (shop.shard_id, 12, 31)


def test_one_shard_shows_its_frontiers_and_schema(persist, shop):
    code, out, _ = persist("inspect", "shard", shop.shard_id, "--json", *shop.args)
    seen = json.loads(out)
    assert (code, seen["since"], seen["upper"]) == (0, 0, 12)
    assert Schema.from_ddl(seen["key_schema"], seen["val_schema"]) == SCHEMA
    code, out, _ = persist("inspect", "shard", "--shard", shop.shard_id, *shop.args)
    assert "upper\t12" in out.splitlines()


def test_state_diffs_batches_and_blobs_tell_the_same_story(persist, shop):
    _, out, _ = persist("inspect", "state", shop.shard_id, *shop.args)
    state = json.loads(out)
    assert state["shard_id"] == shop.shard_id
    _, out, _ = persist("inspect", "diffs", shop.shard_id, "--json", *shop.args)
    diffs = json.loads(out)
    assert [d["seqno"] for d in diffs] == list(range(1, state["seqno"] + 1))
    _, out, _ = persist("inspect", "batches", shop.shard_id, "--json", *shop.args)
    parts = json.loads(out)
    assert sum(part["rows"] for part in parts) == 31
    _, out, _ = persist("inspect", "blobs", shop.shard_id, "--json", *shop.args)
    blobs = json.loads(out)
    assert {b["key"] for b in blobs if b["kind"] == "part"} == {
        f"{shop.shard_id}/{p['part']}" for p in parts if p["part"]
    }
    assert {b["named_by"] for b in blobs} == {"newest"}
    for command in ("diffs", "batches", "blobs"):
        code, out, _ = persist("inspect", command, shop.shard_id, *shop.args)
        assert (code, out.count("\t") > 3) == (0, True)


def test_older_versions_are_shown_while_they_are_live(persist, shop):
    _, out, _ = persist("inspect", "diffs", shop.shard_id, "--json", *shop.args)
    diffs = json.loads(out)
    for diff in diffs:
        _, out, _ = persist("inspect", "state", shop.shard_id, "--seqno", diff["seqno"], *shop.args)
        state = json.loads(out)
        assert (state["seqno"], state["walltime_ms"]) == (diff["seqno"], diff["walltime_ms"])
    _, newest, _ = persist("inspect", "state", shop.shard_id, *shop.args)
    assert json.loads(newest) == state
    for seqno in (0, len(diffs) + 1):
        code, _, err = persist("inspect", "state", shop.shard_id, "--seqno", seqno, *shop.args)
        assert code == 64
        assert f"version {seqno} of shard {shop.shard_id} is not live: those from v1 to v{len(diffs)} are" in err


def test_the_log_is_weighed(persist, shop):
    _, out, _ = persist("inspect", "diffs", shop.shard_id, "--json", *shop.args)
    total = sum(diff["bytes"] for diff in json.loads(out))
    _, out, _ = persist("admin", "usage", shop.shard_id, "--referenced", "--json", *shop.args)
    assert json.loads(out)[0]["consensus_bytes"] == total > 0


def test_unreferenced_blobs_are_found(persist, shop, tmp_path):
    stray = f"{shop.shard_id}/n0000100/p00000000-0000-0000-0000-000000000000"
    (tmp_path / "blobs" / stray).write_bytes(b"stray")
    _, out, _ = persist("inspect", "blobs", shop.shard_id, "--unreferenced", "--json", *shop.args)
    assert [b["key"] for b in json.loads(out)] == [stray]


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


@pytest.mark.parametrize("form", ["arrow", "parquet", "csv", "jsonl"])
def test_read_writes_every_row_in_every_format_to_files_and_pipes(persist, shop, tmp_path, form):
    target = tmp_path / f"out.{form}"
    code, out, _ = persist("read", shop.shard_id, "--format", form, "--output", target, *shop.args)
    assert (code, out) == (0, "")
    assert ids_of(target.read_bytes(), form) == expected_rows()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))) == [target.name]
    piped = subprocess.run(
        [sys.executable, "-m", "persist_engine.cli", "read", shop.shard_id, "--format", form, *shop.args],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert ids_of(piped.stdout, form) == expected_rows()


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


def test_jsonl_and_csv_hold_text_bytes_and_nested_fields(persist, shop):
    _, out, _ = persist("read", shop.shard_id, "--json", *shop.args)
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[3] == {"id": 3, "name": "näme 3", "x": 1.5, "raw": "03", "at": None, "nested": {"a": 3}}
    _, out, _ = persist("read", shop.shard_id, "--format", "csv", *shop.args)
    assert out.splitlines()[0].replace('"', "") == "id,name,x,raw,at,nested.a"


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


def test_a_row_counted_less_than_nothing_is_refused_by_name(persist, shop):
    with PersistClient.open(shop.location) as client, client.open_writer(shop.shard_id, SCHEMA, purpose="t") as writer:
        gone = [(((99, "gone"), (None, None, None, None)), 12, -1)]
        writer.compare_and_append(gone, expected_upper=at(12), new_upper=at(13))
    code, _, err = persist("read", shop.shard_id, *shop.args)
    assert code == 73
    assert "99" in err
    assert persist("read", shop.shard_id, "--updates", *shop.args)[0] == 0


def test_maintenance_reports_and_keeps_the_contents(persist, shop, tmp_path):
    before = persist("read", shop.shard_id, "--json", *shop.args)[1]
    reports = {}
    for work in ("compact", "rollup", "gc"):
        file = tmp_path / f"{work}.json"
        code, out, _ = persist("maintain", work, "--shard", shop.shard_id, "--report", file, "--json", *shop.args)
        assert code == 0
        reports[work] = json.loads(out)
        assert json.loads(file.read_text()) == reports[work]
    keys = {
        "type", "outcome", "message", "shard_id", "seqno", "duration_ms", "bytes_read", "bytes_written", "blobs_deleted",
        "diffs_truncated", "requests", "applied", "rows_before", "rows_after",
    }  # fmt: skip
    assert all(set(report) == keys for report in reports.values())
    assert {report["outcome"] for report in reports.values()} == {"Succeeded"}
    assert [reports[work]["type"] for work in reports] == ["Compaction", "Rollup", "GC"]
    assert reports["compact"]["applied"] > 0
    assert reports["gc"]["diffs_truncated"] > 0
    assert reports["gc"]["blobs_deleted"] > 0
    assert persist("read", shop.shard_id, "--json", *shop.args)[1] == before
    code, out, _ = persist("maintain", "auto", shop.shard_id, *shop.args)
    assert (code, out.splitlines()[0].split("\t")[0]) == (0, "work")


@pytest.mark.parametrize("memory", [(), ("--memory-mib", "512")])
def test_a_compaction_is_planned_within_the_memory_given(persist, shop, tmp_path, memory):
    file = tmp_path / "metrics.prom"
    assert persist("--metrics", file, "maintain", "compact", shop.shard_id, *memory, *shop.args)[0] == 0
    counts = [line for line in file.read_text().splitlines() if line.startswith("persist_compaction_")]
    assert any(line.startswith("persist_compaction_chunks_total") for line in counts)
    assert not any(line.startswith("persist_compaction_memory_exceeded_total") for line in counts)


def test_a_failure_is_reported_too(persist, shop, tmp_path):
    for path in (tmp_path / "blobs").rglob("p*"):
        path.write_bytes(b"garbage")
    file = tmp_path / "report.json"
    code, out, err = persist("maintain", "compact", shop.shard_id, "--report", file, "--json", *shop.args)
    assert code == 74
    assert err.startswith("error: Corrupt: ")
    assert err.count("\n") == 1
    assert json.loads(out)["kind"] == "Corrupt"
    report = json.loads(file.read_text())
    assert (report["outcome"], report["type"]) == ("Failed", "Compaction")
    assert shop.shard_id in report["message"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["inspect", "shard"], "no shard given"),
        (["inspect", "shard", "nonsense"], "not a shard id"),
        (["inspect", "shard", "s" + "0" * 8 + "-0000-0000-0000-" + "0" * 12], "inspect shards"),
        (["read", "SHARD", "--as-of", "yesterday"], "latest"),
    ],
)
def test_misuse_says_what_to_do(persist, shop, args, text):
    code, out, err = persist(*[shop.shard_id if arg == "SHARD" else arg for arg in args], *shop.args)
    assert (code, out) == (64, "")
    assert text in err


@pytest.mark.parametrize("args", [["inspekt"], ["inspect", "shard", "--colour"], ["read", "x", "--format", "xml"]])
def test_what_the_parser_refuses_is_usage(persist, args):
    code, out, err = persist(*args)
    assert (code, out) == (64, "")
    assert err


def test_a_missing_store_is_named(persist, shop, monkeypatch):
    monkeypatch.delenv("PERSIST_BLOB", raising=False)
    code, _, err = persist("inspect", "shards", "--consensus", shop.location.consensus)
    assert code == 64
    assert "PERSIST_BLOB" in err
    code, _, err = persist("inspect", "shards", "--blob", "ftp://x", "--consensus", shop.location.consensus)
    assert code == 64
    assert "ftp" in err


def test_a_time_that_can_no_longer_be_told_is_a_usage_error(persist, shop):
    with PersistClient.open(shop.location) as client, client.open_leased_reader(shop.shard_id, purpose="t") as reader:
        reader.downgrade_since(at(5))
    code, _, err = persist("read", shop.shard_id, "--as-of", 2, *shop.args)
    assert code == 64
    assert "5" in err
    code, _, err = persist("read", shop.shard_id, "--as-of", 99, *shop.args)
    assert (code, "is not written up to 99 yet, its upper is 12" in err) == (64, True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidBounds("x"), 64),
        (Determinate("x"), 70),
        (Unavailable("x"), 70),
        (Fenced("x"), 71),
        (InvariantViolated("x"), 73),
        (CorruptData("x"), 74),
        (MissingBlob("x"), 74),
        (Incompatible("x"), 75),
        (PersistError("x", kind=ErrorKind.STORAGE), 1),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error, code):
    assert cli.exit_code(error) == code


def test_plugins_are_listed_without_being_loaded_and_run_when_called(persist, monkeypatch):
    plugin = typer.Typer()

    @plugin.command()
    def hello(name: str) -> None:
        typer.echo(f"hello {name}")

    @plugin.command()
    def other() -> None:
        pass

    loads = []
    entry = types.SimpleNamespace(name="greet", value="x", dist=None, load=lambda: loads.append(1) or plugin)
    broken = importlib.metadata.EntryPoint(name="broken", value="no.such.module:app", group="persist.commands")
    monkeypatch.setattr("persist_engine.cli.plugins.entry_points", lambda group: [entry, broken])
    code, out, _ = persist("--help")
    assert (code, "greet" in out, "broken" in out, loads) == (0, True, True, [])
    code, out, _ = persist("greet", "hello", "you")
    assert (code, out, loads) == (0, "hello you\n", [1])


def test_commands_of_other_distributions_may_load_pandas(persist, monkeypatch):
    plugin = typer.Typer()

    @plugin.callback(invoke_without_command=True)
    def find() -> None:
        typer.echo(importlib.util.find_spec("pandas").name)

    entry = types.SimpleNamespace(name="frames", value="x", dist=None, load=lambda: plugin)
    monkeypatch.setattr("persist_engine.cli.plugins.entry_points", lambda group: [entry])
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # as it is, afterwards
    no_pandas.keep_pandas_out()
    no_pandas.keep_pandas_out()
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        importlib.util.find_spec("pandas")
    assert persist("frames")[:2] == (0, "pandas\n")


@pytest.mark.parametrize("arguments", [["read", "--where", "id > 3", "--format", "jsonl"], ["read", "--from", "start"]])
def test_commands_do_not_load_pandas(shop, arguments):
    """Arrow would, which takes longer than the command. The rows are the same."""
    run = "import json, sys\nfrom persist_engine.cli.{0} import main\nsys.argv = ['persist', *sys.argv[1:]]\n"
    run += "try:\n    main()\nfinally:\n    sys.stderr.write(json.dumps('pandas' in sys.modules))"
    shown = []
    for module in ("__main__", "main"):  # the command, and its application in a process of another program
        command = [sys.executable, "-c", run.format(module), *arguments, shop.shard_id, *shop.args]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        shown.append((done.stdout, json.loads(done.stderr)))
    (rows, alone), (same, beside) = shown
    assert (alone, beside) == (False, True)
    assert rows == same != ""


def test_help_loads_neither_arrow_nor_drivers():
    script = (
        "import sys\nsys.argv = ['persist', '--help']\nfrom persist_engine.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'pyarrow', 'boto3', 'redis', 'numpy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_a_closed_pipe_ends_quietly(shop):
    command = f"{sys.executable} -m persist_engine.cli read {shop.shard_id} --json {' '.join(shop.args)} | true"
    ended = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""


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
    assert "no column nope; there are key.id, key.name, val.x" in err


def test_what_changed_between_two_times_is_told(persist, shop):
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--from", 10, "--columns", "id")
    rows = [line.split("\t") for line in out.splitlines()]
    assert (code, rows[0]) == (0, ["_time", "_change", "id"])
    assert rows[1:] == [["11", "insert", "7"], ["11", "insert", "11"], ["11", "insert", "23"]]
    code, out, _ = persist("read", shop.shard_id, *shop.args, "--from", "start", "--to", 0, "--json", "--updates")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["key"]["id"], line["time"], line["diff"]) for line in lines] == [(0, 0, 1), (12, 0, 1), (24, 0, 1)]
    for wrong, said in (
        (["--to", "5"], "--to ends what --from begins"),
        (["--from", "5", "--as-of", "7"], "does not go with --as-of"),
        (["--from", "5", "--count"], "does not go with --count"),
        (["--from", "now"], "--from takes a time, or `latest`; the time must be a whole number"),
        (["--to", "2013-01-01", "--from", "5"], "no time zone, so its instant is unknown: add one"),
        (["--from", "9", "--to", "8"], "after 9"),
        (["--from", "5", "--to", "99"], "is not written up to 99 yet"),
    ):
        code, _, err = persist("read", shop.shard_id, *shop.args, *wrong)
        assert code != 0
        assert said in err


SHARD = "s00000000-0000-0000-0000-000000000001"


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "shards"],
        ["inspect", "shard", SHARD],
        ["read", SHARD],
        ["maintain", "auto", SHARD],
        ["admin", "orphans"],
        ["admin", "usage"],
        ["admin", "holds", SHARD],
    ],
    ids=" ".join,
)
def test_a_mistyped_path_is_named_and_nothing_is_made_there(persist, shop, tmp_path, command):
    """No command makes shards: whatever is not there was mistyped, or is not mounted."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    foreign = elsewhere / "foreign.db"
    with contextlib.closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE t (a)")
    before = foreign.read_bytes()
    (elsewhere / "empty.db").touch()
    blob, consensus = shop.location.blob, shop.location.consensus
    mistyped = [
        (blob, f"sqlite://{elsewhere}/c.db"),
        (blob, f"sqlite://{elsewhere}/sub/c.db"),
        (blob, f"sqlite://{elsewhere}/empty.db"),
        (blob, f"sqlite://{foreign}"),
        (f"file://{elsewhere}/blobs", consensus),
        (f"file://{elsewhere}", consensus),
    ]
    for urls in mistyped:
        code, out, err = persist(*command, "--blob", urls[0], "--consensus", urls[1])
        (wrong,) = set(urls) - {blob, consensus}
        assert (code, out) == (64, "")
        assert wrong in err
        assert "check the path" in err
    assert sorted(each.name for each in elsewhere.iterdir()) == ["empty.db", "foreign.db"]
    assert foreign.read_bytes() == before
    assert (elsewhere / "empty.db").stat().st_size == 0


def test_a_rollup_is_shown_by_its_key_without_the_log(persist, shop, tmp_path):
    persist("maintain", "rollup", shop.shard_id, *shop.args)
    _, out, _ = persist("inspect", "blobs", shop.shard_id, "--json", *shop.args)
    first, second = sorted((b for b in json.loads(out) if b["kind"] == "rollup"), key=lambda b: len(b["key"]))
    _, out, _ = persist(
        "inspect", "state", shop.shard_id, "--seqno", seqno := int(second["key"].split("/")[1][1:]), *shop.args
    )
    state = json.loads(out)
    (tmp_path / "consensus.db").unlink()  # it is for when the log is lost
    store = ["--blob", shop.location.blob]
    code, out, _ = persist("inspect", "rollup", second["key"], "--json", *store)
    seen = json.loads(out)
    assert (code, seen.pop("key"), seen.pop("bytes")) == (0, second["key"], second["bytes"])
    assert [diff["seqno"] for diff in seen.pop("diffs")] == list(range(2, seqno + 1))
    assert seen == state
    partial = second["key"].partition("/")[2]
    code, out, _ = persist("inspect", "rollup", partial, "--shard", shop.shard_id, *store)
    assert code == 0
    shown = dict(line.split("\t") for line in out.splitlines())
    assert (shown["seqno"], shown["upper"], shown["updates"], shown["diffs"]) == (
        str(seqno),
        "12",
        "31",
        f"v2 to v{seqno}",
    )
    code, out, _ = persist("inspect", "rollup", first["key"], *store)
    assert dict(line.split("\t") for line in out.splitlines())["diffs"] == ""
    ctx = types.SimpleNamespace(params={"blob": shop.location.blob, "shard": None})
    assert complete_rollup(ctx, f"{shop.shard_id}/v") == sorted([first["key"], second["key"]])
    assert complete_rollup(ctx, second["key"][:-3]) == [second["key"]]
    assert complete_rollup(ctx, "s0") == complete_rollup(types.SimpleNamespace(params={}), second["key"]) == []


def test_a_rollup_that_is_missing_damaged_or_none_is_told(persist, shop, tmp_path):
    persist("maintain", "rollup", shop.shard_id, *shop.args)
    _, out, _ = persist("inspect", "blobs", shop.shard_id, "--json", *shop.args)
    blobs = json.loads(out)
    store = ["--blob", shop.location.blob]
    first, second = sorted((b["key"] for b in blobs if b["kind"] == "rollup"), key=len)
    part = next(b["key"] for b in blobs if b["kind"] == "part")
    for key, text in ((part, "is the key of a part"), ("v1/x", "no shard given"), ("a/b/c", "not a blob key")):
        code, out, err = persist("inspect", "rollup", key, *store)
        assert (code, out) == (64, "")
        assert text in err
    absent = f"{shop.shard_id}/v7/r00000000-0000-0000-0000-000000000000"
    code, _, err = persist("inspect", "rollup", absent, *store)
    assert (code, "is missing" in err, absent in err) == (cli.exit_code(MissingBlob("")), True, True)
    (tmp_path / "blobs" / first).write_bytes((tmp_path / "blobs" / second).read_bytes())
    code, _, err = persist("inspect", "rollup", first, *store)
    assert (code, first in err) == (cli.exit_code(CorruptData("")), True)
    (tmp_path / "blobs" / second).write_bytes(b"junk")
    code, _, err = persist("inspect", "rollup", second, *store)
    assert (code, second in err) == (cli.exit_code(CorruptData("")), True)
