"""The functions that run on executors. Each maps one Arrow iterator to another. They stage a partition's updates, and read parts of a
snapshot.

An executor uses only blobs, never consensus. A staged batch that the driver does not link is an orphan. So a task may fail, be retried or
run twice at once: Spark passes the row of one attempt to the driver, which appends only the batch in that row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import BatchBuilder, Blob, ChangesSplit, LeasedPart, consolidate, holds_errors, open_blob
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import InvalidUsage, PersistError, UpdateBeyondUpper, UpdateNotBeyondLower
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import MIB, BatchSettings, RetrySettings, Settings
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

from persist_spark.columns import RECORD_ROWS, SUMS_MODULUS, halves, hash_chunks, negated_flat, struct_column
from persist_spark.failures import carried
from persist_spark.memory import give_back_freed_memory, keeping_freed_memory
from persist_spark.resume.noting import Noted, Noting
from persist_spark.spec import PARALLELISM_MAX

if TYPE_CHECKING:  # executors do not need it
    from persist_engine import WriteHandle

#: The rows that a correcting task consolidates at a time. Measured: two or four times as many are not faster, but use more memory.
CHUNK_ROWS = 1 << 17
#: The bytes that it consolidates at a time. They are the limit only for rows of more than 64 bytes.
CHUNK_BYTES = 8 * MIB
#: How long an executor or driver retries a failing store before the run ends as a storage failure.
STORE_GIVE_UP_MS = 120_000.0
#: The most and the least bytes of the persisted side that one task reads. A task with a single larger part reads more. Tasks are not made
#: smaller than the least even if cores are free.
READ_BYTES_MAX, READ_BYTES_MIN = 64 * MIB, 4 * MIB
#: The fixed cost of reading a part, expressed in bytes.
_PART_COST_BYTES = 256 << 10

#: One row per task.
STAGED_SCHEMA = pa.schema(
    [
        ("batch", pa.binary()),  # transmittable; null when the partition has no updates
        ("rows", pa.int64()),
        ("errors", pa.int64()),  # how many of these rows are errors
        ("updates", pa.int64()),
        ("least_time", pa.int64()),
        # The sums of the lower and of the upper 32 bits of the hashes of the user's rows, modulo 2^63. 0 when the rows have no hashes.
        ("low", pa.int64()),
        ("high", pa.int64()),
    ]
)
STAGED_DDL = "batch binary, rows bigint, errors bigint, updates bigint, least_time bigint, low bigint, high bigint"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """The arguments of a write task, which the driver sends to executors. Holds no secret, except one in the blob's URL."""

    blob: str
    shard_id: str
    schema: Schema
    schema_id: int
    lower: int
    upper: int
    time: int | None
    """The time of every update. None: the column `time` has the times."""
    target_part_bytes: int
    staging_floor_ms: int = 0
    """The shard's staging floor, as the driver knows it. Parts staged before it would be refused."""
    noted: Noted | None = None
    """The run and the job of a task that notes what it staged, for another driver. None: the task notes nothing."""

    @classmethod
    def at(cls, writer: WriteHandle, *, blob: str, lower: Antichain, time: int, target_part_bytes: int) -> StageTask:
        """A task that stages updates at `time`, for an append of `writer` at `lower`."""
        assert lower.time is not None
        return cls(
            blob=blob,
            shard_id=writer.shard_id,
            schema=writer.schema,
            schema_id=writer.schema_id,
            lower=lower.time,
            upper=time + 1,
            time=time,
            target_part_bytes=target_part_bytes,
            staging_floor_ms=writer.machine.staging_floor_ms,
        )

    @property
    def settings(self) -> Settings:
        """The settings for the builder."""
        return sink_settings(self.target_part_bytes)


def sink_settings(target_part_bytes: int) -> Settings:
    """The settings for the driver and executors of a sink. A run that cannot reach its store fails with that error, and the operator
    repeats it. One part is uploaded while the next is filled; with two, a task uses half as much memory again and is no faster (measured).
    """
    return Settings(
        batch=BatchSettings(target_part_bytes=target_part_bytes, outstanding_parts_max=1),
        retry=RetrySettings(give_up_ms=STORE_GIVE_UP_MS),
    )


