"""From part descriptors to rows: get the blob, verify it, decode it, cut it to its registered bounds, filter it (spec
10.8, 13.8).

`read_consolidated` is the one way rows leave a shard: snapshots, splits of snapshots and compactions differ in their
filter only. Knows nothing of state, leases or handles: whoever calls holds the lease that keeps the blobs alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from persist_engine.base.errors import CorruptData, MissingBlob
from persist_engine.base.metrics import Metrics
from persist_engine.codec import updates
from persist_engine.codec.filter import Filter
from persist_engine.codec.inline_part import decode_inline
from persist_engine.codec.keys import blob_key
from persist_engine.codec.part import StreamedPart, stream_part
from persist_engine.codec.schema import Schema
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunOrder
from persist_engine.model.frontier import MINIMUM, Antichain, Description
from persist_engine.model.ids import ShardId
from persist_engine.shard.consolidate import merge_runs
from persist_engine.shard.key_range import KeyRange
from persist_engine.shard.retry import Retry
from persist_engine.storage.blob import Blob

#: Blobs being fetched at once by one reader: enough to hide an object store's latency behind a merge on one core.
FETCH_THREADS = 4


@dataclass(frozen=True, slots=True)
class CompactionFilter:
    """Keep every row; times advance to `since` (an empty since distinguishes nothing, so times stay as they are)."""

    since: Antichain

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return table if self.since.is_empty() else updates.advance_times(table, self.since)


@dataclass(frozen=True, slots=True)
class SnapshotFilter:
    """Rows at or before `as_of`, all seen at `as_of`."""

    as_of: int

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        passed = updates.time_filter(table, MINIMUM, Antichain.of(self.as_of + 1))
        return updates.advance_times(passed, Antichain.of(self.as_of))


@dataclass(frozen=True, slots=True)
class ListenFilter:
    """Rows after `as_of` and at or past `lower`, unchanged. `lower` is the listener's frontier: compaction may have
    merged rows it has already given out into the batch at hand (spec 20, bug 19).
    """

    as_of: int
    lower: int

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return updates.time_filter(table, Antichain.of(max(self.as_of + 1, self.lower)), Antichain.empty())


@dataclass(frozen=True, slots=True)
class ChangesFilter:
    """Rows after `after` (-1: from the beginning) and at or before `upto`, unchanged."""

    after: int
    upto: int

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return updates.time_filter(table, Antichain.of(self.after + 1), Antichain.of(self.upto + 1))


@dataclass(frozen=True, slots=True)
class Matching:
    """What `rows` lets pass and `where` too. Equal rows pass together, so it may stand before consolidation."""

    rows: SnapshotFilter | ListenFilter | ChangesFilter
    where: Filter

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, with their times as the reader sees them."""
        return self.where.apply(self.rows.apply(table))


