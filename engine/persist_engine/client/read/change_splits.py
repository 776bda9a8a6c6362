"""Splits changes into disjoint pieces for other readers, and reads changes, whole or one piece.

Pieces are ranges of the first key column, so all changes of one key are in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa

from persist_engine.base.retry import Retry
from persist_engine.client.read.pieces import BATCH_ROWS, PIECE_MEMORY_BYTES, Piece, within
from persist_engine.model.batch import HollowBatch
from persist_engine.parts.fetch import ChangesFilter, Matching, PartSource, read_consolidated, runs_of
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.selection import Skipped, audit
from persist_engine.rows.filter import Filter
from persist_engine.rows.projection import Projection
from persist_engine.rows.row_changes import changes_of
from persist_engine.storage.blob import Blob

Shape = Literal["updates", "rows"]


@dataclass(frozen=True, slots=True)
class ChangesRead:
    """What to read, which changes to keep, and in which shape to show them. `batches` are already selected and expanded."""

    batches: tuple[HollowBatch, ...]
    rows: ChangesFilter
    shape: Shape
    where: Filter | None = None
    projection: Projection | None = None
    key_range: KeyRange | None = None
    audits: tuple[Skipped, ...] = ()

    def tables(
        self, source: PartSource, *, memory_bytes: int, on_fetched: Callable[[int], None] | None = None
    ) -> Iterator[pa.Table]:
        """The changes as non-empty tables, merged while reading within about `memory_bytes`. Raises InvariantViolated when an audit finds
        that statistics are wrong.
        """
        row_filter = self.rows if self.where is None else Matching(self.rows, self.where)
        for skipped in self.audits:
            audit(source, skipped, row_filter, self.where)
        tables = read_consolidated(
            source,
            runs_of(self.batches, self.key_range),
            row_filter,
            memory_bytes=memory_bytes,
            key_range=self.key_range,
            on_fetched=on_fetched,
        )
        for table in changes_of(tables) if self.shape == "rows" else tables:
            yield table if self.projection is None else self.projection.apply(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesSplit(Piece):
    """One piece of a shard's changes."""

    NAME: ClassVar[str] = "split of changes"
    FORMAT: ClassVar[int] = 1

    rows: ChangesFilter
    shape: Shape

    @classmethod
    def of(cls, source: PartSource, read: ChangesRead, key_range: KeyRange | None) -> Self:
        """The piece of `read` within `key_range`. It has no audits, and no parts that cannot hold rows of the range."""
        return cls(
            shard_id=source.shard_id,
            schema=source.schema,
            schema_id=source.schema_id,
            batches=within(read.batches, key_range),
            key_range=key_range,
            where=None if read.where is None else read.where.predicate,
            columns=None if read.projection is None else read.projection.names,
            rows=read.rows,
            shape=read.shape,
        )

    def to_batches(
        self, blob: Blob, *, memory_bytes: int = PIECE_MEMORY_BYTES, retry: Retry | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The changes of this piece, as `Changes.to_batches` yields them.

        Needs only the blob store. `retry` retries storage errors (default: for ever). Raises MissingBlob when the changes were closed and
        their blobs were collected.
        """
        read = ChangesRead(
            self.batches,
            self.rows,
            self.shape,
            where=self._filter,
            projection=self._projection,
            key_range=self.key_range,
            audits=self.audits,
        )
        for table in read.tables(self._source(blob, retry), memory_bytes=memory_bytes):
            yield from table.to_batches(max_chunksize=BATCH_ROWS)

    def _own_json(self) -> dict[str, Any]:
        return {"rows": [self.rows.after, self.rows.upto, self.rows.since], "shape": self.shape}

    @classmethod
    def _own_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {
            "rows": ChangesFilter(*map(int, value["rows"])),
            "shape": "rows" if value["shape"] == "rows" else "updates",
        }
