"""All commands on a shard's state and all answers, as plain values.

An answer that depends on a race (`UpperMismatch`, `OpaqueMismatch`) is a value. For misuse, the transition raises InvalidUsage.
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
    """Append `batch` iff its lower equals the upper. `token` identifies the call, so that a repetition finds its own success.

    `progress` (sink id, how far its source was read) commits with the data iff `state.is_expected` is true of the stored
    progress and `expected_progress`. A claim on a compaction lapses at the age `claim_ms`. If the append creates no merge work,
    it takes over `claim_percent` / 100 unclaimed compactions; these include compact batches whose parts were written by code
    older than `claim_min_version`. `commit_info` holds opaque bytes that the log stores with the batch.
    """

    batch: HollowBatch
    writer_id: WriterId
    token: IdempotencyToken
    debug: DebugInfo
    lease_ms: int
    progress: tuple[str, SourceProgress] | None = None
    expected_progress: bytes | SourceProgress | None = None
    commit_info: bytes | None = None
    inline_total_bytes_max: int
    claim_ms: int
    claim_percent: int = 100
    claim_min_version: str | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch is appended. `requests` are claimed for the caller."""

    requests: tuple[MergeReq, ...] = ()


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """An earlier attempt with this token succeeded."""


@dataclass(frozen=True, slots=True)
class UpperMismatch:
    """The upper is not the expected one. `writer_upper` is the upper of this writer's last append. It shows whether an earlier
    attempt with unknown outcome can have succeeded.
    """

    current: Antichain
    expected: Antichain
    writer_upper: Antichain


@dataclass(frozen=True, slots=True)
class StagedTooEarly:
    """A part of the batch was staged before the shard's staging floor, so its blob may already be deleted."""

    key: str
    floor_ms: int


@dataclass(frozen=True, slots=True)
class RaiseStagingFloor:
    """Refuse, from now on, to link any part staged before `floor_ms`."""

    floor_ms: int


@dataclass(frozen=True, slots=True)
class StagingFloor:
    """The floor in force. It never decreases."""

    floor_ms: int


@dataclass(frozen=True, slots=True)
class InlineBackpressure:
    """State holds too much inline data: flush inline parts to blob and try again."""


@dataclass(frozen=True, slots=True)
class ProgressMismatch:
    """Another process committed progress of this sink. `current` is the stored progress."""

    current: SourceProgress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterLeasedReader:
    """Hold since and this version from now on. With `since_from_critical`, hold the meet of the critical readers' sinces instead."""

    reader_id: LeasedReaderId
    lease_ms: int
    debug: DebugInfo
    since_from_critical: bool = False


@dataclass(frozen=True, slots=True)
class Registered:
    """What the reader holds. On a tombstone it holds nothing, and `since` is empty."""

    since: Antichain
    seqno: SeqNo


@dataclass(frozen=True, slots=True)
class HeartbeatLeasedReader:
    """Renew the lease."""

    reader_id: LeasedReaderId


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """Whether the reader still existed."""

    existed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DowngradeSince:
    """Release times before `new_since` and versions before `outstanding_seqno` (None: all versions before the new one).
    `is_heartbeat` marks an automatic call: the shard's since moves only if the reader's since does.
    """

    reader_id: LeasedReaderId
    outstanding_seqno: SeqNo | None
    new_since: Antichain
    is_heartbeat: bool = False


@dataclass(frozen=True, slots=True)
class SinceDowngraded:
    """The reader's since after the command; empty if the reader is gone."""

    since: Antichain


@dataclass(frozen=True, slots=True)
class ExpireLeasedReader:
    """Remove the reader. Since does not move."""

    reader_id: LeasedReaderId


@dataclass(frozen=True, slots=True)
class ExpireWriter:
    """Remove the writer and its token."""

    writer_id: WriterId


@dataclass(frozen=True, slots=True)
class ExpireCriticalReader:
    """Remove the reader. Since does not move."""

    reader_id: CriticalReaderId


@dataclass(frozen=True, slots=True)
class Expired:
    """Whether the reader or writer existed."""

    existed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterCriticalReader:
    """Hold since until the reader is downgraded or expired. An existing reader keeps its since and opaque."""

    reader_id: CriticalReaderId
    opaque: bytes
    debug: DebugInfo


