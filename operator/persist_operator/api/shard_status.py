"""The status of a PersistShard as a value.

Fields have the names that `kubectl explain persistshard.status` shows. Times are texts, as in the resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from persist_operator.api.blocks import Block
from persist_operator.api.names import MaintenanceKind

RunType = Literal["Compaction", "Rollup", "GC", "Verify", "OrphanScan"]
Outcome = Literal["Succeeded", "Failed", "Skipped", "Conflict"]
#: Where a compaction runs.
Runner = Literal["Pod", "Spark"]
#: The result of a verification.
Verdict = Literal["Verified", "MissingBlobs", "Corrupt"]
#: The reason that holds back a wanted compaction.
WaitReason = Literal["AwaitingApproval", "WindowClosed", "BudgetExhausted"]
#: The kinds of run that status.plan names.
WorkType = Literal["Compaction", "Rollup", "GC"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry(Block):
    """The identity of the log (`birth`), and its newest known entry."""

    birth: str | None = None
    seqno: int | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores(Block):
    """The stores' URLs for display, without credentials and parameters."""

    blob: str | None = None
    consensus: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddl(Block):
    """The schema of the stored shard as DDL."""

    key: str | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs(Block):
    """The codec names that the stored shard records."""

    key: str | None = None
    value: str | None = None
    time: str | None = None
    diff: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontiers(Block):
    """since and upper as texts; the empty text is a closed frontier."""

    since: str | None = None
    upper: str | None = None
    seqno: int | None = None
    upper_lag_seconds: int | None = None
    since_lag_seconds: int | None = None
    observed_time: str | None = None
    since_advanced_time: str | None = None
    upper_time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage(Block):
    """Sizes and counts from the shard's state."""

    batches: int | None = None
    uncompacted_batches: int | None = None
    runs: int | None = None
    parts: int | None = None
    updates: int | None = None
    live_bytes: int | None = None
    amplification_percent: int | None = None
    inline_bytes: int | None = None
    rollups: int | None = None
    latest_rollup_seqno: int | None = None
    live_diffs: int | None = None
    missing_blobs: int | None = None
    orphan_blobs: int | None = None
    orphan_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(Block):
    """A reader that holds since back. `held_from`: when the operator first saw it hold this since."""

    id: str | None = None
    purpose: str | None = None
    kind: str | None = None
    host: str | None = None
    since: str | None = None
    held_from: str | None = None
    held_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds(Block):
    """Counts of readers and writers, and the readers that hold since back."""

    readers: int | None = None
    writers: int | None = None
    blocking: tuple[Holder, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Debt(Block):
    """Maintenance that is outstanding."""

    compaction_bytes: int | None = None
    gc_seqnos: int | None = None
    oldest_uncompacted_seconds: int | None = None
    deadline_time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep(Block):
    """Maintenance of one kind. `job_name` is the newest run, `settled_job` the newest ended run, `planned_bytes` the estimate of the newest
    compaction. `wait_reason` is the reason for the wait until `next_run_time`; without one, it is the wait after the last run.
    """

    last_attempt_time: str | None = None
    last_success_time: str | None = None
    last_result: Outcome | None = None
    last_reason: str | None = None
    last_duration_seconds: int | None = None
    next_run_time: str | None = None
    wait_reason: WaitReason | None = None
    consecutive_failures: int | None = None
    last_seqno: int | None = None
    retry: int | None = None
    job_name: str | None = None
    runner: Runner | None = None
    planned_bytes: int | None = None
    settled_job: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Block):
    """The result of the last verification that could look."""

    verdict: Verdict | None = None
    mode: Literal["Metadata", "Full"] | None = None
    time: str | None = None
    errors: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion(Block):
    """The progress of the resource's deletion. `job_name` is the newest run, `settled_job` the newest ended run."""

    attempt: int | None = None
    job_name: str | None = None
    last_attempt_time: str | None = None
    settled_job: str | None = None
    next_attempt_time: str | None = None
    consecutive_failures: int | None = None
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspections(Block):
    """Inspections of a shard on inline storage. `job_name` is the newest inspection, `settled_job` the newest ended one."""

    job_name: str | None = None
    last_attempt_time: str | None = None
    settled_job: str | None = None
    settled_time: str | None = None
    consecutive_failures: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun(Block):
    """The run that the operator would start next, and the reason, even while nothing may start. `approved`: no approval is missing."""

    id: str | None = None
    type: WorkType | None = None
    reason: str | None = None
    runner: Runner | None = None
    estimated_bytes: int | None = None
    estimated_seconds: int | None = None
    created_time: str | None = None
    approved: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenHour(Block):
    """The bytes that compactions read, for compactions that ended in the hour that begins at `time`."""

    time: str | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepRun(Block):
    """One maintenance run that ended."""

    id: str | None = None
    type: RunType | None = None
    runner: Runner | None = None
    reason: str | None = None
    start_time: str | None = None
    end_time: str | None = None
    outcome: Outcome | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    blobs_deleted: int | None = None
    deletion_record: str | None = None
    diffs_truncated: int | None = None
    cpu_seconds: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus(Block):
    """The whole status. `conditions` are as `api.conditions` renders them."""

    observed_generation: int | None = None
    shard_id: str | None = None
    engine_version: str | None = None
    log: LogEntry = LogEntry()
    store: Stores = Stores()
    schema: Ddl = Ddl()
    codecs: Codecs = Codecs()
    frontiers: Frontiers = Frontiers()
    storage: Storage = Storage()
    holds: Holds = Holds()
    debt: Debt = Debt()
    verification: Verification = Verification()
    plan: PlannedRun = PlannedRun()
    rewritten: tuple[RewrittenHour, ...] | None = None
    maintenance: Mapping[MaintenanceKind, Upkeep] | None = None
    inspection: Inspections | None = None
    deletion: Deletion = Deletion()
    last_handled_requests: Mapping[str, str] | None = None
    history: tuple[UpkeepRun, ...] | None = None
    conditions: tuple[Mapping[str, Any], ...] | None = None

    def upkeep(self, kind: MaintenanceKind) -> Upkeep:
        """The block of this kind of maintenance; an empty block before its first run."""
        return (self.maintenance or {}).get(kind, Upkeep())

    def handled(self, request: str) -> str | None:
        """The last token of this request that the operator handled."""
        return (self.last_handled_requests or {}).get(request)
