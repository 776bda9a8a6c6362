"""/healthz, /readyz and /metrics on one port. The body of a failed probe has the reason. /metrics takes `name[]`, as its library does."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

#: The time limit of a silent connection, because each connection has a thread, and any pod of the cluster may open some. It is longer than
#: the time-out of any scrape.
_PATIENCE_S = 60.0


class ProbeServer:
    """Serves in a thread from `start` to `stop`. Every replica serves, leader or not."""

    def __init__(
        self,
        port: int,
        *,
        registry: CollectorRegistry,
        sick_of: Callable[[], str | None],
        waits_for: Callable[[], str | None],
        refresh: Callable[[], None],
        host: str = "0.0.0.0",  # noqa: S104 - kubelet and Prometheus come from outside the pod
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`sick_of` returns the problem of the process; `waits_for` returns what the process waits for until it is ready; None: nothing. A
        client that sends or takes nothing for `patience_s` loses its connection.
        """

        def answer(path: str, query: str) -> tuple[int, str, bytes]:
            if path == "/metrics":
                refresh()
                wanted = parse_qs(query).get("name[]")
                served = registry.restricted_registry(wanted) if wanted else registry
                return 200, CONTENT_TYPE_LATEST, generate_latest(served)
            if path == "/healthz":
                problem = sick_of()
            elif path == "/readyz":
                awaited = waits_for()
                problem = None if awaited is None else f"waiting for {awaited}"
            else:
                return 404, "text/plain", b"not found\n"
            return (503, "text/plain", f"{problem}\n".encode()) if problem else (200, "text/plain", b"ok\n")

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = patience_s

            def do_GET(self) -> None:
                code, content_type, body = answer(*self.path.partition("?")[::2])
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
                """Log nothing, because probes come every few seconds."""

        self._server = http.server.ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)

    @property
    def port(self) -> int:
        """The port on which the server listens. It differs from the port of the constructor when that was 0."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Start serving. Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
