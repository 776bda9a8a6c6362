"""The Spark data source `persist`: `register(spark)`, then `spark.read.format("persist").option("shard", ...).load()`.
It reads a shard at one time, or its changes between two times, in batch mode; `source/` writes and streams. The times are chosen when the
frame is loaded and never change.

Spark loads and plans in Python workers that end afterwards, so neither step opens the shard. Both send requests to the session's keeper
(`keeper`), which lives in the driver's process and keeps a frame's data as long as the frame can be read. Without a keeper (Spark Connect,
where the client is not the driver), a plan registers its own reader with a lease that expires after LEASE_MS, and later actions on the same
frame use that plan. A read that takes longer may then fail with an error that names the blob. No read ever returns other contents.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, MissingBlob
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)

from persist_spark import keeper
from persist_spark.options import Options
from persist_spark.source.loaded import (
    EMPTY_OPTION,
    FORMAT,
    FRAME_OPTION,
    LOOK_OPTION,
    SCHEMA_OPTION,
    LoadedFrame,
    is_of_stream,
    new_name,
)
from persist_spark.source.names import with_shard_id

# Spark starts a Python process for each load and each plan, and ends it afterwards. Imports take most of its time, so the modules that read
# and write rows are imported where they are used.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from persist_spark.held_frames import HeldFrames
    from persist_spark.source.metadata import LoadedTable

#: The lease of a read that was planned without a keeper.
LEASE_MS = 6 * 60 * 60 * 1000
#: How long later actions of one frame use the plan, and so the lease, of the first action. An action then has at least half of the lease
#: left.
KEEP_MS = LEASE_MS // 2
_PART_BYTES = 128 << 20
#: Spark's settings for redaction of options in plans and of texts. Texts matter because Spark Connect shows a client's request in its page
#: and in the event log.
_REDACTION, _REDACTION_OF_TEXTS = "spark.sql.redaction.options.regex", "spark.sql.redaction.string.regex"
#: A URL with a user or a password, up to its host.
_CREDENTIALS = r"://\S*@"


class PersistDataSource(DataSource):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """Format `persist`. Options: docs/spark.md.

    SUBTLE: its reader must not have `pushFilters`. Spark stores the filters of the last planned scan in an object that all scans of one
    frame share, so every scan would read the rows of that scan (docs/upstream).
    """

    keeper: ClassVar[str | None] = None
    """The address of the session's keeper. None: the session has no keeper."""
    stores: ClassVar[Mapping[str, str]] = {}
    """The session's values for options that a load does not give."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Spark creates one object for each load and each attempt to write, and then pickles it."""
        self.options = {**self.stores, **{name.lower(): value for name, value in options.items()}}
        given_name = self.options.pop(FRAME_OPTION, "")
        self.name_of_frame, self.is_named = given_name or new_name(), bool(given_name)
        self.is_look = self.options.pop(LOOK_OPTION, "") == "true"
        self.is_empty = self.options.pop(EMPTY_OPTION, "") == "true"
        self.ddl = self.options.pop(SCHEMA_OPTION, None)
        self.loaded: LoadedFrame | None = None
        self.table: LoadedTable | None = None

    @classmethod
    def name(cls) -> str:
        """The name for `spark.read.format`."""
        return FORMAT

    def schema(self) -> T.StructType:
        """The columns of the frame. This call also fixes the frame's contents, because Spark keeps this object."""
        self.options = with_shard_id(self.options)
        if is_of_stream(self.options):
            from persist_spark.source.stream_read import StreamOptions, stream_row_type

            return stream_row_type(StreamOptions.parse(self.options))
        options = Options.parse(self.options)
        if options.table is not None:
            from persist_spark.source.metadata import LoadedTable

            self.table = LoadedTable.read(options)
            return self.table.row_type
        if self.keeper is None:
            loaded = _look_alone(options, self.ddl)
            self.loaded = replace(loaded, as_of=None) if self.is_empty else loaded
        else:
            self.loaded = keeper.load(self.keeper, self.name_of_frame, self.options)
        if self.is_look:
            from persist_spark.source.connect_frames import times_of

            self.table = times_of(options, self.loaded)
            return self.table.row_type
        return self.loaded.row_type

    def reader(self, schema: T.StructType) -> DataSourceReader:
        """The reader of the frame. With a user's schema Spark does not call `schema`, so the frame's contents are chosen here."""
        self.options = with_shard_id(self.options)
        options = Options.parse(self.options)
        if options.table is not None or self.is_look:
            if self.table is None:  # otherwise each plan would read the table anew, and scans of one frame could differ
                raise InvalidUsage(f"option table: {options.table} has columns of its own; load it without a schema")
            from persist_spark.source.metadata import TableReader

            return TableReader(options, self.table, schema)
        if self.loaded is None:
            if self.keeper is None and not options.is_pinned and not self.is_empty:
                # Without this check each plan would choose a time, and scans of one frame could differ.
                needed = "option as_of" if options.feed is None else "options from and to as times"
                raise InvalidUsage(f"format persist with a schema of your own needs the {needed} in this session")
            self.schema()
        assert self.loaded is not None
        return PersistReader(options, schema, self.name_of_frame, self.loaded, self.keeper, is_named=self.is_named)

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """The writer of a frame with the columns `schema`."""
        from persist_spark.source.write import ShardWriter

        return ShardWriter(with_shard_id(self.options), schema, overwrites=overwrite)

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - as above
        """The writer of a streaming query with the columns `schema`."""
        from persist_spark.source.stream_write import ShardStreamWriter

        return ShardStreamWriter(with_shard_id(self.options), schema, overwrites=overwrite)

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """The reader of a streaming query: the contents, and then the changes."""
        from persist_spark.source.stream_read import ShardStreamReader, StreamOptions

        options = StreamOptions.parse(with_shard_id(self.options))
        return ShardStreamReader(options, schema)


