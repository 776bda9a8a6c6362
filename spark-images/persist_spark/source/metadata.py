"""Metadata tables as frames: `spark.read.format("persist").option("table", "batches")`.

The load reads the table once, and the frame carries its rows. So all scans of one frame show one state of the shard, without a lease and
without the keeper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from persist_engine import PersistClient
from persist_engine.base.env import SystemEnv
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import DataSourceReader, InputPartition

from persist_spark.columns import records_of
from persist_spark.options import Options
from persist_spark.partitions import sink_settings
from persist_spark.row_shape import arrow_schema, check_columns, spark_fields

_PART_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """The rows of a metadata table when the frame was loaded, as a compressed Arrow stream."""

    stream: bytes
    row_type: T.StructType

    @classmethod
    def read(cls, options: Options) -> LoadedTable:
        """Reads the table that `options` name. Raises InvalidUsage for an unknown name, ShardNotFound, and store errors."""
        assert options.table is not None
        settings = sink_settings(_PART_BYTES)
        with PersistClient.open(options.location, settings=settings, env=SystemEnv(), create=False) as client:
            return cls.of(client.metadata(options.shard, options.table))

    @classmethod
    def of(cls, table: pa.Table) -> LoadedTable:
        """These rows."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
        return cls(sink.getvalue().to_pybytes(), spark_fields(table.schema))


@dataclass
class TablePartition(InputPartition):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """The whole table."""

    stream: bytes


class TableRows(DataSourceReader):  # type: ignore[misc]  # as above
    """Reads the rows in the `stream` of a LoadedTable. `schema`: all of its columns, or some of them."""

    def __init__(self, stream: bytes, schema: T.StructType) -> None:
        self.stream, self.row_type = stream, schema

    def partitions(self) -> Sequence[TablePartition]:
        """One partition, because metadata is small."""
        return [TablePartition(self.stream)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the table."""
        if not isinstance(partition, TablePartition):
            return  # when a plan has no partition, Spark creates one of its own class
        with pa.ipc.open_stream(partition.stream) as stream:
            wanted = arrow_schema(self.row_type)
            for batch in stream.read_all().select(wanted.names).cast(wanted).to_batches():
                yield from records_of(batch)


class TableReader(TableRows):
    """Reads one frame over a metadata table. Raises InvalidUsage when the frame was made for other columns."""

    def __init__(self, options: Options, loaded: LoadedTable, schema: T.StructType) -> None:
        check_columns(schema, loaded.row_type, options.shard)
        super().__init__(loaded.stream, schema)
