"""Upsert handles under failure: misuse, closed shards, failing stores and disks, lapsed leases, outgrown schemas."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from persist_engine import (
    Antichain,
    Schema,
    ShardId,
    UpperMismatch,
)
from persist_engine.base.errors import InvalidUsage, SchemaMismatch, Unavailable, UpdateBeyondUpper
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, RetrySettings, Settings
from persist_engine.client.read.handle import ReadHandle
from persist_engine.dataflow.open import open_upsert
from persist_engine.work.perform import perform
from persist_kit.upserts import commands, contents, opened
from persist_kit.world import SCHEMA, World

A = Antichain.of


def test_misuse_of_upserts_is_refused_by_name_before_anything_happens(
    world: World, shard_id: ShardId, tmp_path: Path
) -> None:
    """Spec 16.10."""
    client = world.process()
    upserts = opened(client, shard_id)
    good = commands((1, "a"))
    keys, vals = good["key"], good["val"]
    refusals: list[tuple[type[Exception], str, Any]] = [
        (InvalidUsage, "list", [(1, "a")]),
        (SchemaMismatch, "columns key; expected key, val", good.select(["key"])),
        (SchemaMismatch, "key, val, diff", good.append_column("diff", pa.array([1]))),
        (SchemaMismatch, "key, val, time", good.append_column("time", pa.array([1]))),
        (SchemaMismatch, "key is null in 1 rows", pa.table({"key": pa.nulls(1, SCHEMA.key_type), "val": vals})),
        (
            SchemaMismatch,
            "val.name is BIGINT, the shard's is STRING",
            pa.table({"key": keys, "val": pa.array([{"name": 1}])}),
        ),
        (SchemaMismatch, "key.id is STRING", pa.table({"key": pa.array([{"id": "1"}]), "val": pa.nulls(1)})),
        (InvalidUsage, "order is string", good.append_column("order", pa.array(["1"]))),
        (InvalidUsage, "order does not fit", good.append_column("order", pa.array([2**64 - 1], pa.uint64()))),
    ]
    for kind, text, given in refusals:
        with pytest.raises(kind, match=text):
            upserts.upsert(given)
    with pytest.raises(InvalidUsage, match="null or negative"):
        upserts.upsert_at(commands((1, "a"), time=[-1]), upper=A(5))
    with pytest.raises(InvalidUsage, match="null or negative"):
        upserts.upsert_at(commands((1, "a"), time=[None]), upper=A(5))
    for kind in (pa.timestamp("s"), pa.date32()):
        of_another_unit = good.append_column("time", pa.array([1], kind))
        with pytest.raises(InvalidUsage, match=r"time is (timestamp|date).*, expected int64"):
            upserts.upsert_at(of_another_unit, upper=A(5))
    with pytest.raises(UpdateBeyondUpper, match="time 5"):
        upserts.upsert_at(commands((1, "a"), time=[5]), upper=A(5))
    assert client.recent_upper(shard_id) == A(0)
    with pytest.raises(InvalidUsage, match="unknown upsert backend"):
        opened(client, shard_id, backend="disk")
    with pytest.raises(InvalidUsage, match="needs a directory"):
        opened(client, shard_id, backend="auto")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidUsage, match="cannot be kept in"):
        opened(client, shard_id, backend="rocksdb", directory=tmp_path / "file").hydrate()
    upserts.expire()
    upserts.expire()
    with pytest.raises(InvalidUsage, match="expired"):
        upserts.upsert(good)


def test_a_directory_serves_one_handle(world: World, shard_id: ShardId, tmp_path: Path) -> None:
    with opened(world.process(), shard_id, backend="rocksdb", directory=tmp_path) as first:
        first.upsert(commands((1, "a")))
        with pytest.raises(InvalidUsage, match="cannot be kept in"):
            opened(world.process(), shard_id, backend="rocksdb", directory=tmp_path).upsert(commands((1, "b")))
        assert first.upsert(commands((1, "c"))).retracted == 1


def test_a_closed_shard_takes_no_upserts(world: World, shard_id: ShardId) -> None:
    client = world.process()
    upserts = opened(client, shard_id)
    done = upserts.upsert_at(commands((1, "a"), time=[3]), upper=Antichain.empty())
    assert done.upper.is_empty()
    assert upserts.upsert_at(commands((1, "b"), time=[4]), upper=Antichain.empty()).late == 1
    with pytest.raises(InvalidUsage, match="closed"):
        upserts.upsert(commands((1, "b")))
    with pytest.raises(InvalidUsage, match="its upper is empty"):
        opened(world.process(), shard_id).upsert(commands((1, "b")))


def test_the_greatest_time_can_be_written(world: World, shard_id: ShardId) -> None:
    client = world.process()
    last = 2**63 - 2
    upserts = opened(client, shard_id)
    assert upserts.upsert_at(commands((1, "a"), (1, "b"), time=[0, last]), upper=A(last + 1)).upper == A(last + 1)
    assert contents(client, shard_id, last) == {1: "b"}
    with pytest.raises(InvalidUsage, match="leaves no time"):
        upserts.upsert(commands((1, "c")))


def test_an_upsert_handle_continues_after_an_outage_of_its_stores(shard_id: ShardId) -> None:
    """Calls fail during the outage, whether the append happened or not. Afterwards nothing is doubled or lost."""
    impatient = Settings(retry=RetrySettings(give_up_ms=50), batch=BatchSettings(inline_part_bytes_max=0))
    world = World(settings=impatient)
    client, other = world.process(), world.process()
    one, two = opened(client, shard_id), opened(other, shard_id)
    one.upsert(commands((1, "a"), (2, "b")))
    two.upsert(commands((2, "c"), (3, "d")))
    for happened in (True, False):
        world.faults.fail_next("compare_and_set", happened=happened, times=1)
        world.faults.break_down()
        with pytest.raises(Unavailable):
            one.upsert(commands((1, None), (4, "e")))
        world.faults.heal()
        two.upsert(commands((3, "f")))
        one.upsert(commands((5, f"g {happened}")))
        found = contents(world.process(), shard_id)
        assert found in ({2: "c", 3: "f", 4: "e", 5: f"g {happened}"}, {1: "a", 2: "c", 3: "f", 5: f"g {happened}"})
        one.upsert(commands((1, "a"), (4, None)))
    two.upsert(commands((6, "h"), (7, "i")))
    world.faults.fail_next("get", happened=False, matching="/n", times=1000)
    with pytest.raises(Unavailable):
        one.upsert(commands((6, "j")))
    world.faults.heal()
    assert one.upsert(commands((6, "j"), (7, None))).retracted == 2


def test_regression_a_refused_stream_returns_its_refusal_although_its_blobs_cannot_be_deleted(
    shard_id: ShardId,
) -> None:
    """It raised Unavailable, which means an unknown outcome, although nothing was written for certain."""
    settings = Settings(retry=RetrySettings(give_up_ms=50), batch=BatchSettings(inline_part_bytes_max=0))
    world = World(settings=settings)
    one, two = opened(world.process(), shard_id), opened(world.process(), shard_id)

    def disturbed() -> Iterator[Any]:
        yield commands((1, "a"))
        two.upsert(commands((1, "b")))
        world.faults.fail_next("delete", happened=False, times=1000)

    assert isinstance(one.upsert_stream(disturbed()), UpperMismatch)
    world.faults.heal()
    assert one.upsert(commands((1, "c"))).retracted == 1


def test_an_upsert_handle_whose_lease_lapsed_hydrates_again(
    shard_id: ShardId, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine slept and has not noticed. Since has passed the handle, and its next updates were merged with those that it
    has read.
    """
    eager = Settings(
        batch=BatchSettings(inline_part_bytes_max=0),
        compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1),
        maintenance=MaintenanceSettings(rollup_threshold=2),
    )
    world = World(settings=eager)
    caplog.set_level(logging.INFO)
    client, other = world.process(), world.process()
    one, two = opened(client, shard_id), opened(other, shard_id)
    one.upsert(commands((1, "a"), (2, "b")))
    other.machine(shard_id).expire_leased_reader(one._shard._reader.reader_id)
    two.upsert(commands((1, "x"), (3, "y")))
    two.expire()
    with other.open_leased_reader(shard_id, purpose="moves since") as reader:
        reader.downgrade_since(A(other.recent_upper(shard_id).time + 5))
    with opened(other, shard_id) as three:
        three.upsert(commands((4, "z")))
    machine = other.machine(shard_id)
    while len(list(machine.refresh().trace.batches())) > 1:
        _, maintenance = machine.spine_exert(1000)
        perform(machine, maintenance)
    (batch,) = machine.state.trace.batches()
    assert one.upper <= batch.desc.since
    done = one.upsert(commands((1, "c"), (3, None)))
    assert (done.inserted, done.retracted) == (1, 2)
    assert "hydrating again" in caplog.text
    assert contents(client, shard_id) == {1: "c", 2: "b", 4: "z"}


