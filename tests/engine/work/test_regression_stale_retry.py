"""Found by simulation: a retry so late that the blobs linked by its first attempt are already collected."""

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import MissingBlob
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.codec.keys import blob_key
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.frontier import Antichain
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from persist_engine.work.compact import compact
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
SETTINGS = Settings(
    batch=BatchSettings(inline_part_bytes_max=0),
    maintenance=MaintenanceSettings(gc_versions_min=1),
    compaction=CompactionSettings(claim_ms=0),
)


class BusyEnv(SeededEnv):
    """While its process sleeps before a retry, other processes do `meanwhile`, once."""

    meanwhile = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        work, self.meanwhile = self.meanwhile, None
        if work is not None:
            work()


class Slow:
    """A process whose first compare-and-set of `do` takes effect without an answer, and which retries late."""

    def __init__(self, world: World, meanwhile) -> None:
        self.faults, self.env = Faults(), BusyEnv(1)  # its ids differ from those of the world
        self.env.meanwhile = meanwhile
        client = PersistClient(
            FaultyBlob(world.blob, self.faults),
            FaultyConsensus(world.consensus, self.faults),
            settings=world.settings,
            env=self.env,
            metrics=NoMetrics(),
        )
        self.client = client

    def forget_next_answer(self) -> None:
        self.faults.fail_next("compare_and_set", happened=True)


def written(world: World):
    """A shard of some batches with a merge due, and a machine of another process."""
    shard_id = world.shard_id()
    client = world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(6):
            writer.compare_and_append([row(time, "a", time)], expected_upper=A(time), new_upper=A(time + 1))
    return shard_id, client.machine(shard_id)


def collect(machine) -> None:
    """Collects everything that is not named now."""
    for _ in range(2):
        write_rollup(machine)
        gc_and_truncate(machine)


def check_all_there(world: World, shard_id) -> None:
    state = world.process().machine(shard_id).refresh()
    missing = [blob for blob in live_blobs(state) if world.blob.get(blob_key(shard_id, blob.partial_key)) is None]
    assert missing == []


def test_regression_a_late_retry_does_not_link_a_collected_compaction() -> None:
    """Our result was applied without an answer. Another result replaced it, and ours was collected. Our retry then linked it
    again (spec 12.8).
    """
    world = World(settings=SETTINGS)
    shard_id, other = written(world)
    request = other.claim_compactions(max_requests=1)[0].requests[0]

    def meanwhile() -> None:
        compact(other, request)
        collect(other)

    slow = Slow(world, meanwhile)
    machine = slow.client.machine(shard_id)
    slow.forget_next_answer()
    assert compact(machine, request).ending is Ending.SUCCEEDED
    assert slow.env.meanwhile is None, "others were at work before the retry"
    check_all_there(world, shard_id)
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        assert reader.snapshot(5).to_table().num_rows == 6


def test_regression_a_late_retry_does_not_link_a_collected_rollup() -> None:
    """Our rollup was linked without an answer, replaced by newer ones and collected. Our retry then linked it again."""
    world = World(settings=SETTINGS)
    shard_id, other = written(world)
    slow = Slow(world, lambda: [other.refresh(), collect(other), collect(other)])
    machine = slow.client.machine(shard_id)
    slow.forget_next_answer()
    write_rollup(machine)
    assert slow.env.meanwhile is None, "others were at work before the retry"
    check_all_there(world, shard_id)


def test_regression_a_compaction_with_collected_inputs_is_late_and_not_corrupt() -> None:
    """No lease holds the inputs of a compaction. If another process was faster and they are collected, it is a lost race."""
    world = World(settings=SETTINGS)
    shard_id, other = written(world)
    request = other.claim_compactions(max_requests=1)[0].requests[0]
    assert compact(other, request).applied == 1
    collect(other)
    before = world.blob_keys(shard_id, kind="part")
    late = compact(world.process().machine(shard_id), request)
    assert (late.ending, late.applied) == (Ending.CONFLICT, 0)
    assert world.blob_keys(shard_id, kind="part") == before


def test_regression_a_compaction_with_a_missing_live_input_is_corrupt() -> None:
    """The counterpart: a blob that state still names must exist."""
    world = World(settings=SETTINGS)
    shard_id, other = written(world)
    request = other.claim_compactions(max_requests=1)[0].requests[0]
    _, batch = request.inputs[0]
    world.blob.delete(blob_key(shard_id, batch.parts[0].key))
    with pytest.raises(MissingBlob):
        compact(other, request)
