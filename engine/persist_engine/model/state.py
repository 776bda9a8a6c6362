"""ShardState: the whole metadata of one shard at one seqno, and the records in it (spec 2.1).

Frozen: a transition makes a new state that shares everything it did not touch. Maps are `SharedMap`s, so a change costs what it
changes and `StateDiff.between` looks only at what changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from persist_engine.base.versioned import SeqNo, Tip
from persist_engine.model.batch import HollowRollup
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.model.ids import (
    SENTINEL_TOKEN,
    CriticalReaderId,
    IdempotencyToken,
    LeasedReaderId,
    ShardId,
    WriterId,
)
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.trace import Trace


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Who holds this, for people."""

    hostname: str
    purpose: str


@dataclass(frozen=True, slots=True)
class LeasedReader:
    """A reader that lapses. `seqno`: oldest version whose blobs it may still fetch; `since`: oldest time it may still ask for."""

    seqno: SeqNo
    since: Antichain
    last_heartbeat_ms: int
    lease_ms: int
    debug: DebugInfo


@dataclass(frozen=True, slots=True)
class CriticalReader:
    """A reader that never lapses. `opaque` fences: only who knows the current one may move `since`."""

    since: Antichain
    opaque: bytes
    debug: DebugInfo


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer's registration: its liveness and what makes its appends idempotent."""

    last_heartbeat_ms: int
    lease_ms: int
    debug: DebugInfo
    most_recent_write_token: IdempotencyToken = SENTINEL_TOKEN
    most_recent_write_upper: Antichain = MINIMUM


@dataclass(frozen=True, slots=True)
class SchemaPair:
    """A registered schema: the IPC-serialized Arrow schemas of key and val (codec.schema reads them)."""

    key: bytes
    val: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Maintenance somebody said they would do. `seqno` is what it was claimed for."""

    seqno: SeqNo
    start_ms: int


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far a sink has read its source, committed with its data: opaque to us, compared for equality only."""

    token: bytes
    upper: Antichain


@dataclass(frozen=True, slots=True)
class CodecNames:
    """Names of the codecs the shard was made with; a mismatch is refused on open. Kept in rollups only."""

    key: str
    val: str
    time: str = "u64"
    diff: str = "i64"


@dataclass(frozen=True, slots=True)
class ShardState:
    """Everything about a shard at `seqno`.

    Invariants (model.invariants checks them): `walltime_ms` strictly rises with seqno; `since` of the trace is never beyond a
    registered reader's since; batches tile [0, upper); `applier_version` is the highest that ever wrote.
    """

    applier_version: str
    shard_id: ShardId
    birth: bytes
    """Random, drawn when the log began: distinguishes this log from one that was wiped and written anew."""
    codecs: CodecNames
    seqno: SeqNo
    walltime_ms: int
    hostname: str
    last_gc_req: SeqNo = SeqNo(0)
    """Up to which version collection was last asked for; on a tombstone the version that made it one."""
    active_rollup: Claim | None = None
    active_gc: Claim | None = None
    rollups: SharedMap[SeqNo, HollowRollup] = field(default_factory=SharedMap)
    leased_readers: SharedMap[LeasedReaderId, LeasedReader] = field(default_factory=SharedMap)
    critical_readers: SharedMap[CriticalReaderId, CriticalReader] = field(default_factory=SharedMap)
    writers: SharedMap[WriterId, Writer] = field(default_factory=SharedMap)
    schemas: SharedMap[int, SchemaPair] = field(default_factory=SharedMap)
    progress: SharedMap[str, SourceProgress] = field(default_factory=SharedMap)
    trace: Trace = field(default_factory=Trace)
    staging_floor_ms: int | None = None
    """Parts whose ids tell an earlier time are never linked any more, so that the orphan scan may delete them."""
    tag: bytes = b""
    """That of the log's entry at `seqno`; the next entry tells it. Empty until the entry is encoded."""
    retain_ms: int | None = None
    """Retention: since stays so far behind upper at least, and follows it; None: only readers hold since."""

    @property
    def tip(self) -> Tip:
        """What the log that ends with it is known by."""
        return Tip(self.seqno, self.tag)
