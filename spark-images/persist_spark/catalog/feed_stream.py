"""`spark.readStream.changes("persist.demo.flights")`: a stream of the changes of a table, with the columns of a change feed."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from persist_engine.rows.schema import Schema
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.catalog.change_rows import FEED_COLUMNS, change_rows, feed_row_type
from persist_spark.row_shape import CHANGE_COLUMNS, arrow_schema
from persist_spark.source.stream_read import ShardStreamReader


class FeedStreamReader(ShardStreamReader):
    """The reads of one streaming query over the changes of a table. `row_type`: all columns of the feed."""

    def shown(self, schema: Schema) -> T.StructType:
        """See ShardStreamReader."""
        return feed_row_type(super().shown(schema))

    def rows(self, changes: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """See ShardStreamReader."""
        own = self.row_type.fields[: -len(FEED_COLUMNS.fields)]
        columns = T.StructType([*CHANGE_COLUMNS.fields, *own])
        return change_rows(changes, arrow_schema(columns), arrow_schema(self.row_type))
