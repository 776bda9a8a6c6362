"""Whatever users pass, hold in their shards or point the output at: the command line answers in its own words."""

import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from persist_engine import connect
from persist_engine.cli.export import writing
from persist_engine.cli.output import print_rows
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

SCHEMA = Schema.from_ddl("id BIGINT", "at TIMESTAMP, day DATE, nested STRUCT<at: TIMESTAMP_NTZ>")
#: An instant and a day beyond the years that Python has.
FAR_US, FAR_DAY = 1 << 62, (1 << 31) - 1


@pytest.fixture
def location(tmp_path):
    return Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")


@pytest.fixture
def shard_id(location):
    """One shard with one row, whose value Python's own dates cannot hold."""
    shard_id = ShardId.new()
    nested = pa.StructArray.from_arrays([pa.array([FAR_US], pa.timestamp("us"))], names=["at"])
    days = pa.array([FAR_DAY], pa.int32()).cast(pa.date32())
    val = pa.StructArray.from_arrays(
        [pa.array([FAR_US], pa.timestamp("us", "UTC")), days, nested], names=["at", "day", "nested"]
    )
    key = pa.StructArray.from_arrays([pa.array([1])], names=["id"])
    rows = pa.table({"key": key, "val": val, "time": pa.array([0]), "diff": pa.array([1])})
    with PersistClient.open(location) as client, client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append(rows, expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    return shard_id


@pytest.fixture(autouse=True)
def _at_the_location(monkeypatch, location):
    """Where commands look without a location of their own."""
    monkeypatch.setenv("PERSIST_BLOB", location.blob)
    monkeypatch.setenv("PERSIST_CONSENSUS", location.consensus)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("text", ["closed [/red]", "[bold]loud", "[link=x]"])
def test_a_cell_is_no_markup(monkeypatch, text):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    print_rows((f"name {text}",), [(text,)])
    assert terminal.getvalue().count(text) == 2


def test_a_cell_stays_one_cell_in_a_pipe(capsys):
    print_rows(("purpose", "id"), [("two\nlines\tand\ra tab", 1)])
    assert capsys.readouterr().out == "purpose\tid\ntwo\\nlines\\tand\\ra tab\t1\n"


def test_dates_beyond_the_years_of_python_are_shown_as_out_of_range(persist, shard_id):
    code, out, _ = persist("read", shard_id)
    shown = [f"<value out of range: {far}>" for far in (FAR_US, FAR_DAY, FAR_US)]
    assert (code, out.splitlines()[1]) == (0, "\t".join(["1", *shown[:2], f"{{'at': '{shown[2]}'}}"]))
    code, out, _ = persist("read", shard_id, "--json")
    assert (code, json.loads(out)["nested"]) == (0, {"at": shown[2]})


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--metrics", "{}/missing/m.prom", "maintain", "rollup"], "--metrics"),
        (["maintain", "rollup", "--report", "{}/missing/report.json"], "--report"),
        (["maintain", "rollup", "--report", "{}"], "--report"),
        (["read", "--format", "csv", "--output", "{}/consensus.db/out.csv"], "out.csv"),
        (["read", "--format", "csv", "--output", "{}/" + 300 * "x"], "xxx"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(persist, shard_id, tmp_path, args, option):
    before = sorted((tmp_path / "blobs" / shard_id).rglob("*"))
    code, out, err = persist(*(arg.format(tmp_path) for arg in args), "--shard", shard_id)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert err.startswith("error: InvalidArgument: cannot write")
    assert option in err
    assert sorted((tmp_path / "blobs" / shard_id).rglob("*")) == before


@pytest.mark.parametrize(
    "args",
    [
        ["read", "--as-of", "9" * 5000],
        ["read", "--from", "start", "--to", "9" * 5000],
        ["read", "--as-of", "\N{ARABIC-INDIC DIGIT THREE}"],
        ["admin", "export", "--to", "{}/export", "--as-of", "9" * 5000],
        ["admin", "export", "--to", "{}/export", "--as-of", "\N{ARABIC-INDIC DIGIT THREE}"],
        ["admin", "force-compaction", "--claim-age", "inf"],
        ["maintain", "compact", "--claim-age", "inf"],
    ],
)
def test_numbers_out_of_all_bounds_are_usage(persist, shard_id, tmp_path, args):
    code, out, err = persist(*(arg.format(tmp_path) for arg in args), "--shard", shard_id)
    assert (code, out) == (64, "")
    assert "Traceback" not in err
    assert len(err) < 1000, "what was given is not given back whole"


@pytest.mark.parametrize(
    "args", [["changes", "{}", "--since"], ["changes", "{}", "--to"], ["overwrite", "{}", "no.csv", "--expected"]]
)
@pytest.mark.parametrize("number", ["9" * 5000, "9" * 20, "\N{ARABIC-INDIC DIGIT THREE}"])
def test_times_of_tables_out_of_all_bounds_are_usage(persist, shard_id, args, number):
    code, out, err = persist(*(arg.format(shard_id) for arg in args), number)
    assert (code, out) == (64, "")
    assert "must be a" in err
    assert len(err) < 1000, "what was given is not given back whole"


def test_usage_of_an_unknown_shard_is_refused(persist, shard_id):
    code, out, err = persist("admin", "usage", ShardId.new(), "--json")
    assert (code, json.loads(out)["kind"]) == (64, "ShardNotFound")
    assert "inspect shards" in err
    assert persist("admin", "usage", shard_id)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code", "lines"),
    [(">/dev/full", 1, ["error: OSError: No space left on device"]), (">&-", 0, []), (">&{unread}", 141, [])],
)
def test_an_output_that_cannot_be_written_ends_in_one_sentence(location, shard_id, redirection, code, lines):
    read, unread = os.pipe()
    os.close(read)
    command = f"{sys.executable} -m persist_engine.cli read {shard_id} --json --blob {location.blob}"
    command = f"{command} --consensus {location.consensus} {redirection.format(unread=unread)}"
    ended = subprocess.run(
        ["bash", "-c", f"{command}; exit $?"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        pass_fds=[unread],
    )
    os.close(unread)
    assert (ended.returncode, ended.stderr.splitlines()) == (code, lines)


def test_one_shard_that_cannot_be_read_hides_no_other(persist, location, shard_id, tmp_path):
    other = ShardId("s" + "0" * 8 + "-0000-4000-8000-" + "0" * 12)
    with PersistClient.open(location) as client:
        client.initialise(other, SCHEMA)
    for path in (tmp_path / "blobs" / other).rglob("r*"):
        path.write_bytes(b"no rollup")
    code, out, err = persist("inspect", "shards", "--long", "--json")
    assert (code, [each["seqno"] is None for each in json.loads(out)]) == (74, [True, False])
    assert (err.count("\n"), err.startswith(f"error: Corrupt: {other}/")) == (1, True)
    code, out, _ = persist("admin", "usage", "--referenced", "--json")
    assert (code, [each["shard_id"] for each in json.loads(out)]) == (74, [shard_id])
    code, out, _ = persist("admin", "orphans", "--json")
    assert (code, [each["shard_id"] for each in json.loads(out)["shards"]]) == (74, [shard_id])
    assert persist("admin", "orphans", other, "--json")[0] == 74
    assert persist("admin", "verify", "--json")[0] == 74


def test_regression_outputs_of_two_processes_of_one_id_are_not_mixed(tmp_path):
    """In containers process ids are alike: both wrote into one file, and the first to end put it into place."""
    schema = pa.schema([("id", pa.int64())])
    path = tmp_path / "out.arrow"
    with writing("arrow", path, schema) as ours, writing("arrow", path, schema) as theirs:
        ours(pa.record_batch([pa.array([1])], schema=schema))
        theirs(pa.record_batch([pa.array([2, 3])], schema=schema))
    assert pa.ipc.open_stream(path.read_bytes()).read_all().column("id").to_pylist() == [1]
    assert [each.name for each in tmp_path.iterdir()] == ["out.arrow"]


def test_an_interrupt_while_the_command_line_loads_is_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from persist_engine.cli.__main__ import main; main()"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, "ls"], check=False, env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


#: An environment in which Python decodes paths as ASCII.
ASCII = {"PYTHONUTF8": "0", "LC_ALL": "C"}


def ascii_persist(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "persist_engine.cli", *arguments],
        env={**os.environ, **ASCII, **environ},
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_store_in_a_folder_whose_name_is_not_ascii_opens_in_any_locale(tmp_path):
    """It ended as a bug of persist. The same folder is found in a locale with UTF-8."""
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    url, log = f"file://{folder}/blobs", f"sqlite://{folder}/consensus.db"
    made = ascii_persist("create", "orders", "--key", "id BIGINT", "--blob", url, "--consensus", log)
    assert (made.returncode, made.stderr) == (0, b"")
    with connect(url, log) as db:
        assert db.tables() == ["orders"]


@pytest.mark.slow
def test_a_path_that_the_locale_cannot_name_is_refused_with_the_path_and_the_locale(tmp_path):
    """The path comes from a file, so Python did not decode it by the locale."""
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(f'[home]\nblob = "file://{tmp_path}/caf\u00e9"\n', encoding="utf-8")
    stores = {"PERSIST_BLOB": "", "PERSIST_CONSENSUS": "", "PERSIST_PROFILE": "home"}
    refused = ascii_persist("ls", PERSIST_PROFILES=str(profiles), **stores)
    assert refused.returncode == 64
    assert b"bug of persist" not in refused.stderr
    assert b"caf\\xe9" in refused.stderr
    assert b"LC_ALL=C.UTF-8" in refused.stderr
