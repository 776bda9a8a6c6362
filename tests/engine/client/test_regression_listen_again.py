"""Found by simulation: a listener whose first fetch fails must be able to continue."""

import pytest
from persist_engine.base.errors import Unavailable
from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.client.read.listen import Progress
from persist_engine.model.frontier import Antichain
from persist_kit.world import SCHEMA, World, row

SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0), retry=RetrySettings(give_up_ms=20))


def test_regression_a_listener_continues_after_an_outage_of_the_blob_store() -> None:
    """It took its first batch for consumed, and then its own frontier for one that the batch had passed."""
    world = World(settings=SETTINGS)
    shard_id, client = world.shard_id(), world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append(
            [row(1, "a", 1), row(2, "b", 2)], expected_upper=Antichain.of(0), new_upper=Antichain.of(3)
        )
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        listen = reader.listen(0)
        world.faults.fail_next("get", happened=False, times=50)
        with pytest.raises(Unavailable):
            next(listen)
        world.faults.heal()
        updates, progress = next(listen), next(listen)
        assert updates.table.column("time").to_pylist() == [1, 2]
        assert progress == Progress(Antichain.of(3))
