"""The metadata tables: fixed columns, the numbers of the state and of its log."""

import pytest
from persist_engine import Antichain
from persist_engine.base.errors import InvalidUsage, ShardNotFound
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.model.frontier import DATA_TIME_MAX
from persist_engine.work.holds import holds_of
from persist_engine.work.metadata import SCHEMAS, TIME_MAX
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
COLUMNS = {
    "batches": "spine level batch lower upper since runs parts rows bytes",
    "runs": "spine level batch run order schema parts rows bytes",
    "parts": "spine level batch run order rows bytes diffs_sum part",
    "versions": "seqno walltime_ms bytes latest_rollup changed",
    "holds": "id kind purpose hostname since upper seqno blocks_since blocks_collection held_from_ms is_older "
    "last_heartbeat_ms lease_ends_ms has_lapsed",
    "usage": "shard_id parts_bytes rollups_bytes inline_bytes consensus_bytes",
}


@pytest.fixture
def world():
    return World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))


def test_columns_are_fixed():
    """Readers name them: add at the end, rename none."""
    assert {name: " ".join(schema.names) for name, schema in SCHEMAS.items()} == COLUMNS


def test_the_tables_say_what_inspection_says(world):
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="ingest") as writer:
        for lower, upper, rows in ((0, 1, 3), (1, 4, 0), (4, 9, 5)):
            updates = [row(key, f"n{key}", lower) for key in range(rows)]
            writer.compare_and_append(updates, expected_upper=A(lower), new_upper=A(upper))
        with client.open_leased_reader(shard_id, purpose="report"):
            tables = {name: client.metadata(shard_id, name) for name in SCHEMAS}
            seen, held = client.inspect(shard_id), holds_of(client.machine(shard_id))
    assert all(table.schema == SCHEMAS[name] for name, table in tables.items())
    batches, runs, parts, versions, holds, usage = (tables[name].to_pylist() for name in COLUMNS)
    assert (batches[0]["lower"], batches[-1]["upper"]) == (0, 9)
    assert sum(each["rows"] for each in batches) == sum(each["rows"] for each in parts if each["part"]) == 8
    assert sum(each["parts"] for each in runs) == seen.parts
    assert (len(batches), len(runs), len(versions)) == (seen.batches, seen.runs, seen.live_diffs)
    assert [sum(each["bytes"] for each in table) for table in (batches, runs, parts)] == [seen.live_bytes] * 3
    assert {each["purpose"] for each in holds} >= {"ingest", "report"}
    assert [each["id"] for each in holds] == [hold.id for hold in held.holds]
    assert usage[0]["parts_bytes"] == seen.live_bytes
    assert usage[0]["consensus_bytes"] == sum(each["bytes"] for each in versions)
    assert dict(versions[0]["changed"])["schemas"] == 1


def test_a_shard_without_rows_and_one_that_is_closed_have_tables(world):
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    assert [client.metadata(shard_id, name).num_rows for name in ("batches", "runs", "parts")] == [0, 0, 0]
    with client.open_writer(shard_id, SCHEMA, purpose="ingest") as writer:
        writer.compare_and_append([], expected_upper=A(0), new_upper=A(DATA_TIME_MAX + 5))
        assert client.metadata(shard_id, "batches")["upper"].to_pylist() == [TIME_MAX]
        writer.compare_and_append([], expected_upper=A(DATA_TIME_MAX + 5), new_upper=Antichain.empty())
        assert client.metadata(shard_id, "batches")["upper"].to_pylist()[-1] is None
        assert None in client.metadata(shard_id, "holds")["upper"].to_pylist()


def test_what_is_not_there_is_refused_by_name(world):
    client, shard_id = world.process(), world.shard_id()
    with pytest.raises(ShardNotFound):
        client.metadata(shard_id, "batches")
    client.initialise(shard_id, SCHEMA)
    with pytest.raises(InvalidUsage, match="no metadata table 'batchs'; there are batches, runs, parts, versions"):
        client.metadata(shard_id, "batchs")
