"""Finds out the user of a request to a console for many users, by a token that the API server reviews or by the headers of a proxy.

Headers of a proxy count only when the connection comes from an address that the configuration names, because any client can write them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage
from starlette.requests import HTTPConnection

from persist_operator.cluster.port import ApiError
from persist_operator.cluster.viewing import TOKEN_REVIEW, ViewedCluster
from persist_operator.console.port import Unavailable, Viewer
from persist_operator.console.web import NotSignedIn

#: How long an answer about a token is used.
_REMEMBERED_S = 10.0
_REMEMBERED_MAX = 1024
#: The prefix of the names of the cluster's own users and groups.
_RESERVED = "system:"
#: The longest token. Tokens of Kubernetes are shorter.
_TOKEN_MAX = 8192

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedProxy:
    """A proxy that signs users in: the addresses from which it connects, and the headers with the user and the groups (separated by
    commas).
    """

    networks: tuple[Network, ...]
    user_header: str
    groups_header: str = ""

    @classmethod
    def of(cls, networks: list[str], user_header: str, groups_header: str) -> TrustedProxy | None:
        """None without a network and a header. Raises InvalidUsage for one without the other, and for an invalid network."""
        if not networks and not user_header:
            return None
        if not networks or not user_header:
            raise InvalidUsage(
                "--trust-proxy and --trust-user-header go together: which proxy, and which header it sets"
            )
        try:
            parsed = tuple(ipaddress.ip_network(one) for one in networks)
        except ValueError as error:
            raise InvalidUsage(f"--trust-proxy: {error}; give an address or a network such as 10.0.0.0/8") from error
        return cls(networks=parsed, user_header=user_header, groups_header=groups_header)

    def viewer(self, request: HTTPConnection) -> Viewer | None:
        """The user from the proxy's header; None when the connection is not the proxy's, or the header is absent. Raises NotSignedIn when a
        header comes twice, because one of them may be the user's own, and for a name of the cluster's own users. Groups of the cluster,
        such as system:masters, are left out, because a user may be able to name a group at the proxy.
        """
        users = request.headers.getlist(self.user_header)
        if not any(users) or not self._sent_by_proxy(request):
            return None
        groups = request.headers.getlist(self.groups_header) if self.groups_header else []
        if len(users) > 1 or len(groups) > 1:
            raise NotSignedIn(
                "The proxy passed on a header of the request beside its own. It must replace those of the request."
            )
        (name,) = users
        if name.startswith(_RESERVED):
            raise NotSignedIn(f"A proxy signs in people: names that begin with {_RESERVED} are those of the cluster.")
        listed = [one.strip() for one in ",".join(groups).split(",")]
        people = (one for one in listed if one and not one.startswith(_RESERVED))
        return Viewer(name=name, groups=(*people, "system:authenticated"))

    def _sent_by_proxy(self, request: HTTPConnection) -> bool:
        try:
            peer = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        return any(peer in network for network in self.networks)


class ReviewedEntrance:
    """The entrance of the console in a cluster."""

    def __init__(self, cluster: ViewedCluster, env: Env, proxy: TrustedProxy | None = None) -> None:
        self._cluster, self._env, self._proxy = cluster, env, proxy
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[float, Viewer | None]] = {}

    def viewer(self, request: HTTPConnection) -> Viewer:
        """The user. Raises NotSignedIn, and Unavailable when the API server does not answer."""
        named = None if self._proxy is None else self._proxy.viewer(request)
        if named is not None:
            return named
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(token) <= _TOKEN_MAX:
            raise NotSignedIn("Send a token of the cluster in the header Authorization: Bearer.")
        viewer = self._reviewed(token.strip())
        if viewer is None:
            raise NotSignedIn("The cluster does not accept this token.")
        return viewer

    def _reviewed(self, token: str) -> Viewer | None:
        """The user of a token; None when the API server does not accept the token. Only digests of tokens are remembered."""
        now_s, key = self._env.monotonic_s(), hashlib.sha256(token.encode()).digest()
        with self._lock:
            until_s, known = self._known.get(key, (0.0, None))
        if now_s < until_s:
            return known
        try:
            status = self._cluster.review(TOKEN_REVIEW, {"token": token})
        except ApiError as error:
            raise Unavailable(f"The API server did not review the token (code {error.status}).") from error
        viewer = _viewer(status.get("user") or {}) if status.get("authenticated") is True else None
        with self._lock:
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            self._known[key] = (now_s + _REMEMBERED_S, viewer)
        return viewer


def _viewer(user: Mapping[str, Any]) -> Viewer | None:
    if not user.get("username"):
        return None
    extra = user.get("extra") or {}
    return Viewer(
        name=str(user["username"]),
        uid=str(user.get("uid") or ""),
        groups=tuple(str(one) for one in user.get("groups") or ()),
        extra=tuple((str(name), tuple(map(str, values))) for name, values in sorted(extra.items())),
    )
