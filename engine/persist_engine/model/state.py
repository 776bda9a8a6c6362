"""ShardState: all metadata of one shard at one seqno, and the records in it (spec 2.1).

States are frozen: a transition creates a new state that shares everything it did not touch. The maps are `SharedMap`s, so the
cost of an edit does not grow with the map, and `state_diff.between` inspects only what changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    """Describes the holder of a registration, for people."""

    hostname: str
    purpose: str


@dataclass(frozen=True, slots=True)
class LeasedReader:
    """A reader with a lease. `seqno` is the oldest version whose blobs it may still fetch, and `since` the oldest time it may read."""

    seqno: SeqNo
    since: Antichain
    last_heartbeat_ms: int
    lease_ms: int
    debug: DebugInfo


@dataclass(frozen=True, slots=True)
class CriticalReader:
    """A reader without a lease. `opaque` is its fencing token: moving `since` requires the current one."""

    since: Antichain
    opaque: bytes
    debug: DebugInfo


@dataclass(frozen=True, slots=True)
class FirstHold:
    """A critical reader that a new shard has from its first version on, so that no further commit is needed for it."""

    reader_id: CriticalReaderId
    opaque: bytes
    purpose: str


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer's registration: its lease, and the token that makes its appends idempotent."""

    last_heartbeat_ms: int
    lease_ms: int
    debug: DebugInfo
    most_recent_write_token: IdempotencyToken = SENTINEL_TOKEN
    most_recent_write_upper: Antichain = MINIMUM


@dataclass(frozen=True, slots=True)
class SchemaPair:
    """A registered schema: the IPC-serialized Arrow schemas of key and val (rows.schema reads them)."""

    key: bytes
    val: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim on maintenance work. `seqno` is the version that the work is for."""

    seqno: SeqNo
    start_ms: int


#: The entry of `progress` with the user's metadata of the last append that had any (spec 17.13). An append replaces it together with its
#: upper, so that each state diff shows the metadata of its own append and of no other.
COMMIT_INFO = "persist:commit_info"
#: The limit on this metadata. Every state, and so every rollup, holds one of these entries.
COMMIT_INFO_BYTES_MAX = 4096
#: The entry of `progress` with the columns for which new parts get Bloom filters (spec 17.14, codec.bloom).
FILTERED = "persist:filtered"
#: The entry of `progress` that names the clock of a table that does not use the wall clock (spec 17.15).
CLOCK = "persist:clock"
Clock = Literal["ms", "counter"]
"""The source of the times of a table's writes: the wall clock in milliseconds, or a counter of the writes."""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far a sink has read its source, committed with its data. The token is opaque; it is only compared for equality."""

    token: bytes
    upper: Antichain


def is_expected(stored: SourceProgress | None, expected: bytes | SourceProgress | None) -> bool:
    """Whether the stored progress is the one that an append expects. `expected` is its token (None: no progress is stored), or its token
    and upper.

    SUBTLE: a sink may store the same token again, with a greater upper. Only token and upper together show that the sink committed nothing
    in between.
    """
    if isinstance(expected, SourceProgress):
        return stored == expected
    return (None if stored is None else stored.token) == expected


@dataclass(frozen=True, slots=True)
class CodecNames:
    """Names of the codecs that the shard was created with. Opening with others is refused. Stored in rollups only."""

    key: str
    val: str
    time: str = "u64"
    diff: str = "i64"

    def __str__(self) -> str:
        return f"key {self.key}, value {self.val}, time {self.time}, diff {self.diff}"


@dataclass(frozen=True, slots=True)
class ShardState:
    """All metadata of a shard at `seqno`.

    Invariants, checked by model.invariants: `walltime_ms` rises strictly with seqno; the trace's since is never beyond a
    registered reader's since; batches tile [0, upper); `applier_version` is the highest version that ever wrote.
    """

    applier_version: str
    shard_id: ShardId
    birth: bytes
    """Random bytes, drawn when the log began. They distinguish this log from one that was wiped and written anew."""
    codecs: CodecNames
    seqno: SeqNo
    walltime_ms: int
    hostname: str
    last_gc_req: SeqNo = SeqNo(0)
    """The version up to which collection was last requested; on a tombstone, the version that made it one."""
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
    """Parts whose ids record an earlier time are never linked, so that the orphan scan may delete them."""
    tag: bytes = b""
    """The tag of the log entry at `seqno`, which the next entry records. Empty until the entry is encoded."""
    retain_ms: int | None = None
    """The retention: since stays at least this far behind upper, and follows it. With None, only readers hold since."""

    @property
    def tip(self) -> Tip:
        """The tip of a log that ends with this state's entry."""
        return Tip(self.seqno, self.tag)
