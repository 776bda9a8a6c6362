"""Corrections, which are desired minus persisted: how one is planned, staged and adapted after other writes, and what an overwrite left.

Vectorised over the rows. `Snapshot.corrections` computes the same updates for rows that were staged. This module knows no frames and no
times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.client.expiring import Expiring
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.pieces import BATCH_ROWS, READ_MEMORY_BYTES
from persist_engine.client.read.snapshot import SinceAhead, Snapshot
from persist_engine.client.write.batch import Batch
from persist_engine.client.write.handle import WriteHandle
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.parts.consolidate import merge_runs
from persist_engine.rows.columns import constant, same_rows
from persist_engine.rows.predicate import Predicate
from persist_engine.rows.updates import consolidate
from persist_engine.table.columns import Columns

_ROW = ("key", "val", "diff")
#: A correction up to this size also stays in memory. After other writes it is staged anew, so that it counts exactly what it changes.
RESTAGED_BYTES_MAX = 256 << 10
#: The limit on the memory for what other writers wrote meanwhile. With more, the correction begins anew.
FOLLOWED_BYTES_MAX = 64 << 20

#: Returns the rows of a batch that a correction retracts.
Touched = Callable[[pa.RecordBatch], pa.Table]


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes how a write corrects the contents."""

    updates: Callable[[Snapshot, Columns, int], Iterable[pa.Table]]
    """Returns the updates at a time that correct a snapshot."""
    touched: Callable[[pa.RecordBatch, Columns], pa.Table] = lambda rows, _: pa.Table.from_batches([rows])
    """Returns the rows of a batch that the correction retracts; by default all of them."""
    where: Predicate | None = None
    """The condition that all rows which it retracts fulfil."""


class Correction:
    """Staged updates that turn the contents before an upper into what they should be. For one thread.

    A correction consists of the desired rows, minus the rows that it touches. So after other writes it must only retract the rows of these
    that it touches. Nothing else is read or staged again; the staged batch only moves to a later time. A correction that began anew after
    each lost race would lose to any writer that commits more often than one read takes.

    It ends with `appended`, or with `discard`. After an error with an unknown outcome neither is called, and the blobs stay.
    """

    def __init__(self, writer: WriteHandle, *, upper: Antichain, time: int, plan: Iterable[pa.Table]) -> None:
        """Stages the tables of `plan`, whose updates are at `time` and correct the contents before `upper`."""
        self._writer = writer
        self.upper, self.time = upper, time
        self._inserted = self._deleted = 0
        self._rest: pa.Table | None = None  # the updates in memory, which the last of `_batches` holds in staged form
        kept: list[pa.Table] | None = [writer.schema.updates_schema.empty_table()]
        with writer.builder(upper) as builder:
            for table in plan:
                self._count(table)
                if kept is not None and table.num_rows:
                    kept = [*kept, table] if sum(each.nbytes for each in kept) <= RESTAGED_BYTES_MAX else None
                if table.num_rows:
                    builder.add(table)
            self._batches = [builder.finish(Antichain.of(time + 1))]
        self._fixed = (self._inserted, self._deleted) if kept is None else None
        if kept is not None:
            self._rest = pa.concat_tables(kept)

    @property
    def batches(self) -> list[Batch]:
        """All batches, to be appended together at `upper`."""
        return self._batches

    @property
    def sums(self) -> tuple[int, int]:
        """The numbers of rows that it adds and removes. If a large correction followed other writers, a row may count as both."""
        return self._inserted, self._deleted

    def follow(
        self, reader: ReadHandle, upper: Antichain, time: int, *, where: Predicate | None, touched: Touched
    ) -> bool:
        """Adapts it to the contents before the later `upper`, at `time`. Returns False when it must begin anew, because the updates written
        meanwhile are no longer distinguishable, or are too many. Every row that `touched` picks must fulfil `where`.
        """
        answer = reader.changes(self.upper.newest_complete, upper.newest_complete, where=where)
        if isinstance(answer, SinceAhead):
            return False
        found: list[pa.Table] = []
        with answer:
            for batch in answer.to_batches():
                found.append(retracted(touched(batch), time))
                if sum(each.nbytes for each in found) > FOLLOWED_BYTES_MAX:
                    return False
        self._restage(found, upper, time)
        return True

    def discard(self) -> None:
        """Deletes what was staged and was certainly not appended."""
        for batch in self._batches:
            self._writer.discard(batch)

    def _restage(self, found: list[pa.Table], upper: Antichain, time: int) -> None:
        rest = [_at(each, time) for each in ([] if self._rest is None else [self._rest])]
        self._rest = consolidate(pa.concat_tables([self._writer.schema.updates_schema.empty_table(), *rest, *found]))
        kept, replaced = (self._batches[:1], self._batches[1:]) if self._fixed is not None else ([], self._batches)
        for batch in replaced:
            self._writer.discard(batch)
        self._batches = kept
        self._inserted, self._deleted = (0, 0) if self._fixed is None else self._fixed
        self._count(self._rest)
        self._batches = [
            *kept,
            self._writer.batch(self._rest, lower=upper, upper=Antichain.of(time + 1)),
        ]
        # SUBTLE: either all batches of one append must be marked as rewritten, or none.
        for batch in self._batches:
            batch.rewrite_times(Antichain.of(time), Antichain.of(time + 1))
        self.upper, self.time = upper, time

    def _count(self, updates: pa.Table) -> None:
        diffs = updates.column("diff").to_numpy()
        self._inserted += int(diffs[diffs > 0].sum())
        self._deleted -= int(diffs[diffs < 0].sum())


