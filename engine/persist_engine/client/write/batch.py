"""Batch and BatchBuilder: updates staged as parts before an append (spec 10).

Owns how updates are cut into parts and how many uploads are in flight. Touches no shard state: a batch that is never
appended is only a set of blobs, which `Batch.delete` deletes or an audit finds.
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
from persist_engine.model.batch import (
    NOTHING_WAITS,
    HollowBatch,
    InlinePart,
    Part,
    RunMeta,
    RunOrder,
    RunPart,
    rewritten,
)
from persist_engine.model.frontier import EMPTY, MINIMUM, Antichain, Description, TimeLike, frontier_of
from persist_engine.model.ids import RunId, ShardId
from persist_engine.model.spine.merge import wrapped
from persist_engine.parts.listings import spill_runs
from persist_engine.parts.write import PartStore, delete_parts, flush_inline, write_part
from persist_engine.rows.ingest import Updates, normalise, time_bounds
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate, diffs_sum, has_retraction

#: The number of inline parts flushed at once, over all batches of an append. They are small, so waiting for the store dominates.
FLUSH_THREADS = 16

#: How a batch ended whose deletion was interrupted.
_IN_PART = "deleted in part"

#: A table with buffers below this size counts with all of them, whatever share of them its rows use.
_SMALL_BYTES = 16 * 1024

_log = logging.getLogger(__name__)


class Batch:
    """Updates with times in [lower, upper), staged and durable, not yet part of the shard. Not thread-safe.

    It ends in one of three ways: it is appended, sent elsewhere (`to_transmittable`), or deleted. Any use after that raises
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
        """The shard for which the batch was built."""
        self.version = version
        """The version of the code that built the batch."""

    @property
    def lower(self) -> Antichain:
        """The frontier before which there is no update."""
        return self._hollow.desc.lower

    @property
    def upper(self) -> Antichain:
        """The frontier before which all updates are."""
        return self._hollow.desc.upper

    @property
    def rows(self) -> int:
        """The number of updates, consolidated within each part."""
        return self._hollow.rows

    @property
    def size_bytes(self) -> int:
        """The encoded bytes of all parts."""
        return self._hollow.size_bytes

    @property
    def hollow(self) -> HollowBatch:
        """The descriptor: what an append puts into the shard's state."""
        return self._hollow

    def to_transmittable(self) -> bytes:
        """Bytes from which `WriteHandle.batch_from_transmittable` makes this batch again, in any process. This one is then
        spent.
        """
        self.check_usable()
        data = encode_transmittable(self.shard_id, self.version, self._hollow)
        self.mark_spent("sent elsewhere")
        return data

    def delete(self) -> None:
        """Deletes the blobs. The caller must not append the batch, now or later. Idempotent.

        A batch that came from elsewhere may have been appended before, from a copy of its bytes. Then the blobs that a live
        version of the shard names stay, for garbage collection. An append of the batch that its caller gave up may still be
        under way; a commit that changes nothing makes it fail. After an interrupted deletion, the only thing left to do is
        to complete it with another call.
        """
        if self.is_deleted:
            return
        self.check_deletable()
        named = self._named_keys([self]) if self._named_keys is not None and self.has_blobs else ()
        self.delete_but(named)

    def delete_but(self, named: Collection[str]) -> None:
        """Deletes the blobs whose partial keys are not among `named`. `delete` finds out which keys these are."""
        self.mark_spent(_IN_PART)  # before the first blob is deleted, because the rest must not be appended
        delete_parts(self._store, [part for part in self._hollow.parts if not _names_any(part, named)])
        self.mark_spent("deleted")

    def flush_inline_parts(self) -> None:
        """See `flush_inline_parts`, the function."""
        flush_inline_parts([self])

    def drop_inline_parts(self) -> None:
        """Drops the inline parts, because another batch holds their updates now. The batch may then have no parts."""
        self.check_usable()
        self._hollow = without_inline_parts(self._hollow)

    def rewrite_times(self, frontier: TimeLike, new_upper: TimeLike) -> None:
        """Advances all times to `frontier` and registers the batch up to `new_upper`, without a change of its data. This is for
        a batch that was staged before its time was known. Idempotent. Raises InvalidRewrite as `model.batch.rewritten` does.
        """
        self.check_usable()
        self._hollow = rewritten(self._hollow, frontier_of(frontier), frontier_of(new_upper, "new_upper"))

    @property
    def is_deleted(self) -> bool:
        """Whether a deletion was completed."""
        return self._spent == "deleted"

    @property
    def may_have_copies(self) -> bool:
        """Whether the batch may be, or may become, part of the shard without this object's knowledge: it was made from bytes,
        which may have been copied, or an append of it had an unknown outcome.
        """
        return self._named_keys is not None

    @property
    def is_rewritten(self) -> bool:
        """Whether the times of this batch were rewritten, here or before it was sent. Copies of it may have another upper."""
        return any(part.ts_rewrite is not None for part in self._hollow.parts)

    @property
    def has_blobs(self) -> bool:
        """Whether some of its parts are in blob."""
        return any(True for _ in self._hollow.blob_keys())

    def note_unknown_outcome(self, named_keys: NamedKeys) -> None:
        """Records that the batch may have been appended. From now on it counts as one with copies, and `delete` uses `named_keys`."""
        self._named_keys = named_keys

    def check_usable(self) -> None:
        """Raises InvalidUsage when the batch was appended, sent elsewhere or deleted."""
        if self._spent is not None:
            raise InvalidUsage(f"batch {self._hollow.desc} of shard {self.shard_id} was already {self._spent}")

    def check_deletable(self) -> None:
        """Like `check_usable`, but allows the completion of an interrupted deletion."""
        if self._spent != _IN_PART:
            self.check_usable()

    def mark_spent(self, how: str) -> None:
        """Ends the batch. `how` completes the message "was already ..."."""
        self._spent = how

    def __del__(self) -> None:
        # A batch has no `_spent` if its constructor failed.
        keys = [] if getattr(self, "_spent", "never made") not in (None, _IN_PART) else list(self._hollow.blob_keys())
        if keys:
            text = "a batch of shard %s was dropped, neither appended nor deleted; its blobs stay: %s"
            _log.warning(text, self.shard_id, ", ".join(keys), extra={"shard": self.shard_id})

    def __repr__(self) -> str:
        return f"Batch({self._hollow.desc} {self.rows} rows {len(self._hollow.parts)} parts of {self.shard_id})"


