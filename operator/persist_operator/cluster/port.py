"""The port to the API server: dictionaries in and out, one call one request (a list may take several), no cache, no retry.

Everything is strongly consistent: reads come from the API server, never from a watch cache of ours, so an absence is an absence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from persist_engine.base.errors import PersistError

from persist_operator.api import names

Resource = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind the operator deals with."""

    api_version: str
    kind: str
    plural: str


PERSIST_SHARD = Kind(names.API_VERSION, "PersistShard", "persistshards")
SPARK_SINK = Kind(names.API_VERSION, "SparkSink", "sparksinks")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
#: Made and deleted, never read: the operator has no right to.
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
JOB = Kind("batch/v1", "Job", "jobs")
#: Belongs to no namespace: its own is the empty one.
NAMESPACE = Kind("v1", "Namespace", "namespaces")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
BY_KIND = {one.kind: one for one in (PERSIST_SHARD, SPARK_SINK, POD, SERVICE, CONFIG_MAP, SECRET, EVENT, JOB, LEASE)}


class ApiError(PersistError):
    """The API server refused or did not answer. `status` is the HTTP code, 0 when there was no answer.

    Nothing is known of a write that was not answered: repeat it, every call here is safe to repeat.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message, status=status)
        self.status = status


class Cluster(Protocol):
    """What the operator asks of Kubernetes. Thread-safe. Everything raises ApiError but for the answers named."""

    def get(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        """The resource as stored now; None when there is none."""

    def find(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[Resource]:
        """All resources of the namespace (of all, when None) that carry `labels`."""

    def served(self, api_version: str) -> frozenset[str]:
        """Plural names of the kinds that the API server serves under `api_version` now; empty when it does not know it."""

    def create(self, kind: Kind, manifest: Resource) -> bool:
        """True when it was created, False when one of this name exists (which names make the same one)."""

    def try_create(self, kind: Kind, manifest: Resource) -> None:
        """Have the server decide on a creation and make nothing. ApiError with the words of the refusal; a name that is taken is
        no refusal. It takes the right to create.
        """

    def events_about(self, namespace: str, uid: str, *, reason: str, limit: int) -> list[Resource]:
        """Events with this reason about the object with this uid, in no order; at most `limit`."""

    def replace(self, kind: Kind, manifest: Resource) -> bool:
        """Replace iff metadata.resourceVersion is still the stored one; False when it is not, or the resource is gone."""

    def delete(self, kind: Kind, namespace: str, name: str, *, grace_seconds: int | None = None) -> bool:
        """Delete, with its dependents in the background; False when there was none."""

    def apply_status(self, kind: Kind, namespace: str, name: str, status: Mapping[str, Any], *, version: str) -> bool:
        """Server-side apply of the whole status by our field manager; False when the resource is gone. spec is not touched.

        `version`: the resourceVersion that the status was decided on. ApiError 409 when it is not the stored one any more: the
        status of a leader that slept, or of a resource that was made anew under the same name, must not pass for the newest.
        """

    def logs(self, namespace: str, pod: str, *, lines: int) -> str:
        """The last lines of the pod's log; empty when there is none."""
