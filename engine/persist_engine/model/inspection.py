"""What a shard's state says of itself, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ReaderInfo:
    """One reader."""

    id: str
    kind: Literal["leased", "critical"]
    since: int | None
    seqno: int | None
    purpose: str
    hostname: str
    last_heartbeat_ms: int | None


@dataclass(frozen=True, kw_only=True)
class WriterInfo:
    """One writer."""

    id: str
    purpose: str
    hostname: str
    last_heartbeat_ms: int
    upper: int | None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything a person or the operator asks of a shard."""

    shard_id: str
    seqno: int
    seqno_since: int
    applier_version: str
    walltime_ms: int
    since: int | None
    upper: int | None
    key_schema: str
    val_schema: str
    batches: int
    spine_batches: int
    uncompacted_batches: int
    runs: int
    parts: int
    updates: int
    live_bytes: int
    inline_bytes: int
    rollups: int
    latest_rollup_seqno: int
    latest_rollup_bytes: int | None
    live_diffs: int
    earliest_seqno: int
    gc_seqnos: int
    compaction_requests: int
    compaction_bytes: int
    oldest_uncompacted_ms: int | None
    readers: tuple[ReaderInfo, ...]
    writers: tuple[WriterInfo, ...]
    progress: Mapping[str, int | None]
    is_tombstone: bool
