"""A shard whose schema grows while handles are open on it."""

from __future__ import annotations

import pytest
from persist_engine import Antichain, PersistClient, Schema, SchemaEvolved, SchemaIncompatible, ShardId
from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.work.perform import perform
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
WIDE = Schema.from_ddl("id BIGINT", "extra INT, name STRING")
WIDEST = Schema.from_ddl("id BIGINT, sub STRING", "extra BIGINT, name STRING, more DOUBLE")


@pytest.fixture(params=[0, 4096], ids=["blobs", "inline"])
def world(request) -> World:
    settings = Settings(
        batch=BatchSettings(inline_part_bytes_max=request.param),
        compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1),
    )
    return World(settings=settings)


def contents(client: PersistClient, shard_id: ShardId, as_of: int, schema: Schema | None = None) -> list[tuple]:
    with client.open_leased_reader(shard_id, schema, purpose="test") as reader:
        rows = reader.snapshot(as_of).to_table().to_pylist()
    return [(*row["key"].values(), *row["val"].values(), row["diff"]) for row in rows]


def grown(world: World) -> tuple[PersistClient, ShardId]:
    """Rows of three versions of the schema: 1 and 2 under the first, 3 under the second, 4 under the third."""
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="old") as old:
        old.append([row(1, "a", 0), row(2, "b", 0)], lower=A(0), upper=A(1))
        assert client.evolve_schema(shard_id, WIDE) == SchemaEvolved(1)
        with client.open_writer(shard_id, WIDE, purpose="new") as new:
            new.append([(((3,), (30, "c")), 1, 1)], lower=A(1), upper=A(2))
        assert client.evolve_schema(shard_id, WIDEST) == SchemaEvolved(2)
        with client.open_writer(shard_id, WIDEST, purpose="newest") as newest:
            newest.append([(((4, "s"), (2**40, "d", 0.5)), 2, 1)], lower=A(2), upper=A(3))
        # The oldest writer continues with its old schema.
        old.append([row(5, "e", 3), row(1, "a", 3, -1)], lower=A(3), upper=A(4))
    return client, shard_id


NEWEST_ROWS = [
    (2, None, None, "b", None, 1),
    (3, None, 30, "c", None, 1),
    (4, "s", 2**40, "d", 0.5, 1),
    (5, None, None, "e", None, 1),
]


def test_parts_of_all_versions_read_under_the_newest(world: World) -> None:
    client, shard_id = grown(world)
    assert client.schema(shard_id) == WIDEST
    assert contents(client, shard_id, 3) == NEWEST_ROWS
    assert contents(world.process(), shard_id, 3, WIDEST) == NEWEST_ROWS


def test_a_reader_of_an_old_schema_sees_its_own_fields(world: World) -> None:
    client, shard_id = grown(world)
    assert contents(client, shard_id, 3, SCHEMA) == [(2, "b", 1), (3, "c", 1), (4, "d", 1), (5, "e", 1)]
    assert contents(world.process(), shard_id, 1, WIDE) == [(1, None, "a", 1), (2, None, "b", 1), (3, 30, "c", 1)]


def test_a_value_too_wide_for_an_old_reader_is_refused_by_name(world: World) -> None:
    client, shard_id = grown(world)
    with pytest.raises(SchemaMismatch, match=r"val\.extra holds values that do not fit INT"):
        contents(client, shard_id, 3, WIDE)


def test_an_open_reader_keeps_the_schema_it_began_with(world: World) -> None:
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    with client.open_leased_reader(shard_id, purpose="open") as reader:
        listen = iter(reader.listen(0))
        other, same = grown_over(world, shard_id)
        assert reader.schema == same == SCHEMA
        assert reader.snapshot(1).to_table().schema == SCHEMA.updates_schema
        assert next(listen).table.to_pylist() == [{"key": {"id": 7}, "val": {"name": "g"}, "time": 1, "diff": 1}]
        split_rows = [
            batch.num_rows for split in reader.snapshot(1).splits(2) for batch in split.to_batches(reader.blob)
        ]
        assert sum(split_rows) == 1
        other.close()


