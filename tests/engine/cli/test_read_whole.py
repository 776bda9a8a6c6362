"""`persist read` leaves out no row unless a person at a terminal looks, and says so then."""

import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, Settings, ShardId, connect
from persist_engine.cli import main as cli

ROWS = 1234
SCHEMA = Schema.from_ddl("id BIGINT", "at_ms BIGINT, name STRING")
START = 1_356_998_400_000


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A shard whose rows came in two appends, and how to open it."""
    folder = tmp_path_factory.mktemp("shop")
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/log.db")
    shard_id = ShardId.new()
    with PersistClient.open(location) as client, client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        half = ROWS // 2
        for first, last, time in ((0, half, START), (half, ROWS, START + 1000)):
            rows = [(((10**9 + i,), (START + i, f"n{i}")), time, 1) for i in range(first, last)]
            outcome = writer.compare_and_append(rows, expected_upper=writer.upper, new_upper=Antichain.of(time + 1))
            assert outcome.upper.time == time + 1
    return [shard_id, "--blob", location.blob, "--consensus", location.consensus]


def shown(terminal):
    """What a person sees there until the other side is closed."""
    text = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        text += data
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode())


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs `persist ARGS` in this process, on a terminal; (exit code, what a person sees)."""

    def run(*args, term="dumb"):
        ours, theirs = pty.openpty()
        with (
            ThreadPoolExecutor(1) as person,
            os.fdopen(theirs, "w", encoding="utf-8") as terminal,
            monkeypatch.context() as patch,
        ):
            screen = person.submit(shown, ours)
            for name, value in {"TERM": term, "COLUMNS": "120"}.items():
                patch.setenv(name, value)
            for name, value in {"stdout": terminal, "stderr": terminal, "argv": ["persist", *map(str, args)]}.items():
                patch.setattr(sys, name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            terminal.close()
            return ended.value.code, screen.result()

    return run


@pytest.mark.parametrize("extra", [[], ["--updates"], ["--from", "start"], ["--where", "id > 0"]])
def test_what_goes_into_a_pipe_or_a_file_is_whole(persist, shop, tmp_path, extra):
    code, out, err = persist("read", *shop, *extra)
    assert (code, len(out.splitlines()), err) == (0, ROWS + 1, "")
    file = tmp_path / "out.txt"
    assert persist("read", *shop, *extra, "--output", file) == (0, "", "")
    assert file.read_text() == out


@pytest.mark.parametrize(("name", "begins"), [("out.parquet", b"PAR1"), ("out.csv", b'"id","at_ms"'), ("out.jsonl", b'{"id": '), ("out", b"id\tat_ms"), ("out.tsv", b"id\tat_ms")])  # fmt: skip
def test_the_name_of_a_file_says_its_format(persist, shop, tmp_path, name, begins):
    assert persist("read", *shop, "--output", tmp_path / name) == (0, "", "")
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert persist("read", *shop, "--output", tmp_path / name, "--format", "jsonl") == (0, "", "")
    assert (tmp_path / name).read_bytes().startswith(b'{"id": ')


def test_limits_are_kept_without_a_notice(persist, shop):
    code, out, err = persist("read", *shop, "--limit", 7)
    assert (code, len(out.splitlines()), err) == (0, 8, "")
    code, out, err = persist("read", *shop, "--limit", 0)
    assert (code, out, err) == (0, "id\tat_ms\tname\n", "")


@pytest.mark.slow
def test_a_terminal_shows_the_first_rows_and_says_of_how_many(shop):
    """In a process of its own."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "dumb", "COLUMNS": "120"}
    command = [sys.executable, "-m", "persist_engine.cli", "read", *shop]
    process = subprocess.Popen(command, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = shown(ours)
    assert process.wait() == 0
    assert "50 of 1,234 rows, --limit N" in seen
    assert seen.count("10000000") >= 50
    assert "1,000,000" not in seen, "ids are not grouped"
    assert str(START) in seen


@pytest.mark.parametrize("extra", [["--updates"], ["--from", "start"], ["--where", "id > 0"]])
def test_a_terminal_says_that_there_is_more_where_counting_is_not_cheap(on_terminal, shop, extra):
    code, seen = on_terminal("read", *shop, *extra)
    assert code == 0
    assert "the first 50 rows, --limit N" in seen


@pytest.mark.slow
@pytest.mark.parametrize("extra", [["--limit", "60"], ["--where", "id < 1000000050"], ["--limit", "5000"]])
def test_a_terminal_that_shows_what_was_asked_for_says_nothing(on_terminal, shop, extra):
    code, seen = on_terminal("read", *shop, *extra)
    assert code == 0
    assert "--limit" not in seen


def test_numbers_that_count_are_grouped_for_people_and_no_others(on_terminal, shop):
    _, seen = on_terminal("inspect", "shard", *shop)
    assert f"{START + 1001}" in seen
    assert "1,234" in seen
    assert "1,356" not in seen
    _, seen = on_terminal("read", *shop, "--count")
    assert "1,234" in seen


@pytest.mark.slow
def test_times_are_accepted_as_numbers_and_as_iso_8601(persist, shop):
    for said in (START, "2013-01-01T00:00:00Z", "2013-01-01T01:00:00+01:00"):
        code, out, _ = persist("read", *shop, "--as-of", said, "--count", "--json")
        assert (code, out) == (0, '{"rows": 617}\n')
    code, out, _ = persist("read", *shop, "--from", "2013-01-01T00:00:00Z", "--to", "2013-01-01T00:00:01Z")
    assert (code, len(out.splitlines())) == (0, ROWS // 2 + 1)
    code, _, err = persist("read", *shop, "--as-of", "2013-01-01T00:00:00")
    assert code == 64
    assert "--as-of takes a time, or `latest`; the time is '2013-01-01T00:00:00', which has no time zone" in err


def test_from_start_is_from_since_where_since_has_moved(persist, tmp_path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/log.db")
    args = [ShardId.new(), "--blob", location.blob, "--consensus", location.consensus]
    with PersistClient.open(location, settings=Settings(retain_ms=None)) as client:
        with client.open_writer(args[0], SCHEMA, purpose="test") as writer:
            for i in range(4):
                writer.compare_and_append(
                    [(((i,), (i, "n")), i, 1)], expected_upper=Antichain.of(i), new_upper=Antichain.of(i + 1)
                )
        with client.open_leased_reader(args[0], purpose="test") as reader:
            reader.downgrade_since(Antichain.of(2))
    code, out, _ = persist("read", *args, "--from", "start", "--columns", "id")
    assert (code, [line.split("\t") for line in out.splitlines()[1:]]) == (
        0,
        [["2", "insert", "0"], ["2", "insert", "1"], ["2", "insert", "2"], ["3", "insert", "3"]],
    )
    code, _, err = persist("read", *args, "--from", "start", "--to", 1)
    assert code == 64
    assert "the earliest readable time is 2" in err


def test_a_terminal_shows_a_bar_while_files_are_read_and_a_pipe_none(on_terminal, persist, tmp_path):
    with connect(tmp_path / "shop", maintain=False) as db:
        db.create("t", key="id BIGINT", value="name STRING")
    stores = ["--blob", f"file://{tmp_path}/shop/blobs", "--consensus", f"sqlite://{tmp_path}/shop/consensus.db"]
    path = tmp_path / "in.csv"
    path.write_text("id,name\n" + "".join(f"{number},n{number}\n" for number in range(200_000)))
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    code, screen = on_terminal("append", "t", path, *stores, term="xterm")
    assert code == 0
    assert re.search(rf"append .*200,000 rows, {size} of {size}", screen)
    code, out, err = persist("append", "t", path, *stores)
    assert (code, "MB" in out + err) == (0, False)
    code, screen = on_terminal("optimize", "t", *stores, term="xterm")
    assert code == 0
    assert re.search(r"optimize .*MB read", screen)
