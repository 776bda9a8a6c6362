"""Everything that may be asked of a shard's state, and everything it may answer. Plain values.

An answer that depends on a race (`UpperMismatch`, `OpaqueMismatch`) is a value; misuse raises InvalidUsage from the
transition.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.refusal import Refusal
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowBatch, HollowRollup
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, IdempotencyToken, LeasedReaderId, WriterId
from persist_engine.model.spine.trace import MergeOutcome, MergeReq, MergeRes
from persist_engine.model.state import DebugInfo, SchemaPair, ShardState, SourceProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndAppend:
    """Append `batch` iff the upper is its lower. `token` names the call: a repetition finds that it was already done.

    `progress` (sink id, how far its source was read) is committed with the data iff the stored token is
    `expected_progress` (None: none is stored). `claim_ms`: a claimed compaction older than this may be claimed again;
    `claim_percent` / 100: how many of those nobody is at an append takes over that makes no work itself;
    `claim_min_version`: those with parts of older code too, although they are compact.
    """

    batch: HollowBatch
    writer_id: WriterId
    token: IdempotencyToken
    debug: DebugInfo
    lease_ms: int
    progress: tuple[str, SourceProgress] | None = None
    expected_progress: bytes | None = None
    inline_total_bytes_max: int
    claim_ms: int
    claim_percent: int = 100
    claim_min_version: str | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch is in; `requests` are claimed for the caller."""

    requests: tuple[MergeReq, ...] = ()


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """An earlier attempt with this token got through."""


@dataclass(frozen=True, slots=True)
class UpperMismatch:
    """The upper is elsewhere. `writer_upper` is that of this writer's last append: decides whether an earlier attempt
    whose end is unknown may have got through.
    """

    current: Antichain
    expected: Antichain
    writer_upper: Antichain


@dataclass(frozen=True, slots=True)
class StagedTooEarly:
    """A part of the batch was staged before the shard's floor: its blob may be deleted already."""

    key: str
    floor_ms: int


@dataclass(frozen=True, slots=True)
class RaiseStagingFloor:
    """From now on link no part that was staged before `floor_ms`."""

    floor_ms: int


@dataclass(frozen=True, slots=True)
class StagingFloor:
    """The floor that stands: it never sinks."""

    floor_ms: int


@dataclass(frozen=True, slots=True)
class InlineBackpressure:
    """State holds too much data already: flush inline parts to blob and try again."""


@dataclass(frozen=True, slots=True)
class ProgressMismatch:
    """Somebody else committed progress of this sink: `current` is what stands."""

    current: SourceProgress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterLeasedReader:
    """Hold since and this very version from now on. `since_from_critical`: hold at the critical readers' meet
    instead.
    """

    reader_id: LeasedReaderId
    lease_ms: int
    debug: DebugInfo
    since_from_critical: bool = False


@dataclass(frozen=True, slots=True)
class Registered:
    """What is held. On a tombstone nothing is, and `since` is empty."""

    since: Antichain
    seqno: SeqNo


@dataclass(frozen=True, slots=True)
class HeartbeatLeasedReader:
    """Renew the lease."""

    reader_id: LeasedReaderId


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """Whether the reader was still there."""

    existed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DowngradeSince:
    """Let go of times before `new_since` and of versions before `outstanding_seqno` (None: of all before the new
    one). `is_heartbeat`: nobody asked for it; the shard's since stays unless the reader's moves.
    """

    reader_id: LeasedReaderId
    outstanding_seqno: SeqNo | None
    new_since: Antichain
    is_heartbeat: bool = False


@dataclass(frozen=True, slots=True)
class SinceDowngraded:
    """The reader's since now; empty when the reader is gone."""

    since: Antichain


@dataclass(frozen=True, slots=True)
class ExpireLeasedReader:
    """Remove it; since stays."""

    reader_id: LeasedReaderId


@dataclass(frozen=True, slots=True)
class ExpireWriter:
    """Remove it: its token is forgotten."""

    writer_id: WriterId


@dataclass(frozen=True, slots=True)
class ExpireCriticalReader:
    """Remove it; since stays."""

    reader_id: CriticalReaderId


@dataclass(frozen=True, slots=True)
class Expired:
    """Whether there was something to remove."""

    existed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterCriticalReader:
    """Hold since until told otherwise. An existing one keeps its since and opaque."""

    reader_id: CriticalReaderId
    opaque: bytes
    debug: DebugInfo


@dataclass(frozen=True, slots=True)
class CriticalRegistered:
    """What it holds, and its fencing token."""

    since: Antichain
    opaque: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndDowngradeSince:
    """Move since and opaque iff the opaque is the expected one. A since that would step back stays, the opaque still
    moves.
    """

    reader_id: CriticalReaderId
    expected_opaque: bytes
    new_opaque: bytes
    new_since: Antichain


@dataclass(frozen=True, slots=True)
class CriticalDowngraded:
    """The reader's since now."""

    since: Antichain


