"""Keeps the loaded frames of a session readable: each frame has a snapshot at its `as_of`, under a lease.

This module owns the bookkeeping: which frame reads under which reader, how far a reader's since may advance, and when a lease is released.
It knows no Spark session and no sockets. `keeper` reports loads and the end of frames to it.

Invariant: a reader is registered exactly as long as a frame reads under it. Frames of one shard share a reader if its since and its
schema allow it, so that a thousand loads take one lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from persist_engine import (
    Aggregates,
    Changes,
    Inspection,
    Location,
    PersistClient,
    ReadHandle,
    SinceAhead,
    Snapshot,
)
from persist_engine.base.env import Env
from persist_engine.base.errors import Fenced, InvalidUsage, PersistError
from persist_engine.base.settings import Settings
from persist_engine.base.wording import dated
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_engine.storage.addresses import folder_of
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.options import SPLITS_MAX, Options, instant, refuse_instants
from persist_spark.row_shape import changes_row_type, check_columns, condition, row_type
from persist_spark.source.loaded import LoadedFrame
from persist_spark.source.native import PlainFiles

#: Bytes of parts in one split when the option `splits` is not set. A small shard is one task.
SPLIT_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class HeldFrames:
    """The frames of one session, by name. Thread-safe; loads of one shard run one after another."""

    def __init__(self, *, settings: Settings, env: Env, lease_ms: int | None = None) -> None:
        """`lease_ms` None: the engine's default. Leases are renewed while this process lives."""
        self._settings, self._env, self._lease_ms = settings, env, lease_ms
        self._lock = threading.Lock()
        self._stores: dict[Location, _Store] = {}
        self._shards: dict[tuple[Location, ShardId], _HeldShard] = {}
        self._frames: dict[str, _HeldShard] = {}
        self._is_closed = False

    def look(self, options: Options, schema: Schema | None = None) -> LoadedFrame:
        """What a load would show now. Holds nothing. Raises the errors of `load`, except that a time before since is accepted."""
        shard = self._shard_of(options)
        with shard.lock:
            self._refuse_when_closed(options)
            return shard.look(options, shard.store.client(), schema)

    def load(self, frame: str, options: Options, schema: Schema | None = None) -> LoadedFrame:
        """Chooses the time that `frame` shows and keeps it readable until `drop`. Takes one commit, unless an open reader of the shard can
        serve the frame. Idempotent: a frame that is already loaded keeps its time. `schema`: a current or former schema of the shard, which
        gives the columns; None: the newest schema.

        Raises InvalidUsage for a time before since or not yet complete, for columns and conditions that do not fit the schema, and after
        `close`; ShardNotFound; and store errors. After an error nothing is held.
        """
        shard = self._shard_of(options)
        with shard.lock:  # until the frame is registered, so that `close` waits for this load
            self._refuse_when_closed(options)
            loaded = shard.load(frame, options, shard.store.client(), schema)
            with self._lock:
                self._frames[frame] = shard
            return loaded

    def splits(self, frame: str, asked: T.StructType) -> list[bytes]:
        """The splits of the frame's contents, for executors. An empty frame has none. They stay readable until the frame is dropped. Every
        call yields the same rows.

        Raises InvalidUsage when `asked` is not the frame's row type, or when the frame is not held (any more). Raises Fenced when its lease
        expired.
        """
        with self._lock:
            shard = self._frames.get(frame)
        if shard is None:
            raise InvalidUsage(f"the session does not hold frame {frame}: load it again")
        with shard.lock:
            return shard.splits(frame, asked)

    def plain(self, frame: str) -> PlainFiles | None:
        """The local files that hold exactly the rows of the frame. They stay until the frame is dropped. None when there are no
        such files.
        """
        with self._lock:
            shard = self._frames.get(frame)
        if shard is None:
            return None
        with shard.lock:
            return shard.plain(frame)

    def aggregates(self, frame: str, fields: Sequence[str]) -> Aggregates | None:
        """The aggregates of the frame's rows and of `fields` that the shard's state proves (see Snapshot.aggregates). None for an empty
        frame, a frame of changes, and a frame that is not held. Raises Fenced when its lease expired.
        """
        with self._lock:
            shard = self._frames.get(frame)
        if shard is None:
            return None
        with shard.lock:
            return shard.aggregates(frame, fields)

    def size(self, frame: str) -> int:
        """About how many bytes of parts the frame reads. 0 for an empty frame and for a frame that is not held."""
        with self._lock:
            shard = self._frames.get(frame)
        if shard is None:
            return 0
        with shard.lock:
            return shard.size(frame)

    def drop(self, frame: str) -> None:
        """Ends a frame that Spark can no longer read. Releases its lease when no other frame uses it (one commit). Idempotent."""
        with self._lock:
            shard = self._frames.pop(frame, None)
        if shard is not None:
            with shard.lock:
                shard.drop(frame)

    @property
    def locations(self) -> frozenset[Location]:
        """The stores of all held frames."""
        with self._lock:
            return frozenset(shard.store.location for shard in self._frames.values())

    def location_of(self, frame: str) -> Location | None:
        """The stores of the frame. None for a frame that is not held."""
        with self._lock:
            shard = self._frames.get(frame)
        return None if shard is None else shard.store.location

    def advance(self, location: Location) -> None:
        """Advances the since of each lease at `location` to the oldest time that its frames show, but not past the critical readers and the
        shard's retention, which define what the shard keeps. Takes one commit for each lease that moves. Without critical readers and
        retention no lease moves, because a read must not release history.

        The caller must call it periodically. Store errors are logged, and the next call tries again.
        """
        for shard in self._snapshot_of_shards():
            if shard.store.location == location:
                with shard.lock:
                    shard.advance()

    def close(self) -> None:
        """Drops all frames, releases all leases and closes the stores. Each store has its own thread, so that a store that does not answer
        does not delay the leases of another. Idempotent. Later loads are refused.
        """
        with self._lock:
            self._is_closed = True
            stores = list(self._stores.values())
        threads = [threading.Thread(target=self._release, args=(store,), daemon=True) for store in stores[1:]]
        for thread in threads:
            thread.start()
        if stores:
            self._release(stores[0])
        for thread in threads:
            thread.join()
        self._close_stores()

    def abandon(self) -> None:
        """Stops renewing leases but does not release them, so that each expires at its own time. Closes the stores. For a process that ends
        while executors still read.
        """
        for shard in self._snapshot_of_shards():
            with shard.lock:
                shard.abandon()
        self._close_stores()

    @property
    def count(self) -> int:
        """The number of frames held."""
        with self._lock:
            return len(self._frames)

    def _refuse_when_closed(self, options: Options) -> None:
        with self._lock:
            if self._is_closed:
                raise InvalidUsage(f"the session that loads shard {options.shard} has ended")

    def _release(self, store: _Store) -> None:
        for shard in self._snapshot_of_shards():
            if shard.store is store:
                with shard.lock:  # waits for loads that began earlier
                    pass
        with self._lock:
            frames = [frame for frame, shard in self._frames.items() if shard.store is store]
        for frame in frames:
            self.drop(frame)

    def _close_stores(self) -> None:
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.close()

    def _snapshot_of_shards(self) -> list[_HeldShard]:
        with self._lock:
            return list(self._shards.values())

    def _shard_of(self, options: Options) -> _HeldShard:
        with self._lock:
            location = options.location
            store = self._stores.setdefault(location, _Store(location, self._settings, self._env))
            key = (location, options.shard)
            return self._shards.setdefault(key, _HeldShard(options.shard, store, self._lease_ms))


