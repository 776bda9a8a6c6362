"""The port over the official client: uses its configuration, TLS, tokens and connection pool, and plain JSON instead of its models.

The models would drop unknown fields and double the memory. Every request has a time-out. The caller decides about retries.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import kubernetes
import urllib3
from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names
from persist_operator.cluster.port import EVENT, POD, ApiError, Kind, Resource

_TIMEOUT_S = (5.0, 20.0)
_PAGE = 500
#: The most pages of a list. A million resources have fewer, and etcd cannot hold more than that.
_PAGES_MAX = 2000
_CHUNK_BYTES = 1 << 16
#: How much of the end of a log is kept, and of how much of it: a line of a driver may have any length.
_LOG_BYTES, _LOG_READ_BYTES = 1 << 16, 1 << 23
_GONE = 410
#: The most tries of an expired list. Its version lives for minutes, so a second expiry means that the API server is in trouble.
_LISTS_MAX = 3
#: The longest requested pause of the API server that is respected.
_RETRY_AFTER_MAX_S = 300.0
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

#: Called after every request with verb, HTTP code (0 without an answer) and seconds.
OnRequest = Callable[[str, int, float], None]


class _Expired(Exception):
    """The version of a list was compacted before its last page."""


def load_client() -> kubernetes.client.ApiClient:
    """The client with the pod's service account; outside a cluster, with the current context of the kubeconfig."""
    configuration = kubernetes.client.Configuration()
    if _IN_CLUSTER.exists():
        kubernetes.config.load_incluster_config(client_configuration=configuration)
    else:
        kubernetes.config.load_kube_config(client_configuration=configuration)
    return client_of(configuration)


def client_of(configuration: kubernetes.client.Configuration) -> kubernetes.client.ApiClient:
    """A client that does not retry."""
    configuration.connection_pool_maxsize = 32
    configuration.retries = False
    return kubernetes.client.ApiClient(configuration)


