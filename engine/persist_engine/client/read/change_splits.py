"""Splits changes into disjoint pieces for other readers, and reads changes, whole or one piece.

Pieces are ranges of the first key column, as those of a snapshot (client.read.splits), so all changes of one key are in one piece. This
module knows nothing of leases: the caller keeps the blobs alive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import pyarrow as pa

from persist_engine.base.errors import Incompatible
from persist_engine.base.retry import Retry
from persist_engine.client.read.leased import decoding_transport, part_source
from persist_engine.client.read.splits import (
    SPLIT_MEMORY_BYTES,
    audits_of_texts,
    batch_of_text,
    batch_text,
    texts_of_audits,
    without_others,
)
from persist_engine.model.batch import HollowBatch
from persist_engine.model.ids import ShardId
from persist_engine.parts.fetch import ChangesFilter, Matching, PartSource, read_consolidated, runs_of
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.selection import Skipped, audit
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import Predicate, from_json, to_json
from persist_engine.rows.projection import Projection
from persist_engine.rows.row_changes import changes_of
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob

Shape = Literal["updates", "rows"]
#: The format of `ChangesSplit.to_bytes`. It passes between processes of one release and is never durable.
SPLIT_FORMAT = 1
BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class ChangesRead:
    """What to read, which changes to keep, and in which shape to show them. `batches` are selected and expanded."""

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
        """The changes as non-empty tables, merged while reading within about `memory_bytes`. InvariantViolated when an audit finds that
        statistics are wrong.
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


@dataclass(frozen=True, slots=True)
class ChangesSplit:
    """One piece of a shard's changes: what to fetch, and which changes to keep. Holds no lease: its `Changes` must stay open until the
    piece is read. Names no location: the reader must supply the same blob store.
    """

    shard_id: ShardId
    schema: Schema
    schema_id: int | None
    rows: ChangesFilter
    shape: Shape
    batches: tuple[HollowBatch, ...]
    key_range: KeyRange | None
    where: Predicate | None = None
    columns: tuple[str, ...] | None = None
    audits: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, source: PartSource, read: ChangesRead, key_range: KeyRange | None) -> Self:
        """The piece of `read` within `key_range`, without parts that cannot hold rows of it, and without audits."""
        kept = (batch if key_range is None else without_others(batch, key_range) for batch in read.batches)
        return cls(
            source.shard_id,
            source.schema,
            source.schema_id,
            read.rows,
            read.shape,
            tuple(batch for batch in kept if batch.parts),
            key_range,
            None if read.where is None else read.where.predicate,
            None if read.projection is None else read.projection.names,
        )

    def to_bytes(self) -> bytes:
        """Everything that a remote reader needs except the blob store; inverse of `from_bytes`. For transport, not for storage."""
        value = {
            "format": SPLIT_FORMAT,
            "shard_id": self.shard_id,
            "key": self.schema.key_ddl,
            "val": self.schema.val_ddl,
            "schema_id": self.schema_id,
            "rows": [self.rows.after, self.rows.upto, self.rows.since],
            "shape": self.shape,
            "range": None if self.key_range is None else self.key_range.to_json(),
            "batches": [batch_text(batch) for batch in self.batches],
            "where": None if self.where is None else to_json(self.where),
            "columns": self.columns,
            "audits": texts_of_audits(self.audits),
        }
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`. Incompatible for another format, CorruptData for anything else."""
        with decoding_transport("split of changes"):
            value: dict[str, Any] = json.loads(data)
            if value["format"] != SPLIT_FORMAT:
                raise Incompatible(f"split of changes of format {value['format']}, this code reads {SPLIT_FORMAT}")
            return cls(
                ShardId(str(value["shard_id"])),
                Schema.from_ddl(value["key"], value["val"]),
                value["schema_id"],
                ChangesFilter(*map(int, value["rows"])),
                "rows" if value["shape"] == "rows" else "updates",
                tuple(batch_of_text(batch) for batch in value["batches"]),
                None if value["range"] is None else KeyRange.from_json(value["range"]),
                None if value["where"] is None else from_json(value["where"]),
                None if value["columns"] is None else tuple(value["columns"]),
                audits_of_texts(value["audits"]),
            )

    def to_batches(
        self, blob: Blob, *, memory_bytes: int = SPLIT_MEMORY_BYTES, retry: Retry | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The changes of this piece, as `Changes.to_batches` gives them.

        Needs only the blob store. `retry` retries storage errors (default: for ever). MissingBlob when the changes were closed and their
        blobs were collected.
        """
        read = ChangesRead(
            self.batches,
            self.rows,
            self.shape,
            where=None if self.where is None else Filter(self.where, self.schema),
            projection=None if self.columns is None else Projection.of(self.columns, self.schema),
            key_range=self.key_range,
            audits=self.audits,
        )
        source = replace(part_source(self.shard_id, self.schema, self.schema_id, blob, retry), key_range=self.key_range)
        for table in read.tables(source, memory_bytes=memory_bytes):
            yield from table.to_batches(max_chunksize=BATCH_ROWS)
