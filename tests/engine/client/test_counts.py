"""Snapshot.count is exact for all diffs: it does not use sums in state that are modulo 2**64."""

from __future__ import annotations

import pytest
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.read.snapshot import Snapshot
from persist_engine.model.batch import HollowPart, HollowRun
from persist_engine.model.frontier import Antichain
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.repair.force import force_compaction
from persist_kit.world import SCHEMA, World, row

INT64_MAX = 2**63 - 1


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "target_part_bytes"), [(2, 1 << 20), (300, 1024)], ids=["one part", "listed parts"])
def test_a_count_beyond_int64_is_exact(rows: int, target_part_bytes: int) -> None:
    """No written part leaves int64. A compaction makes parts that do."""
    settings = BatchSettings(inline_part_bytes_max=0, target_part_bytes=target_part_bytes, run_parts_max=2)
    world = World(settings=Settings(batch=settings))
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(2):
            # One row with a large diff, and many rows that keep it in one part with the other large one.
            updates = [row(n * 2 + time, "x", time, 1) for n in range(rows)] + [
                row(-1 - time, "x", time, INT64_MAX - rows)
            ]
            writer.append(updates, lower=Antichain.of(time), upper=Antichain.of(time + 1))
    machine = client.machine(shard_id)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        for _ in range(2):
            snapshot = reader.snapshot(1)
            assert isinstance(snapshot, Snapshot)
            with snapshot:
                assert snapshot.count() == 2 * INT64_MAX == sum(snapshot.to_table().column("diff").to_pylist())
            reader.downgrade_since(Antichain.of(1))
            force_compaction(machine, full=True)
            (batch,) = (each for each in machine.state.trace.batches() if each.parts)
    assert any(part.sum_wraps for part in batch.parts)
    assert {type(part) for part in batch.parts} <= {HollowPart, HollowRun}
    assert any(isinstance(part, HollowRun) for part in batch.parts) == (rows > 2)
    assert verify_shard(machine).findings == []
