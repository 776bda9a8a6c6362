"""The changes of a shard in the columns of Spark's change feeds: `CHANGES FROM ... TO ...`, and streams of them.

The columns are those of the shard, then the kind of the change, its time as a version, and the same time as an instant.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.schema import Schema
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.columns import changes_of_rows
from persist_spark.row_shape import CHANGE_COLUMNS, arrow_schema
from persist_spark.source.stream_read import ShardStreamReader

#: The columns that Spark requires of a change feed.
FEED_COLUMNS = T.StructType(
    [
        T.StructField("_change_type", T.StringType(), nullable=False),
        T.StructField("_commit_version", T.LongType(), nullable=False),
        T.StructField("_commit_timestamp", T.TimestampType(), nullable=False),
    ]
)
#: Spark's names for kinds of changes that differ from the names of the format.
_NAMES = {"update_before": "update_preimage", "update_after": "update_postimage"}


def feed_row_type(shown: T.StructType) -> T.StructType:
    """The columns of a change feed, for changes with the columns `shown` (row_shape.changes_row_type)."""
    return T.StructType([*shown.fields[len(CHANGE_COLUMNS.fields) :], *FEED_COLUMNS.fields])


def change_rows(batch: pa.RecordBatch, columns: pa.Schema, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Selects the columns `wanted` of row changes with the columns `columns`. Raises InvalidUsage if the instant is wanted and a time has
    no instant in Spark.
    """
    for rows in changes_of_rows(batch, columns):
        time, what = (rows.column(field.name) for field in CHANGE_COLUMNS.fields)
        kinds = what.dictionary_encode()
        names = pa.array([_NAMES.get(kind, kind) for kind in kinds.dictionary.to_pylist()], pa.string())
        feed = {"_change_type": names.take(kinds.indices), "_commit_version": time}
        if "_commit_timestamp" in wanted.names:
            feed["_commit_timestamp"] = _instants(time)
        found = [feed[field.name] if field.name in feed else rows.column(field.name) for field in wanted]
        arrays = [column.cast(field.type) for column, field in zip(found, wanted, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _instants(time: pa.Array) -> pa.Array:
    try:
        return time.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"a change at the time {pc.max(time)} has no _commit_timestamp, as if the shard's times are not milliseconds: select other "
            "columns, such as _commit_version"
        ) from error


class FeedStreamReader(ShardStreamReader):
    """Reads for one streaming query over the changes of a table. `row_type`: all columns of the feed."""

    def shown(self, schema: Schema) -> T.StructType:
        """See ShardStreamReader."""
        return feed_row_type(super().shown(schema))

    def rows(self, changes: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """See ShardStreamReader."""
        own = self.row_type.fields[: -len(FEED_COLUMNS.fields)]
        columns = T.StructType([*CHANGE_COLUMNS.fields, *own])
        return change_rows(changes, arrow_schema(columns), arrow_schema(self.row_type))
