"""What holds a compaction back that is wanted: an approval that is missing, a closed window, or the budget of the day. Pure.

A person's approval comes first: nothing overrides that it is missing, because a person asked to decide. A window and the budget give way to
the deletion deadline, when work that waited for them would leave it no room. Rollups and collections never come here: they read and write
little, and free space. Neither do compactions that a request asked for.
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
    """Work of one kind that is due, whether or not it may start. `full`: see StartMaintenance. `owed_from_ms`: since when what it removes
    is owed a deletion, if the deadline makes it due; else None.
    """

    reason: str
    full: bool = False
    owed_from_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a compaction does not start, and until when; None: until a person acts."""

    reason: WaitReason
    message: str
    until_ms: int | None


@dataclass(frozen=True, slots=True)
class Passed:
    """A compaction may start, and read at most `max_bytes` (None: no bound)."""

    max_bytes: int | None = None


def is_approved(shard: Shard, plan_id: str) -> bool:
    """Whether no approval of this plan is missing. The last approval stands until another one, also when its annotation is removed."""
    asked = approval_token(shard)
    return not shard.spec.needs_approval or plan_id == (asked or shard.known.handled(names.APPROVE))


def approval_token(shard: Shard) -> str:
    """The id in the annotation that approves a plan; empty without one."""
    return shard.meta.annotations.get(f"{names.REQUEST_PREFIX}{names.APPROVE}", "")[:64]


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
        # The pod sees writes that came after the estimate. One merge of everything takes no bound.
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
    """The texts do not change while writes go on, because each change is a write of the status."""
    spent = f"{sized(used)} of the {sized(limit)} of 24 hours are spent" if used else f"{sized(limit)} are for 24 hours"
    when = (
        "and the next merge needs more than all of it: raise maintenance.maxRewriteBytesPerDay, or request the compaction"
        if frees_ms is None
        else f"and the next merge fits from {times.to_text(frees_ms)} on"
    )
    return Hold("BudgetExhausted", f"{plan.reason}; {spent}, {when}", frees_ms)
