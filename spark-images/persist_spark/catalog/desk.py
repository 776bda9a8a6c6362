"""The desk of a catalog: a Unix socket to which the JVM sends requests. Each connection has one JSON request and one JSON answer.

A request is `{"ask": NAME, ...}`, and the answer `{"is": VALUE}` or `{"refused": TEXT}`. Requests are served in threads, because a load
may wait for a store. The socket is in a folder that only this user can enter.
"""

from __future__ import annotations

import json
import logging
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.secrets import without_secrets

from persist_spark.catalog.tables import Tables

_log = logging.getLogger(__name__)


class Desk:
    """Answers at `address` until `close`. The constructor starts the threads."""

    def __init__(self, tables: Tables, address: Path) -> None:
        asks: Mapping[str, Callable[..., Any]] = {
            "namespaces": tables.namespaces,
            "tables": tables.tables,
            "exists": tables.exists,
            "create": tables.create,
            "alter": tables.alter,
            "drop": tables.drop,
            "delete": tables.delete,
            "load": tables.load,
            "changes": tables.changes,
            "answers": tables.answers,
            "aggregates": tables.aggregates,
            "scan": tables.scan,
            "stream": tables.stream,
            "writing": tables.writing,
            "drop_frame": tables.drop_frame,
        }

        class Request(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(json.dumps(_answer(asks, self.rfile.read())).encode())

        self._server = _Server(str(address), Request)
        threading.Thread(target=self._server.serve_forever, name="persist-catalog-desk", daemon=True).start()

    def close(self) -> None:
        """Stops answering requests."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def _answer(asks: Mapping[str, Callable[..., Any]], request: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(request)
        what = asked.pop("ask")
        if what not in asks:
            raise InvalidUsage(
                f"the jar of the catalog asked for {what!r}, which this persist_spark does not know: use the jar of its release"
            )
        return {"is": asks[what](**asked)}
    except PersistError as error:
        return {"refused": without_secrets(str(error))}
    except Exception as error:  # noqa: BLE001 - the JVM must get an answer to every request
        _log.exception("a request of the catalog failed")
        return {"refused": without_secrets(f"{type(error).__name__}: {error}")}
