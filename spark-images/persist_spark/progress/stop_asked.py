"""The listener that lets the operator ask this driver to stop: `POST /stop` with the token of this pod is the same as SIGTERM.

Must not know: what a stop does, and the token. It knows the token's digest, so nothing that the pod shows stops the driver. Other pods may
reach the port, so each connection is bounded, and nothing that a client sends is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from persist_spark.report import Log

PATH = "/stop"
#: The time that one connection has, from its beginning to its end.
REQUEST_S = 5.0
#: The connections at one time. The operator needs one; more are closed at once.
CONNECTIONS_MAX = 8


@dataclass(frozen=True, slots=True)
class StopPort:
    """Where a driver listens, and the SHA-256 of the token that stops it, in hex."""

    port: int
    digest: str


@contextmanager
def stop_served(at: StopPort | None, log: Log) -> Iterator[None]:
    """While the body runs, listens on the port, of every address. Without a port, nothing listens. If the port is taken, it logs that, and
    the body still runs: SIGTERM stops it.
    """
    if at is None:
        yield
        return
    try:
        server = _Server(at, log)
    except OSError as error:
        log.event("stop_not_served", port=at.port, error=str(error))
        yield
        return
    thread = threading.Thread(target=server.serve_forever, name="stop", daemon=True)
    thread.start()
    log.event("stop_served", port=server.server_address[1])
    try:
        yield
    finally:
        server.end()
        thread.join()


class _Server(ThreadingMixIn, TCPServer):
    """Serves each connection in a thread. The end of the process waits for none of them."""

    daemon_threads, block_on_close = True, False
    allow_reuse_address = True

    def __init__(self, at: StopPort, log: Log) -> None:
        self.digest, self.log = at.digest, log
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        # A socket of IPv6 also takes connections of IPv4, and a pod may have either.
        is_dual = socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if is_dual else socket.AF_INET
        super().__init__(("", at.port), _Request)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def end(self) -> None:
        """Ends the listener. Requests under way end by themselves."""
        with suppress(OSError):
            # This wakes the thread of the listener, which otherwise looks twice a second whether it must end.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A limit on each read alone would let a client that sends a byte at a time stay for ever.
        limit = threading.Timer(REQUEST_S, _cut, (request,))
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks its connection is no event of the run."""


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """One request. Its body is not read, and the connection ends with the answer."""

    server: _Server
    timeout = REQUEST_S

    def do_POST(self) -> None:
        if self.path != PATH:
            self._answer(HTTPStatus.NOT_FOUND)
        elif self._is_allowed():
            # The same way as for a stop from outside, and before the answer: 202 says that the driver is stopping.
            os.kill(os.getpid(), signal.SIGTERM)
            self.server.log.event("stop_asked")
            self._answer(HTTPStatus.ACCEPTED)
        else:
            self._answer(HTTPStatus.UNAUTHORIZED)

    def _is_allowed(self) -> bool:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
        return hmac.compare_digest(digest, self.server.digest) and scheme == "Bearer"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that http.server refuses, without its page. 501 is its answer to each method but POST."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code = HTTPStatus.METHOD_NOT_ALLOWED if self.path == PATH else HTTPStatus.NOT_FOUND
        self._answer(HTTPStatus(code))

    def _answer(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self.send_response_only(status)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of http.server
        """Nothing that a client sends is logged."""
