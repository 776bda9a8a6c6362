"""Compares the updates that a stream would have written for an interval of its source with the updates of the sink's other driver. Writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from persist_engine import ReadHandle, SinceAhead, SourceProgress
from persist_engine.base.errors import Fenced
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark import frames
from persist_spark.envelopes.against import held, shown_updates
from persist_spark.envelopes.compared import Difference, difference_of_updates
from persist_spark.envelopes.copied import copied
from persist_spark.frames import DIFF, TIME, fields_of
from persist_spark.held_frames import SPLIT_BYTES
from persist_spark.partitions import ReadChanges
from persist_spark.spec import PARALLELISM_MAX, OnError, SinkSpec
from persist_spark.staging import shard_order
from persist_spark.streaming.position import Position, decode_position


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of the writing driver: the position, and the shard's upper after the commit."""

    position: Position
    upper: int

    @classmethod
    def of(cls, progress: SourceProgress, *, sink_id: str) -> Commit:
        """The commit that stored `progress`. Raises the errors of `decode_position`."""
        return cls(decode_position(progress.token, sink_id=sink_id), progress.upper.newest_complete + 1)


@dataclass(frozen=True, slots=True)
class Interval:
    """The part of the source between two commits, and the shard's times of its updates: after `after`, up to `upto`."""

    before: Commit
    end: Commit
    after: int
    upto: int

    @classmethod
    def between(cls, before: Commit, end: Commit, spec: SinkSpec) -> Interval:
        """The interval.

        Unless the input names times, all rows of one batch have one time, the last one before the upper of the batch's commit. So an
        interval of one batch leaves out the appends of other writers between the commits. A commit without rows has no times, whatever
        others have written.
        """
        after, upto = before.upper - 1, end.upper - 1
        if _is_one_batch(before, end):
            if not end.position.has_rows:
                after = upto
            elif spec.envelope.timestamp_column is None:
                after = max(after, upto - 1)
        return cls(before, end, after, upto)

    @property
    def is_one_batch(self) -> bool:
        """Whether the interval is one batch of one driver. Several batches were committed one by one, or some of them had no rows. A driver
        that took over committed a position without rows after the batch, whose own commit is then unknown.
        """
        return _is_one_batch(self.before, self.end)


def _is_one_batch(before: Commit, end: Commit) -> bool:
    return end.position.batch == before.position.batch + 1 and end.position.driver == before.position.driver


def difference_in(
    spark: SparkSession, rows: DataFrame, interval: Interval, spec: SinkSpec, reader: ReadHandle
) -> Difference:
    """Compares the updates that the sink would write for `rows` with the updates that the shard received. `rows`: the rows of the interval
    from `staging.rows_of`. Raises Fenced when the lease of `reader` lapsed, and ConfigurationError for rows that cannot be written.
    """
    spark.sparkContext.setJobDescription(f"{spec.sink_id}: on standby, compare as {spec.envelope.type}")
    columns = [f.column for f in fields_of(spec.schema)]
    if spec.envelope.timestamp_column is not None and spec.envelope.on_error is OnError.FAIL:
        columns.append(TIME)  # otherwise each driver chooses its own times, so they must not be compared
    with (
        _wanted(rows, interval, spec, reader) as wanted,
        _written(spark, interval, spec, reader) as written,
    ):
        return difference_of_updates(wanted, written, columns)


@contextmanager
def _wanted(rows: DataFrame, interval: Interval, spec: SinkSpec, reader: ReadHandle) -> Iterator[DataFrame]:
    """The updates that the sink would write for `rows` against the shard as it was before: k*, v*, `diff`, possibly `time`, TIE
    and FAULT.
    """
    if not spec.envelope.type.has_keys:
        yield rows if DIFF in rows.columns else rows.withColumn(DIFF, F.lit(1).cast("bigint"))
        return
    commands = copied(rows, spec.schema, shard_order(spec))
    as_of = None if interval.after < 0 else interval.after
    with held(reader, as_of, commands, blob=spec.blob) as shard:
        yield shown_updates(commands, shard, read_bytes=spec.write.target_part_bytes)


@contextmanager
def _written(spark: SparkSession, interval: Interval, spec: SinkSpec, reader: ReadHandle) -> Iterator[DataFrame | None]:
    """The updates that the shard received in the interval, with the negated `diff`. None when it received none."""
    if interval.upto <= interval.after:
        yield None
        return
    changes = reader.changes(None if interval.after < 0 else interval.after, interval.upto)
    if isinstance(changes, SinceAhead):
        raise Fenced(f"the lease of {reader} expired before its use; run it again")
    with changes:
        count = min(max(1, -(-changes.bytes_estimate // SPLIT_BYTES)), PARALLELISM_MAX)
        splits = tuple(split.to_bytes() for split in changes.splits(count))
        flat_type = frames.flat_type(spec.schema).add(DIFF, T.LongType()).add(TIME, T.LongType())
        yield spark.range(0, len(splits), 1, len(splits)).mapInArrow(
            ReadChanges(blob=spec.blob, splits=splits), flat_type
        )
