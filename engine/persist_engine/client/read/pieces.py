"""Pieces of a read, for other readers: what pieces of a snapshot and pieces of changes have in common (spec 15.6).

Owns the common fields of a piece, and its form as bytes. The bytes pass between processes of one release and are never durable. A piece is
a range of the first key column: filtering assigns each row to the piece whose range contains it. Statistics only decide what a piece may
skip. This module knows nothing of leases: the caller keeps the blobs alive.
"""

from __future__ import annotations

import base64
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from persist_engine.base.errors import Incompatible
from persist_engine.base.retry import Retry
from persist_engine.client.read.leased import decoding_transport, part_source
from persist_engine.codec.batch import decode_batch, encode_batch
from persist_engine.model.batch import HollowBatch, HollowPart, RunMeta
from persist_engine.model.ids import ShardId
from persist_engine.parts.fetch import PartSource
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.selection import Skipped
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import Predicate, from_json, to_json
from persist_engine.rows.projection import Projection
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob

#: The memory for reading one piece. It is small, because many reads run on one machine. In addition, each run holds the bytes of its
#: current part and one or two row groups.
PIECE_MEMORY_BYTES = 64 << 20
#: The memory for reading everything in one process, with the same addition.
READ_MEMORY_BYTES = 256 << 20
#: The rows of one record batch: large enough for vectorised consumers, small enough to show progress.
BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of a read: what to fetch, and which rows to keep. It holds no lease, so the snapshot or the changes that it comes from must
    stay open until it is read. It names no location, so its reader must supply the same blob store.
    """

    NAME: ClassVar[str]
    FORMAT: ClassVar[int]

    shard_id: ShardId
    schema: Schema
    schema_id: int | None
    batches: tuple[HollowBatch, ...]
    key_range: KeyRange | None
    where: Predicate | None = None
    columns: tuple[str, ...] | None = None
    audits: tuple[Skipped, ...] = ()

    @property
    def bytes_estimate(self) -> int:
        """The bytes of its parts, which are the most that a read fetches. A part that the range cuts is fetched only in some row groups."""
        return sum(batch.size_bytes for batch in self.batches)

    def to_bytes(self) -> bytes:
        """Everything that a remote reader needs except the blob store; inverse of `from_bytes`. The bytes are for transport, not
        storage.
        """
        value = {
            "format": self.FORMAT,
            "shard_id": self.shard_id,
            "key": self.schema.key_ddl,
            "val": self.schema.val_ddl,
            "schema_id": self.schema_id,
            "batches": [_text_of(batch) for batch in self.batches],
            "range": None if self.key_range is None else self.key_range.to_json(),
            "where": None if self.where is None else to_json(self.where),
            "columns": self.columns,
            "audits": [_text_of(HollowBatch(each.desc, 0, (each.part,), (), (RunMeta(),))) for each in self.audits],
            **self._own_json(),
        }
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`. Raises Incompatible for another format, and CorruptData for any other bytes."""
        with decoding_transport(cls.NAME):
            value: dict[str, Any] = json.loads(data)
            if value["format"] != cls.FORMAT:
                raise Incompatible(f"{cls.NAME} of format {value['format']}, this code reads {cls.FORMAT}")
            audits = [_batch_of(text) for text in value["audits"]]
            return cls(
                shard_id=ShardId(str(value["shard_id"])),
                schema=Schema.from_ddl(value["key"], value["val"]),
                schema_id=value["schema_id"],
                batches=tuple(_batch_of(text) for text in value["batches"]),
                key_range=None if value["range"] is None else KeyRange.from_json(value["range"]),
                where=None if value["where"] is None else from_json(value["where"]),
                columns=None if value["columns"] is None else tuple(value["columns"]),
                audits=tuple(
                    Skipped(batch.desc, part)
                    for batch in audits
                    for part in batch.parts
                    if isinstance(part, HollowPart)
                ),
                **cls._own_fields(value),
            )

    @abstractmethod
    def _own_json(self) -> dict[str, Any]:
        """The fields of the subclass, as JSON."""

    @classmethod
    @abstractmethod
    def _own_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Inverse of `_own_json`. `value` is the whole JSON object of the piece."""

    def _source(self, blob: Blob, retry: Retry | None) -> PartSource:
        source = part_source(self.shard_id, self.schema, self.schema_id, blob, retry)
        return replace(source, key_range=self.key_range)

    @property
    def _filter(self) -> Filter | None:
        return None if self.where is None else Filter(self.where, self.schema)

    @property
    def _projection(self) -> Projection | None:
        return None if self.columns is None else Projection.of(self.columns, self.schema)


def within(batches: Sequence[HollowBatch], key_range: KeyRange | None) -> tuple[HollowBatch, ...]:
    """The batches without the parts that cannot hold rows of `key_range`, and without runs and batches that become empty."""
    if key_range is None:
        return tuple(batch for batch in batches if batch.parts)
    kept = []
    for batch in batches:
        runs = [(meta, [part for part in parts if key_range.may_hold(part)]) for meta, parts in batch.part_runs()]
        kept.append(HollowBatch.of_runs(batch.desc, sum(part.rows for _, parts in runs for part in parts), runs))
    return tuple(batch for batch in kept if batch.parts)


def _text_of(batch: HollowBatch) -> str:
    return base64.b64encode(encode_batch(batch)).decode()


def _batch_of(text: str) -> HollowBatch:
    return decode_batch(base64.b64decode(text))
