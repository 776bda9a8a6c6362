"""Keeps the runs of a builder few: merges groups of them while it writes (spec 10.4).

    level 1   [merged of 2, sorted ---]  [merged of 2 ---]        two of a level become one of the next,
    level 0   [part]                                              so that every row is merged log2(parts) times

Owns how many runs there are, and deletes the blobs of runs that were merged. Every part given to it is a sorted run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from persist_engine.base.errors import BatchExpired, MissingBlob
from persist_engine.model.batch import Part
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.model.ids import ShardId
from persist_engine.parts.fetch import CompactionFilter, PartSource, RunToRead, read_consolidated
from persist_engine.parts.write import PartStore, delete_parts, write_part
from persist_engine.rows.schema import Schema

Run = tuple[Part, ...]


class RunGroups:
    """The runs of one builder: at most `runs_max` at the end, or all of them when `runs_max` is 1 or less. Not
    thread-safe.
    """

    def __init__(self, store: PartStore, desc: Description, *, schema: Schema, schema_id: int, runs_max: int) -> None:
        self._store, self._desc = store, desc
        self._schema, self._schema_id = schema, schema_id
        self._runs_max = runs_max
        self._levels: list[list[Run]] = [[]]

    def add(self, part: Part) -> None:
        """Adds one run. When a level has more than `runs_max` runs, merges them before it returns."""
        self._levels[0].append((part,))
        if self._runs_max < 2:
            return
        level = 0
        while len(self._levels[level]) > self._runs_max:
            group, self._levels[level] = self._levels[level], []
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1] += self._merged(group)
            level += 1

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return [run for level in reversed(self._levels) for run in level]

    def finish(self) -> list[Run]:
        """Merges the smallest runs until at most `runs_max` are left, and returns all runs."""
        runs = self.runs()
        excess = len(runs) - self._runs_max
        if self._runs_max < 2 or excess <= 0:
            return runs
        smallest = sorted(range(len(runs)), key=lambda index: _size_bytes(runs[index]))[: excess + 1]
        self._levels = [[run for index, run in enumerate(runs) if index not in smallest]]
        self._levels[0] += self._merged([runs[index] for index in sorted(smallest)])
        return self.runs()

    def _merged(self, group: Sequence[Run]) -> list[Run]:
        """Merges the runs of `group` into one, or into none when all rows cancel. Deletes the parts of `group`. After an error,
        the group is part of `runs` again, and the new parts are deleted. Raises BatchExpired when an orphan scan deleted one
        of its blobs.
        """
        store = self._store
        source = PartSource(store.shard_id, store.blob, self._schema, store.retry, store.metrics, path="builder")
        target = store.settings.batch.target_part_bytes
        reading = [RunToRead.of(self._desc, run, is_sorted=True) for run in group]
        written: list[Part] = []
        try:
            tables = read_consolidated(source, reading, CompactionFilter(MINIMUM), memory_bytes=2 * target)
            for part in self._written(tables, target):
                written.append(part)
        except BaseException as error:
            self._levels[0] += group
            delete_parts(store, written)
            if isinstance(error, MissingBlob):  # no state names the blob yet, so an orphan scan may have deleted it
                raise _swept(store.shard_id, error) from error
            raise
        delete_parts(store, [part for run in group for part in run])
        store.metrics.count("builder_merged_runs", len(group))
        return [tuple(written)] if written else []

    def _written(self, tables: Iterator[pa.Table], target: int) -> Iterator[Part]:
        gathered: list[pa.Table] = []
        size_bytes = 0
        for table in tables:
            if gathered and size_bytes + table.nbytes > target:
                yield self._write(gathered)
                gathered, size_bytes = [], 0
            gathered.append(table)
            size_bytes += table.nbytes
        if gathered:
            yield self._write(gathered)

    def _write(self, tables: list[pa.Table]) -> Part:
        return write_part(
            self._store,
            pa.concat_tables(tables),
            desc=self._desc,
            schema=self._schema,
            schema_id=self._schema_id,
            inline_bytes_max=self._store.settings.batch.inline_part_bytes_max,
        )


def _swept(shard_id: ShardId, error: MissingBlob) -> BatchExpired:
    key = error.detail.get("key")
    return BatchExpired(
        f"blob {key} of a batch that was not yet appended to shard {shard_id} is gone, as after an orphan scan: stage the "
        f"batch again (or set the clock of the machine that staged it)",
        key=key,
    )


def _size_bytes(run: Run) -> int:
    return sum(part.hollow_bytes + part.inline_bytes for part in run)
