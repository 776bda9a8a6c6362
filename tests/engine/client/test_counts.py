"""What reads and writes count (spec 18), each by the path that it takes."""

from concurrent.futures import wait

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import MINIMUM, Antichain, Description
from persist_engine.shard import applier
from persist_engine.shard.part_source import PartSource
from persist_engine.shard.read_ahead import FetchAhead, RunToRead
from persist_engine.shard.retry import Retry
from persist_engine.testing.counted import CountedMetrics
from persist_engine.testing.world import SCHEMA, World, row
from persist_engine.work.compact import compact_due

at = Antichain.of
SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0), compaction=CompactionSettings(claim_ms=0))


class Shop:
    def __init__(self):
        self.world = World()
        self.metrics = CountedMetrics()
        self.client = PersistClient(
            self.world.blob, self.world.consensus, settings=SETTINGS, env=SystemEnv(), metrics=self.metrics
        )
        self.shard_id = self.world.shard_id()

    def write(self, times, *, name="a"):
        with self.client.open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            for time in times:
                writer.append([row(time, name, time)], lower=at(time), upper=at(time + 1))

    def reader(self):
        return self.client.open_leased_reader(self.shard_id, SCHEMA, purpose="test")

    def fetched(self, path):
        """Parts fetched; all else that a path counts is checked on the way."""
        parts = self.metrics.total("fetched_parts", path=path)
        assert len(self.metrics.observed_s("fetched", path=path)) == parts
        assert bool(self.metrics.total("fetched_bytes", path=path)) == bool(parts)
        assert bool(self.metrics.total("fetched_good_bytes", path=path)) == bool(parts)
        return parts


@pytest.fixture
def shop():
    made = Shop()
    made.write(range(4))
    assert len(made.metrics.observed_s("part_write")) == 4
    return made


def test_every_way_to_read_counts_under_its_own_name(shop):
    with shop.reader() as reader:
        assert shop.fetched("snapshot") == 0
        reader.snapshot(3).to_table()
        assert shop.fetched("snapshot") == 4
        leased = reader.snapshot(3).lease_parts()
        reader.fetch(leased[0])
        assert shop.fetched("fetch") == 1
        listen = reader.listen(1)
        for _ in range(2):  # of the first, which holds time 1, statistics say that nothing is to come
            list(listen.next_batch(timeout_s=None))
        assert shop.fetched("listen") == 1
        reader.changes(1, 3).to_table()
        assert shop.fetched("changes") > 0
        assert (shop.fetched("snapshot"), shop.fetched("compaction")) == (4, 0)
        compact_due(shop.client.machine(shop.shard_id))
        assert shop.fetched("compaction") > 0
        assert reader.return_part(leased[0])
    assert shop.metrics.total("lease_dropped_parts") == 3


def test_rows_whose_times_are_rewritten_are_counted_where_they_are_read(shop):
    with shop.client.open_writer(shop.shard_id, SCHEMA, purpose="test") as writer:
        batch = writer.batch([row(9, "late", 4), row(10, "late", 5)], lower=at(4), upper=at(6))
        batch.rewrite_times(at(7), at(8))
        writer.compare_and_append_batch([batch], expected_upper=at(4), new_upper=at(8))
    with shop.reader() as reader:
        reader.snapshot(7).to_table()
    assert shop.metrics.total("fetched_rewritten_rows", path="snapshot") == 2


def test_parts_are_counted_by_whether_they_had_been_fetched_when_needed(shop):
    machine = shop.client.machine(shop.shard_id)
    parts = [part for batch in machine.state.trace.batches() for part in batch.part_list()]
    retry = Retry(machine.env, machine.settings.retry, shop.metrics)
    source = PartSource(shop.shard_id, shop.world.blob, SCHEMA, retry, shop.metrics, path="compaction")
    runs = [RunToRead.of(Description(MINIMUM, at(4), MINIMUM), (part,), is_sorted=True) for part in parts]
    two = sum(part.hollow_bytes for part in parts[:2])
    ahead = FetchAhead(source, runs, budget_bytes=two)
    assert shop.metrics.total("prefetch_over_budget", path="compaction") == 1
    wait(ahead._pending.values())
    ahead.take(3, 0)  # its turn had not come
    assert shop.metrics.total("prefetch_parts", outcome="skipped") == 1
    ahead.take(0, 0)
    assert shop.metrics.total("prefetch_parts", outcome="ready") == 1
    ahead.close()
    assert shop.metrics.total("prefetch_parts", outcome="wasted") == 2
    ample = FetchAhead(source, runs, budget_bytes=10**9)
    ample.close()
    assert shop.metrics.total("prefetch_over_budget") == 1


