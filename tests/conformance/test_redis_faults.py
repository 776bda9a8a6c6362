"""What Redis does wrong, by itself or by its settings, comes back as the right error and never as lost or doubled entries."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import (
    CorruptData,
    Determinate,
    Fenced,
    InvalidUsage,
    StorageError,
    StoreRefused,
    UnsafeStore,
)
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo, VersionedData
from persist_engine.storage.open import open_consensus
from persist_engine.storage.redis import consensus as consensus_redis
from persist_engine.testing.conformance import entry, fill
from persist_kit.servers import free_port, redis_server
from persist_kit.world import SCHEMA

pytestmark = pytest.mark.redis
#: Far longer than anything here takes.
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def shared_server():
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server):
    """One server for the module, empty, and up again whatever the test before did."""
    if shared_server._process is None:
        shared_server.start()
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def consensus(server):
    consensus = opened(server.url)
    yield consensus
    consensus.close()


def opened(url):
    return open_consensus(url, env=SystemEnv(), metrics=NoMetrics())


def verbs(consensus, key="s1"):
    """Every verb as a call on a log that was last seen at v3."""
    return {
        "head": lambda: consensus.head(key),
        "append": lambda: consensus.compare_and_set(key, entry(3).tip, entry(4)),
        "create": lambda: consensus.compare_and_set(key, None, entry(1)),
        "scan": lambda: consensus.scan(key, SeqNo(0), SCAN_ALL),
        "truncate": lambda: consensus.truncate(key, SeqNo(1), entry(1).tip),
    }


@pytest.mark.parametrize(
    ("setting", "value", "safe"),
    [
        ("appendonly", "no", "yes"),
        ("appendfsync", "everysec", "always"),
        ("appendfsync", "no", "always"),
        ("no-appendfsync-on-rewrite", "yes", "no"),
        ("maxmemory-policy", "allkeys-lru", "noeviction"),
    ],
)
def test_settings_that_lose_commits_are_refused(server, setting, value, safe):
    """Spec 3.9."""
    server.command("CONFIG", "SET", setting, value)
    try:
        with pytest.raises(UnsafeStore, match=f"{setting} is {value}, set it to {safe}"):
            opened(server.url)
        opened(f"{server.url}?unsafe=true").close()
    finally:
        server.command("CONFIG", "SET", setting, safe)
    opened(server.url).close()


def test_a_replica_is_refused(server):
    with redis_server() as replica:
        replica.command("REPLICAOF", "127.0.0.1", str(server.port))
        for url in (replica.url, f"{replica.url}?unsafe=true"):
            with pytest.raises(UnsafeStore, match="it is a replica; connect to the primary"):
                opened(url)


def cluster_node():
    """Its bus would have a port of its own choice, past the greatest there is."""
    return redis_server(settings={"cluster-enabled": "yes", "cluster-port": str(free_port())})


def test_a_cluster_node_is_refused_at_open_or_at_its_first_command():
    with cluster_node() as node, cluster_node() as other:
        with pytest.raises(UnsafeStore, match=f"{node.address}/0 is a node of a cluster"):
            opened(node.url)
        with pytest.raises(UnsafeStore, match="is a node of a cluster"):
            opened(f"{node.url}?unsafe=true")
        # The node has the slot of the one log that is looked for at open.
        slot = int(node.command("CLUSTER", "KEYSLOT", consensus_redis._NO_LOG)[1:])
        node.command("CLUSTER", "ADDSLOTSRANGE", str(slot), str(slot))
        other.command("CLUSTER", "ADDSLOTSRANGE", "0", str(slot - 1), str(slot + 1), "16383")
        bus = other.command("CONFIG", "GET", "cluster-port").split(b"\r\n")[-2].decode()
        node.command("CLUSTER", "MEET", "127.0.0.1", str(other.port), bus)
        waiting = threading.Event()
        for _ in range(1200):
            if b"cluster_state:ok" in node.command("CLUSTER", "INFO"):
                break
            waiting.wait(0.05)
        node.command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "-info")
        consensus = opened(node.url.replace("redis://", "redis://app:pw@"))
        for call in verbs(consensus).values():
            with pytest.raises(UnsafeStore, match="s1 at redis://.* is a node of a cluster"):
                call()
        consensus.close()


@pytest.mark.parametrize("scheme", ["redis+sentinel", "redis+cluster", "rediss+sentinel", "rediss+cluster"])
def test_what_fails_over_is_refused_with_the_reason_and_without_the_password(scheme):
    with pytest.raises(UnsafeStore, match="a failover loses commits") as refused:
        opened(f"{scheme}://:hush@127.0.0.1:26379/primary/0")
    assert "hush" not in str(refused.value)


def test_tls_is_verified():
    with redis_server(tls=True) as server:
        for _ in range(20):  # a server's first bytes, with TLS 1.3, come when they come
            opened(f"{server.url}?ca_file={server.ca_file}").close()
        with pytest.raises(StoreRefused, match=f"{server.address}.*certificate"):
            opened(server.url)
        with pytest.raises(StoreRefused, match=f"{server.address}.*the server speaks TLS; use rediss://"):
            opened(server.url.replace("rediss", "redis"))


def test_a_setting_hidden_by_an_acl_is_reported_as_unverified(server, caplog):
    server.command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "-config", "-info")
    with caplog.at_level(logging.WARNING):
        consensus = opened(server.url.replace("redis://", "redis://app:pw@"))
    assert "appendfsync (CONFIG GET is forbidden)" in caplog.text
    fill(consensus, "s1", 1, 3)
    assert consensus.scan("s1", SeqNo(2), SCAN_ALL) == [entry(2), entry(3)]
    consensus.close()


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("append", "hset"),
        ("append", "rpush"),
        ("create", "hset"),
        ("create", "rpush"),
        ("truncate", "hset"),
        ("truncate", "ltrim"),
    ],
)
def test_a_script_that_an_acl_stops_half_way_leaves_the_log_as_it_was(server, consensus, verb, command):
    """One of its two writes was done, and every verb called the log corrupt from then on."""
    fill(consensus, "s1", 1, 3)
    server.command("ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", f"-{command}")
    limited = opened(server.url.replace("redis://", "redis://limited:pw@"))
    calls = {
        "append": lambda: limited.compare_and_set("s1", entry(3).tip, entry(4)),
        "create": lambda: limited.compare_and_set("s2", None, entry(1)),
        "truncate": lambda: limited.truncate("s1", SeqNo(3), entry(3).tip),
    }
    at = f"{'s2' if verb == 'create' else 's1'} at redis://"
    with pytest.raises(StorageError, match=f"{at}.*give the Redis user these commands"):
        calls[verb]()
    limited.close()
    assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(1), entry(2), entry(3)]
    assert consensus.head("s2") is None
    assert list(consensus.list_keys()) == ["s1"]
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED
    assert consensus.compare_and_set("s2", None, entry(1)) is CasResult.COMMITTED
    assert consensus.truncate("s1", SeqNo(3), entry(3).tip) == 2


def test_a_wrong_password_is_refused_and_never_shown():
    with redis_server(password="right/one") as server:
        for secret in ("wrong-secret", ""):
            url = f"redis://{f':{secret}@' if secret else ''}{server.address}/0"
            with pytest.raises(StoreRefused, match=server.address) as caught:
                opened(url)
            assert "wrong-secret" not in f"{caught.value!r}{caught.value.__cause__!r}"
        consensus = opened(server.url)
        assert "right" not in f"{consensus!r}{vars(consensus)}{consensus.address()}"
        server.stop()
        with pytest.raises(Determinate) as refused:
            consensus.head("s1")
        assert "right" not in f"{refused.value!r}"
        consensus.close()


def test_the_password_file_is_read_for_every_connection(server, tmp_path):
    """A rotated password needs no new client: the next connection uses it."""
    password_file = tmp_path / "password"
    password_file.write_text("first\n")
    server.command("ACL", "SETUSER", "rotating", "on", "resetpass", ">first", "~*", "+@all")
    consensus = opened(server.url.replace("redis://", "redis://rotating@") + f"?password_file={password_file}")
    fill(consensus, "s1", 1, 1)
    server.command("ACL", "SETUSER", "rotating", "on", "resetpass", ">second")
    server.command("CLIENT", "KILL", "USER", "rotating")
    password_file.write_text("second\n")
    assert consensus.head("s1") == entry(1)
    password_file.unlink()
    server.command("CLIENT", "KILL", "USER", "rotating")
    with pytest.raises(Determinate, match="password"):
        consensus.head("s1")
    consensus.close()


def test_a_crash_of_redis_loses_nothing_acknowledged(server, consensus):
    """kill -9 after the acknowledgement, with fsync at always: the same client goes on, the new process is recorded."""
    fill(consensus, "s1", 1, 3)
    before = server.command("HGET", "{s1}:m", "run")
    server.restart()
    assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(1), entry(2), entry(3)]
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED
    assert server.command("HGET", "{s1}:m", "run") not in (before, b"$0\r\n\r\n")


def test_a_forgotten_script_is_sent_again(server, consensus):
    fill(consensus, "s1", 1, 3)
    for name, call in verbs(consensus).items():
        server.command("SCRIPT", "FLUSH")
        call()
        assert b"$4\r\n" not in server.command("EXISTS", "{s1}:m"), name


@pytest.mark.parametrize("verb", ["head", "append", "create", "scan", "truncate"])
@pytest.mark.parametrize("keep", [0, 2], ids=["everything", "the last entry"])
def test_lost_entries_are_reported_and_never_overwritten(server, consensus, verb, keep):
    """A Redis without what it acknowledged (flushed, restored, rolled back) is refused by every verb."""
    fill(consensus, "s1", 1, 3)
    server.command("FLUSHALL")
    if keep:
        rolled_back = opened(server.url)
        fill(rolled_back, "s1", 1, keep)
        rolled_back.close()
    with pytest.raises(CorruptData, match="lost acknowledged entries: the head was v3") as caught:
        verbs(consensus)[verb]()
    assert caught.value.detail["key"] == "s1"
    fresh = opened(server.url)
    assert len(fresh.scan("s1", SeqNo(0), SCAN_ALL)) == keep
    fresh.close()


@pytest.mark.parametrize("verb", ["head", "append", "create", "scan", "truncate"])
@pytest.mark.parametrize("known_by", ["commit", "scan", "head"])
def test_a_log_regrown_to_the_very_length_that_was_seen_is_not_ours(server, consensus, verb, known_by):
    """A log is wiped or rolled back, and others write it anew. A process that stands at the old head must not commit onto it (spec 24.5)."""
    fill(consensus, "s1", 1, 3)
    known = consensus if known_by == "commit" else opened(server.url)
    verbs(known)["scan" if known_by == "commit" else known_by]()
    server.command("FLUSHALL")
    other = opened(server.url)
    fill(other, "s1", 1, 2)
    assert other.compare_and_set("s1", entry(2).tip, VersionedData(SeqNo(3), b"another third")) is CasResult.COMMITTED
    with pytest.raises(CorruptData, match="entry 3 is not the one it was, the log was wiped or rolled back"):
        verbs(known)[verb]()
    assert len(other.scan("s1", SeqNo(0), SCAN_ALL)) == 3
    for each in {known, other} - {consensus}:
        each.close()


@pytest.mark.parametrize("verb", ["head", "append", "create", "scan", "truncate"])
@pytest.mark.parametrize(
    "damage",
    [
        ("RPOP", "{s1}:l"),
        ("LPOP", "{s1}:l"),
        ("RPUSH", "{s1}:l", "x"),
        ("DEL", "{s1}:l"),
        ("DEL", "{s1}:m"),
        ("HDEL", "{s1}:m", "l"),
        ("HSET", "{s1}:m", "h", "9"),
    ],
    ids=" ".join,
)
def test_a_log_that_does_not_add_up_is_corrupt(server, consensus, verb, damage):
    """Spec 3.8."""
    fill(consensus, "s1", 1, 3)
    server.command(*damage)
    left = server.command("LLEN", "{s1}:l")
    with pytest.raises(CorruptData, match="s1"):
        verbs(consensus)[verb]()
    assert server.command("LLEN", "{s1}:l") == left


@pytest.mark.parametrize("verb", ["head", "append", "create", "scan", "truncate"])
def test_another_applications_key_is_left_alone(server, consensus, verb):
    server.command("SET", "{s1}:l", "theirs")
    with pytest.raises(CorruptData, match="another application"):
        verbs(consensus)[verb]()
    assert server.command("GET", "{s1}:l") == b"$6\r\ntheirs\r\n"


@pytest.mark.parametrize("verb", ["head", "append", "create", "scan", "truncate"])
def test_a_raised_epoch_fences(server, consensus, verb):
    fill(consensus, "s1", 1, 3)
    server.command("HSET", "{s1}:m", "e", "1")
    with pytest.raises(Fenced, match="epoch is 1"):
        verbs(consensus)[verb]()
    assert server.command("LLEN", "{s1}:l") == b":3\r\n"


def test_another_applications_names_are_no_logs(server, consensus):
    """Not even such as look like ours from afar, or are no text."""
    fill(consensus, "s1", 1, 1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        for name in (b"{\xff}:m", b"{}:m", b"{a\nb}:m", b"{" + b"k" * 800 + b"}:m"):
            connection.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$1\r\nx\r\n" % (len(name), name))
            assert connection.recv(100) == b"+OK\r\n"
    assert list(consensus.list_keys()) == ["s1"]


def test_a_full_redis_refuses_and_nothing_happened(server, consensus):
    fill(consensus, "s1", 1, 3)
    server.command("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(Determinate, match="maxmemory"):
            consensus.compare_and_set("s1", entry(3).tip, entry(4))
    finally:
        server.command("CONFIG", "SET", "maxmemory", "0")
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED


def test_a_demoted_primary_refuses_and_nothing_happened(server, consensus):
    fill(consensus, "s1", 1, 3)
    server.command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(Determinate):
            consensus.compare_and_set("s1", entry(3).tip, entry(4))
    finally:
        server.command("REPLICAOF", "NO", "ONE")
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED


def test_a_stopped_redis_is_determinate_and_named(server, consensus):
    fill(consensus, "s1", 1, 3)
    server.stop()
    for call in verbs(consensus).values():
        with pytest.raises(Determinate, match=f"s1 at redis://{server.address}"):
            call()
    with pytest.raises(Determinate, match=server.address):
        opened(server.url)
    server.start()
    assert consensus.head("s1") == entry(3)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("?ack=s3", "ack=redis"),
        ("?prefix=a{b", "braces"),
        ("?nosuch=1", "nosuch"),
        ("?unsafe=yes", "true or false"),
        ("?ca_file=/x", "rediss"),
    ],
)
def test_a_wrong_parameter_is_named(server, query, text):
    with pytest.raises(InvalidUsage, match=text):
        opened(server.url + query)


def test_regression_a_closed_client_refuses_calls_and_its_heartbeats_end(server, tmp_path):
    """It connected anew: readers of a client that was closed held their shard for as long as the process lived."""
    client = PersistClient.open(Location(blob=f"file://{tmp_path}", consensus=server.url))
    shard_id = ShardId.new()
    client.initialise(shard_id, SCHEMA)
    reader = client.open_leased_reader(shard_id, purpose="test", lease_ms=100)
    client.close()
    client.close()
    reader._heartbeat._thread.join(PATIENCE_S)
    assert not reader._heartbeat._thread.is_alive()
    consensus = opened(server.url)
    fill(consensus, "s1", 1, 3)
    consensus.close()
    for call in verbs(consensus).values():
        with pytest.raises(InvalidUsage, match="the store was closed"):
            call()


def test_regression_closing_takes_no_connection_from_under_a_call(server):
    """The call ended with whatever the driver stumbled over: an AttributeError, as often as not."""
    consensus, answers = opened(server.url), []
    fill(consensus, "s1", 1, 3)
    pool = consensus._inner._pool
    thread = threading.Thread(target=lambda: answers.append(consensus.head("s1")))
    with server.paused():
        thread.start()
        while not pool._get_in_use_connections():
            threading.Event().wait(0.001)
        consensus.close()
    thread.join(PATIENCE_S)
    assert answers == [entry(3)]
    assert all(connection._sock is None for connection in pool._connections)
