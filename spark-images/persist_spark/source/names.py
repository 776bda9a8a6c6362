"""Names instead of ids: `spark.read.format("persist").load("flights")`."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from persist_engine import Location
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.secrets import shown_url, without_secrets
from persist_engine.model.ids import ShardId
from pyspark.sql import SparkSession

#: The default stores of each session that knows the format.
_stores: WeakKeyDictionary[SparkSession, Mapping[str, str]] = WeakKeyDictionary()


def remember_stores(spark: SparkSession, stores: Mapping[str, str]) -> None:
    """Keeps the options `blob` and `consensus` of the session. Replaces earlier ones."""
    _stores[spark] = dict(stores)


def stores_of(spark: SparkSession) -> Mapping[str, str] | None:
    """The default options of the session. None when the session does not know the format."""
    return _stores.get(spark)


def with_shard_id(options: Mapping[str, str]) -> dict[str, str]:
    """Replaces the shard's name by its id in the options, and puts the names of options in lower case.

    The name, or the id, is the option `shard` or the path of the load. A frame keeps the id, so it shows the same shard if the name later
    means another shard. Raises ShardNotFound and InvalidUsage like `PersistClient.shard_named`.
    """
    given = {name.lower(): value for name, value in options.items()}
    if "path" in given:
        if "shard" in given:
            both = without_secrets(f"option shard: {given['shard']} beside the path {given['path']}; give one of them")
            raise InvalidUsage(both)
        given["shard"] = given.pop("path")
    if "://" in given.get("shard", ""):
        raise InvalidUsage(
            f"option shard: {shown_url(given['shard'])} is the address of a store and no shard; give the stores as the options blob and "
            "consensus, and the shard by its name or id"
        )
    if not all(given.get(name) for name in ("shard", "blob", "consensus")) or ShardId.is_valid(given["shard"]):
        return given
    from persist_engine import PersistClient

    from persist_spark.partitions import sink_settings
    from persist_spark.spec import TARGET_PART_BYTES

    location = Location(blob=given["blob"], consensus=given["consensus"])
    settings = sink_settings(TARGET_PART_BYTES)
    with PersistClient.open(location, settings=settings, env=SystemEnv(), create=False) as client:
        given["shard"] = client.shard_named(given["shard"])
    return given
