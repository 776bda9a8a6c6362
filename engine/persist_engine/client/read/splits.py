"""Splits a snapshot into disjoint pieces for other readers (spec 15.6).

Pieces are ranges of the first key column, chosen from part statistics to have about the same weight. Statistics only decide how well the
work is balanced and what a piece may skip. A row belongs to the piece whose range contains it, which filtering decides.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from persist_engine.base.errors import Incompatible
from persist_engine.base.retry import Retry
from persist_engine.client.read.leased import decoding_transport, part_source
from persist_engine.codec.batch import decode_batch, encode_batch
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunMeta
from persist_engine.model.ids import ShardId
from persist_engine.parts.contents import Contents
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.selection import Skipped
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import Predicate, from_json, to_json
from persist_engine.rows.projection import Projection
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob

#: The format of `SnapshotSplit.to_bytes`. It passes between processes of one release and is never durable.
SPLIT_FORMAT = 3
#: Memory of reading one split; small, because many run on one machine. In addition, each run holds the bytes of its current part and one or
#: two row groups.
SPLIT_MEMORY_BYTES = 64 << 20
BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class SnapshotSplit:
    """One piece of a snapshot: what to fetch, and which rows to keep. Holds no lease: its snapshot must stay open until the piece is read.
    Names no location: the reader must supply the same blob store.
    """

    shard_id: ShardId
    schema: Schema
    as_of: int
    batches: tuple[HollowBatch, ...]
    key_range: KeyRange | None
    schema_id: int | None = None
    where: Predicate | None = None
    columns: tuple[str, ...] | None = None
    audits: tuple[Skipped, ...] = ()
    is_merged: bool = True
    """False: its rows are read part by part, which is right for contents that are additive."""

    @classmethod
    def of(cls, contents: Contents, key_range: KeyRange | None, *, is_merged: bool = True) -> SnapshotSplit:
        """The piece of `contents` within `key_range`, without parts that cannot hold rows of it, and without audits."""
        kept = (batch if key_range is None else without_others(batch, key_range) for batch in contents.batches)
        return cls(
            contents.source.shard_id,
            contents.source.schema,
            contents.as_of,
            tuple(batch for batch in kept if batch.parts),
            key_range,
            contents.source.schema_id,
            None if contents.where is None else contents.where.predicate,
            None if contents.projection is None else contents.projection.names,
            is_merged=is_merged,
        )

    @property
    def bytes_estimate(self) -> int:
        """Bytes of its parts: what reading it fetches at most. Of parts that its range cuts, it fetches some row groups."""
        return sum(batch.size_bytes for batch in self.batches)

    def to_bytes(self) -> bytes:
        """Everything that a remote reader needs except the blob store; inverse of `from_bytes`. For transport, not for storage."""
        value = {
            "format": SPLIT_FORMAT,
            "shard_id": self.shard_id,
            "key": self.schema.key_ddl,
            "val": self.schema.val_ddl,
            "schema_id": self.schema_id,
            "as_of": self.as_of,
            "range": None if self.key_range is None else self.key_range.to_json(),
            "batches": [batch_text(batch) for batch in self.batches],
            "where": None if self.where is None else to_json(self.where),
            "columns": self.columns,
            "audits": texts_of_audits(self.audits),
            "is_merged": self.is_merged,
        }
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SnapshotSplit:
        """Inverse of `to_bytes`. Incompatible for another format, CorruptData for anything else."""
        with decoding_transport("snapshot split"):
            value: dict[str, Any] = json.loads(data)
            if value["format"] != SPLIT_FORMAT:
                raise Incompatible(f"snapshot split of format {value['format']}, this code reads {SPLIT_FORMAT}")
            return cls(
                ShardId(str(value["shard_id"])),
                Schema.from_ddl(value["key"], value["val"]),
                int(value["as_of"]),
                tuple(batch_of_text(batch) for batch in value["batches"]),
                None if value["range"] is None else KeyRange.from_json(value["range"]),
                value["schema_id"],
                None if value["where"] is None else from_json(value["where"]),
                None if value["columns"] is None else tuple(value["columns"]),
                audits_of_texts(value["audits"]),
                bool(value["is_merged"]),
            )

    def to_batches(
        self, blob: Blob, *, memory_bytes: int = SPLIT_MEMORY_BYTES, retry: Retry | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of this piece as non-empty record batches: consolidated and sorted by (key, val), unless the split is not merged.

        Needs only the blob store. `retry` retries storage errors (default: for ever). MissingBlob when the snapshot was closed and its
        blobs were collected.
        """
        contents = Contents(
            replace(part_source(self.shard_id, self.schema, self.schema_id, blob, retry), key_range=self.key_range),
            self.batches,
            self.as_of,
            where=None if self.where is None else Filter(self.where, self.schema),
            projection=None if self.columns is None else Projection.of(self.columns, self.schema),
            key_range=self.key_range,
            audits=self.audits,
        )
        for table in contents.tables(memory_bytes=memory_bytes) if self.is_merged else contents.tables_apart():
            yield from table.to_batches(max_chunksize=BATCH_ROWS)


def batch_text(batch: HollowBatch) -> str:
    """`batch` as text for transport."""
    return base64.b64encode(encode_batch(batch)).decode()


def batch_of_text(text: str) -> HollowBatch:
    """Inverse of `batch_text`."""
    return decode_batch(base64.b64decode(text))


def texts_of_audits(audits: Sequence[Skipped]) -> list[str]:
    """Skipped parts as text for transport."""
    return [batch_text(HollowBatch(each.desc, 0, (each.part,), (), (RunMeta(),))) for each in audits]


def audits_of_texts(texts: Sequence[str]) -> tuple[Skipped, ...]:
    """Inverse of `texts_of_audits`."""
    batches = [batch_of_text(text) for text in texts]
    return tuple(Skipped(batch.desc, part) for batch in batches for part in batch.parts if isinstance(part, HollowPart))


def without_others(batch: HollowBatch, key_range: KeyRange) -> HollowBatch:
    """`batch` without the parts that cannot hold rows of `key_range`, and without runs that become empty."""
    runs = [(meta, [part for part in parts if key_range.may_hold(part)]) for meta, parts in batch.part_runs()]
    return HollowBatch.of_runs(batch.desc, sum(part.rows for _, parts in runs for part in parts), runs)


def pieces_apart(contents: Contents, count: int) -> list[SnapshotSplit]:
    """At most `count` splits of whole parts that are not merged, of about the same number of bytes: no part is fetched twice."""
    costs = [part.hollow_bytes + part.inline_bytes + 1 for batch in contents.batches for part in batch.part_list()]
    share = -(-sum(costs) // count)
    ends = iter(itertools.accumulate(costs))
    pieces: dict[int, list[HollowBatch]] = {}
    for batch in contents.batches:
        runs: dict[int, list[tuple[RunMeta, list[Part]]]] = {}
        for meta, parts in batch.part_runs():
            for part, end in zip(parts, ends, strict=False):
                members = runs.setdefault((end - 1) // share, [])
                if not members or members[-1][0] is not meta:
                    members.append((meta, []))
                members[-1][1].append(part)
        for number, kept in runs.items():
            rows = sum(part.rows for _, parts in kept for part in parts)
            pieces.setdefault(number, []).append(HollowBatch.of_runs(batch.desc, rows, kept))
    whole = SnapshotSplit.of(contents, None, is_merged=False)
    return [replace(whole, batches=tuple(batches)) for batches in pieces.values()] or [whole]
