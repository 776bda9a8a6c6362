"""An API server in memory with the behaviour that the operator depends on: versions, generations, label selectors, 409 and 404, status
apart from spec with server-side apply by one manager, garbage collection by owner. There is no kubelet: tests change pods with `edit`.
Admission is what tests put into `deny`. Any other fault is a function in `intercept`.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persist_operator.api import times
from persist_operator.cluster.port import BY_KIND, EVENT, ApiError, Kind, Resource

_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the operator. `send` carries it out; `arguments` are those of the port's method."""

    verb: str
    """Name of the port's method."""
    kind: str
    arguments: tuple[Any, ...]
    send: Callable[[], Any]


def _request(method: Any, kind: str | None = None) -> Any:
    """Pass calls of the method through `FakeCluster.intercept`. The kind is the first argument unless it is given here."""

    @functools.wraps(method)
    def call(self: FakeCluster, *given: Any, **named: Any) -> Any:
        send = functools.partial(method, self, *given, **named)
        return self.intercept(Request(method.__name__, kind or given[0].kind, given, send))

    return call


_pod_request = functools.partial(_request, kind="Pod")
_event_request = functools.partial(_request, kind="Event")


class FakeCluster:
    """Cluster in memory. Thread-safe. `requests` holds (verb, kind, name) of every write, in order."""

    def __init__(self, *, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._stored: dict[_Key, Resource] = {}
        self._version = 0
        self._lock = threading.RLock()
        self.requests: list[tuple[str, str, str]] = []
        self.log_texts: dict[str, str] = {}
        self.fail_next: list[ApiError] = []
        """Raised, one by one, by the next writes, before they do anything."""
        self.unserved: set[str] = set()
        """Plural names of kinds whose definitions are not installed."""
        self.deny: dict[tuple[str, str], Exception] = {}
        """By (verb, kind): raised by every such request for as long as it stands. Verbs: get, find, create, replace, delete, status."""
        self.denied: Counter[tuple[str, str]] = Counter()
        """By (verb, kind): how often `deny` raised."""
        self.intercept: Callable[[Request], Any] = _send
        """Answers each request, by default with what `send` returns. It may record, raise, or act before and after."""

    def record(self) -> list[Request]:
        """The requests from now on, which this list receives before they are sent."""
        recorded: list[Request] = []
        following = self.intercept

        def intercept(request: Request) -> Any:
            recorded.append(request)
            return following(request)

        self.intercept = intercept
        return recorded

    @_request
    def get(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        with self._lock:
            self._admit("get", kind.kind)
            found: Resource | None = _copy(self._stored.get((kind.kind, namespace, name)))
            return found

    @_request
    def find(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[Resource]:
        return self._find(kind, namespace, labels)

    def _find(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[Resource]:
        with self._lock:
            self._admit("find", kind.kind)
            return [
                _copy(one)
                for (stored_kind, stored_namespace, _), one in sorted(self._stored.items())
                if stored_kind == kind.kind
                and namespace in {None, stored_namespace}
                and labels.items() <= (one["metadata"].get("labels") or {}).items()
            ]

    def pages(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[list[Resource]]:
        return [self.find(kind, namespace, labels)]

    def served(self, api_version: str) -> frozenset[str]:
        plurals = {one.plural for one in BY_KIND.values() if one.api_version == api_version}
        return frozenset(plurals - self.unserved)

    @_request
    def create(self, kind: Kind, manifest: Resource) -> bool:
        key = self._key(kind, manifest)
        with self._lock:
            self._write("create", key)
            if key in self._stored:
                return False
            stored = {"apiVersion": kind.api_version, "kind": kind.kind, **_copy(manifest)}
            self._version += 1
            stored["metadata"] = {
                "uid": f"uid-{self._version}",
                "generation": 1,
                "creationTimestamp": times.to_text(self._now_ms()),
                **stored["metadata"],
                "resourceVersion": str(self._version),
            }
            self._stored[key] = stored
            return True

    @_request
    def try_create(self, kind: Kind, manifest: Resource) -> None:
        with self._lock:
            self._key(kind, manifest)
            self._admit("create", kind.kind)

    @_event_request
    def events_about(self, namespace: str, uid: str, *, reason: str, limit: int) -> list[Resource]:
        found = self._find(EVENT, namespace, {})
        return [one for one in found if (one["involvedObject"]["uid"], one["reason"]) == (uid, reason)][:limit]

    @_request
    def replace(self, kind: Kind, manifest: Resource) -> bool:
        key = self._key(kind, manifest)
        with self._lock:
            self._write("replace", key)
            stored = self._stored.get(key)
            if stored is None or manifest["metadata"].get("resourceVersion") != stored["metadata"]["resourceVersion"]:
                return False
            self._put(key, {**_copy(manifest), "status": stored.get("status", {})}, stored)
            return True

    @_request
    def delete(self, kind: Kind, namespace: str, name: str, *, grace_seconds: int | None = None) -> bool:
        with self._lock:
            self._write("delete", (kind.kind, namespace, name))
            held = self._stored.get((kind.kind, namespace, name))
            if held is not None and held["metadata"].get("finalizers"):
                head = {**held["metadata"], "deletionTimestamp": times.to_text(self._now_ms())}
                self._put((kind.kind, namespace, name), {**held, "metadata": head}, held)
                return True
            gone = self._stored.pop((kind.kind, namespace, name), None)
            if gone is not None:
                self._collect(gone["metadata"]["uid"])
            return gone is not None

    @_request
    def apply_status(
        self, kind: Kind, namespace: str, name: str, status: Mapping[str, Any], *, version: str
    ) -> Resource | None:
        key = (kind.kind, namespace, name)
        with self._lock:
            self._write("status", key)
            stored = self._stored.get(key)
            if stored is None:
                return None
            if version != stored["metadata"]["resourceVersion"]:
                raise ApiError(f"{kind.kind} {namespace}/{name}: the object has been modified", status=409)
            # One manager owns all of status: what it does not apply any more goes away.
            self._put(key, {**stored, "status": _copy(dict(status))}, stored)
            return self.stored(*key)

    @_request
    def set_finalizers(
        self, kind: Kind, namespace: str, name: str, finalizers: Sequence[str], *, version: str
    ) -> Resource | None:
        key = (kind.kind, namespace, name)
        with self._lock:
            self._write("finalizers", key)
            stored = self._stored.get(key)
            if stored is None:
                return None
            if version != stored["metadata"]["resourceVersion"]:
                raise ApiError(f"{kind.kind} {namespace}/{name}: the object has been modified", status=409)
            self._put(key, {**stored, "metadata": {**stored["metadata"], "finalizers": list(finalizers)}}, stored)
            found = self.stored(*key)
            if not finalizers and "deletionTimestamp" in found["metadata"]:
                del self._stored[key]
                self._collect(found["metadata"]["uid"])
            return found

    @_pod_request
    def logs(self, namespace: str, pod: str, *, container: str, lines: int) -> str:
        return "\n".join(self.log_texts.get(f"{namespace}/{pod}", "").splitlines()[-lines:])

    def edit(self, kind: Kind, namespace: str, name: str, change: Callable[[Resource], None]) -> None:
        """Change a resource as users, kubelets and controllers do."""
        key = (kind.kind, namespace, name)
        with self._lock:
            before = self._stored[key]
            after = _copy(before)
            change(after)
            self._put(key, after, before)

    def stored(self, kind: str, namespace: str, name: str) -> Resource:
        """The resource as it is stored, past `intercept` and `deny`."""
        with self._lock:
            found: Resource = _copy(self._stored[kind, namespace, name])
            return found

    def events(self, namespace: str) -> list[str]:
        """Reasons of the Events of a namespace, oldest first."""
        found = self._find(EVENT, namespace, {})
        return [one["reason"] for one in sorted(found, key=lambda one: int(one["metadata"]["resourceVersion"]))]

    def _put(self, key: _Key, after: Resource, before: Resource) -> None:
        if after == before:
            return
        self._version += 1
        metadata = {**after["metadata"], "resourceVersion": str(self._version)}
        if after.get("spec") != before.get("spec"):
            metadata["generation"] = before["metadata"].get("generation", 1) + 1
        self._stored[key] = {**after, "metadata": metadata}

    def _collect(self, owner_uid: str) -> None:
        for key, one in list(self._stored.items()):
            owners = one["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == owner_uid for owner in owners) and key in self._stored:
                del self._stored[key]
                self._collect(one["metadata"]["uid"])

    def _write(self, verb: str, key: _Key) -> None:
        if self.fail_next:
            raise self.fail_next.pop(0)
        self._admit(verb, key[0])
        self.requests.append((verb, key[0], key[2]))

    def _admit(self, verb: str, kind: str) -> None:
        if (verb, kind) in self.deny:
            self.denied[verb, kind] += 1
            raise self.deny[verb, kind]

    @staticmethod
    def _key(kind: Kind, manifest: Resource) -> _Key:
        return (kind.kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def _send(request: Request) -> Any:
    return request.send()


def _copy(value: Any) -> Any:
    """The value after its way over the wire."""
    return json.loads(json.dumps(value))
