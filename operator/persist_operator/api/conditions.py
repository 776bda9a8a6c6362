"""Conditions by the conventions of Kubernetes and kstatus: Ready always, Reconciling and Stalled only while true.

Invariant: lastTransitionTime changes only when `status` changes, so that an unchanged decision gives an unchanged object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from persist_operator.api import times
from persist_operator.api.redact import printable

Status = Literal["True", "False", "Unknown"]
#: The conditions by which kstatus decides whether a resource matches its spec.
OUTCOME = ("Ready", "Reconciling", "Stalled")


@dataclass(frozen=True, slots=True)
class Condition:
    """One statement that is true, false or unknown now. `reason` is CamelCase for programs, `message` is for people."""

    type: str
    status: Status
    reason: str
    message: str = ""


def reconciling(reason: str, message: str, *, ready: Status = "False") -> list[Condition]:
    """The outcome of a resource that is not Ready because work on it is in progress or is retried."""
    return [Condition("Ready", ready, reason, message), Condition("Reconciling", "True", reason, message)]


def stalled(reason: str, message: str) -> list[Condition]:
    """The outcome of a resource that is not Ready until a person acts, or the next tick comes."""
    return [Condition("Ready", "False", reason, message), Condition("Stalled", "True", reason, message)]


def render(
    conditions: Iterable[Condition], previous: Sequence[Mapping[str, Any]], *, generation: int, now_ms: int
) -> list[dict[str, Any]]:
    """The conditions as JSON objects, sorted by type. A condition with an unchanged status keeps its transition time from `previous`.
    Messages quote keys and values of resources, so they are made printable.
    """
    before = {one.get("type"): one for one in previous}
    rendered = []
    for condition in sorted(conditions, key=lambda one: one.type):
        old = before.get(condition.type)
        same = old is not None and old.get("status") == condition.status and old.get("lastTransitionTime")
        rendered.append(
            {
                "type": condition.type,
                "status": condition.status,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old is not None and same else times.to_text(now_ms),
                "reason": condition.reason,
                "message": printable(condition.message[:32_000]),
            }
        )
    return rendered


def find(status: Mapping[str, Any], condition_type: str) -> Mapping[str, Any] | None:
    """The condition of this type on a status; None when there is none."""
    for one in status.get("conditions", ()):
        if one.get("type") == condition_type:
            found: Mapping[str, Any] = one
            return found
    return None


def is_true(status: Mapping[str, Any], condition_type: str) -> bool:
    """Whether the status has this condition with status True."""
    found = find(status, condition_type)
    return found is not None and found.get("status") == "True"


def with_outcome(
    status: Mapping[str, Any],
    outcome: Sequence[Condition],
    previous: Sequence[Mapping[str, Any]],
    *,
    generation: int,
    now_ms: int,
) -> dict[str, Any]:
    """`status` with its conditions Ready, Reconciling and Stalled replaced by `outcome`. Other conditions stay the same."""
    rendered = render(outcome, previous, generation=generation, now_ms=now_ms)
    others = [one for one in status.get("conditions", ()) if one.get("type") not in OUTCOME]
    return {
        **status,
        "observedGeneration": generation,
        "conditions": sorted([*others, *rendered], key=lambda one: str(one["type"])),
    }
