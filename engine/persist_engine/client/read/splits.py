"""Splits a snapshot into disjoint pieces for other readers (spec 15.6).

Part statistics decide the ranges, so that all pieces have about the same size. They affect only how well the work is balanced, never the
result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyarrow as pa

from persist_engine.base.retry import Retry
from persist_engine.client.read.key_condition import condition_of
from persist_engine.client.read.pieces import BATCH_ROWS, PIECE_MEMORY_BYTES, Piece, within
from persist_engine.model.batch import HollowBatch, Part, RunMeta
from persist_engine.parts.contents import Contents
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.selection import Times, select
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And
from persist_engine.storage.blob import Blob


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSplit(Piece):
    """One piece of a snapshot."""

    NAME: ClassVar[str] = "snapshot split"
    FORMAT: ClassVar[int] = 3

    as_of: int
    is_merged: bool = True
    """False means that rows are read part by part and not merged, which is correct for additive contents."""

    @classmethod
    def of(cls, contents: Contents, key_range: KeyRange | None, *, is_merged: bool = True) -> Self:
        """The piece of `contents` within `key_range`. It has no audits, and no parts that cannot hold rows of the range."""
        return cls(
            shard_id=contents.source.shard_id,
            schema=contents.source.schema,
            schema_id=contents.source.schema_id,
            batches=within(contents.batches, key_range),
            key_range=key_range,
            where=None if contents.where is None else contents.where.predicate,
            columns=None if contents.projection is None else contents.projection.names,
            as_of=contents.as_of,
            is_merged=is_merged,
        )

    def to_batches(
        self, blob: Blob, *, memory_bytes: int = PIECE_MEMORY_BYTES, retry: Retry | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of this piece as non-empty record batches: consolidated and sorted by (key, val), unless the split is not merged.

        Needs only the blob store. `retry` retries storage errors (default: for ever). Raises MissingBlob when the snapshot was closed and
        its blobs were collected.
        """
        contents = Contents(
            self._source(blob, retry),
            self.batches,
            self.as_of,
            where=self._filter,
            projection=self._projection,
            key_range=self.key_range,
            audits=self.audits,
        )
        for table in contents.tables(memory_bytes=memory_bytes) if self.is_merged else contents.tables_apart():
            yield from table.to_batches(max_chunksize=BATCH_ROWS)

    def of_keys(self, keys: pa.ChunkedArray) -> Self:
        """This piece without the parts that, according to their statistics, cannot hold a row of `keys` (at least one struct). It has all
        rows with these keys, and perhaps others. Audits stay as they are.
        """
        where = condition_of(keys, self.schema)
        if where is None:
            return self
        both = where if self.where is None else And((self.where, where))
        found = select(
            self.batches, where=Filter(both, self.schema), times=Times(last=self.as_of), audited=lambda: False
        )
        return replace(self, batches=found.batches, where=both)

    def _own_json(self) -> dict[str, Any]:
        return {"as_of": self.as_of, "is_merged": self.is_merged}

    @classmethod
    def _own_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {"as_of": int(value["as_of"]), "is_merged": bool(value["is_merged"])}


def pieces_apart(contents: Contents, count: int) -> list[SnapshotSplit]:
    """At most `count` splits that are not merged, of whole parts, with about the same number of bytes each. No part is fetched twice."""
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
