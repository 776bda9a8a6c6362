"""Checks whether a Redis can hold the log at all, and whether its settings keep what it acknowledges. Errors say what to change.

Knows no driver: the caller supplies a function that sends one command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persist_engine.base.errors import PersistError, UnsafeStore

Ask = Callable[..., Any]
#: Completes "redis at <address> ...".
CLUSTER_NODE = (
    "is a node of a cluster, which holds only some of the keys, and whose failover loses acknowledged commits: "
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
    # Keys of the log have no time to live, so the volatile policies cannot evict them.
    _Rule(
        "maxmemory-policy",
        ("noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"),
        "it evicts commits when memory runs out",
    ),
)


class RunWatch:
    """Remembers which Redis process was checked last, so that a process that replaces it, after a restart or at the same
    address, is checked before use. Thread-safe: if two threads connect at the same time, both may check.
    """

    def __init__(self, *, address: str) -> None:
        self._address = address
        self._run_id: str | None = None

    def meet(self, ask: Ask) -> None:
        """Must be called for each new connection, on which `ask` sends commands. Raises UnsafeStore unless the process is the
        known one, or a primary that keeps what it acknowledges. Does not check the first process, because opening the store
        checks it. Costs one command.
        """
        known, run_id = self._run_id, _run_id(ask)
        # Without a run id, each connection may lead to a different process.
        if known is not None and (run_id != known or not run_id):
            check_role(ask, address=self._address)
            check_durability(ask, address=self._address)
        self._run_id = run_id


def _run_id(ask: Ask) -> str:
    """Return the run id of the answering process; "" if INFO is forbidden."""
    try:
        lines = _text(ask("INFO", "server")).splitlines()
    except PersistError as error:
        if not _is_forbidden(error):
            raise
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("run_id:")), "")


def check_role(ask: Ask, *, address: str) -> list[str]:
    """Raises UnsafeStore unless the server is a primary that holds every key itself: no setting and no URL makes another kind
    safe. Returns what could not be verified. `ask` is as in check_durability.
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
    """Raises UnsafeStore if a setting is unsafe; the error names every unsafe setting and its safe value. Returns what could not
    be verified.

    `ask(*command)` sends one command and returns its RESP2 reply, or raises PersistError. A Redis that forbids CONFIG or INFO
    (managed services, ACLs) is trusted. If Redis cannot be reached, the error of `ask` is raised.
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
            "Change the settings, or accept the loss with ?unsafe=true"
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
