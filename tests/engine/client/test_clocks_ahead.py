"""A process whose clock is ahead ends the leases of others with its commits. That is said, and no read gives another answer for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from persist_engine import Appended, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import Fenced
from persist_engine.base.settings import LeaseSettings

SCHEMA = Schema.from_ddl("id BIGINT", "")
NOW_MS = 1_790_000_000_000


@pytest.mark.parametrize(("ahead_ms", "ends"), [(LeaseSettings().reader_lease_ms - 60_000, False), (3_600_001, True)])
def test_a_reader_whose_lease_another_clock_ended_is_fenced_and_an_append_of_that_writer_lands(
    tmp_path: Path, ahead_ms: int, ends: bool
) -> None:
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/log.db")
    shard = ShardId.new()
    with (
        PersistClient.open(location, env=SeededEnv(start_ms=NOW_MS)) as mine,
        PersistClient.open(location, env=SeededEnv(start_ms=NOW_MS + ahead_ms)) as ahead,
        mine.open_writer(shard, SCHEMA, purpose="mine") as writer,
        ahead.open_writer(shard, SCHEMA, purpose="ahead") as other,
    ):
        rows = [(((upper,), ()), upper, 1) for upper in range(3)]
        assert isinstance(writer.compare_and_append(rows[:1], expected_upper=0, new_upper=1), Appended)
        reader = mine.open_leased_reader(shard, SCHEMA, purpose="mine")
        assert isinstance(other.compare_and_append(rows[1:2], expected_upper=1, new_upper=2), Appended)
        assert isinstance(writer.compare_and_append(rows[2:], expected_upper=2, new_upper=3), Appended)
        left = {one.purpose for one in mine.inspect(shard).readers}
        if ends:
            assert left == set()
            with pytest.raises(Fenced, match="ran out, or its hold was ended: open a new reader"):
                reader.snapshot(2)
        else:
            assert left == {"mine"}
            assert reader.snapshot(2).to_table().num_rows == 3
            reader.expire()
