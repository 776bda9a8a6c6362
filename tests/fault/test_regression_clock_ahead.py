"""Found by simulation: an append of unknown outcome had happened, a process whose clock is far ahead removed its writer, and
the retry took that for a refusal and deleted the blobs that the shard names. Likewise when one's own clock was set back
between two attempts of one call, and forward again (seed 1007261).
"""

from __future__ import annotations

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import InvariantViolated
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_kit.world import SCHEMA, World, row

SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0))
LEASE_MS = SETTINGS.lease.writer_lease_ms


def test_a_writer_removed_by_a_clock_that_is_ahead_was_not_surely_refused():
    world = World(settings=SETTINGS)
    shard_id = world.shard_id()
    ahead = SeededEnv(1)
    ahead.advance_ms(2 * LEASE_MS)
    rival = PersistClient(world.blob, world.consensus, settings=SETTINGS, env=ahead, metrics=NoMetrics())
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    original = world.env.sleep

    def sleep(seconds: float) -> None:
        """The backoff between the attempts."""
        world.env.sleep = original
        other = rival.open_writer(shard_id, SCHEMA, purpose="rival")
        other.compare_and_append([row(2, "b", 1)], expected_upper=Antichain(1), new_upper=Antichain(2))
        original(seconds)

    world.env.sleep = sleep
    world.faults.fail_next("compare_and_set", happened=True)
    with pytest.raises(InvariantViolated, match="may or may not have happened"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=Antichain(0), new_upper=Antichain(1))
    with rival.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader, reader.snapshot(1) as snapshot:
        assert [update["key"]["id"] for update in snapshot.to_table().to_pylist()] == [1, 2]


def test_a_writer_whose_own_clock_was_back_for_the_attempt_that_got_through_was_not_surely_refused():
    world = World(settings=SETTINGS)
    shard_id = world.shard_id()
    rival = PersistClient(world.blob, world.consensus, settings=SETTINGS, env=SeededEnv(1), metrics=NoMetrics())
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    other = rival.open_writer(shard_id, SCHEMA, purpose="rival")  # now the first attempt loses a race
    original_scan, original_sleep = world.consensus.scan, world.env.sleep

    def scan(*args: object, **kwargs: object) -> object:
        """Between the first attempt and the second."""
        world.consensus.scan = original_scan
        world.env.advance_ms(-3 * LEASE_MS)
        world.faults.fail_next("compare_and_set", happened=True)
        return original_scan(*args, **kwargs)

    def sleep(seconds: float) -> None:
        """Between the second, which gets through, and the third."""
        world.env.sleep = original_sleep
        world.env.advance_ms(3 * LEASE_MS)
        other.compare_and_append([row(2, "b", 1)], expected_upper=Antichain(1), new_upper=Antichain(2))
        original_sleep(seconds)

    world.consensus.scan, world.env.sleep = scan, sleep
    other.compare_and_append([], expected_upper=Antichain(0), new_upper=Antichain(0))
    with pytest.raises(InvariantViolated, match="may or may not have happened"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=Antichain(0), new_upper=Antichain(1))
    with rival.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader, reader.snapshot(1) as snapshot:
        assert [update["key"]["id"] for update in snapshot.to_table().to_pylist()] == [1, 2]
