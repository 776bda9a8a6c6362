"""Chunks of updates, in memory or spilled, and their total size. The shell implements spilling: see `Spill`.

Invariant: `memory_bytes` and `spilled_bytes` are the sums over all chunks that were put and not yet dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import check
from persist_engine.model.frontier import Antichain


class UpdateLaws(Protocol):
    """The laws of updates: `rows.updates` and `parts.consolidate`, supplied by the shell. Pure."""

    def consolidate(self, table: pa.Table) -> pa.Table:
        """Sort by (key, val, time), add the diffs of equal rows, drop zeros."""

    def advance_times(self, table: pa.Table, frontier: Antichain) -> pa.Table:
        """Advance each time to max(time, frontier); no rows if the frontier is empty. Returns the table itself if no time is before it."""

    def time_filter(self, table: pa.Table, lower: Antichain, upper: Antichain) -> pa.Table:
        """Return the rows with lower <= time < upper."""

    def merge_runs(self, runs: Iterable[Iterator[pa.Table]], *, memory_bytes: int) -> Iterator[pa.Table]:
        """Yield the consolidated union of runs of consolidated tables, each run sorted, streaming within about `memory_bytes`."""


class Spill(Protocol):
    """Storage for chunks that do not fit into memory. Not durable: nothing needs it after a crash."""

    def write(self, table: pa.Table) -> int:
        """Store `table` and return the number that identifies it."""

    def read(self, number: int) -> pa.Table:
        """Return the table with this number."""

    def delete(self, number: int) -> None:
        """Delete the table with this number."""


class NoSpill:
    """Never spills. For buffers without a memory bound."""

    def write(self, table: pa.Table) -> int:
        """Never called."""
        raise AssertionError(f"nothing to spill {table.num_rows} rows to")

    def read(self, number: int) -> pa.Table:
        """Never called."""
        raise AssertionError(f"chunk {number} was never spilled")

    def delete(self, number: int) -> None:
        """Never called."""
        raise AssertionError(f"chunk {number} was never spilled")


@dataclass(slots=True, eq=False)
class Chunk:
    """Sorted rows, at least one. In memory iff `table` is not None, else spilled under `number`."""

    rows: int
    size_bytes: int
    time_min: int
    time_max: int
    table: pa.Table | None
    number: int | None = None


Run = list[Chunk]
"""Consecutive chunks. Their rows are in (key, val, time) order throughout."""


class ChunkStore:
    """All chunks of one buffer. Not thread-safe."""

    def __init__(self, spill: Spill | None, *, memory_bytes_max: int) -> None:
        """Without `spill`, everything stays in memory, regardless of `memory_bytes_max`."""
        self._spill = spill or NoSpill()
        self.memory_bytes_max = memory_bytes_max if spill is not None else 1 << 62
        self.memory_bytes = 0
        self.spilled_bytes = 0

    def put(self, table: pa.Table) -> Chunk:
        """Store `table` (sorted, at least one row) as a chunk: in memory if it fits, else spilled."""
        times = pc.min_max(table.column("time"))
        chunk = Chunk(table.num_rows, table.nbytes, times["min"].as_py(), times["max"].as_py(), table)
        self.memory_bytes += chunk.size_bytes
        if self.memory_bytes > self.memory_bytes_max:
            self.spill(chunk)
        return chunk

    def read(self, chunk: Chunk) -> pa.Table:
        """Return the chunk's rows."""
        if chunk.table is not None:
            return chunk.table
        assert chunk.number is not None
        table = self._spill.read(chunk.number)
        check(table.num_rows == chunk.rows, f"a spilled chunk of {chunk.rows} rows came back with {table.num_rows}")
        return table

    def drop(self, chunk: Chunk) -> None:
        """Remove the chunk."""
        if chunk.table is not None:
            self.memory_bytes -= chunk.size_bytes
            chunk.table = None
        else:
            assert chunk.number is not None
            self.spilled_bytes -= chunk.size_bytes
            self._spill.delete(chunk.number)

    def spill(self, chunk: Chunk) -> None:
        """Move a chunk out of memory. Idempotent."""
        if chunk.table is None:
            return
        chunk.number = self._spill.write(chunk.table)
        chunk.table = None
        self.memory_bytes -= chunk.size_bytes
        self.spilled_bytes += chunk.size_bytes

    def drain(self, run: Run) -> Iterator[pa.Table]:
        """Yield the run's tables and remove each from the store."""
        for chunk in run:
            table = self.read(chunk)
            self.drop(chunk)
            yield table


def as_of(laws: UpdateLaws, table: pa.Table, since: Antichain) -> pa.Table:
    """Return the consolidated `table` as of `since`, still consolidated: times before since become since, and rows that
    differed only in those times are added up.
    """
    advanced = laws.advance_times(table, since)
    times = pc.min_max(table.column("time"))
    return advanced if advanced is table or times["min"] == times["max"] else laws.consolidate(advanced)


def rows_of(run: Run) -> int:
    """Return the number of rows in a run."""
    return sum(chunk.rows for chunk in run)
