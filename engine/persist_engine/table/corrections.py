"""Desired minus persisted, for rows that are in memory. Vectorised over the rows.

`Snapshot.corrections` gives the same updates for rows that were staged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.client.read.snapshot import BATCH_ROWS, READ_MEMORY_BYTES, Snapshot
from persist_engine.parts.consolidate import merge_runs
from persist_engine.rows.columns import flatten_columns
from persist_engine.rows.updates import consolidate

_ROW = ("key", "val", "diff")


def retracted(rows: pa.Table, time: int) -> pa.Table:
    """The updates at `time` that remove rows of a snapshot."""
    return _at(rows.set_column(3, "diff", pc.negate_checked(rows.column("diff"))), time)


def correction(persisted: pa.Table, desired: pa.Table, *, time: int) -> pa.Table:
    """The updates at `time` that turn `persisted` into `desired`, consolidated. Both are consolidated and sorted."""
    if persisted.num_rows == desired.num_rows:
        # Rows that stay where they are cancel. Usually that is nearly all of them.
        differs = pa.array(~_same(persisted, desired))
        persisted, desired = persisted.filter(differs), desired.filter(differs)
    return consolidate(pa.concat_tables([retracted(persisted, time), _at(desired, time)]))


def corrections(snapshot: Snapshot, desired: pa.Table, *, time: int) -> Iterator[pa.Table]:
    """The same for a snapshot of any size, within about the memory of a streaming read."""
    old = (retracted(pa.Table.from_batches([batch]), time) for batch in snapshot.to_batches())
    wanted = (pa.Table.from_batches([batch]) for batch in _at(desired, time).to_batches(max_chunksize=BATCH_ROWS))
    return merge_runs([old, wanted], memory_bytes=READ_MEMORY_BYTES)


def _at(rows: pa.Table, time: int) -> pa.Table:
    return rows.set_column(2, "time", pa.repeat(pa.scalar(time, pa.int64()), rows.num_rows))


def _same(left: pa.Table, right: pa.Table) -> npt.NDArray[np.bool_]:
    """For each place, whether both have the same row there, as the engine compares: null is null, NaN is NaN, -0.0 is 0.0."""
    same = np.ones(left.num_rows, np.bool_)
    for one, other in zip(flatten_columns(left, _ROW), flatten_columns(right, _ROW), strict=True):
        equal = pc.equal(one, other)
        if pa.types.is_floating(one.type):
            equal = pc.or_kleene(equal, pc.and_kleene(pc.is_nan(one), pc.is_nan(other)))
        if one.null_count or other.null_count:
            equal = pc.or_(pc.fill_null(equal, False), pc.and_(pc.is_null(one), pc.is_null(other)))  # noqa: FBT003 - Arrow's own signature
        same &= equal.to_numpy()
    return same
