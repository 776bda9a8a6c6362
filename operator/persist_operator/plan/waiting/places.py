"""Decides which of the waiting starts may begin, within the installation's limits on concurrent pods. Pure.

The order: the earliest due time first, then the greatest debt, then the greatest priority, then drivers before maintenance, then the
longest wait. If a limit on its own store or namespace holds a start back, the others are not held back. Inspections have their own limit
and their own queue, so a sink never waits behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from persist_operator.settings import LimitSettings

PlaceKind = Literal["driver", "maintenance", "inspection"]
_RANK: dict[PlaceKind, int] = {"driver": 0, "maintenance": 1, "inspection": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A running pod, or one that waits for its start. `name` is the name of the pod or Job, and unique in its namespace."""

    namespace: str
    name: str
    kind: PlaceKind
    store: str
    due_ms: int | None = None
    """When the work should be done; None if it has no due time."""
    debt_bytes: int = 0
    """The bytes that wait for the work."""
    priority: int = 0
    """The `queuePriority` of the resource."""
    asked_ms: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Identifies it."""
        return self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of a start: its place among the starts that wait for the same limits, from 1, and the limit that is reached."""

    place: int
    limit: str


def wait_of(start: Place, others: Iterable[Place], running: Iterable[Place], limits: LimitSettings) -> Wait | None:
    """The wait of `start`, given the `running` pods and the waiting `others` that go before it. None when it may begin now."""
    counts = Counter(bound for one in running for bound in _bounds(one, limits))
    ahead = 1
    for one in sorted({*others, start}, key=_order):
        full = [bound for bound in _bounds(one, limits) if counts[bound] >= bound[1]]
        if one == start:
            return Wait(ahead, full[0][0]) if full else None
        if not full:
            counts.update(_bounds(one, limits))
        elif set(_bounds(one, limits)) & set(_bounds(start, limits)):
            ahead += 1
    raise AssertionError("start is among those that were sorted")


def _order(one: Place) -> tuple[float, int, int, int, int, tuple[str, str]]:
    due = float("inf") if one.due_ms is None else one.due_ms
    return due, -one.debt_bytes, -one.priority, _RANK[one.kind], one.asked_ms, one.key


def _bounds(one: Place, limits: LimitSettings) -> list[tuple[str, int]]:
    """The limits that count `one`, each with its name and its number."""
    if one.kind == "inspection":
        own = {"limits.inspections": limits.inspections}
    else:
        own = {
            "limits.total": limits.total,
            f"limits.{one.kind}{'s' if one.kind == 'driver' else ''}": getattr(
                limits, "drivers" if one.kind == "driver" else "maintenance"
            ),
            f"limits.perNamespace, of namespace {one.namespace}": limits.per_namespace,
            **({f"limits.perStore, of store {one.store}": limits.per_store} if one.store else {}),
        }
    return [(name, number) for name, number in own.items() if number is not None]