RowFilter = CompactionFilter | SnapshotFilter | ListenFilter | ChangesFilter | Matching


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where one shard's parts are and how they are read."""

    shard_id: ShardId
    blob: Blob
    schema: Schema
    retry: Retry
    metrics: Metrics
    schema_id: int | None = None
    """Of `schema`, where parts of newer ones may be met: they are shown without what came since."""

    def is_newer(self, part: Part) -> bool:
        """Whether `part` was written under a newer schema than the one asked for: its order is then not ours."""
        return self.schema_id is not None and part.schema_id is not None and part.schema_id > self.schema_id

    def get(self, part: Part, desc: Description) -> bytes:
        """The part's bytes as they lie in blob. Retries storage errors; MissingBlob names the key."""
        if not isinstance(part, HollowPart):
            return part.data
        key = blob_key(self.shard_id, part.key)
        data = self.retry.external("fetch_part", lambda: self.blob.get(key), shard=self.shard_id)
        if data is None:
            raise MissingBlob(f"blob {key} is missing though a live state names it (batch {desc})", key=key)
        self.metrics.count("fetched_parts")
        self.metrics.count("fetched_bytes", len(data))
        self.metrics.count("shard_blob_gets", shard=self.shard_id)
        return data

    def decode(self, data: bytes, part: Part, desc: Description) -> Iterator[pa.Table]:
        """The part's rows as its batch registered them, a row group at a time: verified against the checksum in state
        (or in the part itself when it is inline), times rewritten first, then cut to [desc.lower, desc.upper).
        CorruptData names the key.
        """
        if isinstance(part, HollowPart):
            key = blob_key(self.shard_id, part.key)
            opened = stream_part(
                data,
                key=key,
                schema=self.schema,
                expected_checksum=part.checksum,
                may_be_newer=self.is_newer(part),
            )
        else:
            key = f"{self.shard_id} inline part of {desc}"
            inline = decode_inline(
                data, format_name=part.format, key=key, schema=self.schema, may_be_newer=self.is_newer(part)
            )
            opened = StreamedPart(inline.desc, inline.table.num_rows, iter([inline.table]))
        if opened.rows != part.rows:
            raise CorruptData(f"{key}: {opened.rows} rows, state says {part.rows}", key=key)
        written = opened.desc
        _check_description(written, desc, part, key)
        is_cut = part.ts_rewrite is not None or (written.lower, written.upper) != (desc.lower, desc.upper)
        for table in opened.tables:
            rows = table if part.ts_rewrite is None else updates.advance_times(table, part.ts_rewrite)
            yield updates.time_filter(rows, desc.lower, desc.upper) if is_cut else rows


def _check_description(written: Description, registered: Description, part: Part, key: str) -> None:
    """Spec 10.8: only user-written parts (since at the minimum) may be narrower in state than in blob."""
    if (written.lower, written.upper) == (registered.lower, registered.upper):
        fits = part.ts_rewrite is not None or written.since == registered.since
    else:
        upper_fits = part.ts_rewrite is not None or registered.upper <= written.upper
        fits = written.lower <= registered.lower and upper_fits and written.since == MINIMUM
    if not fits:
        raise CorruptData(f"{key}: written as {written}, registered as {registered}", key=key)


@dataclass(frozen=True, slots=True)
class RunToRead:
    """Parts to be read one after the other, under their batch's description. `is_sorted`: rows never go back over the
    run.
    """

    desc: Description
    parts: tuple[Part, ...]
    is_sorted: bool


