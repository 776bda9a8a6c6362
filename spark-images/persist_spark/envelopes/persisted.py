"""The contents of a shard at one time, as tasks on executors read them. The driver's snapshot keeps the blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from persist_engine import ReadHandle, SinceAhead, Snapshot
from persist_engine.base.errors import Fenced
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark import frames
from persist_spark.envelopes.copied import Where
from persist_spark.partitions import ReadParts, grouped
from persist_spark.session import parallelism_of


@dataclass(frozen=True, slots=True)
class Persisted:
    """The contents of a shard. `parts` reads them in tasks: flat columns and the negated `diff`, not consolidated."""

    spark: SparkSession
    schema: Schema
    parts: ReadParts
    size_bytes: int
    """The bytes that reading them fetches."""
    rows_estimate: int
    """An upper bound of the number of rows."""

    def rows(self, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] | None = None) -> DataFrame:
        """The rows that `parts` reads, or (`task`) some of them. Plans only."""
        return self.read(task or self.parts, frames.flat_type(self.schema).add(frames.DIFF, T.LongType()))

    def read(
        self, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], shape: T.StructType | str
    ) -> DataFrame:
        """What `task` makes of the numbers of groups, in the place of `parts`. Plans only."""
        groups = len(self.parts.groups)
        return self.spark.range(0, groups, 1, max(1, groups)).mapInArrow(task, shape)


def opened(reader: ReadHandle, as_of: int, where: Where | None = None) -> Snapshot:
    """The snapshot of the shard at `as_of`, which the caller closes. Raises Fenced when the lease expired."""
    # mint ensures since <= as_of < upper, under this reader's own hold.
    snapshot = reader.snapshot(Antichain.of(as_of), where=where)
    if isinstance(snapshot, SinceAhead):
        raise Fenced(f"the lease of {reader} expired before its first use; run it again")
    return snapshot


@contextmanager
def persisted(spark: SparkSession, reader: ReadHandle, as_of: int, schema: Schema, *, blob: str) -> Iterator[Persisted]:
    """Yields the shard's contents at `as_of`. Reading them takes about one task for each core. They are readable within the block. Raises
    Fenced when the lease expired.
    """
    with opened(reader, as_of) as snapshot:
        groups = grouped(snapshot.lease_parts(), cores=parallelism_of(spark))
        yield Persisted(
            spark, schema, ReadParts(blob=blob, groups=groups), snapshot.bytes_estimate, snapshot.rows_estimate
        )


def tasks_for(desired: DataFrame, contents: Persisted) -> int | None:
    """The number of tasks for the rows of both sides, by Spark's estimate of `desired`: 1 for few rows. None: as many as their bytes
    require.
    """
    size_bytes = frames.planned_bytes(desired)
    is_small = size_bytes is not None and size_bytes + contents.size_bytes <= frames.SMALL_TASK_BYTES
    return 1 if is_small else None