class KubeCluster:
    """The Cluster of a real API server. Thread-safe."""

    def __init__(self, client: kubernetes.client.ApiClient, *, on_request: OnRequest | None = None) -> None:
        self._client = client
        self._on_request = on_request or (lambda verb, status, seconds: None)

    def get(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        status, body = self.call("GET", _path(kind, namespace, name))
        return None if status == 404 else _object(body)

    def find(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str], *, field: tuple[str, str] | None = None
    ) -> list[Resource]:
        """See Cluster. `field`: only resources whose field has this value. The kind must support selection by this field."""
        for _ in range(_LISTS_MAX):
            with contextlib.suppress(_Expired):
                return [one for page in self._pages(kind, namespace, labels, field) for one in page]
        raise ApiError(f"every list of {kind.plural} expires before its last page", status=_GONE)

    def pages(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> Iterator[list[Resource]]:
        for _ in range(_LISTS_MAX):
            with contextlib.suppress(_Expired):
                yield from self._pages(kind, namespace, labels)
                return
        raise ApiError(f"every list of {kind.plural} expires before its last page", status=_GONE)

    def _pages(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str], field: tuple[str, str] | None = None
    ) -> Iterator[list[Resource]]:
        """The pages of one list. Raises _Expired when the API server compacted the version of the list before its last page."""
        query = {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        if field:
            query["fieldSelector"] = "=".join(field)
        for _ in range(_PAGES_MAX):
            status, body = self.call("GET", _path(kind, namespace), query=query, accept=(_GONE,))
            if status == _GONE:
                raise _Expired
            if status == 404:
                raise ApiError(
                    f"the API server does not know {kind.plural}: are the resource definitions installed?", status=404
                )
            page = _object(body)
            yield [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page.get("items") or ()]
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token
        raise ApiError(f"the list of {kind.plural} does not end: it has more than {_PAGES_MAX} pages", status=0)

    def served(self, api_version: str) -> frozenset[str]:
        status, body = self.call("GET", _root(api_version))
        return frozenset() if status == 404 else frozenset(one["name"] for one in _object(body).get("resources", ()))

    def create(self, kind: Kind, manifest: Resource) -> bool:
        path = _path(kind, manifest["metadata"]["namespace"])
        status, body = self.call("POST", path, body=manifest, accept=(409,))
        # The reason Conflict has the same code. It comes from a quota that is being changed, and nothing was created then.
        if status == 404 or (status == 409 and _object(body).get("reason") != "AlreadyExists"):
            raise _not_created(path, status, body)
        return status != 409

    def try_create(self, kind: Kind, manifest: Resource) -> None:
        path = _path(kind, manifest["metadata"]["namespace"])
        status, body = self.call("POST", path, query={"dryRun": "All"}, body=manifest, accept=(409,))
        if status == 404:
            raise _not_created(path, status, body)

    def events_about(self, namespace: str, uid: str, *, reason: str, limit: int) -> list[Resource]:
        query = {"fieldSelector": f"involvedObject.uid={uid},reason={reason}", "limit": str(limit)}
        status, body = self.call("GET", _path(EVENT, namespace), query=query)
        return [] if status == 404 else list(_object(body).get("items") or ())

    def replace(self, kind: Kind, manifest: Resource) -> bool:
        metadata = manifest["metadata"]
        status, _ = self.call("PUT", _path(kind, metadata["namespace"], metadata["name"]), body=manifest, accept=(409,))
        return status not in {404, 409}

    def delete(self, kind: Kind, namespace: str, name: str, *, grace_seconds: int | None = None) -> bool:
        options: Resource = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        status, _ = self.call("DELETE", _path(kind, namespace, name), body=options)
        return status != 404

    def apply_status(
        self, kind: Kind, namespace: str, name: str, status: Mapping[str, Any], *, version: str
    ) -> Resource | None:
        manifest = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            # The API server refuses an apply with a version by 409 when another version is stored, with `force` too.
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": version},
            "status": dict(status),
        }
        # An apply to the resource itself would create it again after a deletion. An apply to the status subresource answers 404.
        code, answer = self.call(
            "PATCH",
            _path(kind, namespace, name) + "/status",
            query={"fieldManager": names.MANAGER, "force": "true"},
            body=manifest,
            content_type="application/apply-patch+yaml",
        )
        return None if code == 404 else _object(answer)

    def set_finalizers(
        self, kind: Kind, namespace: str, name: str, finalizers: Sequence[str], *, version: str
    ) -> Resource | None:
        change = {"metadata": {"finalizers": list(finalizers), "resourceVersion": version}}
        return self.merge_patch(kind, namespace, name, change, manager=names.MANAGER)

    def merge_patch(
        self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any], *, manager: str
    ) -> Resource | None:
        """Merge `change` into the resource, as the field manager `manager`. Returns the changed resource; None when there is none.
        Idempotent. For the other modules of this room.
        """
        code, answer = self.call(
            "PATCH",
            _path(kind, namespace, name),
            query={"fieldManager": manager},
            body=dict(change),
            content_type="application/merge-patch+json",
        )
        return None if code == 404 else _object(answer)

    def logs(self, namespace: str, pod: str, *, container: str, lines: int) -> str:
        end = b""
        # SUBTLE: the limit of the API server keeps the beginning of the lines, and the cause of a failure is at their end.
        query = {"container": container, "tailLines": str(lines), "limitBytes": str(_LOG_READ_BYTES)}
        try:
            for chunk in self._chunks(_path(POD, namespace, pod) + "/log", query, idle_s=_TIMEOUT_S[1]):
                end = (end + chunk)[-_LOG_BYTES:]
        except ApiError as error:
            if error.status not in {400, 404}:
                raise
        return end.decode("utf-8", "replace")

    def stream(self, path: str, query: Mapping[str, str], *, idle_s: float) -> Generator[bytes, None, None]:
        """The lines of a long answer, such as a watch or a log, as they come, until the server ends it. Raises ApiError before the first
        line, as for every request. Raises ApiError with status 0 after any line, when the connection broke or no line came for `idle_s`
        seconds; there may be more lines then. For the other modules of this room.
        """
        held = b""
        with contextlib.closing(self._chunks(path, query, idle_s=idle_s)) as chunks:
            for chunk in chunks:
                *lines, held = (held + chunk).split(b"\n")
                yield from lines
        if held:
            yield held

    def _chunks(self, path: str, query: Mapping[str, str], *, idle_s: float) -> Generator[bytes, None, None]:
        """The body of an answer in pieces. ApiError as from `stream`."""
        response = self._send("GET", path, query=query, read_s=idle_s, preload=False)
        try:
            if response.status >= 300:
                raise _refusal("GET", path, response)
            while chunk := response.read1(_CHUNK_BYTES):
                yield chunk
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"GET {path}: the answer broke off: {error}", status=0) from error
        finally:
            response.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Resource | None = None,
        content_type: str = "application/json",
        accept: tuple[int, ...] = (),
    ) -> tuple[int, bytes]:
        """(code, body) of a success, of 404 and of the codes in `accept`. Raises ApiError for every other answer."""
        response = self._send(method, path, query=query, body=body, content_type=content_type)
        if response.status < 300 or response.status == 404 or response.status in accept:
            return response.status, response.data
        raise _refusal(method, path, response)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Resource | None = None,
        content_type: str = "application/json",
        read_s: float = _TIMEOUT_S[1],
        preload: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        """The answer, with any code. Raises ApiError with status 0 when there is no answer."""
        headers = {"Accept": "application/json, */*", "Content-Type": content_type, "User-Agent": names.MANAGER}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        started = time.monotonic()
        try:
            response: urllib3.BaseHTTPResponse = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(connect=_TIMEOUT_S[0], read=read_s),
                retries=False,
                preload_content=preload,
            )
        except urllib3.exceptions.HTTPError as error:
            self._on_request(method, 0, time.monotonic() - started)
            raise ApiError(f"{method} {path}: {error}", status=0) from error
        self._on_request(method, response.status, time.monotonic() - started)
        return response


