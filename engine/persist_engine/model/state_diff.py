"""What changed between two states of a shard, and how to apply it (spec 8).

`between(a, b)` and `apply(a, between(a, b)) == b`. Structure is diffed as flat collections; a state shares with its successor
everything that did not change, and `between` looks only at what did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowBatch, HollowRollup
from persist_engine.model.flat_trace import SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, WriterId
from persist_engine.model.state import Claim, CriticalReader, LeasedReader, SchemaPair, SourceProgress, Writer

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Insert(Generic[K, V]):
    """`key` was absent and is now `to`."""

    key: K
    to: V


@dataclass(frozen=True, slots=True)
class Update(Generic[K, V]):
    """`key` was `old` and is now `to`."""

    key: K
    old: V
    to: V


@dataclass(frozen=True, slots=True)
class Delete(Generic[K, V]):
    """`key` was `old` and is now absent."""

    key: K
    old: V


FieldDiff = Insert[K, V] | Update[K, V] | Delete[K, V]


@dataclass(frozen=True, slots=True)
class StateDiff:
    """One version of the log. Scalars use the key None and Update (optional claims: Insert, Update or Delete). Tuples are
    sorted by key. `latest_rollup_key` is the new state's newest rollup, so that a reader of the last diff can start there."""

    applier_version: str
    seqno_from: SeqNo
    seqno_to: SeqNo
    walltime_ms: int
    latest_rollup_key: str
    hostname: tuple[FieldDiff[None, str], ...] = ()
    last_gc_req: tuple[FieldDiff[None, SeqNo], ...] = ()
    active_rollup: tuple[FieldDiff[None, Claim], ...] = ()
    active_gc: tuple[FieldDiff[None, Claim], ...] = ()
    rollups: tuple[FieldDiff[SeqNo, HollowRollup], ...] = ()
    leased_readers: tuple[FieldDiff[LeasedReaderId, LeasedReader], ...] = ()
    critical_readers: tuple[FieldDiff[CriticalReaderId, CriticalReader], ...] = ()
    writers: tuple[FieldDiff[WriterId, Writer], ...] = ()
    schemas: tuple[FieldDiff[int, SchemaPair], ...] = ()
    progress: tuple[FieldDiff[str, SourceProgress], ...] = ()
    since: tuple[FieldDiff[None, Antichain], ...] = ()
    legacy_batches: tuple[FieldDiff[HollowBatch, None], ...] = ()
    hollow_batches: tuple[FieldDiff[SpineId, HollowBatch], ...] = ()
    spine_batches: tuple[FieldDiff[SpineId, ThinSpineBatch], ...] = ()
    merges: tuple[FieldDiff[SpineId, ThinMerge], ...] = ()
