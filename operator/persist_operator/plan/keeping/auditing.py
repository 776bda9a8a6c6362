"""Verification and orphan scans: when each is due, its findings, and the condition Verified. Pure.

The time of the next run is on the status. The first run has a time within the interval that depends on the resource, so that many resources
are not audited at the same time. A run that could not look changes no verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from persist_operator.api import names, times
from persist_operator.api.conditions import Condition
from persist_operator.api.names import AuditKind, MaintenanceKind
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import ShardStatus, Upkeep, Verdict, Verification
from persist_operator.plan.hints import Request, Restore, Words
from persist_operator.plan.observed import Phase, Run

#: The API server refuses greater numbers, but a report may contain any number.
_COUNT_MAX = (1 << 63) - 1
_MESSAGE_MAX = 1024
#: How far the clocks of pods, which give the ends of runs, may be ahead of the operator's clock.
_AHEAD_MS = 600_000
_VERIFY_AGAIN = Request("verify")


@dataclass(frozen=True, slots=True)
class Audit:
    """The work of an audit run: the `mode` of a verification, or the age and the limit of an orphan scan. `deletes_max` None: it only
    counts.
    """

    mode: str = ""
    min_age_seconds: int = 0
    deletes_max: int | None = None


def audit_of(shard: Shard, kind: MaintenanceKind) -> Audit | None:
    """The audit that a run of `kind` carries out; None for other kinds. While the mode is Off, a requested run looks but deletes
    nothing.
    """
    spec = shard.spec
    if kind == "verify":
        return Audit(mode="Full" if spec.verify_mode == "Full" else "Metadata")
    if kind == "orphanScan":
        deletes = spec.orphans_mode == "Delete"
        return Audit(min_age_seconds=spec.orphans_min_age_seconds, deletes_max=spec.gc_deletes_max if deletes else None)
    return None


def interval_s(shard: Shard, kind: MaintenanceKind) -> int | None:
    """The seconds between two runs; None for kinds that are not audits, and while the mode is Off."""
    spec = shard.spec
    intervals_s = {"verify": spec.verify_interval_seconds, "orphanScan": spec.orphans_interval_seconds}
    return None if spec.switched_off(kind) else intervals_s.get(kind)


def scheduled(shard: Shard, blocks: Mapping[MaintenanceKind, Upkeep], now_ms: int) -> Mapping[MaintenanceKind, Upkeep]:
    """`blocks` with the time of the next run of each audit that has an interval and no run under way."""
    out = dict(blocks)
    for kind in names.AUDIT_KINDS:
        whole_s, block = interval_s(shard, kind), blocks.get(kind, Upkeep())
        if block.job_name != block.settled_job or block.consecutive_failures:
            continue
        next_ms = times.to_ms(block.next_run_time)
        if whole_s is None:
            block = replace(block, next_run_time=None)
        elif next_ms is None or next_ms > now_ms + 1000 * whole_s + _AHEAD_MS:
            # The time is more than an interval ahead: the interval was shortened, or a clock was set back.
            block = replace(block, next_run_time=times.to_text(now_ms + round(1000 * whole_s * _share(shard, kind))))
        out[kind] = block
    return {kind: block for kind, block in out.items() if block != Upkeep()}


def _share(shard: Shard, kind: AuditKind) -> float:
    """A share of an interval, the same for each plan of this resource. It is not zero, because a new shard needs no audit."""
    return (hashlib.sha256(f"{kind}/{shard.meta.uid}".encode()).digest()[0] + 1) / 256


def due_reason(shard: Shard, block: Upkeep, kind: MaintenanceKind, now_ms: int) -> str | None:
    """The reason why an audit of this kind is due now; None when it is not due."""
    whole_s, next_ms = interval_s(shard, kind), times.to_ms(block.next_run_time)
    if whole_s is None or next_ms is None or now_ms < next_ms:
        return None
    return f"every {whole_s} s"


def next_ms(shard: Shard, run: Run, end_ms: int) -> int | None:
    """The time of the next run after a successful run. It is at once if that run stopped at its limit of deletes."""
    whole_s = interval_s(shard, run.kind) if run.kind in names.AUDIT_KINDS else None
    if whole_s is None:
        return None
    return end_ms if (run.report or {}).get("complete") is False else end_ms + 1000 * whole_s


# -- what the runs found ----------------------------------------------------------------------------------------------


def with_findings(
    status: ShardStatus, known: ShardStatus, blocks: Mapping[MaintenanceKind, Upkeep], runs: Sequence[Run]
) -> ShardStatus:
    """`status` with the findings of audits: those of `known`, or newer ones of `runs`. `blocks` has every run recorded."""
    kept, verification = known.storage, known.verification
    for kind in names.AUDIT_KINDS:
        run = _news(known, blocks, runs, kind)
        report = {} if run is None else run.report or {}
        if kind == "verify" and run is not None:
            found = _verification(run, report)
            if found is not None:
                verification, kept = found, replace(kept, missing_blobs=count(report, "missing_blobs"))
        elif run is not None and count(report, "orphan_blobs") is not None:
            kept = replace(
                kept,
                orphan_blobs=count(report, "orphan_blobs"),
                orphan_bytes=count(report, "orphan_bytes"),
            )
    storage = replace(
        status.storage,
        missing_blobs=kept.missing_blobs,
        orphan_blobs=kept.orphan_blobs,
        orphan_bytes=kept.orphan_bytes,
    )
    return replace(status, storage=storage, verification=verification)


def _news(
    known: ShardStatus, blocks: Mapping[MaintenanceKind, Upkeep], runs: Sequence[Run], kind: AuditKind
) -> Run | None:
    """The run whose end `blocks` records and `known` does not. None when it could not look."""
    block = blocks.get(kind, Upkeep())
    if block.settled_job == known.upkeep(kind).settled_job or block.last_result != "Succeeded":
        return None
    return next((one for one in runs if one.name == block.settled_job and one.phase is Phase.SUCCEEDED), None)


def _verification(run: Run, report: Mapping[str, Any]) -> Verification | None:
    """The verification in a report. None without a valid verdict, because pods in the resource's namespace can write any text."""
    verdict = next((one for one in get_args(Verdict) if one == report.get("verdict")), None)
    if verdict is None or count(report, "missing_blobs") is None:
        return None
    return Verification(
        verdict=verdict,
        mode="Full" if report.get("mode") == "Full" else "Metadata",
        time=times.to_text(run.finished_ms or run.created_ms),
        errors=count(report, "errors"),
        message=clip(redact(str(report.get("message") or "")), _MESSAGE_MAX),
    )


