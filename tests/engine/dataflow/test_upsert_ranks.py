"""Upserts whose keys keep a greater value: in one handle, after lost races, and against a dictionary."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import PersistClient, ProgressMismatch, Schema, ShardId
from persist_engine.base.errors import InvalidUsage
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.dataflow.upsert.stores import Backend
from persist_kit.depth import draws
from persist_kit.world import World

SCHEMA = Schema.from_ddl("id BIGINT", "at BIGINT, day DATE, name STRING")
Row = tuple[int, int | None, str | None]


def opened(client: PersistClient, shard_id: ShardId, backend: Backend = "memory") -> UpsertHandle:
    return open_upsert(client, shard_id, SCHEMA, backend=backend, purpose="test")


def commands(*rows: Row) -> pa.Table:
    """(key, order, name); without a name, a removal at that order."""
    vals = [None if name is None else {"at": at, "day": None, "name": name} for _, at, name in rows]
    columns = {
        "key": pa.array([{"id": key} for key, _, _ in rows], SCHEMA.key_type),
        "val": pa.array(vals, SCHEMA.val_type),
        "order": pa.array([at for _, at, _ in rows], pa.int64()),
    }
    return pa.table(columns)


def contents(client: PersistClient, shard_id: ShardId) -> dict[int, tuple[int | None, str]]:
    upper = client.recent_upper(shard_id)
    if upper.newest_complete < 0:
        return {}
    with client.open_leased_reader(shard_id, purpose="check") as reader:
        rows = reader.snapshot(upper.newest_complete).to_table().to_pylist()
    assert {row["diff"] for row in rows} <= {1}
    return {row["key"]["id"]: (row["val"]["at"], row["val"]["name"]) for row in rows}


def test_a_key_keeps_a_value_that_is_greater_in_the_field(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with opened(client, shard_id) as upserts:
        upserts.upsert(commands((1, 5, "a"), (2, None, "b"), (3, 5, "c"), (4, 5, "d")), keeps_greater="at")
        late = commands((1, 4, "late"), (2, None, "b2"), (3, None, "late"), (4, 4, None))
        assert upserts.upsert(late, keeps_greater="at").inserted == 1
        kept = {1: (5, "a"), 2: (None, "b2"), 3: (5, "c"), 4: (5, "d")}
        assert contents(client, shard_id) == kept
        upserts.upsert(commands((1, 5, "same"), (3, 6, "newer"), (4, 5, None)), keeps_greater="at")
        assert contents(client, shard_id) == {1: (5, "same"), 2: (None, "b2"), 3: (6, "newer")}
        upserts.upsert(commands((3, 0, "whatever")))
        assert contents(client, shard_id)[3] == (0, "whatever")


@pytest.mark.parametrize("backend", ["memory", "shard"])
def test_the_winner_of_a_race_is_compared_too(world: World, shard_id: ShardId, backend: Backend) -> None:
    client = world.process()
    with opened(client, shard_id, backend) as upserts, opened(world.process(), shard_id) as other:
        upserts.upsert(commands((1, 1, "a"), (2, 1, "b")), keeps_greater="at")
        other.upsert(commands((1, 9, "greater")), keeps_greater="at")
        done = upserts.upsert(commands((1, 5, "late"), (2, 5, "newer")), keeps_greater="at", progress=("s", b"1"))
        assert not isinstance(done, ProgressMismatch)
        assert (done.inserted, done.retracted) == (1, 1)
    assert contents(client, shard_id) == {1: (9, "greater"), 2: (5, "newer")}


def test_progress_is_stored_although_no_command_counts(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with opened(client, shard_id) as upserts:
        upserts.upsert(commands((1, 9, "a")), keeps_greater="at")
        upserts.upsert(commands((1, 3, "late")), keeps_greater="at", progress=("s", b"1"))
        assert client.progress(shard_id, "s").token == b"1"
    assert contents(client, shard_id) == {1: (9, "a")}


@pytest.mark.parametrize(("field", "problem"), [("name", "the field name is string"), ("none", "no field none")])
def test_a_field_without_an_order_is_refused(world: World, shard_id: ShardId, field: str, problem: str) -> None:
    with opened(world.process(), shard_id) as upserts, pytest.raises(InvalidUsage, match=problem):
        upserts.upsert(commands((1, 1, "a")), keeps_greater=field)


@pytest.mark.parametrize(
    ("field", "kind"),
    [("day", pa.date64()), ("day", pa.int64()), ("day", pa.timestamp("ms")), ("at", pa.date32()), ("at", None)],
)
def test_orders_of_another_kind_are_refused(
    world: World, shard_id: ShardId, field: str, kind: pa.DataType | None
) -> None:
    """By their numbers alone, a day of 2026 is less than any of its milliseconds."""
    given = commands((1, 1, "a")).drop_columns(["order"])
    if kind is not None:
        given = given.append_column("order", pa.nulls(1, kind))
    client = world.process()
    with opened(client, shard_id) as upserts:
        with pytest.raises(InvalidUsage, match=f"orders do not compare with the field {field}: .* in the commands, "):
            upserts.upsert(given, keeps_greater=field)
        nulls = commands((1, None, "a")).drop_columns(["order"]).append_column("order", pa.nulls(1))
        assert upserts.upsert(nulls, keeps_greater=field).inserted == 1


def test_days_are_orders(world: World, shard_id: ShardId) -> None:
    client, day = world.process(), datetime.date(2026, 1, 2)

    def at(number: int, name: str) -> pa.Table:
        vals = [{"at": None, "day": day.replace(day=number), "name": name}]
        key = pa.array([{"id": 1}], SCHEMA.key_type)
        order = pa.array([day.replace(day=number)])
        return pa.table({"key": key, "val": pa.array(vals, SCHEMA.val_type), "order": order})

    with opened(client, shard_id) as upserts:
        for number, name in ((5, "a"), (4, "late"), (6, "b"), (2, "late")):
            upserts.upsert(at(number, name), keeps_greater="day")
    assert contents(client, shard_id) == {1: (None, "b")}


_rows = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(-2, 4), st.none() | st.sampled_from("abc")), max_size=6
)


@pytest.mark.slow
@given(turns=st.lists(st.tuples(st.integers(0, 1), _rows), max_size=6))
@settings(max_examples=draws(60))
def test_any_commands_of_two_handles(turns: list[tuple[int, list[Row]]]) -> None:
    world = World()
    shard_id, client = world.shard_id(), world.process()
    handles = [opened(world.process(), shard_id, backend) for backend in ("memory", "shard")]
    expected: dict[int, tuple[int | None, str]] = {}
    for number, rows in turns:
        last: dict[int, Row] = {}
        for row in rows:  # among equal orders the first
            before = last.get(row[0])
            if before is None or _rank(row[1]) > _rank(before[1]):
                last[row[0]] = row
        handles[number].upsert(commands(*rows), keeps_greater="at")
        held: Any = dict(expected)
        for key, order, name in last.values():
            if key in held and held[key][0] is not None and held[key][0] > _rank(order):
                continue
            expected.pop(key, None)
            if name is not None:
                expected[key] = (order, name)
        assert contents(client, shard_id) == expected
    for handle in handles:
        handle.expire()


def _rank(order: int | None) -> float:
    return float("-inf") if order is None else order
