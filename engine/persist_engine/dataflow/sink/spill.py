"""Spill files of a sink's correction buffers: Arrow IPC files in one directory for each worker. They are not durable: they are deleted with
the sink, and files that a crash left are not used again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from persist_engine.model.frontier import Antichain
from persist_engine.parts.consolidate import merge_runs
from persist_engine.rows import updates


class SpillFiles:
    """`flow.correction_chunks.Spill` on files. Not thread-safe. Raises OSError when the disk is full or unavailable."""

    def __init__(self, make_directory: Callable[[], Path]) -> None:
        """`make_directory` is called at the first spill and makes a directory for this buffer alone."""
        self._make_directory = make_directory
        self._directory: Path | None = None
        self._numbers = itertools.count()

    def write(self, table: pa.Table) -> int:
        """See Spill."""
        if self._directory is None:
            self._directory = self._make_directory()
        number = next(self._numbers)
        with pa.OSFile(str(self._path(number)), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return number

    def read(self, number: int) -> pa.Table:
        """See Spill. The rows stay on disk until they are read."""
        with pa.memory_map(str(self._path(number)), "rb") as file:
            return pa.ipc.open_file(file).read_all()

    def delete(self, number: int) -> None:
        """See Spill. Tables that were already read stay readable."""
        self._path(number).unlink()

    def _path(self, number: int) -> Path:
        assert self._directory is not None, "nothing was spilled yet"
        return self._directory / f"chunk-{number}.arrow"


class ArrowLaws:
    """`flow.correction_chunks.UpdateLaws` with the engine's own functions."""

    def consolidate(self, table: pa.Table) -> pa.Table:
        """See rows.updates."""
        return updates.consolidate(table)

    def advance_times(self, table: pa.Table, frontier: Antichain) -> pa.Table:
        """See rows.updates."""
        return updates.advance_times(table, frontier)

    def time_filter(self, table: pa.Table, lower: Antichain, upper: Antichain) -> pa.Table:
        """See rows.updates."""
        return updates.time_filter(table, lower, upper)

    def merge_runs(self, runs: Iterable[Iterator[pa.Table]], *, memory_bytes: int) -> Iterator[pa.Table]:
        """See parts.consolidate."""
        return merge_runs(runs, memory_bytes=memory_bytes)