@dataclass(frozen=True, slots=True)
class OpaqueMismatch(Refusal):
    """Somebody newer owns this reader."""

    opaque: bytes
    since: Antichain

    @property
    def meaning(self) -> str:
        """See Refusal."""
        return f"nothing was moved, another owner has taken over this critical reader, whose since is {self.since}"


@dataclass(frozen=True, slots=True)
class AddRollup:
    """Link a rollup that was written for `seqno`."""

    seqno: SeqNo
    rollup: HollowRollup


@dataclass(frozen=True, slots=True)
class RollupAdded:
    """Whether it is linked. If it was never, over all attempts, its blob is garbage."""

    applied: bool


@dataclass(frozen=True, slots=True)
class RemoveRollups:
    """Unlink these, where they still are what is named, and all that are older; ends the claim on GC. The caller owes that
    the log begins past them.
    """

    rollups: tuple[tuple[SeqNo, HollowRollup], ...]


@dataclass(frozen=True, slots=True)
class RollupsRemoved:
    """Those that were there, or older."""

    seqnos: tuple[SeqNo, ...]


@dataclass(frozen=True, slots=True)
class ApplyMergeRes:
    """Swap in the result of a compaction."""

    res: MergeRes


@dataclass(frozen=True, slots=True)
class MergeApplied:
    """What became of it. If it was never applied, over all attempts, its blobs are garbage."""

    outcome: MergeOutcome


@dataclass(frozen=True, slots=True)
class RegisterSchema:
    """Find this schema, or make it the shard's first."""

    pair: SchemaPair


@dataclass(frozen=True, slots=True)
class SchemaRegistered:
    """Its id; None when the shard has others and this is none of them."""

    id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndEvolveSchema:
    """Make `pair` the newest schema iff the newest is `expected_id`. Whether it may succeed that one is the caller's to
    know: what an id names never changes.
    """

    expected_id: int
    pair: SchemaPair


@dataclass(frozen=True, slots=True)
class SchemaEvolved:
    """The schema is the newest, under this id."""

    id: int


@dataclass(frozen=True, slots=True)
class SchemaIdMismatch:
    """The newest schema is another; None when the shard takes none any more."""

    current_id: int | None


@dataclass(frozen=True, slots=True)
class SpineExert:
    """Move merges along as if `fuel` updates had been pushed, so that a shard nobody writes ripens too."""

    fuel: int


@dataclass(frozen=True, slots=True)
class Exerted:
    """Requests that came of it, claimed for the caller."""

    requests: tuple[MergeReq, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCompactions:
    """Take over up to `max_requests` compactions, oldest first, that nobody claimed within `claim_ms`.
    `claim_min_version`: see CompareAndAppend.
    """

    max_requests: int
    claim_ms: int
    claim_min_version: str | None = None


@dataclass(frozen=True, slots=True)
class CompactionsClaimed:
    """They are the caller's now."""

    requests: tuple[MergeReq, ...] = ()


@dataclass(frozen=True, slots=True)
class SetRetention:
    """From now on keep the newest `retain_ms` of times apart, whatever readers let go of; None: only what readers hold."""

    retain_ms: int | None


@dataclass(frozen=True, slots=True)
class RetentionSet:
    """What is retained now, None without retention, and the shard's since: what it had passed does not come back."""

    retain_ms: int | None
    since: Antichain


@dataclass(frozen=True, slots=True)
class BecomeTombstone:
    """One bounded step towards an empty tombstone; repeat until nothing progresses."""


@dataclass(frozen=True, slots=True)
class TombstoneStep:
    """`progressed`: this step changed something. `finalized`: a tombstone without data."""

    finalized: bool
    progressed: bool


Command = (
    CompareAndAppend
    | RegisterLeasedReader
    | HeartbeatLeasedReader
    | DowngradeSince
    | ExpireLeasedReader
    | ExpireWriter
    | ExpireCriticalReader
    | RegisterCriticalReader
    | CompareAndDowngradeSince
    | AddRollup
    | RemoveRollups
    | ApplyMergeRes
    | RegisterSchema
    | CompareAndEvolveSchema
    | SpineExert
    | ClaimCompactions
    | RaiseStagingFloor
    | SetRetention
    | BecomeTombstone
)

Answer = (
    Appended
    | AlreadyCommitted
    | UpperMismatch
    | InlineBackpressure
    | ProgressMismatch
    | StagedTooEarly
    | StagingFloor
    | Registered
    | HeartbeatSeen
    | SinceDowngraded
    | Expired
    | CriticalRegistered
    | CriticalDowngraded
    | OpaqueMismatch
    | RollupAdded
    | RollupsRemoved
    | MergeApplied
    | SchemaRegistered
    | SchemaEvolved
    | SchemaIdMismatch
    | Exerted
    | CompactionsClaimed
    | RetentionSet
    | TombstoneStep
)


@dataclass(frozen=True, slots=True)
class Applied:
    """Commit `state`, then give `answer`."""

    state: ShardState
    answer: Answer


@dataclass(frozen=True, slots=True)
class Refused:
    """Give `answer`; there is nothing to commit."""

    answer: Answer
