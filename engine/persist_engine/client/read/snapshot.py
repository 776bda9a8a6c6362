"""Snapshot: the contents of a shard at one time, consolidated, as a table, a stream, or disjoint splits for many readers.

This module owns a pin on the version of the snapshot until `close`. It knows nothing of how leases are managed (client.read.leased) or how
rows are merged (parts).
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

#: Memory of a read into a table, as READ_MEMORY_BYTES: beside all rows, larger pieces cost no more than many small ones.
TABLE_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SinceAhead(Refusal):
    """The answer to a read at a time that is no longer readable: the shard can only be read at or past `since`. Using it as a snapshot
    raises InvalidUsage with both times.
    """

    since: Antichain
    as_of: int

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
    """Rows (key, val, time = as_of, diff), sorted by (key, val), each (key, val) once, never with diff 0. Restricted to rows that pass
    `where` and to the fields `columns`, if the reader gave them. The projection does not merge rows: two of them may look alike when not
    all fields are shown.

    Reading may be repeated and gives the same rows. The blobs are kept from collection until `close`, the end of the `with` block, or until
    the snapshot is garbage-collected.
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
        """The schema of the tables that this yields."""
        return self.schema.updates_schema if self._projection is None else self._projection.updates_schema

    @property
    def rows_estimate(self) -> int:
        """An upper bound of the number of rows, known without reading any part (listings of parts are read, if there are any)."""
        return sum(batch.rows for batch in self._contents.batches)

    @property
    def bytes_estimate(self) -> int:
        """Bytes that a full read fetches; as `rows_estimate`."""
        return sum(batch.size_bytes for batch in self._contents.batches)

    def to_table(self) -> pa.Table:
        """All rows as one table."""
        return pa.Table.from_batches(self.to_batches(memory_bytes=TABLE_MEMORY_BYTES), schema=self.updates_schema)

    def to_batches(
        self, *, memory_bytes: int = READ_MEMORY_BYTES, on_fetched: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """All rows as a stream of non-empty record batches, merged while reading within about `memory_bytes`.

        `on_fetched` receives the size in bytes of every part when the merge takes it. Storage errors are retried. MissingBlob and
        CorruptData name the key.
        """
        self.check_open()
        return _record_batches(self, self._contents.tables(memory_bytes=memory_bytes, on_fetched=on_fetched))

    def to_reader(self) -> pa.RecordBatchReader:
        """The same stream as a reader of Arrow. The snapshot must stay open until its end."""
        return pa.RecordBatchReader.from_batches(self.updates_schema, self.to_batches())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def count(self) -> int:
        """The number of rows, each counted diff times. Reads only parts that statistics and sums in state do not cover."""
        self.check_open()
        return self._contents.count(self._named)

    def aggregates(self, fields: Sequence[str] = ()) -> Aggregates | None:
        """The number of rows, and of each of `fields` (`key.<field>` or `val.<field>`, whatever `columns` says) the nulls and the least and
        greatest value, as far as state proves them. None when it does not prove that each part shows all of its rows, each once. Fetches
        no part.
        """
        self.check_open()
        return aggregates(self._contents, fields)

    def splits(self, count: int, *, merged: bool = True) -> list[SnapshotSplit]:
        """At most `count` (at least one) splits by key range. Every row is in exactly one, whatever statistics the parts have.

        With `merged` False, splits may be cheaper to read: if statistics prove that no row cancels another, the rows are not merged, and a
        row may come several times, in one split or in several, with diffs that add up.

        They may be read anywhere while this snapshot stays open: a split holds no lease.
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
        # Parts that are fetched only for an audit are fetched once.
        return [replace(first, audits=contents.audits), *others]

    def plain_blobs(self) -> list[str] | None:
        """The keys of the blobs, Parquet files (spec 29.12), whose columns key and val are exactly the contents, once `where` is applied to
        them: every row there is once, and this read hides none of them but by `where`. None when that is not known, or rows are inline, or
        a blob has another footer or other Bloom filters than its part. The blobs stay while this snapshot is open.
        """
        self.check_open()
        return self._contents.plain_blobs()

    def lease_parts(self) -> list[LeasedPart]:
        """The parts to read, one by one, for others to fetch. They are neither sorted nor consolidated across parts: the same (key, val)
        may come in several, with diffs that add up. They have all fields, whatever `columns` says. Parts fetched only for an audit come
        last.

        Every part keeps its own blobs from collection until it is returned to the reader (`ReadHandle.return_part`) or the reader expires.
        The snapshot may be closed before.
        """
        self.check_open()
        contents = self._contents
        selection = Selection(contents.batches, contents.audits)
        rows = SnapshotFilter(self.as_of)
        return self._leases.lease_all(self._pin, contents.source, selection, rows=rows, where=self._where)

    def corrections(
        self, desired: Sequence[HollowBatch], *, time: int, memory_bytes: int = READ_MEMORY_BYTES
    ) -> Iterator[pa.Table]:
        """The updates at `time` that turn these rows into the rows of `desired`: desired minus persisted, consolidated and sorted. Empty
        when both are equal. `desired` are batches staged for this shard at times up to `time`; their blobs must stay until the end.

        Streams within about `memory_bytes`. Storage errors are retried. MissingBlob and CorruptData name the key.
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
        """InvalidUsage once it was closed."""
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
        """The selection to read, made at first use: listings of parts are fetched then."""
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
    """Keeps `snapshot`, and with it the lease, alive until the last batch was taken. InvalidUsage once it was closed: blobs not yet fetched
    may be collected.
    """
    snapshot.check_open()
    for table in tables:
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            yield batch
            snapshot.check_open()
