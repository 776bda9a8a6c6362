"""Refused actions: when each is tried again, and how the conditions show the refusal until then. Pure.

Invariant: while an action of the plan is refused, Ready is False, and Reconciling or Stalled has the message of the refusal. The
exception is the start of a driver on standby, because another driver does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from persist_operator.api import conditions, times
from persist_operator.api.conditions import Condition
from persist_operator.api.resource import Meta
from persist_operator.plan.actions import (
    STANDBY_KEY,
    Action,
    Note,
    Plan,
    ShardAction,
    StartDriver,
    StartInspection,
    StartMaintenance,
    action_key,
)
from persist_operator.plan.observed import ACTION_REFUSED, QUEUED, ActionFailure, Run

_FIRST_S, _MAX_S, _PERMANENT_S = 5, 120, 300


def wait_s(failure: ActionFailure, *, generation: int, now_ms: int) -> float:
    """Seconds until the refused action is tried again; 0 when it is tried now. A clock that was set back does not prolong the wait."""
    if failure.generation != generation:
        return 0.0
    if failure.place:
        return max(0.0, queue_wait_s(failure.place) - abs(now_ms - failure.at_ms) / 1000)
    backoff_s = times.backoff_s(failure.count, first_s=_FIRST_S, max_s=_MAX_S)
    return max(0.0, (_PERMANENT_S if failure.permanent else backoff_s) - abs(now_ms - failure.at_ms) / 1000)


def queue_wait_s(place: int) -> float:
    """How long a start in the queue waits until it asks again. The first starts ask often, so that a free place is taken soon."""
    return float(min(_MAX_S, _FIRST_S * place))


def with_refusals(
    plan: Plan,
    failures: Mapping[str, ActionFailure],
    *,
    wanted: Iterable[Action],
    meta: Meta,
    before: Mapping[str, Any],
    now_ms: int,
    runs: Iterable[Run] = (),
) -> Plan:
    """`plan` without the actions whose next try is not due, and with the refusals of all `wanted` actions in its conditions.

    `before` is the stored status. A refusal that it shows is in force until the action is taken, even in a new process that has not
    received the refusal itself. plan/shard.py shows refusals of a ShardAction. `runs`: the runs whose pods may be refused.
    """
    mine = [one for one in wanted if not isinstance(one, ShardAction)]
    standing = {action_key(one): failures[action_key(one)] for one in mine if action_key(one) in failures}
    # A shard whose maintenance waits for a place can be read and written, so its own conditions show the wait.
    shown = {
        key: one
        for key, one in standing.items()
        if key != STANDBY_KEY and not (one.place and key.startswith("Start") and key != StartDriver.__name__)
    }
    waits = {
        key: left_s
        for key, one in standing.items()
        if (left_s := wait_s(one, generation=meta.generation, now_ms=now_ms)) > 0
    }
    actions = tuple(one for one in plan.actions if action_key(one) not in waits)
    plan = replace(plan, actions=actions, refused=plan.refused | frozenset(standing))
    refused = [*shown.values(), *(_of_pod(one) for one in runs if one.refused)]
    starts = any(isinstance(one, StartDriver | StartInspection | StartMaintenance) for one in mine)
    found = _conditions(refused) if refused else _kept(before) if starts else []
    if not found or conditions.is_true(plan.status, "Stalled"):
        return plan
    status = conditions.with_outcome(
        plan.status, found, before.get("conditions", ()), generation=meta.generation, now_ms=now_ms
    )
    was = conditions.find(before, "Ready") or {}
    first = found[0]
    news = () if first.reason in {was.get("reason"), QUEUED} else (Note("Warning", first.reason, first.message),)
    least_s = min((plan.requeue_after_s or 0.0, *waits.values())) if waits else plan.requeue_after_s
    return replace(
        plan,
        status=status,
        notes=(*plan.notes, *news),
        requeue_after_s=least_s,
        is_periodic=plan.is_periodic and not waits,
    )


def _of_pod(run: Run) -> ActionFailure:
    """The refusal of a Job's pod. It is not permanent, because Kubernetes keeps trying."""
    return ActionFailure(reason=ACTION_REFUSED, message=run.message, permanent=False, at_ms=run.created_ms)


def _conditions(failures: Sequence[ActionFailure]) -> list[Condition]:
    """The conditions of these refusals. A refusal that only a person can end comes before refusals that may end without an action."""
    worst = max(failures, key=lambda one: one.permanent)
    rest = [one.message for one in failures if one is not worst and one.message != worst.message]
    message = "; ".join([worst.message, *rest])
    outcome = conditions.stalled if worst.permanent else conditions.reconciling
    return outcome(worst.reason, message)


def _kept(before: Mapping[str, Any]) -> list[Condition]:
    """The conditions with which the stored status shows a refusal; empty when it shows none."""
    ready = conditions.find(before, "Ready")
    if ready is None or ready.get("reason") != ACTION_REFUSED:
        return []
    triple = [conditions.find(before, one) for one in ("Ready", "Reconciling", "Stalled")]
    return [
        Condition(one["type"], one["status"], one["reason"], one.get("message", ""))
        for one in triple
        if one is not None
    ]
