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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import Incompatible
from persist_engine.base.retry import Retry
from persist_engine.client.read.leased import decoding_transport, part_source
from persist_engine.codec.batch import decode_batch, encode_batch
from persist_engine.codec.row_groups import group_bytes
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunMeta
from persist_engine.model.ids import ShardId
from persist_engine.parts.contents import Contents
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.selection import Skipped
from persist_engine.parts.source import CUT_BYTES_MIN
from persist_engine.rows.filter import Filter
from persist_engine.rows.part_stats import bound
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
#: What all splits together fetch at most, in percent of the bytes that are there, as long as each has fewer than SPLIT_BYTES_MIN. Some
#: bytes more never matter, so that a small shard has as many splits as were asked for.
FETCH_PERCENT_MAX, FETCH_BYTES_MORE = 120, 1 << 20
SPLIT_BYTES_MIN = 32 << 20


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


def affordable_ranges(batches: Sequence[HollowBatch], schema: Schema, count: int) -> list[KeyRange | None]:
    """As `choose_ranges`, but fewer where that many would fetch more than FETCH_PERCENT_MAX of the bytes that are there: of a part that
    several pieces cut, each fetches the footer and about a row group too much. There are as many as SPLIT_BYTES_MIN asks for, whatever
    they fetch, so that a large read stays parallel.
    """
    ranges = choose_ranges(batches, schema, count)
    parts = [part for batch in batches for part in batch.part_list() if isinstance(part, HollowPart)]
    held = sum(part.size_bytes for part in parts)
    least = -(-held // SPLIT_BYTES_MIN)
    if len(ranges) <= max(1, least):
        return ranges
    cuts = [(part, sum(each is None or each.may_hold(part) for each in ranges)) for part in parts]
    numbers = range(len(ranges), least, -1)
    most = max(held * FETCH_PERCENT_MAX // 100, held + FETCH_BYTES_MORE)
    fitting = (n for n in numbers if _to_fetch(cuts, (n - 1) / (len(ranges) - 1)) <= most)
    affordable = max(1, next(fitting, least))
    return ranges if affordable == len(ranges) else choose_ranges(batches, schema, affordable)


def _to_fetch(cuts: Sequence[tuple[HollowPart, int]], share: float) -> float:
    """About the bytes that the pieces fetch, if only so large a `share` of the bounds between them is left. `cuts`: each part, and the
    number of pieces that hold rows of it.
    """
    total = 0.0
    for part, pieces in cuts:
        left = 1 + (pieces - 1) * share
        whole = part.size_bytes * left
        if left > 1 and part.footer is not None and part.size_bytes > CUT_BYTES_MIN:
            waste = part.footer.size_bytes + group_bytes(part.rows, part.size_bytes)
            whole = min(whole, part.size_bytes + left * waste)
        total += whole
    return total


def choose_ranges(batches: Sequence[HollowBatch], schema: Schema, count: int) -> list[KeyRange | None]:
    """At most `count` ranges that partition all keys, of about the same number of rows. [None] when nothing supports a split.

    Integers, dates and timestamps are split anywhere (rows are assumed evenly distributed within a part), other types only at the beginning
    of a part.
    """
    column = schema.key.field(0)
    spans = _spans(batches, column)
    if count == 1 or not spans or pa.types.is_struct(column.type) or pa.types.is_boolean(column.type):
        return [None]
    bounds = _even_bounds(spans, column.type, count) if _is_linear(column.type) else _part_bounds(spans, count)
    edges = [None, *bounds, None]
    return [KeyRange(column.name, lower, upper) for lower, upper in itertools.pairwise(edges)]


_Span = tuple[pa.Scalar, pa.Scalar | None, int]


def _spans(batches: Sequence[HollowBatch], column: pa.Field) -> list[_Span]:
    """(least, greatest if known, rows) of the column for each part with statistics."""
    spans: list[_Span] = []
    for part in itertools.chain.from_iterable(batch.part_list() for batch in batches):
        if not isinstance(part, HollowPart) or part.stats is None:
            continue
        stats = dict(part.stats.columns).get(f"key.{column.name}")
        if stats is not None and stats.lower is not None:
            upper = None if stats.upper is None else bound(stats.upper, column.type)
            spans.append((bound(stats.lower, column.type), upper, part.rows))
    return spans


def _is_linear(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_timestamp(data_type) or pa.types.is_date32(data_type))


def _part_bounds(spans: list[_Span], count: int) -> list[pa.Scalar]:
    """Bounds among the parts' least values, every rows/count rows."""
    lowers = pa.chunked_array([pa.array([span[0]], type=span[0].type) for span in spans])
    order = pc.sort_indices(lowers).to_numpy()
    rows = np.cumsum(np.array([spans[index][2] for index in order], dtype=np.float64))
    before = rows - np.array([spans[index][2] for index in order])
    wanted = rows[-1] * np.arange(1, count) / count
    picked = np.searchsorted(before, wanted, side="left")
    values = pc.unique(lowers.take(pa.array(order[picked[picked < len(order)]])))
    return [value for value in values if bool(pc.greater(value, lowers[order[0]]).as_py())]


def _even_bounds(spans: list[_Span], data_type: pa.DataType, count: int) -> list[pa.Scalar]:
    """Bounds where the number of rows below reaches 1/count, 2/count, ..., with each part's rows spread evenly over its span."""
    storage = pa.int32() if pa.types.is_date32(data_type) else pa.int64()
    whole = [
        (_as_int(low, storage), _as_int(low if high is None else high, storage) + 1, rows) for low, high, rows in spans
    ]
    edges = sorted({edge for low, end, _ in whole for edge in (low, end)})
    index = {edge: at for at, edge in enumerate(edges)}
    slope = np.zeros(len(edges))
    for low, end, rows in whole:
        slope[index[low]] += rows / (end - low)
        slope[index[end]] -= rows / (end - low)
    # Python integers for the bounds: spans of timestamps times rows exceed float's exact range, which the bounds themselves must not.
    widths = np.array([float(b - a) for a, b in itertools.pairwise(edges)])
    below = np.concatenate([[0.0], np.cumsum(np.maximum(np.cumsum(slope)[:-1], 0.0) * widths)])
    bounds: list[int] = []
    for step in range(1, count):
        wanted = below[-1] * step / count
        at = min(int(np.searchsorted(below, wanted, side="right")) - 1, len(edges) - 2)
        height = below[at + 1] - below[at]
        share = 0.0 if height <= 0 else (wanted - below[at]) / height
        cut = edges[at] + int((edges[at + 1] - edges[at]) * share)
        if edges[0] < cut < edges[-1] and (not bounds or cut > bounds[-1]):
            bounds.append(cut)
    return [pa.scalar(cut, storage).cast(data_type) for cut in bounds]


def _as_int(value: pa.Scalar, storage: pa.DataType) -> int:
    return int(value.cast(storage).as_py())
