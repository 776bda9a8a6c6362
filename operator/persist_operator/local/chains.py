"""Sinks that read shards: the order in which one `up` runs them, and the shard that each of them reads. Pure.

Without `--watch`, a sink that reads a shard waits until the sinks that write this shard have run. So after one `up` every shard is as it
would be after some time in a cluster. A sink that only compares (writeMode ReadOnly) reads the shard that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from persist_engine.model.ids import ShardId
from persist_engine.model.inspection import Inspection

from persist_operator.api.shard import Shard, StoreLocation
from persist_operator.api.sink import Sink
from persist_operator.local.objects import Document
from persist_operator.plan.observed import RESOLVED, Inspected, ShardView
from persist_operator.plan.shard_status import frontier_text
from persist_operator.settings import OperatorSettings

#: The writeMode of a sink that compares its input with its shard and writes nothing.
READ_ONLY = "ReadOnly"


def upstream_first(sinks: Iterable[Document]) -> list[Document]:
    """The sinks, each one after the sinks that write a shard that it reads. A ring of sinks begins with the first of them by name."""
    every = sorted(sinks, key=lambda one: str(one["metadata"]["name"]))
    ordered: list[Document] = []
    seen: set[str] = set()

    def put(sink: Document) -> None:
        if sink["metadata"]["name"] in seen:
            return
        seen.add(sink["metadata"]["name"])
        for writer in every:
            if written_by(writer) in read_by(sink):
                put(writer)
        ordered.append(sink)

    for sink in every:
        put(sink)
    return ordered


def written_by(sink: Mapping[str, Any]) -> str | None:
    """The name of the PersistShard that the sink writes; None when it writes none."""
    return None if _is_read_only(sink) else str(sink["spec"]["shardRef"]["name"])


def read_by(sink: Mapping[str, Any]) -> frozenset[str]:
    """The names of the PersistShards that the sink reads, as its input or for comparison with its input."""
    names = {(sink["spec"]["input"].get("shard") or {}).get("name")}
    if _is_read_only(sink):
        names.add(sink["spec"]["shardRef"]["name"])
    return frozenset(str(name) for name in names if name is not None)


def _is_read_only(sink: Mapping[str, Any]) -> bool:
    return bool(sink["spec"].get("writeMode") == READ_ONLY)


def with_news(found: Document | None, inspected: Inspected | None) -> Document | None:
    """The PersistShard with the frontiers that this pass read, because the status of a busy shard is older."""
    if found is None or not isinstance(inspected, Inspection):
        return found
    frontiers = {"since": frontier_text(inspected.since), "upper": frontier_text(inspected.upper)}
    return {**found, "status": {**(found.get("status") or {}), "frontiers": frontiers}}


def target_of(sink: Sink, found: Mapping[str, Any] | None, settings: OperatorSettings, *, busy: Set[str]) -> ShardView:
    """The view of the PersistShard `found` that the sink writes, or compares with its input. `busy`: see `input_of`."""
    name = sink.spec.shard_name
    if sink.spec.write_mode == READ_ONLY and name in busy:
        return _busy(name, "ShardBusy")
    return ShardView.of(name, None if found is None else Shard.of(found), settings)


def input_of(
    sink: Sink, found: Mapping[str, Any] | None, settings: OperatorSettings, *, busy: Set[str]
) -> ShardView | None:
    """The view of the shard that the sink reads; None when it reads none. `found` is the PersistShard of this name. Without one, the name
    may be the id of a shard in the default stores. `busy`: the shards that other sinks have yet to write in this `up`.
    """
    name = sink.spec.input_shard
    if name is None:
        return None
    if name in busy:
        return _busy(name, "InputBusy")
    default = settings.storage_profiles.get(settings.default_profile)
    if found is None and default is not None and ShardId.is_valid(name):
        location = StoreLocation(
            blob=default.blob,
            consensus=default.consensus,
            secret_name=default.secret_name,
            profile=settings.default_profile,
        )
        return ShardView(found=True, reason=RESOLVED, message=f"reads {name}", shard_id=name, location=location)
    shard = None if found is None else Shard.of(found)
    return ShardView.of_input(name, shard, settings, is_stream=sink.spec.mode == "Streaming")


def _busy(name: str, reason: str) -> ShardView:
    return ShardView(found=True, reason=reason, message=f"waits for the sinks that write PersistShard {name}")
