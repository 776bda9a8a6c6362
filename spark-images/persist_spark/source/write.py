"""`df.write.format("persist")`: a frame's rows become updates of a shard, all in one compare-and-append, or none.

Spark creates the writer and calls `commit` and `abort` in Python workers of the driver, and `write` in the tasks. Tasks stage batches
and use only the blob store. `commit.py` appends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import Filter, Location, PersistClient, predicate_of
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.flow.mint_run import Minted, ShardView, mint
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from persist_spark.columns import flat_batch
from persist_spark.frames import fields_of, unfit
from persist_spark.options import STORE, check_names
from persist_spark.partitions import StagedBatch, StageTask, carrying_errors, sink_settings, stage, updates_of
from persist_spark.row_shape import condition
from persist_spark.source.commit import PURPOSE, Written, append, overwrite
from persist_spark.spec import TARGET_PART_BYTES

_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of one write, checked."""

    shard: ShardId
    location: Location
    replace_where: str | None = None
    """Overwrite only: the rows to replace. None: all."""
    allow_empty: bool = False
    """Overwrite only: whether a frame without rows removes the rows that it replaces."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, overwrites: bool) -> WriteOptions:
        """Checks the options. Names are case-insensitive, as in Spark. Raises InvalidUsage, which names an invalid, missing or
        unknown option.
        """
        given = {name.lower(): value for name, value in options.items()}
        only = {"replace_where", "allow_empty"}
        check_names(given, {*STORE, *only}, "a write in format persist")
        if not overwrites and (beside := sorted(only & set(given))):
            raise InvalidUsage(
                f"option {', '.join(beside)}: needs mode overwrite; remove the option, or choose that mode"
            )
        allow_empty = given.get("allow_empty", "false").lower()
        if allow_empty not in ("true", "false"):
            raise InvalidUsage(f"option allow_empty: {given['allow_empty'][:64]!r} is not true or false")
        return cls(
            shard=ShardId(given["shard"]),
            location=Location(blob=given["blob"], consensus=given["consensus"]),
            replace_where=given.get("replace_where"),
            allow_empty=allow_empty == "true",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The facts about a write that tasks and the commit need, chosen when Spark plans the write."""

    options: WriteOptions
    task: StageTask
    positions: tuple[int, ...]
    """The positions of the shard's key fields and value fields among the frame's columns."""

    @classmethod
    def of(cls, options: WriteOptions, columns: T.StructType) -> WritePlan:
        """Reads the shard's schema and upper. Raises InvalidUsage when the columns do not fit; ShardNotFound; store errors."""
        env, settings = SystemEnv(), sink_settings(TARGET_PART_BYTES)
        with PersistClient.open(options.location, settings=settings, env=env, create=False) as client:
            schema = client.schema(options.shard)
            positions = matched(columns, schema)
            if options.replace_where is not None:
                rule = condition(options.replace_where, schema, "replace_where")
                if (
                    rule.passes_errors
                ):  # a read shows errors too, but a write must remove only rows that satisfy its condition
                    options = replace(options, replace_where=f"({options.replace_where}) AND key.err IS NULL")
            with client.open_writer(options.shard, schema, purpose=PURPOSE) as writer:
                view = ShardView(since=Antichain.minimum(), upper=writer.fetch_recent_upper(), progress=None)
                minted = mint(view, run=b"", now_ms=writer.clock_time(env.now_ms()), reads_back=False)
                assert isinstance(minted, Minted)
                task = StageTask.at(
                    writer,
                    blob=options.location.blob,
                    lower=minted.lower,
                    time=minted.time,
                    target_part_bytes=TARGET_PART_BYTES,
                )
        return cls(options=options, task=task, positions=positions)


def matched(columns: T.StructType, schema: Schema) -> tuple[int, ...]:
    """The position of each field of the shard among `columns`. Names are compared exactly. Raises InvalidUsage, which names every column
    that is missing, surplus or duplicate, or whose type does not fit without loss.
    """
    problem = schema.column_problem(columns.names, hint="drop them with select")
    if problem is not None:
        raise InvalidUsage(problem)
    fields = fields_of(schema)
    at = {field.name: index for index, field in enumerate(columns.fields)}
    problems = [unfit(field.name, columns[at[field.name]].dataType, field.type) for field in fields]
    if found := [text for text in problems if text is not None]:
        raise InvalidUsage(f"the frame does not fit the shard's schema: {'; '.join(found)}; cast these columns")
    return tuple(at[field.name] for field in fields)


@dataclass
class Staged(WriterCommitMessage):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """The result of one task."""

    batch: StagedBatch


class ShardWriter(DataSourceArrowWriter):  # type: ignore[misc]  # as above
    """One write of one frame."""

    def __init__(self, options: Mapping[str, str], columns: T.StructType, *, overwrites: bool) -> None:
        self.overwrites = overwrites
        self.plan = WritePlan.of(WriteOptions.parse(options, overwrites=overwrites), columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stages one partition. A repeated task stages another batch, and Spark passes the message of one of them to `commit`."""
        return Staged(stage_partition(self.plan, iterator))

    def commit(self, messages: Sequence[Staged | None]) -> None:
        """Appends the staged batches in one step, or raises. After an error of the stores the append may have happened."""
        written = self._written(messages)
        if self.overwrites:
            overwrite(written, where=self.plan.options.replace_where, allow_empty=self.plan.options.allow_empty)
        else:
            append(written)

    def abort(self, messages: Sequence[Staged | None]) -> None:
        """Deletes the staged batches of a failed job.

        SUBTLE: Spark also calls this after a failed commit, although its append may have happened. Then every task has a message, and
        nothing is deleted here. The commit has deleted the batches that it could, and the orphan scan finds the rest.
        """
        if all(message is not None for message in messages):
            return
        self._written(messages).delete()

    def _written(self, messages: Sequence[Staged | None]) -> Written:
        return Written(
            location=self.plan.options.location,
            shard=self.plan.options.shard,
            task=self.plan.task,
            batches=tuple(message.batch for message in messages if message is not None),
        )


def stage_partition(plan: WritePlan, batches: Iterator[pa.RecordBatch]) -> StagedBatch:
    """Stages the rows of one task, each as one update with diff 1. Raises InvalidUsage for rows outside `replace_where`, with an
    example.
    """
    task, rule = plan.task, plan.options.replace_where
    inside = None if rule is None else Filter(predicate_of(rule), task.schema)

    def updates() -> Iterator[pa.Table]:
        for batch in batches:
            rows = updates_of(flat_batch(batch, plan.positions, task.schema.key_type, task.schema.val_type), task)
            if inside is not None and not pc.all(kept := inside.mask(rows)).as_py():
                first = rows.filter(pc.invert(kept)).slice(0, 1)
                raise InvalidUsage(
                    f"option replace_where: {rule} does not hold for the row with key "
                    f"{str(first.column('key')[0].as_py())[:_SHOWN_CHARS]}; filter the frame, or change the option"
                )
            yield rows

    with carrying_errors():
        return stage(task, updates())
