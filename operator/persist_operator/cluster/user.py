"""The calls of a user's command line, with the user's kubeconfig: the calls of the port, a merge patch, a watch of one resource, and
following a log.

Unlike the port, a call retries passing failures of a server or a connection, because the user would only do the same. A refusal for a
missing right becomes `Forbidden`, which names the right.
"""

from __future__ import annotations

import contextlib
import json
import logging
import ssl
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import kubernetes
import yaml
from kubernetes.config import kube_config
from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage, PersistError

from persist_operator.cluster.kube import KubeCluster, client_of, resource_path
from persist_operator.cluster.port import POD, ApiError, Kind, Resource

#: Field manager of a spec that a user changes through the command line. Flux takes over the fields of a manager whose name begins with
#: `kubectl`, and reverts them at its next sync.
SPEC_MANAGER = "kubectl-persist"
#: Field manager of requests. They must survive a sync, because an approval counts until its run has succeeded.
REQUEST_MANAGER = "persist-requests"
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_NAMESPACE = "default"
#: Codes after which the next try may succeed. 409: another writer came first, and a patch has no version.
_PASSING = {0, 409, 429, 500, 502, 503, 504}
_TRIES = 4
#: The time without an answer after which the user sees what a call waits for.
QUIET_S = 2.0
_PAUSE_S = (0.5, 4.0)
#: A watch without an event ends after this, and begins again with a read.
_WATCH_S = 30.0
#: The longest time without a line of a log.
_LOG_IDLE_S = 3600.0
#: The library's errors for a kubeconfig with values of wrong types, with bytes that are not text, or with missing files.
_UNUSABLE = (AttributeError, LookupError, OSError, TypeError, ValueError)
_T = TypeVar("_T")


class Forbidden(PersistError):
    """The API server refused a request because of a missing right, which the message names."""


@dataclass(frozen=True, slots=True)
class Access:
    """The target of the user's requests: a client, the namespace of the context, and the name of the context, which is empty in a pod."""

    client: kubernetes.client.ApiClient
    namespace: str
    context: str


def load_access(kubeconfig: str | None, context: str | None) -> Access:
    """The access that kubectl would use: the file, or $KUBECONFIG, or ~/.kube/config; in a pod without any of them, its service account.
    Raises InvalidUsage when there is none, for an unknown context, and for unusable credentials. No message shows credentials.
    """
    configuration = kubernetes.client.Configuration()
    try:
        document = kube_config.KubeConfigMerger(kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION).config
        if document is None:
            raise kubernetes.config.ConfigException("there is no kubeconfig, or it is empty")
        known = {str(one["name"]) for one in document.value.get("contexts") or ()}
        if context is not None and context not in known:
            raise InvalidUsage(f"no context {context!r} in the kubeconfig; there are: {', '.join(sorted(known))}")
        # Without a base path, relative paths are relative to the file that contains them.
        loader = kube_config.KubeConfigLoader(document, active_context=context, config_base_path=None)
    except (kubernetes.config.ConfigException, yaml.YAMLError, *_UNUSABLE) as error:
        if kubeconfig is None and context is None and (_IN_CLUSTER / "token").exists():
            kubernetes.config.load_incluster_config(client_configuration=configuration)
            return Access(client_of(configuration), (_IN_CLUSTER / "namespace").read_text().strip(), "")
        raise InvalidUsage(f"no access to a cluster: {error}; name a file with --kubeconfig or $KUBECONFIG") from error
    chosen = loader.current_context
    try:
        _load_credentials(loader, configuration)
    except (kubernetes.config.ConfigException, *_UNUSABLE) as error:
        raise InvalidUsage(f"the kubeconfig cannot be used: {error or type(error).__name__}") from error
    namespace = str(chosen["context"].get("namespace") or _DEFAULT_NAMESPACE)
    return Access(client_of(configuration), namespace, str(chosen["name"]))


