"""The checks for every request, and the headers of every answer: the Host check, the headers, and the token of forms.

A page of another site may send requests to a server on this machine. The Host check refuses requests for which a name of that site was
resolved to this machine (DNS rebinding). A POST must come from a page of this server: its Origin is this host, and its form has the token
of the browser's cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "persist-console"
FIELD = "token"
#: Pages load their style and script from this server, and nothing from other hosts. No page may frame them.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # `no-referrer` would make the Origin of the forms `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
#: The longest body. A form of the console has only a token and an id.
BODY_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names by which browsers may address the server."""

    names: frozenset[str]
    loopback: bool = True
    """Whether the names of this machine's loopback are among them."""

    @classmethod
    def of(cls, names: Iterable[str], *, loopback: bool = True) -> Hosts:
        """From host names without ports."""
        return cls(frozenset(name.lower() for name in names), loopback)

    def allows(self, host: str | None) -> bool:
        """Whether a request with this Host header is for this server. The port does not matter, because the request has arrived."""
        name = host_name(host or "")
        if name in self.names:
            return True
        return self.loopback and (name == "localhost" or _is_loopback(name))


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Forms:
    """The tokens of forms. Each process draws a new `key`, so no token outlives the process."""

    key: bytes = field(repr=False)

    def token(self, cookie: str) -> str:
        """The token for the browser with this cookie."""
        return hmac.new(self.key, cookie.encode(), hashlib.sha256).hexdigest()

    def problem(self, headers: Mapping[str, str], cookie: str | None, token: str) -> str:
        """Empty when a POST with these headers (in lower case) comes from a page of this server; otherwise the reason for its refusal."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if headers.get("sec-fetch-site") not in {None, "same-origin"}:
            return "the request comes from a page of another site"
        # A proxy may end TLS, so the scheme is not compared.
        if origin is None or "://" not in origin or origin.partition("://")[2].lower() != host.lower():
            return "the request has no Origin header, or that of another site"
        if not cookie or not token.isascii() or not hmac.compare_digest(self.token(cookie), token):
            return "the form is old: load the page again and repeat"
        return ""


class Guard:
    """ASGI middleware: refuses requests for other hosts and large bodies, and adds the headers."""

    def __init__(self, app: ASGIApp, *, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        # Probes of a kubelet use the address of the pod.
        if scope["path"] != "/healthz" and not self._hosts.allows(headers.get("host")):
            text = f"this console is not called {host_name(headers.get('host', ''))!r}; start it with --host-name to allow a name\n"
            await PlainTextResponse(text, status_code=421)(scope, receive, send_with_headers)
            return
        length = headers.get("content-length", "0")
        is_long = not length.isdecimal() or int(length) > BODY_BYTES_MAX or "transfer-encoding" in headers
        if scope["method"] not in {"GET", "HEAD"} and is_long:
            await PlainTextResponse("the request is too long\n", status_code=413)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)
