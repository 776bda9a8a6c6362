"""Actions that were refused: when each is tried again, and what the conditions say meanwhile. Pure.

Invariant: while an action of the plan stands refused, Ready is False, and Reconciling or Stalled has the words of who refused it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from persist_operator.api import conditions
from persist_operator.api.conditions import Condition
from persist_operator.api.resource import Meta
from persist_operator.plan.actions import (
    Action,
    AdvanceSince,
    InitialiseShard,
    Note,
    Plan,
    StartDriver,
    StartInspection,
    StartMaintenance,
    action_key,
)
from persist_operator.plan.observed import ACTION_REFUSED, ActionFailure, Run

_FIRST_S, _MAX_S, _PERMANENT_S = 5, 120, 300


def wait_s(failure: ActionFailure, *, generation: int, now_ms: int) -> float:
    """How long the action is left alone from now on; 0 when it is to be tried. A clock that went back does not prolong it."""
    if failure.generation != generation:
        return 0.0
    whole_s = _PERMANENT_S if failure.permanent else min(_MAX_S, _FIRST_S * 2 ** min(failure.count - 1, 10))
    return max(0.0, whole_s - abs(now_ms - failure.at_ms) / 1000)


def told(
    plan: Plan,
    failures: Mapping[str, ActionFailure],
    *,
    wanted: Iterable[Action],
    meta: Meta,
    before: Mapping[str, Any],
    now_ms: int,
    runs: Iterable[Run] = (),
) -> Plan:
    """`plan` without the actions that are not to be tried yet, and with the refusals of all that is `wanted` in its conditions.

    `before`: the status that is stored. What it tells as refused stands until the action is done, also for a process that knows
    nothing of the refusal yet. Making a shard and moving its since are told by plan/shard.py. `runs`: those whose pods may be refused.
    """
    mine = [one for one in wanted if not isinstance(one, InitialiseShard | AdvanceSince)]
    standing = {action_key(one): failures[action_key(one)] for one in mine if action_key(one) in failures}
    waits = {
        key: left_s
        for key, one in standing.items()
        if (left_s := wait_s(one, generation=meta.generation, now_ms=now_ms)) > 0
    }
    actions = tuple(one for one in plan.actions if action_key(one) not in waits)
    plan = replace(plan, actions=actions, refused=plan.refused | frozenset(standing))
    if conditions.is_true(plan.status, "Stalled"):
        found: Sequence[Condition] = ()
    elif refused := [*standing.values(), *(_of_pod(one) for one in runs if one.refused)]:
        found = _conditions(refused)
    else:
        found = (
            _kept(before)
            if any(isinstance(one, StartDriver | StartInspection | StartMaintenance) for one in mine)
            else ()
        )
    if not found:
        return plan
    status = conditions.with_outcome(
        plan.status, found, before.get("conditions", ()), generation=meta.generation, now_ms=now_ms
    )
    was = conditions.find(before, "Ready") or {}
    first = found[0]
    news = () if was.get("reason") == first.reason else (Note("Warning", first.reason, first.message),)
    least_s = min((plan.requeue_after_s or 0.0, *waits.values())) if waits else plan.requeue_after_s
    return replace(
        plan,
        status=status,
        notes=(*plan.notes, *news),
        requeue_after_s=least_s,
        is_periodic=plan.is_periodic and not waits,
    )


def _of_pod(run: Run) -> ActionFailure:
    """Kubernetes goes on trying."""
    return ActionFailure(reason=ACTION_REFUSED, message=run.message, permanent=False, at_ms=run.created_ms)


def _conditions(failures: Sequence[ActionFailure]) -> list[Condition]:
    """The one that a person has to end comes first; the others may end by themselves."""
    worst = max(failures, key=lambda one: one.permanent)
    rest = [one.message for one in failures if one is not worst and one.message != worst.message]
    message = "; ".join([worst.message, *rest])
    second = "Stalled" if worst.permanent else "Reconciling"
    return [Condition("Ready", "False", worst.reason, message), Condition(second, "True", worst.reason, message)]


def _kept(before: Mapping[str, Any]) -> list[Condition]:
    """What the stored status tells of a refusal, as conditions; nothing when it tells of none."""
    ready = conditions.find(before, "Ready")
    if ready is None or ready.get("reason") != ACTION_REFUSED:
        return []
    triple = [conditions.find(before, one) for one in ("Ready", "Reconciling", "Stalled")]
    return [
        Condition(one["type"], one["status"], one["reason"], one.get("message", ""))
        for one in triple
        if one is not None
    ]
