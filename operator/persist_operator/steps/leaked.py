"""Leaked pods: their resource is gone, or they are executors whose driver is gone.

Kubernetes collects the children of deleted objects, so leaked pods should not last. A leaked pod costs money, and may still write.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persist_operator.api import names
from persist_operator.cluster.port import POD, Cluster

_LOG = logging.getLogger(__name__)
_ENDED = {"Succeeded", "Failed"}
#: The most pods that one log line names.
_NAMED_MAX = 10
#: Identifies a driver and its executors: the uid of their resource, their purpose, and the attempt.
_Group = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class OurPod:
    """The facts about a pod's owner in the pod's metadata. `name` includes the namespace."""

    name: str
    group: _Group
    role: str
    is_ended: bool


def our_pods(cluster: Cluster, namespaces: Iterable[str | None]) -> list[OurPod]:
    """The operator's pods in these namespaces (None: in all). Raises ApiError."""
    ours = {names.LABEL_MANAGED_BY: names.MANAGER}
    pages = (page for namespace in namespaces for page in cluster.pages(POD, namespace, ours))
    return [
        _our_pod(pod["metadata"], str((pod.get("status") or {}).get("phase", ""))) for page in pages for pod in page
    ]


def leaked_pods(pods: Sequence[OurPod], owners: Container[str]) -> int:
    """The number of leaked pods. A log line names them. `owners`: the uids of all resources, listed after `pods`, so that the owner of each
    pod was created before. Kubernetes soon collects the pods of a resource that was deleted meanwhile, so only a lasting number is a
    problem.
    """
    drivers = {pod.group for pod in pods if pod.role == "driver" and not pod.is_ended}
    leaked = [
        pod.name
        for pod in pods
        if pod.group[0] not in owners or (pod.role == "executor" and not pod.is_ended and pod.group not in drivers)
    ]
    if leaked:
        _LOG.warning("pods are leaked", extra={"count": len(leaked), "pods": sorted(leaked)[:_NAMED_MAX]})
    return len(leaked)


def _our_pod(head: Mapping[str, Any], phase: str) -> OurPod:
    labels = head["labels"]
    uid, component = labels.get(names.LABEL_OWNER_UID, ""), labels.get(names.LABEL_COMPONENT, "")
    return OurPod(
        name=f"{head['namespace']}/{head['name']}",
        group=(uid, component, labels.get(names.LABEL_ATTEMPT, "")),
        role=labels.get(names.LABEL_ROLE, ""),
        is_ended=phase in _ENDED,
    )
