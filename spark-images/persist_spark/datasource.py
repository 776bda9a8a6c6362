"""The Spark data source `persist`: `register(spark)`, then `spark.read.format("persist").option("shard", ...).load()`.
Batch reading of a shard at a time.

Spark plans in short-lived Python workers: the one that plans opens the shard, registers a leased reader, cuts the
snapshot into splits and goes away. It
does not expire the reader: the lease is what keeps the blobs alive while executors read, and it runs out by itself
LEASE_MS after planning.
A read that takes longer may find blobs collected and then fails naming the blob; it never returns other contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest

import pyarrow as pa
from persist_engine.base.errors import InvalidUsage, MissingBlob, Unavailable
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.read import ReadHandle
from persist_engine.client.snapshot import SinceAhead
from persist_engine.client.splits import SnapshotSplit
from persist_engine.codec.projection import Projection
from persist_engine.codec.schema import Schema
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.ids import ShardId
from pyspark.sql import SparkSession
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from persist_spark.columns import records_of, rows_of
from persist_spark.frames import spark_type
from persist_spark.partitions import blob_at, reading_retry, sink_settings

#: How long a planned read may take before its blobs may be collected.
LEASE_MS = 6 * 60 * 60 * 1000
#: Splits when the option `splits` does not say: one for about so many bytes of parts, so that a small shard is one
#: task.
SPLIT_BYTES = 64 << 20
SPLITS_MAX = 10_000
_PART_BYTES = 128 << 20
_DIGITS_MAX = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one read, checked."""

    shard: ShardId
    location: Location
    as_of: int | None
    splits: int | None
    updates: bool
    where: str | None = None
    columns: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Raises InvalidUsage naming the option. Names are case-insensitive, as Spark's are; unknown ones are
        refused.
        """
        given = {name.lower(): value for name, value in options.items()}
        known = {"shard", "blob", "consensus", "as_of", "splits", "updates", "where", "columns"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise InvalidUsage(
                f"option {', '.join(unknown)}: not known to format persist, which has {', '.join(sorted(known))}"
            )
        missing = [name for name in ("shard", "blob", "consensus") if not given.get(name)]
        if missing:
            raise InvalidUsage(f"option {', '.join(missing)}: required by format persist")
        updates = given.get("updates", "false").lower()
        if updates not in ("true", "false"):
            raise InvalidUsage(f"option updates: {given['updates']!r} is not true or false")
        return cls(
            shard=ShardId(given["shard"]),
            location=Location(blob=given["blob"], consensus=given["consensus"]),
            as_of=_number(given, "as_of", 0, DATA_TIME_MAX),
            splits=_number(given, "splits", 1, SPLITS_MAX),
            updates=updates == "true",
            where=given.get("where"),
            columns=_names(given.get("columns")),
        )


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise InvalidUsage(f"option columns: {text!r} is no list of names with commas between")
    return names


def _number(given: Mapping[str, str], name: str, least: int, greatest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    # Digits are counted first: Python reads no number of thousands of them.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    if not is_number or not least <= int(text) <= greatest:
        raise InvalidUsage(f"option {name}: {text[:64]!r} is not a whole number in [{least}, {greatest}]")
    return int(text)


class PersistDataSource(DataSource):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """Format `persist`. Options: docs/spark.md.

    SUBTLE: no reader of it may have `pushFilters`. Spark keeps what the last planned scan pushed in an object that all
    scans of one frame share, so that each of them would read the rows of the last (docs/upstream).
    """

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "persist"

    def schema(self) -> T.StructType:
        """The shard's columns; runs in a worker of its own."""
        options = Options.parse(self.options)
        with _open(options) as client:
            return row_type(client.schema(options.shard), updates=options.updates, columns=options.columns)

    def reader(self, schema: T.StructType) -> PersistReader:
        """Plans and reads."""
        return PersistReader(Options.parse(self.options), schema)


def register(spark: SparkSession) -> None:
    """Make format `persist` known to the session. Idempotent."""
    spark.dataSource.register(PersistDataSource)


@dataclass
class SplitPartition(InputPartition):  # type: ignore[misc]  # as above
    """One split of the snapshot, as bytes: whoever holds them can read it with the blob store alone."""

    split: bytes


