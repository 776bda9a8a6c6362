"""A time has the same meaning in every form: a number, a frontier, a datetime or ISO 8601 text."""

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
    "form",
    [
        lambda n: START + 1000 * n,
        lambda n: at(START + 1000 * n),
        seconds,
        lambda n: seconds(n).isoformat(),
    ],
    ids=["number", "frontier", "datetime", "text"],
)
def test_every_method_takes_every_form_of_a_time(form):
    world = World(env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    t = START
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        assert isinstance(writer.compare_and_append([], expected_upper=0, new_upper=form(0)), Appended)
        outcome = writer.compare_and_append([row(1, "a", t)], expected_upper=form(0), new_upper=form(1))
        assert outcome.upper == at(t + 1000)
        assert isinstance(writer.append([row(2, "b", t + 1000)], lower=form(1), upper=form(2)), Appended)
        batch = writer.batch([row(3, "c", t + 2000)], lower=form(2), upper=form(3))
        assert isinstance(writer.append_batch(batch, form(2), form(3)), Appended)
        with writer.builder(form(3)) as builder:
            builder.add([row(4, "d", t + 3000)])
            batch = builder.finish(form(4))
        assert isinstance(writer.compare_and_append_batch([batch], expected_upper=form(3), new_upper=form(4)), Appended)
        moved = writer.batch([row(5, "e", t + 4000)], lower=form(4), upper=form(5))
        moved.rewrite_times(form(5), form(6))
        assert isinstance(writer.compare_and_append([], expected_upper=form(4), new_upper=form(5)), Appended)
        assert isinstance(writer.compare_and_append_batch([moved], expected_upper=form(5), new_upper=form(6)), Appended)
        assert writer.wait_for_upper_past(form(5), timeout=0)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert reader.snapshot(form(5)).count() == 5
        assert reader.changes(form(1), form(3)).to_table().num_rows == 2
        reader.downgrade_since(form(1))
        assert reader.since == at(t + 1000)
        events = reader.subscribe(form(1))
        first = [event for event in (next(events), next(events), next(events)) if isinstance(event, Progress)]
        assert first == [Progress(at(t + 1001))]
        events.close()
        listen = reader.listen(form(2))
        listen.close()
    critical = client.open_critical_since(shard_id, CriticalReaderId.from_bytes(bytes(16)), opaque=b"o")
    assert critical.compare_and_downgrade_since(b"o", (b"o", form(3))).since == at(t + 3000)
    with open_upsert(client, world.shard_id(), SCHEMA, purpose="test") as upserts:
        table = pa.table(
            {"key": pa.array([{"id": 1}]), "val": pa.array([{"name": "b"}]), "time": pa.array([t], pa.int64())}
        )
        assert upserts.upsert_at(table, upper=form(1)).upper == at(t + 1000)
    with open_sink(client, world.shard_id(), SCHEMA, as_of=form(0)) as sink:
        sink.inputs[0].insert([row(1, "a", t)])
        sink.inputs[0].advance(form(1))
        assert sink.wait_for_upper(form(1), timeout_s=60)


def test_a_subscription_reports_each_frontier_once():
    world = World(env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for i in range(4):
            writer.compare_and_append([row(i, "a", 10 * i)], expected_upper=10 * i, new_upper=10 * i + 10)
        for as_of in (9, 15, 39):
            with client.open_leased_reader(shard_id, purpose="test") as reader:
                events = reader.subscribe(as_of)
                frontiers = []
                while not frontiers or frontiers[-1] < at(40):
                    event = next(events)
                    frontiers += [event.frontier] if isinstance(event, Progress) else []
                assert frontiers == sorted(set(frontiers), key=lambda frontier: frontier.time)
                assert frontiers[0] == at(as_of + 1)
                events.close()
