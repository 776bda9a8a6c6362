"""The view of holds: the readers that hold the since and the versions of shards, for one shard and for all. Pure.

The stores know every hold and its age. Without the stores, the status names at most five readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from persist_operator.console.port import EngineView, Resource, Unseen
from persist_operator.console.texts import block, instant, items, number, span, text

#: The most shards whose stores are read for the page of all holds. The other shards show the holds on their status.
SHARDS_READ_MAX = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRow:
    """One hold. `blocks`: what it holds back."""

    namespace: str
    shard: str
    id: str
    kind: str
    purpose: str
    hostname: str
    since: str
    since_time: int | None
    age: str
    age_ms: int
    heartbeat: str
    lease: str
    blocks: str
    has_lapsed: bool
    holds_since: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsPage:
    """All holds, the oldest first. `notes` name the shards that show less than their stores have, with the reasons."""

    rows: tuple[HoldRow, ...]
    shards: int
    notes: tuple[tuple[str, str], ...]


def holds_page(shards: Iterable[tuple[Resource, EngineView | Unseen]], *, now_ms: int) -> HoldsPage:
    """The page over these shards."""
    rows: list[HoldRow] = []
    notes: dict[str, list[str]] = {}
    count = 0
    for resource, engine in shards:
        count += 1
        rows += holds_of_shard(resource, engine, now_ms=now_ms)
        why = engine.omitted if isinstance(engine, EngineView) else engine.why
        if why:
            notes.setdefault(why, []).append(text(block(resource, "metadata").get("name")))
    return HoldsPage(
        rows=tuple(sorted(rows, key=lambda one: (-one.age_ms, one.namespace, one.shard, one.id))),
        shards=count,
        notes=tuple((", ".join(names), why) for why, names in notes.items()),
    )


def holds_of_shard(resource: Resource, engine: EngineView | Unseen, *, now_ms: int) -> list[HoldRow]:
    """The holds of one shard, the oldest first: from its stores, or else from its status."""
    metadata = block(resource, "metadata")
    namespace, shard = text(metadata.get("namespace")), text(metadata.get("name"))
    if isinstance(engine, EngineView) and engine.holds is not None:
        return [_stored(row, namespace, shard, now_ms) for row in engine.holds]
    return [_reported(row, namespace, shard) for row in items(block(resource, "status", "holds").get("blocking"))]


def _stored(row: Resource, namespace: str, shard: str, now_ms: int) -> HoldRow:
    held_ms = max(0, now_ms - (number(row["held_from_ms"]) or now_ms))
    ends, beat = number(row["lease_ends_ms"]), number(row["last_heartbeat_ms"])
    kind = text(row["kind"])
    blocked = [word for word, field in (("since", "blocks_since"), ("collection", "blocks_collection")) if row[field]]
    return HoldRow(
        namespace=namespace,
        shard=shard,
        id=text(row["id"]),
        kind=kind,
        purpose=text(row["purpose"]),
        hostname=text(row["hostname"]),
        since="" if kind == "writer" else instant(row["since"]),
        since_time=number(row["since"]),
        age=f"{'over ' if row['is_older'] else ''}{span(held_ms)}",
        age_ms=held_ms,
        heartbeat="" if beat is None else f"{span(max(0, now_ms - beat))} ago",
        lease=_lease(ends, now_ms),
        blocks=" and ".join(blocked),
        has_lapsed=bool(row["has_lapsed"]),
        holds_since=kind != "writer",
    )


def _lease(ends_ms: int | None, now_ms: int) -> str:
    if ends_ms is None:
        return "never lapses"
    return f"lapsed {span(now_ms - ends_ms)} ago" if ends_ms < now_ms else f"lapses in {span(ends_ms - now_ms)}"


def _reported(row: Resource, namespace: str, shard: str) -> HoldRow:
    held_s = number(row.get("heldSeconds"))
    return HoldRow(
        namespace=namespace,
        shard=shard,
        id=text(row.get("id")),
        kind=text(row.get("kind")),
        purpose=text(row.get("purpose")),
        hostname=text(row.get("host")),
        since=instant(row.get("since")),
        since_time=number(row.get("since")),
        age="" if held_s is None else f"over {span(held_s * 1000)}",
        age_ms=(held_s or 0) * 1000,
        heartbeat="",
        lease="",
        blocks="since",
        has_lapsed=False,
        holds_since=True,
    )
