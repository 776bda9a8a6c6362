"""Store URLs, taken apart once and strictly: an unknown scheme, parameter or shape is InvalidUsage, never ignored.

Passwords leave this file only as the field `password`, which no repr and no message shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from persist_engine.base.errors import InvalidUsage


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """One URL. `path` and the credentials are percent-decoded; `host` keeps its case."""

    scheme: str
    host: str
    port: int | None
    user: str | None
    password: str | None = field(repr=False)
    path: str
    params: dict[str, str]
    shown: str
    """The URL without credentials, for messages."""

    def flag(self, name: str, *, default: bool) -> bool:
        """The parameter `name` as true or false; InvalidUsage on any other word."""
        word = self.params.get(name)
        if word is None:
            return default
        if word not in ("true", "false"):
            raise InvalidUsage(f"{self.shown}: parameter {name} must be true or false")
        return word == "true"


def parse_url(url: str, *, allowed: dict[str, frozenset[str]]) -> StoreUrl:
    """Split `url`, whose scheme must be a key of `allowed` and whose parameters must be among that scheme's."""
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        # Not chained: the parser quotes what it took for the port, which may be a piece of a password.
        raise InvalidUsage(
            "store URL does not parse: check brackets and port, and percent-encode the password"
        ) from None
    if "@" in split.query + split.fragment or (split.netloc and "@" not in split.netloc and "@" in url):
        # A password with a raw /, ? or # ends the host early; showing what follows would show the password.
        raise InvalidUsage("store URL has an @ past its host: percent-encode the password (and @ elsewhere as %40)")
    shown = _without_credentials(split)
    if split.scheme not in allowed:
        raise InvalidUsage(f"{shown}: unknown scheme {split.scheme!r}, expected one of {', '.join(sorted(allowed))}")
    if "\0" in unquote(split.path):
        raise InvalidUsage(f"{shown}: a store URL has no %00 in its path")
    if port == 0:
        raise InvalidUsage(f"{shown}: 0 is no port")
    if split.fragment:
        raise InvalidUsage(f"{shown}: a store URL has no fragment; write # as %23")
    pairs = parse_qsl(split.query, keep_blank_values=True)
    params = dict(pairs)
    if len(params) != len(pairs):
        raise InvalidUsage(f"{shown}: a parameter is given twice")
    if unknown := sorted(params.keys() - allowed[split.scheme]):
        known = ", ".join(sorted(allowed[split.scheme])) or "none"
        raise InvalidUsage(f"{shown}: unknown parameter {', '.join(unknown)}; {split.scheme} knows {known}")
    location = split.netloc.rpartition("@")[2]
    return StoreUrl(
        scheme=split.scheme,
        host=location.rpartition(":")[0] if port is not None else location.removesuffix(":"),
        port=port,
        user=unquote(split.username) if split.username else None,
        password=unquote(split.password) if split.password else None,
        path=unquote(split.path),
        params=params,
        shown=shown,
    )


def pushes(url: StoreUrl) -> bool:
    """Whether commits are told and heard of as they happen: but for `push=off`. InvalidUsage on any other word."""
    word = url.params.get("push", "on")
    if word not in ("on", "off"):
        raise InvalidUsage(f"{url.shown}: parameter push must be on or off")
    return word == "on"


def absolute_path(url: StoreUrl) -> str:
    """The path of a `scheme:///path` URL; InvalidUsage when it names a host or is not absolute.

    A fourth slash means the same, as people write it from habit: to POSIX and to SQLite a leading `//` is something else.
    """
    if url.host not in ("", "localhost") or not url.path.startswith("/"):
        raise InvalidUsage(f"{url.shown}: expected {url.scheme}:///absolute/path")
    return "/" + url.path.lstrip("/")


def _without_credentials(split: SplitResult) -> str:
    host = split.netloc.rpartition("@")[2]
    slashes = "//" if split.netloc or split.path.startswith("/") else ""
    # What looks like a path may be credentials: slashes forgotten (redis:/user:password@host), a URL pasted twice.
    path = "..." + split.path[split.path.rindex("@") :] if "@" in split.path else split.path
    return f"{split.scheme}:{slashes}{host}{path}"
