"""`attach`: shards as temporary views of a session, in one call, without a jar.

A view is a loaded frame with a name, so it shows the contents of one time, which `attach` chooses and returns. Another call with the same
arguments shows newer contents. In contrast, each statement reads a table of the SQL catalog anew (docs/howto/sql.md), which needs a jar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from persist_engine import Location, PersistClient
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId
from pyspark.sql import SparkSession

from persist_spark.datasource import register
from persist_spark.options import instant, moment
from persist_spark.partitions import sink_settings
from persist_spark.source.names import stores_of
from persist_spark.spec import TARGET_PART_BYTES
from persist_spark.table.shard import TableShard, text_of

#: More views than a person attaches by hand. Each costs a load.
VIEWS_MAX = 1_000
_QUOTE = "`"
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """One view."""

    view: str
    """The name of the view in SQL. It has backquotes if it is not a plain identifier."""
    name: str
    """NAMESPACE/NAME of the shard's owner, or the shard's id if the call named the id."""
    shard: str
    as_of: int | None
    """The time whose contents the view shows. None: nothing was ever written, and the view stays empty."""


def attach(
    spark: SparkSession,
    *,
    namespace: str | None = None,
    names: Iterable[str] | Mapping[str, str] | None = None,
    blob: str | None = None,
    consensus: str | None = None,
    as_of: int | str | datetime | None = None,
) -> tuple[Attached, ...]:
    """Makes a temporary view of each shard, and returns the views. A view has the name of the shard's owner, and replaces an existing view
    of that name.

    `names`: names or ids of shards, as `PersistTable.forName` takes them, or a mapping from views to these names; by default all shards of
    the registry. `namespace`: attaches only shards of this namespace, and looks up names in it. `blob` and `consensus`: the stores; by
    default those of `register`. `as_of`: see `PersistTable.toDF`; by default the newest contents of each shard.

    Makes all views or none. Raises InvalidUsage when two shards would have the same view, for a name that no view can have, for a time that
    cannot be read, when there is nothing to attach, and without stores. Raises ShardNotFound, which lists similar names, and errors of the
    stores. Works in the process that calls it, which must reach both stores.
    """
    location = _location(spark, blob, consensus)
    if stores_of(spark) is None:
        register(spark)
    time = None if as_of is None else _time(as_of)
    settings, env = sink_settings(TARGET_PART_BYTES), SystemEnv()
    loaded = []
    with PersistClient.open(location, settings=settings, env=env, create=False) as client:
        for view, (name, shard) in _wanted(client, namespace, names).items():
            latest = client.recent_upper(shard).newest_complete
            shown = time if time is not None else latest if latest >= 0 else None
            frame = TableShard(spark=spark, id=shard, location=location).frame(shown)
            loaded.append((frame, view, name, shard, shown))
    for frame, view, *_ in loaded:
        frame.createOrReplaceTempView(_quoted(view))
    return tuple(
        Attached(view=view if _PLAIN.fullmatch(view) else _quoted(view), name=name, shard=str(shard), as_of=shown)
        for _, view, name, shard, shown in loaded
    )


def _location(spark: SparkSession, blob: str | None, consensus: str | None) -> Location:
    known = stores_of(spark) or {}
    blob, consensus = blob or known.get("blob"), consensus or known.get("consensus")
    if blob is None or consensus is None:
        raise InvalidUsage(
            "attach needs the addresses of the stores: give blob and consensus here, or once for the session with "
            "register(spark, blob=..., consensus=...)"
        )
    return Location(blob=blob, consensus=consensus)


def _time(as_of: int | str | datetime) -> int:
    """The time that all views show. A relative time is resolved once, so that all views show the same moment."""
    found = moment({"as_of": text_of(as_of)}, "as_of")
    assert found is not None
    return instant(found, SystemEnv().now_ms())


def _wanted(
    client: PersistClient, namespace: str | None, names: Iterable[str] | Mapping[str, str] | None
) -> dict[str, tuple[str, ShardId]]:
    """The shard of each view, and its name."""
    found: list[tuple[str, str, ShardId]] = []
    if names is None:
        found = [
            (owner.name, f"{owner.namespace}/{owner.name}", shard)
            for owner, shard in client.names()
            if (namespace is None or owner.namespace == namespace) and client.owner_of(shard) == owner
        ]
    else:
        if isinstance(names, str):
            raise InvalidUsage(
                f"names is a list of names, or a mapping from views to names, not the text {names[:64]!r}"
            )
        pairs = names.items() if isinstance(names, Mapping) else ((None, name) for name in names)
        for view, name in pairs:
            shard = _named(client, name, namespace)
            owner = client.owner_of(shard)
            shown = str(shard) if owner is None else f"{owner.namespace}/{owner.name}"
            found.append((view or (name if owner is None else owner.name), shown, shard))
    if not found:
        where = "this store" if namespace is None else f"namespace {namespace}"
        raise InvalidUsage(f"there is nothing to attach: {where} names no shards")
    if len(found) > VIEWS_MAX:
        raise InvalidUsage(f"{len(found)} shards are more than the {VIEWS_MAX} that one call attaches: give names")
    return _by_view(sorted(found))


def _named(client: PersistClient, name: str, namespace: str | None) -> ShardId:
    """The shard of a name or an id."""
    if ShardId.is_valid(name):
        return ShardId(name)
    return client.shard_named(name if namespace is None else f"{namespace}/{name}")


def _by_view(found: Sequence[tuple[str, str, ShardId]]) -> dict[str, tuple[str, ShardId]]:
    views: dict[str, tuple[str, ShardId]] = {}
    spelled: dict[str, str] = {}
    for view, name, shard in found:
        if not view or _QUOTE in view:
            raise InvalidUsage(
                f"{name} cannot be attached as {view[:64]!r}, which no view can be named: give names={{VIEW: {name!r}}}"
            )
        same = spelled.setdefault(view.lower(), name)
        if same != name or view in views:
            raise InvalidUsage(
                f"{same} and {name} would both be the view {view}: give a namespace, or a mapping from views to names"
            )
        views[view] = (name, shard)
    return views


def _quoted(view: str) -> str:
    return f"{_QUOTE}{view}{_QUOTE}"
