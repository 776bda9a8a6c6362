"""The contents of a shard as of a time, or a piece of them: rows, or how many there are, read as cheaply as can be proven.

    every read   parts that cannot hold a wanted row are not fetched (shard.selection)
    rows         merged and consolidated; or, when statistics prove that no two rows can be one, only the columns asked for
    count        sums of diffs that state knows; what it does not know is read by time and diff alone

Knows nothing of leases: whoever calls keeps the blobs alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from persist_engine.base.errors import CorruptData
from persist_engine.codec.keys import blob_key
from persist_engine.codec.part import decode_part
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunMeta, RunOrder, RunPart
from persist_engine.model.frontier import Antichain, Description
from persist_engine.parts.fetch import (
    Matching,
    PartSource,
    RowFilter,
    SnapshotFilter,
    read_consolidated,
    runs_of,
)
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.listings import expand
from persist_engine.parts.selection import Skipped, audit
from persist_engine.rows.filter import Filter
from persist_engine.rows.projection import Projection
from persist_engine.rows.updates import diffs_sum


@dataclass(frozen=True)
class Contents:
    """What of `batches`, which were selected and expanded, is to be read, and how it is shown."""

    source: PartSource
    batches: tuple[HollowBatch, ...]
    as_of: int
    where: Filter | None = None
    projection: Projection | None = None
    key_range: KeyRange | None = None
    audits: tuple[Skipped, ...] = ()

    def tables(self, *, memory_bytes: int, on_fetched: Callable[[int], None] | None = None) -> Iterator[pa.Table]:
        """The rows, consolidated and sorted by (key, val) before they are cut to the columns shown, as non-empty tables.

        InvariantViolated when an audit finds that statistics lie.
        """
        for skipped in self.audits:
            audit(self.source, skipped, self._row_filter, self.where)
        lone = self._lone_run() if self.projection is not None else None
        if lone is not None and self.projection is not None:
            for table in self._columns_of(*lone, self._needed(self.projection.names), on_fetched):
                yield self.projection.apply(table)
            return
        tables = read_consolidated(
            self.source,
            runs_of(self.batches, self.key_range),
            self._row_filter,
            memory_bytes=memory_bytes,
            key_range=self.key_range,
            on_fetched=on_fetched,
        )
        for table in tables:
            yield table if self.projection is None else self.projection.apply(table)

    @property
    def _row_filter(self) -> RowFilter:
        rows = SnapshotFilter(self.as_of)
        return rows if self.where is None else Matching(rows, self.where)

    def _lone_run(self) -> tuple[Description, tuple[HollowPart, ...]] | None:
        """The parts of the only run there is, when no two rows of it can have the same key and val: it is consolidated,
        and all of its rows are at one time, which the read sees. None when that is not known.
        """
        runs = [(batch.desc, meta, parts) for batch in self.batches for meta, parts in batch.part_runs() if parts]
        if len(runs) != 1:
            return None
        desc, meta, parts = runs[0]
        hollow = tuple(part for part in parts if isinstance(part, HollowPart) and self._is_plain(part))
        if meta.order is not RunOrder.STRUCTURED or len(hollow) != len(parts):
            return None
        times = {time for part in hollow for time in _times_of(part)}
        time = times.pop() if len(times) == 1 else None
        if time is None or time > self.as_of or not desc.lower.less_equal(time) or desc.upper.less_equal(time):
            return None
        return desc, hollow

    def _is_plain(self, part: HollowPart) -> bool:
        """Whether its rows are those stored: of the schema that is read, at the times that were written."""
        return part.schema_id == self.source.schema_id and part.ts_rewrite is None

    def _columns_of(
        self,
        desc: Description,
        parts: Sequence[HollowPart],
        names: list[str],
        on_fetched: Callable[[int], None] | None = None,
    ) -> Iterator[pa.Table]:
        """The rows of `parts` that are wanted, in order, with the columns `names` only; the next part is fetched while
        one is decoded.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="persist-columns")
        try:
            fetched = pool.submit(self.source.get, parts[0], desc)
            for index, part in enumerate(parts):
                data = fetched.result()
                if index + 1 < len(parts):
                    fetched = pool.submit(self.source.get, parts[index + 1], desc)
                if on_fetched is not None:
                    on_fetched(len(data))
                table = self._row_filter.apply(self._decoded(data, part, names))
                table = table if self.key_range is None else self.key_range.apply(table)
                if table.num_rows:
                    yield table
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _decoded(self, data: bytes, part: HollowPart, names: list[str]) -> pa.Table:
        key = blob_key(self.source.shard_id, part.key)
        table = decode_part(
            data, key=key, schema=self.source.schema, columns=names, expected_checksum=part.checksum
        ).table
        if table.num_rows != part.rows:
            raise CorruptData(f"{key}: {table.num_rows} rows, state says {part.rows}", key=key)
        return table

    def _needed(self, shown: Sequence[str]) -> list[str]:
        """The columns to decode so that `shown` can be, and what is wanted be told apart."""
        names = [*shown, *(() if self.where is None else self.where.columns)]
        if self.key_range is not None:
            names.append(f"key.{self.key_range.column}")
        return [*dict.fromkeys(names), "time", "diff"]

    def count(self, named: Sequence[HollowBatch]) -> int:
        """How many rows `tables` would show, each counted diff times (spec 15.8). `named` are the batches as state has
        them, of which `batches` is the selection.

        Sums of diffs in state are taken where they hold for the read: all rows at or before `as_of`, wanted, and within the
        registered bounds. Only other parts are read, and of them only times, diffs and what `where` looks at.
        """
        for skipped in self.audits:
            audit(self.source, skipped, self._row_filter, self.where)
        if self.where is None:
            # Listings sum up what they lead to: where these sums will do, nobody looks into them.
            total, left = self._summed(named)
            more, unknown = self._summed(expand(self.source, left))
            total += more
        else:
            total, unknown = self._summed(self.batches)
        return total + sum(
            self._counted(batch.desc, meta, part)
            for batch in unknown
            for meta, parts in batch.part_runs()
            for part in parts
        )

    def _summed(self, batches: Sequence[HollowBatch]) -> tuple[int, list[HollowBatch]]:
        """The sum of diffs that state knows to be the count, and `batches` without the parts that it counts."""
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
        if meta.truncated or part.sum_wraps:  # a sum of rows that nobody sees (spec 20, bug 20), or modulo 2**64
            return False
        is_seen = desc.upper <= Antichain.of(self.as_of + 1) and desc.since <= Antichain.of(self.as_of)
        if not is_seen and isinstance(part, HollowPart):
            _, last = _times_of(part)
            is_seen = last is not None and last <= self.as_of
        if not is_seen or self.where is None:
            return is_seen
        return isinstance(part, HollowPart) and self.where.must_pass(part)

    def _counted(self, desc: Description, meta: RunMeta, part: Part) -> int:
        data = self.source.get(part, desc)
        if isinstance(part, HollowPart) and not meta.truncated and self._is_plain(part):
            return diffs_sum(self._row_filter.apply(self._decoded(data, part, self._needed(()))))
        return sum(diffs_sum(self._row_filter.apply(table)) for table in self.source.decode(data, part, desc))


def _times_of(part: HollowPart) -> tuple[int | None, int | None]:
    """The least and greatest time of its rows, as far as known."""
    if part.stats is None or part.ts_rewrite is not None:
        return None, None
    return part.stats.time_min, part.stats.time_max
