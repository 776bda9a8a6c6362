"""The shard behind a table: its stores, its frames, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from persist_engine import Location, PersistClient
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, PersistError, ShardNotFound
from persist_engine.base.settings import Settings
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame, SparkSession

from persist_spark.datasource import is_connect, register
from persist_spark.landing import driver_settings
from persist_spark.partitions import sink_settings
from persist_spark.source.loaded import FORMAT
from persist_spark.source.names import stores_of, with_shard_id
from persist_spark.spec import TARGET_PART_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedShard:
    """One shard of one location."""

    id: ShardId
    location: Location

    def schema(self) -> Schema:
        """The newest schema of the shard. Raises ShardNotFound and store errors."""
        with self.opened() as client:
            return client.schema(self.id)

    @contextmanager
    def opened(self, settings: Settings | None = None) -> Iterator[PersistClient]:
        """A client in this process. `settings` None: the settings of a write."""
        chosen = driver_settings(sink_settings(TARGET_PART_BYTES)) if settings is None else settings
        with PersistClient.open(self.location, settings=chosen, env=SystemEnv(), create=False) as client:
            yield client


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard(PlacedShard):
    """One shard as a session of Spark uses it."""

    spark: SparkSession

    @classmethod
    def named(cls, spark: SparkSession, name: str, *, blob: str | None, consensus: str | None) -> TableShard:
        """The shard with this name or id. Missing stores are those of `register`. Registers the format if the session does not know it.
        Raises InvalidUsage without stores; ShardNotFound; store errors.
        """
        known = stores_of(spark)
        given = {"blob": blob, "consensus": consensus}
        stores = {**(known or {}), **{option: url for option, url in given.items() if url is not None}}
        if missing := [option for option in given if not stores.get(option)]:
            raise InvalidUsage(
                f"the table {name} needs {' and '.join(missing)}: give the addresses of its stores here, or once for the session with "
                "register(spark, blob=..., consensus=...)"
            )
        if known is None:
            register(spark)
        try:
            shard = ShardId(with_shard_id({"shard": name, **stores})["shard"])
            location = Location(blob=stores["blob"], consensus=stores["consensus"])
            table = cls(spark=spark, id=shard, location=location)
            table.schema()
        except PersistError as error:
            if is_connect(spark) and not isinstance(error, ShardNotFound):
                error.add_note(
                    "Over Spark Connect a table works in the client's process, which must reach both stores at these addresses. Frames "
                    'do not need that: spark.read.format("persist") works on the server.'
                )
            raise
        return table

    @property
    def options(self) -> Mapping[str, str]:
        """The options of a load or a write."""
        return {"shard": str(self.id), "blob": self.location.blob, "consensus": self.location.consensus}

    def frame(self, as_of: int | str | datetime | None = None, **options: str) -> DataFrame:
        """A load of the shard. `as_of`: a number, ISO 8601 text with its zone, a relative time such as -1h, or a datetime with a
        time zone.
        """
        if as_of is not None:
            options["as_of"] = text_of(as_of)
        return self.spark.read.format(FORMAT).options(**self.options, **options).load()


def text_of(as_of: int | str | datetime) -> str:
    """A time as text for option `as_of`. Raises InvalidUsage for a datetime without a time zone."""
    if not isinstance(as_of, datetime):
        return str(as_of)
    if as_of.tzinfo is None:
        raise InvalidUsage(f"as_of: {as_of} has no time zone; give it one, such as tzinfo=timezone.utc")
    return as_of.isoformat()
