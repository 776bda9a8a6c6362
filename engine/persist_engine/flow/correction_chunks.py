"""Chunks of updates, in memory or spilled, and the bytes they take. What spilling is, is the shell's: see `Spill`.

Invariant: `memory_bytes` and `spilled_bytes` are the sums over all chunks that were put and neither taken nor dropped.
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
    """What updates are: `codec.updates` and `shard.consolidate`, handed in by the shell. Pure."""

    def consolidate(self, table: pa.Table) -> pa.Table:
        """Sorted by (key, val, time), equal ones added up, zeros dropped."""

    def advance_times(self, table: pa.Table, frontier: Antichain) -> pa.Table:
        """max(time, frontier) for each row; nothing when it is empty. The table itself when no time is before it."""

    def time_filter(self, table: pa.Table, lower: Antichain, upper: Antichain) -> pa.Table:
        """The rows with lower <= time < upper."""

    def merge_runs(self, runs: Iterable[Iterator[pa.Table]], *, memory_bytes: int) -> Iterator[pa.Table]:
        """The consolidated union of runs that are sorted each, of consolidated tables, streaming within about
        `memory_bytes`.
        """


class Spill(Protocol):
    """Where chunks go that memory has no room for. Not durable: nothing needs it after a crash."""

    def write(self, table: pa.Table) -> int:
        """Keep `table`; a number under which it is found."""

    def read(self, number: int) -> pa.Table:
        """The table again."""

    def delete(self, number: int) -> None:
        """Forget it."""


class NoSpill:
    """For buffers that may take all the memory they need."""

    def write(self, table: pa.Table) -> int:
        """Never."""
        raise AssertionError(f"nothing to spill {table.num_rows} rows to")

    def read(self, number: int) -> pa.Table:
        """Never."""
        raise AssertionError(f"chunk {number} was never spilled")

    def delete(self, number: int) -> None:
        """Never."""
        raise AssertionError(f"chunk {number} was never spilled")


@dataclass(slots=True, eq=False)
class Chunk:
    """Some rows, sorted, never none. In memory iff `table` is not None, else spilled under `number`."""

    rows: int
    size_bytes: int
    time_min: int
    time_max: int
    table: pa.Table | None
    number: int | None = None


Run = list[Chunk]
"""Chunks that, read one after the other, never go back in (key, val, time)."""


class ChunkStore:
    """All chunks of one buffer. Not thread-safe."""

    def __init__(self, spill: Spill | None, *, memory_bytes_max: int) -> None:
        """Without `spill` everything stays in memory whatever `memory_bytes_max` says."""
        self._spill = spill or NoSpill()
        self.memory_bytes_max = memory_bytes_max if spill is not None else 1 << 62
        self.memory_bytes = 0
        self.spilled_bytes = 0

    def put(self, table: pa.Table) -> Chunk:
        """A chunk of `table` (sorted, at least one row): in memory if it fits there."""
        times = pc.min_max(table.column("time"))
        chunk = Chunk(table.num_rows, table.nbytes, times["min"].as_py(), times["max"].as_py(), table)
        self.memory_bytes += chunk.size_bytes
        if self.memory_bytes > self.memory_bytes_max:
            self.spill(chunk)
        return chunk

    def read(self, chunk: Chunk) -> pa.Table:
        """Its rows."""
        if chunk.table is not None:
            return chunk.table
        assert chunk.number is not None
        table = self._spill.read(chunk.number)
        check(table.num_rows == chunk.rows, f"a spilled chunk of {chunk.rows} rows came back with {table.num_rows}")
        return table

    def drop(self, chunk: Chunk) -> None:
        """The chunk is gone."""
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
        """The run's tables, each gone from the store once it was given out."""
        for chunk in run:
            table = self.read(chunk)
            self.drop(chunk)
            yield table


def as_of(laws: UpdateLaws, table: pa.Table, since: Antichain) -> pa.Table:
    """`table`, which is consolidated, as of `since`, and consolidated still: times before it become one, and rows equal
    that differed in them only.
    """
    advanced = laws.advance_times(table, since)
    times = pc.min_max(table.column("time"))
    return advanced if advanced is table or times["min"] == times["max"] else laws.consolidate(advanced)


def rows_of(run: Run) -> int:
    """How many rows a run has."""
    return sum(chunk.rows for chunk in run)
