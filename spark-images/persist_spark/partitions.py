"""What runs on executors: one Arrow iterator in, one out. Owns: staging a partition's updates, reading parts of a
snapshot.

An executor touches blobs only, never consensus: what it stages is linked by the driver, or is an orphan. So a task
may fail, be retried or run twice at once:
Spark hands the driver the row of one attempt, and only the batch in that row is appended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import BatchBuilder, Blob, LeasedPart, consolidate, open_blob
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import PersistError, UpdateBeyondUpper, UpdateNotBeyondLower
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import MIB, BatchSettings, RetrySettings, Settings
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

from persist_spark.columns import RECORD_ROWS, hash_chunks, negated_flat, struct_column
from persist_spark.failures import carried
from persist_spark.memory import give_back_freed_memory
from persist_spark.spec import PARALLELISM_MAX

#: Rows that a correcting task consolidates at a time. Measured: twice or four times as many are not faster, and cost
#: their memory.
CHUNK_ROWS = 1 << 17
#: And bytes of them: fewer rows only where they have more than 64 bytes.
CHUNK_BYTES = 8 * MIB
#: How long an executor or driver insists on a store that fails before the run is reported as a storage failure.
STORE_GIVE_UP_MS = 120_000.0
#: What a task reads of the persisted side: no more than this where there are more parts, no less while cores are free.
READ_BYTES_MAX, READ_BYTES_MIN = 64 * MIB, 4 * MIB
#: A part costs a task as much as so many bytes more, however small it is.
_PART_COST_BYTES = 256 << 10

#: One row per task.
STAGED_SCHEMA = pa.schema(
    [
        ("batch", pa.binary()),  # transmittable; null when the partition came to nothing
        ("rows", pa.int64()),
        ("updates", pa.int64()),
        ("least_time", pa.int64()),
    ]
)
STAGED_DDL = "batch binary, rows bigint, updates bigint, least_time bigint"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """What a write task must know; travels to executors, holds no secret but what the blob's URL names."""

    blob: str
    shard_id: str
    schema: Schema
    schema_id: int
    lower: int
    upper: int
    time: int | None
    """Time of every update; None: the column `time` carries it."""
    target_part_bytes: int
    staging_floor_ms: int = 0
    """The shard's, as the driver knows it: parts staged before it would be refused."""

    @property
    def settings(self) -> Settings:
        """Numbers for the builder."""
        return sink_settings(self.target_part_bytes)


def sink_settings(target_part_bytes: int) -> Settings:
    """What driver and executors of a sink run with: a run that cannot reach its store ends and says so, the operator
    repeats it. One part is on its way while the next is filled: with two, a task takes half as much memory again and is
    no faster (measured).
    """
    return Settings(
        batch=BatchSettings(target_part_bytes=target_part_bytes, outstanding_parts_max=1),
        retry=RetrySettings(give_up_ms=STORE_GIVE_UP_MS),
    )