def runs_of(batches: Iterable[HollowBatch], key_range: KeyRange | None = None) -> list[RunToRead]:
    """The runs to merge for `batches`, without parts that cannot hold rows in `key_range`. A run in another order
    than ours is taken apart: each of its parts is sorted when it is fetched and merged as a run of its own.
    """
    runs: list[RunToRead] = []
    for batch in batches:
        for meta, parts in batch.part_runs():
            wanted = tuple(part for part in parts if key_range is None or key_range.may_hold(part))
            if meta.order is RunOrder.STRUCTURED and wanted:
                runs.append(RunToRead(batch.desc, wanted, is_sorted=True))
            elif meta.order is not RunOrder.STRUCTURED:
                runs.extend(RunToRead(batch.desc, (part,), is_sorted=False) for part in wanted)
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
    """The rows of `runs` after the filters, consolidated and sorted by (key, val, time), streaming.

    Memory: a quarter of `memory_bytes` for blobs fetched ahead, half for the merge, and of each run the bytes of the
    part at hand and a row group or two. Blobs are fetched in background threads; closing the iterator stops them.
    `on_fetched` is told the bytes of every part as it is taken up, in the reader's thread.
    """
    runs = _without_newer(source, runs)
    ahead = _FetchAhead(source, runs, budget_bytes=memory_bytes // 4, on_fetched=on_fetched)
    try:
        streams = [_tables(ahead, index, row_filter, key_range) for index in range(len(runs))]
        yield from merge_runs(streams, memory_bytes=memory_bytes // 2)
    finally:
        ahead.close()


def _without_newer(source: PartSource, runs: Sequence[RunToRead]) -> list[RunToRead]:
    """`runs`, those with parts of newer schemas taken apart: without the fields that came since, rows lie in no order."""
    out: list[RunToRead] = []
    for run in runs:
        if run.is_sorted and any(source.is_newer(part) for part in run.parts):
            out.extend(RunToRead(run.desc, (part,), is_sorted=False) for part in run.parts)
        else:
            out.append(run)
    return out


def read_parts(source: PartSource, batch: HollowBatch, row_filter: RowFilter) -> Iterator[pa.Table]:
    """The rows of `batch` part by part after the filter, neither sorted nor consolidated across parts."""
    parts = tuple(part for _, run in batch.part_runs() for part in run)
    runs = [RunToRead(batch.desc, parts, is_sorted=True)] if parts else []
    ahead = _FetchAhead(source, runs, budget_bytes=2 * max((part.hollow_bytes for part in parts), default=0))
    try:
        for index in range(len(runs)):
            yield from _tables(ahead, index, row_filter, None)
    finally:
        ahead.close()


def _tables(ahead: _FetchAhead, index: int, row_filter: RowFilter, key_range: KeyRange | None) -> Iterator[pa.Table]:
    run = ahead.runs[index]
    for position, part in enumerate(run.parts):
        groups = ahead.source.decode(ahead.take(index, position), part, run.desc)
        tables = (row_filter.apply(table) for table in groups)
        if key_range is not None:
            tables = (key_range.apply(table) for table in tables)
        if run.is_sorted:
            yield from tables
        else:
            yield updates.consolidate(pa.concat_tables(tables))


class _FetchAhead:
    """Fetches blobs before they are asked for: the first part of every run, then the second, ... within a budget of
    bytes.

    What is asked for and not yet under way is fetched at once, budget or not: the merge cannot go on without it.
    Not thread-safe: one reader.
    """

    def __init__(
        self,
        source: PartSource,
        runs: Sequence[RunToRead],
        *,
        budget_bytes: int,
        on_fetched: Callable[[int], None] | None = None,
    ) -> None:
        self.source = source
        self.runs = runs
        self._budget_bytes = budget_bytes
        self._on_fetched = on_fetched
        self._held_bytes = 0
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="persist-fetch")
        self._pending: dict[tuple[int, int], Future[bytes]] = {}
        longest = max((len(run.parts) for run in runs), default=0)
        rounds = ((index, at) for at in range(longest) for index, run in enumerate(runs) if at < len(run.parts))
        self._queue = iter([slot for slot in rounds if isinstance(self._part(slot), HollowPart)])
        self._next = next(self._queue, None)
        self._taken: set[tuple[int, int]] = set()
        self._fill()

    def take(self, index: int, position: int) -> bytes:
        """The bytes of part `position` of run `index`; each may be taken once."""
        slot = (index, position)
        self._taken.add(slot)
        future = self._pending.pop(slot, None)
        if future is None:
            data = self.source.get(self._part(slot), self.runs[index].desc)
        else:
            data = future.result()
            self._held_bytes -= self._part(slot).hollow_bytes
        self._fill()
        if self._on_fetched is not None:
            self._on_fetched(len(data))
        return data

    def close(self) -> None:
        """Stop fetching. What is under way ends in the background (waiting could mean: until the store is back).
        Idempotent.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _part(self, slot: tuple[int, int]) -> Part:
        return self.runs[slot[0]].parts[slot[1]]

    def _fill(self) -> None:
        while self._next is not None:
            slot = self._next
            if slot not in self._taken:
                part = self._part(slot)
                if self._held_bytes + part.hollow_bytes > self._budget_bytes:
                    return
                self._held_bytes += part.hollow_bytes
                self._pending[slot] = self._pool.submit(self.source.get, part, self.runs[slot[0]].desc)
            self._next = next(self._queue, None)