class _Store:
    """One client for all shards of a location, opened at its first use."""

    def __init__(self, location: Location, settings: Settings, env: Env) -> None:
        self.location, self._settings, self.env = location, settings, env
        self._lock = threading.Lock()
        self._client: PersistClient | None = None

    def client(self) -> PersistClient:
        with self._lock:
            if self._client is None:
                self._client = PersistClient.open(self.location, settings=self._settings, env=self.env, create=False)
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


@dataclass(slots=True, kw_only=True)
class _Lease:
    """A reader and the frames under it."""

    reader: ReadHandle
    reads: dict[str, Snapshot | Changes] = field(default_factory=dict)

    @property
    def oldest(self) -> int:
        """The oldest time from which its frames read."""
        return min(max(0, read.after) if isinstance(read, Changes) else read.as_of for read in self.reads.values())

    def serves(self, time: int, schema: Schema) -> bool:
        """Whether a frame of `schema` that reads from `time` can read under this lease. A lost lease has an empty since and serves no
        frame.
        """
        return self.reader.since.less_equal(time) and self.reader.schema == schema


def follow(reader: ReadHandle, oldest: int, report: Inspection) -> None:
    """Advances the since of a lease to `oldest`, but not past the critical readers and the retention in `report`. Takes one commit if it
    moves. Without critical readers and retention it stays, because a read must not release history.
    """
    kept = [held.since for held in report.readers if held.kind == "critical"]
    kept += [] if report.retain_ms is None else [report.retained_since]
    if not kept:
        return
    allowed = Antichain.of(min([oldest, *(since for since in kept if since is not None)]))
    if reader.since < allowed:
        reader.downgrade_since(allowed)


