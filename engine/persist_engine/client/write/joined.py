"""Joins many staged batches into the one that an append puts into state (spec 9.5, 10.9).

Owns which parts become which runs, and the joining of small inline parts. Does not decide whether the append may happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.client.write.batch import Batch, BatchBuilder
from persist_engine.model.batch import HollowBatch, InlinePart, RunMeta, RunPart
from persist_engine.model.frontier import Description
from persist_engine.parts.fetch import PartSource
from persist_engine.parts.write import PartStore
from persist_engine.rows.schema import Schema


def joined(batches: Sequence[HollowBatch], desc: Description) -> HollowBatch:
    """The runs of all batches, in their order, under one description. A run is marked if the description cuts it (spec 10.9)."""
    if len(batches) == 1 and batches[0].desc == desc:  # the usual append
        return batches[0]
    parts: list[RunPart] = []
    splits: list[int] = []
    metas: list[RunMeta] = []
    for batch in batches:
        cut = (batch.desc.lower, batch.desc.upper) != (desc.lower, desc.upper) and not _is_moved_into(batch, desc)
        for meta, run in batch.runs():
            if parts:
                splits.append(len(parts))
            parts += run
            metas.append(replace(meta, truncated=True) if cut else meta)
    rows = sum(batch.rows for batch in batches)
    return HollowBatch(desc=desc, rows=rows, parts=tuple(parts), run_splits=tuple(splits), run_metas=tuple(metas))


def _is_moved_into(batch: HollowBatch, desc: Description) -> bool:
    """Whether all rows of the batch were moved to times within `desc`, so that its bounds hide none of them."""
    if batch.desc.upper != desc.upper:
        return False
    return all(part.ts_rewrite is not None and desc.lower <= part.ts_rewrite for part in batch.parts)


def combined_inline_parts(
    batches: Sequence[Batch], desc: Description, *, store: PartStore, schema: Schema, schema_id: int
) -> Batch | None:
    """A new batch of [desc.lower, desc.upper) with the rows of all inline parts of `batches`. If it is appended in place of
    these parts, there is one part, in state or in blob, instead of many.

    `batches` stay as they are. The caller must append or delete the new batch. Returns None when there are fewer than two
    inline parts, when some have another schema, or when the joined rows cannot be stored as one part. Rows are cut to
    `desc` after their times were rewritten.
    """
    small = [
        (part, batch.hollow.desc.since)
        for batch in batches
        for part in batch.hollow.parts
        if isinstance(part, InlinePart)
    ]
    if len(small) < 2 or any(part.schema_id != schema_id for part, _ in small):
        return None
    source = PartSource(store.shard_id, store.blob, schema, store.retry, store.metrics, path="builder")
    try:
        with BatchBuilder(store, desc.lower, schema=schema, schema_id=schema_id, upper=desc.upper) as builder:
            for part, since in small:
                bounds = Description(desc.lower, desc.upper, since)
                builder.add(pa.concat_tables(source.decode(part.data, part, bounds)))
            store.metrics.count("inline_combined_parts", len(small))
            return builder.finish(desc.upper)
    except InvalidUsage:  # one row cannot hold the sum of the diffs, but each batch alone is valid
        return None


def gathered(
    batches: Sequence[Batch], desc: Description, *, store: PartStore, schema: Schema, schema_id: int
) -> list[Batch]:
    """Prepares `batches` for appends of all of them that may be refused and tried again. The updates of their inline parts
    move into one more batch, so that no attempt has to join them (`batch.combine_inline`). Returns the batches to append in
    their place; these are `batches` when there is nothing to join. No batch may hold an update outside `desc`. Idempotent:
    at most one inline part is left.

    Like `flush_inline_parts`, this changes `batches`. Each must be usable.
    """
    combined = combined_inline_parts(batches, desc, store=store, schema=schema, schema_id=schema_id)
    if combined is None:
        return list(batches)
    for batch in batches:
        batch.drop_inline_parts()
    return [batch for batch in (*batches, combined) if batch.hollow.parts]
