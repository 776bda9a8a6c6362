"""Decides the commands of a run against what the shard holds, in tasks of executors. Each has a range of the keys: it takes the last
command of each key, reads what the shard holds of these keys, and makes or stages the updates. The commands are exchanged once, and rows of
the shard never.

Owns the plan and the tasks. Two things turn up in tasks alone: a key without a last command, and one of which the shard holds several
values. They come back as rows, from which Spark makes the texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from persist_engine import LastOfKeys, NotOneValue, ReadHandle, SinceAhead, SnapshotSplit, empty_struct, updates_against
from persist_engine.base.errors import Fenced, InvalidUsage
from persist_engine.model.frontier import Antichain
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
from persist_spark.frames import DELETED, DIFF, FAULT, ORDER, fields_of
from persist_spark.memory import give_back_freed_memory
from persist_spark.partitions import STAGED_SCHEMA, StageTask, blob_at, carrying_errors, reading_retry, stage
from persist_spark.spec import ConfigurationError

#: The key without a last command, as text. FAULT beside it: of which key the shard holds what it must not.
TIE = "tie"
#: The number of keys of a task.
KEYS = "keys"
#: Of a key that cannot be decided: how many values the shard holds, and their diffs. Null where the commands are the cause.
_HELD, _TOTAL = "held", "total"
_PROBLEM = pa.schema([(TIE, pa.bool_()), (_HELD, pa.int64()), (_TOTAL, pa.int64())])
_STAGED = STAGED_SCHEMA.append(pa.field(KEYS, pa.int64()))
#: What a shard must hold of each key.
_RULE = (
    "an Upsert needs at most one value of a key, with diff 1; remove the other rows first, for example with a Mirror"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a shard holds, for tasks that each read some of it. The driver keeps the blobs."""

    blob: str
    split: bytes
    """A SnapshotSplit of all that commands may concern."""


@contextmanager
def held(reader: ReadHandle | None, as_of: int | None, commands: Copied, *, blob: str) -> Iterator[Held | None]:
    """What the shard holds at `as_of` that `commands` may concern, readable within the block. None when that is nothing. Fenced when the
    lease expired.
    """
    if reader is None or as_of is None or not commands.count:
        yield None
        return
    # mint ensures since <= as_of < upper, under this reader's own hold.
    snapshot = reader.snapshot(Antichain.of(as_of), where=commands.where)
    if isinstance(snapshot, SinceAhead):
        raise Fenced(f"the lease of {reader} expired before its first use; run it again")
    with snapshot:
        yield Held(blob=blob, split=snapshot.splits(1)[0].to_bytes())


def staged_updates(commands: Copied, shard: Held | None, task: StageTask, *, tasks: int | None) -> DataFrame:
    """Stages the updates. One row for each task: STAGED_SCHEMA, KEYS, TIE and FAULT. `tasks`: as of `frames.by_key_range`. Plans only."""
    schema = commands.schema
    stages = StageUpdates(Decision(schema, shard, commands.order, read_bytes=task.target_part_bytes), task)
    key = [field for field in frames.flat_type(schema) if field.name.startswith("k")]
    kind = T.StructType([*from_arrow_schema(_STAGED), *key, *from_arrow_schema(_PROBLEM)])
    ranged = frames.by_key_range(commands.frame, schema, tasks)
    return _with_texts(ranged.mapInArrow(stages, kind), schema, _STAGED.names)


def shown_updates(commands: Copied, shard: Held | None, *, read_bytes: int) -> DataFrame:
    """The updates: k*, v*, `diff`, TIE and FAULT. A row with a text is no update. Plans only."""
    schema = commands.schema
    shows = ShowUpdates(Decision(schema, shard, commands.order, read_bytes=read_bytes))
    kind = T.StructType([*frames.flat_type(schema), T.StructField(DIFF, T.LongType()), *from_arrow_schema(_PROBLEM)])
    ranged = frames.by_key_range(commands.frame, schema, None)
    return _with_texts(ranged.mapInArrow(shows, kind), schema, [*(f.column for f in fields_of(schema)), DIFF])


