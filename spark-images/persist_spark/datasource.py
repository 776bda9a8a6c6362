"""The Spark data source `persist`: `spark.read.format("persist").option("shard", ...).load()`. Batch reading of a
shard at a time.

Spark plans in short-lived Python workers: the one that plans opens the shard, registers a leased reader, cuts the
snapshot into splits and goes away. It
does not expire the reader: the lease is what keeps the blobs alive while executors read, and it runs out by itself
LEASE_MS after planning.
A read that takes longer may find blobs collected and then fails naming the blob; it never returns other contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from persist_engine.base.errors import InvalidUsage
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.snapshot import SinceAhead
from persist_engine.client.splits import SnapshotSplit
from persist_engine.codec.schema import Schema
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.ids import ShardId
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one read, checked."""

    shard: ShardId
    location: Location
    as_of: int | None
    splits: int | None
    updates: bool
    where: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Raises InvalidUsage naming the option. Names are case-insensitive, as Spark's are; unknown ones are
        refused.
        """
        given = {name.lower(): value for name, value in options.items()}
        known = {"shard", "blob", "consensus", "as_of", "splits", "updates", "where"}
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
        )


def _number(given: Mapping[str, str], name: str, least: int, greatest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= greatest:
        raise InvalidUsage(f"option {name}: {text!r} is not a whole number in [{least}, {greatest}]")
    return int(text)


class PersistDataSource(DataSource):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """Register once: `spark.dataSource.register(PersistDataSource)`. Options: docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "persist"

    def schema(self) -> T.StructType:
        """The shard's columns; runs in a worker of its own."""
        options = Options.parse(self.options)
        with _open(options) as client:
            return row_type(client.schema(options.shard), updates=options.updates)

    def reader(self, schema: T.StructType) -> PersistReader:
        """Plans and reads."""
        return PersistReader(Options.parse(self.options), schema)


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
        options = self.options
        with _open(options) as client:
            upper = client.recent_upper(options.shard)
            latest = DATA_TIME_MAX if upper.time is None else min(upper.time - 1, DATA_TIME_MAX)
            as_of = latest if options.as_of is None else options.as_of
            if as_of > latest:
                raise InvalidUsage(
                    f"cannot read shard {options.shard} at as_of {as_of}: its upper is {upper}, "
                    f"the latest readable time is {latest}"
                )
            if as_of < 0:
                return []  # Nothing was ever written.
            reader = client.open_leased_reader(options.shard, purpose="spark read", lease_ms=LEASE_MS)
            snapshot = reader.snapshot(Antichain.of(as_of), where=options.where)
            if isinstance(snapshot, SinceAhead):
                reader.expire()
                raise InvalidUsage(
                    f"cannot read shard {options.shard} at as_of {as_of}: "
                    f"times before since {snapshot.since} can no longer be told apart"
                )
            count = options.splits or min(max(1, -(-snapshot.bytes_estimate // SPLIT_BYTES)), SPLITS_MAX)
            partitions = [SplitPartition(split.to_bytes()) for split in snapshot.splits(count)]
            reader.abandon()  # executors read under its lease
            return partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split, as Arrow; bounded memory."""
        if not isinstance(partition, SplitPartition):
            return  # Spark makes one partition of its own when a plan has none.
        wanted = arrow_schema(self.row_type)
        for batch in SnapshotSplit.from_bytes(partition.split).to_batches(
            blob_at(self.options.location.blob), retry=reading_retry()
        ):
            yield from records_of(batch) if self.options.updates else rows_of(batch, wanted)


def row_type(schema: Schema, *, updates: bool) -> T.StructType:
    """Columns of a read: the key's fields and then the value's; with `updates` key, val, time, diff."""
    if updates:
        return T.StructType([T.StructField(f.name, spark_type(f.type), f.nullable) for f in schema.updates_schema])
    doubled = sorted(set(schema.key.names) & set(schema.val.names))
    if doubled:
        raise InvalidUsage(
            f"key and value both have {', '.join(doubled)}: read with option updates=true, which keeps them apart"
        )
    return T.StructType(
        [T.StructField(f.name, spark_type(f.type), f.nullable) for side in (schema.key, schema.val) for f in side]
    )


def arrow_schema(row: T.StructType) -> pa.Schema:
    """Arrow schema of flat rows, as Spark expects them back."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(row, timezone="UTC")


def _open(options: Options) -> PersistClient:
    return PersistClient.open(options.location, settings=sink_settings(_PART_BYTES))