def register(spark: SparkSession, *, blob: str | None = None, consensus: str | None = None) -> None:
    """Registers the format `persist` with the session. From then on the data of its frames are kept as long as they can be read. `blob` and
    `consensus` are the default stores of loads and writes. Idempotent; another call replaces the stores. Spark redacts options with
    credentials in the session's plans. Sessions from `newSession` also know the format.
    """
    from persist_spark.session_frames import active, keeper_of
    from persist_spark.source.connect_frames import pin_frames_at_load
    from persist_spark.source.names import remember_stores

    stores = {name: url for name, url in (("blob", blob), ("consensus", consensus)) if url is not None}
    on_connect = is_connect(spark)
    if on_connect:
        pin_frames_at_load()
        address = None
    else:
        address = keeper_of(spark.sparkContext, stores).address
    # A class created here is pickled by value, so it brings the address to Spark's Python workers.
    members = {"keeper": address, "stores": stores}
    for name in (_REDACTION, _REDACTION_OF_TEXTS) if on_connect else (_REDACTION,):
        redacted = spark.conf.get(name) or ""
        if _CREDENTIALS not in redacted:  # by default Spark's plans, logs and UI show a view's options
            spark.conf.set(name, f"{redacted}|{_CREDENTIALS}" if redacted else _CREDENTIALS)
    with nullcontext() if on_connect else active(spark):
        spark.dataSource.register(type(PersistDataSource.__name__, (PersistDataSource,), members))
    remember_stores(spark, stores)
    _follow_new_sessions(type(spark))


def _follow_new_sessions(kind: type[SparkSession]) -> None:
    """Registers the format in each session that `newSession` makes.

    SUBTLE: replaces `newSession` of this class, once per process. A new Spark session lacks the formats that were registered in Python, and
    Spark's error only says that it does not find them.
    """
    from persist_spark.source.names import stores_of

    original = kind.newSession
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def new_session(self: SparkSession) -> SparkSession:
        made = original(self)
        stores = stores_of(self)
        if stores is not None:
            register(made, **stores)
        return made

    kind.newSession = new_session


