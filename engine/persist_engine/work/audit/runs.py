"""Verification and orphan scan as maintenance runs, each with one outcome that is small enough for the report of a pod.

A run that finds something wrong has still succeeded: its outcome says what it found. Only a run that could not check has failed.
"""

from __future__ import annotations

from typing import Literal

from persist_engine.base.errors import CorruptData, ForkedLog, InvariantViolated, MissingBlob
from persist_engine.base.versioned import SeqNo
from persist_engine.base.wording import counted, sized
from persist_engine.model.ids import ShardId
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.finding import Finding, FindingKind, Severity, Verification
from persist_engine.work.audit.orphans import OnListed, scan_orphans
from persist_engine.work.audit.verify import OnChecked, verify_shard
from persist_engine.work.outcome import Ending, OrphanOutcome, VerifyOutcome

VerifyMode = Literal["Metadata", "Full"]
#: The limits on the findings that the message of a run shows. `persist admin verify` lists all.
_SHOWN_MAX, _SHOWN_CHARACTERS = 3, 900


def verify_run(machine: Machine, mode: VerifyMode, *, on_checked: OnChecked | None = None) -> VerifyOutcome:
    """Verifies the shard. The mode `Metadata` reads the log and its rollups, and compares the listing of the store with what they name. The
    mode `Full` also reads every part. Changes nothing. Raises storage errors that outlast their retries.
    """
    started_s = machine.env.monotonic_s()
    found = verify_shard(machine, sample=1.0 if mode == "Full" else 0.0, on_checked=on_checked)
    duration_ms = round((machine.env.monotonic_s() - started_s) * 1000)
    return outcome_of(found, mode, seqno=machine.state.seqno, duration_ms=duration_ms)


def unreadable(shard_id: ShardId, error: CorruptData | InvariantViolated) -> Verification:
    """The verification of a shard whose newest state cannot be read."""
    found = Verification(shard_id)
    kind = FindingKind.CORRUPT
    if isinstance(error, MissingBlob):
        kind = FindingKind.MISSING_BLOB
    elif isinstance(error, ForkedLog):
        kind = FindingKind.LOG_FORKED
    found.error(kind, str(error.detail.get("key", shard_id)), str(error))
    return found


def outcome_of(found: Verification, mode: VerifyMode, *, seqno: SeqNo, duration_ms: int = 0) -> VerifyOutcome:
    """The outcome of a verification. If there are several kinds of errors, a missing blob determines the verdict."""
    errors = [one for one in found.findings if one.severity is Severity.ERROR]
    missing = len({one.key for one in errors if one.kind is FindingKind.MISSING_BLOB})
    return VerifyOutcome(
        shard_id=found.shard_id,
        seqno=seqno,
        ending=Ending.SUCCEEDED,
        message=_message(found, errors),
        duration_ms=duration_ms,
        bytes_read=found.bytes_read,
        verdict="MissingBlobs" if missing else "Corrupt" if errors else "Verified",
        mode=mode,
        blobs=found.rollups + found.parts,
        missing_blobs=missing,
        errors=len(errors),
        warnings=len(found.findings) - len(errors),
    )


def _message(found: Verification, errors: list[Finding]) -> str:
    if not errors:
        read = f", {counted(found.parts_read, 'part')} read" if found.parts_read else ""
        return f"{counted(found.versions, 'version')}, {counted(found.rollups + found.parts, 'blob')}{read}: nothing is missing or wrong"
    shown = "; ".join(f"{one.kind.value} {one.key}: {one.message}" for one in errors[:_SHOWN_MAX])
    more = f"; and {len(errors) - _SHOWN_MAX} more" if len(errors) > _SHOWN_MAX else ""
    return f"{shown[:_SHOWN_CHARACTERS]}{more}"


def orphan_run(
    machine: Machine, *, older_than_ms: int, max_deletes: int | None, on_listed: OnListed | None = None
) -> OrphanOutcome:
    """Counts the orphans that were staged more than `older_than_ms` ago. With `max_deletes`, deletes at most that many of them. Raises the
    errors of `scan_orphans`. A repetition continues where a run stopped or was killed.
    """
    started_s = machine.env.monotonic_s()
    found = scan_orphans(
        machine,
        older_than_ms=older_than_ms,
        commit=max_deletes is not None,
        max_deletes=max_deletes,
        on_listed=on_listed,
    )
    left, left_bytes = found.found - found.deleted, found.found_bytes - found.deleted_bytes
    message = f"{counted(left, 'orphan')} of {sized(left_bytes)} left in {counted(found.listed, 'blob')}"
    if max_deletes is not None:
        message += f", {found.deleted} deleted"
    if not found.is_complete:
        message += "; stopped at the limit of deletes"
    return OrphanOutcome(
        shard_id=machine.shard_id,
        seqno=machine.state.seqno,
        ending=Ending.SUCCEEDED,
        message=message,
        duration_ms=round((machine.env.monotonic_s() - started_s) * 1000),
        blobs_deleted=found.deleted,
        deletion_record=found.deletion_record,
        orphan_blobs=left,
        orphan_bytes=left_bytes,
        is_complete=found.is_complete,
    )