class LeftRows(Expiring):
    """The rows that an overwrite left, so that the next overwrite need not read them. The contents at a time are definite, so they are
    valid while that time is the newest one. Threads may share it. It holds memory of its own, and nothing of the store.
    """

    def __init__(self, shard_id: ShardId) -> None:
        self._shard_id = shard_id
        self._left: tuple[int, pa.Table] | None = None

    @property
    def shard_id(self) -> ShardId:
        """See Expiring."""
        return self._shard_id

    def at(self, time: int, schema: pa.Schema) -> pa.Table | None:
        """The contents at `time` as consolidated updates of `schema`; None when unknown."""
        left = self._left
        return left[1] if left is not None and left[0] == time and left[1].schema == schema else None

    def keep(self, time: int, rows: pa.Table) -> None:
        """Keeps a copy of `rows` as the contents at `time`. They must be consolidated; their own times do not matter."""
        left = self._left
        is_alike = left is not None and left[1].schema == rows.schema
        self._left = (time, _copied(rows, left[1] if left is not None and is_alike else rows.schema.empty_table()))

    def expire(self) -> None:
        """See Expiring."""
        self._left = None


def retracted(rows: pa.Table, time: int) -> pa.Table:
    """The updates at `time` that remove rows of a snapshot."""
    return _at(rows.set_column(3, "diff", pc.negate_checked(rows.column("diff"))), time)


def correction(persisted: pa.Table, desired: pa.Table, *, time: int) -> pa.Table:
    """The updates at `time` that turn `persisted` into `desired`, consolidated. Both are consolidated and sorted."""
    if persisted.num_rows == desired.num_rows:
        # Rows that are equal at the same index cancel. Usually these are nearly all rows.
        differs = pa.array(~same_rows(persisted, desired, _ROW))
        persisted, desired = persisted.filter(differs), desired.filter(differs)
    return consolidate(pa.concat_tables([retracted(persisted, time), _at(desired, time)]))


def corrections(snapshot: Snapshot, desired: pa.Table, *, time: int) -> Iterator[pa.Table]:
    """Like `correction`, for a snapshot of any size, within about the memory of a streaming read."""
    old = (retracted(pa.Table.from_batches([batch]), time) for batch in snapshot.to_batches())
    wanted = (pa.Table.from_batches([batch]) for batch in _at(desired, time).to_batches(max_chunksize=BATCH_ROWS))
    return merge_runs([old, wanted], memory_bytes=READ_MEMORY_BYTES)


def _copied(rows: pa.Table, kept: pa.Table) -> pa.Table:
    """The same rows in buffers of their own. Shares the fields that are equal in `kept`, a copy made before.

    SUBTLE: rows that were in order already may still refer to the arrays of the caller's frame, into which the caller may write later.
    """
    columns: list[pa.Array] = []
    for ours, theirs in zip(rows.columns, kept.columns, strict=True):
        if not pa.types.is_struct(ours.type) or not ours.type.num_fields:
            columns.append(_copied_field(ours, theirs))
            continue
        pairs = zip(ours.flatten(), theirs.flatten(), strict=True)
        columns.append(pa.StructArray.from_arrays([_copied_field(*pair) for pair in pairs], fields=list(ours.type)))
    return pa.table(columns, schema=rows.schema)


def _copied_field(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> pa.Array:
    if ours.equals(theirs) and theirs.num_chunks == 1:
        return theirs.chunk(0)
    return pa.concat_arrays(ours.chunks or [pa.array([], ours.type)])


def _at(rows: pa.Table, time: int) -> pa.Table:
    return rows.set_column(2, "time", constant(time, rows.num_rows))