class _HeldShard:
    """The frames of one shard. Not thread-safe: callers hold `lock`."""

    def __init__(self, shard: ShardId, store: _Store, lease_ms: int | None) -> None:
        self.lock = threading.Lock()
        self.store = store
        self._shard, self._lease_ms = shard, lease_ms
        self._leases: list[_Lease] = []
        self._loaded: dict[str, tuple[Options, LoadedFrame]] = {}

    def look(self, options: Options, client: PersistClient, schema: Schema | None = None) -> LoadedFrame:
        # SUBTLE: times come first. Looking them up also fetches a schema that another process evolved before the load.
        loaded = self._chosen(options, client, schema)
        if options.where is not None:  # an invalid condition is refused even if the shard is still empty
            condition(options.where, schema or client.schema(self._shard), "where")
        return loaded

    def load(self, frame: str, options: Options, client: PersistClient, schema: Schema | None) -> LoadedFrame:
        if frame in self._loaded:
            return self._loaded[frame][1]
        loaded = self.look(options, client, schema)
        if loaded.as_of is not None:
            lease = self._lease_for(loaded.readable_from, client, schema)
            with self._given_back_unless_used(lease):
                # Choose again: before the lease was taken, since may have passed the latest time, and the schema may have evolved.
                loaded = self._chosen(options, client, lease.reader.schema)
                if loaded.as_of is not None:  # a window relative to now may have become empty
                    lease.reads[frame] = self._opened(lease.reader, loaded, options)
        self._loaded[frame] = (options, loaded)
        return loaded

    def splits(self, frame: str, asked: T.StructType) -> list[bytes]:
        found = self._loaded.get(frame)
        if found is None:
            raise InvalidUsage(f"the session no longer holds frame {frame} of shard {self._shard}: load it again")
        options, loaded = found
        check_columns(asked, loaded.row_type, self._shard)
        lease = self._open_lease_of(frame)
        if lease is None:
            return []
        read = lease.reads[frame]
        count = options.splits or min(max(1, -(-read.bytes_estimate // SPLIT_BYTES)), SPLITS_MAX)
        # A frame of rows repeats a row as often as its diffs say, so equal rows from several parts need not be merged.
        splits = read.splits(count) if isinstance(read, Changes) else read.splits(count, merged=options.updates)
        return [split.to_bytes() for split in splits]

    def plain(self, frame: str) -> PlainFiles | None:
        found = self._loaded.get(frame)
        if found is None:
            return None  # dropped meanwhile
        options, loaded = found
        lease, folder = self._lease_of(frame), folder_of(options.location.blob)
        read = None if lease is None else lease.reads[frame]
        if folder is None or not isinstance(read, Snapshot) or not options.is_of_plain_rows:
            return None
        keys = read.plain_blobs()
        if not keys:
            return None
        files = tuple(folder / key for key in keys)
        where = None if options.where is None else condition(options.where, read.schema, "where")
        return PlainFiles(files=files, schema=read.schema, row_type=loaded.row_type, where=where)

    def aggregates(self, frame: str, fields: Sequence[str]) -> Aggregates | None:
        lease = self._open_lease_of(frame)
        read = None if lease is None else lease.reads[frame]
        return read.aggregates(fields) if isinstance(read, Snapshot) else None

    def size(self, frame: str) -> int:
        lease = self._lease_of(frame)
        return 0 if lease is None else lease.reads[frame].bytes_estimate

    def drop(self, frame: str) -> None:
        self._loaded.pop(frame, None)
        lease = self._lease_of(frame)
        if lease is not None:
            lease.reads.pop(frame).close()
            self._give_back_unless_used(lease)

    def advance(self) -> None:
        if not self._leases:
            return
        try:
            report = self.store.client().inspect(self._shard)
            for lease in self._leases:
                follow(lease.reader, lease.oldest, report)
        except PersistError as error:
            _log.warning(
                "could not advance the leases on shard %s: %s", self._shard, error, extra={"shard": self._shard}
            )

    def abandon(self) -> None:
        for lease in self._leases:
            lease.reader.abandon()

    def _chosen(self, options: Options, client: PersistClient, schema: Schema | None) -> LoadedFrame:
        """What a load shows now, with the columns of `schema` (None: the newest schema). Raises InvalidUsage for times that are not
        complete yet.
        """
        feed = options.feed
        refuse_instants(
            client.clock(self._shard), self._shard, *((options.as_of,) if feed is None else (feed.start, feed.end))
        )
        if options.feed is None:
            as_of = self._time_of(options, client)
            schema = schema or client.schema(self._shard)
            shown = row_type(schema, updates=options.updates, columns=options.columns)
            return LoadedFrame(as_of=as_of, row_type=shown, ddl=(schema.key_ddl, schema.val_ddl))
        upper = client.recent_upper(self._shard)
        try:
            start, end = options.feed.window(upper, now_ms=self.store.env.now_ms())
        except InvalidUsage as error:
            raise InvalidUsage(f"cannot read the changes of shard {self._shard}: {error}") from error
        schema = schema or client.schema(self._shard)
        shown = changes_row_type(schema, shape=options.feed.shape, columns=options.columns)
        as_of = end - 1 if start < end else None
        return LoadedFrame(as_of=as_of, row_type=shown, ddl=(schema.key_ddl, schema.val_ddl), start=start)

    def _time_of(self, options: Options, client: PersistClient) -> int | None:
        """The time at which to read. None when nothing was ever written. Raises InvalidUsage when the requested time is not
        complete yet.
        """
        upper = client.recent_upper(self._shard)
        latest = upper.newest_complete
        as_of = latest if options.as_of is None else instant(options.as_of, self.store.env.now_ms())
        if as_of > latest:
            raise InvalidUsage(
                f"cannot read shard {self._shard} at as_of {dated(as_of)}: its upper is {upper}, "
                f"the latest readable time is {dated(latest)}"
            )
        return None if as_of < 0 else as_of

    def _opened(self, reader: ReadHandle, loaded: LoadedFrame, options: Options) -> Snapshot | Changes:
        assert loaded.as_of is not None
        if options.feed is None or loaded.start is None:
            return self._snapshot(reader, loaded.as_of, options)
        # All times up to since are merged into one time. So it is unknown when the changes at since happened, unless since is 0.
        after = loaded.start - 1
        changes: Changes | SinceAhead | None = None
        if after >= 0 or reader.since.less_equal(0):
            changes = reader.changes(
                None if after < 0 else after,
                loaded.as_of,
                shape=options.feed.shape,
                where=options.where,
                columns=options.columns,
            )
        if isinstance(changes, Changes):
            return changes
        since = reader.since.time
        raise InvalidUsage(
            f"cannot read the changes of shard {self._shard} from {dated(loaded.start)}: its since is {dated(since)}. Since is "
            "the earliest time at which the shard can still be read, and the times of changes up to it are no longer known. "
            + ("" if since is None else f"Read the contents with as_of {since}, and the changes from {since + 1} on; ")
            + "a longer retention, or a critical reader, keeps earlier times"
        )

    def _snapshot(self, reader: ReadHandle, as_of: int, options: Options) -> Snapshot:
        snapshot = reader.snapshot(Antichain.of(as_of), where=options.where, columns=options.columns)
        if isinstance(snapshot, SinceAhead):
            since = next(iter(snapshot.since.elements), None)
            raise InvalidUsage(
                f"cannot read shard {self._shard} at as_of {dated(as_of)}: "
                f"times before since {dated(since)} are no longer readable"
            )
        return snapshot

    def _lease_for(self, time: int, client: PersistClient, schema: Schema | None) -> _Lease:
        """A lease for a frame that reads from `time`: an existing lease, or a new one at the shard's since."""
        wanted = schema or client.schema(self._shard)
        lease = next((lease for lease in self._leases if lease.serves(time, wanted)), None)
        if lease is None:
            reader = client.open_leased_reader(self._shard, schema, purpose="spark read", lease_ms=self._lease_ms)
            lease = _Lease(reader=reader)
            self._leases.append(lease)
        return lease

    def _lease_of(self, frame: str) -> _Lease | None:
        return next((lease for lease in self._leases if frame in lease.reads), None)

    def _open_lease_of(self, frame: str) -> _Lease | None:
        lease = self._lease_of(frame)
        try:
            if lease is not None:
                lease.reader.check_open()
        except Fenced as error:
            raise Fenced(
                f"{error}: this process was suspended for longer than its lease; load the frame again", **error.detail
            ) from error
        return lease

    @contextmanager
    def _given_back_unless_used(self, lease: _Lease) -> Iterator[None]:
        try:
            yield
        finally:
            self._give_back_unless_used(lease)

    def _give_back_unless_used(self, lease: _Lease) -> None:
        if lease.reads:
            return
        self._leases.remove(lease)
        try:
            lease.reader.expire()
        except PersistError as error:  # nothing renews the lease now, so it will expire
            _log.warning("could not release a lease on shard %s: %s", self._shard, error, extra={"shard": self._shard})
