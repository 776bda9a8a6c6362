"""Pods that nothing looks after: their resource is gone, or they are executors whose driver is gone.

Kubernetes collects the children of what is deleted, so there are none for long. What is left costs money, and may still write.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from persist_operator.api import names
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK, Cluster, Kind

_LOG = logging.getLogger(__name__)
_ENDED = {"Succeeded", "Failed"}
#: Pods that one line of the log names.
_NAMED_MAX = 10
#: A driver and its executors: the uid of their resource, what they are for, and the attempt.
_Group = tuple[str, str, str]


def leaked_pods(cluster: Cluster, namespaces: tuple[str | None, ...]) -> int:
    """The number of such pods in these namespaces (None: in all), which a line of the log names. ApiError.

    The pods are listed before the resources: a resource that is created meanwhile has none of these pods. One that is deleted meanwhile
    leaves pods that Kubernetes is about to collect, so only a number that stays says something.
    """
    ours = {names.LABEL_MANAGED_BY: names.MANAGER}
    pods = [
        (f"{head['namespace']}/{head['name']}", _group(head), head["labels"].get(names.LABEL_ROLE), _phase(pod))
        for pod in _listed(cluster, POD, namespaces, ours)
        for head in [pod["metadata"]]
    ]
    if not pods:
        return 0
    owners = {
        one["metadata"].get("uid")
        for kind in (PERSIST_SHARD, SPARK_SINK)
        for one in _listed(cluster, kind, namespaces, {})
    }
    drivers = {group for _, group, role, phase in pods if role == "driver" and phase not in _ENDED}
    leaked = [
        name
        for name, group, role, phase in pods
        if group[0] not in owners or (role == "executor" and phase not in _ENDED and group not in drivers)
    ]
    if leaked:
        _LOG.warning("pods are leaked", extra={"count": len(leaked), "pods": sorted(leaked)[:_NAMED_MAX]})
    return len(leaked)


def _listed(
    cluster: Cluster, kind: Kind, namespaces: tuple[str | None, ...], labels: Mapping[str, str]
) -> Iterator[Mapping[str, Any]]:
    for namespace in namespaces:
        for page in cluster.pages(kind, namespace, labels):
            yield from page


def _group(head: Mapping[str, Any]) -> _Group:
    labels = head["labels"]
    return (
        labels.get(names.LABEL_OWNER_UID, ""),
        labels.get(names.LABEL_COMPONENT, ""),
        labels.get(names.LABEL_ATTEMPT, ""),
    )


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase", ""))