def _with_texts(rows: DataFrame, schema: Schema, columns: Sequence[str]) -> DataFrame:
    """`columns`, and what _PROBLEM says as the texts TIE and FAULT."""
    name = key_text(fields_of(schema))
    several = F.concat(F.lit("the shard holds "), F.col(_HELD), F.lit(" values of key "), name)
    several = F.concat(several, F.lit(" with a total diff of "), F.col(_TOTAL), F.lit(f": {_RULE}"))
    fault = F.when(F.col(_HELD).isNotNull(), several)
    return rows.select(*columns, F.when(F.col(TIE), name).alias(TIE), fault.alias(FAULT))


def refusal(rows: Sequence[Mapping[str, Any]], shard: object) -> InvalidUsage | None:
    """Why nothing may be appended to `shard`, by the rows of `staged_updates`: ConfigurationError names the first key without a last
    command, InvalidUsage the first of which the shard holds several values.
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
    """A key has no last command. `key`: an array of it alone."""

    def __init__(self, key: pa.StructArray) -> None:
        super().__init__("a key has no last command")
        self.key = key


class Decision:
    """What every task of a run decides. `order`: as of Copied. `read_bytes`: the memory of a task for the rows of the shard."""

    def __init__(self, schema: Schema, shard: Held | None, order: str | None, *, read_bytes: int) -> None:
        self.schema, self.order, self.shard, self.read_bytes = schema, order, shard, read_bytes

    def updates(self, batches: Iterator[pa.RecordBatch]) -> tuple[int, Iterator[pa.Table]]:
        """The number of keys of the commands in `batches`, and the updates of these keys: key, val, diff. _NoLast now, and NotOneValue
        while the updates are taken. Holds a command for each key, and some rows of the shard at a time.
        """
        give_back_freed_memory()
        choice = LastOfKeys()
        for batch in batches:
            if batch.num_rows:
                choice.add(self._commands(batch))
        found = choice.result()
        if found is None:
            return 0, iter(())
        last, tied_rows = found
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
        """What the shard holds of `keys`, and perhaps of others. The first task also audits what the driver left out."""
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
        """Yields one row. A repetition stages another batch and does not change linked ones."""
        with carrying_errors():
            yield self._staged(batches)

    def _staged(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
        problem, key = None, pa.nulls(1, self.task.schema.key_type)
        try:
            keys, updates = self.decision.updates(batches)
            done = stage(self.task, (self._timed(table) for table in updates))
            said: list[Any] = [done.batch, 0, 0, done.updates, done.least_time, 0, 0, keys]
        except (_NoLast, NotOneValue) as error:
            said, problem, key = [None, 0, 0, 0, None, 0, 0, 0], error, error.key
        columns = {field.name: pa.array([each], field.type) for field, each in zip(_STAGED, said, strict=True)}
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
        """Yields the updates, and none after a key that cannot be decided."""
        with carrying_errors():
            try:
                _, updates = self.decision.updates(batches)
                for rows in (each for table in updates for each in table.to_batches(max_chunksize=RECORD_ROWS)):
                    columns = flat_columns(rows.column("key"), rows.column("val"))
                    yield _with_problem({**columns, DIFF: rows.column("diff")}, rows.num_rows, None)
            except (_NoLast, NotOneValue) as error:
                columns = flat_columns(error.key, pa.nulls(1, self.decision.schema.val_type))
                yield _with_problem({**columns, DIFF: pa.nulls(1, pa.int64())}, 1, error)


def _with_problem(columns: dict[str, pa.Array], rows: int, error: _NoLast | NotOneValue | None) -> pa.RecordBatch:
    """`columns`, and those of _PROBLEM."""
    match error:
        case NotOneValue(held=held, total=total):
            said: tuple[Any, ...] = (None, held, total)
        case _:
            said = (None if error is None else True, None, None)
    beside = {field.name: pa.array([each] * rows, field.type) for field, each in zip(_PROBLEM, said, strict=True)}
    return pa.RecordBatch.from_pydict({**columns, **beside})
