"""The location of shards: one blob store and one consensus store that belong together."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.secrets import shown_url
from persist_engine.client.arguments import expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A pair of URLs. `blob`: `mem:[name]`, `file:///dir` or `s3://bucket/prefix`; `consensus`: `mem:[name]`,
    `sqlite:///file` or `redis[s]://host:port/db`. Parameters of each: `storage.open`.

    Its repr and its text show neither credentials nor parameters. The fields hold the URLs as given.
    """

    blob: str
    consensus: str

    def __post_init__(self) -> None:
        expect(self.blob, str, "blob", "a text, the URL of a blob store")
        expect(self.consensus, str, "consensus", "a text, the URL of a consensus store")

    def __repr__(self) -> str:
        return f"Location(blob={shown_url(self.blob)!r}, consensus={shown_url(self.consensus)!r})"
