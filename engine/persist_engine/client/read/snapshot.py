"""Snapshot: the contents of a shard at one time, consolidated, as a table, a stream, or disjoint splits for many readers.

This module owns a pin, until `close`, on the version of the snapshot. It knows nothing of how leases are managed (client.read.leased) or
how rows are merged (parts).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, Self

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.refusal import Refusal
from persist_engine.base.wording import dated
from persist_engine.client.arguments import expect_count
from persist_engine.client.read.leased import LeasedPart, PartLeases, Pin
from persist_engine.client.read.pieces import BATCH_ROWS, READ_MEMORY_BYTES
from persist_engine.client.read.splits import SnapshotSplit, pieces_apart
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain
from persist_engine.parts.aggregates import Aggregates, aggregates
from persist_engine.parts.consolidate import merge_runs
from persist_engine.parts.contents import Contents
from persist_engine.parts.even_ranges import affordable_ranges
from persist_engine.parts.fetch import PartSource, SnapshotFilter, read_consolidated, runs_of
from persist_engine.parts.selection import Selection, Times, select
from persist_engine.rows.columns import constant
from persist_engine.rows.filter import Filter
from persist_engine.rows.projection import Projection
from persist_engine.rows.schema import Schema

#: Like READ_MEMORY_BYTES, for a read into a table. The table holds all rows anyway, so larger pieces of work cost no more memory.
TABLE_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SinceAhead(Refusal):
    """The answer to a read at a time that is no longer readable: the shard can only be read at or past `since`. Use of it as a snapshot
    raises InvalidUsage, with both times.
    """

    since: Antichain
    as_of: int

    def refused(self, what: str) -> str:
        """The message for a user whose `what`, such as `cannot read`, this answers."""
        if self.since.is_empty():
            return f"{what}: the shard is closed, and no time of it can be read any more"
        return f"{what} at {dated(self.as_of)}: the earliest readable time is {dated(self.since.time)}"

    @property
    def meaning(self) -> str:
        """See Refusal."""
        end = "the reader has none left" if self.since.is_empty() else f"read at {self.since.time} or later"
        text = f"cannot read at as_of {self.as_of}: times before since {self.since} are no longer readable"
        return f"{text}; {end}"

    def to_table(self) -> NoReturn:
        """Raises InvalidUsage."""
        self.refuse("to_table")

    def to_batches(self) -> NoReturn:
        """Raises InvalidUsage."""
        self.refuse("to_batches")

    def splits(self, _count: int) -> NoReturn:
        """Raises InvalidUsage."""
        self.refuse("splits")

    def count(self) -> NoReturn:
        """Raises InvalidUsage."""
        self.refuse("count")


class Snapshot:
    """Rows (key, val, time = as_of, diff), sorted by (key, val), each (key, val) once, never with diff 0. Only rows that pass `where` and
    only the fields `columns` are shown, if the reader gave them. The projection does not merge rows: two rows may look alike when not all
    fields are shown.

    Reading may be repeated and gives the same rows. The blobs are protected from collection until `close`, the end of the `with` block, or
    until the snapshot is garbage-collected.
    """

    def __init__(
        self,
        *,
        source: PartSource,
        batches: tuple[HollowBatch, ...],
        as_of: int,
        pin: Pin,
        leases: PartLeases,
        where: Filter | None = None,
        projection: Projection | None = None,
        audited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source = source
        self._named = batches
        self.as_of = as_of
        self._pin = pin
        self._leases = leases
        self._where, self._projection, self._audited = where, projection, audited
        self._finalizer = weakref.finalize(self, pin.release)

    @property
    def schema(self) -> Schema:
        """The key and value schema of the shard's rows."""
        return self._source.schema

    @property
    def updates_schema(self) -> pa.Schema:
        """The schema of the tables that a read yields."""
        return self.schema.updates_schema if self._projection is None else self._projection.updates_schema

    @property
    def rows_estimate(self) -> int:
        """An upper bound of the number of rows. Reads no parts, but fetches listings of parts, if there are any."""
        return sum(batch.rows for batch in self._contents.batches)

    @property
    def bytes_estimate(self) -> int:
        """The bytes that a full read fetches. Reads what `rows_estimate` reads."""
        return sum(batch.size_bytes for batch in self._contents.batches)

    def to_table(self) -> pa.Table:
        """All rows as one table."""
        return pa.Table.from_batches(self.to_batches(memory_bytes=TABLE_MEMORY_BYTES), schema=self.updates_schema)

    def to_batches(
        self, *, memory_bytes: int = READ_MEMORY_BYTES, on_fetched: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """All rows as a stream of non-empty record batches, merged while reading within about `memory_bytes`.

        `on_fetched` receives the size in bytes of every part when the merge takes it. Storage errors are retried. Raises MissingBlob and
        CorruptData, which name the key.
        """
        self.check_open()
        return _record_batches(self, self._contents.tables(memory_bytes=memory_bytes, on_fetched=on_fetched))

    def to_reader(self) -> pa.RecordBatchReader:
        """The same stream as an Arrow reader. The snapshot must stay open until the end of the stream."""
        return pa.RecordBatchReader.from_batches(self.updates_schema, self.to_batches())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def count(self) -> int:
        """The number of rows, each counted diff times. Reads only the parts for which statistics and sums in state do not suffice."""
        self.check_open()
        return self._contents.count(self._named)

    def aggregates(self, fields: Sequence[str] = ()) -> Aggregates | None:
        """The number of rows and, for each of `fields` (`key.<field>` or `val.<field>`, whatever `columns` says), the number of nulls and
        the least and greatest value, as far as state proves them. None when state does not prove that the read shows all rows of each part,
        each once. Fetches no part.
        """
        self.check_open()
        return aggregates(self._contents, fields)

    def splits(self, count: int, *, merged: bool = True) -> list[SnapshotSplit]:
        """At most `count` (at least one) splits by key range. Every row is in exactly one, whatever statistics the parts have.

        With `merged` False, splits may be cheaper to read: if statistics prove that no row cancels another, the rows are not merged. A row
        may then come several times, in one split or in several, with diffs that add up.

        The splits may be read anywhere, but only while this snapshot stays open, because a split holds no lease.
        """
        self.check_open()
        expect_count(count, "count", least=1)
        contents = self._contents
        is_merged = merged or not contents.is_additive
        if not is_merged and count <= sum(len(batch.parts) for batch in contents.batches):
            first, *others = pieces_apart(contents, count)
        else:
            ranges = affordable_ranges(contents.batches, self.schema, count)
            first, *others = (SnapshotSplit.of(contents, each, is_merged=is_merged) for each in ranges)
        # Only the first split has the audits, so that parts fetched only for an audit are fetched once.
        return [replace(first, audits=contents.audits), *others]

    def plain_blobs(self) -> list[str] | None:
        """The keys of Parquet blobs (spec 29.12) whose columns key and val, filtered by `where`, are exactly the contents: every row is
        there once, and nothing but `where` hides a row. None when this is not known, when rows are inline, or when a blob's footer or Bloom
        filters differ from those of its part. The blobs stay while this snapshot is open.
        """
        self.check_open()
        return self._contents.plain_blobs()

    def lease_parts(self) -> list[LeasedPart]:
        """The parts to read, for other processes to fetch one by one. Rows are neither sorted nor consolidated across parts: the same
        (key, val) may be in several parts, with diffs that add up. Rows have all fields, whatever `columns` says. Parts fetched only for an
        audit come last.

        Every part protects its own blobs from collection until it is returned to the reader (`ReadHandle.return_part`) or the reader
        expires. The snapshot may be closed before.
        """
        self.check_open()
        contents = self._contents
        selection = Selection(contents.batches, contents.audits)
        rows = SnapshotFilter(self.as_of)
        return self._leases.lease_all(self._pin, contents.source, selection, rows=rows, where=self._where)

    def corrections(
        self, desired: Sequence[HollowBatch], *, time: int, memory_bytes: int = READ_MEMORY_BYTES
    ) -> Iterator[pa.Table]:
        """The updates at `time` that turn these rows into the rows of `desired`: desired minus persisted, consolidated and sorted. Yields
        nothing when both are equal. `desired` holds batches staged for this shard at times up to `time`; their blobs must stay until the
        stream ends.

        Streams within about `memory_bytes`. Storage errors are retried. Raises MissingBlob and CorruptData, which name the key.
        """
        self.check_open()
        if self._projection is not None:
            raise InvalidUsage("a snapshot that shows only some columns has no corrections: open one without columns")
        share = memory_bytes // 3
        persisted = (_retracted(table, time) for table in self._contents.tables(memory_bytes=share))
        runs = runs_of(self._source.expanded(desired))
        wanted = read_consolidated(self._source, runs, SnapshotFilter(time), memory_bytes=share)
        for table in merge_runs([persisted, wanted], memory_bytes=share):
            yield table
            self.check_open()

    def close(self) -> None:
        """Releases the blobs. Idempotent."""
        self._finalizer()

    def check_open(self) -> None:
        """Raises InvalidUsage once the snapshot was closed."""
        if not self._finalizer.alive:
            raise InvalidUsage(f"the snapshot of {self._source.shard_id} at {self.as_of} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Snapshot({self._source.shard_id} at {self.as_of}, {len(self._named)} batches)"

    @cached_property
    def _contents(self) -> Contents:
        """The selection to read. It is made at first use, which fetches listings of parts."""
        times = Times(last=self.as_of)
        batches = self._source.expanded(self._named)
        selection = select(batches, where=self._where, times=times, audited=self._audited, is_of_contents=True)
        self._source.metrics.count("stats_skipped_parts", selection.skipped_parts, shard=self._source.shard_id)
        return Contents(
            self._source,
            selection.batches,
            self.as_of,
            where=self._where,
            projection=self._projection,
            audits=selection.audits,
        )


def _retracted(table: pa.Table, time: int) -> pa.Table:
    """The updates that retract the rows of `table` at `time`."""
    columns = [
        table.column("key"),
        table.column("val"),
        constant(time, table.num_rows),
        pc.negate_checked(table.column("diff")),
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _record_batches(snapshot: Snapshot, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Keeps `snapshot`, and with it the lease, alive until the last batch was taken. Raises InvalidUsage once the snapshot was closed,
    because blobs that are not yet fetched may then be collected.
    """
    snapshot.check_open()
    for table in tables:
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            yield batch
            snapshot.check_open()
