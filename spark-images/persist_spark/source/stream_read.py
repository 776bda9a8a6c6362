"""`spark.readStream.format("persist")`: the contents of a shard, and then its changes.

Spark runs one reader of a query in a Python worker of the driver that lives as long as the query, and passes pickled copies to the tasks.
The reader on the driver holds a leased reader. It follows the query, so that changes which the query has not seen stay readable. The tasks
use only the blob store.

An offset is `{"upper": n, "shard": id}`: all updates of this shard at times before n were delivered. -1 means that nothing was delivered
and the query begins with the contents. Offsets in older checkpoints have no shard and count as offsets in the shard of the query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
from persist_engine import Changes, ChangesSplit, Location, PersistClient, ReadHandle, Refresh, SinceAhead
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.retention import retention_of
from persist_engine.rows.schema import Schema
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

from persist_spark.columns import changes_of_rows, records_of
from persist_spark.held_frames import SPLIT_BYTES, follow
from persist_spark.options import (
    SPLITS_MAX,
    STORE,
    Ago,
    check_names,
    instant,
    moment,
    names_in,
    number_in,
    refuse_instants,
)
from persist_spark.partitions import blob_at, reading_retry, sink_settings
from persist_spark.row_shape import arrow_schema, changes_row_type, check_columns, condition
from persist_spark.source.loaded import STARTING
from persist_spark.source.refresh import NAMES, batch_end, refresh_in
from persist_spark.spec import TARGET_PART_BYTES

#: The name under which a stream shows among the shard's holds.
PURPOSE = "spark stream"
#: The interval at which a stream releases the times that it has read.
FOLLOW_S = 60.0
#: The lease of a stream. Spark ends a query's Python worker with SIGKILL, so a stopped query holds the shard for this long.
LEASE_MS = 120_000
_BYTES_MAX = 1 << 50
Offset = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of one streaming read, checked."""

    shard: ShardId
    location: Location
    shape: Literal["updates", "rows"]
    start: int | Ago | None
    """The first time of the changes. None: the contents first."""
    where: str | None
    columns: tuple[str, ...] | None
    splits: int | None
    bytes_max: int | None
    """The approximate size of a batch. A batch holds at least one append."""
    span_ms: int | None
    """The longest span of times in one batch."""
    refresh: Refresh | None
    """The only times at which the stream shows the shard."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Checks the options. Raises InvalidUsage, which names an invalid, missing or unknown option."""
        given = {name.lower(): value for name, value in options.items()}
        known = {
            *STORE,
            "rows",
            STARTING,
            "where",
            "columns",
            "splits",
            "maxbytespertrigger",
            "maxtimepertrigger",
            *NAMES,
        }
        check_names(given, known, "a stream of format persist")
        rows = given.get("rows", "").lower()
        if rows not in ("updates", "changes"):
            raise InvalidUsage(
                f"option rows: {given.get('rows', '')[:64]!r} is not updates or changes; a stream needs it, as it shows changes"
            )
        refresh = refresh_in(given)
        if refresh is not None and rows == "changes":
            raise InvalidUsage(
                "option refreshEvery: needs option rows=updates, because a change of a row has its own time"
            )
        return cls(
            shard=ShardId(given["shard"]),
            location=Location(blob=given["blob"], consensus=given["consensus"]),
            shape="rows" if rows == "changes" else "updates",
            start=moment(given, STARTING),
            where=given.get("where"),
            columns=names_in(given.get("columns")),
            splits=number_in(given, "splits", 1, SPLITS_MAX),
            bytes_max=number_in(given, "maxbytespertrigger", 1, _BYTES_MAX),
            span_ms=_span(given.get("maxtimepertrigger")),
            refresh=refresh,
        )


def _span(text: str | None) -> int | None:
    try:
        return None if text is None else retention_of(text)
    except InvalidUsage:
        raise InvalidUsage(
            f"option maxTimePerTrigger: {text!r} is not a length of time such as 1h, 30m or 7d"
        ) from None


def stream_row_type(options: StreamOptions) -> T.StructType:
    """The columns of the stream, from the shard's newest schema. Holds nothing. Raises InvalidUsage for a condition or columns that do not
    fit the schema; ShardNotFound; store errors.
    """
    with _opened(options) as client:
        schema = client.schema(options.shard)
    if options.where is not None:
        condition(options.where, schema, "where")
    return changes_row_type(schema, shape=options.shape, columns=options.columns)


def _opened(options: StreamOptions) -> PersistClient:
    settings = sink_settings(TARGET_PART_BYTES)
    return PersistClient.open(options.location, settings=settings, env=SystemEnv(), create=False)


