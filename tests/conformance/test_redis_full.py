"""A Redis whose memory is full takes no commits; what makes room goes on."""

from __future__ import annotations

import re

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Determinate, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import RetrySettings
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo
from persist_engine.storage.open import open_consensus
from persist_engine.testing.conformance import entry, fill
from persist_engine.work.rollup import write_rollup
from persist_kit.servers import redis_server
from persist_kit.world import SCHEMA, row

pytestmark = pytest.mark.redis
A = Antichain.of
#: Bytes of one version here, most of them a source's progress.
VERSION_BYTES = 20_000


@pytest.fixture
def server():
    with redis_server() as server:
        yield server


def token(at):
    return (b"%03d" % at) * (VERSION_BYTES // 3)


def used_bytes(server):
    return int(re.search(rb"used_memory:(\d+)", server.command("INFO", "memory"))[1])


def test_regression_a_full_redis_truncates(server):
    """Truncating notes the lowest seqno, which Redis took for a command that needs memory."""
    consensus = open_consensus(server.url, env=SystemEnv(), metrics=NoMetrics())
    fill(consensus, "s1", 1, 9)
    server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(Determinate, match=r"used memory > 'maxmemory'.*redis is full.*persist maintain gc"):
        consensus.compare_and_set("s1", entry(9).tip, entry(10))
    assert [consensus.truncate("s1", SeqNo(seqno), entry(seqno).tip) for seqno in (4, 4, 9)] == [3, 0, 5]
    assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(9)]
    server.command("CONFIG", "SET", "maxmemory", "0")
    assert consensus.compare_and_set("s1", entry(9).tip, entry(10)) is CasResult.COMMITTED
    server.restart()
    assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(9), entry(10)], "the append-only file says the same"
    consensus.close()


@pytest.mark.parametrize("command", ["gc", "auto"])
def test_regression_collection_makes_room_on_a_full_redis(server, tmp_path, persist, command):
    location = Location(blob=f"file://{tmp_path}", consensus=server.url)
    settings = Settings(retry=RetrySettings(give_up_ms=300))
    shard_id = ShardId.new()
    with PersistClient.open(location, settings=settings) as client:
        writer = client.open_writer(shard_id, SCHEMA, purpose="test")

        def append(at):
            answer = writer.compare_and_append(
                [row(at, "a", at)],
                expected_upper=A(at),
                new_upper=A(at + 1),
                progress=("sink", token(at)),
                expected_progress=token(at - 1) if at else None,
            )
            assert isinstance(answer, Appended)

        for at in range(30):
            append(at)
        write_rollup(client.machine(shard_id))
        server.command("CONFIG", "SET", "maxmemory", str(used_bytes(server)))
        with pytest.raises(Unavailable, match=r"used memory > 'maxmemory'.*redis is full"):
            list(map(append, range(30, 60)))
        written = client.recent_upper(shard_id).time
        before = used_bytes(server)
        # As where other shards filled what this one left: not even the smallest command that takes memory.
        server.command("CONFIG", "SET", "maxmemory", str(before - 5 * VERSION_BYTES))
        code, _, err = persist(
            *(
                "maintain",
                command,
                shard_id,
                "--blob",
                location.blob,
                "--consensus",
                location.consensus,
                "--give-up",
                "5",
            )
        )
        assert code == 0, err
        assert used_bytes(server) < before - 20 * VERSION_BYTES
        append(written)
        with client.open_leased_reader(shard_id, purpose="test") as reader:
            assert reader.snapshot(A(written)).to_table().num_rows == written + 1
