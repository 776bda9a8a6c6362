"""Schemas and keys at their limits: a thousand columns, ten megabytes, and everything at once."""

from __future__ import annotations

import pyarrow as pa
import pytest
from persist_engine import Antichain, Schema, SchemaEvolved, SchemaIncompatible
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.perform import perform_due
from persist_kit.world import SCHEMA, World, row

A = Antichain.of


@pytest.mark.slow
def test_a_schema_of_a_thousand_columns_is_written_read_evolved_and_kept() -> None:
    wide = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([(f"c{n}", pa.int32()) for n in range(1000)]))
    wider = Schema(
        key=wide.key,
        val=pa.schema([(f"c{n}", pa.int64() if n % 2 else pa.int32()) for n in range(1000)] + [("z", pa.string())]),
    )
    world = World()
    shard_id, client = world.shard_id(), world.process()
    rows = [(((key,), tuple(range(key, key + 1000))), 0, 1) for key in range(5)]
    with client.open_writer(shard_id, wide, purpose="test") as writer:
        writer.append(rows, lower=A(0), upper=A(1))
    assert client.evolve_schema(shard_id, wider) == SchemaEvolved(1)
    answer = client.evolve_schema(shard_id, wide)
    assert isinstance(answer, SchemaIncompatible)
    assert len(answer.reasons) == 501
    perform_due(client.machine(shard_id))
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        found = reader.snapshot(0).to_table()
    assert found.schema == wider.updates_schema
    assert found.column("val").to_pylist()[4] == {**{f"c{n}": n + 4 for n in range(1000)}, "z": None}


@pytest.mark.slow
def test_a_key_of_ten_megabytes() -> None:
    schema = Schema.from_ddl("k STRING NOT NULL", "n INT")
    world = World()
    shard_id, client = world.shard_id(), world.process()
    keys = [letter * 10_000_000 for letter in "ab"]
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        writer.append([(((key,), (1,)), 0, 1) for key in keys], lower=A(0), upper=A(1))
        writer.append([(((keys[0],), (1,)), 1, -1)], lower=A(1), upper=A(2))
    perform_due(client.machine(shard_id))
    state = client.machine(shard_id).refresh()
    assert (
        sum(len(part.key_lower) for each in state.trace.batches() for part in each.parts if hasattr(part, "key_lower"))
        < 1000
    )
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert [each["key"]["k"][0] for each in reader.snapshot(1).to_table().to_pylist()] == ["b"]
        assert reader.snapshot(0).to_table().num_rows == 2


def test_a_closed_shard_answers_everything_about_its_empty_frontiers() -> None:
    world = World()
    shard_id, client = world.shard_id(), world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 2**63 - 2)], lower=A(0), upper=A(2**63 - 1))
        writer.append([], lower=A(2**63 - 1), upper=Antichain.empty())
        assert writer.wait_for_upper_past(A(2**64 - 1), 0)
        with client.open_leased_reader(shard_id, purpose="test") as reader:
            assert reader.snapshot(2**63 - 2).to_table().num_rows == 1
            assert reader.downgrade_since(Antichain.empty()) == Antichain.empty()
    client.finalize(shard_id)
    client.finalize(shard_id)
    assert client.is_finalized(shard_id)


@pytest.mark.parametrize("name", [".x", "[0]", "a.b", "`", "key", '["key","a","b"]', " "])
def test_whatever_a_column_is_called_its_rows_are_read_cut_and_filtered(name: str) -> None:
    """Arrow takes a name that begins with a dot for a path, where it is given as a text."""
    schema = Schema(key=pa.schema([(name, pa.int64())]), val=pa.schema([(name, pa.float64())]))
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        writer.append([(((i,), (i / 2,)), 0, 1) for i in range(50)], lower=A(0), upper=A(1))
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        splits = [SnapshotSplit.from_bytes(split.to_bytes()) for split in reader.snapshot(0).splits(4)]
        rows = [row for split in splits for batch in split.to_batches(reader.blob) for row in batch.to_pylist()]
        assert (len(splits), [row["key"][name] for row in rows]) == (4, list(range(50)))
        some = reader.snapshot(0, where=[(f"key.{name}", ">=", 40)], columns=[f"val.{name}"]).to_table().to_pylist()
        assert [row["val"][name] for row in some] == [i / 2 for i in range(40, 50)]
    assert verify_shard(client.machine(shard_id)).findings == []
