"""The port to the API server: JSON objects in and out, one request a call (a list may take several), no cache, no retry.

Reads are strongly consistent. They come from the API server, so a missing object does not exist. Copies from the watches are in `informed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from persist_engine.base.errors import PersistError

from persist_operator.api import names

Resource = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object that the operator uses."""

    api_version: str
    kind: str
    plural: str


PERSIST_SHARD = Kind(names.API_VERSION, "PersistShard", "persistshards")
SPARK_SINK = Kind(names.API_VERSION, "SparkSink", "sparksinks")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
#: The operator creates and deletes Secrets, but has no right to read them.
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
JOB = Kind("batch/v1", "Job", "jobs")
#: Cluster-scoped; calls pass the empty namespace.
NAMESPACE = Kind("v1", "Namespace", "namespaces")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
BY_KIND = {one.kind: one for one in (PERSIST_SHARD, SPARK_SINK, POD, SERVICE, CONFIG_MAP, SECRET, EVENT, JOB, LEASE)}


class ApiError(PersistError):
    """The API server refused a request or did not answer. `status` is the HTTP code; 0 when there was no answer.

    A write without an answer is indeterminate. The caller may repeat it, because every call of the port is safe to repeat. `retry_after_s`
    is the pause that the API server requests before the next request; 0 when it requests none.
    """

    def __init__(self, message: str, *, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(message, status=status)
        self.status, self.retry_after_s = status, retry_after_s


class Stops(Protocol):
    """Requests to drivers to stop. Thread-safe."""

    def digest(self, uid: str, pod: str) -> str | None:
        """The SHA-256, in hex, of the token that stops the driver `pod` of the resource `uid`; None while there is no key."""

    def ask(self, host: str, port: int, *, uid: str, pod: str) -> bool:
        """Ask the driver at this address to stop. Returns True when it accepted: it then ends by itself. Returns False for every other
        answer, without one within seconds, and without a key. Repeated requests have no further effect.
        """


class Cluster(Protocol):
    """The operator's calls of Kubernetes. Thread-safe. Every call raises ApiError, except for the outcomes that its docstring names."""

    def get(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        """The resource as it is stored now; None when there is none."""

    def find(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[Resource]:
        """All resources with `labels` in the namespace; in every namespace when it is None."""

    def pages(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> Iterator[list[Resource]]:
        """Like `find`, but a page at a time, so that memory stays bounded. A list that expires in between begins again. So a resource may
        come twice, and a resource that was deleted meanwhile may also come.
        """

    def served(self, api_version: str) -> frozenset[str]:
        """Plural names of the kinds that the API server serves under `api_version` now; empty when the version is unknown."""

    def create(self, kind: Kind, manifest: Resource) -> bool:
        """Create the resource. Returns False when one of this name exists. Names of children are deterministic, so that is the
        same child.
        """

    def try_create(self, kind: Kind, manifest: Resource) -> None:
        """Let the API server check a creation without creating anything. Raises ApiError with the message of a refusal. An existing
        resource of this name is not a refusal. The call needs the right to create.
        """

    def events_about(self, namespace: str, uid: str, *, reason: str, limit: int) -> list[Resource]:
        """At most `limit` Events with this reason about the object with this uid, in no order."""

    def replace(self, kind: Kind, manifest: Resource) -> bool:
        """Replace the resource iff metadata.resourceVersion is still the stored one. Returns False when it is not, or the resource
        is gone.
        """

    def delete(self, kind: Kind, namespace: str, name: str, *, grace_seconds: int | None = None) -> bool:
        """Delete the resource, and its dependents in the background. Returns False when there was none."""

    def apply_status(
        self, kind: Kind, namespace: str, name: str, status: Mapping[str, Any], *, version: str
    ) -> Resource | None:
        """Server-side apply of the whole status by the operator's field manager. The spec stays. Returns the stored resource after it; None
        when the resource is gone.

        `version` is the resourceVersion from which the status was planned. Raises ApiError 409 when another version is stored, because the
        status from a suspended leader, or for a former resource of the same name, must not replace a newer one.
        """

    def set_finalizers(
        self, kind: Kind, namespace: str, name: str, finalizers: Sequence[str], *, version: str
    ) -> Resource | None:
        """Replace the finalizers of the resource, and nothing else. Returns the stored resource after it; None when the resource is gone.
        Raises ApiError 409 when the stored version is not `version`.
        """

    def logs(self, namespace: str, pod: str, *, container: str, lines: int) -> str:
        """The last lines of a container's log, of them at most the last 64 KiB; empty when there is no log."""
