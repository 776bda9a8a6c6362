"""The condition that rows with one of some keys fulfil, and a piece of a snapshot that reads only what can hold them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from persist_engine import Antichain, Filter, PersistClient, Schema, SnapshotSplit
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.read import key_condition
from persist_engine.client.read.key_condition import condition_of
from persist_kit.depth import draws
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
#: Values of each type, in order.
VALUES: dict[str, list[Any]] = {
    "BIGINT": [-(2**63), -1, 0, 5, 2**63 - 1],
    "DOUBLE": [-math.inf, -1.5, -0.0, 0.0, 2.5, math.nan],
    "STRING": ["", "a", "a\0", "é"],
    "BINARY": [b"", b"\x00", b"\xff"],
    "BOOLEAN": [False, True],
    "DECIMAL(9,2)": [Decimal("-1.50"), Decimal("0.00"), Decimal("7.25")],
    "DATE": [-719_163, 0, 2_932_897],
    "TIMESTAMP": [-62_135_596_800_000_001, 0, 253_402_300_800_000_000],
    "STRUCT<x: INT, y: DOUBLE>": [{"x": 1, "y": 0.5}, {"x": None, "y": None}, {"x": 2, "y": math.nan}],
}


@given(data=st.data(), first=st.sampled_from(sorted(VALUES)), second=st.sampled_from(sorted(VALUES)))
@drawn(max_examples=draws(200), deadline=None)
def test_every_row_with_one_of_the_keys_fulfils_it(data: st.DataObject, first: str, second: str) -> None:
    schema = Schema.from_ddl(f"a {first}, b {second}, err STRING", "")
    sides = [
        data.draw(st.lists(st.none() | st.sampled_from(VALUES[kind]), min_size=3, max_size=3))
        for kind in (first, second)
    ]
    columns = [_array(values, field.type) for values, field in zip(sides, schema.key, strict=False)]
    columns.append(pa.array(data.draw(st.sampled_from([[None] * 3, [None, None, "bad"]])), pa.string()))
    keys = pa.chunked_array([pa.StructArray.from_arrays(columns, fields=list(schema.key_type))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_condition, "VALUES_MAX", data.draw(st.sampled_from([0, 256])))
        found = condition_of(keys, schema)
    if found is None:
        assert {first, second} <= {"DATE", "TIMESTAMP"}, "times that Python does not have"
        return
    val = pa.array([{}] * 3, schema.val_type)
    ones = pa.array([1] * 3, pa.int64())
    table = pa.Table.from_arrays([keys, val, ones, ones], schema=schema.updates_schema)
    assert Filter(found, schema).mask(table).to_pylist() == [True] * 3


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pa.array(values, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize(("keys", "parts"), [([3], 1), ([1500, 3500], 2), (range(1000, 1300), 1)])
def test_a_piece_of_some_keys_has_their_rows_and_few_others(keys: Any, parts: int) -> None:
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None))
    client, shard_id = world.process(), world.shard_id()
    _write(client, shard_id)
    wanted = pa.chunked_array([pa.array([{"id": key} for key in keys], SCHEMA.key_type)])
    with client.open_leased_reader(shard_id, SCHEMA, purpose="test") as reader, reader.snapshot(3) as snapshot:
        (split,) = snapshot.splits(1)
        piece = SnapshotSplit.from_bytes(split.to_bytes()).of_keys(wanted)
        rows = pa.Table.from_batches(piece.to_batches(world.blob)).column("key").combine_chunks().field(0)
    assert sum(len(batch.part_list()) for batch in piece.batches) == parts
    assert set(keys) <= set(rows.to_pylist())
    assert len(rows) < 4000


def _write(client: PersistClient, shard_id: Any) -> None:
    with client.open_writer(shard_id, SCHEMA, purpose="load") as writer:
        for time in range(4):
            rows = [row(1000 * time + key, "x", time) for key in range(1000)]
            writer.append(rows, lower=A(time), upper=A(time + 1))
