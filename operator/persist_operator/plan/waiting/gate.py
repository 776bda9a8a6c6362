"""The reasons that hold back a wanted compaction: a missing approval, a closed window, or the budget of the day. Pure.

The approval comes first. Nothing overrides a missing approval, because the user has asked to decide. The deletion deadline overrides a
window and the budget, if waiting for them would leave too little time. Rollups and collections never wait here, because they read and write
little, and free space. Requested compactions do not wait here either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persist_engine.base.wording import sized

from persist_operator.api import names, times
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.redact import redact
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import PlannedRun, Upkeep, WaitReason
from persist_operator.plan.hints import Approve, Words
from persist_operator.plan.waiting import budget, deadline, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Work of one kind that is due, whether or not it may start. `full`: see StartMaintenance. `owed_from_ms`: if the deadline makes the
    work due, the time since which its deletions are owed; else None.
    """

    reason: str
    full: bool = False
    owed_from_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """The reason why a compaction does not start, and the end of the hold. None: it ends when a person acts."""

    reason: WaitReason
    message: str
    until_ms: int | None


@dataclass(frozen=True, slots=True)
class Passed:
    """A compaction may start, and read at most `max_bytes` (None: no bound)."""

    max_bytes: int | None = None


def is_approved(shard: Shard, plan_id: str) -> bool:
    """Whether this plan needs no further approval. The last approval is valid until the next one, even if its annotation is removed."""
    asked = approval_token(shard)
    return not shard.spec.needs_approval or plan_id == (asked or shard.known.handled(names.APPROVE))


def approval_token(shard: Shard) -> str:
    """The id in the annotation that approves a plan; empty without one."""
    return names.request_token(shard.meta.annotations, names.APPROVE)


def passes(
    shard: Shard,
    wanted: Wanted,
    plan: PlannedRun,
    blocks: Mapping[MaintenanceKind, Upkeep],
    rewritten: budget.Rewritten,
    *,
    least_bytes: int | None,
    words: Words,
    now_ms: int,
) -> Hold | Passed:
    """Whether the compaction `plan` may start. `least_bytes`: what its smallest merge would read; None when it is one merge."""
    if not plan.approved:
        return _unapproved(shard, plan, words)
    owed_ms = wanted.owed_from_ms
    if not windows.is_open(shard.spec.windows, now_ms):
        opens_ms = windows.next_opening_ms(shard.spec.windows, now_ms)
        if owed_ms is None or not deadline.cannot_wait(shard, owed_ms, blocks, opens_ms):
            return Hold("WindowClosed", f"{plan.reason}; the next window opens at {times.to_text(opens_ms)}", opens_ms)
    limit = shard.spec.max_rewrite_bytes_per_day
    if limit is None:
        return Passed()
    need, used = plan.estimated_bytes or 0, budget.used_bytes(rewritten, now_ms)
    if used + need <= limit:
        # The pod sees writes that came after the estimate, so it gets the bound. A single merge of everything has no bound.
        return Passed(None if least_bytes is None else limit - used)
    least = need if least_bytes is None else min(least_bytes, need)
    if used + least <= limit:
        return Passed(limit - used)
    frees_ms = budget.frees_ms(rewritten, now_ms, need_bytes=least, budget_bytes=limit)
    if owed_ms is not None and deadline.cannot_wait(shard, owed_ms, blocks, frees_ms):
        return Passed()
    return _exhausted(plan, used, limit, frees_ms)


def _unapproved(shard: Shard, plan: PlannedRun, words: Words) -> Hold:
    asked = approval_token(shard)
    refused = f"; request-approve is {redact(asked)}, which names no plan that waits" if asked else ""
    text = f"plan {plan.id} ({plan.reason}) waits for an approval: {words(Approve(str(plan.id)))}{refused}"
    return Hold("AwaitingApproval", text, None)


def _exhausted(plan: PlannedRun, used: int, limit: int, frees_ms: int | None) -> Hold:
    """The hold of an exhausted budget. Its texts do not change with writes to the shard, because each change is a write of the status."""
    spent = f"{sized(used)} of the {sized(limit)} of 24 hours are spent" if used else f"{sized(limit)} are for 24 hours"
    when = (
        "and the next merge needs more than all of it: raise maintenance.maxRewriteBytesPerDay, or request the compaction"
        if frees_ms is None
        else f"and the next merge fits from {times.to_text(frees_ms)} on"
    )
    return Hold("BudgetExhausted", f"{plan.reason}; {spent}, {when}", frees_ms)
