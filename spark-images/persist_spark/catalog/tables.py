"""The tables of one catalog: looks up names in the registry, and reads and changes their shards.

Every answer is a value of plain JSON. `desk.py` sends it to the JVM. A loaded table is a frame of the session's `HeldFrames`. Its time is
chosen once, and a lease keeps it readable until the JVM drops the frame. Each scan is a separate frame at the same time, with its own
columns and its own condition.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from persist_engine import METADATA_TABLES, Location, PersistClient
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, NoStore, ShardNotFound
from persist_engine.base.wording import iso_text
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner
from persist_engine.rows.schema import Schema
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.catalog.aggregates import Asked, fields, sided, values
from persist_spark.catalog.change_rows import feed_row_type
from persist_spark.catalog.conditions import answered, conjunction
from persist_spark.catalog.definitions import alter, create, drop, is_ours
from persist_spark.held_frames import HeldFrames
from persist_spark.options import STORE, Ago, Feed, Instant, Options, check_names, moment
from persist_spark.partitions import sink_settings
from persist_spark.row_shape import changes_row_type
from persist_spark.source.loaded import LoadedFrame, new_name
from persist_spark.source.metadata import LoadedTable
from persist_spark.spec import TARGET_PART_BYTES
from persist_spark.table.shard import PlacedShard

#: The option of a scan without rows. Its table was empty when it was loaded.
EMPTY = "persist.empty"
#: The option with the rows of a metadata table, as base64 of the stream of a LoadedTable.
ROWS = "persist.rows"
#: The option with the name of a scan (as in PersistScan.java), and the option with the address of its keeper.
FRAME, KEEPER = "persist.frame", "persist.keeper"
#: The option with the shard of a scan. If two scans have the same text, it shows whether they have the same rows.
SHARD = "persist.shard"
#: The option of a scan of changes: the columns of its splits, as JSON.
CHANGES = "persist.changes"
#: The options by which Spark chooses changes. Spark has already applied them.
_OF_CHANGES = frozenset(
    {
        "startingversion",
        "endingversion",
        "startingtimestamp",
        "endingtimestamp",
        "startingboundinclusive",
        "endingboundinclusive",
        "deduplicationmode",
        "computeupdates",
    }
)
_GONE = "the catalog does not hold this table any more: it was dropped, or the catalog's process ended; load it again"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A table that was loaded."""

    options: Options
    frame: LoadedFrame
    schema: Schema
    """The newest schema of the shard when the table was loaded. All scans have its columns, even if the shard evolves meanwhile, because
    Spark reads the rows with the types that it saw first.
    """


@dataclass(frozen=True, slots=True)
class _ToStream:
    """Loaded changes that only a stream can read."""

    shard: ShardId
    start: int | Ago | None
    """The first time of the changes. None: the contents first."""
    has_end: bool