@dataclass
class ChangesPartition(InputPartition):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """One split of a batch, as bytes. Reading it needs only the blob store."""

    split: bytes


class _Follower:
    """The lease and the open changes of the reader on the driver."""

    def __init__(self, client: PersistClient, shard: ShardId) -> None:
        self.client, self._shard = client, shard
        self.reader: ReadHandle = client.open_leased_reader(shard, purpose=PURPOSE, lease_ms=LEASE_MS)
        self._of_contents: ReadHandle | None = None
        self._changes: Changes | None = None
        self._followed_s = SystemEnv().monotonic_s()

    def reader_of(self, begin: int, stop: int) -> ReadHandle:
        """The reader for the batch from `begin` to `stop`. The contents have their own reader, whose since is the time of the contents, so
        that all changes up to it are the contents. The first reader must stay behind it and hold earlier times. The reader of the contents
        ends when the next batch is planned. Otherwise it would hold since at that time as long as the query runs.
        """
        self._release()
        if begin >= 0:
            return self.reader
        self._of_contents = self.client.open_leased_reader(self._shard, purpose=PURPOSE, lease_ms=LEASE_MS)
        self._of_contents.downgrade_since(Antichain.of(stop - 1))
        return self._of_contents

    def hold(self, changes: Changes) -> None:
        """Keeps the blobs of `changes` until the next batch is planned."""
        if self._changes is not None:
            self._changes.close()
        self._changes = changes

    def follow(self, time: int) -> None:
        """Releases the times before `time` that the shard itself need not keep. Takes at most one commit in FOLLOW_S."""
        now_s = SystemEnv().monotonic_s()
        if now_s - self._followed_s >= FOLLOW_S:
            self._followed_s = now_s
            follow(self.reader, time, self.client.inspect(self._shard))

    def close(self) -> None:
        """Releases the leases. Idempotent."""
        if self._changes is not None:
            self._changes.close()
        self._release()
        self.reader.expire()

    def _release(self) -> None:
        if self._of_contents is not None:
            self._of_contents.expire()
            self._of_contents = None


class ShardStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # as above
    """Reads for one streaming query."""

    def __init__(self, options: StreamOptions, schema: T.StructType) -> None:
        self.options, self.row_type = options, schema
        self._client: PersistClient | None = None
        self._follower: _Follower | None = None
        self._target: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for tasks, without the connection and the lease."""
        return {**self.__dict__, "_client": None, "_follower": None}

    def initialOffset(self) -> Offset:  # noqa: N802 - here and below: Spark's names
        """The offset of a new query. Raises InvalidUsage for a start that does not fit the shard's clock."""
        start = self.options.start
        refuse_instants(self._opened().clock(self.options.shard), self.options.shard, start)
        return self._offset(-1 if start is None else instant(start, SystemEnv().now_ms()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit that the options set."""
        return ReadAllAvailable() if self.options.bytes_max is None else ReadMaxBytes(self.options.bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Makes the query end at the shard's present upper."""
        self._target = self._written()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """The shard's upper."""
        return self._offset(self._written())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next batch, or `start` when there is nothing to read. The contents at the beginning are one batch. Raises
        InvalidUsage when `start` is an offset in another shard.
        """
        self._check_shard(start)
        since = self._following().reader.since  # from here on, times that the query has not read stay readable
        begin, written = start["upper"], self._written() if self._target is None else self._target
        if written <= max(0, begin):
            return start
        end = written
        if begin >= 0 and self.options.span_ms is not None:
            end = min(written, begin + self.options.span_ms)
        if begin >= 0 and isinstance(limit, ReadMaxBytes):
            end = min(end, self._fitting(begin, limit.max_bytes))
        if self.options.refresh is not None:
            end = batch_end(self.options.refresh, max(0, begin), end, written)
            if begin < 0 and (end == 0 or not since.less_equal(end - 1)):
                return start  # the contents at the last refresh are no longer readable: wait for the next one
        return start if end == begin else self._offset(end)

    def partitions(self, start: Offset, end: Offset) -> Sequence[ChangesPartition]:
        """The splits of one batch. Every call yields the same rows, even after a restart of the query.

        Raises InvalidUsage when the shard's since has passed the batch, when the shard's columns differ from those of the query, and when
        the batch belongs to another shard.
        """
        self._check_shard(end)
        begin, stop = start["upper"], end["upper"]
        if stop <= max(begin, 0):
            return []
        follower = self._following()
        check_columns(self.row_type, self.shown(follower.reader.schema), self.options.shard)
        changes = self._changes(follower, begin, stop)
        follower.hold(changes)
        count = self.options.splits or min(max(1, -(-changes.bytes_estimate // SPLIT_BYTES)), SPLITS_MAX)
        return [ChangesPartition(split.to_bytes()) for split in changes.splits(count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split, as Arrow. Uses bounded memory."""
        if not isinstance(partition, ChangesPartition):
            return  # when a plan has no partition, Spark creates one of its own class
        blob = blob_at(self.options.location.blob)
        for changes in ChangesSplit.from_bytes(partition.split).to_batches(blob, retry=reading_retry()):
            for shown in self.refreshed(changes):
                yield from self.rows(shown)

    def shown(self, schema: Schema) -> T.StructType:
        """The columns of the stream while the shard has `schema`."""
        return changes_row_type(schema, shape=self.options.shape, columns=self.options.columns)

    def refreshed(self, changes: pa.RecordBatch) -> Sequence[pa.RecordBatch]:
        """The changes, moved to the times of the refreshes that show them."""
        refresh = self.options.refresh
        return [changes] if refresh is None else refresh.apply(pa.Table.from_batches([changes])).to_batches()

    def rows(self, changes: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of the stream for `changes`, which have the shape that the options choose."""
        if self.options.shape == "updates":
            return records_of(changes)
        return changes_of_rows(changes, arrow_schema(self.row_type))

    def commit(self, end: Offset) -> None:
        """Releases the times that the query will not read again."""
        if self._follower is not None and end["upper"] > 0:
            self._follower.follow(end["upper"] - 1)

    def stop(self) -> None:
        """Releases the lease."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _offset(self, upper: int) -> Offset:
        return {"upper": upper, "shard": str(self.options.shard)}

    def _check_shard(self, offset: Offset) -> None:
        ours, read = str(self.options.shard), offset.get("shard")
        if read not in (None, ours):
            raise InvalidUsage(
                f"the checkpoint of the stream has read shard {read} up to {dated(offset['upper'])}, and its times are not times of shard "
                f"{ours}: read shard {read}, or start a query with a new checkpointLocation, which begins with the contents"
            )

    def _opened(self) -> PersistClient:
        if self._client is None:
            self._client = _opened(self.options)
        return self._client

    def _following(self) -> _Follower:
        """The lease. If it lapsed, for example while the machine was suspended, a new one. The since of a new lease may be past the times
        that the query needs.
        """
        if self._follower is None or self._follower.reader.since.is_empty():
            client = self._opened()
            if self.options.where is not None:  # if the user gives the columns, Spark does not call stream_row_type
                condition(self.options.where, client.schema(self.options.shard), "where")
            if self._follower is not None:
                self._follower.close()
            self._follower = _Follower(client, self.options.shard)
        return self._follower

    def _written(self) -> int:
        """The time before which everything is written."""
        return self._opened().recent_upper(self.options.shard).newest_complete + 1

    def _fitting(self, begin: int, bytes_max: int) -> int:
        """The greatest upper such that the appends after `begin` up to it hold at most `bytes_max` together, and at least the upper of the
        first append.
        """
        batches = self._opened().metadata(self.options.shard, "batches").to_pylist()
        uppers = sorted(
            (batch["upper"], batch["bytes"])
            for batch in batches
            if batch["upper"] is not None and batch["upper"] > begin
        )
        end, total = begin, 0
        for upper, size in uppers:
            total += size
            if end > begin and total > bytes_max:
                break
            end = upper
        return end if end > begin else self._written()

    def _changes(self, follower: _Follower, begin: int, stop: int) -> Changes:
        reader = follower.reader_of(begin, stop)
        is_whole = begin < 0 or (begin == 0 and reader.since.less_equal(0))
        changes = reader.changes(
            None if is_whole else max(0, begin - 1),
            stop - 1,
            shape=self.options.shape,
            where=self.options.where,
            columns=self.options.columns,
        )
        if isinstance(changes, SinceAhead):
            if self.options.start is None:
                what = f"the stream cannot continue: it has read shard {self.options.shard} up to {dated(begin)}"
                remedy = "with a new checkpoint, which begins with the contents"
            else:
                what = f"the stream cannot begin or continue with the changes of shard {self.options.shard} at {dated(begin)}"
                remedy = (
                    "with a new checkpoint, and with a start past since, or without a start to begin with the contents"
                )
            raise InvalidUsage(
                f"{what}, and the shard's since is {dated(changes.since.time)}. The times of changes up to since are no longer known. "
                f"Start a query {remedy}; a longer retention, or a critical reader, keeps changes for a stopped query"
            )
        return changes
