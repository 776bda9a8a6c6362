"""The command line on file and SQLite stores, in this process (`main`) and, where the process itself matters, in another."""

import contextlib
import importlib.util
import json
import sqlite3
import subprocess
import sys
import types

import pytest
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
from persist_engine.cli import main as cli
from persist_engine.cli import startup
from persist_engine.cli.inspect.rollup import complete_rollup
from persist_engine.client.client import PersistClient
from persist_engine.codec.keys import blob_key, staging_note_key
from persist_engine.model.ids import PartId
from persist_engine.rows.schema import Schema


@pytest.mark.slow
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
    assert Schema.from_ddl(seen["key_schema"], seen["val_schema"]) == shop.schema
    code, out, _ = persist("inspect", "shard", "--shard", shop.shard_id, *shop.args)
    assert "upper\t12" in out.splitlines()


@pytest.mark.slow
def test_state_diffs_batches_and_blobs_agree(persist, shop):
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


@pytest.mark.slow
def test_the_note_of_a_write_task_is_no_part(persist, shop):
    note_id = PartId.staged_at(1_700_000_000_000, bytes(10))
    key = blob_key(shop.shard_id, staging_note_key(note_id))
    with PersistClient.open(shop.location) as client:
        client.machine(shop.shard_id).blob.set(key, b"a note")
    _, out, _ = persist("inspect", "blobs", shop.shard_id, "--json", *shop.args)
    shown = [(b["kind"], b["bytes"], b["named_by"]) for b in json.loads(out) if b["key"] == key]
    assert shown == [("staging note", 6, "none")]


@pytest.mark.slow
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


@pytest.mark.slow
def test_maintenance_reports_and_keeps_the_contents(persist, shop, tmp_path):
    before = persist("read", shop.shard_id, "--json", *shop.args)[1]
    reports, stores = {}, {}
    for work in ("compact", "rollup", "gc"):
        file = tmp_path / f"{work}.json"
        code, out, _ = persist("maintain", work, "--shard", shop.shard_id, "--report", file, "--json", *shop.args)
        assert code == 0
        reports[work] = json.loads(out)
        assert bool(reports[work]["deletion_record"]) == bool(reports[work]["blobs_deleted"])
        written = json.loads(file.read_text())
        stores[work] = written.pop("stores")
        assert written == reports[work]
    keys = {
        "type", "outcome", "message", "shard_id", "seqno", "duration_ms", "bytes_read", "bytes_written", "blobs_deleted", "deletion_record",
        "diffs_truncated", "requests", "applied", "rows_before", "rows_after", "cpu_ms",
    }  # fmt: skip
    assert all(report["cpu_ms"] > 0 for report in reports.values())
    assert all(set(report) == keys for report in reports.values())
    assert {report["outcome"] for report in reports.values()} == {"Succeeded"}
    assert [reports[work]["type"] for work in reports] == ["Compaction", "Rollup", "GC"]
    assert reports["compact"]["applied"] > 0
    assert reports["gc"]["diffs_truncated"] > 0
    assert reports["gc"]["blobs_deleted"] > 0
    assert all(sum(one["commits"]) == one["consensus"]["compare_and_set"]["ok"] > 0 for one in stores.values())
    assert stores["rollup"]["blob"]["set"]["bytes"] >= reports["rollup"]["bytes_written"] > 0
    assert stores["gc"]["blob"]["delete"]["ok"] == reports["gc"]["blobs_deleted"]
    assert persist("read", shop.shard_id, "--json", *shop.args)[1] == before
    code, out, _ = persist("maintain", "auto", shop.shard_id, *shop.args)
    assert (code, out.splitlines()[0].split("\t")[0]) == (0, "work")


@pytest.mark.slow
def test_a_bounded_compaction_does_the_merges_that_fit(persist, shop):
    code, out, _ = persist("maintain", "compact", shop.shard_id, "--max-bytes", "1", "--json", *shop.args)
    assert (code, json.loads(out)["outcome"], json.loads(out)["bytes_read"]) == (0, "Skipped", 0)
    code, out, _ = persist("maintain", "compact", shop.shard_id, "--max-bytes", 1 << 30, "--json", *shop.args)
    assert (code, json.loads(out)["outcome"]) == (0, "Succeeded")
    code, _, err = persist("maintain", "compact", shop.shard_id, "--max-bytes", "9", "--full", *shop.args)
    assert code == 64
    assert "leave out --max-bytes" in err


