"""Runs the console's server until a signal. Owns its socket, so that a busy port is a clear error before anything starts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

import uvicorn
from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage

from persist_operator.console.guard import Hosts
from persist_operator.console.patience import PatientForAWhile
from persist_operator.console.port import Source
from persist_operator.console.web import Entrance, console

#: Shown when other machines can reach the console: without an entrance it cannot distinguish users, and a pod's console may change nothing.
ONLY_READS = (
    "This console only reads, because other machines can reach it. Approve from `persist ui` on your own machine."
)
#: How long requests under way may take after a signal.
_GRACE_S = 2
_BACKLOG = 64


def serve(
    source: Source,
    *,
    env: Env,
    address: str,
    port: int,
    host_names: Iterable[str],
    entrance: Entrance | None = None,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. `announce` gets the URL when the port is taken; port 0 takes a free one. Raises InvalidUsage for an
    address or port that cannot be taken.
    """
    listener = _listener(address, port)
    with listener:
        taken = listener.getsockname()[1]
        shown = f"[{address}]" if ":" in address else address
        announce(f"http://{shown}:{taken}/")
        only_reads = "" if is_loopback(address) and entrance is None else ONLY_READS
        app = console(source, env=env, hosts=Hosts.of([*host_names, address]), entrance=entrance, only_reads=only_reads)
        # The server header and the access log would reveal more about the machine than a page needs.
        config = uvicorn.Config(
            app,
            http=PatientForAWhile,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_GRACE_S,
        )
        uvicorn.Server(config).run(sockets=[listener])


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach a server at this address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _listener(address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidUsage(f"--address {address}: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(target)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise InvalidUsage(
            f"{address}:{port} cannot be taken ({error.strerror}): choose another with --port"
        ) from error
    return made
