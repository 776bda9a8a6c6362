"""Chain: the updates of one stretch of time, consolidated when that saves more than it costs (spec 17.6). Pure.

    runs     [ main: consolidated ][ sorted ][ sorted ] ...     in memory or spilled
    pending  [ table ][ table ] ...                             as received, in memory

Policy: beside a main run of `main` rows, at most max(rows_min, main / (dampener + 1)) loose rows are held; beyond that, all
rows are consolidated into one run. A snapshot followed by its negation therefore takes at most about 1 + 1 / (dampener + 1)
snapshots, and a row is sorted about dampener + 2 times, however many inserts there are. Nothing has to be shrunk: cancelled
rows are gone, and the allowance follows the remaining rows.

SUBTLE: stored times may lag behind the buffer's since; each read advances them. max(time, since) preserves the order of rows,
so sorted runs stay sorted and nothing is rewritten when since advances. But rows that differed only in time become equal, so
everything is consolidated again before a merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from persist_engine.flow.correction_chunks import Chunk, ChunkStore, Run, UpdateLaws, as_of, rows_of
from persist_engine.model.frontier import Antichain

#: A chain with more runs than this merges all runs but the main one first, because each run in a merge needs a window in memory.
RUNS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPolicy:
    """The limits of a chain."""

    rows_min: int
    """The number of loose rows that are always tolerated. With fewer, consolidating costs more in calls than in rows."""
    dampener: int
    """Beside n consolidated rows, n / (dampener + 1) loose rows are tolerated. A larger value means more work and less memory."""
    chunk_bytes: int
    """The approximate size of a chunk, the unit of spilling and reading back."""
    merge_bytes: int
    """The memory of a streaming merge. Rows of less than a quarter of it are sorted in one piece instead."""


class Chain:
    """See the module. Not thread-safe."""

    def __init__(self, store: ChunkStore, laws: UpdateLaws, policy: ChainPolicy) -> None:
        self._store, self._laws, self._policy = store, laws, policy
        self.runs: list[Run] = []
        self.pending: list[pa.Table] = []
        self.pending_bytes = 0
        self.rows = 0
        self.loose_rows = 0
        """The number of rows outside the main run; all rows if there is none."""

    @property
    def capacity_rows(self) -> int:
        """The number of rows that fit before the chain consolidates."""
        main = self.rows - self.loose_rows
        return main + max(self._policy.rows_min, main // (self._policy.dampener + 1))

    @property
    def memory_bytes(self) -> int:
        """The bytes in memory."""
        return self.pending_bytes + sum(
            chunk.size_bytes for run in self.runs for chunk in run if chunk.table is not None
        )

    def push(self, table: pa.Table) -> None:
        """Add rows in any order."""
        if not table.num_rows:
            return
        self.pending.append(table)
        self.pending_bytes += table.nbytes
        self.rows += table.num_rows
        self.loose_rows += table.num_rows

    def push_run(self, run: Run) -> None:
        """Add a sorted run. A small run in memory becomes pending, to be sorted with others."""
        rows = rows_of(run)
        if rows <= self._policy.rows_min and all(chunk.table is not None for chunk in run):
            for table in self._store.drain(run):
                self.push(table)
        elif run:
            self.runs.append(run)
            self.rows += rows
            self.loose_rows += rows

    def clear(self) -> None:
        """Remove all rows."""
        for run in self.runs:
            for chunk in run:
                self._store.drop(chunk)
        self.take()

    def take(self) -> tuple[list[Run], list[pa.Table]]:
        """Remove and return all runs and pending tables."""
        taken = self.runs, self.pending
        self.runs, self.pending, self.pending_bytes = [], [], 0
        self.rows = self.loose_rows = 0
        return taken

    def settle(self, since: Antichain) -> None:
        """Consolidate if the policy requires it."""
        if self.rows > self.capacity_rows:
            self.consolidate(since)
        elif len(self.runs) > RUNS_MAX:
            self._merge_tail(since)

    def consolidate_soon(self, since: Antichain) -> None:
        """Consolidate, unless that would copy a large main run for few loose rows."""
        main = self.rows - self.loose_rows
        if main <= self._policy.rows_min or self.loose_rows * (self._policy.dampener + 1) >= main:
            self.consolidate(since)

    def consolidate(self, since: Antichain) -> None:
        """Turn the chain into one consolidated run, or nothing. Idempotent."""
        if not self.loose_rows:
            return
        self.sort_pending(since)
        runs, _ = self.take()
        merged = self._merged(runs, since)
        if merged:
            self.runs, self.rows = [merged], rows_of(merged)

    def tables(self, since: Antichain) -> Iterator[pa.Table]:
        """Yield all rows, as of `since`. Requires a consolidated chain; changes nothing."""
        assert not self.loose_rows, "consolidate first"
        for chunk in self.runs[0] if self.runs else ():
            yield self._laws.advance_times(self._store.read(chunk), since)

    def sort_pending(self, since: Antichain) -> None:
        """Turn the pending tables into a run. Its chunks can be spilled, and merged within the memory bound."""
        if not self.pending:
            return
        tables, self.pending, self.pending_bytes = self.pending, [], 0
        before = sum(table.num_rows for table in tables)
        run = self._chunked(iter([self._sorted(tables, since)]))
        cancelled = before - rows_of(run)
        self.rows -= cancelled
        self.loose_rows -= cancelled
        if run:
            self.runs.append(run)

    def _merge_tail(self, since: Antichain) -> None:
        """Merge all runs but the first into one."""
        first, *tail = self.runs
        before = sum(map(rows_of, tail))
        merged = self._merged(tail, since)
        self.runs = [first, *([merged] if merged else [])]
        self.rows -= before - rows_of(merged)
        self.loose_rows = max(0, self.loose_rows - (before - rows_of(merged)))

    def _merged(self, runs: list[Run], since: Antichain) -> Run:
        policy = self._policy
        size_bytes = sum(chunk.size_bytes for run in runs for chunk in run)
        if size_bytes <= policy.merge_bytes // 4:
            tables = [table for run in runs for table in self._store.drain(run)]
            return self._chunked(iter([self._sorted(tables, since)] if tables else []))
        advanced = [(as_of(self._laws, table, since) for table in self._store.drain(run)) for run in runs]
        return self._chunked(self._laws.merge_runs(advanced, memory_bytes=policy.merge_bytes))

    def _sorted(self, tables: list[pa.Table], since: Antichain) -> pa.Table:
        return self._laws.consolidate(self._laws.advance_times(pa.concat_tables(tables), since))

    def _chunked(self, tables: Iterator[pa.Table]) -> Run:
        """Split `tables` into chunks of about the policy's size."""
        run: Run = []
        held: list[pa.Table] = []
        held_bytes = 0
        target = self._policy.chunk_bytes
        for table in tables:
            for piece in _cut(table, target):
                held.append(piece)
                held_bytes += piece.nbytes
                if held_bytes >= target // 2:
                    run.append(self._put(held))
                    held, held_bytes = [], 0
        if held:
            run.append(self._put(held))
        return run

    def _put(self, held: list[pa.Table]) -> Chunk:
        return self._store.put(held[0] if len(held) == 1 else pa.concat_tables(held).combine_chunks())


def _cut(table: pa.Table, target_bytes: int) -> Iterator[pa.Table]:
    """Yield slices of about `target_bytes`; none for an empty table."""
    if not table.num_rows:
        return
    rows = max(1, table.num_rows * target_bytes // max(1, table.nbytes))
    if rows >= table.num_rows:
        yield table
        return
    for start in range(0, table.num_rows, rows):
        # The slice is copied, because it would keep the whole table alive, and spilling the others would free no memory.
        yield table.slice(start, rows).combine_chunks().take(pa.array(np.arange(min(rows, table.num_rows - start))))
