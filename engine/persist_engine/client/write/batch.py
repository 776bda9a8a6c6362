"""Batch and BatchBuilder: updates staged as parts before anybody appends them (spec 10).

Owns how updates are cut into parts and how many uploads are in flight. Touches no shard state: a batch that is never
appended is only blobs, deleted by `Batch.delete` or found by an audit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import pyarrow as pa

from persist_engine.base.errors import (
    InvalidBounds,
    InvalidEmptyTimeInterval,
    InvalidUsage,
    InvariantViolated,
    UpdateBeyondUpper,
    UpdateNotBeyondLower,
)
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.client.write.runs import Run, RunGroups
from persist_engine.codec.batch import encode_transmittable
from persist_engine.model.batch import HollowBatch, InlinePart, Part, RunMeta, RunOrder, RunPart, rewritten
from persist_engine.model.frontier import EMPTY, MINIMUM, Antichain, Description, TimeLike, frontier_of
from persist_engine.model.ids import RunId, ShardId
from persist_engine.model.spine.merge import wrapped
from persist_engine.parts.listings import spill_runs
from persist_engine.parts.write import PartStore, delete_parts, flush_inline, write_part
from persist_engine.rows.ingest import Updates, normalise, time_bounds
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate, diffs_sum

#: Inline parts that are flushed at once, over all batches of an append. They are small: what counts is to wait for the
#: store's answers together.
FLUSH_THREADS = 16

#: How a batch ends whose deletion breaks off.
_IN_PART = "deleted in part"

#: Of tables below this nobody asks how much of their buffers they use.
_SMALL_BYTES = 16 * 1024

_log = logging.getLogger(__name__)


class Batch:
    """Updates with times in [lower, upper), staged and durable, not yet part of the shard. Not thread-safe.

    Ends in one of three ways: appended, sent elsewhere (`to_transmittable`), or deleted. Using it after that is
    InvalidUsage.
    """

    def __init__(
        self,
        store: PartStore,
        hollow: HollowBatch,
        *,
        schema: Schema,
        shard_id: ShardId,
        version: str = APPLIER_VERSION,
        named_keys: NamedKeys | None = None,
    ) -> None:
        self._store = store
        self._named_keys = named_keys
        self._schema = schema
        self._hollow = hollow
        self._spent: str | None = None
        self.shard_id = shard_id
        """The shard it was built for."""
        self.version = version
        """Version of the code that built it."""

    @property
    def lower(self) -> Antichain:
        """No update's time is before it."""
        return self._hollow.desc.lower

    @property
    def upper(self) -> Antichain:
        """Every update's time is before it."""
        return self._hollow.desc.upper

    @property
    def rows(self) -> int:
        """How many updates, consolidated within each part."""
        return self._hollow.rows

    @property
    def size_bytes(self) -> int:
        """Encoded bytes of all parts."""
        return self._hollow.size_bytes

    @property
    def hollow(self) -> HollowBatch:
        """The descriptor: what an append puts into the shard's state."""
        return self._hollow

    def to_transmittable(self) -> bytes:
        """Bytes from which `WriteHandle.batch_from_transmittable` makes this batch again, in any process. Spends
        this one.
        """
        self.check_usable()
        data = encode_transmittable(self.shard_id, self.version, self._hollow)
        self.mark_spent("sent elsewhere")
        return data

    def delete(self) -> None:
        """Delete the blobs; only for a batch that nobody appends, now or later. Idempotent.

        A batch that came from elsewhere may have been appended before, from a copy of its bytes: blobs that a live
        version of the shard names are left to garbage collection, and an append of it that was given up and is still on
        its way is made to fail, by a commit that changes nothing.
        Once it has begun it can only be brought to its end, by another call.
        """
        if self.is_deleted:
            return
        self.check_deletable()
        named = self._named_keys([self]) if self._named_keys is not None and self.has_blobs else ()
        self.delete_but(named)

    def delete_but(self, named: Collection[str]) -> None:
        """Delete the blobs whose partial keys are not among `named`. See `delete`, which knows which these are."""
        self.mark_spent(_IN_PART)  # before the first is gone: what is left must not be appended
        delete_parts(self._store, [part for part in self._hollow.parts if not _names_any(part, named)])
        self.mark_spent("deleted")

    def flush_inline_parts(self) -> None:
        """See the function."""
        flush_inline_parts([self])

    def drop_inline_parts(self) -> None:
        """Forget the inline parts: their updates are part of another batch now. The batch may be left without any."""
        self.check_usable()
        self._hollow = without_inline_parts(self._hollow)

    def rewrite_times(self, frontier: TimeLike, new_upper: TimeLike) -> None:
        """Advance all times to `frontier` and register the batch up to `new_upper`, without touching its data: for a
        batch that was staged before its time was known. Idempotent. InvalidRewrite as of `model.rewrite`.
        """
        self.check_usable()
        self._hollow = rewritten(self._hollow, frontier_of(frontier), frontier_of(new_upper, "new_upper"))

    @property
    def is_deleted(self) -> bool:
        """Whether `delete` was called."""
        return self._spent == "deleted"

    @property
    def may_have_copies(self) -> bool:
        """Whether it was made from bytes, from which others may have made it too, or may have been appended."""
        return self._named_keys is not None

    @property
    def is_rewritten(self) -> bool:
        """Whether its times were rewritten, here or before it was sent: copies of it may end elsewhere."""
        return any(part.ts_rewrite is not None for part in self._hollow.parts)

    @property
    def has_blobs(self) -> bool:
        """Whether not all of it is inline."""
        return any(True for _ in self._hollow.blob_keys())

    def note_unknown_outcome(self, named_keys: NamedKeys) -> None:
        """It may have been appended: from here on it is as careful as one that has copies, by `named_keys`."""
        self._named_keys = named_keys

    def check_usable(self) -> None:
        """Raise InvalidUsage when the batch was appended, sent elsewhere or deleted."""
        if self._spent is not None:
            raise InvalidUsage(f"batch {self._hollow.desc} of shard {self.shard_id} was already {self._spent}")

    def check_deletable(self) -> None:
        """As `check_usable`, but what was deleted in part may be deleted to its end."""
        if self._spent != _IN_PART:
            self.check_usable()

    def mark_spent(self, how: str) -> None:
        """The batch has come to its end: `how` completes "was already ..."."""
        self._spent = how

    def __del__(self) -> None:
        # A batch whose making failed has no `_spent`.
        keys = [] if getattr(self, "_spent", "never made") not in (None, _IN_PART) else list(self._hollow.blob_keys())
        if keys:
            text = "a batch of shard %s was dropped, neither appended nor deleted; its blobs stay: %s"
            _log.warning(text, self.shard_id, ", ".join(keys), extra={"shard": self.shard_id})

    def __repr__(self) -> str:
        return f"Batch({self._hollow.desc} {self.rows} rows {len(self._hollow.parts)} parts of {self.shard_id})"


