"""Durable, versioned, time-varying collections of updates ((key, value), time, diff).

The public names. They load when they are first used, so that `persist --help` needs no Arrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from persist_engine.base.version import APPLIER_VERSION

if TYPE_CHECKING:
    from persist_engine.base.env import Env as Env
    from persist_engine.base.env import SeededEnv as SeededEnv
    from persist_engine.base.env import SystemEnv as SystemEnv
    from persist_engine.base.settings import Settings as Settings
    from persist_engine.client.client import PersistClient as PersistClient
    from persist_engine.client.location import Location as Location
    from persist_engine.client.read.changes import Changes as Changes
    from persist_engine.client.read.handle import ReadHandle as ReadHandle
    from persist_engine.client.read.leased import LeasedPart as LeasedPart
    from persist_engine.client.read.snapshot import SinceAhead as SinceAhead
    from persist_engine.client.since import SinceHandle as SinceHandle
    from persist_engine.client.write.batch import Batch as Batch
    from persist_engine.client.write.batch import BatchBuilder as BatchBuilder
    from persist_engine.client.write.handle import WriteHandle as WriteHandle
    from persist_engine.client.write.outcomes import Appended as Appended
    from persist_engine.client.write.outcomes import ProgressMismatch as ProgressMismatch
    from persist_engine.client.write.outcomes import UpperMismatch as UpperMismatch
    from persist_engine.dataflow.open import open_sink as open_sink
    from persist_engine.dataflow.open import open_upsert as open_upsert
    from persist_engine.dataflow.sink.handle import Sink as Sink
    from persist_engine.dataflow.sink.handle import SinkStatus as SinkStatus
    from persist_engine.dataflow.upsert.follow import Hydration as Hydration
    from persist_engine.dataflow.upsert.handle import Upserted as Upserted
    from persist_engine.dataflow.upsert.handle import UpsertHandle as UpsertHandle
    from persist_engine.flow.refresh import Refresh as Refresh
    from persist_engine.model.commands import RetentionSet as RetentionSet
    from persist_engine.model.commands import SchemaEvolved as SchemaEvolved
    from persist_engine.model.frontier import Antichain as Antichain
    from persist_engine.model.ids import CriticalReaderId as CriticalReaderId
    from persist_engine.model.ids import ShardId as ShardId
    from persist_engine.model.inspection import Inspection as Inspection
    from persist_engine.rows.schema import Schema as Schema
    from persist_engine.shard.schemas import SchemaIncompatible as SchemaIncompatible

__version__ = APPLIER_VERSION

_MODULES = {
    "Antichain": "model.frontier",
    "Appended": "client.write.outcomes",
    "Batch": "client.write.batch",
    "BatchBuilder": "client.write.batch",
    "Changes": "client.read.changes",
    "CriticalReaderId": "model.ids",
    "Env": "base.env",
    "Hydration": "dataflow.upsert.follow",
    "Inspection": "model.inspection",
    "LeasedPart": "client.read.leased",
    "Location": "client.location",
    "PersistClient": "client.client",
    "ProgressMismatch": "client.write.outcomes",
    "ReadHandle": "client.read.handle",
    "Refresh": "flow.refresh",
    "RetentionSet": "model.commands",
    "Schema": "rows.schema",
    "SchemaEvolved": "model.commands",
    "SchemaIncompatible": "shard.schemas",
    "SeededEnv": "base.env",
    "Settings": "base.settings",
    "ShardId": "model.ids",
    "SinceAhead": "client.read.snapshot",
    "SinceHandle": "client.since",
    "Sink": "dataflow.sink.handle",
    "SinkStatus": "dataflow.sink.handle",
    "SystemEnv": "base.env",
    "UpperMismatch": "client.write.outcomes",
    "UpsertHandle": "dataflow.upsert.handle",
    "Upserted": "dataflow.upsert.handle",
    "WriteHandle": "client.write.handle",
    "open_sink": "dataflow.open",
    "open_upsert": "dataflow.open",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605 - the table is the list


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
