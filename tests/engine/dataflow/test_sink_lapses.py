"""A sink whose leases lapse, as on a machine that slept, continues where it was, and ends if it cannot know where that is.

The sink is stepped without threads: each part handles its events when the test calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Schema
from persist_engine.base.errors import Fenced, MissingBlob, SchemaMismatch
from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    LeaseSettings,
    MaintenanceSettings,
    Settings,
)
from persist_engine.dataflow.sink import readback as sink_readback
from persist_engine.dataflow.sink.actors import Desired, DesiredFrontier
from persist_engine.dataflow.sink.handle import SinkOptions, assemble
from persist_engine.flow.desired import Stream
from persist_engine.model.ids import CriticalReaderId
from persist_engine.rows.ingest import normalise
from persist_engine.rows.partitioning import deal
from persist_engine.work.perform import perform, perform_due
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
WRITER_LEASE_MS = 1000
SETTINGS = Settings(
    batch=BatchSettings(inline_part_bytes_max=0),
    lease=LeaseSettings(writer_lease_ms=WRITER_LEASE_MS),
    maintenance=MaintenanceSettings(rollup_threshold=2, gc_versions_min=2),
    compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1),
)


class Stepped:
    """A sink of two workers in one process of a world, and a client of another process."""

    def __init__(self, tmp_path: Path) -> None:
        self.world = World(settings=SETTINGS)
        self.shard_id = self.world.shard_id()
        self.outside = self.world.process()
        self.outside.initialise(self.shard_id, SCHEMA)
        self.client = self.world.process()
        self.tmp_path = tmp_path
        self.desired: list = []

    def open(self) -> None:
        self.parts = assemble(
            SinkOptions(workers=2),
            open_reader=lambda: self.client.open_leased_reader(self.shard_id, SCHEMA, purpose="sink"),
            writer=self.client.open_writer(self.shard_id, SCHEMA, purpose="sink"),
            spill_directory=lambda _: self.tmp_path,
        )

    @property
    def machine(self):
        return self.outside.machine(self.shard_id)

    def desire(self, rows: list, frontier: int) -> None:
        self.desired += rows
        inboxes = self.parts.worker_inboxes
        for table in normalise(rows, SCHEMA):
            for inbox, share in zip(inboxes, deal(table, len(inboxes)), strict=True):
                inbox.put(Desired(share))
        for inbox in (*inboxes, self.parts.control_inbox):
            inbox.put(DesiredFrontier(Stream.OK, A(frontier)))

    def settle(self) -> None:
        parts = self.parts
        queues = [*zip(parts.worker_inboxes, parts.workers, strict=True), (parts.control_inbox, parts.control)]
        moved = True
        while moved:
            known = parts.reader.frontier, parts.reader.lapses
            parts.reader.step(timeout_s=0)
            moved = known != (parts.reader.frontier, parts.reader.lapses)
            for inbox, part in queues:
                while (event := inbox.poll()) is not None:
                    part.handle(event)
                    moved = True

    def edit(self, rows: list, *, width: int = 1, schema: Schema = SCHEMA) -> None:
        with self.outside.open_writer(self.shard_id, schema, purpose="vandal") as vandal:
            lower = vandal.fetch_recent_upper()
            outcome = vandal.compare_and_append(rows, expected_upper=lower, new_upper=A(lower.time + width))
            assert isinstance(outcome, Appended)

    def lapse(self, *, since: int | None = None) -> None:
        """The reader is expired and its process knows. If `since` is given, the history up to it is compacted meanwhile."""
        handle = self.parts.reader.handle
        self.machine.expire_leased_reader(handle.reader_id)
        if since is not None:
            with self.outside.open_leased_reader(self.shard_id, purpose="since") as reader:
                reader.downgrade_since(A(since))
        handle._heartbeat._lost.set()
        self.world.env.advance_ms(10**7)  # enough for the next step to renew the lease

    def contents(self) -> Counter:
        upper = self.outside.recent_upper(self.shard_id).time
        with self.outside.open_leased_reader(self.shard_id, SCHEMA, purpose="check") as reader:
            rows = reader.snapshot(upper - 1).to_table().to_pylist()
        return Counter({(r["key"]["id"], r["val"]["name"]): r["diff"] for r in rows})

    def is_as_desired(self) -> bool:
        wanted: Counter = Counter()
        for ((key,), (name,)), _, diff in self.desired:
            wanted[key, name] += diff
        return self.contents() == +wanted


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Stepped]:
    stepped = Stepped(tmp_path)
    yield stepped
    stepped.parts.reader.handle.expire()


def test_listening_continues_under_a_new_lease(stepped: Stepped):
    stepped.open()
    stepped.desire([row(1, "a", 0)], 3)
    stepped.settle()
    stepped.edit([row(7, "vandal", 3)])
    stepped.lapse()
    stepped.desire([row(2, "b", 3)], 9)
    stepped.settle()
    assert stepped.parts.reader.lapses == 1
    assert stepped.is_as_desired()


def test_an_idle_sink_on_an_empty_shard_continues_after_a_lapse(stepped: Stepped):
    """Nothing is readable yet. The rows delivered as of 0, here none, are retracted all the same."""
    stepped.open()
    stepped.settle()
    stepped.lapse()
    stepped.edit([row(7, "vandal", 0)])
    stepped.desire([row(1, "a", 0)], 5)
    stepped.settle()
    assert stepped.parts.reader.lapses == 1
    assert stepped.is_as_desired()


def test_blobs_collected_under_the_cached_state_are_replaced_by_their_merge_result(stepped: Stepped):
    stepped.open()
    stepped.desire([row(1, "a", 0)], 3)
    stepped.settle()
    times_told_apart = CriticalReaderId.from_bytes(b"c" * 16)
    stepped.outside.open_critical_since(stepped.shard_id, times_told_apart, opaque=b"")
    stepped.edit([row(7, "vandal", 3)])
    stepped.client.machine(stepped.shard_id).refresh()
    stepped.machine.expire_leased_reader(stepped.parts.reader.handle.reader_id)
    for time in range(4, 8):
        stepped.edit([row(7, "vandal", time)])
        perform(stepped.machine, stepped.machine.spine_exert(1000)[1])
        perform_due(stepped.machine)
    stepped.desire([], 12)
    stepped.settle()
    assert stepped.parts.reader.lapses == 1
    assert stepped.is_as_desired()


@pytest.mark.parametrize("rows", [0, 1, 5, 9])
def test_a_snapshot_continues_after_the_rows_that_it_has_delivered(stepped: Stepped, monkeypatch, rows: int):
    """The new snapshot differs physically, but has the same rows in the same order."""
    stepped.edit([row(key, "old", 0) for key in range(10)])
    stepped.open()
    original: Callable = sink_readback._tables
    broken: list = []

    def tables(snapshot) -> Iterator[pa.Table]:
        whole = pa.concat_tables(original(snapshot))
        for begin in range(whole.num_rows):
            if begin == rows and not broken:
                broken.append(snapshot)
                stepped.lapse()
                stepped.edit([row(3, "old", 1, -1)])
                raise MissingBlob("collected", key="n1")
            yield whole.slice(begin, 1)

    monkeypatch.setattr(sink_readback, "_tables", tables)
    stepped.desire([row(key, "new", 0) for key in range(4)], 7)
    stepped.settle()
    assert broken
    assert stepped.parts.reader.lapses == 1
    assert stepped.is_as_desired()


def test_a_sink_ends_if_history_was_lost_during_its_lapse(stepped: Stepped):
    """Updates that were appended during the lapse are merged with those it has read. They cannot be separated."""
    stepped.open()
    stepped.desire([row(1, "a", 0)], 3)
    stepped.settle()
    stepped.edit([row(7, "vandal", 3)], width=5)
    stepped.lapse(since=6)
    with pytest.raises(Fenced, match=r"when its lease lapsed, and since went to \{6\}.*send it all inputs again"):
        stepped.settle()


def test_a_lapse_between_rows_and_their_progress_ends_the_sink(stepped: Stepped, monkeypatch):
    stepped.open()
    stepped.desire([row(1, "a", 0)], 3)
    stepped.settle()
    stepped.edit([row(7, "vandal", 3)])
    readback = stepped.parts.reader._readback

    def half(_listen):
        yield readback._given(SCHEMA.updates_schema.empty_table())
        raise MissingBlob("collected", key="n1")

    monkeypatch.setattr(readback, "_listened", half)
    with pytest.raises(MissingBlob, match="collected"):
        stepped.settle()
    assert stepped.parts.reader.lapses == 0


def test_leases_that_lapse_again_and_again_end_the_sink(stepped: Stepped, monkeypatch):
    stepped.open()
    readback = stepped.parts.reader._readback

    def never() -> Iterator:
        raise Fenced("again")
        yield

    monkeypatch.setattr(readback, "_news", never)
    with pytest.raises(Fenced, match="again"):
        stepped.settle()
    assert stepped.parts.reader.lapses == sink_readback.LAPSES_IN_A_ROW_MAX


@pytest.mark.parametrize("happened", [True, False])
def test_an_append_of_unknown_outcome_is_read_back(stepped: Stepped, happened: bool):
    """The writer's lease lapsed while the outcome was unknown. Its blobs may be linked, so they stay."""
    stepped.open()
    stepped.desire([row(1, "a", 0)], 3)
    stepped.settle()
    stepped.desire([row(2, "b", 3)], 5)
    slept = stepped.world.env.sleep

    def sleep(seconds: float) -> None:
        stepped.world.env.sleep = slept  # type: ignore[method-assign]  # once
        stepped.world.env.advance_ms(2 * WRITER_LEASE_MS)
        stepped.edit([row(7, "vandal", 5 if happened else 3)])

    stepped.world.env.sleep = sleep  # type: ignore[method-assign]  # a long sleep between two attempts
    original = stepped.parts.control._commit

    def commit(one):
        stepped.world.faults.fail_next("compare_and_set", happened=happened)
        stepped.parts.control._commit = original  # type: ignore[method-assign]  # only the first call
        return original(one)

    stepped.parts.control._commit = commit  # type: ignore[method-assign]  # its answer is lost
    stepped.settle()
    stepped.desire([], 20)
    stepped.settle()
    assert stepped.parts.control.lapses == 1
    assert stepped.is_as_desired()


def test_a_schema_evolution_ends_a_running_sink(stepped: Stepped):
    """The sink must not retract rows without the fields that it does not know."""
    stepped.open()
    stepped.desire([row(1, "a", 0)], 3)
    stepped.settle()
    wider = Schema(key=SCHEMA.key, val=pa.schema([*SCHEMA.val, ("note", pa.string())]))
    stepped.outside.evolve_schema(stepped.shard_id, wider)
    stepped.edit([(((7,), ("vandal", "a note")), 3, 1)], schema=wider)
    stepped.desire([], 9)
    with pytest.raises(SchemaMismatch, match="evolved to schema 1, this handle has 0"):
        stepped.settle()
    assert stepped.outside.recent_upper(stepped.shard_id) == A(4), "nothing was corrected"
