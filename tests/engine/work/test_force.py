"""Compaction that a person asks for, with the settings that everybody has."""

from __future__ import annotations

import random

import pytest
from persist_engine import Antichain
from persist_engine.testing.world import SCHEMA, World, row
from persist_engine.work.force import force_compaction
from persist_engine.work.outcome import Ending

A = Antichain.of


@pytest.mark.parametrize("seed", range(8))
def test_full_compaction_does_what_it_claims_itself(seed: int):
    """Nobody else would, for as long as a claim lasts: nothing was compacted, and nothing could be for an hour."""
    rng, world = random.Random(seed), World(seed)
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    rows = 0
    for time in range(rng.randint(3, 9)):
        count = rng.choice([1, 2, 5, 20, 60])
        updates = [row(time * 100 + number, "x", time) for number in range(count)]
        writer.compare_and_append(updates, expected_upper=A(time), new_upper=A(time + 1))
        rows += count
    world.env.advance_ms(world.settings.compaction.claim_ms + 1)  # the claims of the appends have lapsed
    outcomes = force_compaction(writer.machine, full=True)
    assert outcomes
    assert all(outcome.ending is Ending.SUCCEEDED for outcome in outcomes)
    batches = [batch for batch in writer.machine.refresh().trace.spine_batches() if batch.rows]
    assert [(batch.rows, batch.is_compact) for batch in batches] == [(rows, True)]
