"""Pods that nothing looks after: their resource is gone, or they are executors whose driver is gone.

Kubernetes collects the children of what is deleted, so there are none for long. What is left costs money, and may still write.
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
#: Pods that one line of the log names.
_NAMED_MAX = 10
#: A driver and its executors: the uid of their resource, what they are for, and the attempt.
_Group = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class OurPod:
    """What a pod of the operator says about its owner. `name` has the namespace."""

    name: str
    group: _Group
    role: str
    is_ended: bool


def our_pods(cluster: Cluster, namespaces: Iterable[str | None]) -> list[OurPod]:
    """The operator's pods in these namespaces (None: in all). ApiError."""
    ours = {names.LABEL_MANAGED_BY: names.MANAGER}
    pages = (page for namespace in namespaces for page in cluster.pages(POD, namespace, ours))
    return [
        _our_pod(pod["metadata"], str((pod.get("status") or {}).get("phase", ""))) for page in pages for pod in page
    ]


def leaked_pods(pods: Sequence[OurPod], owners: Container[str]) -> int:
    """The number of such pods, which a line of the log names. `owners` are the uids of all resources, listed after `pods`: a resource that
    is created meanwhile has none of them. One that is deleted meanwhile leaves pods that Kubernetes is about to collect, so only a number
    that stays says something.
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