NamedKeys: TypeAlias = Callable[[Sequence[Batch]], Collection[str]]
"""Partial keys that the shard names, where some of the batches may have been appended."""


def flush_inline_parts(batches: Sequence[Batch]) -> None:
    """Rewrite every inline part of every batch as a blob, in place and all at once: the order of parts, their rewrites
    and their schemas stay (spec 10.10). Every batch must be usable.
    """
    inline: list[tuple[Batch, InlinePart]] = []
    for batch in batches:
        batch.check_usable()
        inline += [(batch, part) for part in batch.hollow.parts if isinstance(part, InlinePart)]
    if not inline:
        return

    def flush(item: tuple[Batch, InlinePart]) -> Part:
        return flush_inline(item[0]._store, item[1])

    if len(inline) == 1:  # the usual case is not worth a thread
        flushed = iter([flush(inline[0])])
    else:
        with ThreadPoolExecutor(min(FLUSH_THREADS, len(inline)), thread_name_prefix="persist-flush") as pool:
            flushed = iter(list(pool.map(flush, inline)))
    for batch in batches:
        parts = tuple(next(flushed) if isinstance(part, InlinePart) else part for part in batch.hollow.parts)
        batch._hollow = replace(batch.hollow, parts=parts)
    metrics = inline[0][0]._store.metrics
    metrics.count("inline_flushed_parts", len(inline))
    metrics.count("inline_flushed_bytes", sum(part.inline_bytes for _, part in inline))


