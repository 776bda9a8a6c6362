"""The Spark data source `persist`: `register(spark)`, then `spark.read.format("persist").option("shard", ...).load()`.
Batch reading of a shard at a time, which is chosen when the frame is loaded and never changes.

Spark loads and plans in Python workers that end afterwards, so neither opens a shard: both ask the session's keeper (`keeper`),
which lives in the driver's process and holds what the frame reads as long as the frame can be read. Where the format was
registered without a keeper (Spark Connect: the client is no driver), a plan registers a reader of its own, whose lease of
LEASE_MS runs out by itself; a read that takes longer may then fail naming the blob.
Whatever happens, no read returns other contents.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pyarrow as pa
from persist_engine import SnapshotSplit
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, MissingBlob
from pyspark.sql import SparkSession
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition

from persist_spark import keeper
from persist_spark.columns import records_of, rows_of
from persist_spark.held_frames import HeldFrames, LoadedFrame
from persist_spark.options import Options
from persist_spark.partitions import blob_at, reading_retry, sink_settings
from persist_spark.row_shape import arrow_schema
from persist_spark.session_frames import FORMAT, FRAME_OPTION, keeper_of, new_name

#: How long blobs are kept for a read that was planned without a keeper.
LEASE_MS = 6 * 60 * 60 * 1000
_PART_BYTES = 128 << 20


class PersistDataSource(DataSource):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """Format `persist`. Options: docs/spark.md.

    SUBTLE: no reader of it may have `pushFilters`. Spark keeps what the last planned scan pushed in an object that all
    scans of one frame share, so that each of them would read the rows of the last (docs/upstream).
    """

    keeper: ClassVar[str | None] = None
    """Address of the session's keeper; None: there is none."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Spark makes one for each load, and for each attempt to write; then it travels by pickling."""
        self.options = options
        self.name_of_frame = options.pop(FRAME_OPTION, "") or new_name()
        self.loaded: LoadedFrame | None = None

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return FORMAT

    def schema(self) -> T.StructType:
        """The columns of the frame. Chooses what it shows: it stays so, for Spark keeps this object as it is afterwards."""
        if self.keeper is None:
            self.loaded = _look_alone(Options.parse(self.options))
        else:
            self.loaded = keeper.load(self.keeper, self.name_of_frame, self.options)
        return self.loaded.row_type

    def reader(self, schema: T.StructType) -> PersistReader:
        """Plans and reads. Where the user gave a schema Spark did not ask for ours, and what the frame shows is chosen here."""
        options = Options.parse(self.options)
        if self.loaded is None:
            if self.keeper is None and options.as_of is None:
                # Each plan would choose anew, and scans of one frame could differ.
                raise InvalidUsage("format persist with a schema of your own needs the option as_of in this session")
            self.schema()
        assert self.loaded is not None
        return PersistReader(options, schema, self.name_of_frame, self.loaded, self.keeper)

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """Raises InvalidUsage: this format reads."""
        raise InvalidUsage("format persist only reads: a SparkSink writes a shard, and the engine's handles do")


def register(spark: SparkSession) -> None:
    """Make format `persist` known to the session, and keep what its frames read as long as they can be read. Idempotent."""
    source: type[PersistDataSource] = PersistDataSource
    if not type(spark).__module__.startswith("pyspark.sql.connect"):
        # A class of its own, pickled by value: so the address comes to Spark's Python workers.
        address = keeper_of(spark.sparkContext).address
        source = type(PersistDataSource.__name__, (PersistDataSource,), {"keeper": address})
    spark.dataSource.register(source)


@dataclass
class SplitPartition(InputPartition):  # type: ignore[misc]  # as above
    """One split of the snapshot, as bytes: it can be read with the blob store alone."""

    split: bytes


class PersistReader(DataSourceReader):  # type: ignore[misc]  # as above
    """The reads of one frame."""

    def __init__(
        self, options: Options, schema: T.StructType, frame: str, loaded: LoadedFrame, address: str | None
    ) -> None:
        self.options = options
        self.row_type = schema
        self.frame = frame
        self.loaded = loaded
        self.address = address

    def partitions(self) -> Sequence[SplitPartition]:
        """The pieces of the frame. Raises InvalidUsage when it cannot be shown as the schema that the user gave."""
        if self.address is not None:
            splits = keeper.splits(self.address, self.frame, self.row_type)
        else:
            splits = _splits_alone(self.frame, self.options, self.loaded, self.row_type)
        return [SplitPartition(split) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split, as Arrow; bounded memory."""
        if not isinstance(partition, SplitPartition):
            return  # Spark makes one partition of its own when a plan has none.
        wanted = arrow_schema(self.row_type)
        split = SnapshotSplit.from_bytes(partition.split)
        with _telling_of_the_lease():
            for batch in split.to_batches(blob_at(self.options.location.blob), retry=reading_retry()):
                yield from (records_of(batch) if self.options.updates else rows_of(batch, wanted, shard=split.shard_id))


def _look_alone(options: Options) -> LoadedFrame:
    """A load without a keeper: what it shows is chosen, and nothing held."""
    held = HeldFrames(settings=sink_settings(_PART_BYTES), env=SystemEnv())
    try:
        return held.look(options)
    finally:
        held.close()


def _splits_alone(frame: str, options: Options, loaded: LoadedFrame, asked: T.StructType) -> list[bytes]:
    """A plan without a keeper: its lease is left behind for the executors."""
    if loaded.as_of is None:
        return []
    held = HeldFrames(settings=sink_settings(_PART_BYTES), env=SystemEnv(), lease_ms=LEASE_MS)
    try:
        held.load(frame, replace(options, as_of=loaded.as_of))
        splits = held.splits(frame, asked)
        held.abandon()
    except BaseException:
        held.close()  # nothing reads under its lease, which would hold the shard back all the same
        raise
    return splits


@contextmanager
def _telling_of_the_lease() -> Iterator[None]:
    """A blob that is gone says why it may be, and what to do."""
    try:
        yield
    except MissingBlob as error:
        raise MissingBlob(
            f"{error}: what a frame reads is kept while its session lives; if the driver stood still for longer than its "
            "lease, load the frame anew",
            **error.detail,
        ) from error
