"""Writing and deleting the parts of batches: one table of updates becomes one blob, or a few bytes inside state.

Owns the order in which a part comes to be: bytes first, blob next, descriptor last; a crash in between leaks a blob and
loses nothing. Knows nothing of bounds or of how updates are cut into parts.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from persist_engine.base.version import APPLIER_VERSION
from persist_engine.codec.checksum import checksum
from persist_engine.codec.keys import blob_key, part_key
from persist_engine.codec.order import key_lower
from persist_engine.codec.part import decode_part, encode_part
from persist_engine.codec.part_stats import part_stats
from persist_engine.codec.schema import Schema
from persist_engine.codec.updates import diffs_sum
from persist_engine.model.batch import HollowPart, InlinePart, Part
from persist_engine.model.frontier import Description
from persist_engine.model.ids import PartId
from persist_engine.shard.machine import Machine


def write_part(
    machine: Machine, table: pa.Table, *, desc: Description, schema: Schema, schema_id: int, inline_bytes_max: int
) -> Part:
    """Encode `table` (at least one row) under `desc`; durable when it returns.

    Inline when the encoded part is smaller than `inline_bytes_max` (0: never), else a blob under a fresh key.
    """
    data = encode_part(table, desc=desc, schema=schema)
    machine.metrics.count("part_written", kind="inline" if len(data) < inline_bytes_max else "blob")
    machine.metrics.count("part_written_bytes", len(data))
    if len(data) < inline_bytes_max:
        return InlinePart(data=data, rows=table.num_rows, diffs_sum=diffs_sum(table), schema_id=schema_id)
    return _store(machine, data, table, schema=schema, schema_id=schema_id)


def flush_inline(machine: Machine, part: InlinePart, *, schema: Schema) -> HollowPart:
    """The same updates as a blob, under a fresh key: same bytes, rewrite and schema."""
    table = decode_part(part.data, key="inline part", schema=schema).table
    hollow = _store(machine, part.data, table, schema=schema, schema_id=part.schema_id)
    return HollowPart(
        key=hollow.key,
        size_bytes=hollow.size_bytes,
        rows=hollow.rows,
        diffs_sum=hollow.diffs_sum,
        checksum=hollow.checksum,
        key_lower=hollow.key_lower,
        stats=hollow.stats,
        ts_rewrite=part.ts_rewrite,
        schema_id=part.schema_id,
    )


def delete_parts(machine: Machine, parts: Iterable[Part]) -> None:
    """Delete the blobs of parts that no state names or ever will. Idempotent."""
    for part in parts:
        if isinstance(part, HollowPart):
            key = blob_key(machine.shard_id, part.key)
            machine.versions.retry.external(
                "delete part", lambda key=key: machine.blob.delete(key), shard=machine.shard_id
            )


def _store(machine: Machine, data: bytes, table: pa.Table, *, schema: Schema, schema_id: int | None) -> HollowPart:
    key = part_key(APPLIER_VERSION, PartId.from_bytes(machine.env.random_bytes(16)))
    whole_key = blob_key(machine.shard_id, key)
    machine.versions.retry.external("set part", lambda: machine.blob.set(whole_key, data), shard=machine.shard_id)
    return HollowPart(
        key=key,
        size_bytes=len(data),
        rows=table.num_rows,
        diffs_sum=diffs_sum(table),
        checksum=checksum(data),
        key_lower=key_lower(table),
        stats=part_stats(table, schema, machine.settings.batch.stats_bytes_max),
        schema_id=schema_id,
    )
