"""Jobs without a pod: when the operator reads their Events, what a refusal means, and when the operator plans again. Pure.

The Job controller creates the pods of a Job. When the API server refuses a pod, only an Event of the Job (FailedCreate) shows why. The
operator reads these Events for a Job that has no pod two seconds after its creation, and then at growing intervals. A Job whose pod comes
in time needs no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from persist_operator.api import times
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard_status import Inspections, ShardStatus, Upkeep
from persist_operator.plan.actions import Plan, StartInspection, StartMaintenance
from persist_operator.plan.observed import Phase, Run

_FIRST_S = 2.0
_WORDS_MAX = 1024


def needs_events(run: Run, status: ShardStatus, now_ms: int) -> bool:
    """Whether Events may show why `run` has no pod. `status`: the stored status of its shard. False for a failure that is already on the
    status.
    """
    if not run.podless or run.deleting:
        return False
    if run.phase is Phase.FAILED:
        block = _block(run, status)
        return run.kind == "inspection" or block.job_name == run.name != block.settled_job
    return _age_s(run, status, now_ms) >= _FIRST_S


def with_refusal(run: Run, words: str) -> Run:
    """`run` with the refusal of its pod, in the `words` of its Events; `run` itself when there are no words."""
    if not words:
        return run
    # Any writer of Events can choose these words. A control character in a status would reach a terminal.
    line = "".join(one if one.isprintable() else " " for one in words)
    message = (
        f"Job {run.name} has no pod: {clip(redact(line), _WORDS_MAX)}; "
        "let the namespace's quota, its pod security level or its admission policies allow it"
    )
    return replace(run, refused=True, message=f"{run.message}; {message}" if run.phase.finished else message)


def with_look(plan: Plan, runs: Iterable[Run], status: ShardStatus, *, now_ms: int) -> Plan:
    """`plan` with a requeue in time for the Events of every Job that has no pod or that the plan creates. `status`: as stored."""
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


def _age_s(run: Run, status: ShardStatus, now_ms: int) -> float:
    """The time since the creation of `run`, by the API server's clock or by the clock of the operator that intended it, whichever is less.
    So a wrong clock makes no Job old.
    """
    made_ms, block = [run.created_ms], _block(run, status)
    if block.job_name == run.name:
        made_ms.append(times.to_ms(block.last_attempt_time) or run.created_ms)
    return min(abs(now_ms - one) for one in made_ms) / 1000


def _block(run: Run, status: ShardStatus) -> Upkeep | Inspections:
    """The part of the status about runs of this kind."""
    if run.kind == "inspection":
        return status.inspection or Inspections()
    return next((block for kind, block in (status.maintenance or {}).items() if kind == run.kind), Upkeep())
