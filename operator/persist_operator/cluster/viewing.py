"""The console's calls of the API server: events, merge patches, and reviews that show a user's identity and rights.

A review is created but never stored. Its answer comes back at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from persist_operator.cluster.kube import KubeCluster, resource_path
from persist_operator.cluster.port import EVENT, Kind, Resource

SELF_REVIEW = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")
ACCESS_REVIEW = Kind("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews")
TOKEN_REVIEW = Kind("authentication.k8s.io/v1", "TokenReview", "tokenreviews")
#: Field manager of a user's changes on a page.
CONSOLE_MANAGER = "persist-console"


class ViewedCluster(KubeCluster):
    """The Cluster of a real API server, with the additional calls of pages. Thread-safe. Calls raise ApiError."""

    def events(self, namespace: str, uid: str, *, limit: int) -> list[Resource]:
        """At most `limit` Events about the object with this uid, in no order."""
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(limit)}
        status, body = self.call("GET", resource_path(EVENT, namespace), query=query)
        return [] if status == 404 else list(json.loads(body).get("items") or ())

    def review(self, kind: Kind, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """The status of a review with this spec."""
        document = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {}, "spec": dict(spec)}
        _, body = self.call("POST", resource_path(kind, None), body=document)
        status: Mapping[str, Any] = json.loads(body).get("status") or {}
        return status

    def annotate(self, kind: Kind, namespace: str, name: str, annotation: str, value: str) -> bool:
        """Set one annotation by a merge patch. Idempotent. Returns False when there is no such resource."""
        change = {"metadata": {"annotations": {annotation: value}}}
        return self.merge_patch(kind, namespace, name, change, manager=CONSOLE_MANAGER) is not None
