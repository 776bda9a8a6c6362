"""Graceful stops of drivers: the key from which the tokens derive, and the request `POST /stop` to a driver.

The key is a Secret of the operator's own namespace. The operator creates it once and mounts it; it has no right to read Secrets. A token is
bound to the uid of a resource and the name of a pod, so another pod that gets it can use it nowhere. A driver's pod shows only the token's
digest.

Must not know: which drivers to stop, and how their pods are built.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from base64 import b64encode
from pathlib import Path

from persist_engine.base.env import Env

from persist_operator.cluster.port import SECRET, Cluster, Resource
from persist_operator.settings import StopSettings

#: Where the operator's pod mounts the key.
KEY_FILE = Path("/var/run/secrets/persist/stop/key")
_LOG = logging.getLogger(__name__)
_KEY, _KEY_BYTES = KEY_FILE.name, 32
#: The time that a driver has for its whole answer, the connection included. A worker waits for it.
_ANSWER_S = 2.5
#: The beginning of an answer, up to its code.
_ACCEPTED = (b"HTTP/1.0 202", b"HTTP/1.1 202")


def create_key(cluster: Cluster, settings: StopSettings, env: Env) -> bool:
    """Create the Secret with a random key. Returns False when it exists, because another replica or an earlier process created it. The
    kubelet shows it to the operator's pods within some 90 s. Raises ApiError.
    """
    secret: Resource = {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": {"namespace": settings.namespace, "name": settings.secret_name},
        "type": "Opaque",
        "data": {_KEY: b64encode(env.random_bytes(_KEY_BYTES)).decode()},
    }
    return cluster.create(SECRET, secret)


class DriverStops:
    """The Stops of real drivers. Thread-safe."""

    def __init__(self, key_file: Path = KEY_FILE) -> None:
        self._key_file = key_file

    def is_ready(self) -> bool:
        """Whether there is a key."""
        return self._key() is not None

    def digest(self, uid: str, pod: str) -> str | None:
        token = self._token(uid, pod)
        return None if token is None else hashlib.sha256(token.encode()).hexdigest()

    def ask(self, host: str, port: int, *, uid: str, pod: str) -> bool:
        token = self._token(uid, pod)
        if token is None:
            return False
        try:
            address = ipaddress.ip_address(host)
            return _posted(str(address), port, token)
        except (ValueError, OSError) as error:
            _LOG.info("driver not asked to stop", extra={"pod": pod, "error": str(error)})
            return False

    def _token(self, uid: str, pod: str) -> str | None:
        key = self._key()
        return None if key is None else hmac.new(key, f"{uid}/{pod}".encode(), hashlib.sha256).hexdigest()

    def _key(self) -> bytes | None:
        """The key as it is mounted now, because the kubelet may show it, or another one, at any time."""
        try:
            key = self._key_file.read_bytes()
        except OSError:
            return None
        if len(key) < _KEY_BYTES:
            _LOG.warning("the key of stops is too short and not used", extra={"file": str(self._key_file)})
            return None
        return key


def _posted(host: str, port: int, token: str) -> bool:
    """Whether the driver accepts. Raises OSError when there is no answer in time.

    A client library limits each read, and a driver, which runs a user's code, could then answer for ever. It would also use proxies, follow
    redirects and read bodies. Nothing but the code of the answer is read here.
    """
    until_s = time.monotonic() + _ANSWER_S

    def left_s() -> float:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        return left_s

    name = f"[{host}]" if ":" in host else host
    lines = [
        "POST /stop HTTP/1.1",
        f"Host: {name}:{port}",
        f"Authorization: Bearer {token}",
        "Content-Length: 0",
        "Connection: close",
    ]
    answer, wanted = b"", len(_ACCEPTED[0])
    with socket.create_connection((host, port), timeout=_ANSWER_S) as connection:
        connection.settimeout(left_s())
        connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        while len(answer) < wanted:
            connection.settimeout(left_s())
            chunk = connection.recv(wanted - len(answer))
            if not chunk:
                raise ConnectionError("the answer is no HTTP")
            answer += chunk
    return answer in _ACCEPTED