NamedKeys: TypeAlias = Callable[[Sequence[Batch]], Collection[str]]
"""Finds the partial keys that the shard names, if some of the batches may have been appended."""


def flush_inline_parts(batches: Sequence[Batch]) -> None:
    """Rewrites every inline part of every batch as a blob, in place and concurrently. The order of parts, their rewrites and
    their schemas stay (spec 10.10). Every batch must be usable.
    """
    inline: list[tuple[Batch, InlinePart]] = []
    for batch in batches:
        batch.check_usable()
        inline += [(batch, part) for part in batch.hollow.parts if isinstance(part, InlinePart)]
    if not inline:
        return

    def flush(item: tuple[Batch, InlinePart]) -> Part:
        return flush_inline(item[0]._store, item[1])

    if len(inline) == 1:  # the usual case, which needs no thread
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
    """`batch` with only its parts in blob. A run without any is left out."""
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
    """Takes updates in any order, cuts them into parts and uploads these in the background. Not thread-safe.

    Its memory holds one part that is being filled and `batch.outstanding_parts_max` parts under way, each of about
    `batch.target_part_bytes` times what sorting needs; two more while runs are merged. Every part is consolidated and
    sorted separately, and is a run of its own. With `batch.runs_max`, the builder merges runs while it writes. Runs longer
    than `batch.run_parts_max` become listings. A context manager that abandons an unfinished batch on exit.
    """

    def __init__(
        self, store: PartStore, lower: Antichain, *, schema: Schema, schema_id: int, upper: Antichain = EMPTY
    ) -> None:
        # The description inside each part is what the writer promises. `finish` registers the batch under a narrower one.
        self._desc = Description(lower, upper, MINIMUM)
        self._store = store
        self._schema, self._schema_id = schema, schema_id
        self._settings = store.settings.batch
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._time_max: int | None = None
        self._waits_from_ms = NOTHING_WAITS
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: deque[Future[Part | None]] = deque()
        self._groups = RunGroups(
            store, self._desc, schema=schema, schema_id=schema_id, runs_max=self._settings.runs_max
        )
        self._ended = False

    def add(self, updates: Updates) -> None:
        """Stages more updates. Waits while too many uploads are in flight. Arrays under `updates` must not change before `finish`.

        Raises UpdateNotBeyondLower, UpdateBeyondUpper or SchemaMismatch. Any error abandons the builder.
        """
        self._check_open()
        try:
            for table in normalise(updates, self._schema):
                self._check_times(table)
                if self._waits_from_ms == NOTHING_WAITS and has_retraction(table):
                    self._waits_from_ms = self._store.env.now_ms()
                self._cut(table)
        except BaseException:
            self.abandon()
            raise

    def finish(self, upper: TimeLike) -> Batch:
        """Ends the builder and returns the batch of all added updates, under [lower, upper). Every part is durable.

        Raises InvalidBounds, InvalidEmptyTimeInterval or UpdateBeyondUpper. Any error deletes the parts written so far.
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
        """Deletes the parts written so far and ends the builder. Idempotent; does nothing after `finish`."""
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
        """Fills parts up to the target size. Slices a table that would exceed it."""
        target = self._settings.target_part_bytes
        while table.num_rows:
            # A table may share buffers far larger than its rows. Small buffers bound its size well enough.
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
        """Writes the pending rows as one part. Does so in the background, except for the last, for which `finish` would wait."""
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
        """Writes `tables` as one part. Empties the list, because the pool keeps it until the part is uploaded."""
        try:
            consolidated = consolidate(_put_together(tables))
            if (total := diffs_sum(consolidated)) != wrapped(total):
                raise InvariantViolated("diffs sum to more than int64 holds")
        except InvariantViolated as error:  # the error is meant for stored rows, but these come from the caller
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
        """Waits for the oldest upload and adds its part to the runs."""
        part = self._in_flight[0].result()
        self._in_flight.popleft()
        if part is not None:
            self._groups.add(part)

    def _hollow(self, runs: list[Run], upper: Antichain) -> HollowBatch:
        env = self._store.env
        rows = [sum(part.rows for part in run) for run in runs]
        metas = [
            RunMeta(
                RunOrder.STRUCTURED,
                RunId.from_bytes(env.random_bytes(16)),
                self._schema_id,
                count,
                waits_from_ms=self._waits_from_ms,
            )
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
    """Joins `tables` into one. Empties the list, so that only the result holds their memory."""
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    tables.clear()
    return table


def _names_any(part: RunPart, keys: Collection[str]) -> bool:
    return not isinstance(part, InlinePart) and part.key in keys


def _check_before(time: int, upper: Antichain) -> None:
    if upper.less_equal(time):
        raise UpdateBeyondUpper(f"update at time {time} is beyond upper {upper}", ts=time, upper=upper)
