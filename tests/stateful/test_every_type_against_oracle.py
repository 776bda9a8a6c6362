"""Random histories over every type there is: schemas that grow in the middle, batches that are staged, copied to several
windows, rewritten and cut, parts inline, tiny and behind listings, compactions and collections between. A list of rows on
paper knows the contents at every time, and every way of reading must show exactly these. At rest no blob is left over.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from persist_engine import Antichain, Appended, Schema, WriteHandle
from persist_engine.base.errors import BatchExpired, InvalidUsage
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    MaintenanceSettings,
    ReadSettings,
    Settings,
)
from persist_engine.client.export import export_shard
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.leased import LeasedPart
from persist_engine.client.read.listen import Updates
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.model.commands import SchemaEvolved
from persist_engine.rows.filter import column_named
from persist_engine.rows.predicate import IsNull, Not
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.references import Bucket
from persist_engine.work.audit.usage import audit_usage
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.repair.force import force_compaction, force_gc
from persist_kit.depth import draws
from persist_kit.strategies import schemas, successors, updates, updates_table
from persist_kit.world import AheadEnv, World

A = Antichain.of
_AUDITED = ReadSettings(stats_audit_percent=100)
_EAGER = MaintenanceSettings(rollup_threshold=2, recent_diffs_max=4)
INLINE = Settings(read=_AUDITED, maintenance=_EAGER)
HOLLOW = Settings(
    batch=BatchSettings(
        target_part_bytes=1024, inline_part_bytes_max=0, runs_max=2, run_parts_max=2, stats_bytes_max=60
    ),
    compaction=CompactionSettings(memory_bytes_max=0),
    read=_AUDITED,
    maintenance=_EAGER,
)

Row = tuple[dict[str, Any], dict[str, Any], int, int]
Shown = tuple[Hashable, Hashable]
processes = st.integers(0, 1)
widths = st.integers(1, 4)


def canonical(value: Any, kind: pa.DataType) -> Any:
    """Equal exactly where rows are equal: one NaN, one zero; absent fields are null, fields that were not asked for left out."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return tuple(canonical(value.get(field.name), field.type) for field in kind)
    if pa.types.is_map(kind):
        return tuple((canonical(key, kind.key_type), canonical(item, kind.item_type)) for key, item in value)
    if pa.types.is_list(kind):
        return tuple(canonical(each, kind.value_type) for each in value)
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value or 0.0
    return value


def shown(key: dict[str, Any], val: dict[str, Any] | None, schema: Schema) -> Shown:
    return canonical(key, schema.key_type), canonical(val or {}, schema.val_type)


def counted(table: pa.Table, schema: Schema, *, timed: bool = False) -> dict[Any, int]:
    """What a read shows; zeros left out."""
    found: Counter[Any] = Counter()
    for row in table.to_pylist():
        data = shown(row["key"], row.get("val"), schema)
        found[(data, row["time"]) if timed else data] += row["diff"]
    return {data: diff for data, diff in found.items() if diff}


