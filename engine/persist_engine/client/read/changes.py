"""Changes: the difference between two times of a shard, as updates or as row changes.

This module owns a pin, until `close`, on the version that it reads. It knows nothing of how leases are managed (client.read.leased) or how
rows are merged (parts).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Self, get_args

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.client.arguments import expect_count
from persist_engine.client.read.change_splits import ChangesRead, ChangesSplit, Shape
from persist_engine.client.read.leased import Pin
from persist_engine.client.read.pieces import BATCH_ROWS, READ_MEMORY_BYTES
from persist_engine.model.batch import HollowBatch
from persist_engine.parts.even_ranges import affordable_ranges
from persist_engine.parts.fetch import ChangesFilter, PartSource
from persist_engine.parts.selection import Times, select
from persist_engine.rows.filter import Filter
from persist_engine.rows.projection import Projection
from persist_engine.rows.row_changes import changes_schema


class Changes:
    """The changes after `after`, up to and including `upto`, in one of two shapes. With `after` -1 they are all changes; those before
    `since` are shown at since:

    - "updates": key, val, time, diff; sorted by (key, val, time), each once, never with diff 0.
    - "rows": key, val, time, change, which is insert, delete, update_before or update_after (rows.row_changes); sorted by (key, time).

    Reading may be repeated and gives the same rows. The blobs are protected from collection until `close`, the end of the `with` block, or
    until the object is garbage-collected.
    """

    def __init__(
        self,
        *,
        source: PartSource,
        batches: tuple[HollowBatch, ...],
        after: int,
        upto: int,
        since: int,
        shape: Shape,
        pin: Pin,
        where: Filter | None,
        projection: Projection | None,
        audited: Callable[[], bool],
    ) -> None:
        if shape not in get_args(Shape):
            raise InvalidUsage(f"changes come as {' or '.join(get_args(Shape))}, not as {shape!r}")
        self.after = after
        self.upto = upto
        self.since = since
        self.shape = shape
        self._source = source
        # The other batches cannot hold changes after `after`, because all their times are before their upper.
        self._named = tuple(batch for batch in batches if after < 0 or not batch.desc.upper.less_equal(after + 1))
        self._where, self._projection, self._audited = where, projection, audited
        self._finalizer = weakref.finalize(self, pin.release)

    @property
    def updates_schema(self) -> pa.Schema:
        """The schema of the tables that a read yields."""
        whole = self._source.schema
        if self.shape == "rows":
            rows = changes_schema(whole)
            return rows if self._projection is None else self._projection.shown(rows)
        return whole.updates_schema if self._projection is None else self._projection.updates_schema

    @property
    def bytes_estimate(self) -> int:
        """The bytes that a full read fetches."""
        return sum(batch.size_bytes for batch in self._read.batches)

    def to_table(self) -> pa.Table:
        """All changes as one table."""
        return pa.Table.from_batches(self.to_batches(), schema=self.updates_schema)

    def to_batches(
        self, *, memory_bytes: int = READ_MEMORY_BYTES, on_fetched: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """All changes as a stream of non-empty record batches, merged while reading within about `memory_bytes` (the shape "rows" also
        holds all changes of one key in memory). Otherwise like `Snapshot.to_batches`.
        """
        self._check_open()
        return self._batches(memory_bytes, on_fetched)

    def _batches(self, memory_bytes: int, on_fetched: Callable[[int], None] | None) -> Iterator[pa.RecordBatch]:
        self._check_open()
        for table in self._read.tables(self._source, memory_bytes=memory_bytes, on_fetched=on_fetched):
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                yield batch
                self._check_open()  # after `close`, blobs that are not yet fetched may be collected

    def splits(self, count: int) -> list[ChangesSplit]:
        """At most `count` (at least one) pieces by key range. Every change is in exactly one, and all changes of a key are in the same one.

        The pieces may be read anywhere, but only while these changes stay open, because a piece holds no lease.
        """
        self._check_open()
        expect_count(count, "count", least=1)
        read = self._read
        ranges = affordable_ranges(read.batches, self._source.schema, count)
        first, *others = (ChangesSplit.of(self._source, read, key_range) for key_range in ranges)
        # Only the first piece has the audits, so that parts fetched only for an audit are fetched once.
        return [replace(first, audits=read.audits), *others]

    def close(self) -> None:
        """Releases the blobs. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Changes({self._source.shard_id} after {self.after} up to {self.upto}, {len(self._named)} batches)"

    @cached_property
    def _read(self) -> ChangesRead:
        """The selection to read. It is made at first use, which fetches listings of parts."""
        times = Times(first=self.after + 1, last=self.upto)
        selection = select(self._source.expanded(self._named), where=self._where, times=times, audited=self._audited)
        self._source.metrics.count("stats_skipped_parts", selection.skipped_parts, shard=self._source.shard_id)
        return ChangesRead(
            selection.batches,
            ChangesFilter(self.after, self.upto, self.since),
            self.shape,
            where=self._where,
            projection=self._projection,
            audits=selection.audits,
        )

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise InvalidUsage(f"the changes of {self._source.shard_id} up to {self.upto} were closed")
