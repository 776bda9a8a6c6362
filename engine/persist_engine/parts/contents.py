"""The contents of a shard at a time, or a piece of them, as rows or as a count. Each read takes the cheapest way that is provably exact.

    every read   does not fetch parts that cannot hold a wanted row (parts.selection)
    rows         are merged and consolidated; if all are known to be distinct, there is no merge, and only the wanted columns are read
    rows apart   are read part by part, if statistics prove that no row cancels another
    count        adds sums of diffs from state; reads only times and diffs of the parts whose sums are not exact

This module knows nothing of leases: the caller keeps the blobs alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.codec.keys import blob_key
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunKind, RunMeta, RunOrder, RunPart
from persist_engine.model.frontier import Antichain, Description
from persist_engine.parts.chains import chained
from persist_engine.parts.fetch import (
    Matching,
    PartSource,
    RowFilter,
    SnapshotFilter,
    read_consolidated,
    runs_of,
)
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.read_ahead import FetchAhead, RunToRead
from persist_engine.parts.selection import Skipped, audit
from persist_engine.parts.source import Fetched
from persist_engine.rows.filter import Filter
from persist_engine.rows.projection import Projection
from persist_engine.rows.updates import diffs_sum, with_canonical_floats

#: The number of blobs whose ends are checked at once. Each check is one small request, and a shard may have thousands of blobs.
_CHECK_THREADS = 16


@dataclass(frozen=True)
class Contents:
    """A read of `batches`, which are already selected and expanded, and the form in which it shows rows."""

    source: PartSource
    batches: tuple[HollowBatch, ...]
    as_of: int
    where: Filter | None = None
    projection: Projection | None = None
    key_range: KeyRange | None = None
    audits: tuple[Skipped, ...] = ()

    def tables(self, *, memory_bytes: int, on_fetched: Callable[[int], None] | None = None) -> Iterator[pa.Table]:
        """The rows as non-empty tables. They are consolidated and sorted by (key, val) before the projection.

        Raises InvariantViolated when an audit finds that statistics are wrong.
        """
        for skipped in self.audits:
            audit(self.source, skipped, self._row_filter, self.where)
        distinct = self._distinct_rows()
        if distinct is not None:
            yield from self._handed_through(distinct, memory_bytes, on_fetched)
            return
        tables = read_consolidated(
            self._narrow,
            runs_of(self.batches, self.key_range),
            self._row_filter,
            memory_bytes=memory_bytes,
            key_range=self.key_range,
            on_fetched=on_fetched,
        )
        for table in tables:
            yield table if self.projection is None else self.projection.apply(table)

    @property
    def is_additive(self) -> bool:
        """Whether every diff is known to be positive. Then no row cancels another, so the rows of the parts are the contents without a
        merge: if several parts hold the same row, its diffs add up.
        """
        return all(self._adds(batch.desc, part) for batch in self.batches for part in batch.part_list())

    def plain_blobs(self) -> list[str] | None:
        """The keys of blobs that hold exactly the rows of the read, each with diff 1 and in the schema of the read; other rows are there
        only if `where` hides them. So a reader of their columns key and val that applies `where` gets the contents. None when a row is
        inline, is cut off or rewritten by its batch, is later than `as_of`, or is not known to count once, and when the end of a blob is
        not the end that was written.
        """
        if self.key_range is not None or self.audits:
            return None
        plain: list[tuple[Description, HollowPart]] = []
        for batch in self.batches:
            for part in batch.part_list():
                if not isinstance(part, HollowPart) or not self.counts_once(batch.desc, part):
                    return None
                plain.append((batch.desc, part))
        with ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="persist-parts") as pool:
            if not all(pool.map(lambda each: self.source.ends_as_written(each[1], each[0]), plain)):
                return None
        return [blob_key(self.source.shard_id, part.key) for _, part in plain]

    def counts_once(self, desc: Description, part: HollowPart) -> bool:
        """Whether each row of the part has diff 1 and is shown as it is stored, unless `where` hides it. Positive diffs that add up to the
        number of rows are all 1.
        """
        first, last = _times_of(part)
        if (
            not self._is_plain(part)
            or first is None
            or last is None
            or last > self.as_of
            or not desc.lower.less_equal(first)
            or desc.upper.less_equal(last)
        ):
            return False
        return self._adds(desc, part) and not part.sum_wraps and part.diffs_sum == part.rows

    def _adds(self, desc: Description, part: Part) -> bool:
        if isinstance(part, HollowPart):
            return part.stats is not None and part.stats.diff_min is not None and part.stats.diff_min > 0
        return all(
            pc.min(table.column("diff")).as_py() > 0
            for table in self.source.decode(part.data, part, desc)
            if len(table)
        )

    def tables_apart(self) -> Iterator[pa.Table]:
        """The rows as non-empty tables, part by part. They are neither merged nor sorted, so a row may come several times, with diffs that
        add up. Decodes only the requested columns. Holds two encoded parts and one row group in memory. The caller must check
        `is_additive`.
        """
        for skipped in self.audits:
            audit(self.source, skipped, self._row_filter, self.where)
        members = [(batch.desc, part) for batch in self.batches for part in batch.part_list()]
        columns = None if self.projection is None else self._needed(self.projection.names)
        for (desc, part), data in zip(members, self._fetched_ahead(members), strict=True):
            opened = self.source.open(data, part, desc, columns=columns)
            for group in range(opened.groups):
                table = self._row_filter.apply(opened.read_group(group, seen=self._row_filter.seen))
                table = table if self.key_range is None else self.key_range.apply(table)
                if table.num_rows:
                    yield with_canonical_floats(table) if self.projection is None else self.projection.apply(table)

    def _fetched_ahead(self, members: Sequence[tuple[Description, Part]]) -> Iterator[Fetched]:
        """The fetched bytes of each part. Fetches the next part while the caller decodes one."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="persist-parts")
        try:
            fetched: deque[Future[Fetched]] = deque()
            for desc, part in members:
                fetched.append(pool.submit(self._narrow.get, part, desc))
                if len(fetched) > 1:
                    yield fetched.popleft().result()
            while fetched:
                yield fetched.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def shown(self, table: pa.Table) -> pa.Table:
        """The rows of a part's `table` that the read shows."""
        return self._row_filter.apply(table)

    @property
    def _narrow(self) -> PartSource:
        """The source, without the row groups that `where` rules out. An audit reads `source`, to prove that no wanted row was skipped."""
        return self.source if self.where is None else replace(self.source, where=self.where)

    @property
    def _row_filter(self) -> RowFilter:
        rows = SnapshotFilter(self.as_of)
        return rows if self.where is None else Matching(rows, self.where)

    def _distinct_rows(self) -> RunToRead | None:
        """All parts as one run, if it is known that no two of their rows have the same key and value; otherwise None."""
        runs: list[RunToRead] = []
        for batch in self.batches:
            for meta, parts in batch.part_runs():
                if parts and not self._is_distinct(batch.desc, meta, parts):
                    return None
                runs.append(RunToRead.of(batch.desc, parts, is_sorted=True))
        chains = chained(filter(lambda run: run.members, runs), self.source.schema)
        return chains[0] if len(chains) == 1 else None

    def _is_distinct(self, desc: Description, meta: RunMeta, parts: Sequence[Part]) -> bool:
        """Whether no two rows of the run can have the same key and value. This is so when the run is marked as distinct, or when it is
        consolidated and all its rows have one time, which lies within its bounds.
        """
        if meta.order is not RunOrder.STRUCTURED or not all(map(self._is_plain, parts)):
            return False
        if meta.kind is RunKind.DISTINCT:
            return True
        times = {time for part in parts for time in _times_of(part)}
        time = times.pop() if len(times) == 1 else None
        return time is not None and desc.lower.less_equal(time) and not desc.upper.less_equal(time)

    def _is_plain(self, part: Part) -> bool:
        """Whether the part's rows are shown as stored: they have the schema of the read, and their times are not rewritten."""
        return isinstance(part, HollowPart) and part.schema_id == self.source.schema_id and part.ts_rewrite is None

    def _handed_through(
        self, run: RunToRead, memory_bytes: int, on_fetched: Callable[[int], None] | None
    ) -> Iterator[pa.Table]:
        """The wanted rows of `run` in order. Decodes only the wanted columns."""
        columns = None if self.projection is None else self._needed(self.projection.names)
        ahead = FetchAhead(self._narrow, [run], budget_bytes=memory_bytes // 4, on_fetched=on_fetched)
        wanted = self._row_filter
        try:
            for position, (desc, part, _) in enumerate(run.members):
                opened = self.source.open(ahead.take(0, position), part, desc, columns=columns)
                for group in range(opened.groups):
                    table = wanted.apply(opened.read_group(group, seen=wanted.seen, use_threads=True))
                    table = table if self.key_range is None else self.key_range.apply(table)
                    if table.num_rows:
                        yield with_canonical_floats(table) if self.projection is None else self.projection.apply(table)
        finally:
            ahead.close()

    def _needed(self, shown: Sequence[str]) -> list[str]:
        """The columns to decode, so that the read can show `shown` and apply its filters."""
        names = [*shown, *(() if self.where is None else self.where.columns)]
        if self.key_range is not None:
            names.append(f"key.{self.key_range.column}")
        return [*dict.fromkeys(names), "time", "diff"]

    def count(self, named: Sequence[HollowBatch]) -> int:
        """The number of rows that `tables` would show, each counted diff times (spec 15.8). `named` holds the batches as they are in state;
        `batches` was selected from them.

        Uses the sums of diffs in state where they are exact for this read: all rows are at or before `as_of`, wanted, and within the
        registered bounds. Reads only the other parts, and of them only times, diffs and the columns of `where`.
        """
        for skipped in self.audits:
            audit(self.source, skipped, self._row_filter, self.where)
        if self.where is None:
            # A listing's entry in state holds the sums of its parts. If these suffice, the listing is not fetched.
            total, left = self._summed(named)
            more, unknown = self._summed(self.source.expanded(left))
            total += more
        else:
            total, unknown = self._summed(self.batches)
        return total + sum(
            self._counted(batch.desc, part) for batch in unknown for _, parts in batch.part_runs() for part in parts
        )

    def _summed(self, batches: Sequence[HollowBatch]) -> tuple[int, list[HollowBatch]]:
        """The total of the sums in state that are exact, and `batches` without the parts that these sums cover."""
        total = 0
        left: list[HollowBatch] = []
        for batch in batches:
            runs: list[tuple[RunMeta, list[RunPart]]] = []
            for meta, parts in batch.runs():
                unknown: list[RunPart] = []
                for part in parts:
                    if part.diffs_sum is not None and self._is_countable(batch.desc, meta, part):
                        total += part.diffs_sum
                    else:
                        unknown.append(part)
                runs.append((meta, unknown))
            if any(parts for _, parts in runs):
                left.append(HollowBatch.of_runs(batch.desc, batch.rows, runs))
        return total, left

    def _is_countable(self, desc: Description, meta: RunMeta, part: RunPart) -> bool:
        # The sum may include rows outside the bounds (spec 20, bug 20), or be modulo 2**64.
        if meta.truncated or part.sum_wraps:
            return False
        is_visible = desc.upper <= Antichain.of(self.as_of + 1) and desc.since <= Antichain.of(self.as_of)
        if not is_visible and isinstance(part, HollowPart):
            _, last = _times_of(part)
            is_visible = last is not None and last <= self.as_of
        if not is_visible or self.where is None:
            return is_visible
        return isinstance(part, HollowPart) and self.where.must_pass(part)

    def _counted(self, desc: Description, part: Part) -> int:
        opened = self.source.open(self._narrow.get(part, desc), part, desc, columns=self._needed(()))
        return sum(diffs_sum(self._row_filter.apply(opened.read_group(group))) for group in range(opened.groups))


def _times_of(part: Part) -> tuple[int | None, int | None]:
    """The least and greatest time of the part's rows; None where unknown."""
    if not isinstance(part, HollowPart) or part.stats is None or part.ts_rewrite is not None:
        return None, None
    return part.stats.time_min, part.stats.time_max
