"""Runs that lie apart are read as one, by what statistics say; others are left as they are."""

from __future__ import annotations

import collections
import itertools
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as limited
from hypothesis import strategies as st
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.codec import row_groups
from persist_engine.model.batch import ColumnStats, HollowPart, InlinePart, PartStats
from persist_engine.model.frontier import EMPTY, MINIMUM, Description
from persist_engine.parts import fetch
from persist_engine.parts.chains import chained
from persist_engine.parts.read_ahead import RunToRead
from persist_engine.rows.schema import Schema
from persist_kit.depth import draws

SCHEMA = Schema.from_ddl("id BIGINT, name STRING")
DESC = Description(MINIMUM, EMPTY, MINIMUM)


def part(lower, upper, *, nulls=0, column="key.id", key="k"):
    texts = [None if value is None else json.dumps(value) for value in (lower, upper)]
    stats = PartStats(columns=((column, ColumnStats(nulls, *texts)),))
    return HollowPart(key=key, size_bytes=1, rows=1, diffs_sum=1, checksum="", stats=stats)


def run(*parts, is_sorted=True):
    return RunToRead.of(DESC, parts, is_sorted=is_sorted)


@pytest.mark.slow
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), min_size=1, max_size=3), max_size=12))
def test_chains_are_as_few_as_can_be_and_each_in_order(extents):
    runs = []
    for number, lengths in enumerate(extents):
        at, parts = 0, []
        for gap, length in lengths:
            parts.append(part(at + gap, at + gap + length, key=f"{number}"))
            at += gap + length + 1
        runs.append(run(*parts))
    out = chained(runs, SCHEMA)
    assert sorted(p.key for chain in out for p in chain.parts) == sorted(p.key for each in runs for p in each.parts)
    for chain in out:
        pieces = [list(group) for _, group in itertools.groupby(chain.parts, key=lambda p: p.key)]
        assert all(tuple(piece) == runs[int(piece[0].key)].parts for piece in pieces), "a run stays in one piece"
        bounds = [json.loads(text) for p in chain.parts for _, s in p.stats.columns for text in (s.lower, s.upper)]
        assert bounds == sorted(bounds)
        ends = [(bounds_of(piece[0])[0], bounds_of(piece[-1])[1]) for piece in pieces]
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))
    wholes = [(bounds_of(each.parts[0])[0], bounds_of(each.parts[-1])[1]) for each in runs]
    deepest = max((sum(low <= at <= high for low, high in wholes) for at, _ in wholes), default=0)
    assert len(out) == deepest


def bounds_of(some):
    stats = some.stats.columns[0][1]
    return json.loads(stats.lower), json.loads(stats.upper)


@pytest.mark.parametrize(
    "other",
    [
        run(part(10, 20, nulls=1)),
        run(part(10, None)),
        run(part(None, 20)),
        run(part(10, 20, column="key.name")),
        run(part(10, 20), is_sorted=False),
        run(part(10, 20), InlinePart(data=b"", rows=1, diffs_sum=1)),
        run(HollowPart(key="k", size_bytes=1, rows=1, diffs_sum=1, checksum="")),
        run(part(5, 20)),
    ],
    ids=["nulls", "no upper", "no lower", "other column", "no order", "inline", "no statistics", "one key in both"],
)
def test_what_is_not_known_to_lie_apart_is_merged(other):
    first = run(part(0, 5))
    assert sorted(map(repr, chained([first, other], SCHEMA))) == sorted(map(repr, [first, other]))


def test_bounds_are_compared_as_values_of_the_column():
    runs = [run(part("é", "é")), run(part("a", "z")), run(part("{", "{"))]
    assert len(chained(runs, Schema.from_ddl("id STRING"))) == 1
    assert len(chained([run(part(9, 9)), run(part(10, 11))], SCHEMA)) == 1
    assert len(chained([run(part("9", "9")), run(part("10", "11"))], Schema.from_ddl("id DECIMAL(9,0)"))) == 1


@pytest.mark.parametrize("ddl", ["s STRUCT<a: BIGINT>"])
def test_a_key_that_begins_with_a_struct_is_merged(ddl):
    runs = [run(part(0, 1, column="key.s")), run(part(2, 3, column="key.s"))]
    assert chained(runs, Schema.from_ddl(ddl)) == runs


def updates(ids, schema, time):
    return pa.table(
        [
            pa.array([{"id": each} for each in ids], schema.key_type),
            pa.array([{"x": each * 7} for each in ids], schema.val_type),
            pa.array([time] * len(ids), pa.int64()),
            pa.array([1] * len(ids), pa.int64()),
        ],
        schema=schema.updates_schema,
    )


@pytest.mark.slow
@pytest.mark.parametrize("threaded_bytes_min", [0, 1 << 20], ids=["threads", "none"])
def test_a_snapshot_is_the_same_however_runs_lie(monkeypatch, threaded_bytes_min):
    """Among chains, parts of several groups and of one, and runs that overlap, no row is lost, doubled or misplaced."""
    monkeypatch.setattr(fetch, "THREADED_BYTES_MIN", threaded_bytes_min)
    monkeypatch.setattr(row_groups, "ROW_GROUP_ROWS", 20)
    monkeypatch.setattr(row_groups, "DECODED_ROWS", 20)
    schema = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("x", pa.int64())]))
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=1024))

    @given(st.lists(st.tuples(st.integers(-90, 90), st.integers(1, 60)), min_size=1, max_size=6))
    @limited(max_examples=draws(10), deadline=None)
    def law(extents):
        expected: collections.Counter[int] = collections.Counter()
        with PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=settings) as client:
            shard = ShardId.new()
            with client.open_writer(shard, schema, purpose="test") as writer:
                for time, (first, count) in enumerate(extents):
                    ids = range(first, first + count)
                    expected.update(ids)
                    writer.compare_and_append(
                        updates(ids, schema, time), expected_upper=Antichain.of(time), new_upper=Antichain.of(time + 1)
                    )
            with client.open_leased_reader(shard, schema, purpose="test") as reader:
                table = reader.snapshot(as_of=Antichain.of(len(extents) - 1)).to_table()
        got = [(row["key"]["id"], row["val"]["x"], row["diff"]) for row in table.to_pylist()]
        assert got == [(each, each * 7, diff) for each, diff in sorted(expected.items())]

    law()