def grown_over(world: World, shard_id: ShardId) -> tuple[PersistClient, Schema]:
    other = world.process()
    assert other.evolve_schema(shard_id, WIDE) == SchemaEvolved(1)
    with other.open_writer(shard_id, WIDE, purpose="new") as new:
        new.append([(((7,), (70, "g")), 1, 1)], lower=A(0), upper=A(2))
    return other, SCHEMA


def test_an_old_reader_sees_rows_that_differ_only_in_new_fields_as_one_row(world: World) -> None:
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    client.evolve_schema(shard_id, WIDE)
    with client.open_writer(shard_id, WIDE, purpose="new") as writer:
        rows = [(((key,), (extra, name)), 0, 1) for key in (1, 2) for extra in (1, 2) for name in ("b", "a")]
        writer.append(rows, lower=A(0), upper=A(1))
    assert contents(client, shard_id, 0, SCHEMA) == [(1, "a", 2), (1, "b", 2), (2, "a", 2), (2, "b", 2)]


def test_compaction_writes_the_newest_schema_and_changes_nothing(world: World) -> None:
    client, shard_id = grown(world)
    machine = client.machine(shard_id)
    for _ in range(4):
        _, due = machine.spine_exert(1000)
        perform(machine, due)
    ids = {part.schema_id for batch in machine.refresh().trace.batches() for part in batch.parts}
    assert ids == {2}
    assert contents(client, shard_id, 3) == NEWEST_ROWS
    assert contents(client, shard_id, 3, SCHEMA) == [(2, "b", 1), (3, "c", 1), (4, "d", 1), (5, "e", 1)]


def test_a_refused_evolution_names_every_field(world: World) -> None:
    client, shard_id = grown(world)
    answer = client.evolve_schema(
        shard_id, Schema.from_ddl("id BIGINT, sub STRING", "extra BIGINT, name STRING NOT NULL")
    )
    assert isinstance(answer, SchemaIncompatible)
    assert answer.reasons == ("val.more is dropped", "val.name is nullable and cannot become NOT NULL")
    assert answer.current == WIDEST
    # A return to an older schema is a change, too.
    assert isinstance(client.evolve_schema(shard_id, SCHEMA), SchemaIncompatible)


def test_an_evolution_to_the_current_schema_commits_nothing(world: World) -> None:
    client, shard_id = grown(world)
    before = client.machine(shard_id).refresh().seqno
    assert client.evolve_schema(shard_id, WIDEST) == SchemaEvolved(2)
    assert client.machine(shard_id).refresh().seqno == before


@pytest.mark.parametrize("happened", [True, False])
def test_an_evolution_of_unknown_outcome_happens_once(world: World, happened: bool) -> None:
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    world.faults.fail_next("compare_and_set", happened=happened)
    assert client.evolve_schema(shard_id, WIDE) == SchemaEvolved(1)
    assert len(client.machine(shard_id).refresh().schemas) == 2


def test_concurrent_evolutions_both_return_the_current_schema(world: World) -> None:
    first, second, shard_id = world.process(), world.process(), world.shard_id()
    first.initialise(shard_id, SCHEMA)
    second.initialise(shard_id, SCHEMA)
    assert first.evolve_schema(shard_id, WIDE) == SchemaEvolved(1)
    other = Schema.from_ddl("id BIGINT", "name STRING, other INT")
    answer = second.evolve_schema(shard_id, other)
    assert isinstance(answer, SchemaIncompatible)
    assert answer.reasons == ("val.extra is dropped",)
    both = Schema.from_ddl("id BIGINT", "extra INT, name STRING, other INT")
    assert second.evolve_schema(shard_id, both) == SchemaEvolved(2)


