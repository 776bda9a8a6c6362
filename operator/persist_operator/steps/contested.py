"""Statuses that two operators want to write, because two releases watch one namespace and only one of them can serve a resource.

The serving operator replaces the status of the other one at once, and each write wakes the other operator. Without a limit both would write
as fast as the API server lets them. So an operator whose verdict is not Ready yields: it seldom replaces the other's status, but at least
every five minutes.

This is kept in memory, so an operator writes its verdict once more after a restart. Thread-safe for different keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from persist_operator.api import conditions
from persist_operator.cluster.port import Resource

#: The first and the longest time for which a status that replaced ours is left. The time doubles with each replacement.
_FIRST_S, _MAX_S = 60.0, 300.0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A status that is not Ready. With it this process made `version` of the resource with this uid. Also the time until which another
    writer's later status is left.
    """

    uid: str
    status: Mapping[str, Any]
    version: int
    replaced: int
    until_s: float

    def is_replaced_in(self, resource: Resource) -> bool:
        """Whether another writer has changed the status since. False for an older copy of the resource, and for another resource of the
        same name, because they prove nothing.
        """
        if _uid(resource) != self.uid:
            return False
        return _version(resource) > self.version and (resource.get("status") or {}) != self.status


class Contested:
    """The verdicts of this process by key."""

    def __init__(self) -> None:
        self._verdicts: dict[Hashable, _Verdict] = {}

    def wrote(self, key: Hashable, before: Resource, stored: Resource, *, now_s: float) -> None:
        """Record that this process has changed `before` to `stored`. `now_s` is monotonic."""
        status, last = stored.get("status") or {}, self._verdicts.pop(key, None)
        if not conditions.is_true(status, "Ready"):
            replaced = last.replaced + 1 if last is not None and last.is_replaced_in(before) else 0
            until_s = now_s + min(_MAX_S, _FIRST_S * 2.0 ** min(replaced, 10))
            self._verdicts[key] = _Verdict(_uid(stored), status, _version(stored), replaced, until_s)

    def yields_s(self, key: Hashable, resource: Resource, status: Mapping[str, Any], *, now_s: float) -> float:
        """Seconds for which this process must leave the status of `resource`, although it would write `status`, because another writer
        replaced its verdict. 0 when it may write.
        """
        verdict = self._verdicts.get(key)
        if verdict is None or conditions.is_true(status, "Ready") or not verdict.is_replaced_in(resource):
            return 0.0
        return max(0.0, verdict.until_s - now_s)

    def forget(self, key: Hashable) -> None:
        """Forget a resource that is gone, or that another replica reconciles now."""
        self._verdicts.pop(key, None)


def _uid(resource: Resource) -> str:
    return str(resource["metadata"].get("uid", ""))


def _version(resource: Resource) -> int:
    """The version of a resource, which rises with each change; 0 for one that is no number."""
    text = str(resource["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