def _load_credentials(loader: kube_config.KubeConfigLoader, configuration: kubernetes.client.Configuration) -> None:
    """Load the credentials. Raises ConfigException when a plugin failed, after which the library would continue without credentials. Also
    raises it for a token that no request can contain, because the error of the request would show the token. A line end after the token is
    dropped. Raises OSError and ValueError for an invalid certificate.
    """
    with _logged_errors() as errors:
        loader.load_and_set(configuration)
    if errors and not configuration.api_key and not configuration.cert_file:
        raise kubernetes.config.ConfigException(f"its login plugin failed: {'; '.join(errors)}")
    _check_files(configuration)
    token = str(getattr(loader, "token", ""))
    if not token.strip().isprintable():
        raise kubernetes.config.ConfigException("its token has a line end or another control character within")
    if token != token.strip():
        loader.token = configuration.api_key["BearerToken"] = token.strip()


def _check_files(configuration: kubernetes.client.Configuration) -> None:
    """Read the client's certificate, because the error of the first request would not show that the certificate is the kubeconfig's."""
    if configuration.cert_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Without a password OpenSSL would ask the terminal for one. The client has no password.
        context.load_cert_chain(configuration.cert_file, configuration.key_file or None, password="")


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Yields the errors that are logged within the block. They do not reach the log."""
    texts: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger().removeHandler(handler)


class UserCluster:
    """The API server with a user's rights. Thread-safe."""

    def __init__(
        self, client: kubernetes.client.ApiClient, env: Env, *, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """`on_wait` receives one line, in another thread, when a call has waited for QUIET_S. It is called only once."""
        self._kube, self._env = KubeCluster(client), env
        self._server, self._on_wait = str(client.configuration.host), on_wait

    def get(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        """The resource; None when there is none."""
        found = self._asked("get", kind, namespace, lambda: self._kube.get(kind, namespace, name))
        return None if found is None else {"apiVersion": kind.api_version, "kind": kind.kind, **found}

    def find(
        self,
        kind: Kind,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        *,
        field: tuple[str, str] | None = None,
    ) -> list[Resource]:
        """All resources with `labels` in the namespace; in every namespace when it is None. `field`: a selectable field and its value."""
        return self._asked("list", kind, namespace, lambda: self._kube.find(kind, namespace, labels or {}, field=field))

    def create(self, kind: Kind, manifest: Resource) -> bool:
        """Create the resource. False when one of this name exists."""
        namespace = manifest["metadata"]["namespace"]
        return self._asked("create", kind, namespace, lambda: self._kube.create(kind, manifest))

    def try_create(self, kind: Kind, manifest: Resource) -> None:
        """Let the API server check a creation without creating anything."""
        namespace = manifest["metadata"]["namespace"]
        self._asked("create", kind, namespace, lambda: self._kube.try_create(kind, manifest))

    def delete(self, kind: Kind, namespace: str, name: str) -> bool:
        """Delete the resource. False when there was none."""
        return self._asked("delete", kind, namespace, lambda: self._kube.delete(kind, namespace, name))

    def patch(self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any]) -> Resource | None:
        """Merge `change` into the resource. Returns the changed resource; None when there is none. Idempotent."""
        manager = SPEC_MANAGER if "spec" in change else REQUEST_MANAGER
        return self._asked(
            "patch", kind, namespace, lambda: self._kube.merge_patch(kind, namespace, name, change, manager=manager)
        )

    def follow(
        self, kind: Kind, namespace: str, name: str, *, until_s: float | None
    ) -> Generator[Resource | None, None, None]:
        """The resource now, and after each change, until `until_s` of the monotonic clock; None when it is gone. A broken watch begins
        again with a read, so the last state is never missed.
        """
        while True:
            found = self.get(kind, namespace, name)
            yield found
            left_s = None if until_s is None else until_s - self._env.monotonic_s()
            if found is None or (left_s is not None and left_s <= 0):
                return
            yield from self._changes(kind, found, _WATCH_S if left_s is None else min(_WATCH_S, left_s))

    def _changes(self, kind: Kind, known: Resource, seconds: float) -> Generator[Resource, None, None]:
        """The changes of `known` that a watch from its version shows, for about `seconds`, without its deletion."""
        metadata = known["metadata"]
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={metadata['name']}",
            "resourceVersion": metadata.get("resourceVersion", ""),
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        namespace = metadata["namespace"]
        began_s = self._env.monotonic_s()
        lines = self._kube.stream(resource_path(kind, namespace), query, idle_s=max(0.05, seconds))
        with contextlib.closing(lines), self._explained("watch", kind, namespace), _unbroken():
            for line in lines:
                event = _event(line)
                if event is None or event.get("type") in {"DELETED", "ERROR"}:
                    break
                shown = event.get("object") or {}
                if shown.get("metadata", {}).get("name") == metadata["name"]:
                    yield {"apiVersion": kind.api_version, "kind": kind.kind, **shown}
                if self._env.monotonic_s() - began_s >= seconds:
                    return
        if self._env.monotonic_s() - began_s < _PAUSE_S[0]:
            self._env.sleep(_PAUSE_S[0])  # avoids a tight loop if a server ends every watch at once

    def log_lines(
        self,
        namespace: str,
        pod: str,
        *,
        container: str | None,
        lines: int | None,
        follow: bool,
        previous: bool = False,
    ) -> Generator[str, None, None]:
        """The last `lines` lines of the pod's log (all when None), and with `follow` also new lines, until the container ends. Raises
        ApiError after the lines so far when the connection broke. A log that ends without an error is complete.
        """
        query = {
            **({"container": container} if container else {}),
            **({} if lines is None else {"tailLines": str(lines)}),
            **({"follow": "true"} if follow else {}),
            **({"previous": "true"} if previous else {}),
        }
        path = resource_path(POD, namespace, pod) + "/log"
        with self._explained("get", Kind("v1", "Pod", "pods/log"), namespace):
            for line in self._kube.stream(path, query, idle_s=_LOG_IDLE_S):
                yield line.decode("utf-8", "replace")

    def _asked(self, verb: str, kind: Kind, namespace: str | None, send: Callable[[], _T]) -> _T:
        """The result of `send`, which is retried after a passing failure."""
        pause_s = _PAUSE_S[0]
        with self._explained(verb, kind, namespace), self._heard():
            for _ in range(_TRIES - 1):
                try:
                    return send()
                except ApiError as error:
                    if error.status not in _PASSING:
                        raise
                    self._env.sleep(max(pause_s, min(error.retry_after_s, _PAUSE_S[1])))
                    pause_s = min(2 * pause_s, _PAUSE_S[1])
            return send()

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """Shows what a call waits for, if it waits long."""
        if self._on_wait is None:
            yield
            return

        def say() -> None:
            on_wait, self._on_wait = self._on_wait, None
            if on_wait is not None:
                on_wait(f"waiting: no answer yet from the API server at {self._server}")

        timer = threading.Timer(QUIET_S, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _explained(self, verb: str, kind: Kind, namespace: str | None) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            if error.status == 403:
                raise Forbidden(_missing(verb, kind, namespace, str(error))) from error
            if error.status == 401:
                raise Forbidden(
                    "the API server does not know this user: log in again, or name another --context"
                ) from error
            raise


@contextlib.contextmanager
def _unbroken() -> Iterator[None]:
    """Ends a watch whose connection broke, or on which nothing came. The caller begins again with a read."""
    try:
        yield
    except ApiError as error:
        if error.status:
            raise


def _missing(verb: str, kind: Kind, namespace: str | None, text: str) -> str:
    """The message for a refusal. Quotas and admission also answer 403, and their own message has the reason."""
    if "cannot" not in text:
        return text
    group = kind.api_version.partition("/")[0] if "/" in kind.api_version else ""
    where = f"namespace {namespace}" if namespace else "all namespaces"
    resource = f"{kind.plural}.{group}" if group else kind.plural
    rule = f'apiGroups: ["{group}"], resources: ["{kind.plural}"], verbs: ["{verb}"]'
    return f"the right to {verb} {resource} in {where} is missing; a rule of a Role gives it: {rule}"


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None  # the end of a connection that broke within a line
    return event if isinstance(event, dict) else None
