"""Whether a Redis can hold the log at all, and whether it keeps what it acknowledges: the settings that decide it, and what
to change.

Knows no driver: it is given a function that sends one command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persist_engine.base.errors import PersistError, UnsafeStore

Ask = Callable[..., Any]
#: Completes "redis at <address> ...".
CLUSTER_NODE = (
    "is a node of a cluster, which holds some of the keys only, and whose failover forgets commits that were acknowledged: "
    "use a Redis with cluster-enabled no"
)


@dataclass(frozen=True, slots=True)
class _Rule:
    setting: str
    allowed: tuple[str, ...]
    why: str


_RULES = (
    _Rule("appendonly", ("yes",), "without the append-only file a restart loses commits"),
    _Rule("appendfsync", ("always",), "a power loss may lose the last seconds of commits"),
    _Rule("no-appendfsync-on-rewrite", ("no",), "while the append-only file is rewritten commits are not on disk"),
    # Keys here never have a time to live, so the volatile policies cannot touch them.
    _Rule(
        "maxmemory-policy",
        ("noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"),
        "it evicts commits when memory runs out",
    ),
)


class RunWatch:
    """Knows which Redis process was checked last, so that one that takes its place, after a restart or at the same address, is
    checked before it is used. Thread-safe: who connects at the same time checks twice at worst.
    """

    def __init__(self, *, address: str) -> None:
        self._address = address
        self._run_id: str | None = None

    def meet(self, ask: Ask) -> None:
        """For each new connection, which `ask` sends its commands on: UnsafeStore unless its process is the one that is known,
        or one that keeps what it acknowledges. The first is not checked: who opens the store does that. Costs one command.
        """
        known, run_id = self._run_id, _run_id(ask)
        # Where it does not tell, each connection may lead to another one.
        if known is not None and (run_id != known or not run_id):
            check_durability(ask, address=self._address)
        self._run_id = run_id


def _run_id(ask: Ask) -> str:
    """Of the process that answers; "" where INFO is forbidden."""
    try:
        lines = _text(ask("INFO", "server")).splitlines()
    except PersistError as error:
        if not _is_forbidden(error):
            raise
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("run_id:")), "")


def check_role(ask: Ask, *, address: str) -> list[str]:
    """UnsafeStore unless it is a primary that holds every key by itself: no setting and no URL makes another one fit.
    Returns what could not be verified; `ask` as of check_durability.
    """
    try:
        replication, cluster = (_text(ask("INFO", section)) for section in ("replication", "cluster"))
    except PersistError as error:
        if not _is_forbidden(error):
            raise
        return ["role (INFO is forbidden)"]
    if "role:slave" in replication:
        raise UnsafeStore(f"redis at {address} takes no commits: it is a replica; connect to the primary")
    if "cluster_enabled:1" in cluster:
        raise UnsafeStore(f"redis at {address} {CLUSTER_NODE}")
    return []


def check_durability(ask: Ask, *, address: str) -> list[str]:
    """UnsafeStore naming every unsafe setting and its safe value; returns what could not be verified.

    `ask(*command)` sends one command and returns its RESP2 reply, or raises PersistError. A Redis that forbids CONFIG
    or INFO (managed services, ACLs) is believed; one that cannot be reached raises as the command does.
    """
    faults: list[str] = []
    notes: list[str] = []
    for rule in _RULES:
        value = _setting(ask, rule.setting)
        if value is None:
            notes.append(f"{rule.setting} (CONFIG GET is forbidden)")
        elif value not in rule.allowed:
            faults.append(f"{rule.setting} is {value}, set it to {rule.allowed[0]}: {rule.why}")
    if faults:
        raise UnsafeStore(
            f"redis at {address} can lose acknowledged commits: {'; '.join(faults)}. "
            "Change this, or accept the loss with ?unsafe=true"
        )
    return notes


def _setting(ask: Ask, name: str) -> str | None:
    try:
        reply = ask("CONFIG", "GET", name)
    except PersistError as error:
        if _is_forbidden(error):
            return None
        raise
    return _text(reply[1]) if reply else None


def _is_forbidden(error: PersistError) -> bool:
    cause = str(error.__cause__).lower()
    return "unknown command" in cause or "has no permissions" in cause or "not allowed" in cause


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