def is_connect(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect, whose client is not the driver."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


@dataclass
class SplitPartition(InputPartition):  # type: ignore[misc]  # as above
    """One split of the snapshot, as bytes. Reading it needs only the blob store."""

    split: bytes


class PersistReader(DataSourceReader):  # type: ignore[misc]  # as above
    """Reads for one frame."""

    def __init__(
        self,
        options: Options,
        schema: T.StructType,
        frame: str,
        loaded: LoadedFrame,
        address: str | None,
        *,
        is_named: bool,
    ) -> None:
        """`is_named`: whether the frame has the same name in every plan."""
        self.options = options
        self.row_type = schema
        self.frame = frame
        self.loaded = loaded
        self.address = address
        self.is_named = is_named

    def partitions(self) -> Sequence[SplitPartition]:
        """The splits of the frame. Raises InvalidUsage when the frame's columns do not fit the user's schema."""
        if self.address is not None:
            splits = keeper.splits(self.address, self.frame, self.row_type)
        elif self.is_named:
            from persist_spark.source.kept_plans import kept

            now_ms, columns = SystemEnv().now_ms(), self.row_type.json()
            splits = kept(self.frame, columns, self._planned_alone, now_ms=now_ms, keep_ms=KEEP_MS)
        else:
            splits = self._planned_alone()
        return [SplitPartition(split) for split in splits]

    def _planned_alone(self) -> list[bytes]:
        return _splits_alone(self.frame, self.options, self.loaded, self.row_type)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split, as Arrow. Uses bounded memory."""
        if not isinstance(partition, SplitPartition):
            return  # when a plan has no partition, Spark creates one of its own class
        from persist_engine import ChangesSplit, SnapshotSplit

        from persist_spark.columns import changes_of_rows, records_of, rows_of
        from persist_spark.partitions import blob_at, reading_retry
        from persist_spark.row_shape import arrow_schema

        wanted = arrow_schema(self.row_type)
        feed, blob = self.options.feed, blob_at(self.options.location.blob)
        with explaining_lost_blobs():
            if feed is not None:
                for changes in ChangesSplit.from_bytes(partition.split).to_batches(blob, retry=reading_retry()):
                    yield from (changes_of_rows(changes, wanted) if feed.shape == "rows" else records_of(changes))
                return
            split = SnapshotSplit.from_bytes(partition.split)
            for batch in split.to_batches(blob, retry=reading_retry()):
                yield from (records_of(batch) if self.options.updates else rows_of(batch, wanted, shard=split.shard_id))


def _look_alone(options: Options, ddl: str | None) -> LoadedFrame:
    """Loads without a keeper. Chooses the contents and holds nothing. `ddl`: the option with the schema of an earlier load."""
    from persist_engine.rows.schema import Schema

    held = _held_here()
    try:
        return held.look(options, None if ddl is None else Schema.from_ddl(*json.loads(ddl)))
    finally:
        held.close()


def _splits_alone(frame: str, options: Options, loaded: LoadedFrame, asked: T.StructType) -> list[bytes]:
    """Plans without a keeper. Leaves a lease for the executors."""
    if loaded.as_of is None:
        return []
    from persist_engine.rows.schema import Schema

    held = _held_here(LEASE_MS)
    try:
        held.load(frame, loaded.pinned(options), Schema.from_ddl(*loaded.ddl))
        splits = held.splits(frame, asked)
        held.abandon()
    except BaseException:
        held.close()  # an unused lease would keep the shard's since back
        raise
    return splits


def _held_here(lease_ms: int | None = None) -> HeldFrames:
    from persist_spark.held_frames import HeldFrames
    from persist_spark.partitions import sink_settings

    return HeldFrames(settings=sink_settings(_PART_BYTES), env=SystemEnv(), lease_ms=lease_ms)


@contextmanager
def explaining_lost_blobs() -> Iterator[None]:
    """Adds to MissingBlob the likely cause and the remedy."""
    try:
        yield
    except MissingBlob as error:
        raise MissingBlob(
            f"{error}: a frame's data is kept while its session lives; if the driver was suspended for longer than its "
            "lease, load the frame again",
            **error.detail,
        ) from error
