"""The format that the scans and writes of a SQL catalog use. Users do not name it.

Each scan has its own source, so it has its own columns and its own condition. The catalog's desk has already loaded the scan. The reader
gets the scan's splits from the catalog's keeper.
"""

from __future__ import annotations

import base64
import json
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

#: As in `Python.java`.
FORMAT = "persist_catalog"


class CatalogSource(DataSource):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """One scan, or one write. It imports the engine only when it is used, because Spark loads this class in every session on a machine with
    the package.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = {name.lower(): value for name, value in options.items()}

    @classmethod
    def name(cls) -> str:
        """The name by which the catalog finds it."""
        return FORMAT

    def schema(self) -> T.StructType:
        """Refuses: the catalog knows the columns."""
        from persist_engine.base.errors import InvalidUsage

        raise InvalidUsage("format persist_catalog belongs to the SQL catalog: load format persist instead")

    def reader(self, schema: T.StructType) -> DataSourceReader:
        """The reader of a scan."""
        from persist_spark.catalog.tables import ROWS

        if ROWS in self.options:
            from persist_spark.source.metadata import TableRows

            return TableRows(base64.b64decode(self.options[ROWS]), schema)
        return ScanReader(self.options, schema)

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """The writer of a frame with the columns `schema`."""
        from persist_spark.source.write import ShardWriter

        return ShardWriter(self.options, schema, overwrites=overwrite)

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - as above
        """The writer of a streaming query with the columns `schema`."""
        from persist_spark.source.stream_write import ShardStreamWriter

        return ShardStreamWriter(self.options, schema, overwrites=overwrite)

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """The reader of a stream of changes, with the columns of a change feed."""
        from persist_spark.catalog.change_rows import FeedStreamReader
        from persist_spark.source.stream_read import StreamOptions

        return FeedStreamReader(StreamOptions.parse(self.options), schema)


class ScanReader(DataSourceReader):  # type: ignore[misc]  # as above
    """Reads for one scan."""

    def __init__(self, options: MutableMapping[str, str], schema: T.StructType) -> None:
        self.options, self.row_type = options, schema

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the scan. Raises InvalidUsage when the catalog's process no longer holds the scan."""
        from persist_spark import keeper
        from persist_spark.catalog.tables import CHANGES, EMPTY, FRAME, KEEPER
        from persist_spark.datasource import SplitPartition

        if self.options.get(EMPTY) == "true":
            return []
        stored = self.options.get(CHANGES)
        row_type = self.row_type if stored is None else T.StructType.fromJson(json.loads(stored))
        splits = keeper.splits(self.options[KEEPER], self.options[FRAME], row_type)
        return [SplitPartition(split) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split, as Arrow. Needs only the blob store."""
        from persist_engine import ChangesSplit, SnapshotSplit

        from persist_spark.catalog.tables import CHANGES
        from persist_spark.columns import rows_of
        from persist_spark.datasource import SplitPartition, explaining_lost_blobs
        from persist_spark.partitions import blob_at, reading_retry
        from persist_spark.row_shape import arrow_schema

        if not isinstance(partition, SplitPartition):
            return  # when a plan has no partition, Spark creates one of its own class
        wanted, blob = arrow_schema(self.row_type), blob_at(self.options["blob"])
        with explaining_lost_blobs():
            if (stored := self.options.get(CHANGES)) is not None:
                from persist_spark.catalog.change_rows import change_rows

                columns = arrow_schema(T.StructType.fromJson(json.loads(stored)))
                for batch in ChangesSplit.from_bytes(partition.split).to_batches(blob, retry=reading_retry()):
                    yield from change_rows(batch, columns, wanted)
                return
            split = SnapshotSplit.from_bytes(partition.split)
            for batch in split.to_batches(blob, retry=reading_retry()):
                yield from rows_of(batch, wanted, shard=split.shard_id)
