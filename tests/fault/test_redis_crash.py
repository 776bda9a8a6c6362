"""A real Redis that dies without warning while two processes' worth of clients append."""

from __future__ import annotations

import threading

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Settings, ShardId
from persist_engine.base.errors import Unavailable
from persist_engine.base.settings import RetrySettings
from persist_kit.servers import RedisServer, redis_server
from persist_kit.world import SCHEMA, row

A = Antichain.of
pytestmark = pytest.mark.redis
APPENDS = 60


def appender(location: Location, shard_id: ShardId, number: int, acknowledged: list[int], ready: threading.Barrier):
    """Append `APPENDS` rows one by one, each at whatever the upper is by then."""
    with PersistClient.open(location) as client, client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        ready.wait(60)
        for key in range(number * APPENDS, (number + 1) * APPENDS):
            while True:
                upper = writer.upper
                assert upper.time is not None
                outcome = writer.compare_and_append(
                    [row(key, "x", upper.time)], expected_upper=upper, new_upper=A(upper.time + 1)
                )
                if isinstance(outcome, Appended):
                    acknowledged.append(key)
                    break


def test_what_was_acknowledged_is_there_exactly_once_after_crashes():
    shard_id = ShardId.new()
    with redis_server() as server:
        location = Location(blob=f"mem:{shard_id}", consensus=server.url)
        with PersistClient.open(location) as client:
            client.initialise(shard_id, SCHEMA)
        acknowledged: list[int] = []
        ready = threading.Barrier(3)
        threads = [
            threading.Thread(target=appender, args=(location, shard_id, number, acknowledged, ready))
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        ready.wait(60)
        for _ in range(4):
            # Let some appends through between two crashes.
            goal = min(len(acknowledged) + 10, 2 * APPENDS)
            pause = threading.Event()
            while len(acknowledged) < goal:
                pause.wait(0.002)
            server.restart()
        for thread in threads:
            thread.join(120)
        assert sorted(acknowledged) == list(range(2 * APPENDS))
        with (
            PersistClient.open(location) as client,
            client.open_leased_reader(shard_id, purpose="check") as reader,
        ):
            upper = client.recent_upper(shard_id).time
            assert upper == 2 * APPENDS
            rows = reader.snapshot(A(upper - 1)).to_table()
        assert rows.column("key").combine_chunks().field("id").to_pylist() == list(range(2 * APPENDS))
        assert set(rows.column("diff").to_pylist()) == {1}


def test_a_redis_that_is_away_gives_up_when_asked_and_serves_again_when_it_is_back():
    shard_id = ShardId.new()
    hasty = Settings(retry=RetrySettings(give_up_ms=300))
    with redis_server() as server:
        location = Location(blob=f"mem:{shard_id}", consensus=server.url)
        with PersistClient.open(location, settings=hasty) as client, PersistClient.open(location) as patient:
            writer, other = (one.open_writer(shard_id, SCHEMA, purpose="test") for one in (client, patient))
            assert isinstance(writer.append([row(1, "a", 0)], lower=A(0), upper=A(1)), Appended)
            address = _away(server)
            with pytest.raises(Unavailable, match=address):
                writer.fetch_recent_upper()
            with pytest.raises(Unavailable, match=address):
                writer.append([row(2, "b", 1)], lower=A(1), upper=A(2))
            server.start()
            # The first call on a connection of before fails, and a busy machine may take longer for the second than the hasty client.
            assert isinstance(other.append([row(2, "b", 1)], lower=A(1), upper=A(2)), Appended)
            assert writer.fetch_recent_upper() == A(2)


def _away(server: RedisServer) -> str:
    server.kill()
    return server.address