class PersistReader(DataSourceReader):  # type: ignore[misc]  # as above
    """One read of one shard at one time."""

    def __init__(self, options: Options, schema: T.StructType) -> None:
        self.options = options
        self.row_type = schema

    def partitions(self) -> Sequence[SplitPartition]:
        """Pin the snapshot by a lease and cut it. Raises InvalidUsage when the time can no longer be read, or not
        yet.
        """
        with _open(self.options) as client:
            # Before the time is chosen: since could pass the latest one before it is held.
            reader = client.open_leased_reader(self.options.shard, purpose="spark read", lease_ms=LEASE_MS)
            try:
                as_of = self._as_of(client)
                partitions = [] if as_of is None else self._cut(reader, as_of)
            except BaseException:
                # Nobody will read under its lease, which would hold the shard back all the same.
                with suppress(Unavailable):  # what went wrong before is what matters
                    reader.expire()
                raise
            if partitions:
                reader.abandon()  # executors read under its lease
            else:
                with suppress(Unavailable):  # its lease runs out by itself; that there is nothing to read is known
                    reader.expire()
            return partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split, as Arrow; bounded memory."""
        if not isinstance(partition, SplitPartition):
            return  # Spark makes one partition of its own when a plan has none.
        wanted = arrow_schema(self.row_type)
        split = SnapshotSplit.from_bytes(partition.split)
        with _telling_of_the_lease():
            for batch in split.to_batches(blob_at(self.options.location.blob), retry=reading_retry()):
                yield from (records_of(batch) if self.options.updates else rows_of(batch, wanted, shard=split.shard_id))

    def _as_of(self, client: PersistClient) -> int | None:
        """The time to read at; None when nothing was ever written. InvalidUsage for one that is not complete yet."""
        options = self.options
        upper = client.recent_upper(options.shard)
        latest = upper.newest_complete
        as_of = latest if options.as_of is None else options.as_of
        if as_of > latest:
            raise InvalidUsage(
                f"cannot read shard {options.shard} at as_of {as_of}: its upper is {upper}, "
                f"the latest readable time is {latest}"
            )
        return None if as_of < 0 else as_of

    def _cut(self, reader: ReadHandle, as_of: int) -> list[SplitPartition]:
        """The splits of the snapshot that `reader` holds."""
        options = self.options
        shown = row_type(reader.schema, updates=options.updates, columns=options.columns)
        check_columns(self.row_type, shown, options.shard)
        snapshot = reader.snapshot(Antichain.of(as_of), where=options.where, columns=options.columns)
        if isinstance(snapshot, SinceAhead):
            raise InvalidUsage(
                f"cannot read shard {options.shard} at as_of {as_of}: "
                f"times before since {snapshot.since} can no longer be told apart"
            )
        count = options.splits or min(max(1, -(-snapshot.bytes_estimate // SPLIT_BYTES)), SPLITS_MAX)
        return [SplitPartition(split.to_bytes()) for split in snapshot.splits(count)]


def shown_schema(schema: Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Updates of `schema` with the fields `columns` (None: all) of key and val."""
    return schema.updates_schema if columns is None else Projection.of(columns, schema).updates_schema


def row_type(schema: Schema, *, updates: bool, columns: Sequence[str] | None = None) -> T.StructType:
    """Columns of a read: the key's fields and then the value's; with `updates` key, val, time, diff."""
    shown = shown_schema(schema, columns)
    if updates:
        return _spark_fields(shown)
    key, val = (side.type for side in _sides(shown))
    doubled = sorted({field.name for field in key} & {field.name for field in val})
    if doubled:
        raise InvalidUsage(
            f"key and value both have {', '.join(doubled)}: read with option updates=true, which keeps them apart, or one "
            f"of them with option columns"
        )
    return _spark_fields([*key, *val])


def check_columns(asked: T.StructType, shown: T.StructType, shard: ShardId) -> None:
    """Refuse to show rows of `shown` in a frame that was made for `asked`: columns go by their places, so that others would
    pass for them, and a null where there is none to be is not seen. NOT NULL may be forgotten.

    InvalidUsage names the first column that differs: the schema evolved since the frame was loaded, or the user gave one.
    """
    for theirs, ours in zip_longest(asked, shown):
        if theirs is None or ours is None or not _is_shown_as(theirs, ours):
            raise InvalidUsage(
                f"shard {shard} has {_told(ours)} where the frame was made for {_told(theirs)}: "
                "load the frame anew, without a schema of your own"
            )


def _is_shown_as(asked: T.StructField, shown: T.StructField) -> bool:
    if asked.name != shown.name or (shown.nullable and not asked.nullable):
        return False
    theirs, ours = asked.dataType, shown.dataType
    if isinstance(theirs, T.StructType) and isinstance(ours, T.StructType):
        return len(theirs) == len(ours) and all(map(_is_shown_as, theirs, ours))
    return bool(theirs == ours)


def _told(field: T.StructField | None) -> str:
    if field is None:
        return "no column"
    return f"column {field.name} {field.dataType.simpleString()}{'' if field.nullable else ' NOT NULL'}"


def _sides(shown: pa.Schema) -> tuple[pa.Field, pa.Field]:
    return shown.field("key"), shown.field("val")


def _spark_fields(fields: Iterable[pa.Field]) -> T.StructType:
    return T.StructType([T.StructField(field.name, spark_type(field.type), field.nullable) for field in fields])


def arrow_schema(row: T.StructType) -> pa.Schema:
    """Arrow schema of flat rows, as Spark expects them back."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(row, timezone="UTC")


@contextmanager
def _telling_of_the_lease() -> Iterator[None]:
    """A blob that is gone says why it may be, and what to do."""
    try:
        yield
    except MissingBlob as error:
        raise MissingBlob(
            f"{error}: what a query reads is kept for {LEASE_MS // 3_600_000} hours after it was planned; if that was "
            "longer ago, run it again",
            **error.detail,
        ) from error


def _open(options: Options) -> PersistClient:
    return PersistClient.open(options.location, settings=sink_settings(_PART_BYTES), create=False)
