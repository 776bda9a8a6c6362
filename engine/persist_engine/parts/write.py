"""Writes and deletes the parts of batches. One table of updates becomes one blob, or a few bytes within state.

This module owns the order in which a part is made: bytes first, blob next, descriptor last. A crash in between leaks a
blob and loses nothing. The module knows nothing of bounds, or of how updates are split into parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import pyarrow as pa

from persist_engine.base.metrics import Metrics
from persist_engine.codec.damage import checksum
from persist_engine.codec.inline_part import ROW_BYTES_MIN, decode_inline, encode_inline, inline_format_name_of
from persist_engine.codec.keys import blob_key
from persist_engine.codec.part import encode_part, format_name_of, schema_of
from persist_engine.codec.row_groups import footing_of
from persist_engine.model.batch import HollowPart, HollowRun, InlinePart, Part, RunPart
from persist_engine.model.frontier import Description
from persist_engine.model.spine.merge import wrapped
from persist_engine.parts.listings import RunWriter, deletion_waves, new_part_key
from persist_engine.rows.order import KEY_LOWER_BYTES_MAX, key_lower
from persist_engine.rows.part_stats import part_stats
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import diffs_sum


class PartStore(RunWriter, Protocol):
    """What staging parts needs from a shard: its blobs, never its state. A Machine is a PartStore. A process that must not
    access consensus (a Spark executor) has another implementation.
    """

    @property
    def metrics(self) -> Metrics: ...

    @property
    def filtered(self) -> Sequence[str]:
        """The columns for which new parts get Bloom filters: `key.<field>` and `val.<field>`."""


def write_part(
    store: PartStore,
    table: pa.Table,
    *,
    desc: Description,
    schema: Schema,
    schema_id: int,
    inline_bytes_max: int,
    filtered: Sequence[str] | None = None,
) -> Part:
    """Encodes `table` (at least one row) under `desc`. The part is durable when this returns.

    The part is inline when its record batch is smaller than `inline_bytes_max` (0: never). Otherwise it is a blob under a fresh key, with
    Bloom filters for the columns `filtered` (None: those of the store).
    """
    started_s = store.env.monotonic_s()
    inline = None
    if table.num_rows * ROW_BYTES_MIN < inline_bytes_max:
        inline = encode_inline(table, desc=desc, schema=schema, bytes_max=inline_bytes_max)
    paths = _paths(table, store.filtered if filtered is None else filtered)
    data = encode_part(table, desc=desc, schema=schema, filtered=paths) if inline is None else inline
    what = "part" if inline is None else "inline"
    store.metrics.observe_s("codec", store.env.monotonic_s() - started_s, op="encode", what=what)
    store.metrics.count("part_written", kind="blob" if inline is None else "inline")
    store.metrics.count("part_written_bytes", len(data))
    store.metrics.count("part_written_good_bytes", table.nbytes)
    if inline is not None:
        total, wraps = _diffs_sum(table)
        return InlinePart(
            inline, table.num_rows, total, schema_id=schema_id, format=inline_format_name_of(schema), sum_wraps=wraps
        )
    part = _set_blob(store, data, table, schema=schema, schema_id=schema_id, filtered=paths)
    store.metrics.observe_s("part_write", store.env.monotonic_s() - started_s)
    return part


def flush_inline(store: PartStore, part: InlinePart) -> HollowPart:
    """Writes the same updates as a blob under a fresh key. Rows, description, rewrite and schema stay the same. The schema
    need not be the shard's newest.
    """
    opened = decode_inline(part.data, format_name=part.format, key="inline part", schema=None)
    schema = schema_of(opened.table.schema)
    paths = _paths(opened.table, store.filtered)
    data = encode_part(opened.table, desc=opened.desc, schema=schema, filtered=paths)
    hollow = _set_blob(store, data, opened.table, schema=schema, schema_id=part.schema_id, filtered=paths)
    return replace(hollow, ts_rewrite=part.ts_rewrite)


def delete_parts(store: PartStore, parts: Iterable[RunPart]) -> None:
    """Deletes the blobs of `parts`, and of all parts below hollow runs. No state may name them, now or ever.
    Idempotent.
    """
    some = list(parts)
    waves = deletion_waves(store, [part.key for part in some if isinstance(part, HollowRun)])
    for key in itertools.chain((part.key for part in some if isinstance(part, HollowPart)), *waves):
        whole_key = blob_key(store.shard_id, key)
        store.retry.external("delete part", partial(store.blob.delete, whole_key), shard=store.shard_id)


def _set_blob(
    store: PartStore, data: bytes, table: pa.Table, *, schema: Schema, schema_id: int | None, filtered: Sequence[str]
) -> HollowPart:
    key = new_part_key(store)
    whole_key = blob_key(store.shard_id, key)
    store.retry.external("set part", lambda: store.blob.set(whole_key, data), shard=store.shard_id)
    store.metrics.count("shard_blob_sets", shard=store.shard_id)
    lower = key_lower(table)
    total, wraps = _diffs_sum(table)
    if len(lower) == KEY_LOWER_BYTES_MAX:
        store.metrics.count("key_lower_cut")
    return HollowPart(
        key=key,
        size_bytes=len(data),
        rows=table.num_rows,
        diffs_sum=total,
        sum_wraps=wraps,
        checksum=checksum(data),
        key_lower=lower,
        stats=part_stats(table, schema, store.settings.batch.stats_bytes_max),
        schema_id=schema_id,
        format=format_name_of(schema),
        footer=footing_of(data, filtered),
    )


def _paths(table: pa.Table, filtered: Sequence[str]) -> tuple[str, ...]:
    """The columns of `filtered` that `table` has and that can have filters."""
    if not filtered:
        return ()
    from persist_engine.codec.bloom import filtered_paths  # most shards have none

    return filtered_paths(table.schema, filtered)


def _diffs_sum(table: pa.Table) -> tuple[int, bool]:
    """The sum of diffs as a descriptor holds it (modulo 2**64), and whether it differs from the true sum."""
    total = diffs_sum(table)
    return wrapped(total), wrapped(total) != total
