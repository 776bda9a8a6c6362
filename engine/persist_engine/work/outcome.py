"""Results of maintenance: one frozen value for each kind, and the flat report that pods and operators read.

SKIPPED (nothing was due) and CONFLICT (another process was faster; the output was deleted again) are normal results,
not errors.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from persist_engine.base.versioned import SeqNo
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.spine.flat import SpineId
from persist_engine.shard.applier import NO_MAINTENANCE


class Ending(enum.StrEnum):
    """The ways in which work ends."""

    SUCCEEDED = "Succeeded"
    SKIPPED = "Skipped"
    CONFLICT = "Conflict"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The fields that every kind has. `seqno` is the version on which the work was based. `deletion_record` is the partial key of the last
    record that names the deleted blobs (work.deletions); "" if there is none. `maintenance` is the work that the commit left.
    """

    type: ClassVar[str] = ""
    shard_id: ShardId
    seqno: SeqNo
    ending: Ending
    message: str
    duration_ms: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    blobs_deleted: int = 0
    deletion_record: str = ""
    maintenance: Maintenance = field(default=NO_MAINTENANCE)

    def to_json(self) -> dict[str, Any]:
        """The report. Every key is always present, with zero where it does not apply to the kind."""
        return {
            "type": self.type,
            "outcome": self.ending.value,
            "message": self.message,
            "shard_id": str(self.shard_id),
            "seqno": int(self.seqno),
            "duration_ms": self.duration_ms,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "blobs_deleted": self.blobs_deleted,
            "deletion_record": self.deletion_record,
            "diffs_truncated": 0,
            "requests": 0,
            "applied": 0,
            "rows_before": 0,
            "rows_after": 0,
        } | self._own()

    def _own(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RollupOutcome(Outcome):
    """`key` is the partial key of the linked rollup."""

    type: ClassVar[str] = "Rollup"
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOutcome(Outcome):
    """`truncated_to` is the earliest live version after this run, as far as it saw."""

    type: ClassVar[str] = "GC"
    truncated_to: SeqNo | None = None
    diffs_truncated: int = 0
    rollups_removed: int = 0

    def _own(self) -> dict[str, Any]:
        return {"diffs_truncated": self.diffs_truncated}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactOutcome(Outcome):
    """The result of one request, or the sum of several. `rows_*` count the rows of the inputs, as state bounds them,
    and of the output.
    """

    type: ClassVar[str] = "Compaction"
    id: SpineId | None = None
    requests: int = 1
    applied: int = 0
    rows_before: int = 0
    rows_after: int = 0

    def _own(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "applied": self.applied,
            "rows_before": self.rows_before,
            "rows_after": self.rows_after,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome(Outcome):
    """What a verification found. The run succeeded when it could check, whatever it found; `verdict` says what that was."""

    type: ClassVar[str] = "Verify"
    verdict: Literal["Verified", "MissingBlobs", "Corrupt"]
    mode: Literal["Metadata", "Full"]
    blobs: int = 0
    missing_blobs: int = 0
    errors: int = 0
    warnings: int = 0

    def _own(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "mode": self.mode,
            "blobs": self.blobs,
            "missing_blobs": self.missing_blobs,
            "errors": self.errors,
            "warnings": self.warnings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanOutcome(Outcome):
    """The orphans that are left: blobs that no version will ever name. `is_complete` is false when the scan stopped at the limit of
    deletes; then at least this many are left.
    """

    type: ClassVar[str] = "OrphanScan"
    orphan_blobs: int
    orphan_bytes: int
    is_complete: bool

    def _own(self) -> dict[str, Any]:
        return {
            "orphan_blobs": self.orphan_blobs,
            "orphan_bytes": self.orphan_bytes,
            "complete": self.is_complete,
        }


#: How far the reclaiming of a shard got. Held: readers hold it, and nothing was deleted. Incomplete: another run must continue.
Reclaimed = Literal["Reclaimed", "NotOwned", "NoShard", "Held", "Incomplete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimOutcome(Outcome):
    """The progress of reclaiming a shard."""

    type: ClassVar[str] = "Reclaim"
    verdict: Reclaimed

    def _own(self) -> dict[str, Any]:
        return {"verdict": self.verdict}


def summary(kind: str, shard_id: ShardId, seqno: SeqNo, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One report for a run with the results `outcomes`, all of `kind`. Adds up their numbers. The run succeeded if any of
    the results did.
    """
    if len(outcomes) == 1:
        return outcomes[0].to_json()
    endings = {outcome.ending for outcome in outcomes}
    ending = next((known for known in (Ending.SUCCEEDED, Ending.CONFLICT) if known in endings), Ending.SKIPPED)
    message = f"{len(outcomes)} done" if outcomes else "nothing was due"
    total = Outcome(shard_id=shard_id, seqno=seqno, ending=ending, message=message).to_json() | {"type": kind}
    for outcome in outcomes:
        for name, value in outcome.to_json().items():
            if name == "deletion_record":
                total[name] = value or total[name]
            elif name not in {"type", "outcome", "message", "shard_id", "seqno"}:
                total[name] += value
    return total


def failure_report(kind: str, shard_id: str, message: str, *, duration_ms: int) -> dict[str, Any]:
    """The report of work that failed with an error. Readers see nothing of unfinished work. `shard_id` is a name if no id was found."""
    common = Outcome(
        shard_id=cast(ShardId, shard_id), seqno=SeqNo(0), ending=Ending.FAILED, message=message, duration_ms=duration_ms
    )
    return common.to_json() | {"type": kind}