def test_a_process_that_knows_only_the_old_schema_finds_the_new_one(world: World) -> None:
    late, shard_id = world.process(), world.shard_id()
    late.initialise(shard_id, SCHEMA)
    world.process().evolve_schema(shard_id, WIDE)
    assert late.open_writer(shard_id, WIDE, purpose="late").schema_id == 1
    with pytest.raises(SchemaMismatch):
        late.open_writer(shard_id, WIDEST, purpose="never registered")


def test_a_batch_staged_under_one_schema_is_appended_by_a_writer_of_another(world: World) -> None:
    """A flushed batch too: its statistics are made under the schema it was staged with."""
    client, shard_id = world.process(), world.shard_id()
    old = client.open_writer(shard_id, SCHEMA, purpose="old")
    client.evolve_schema(shard_id, WIDE)
    new = client.open_writer(shard_id, WIDE, purpose="new")
    staged = new.batch([(((1,), (10, "a")), 0, 1)], lower=A(0), upper=A(1)).to_transmittable()
    batch = old.batch_from_transmittable(staged)
    batch.flush_inline_parts()
    old.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(1))
    assert contents(client, shard_id, 0) == [(1, 10, "a", 1)]


def test_a_finalized_shard_takes_no_schema(world: World) -> None:
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="last") as writer:
        writer.append([], lower=A(0), upper=Antichain.empty())
    with client.open_leased_reader(shard_id, purpose="last") as reader:
        reader.downgrade_since(Antichain.empty())
    client.finalize(shard_id)
    with pytest.raises(InvalidUsage, match="finalized"):
        client.evolve_schema(shard_id, WIDE)


@pytest.mark.parametrize("world", [0], indirect=True)
def test_a_filter_of_an_old_handle_holds_for_newer_parts_of_a_widened_column(world: World) -> None:
    """Bounds of newer parts may lie past all values of the old type. They are valid, not corrupt."""
    client, shard_id = grown(world)
    with client.open_leased_reader(shard_id, WIDE, purpose="old") as reader:
        small = reader.snapshot(3, where="extra < 100")
        assert [each["key"]["id"] for each in small.to_table().to_pylist()] == [3]
        assert (small.count(), reader.snapshot(3, where="extra = 30").count()) == (1, 1)
        with pytest.raises(SchemaMismatch, match="holds values that do not fit INT"):
            reader.snapshot(3, where="extra > 100").to_table()


@pytest.mark.parametrize("world", [0], indirect=True)
@pytest.mark.parametrize("where", ["extra > 5000000000", "extra in (1, 1099511627776)", "extra <> 5000000000"])
def test_regression_a_filter_of_an_old_handle_with_a_literal_beyond_its_type_skips_no_matching_part(
    world: World, where: str
) -> None:
    """Matching rows of newer parts were skipped silently. Without the filter such rows are refused."""
    client, shard_id = grown(world)
    with client.open_leased_reader(shard_id, WIDE, purpose="old") as reader:
        with pytest.raises(SchemaMismatch, match="holds values that do not fit INT"):
            reader.snapshot(3, where=where).to_table()
        few = reader.snapshot(3, where="extra in (30, 5000000000)").to_table()
        assert [each["key"]["id"] for each in few.to_pylist()] == [3]
        assert reader.snapshot(3, where="extra > -5000000000 and extra < 99").count() == 1
        assert reader.snapshot(3, where="extra > 99999999999999999999").count() == 0


@pytest.mark.parametrize("world", [0], indirect=True)
def test_regression_a_count_of_an_old_handle_excludes_rows_past_a_literal_beyond_its_type(world: World) -> None:
    """2**40 was counted as below 5,000,000,000: a literal past all values of the type was taken as past every row."""
    client, shard_id = grown(world)
    with client.open_leased_reader(shard_id, WIDE, purpose="old") as reader:
        assert reader.snapshot(3, where="extra < 5000000000").count() == 1