class StageRows:
    """Stages a partition of rows. Columns: k*, v*; `time` when the task has no time; optionally `diff` (without it every row has diff 1),
    `fault` (the reason why a row must not be written), and `h` (hashes, which the task adds up).
    """

    def __init__(self, task: StageTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields one row of STAGED_SCHEMA. A repeated call stages another batch and does not change linked ones. Raises InvalidUsage for a
        fault.
        """
        with carrying_errors():
            yield self.staged(batches)

    def staged(self, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Stages the rows and returns the row of STAGED_SCHEMA, for a caller in this process."""
        with _explaining_changed_input(self.task):
            counter = RowCounter(self.task.schema)
            noting = None if self.task.noted is None else Noting(self.task.noted, self.task.schema)
            tables = (counter.counted(_faultless(batch, self.task)) for batch in batches if batch.num_rows)
            if noting is not None:
                tables = (_noted(table, noting) for table in tables)
            return _stage(self.task, (updates_of(table, self.task) for table in tables), counter, noting)


def _noted(rows: pa.RecordBatch, noting: Noting) -> pa.RecordBatch:
    noting.add(rows)
    return rows


def _faultless(batch: pa.RecordBatch, task: StageTask) -> pa.RecordBatch:
    if "fault" in batch.schema.names and (faults := batch.column("fault").drop_null()):
        raise InvalidUsage(f"{faults[0]}; nothing was appended to shard {task.shard_id}")
    return batch


class StageCorrections:
    """Stages desired - persisted of one hash partition. Columns: k*, v*, `diff`, `desired`, `h`, sorted by `h` (envelopes.mirror).
    Adds up the hashes of the desired rows.
    """

    def __init__(self, task: StageTask, *, is_net: bool = False) -> None:
        self.task, self.is_net = task, is_net

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields one row of STAGED_SCHEMA. It counts the desired rows, or (`is_net`) all rows, each times its diff. Beside the parts, it
        holds at most CHUNK_ROWS rows or CHUNK_BYTES in memory.
        """
        with carrying_errors():
            counter = row_counter(self.task.schema, is_net=self.is_net)
            rows = (counter.counted(batch) for batch in batches)
            chunks = hash_chunks(rows, chunk_rows=CHUNK_ROWS, chunk_bytes=CHUNK_BYTES)
            yield _stage(self.task, (consolidate(updates_of(chunk, self.task)) for chunk in chunks), counter)


def grouped(parts: Sequence[LeasedPart], *, cores: int) -> tuple[tuple[bytes, ...], ...]:
    """Divides the parts, as bytes, into groups of about equal size, one for each reading task. There are at most `cores` groups, or more if
    groups would exceed READ_BYTES_MAX, but never more than PARALLELISM_MAX.
    """
    costs = [part.bytes_estimate + _PART_COST_BYTES for part in parts]
    total = sum(costs)
    share = max(min(READ_BYTES_MAX, max(READ_BYTES_MIN, -(-total // cores))), -(-total // PARALLELISM_MAX))
    groups: dict[int, list[bytes]] = {}
    for part, end in zip(parts, accumulate(costs), strict=True):
        groups.setdefault((end - 1) // share, []).append(part.to_bytes())
    return tuple(tuple(group) for group in groups.values())


class ReadParts:
    """Reads the persisted side. For number i of `spark.range(n)` it yields the updates of group i, as flat columns with the negated `diff`.
    The parts belong to the driver's snapshot, which keeps their blobs.
    """

    def __init__(self, *, blob: str, groups: tuple[tuple[bytes, ...], ...]) -> None:
        self.blob, self.groups = blob, groups

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the updates of the groups with the given numbers, part by part. Memory is one part's bytes and one of its row groups,
        however many runs overlap. The result is not consolidated; `StageCorrections` adds up the diffs of equal rows.
        """
        with keeping_freed_memory(), carrying_errors():
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    for part in self.groups[number]:
                        yield from self._rows_of(LeasedPart.from_bytes(part))

    def _rows_of(self, part: LeasedPart) -> Iterator[pa.RecordBatch]:
        for table in part.fetch(blob_at(self.blob), retry=reading_retry()):
            for rows in table.to_batches(max_chunksize=RECORD_ROWS):
                yield negated_flat(rows)


class ReadChanges:
    """Reads what was written between two times. For number i of `spark.range(n)` it yields the updates of split i, as flat columns with
    the negated `diff` and the `time`. The driver keeps the changes open, and with them their blobs.
    """

    def __init__(self, *, blob: str, splits: tuple[bytes, ...]) -> None:
        self.blob, self.splits = blob, splits

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the updates of the splits with the given numbers, each once in its split. Uses bounded memory."""
        with carrying_errors():
            for number in (number for batch in batches for number in batch.column(0).to_pylist()):
                split = ChangesSplit.from_bytes(self.splits[number])
                for rows in split.to_batches(blob_at(self.blob), retry=reading_retry()):
                    yield negated_flat(rows).append_column("time", rows.column("time"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStore:
    """The part of a shard that an executor may use: its blobs."""

    shard_id: ShardId
    blob: Blob
    retry: Retry
    settings: Settings
    env: Env
    metrics: Metrics
    staging_floor_ms: int
    filtered: tuple[str, ...] = ()
    """The fields with Bloom filters: none, because only a compaction gives its parts Bloom filters."""


def store_at(blob: str, shard_id: str, settings: Settings, *, staging_floor_ms: int) -> ExecutorStore:
    """The store for the parts of the shard."""
    env, metrics = SystemEnv(), NoMetrics()
    retry = Retry(env, settings.retry, metrics)
    return ExecutorStore(
        shard_id=ShardId(shard_id),
        blob=blob_at(blob),
        retry=retry,
        settings=settings,
        env=env,
        metrics=metrics,
        staging_floor_ms=staging_floor_ms,
    )


def reading_retry() -> Retry:
    """The retries of an executor's reads."""
    return Retry(SystemEnv(), RetrySettings(give_up_ms=STORE_GIVE_UP_MS), NoMetrics())


@lru_cache(maxsize=4)
def blob_at(url: str) -> Blob:
    """The blob store, opened once per Python worker. A worker serves many tasks."""
    return reading_retry().external("open blob store", lambda: open_blob(url, env=SystemEnv(), metrics=NoMetrics()))


def updates_of(rows: pa.Table | pa.RecordBatch, task: StageTask) -> pa.Table:
    """Converts flat columns to key struct, val struct, time and diff, in the shard's Arrow types."""
    count = rows.num_rows
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    key = struct_column(table, "k", task.schema.key_type)
    val = struct_column(table, "v", task.schema.val_type)
    time = (
        table.column("time").combine_chunks()
        if task.time is None
        else pa.repeat(pa.scalar(task.time, pa.int64()), count)
    )
    diff = (
        table.column("diff").combine_chunks()
        if "diff" in table.column_names
        else pa.repeat(pa.scalar(1, pa.int64()), count)
    )
    return pa.Table.from_arrays([key, val, time, diff], schema=task.schema.updates_schema)


class RowCounter:
    """Counts the user's rows in a stream, and adds up their hashes, if they have any."""

    def __init__(self, schema: Schema) -> None:
        self.rows, self.errors, self.low, self.high = 0, 0, 0, 0
        self._error = f"k{len(schema.key) - 1}" if holds_errors(schema) else None

    def counted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        desired = batch.column("desired") if "desired" in batch.schema.names else None
        self.rows += batch.num_rows if desired is None else (pc.sum(desired).as_py() or 0)
        if self._error is not None:
            errors = batch.column(self._error) if desired is None else batch.column(self._error).filter(desired)
            self.errors += len(errors) - errors.null_count
        if "h" in batch.schema.names:
            column = batch.column("h") if desired is None else batch.column("h").filter(desired)
            low, high = halves(column.to_numpy())
            self.low += int(low.sum())
            self.high += int(high.sum())
        return batch

    @property
    def sums(self) -> tuple[int, int]:
        """The sums of the lower and the upper halves of the hashes, modulo SUMS_MODULUS."""
        return self.low % SUMS_MODULUS, self.high % SUMS_MODULUS


class NetCounter:
    """Counts all rows of a stream, and adds up their hashes, each times its diff. Counts no errors."""

    def __init__(self) -> None:
        self.rows, self.errors, self.low, self.high = 0, 0, 0, 0

    def counted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        (low, high), diff = halves(batch.column("h").to_numpy()), batch.column("diff").to_numpy()
        self.rows += int(diff.sum())
        self.low += int((low * diff).sum())
        self.high += int((high * diff).sum())
        return batch

    @property
    def sums(self) -> tuple[int, int]:
        """See RowCounter."""
        return self.low % SUMS_MODULUS, self.high % SUMS_MODULUS


def row_counter(schema: Schema, *, is_net: bool) -> RowCounter | NetCounter:
    """The counter of a task that makes corrections. `is_net`: see StageCorrections."""
    return NetCounter() if is_net else RowCounter(schema)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """What one task staged."""

    batch: bytes | None
    """Transmittable; None when the task had no updates."""
    rows: int
    """The user's rows."""
    updates: int
    least_time: int | None


def stage(task: StageTask, tables: Iterable[pa.Table]) -> StagedBatch:
    """Stages the updates in `tables` as one batch, and counts each row as a user's row. Deletes the staged parts when it fails."""
    give_back_freed_memory()
    rows = 0
    upper = Antichain.of(task.upper)
    store = store_at(task.blob, task.shard_id, task.settings, staging_floor_ms=task.staging_floor_ms)
    least: int | None = None
    # On an error, the builder deletes the parts that it has staged.
    with BatchBuilder(
        store, Antichain.of(task.lower), schema=task.schema, schema_id=task.schema_id, upper=upper
    ) as builder:
        for table in tables:
            if table.num_rows == 0:
                continue
            rows += table.num_rows
            earliest = pc.min(table.column("time")).as_py()
            least = earliest if least is None else min(least, earliest)
            builder.add(table)
        batch = builder.finish(upper)
    updates = batch.rows
    return StagedBatch(batch.to_transmittable() if updates else None, rows, updates, least)


def _stage(
    task: StageTask, tables: Iterator[pa.Table], counter: RowCounter | NetCounter, noting: Noting | None = None
) -> pa.RecordBatch:
    staged = stage(task, tables)
    low, high = counter.sums
    if noting is not None:
        store = store_at(task.blob, task.shard_id, task.settings, staging_floor_ms=task.staging_floor_ms)
        noting.put(store, staged, errors=counter.errors, low=low, high=high)
    counts = [[counter.rows], [counter.errors], [staged.updates]]
    sums = [[low], [high]]
    columns = [[staged.batch], *counts, [staged.least_time], *sums]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, STAGED_SCHEMA, strict=True)],
        schema=STAGED_SCHEMA,
    )


@contextmanager
def _explaining_changed_input(task: StageTask) -> Iterator[None]:
    """Explains a time outside the bounds. An earlier read of the input determined the bounds, so the input has changed since."""
    try:
        yield
    except (UpdateNotBeyondLower, UpdateBeyondUpper) as error:
        raise type(error)(
            f"the input changed while it was read for shard {task.shard_id}: {error}; nothing was appended; run the sink "
            "again, and if this happens often, give it an input that does not change during a run",
            **error.detail,
        ) from error


@contextmanager
def carrying_errors() -> Iterator[None]:
    """Turns engine errors into text that the driver can classify."""
    try:
        yield
    except PersistError as error:
        raise carried(error) from error