@dataclass(frozen=True, slots=True)
class CriticalRegistered:
    """The reader's since and its fencing token."""

    since: Antichain
    opaque: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndDowngradeSince:
    """Set since and opaque iff the opaque equals `expected_opaque`. If since would move back, it stays, but the opaque is still
    replaced.
    """

    reader_id: CriticalReaderId
    expected_opaque: bytes
    new_opaque: bytes
    new_since: Antichain


@dataclass(frozen=True, slots=True)
class CriticalDowngraded:
    """The reader's since after the command."""

    since: Antichain


@dataclass(frozen=True, slots=True)
class OpaqueMismatch(Refusal):
    """A newer owner holds this critical reader."""

    opaque: bytes
    since: Antichain

    @property
    def meaning(self) -> str:
        """See Refusal."""
        return f"nothing was moved, another owner has taken over this critical reader, whose since is {self.since}"


@dataclass(frozen=True, slots=True)
class AddRollup:
    """Link a rollup written for `seqno`."""

    seqno: SeqNo
    rollup: HollowRollup


@dataclass(frozen=True, slots=True)
class RollupAdded:
    """Whether the rollup is linked. If no attempt linked it, its blob is garbage."""

    applied: bool


@dataclass(frozen=True, slots=True)
class RemoveRollups:
    """Unlink these rollups, if state still names exactly them, and all older ones. Ends the claim on GC. The caller must have
    truncated the log past them.
    """

    rollups: tuple[tuple[SeqNo, HollowRollup], ...]


@dataclass(frozen=True, slots=True)
class RollupsRemoved:
    """The seqnos of the rollups that were unlinked, older ones included."""

    seqnos: tuple[SeqNo, ...]


@dataclass(frozen=True, slots=True)
class ApplyMergeRes:
    """Swap in the result of a compaction."""

    res: MergeRes


@dataclass(frozen=True, slots=True)
class MergeApplied:
    """The outcome. If no attempt applied the result, its blobs are garbage."""

    outcome: MergeOutcome


@dataclass(frozen=True, slots=True)
class RegisterSchema:
    """Find this schema, or register it as the shard's first."""

    pair: SchemaPair


@dataclass(frozen=True, slots=True)
class SchemaRegistered:
    """The schema's id; None if the shard has other schemas but not this one."""

    id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndEvolveSchema:
    """Make `pair` the newest schema iff the newest has `expected_id`. The caller ensures that `pair` may succeed that schema.
    The schema of an id never changes.
    """

    expected_id: int
    pair: SchemaPair


@dataclass(frozen=True, slots=True)
class SchemaEvolved:
    """The schema is the newest and has this id."""

    id: int


@dataclass(frozen=True, slots=True)
class SchemaIdMismatch:
    """Another schema is the newest. None means that the shard accepts no schemas any more."""

    current_id: int | None


@dataclass(frozen=True, slots=True)
class SpineExert:
    """Advance merges as if `fuel` updates had been pushed, so that merges complete in a shard without writes, too."""

    fuel: int


@dataclass(frozen=True, slots=True)
class Exerted:
    """The merge requests that fell due, claimed for the caller."""

    requests: tuple[MergeReq, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCompactions:
    """Take over up to `max_requests` compactions, oldest first, that have no claim younger than `claim_ms`. For
    `claim_min_version`, see CompareAndAppend. With `max_bytes`, leave out each one whose inputs would bring the total over this limit.
    """

    max_requests: int
    claim_ms: int
    claim_min_version: str | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CompactionsClaimed:
    """The compactions, claimed for the caller."""

    requests: tuple[MergeReq, ...] = ()


@dataclass(frozen=True, slots=True)
class SetRetention:
    """Keep the newest `retain_ms` of times distinguishable from now on, whatever readers release. With None, only readers hold since."""

    retain_ms: int | None


@dataclass(frozen=True, slots=True)
class RetentionSet:
    """The retention in force (None: none) and the shard's since. Times that since has passed do not come back."""

    retain_ms: int | None
    since: Antichain


@dataclass(frozen=True, slots=True)
class BecomeTombstone:
    """Take one bounded step towards an empty tombstone. Repeat until a step makes no progress."""


@dataclass(frozen=True, slots=True)
class TombstoneStep:
    """`progressed`: this step changed something. `finalized`: the shard is a tombstone without data."""

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
    """Commit `state`, then return `answer`."""

    state: ShardState
    answer: Answer


@dataclass(frozen=True, slots=True)
class Refused:
    """Return `answer`. There is nothing to commit."""

    answer: Answer
