"""Snapshot.corrections: desired minus persisted, beside the same difference of two multisets."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from persist_kit.depth import draws
from persist_kit.world import World

SCHEMA = Schema.from_ddl("id DOUBLE", "name STRING")
at = Antichain.of
SMALL = Settings(batch=BatchSettings(target_part_bytes=KIB, inline_part_bytes_max=0))
INLINE = Settings()
rows = st.tuples(
    st.tuples(st.sampled_from([None, 0.0, -1.5, 2.0, float("inf")])), st.tuples(st.sampled_from([None, "", "a", "b"]))
)


def shown(table):
    return Counter(
        {
            (tuple(each["key"].values()), tuple(each["val"].values()), each["time"]): each["diff"]
            for each in table.to_pylist()
        }
    )


@pytest.mark.parametrize("config", [SMALL, INLINE], ids=["blobs", "inline"])
@settings(max_examples=draws(25), deadline=None)
@given(
    persisted=st.lists(st.lists(st.tuples(rows, st.integers(1, 3)), max_size=12), min_size=1, max_size=4),
    desired=st.lists(st.lists(rows, max_size=30), max_size=3),
    limited=st.booleans(),
)
def test_they_are_the_difference_of_two_multisets(config, persisted, desired, limited):
    world = World(settings=config)
    client, shard_id = world.process(), world.shard_id()
    where = "name = 'a'" if limited else None
    passes = (lambda row: row[1][0] == "a") if limited else (lambda _: True)
    desired = [[row for row in part if passes(row)] for part in desired]
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time, part in enumerate(persisted):
            updates = [(row, time, diff) for row, diff in part]
            writer.compare_and_append(updates, expected_upper=at(time), new_upper=at(time + 1))
        now = len(persisted)
        staged = [writer.batch([(row, now, 1) for row in part], lower=at(now), upper=at(now + 1)) for part in desired]
        reader = client.open_leased_reader(shard_id, purpose="test")
        with reader, reader.snapshot(at(now - 1), where=where) as snapshot:
            tables = list(snapshot.corrections([each.hollow for each in staged], time=now + 5))
        writer.delete_batches(staged)
    wanted = Counter(row for part in desired for row in part)
    for row, diff in (each for part in persisted for each in part):
        if passes(row):
            wanted[row] -= diff
    expected = {(*row, now + 5): diff for row, diff in wanted.items() if diff}
    assert {row: diff for table in tables for row, diff in shown(table).items()} == expected


def test_a_snapshot_of_some_columns_has_none():
    world = World(settings=SMALL)
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([(((1.0,), ("a",)), 0, 1)], expected_upper=at(0), new_upper=at(1))
    with (
        client.open_leased_reader(shard_id, purpose="test") as reader,
        reader.snapshot(at(0), columns=["id"]) as snapshot,
        pytest.raises(InvalidUsage, match="only some columns"),
    ):
        list(snapshot.corrections([], time=1))
