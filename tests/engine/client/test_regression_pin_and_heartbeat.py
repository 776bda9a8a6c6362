"""Found by simulation: a snapshot begins while the heartbeat of its own handle releases old versions."""

from __future__ import annotations

import threading

import pytest
from persist_engine.base.errors import Unavailable
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.model.frontier import Antichain
from persist_kit.world import SCHEMA, World, row


class LockWithHeartbeat:
    """The lock around the pins of a handle. Its heartbeat runs once before the lock is taken."""

    def __init__(self, beat):
        self._inner = threading.Lock()
        self._beat = beat

    def __enter__(self):
        beat, self._beat = self._beat, None
        if beat is not None:
            beat()
        self._inner.acquire()

    def __exit__(self, *_):
        self._inner.release()


def test_a_pin_never_holds_a_version_that_a_heartbeat_has_just_released():
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    with client.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:

        def beat() -> None:
            writer.append([row(1, "x", 0)], lower=Antichain(0), upper=Antichain(1))
            assert reader._beat()

        reader._pins._lock = LockWithHeartbeat(beat)
        pin = reader.pin()
        held = world.process().machine(shard_id).state.leased_readers[reader.reader_id].seqno
        assert reader._pins.oldest(SeqNo(0)) >= held
        assert reader._beat()  # it still holds the pinned version
        pin.release()


@pytest.mark.slow
def test_the_retry_of_a_downgrade_requests_no_version_that_a_heartbeat_released():
    """The outcome of the first attempt is unknown. Before the second, a heartbeat of the same handle would release more."""
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    with client.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:
        beats: list[threading.Thread] = []
        original = world.env.sleep

        def sleep(seconds: float) -> None:
            """The backoff between the attempts."""
            if not beats:
                beats.append(threading.Thread(target=reader._beat))
                writer.append([row(1, "x", 0)], lower=Antichain(0), upper=Antichain(5))
                beats[0].start()
                beats[0].join(0.3)  # it ends at once, or waits for its turn
            original(seconds)

        world.env.sleep = sleep
        world.faults.fail_next("compare_and_set", happened=True)
        assert reader.downgrade_since(Antichain(3)) == Antichain(3)
        beats[0].join()
        assert len(beats) == 1


def test_after_a_downgrade_without_answer_the_handle_reads_nothing_before_its_requested_since():
    """Found by simulation: the handle believed that it still held what its state had released."""
    settings = Settings(retry=RetrySettings(initial_ms=1, clamp_ms=1, give_up_ms=1.0))
    world = World(settings=settings)
    shard_id = world.shard_id()
    client = world.process()
    client.open_writer(shard_id, SCHEMA, purpose="test").append(
        [row(1, "x", 0)], lower=Antichain(0), upper=Antichain(5)
    )
    with client.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:
        world.faults.fail_next("compare_and_set", happened=True)
        world.faults.set_rates(happens=0.0, answers=0.0)
        with pytest.raises(Unavailable):
            reader.downgrade_since(Antichain(3))
        world.faults.heal()
        assert world.process().machine(shard_id).state.trace.since == Antichain(3)
        assert reader.since == Antichain(3)
        assert reader.snapshot(2) == SinceAhead(since=Antichain(3), as_of=2)
        assert reader.downgrade_since(Antichain(1)) == Antichain(3)