class Histories:
    """A shard, two processes that see it differently, and what it holds on paper."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        first = draw(schemas())
        self.schemas = [first, draw(successors(first))]
        self.known = 1
        self.world = World(env=AheadEnv())
        self.shard_id = self.world.shard_id()
        self.clients = [self.world.process(settings=each) for each in (INLINE, HOLLOW)]
        self.clients[0].initialise(self.shard_id, first)
        self.paper: list[Row] = []
        self.upper = 0

    # -- writing ---------------------------------------------------------------------------------------------------------

    def writer(self) -> tuple[WriteHandle, Schema]:
        schema = self.schemas[self.draw(st.integers(0, self.known - 1))]
        return self.clients[self.draw(processes)].open_writer(self.shard_id, schema, purpose="test"), schema

    def rows(self, schema: Schema, width: int) -> list[Row]:
        """New ones, and some of those that are there taken back."""
        rows = [
            (row["key"], row["val"] or {}, self.upper + row["time"] % width, row["diff"])
            for row in self.draw(updates(schema)).to_pylist()
        ]
        if self.paper and schema == self.schemas[self.known - 1]:
            again = self.draw(st.lists(st.sampled_from(self.paper), max_size=4))
            rows += [(key, val, self.upper, -diff) for key, val, _, diff in again]
        return rows

    def table(self, schema: Schema, rows: Iterable[Row]) -> pa.Table:
        def filled(value: Any, kind: pa.DataType) -> Any:
            if value is None or not pa.types.is_nested(kind):
                return value
            if pa.types.is_map(kind):
                return [(key, filled(item, kind.item_type)) for key, item in value]
            if pa.types.is_list(kind):
                return [filled(each, kind.value_type) for each in value]
            return {field.name: filled(value.get(field.name), field.type) for field in kind}

        return updates_table(
            schema, [(filled(row[0], schema.key_type), filled(row[1], schema.val_type), *row[2:]) for row in rows]
        )

    def append(self) -> None:
        writer, schema = self.writer()
        width = self.draw(widths)
        rows = self.rows(schema, width)
        with writer:
            upper = self.upper + width
            outcome = writer.compare_and_append(
                self.table(schema, rows), expected_upper=A(self.upper), new_upper=A(upper)
            )
        assert isinstance(outcome, Appended)
        self.paper += rows
        self.upper = upper

    def append_copies(self) -> None:
        """One batch, sent to both processes, each of which appends a window of it. What was collected since the first window was
        appended is staged again, as BatchExpired asks.
        """
        writer, schema = self.writer()
        width = self.draw(widths) + 1
        rows, lower, upper = self.rows(schema, width), self.upper, self.upper + width
        sent = writer.batch(self.table(schema, rows), lower=A(lower), upper=A(upper)).to_transmittable()
        cut = self.draw(st.integers(lower + 1, upper - 1))
        for client, start, end in zip(self.clients, (lower, cut), (cut, upper), strict=True):
            with client.open_writer(self.shard_id, schema, purpose="test") as other:
                batch = other.batch_from_transmittable(sent)
                try:
                    outcome = other.compare_and_append_batch([batch], expected_upper=A(start), new_upper=A(end))
                except BatchExpired:
                    assert start == cut
                    window = self.table(schema, [row for row in rows if start <= row[2] < end])
                    outcome = other.compare_and_append(window, expected_upper=A(start), new_upper=A(end))
            assert isinstance(outcome, Appended)
            self.maintain()
        self.paper += rows
        self.upper = upper

    def append_rewritten(self) -> None:
        """Staged by one process before its time was known, appended with a plain one of another."""
        writer, schema = self.writer()
        width = self.draw(widths)
        rows, lower = self.rows(schema, width), self.upper
        batch = writer.batch(self.table(schema, rows), lower=A(lower), upper=A(lower + width))
        time = lower + self.draw(st.integers(0, width + 2))
        upper = max(lower + width, time + 1)
        batch.rewrite_times(A(time), A(upper))
        other, others_schema = self.writer()
        plain = self.rows(others_schema, width)
        with other:
            both = [
                other.batch_from_transmittable(batch.to_transmittable()),
                other.batch(self.table(others_schema, plain), lower=A(lower), upper=A(upper)),
            ]
            outcome = other.compare_and_append_batch(both, expected_upper=A(lower), new_upper=A(upper))
        assert isinstance(outcome, Appended)
        self.paper += [(key, val, max(at, time), diff) for key, val, at, diff in rows] + plain
        self.upper = upper

    # -- what happens meanwhile ------------------------------------------------------------------------------------------

    def evolve(self) -> None:
        answer = self.clients[self.draw(processes)].evolve_schema(self.shard_id, self.schemas[1])
        assert isinstance(answer, SchemaEvolved)
        self.known = 2

    def maintain(self) -> None:
        machine = self.clients[self.draw(processes)].machine(self.shard_id)
        if self.draw(st.booleans()):
            force_compaction(machine, full=self.draw(st.booleans()))
        if self.draw(st.booleans()):
            force_gc(machine)

    def forget(self) -> None:
        with self.clients[0].open_leased_reader(self.shard_id, purpose="test") as reader:
            reader.downgrade_since(A(max(0, self.upper - self.draw(widths))))

    # -- reading ---------------------------------------------------------------------------------------------------------

    def contents(self, as_of: int, schema: Schema) -> dict[Shown, int]:
        found: Counter[Shown] = Counter()
        for key, val, time, diff in self.paper:
            if time <= as_of:
                found[shown(key, val, schema)] += diff
        return {data: diff for data, diff in found.items() if diff}

    def history(self, after: int, schema: Schema) -> dict[Any, int]:
        found: Counter[Any] = Counter()
        for key, val, time, diff in self.paper:
            if time > after:
                found[shown(key, val, schema), time] += diff
        return {data: diff for data, diff in found.items() if diff}

    def check(self) -> None:
        """Every way of reading, by either process."""
        client = self.clients[self.draw(processes)]
        schema = self.schemas[self.known - 1]
        with client.open_leased_reader(self.shard_id, schema, purpose="test") as reader:
            since = reader.since.time or 0
            if since >= self.upper:
                return
            as_of = self.draw(st.integers(since, self.upper - 1))
            self._check_snapshot(reader, as_of, schema)
            after = -1 if since == 0 else as_of
            with reader.changes(None if after < 0 else after, self.upper - 1) as changes:
                assert counted(changes.to_table(), schema, timed=True) == self.history(after, schema)
            listen = reader.listen(as_of)
            tables = [schema.updates_schema.empty_table()]
            while listen.frontier < A(self.upper):
                tables += [event.table for event in listen.next_batch(timeout_s=0) if isinstance(event, Updates)]
            assert counted(pa.concat_tables(tables), schema, timed=True) == self.history(as_of, schema)
            listen.close()
        assert not verify_shard(client.machine(self.shard_id)).findings

    def _check_snapshot(self, reader: ReadHandle, as_of: int, schema: Schema) -> None:
        wanted = self.contents(as_of, schema)
        blob = self.world.blob
        with reader.snapshot(as_of, timeout_s=0) as snapshot:
            table = snapshot.to_table()
            assert counted(table, schema) == wanted
            assert (table.num_rows, snapshot.count()) == (len(wanted), sum(wanted.values()))
            splits = [SnapshotSplit.from_bytes(split.to_bytes()) for split in snapshot.splits(3)]
            pieces = [pa.Table.from_batches(split.to_batches(blob), schema.updates_schema) for split in splits]
            assert counted(pa.concat_tables(pieces), schema) == wanted
            parts = [LeasedPart.from_bytes(part.to_bytes()) for part in snapshot.lease_parts()]
            tables = [schema.updates_schema.empty_table(), *(each for part in parts for each in part.fetch(blob))]
            assert counted(pa.concat_tables(tables), schema) == wanted
        side = self.draw(st.sampled_from(["key", "val"] if len(schema.val) else ["key"]))
        fields = schema.key if side == "key" else schema.val
        at = self.draw(st.integers(0, len(fields) - 1))
        name = f"{side}.{fields.names[at]}"
        try:
            if column_named(name, schema).top != name:
                return
        except InvalidUsage:  # with dots in names it may be the name of several
            return
        for where, is_null in ((IsNull(name), True), (Not(IsNull(name)), False)):
            passing = {data: n for data, n in wanted.items() if (data[side == "val"][at] is None) == is_null}
            with reader.snapshot(as_of, where=where, timeout_s=0) as snapshot:
                assert counted(snapshot.to_table(), schema) == passing
                assert snapshot.count() == sum(passing.values())
        with reader.snapshot(as_of, columns=[name], timeout_s=0) as snapshot:
            seen = Counter(repr(row[side]) for row in snapshot.to_table().select([side]).to_pylist())
        assert sum(seen.values()) == len(wanted)

    def export(self) -> None:
        schema, client = self.schemas[self.known - 1], self.clients[self.draw(processes)]
        since = client.machine(self.shard_id).refresh().trace.since.time or 0
        with tempfile.TemporaryDirectory() as directory:
            manifest = export_shard(client, self.shard_id, Path(directory) / "out", as_of=None)
            table = pa.concat_tables([pq.read_table(Path(directory) / "out" / file.name) for file in manifest.files])
        paper = Histories.__new__(Histories)
        paper.paper = [(key, val, max(time, since), diff) for key, val, time, diff in self.paper]
        assert counted(table, schema, timed=True) == paper.history(-1, schema)

    def settle(self) -> None:
        """No blob is left that no version names, and all else is there."""
        client = self.clients[0]
        machine = client.machine(self.shard_id)
        self.world.env.advance_ms(10_000_000)
        machine.overtake()
        force_compaction(machine, full=True)
        for _ in range(3):
            force_gc(machine)
        self.world.env.advance_ms(10_000)
        machine.overtake()
        scan_orphans(machine, older_than_ms=0, commit=True)
        usage = audit_usage(machine.blob, lambda _: machine, retry=machine.retry, metrics=NoMetrics())
        blobs = usage.shards[self.shard_id].blobs
        assert blobs[Bucket.LEAKED] == blobs[Bucket.NOT_LEAKED_NOT_REFERENCED] == 0
        self.check()


@pytest.mark.slow
@settings(max_examples=draws(10), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_way_of_reading_shows_what_was_written_whatever_its_types(data: st.DataObject) -> None:
    histories = Histories(data.draw)
    steps = [
        histories.append,
        histories.append_copies,
        histories.append_rewritten,
        histories.evolve,
        histories.maintain,
        histories.forget,
        histories.check,
        histories.export,
    ]
    for step in data.draw(st.lists(st.sampled_from(range(len(steps))), min_size=4, max_size=12)):
        steps[step]()
    histories.check()
    histories.export()
    histories.settle()
