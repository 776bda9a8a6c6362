"""Jobs without a pod: when their Events are read, what a refused one means, and when it is looked at again. Pure.

Kubernetes makes the pods of Jobs, and tells only the Job's Events (FailedCreate) that it is refused them. They are read for a Job that
has no pod two seconds after it was made, and ever later: pods that come as they should cost no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from persist_operator.api import times
from persist_operator.api.redact import clip, redact
from persist_operator.plan.actions import Plan, StartInspection, StartMaintenance
from persist_operator.plan.observed import Phase, Run

_FIRST_S = 2.0
_WORDS_MAX = 1024


def is_to_be_asked_about(run: Run, status: Mapping[str, Any], now_ms: int) -> bool:
    """Whether Events may say why `run` has no pod. `status`: its shard's, as stored; a failure that it tells of is told."""
    if not run.podless or run.deleting:
        return False
    if run.phase is Phase.FAILED:
        block = _block(run, status)
        return run.kind == "inspection" or block.get("jobName") == run.name != block.get("settledJob")
    return _age_s(run, status, now_ms) >= _FIRST_S


def with_refusal(run: Run, words: str) -> Run:
    """`run`, of which Events say that its pod is refused with `words`; as it is when they say nothing."""
    if not words:
        return run
    # Others may write Events, too: what a status shows on a terminal moves no cursor.
    line = "".join(one if one.isprintable() else " " for one in words)
    told = (
        f"Job {run.name} has no pod: {clip(redact(line), _WORDS_MAX)}; "
        "let the namespace's quota, its pod security level or its admission policies allow it"
    )
    return replace(run, refused=True, message=f"{run.message}; {told}" if run.phase.finished else told)


def with_look(plan: Plan, runs: Iterable[Run], status: Mapping[str, Any], *, now_ms: int) -> Plan:
    """`plan` with a look in time for the Events of every Job that has no pod, or is made now. `status`: as stored."""
    waits = [
        max(1.0, age_s if age_s >= _FIRST_S else _FIRST_S - age_s)
        for run in runs
        if run.podless and not run.phase.finished and not run.deleting and not run.refused
        for age_s in [_age_s(run, status, now_ms)]
    ]
    if any(isinstance(one, StartMaintenance | StartInspection) for one in plan.actions):
        waits.append(_FIRST_S)
    if plan.requeue_after_s is None or plan.requeue_after_s <= min(waits, default=plan.requeue_after_s):
        return plan
    return replace(plan, requeue_after_s=min(waits), is_periodic=False)


def _age_s(run: Run, status: Mapping[str, Any], now_ms: int) -> float:
    """Since it was made, by the server's clock or by that of who intended it: one that is ahead or behind makes no Job old."""
    made_ms, block = [run.created_ms], _block(run, status)
    if block.get("jobName") == run.name:
        made_ms.append(times.to_ms(block.get("lastAttemptTime")) or run.created_ms)
    return min(abs(now_ms - one) for one in made_ms) / 1000


def _block(run: Run, status: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the status says of runs of this kind."""
    found: Mapping[str, Any] = (
        status.get("inspection", {}) if run.kind == "inspection" else status.get("maintenance", {}).get(run.kind, {})
    )
    return found
