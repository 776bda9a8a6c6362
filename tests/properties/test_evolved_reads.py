"""A law of reads: whatever a part knows of its rows, a condition chooses the rows that it chooses among all of them. Parts of several
versions of the schema, with statistics, Bloom filters and row groups, inline and merged, read by the newest schema and by each older one.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Antichain, PersistClient
from persist_engine.base.errors import SchemaMismatch
from persist_engine.base.settings import BatchSettings, CompactionSettings, ReadSettings, Settings
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.codec.bloom import is_filterable
from persist_engine.rows.evolution import adapted
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, In, IsNull, Like, Not, Or, Predicate
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate
from persist_engine.work.repair.force import force_compaction
from persist_kit.depth import draws
from persist_kit.strategies import schemas, successors, updates
from persist_kit.world import World

A = Antichain.of
Paths = list[tuple[str, tuple[str, ...], pa.DataType]]


def paths_of(schema: Schema) -> Paths:
    """Every field that a text names without doubt, at any depth of structs."""
    found: dict[str, list[tuple[tuple[str, ...], pa.DataType]]] = {}

    def walk(path: tuple[str, ...], fields: Any) -> None:
        for field in fields:
            found.setdefault(".".join((*path, field.name)), []).append(((*path, field.name), field.type))
            if pa.types.is_struct(field.type):
                walk((*path, field.name), field.type)

    walk(("key",), schema.key)
    walk(("val",), schema.val)
    return [(text, *some[0]) for text, some in found.items() if len(some) == 1]


def value_at(row: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = row
    for name in path:
        value = None if value is None else value[name]
    return value


@st.composite
def conditions(draw: st.DrawFn, paths: Paths, rows: list[dict[str, Any]], depth: int = 1) -> Predicate:
    """Conditions with values of the rows, and with numbers that no narrower type holds."""
    if depth and draw(st.booleans()):
        one, other = (draw(conditions(paths, rows, depth - 1)) for _ in range(2))
        return draw(st.sampled_from([And((one, other)), Or((one, other)), Not(one)]))
    text, path, kind = draw(st.sampled_from(paths))
    values = [value for row in rows if (value := value_at(row, path)) is not None]
    if pa.types.is_nested(kind) or not values or draw(st.integers(0, 3)) == 0:
        return IsNull(text)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values += [0, 2**40, -(2**40), 0.1, Decimal("0.5")]
    if pa.types.is_string(kind) and draw(st.booleans()):
        return Like(text, f"{values[0][:1]}%" if values[0][:1] not in ("%", "_", "\\") else "%")
    if draw(st.booleans()):
        return In(text, tuple(draw(st.lists(st.sampled_from(values), max_size=3))))
    return Compare(text, draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="])), draw(st.sampled_from(values)))


def texts(table: pa.Table) -> list[str]:
    return sorted(repr((row["key"], row["val"], row["diff"])) for row in table.to_pylist())


class Grown:
    """A shard whose schema evolved between its appends, and the updates of all of them in the newest one."""

    def __init__(self, inline_bytes: int, stats_bytes: int) -> None:
        self.world = World(
            settings=Settings(
                batch=BatchSettings(inline_part_bytes_max=inline_bytes, stats_bytes_max=stats_bytes),
                read=ReadSettings(stats_audit_percent=100),
                compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1),
            )
        )
        self.shard_id, self.client = self.world.shard_id(), self.world.process()
        self.schemas: list[Schema] = []
        self.tables: list[pa.Table] = []

    def evolve(self, schema: Schema) -> None:
        if self.schemas:
            self.client.evolve_schema(self.shard_id, schema)
        else:
            self.client.initialise(self.shard_id, schema)
        fields = [(side, each) for side in ("key", "val") for each in getattr(schema, side)]
        filtered = [f"{side}.{each.name}" for side, each in fields if is_filterable(each.type) and "." not in each.name]
        self.client.set_filtered(self.shard_id, filtered)
        self.schemas.append(schema)

    def append(self, table: pa.Table, schema: Schema) -> None:
        """With the handle of a process that knows `schema`, which may be an older one."""
        time = len(self.tables)
        rows = table.set_column(2, "time", pa.array([time] * table.num_rows, pa.int64()))
        with self.client.open_writer(self.shard_id, schema, purpose="test") as writer:
            writer.append(rows, lower=A(time), upper=A(time + 1))
        self.tables.append(table.set_column(2, "time", pa.array([0] * table.num_rows, pa.int64())))

    def contents(self, schema: Schema) -> pa.Table:
        """The rows in `schema`, which all of them fit, or SchemaMismatch."""
        shown = [adapted(table, asked=self.schemas[-1], key="rows") for table in self.tables]
        return consolidate(adapted(consolidate(pa.concat_tables(shown)), asked=schema, key="rows"))

    def check(self, client: PersistClient, schema: Schema, condition: Predicate, count: int) -> None:
        try:
            whole = self.contents(schema)
        except SchemaMismatch:
            return  # a reader of the older schema may meet the value that does not fit, or skip its part
        wanted = Filter(condition, schema).apply(whole)
        with client.open_leased_reader(self.shard_id, schema, purpose="test") as reader:
            snapshot = reader.snapshot(len(self.tables) - 1, where=condition)
            assert texts(snapshot.to_table()) == texts(wanted)
            assert snapshot.count() == sum(wanted.column("diff").to_pylist())
            for merged in (True, False):
                splits = [SnapshotSplit.from_bytes(each.to_bytes()) for each in snapshot.splits(count, merged=merged)]
                read = [batch for split in splits for batch in split.to_batches(reader.blob)]
                rows = pa.Table.from_batches(read, schema=schema.updates_schema)
                assert texts(consolidate(rows)) == texts(wanted)
            known = snapshot.aggregates()
            assert known is None or known.rows == wanted.num_rows


@st.composite
def grown(draw: st.DrawFn) -> tuple[Grown, list[Schema], list[tuple[Predicate, Schema]]]:
    old = draw(schemas().filter(lambda each: bool(paths_of(each))))
    versions = [old, draw(successors(old))]
    versions.append(draw(successors(versions[1])))
    shard = Grown(draw(st.sampled_from([0, 0, 4096])), draw(st.sampled_from([0, 200, 100_000])))
    for number, schema in enumerate(versions):
        shard.evolve(schema)
        for written in draw(st.sampled_from([[schema], [versions[0], schema], [schema, schema]])):
            shard.append(draw(updates(written)), written)
        if number and draw(st.booleans()):
            force_compaction(shard.client.machine(shard.shard_id), full=draw(st.booleans()))
    asked = []
    for schema in versions:
        rows = adapted(pa.concat_tables([schema.updates_schema.empty_table()]), asked=schema, key="rows").to_pylist()
        rows += [row for table in shard.tables if table.schema == schema.updates_schema for row in table.to_pylist()]
        asked.append((draw(conditions(paths_of(schema), rows)), schema))
    return shard, versions, asked


@pytest.mark.slow
@settings(max_examples=draws(4), deadline=None)
@given(grown(), st.integers(1, 4))
def test_a_condition_chooses_the_same_rows_whatever_version_of_the_schema_each_part_has(
    case: tuple, count: int
) -> None:
    shard, _, asked = case
    for client in (shard.client, shard.world.process()):
        for condition, schema in asked:
            shard.check(client, schema, condition, count)
