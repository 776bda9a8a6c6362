"""`delete(where)`: retracts the rows that satisfy a condition, in one compare-and-append.

If the engine can express the condition, this process reads the rows, without a Spark job. It does not fetch parts whose statistics exclude
matching rows. Any other condition becomes a query, and Spark's tasks stage the retractions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow.compute as pc
from persist_engine import Changes, ReadHandle, filter_of, holds_errors
from persist_engine.base.errors import InvalidUsage
from persist_engine.flow.append_run import AfterMismatch, Recompute
from persist_engine.flow.mint_run import Minted
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.errors import AnalysisException
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark import frames
from persist_spark.landing import CHANGES_MEMORY_BYTES, Landing
from persist_spark.source.commit import PURPOSE, Written, overwrite
from persist_spark.table.attempt import Attempt, minted_at, task_at, until_done
from persist_spark.table.shard import PlacedShard, TableShard

#: The condition that every row satisfies.
ALL = "true"
#: The column of errors in a collection that can contain them.
_ERR = "err"


def delete(table: TableShard, where: str | Column) -> int:
    """Removes the rows of `table` that satisfy `where`, all at one time or none, and returns their number, counted with their copies.

    Rows that do not satisfy it stay, even if other writers add them meanwhile. Rows that satisfy it and that other writers add meanwhile
    may stay. Raises Spark's AnalysisException for a condition that Spark does not understand; Unavailable when other writers were faster
    for too long, and then nothing was deleted. After other errors of the stores the rows may be deleted or not.
    """
    schema = table.schema()
    if isinstance(where, str):
        if where.strip().lower() == ALL:
            return delete_here(table, schema, None)
        if _is_expressible(where, schema):
            return delete_here(table, schema, where)

    keeps_errors = holds_errors(schema) and not _names_errors(table, where)

    def attempt(now: Attempt) -> int | None:
        if now.minted.as_of is None:
            return 0  # nothing was ever written
        frame = table.frame(now.minted.as_of)
        if keeps_errors:
            frame = frame.where(F.col(_ERR).isNull())
        found = frames.to_flat(frame.where(where), schema)
        staged = now.stage(found.withColumn(frames.DIFF, F.lit(-1).cast("bigint")))
        if not staged.batches:
            return 0
        return None if now.land(staged.batches, RowLanding, reads_back=False) is None else staged.rows

    return until_done(table, schema, attempt)


def _is_expressible(where: str, schema: Schema) -> bool:
    """Whether the engine evaluates the condition as Spark's SQL does. It does not for a collection with errors, because its filters let
    errors pass. Nor does it for a time without a zone, which is in the zone of the session, because only Spark knows that zone.
    """
    try:
        rule = filter_of(where, schema)
    except InvalidUsage:
        return False
    return not rule.zoneless and not rule.passes_errors


def _names_errors(table: TableShard, where: str | Column) -> bool:
    """Whether a condition on a collection with errors reads the column of errors. It is then invalid for rows without that column."""
    others = T.StructType([field for field in table.frame().schema if field.name != _ERR])
    try:
        # Spark Connect analyses a frame only when the client asks for its columns.
        table.spark.createDataFrame([], others).where(where).schema  # noqa: B018
    except AnalysisException:
        return True
    return False


def delete_here(table: PlacedShard, schema: Schema, where: str | None) -> int:
    """Removes the rows that satisfy `where`, a condition of the engine (None: all rows), in this process, without a Spark job. Returns
    their number, counted with their copies. Has the contract of `delete`.
    """
    with table.opened() as client, client.open_writer(table.id, schema, purpose=PURPOSE) as writer:
        upper = writer.fetch_recent_upper()
        minted = minted_at(writer, upper, Antichain.minimum(), reads_back=False)
        assert isinstance(minted, Minted)
        if upper == Antichain.minimum():
            return 0  # nothing was ever written
        task = task_at(table, writer, minted)
    written = Written(location=table.location, shard=table.id, task=task, batches=())
    return -overwrite(written, where=where, allow_empty=True)


@dataclass(kw_only=True)
class RowLanding(Landing):
    """The append of retractions of rows that existed at `staged.as_of`. It moves past writers that only add rows. If other writers removed
    rows meanwhile, some of the rows might be gone already, so the landing ends with Recompute.
    """

    def _decide(self, current: Antichain) -> AfterMismatch:
        assert self.reader is not None
        upto = current.newest_complete
        if _lost_rows(self.reader, self.staged.as_of, upto):
            return Recompute()
        self.staged = replace(self.staged, as_of=upto)
        return super()._decide(current)


def _lost_rows(reader: ReadHandle, after: int | None, upto: int) -> bool:
    """Whether rows were removed after `after`, up to `upto`. Also true when these times are no longer readable."""
    changes = reader.changes(after, upto)
    if not isinstance(changes, Changes):
        return True
    with changes:
        batches = changes.to_batches(memory_bytes=CHANGES_MEMORY_BYTES)
        return any(pc.min(batch.column("diff")).as_py() < 0 for batch in batches)
