"""The rights that a page needs, and whether a viewer has them.

There are two modes. For one user, the console sends requests with the rights of the kubeconfig's user, and the API server decides. For many
viewers, the console reads with its own rights, and asks the API server about each viewer before it shows anything.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Protocol

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.cluster.port import ApiError
from persist_operator.cluster.viewing import ACCESS_REVIEW, SELF_REVIEW, ViewedCluster
from persist_operator.console.port import PLURALS, KindName, Right, Viewer

#: How long an answer is used. A withdrawn right remains effective for this time.
_REMEMBERED_S = 10.0
_REMEMBERED_MAX = 4096


def reading(kind: KindName, verb: str, namespace: str | None) -> Right:
    """The right to `get` or `list` resources of a kind, or to `patch` one."""
    return Right(verb=verb, group=names.GROUP, resource=PLURALS[kind], namespace=namespace)


def listing_events(namespace: str) -> Right:
    """The right to the events of a page."""
    return Right(verb="list", group="", resource="events", namespace=namespace)


def reading_logs(namespace: str) -> Right:
    """The right to the log of a driver."""
    return Right(verb="get", group="", resource="pods/log", namespace=namespace)


class Rights(Protocol):
    """Answers whether a viewer has a right. Thread-safe."""

    @property
    def precedes(self) -> bool:
        """Whether a right must be checked before each read, because the console reads with its own rights."""

    def has(self, viewer: Viewer, right: Right) -> bool | None:
        """Whether the viewer has the right; None when the API server does not answer this."""


class OwnRights:
    """The rights of the kubeconfig's user. They explain a refusal, and decide which actions a page offers."""

    precedes = False

    def __init__(self, cluster: ViewedCluster) -> None:
        self._cluster = cluster

    def has(self, viewer: Viewer, right: Right) -> bool | None:
        """See Rights."""
        try:
            return bool(self._cluster.review(SELF_REVIEW, {"resourceAttributes": _attributes(right)}).get("allowed"))
        except ApiError:
            return None


class ReviewedRights:
    """The rights of viewers that a request names. An answer is remembered for some seconds. A missing answer counts as a refusal."""

    precedes = True

    def __init__(self, cluster: ViewedCluster, env: Env) -> None:
        self._cluster, self._env = cluster, env
        self._lock = threading.Lock()
        self._known: dict[tuple[Viewer, Right], tuple[float, bool]] = {}

    def has(self, viewer: Viewer, right: Right) -> bool:
        """See Rights."""
        now_s, key = self._env.monotonic_s(), (viewer, right)
        with self._lock:
            until_s, answer = self._known.get(key, (0.0, False))
        if now_s < until_s:
            return answer
        spec: dict[str, Any] = {
            "user": viewer.name,
            "groups": list(viewer.groups),
            "resourceAttributes": _attributes(right),
            **({"uid": viewer.uid} if viewer.uid else {}),
            **({"extra": {name: list(values) for name, values in viewer.extra}} if viewer.extra else {}),
        }
        try:
            answer = self._cluster.review(ACCESS_REVIEW, spec).get("allowed") is True
        except ApiError:
            return False
        with self._lock:
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            self._known[key] = (now_s + _REMEMBERED_S, answer)
        return answer


def explained(rights: Rights, viewer: Viewer, needed: list[Right]) -> list[Right]:
    """The rights, each with the answer whether the viewer has it."""
    return [replace(one, held=rights.has(viewer, one)) for one in needed]


def _attributes(right: Right) -> dict[str, str]:
    resource, _, subresource = right.resource.partition("/")
    attributes = {"verb": right.verb, "group": right.group, "resource": resource}
    if subresource:
        attributes["subresource"] = subresource
    if right.namespace is not None:
        attributes["namespace"] = right.namespace
    return attributes
