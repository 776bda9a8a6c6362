"""Decides the commands of a run against what the shard holds, in tasks on executors. Each task has a range of the keys. It takes the last
command of each key, reads what the shard holds for these keys, and makes or stages the updates. Spark shuffles the commands once, and never
the rows of the shard.

Owns the plan and the tasks. Only tasks can detect two problems: a key without a last command, and a key for which the shard holds several
values. A task returns a problem as a row, and Spark makes the message from that row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from persist_engine import LastOfKeys, NotOneValue, ReadHandle, SnapshotSplit, empty_struct, updates_against
from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.schema import Schema
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from persist_spark import frames
from persist_spark.columns import RECORD_ROWS, flat_columns, struct_column
from persist_spark.envelopes.commands import key_text
from persist_spark.envelopes.copied import Copied
from persist_spark.envelopes.persisted import opened
from persist_spark.frames import DELETED, DIFF, FAULT, ORDER, fields_of
from persist_spark.memory import give_back_freed_memory
from persist_spark.partitions import STAGED_SCHEMA, StageTask, blob_at, carrying_errors, reading_retry, stage
from persist_spark.spec import ConfigurationError

#: The column with the text of a key that has no last command. The column FAULT beside it names a key for which the shard holds several
#: values.
TIE = "tie"
#: The number of keys of a task.
KEYS = "keys"
#: The number of values that the shard holds for a key that cannot be decided, and the sum of their diffs. Null if the commands are the
#: cause.
_HELD, _TOTAL = "held", "total"
_PROBLEM = pa.schema([(TIE, pa.bool_()), (_HELD, pa.int64()), (_TOTAL, pa.int64())])
_STAGED = STAGED_SCHEMA.append(pa.field(KEYS, pa.int64()))
#: The condition that the shard must meet for each key, and the remedy.
_RULE = (
    "an Upsert needs at most one value of a key, with diff 1; remove the other rows first, for example with a Mirror"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The contents of a shard, of which each task reads a part. The driver's snapshot keeps the blobs."""

    blob: str
    split: bytes
    """A SnapshotSplit of all rows that the commands may concern."""


@contextmanager
def held(reader: ReadHandle | None, as_of: int | None, commands: Copied, *, blob: str) -> Iterator[Held | None]:
    """Yields the rows of the shard at `as_of` that `commands` may concern. They are readable within the block. Yields None when there is
    nothing to read: no reader, no `as_of`, or no commands. Raises Fenced when the lease expired.
    """
    if reader is None or as_of is None or not commands.count:
        yield None
        return
    with opened(reader, as_of, commands.where) as snapshot:
        yield Held(blob=blob, split=snapshot.splits(1)[0].to_bytes())


def staged_updates(commands: Copied, shard: Held | None, task: StageTask, *, tasks: int | None) -> DataFrame:
    """Plans to stage the updates. The frame has one row for each task: STAGED_SCHEMA, KEYS, TIE and FAULT. `tasks`: see
    `frames.by_key_range`. Starts no Spark job.
    """
    schema = commands.schema
    stages = StageUpdates(Decision(schema, shard, commands.order, read_bytes=task.target_part_bytes), task)
    key = [field for field in frames.flat_type(schema) if field.name.startswith("k")]
    row_type = T.StructType([*from_arrow_schema(_STAGED), *key, *from_arrow_schema(_PROBLEM)])
    ranged = frames.by_key_range(commands.frame, schema, tasks)
    return _with_texts(ranged.mapInArrow(stages, row_type), schema, _STAGED.names)


def shown_updates(commands: Copied, shard: Held | None, *, read_bytes: int) -> DataFrame:
    """Plans the updates as a frame: k*, v*, `diff`, TIE and FAULT. A row with a text in TIE or FAULT is not an update. Starts no
    Spark job.
    """
    schema = commands.schema
    shows = ShowUpdates(Decision(schema, shard, commands.order, read_bytes=read_bytes))
    diff = T.StructField(DIFF, T.LongType())
    row_type = T.StructType([*frames.flat_type(schema), diff, *from_arrow_schema(_PROBLEM)])
    ranged = frames.by_key_range(commands.frame, schema, None)
    return _with_texts(ranged.mapInArrow(shows, row_type), schema, [*(f.column for f in fields_of(schema)), DIFF])


def _with_texts(rows: DataFrame, schema: Schema, columns: Sequence[str]) -> DataFrame:
    """`columns`, and the columns of _PROBLEM as the texts TIE and FAULT."""
    name = key_text(fields_of(schema))
    several = F.concat(F.lit("the shard holds "), F.col(_HELD), F.lit(" values of key "), name)
    several = F.concat(several, F.lit(" with a total diff of "), F.col(_TOTAL), F.lit(f": {_RULE}"))
    fault = F.when(F.col(_HELD).isNotNull(), several)
    return rows.select(*columns, F.when(F.col(TIE), name).alias(TIE), fault.alias(FAULT))


def refusal(rows: Sequence[Mapping[str, Any]], shard: object) -> InvalidUsage | None:
    """The error that forbids an append to `shard`, from the rows of `staged_updates`. ConfigurationError names the first key without a
    last command. Otherwise InvalidUsage names the first key for which the shard holds several values. None when tasks found no problem.
    """
    tie, fault = (min((row[text] for row in rows if row[text] is not None), default=None) for text in (TIE, FAULT))
    if tie is not None:
        return tied(tie)
    return None if fault is None else InvalidUsage(f"{fault}; nothing was appended to shard {shard}")


