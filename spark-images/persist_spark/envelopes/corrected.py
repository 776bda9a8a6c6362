"""Makes the corrections of a Mirror once, copies them on the executors, and divides them by ranges of keys.

The tasks that make corrections have the rows of a range of hashes (`mirror.corrections`), so that a hot key makes no hot task. Batches of
such tasks would each span all keys, and a reader of few keys would fetch from all of them. So the corrections, which are few as a rule, go
through a second shuffle by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from persist_engine import consolidate
from persist_engine.rows.ingest import normalise
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.columns import RECORD_ROWS, flat_columns, hash_chunks
from persist_spark.envelopes.mirror import corrections, hashed
from persist_spark.frames import DIFF, HASH, SMALL_TASK_BYTES, fields_of, flat_type
from persist_spark.memory import give_back_freed_memory
from persist_spark.partitions import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    STAGED_DDL,
    StageCorrections,
    StageRows,
    StageTask,
    carrying_errors,
    row_counter,
    updates_of,
)

#: What a task counts: see STAGED_SCHEMA; then the corrections that it made and their bytes in memory. Its last row has them.
COUNTS = ("rows", "errors", "low", "high")
_MADE, _BYTES = "made", "bytes"
_COLUMNS = (*COUNTS, _MADE, _BYTES)


def staged_corrections(
    both: DataFrame, task: StageTask, tasks: int | None, *, wanted: int | None, is_net: bool = False
) -> list[Any]:
    """Stages the corrections of `both` sides (`mirror.both_sides`) in batches by ranges of keys. `wanted`: the number of tasks
    that the user wants. None: one for few corrections, otherwise as many as their bytes require; then `tasks` (see `mirror.corrections`)
    make them. Returns rows of STAGED_SCHEMA, whose counts are those of StageCorrections with `is_net`.
    """
    tasks = wanted or tasks
    parts = corrections(both, tasks)
    if tasks == 1:
        staged: list[Any] = parts.mapInArrow(StageCorrections(task, is_net=is_net), STAGED_DDL).collect()
        return staged
    made = corrected(parts, task, is_net=is_net)
    rows = made.by_key(wanted).mapInArrow(StageRows(task), STAGED_DDL).collect() if made.count else []
    return with_counts(made.counts, rows)


@dataclass(frozen=True, slots=True)
class Corrected:
    """The corrections of a run: k*, v*, `diff`, each row once."""

    frame: DataFrame
    schema: Schema
    count: int
    """The number of corrections."""
    size_bytes: int
    """Their bytes in the memory of tasks."""
    counts: dict[str, int]
    """The sums of COUNTS over all tasks."""

    def by_key(self, tasks: int | None) -> DataFrame:
        """The corrections, divided into ranges of keys: `tasks`, or (None) one for few corrections and otherwise as many as their bytes
        require. Adjacent ranges may share one key, whose corrections are divided by their hashes, so that a hot key makes no hot task.
        Plans only, except for a sample.
        """
        columns = [*(f.column for f in fields_of(self.schema)), DIFF]
        if tasks is None and self.size_bytes <= SMALL_TASK_BYTES:
            return self.frame.select(*columns).coalesce(1)
        keys = [F.col(f.column).asc_nulls_last() for f in fields_of(self.schema) if f.side == "key"]
        rows, order = hashed(self.frame, self.schema), [*keys, F.col(HASH)]
        ranged = rows.repartitionByRange(*order) if tasks is None else rows.repartitionByRange(tasks, *order)
        return ranged.select(*columns)


def corrected(parts: DataFrame, task: StageTask, *, is_net: bool) -> Corrected:
    """Makes and copies the corrections of `parts` (from `mirror.corrections`). `is_net`: see StageCorrections. Runs one Spark job over
    `parts` and one over the copy.
    """
    schema = task.schema
    shape = flat_type(schema).add(DIFF, T.LongType())
    for name in _COLUMNS:
        shape.add(name, T.LongType())
    # SUBTLE: this is a copy, not a cache. Losing a copy fails the job (`failures.is_lost_copy`). Losing a cache would read the input again,
    # and the second reading might have other rows than those that were counted.
    copy = parts.mapInArrow(MakeCorrections(task, is_net=is_net), shape).localCheckpoint(eager=True)
    # Python adds them up, because a bigint is too small for the sums of several tasks.
    tasks = copy.where(F.col(DIFF).isNull()).select(*_COLUMNS).collect()
    totals = {name: sum(task[name] for task in tasks) for name in _COLUMNS}
    made, size_bytes = totals.pop(_MADE), totals.pop(_BYTES)
    rows = copy.where(F.col(DIFF).isNotNull())
    return Corrected(rows, schema, made, size_bytes, totals)


def with_counts(counts: Mapping[str, int], tasks: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows of STAGED_SCHEMA of `tasks`, of which a row before them has all `counts` (COUNTS)."""
    none = dict.fromkeys(COUNTS, 0)
    rows = [row if isinstance(row, dict) else row.asDict() for row in tasks]
    return [{"batch": None, "updates": 0, "least_time": None, **counts}, *(row | none for row in rows)]


class MakeCorrections:
    """Makes desired - persisted of one hash partition. Columns: as for StageCorrections."""

    def __init__(self, task: StageTask, *, is_net: bool) -> None:
        self.task, self.is_net = task, is_net

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the corrections as flat columns with their `diff`, then one row with the counts of the task and without a diff. Holds at
        most CHUNK_ROWS rows or CHUNK_BYTES in memory.
        """
        with carrying_errors():
            give_back_freed_memory()
            schema, counter = self.task.schema, row_counter(self.task.schema, is_net=self.is_net)
            made = size_bytes = 0
            rows = (counter.counted(batch) for batch in batches)
            for chunk in hash_chunks(rows, chunk_rows=CHUNK_ROWS, chunk_bytes=CHUNK_BYTES):
                # SUBTLE: `normalise` refuses nulls in NOT NULL fields, as the builder does. The JVM gets the rows next. It fails at such a
                # null within a struct, and does not name the field.
                for updates in normalise(consolidate(updates_of(chunk, self.task)), schema):
                    made, size_bytes = made + updates.num_rows, size_bytes + updates.nbytes
                    for batch in updates.to_batches(max_chunksize=RECORD_ROWS):
                        columns = {**flat_columns(batch.column("key"), batch.column("val")), DIFF: batch.column("diff")}
                        yield _with_counts(columns, batch.num_rows, None)
            empty = flat_columns(pa.nulls(1, schema.key_type), pa.nulls(1, schema.val_type))
            counts = (counter.rows, counter.errors, *counter.sums, made, size_bytes)
            yield _with_counts({**empty, DIFF: pa.nulls(1, pa.int64())}, 1, counts)


def _with_counts(columns: dict[str, pa.Array], rows: int, counts: tuple[int, ...] | None) -> pa.RecordBatch:
    """`columns`, and the columns of counts: `counts` in the only row, or nulls."""
    none = pa.nulls(rows, pa.int64())
    values = [none] * len(_COLUMNS) if counts is None else [pa.array([count], pa.int64()) for count in counts]
    return pa.RecordBatch.from_pydict({**columns, **dict(zip(_COLUMNS, values, strict=True))})