class Tables:
    """The tables at `location`. Thread-safe. Raises the engine's errors, with texts for users."""

    def __init__(self, location: Location, held: HeldFrames, *, keeper: str) -> None:
        """`keeper`: the address from which Spark's planners get the splits of a frame in `held`."""
        self._location, self._held, self._keeper = location, held, keeper
        self._lock = threading.Lock()
        self._loaded: dict[str, _Loaded] = {}
        self._metadata: dict[str, LoadedTable] = {}
        self._feeds: dict[str, _ToStream] = {}
        self._frames: dict[str, ShardId] = {}
        self._found: dict[tuple[str, ...], tuple[Owner, ShardId]] = {}
        self._client: PersistClient | None = None

    def namespaces(self) -> list[str]:
        """The namespaces that have tables."""
        return sorted({owner.namespace for owner, _ in self._owned()})

    def tables(self, namespace: Sequence[str]) -> list[str] | None:
        """The names of the tables of a namespace. None when it has none."""
        found = sorted({owner.name for owner, _ in self._owned() if _is_in(owner, namespace)})
        return found or None

    def load(
        self,
        table: Sequence[str],
        *,
        frame: str,
        version: str | None = None,
        timestamp_us: int | None = None,
    ) -> dict[str, Any] | None:
        """Chooses what the frame `frame` over a table shows: the contents at a time, by default the newest, or the present rows of a
        metadata table, which is TABLE.NAME. Returns None when there is no such table. Raises InvalidUsage for a name of several shards, for
        a time that cannot be read, and for a metadata table with a time.
        """
        found = self._shard(table)
        if found is None:
            return self._load_metadata(table, frame, is_at_a_time=(version, timestamp_us) != (None, None))
        if self._is_half(*found):
            return None
        owner, shard = found
        return self._shown(self._made(frame, self._options(shard, _time(version, timestamp_us))), owner=str(owner))

    def open(self, frame: str, options: Options, *, store: str) -> dict[str, Any]:
        """Like `load`, but `options` name the shard and the time; their other fields are ignored. `store` distinguishes this location from
        other locations of the session, which may have copies of the shard. Raises the errors of HeldFrames.load.
        """
        return self._shown(self._made(frame, self._options(options.shard, options.as_of)), store=store)

    @staticmethod
    def _shown(made: _Loaded, **properties: str) -> dict[str, Any]:
        key = ", ".join(made.schema.key.names)
        properties = {"provider": "persist", "shard": str(made.options.shard), **properties, "key": key}
        return {"columns": made.frame.row_type.jsonValue(), "as_of": made.frame.as_of, "properties": properties}

    def _load_metadata(self, table: Sequence[str], frame: str, *, is_at_a_time: bool) -> dict[str, Any] | None:
        shard = self._described(table)
        if shard is None:
            return None
        *of, name = table
        if is_at_a_time:
            raise InvalidUsage(
                f"{'.'.join(table)} shows the metadata of {'.'.join(of)} as they are now, at no other time"
            )
        # Two loads must be two tables, because the metadata may change in between.
        read = iso_text(SystemEnv().now_ms())
        loaded = self._metadata[frame] = LoadedTable.of(self._opened().metadata(shard, name))
        properties = {"provider": "persist", "shard": str(shard)}
        return {"columns": loaded.row_type.jsonValue(), "as_of": read, "properties": properties, "is_metadata": True}

    def _described(self, table: Sequence[str]) -> ShardId | None:
        """The shard of the metadata table with this name. None when there is no such table."""
        *of, name = table
        if name not in METADATA_TABLES or not of:
            return None
        found = self._shard(of)
        return None if found is None or self._is_half(*found) else found[1]

    def changes(
        self,
        table: Sequence[str],
        *,
        frame: str,
        unit: str = "version",
        start: str | None = None,
        end: str | None = None,
        with_start: bool = True,
        with_end: bool = True,
    ) -> dict[str, Any] | None:
        """Chooses the changes of a table that the frame `frame` shows: those between two bounds. `with_start` and `with_end` include the
        bounds. `unit`: `version` (times as option `as_of` takes them) or `us` (microseconds). Without `end`, it shows all complete changes.
        Without `start`, only a stream can read the frame, and the stream begins with the contents. Returns None when there is no such
        table. Raises InvalidUsage for times whose changes are no longer known, or not yet known.
        """
        found = self._shard(table)
        if found is None:
            return None
        _, shard = found
        first = None if start is None else _bound(start, unit, is_after=not with_start)
        self._feeds[frame] = _ToStream(shard, first, has_end=end is not None)
        if first is None:
            schema = self._newest_schema(shard)
            shown = feed_row_type(changes_row_type(schema, shape="rows"))
            return {
                "shard": str(shard),
                "columns": shown.jsonValue(),
                "key": list(schema.key.names),
                "window": "all times",
                "bytes": 0,
            }
        feed = Feed(first, None if end is None else _bound(end, unit, is_after=with_end), "rows")
        made = self._made(frame, replace(self._options(shard, None), feed=feed))
        loaded = made.frame
        window = "no times" if loaded.as_of is None else f"[{loaded.start}, {loaded.as_of}]"
        return {
            "shard": str(shard),
            "columns": feed_row_type(loaded.row_type).jsonValue(),
            "key": list(made.schema.key.names),
            "window": window,
            "bytes": self._held.size(frame),
        }

    def answers(self, frame: str, conditions: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """For each condition, the text of option `where` that answers it, or null if Spark must answer it."""
        if frame in self._metadata:
            return [None] * len(conditions)
        table = self._of(frame)
        keys_only = table.options.feed is not None  # a condition on values could drop one half of an update
        return [answered(condition, table.schema, keys_only=keys_only) for condition in conditions]

    def aggregates(self, of: str, *, where: Sequence[str], asked: Asked) -> list[Any] | None:
        """The values of aggregates (see `catalog.aggregates`) over rows of the table that was loaded as frame `of`. The rows satisfy all of
        `where`. None when Spark must compute them, because state does not prove all of them or the rows are not the contents of a shard.
        Fetches no part.
        """
        table = self._loaded.get(of)
        if table is None or table.options.feed is not None or table.frame.as_of is None:
            return None
        scan = new_name()
        try:
            self._load(scan, table.frame.pinned(replace(table.options, where=conjunction(where))), table.schema)
            found = self._held.aggregates(scan, fields(asked, table.schema))
        finally:
            self.drop_frame(scan)
        return None if found is None else values(found, asked, table.schema)

    def scan(self, frame: str, *, of: str, columns: Sequence[str], where: Sequence[str]) -> dict[str, Any]:
        """Makes `frame` a scan of the table that was loaded as frame `of`: the rows at the same time that satisfy all of `where`, with
        these columns. Returns options for the format of the catalog.
        """
        if of in self._metadata:
            return self._scan_of_metadata(self._metadata[of], columns)
        if of in self._feeds and self._feeds[of].start is None:
            raise InvalidUsage("CHANGES without FROM is for streams: say from which time, as in CHANGES FROM VERSION 0")
        table = self._of(of)
        if table.options.feed is not None:
            return self._scan_of_changes(frame, table, columns=columns, where=where)
        shown = tuple(sided(name, table.schema) for name in columns)
        options = replace(table.options, columns=shown, where=conjunction(where))
        if table.frame.as_of is None:
            return self._empty(frame, options.shard, _only(table.frame.row_type, columns))
        loaded = self._load(frame, table.frame.pinned(options), table.schema)
        return self._planned(frame, options.shard, loaded.row_type)

    def stream(self, frame: str, *, options: Mapping[str, str]) -> dict[str, str]:
        """The options of a stream of the changes that were loaded as `frame`. The stream continues after the newest changes. `options`: the
        options of the read. Holds nothing, because the query holds its own lease. Raises InvalidUsage for an end, and for options that a
        stream does not know.
        """
        feed = self._feeds.get(frame)
        if feed is None:
            raise InvalidUsage(_GONE)
        if feed.has_end:
            raise InvalidUsage("a stream of changes has no end: leave it out, or use Trigger.AvailableNow")
        given = {name.lower(): value for name, value in options.items() if name.lower() not in _OF_CHANGES}
        given |= {"shard": str(feed.shard), "blob": self._location.blob, "consensus": self._location.consensus}
        check_names(given, {*STORE, "maxbytespertrigger", "maxtimepertrigger"}, "a stream of changes")
        start = {} if feed.start is None else {"startingtime": _text(feed.start)}
        return {**given, **start, "rows": "changes"}

    def _scan_of_changes(
        self, frame: str, table: _Loaded, *, columns: Sequence[str], where: Sequence[str]
    ) -> dict[str, Any]:
        """A scan of changes. It reads all columns: without a changed column, the two halves of an update would cancel each other."""
        shown = _only(feed_row_type(table.frame.row_type), columns)
        if table.frame.as_of is None:
            return self._empty(frame, table.options.shard, shown)
        self._load(frame, table.frame.pinned(replace(table.options, where=conjunction(where))), table.schema)
        return self._planned(frame, table.options.shard, shown, **{CHANGES: table.frame.row_type.json()})

    def _scan_of_metadata(self, loaded: LoadedTable, columns: Sequence[str]) -> dict[str, Any]:
        """A scan of a metadata table. Its options contain its rows, because they are few and no lease keeps them."""
        shown, rows = _only(loaded.row_type, columns), base64.b64encode(loaded.stream).decode()
        return {"columns": shown.jsonValue(), "options": {ROWS: rows}, "bytes": len(loaded.stream)}

    def _made(self, frame: str, options: Options) -> _Loaded:
        schema = self._newest_schema(options.shard)
        made = self._loaded[frame] = _Loaded(options, self._load(frame, options, schema), schema)
        return made

    def _newest_schema(self, shard: ShardId) -> Schema:
        """The newest schema, including a schema that another process evolved before this call."""
        client = self._opened()
        client.recent_upper(shard)
        return client.schema(shard)

    def _load(self, frame: str, options: Options, schema: Schema) -> LoadedFrame:
        self._frames[frame] = options.shard
        return self._held.load(frame, options, schema)

    def _planned(self, frame: str, shard: ShardId, columns: T.StructType, **options: str) -> dict[str, Any]:
        given = {"blob": self._location.blob, SHARD: str(shard), FRAME: frame, KEEPER: self._keeper, **options}
        return {"columns": columns.jsonValue(), "options": given, "bytes": self._held.size(frame)}

    def _empty(self, frame: str, shard: ShardId, columns: T.StructType) -> dict[str, Any]:
        return self._planned(frame, shard, columns, **{EMPTY: "true"})

    def writing(self, frame: str) -> dict[str, str]:
        """The options of a write to the table that was loaded as `frame`."""
        shard = self._of(frame).options.shard
        return {"shard": str(shard), "blob": self._location.blob, "consensus": self._location.consensus}

    def exists(self, table: Sequence[str]) -> bool:
        """Whether there is a table or metadata table of this name. Holds nothing. False for a table that an interrupted CREATE left without
        a shard, and false when there are no stores yet, because CREATE makes them.
        """
        try:
            found = self._shard(table)
        except NoStore:
            return False
        return self._described(table) is not None if found is None else not self._is_half(*found)

    def create(self, table: Sequence[str], *, columns: Mapping[str, Any], properties: Mapping[str, str]) -> bool:
        """Creates a table: see definitions.create. Returns False when there is already a table of this name."""
        if self.exists(table):
            return False
        # Opens the stores with `create`, because this may be the first table of new stores.
        with PersistClient.open(self._location, settings=sink_settings(TARGET_PART_BYTES), env=SystemEnv()) as client:
            create(client, table, T.StructType.fromJson(dict(columns)), properties)
        return True

    def alter(self, table: Sequence[str], *, changes: Sequence[Mapping[str, Any]]) -> bool:
        """Evolves a table that `create` created: see definitions.alter. Loaded tables keep their columns. Returns False when there is no
        table of this name. Raises InvalidUsage for a shard that another owner created.
        """
        found = self._shard(table)
        if found is None:
            return False
        owner, shard = found
        if not is_ours(owner):
            raise InvalidUsage(f"table {'.'.join(table)} belongs to {owner}, which created it: change its schema there")
        alter(self._opened(), table, shard, changes)
        return True

    def drop(self, table: Sequence[str]) -> bool:
        """Deletes a table that `create` created, with its data. This catalog's frames over it can no longer be read. Returns False when
        there is no table of this name. Raises FinalizationError, and the table stays, while other processes read it. Raises InvalidUsage
        for a shard that another owner created.
        """
        found = self._shard(table)
        if found is None:
            if self._described(table) is not None:
                raise InvalidUsage(f"{'.'.join(table)} is metadata and goes with its table")
            return False
        owner, shard = found
        if not is_ours(owner):
            raise InvalidUsage(
                f"table {'.'.join(table)} belongs to {owner}, which created it: delete that resource, or use persist admin finalize"
            )
        for frame in [frame for frame, of in list(self._frames.items()) if of == shard]:
            self.drop_frame(frame)
        drop(self._opened(), shard)
        return True

    def delete(self, frame: str, *, where: Sequence[str]) -> int:
        """Removes the rows that satisfy all of `where`, texts of `answers`, in one step, and returns their number."""
        from persist_spark.table.removal import delete_here

        shard = PlacedShard(id=self._of(frame).options.shard, location=self._location)
        return delete_here(shard, shard.schema(), conjunction(where))

    def drop_frame(self, frame: str) -> None:
        """Releases a frame that can no longer be read. Idempotent."""
        self._loaded.pop(frame, None)
        self._metadata.pop(frame, None)
        self._feeds.pop(frame, None)
        self._frames.pop(frame, None)
        self._held.drop(frame)

    def close(self) -> None:
        """Releases everything."""
        self._held.close()
        self.disconnect()

    def disconnect(self) -> None:
        """Closes its own connections. The frames stay."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _of(self, frame: str) -> _Loaded:
        found = self._loaded.get(frame)
        if found is None:
            raise InvalidUsage(_GONE)
        return found

    def _options(self, shard: ShardId, as_of: Any) -> Options:
        return Options(shard=shard, location=self._location, as_of=as_of, splits=None, updates=False)

    def _opened(self) -> PersistClient:
        with self._lock:
            if self._client is None:
                settings = sink_settings(TARGET_PART_BYTES)
                self._client = PersistClient.open(self._location, settings=settings, env=SystemEnv(), create=False)
            return self._client

    def _owned(self) -> Iterator[tuple[Owner, ShardId]]:
        client = self._opened()
        return ((owner, shard) for owner, shard in client.names() if client.owner_of(shard) == owner)

    def _is_half(self, owner: Owner, shard: ShardId) -> bool:
        """Whether a CREATE was interrupted after it made the name and before it made the shard."""
        if not is_ours(owner):
            return False
        try:
            self._opened().recent_upper(shard)
        except ShardNotFound:
            return True
        return False

    def _shard(self, table: Sequence[str]) -> tuple[Owner, ShardId] | None:
        """The shard of a name, and its owner. A known name keeps its shard as long as the owner has that shard, because a new lookup lists
        all keys of the store.
        """
        known, client = self._found.get(tuple(table)), self._opened()
        if known is not None and client.registered(known[0]) == known[1] and client.owner_of(known[1]) == known[0]:
            return known
        *namespace, name = table
        found = [(owner, shard) for owner, shard in self._owned() if owner.name == name and _is_in(owner, namespace)]
        if len(found) > 1:
            choices = ", ".join(sorted(f"{owner.operator_id}.{owner.namespace}.{owner.name}" for owner, _ in found))
            raise InvalidUsage(
                f"{len(found)} shards are named {'.'.join(table)}: name one of {choices} after the name of the catalog"
            )
        if not found:
            return None
        self._found[tuple(table)] = found[0]
        return found[0]


def _is_in(owner: Owner, namespace: Sequence[str]) -> bool:
    """Whether `namespace`, which is NAMESPACE or OPERATOR.NAMESPACE, is the owner's."""
    return list(namespace) in ([owner.namespace], [owner.operator_id, owner.namespace])


def _time(version: str | None, timestamp_us: int | None) -> Any:
    if version is not None:
        return moment({"VERSION AS OF": version}, "VERSION AS OF")
    if timestamp_us is None:
        return None
    if timestamp_us < 0:
        raise InvalidUsage("TIMESTAMP AS OF: the time is before 1970, where a shard's times begin")
    return Instant(timestamp_us // 1000)


def _bound(text: str, unit: str, *, is_after: bool) -> int | Ago:
    """The first time at or after a bound of a range. With `is_after`, the first time after it."""
    if unit == "us":
        us = int(text)
        return Instant(max(0, us // 1000 + 1 if is_after or us % 1000 else us // 1000))
    at = moment({"VERSION": text}, "VERSION")
    assert at is not None
    return replace(at, ms=at.ms - is_after) if isinstance(at, Ago) else type(at)(at + is_after)


def _text(time: int | Ago) -> str:
    return f"-{time.ms}ms" if isinstance(time, Ago) else str(time)


def _only(row: T.StructType, columns: Sequence[str]) -> T.StructType:
    """The fields `columns` of `row`, in the order of `row`."""
    names = set(columns)
    return T.StructType([field for field in row if field.name in names])
