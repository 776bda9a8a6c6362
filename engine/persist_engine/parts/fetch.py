"""Reads the rows of a shard. Snapshots, splits of snapshots, listeners and compactions all read here, and differ only in their filter (spec
13.8).

This module knows nothing of state, leases or handles. The caller holds the lease that keeps the blobs alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from persist_engine.model.batch import HollowBatch, RunOrder
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.parts.chains import chained
from persist_engine.parts.consolidate import merge_runs
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.read_ahead import FetchAhead, RunReader, RunToRead, Shape, Workers
from persist_engine.parts.sifting import without_settled
from persist_engine.parts.source import PartSource
from persist_engine.rows import updates
from persist_engine.rows.filter import Filter

__all__ = [
    "ChangesFilter",
    "CompactionFilter",
    "ListenFilter",
    "Matching",
    "PartSource",
    "RowFilter",
    "RunToRead",
    "SnapshotFilter",
    "read_consolidated",
    "read_parts",
    "runs_of",
]

#: A read of fewer bytes runs in the calling thread, because starting workers would cost more than it saves.
THREADED_BYTES_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class CompactionFilter:
    """Keeps every row and advances times to `since`. If `since` is empty, times stay as they are."""

    since: Antichain

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return table if self.since.is_empty() else updates.advance_times(table, self.since)

    def seen(self, time: int) -> int:
        """The time that `apply` gives to a row at `time`."""
        return time if self.since.time is None else max(time, min(self.since.time, DATA_TIME_MAX))


@dataclass(frozen=True, slots=True)
class SnapshotFilter:
    """Keeps rows at or before `as_of`, and shows all of them at time `as_of`."""

    as_of: int

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return updates.times_at(table, self.as_of)

    def seen(self, time: int) -> int:
        """The time that `apply` gives to a row at `time`; `time` itself when the row does not pass."""
        return max(time, min(self.as_of, DATA_TIME_MAX))

    def without_settled(self, table: pa.Table) -> pa.Table:
        """See `without_settled`."""
        return without_settled(table, self.as_of)


@dataclass(frozen=True, slots=True)
class ListenFilter:
    """Keeps rows after `as_of` and at or past `lower`, unchanged. `lower` is the listener's frontier: compaction may have merged rows that
    the listener already emitted into this batch (spec 20, bug 19).
    """

    as_of: int
    lower: int

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return updates.time_filter(table, Antichain.of(max(self.as_of + 1, self.lower)), Antichain.empty())

    def seen(self, time: int) -> int:
        """The time that `apply` gives to a row at `time`."""
        return time


@dataclass(frozen=True, slots=True)
class ChangesFilter:
    """Keeps rows after `after` (-1: from the beginning) and at or before `upto`. Times before `since` become `since`."""

    after: int
    upto: int
    since: int = 0

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        rows = updates.time_filter(table, Antichain.of(self.after + 1), Antichain.of(self.upto + 1))
        return updates.advance_times(rows, Antichain.of(self.since)) if self.since else rows

    def seen(self, time: int) -> int:
        """The time that `apply` gives to a row at `time`."""
        return max(time, self.since)


@dataclass(frozen=True, slots=True)
class Matching:
    """Keeps the rows that pass both `rows` and `where`. Equal rows pass together, so this filter may run before consolidation."""

    rows: SnapshotFilter | ListenFilter | ChangesFilter
    where: Filter

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return self.where.apply(self.rows.apply(table))

    def seen(self, time: int) -> int:
        """The time that `apply` gives to a row at `time`; `time` itself when the row does not pass."""
        return self.rows.seen(time)

    @property
    def without_settled(self) -> Callable[[pa.Table], pa.Table] | None:
        """The method `without_settled` of `rows`, if it has one."""
        return getattr(self.rows, "without_settled", None)


RowFilter = CompactionFilter | SnapshotFilter | ListenFilter | ChangesFilter | Matching


def runs_of(batches: Iterable[HollowBatch], key_range: KeyRange | None = None) -> list[RunToRead]:
    """The runs to merge for `batches`, without parts that cannot hold rows in `key_range`. A run whose order is not that of this code is
    split: each of its parts is sorted after its fetch and merged as a run of its own.
    """
    runs: list[RunToRead] = []
    for batch in batches:
        for meta, parts in batch.part_runs():
            wanted = tuple(part for part in parts if key_range is None or key_range.may_hold(part))
            if meta.order is RunOrder.STRUCTURED and wanted:
                runs.append(RunToRead.of(batch.desc, wanted, is_sorted=True, is_balanced=meta.is_balanced))
            elif meta.order is not RunOrder.STRUCTURED:
                runs.extend(RunToRead.of(batch.desc, (part,), is_sorted=False) for part in wanted)
    return runs


def read_consolidated(
    source: PartSource,
    runs: Sequence[RunToRead],
    row_filter: RowFilter,
    *,
    memory_bytes: int,
    key_range: KeyRange | None = None,
    on_fetched: Callable[[int], None] | None = None,
) -> Iterator[pa.Table]:
    """Streams the rows of `runs` after the filters, consolidated and sorted by (key, val, time).

    Uses a quarter of `memory_bytes` for blobs fetched ahead, half for the merge, and in addition the bytes of the current part of each run.
    Background threads fetch blobs, decode and merge, unless there is little to do. Closing the iterator stops them. `on_fetched` receives
    the size in bytes of every part when the merge takes it, in the reader's thread.
    """
    runs = chained(_without_newer(source, runs), source.schema)
    ahead = FetchAhead(source, runs, budget_bytes=memory_bytes // 4, on_fetched=on_fetched)
    workers = Workers(is_worthwhile=_bytes_of(runs) >= THREADED_BYTES_MIN)
    merge_bytes = memory_bytes // 2

    def filtered(table: pa.Table) -> pa.Table:
        table = row_filter.apply(table)
        return table if key_range is None else key_range.apply(table)

    shape = Shape(filtered, row_filter.seen, getattr(row_filter, "without_settled", None))
    try:
        streams = [RunReader(ahead, index, shape, workers.submit, merge_bytes) for index in range(len(runs))]
        if workers.are_there:
            for stream in streams:
                stream.begin()
        yield from merge_runs(streams, memory_bytes=merge_bytes, submit=workers.submit)
    finally:
        ahead.close()
        workers.close()


def _without_newer(source: PartSource, runs: Sequence[RunToRead]) -> list[RunToRead]:
    """`runs`, with each run that has parts of newer schemas split into its parts: without the newer fields, its rows are not in order."""
    out: list[RunToRead] = []
    for run in runs:
        if run.is_sorted and any(source.is_newer(part) for part in run.parts):
            out.extend(RunToRead((member,), is_sorted=False) for member in run.members)
        else:
            out.append(run)
    return out


def read_parts(source: PartSource, batch: HollowBatch, row_filter: RowFilter) -> Iterator[pa.Table]:
    """The rows of `batch` after the filter, part by part. They are neither sorted nor consolidated across parts."""
    parts = tuple(part for _, run in batch.part_runs() for part in run)
    runs = [RunToRead.of(batch.desc, parts, is_sorted=True)] if parts else []
    ahead = FetchAhead(source, runs, budget_bytes=2 * max((part.hollow_bytes for part in parts), default=0))
    try:
        for position, part in enumerate(parts):
            for table in source.decode(ahead.take(0, position), part, batch.desc):
                yield row_filter.apply(table)
    finally:
        ahead.close()


def _bytes_of(runs: Iterable[RunToRead]) -> int:
    return sum(part.hollow_bytes + part.inline_bytes for run in runs for part in run.parts)
