"""`persist changes`: what happened to a table, for people and for programs, once or as it goes on."""

import datetime as dt
import json
import os
import signal
import subprocess
import sys

import pytest
from persist_engine import connect


@pytest.fixture
def shop(tmp_path):
    with connect(f"file://{tmp_path}/shop") as db:
        made = db.create("prices", key="id BIGINT", value="name STRING, price BIGINT")
        made.append([{"id": 1, "name": "apple", "price": 120}, {"id": 2, "name": "a\n\x1b[31mb", "price": None}])
        made.upsert([{"id": 1, "name": "apple", "price": 110}])
        made.delete("id = 2")
        yield made


@pytest.fixture
def stores(tmp_path):
    return ["--blob", f"file://{tmp_path}/shop/blobs", "--consensus", f"sqlite://{tmp_path}/shop/consensus.db"]


def test_each_change_is_a_line(shop, stores, persist):
    code, out, _ = persist("changes", "prices", *stores)
    times = [change.time for change in shop.changes("start")]
    assert code == 0
    lines = [line.split("  ", 1) for line in out.splitlines()]
    assert [line[0].split()[0] for line in lines] == list(map(str, times))
    assert [line[1] for line in lines] == [
        'insert  id=1  name="apple"  price=120',
        'insert  id=2  name="a\\n\\u001b[31mb"  price=null',
        "update  id=1  price: 120 -> 110",
        'delete  id=2  name="a\\n\\u001b[31mb"  price=null',
    ]


def test_maps_are_objects_with_texts_as_names(tmp_path, stores, persist):
    with connect(f"file://{tmp_path}/shop") as db:
        made = db.create("maps", key="id BIGINT", value="scores MAP<STRING, DOUBLE>, days ARRAY<MAP<DATE, INT>>")
        made.append([{"id": 1, "scores": {"b": 2.0, "a": float("nan")}, "days": [{dt.date(2020, 1, 2): 3}, None]}])
        made.upsert([{"id": 1, "scores": {"b": 2.0, "a": 1.0}, "days": [{dt.date(2020, 1, 2): 3}, None]}])
    code, out, _ = persist("changes", "maps", *stores)
    assert code == 0
    assert [line.split("  ", 1)[1] for line in out.splitlines()] == [
        'insert  id=1  scores={"a": NaN, "b": 2.0}  days=[{"2020-01-02": 3}, null]',
        'update  id=1  scores: {"a": NaN, "b": 2.0} -> {"a": 1.0, "b": 2.0}',
    ]


def test_programs_get_objects_with_the_row_before_and_after(shop, stores, persist):
    times = [change.time for change in shop.changes("start")]
    _, out, _ = persist("changes", "prices", "--since", times[0], "--json", "--limit", "1", *stores)
    (found,) = map(json.loads, out.splitlines())
    rows = [{"id": 1, "name": "apple", "price": price} for price in (120, 110)]
    assert found == {"_change": "update", "_time": times[2], "id": 1, "_before": rows[0], "_after": rows[1]}
    _, out, _ = persist("changes", "prices", "--to", times[2], "--where", "price > 115", "--format", "jsonl", *stores)
    assert [json.loads(line)["_change"] for line in out.splitlines()] == ["insert", "delete"]
    assert persist("changes", "prices", "--since", "latest", *stores) == (0, "", "")


def test_what_does_not_fit_is_refused(shop, stores, persist):
    code, _, err = persist("changes", "prices", "--since", "soon", *stores)
    assert (code, "since must be a whole number" in err) == (64, True)
    assert "a time ago begins with a minus, as in '-1h'" in err
    code, _, err = persist("changes", "prices", "--follow", "--to", "latest", *stores)
    assert (code, "a feed that follows has no upto" in err) == (64, True)


@pytest.fixture
def interruptible():
    """A test process that a shell started in the background ignores SIGINT, and its children would inherit that."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, ours)


@pytest.mark.usefixtures("interruptible")
def test_it_follows_until_it_is_interrupted(shop, stores):
    command = [sys.executable, "-m", "persist_engine.cli", "changes", "prices", "--follow", "--json", *stores]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONFAULTHANDLER": "1"}, **pipes) as process:
        try:
            assert process.stdout is not None
            seen = [json.loads(process.stdout.readline())["_change"] for _ in range(4)]
            assert seen == ["insert", "insert", "update", "delete"]
            shop.upsert([{"id": 3, "name": "plum", "price": 90}])
            assert json.loads(process.stdout.readline())["_after"] == {"id": 3, "name": "plum", "price": 90}
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # shows where its threads are
            pytest.fail(process.communicate(timeout=60)[1])
        finally:
            process.kill()
