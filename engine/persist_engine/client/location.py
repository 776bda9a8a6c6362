"""The location of shards: one blob store and one consensus store that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.secrets import shown_url
from persist_engine.client.arguments import expect
from persist_engine.client.profiles import PREFIX, PROFILE_VARIABLE, profile_urls

BLOB_VARIABLE, CONSENSUS_VARIABLE = "PERSIST_BLOB", "PERSIST_CONSENSUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A pair of URLs. `blob` is `mem:[name]`, `file:///dir` or `s3://bucket/prefix`. `consensus` is `mem:[name]`,
    `sqlite:///file` or `redis[s]://host:port/db`. `storage.open` describes the parameters of each.

    Its repr and its text show neither credentials nor parameters. The fields hold the URLs as given.
    """

    blob: str
    consensus: str

    def __post_init__(self) -> None:
        expect(self.blob, str, "blob", "a text, the URL of a blob store")
        expect(self.consensus, str, "consensus", "a text, the URL of a consensus store")

    def __repr__(self) -> str:
        return f"Location(blob={shown_url(self.blob)!r}, consensus={shown_url(self.consensus)!r})"


def location_of(url: str | Path | None, consensus: str | None, environ: Mapping[str, str]) -> Location:
    """The pair of stores for the arguments of `connect`. Raises InvalidUsage, which says what is missing."""
    if url is None:
        url, consensus = _of_environment(consensus, environ)
    if isinstance(url, Path):
        url = url.expanduser().absolute().as_uri()
    if not isinstance(url, str) or not (consensus is None or isinstance(consensus, str)):
        raise InvalidUsage("a store is a URL, a text such as file:///dir, or a pathlib.Path")
    if url.startswith(PREFIX):
        if consensus is not None:
            raise InvalidUsage(f"{url} names both stores: give no second URL")
        url, consensus = profile_urls(url.removeprefix(PREFIX), environ)
        if url.startswith(PREFIX):
            raise InvalidUsage("a profile names stores, and no other profile")
    if consensus is not None:
        return Location(blob=url, consensus=consensus)
    if url.startswith("mem:"):
        return Location(blob=url, consensus=url)
    if url.startswith("file://"):
        folder = url.rstrip("/")
        return Location(blob=f"{folder}/blobs", consensus=f"sqlite{folder.removeprefix('file')}/consensus.db")
    if "://" not in url:
        raise InvalidUsage(
            f"{shown_url(url)[:80]!r} is not a URL: write file:///dir, give a pathlib.Path, or name a profile, as in 'profile:prod'"
        )
    raise InvalidUsage(
        f"{shown_url(url)} has no log: give the second URL, as in connect({shown_url(url)!r}, 'redis://host:6379/0')"
    )


def _of_environment(consensus: str | None, environ: Mapping[str, str]) -> tuple[str, str | None]:
    blob, profile = environ.get(BLOB_VARIABLE), environ.get(PROFILE_VARIABLE)
    if blob and profile:
        raise InvalidUsage(
            f"both {BLOB_VARIABLE} and {PROFILE_VARIABLE} are set, and each says where the stores are: unset one"
        )
    if profile:
        return f"{PREFIX}{profile}", consensus
    if not blob:
        raise InvalidUsage(
            f"no store given: connect('file:///dir'), connect('s3://bucket/prefix', 'redis://host:6379/0'), or set {BLOB_VARIABLE} "
            f"and {CONSENSUS_VARIABLE}, or {PROFILE_VARIABLE}"
        )
    return blob, consensus or environ.get(CONSENSUS_VARIABLE) or None
