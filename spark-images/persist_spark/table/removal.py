"""`delete(where)`: retracts the rows that satisfy a condition, in one compare-and-append.

A condition that the engine can express is read here, in the caller's process, without a Spark job; parts without such rows, by their
statistics, are not fetched. Any other condition is a query: Spark's tasks stage the retractions.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import pyarrow.compute as pc
from persist_engine import Changes, Filter, ReadHandle, WriteHandle, predicate_of
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, Unavailable
from persist_engine.flow.append_run import AfterMismatch, Recompute, Staged
from persist_engine.flow.mint_run import Minted, RaiseUpper, ShardView, mint
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark import frames
from persist_spark.landing import CHANGES_MEMORY_BYTES, Landed, Landing, refuse_outgrown_schema
from persist_spark.partitions import STAGED_DDL, StageRows, StageTask
from persist_spark.report import Log
from persist_spark.source.commit import PURPOSE, ROUNDS_MAX, Written, overwrite
from persist_spark.spec import TARGET_PART_BYTES
from persist_spark.table.shard import TableShard

#: The condition that every row satisfies.
ALL = "true"


def delete(table: TableShard, where: str | Column) -> int:
    """Removes the rows of `table` that satisfy `where` and returns their number, counted with their copies. All go at one time, or none.

    Rows that do not satisfy it stay, also those that other writers add meanwhile. Of the rows that satisfy it, those that others add
    meanwhile may stay. Spark's AnalysisException for a condition without a meaning; Unavailable when other writers were faster for too
    long, and then nothing was deleted; other errors of the stores leave it open.
    """
    if isinstance(where, str):
        with table.opened() as client:
            schema = client.schema(table.id)
        if where.strip().lower() == ALL:
            return _delete_here(table, None)
        if _is_expressible(where, schema):
            return _delete_here(table, where)
    return _delete_by_query(table, where)


def _is_expressible(where: str, schema: Schema) -> bool:
    """Whether the engine reads the condition as SQL does. In a collection with errors its filters let the errors pass."""
    try:
        Filter(predicate_of(where), schema)
    except InvalidUsage:
        return False
    return "err" not in schema.key.names


def _delete_here(table: TableShard, where: str | None) -> int:
    """Makes the rows that satisfy `where` equal to no rows."""
    with table.opened() as client, client.open_writer(table.id, client.schema(table.id), purpose=PURPOSE) as writer:
        upper = writer.fetch_recent_upper()
        minted = _minted(upper, Antichain.minimum(), reads_back=False)
        assert isinstance(minted, Minted)
        if upper == Antichain.minimum():
            return 0  # nothing was ever written
        task = _task(table, writer, minted)
    written = Written(location=table.location, shard=table.id, task=task, batches=())
    return -overwrite(written, where=where, allow_empty=True)


def _delete_by_query(table: TableShard, where: str | Column) -> int:
    with table.opened() as client, client.open_writer(table.id, client.schema(table.id), purpose=PURPOSE) as writer:
        for _ in range(ROUNDS_MAX):
            with client.open_leased_reader(table.id, writer.schema, purpose=PURPOSE) as reader:
                removed = _round(table, writer, reader, where)
            if removed is not None:
                return removed
    raise Unavailable(
        f"other writers removed rows of shard {table.id} {ROUNDS_MAX} times while the rows to delete were looked up; nothing was "
        "deleted; delete again, or with a condition that option where of a read accepts, which waits for nobody's pause"
    )


def _round(table: TableShard, writer: WriteHandle, reader: ReadHandle, where: str | Column) -> int | None:
    """Stages the retractions of the rows that satisfy `where` now, and appends them. None when it must start over."""
    refuse_outgrown_schema(writer)
    match _minted(writer.fetch_recent_upper(), reader.since, reads_back=True):
        case RaiseUpper(lower, upper):
            writer.compare_and_append_batch([], expected_upper=lower, new_upper=upper)
            return None
        case Minted(as_of=as_of) as minted:
            pass
    if as_of is None:
        return 0  # nothing was ever written
    found = frames.to_flat(table.frame(as_of).where(where), writer.schema)
    retractions = found.withColumn(frames.DIFF, F.lit(-1).cast("bigint"))
    rows = retractions.mapInArrow(StageRows(_task(table, writer, minted)), STAGED_DDL).collect()
    batches = [writer.batch_from_transmittable(bytes(row["batch"]), is_only_copy=True) for row in rows if row["batch"]]
    if not batches:
        return 0
    time, env = minted.time, SystemEnv()
    landing = RowLanding(
        writer=writer,
        reader=reader,
        staged=Staged(lower=minted.lower, upper=minted.upper, time=time, least_time=time, as_of=as_of),
        batches=batches,
        sink_id=None,
        run_token=b"",
        expected=None,
        env=env,
        log=Log(io.StringIO(), env),
    )
    return sum(row["rows"] for row in rows) if isinstance(landing.land(), Landed) else None


@dataclass(kw_only=True)
class RowLanding(Landing):
    """The append of retractions of rows that were there at `staged.as_of`. It moves past writers that only add rows. When others removed
    rows meanwhile, some of these might be gone already, so the landing ends with Recompute.
    """

    def _decide(self, current: Antichain) -> AfterMismatch:
        assert self.reader is not None
        upto = current.newest_complete
        if _lost_rows(self.reader, self.staged.as_of, upto):
            return Recompute()
        self.staged = replace(self.staged, as_of=upto)
        return super()._decide(current)


def _lost_rows(reader: ReadHandle, after: int | None, upto: int) -> bool:
    """Whether rows were removed at the times after `after` up to `upto`. Also true when those times are no longer readable."""
    changes = reader.changes(after, upto)
    if not isinstance(changes, Changes):
        return True
    with changes:
        batches = changes.to_batches(memory_bytes=CHANGES_MEMORY_BYTES)
        return any(pc.min(batch.column("diff")).as_py() < 0 for batch in batches)


def _minted(upper: Antichain, since: Antichain, *, reads_back: bool) -> Minted | RaiseUpper:
    view = ShardView(since=since, upper=upper, progress=None)
    minted = mint(view, run=b"", now_ms=SystemEnv().now_ms(), reads_back=reads_back)
    assert isinstance(minted, Minted | RaiseUpper), "a run without progress is neither done nor superseded"
    return minted


def _task(table: TableShard, writer: WriteHandle, minted: Minted) -> StageTask:
    return StageTask.at(
        writer,
        blob=table.location.blob,
        lower=minted.lower,
        time=minted.time,
        target_part_bytes=TARGET_PART_BYTES,
    )