def tied(key: str) -> ConfigurationError:
    """The error for a key without a last command."""
    return ConfigurationError(
        f"the input has several different rows for key {key} and none of them is the last: set "
        "envelope.orderColumn to a column that decides, or keep one row for each key with input.format.sql"
    )


# -- tasks ---------------------------------------------------------------------------------------------------------------


class _NoLast(Exception):
    """A key has no last command. `key`: an array with this one key."""

    def __init__(self, key: pa.StructArray) -> None:
        super().__init__("a key has no last command")
        self.key = key


class Decision:
    """Decides the commands of one task. All tasks of a run share it. `order`: see Copied. `read_bytes`: the memory that a task uses for
    rows of the shard.
    """

    def __init__(self, schema: Schema, shard: Held | None, order: str | None, *, read_bytes: int) -> None:
        self.schema, self.order, self.shard, self.read_bytes = schema, order, shard, read_bytes

    def updates(self, batches: Iterator[pa.RecordBatch]) -> tuple[int, Iterator[pa.Table]]:
        """Returns the number of keys in `batches`, and the updates of these keys: key, val, diff. Memory holds one command for each key,
        and at most `read_bytes` of rows of the shard at a time.

        Raises _NoLast at once. The iterator of updates raises NotOneValue.
        """
        give_back_freed_memory()
        choice = LastOfKeys()
        for batch in batches:
            if batch.num_rows:
                choice.add(self._commands(batch))
        chosen = choice.result()
        if chosen is None:
            return 0, iter(())
        last, tied_rows = chosen
        if len(tied_rows):
            raise _NoLast(last.column("key").slice(int(tied_rows[0]), 1).combine_chunks())
        return last.num_rows, updates_against(last, self._held_of(last.column("key")), keeps_greater=self.order)

    def _commands(self, batch: pa.RecordBatch) -> pa.Table:
        table, schema = pa.Table.from_batches([batch]), self.schema
        order = table.column(ORDER)
        if self.order is not None:
            order = order.cast(schema.val.field(self.order).type)
        sides = {"key": struct_column(table, "k", schema.key_type), "val": struct_column(table, "v", schema.val_type)}
        return pa.table({**sides, "order": order, "deleted": table.column(DELETED)})

    def _held_of(self, keys: pa.ChunkedArray) -> Iterator[pa.RecordBatch]:
        """The rows of the shard with `keys`, and possibly with other keys. The first task also audits the parts that the driver
        left out.
        """
        if self.shard is None:
            return
        split, context = SnapshotSplit.from_bytes(self.shard.split), TaskContext.get()
        if context is not None and context.partitionId() > 0:
            split = replace(split, audits=())
        blob = blob_at(self.shard.blob)
        yield from split.of_keys(keys).to_batches(blob, memory_bytes=self.read_bytes, retry=reading_retry())


class StageUpdates:
    """Stages the updates of a range of keys. Columns: k*, v*, `o`, `deleted`."""

    def __init__(self, decision: Decision, task: StageTask) -> None:
        self.decision, self.task = decision, task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields one row. A repeated call stages another batch and does not change linked ones."""
        with carrying_errors():
            yield self._staged(batches)

    def _staged(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
        problem, key = None, pa.nulls(1, self.task.schema.key_type)
        try:
            keys, updates = self.decision.updates(batches)
            staged = stage(self.task, (self._timed(table) for table in updates))
            row: list[Any] = [staged.batch, 0, 0, staged.updates, staged.least_time, 0, 0, keys]
        except (_NoLast, NotOneValue) as error:
            row, problem, key = [None, 0, 0, 0, None, 0, 0, 0], error, error.key
        columns = {field.name: pa.array([value], field.type) for field, value in zip(_STAGED, row, strict=True)}
        return _with_problem({**columns, **flat_columns(key, empty_struct(1))}, 1, problem)

    def _timed(self, updates: pa.Table) -> pa.Table:
        times = pa.repeat(pa.scalar(self.task.time, pa.int64()), updates.num_rows)
        columns = [updates.column("key"), updates.column("val"), times, updates.column("diff")]
        return pa.Table.from_arrays(columns, schema=self.task.schema.updates_schema)


class ShowUpdates:
    """Makes the updates of a range of keys. Columns: k*, v*, `o`, `deleted`."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the updates. When a key cannot be decided, its row is the last one."""
        with carrying_errors():
            try:
                _, updates = self.decision.updates(batches)
                for rows in (batch for table in updates for batch in table.to_batches(max_chunksize=RECORD_ROWS)):
                    columns = flat_columns(rows.column("key"), rows.column("val"))
                    yield _with_problem({**columns, DIFF: rows.column("diff")}, rows.num_rows, None)
            except (_NoLast, NotOneValue) as error:
                columns = flat_columns(error.key, pa.nulls(1, self.decision.schema.val_type))
                yield _with_problem({**columns, DIFF: pa.nulls(1, pa.int64())}, 1, error)


def _with_problem(columns: dict[str, pa.Array], rows: int, error: _NoLast | NotOneValue | None) -> pa.RecordBatch:
    """`columns`, and the columns of _PROBLEM."""
    match error:
        case NotOneValue(held=held, total=total):
            values: tuple[Any, ...] = (None, held, total)
        case _:
            values = (None if error is None else True, None, None)
    beside = {field.name: pa.array([value] * rows, field.type) for field, value in zip(_PROBLEM, values, strict=True)}
    return pa.RecordBatch.from_pydict({**columns, **beside})
