"""Parses store URLs strictly: an unknown scheme, parameter or shape raises InvalidUsage and is never ignored.

Passwords leave this file only in the field `password`, which no repr and no message shows.
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
        """Return the parameter `name` as a bool. Raises InvalidUsage for any word but true and false."""
        word = self.params.get(name)
        if word is None:
            return default
        if word not in ("true", "false"):
            raise InvalidUsage(f"{self.shown}: parameter {name} must be true or false")
        return word == "true"


def parse_url(url: str, *, allowed: dict[str, frozenset[str]]) -> StoreUrl:
    """Parse `url`. Its scheme must be a key of `allowed`, and its parameters must be among that scheme's."""
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        # The error is not chained, because the parser quotes the text that it took for the port, which may be part of a password.
        raise InvalidUsage(
            "store URL does not parse: check brackets and port, and percent-encode the password"
        ) from None
    if "@" in split.query + split.fragment or (split.netloc and "@" not in split.netloc and "@" in url):
        # An unescaped /, ? or # in a password ends the host early. A message with the rest would show the password.
        raise InvalidUsage("store URL has an @ past its host: percent-encode the password (and @ elsewhere as %40)")
    shown = _without_credentials(split)
    if not split.scheme:
        example = "file:///folder" if "file" in allowed else "sqlite:///folder/file.db"
        schemes = ", ".join(f"{scheme}:" for scheme in sorted(allowed))
        raise InvalidUsage(
            f"{shown.removeprefix(':')} is not a URL: a URL begins with one of {schemes}, as in {example}"
        )
    if split.scheme not in allowed:
        raise InvalidUsage(f"{shown}: unknown scheme {split.scheme!r}, expected one of {', '.join(sorted(allowed))}")
    if "\0" in unquote(split.path):
        raise InvalidUsage(f"{shown}: a store URL has no %00 in its path")
    if port == 0:
        raise InvalidUsage(f"{shown}: 0 is not a port (1 to 65535)")
    if split.fragment:
        raise InvalidUsage(f"{shown}: a store URL has no fragment; write # as %23")
    pairs = parse_qsl(split.query, keep_blank_values=True)
    params = dict(pairs)
    if len(params) != len(pairs):
        raise InvalidUsage(f"{shown}: a parameter is given twice")
    if unknown := sorted(params.keys() - allowed[split.scheme]):
        known = ", ".join(sorted(allowed[split.scheme])) or "none"
        raise InvalidUsage(f"{shown}: unknown parameter {', '.join(unknown)}; {split.scheme} accepts {known}")
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
    """Whether news of commits is sent and received: yes, unless `push=off`. Raises InvalidUsage for any word but on and off."""
    word = url.params.get("push", "on")
    if word not in ("on", "off"):
        raise InvalidUsage(f"{url.shown}: parameter push must be on or off")
    return word == "on"


def absolute_path(url: StoreUrl) -> str:
    """Return the path of a `scheme:///path` URL. Raises InvalidUsage if the URL names a host or the path is not absolute.

    Drops further leading slashes: people write a fourth one from habit, and a leading `//` is special to POSIX and SQLite.
    """
    if url.host not in ("", "localhost") or not url.path.startswith("/"):
        raise InvalidUsage(f"{url.shown}: expected {url.scheme}:///absolute/path")
    return "/" + url.path.lstrip("/")


def _without_credentials(split: SplitResult) -> str:
    host = split.netloc.rpartition("@")[2]
    slashes = "//" if split.netloc or split.path.startswith("/") else ""
    # The path may contain credentials if slashes were forgotten (redis:/user:password@host) or a URL was pasted twice.
    path = "..." + split.path[split.path.rindex("@") :] if "@" in split.path else split.path
    return f"{split.scheme}:{slashes}{host}{path}"
