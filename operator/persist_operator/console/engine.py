"""Reads the stores of a shard for a page, through the bridge, whose deadline and breaker keep a dead store from holding up the pages.

Connects only to stores that the user of this process named. It never uses an address from a resource, because the author of the resource
could make the console connect anywhere with the user's credentials.
"""

from __future__ import annotations

from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage

from persist_operator.api.shard import StoreLocation
from persist_operator.bridge import Bridge, StoreBusy
from persist_operator.console.port import EngineView, Resource, Unseen
from persist_operator.console.texts import block, text
from persist_operator.plan.observed import ShardMissing, StoreFailure
from persist_operator.settings import LoopSettings, OperatorSettings

#: The longest log that is read for a page. It has a few MB.
LOG_VERSIONS_MAX = 5_000
#: How long a page waits for a store.
_DEADLINE_S = 5.0


def reading_bridge(env: Env, credentials_dir: str) -> Bridge:
    """A bridge for pages. It creates nothing and gives up early."""
    settings = OperatorSettings(loop=LoopSettings(store_deadline_seconds=_DEADLINE_S))
    return Bridge(settings, env=env, credentials_dir=credentials_dir, only_reads=True)


def engine_view(bridge: Bridge, location: StoreLocation, shard: Resource) -> EngineView | Unseen:
    """The shard of a resource in these stores. Every failure is a value."""
    shard_id = text(block(shard, "status").get("shardId"))
    if not shard_id:
        return Unseen("The resource has no shard yet: the operator creates it.")
    try:
        found = bridge.metadata(location, shard_id, log_max=LOG_VERSIONS_MAX)
    except (InvalidUsage, StoreBusy) as error:
        return Unseen(f"The stores could not be read: {error}.")
    match found:
        case StoreFailure():
            return Unseen(f"The stores could not be read: {found.message}.")
        case ShardMissing():
            return Unseen(f"The stores of this console have no shard {shard_id}.")
    seen, tables = found.inspection, found.tables
    omitted = f"The log has {seen.live_diffs:,} live versions, more than a page reads: versions and ages of holds are left out."
    return EngineView(
        since=seen.since,
        upper=seen.upper,
        batches=tables["batches"],
        versions=tables.get("versions"),
        holds=tables.get("holds"),
        omitted="" if "versions" in tables else omitted,
    )