@pytest.mark.slow
def test_an_upsert_handle_that_only_writes_releases_since(world: World, shard_id: ShardId) -> None:
    """It reads back nothing of its own. Its reader must not hold since where the handle was opened (spec 20, bug 9)."""
    client = world.process()
    upserts = opened(client, shard_id)
    uppers = []
    for turn in range(4):
        uppers.append(upserts.upsert(commands((1, f"{turn}"))).upper)
        world.env.advance_ms(Settings().lease.reader_lease_ms // 3)
    assert client.machine(shard_id).refresh().trace.since == A(uppers[-2].time - 1)
    opened(world.process(), shard_id).upsert(commands((1, "other"), (2, "other")))
    assert upserts.upsert(commands((1, None), (2, None))).retracted == 2


def test_an_upsert_handle_with_an_outgrown_schema_stops_before_a_wrong_retraction(
    world: World, shard_id: ShardId
) -> None:
    """Its values lack a field: its retractions would not match the inserted rows."""
    client, other = world.process(), world.process()
    old = opened(client, shard_id)
    old.upsert(commands((1, "a"), (2, "b")))
    grown = Schema(key=SCHEMA.key, val=pa.schema([("name", pa.string()), ("size", pa.int64())]))
    other.evolve_schema(shard_id, grown)
    new = open_upsert(other, shard_id, grown, purpose="test")
    vals = pa.array([{"name": "c", "size": 7}, {"name": "d", "size": None}], grown.val_type)
    assert new.upsert(pa.table({"key": pa.array([{"id": 1}, {"id": 3}], grown.key_type), "val": vals})).retracted == 1
    with pytest.raises(SchemaMismatch, match="evolved to schema 1, this handle has 0"):
        old.upsert(commands((1, "e")))
    with pytest.raises(SchemaMismatch, match="evolved to schema 1"):
        opened(client, shard_id)
    with open_upsert(client, shard_id, grown, purpose="again") as again:
        both = pa.array([{"id": 1}, {"id": 2}], grown.key_type)
        assert again.upsert(pa.table({"key": both, "val": pa.nulls(2)})).retracted == 2
    assert contents(client, shard_id) == {3: "d"}


def test_a_failure_of_the_disk_costs_one_hydration_and_no_data(
    world: World, shard_id: ShardId, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upserts = opened(world.process(), shard_id, backend="rocksdb", directory=tmp_path)
    upserts.upsert(commands((1, "a"), (2, "b")))

    def break_disk() -> None:
        upserts._shard._store._inner.driver[0].close()

    break_disk()
    with pytest.raises(Unavailable, match="upsert state in .* failed"):
        upserts.upsert(commands((1, "c")))
    done = upserts.upsert(commands((1, "c")))
    assert (done.inserted, done.retracted) == (1, 1)
    client = world.process()

    def failing() -> Any:
        yield commands((1, "x"))
        break_disk()
        yield commands((2, "y"))

    with pytest.raises(Unavailable, match="upsert state in .* failed"):
        upserts.upsert_stream(failing())
    assert contents(client, shard_id) == {1: "c", 2: "b"}
    assert upserts.upsert(commands((1, "d"), (2, None))).retracted == 2
    assert contents(world.process(), shard_id) == {1: "d"}


def test_a_lease_that_lapses_before_hydration_is_not_taken_for_a_closed_shard(world: World, shard_id: ShardId) -> None:
    """Found by simulation: a reader without its lease reports an empty since, which was taken for the shard's."""
    client = world.process()
    with opened(client, shard_id) as upserts:
        upserts.upsert(commands((1, "a")))
    late = opened(client, shard_id)
    open_reader = late._shard._open_reader

    def lapsing() -> ReadHandle:
        late._shard._open_reader = open_reader
        reader = open_reader()
        reader._heartbeat._lost.set()  # its thread does this when a beat finds no lease
        assert reader.since.is_empty()
        return reader

    late._shard._open_reader = lapsing
    with late:
        late.upsert(commands((1, "b")))
    assert contents(client, shard_id) == {1: "b"}


def test_a_stream_with_order_keys_of_two_units_is_refused(world: World, shard_id: ShardId) -> None:
    """By number alone, a second is less than the microsecond before it."""
    client = world.process()
    seconds, micros, whole, nulls = pa.timestamp("s"), pa.timestamp("us"), pa.int64(), pa.null()

    def given(kind: pa.DataType | None, order: int | None, name: str) -> pa.Table:
        made = commands((1, name))
        return made if kind is None else made.append_column("order", pa.array([order], kind))

    with opened(client, shard_id) as upserts:
        for first, second in ((micros, seconds), (micros, whole), (None, micros), (whole, None)):
            with pytest.raises(InvalidUsage, match="orders of a stream do not compare: .* in one table, then "):
                upserts.upsert_stream([given(first, 5, "first"), given(second, 1, "second")])
        assert contents(client, shard_id) == {}
        rows = [(micros, 5, "five"), (nulls, None, "none"), (micros, 7, "seven"), (micros, 6, "six")]
        upserts.upsert_stream([given(*row) for row in rows])
        assert contents(client, shard_id) == {1: "seven"}


def test_a_writer_is_expired_although_its_reader_cannot_be(shard_id: ShardId) -> None:
    world = World(settings=Settings(retry=RetrySettings(give_up_ms=0)))
    upserts = opened(world.process(), shard_id)
    upserts.upsert(commands((1, "a")))
    machine = world.process().machine(shard_id)
    assert machine.state.writers
    world.faults.fail_next("compare_and_set", happened=False)
    with pytest.raises(Unavailable):
        upserts.expire()
    state = machine.refresh()
    assert (bool(state.leased_readers), bool(state.writers)) == (True, False)