def _refusal(method: str, path: str, response: urllib3.BaseHTTPResponse) -> ApiError:
    return ApiError(
        f"{method} {path}: {response.status} {_reason(response.data)}",
        status=response.status,
        retry_after_s=_retry_after_s(response.headers.get("Retry-After")),
    )


def _not_created(path: str, status: int, body: bytes) -> ApiError:
    """The error for a creation that was answered with 404 (the namespace is gone, or a webhook did not find another object), or 409."""
    return ApiError(f"POST {path}: {status} {_reason(body)}", status=status)


def is_segment(name: str) -> bool:
    """Whether `name` can be a part of a path. An empty name would request all resources, and dots would request a parent path."""
    return name not in {"", ".", ".."}


def resource_path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
    """The path of a resource, of a namespace's resources, or of all of a kind. For the other modules of this room."""
    return _path(kind, namespace, name)


def _path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
    if not all(is_segment(one) for one in (namespace or "x", "x" if name is None else name)):
        raise InvalidUsage(f"no resource of the cluster can be called {name!r} in namespace {namespace!r}")
    scope = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{_root(kind.api_version)}{scope}/{kind.plural}" + ("" if name is None else f"/{quote(name, safe='')}")


def _root(api_version: str) -> str:
    return f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"


def _object(body: bytes) -> Resource:
    try:
        document = json.loads(body)
    except ValueError as error:  # a proxy in between may have answered
        raise ApiError(f"the API server's answer is not JSON: {body[:200]!r}", status=0) from error
    if not isinstance(document, dict):
        raise ApiError(f"the API server's answer is no object: {body[:200]!r}", status=0)
    return document


def _retry_after_s(header: str | None) -> float:
    """The seconds in the header; 0 without a header, and for a date, which Kubernetes does not send."""
    return min(float(header), _RETRY_AFTER_MAX_S) if header and header.isdecimal() else 0.0


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body).get("message", ""))[:2000]
    except (ValueError, AttributeError):
        return body[:200].decode("utf-8", "replace")