def without_inline_parts(batch: HollowBatch) -> HollowBatch:
    """`batch` with its parts in blob only; a run that has none is left out."""
    parts: list[RunPart] = []
    splits: list[int] = []
    metas: list[RunMeta] = []
    rows = batch.rows
    for meta, run in batch.runs():
        kept = [part for part in run if not isinstance(part, InlinePart)]
        gone = sum(part.rows for part in run if isinstance(part, InlinePart))
        rows -= gone
        if not kept:
            continue
        if parts:
            splits.append(len(parts))
        parts += kept
        metas.append(meta if meta.rows is None or not gone else replace(meta, rows=meta.rows - gone))
    return HollowBatch(batch.desc, max(rows, 0), tuple(parts), tuple(splits), tuple(metas))


class BatchBuilder:
    """Takes updates in any order, cuts and uploads parts in the background. Not thread-safe.

    Memory: one part being filled and `batch.outstanding_parts_max` on their way, each about
    `batch.target_part_bytes`, times what sorting needs; two more while runs are merged. Every part is consolidated
    and sorted by itself and is a run of its own; with `batch.runs_max` runs are merged meanwhile, and those longer than
    `batch.run_parts_max` end behind listings. As a context manager it abandons what was not finished.
    """

    def __init__(
        self, store: PartStore, lower: Antichain, *, schema: Schema, schema_id: int, upper: Antichain = EMPTY
    ) -> None:
        # The description inside each part: what the writer promised. `finish` registers the batch under a narrower one.
        self._desc = Description(lower, upper, MINIMUM)
        self._store = store
        self._schema, self._schema_id = schema, schema_id
        self._settings = store.settings.batch
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._time_max: int | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: deque[Future[Part | None]] = deque()
        self._groups = RunGroups(
            store, self._desc, schema=schema, schema_id=schema_id, runs_max=self._settings.runs_max
        )
        self._ended = False

    def add(self, updates: Updates) -> None:
        """Stage more updates. Waits while too many uploads are in flight.

        UpdateNotBeyondLower, UpdateBeyondUpper, SchemaMismatch: the builder is then abandoned, as after any error.
        """
        self._check_open()
        try:
            for table in normalise(updates, self._schema):
                self._check_times(table)
                self._cut(table)
        except BaseException:
            self.abandon()
            raise

    def finish(self, upper: TimeLike) -> Batch:
        """The batch of all that was added, under [lower, upper); every part is durable. Ends the builder.

        InvalidBounds, InvalidEmptyTimeInterval, UpdateBeyondUpper: the parts written so far are deleted.
        """
        self._check_open()
        lower = self._desc.lower
        try:
            upper = frontier_of(upper, "upper")
            if not lower <= upper:
                raise InvalidBounds(f"upper {upper} is before lower {lower}", lower=lower, upper=upper)
            if self._time_max is not None:
                if lower == upper:
                    raise InvalidEmptyTimeInterval(
                        f"updates for the empty interval [{lower}, {upper})", lower=lower, upper=upper, parts=()
                    )
                _check_before(self._time_max, upper)
            self._flush(last=True)
            while self._in_flight:
                self._collect()
            hollow = spill_runs(self._store, self._hollow(self._groups.finish(), upper))
        except BaseException:
            self.abandon()
            raise
        self._end()
        return Batch(self._store, hollow, schema=self._schema, shard_id=self._store.shard_id)

    def abandon(self) -> None:
        """Give up: delete the parts written so far. Idempotent; nothing happens after `finish`."""
        if self._ended:
            return
        self._end()
        done = [future for future in self._in_flight if not future.cancelled() and future.exception() is None]
        parts = [part for future in done if (part := future.result()) is not None]
        self._in_flight.clear()
        delete_parts(self._store, [*parts, *(part for run in self._groups.runs() for part in run)])

    def __enter__(self) -> BatchBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidUsage(f"this builder of shard {self._store.shard_id} has ended")

    def _check_times(self, table: pa.Table) -> None:
        least, greatest = time_bounds(table)
        lower, upper = self._desc.lower, self._desc.upper
        if not lower.less_equal(least):
            raise UpdateNotBeyondLower(f"update at time {least} is not beyond lower {lower}", ts=least, lower=lower)
        if not upper.is_empty():
            if lower == upper:
                raise InvalidEmptyTimeInterval(
                    f"updates for the empty interval [{lower}, {upper})", lower=lower, upper=upper, parts=()
                )
            _check_before(greatest, upper)
        self._time_max = greatest if self._time_max is None else max(self._time_max, greatest)

    def _cut(self, table: pa.Table) -> None:
        """Fill parts up to the target size, slicing tables that reach over it."""
        target = self._settings.target_part_bytes
        while table.num_rows:
            # The buffers that a table shares may be far larger than its rows, but when even they are small it is settled.
            size_bytes = table.get_total_buffer_size()
            if self._pending or size_bytes > _SMALL_BYTES:
                size_bytes = table.nbytes
            room = target - self._pending_bytes
            if size_bytes < room:
                self._pending.append(table)
                self._pending_bytes += size_bytes
                return
            rows = min(table.num_rows, max(1, table.num_rows * room // size_bytes))
            self._pending.append(table.slice(0, rows))
            self._flush(last=False)
            table = table.slice(rows)

    def _flush(self, *, last: bool) -> None:
        """Write what is pending as one part: in the background, but for the last, which would only be waited for."""
        if not self._pending:
            return
        tables, self._pending, self._pending_bytes = self._pending, [], 0
        if last and self._pool is None:
            if (part := self._write(tables)) is not None:
                self._groups.add(part)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._settings.outstanding_parts_max, thread_name_prefix="persist-part")
        while len(self._in_flight) >= self._settings.outstanding_parts_max:
            self._store.metrics.count("write_stall")
            self._collect()
        self._in_flight.append(self._pool.submit(self._write, tables))

    def _write(self, tables: list[pa.Table]) -> Part | None:
        """`tables` is empty afterwards: the pool keeps the list until the part is uploaded."""
        try:
            consolidated = consolidate(_put_together(tables))
            if (total := diffs_sum(consolidated)) != wrapped(total):
                raise InvariantViolated("diffs sum to more than int64 holds")
        except InvariantViolated as error:  # a rule for what is stored; this was only handed over
            raise InvalidUsage(f"updates cannot be stored as one part: {error}") from error
        if consolidated.num_rows == 0:
            return None
        return write_part(
            self._store,
            consolidated,
            desc=self._desc,
            schema=self._schema,
            schema_id=self._schema_id,
            inline_bytes_max=self._settings.inline_part_bytes_max,
        )

    def _collect(self) -> None:
        """Wait for the oldest upload."""
        part = self._in_flight[0].result()
        self._in_flight.popleft()
        if part is not None:
            self._groups.add(part)

    def _hollow(self, runs: list[Run], upper: Antichain) -> HollowBatch:
        env = self._store.env
        rows = [sum(part.rows for part in run) for run in runs]
        metas = [
            RunMeta(RunOrder.STRUCTURED, RunId.from_bytes(env.random_bytes(16)), self._schema_id, count)
            for count in rows
        ]
        return HollowBatch(
            desc=Description(self._desc.lower, upper, MINIMUM),
            rows=sum(rows),
            parts=tuple(part for run in runs for part in run),
            run_splits=tuple(accumulate(len(run) for run in runs[:-1])),
            run_metas=tuple(metas),
        )

    def _end(self) -> None:
        self._ended = True
        self._pending = []
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _put_together(tables: list[pa.Table]) -> pa.Table:
    """`tables` as one, and no more in their list: nothing but the answer holds on to their memory."""
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    tables.clear()
    return table


def _names_any(part: RunPart, keys: Collection[str]) -> bool:
    return not isinstance(part, InlinePart) and part.key in keys


def _check_before(time: int, upper: Antichain) -> None:
    if upper.less_equal(time):
        raise UpdateBeyondUpper(f"update at time {time} is beyond upper {upper}", ts=time, upper=upper)
