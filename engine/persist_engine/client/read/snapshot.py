"""Snapshot: the contents of a shard at one time, consolidated, as a table, a stream, or disjoint splits for many
readers.

Owns the version it was taken at until `close`. Knows nothing of leases' bookkeeping (client.read) nor of merging
(shard).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, Self

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.refusal import Refusal
from persist_engine.client.arguments import expect_count
from persist_engine.client.read.leased import LeasedPart, PartLeases, Pin
from persist_engine.client.read.splits import SnapshotSplit, choose_ranges
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain
from persist_engine.parts.contents import Contents
from persist_engine.parts.fetch import PartSource, SnapshotFilter
from persist_engine.parts.listings import expand
from persist_engine.parts.selection import Selection, Times, select
from persist_engine.rows.filter import Filter
from persist_engine.rows.projection import Projection
from persist_engine.rows.schema import Schema

#: Memory of one streaming read beside, of each run, the bytes of the part at hand and a row group or two.
READ_MEMORY_BYTES = 256 << 20
#: The same, of one that ends in a table: beside all rows, larger pieces cost no more than many small ones do.
TABLE_MEMORY_BYTES = 1 << 30
#: Rows of one record batch: large enough for vectorised consumers, small enough to show progress.
BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class SinceAhead(Refusal):
    """The answer to a read that came too late: the shard can only be read at or past `since`. Using it as a snapshot
    raises InvalidUsage naming both.
    """

    since: Antichain
    as_of: int

    @property
    def meaning(self) -> str:
        """See Refusal."""
        end = "the reader has none left" if self.since.is_empty() else f"read at {self.since.time} or later"
        text = f"cannot read at as_of {self.as_of}: times before since {self.since} can no longer be told apart"
        return f"{text}; {end}"

    def to_table(self) -> NoReturn:
        """Raises."""
        self.refuse("to_table")

    def to_batches(self) -> NoReturn:
        """Raises."""
        self.refuse("to_batches")

    def splits(self, _count: int) -> NoReturn:
        """Raises."""
        self.refuse("splits")

    def count(self) -> NoReturn:
        """Raises."""
        self.refuse("count")


class Snapshot:
    """Rows (key, val, time = as_of, diff), sorted by (key, val), each (key, val) once, never with diff 0; of those that
    pass `where`, and with the fields `columns`, where the reader said so. The rows are those of the whole: two of them may
    look alike when not all fields are shown.

    Reading may be repeated and gives the same rows. The blobs read are held back from collection until `close`, the
    end of the `with` block, or until nobody refers to the snapshot any more.
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
        """Key and value schema of the shard's rows."""
        return self._source.schema

    @property
    def updates_schema(self) -> pa.Schema:
        """Schema of the tables that come out."""
        return self.schema.updates_schema if self._projection is None else self._projection.updates_schema

    @property
    def rows_estimate(self) -> int:
        """An upper bound of the number of rows, known without reading (but for listings of parts, where there are any)."""
        return sum(batch.rows for batch in self._contents.batches)

    @property
    def bytes_estimate(self) -> int:
        """Bytes that a full read fetches; as `rows_estimate`."""
        return sum(batch.size_bytes for batch in self._contents.batches)

    def to_table(self) -> pa.Table:
        """Everything at once."""
        return pa.Table.from_batches(self.to_batches(memory_bytes=TABLE_MEMORY_BYTES), schema=self.updates_schema)

    def to_batches(
        self, *, memory_bytes: int = READ_MEMORY_BYTES, on_fetched: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Everything as a stream of non-empty record batches, merged as it is read within about `memory_bytes`.

        `on_fetched` is told the bytes of every part that was taken up. Storage errors are retried;
        MissingBlob and CorruptData name the key.
        """
        self.check_open()
        return _record_batches(self, self._contents.tables(memory_bytes=memory_bytes, on_fetched=on_fetched))

    def count(self) -> int:
        """The number of rows, each counted diff times. Reads only what statistics and sums in state do not tell."""
        self.check_open()
        return self._contents.count(self._named)

    def splits(self, count: int) -> list[SnapshotSplit]:
        """At most `count` (at least one) splits by key range: every row is in exactly one, whatever statistics the
        parts have.

        Read them anywhere while this snapshot stays open: a split holds no lease.
        """
        self.check_open()
        expect_count(count, "count", least=1)
        contents = self._contents
        ranges = choose_ranges(contents.batches, self.schema, count)
        first, *others = (SnapshotSplit.of(contents, key_range) for key_range in ranges)
        # What is fetched for an audit only is fetched once.
        return [replace(first, audits=contents.audits), *others]

    def lease_parts(self) -> list[LeasedPart]:
        """The parts to read, one by one, for others to fetch: neither sorted nor consolidated across parts, so the same
        (key, val) may come in several, with diffs that add up; with all fields, whatever `columns` says. Those that are
        fetched for an audit only come last.

        Every part keeps its blobs from collection by itself until it is returned to the reader (`ReadHandle.return_part`)
        or the reader expires; the snapshot may be closed before.
        """
        self.check_open()
        contents = self._contents
        selection = Selection(contents.batches, contents.audits)
        rows = SnapshotFilter(self.as_of)
        return self._leases.lease_all(self._pin, contents.source, selection, rows=rows, where=self._where)

    def close(self) -> None:
        """Let go of the blobs. Idempotent."""
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
        """What to read, chosen when it is first asked for: listings of parts are fetched then."""
        times = Times(last=self.as_of)
        selection = select(expand(self._source, self._named), where=self._where, times=times, audited=self._audited)
        self._source.metrics.count("stats_skipped_parts", selection.skipped_parts, shard=self._source.shard_id)
        return Contents(
            self._source,
            selection.batches,
            self.as_of,
            where=self._where,
            projection=self._projection,
            audits=selection.audits,
        )


def _record_batches(snapshot: Snapshot, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    """`snapshot` is kept alive, and with it the lease, until the last batch was taken. InvalidUsage once it was closed:
    what is not fetched yet may be collected.
    """
    snapshot.check_open()
    for table in tables:
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            yield batch
            snapshot.check_open()
