"""Snapshot: the contents of a shard at one time, consolidated, as a table, a stream, or disjoint splits for many
readers.

Owns the version it was taken at until `close`. Knows nothing of leases' bookkeeping (client.read) nor of merging
(shard).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, Self

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.client.splits import SnapshotSplit, choose_ranges
from persist_engine.codec.schema import Schema
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain
from persist_engine.shard.fetch import PartSource, SnapshotFilter, read_consolidated, runs_of
from persist_engine.shard.runs import expand

#: Memory of one streaming read beside, of each run, the bytes of the part at hand and a row group or two.
READ_MEMORY_BYTES = 256 << 20
#: Rows of one record batch: large enough for vectorised consumers, small enough to show progress.
BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class SinceAhead:
    """The answer to a read that came too late: the shard can only be read at or past `since`. Using it as a snapshot
    raises.
    """

    since: Antichain
    as_of: int

    def to_table(self) -> NoReturn:
        """Raises InvalidUsage naming both frontiers."""
        raise InvalidUsage(
            f"cannot read at as_of {self.as_of}: times before since {self.since} can no longer be told apart",
            as_of=self.as_of,
            since=self.since,
        )

    def to_batches(self) -> NoReturn:
        """Raises InvalidUsage naming both frontiers."""
        self.to_table()

    def splits(self, _count: int) -> NoReturn:
        """Raises InvalidUsage naming both frontiers."""
        self.to_table()

    def __iter__(self) -> NoReturn:
        self.to_table()


class Snapshot:
    """Rows (key, val, time = as_of, diff), sorted by (key, val), each (key, val) once, never with diff 0.

    Reading may be repeated and gives the same rows. The blobs read are held back from collection until `close`, the
    end of the `with` block, or until nobody refers to the snapshot any more.
    """

    def __init__(
        self, *, source: PartSource, batches: tuple[HollowBatch, ...], as_of: int, release: Callable[[], None]
    ) -> None:
        self._source = source
        self._named = batches
        self.as_of = as_of
        self._finalizer = weakref.finalize(self, release)

    @property
    def schema(self) -> Schema:
        """Key and value schema of the rows."""
        return self._source.schema

    @property
    def rows_estimate(self) -> int:
        """An upper bound of the number of rows, known without reading."""
        return sum(batch.rows for batch in self._named)

    @property
    def bytes_estimate(self) -> int:
        """Bytes that a full read fetches."""
        return sum(batch.size_bytes for batch in self._named)

    def to_table(self) -> pa.Table:
        """Everything at once."""
        return pa.Table.from_batches(self.to_batches(), schema=self.schema.updates_schema)

    def to_batches(
        self, *, memory_bytes: int = READ_MEMORY_BYTES, on_fetched: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Everything as a stream of non-empty record batches, merged as it is read within about `memory_bytes`.

        `on_fetched` is told the bytes of every part that was taken up. Storage errors are retried;
        MissingBlob and CorruptData name the key.
        """
        self._check_open()
        runs = runs_of(self._batches)
        tables = read_consolidated(
            self._source, runs, SnapshotFilter(self.as_of), memory_bytes=memory_bytes, on_fetched=on_fetched
        )
        return _record_batches(self, tables)

    def splits(self, count: int) -> list[SnapshotSplit]:
        """At most `count` (at least one) splits by key range: every row is in exactly one, whatever statistics the
        parts have.

        Read them anywhere while this snapshot stays open: a split holds no lease.
        """
        self._check_open()
        if count < 1:
            raise InvalidUsage(f"a snapshot is cut into at least 1 split, not {count}")
        ranges = choose_ranges(self._batches, self.schema, count)
        return [SnapshotSplit.of(self._source, self._batches, self.as_of, key_range) for key_range in ranges]

    def close(self) -> None:
        """Let go of the blobs. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Snapshot({self._source.shard_id} at {self.as_of}, {len(self._named)} batches)"

    @cached_property
    def _batches(self) -> tuple[HollowBatch, ...]:
        """With their hollow runs expanded; fetched when it is first read."""
        return expand(self._source, self._named)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise InvalidUsage(f"the snapshot of {self._source.shard_id} at {self.as_of} was closed")


def _record_batches(snapshot: Snapshot, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    """`snapshot` is kept alive, and with it the lease, until the last batch was taken."""
    for table in tables:
        yield from table.to_batches(max_chunksize=BATCH_ROWS)
    del snapshot
