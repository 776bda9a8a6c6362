"""The process behind a SQL catalog, as the JVM uses it: without a JVM."""

import json
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from persist_engine import Location
from persist_kit.servers import redis_server
from table_shard import Shard


class Process:
    """The process, and the requests to it."""

    def __init__(self, location):
        command = [sys.executable, "-P", "-m", "persist_spark.catalog.main"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process.stdin.write(json.dumps({"blob": location.blob, "consensus": location.consensus}) + "\n")
        self.process.stdin.flush()
        self.address = json.loads(self.process.stdout.readline())["desk"]

    def ask(self, what, **fields):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            connection.sendall(json.dumps({"ask": what, **fields}).encode())
            connection.shutdown(socket.SHUT_WR)
            answer = json.load(connection.makefile())
        assert len(answer) == 1
        return answer.get("is", answer.get("refused"))

    def end(self):
        """What the end of the JVM does, however it ends."""
        self.process.stdin.close()
        return self.process.wait(timeout=60)


@contextmanager
def running(location):
    made = Process(location)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.process.stdout.close()


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    made.add([((id_, "a"), (id_, "b")) for id_ in range(10)])
    yield made
    made.client.close()


def test_what_is_loaded_is_held_until_it_is_dropped_or_the_jvm_ends(shard):
    readers = lambda: len(shard.client.inspect(shard.id).readers)  # noqa: E731
    with running(shard.location) as process:
        assert process.ask("exists", table=["demo", "flights"]) is True
        assert process.ask("load", table=["demo", "planes"], frame="none") is None
        assert readers() == 0
        loaded = process.ask("load", table=["demo", "flights"], frame="table")
        assert (loaded["as_of"], loaded["properties"]["key"]) == (0, "id, area")
        scan = process.ask("scan", frame="scan", of="table", columns=["n"], where=["`key`.`id` = 3"])
        assert [field["name"] for field in scan["columns"]["fields"]] == ["n"]
        assert readers() == 1, "a table and its scans share a lease"
        process.ask("drop_frame", frame="table")
        assert readers() == 1
        for _ in range(2):
            process.ask("drop_frame", frame="scan")
        assert readers() == 0
        process.ask("load", table=["demo", "flights"], frame="again")
        assert readers() == 1
        assert process.end() == 0
        assert readers() == 0


@pytest.mark.redis
def test_the_process_ends_with_the_jvm_although_a_store_does_not_answer(tmp_path):
    with redis_server() as redis:
        made = Shard(tmp_path, location=Location(blob=f"file://{tmp_path}/blobs", consensus=redis.url))
        made.add([((1, "a"), (1, "b"))])
        with running(made.location) as process:
            process.ask("load", table=["demo", "flights"], frame="table")
            redis.kill()
            assert process.end() == 0
        redis.restart()
        assert len(made.client.inspect(made.id).readers) == 1, "its lease expires by itself"
        made.client.close()


def test_a_request_that_fails_is_an_answer(shard, capfd):
    with running(shard.location) as process:
        assert "'fly', which this persist_spark does not know: use the jar of its release" in process.ask("fly")
        assert "load it again" in process.ask("answers", frame="unknown", conditions=[])
        assert process.ask("load", table=["demo", "flights"], frame="f", version="9").startswith("cannot read shard")
        assert "TypeError" in process.ask("load", tables=[])
        assert process.ask("namespaces") == ["demo"]
    assert "Traceback" in capfd.readouterr().err, "a defect is in the log of the driver"


def test_tables_of_python_and_of_the_catalog_are_one_kind(tmp_path):
    """What `connect` makes, the catalog finds and drops, and the other way round."""
    from persist_engine import connect

    columns = {"type": "struct", "fields": [{"name": "id", "type": "long", "nullable": True, "metadata": {}}]}
    with connect(tmp_path, maintain=False) as db, running(db.location) as process:
        db.create("demo.ours", key="id BIGINT").append([{"id": 1}])
        assert process.ask("tables", namespace=["demo"]) == ["ours"]
        assert process.ask("load", table=["demo", "ours"], frame="f")["properties"]["key"] == "id"
        assert process.ask("create", table=["demo", "ours"], columns=columns, properties={"key": "id"}) is False
        assert process.ask("create", table=["demo", "theirs"], columns=columns, properties={"key": "id"}) is True
        assert db.tables("demo") == ["demo.ours", "demo.theirs"]
        assert db["demo.theirs"].append([{"id": 2}]).inserted == 1
        process.ask("drop_frame", frame="f")
        db.close()
        assert process.ask("drop", table=["demo", "ours"]) is True
    with connect(tmp_path, maintain=False) as db:
        assert db.tables() == ["demo.theirs"]
        assert db.rename("demo.theirs", "mine").to_pylist() == [{"id": 2}]
