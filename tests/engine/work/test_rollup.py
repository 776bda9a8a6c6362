"""Rollups on in-memory stores: linked once, never lost, never written for nothing."""

import pytest
from persist_engine.codec.keys import blob_key
from persist_engine.testing.faults import Faults, FaultyConsensus
from persist_engine.work.outcome import Ending
from persist_engine.work.rollup import write_rollup
from persist_kit.recorded import RecordedShard, connect


@pytest.fixture
def stores():
    made = RecordedShard()
    made.append(times=5)
    return made


def test_a_rollup_is_linked_readable_and_not_written_twice(stores):
    machine = stores.client().machine(stores.shard_id)
    outcome = write_rollup(machine)
    assert outcome.ending is Ending.SUCCEEDED
    assert outcome.bytes_written > 0
    assert machine.state.rollups[outcome.seqno].key == outcome.key
    assert stores.blob.get(blob_key(stores.shard_id, outcome.key)) is not None
    stores.check_contents()
    again = write_rollup(stores.client().machine(stores.shard_id))
    assert again.seqno > outcome.seqno  # the link itself was a version


def test_of_two_rollups_of_one_version_one_is_linked_and_the_other_removed(stores):
    mine, other = (stores.client().machine(stores.shard_id) for _ in range(2))
    mine.refresh()
    state = other.refresh()
    key, size = other.versions.write_rollup_for_state(state)
    before = len(stores.blobs())

    class Slow:
        """Lets the other process link between our write and our link."""

        def __getattr__(self, name):
            return getattr(mine, name)

        def add_rollup(self, seqno, rollup):
            from persist_engine.model.batch import HollowRollup

            other.add_rollup(seqno, HollowRollup(key, size))
            return mine.add_rollup(seqno, rollup)

    outcome = write_rollup(Slow())
    assert outcome.ending is Ending.CONFLICT
    assert outcome.blobs_deleted == 1
    assert len(stores.blobs()) == before
    stores.check_nothing_lost()


def test_a_rollup_with_a_link_of_unknown_outcome_is_kept(stores):
    """Regression for bug 1: the blob of a rollup that an unanswered attempt linked must not be deleted."""
    faults = Faults()
    client = connect(stores.blob, FaultyConsensus(stores.consensus, faults))
    machine = client.machine(stores.shard_id)
    faults.fail_next("compare_and_set", happened=True)
    outcome = write_rollup(machine)
    assert faults.injected == 1
    assert outcome.ending is Ending.SUCCEEDED
    assert stores.blob.get(blob_key(stores.shard_id, outcome.key)) is not None
    stores.check_nothing_lost()
