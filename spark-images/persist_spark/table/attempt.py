"""One run of a table that compares rows with the contents of the shard. It reads at one time, stages on executors, and appends once.

If other writers commit changes that the run's rows cannot follow, the run starts again with the read. Decides nothing about rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persist_engine import Batch, ReadHandle, WriteHandle
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Unavailable
from persist_engine.flow.append_run import Recompute, Staged
from persist_engine.flow.mint_run import Minted, RaiseUpper, RunToken, ShardView, mint
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame

from persist_spark.envelopes.against import KEYS, refusal
from persist_spark.landing import Landed, Landing, refuse_outgrown_schema
from persist_spark.partitions import STAGED_DDL, StageRows, StageTask
from persist_spark.report import Log
from persist_spark.source.commit import PURPOSE, ROUNDS_MAX
from persist_spark.spec import TARGET_PART_BYTES
from persist_spark.table.shard import PlacedShard, TableShard


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """The staged batches of one attempt, and their counts."""

    batches: list[Batch]
    rows: int
    """The number of rows that the tasks read."""
    keys: int = 0
    """The number of keys, if the rows are commands on keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a run. `reader` holds the contents with which the attempt compares."""

    table: TableShard
    writer: WriteHandle
    reader: ReadHandle
    minted: Minted

    @property
    def task(self) -> StageTask:
        """The task that stages updates at the time of the attempt."""
        return task_at(self.table, self.writer, self.minted)

    def stage(self, updates: DataFrame) -> StagedRows:
        """Stages the rows of `updates` (partitions.StageRows). Runs a Spark job."""
        return self.staged(updates.mapInArrow(StageRows(self.task), STAGED_DDL))

    def staged(self, staging: DataFrame) -> StagedRows:
        """Runs the Spark job of `staging` and collects the staged batches. Raises the errors of `against.refusal` after it has deleted the
        batches.
        """
        tasks = staging.collect()
        # Spark returns the row of one attempt of each task, and only here.
        batches = [
            self.writer.batch_from_transmittable(bytes(task["batch"]), is_only_copy=True)
            for task in tasks
            if task["batch"] is not None
        ]
        if KEYS not in staging.columns:
            return StagedRows(batches=batches, rows=sum(task["rows"] for task in tasks))
        if error := refusal(tasks, self.table.id):
            self.writer.delete_batches(batches)
            raise error
        return StagedRows(batches=batches, rows=0, keys=sum(task[KEYS] for task in tasks))

    def land(self, batches: list[Batch], kind: type[Landing] = Landing, *, reads_back: bool, **more: Any) -> int | None:
        """Appends the batches with a landing of class `kind` and the arguments `more`. Returns the number of updates, or None when the run
        must compare again.
        """
        time, env = self.minted.time, SystemEnv()
        staged = Staged(
            lower=self.minted.lower,
            upper=self.minted.upper,
            time=time,
            least_time=time,
            reads_back=reads_back,
            as_of=self.minted.as_of,
        )
        outcome = kind(
            writer=self.writer,
            reader=self.reader,
            staged=staged,
            batches=batches,
            sink_id=None,
            run_token=RunToken(b""),
            expected=None,
            env=env,
            log=Log(io.StringIO(), env),
            **more,
        ).land()
        match outcome:
            case Landed(updates=updates):
                return updates
            case Recompute():
                return None
        raise AssertionError(f"a run without progress and with one time ended as {outcome}")


def until_done(table: TableShard, schema: Schema, attempt: Callable[[Attempt], int | None]) -> int:
    """Calls `attempt` until it returns a number, and returns that. Raises Unavailable after ROUNDS_MAX attempts; nothing was appended then.
    Raises InvalidUsage for a closed shard, and for a schema that evolved meanwhile.
    """
    with table.opened() as client, client.open_writer(table.id, schema, purpose=PURPOSE) as writer:
        for _ in range(ROUNDS_MAX):
            with client.open_leased_reader(table.id, schema, purpose=PURPOSE) as reader:
                refuse_outgrown_schema(writer)
                match minted_at(writer, writer.fetch_recent_upper(), reader.since, reads_back=True):
                    case RaiseUpper(lower, upper):
                        writer.compare_and_append_batch([], expected_upper=lower, new_upper=upper)
                        continue
                    case Minted() as minted:
                        answer = attempt(Attempt(table=table, writer=writer, reader=reader, minted=minted))
            if answer is not None:
                return answer
    raise Unavailable(
        f"other writers of shard {table.id} changed the same rows {ROUNDS_MAX} times in a row while this run read them; nothing was "
        "changed; run it again"
    )


def minted_at(writer: WriteHandle, upper: Antichain, since: Antichain, *, reads_back: bool) -> Minted | RaiseUpper:
    """The times of a run that begins now. Raises InvalidUsage for a closed shard."""
    view = ShardView(since=since, upper=upper, progress=None)
    minted = mint(view, run=b"", now_ms=writer.clock_time(SystemEnv().now_ms()), reads_back=reads_back)
    assert isinstance(minted, Minted | RaiseUpper), "a run without progress is neither done nor superseded"
    return minted


def task_at(table: PlacedShard, writer: WriteHandle, minted: Minted) -> StageTask:
    """The task that stages updates at the time of `minted`."""
    return StageTask.at(
        writer, blob=table.location.blob, lower=minted.lower, time=minted.time, target_part_bytes=TARGET_PART_BYTES
    )