def test_a_part_that_is_still_on_its_way_is_waited_for(shop):
    machine = shop.client.machine(shop.shard_id)
    part = next(machine.state.trace.batches()).part_list()[0]

    class Future:
        def done(self):
            return False

        def result(self):
            return b"data"

    retry = Retry(machine.env, machine.settings.retry, shop.metrics)
    source = PartSource(shop.shard_id, shop.world.blob, SCHEMA, retry, shop.metrics)
    ahead = FetchAhead(
        source, [RunToRead.of(Description(MINIMUM, at(4), MINIMUM), (part,), is_sorted=True)], budget_bytes=0
    )
    ahead._pending[(0, 0)] = Future()
    ahead.take(0, 0)
    ahead.close()
    assert shop.metrics.total("prefetch_parts", outcome="waited", path="snapshot") == 1


def test_a_command_that_waits_for_another_is_counted(shop, monkeypatch):
    monkeypatch.setattr(applier, "_TURN_S", 0)
    shop.write([4])
    assert shop.metrics.observed_s("command_turn") == []
    turn = shop.client.machine(shop.shard_id)._applier._turn
    with turn:
        shop.write([5])
    waited = len(shop.metrics.observed_s("command_turn"))
    assert waited == shop.metrics.total("command_turn_timeout") > 0


def test_a_read_after_the_lease_ran_out_is_counted(shop):
    reader = shop.reader()
    reader._heartbeat._lost.set()
    with pytest.raises(Fenced):
        reader.snapshot(3)
    assert shop.metrics.total("lease_timeout_read") == 1
    reader.expire()
    assert shop.metrics.total("lease_dropped_parts") == 0


def test_keys_too_long_for_their_bound_are_counted():
    from persist_engine.codec.schema import Schema

    shop, schema = Shop(), Schema.from_ddl("name STRING", "x BIGINT")
    with shop.client.open_writer(shop.shard_id, schema, purpose="test") as writer:
        writer.append([((("short",), (1,)), 0, 1)], lower=at(0), upper=at(1))
        assert shop.metrics.total("key_lower_cut") == 0
        writer.append([((("long" * 100,), (1,)), 1, 1)], lower=at(1), upper=at(2))
    assert shop.metrics.total("key_lower_cut") == 1


def test_rebuilding_the_state_of_upserts_is_timed(shop):
    with shop.client.open_upsert(shop.shard_id, SCHEMA, purpose="test") as upserts:
        upserts.hydrate()
    assert len(shop.metrics.observed_s("upsert_rehydration")) == 1


def test_additions_that_wait_for_uploads_are_counted(shop):
    small = BatchSettings(inline_part_bytes_max=0, target_part_bytes=1024, outstanding_parts_max=1)
    client = PersistClient(
        shop.world.blob, shop.world.consensus, settings=Settings(batch=small), env=SystemEnv(), metrics=shop.metrics
    )
    with client.open_writer(shop.shard_id, SCHEMA, purpose="test") as writer:
        batch = writer.batch([row(key, "a" * 50, 4) for key in range(60)], lower=at(4), upper=at(5))
        assert shop.metrics.total("write_stall") == len(batch.hollow.parts) - 1, "all but the first"
        batch.delete()


def test_blobs_are_fetched_ahead_in_turns_over_all_runs(shop):
    """The first part of every run, then the second: any other order lets the merge wait."""
    machine = shop.client.machine(shop.shard_id)
    one, two, three, four = [part for batch in machine.state.trace.batches() for part in batch.part_list()]
    retry = Retry(machine.env, machine.settings.retry, shop.metrics)
    source = PartSource(shop.shard_id, shop.world.blob, SCHEMA, retry, shop.metrics)
    desc = Description(MINIMUM, at(4), MINIMUM)
    runs = [RunToRead.of(desc, (one, two), is_sorted=True), RunToRead.of(desc, (three, four), is_sorted=True)]
    begun = []
    for parts in range(5):
        ahead = FetchAhead(
            source, runs, budget_bytes=sum(part.hollow_bytes for part in (one, three, two, four)[:parts])
        )
        begun.append(list(ahead._pending))
        ahead.close()
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert begun == [order[:parts] for parts in range(5)]
