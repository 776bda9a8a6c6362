"""A Redis process that takes the place of the one that was opened is checked as that one was, and before it is used."""

from __future__ import annotations

import re

import pytest
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import UnsafeStore
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo
from persist_engine.storage.open import open_consensus
from persist_engine.testing.conformance import entry, fill
from persist_kit.servers import redis_server
from persist_kit.world import SCHEMA, row

pytestmark = pytest.mark.redis
A = Antichain.of


@pytest.fixture(params=[False, True], ids=["tcp", "tls"])
def server(request):
    with redis_server(tls=request.param) as server:
        yield server


def url_of(server, query=""):
    return f"{server.url}?ca_file={server.ca_file}{query}" if server.ca_file else f"{server.url}?push=off{query}"


def opened(url):
    return open_consensus(url, env=SystemEnv(), metrics=NoMetrics())


def restart(server, *settings, appendonly="yes"):
    """As after a change of its configuration, with all its data."""
    safe = server._command
    server._command = lambda port: [*safe(port), "--appendonly", appendonly, "--save", "1 1", *settings]
    server.command("SAVE")
    server.restart()
    server._command = safe


def calls(server, command):
    found = re.search(rb"cmdstat_%s:calls=(\d+)" % command, server.command("INFO", "commandstats"))
    return int(found[1]) if found else 0


def test_regression_a_redis_that_came_back_without_its_log_takes_no_commit(server):
    consensus, unsafe = opened(url_of(server)), opened(url_of(server, "&unsafe=true"))
    fill(consensus, "s1", 1, 3)
    restart(server, appendonly="no")
    for _ in range(2):
        with pytest.raises(UnsafeStore, match="can lose acknowledged commits: appendonly is no, set it to yes"):
            consensus.compare_and_set("s1", entry(3).tip, entry(4))
    assert unsafe.scan("s1", SeqNo(0), SCAN_ALL) == [entry(1), entry(2), entry(3)]
    server.command("CONFIG", "SET", "appendonly", "yes")
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED
    consensus.close()
    unsafe.close()


def test_a_redis_that_came_back_as_a_replica_is_not_read(server):
    """What it holds is as old as its last contact with its primary: a reader would see an upper below one that was acknowledged."""
    consensus = opened(url_of(server))
    fill(consensus, "s1", 1, 3)
    nowhere = ("--replicaof", "127.0.0.1", "1")
    restart(server, *nowhere)
    other = lambda: consensus.head("s2")  # noqa: E731 - of a log of which this process knows no head
    for read in (lambda: consensus.head("s1"), other):
        with pytest.raises(UnsafeStore, match="it is a replica; connect to the primary"):
            read()
    server.command("REPLICAOF", "NO", "ONE")
    assert consensus.head("s1") == entry(3)
    consensus.close()


def test_a_restart_with_the_same_settings_is_not_noticed_and_commits_ask_nothing(server):
    consensus = opened(url_of(server))
    fill(consensus, "s1", 1, 3)
    asked = calls(server, rb"info"), calls(server, rb"config\|get")
    fill(consensus, "s1", 4, 23)
    # Each commit's script asks which process it runs in, which takes no round trip; two more are this test's own.
    assert (calls(server, rb"info"), calls(server, rb"config\|get")) == (asked[0] + 20 + 2, asked[1])
    server.restart()
    assert consensus.compare_and_set("s1", entry(23).tip, entry(24)) is CasResult.COMMITTED
    assert calls(server, rb"config\|get") == 4
    consensus.close()


def test_without_the_right_to_read_the_run_id_each_connection_is_checked(server):
    server.command("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-info")
    consensus = opened(url_of(server).replace("://", "://app:pw@"))
    fill(consensus, "s1", 1, 3)
    server.command("CONFIG", "SET", "appendfsync", "everysec")
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED
    server.command("CLIENT", "KILL", "USER", "app")
    with pytest.raises(UnsafeStore, match="appendfsync is everysec"):
        consensus.compare_and_set("s1", entry(4).tip, entry(5))
    consensus.close()


def test_a_writer_fails_on_an_unsafe_redis_and_goes_on_when_it_is_safe_again(server, tmp_path):
    with PersistClient.open(Location(blob=f"file://{tmp_path}", consensus=url_of(server))) as client:
        writer = client.open_writer(ShardId.new(), SCHEMA, purpose="test")
        writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
        restart(server, appendonly="no")
        with pytest.raises(UnsafeStore, match="appendonly is no"):
            writer.append([row(2, "b", 1)], lower=A(1), upper=A(2))
        server.command("CONFIG", "SET", "appendonly", "yes")
        writer.append([row(2, "b", 1)], lower=A(1), upper=A(2))
        assert writer.fetch_recent_upper() == A(2)