def test_a_compaction_that_fails_reports_what_it_read(persist, shop, tmp_path):
    _, out, _ = persist("inspect", "batches", shop.shard_id, "--json", *shop.args)
    sizes = {}
    for part in json.loads(out):
        file = tmp_path / "blobs" / shop.shard_id / part["part"]
        sizes[file] = file.stat().st_size
    for file in list(sizes)[4:]:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    report = tmp_path / "report.json"
    code, _, _ = persist("maintain", "compact", shop.shard_id, "--report", report, *shop.args)
    assert code != 0
    failed = json.loads(report.read_text())
    assert failed["outcome"] == "Failed"
    assert 0 < failed["bytes_read"] < sum(sizes.values())
    assert failed["stores"]["blob"]["get"]["ok"] > 0
    assert failed["cpu_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("memory", [(), ("--memory-mib", "512")])
def test_a_compaction_is_planned_within_the_memory_given(persist, shop, tmp_path, memory):
    file = tmp_path / "metrics.prom"
    assert persist("--metrics", file, "maintain", "compact", shop.shard_id, *memory, *shop.args)[0] == 0
    counts = [line for line in file.read_text().splitlines() if line.startswith("persist_compaction_")]
    assert any(line.startswith("persist_compaction_chunks_total") for line in counts)
    assert not any(line.startswith("persist_compaction_memory_exceeded_total") for line in counts)


def test_maintenance_reports_a_failure(persist, shop, tmp_path):
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
        (["inspect", "shard", "nonsense"], "there is no table nonsense"),
        (["inspect", "shard", "s" + "0" * 8 + "-0000-0000-0000-" + "0" * 12], "inspect shards"),
        (["read", "SHARD", "--as-of", "yesterday"], "latest"),
    ],
)
def test_misuse_says_what_to_do(persist, shop, args, text):
    code, out, err = persist(*[shop.shard_id if arg == "SHARD" else arg for arg in args], *shop.args)
    assert (code, out) == (64, "")
    assert text in err


@pytest.mark.slow
@pytest.mark.parametrize("args", [["inspekt"], ["inspect", "shard", "--colour"], ["read", "x", "--format", "xml"]])
def test_errors_of_the_parser_are_usage_errors(persist, args):
    code, out, err = persist(*args)
    assert (code, out) == (64, "")
    assert err
    code, out, again = persist(*args, "--json")
    assert (code, again) == (64, err)
    report = json.loads(out)
    assert (report["exit_code"], report["kind"]) == (64, "InvalidArgument")
    assert report["error"].startswith(("No such ", "Invalid value for '--format'")), report


def test_a_missing_store_is_named(persist, shop, monkeypatch):
    monkeypatch.delenv("PERSIST_BLOB", raising=False)
    code, _, err = persist("inspect", "shards", "--consensus", shop.location.consensus)
    assert code == 64
    assert "PERSIST_BLOB" in err
    code, _, err = persist("inspect", "shards", "--blob", "ftp://x", "--consensus", shop.location.consensus)
    assert code == 64
    assert "ftp" in err


@pytest.mark.slow
def test_a_time_behind_since_is_a_usage_error(persist, shop):
    with PersistClient.open(shop.location) as client, client.open_leased_reader(shop.shard_id, purpose="t") as reader:
        reader.downgrade_since(5)
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


PLUGIN = """
import importlib.util

import typer

app = typer.Typer()

@app.command()
def hello(name: str) -> None:
    typer.echo(f"hello {name}")

@app.command()
def frames() -> None:
    typer.echo(importlib.util.find_spec("pandas").name)

@app.command()
def fail(json: bool = False) -> None:
    raise ZeroDivisionError("division by zero")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed distribution with the command `greet`, and with `broken`, whose module is missing; the name of the module."""
    module = f"plugin_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(PLUGIN)
    installed = tmp_path / f"{module}-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        f"[persist.commands]\ngreet = {module}:app\nbroken = no.such.module:app\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield module
    sys.modules.pop(module, None)


@pytest.mark.slow
def test_plugins_are_listed_without_being_loaded_and_run_when_called(persist, plugin):
    code, out, _ = persist("--help")
    assert (code, "greet" in out, "broken" in out, plugin in sys.modules) == (0, True, True, False)
    code, out, _ = persist("greet", "hello", "you")
    assert (code, out, plugin in sys.modules) == (0, "hello you\n", True)


def test_a_bug_is_one_line(persist, plugin, monkeypatch):
    code, out, err = persist("greet", "fail", "--json")
    assert (code, json.loads(out)["exit_code"], err.count("\n")) == (1, 1, 1)
    assert err.startswith("error: Unexpected: ZeroDivisionError: division by zero; ")
    monkeypatch.setenv("PERSIST_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_commands_of_other_distributions_may_load_pandas(persist, plugin, monkeypatch):
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # as it is, afterwards
    startup.keep_pandas_out()
    startup.keep_pandas_out()
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        importlib.util.find_spec("pandas")
    assert persist("greet", "frames")[:2] == (0, "pandas\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["read", "--where", "id > 3", "--format", "jsonl"], ["read", "--from", "start"]])
def test_commands_do_not_load_pandas(shop, arguments):
    """Arrow would, which takes longer than the command. The rows are the same."""
    run = "import atexit, json, sys\nfrom persist_engine.cli.{0} import main\nsys.argv = ['persist', *sys.argv[1:]]\n"
    run += "atexit.register(lambda: sys.stderr.write(json.dumps('pandas' in sys.modules)))\nmain()"
    shown = []
    for module in ("__main__", "main"):  # the command, and its application in a process of another program
        command = [sys.executable, "-c", run.format(module), *arguments, shop.shard_id, *shop.args]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        shown.append((done.stdout, json.loads(done.stderr)))
    (rows, alone), (same, beside) = shown
    assert (alone, beside) == (False, True)
    assert rows == same != ""


@pytest.mark.slow
def test_help_loads_neither_arrow_nor_drivers():
    script = (
        "import sys\nsys.argv = ['persist', '--help']\nfrom persist_engine.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'pyarrow', 'boto3', 'redis', 'numpy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


SHARD = "s00000000-0000-0000-0000-000000000001"


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_missing_damaged_or_foreign_rollup_is_named(persist, shop, tmp_path):
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
