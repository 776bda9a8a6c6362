"""Upserts with the backend `shard`: each call reads what the shard holds of its keys (spec 16.12)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from persist_engine import Antichain, Hydration, PersistClient, ProgressMismatch, Schema, ShardId
from persist_engine.base.errors import InvalidUsage, InvariantViolated, SchemaMismatch
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.dataflow.upsert.stores import Backend
from persist_engine.work.perform import perform
from persist_kit.upserts import commands, contents, opened
from persist_kit.world import SCHEMA, World, row

A = Antichain.of


def reading(client: PersistClient, shard_id: ShardId, **more) -> UpsertHandle:
    return opened(client, shard_id, backend="shard", **more)


def test_the_last_value_of_a_key_wins_and_nothing_is_kept(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with reading(client, shard_id) as upserts:
        assert upserts.hydrate() == A(0)
        done = upserts.upsert(commands((1, "a"), (2, "b"), (1, "c")))
        assert (done.inserted, done.retracted) == (2, 0)
        done = upserts.upsert(commands((1, None), (2, "b"), (3, "d"), (4, None)))
        assert (done.inserted, done.retracted) == (1, 1)
        assert upserts.upper == done.upper == upserts.hydrate()
        assert upserts.state_bytes == 0
        assert upserts.upsert(commands()).inserted == 0
    assert contents(client, shard_id) == {2: "b", 3: "d"}
    state = client.machine(shard_id).refresh()
    assert not state.writers
    assert not state.leased_readers


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        pytest.param([*range(5), *range(3000, 3005)], 2, id="few, by their list"),
        pytest.param(range(2800, 3100), 2, id="many, by their bounds"),
        pytest.param(range(0, 4800, 16), 5, id="many, all over the shard"),
    ],
)
def test_a_call_reads_only_what_can_hold_its_keys(shard_id: ShardId, keys: Sequence[int], parts: int) -> None:
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None))
    client, hydrations = world.process(), list[Hydration]()
    with client.open_writer(shard_id, SCHEMA, purpose="load") as writer:
        for number in range(5):
            ids = np.arange(1000) + 1000 * number
            key = pa.StructArray.from_arrays([pa.array(ids)], fields=list(SCHEMA.key_type))
            val = pa.StructArray.from_arrays([pa.array(["old"] * 1000)], fields=list(SCHEMA.val_type))
            time = writer.fetch_recent_upper().time
            ones = [pa.array(np.full(1000, each)) for each in (time, 1)]
            writer.append(pa.table([key, val, *ones], schema=SCHEMA.updates_schema), lower=A(time), upper=A(time + 1))
    with reading(client, shard_id, on_hydration=hydrations.append) as upserts:
        done = upserts.upsert(commands(*((key, "new") for key in keys)))
        assert (done.inserted, done.retracted) == (len(keys), len(keys))
    assert (hydrations[0].rows, hydrations[0].rows_max) == (0, 1000 * parts), "of five parts"
    sizes = [info.size_bytes for info in world.blob.list_prefix(f"{shard_id}/n")]
    assert hydrations[0].fetched_bytes == 0
    assert parts * min(sizes) // 2 < hydrations[-1].fetched_bytes <= parts * max(sizes)
    found = contents(client, shard_id)
    assert len(found) == 5000
    assert {key for key, name in found.items() if name == "new"} == set(keys)


def test_commands_that_lost_a_race_read_what_the_winner_wrote(world: World, shard_id: ShardId) -> None:
    client, hydrations = world.process(), list[Hydration]()
    with (
        reading(client, shard_id, on_hydration=hydrations.append) as upserts,
        opened(world.process(), shard_id) as other,
    ):
        upserts.upsert(commands((1, "a"), (2, "b"), (3, "c")))
        hydrations.clear()

        def win() -> None:
            other.upsert(commands((1, "x"), (2, None), (4, "y")))

        world.consensus.before_next("compare_and_set", win)
        done = upserts.upsert(commands((1, "e"), (2, "f"), (3, "g"), (4, None)), progress=("s", b"1"))
        assert not isinstance(done, ProgressMismatch)
        assert (done.inserted, done.retracted) == (3, 3)
    assert len({each.as_of for each in hydrations}) == 1, "only the changes since were read"
    assert contents(client, shard_id) == {1: "e", 2: "f", 3: "g"}


def test_only_keys_that_are_asked_for_must_have_one_value(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="appends") as writer:
        writer.append([row(1, "a", 0), row(1, "b", 0), row(2, "b", 0)], lower=A(0), upper=A(1))
    with reading(client, shard_id) as upserts:
        assert upserts.upsert(commands((2, "c"), (3, "d"))).retracted == 1
        named = rf"^1 keys .*diff_sum 2, .*\(shard {shard_id} before .*; keys: \{{'id': 1\}}\); append updates"
        for _ in range(2):
            with pytest.raises(InvariantViolated, match=named):
                upserts.upsert(commands((1, "d"), (2, "d")))
        with client.open_writer(shard_id, SCHEMA, purpose="repairs") as writer:
            upper = writer.fetch_recent_upper().time
            writer.append([row(1, "a", upper, -1)], lower=A(upper), upper=A(upper + 1))
        assert upserts.upsert(commands((1, "d"))).retracted == 1


def test_keys_without_an_order_and_with_nulls_are_found(world: World, shard_id: ShardId) -> None:
    schema = Schema.from_ddl("x DOUBLE, part STRING", "n BIGINT")
    keys = [{"x": x, "part": part} for x in (0.0, float("nan"), 1.5, None) for part in ("", None)]

    def numbered(number: int) -> pa.Table:
        vals = [{"n": number}] * len(keys)
        return pa.table({"key": pa.array(keys, schema.key_type), "val": pa.array(vals, schema.val_type)})

    with open_upsert(world.process(), shard_id, schema, backend="shard", purpose="test") as upserts:
        assert upserts.upsert(numbered(1)).inserted == len(keys)
        done = upserts.upsert(numbered(2))
        assert (done.inserted, done.retracted) == (len(keys), len(keys))


def test_it_releases_since_and_reads_again_after_its_lease_lapsed(
    shard_id: ShardId, caplog: pytest.LogCaptureFixture
) -> None:
    eager = Settings(
        batch=BatchSettings(inline_part_bytes_max=0),
        compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1),
        maintenance=MaintenanceSettings(rollup_threshold=2),
    )
    world = World(settings=eager)
    caplog.set_level(logging.INFO)
    client, other = world.process(), world.process()
    upserts = reading(client, shard_id)
    uppers = []
    for turn in range(4):
        uppers.append(upserts.upsert(commands((1, f"{turn}"), (2, "b"))).upper)
        world.env.advance_ms(Settings().lease.reader_lease_ms // 3)
    assert client.machine(shard_id).refresh().trace.since >= A(uppers[-2].time - 1)
    other.machine(shard_id).expire_leased_reader(upserts._shard._reader.reader_id)
    with other.open_leased_reader(shard_id, purpose="moves since") as reader:
        reader.downgrade_since(A(other.recent_upper(shard_id).time + 5))
    with opened(other, shard_id) as another:
        another.upsert(commands((4, "z")))
    machine = other.machine(shard_id)
    while len(list(machine.refresh().trace.batches())) > 1:
        _, maintenance = machine.spine_exert(1000)
        perform(machine, maintenance)
    done = upserts.upsert(commands((1, "c"), (4, None)))
    assert (done.inserted, done.retracted) == (1, 2)
    assert "reading the keys again" in caplog.text
    assert contents(client, shard_id) == {1: "c", 2: "b"}
    upserts.expire()


def test_it_stops_before_a_wrong_retraction_when_the_schema_evolved(world: World, shard_id: ShardId) -> None:
    client, other = world.process(), world.process()
    old = reading(client, shard_id)
    old.upsert(commands((1, "a")))
    grown = Schema(key=SCHEMA.key, val=pa.schema([("name", pa.string()), ("size", pa.int64())]))
    other.evolve_schema(shard_id, grown)
    with open_upsert(other, shard_id, grown, backend="shard", purpose="test") as new:
        vals = pa.array([{"name": "c", "size": 7}], grown.val_type)
        assert new.upsert(pa.table({"key": pa.array([{"id": 1}], grown.key_type), "val": vals})).retracted == 1
    with pytest.raises(SchemaMismatch, match="evolved to schema 1, this handle has 0"):
        old.upsert(commands((1, "e")))
    assert len(contents(client, shard_id)) == 1


def test_streams_are_refused_and_a_closed_shard_takes_nothing(world: World, shard_id: ShardId) -> None:
    client = world.process()
    upserts = reading(client, shard_id)
    with pytest.raises(
        InvalidUsage, match=f"shard {shard_id}: the upsert backend shard .*: use memory, rocksdb or auto"
    ):
        upserts.upsert_stream([commands((1, "a"))])
    assert upserts.upsert_at(commands((1, "a"), (1, "b"), time=[3, 4]), upper=A(5)).inserted == 2
    with client.open_writer(shard_id, SCHEMA, purpose="closes") as writer:
        writer.append([], lower=A(5), upper=Antichain.empty())
    assert upserts.upsert_at(commands((1, "c"), time=[7]), upper=A(8)).late == 1
    with pytest.raises(InvalidUsage, match="is closed"):
        upserts.upsert(commands((1, "c")))


@pytest.mark.parametrize("ddl", ["id DATE", "id TIMESTAMP", "id TIMESTAMP_NTZ"])
@pytest.mark.parametrize("backend", ["memory", "shard"])
def test_keys_in_years_that_python_does_not_have(world: World, shard_id: ShardId, ddl: str, backend: Backend) -> None:
    """They ended calls in an OverflowError: for their bounds, and in the place of an error that names them."""
    schema = Schema.from_ddl(ddl, "name STRING")
    kind = schema.key.field("id").type
    far = pa.array([3_000_000] if pa.types.is_date(kind) else [2**62]).cast(
        pa.int32() if pa.types.is_date(kind) else pa.int64()
    )
    keys = pa.StructArray.from_arrays([far.cast(kind)], fields=list(schema.key_type))

    def named(name: str) -> pa.Table:
        return pa.table({"key": keys, "val": pa.array([{"name": name}], schema.val_type)})

    client = world.process()
    with open_upsert(client, shard_id, schema, backend=backend, purpose="test") as upserts:
        upserts.upsert(named("a"))
        assert upserts.upsert(named("b")).retracted == 1
        with client.open_writer(shard_id, schema, purpose="appends") as writer:
            upper = writer.fetch_recent_upper().time
            more = [pa.array([upper]), pa.array([1])]
            writer.append(
                pa.table([keys, named("c")["val"], *more], schema=schema.updates_schema),
                lower=A(upper),
                upper=A(upper + 1),
            )
        with pytest.raises(InvariantViolated, match=r"keys: \{'id': '<value out of range: \d+>'\}\)"):
            upserts.upsert(named("d"))


def test_a_lease_that_ends_while_it_releases_since_is_no_error(world: World, shard_id: ShardId) -> None:
    client, other = world.process(), world.process()
    with reading(client, shard_id) as upserts:
        upserts.upsert(commands((1, "a")))
        lost = upserts._shard._reader
        world.env.advance_ms(Settings().lease.reader_lease_ms // 2)
        world.consensus.before_next(
            "compare_and_set", lambda: other.machine(shard_id).expire_leased_reader(lost.reader_id)
        )
        assert upserts.upsert(commands((1, "b"))).retracted == 1
        assert upserts._shard._reader is not lost
    assert contents(client, shard_id) == {1: "b"}
