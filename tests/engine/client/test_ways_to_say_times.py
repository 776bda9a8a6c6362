"""A time is a time however it is said: as a number, a frontier, a datetime or ISO 8601 text."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from persist_engine import Antichain, CriticalReaderId
from persist_engine.client.read.listen import Progress
from persist_engine.client.write.outcomes import Appended
from persist_engine.dataflow.open import open_sink, open_upsert
from persist_kit.world import SCHEMA, AheadEnv, World, row

at = Antichain.of
NEW_YEAR = datetime(2013, 1, 1, tzinfo=UTC)
START = 1_356_998_400_000


def seconds(n):
    return NEW_YEAR + timedelta(seconds=n)


@pytest.mark.parametrize(
    "say",
    [
        lambda n: START + 1000 * n,
        lambda n: at(START + 1000 * n),
        seconds,
        lambda n: seconds(n).isoformat(),
    ],
    ids=["number", "frontier", "datetime", "text"],
)
def test_every_method_takes_every_way_to_say_a_time(say):
    world = World(env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    t = START
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        assert isinstance(writer.compare_and_append([], expected_upper=0, new_upper=say(0)), Appended)
        outcome = writer.compare_and_append([row(1, "a", t)], expected_upper=say(0), new_upper=say(1))
        assert outcome.upper == at(t + 1000)
        assert isinstance(writer.append([row(2, "b", t + 1000)], lower=say(1), upper=say(2)), Appended)
        batch = writer.batch([row(3, "c", t + 2000)], lower=say(2), upper=say(3))
        assert isinstance(writer.append_batch(batch, say(2), say(3)), Appended)
        with writer.builder(say(3)) as builder:
            builder.add([row(4, "d", t + 3000)])
            batch = builder.finish(say(4))
        assert isinstance(writer.compare_and_append_batch([batch], expected_upper=say(3), new_upper=say(4)), Appended)
        moved = writer.batch([row(5, "e", t + 4000)], lower=say(4), upper=say(5))
        moved.rewrite_times(say(5), say(6))
        assert isinstance(writer.compare_and_append([], expected_upper=say(4), new_upper=say(5)), Appended)
        assert isinstance(writer.compare_and_append_batch([moved], expected_upper=say(5), new_upper=say(6)), Appended)
        assert writer.wait_for_upper_past(say(5), timeout=0)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert reader.snapshot(say(5)).count() == 5
        assert reader.changes(say(1), say(3)).to_table().num_rows == 2
        reader.downgrade_since(say(1))
        assert reader.since == at(t + 1000)
        events = reader.subscribe(say(1))
        first = [event for event in (next(events), next(events), next(events)) if isinstance(event, Progress)]
        assert first == [Progress(at(t + 1001))]
        events.close()
        listen = reader.listen(say(2))
        listen.close()
    critical = client.open_critical_since(shard_id, CriticalReaderId.from_bytes(bytes(16)), opaque=b"o")
    assert critical.compare_and_downgrade_since(b"o", (b"o", say(3))).since == at(t + 3000)
    with open_upsert(client, world.shard_id(), SCHEMA, purpose="test") as upserts:
        table = pa.table(
            {"key": pa.array([{"id": 1}]), "val": pa.array([{"name": "b"}]), "time": pa.array([t], pa.int64())}
        )
        assert upserts.upsert_at(table, upper=say(1)).upper == at(t + 1000)
    with open_sink(client, world.shard_id(), SCHEMA, as_of=say(0)) as sink:
        sink.inputs[0].insert([row(1, "a", t)])
        sink.inputs[0].advance(say(1))
        assert sink.wait_for_upper(say(1), timeout_s=30)


def test_a_subscription_tells_each_frontier_once():
    world = World(env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for i in range(4):
            writer.compare_and_append([row(i, "a", 10 * i)], expected_upper=10 * i, new_upper=10 * i + 10)
        for as_of in (9, 15, 39):
            with client.open_leased_reader(shard_id, purpose="test") as reader:
                events = reader.subscribe(as_of)
                told = []
                while not told or told[-1] < at(40):
                    event = next(events)
                    told += [event.frontier] if isinstance(event, Progress) else []
                assert told == sorted(set(told), key=lambda frontier: frontier.time)
                assert told[0] == at(as_of + 1)
                events.close()
