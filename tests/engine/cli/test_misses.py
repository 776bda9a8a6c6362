"""What a first user meets: folders that are not there, stores that do not answer, wrong names, times that are not written yet."""

import json
import pathlib
import re
import socket
import subprocess
import sys
import tomllib
from datetime import UTC, datetime

import persist_engine
import pytest
from persist_engine.base.wording import dated
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

ROOT = pathlib.Path(__file__).resolve().parents[3]
SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
SHARD = "s" + "0" * 8 + "-0000-0000-0000-" + "0" * 12
#: 2014-01-01T04:00:00.001Z.
UPPER = 1_388_548_800_001


@pytest.fixture
def dated_shard(tmp_path):
    """A shard with a row at UPPER - 1: its id, and the options that name its stores."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/log.db")
    shard_id = ShardId.new()
    with (
        PersistClient.open(location) as client,
        client.open_writer(shard_id, SCHEMA, purpose="test") as writer,
    ):
        writer.compare_and_append([(((1,), ("a",)), UPPER - 1, 1)], expected_upper=0, new_upper=UPPER)
    return shard_id, ["--blob", location.blob, "--consensus", location.consensus]


@pytest.mark.slow
def test_a_time_that_is_not_written_yet_is_refused_at_once_with_the_upper(persist, dated_shard, tmp_path):
    shard_id, args = dated_shard
    asked = (
        ["read", "--as-of"],
        ["read", "--from", "start", "--to"],
        ["admin", "export", "--to", tmp_path / "x", "--as-of"],
    )
    for command in asked:
        code, out, err = persist(*command, "2030-01-01T00:00:00Z", "--shard", shard_id, *args)
        assert (code, out) == (64, "")
        assert "is not written up to 1893456000000 (2030-01-01T00:00:00Z) yet" in err
        assert "its upper is 1388548800001 (2014-01-01T04:00:00.001Z); the newest complete time is 13885488" in err
    assert not (tmp_path / "x").exists()
    code, _, err = persist("read", shard_id, *args, "--as-of", UPPER, "--wait", "0.1")
    assert (code, "upper is still" in err) == (70, True)


@pytest.mark.slow
def test_a_time_ago_counts_back_from_now(persist, dated_shard):
    shard_id, args = dated_shard
    code, _, err = persist("read", shard_id, *args, "--as-of", "-1h")
    assert (code, "is not written up to" in err) == (64, True)
    assert persist("read", shard_id, *args, "--as-of", "-1x")[0] == 64
    code, out, _ = persist("read", shard_id, *args, "--from", "-1h", "--json")
    assert (code, out) == (0, "")  # nothing changed within the hour
    years = (datetime.now(UTC) - datetime.fromisoformat("2013-12-30T00:00:00Z")).days
    code, out, _ = persist("read", shard_id, *args, "--from", f"-{years}d", "--json")
    assert (code, json.loads(out)["_time"]) == (0, UPPER - 1)
    code, _, err = persist("read", shard_id, *args, "--as-of", "-many")
    assert (code, "--as-of takes a time, or `latest`; '-many' is not a time ago such as -1h" in err) == (64, True)


def test_a_time_is_shown_with_its_date_and_never_grouped():
    assert dated(UPPER) == "1388548800001 (2014-01-01T04:00:00.001Z)"
    assert dated(1_388_548_800_000) == "1388548800000 (2014-01-01T04:00:00Z)"
    assert (dated(12_345), dated(None), dated(2**64 - 1)) == ("12345", "closed", str(2**64 - 1))


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "shards"],
        ["inspect", "shard", SHARD],
        ["read", SHARD],
        ["admin", "usage"],
        ["admin", "holds", SHARD],
    ],
    ids=" ".join,
)
def test_a_store_that_is_not_there_is_named_in_one_sentence_and_not_made(persist, tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    consensus = f"sqlite://{tmp_path}/none/log.db"
    for blob, said in (
        (f"file://{tmp_path}/none", f"there is no directory file://{tmp_path}/none: check the path"),
        (f"file://{tmp_path}/empty", "is not a blob store: it has no .tmp/ in it; check the path"),
        ("empty", "empty is not a URL: a URL begins with one of file:, mem:, s3:, as in file:///folder"),
        (f"file://{tmp_path}/file", "Not a directory"),
    ):
        code, out, err = persist(*command, "--blob", blob, "--consensus", consensus)
        assert code in {64, 70}
        assert (out, err.count("\n")) == ("", 1)
        assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert not list((tmp_path / "empty").iterdir())


def test_a_log_that_is_not_there_is_named_in_one_sentence(persist, tmp_path, dated_shard):
    _, (_, blob, *_) = dated_shard
    for consensus, said in (
        (f"sqlite://{tmp_path}/other.db", "other.db is not there: check the path"),
        ("log.db", "log.db is not a URL: a URL begins with one of mem:, redis:, rediss:, sqlite:"),
    ):
        code, out, err = persist("inspect", "shards", "--blob", blob, "--consensus", consensus)
        assert (code, out, err.count("\n")) == (64, "", 1)
        assert said in err
    assert not (tmp_path / "other.db").exists()


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_given_up_in_one_sentence(dated_shard):
    """In a process of its own: what the log says beside the error counts, too."""
    _, (_, blob, *_) = dated_shard
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        stores = ["--blob", blob, "--consensus", f"redis://127.0.0.1:{taken.getsockname()[1]}/0", "--give-up", "1"]
        command = [sys.executable, "-m", "persist_engine.cli", "inspect", "shards", *stores]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (70, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "redis://127.0.0.1" in errors[0]
    assert "check" in errors[0]


def test_a_name_that_leads_nowhere_says_where_names_are(persist, dated_shard):
    code, _, err = persist("inspect", "shard", "flights", *dated_shard[1])
    assert code == 64
    assert "there is no table flights" in err
    assert "`persist ls` and `persist inspect shards` list what there is" in err
    assert "for a resource on this machine `persist local inspect NAME`" in err


def test_the_version_comes_from_one_place(persist):
    code, out, _ = persist("--version")
    assert (code, out) == (0, f"persist {persist_engine.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+", persist_engine.__version__)
    for folder in (".", "engine", "operator", "spark-images"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == persist_engine.__version__


@pytest.mark.slow
def test_commands_that_read_no_rows_import_no_pandas():
    """It takes a second. pyarrow imports it for arrays of Python values, so no module makes one while it is imported."""
    script = "import sys, persist_engine.client.client, persist_engine.rows.words; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
