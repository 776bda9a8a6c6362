"""Where shards live: one blob store and one consensus store that belong together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A pair of URLs. `blob`: `mem:[name]`, `file:///dir` or `s3://bucket/prefix`; `consensus`: `mem:[name]`,
    `sqlite:///file` or `redis[s]://host:port/db`. Parameters of each: `storage.open`.
    """

    blob: str
    consensus: str
