"""Maintenance of a shard on the live cluster: what asks for it, what keeps it from falling due, and what the status records of it."""

from __future__ import annotations

import json
from typing import Any

#: Nothing is due by itself.
IDLE = {
    "compaction": {"mode": "Disabled"},
    "gc": {"enabled": False, "orphans": {"mode": "Off"}},
    "rollup": {"everySeqnos": 100_000},
    "verify": {"mode": "Off"},
}


def ask(cluster: Any, action: str, *shards: str, token: str = "once") -> None:
    """Requests a run of each of these shards by its annotation."""
    cluster.kubectl("annotate", "persistshard", *shards, f"persistshard.io/request-{action}={token}", "--overwrite")


def patch(cluster: Any, kind: str, name: str, spec: dict[str, Any]) -> None:
    """Merges `spec` into the spec of a resource."""
    cluster.kubectl("patch", kind, name, "--type=merge", "--patch", json.dumps({"spec": spec}))


def runs(cluster: Any, shard: str, type_: str) -> list[dict[str, Any]]:
    """The runs of this type that the status records, the newest first."""
    return [one for one in cluster.status("persistshard", shard).get("history", []) if one["type"] == type_]


def outcomes(cluster: Any, shard: str, type_: str) -> list[str]:
    """The outcomes of the runs of this type that the status records."""
    return [one["outcome"] for one in runs(cluster, shard, type_)]


def succeeded(cluster: Any, shard: str) -> set[str]:
    """The types of the runs that the status records as succeeded."""
    history = cluster.status("persistshard", shard).get("history", [])
    return {one["type"] for one in history if one["outcome"] == "Succeeded"}
