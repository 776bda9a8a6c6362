"""Durable, versioned, time-varying collections of updates ((key, value), time, diff).

This package exports the public names. Each loads when it is first used, so that `persist --help` needs no Arrow.
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
    from persist_engine.client.closing import close_shard as close_shard
    from persist_engine.client.closing import finalize_shard as finalize_shard
    from persist_engine.client.location import Location as Location
    from persist_engine.client.read.change_splits import ChangesSplit as ChangesSplit
    from persist_engine.client.read.changes import Changes as Changes
    from persist_engine.client.read.handle import ReadHandle as ReadHandle
    from persist_engine.client.read.leased import LeasedPart as LeasedPart
    from persist_engine.client.read.snapshot import SinceAhead as SinceAhead
    from persist_engine.client.read.snapshot import Snapshot as Snapshot
    from persist_engine.client.read.splits import SnapshotSplit as SnapshotSplit
    from persist_engine.client.since import SinceHandle as SinceHandle
    from persist_engine.client.tend import hold_since as hold_since
    from persist_engine.client.write.batch import Batch as Batch
    from persist_engine.client.write.batch import BatchBuilder as BatchBuilder
    from persist_engine.client.write.handle import WriteHandle as WriteHandle
    from persist_engine.client.write.joined import gathered as gathered
    from persist_engine.client.write.notes import StagingNotes as StagingNotes
    from persist_engine.client.write.outcomes import Appended as Appended
    from persist_engine.client.write.outcomes import AppendOutcome as AppendOutcome
    from persist_engine.client.write.outcomes import ProgressMismatch as ProgressMismatch
    from persist_engine.client.write.outcomes import UpperMismatch as UpperMismatch
    from persist_engine.codec.staging_note import StagingNote as StagingNote
    from persist_engine.dataflow.open import open_sink as open_sink
    from persist_engine.dataflow.open import open_upsert as open_upsert
    from persist_engine.dataflow.sink.handle import Sink as Sink
    from persist_engine.dataflow.sink.handle import SinkStatus as SinkStatus
    from persist_engine.dataflow.upsert.against import NotOneValue as NotOneValue
    from persist_engine.dataflow.upsert.against import updates_against as updates_against
    from persist_engine.dataflow.upsert.follow import Hydration as Hydration
    from persist_engine.dataflow.upsert.handle import Upserted as Upserted
    from persist_engine.dataflow.upsert.handle import UpsertHandle as UpsertHandle
    from persist_engine.dataflow.upsert.last_of_key import LastOfKeys as LastOfKeys
    from persist_engine.dataflow.upsert.last_of_key import Undecided as Undecided
    from persist_engine.dataflow.upsert.last_of_key import last_of_each_key as last_of_each_key
    from persist_engine.flow.refresh import Refresh as Refresh
    from persist_engine.model.batch import InlinePart as InlinePart
    from persist_engine.model.commands import RetentionSet as RetentionSet
    from persist_engine.model.commands import SchemaEvolved as SchemaEvolved
    from persist_engine.model.frontier import Antichain as Antichain
    from persist_engine.model.ids import CriticalReaderId as CriticalReaderId
    from persist_engine.model.ids import ShardId as ShardId
    from persist_engine.model.inspection import Inspection as Inspection
    from persist_engine.model.state import SourceProgress as SourceProgress
    from persist_engine.parts.aggregates import Aggregates as Aggregates
    from persist_engine.rows.columns import empty_struct as empty_struct
    from persist_engine.rows.errors_column import ERR as ERR
    from persist_engine.rows.errors_column import holds_errors as holds_errors
    from persist_engine.rows.errors_column import without_errors as without_errors
    from persist_engine.rows.filter import Filter as Filter
    from persist_engine.rows.predicate_text import filter_of as filter_of
    from persist_engine.rows.predicate_text import predicate_of as predicate_of
    from persist_engine.rows.projection import Projection as Projection
    from persist_engine.rows.schema import Schema as Schema
    from persist_engine.rows.updates import consolidate as consolidate
    from persist_engine.shard.schemas import SchemaIncompatible as SchemaIncompatible
    from persist_engine.storage.blob import Blob as Blob
    from persist_engine.storage.open import open_blob as open_blob
    from persist_engine.table.connect import connect as connect
    from persist_engine.table.database import Database as Database
    from persist_engine.table.feed import Change as Change
    from persist_engine.table.feed import ChangeFeed as ChangeFeed
    from persist_engine.table.pictures.info import TableInfo as TableInfo
    from persist_engine.table.pictures.listing import Listing as Listing
    from persist_engine.table.scan import Scan as Scan
    from persist_engine.table.table import Table as Table
    from persist_engine.table.writing import Written as Written
    from persist_engine.work.compact import compact_due as compact_due
    from persist_engine.work.merging import Merged as Merged
    from persist_engine.work.merging import MergeJob as MergeJob
    from persist_engine.work.merging import Merger as Merger
    from persist_engine.work.merging import MergeTask as MergeTask
    from persist_engine.work.metadata import METADATA_TABLES as METADATA_TABLES
    from persist_engine.work.outcome import Outcome as Outcome
    from persist_engine.work.outcome import failure_report as failure_report
    from persist_engine.work.outcome import summary as summary
    from persist_engine.work.repair.force import force_compaction as force_compaction
    from persist_engine.work.repair.force import force_gc as force_gc

__version__ = APPLIER_VERSION

#: The module of each public name.
MODULES = {
    "METADATA_TABLES": "work.metadata",
    "Aggregates": "parts.aggregates",
    "Antichain": "model.frontier",
    "AppendOutcome": "client.write.outcomes",
    "Appended": "client.write.outcomes",
    "Batch": "client.write.batch",
    "BatchBuilder": "client.write.batch",
    "Blob": "storage.blob",
    "Change": "table.feed",
    "ChangeFeed": "table.feed",
    "Changes": "client.read.changes",
    "ChangesSplit": "client.read.change_splits",
    "CriticalReaderId": "model.ids",
    "Database": "table.database",
    "ERR": "rows.errors_column",
    "Env": "base.env",
    "Filter": "rows.filter",
    "Hydration": "dataflow.upsert.follow",
    "InlinePart": "model.batch",
    "Inspection": "model.inspection",
    "LeasedPart": "client.read.leased",
    "LastOfKeys": "dataflow.upsert.last_of_key",
    "Listing": "table.pictures.listing",
    "Location": "client.location",
    "MergeJob": "work.merging",
    "MergeTask": "work.merging",
    "Merged": "work.merging",
    "Merger": "work.merging",
    "NotOneValue": "dataflow.upsert.against",
    "PersistClient": "client.client",
    "Outcome": "work.outcome",
    "ProgressMismatch": "client.write.outcomes",
    "Projection": "rows.projection",
    "ReadHandle": "client.read.handle",
    "Refresh": "flow.refresh",
    "RetentionSet": "model.commands",
    "Scan": "table.scan",
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
    "Snapshot": "client.read.snapshot",
    "SnapshotSplit": "client.read.splits",
    "SourceProgress": "model.state",
    "SystemEnv": "base.env",
    "StagingNote": "codec.staging_note",
    "StagingNotes": "client.write.notes",
    "Table": "table.table",
    "TableInfo": "table.pictures.info",
    "Undecided": "dataflow.upsert.last_of_key",
    "UpperMismatch": "client.write.outcomes",
    "UpsertHandle": "dataflow.upsert.handle",
    "Upserted": "dataflow.upsert.handle",
    "WriteHandle": "client.write.handle",
    "Written": "table.writing",
    "close_shard": "client.closing",
    "compact_due": "work.compact",
    "connect": "table.connect",
    "consolidate": "rows.updates",
    "empty_struct": "rows.columns",
    "failure_report": "work.outcome",
    "finalize_shard": "client.closing",
    "filter_of": "rows.predicate_text",
    "force_compaction": "work.repair.force",
    "force_gc": "work.repair.force",
    "gathered": "client.write.joined",
    "hold_since": "client.tend",
    "holds_errors": "rows.errors_column",
    "last_of_each_key": "dataflow.upsert.last_of_key",
    "open_blob": "storage.open",
    "open_sink": "dataflow.open",
    "open_upsert": "dataflow.open",
    "predicate_of": "rows.predicate_text",
    "summary": "work.outcome",
    "updates_against": "dataflow.upsert.against",
    "without_errors": "rows.errors_column",
}

__all__ = sorted(MODULES)  # noqa: PLE0605 - MODULES lists the names


def __getattr__(name: str) -> Any:
    module = MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
