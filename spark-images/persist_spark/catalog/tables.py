"""The tables of one catalog: names of the registry, and shards read and changed behind them.

Every answer is a value of plain JSON. `desk.py` carries it to the JVM. A table that was loaded is a frame of the session's `HeldFrames`:
its time is chosen once, and a lease keeps it readable until the JVM drops the frame. Each scan is a frame of its own at the same time,
with its own columns and its own condition.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from persist_engine import Location, PersistClient
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner

from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.catalog.conditions import answered, conjunction
from persist_spark.catalog.definitions import check_is_ours, create, drop
from persist_spark.held_frames import HeldFrames, LoadedFrame
from persist_spark.options import Options, moment
from persist_spark.partitions import sink_settings
from persist_spark.spec import TARGET_PART_BYTES
from persist_spark.table.shard import PlacedShard

#: The option that says that a scan has no rows: its table was empty when it was loaded.
EMPTY = "persist.empty"
FRAME = "persist.frame"
KEEPER = "persist.keeper"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A table that was loaded."""

    options: Options
    frame: LoadedFrame


class Tables:
    """The tables at `location`. Thread-safe. Errors are those of the engine, with texts for users."""

    def __init__(self, location: Location, held: HeldFrames, *, keeper: str) -> None:
        """`keeper`: the address at which Spark's planners ask for the splits of a frame in `held`."""
        self._location, self._held, self._keeper = location, held, keeper
        self._lock = threading.Lock()
        self._loaded: dict[str, _Loaded] = {}
        self._frames: dict[str, ShardId] = {}
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
        """Chooses what the frame `frame` over a table shows: the contents at a time, by default the newest. None: there is no such table.
        InvalidUsage for a name of several shards, and for a time that cannot be read.
        """
        found = self._shard(table)
        if found is None:
            return None
        owner, shard = found
        options = self._options(shard, _time(version, timestamp_us))
        self._frames[frame] = shard
        loaded = self._held.load(frame, options)
        self._loaded[frame] = _Loaded(options, loaded)
        schema = self._opened().schema(shard)
        properties = {
            "provider": "persist",
            "shard": str(shard),
            "owner": str(owner),
            "key": ", ".join(schema.key.names),
        }
        return {"columns": loaded.row_type.jsonValue(), "as_of": loaded.as_of, "properties": properties}

    def answers(self, frame: str, conditions: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """For each condition the text of option `where` that answers it; null where Spark must answer it."""
        schema = self._opened().schema(self._of(frame).options.shard)
        return [answered(condition, schema) for condition in conditions]

    def scan(self, frame: str, *, of: str, columns: Sequence[str], where: Sequence[str]) -> dict[str, Any]:
        """Makes `frame` a scan of the table that was loaded as frame `of`: the rows at the same time that satisfy all of `where`, with
        these columns. The options are those of the format of the catalog.
        """
        table = self._of(of)
        key = self._opened().schema(table.options.shard).key.names
        sided = tuple(f"{'key' if name in key else 'val'}.{name}" for name in columns)
        options = replace(table.options, columns=sided, where=conjunction(where))
        stores = {"shard": str(options.shard), "blob": self._location.blob, "consensus": self._location.consensus}
        given = {**stores, FRAME: frame, KEEPER: self._keeper}
        if table.frame.as_of is None:
            names = set(columns)
            shown = [field.jsonValue() for field in table.frame.row_type if field.name in names]
            return {"columns": {"type": "struct", "fields": shown}, "options": {**given, EMPTY: "true"}, "bytes": 0}
        self._frames[frame] = options.shard
        loaded = self._held.load(frame, table.frame.pinned(options))
        return {
            "columns": loaded.row_type.jsonValue(),
            "options": given,
            "bytes": self._held.size(frame),
        }

    def writing(self, frame: str) -> dict[str, str]:
        """The options of a write to the table that was loaded as `frame`."""
        shard = self._of(frame).options.shard
        return {"shard": str(shard), "blob": self._location.blob, "consensus": self._location.consensus}

    def exists(self, table: Sequence[str]) -> bool:
        """Whether there is such a table. Holds nothing."""
        return self._shard(table) is not None

    def create(self, table: Sequence[str], *, columns: Mapping[str, Any], properties: Mapping[str, str]) -> bool:
        """Creates a table: see definitions.create. False when there is one of this name already."""
        if self.exists(table):
            return False
        # Opened anew: this may be the first table of stores that nothing used before.
        with PersistClient.open(self._location, settings=sink_settings(TARGET_PART_BYTES), env=SystemEnv()) as client:
            create(client, table, T.StructType.fromJson(dict(columns)), properties)
        return True

    def drop(self, table: Sequence[str]) -> bool:
        """Deletes a table that `create` created, with its data. False when there is none of this name. Frames of this catalog over it
        cannot be read any more. FinalizationError, and the table stays, while other processes read it. InvalidUsage for a shard that
        another owner created.
        """
        found = self._shard(table)
        if found is None:
            return False
        owner, shard = found
        check_is_ours(owner)
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
        """Releases a frame that nothing can read any more. Idempotent."""
        self._loaded.pop(frame, None)
        self._frames.pop(frame, None)
        self._held.drop(frame)

    def close(self) -> None:
        """Releases everything."""
        self._held.close()
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _of(self, frame: str) -> _Loaded:
        found = self._loaded.get(frame)
        if found is None:
            raise InvalidUsage("the catalog does not hold this table any more: its process ended; load the table again")
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

    def _shard(self, table: Sequence[str]) -> tuple[Owner, ShardId] | None:
        *namespace, name = table
        found = [(owner, shard) for owner, shard in self._owned() if owner.name == name and _is_in(owner, namespace)]
        if len(found) > 1:
            choices = ", ".join(sorted(f"{owner.operator_id}.{owner.namespace}.{owner.name}" for owner, _ in found))
            raise InvalidUsage(
                f"{len(found)} shards are named {'.'.join(table)}: name one of {choices} after the name of the catalog"
            )
        return found[0] if found else None


def _is_in(owner: Owner, namespace: Sequence[str]) -> bool:
    """NAMESPACE, or OPERATOR.NAMESPACE."""
    return list(namespace) in ([owner.namespace], [owner.operator_id, owner.namespace])


def _time(version: str | None, timestamp_us: int | None) -> Any:
    if version is not None:
        return moment({"VERSION AS OF": version}, "VERSION AS OF")
    if timestamp_us is None:
        return None
    if timestamp_us < 0:
        raise InvalidUsage("TIMESTAMP AS OF: the time is before 1970, where a shard's times begin")
    return timestamp_us // 1000