def count(report: Mapping[str, Any], name: str) -> int | None:
    """The number `name` in a report. None when the report has no valid number of this name."""
    value = report.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MAX else None


def condition(
    shard: Shard, status: ShardStatus, blocks: Mapping[MaintenanceKind, Upkeep], words: Words
) -> tuple[Condition, ...]:
    """The condition Verified, from `status` with every finding. Empty while there is no verification and none is due."""
    found, block = status.verification, blocks.get("verify", Upkeep())
    if found.verdict is None:
        if interval_s(shard, "verify") is None and block.job_name is None:
            return ()
        when = f"the first verification is due at {block.next_run_time}" if block.next_run_time else "it is under way"
        if block.consecutive_failures:
            when = f"it could not be verified: {block.message}"
        return (Condition("Verified", "Unknown", "NotYet", clip(when, _MESSAGE_MAX)),)
    what = f"{found.mode}, {found.time}: {found.message}"
    if found.verdict == "Verified":
        return (Condition("Verified", "True", "Verified", clip(what, _MESSAGE_MAX)),)
    advice = f". {words(Restore(str(status.shard_id)))}, then {words(_VERIFY_AGAIN)}"
    return (Condition("Verified", "False", found.verdict, clip(what, _MESSAGE_MAX - len(advice)) + advice),)