class StageRows:
    """Stage a partition of rows: every row is one update with diff 1. Columns k*, v*, and `time` when the task has
    none.
    """

    def __init__(self, task: StageTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One staged row. Repeating it stages again and changes nothing that is linked."""
        with _carrying_errors(), _telling_of_changed_input(self.task):
            counted = _Counted()
            tables = (counted.saw(batch) for batch in batches if batch.num_rows)
            yield _stage(self.task, (updates_of(table, self.task) for table in tables), counted)


class StageCorrections:
    """Stage desired - persisted of one hash partition. Columns k*, v*, `diff`, `desired`, `h`; sorted by `h`
    (frames.corrections).
    """

    def __init__(self, task: StageTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One staged row; its `rows` counts the desired rows. Holds CHUNK_ROWS rows or CHUNK_BYTES beside the parts."""
        with _carrying_errors():
            counted = _Counted()
            rows = (counted.saw(batch) for batch in batches)
            chunks = hash_chunks(rows, chunk_rows=CHUNK_ROWS, chunk_bytes=CHUNK_BYTES)
            yield _stage(self.task, (consolidate(updates_of(chunk, self.task)) for chunk in chunks), counted)


def grouped(parts: Sequence[LeasedPart], *, cores: int) -> tuple[tuple[bytes, ...], ...]:
    """The parts, as bytes, in groups of about the same size, one for each task that reads them: no more than `cores` unless
    they would be larger than READ_BYTES_MAX, and PARALLELISM_MAX at most.
    """
    costs = [part.bytes_estimate + _PART_COST_BYTES for part in parts]
    total = sum(costs)
    share = max(min(READ_BYTES_MAX, max(READ_BYTES_MIN, -(-total // cores))), -(-total // PARALLELISM_MAX))
    groups: dict[int, list[bytes]] = {}
    for part, end in zip(parts, accumulate(costs), strict=True):
        groups.setdefault((end - 1) // share, []).append(part.to_bytes())
    return tuple(tuple(group) for group in groups.values())


class ReadParts:
    """Read the persisted side: number i of `spark.range(n)` becomes the parts of group i, as flat columns and the negated
    `diff`. Parts of the driver's snapshot, which holds their blobs.
    """

    def __init__(self, *, blob: str, groups: tuple[tuple[bytes, ...], ...]) -> None:
        self.blob, self.groups = blob, groups

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The groups whose numbers come in, part by part: memory is one part's bytes and a row group of it, however many
        runs overlap. What they say of one row is for `StageCorrections` to add up.
        """
        give_back_freed_memory()
        with _carrying_errors():
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    for part in self.groups[number]:
                        yield from self._rows_of(LeasedPart.from_bytes(part))

    def _rows_of(self, part: LeasedPart) -> Iterator[pa.RecordBatch]:
        for table in part.fetch(blob_at(self.blob), retry=reading_retry()):
            for rows in table.to_batches(max_chunksize=RECORD_ROWS):
                yield negated_flat(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStore:
    """The half of a shard that an executor may touch: its blobs."""

    shard_id: ShardId
    blob: Blob
    retry: Retry
    settings: Settings
    env: Env
    metrics: Metrics
    staging_floor_ms: int


def store_at(blob: str, shard_id: str, settings: Settings, *, staging_floor_ms: int) -> ExecutorStore:
    """Where the parts of the shard go."""
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
    """How an executor insists on a blob that does not come."""
    return Retry(SystemEnv(), RetrySettings(give_up_ms=STORE_GIVE_UP_MS), NoMetrics())


@lru_cache(maxsize=4)
def blob_at(url: str) -> Blob:
    """The blob store, opened once per Python worker: workers live for many tasks."""
    return reading_retry().external("open blob store", lambda: open_blob(url, env=SystemEnv(), metrics=NoMetrics()))


def updates_of(rows: pa.Table | pa.RecordBatch, task: StageTask) -> pa.Table:
    """Flat columns -> key struct, val struct, time, diff in the shard's own Arrow types."""
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


class _Counted:
    """Counts the user's rows as they stream by."""

    def __init__(self) -> None:
        self.rows = 0

    def saw(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        desired = batch.column("desired") if "desired" in batch.schema.names else None
        self.rows += batch.num_rows if desired is None else (pc.sum(desired).as_py() or 0)
        return batch


def _stage(task: StageTask, tables: Iterator[pa.Table], counted: _Counted) -> pa.RecordBatch:
    give_back_freed_memory()
    upper = Antichain.of(task.upper)
    store = store_at(task.blob, task.shard_id, task.settings, staging_floor_ms=task.staging_floor_ms)
    least: int | None = None
    # Leaving the block on an error deletes what was staged so far.
    with BatchBuilder(
        store, Antichain.of(task.lower), schema=task.schema, schema_id=task.schema_id, upper=upper
    ) as builder:
        for table in tables:
            if table.num_rows == 0:
                continue
            earliest = pc.min(table.column("time")).as_py()
            least = earliest if least is None else min(least, earliest)
            builder.add(table)
        batch = builder.finish(upper)
    rows = batch.rows
    staged = batch.to_transmittable() if rows else None
    columns = [[staged], [counted.rows], [rows], [least]]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, STAGED_SCHEMA, strict=True)],
        schema=STAGED_SCHEMA,
    )


@contextmanager
def _telling_of_changed_input(task: StageTask) -> Iterator[None]:
    """Bounds were chosen by an earlier reading of the input: times outside came since."""
    try:
        yield
    except (UpdateNotBeyondLower, UpdateBeyondUpper) as error:
        raise type(error)(
            f"the input changed while it was read for shard {task.shard_id}: {error}; nothing was appended, run it again, "
            "and if that happens often, over an input that stands still",
            **error.detail,
        ) from error


@contextmanager
def _carrying_errors() -> Iterator[None]:
    """Engine errors leave as text that the driver can classify."""
    try:
        yield
    except PersistError as error:
        raise carried(error) from error
