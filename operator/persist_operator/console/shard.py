"""The view of one shard's page. Pure: the resource, what its stores say, its events and the time in; texts and pictures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persist_engine.base.wording import counted

from persist_operator.api import pausing
from persist_operator.console.fleet import Readiness
from persist_operator.console.holds import HoldRow, holds_of_shard
from persist_operator.console.picture import Picture, SpineBatch, frontiers_picture, scale_of, spine_of, spine_picture
from persist_operator.console.port import EngineView, Event, Resource, Unseen
from persist_operator.console.texts import (
    ago,
    block,
    due,
    grouped,
    instant,
    items,
    number,
    seconds,
    size,
    span,
    text,
    to_ms,
)

#: The newest versions that a page shows.
VERSIONS_MAX = 50
#: How many of these versions are visible at first.
VERSIONS_SHOWN = 8
#: The newest batches that a page lists.
BATCHES_MAX = 60
KINDS = {
    "compaction": "Compaction",
    "rollup": "Rollup",
    "gc": "Garbage collection",
    "verify": "Verification",
    "orphanScan": "Orphan scan",
}
_CHANGED = {
    "hostname": "",
    "since": "since",
    "spine_batches": "spine batch",
    "hollow_batches": "batch",
    "legacy_batches": "batch",
    "merges": "merge",
    "rollups": "rollup",
    "leased_readers": "leased reader",
    "critical_readers": "critical reader",
    "writers": "writer",
    "schemas": "schema",
    "progress": "source progress",
    "last_gc_req": "collection request",
    "active_rollup": "claim of a rollup",
    "active_gc": "claim of a collection",
    "staging_floor_ms": "staging floor",
    "retain_ms": "retention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRow:
    """A condition."""

    type: str
    status: str
    reason: str
    since: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """A live version and what it changed."""

    seqno: str
    when: str
    changed: str
    bytes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepRow:
    """The state of one kind of maintenance."""

    kind: str
    last: str
    result: str
    tone: str
    reason: str
    took: str
    failures: str
    next: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A maintenance run that ended."""

    id: str
    type: str
    outcome: str
    tone: str
    when: str
    took: str
    reason: str
    read: str
    written: str
    deleted: str
    cut: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan that waits for an approval, or has one. `why_not` is empty when the viewer may approve it now."""

    id: str
    facts: tuple[tuple[str, str], ...]
    approved: bool
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPage:
    """The page."""

    namespace: str
    name: str
    ready: Readiness
    facts: tuple[tuple[str, str], ...]
    timeline: Picture | None
    spine: Picture | None
    batches: tuple[SpineBatch, ...]
    batches_omitted: int
    versions: tuple[VersionRow, ...]
    versions_omitted: int
    unseen: str
    """The reason why the page shows only the status; empty when it shows more."""
    holds: tuple[HoldRow, ...]
    debt: tuple[tuple[str, str], ...]
    deadline: str
    is_late: bool
    upkeep: tuple[UpkeepRow, ...]
    running: tuple[str, ...]
    history: tuple[RunRow, ...]
    conditions: tuple[ConditionRow, ...]
    events: tuple[Event, ...]
    events_unseen: str
    plan: PlanView | None
    sinks: tuple[str, ...]


def shard_page(
    resource: Resource,
    engine: EngineView | Unseen,
    events: Sequence[Event] | Unseen,
    *,
    sinks: Sequence[Resource],
    running: Sequence[str],
    why_not: str,
    now_ms: int,
) -> ShardPage:
    """The page of `resource`. `why_not` is the answer of `Source.may_approve`; `sinks` are the resources of its namespace that it reads."""
    metadata, status = block(resource, "metadata"), block(resource, "status")
    seen = engine if isinstance(engine, EngineView) else None
    deadline = block(status, "debt").get("deadlineTime")
    holds = holds_of_shard(resource, engine, now_ms=now_ms)
    spine = spine_of(seen.batches) if seen else []
    timeline, drawn = _pictures(status, seen, spine, holds)
    versions = list(reversed(seen.versions or ())) if seen else []
    return ShardPage(
        namespace=text(metadata.get("namespace")),
        name=text(metadata.get("name")),
        ready=Readiness.of(resource),
        facts=tuple(_facts(resource, now_ms)),
        timeline=timeline,
        spine=drawn,
        batches=tuple(reversed(spine[-BATCHES_MAX:])),
        batches_omitted=max(0, len(spine) - BATCHES_MAX),
        versions=tuple(_version(row, now_ms) for row in versions[:VERSIONS_MAX]),
        versions_omitted=max(0, len(versions) - VERSIONS_MAX),
        unseen=engine.omitted if isinstance(engine, EngineView) else engine.why,
        holds=tuple(holds),
        debt=tuple(_debt(status, now_ms)),
        deadline=ago(deadline, now_ms),
        is_late=(to_ms(deadline) or now_ms + 1) <= now_ms,
        upkeep=tuple(
            _upkeep(KINDS.get(kind, kind), block(status, "maintenance", kind), now_ms)
            for kind in block(status, "maintenance")
        ),
        running=tuple(running),
        history=tuple(_run(one, now_ms) for one in items(status.get("history"))),
        conditions=tuple(condition_rows(status, now_ms)),
        events=() if isinstance(events, Unseen) else tuple(events),
        events_unseen=events.why if isinstance(events, Unseen) else "",
        plan=plan_of(status, why_not, now_ms),
        sinks=tuple(
            text(block(one, "metadata").get("name"))
            for one in sinks
            if block(one, "spec", "shardRef").get("name") == metadata.get("name")
            and block(one, "metadata").get("namespace") == metadata.get("namespace")
        ),
    )


def condition_rows(status: Mapping[str, Any], now_ms: int) -> list[ConditionRow]:
    """The conditions of a status, Ready first."""
    rows = [
        ConditionRow(
            type=text(one.get("type")),
            status=text(one.get("status")),
            reason=text(one.get("reason")),
            since=ago(one.get("lastTransitionTime"), now_ms),
            message=text(one.get("message")),
        )
        for one in items(status.get("conditions"))
    ]
    return sorted(rows, key=lambda one: (one.type != "Ready", one.type))


def plan_of(status: Mapping[str, Any], why_not: str, now_ms: int) -> PlanView | None:
    """The plan on a status; None when there is none. A plan without an id cannot be approved, so it counts as none."""
    plan = block(status, "plan")
    if not isinstance(plan.get("id"), str) or not plan["id"]:
        return None
    facts = [
        ("What", text(plan.get("type"))),
        ("Why", text(plan.get("reason"))),
        ("Runs in", text(plan.get("runner"))),
        ("Reads about", size(plan.get("estimatedBytes"))),
        ("Takes about", seconds(plan.get("estimatedSeconds"))),
        ("Planned", ago(plan.get("createdTime"), now_ms)),
    ]
    return PlanView(
        id=plan["id"],
        facts=tuple((name, value) for name, value in facts if value),
        approved=plan.get("approved") is True,
        why_not=why_not,
    )


def _facts(resource: Resource, now_ms: int) -> list[tuple[str, str]]:
    metadata, status = block(resource, "metadata"), block(resource, "status")
    store, schema, frontiers = block(status, "store"), block(status, "schema"), block(status, "frontiers")
    storage = block(status, "storage")
    facts = [
        ("Shard", text(status.get("shardId"))),
        ("Key", text(schema.get("key"))),
        ("Value", text(schema.get("value"))),
        ("Upper", _frontier(frontiers, "upper", "upperLagSeconds")),
        ("Since", _frontier(frontiers, "since", "sinceLagSeconds")),
        ("Version", f"v{frontiers['seqno']}" if "seqno" in frontiers else ""),
        ("Updates", grouped(storage.get("updates"))),
        ("Size", _sizes(storage)),
        ("Log", _log(storage)),
        ("Blobs", text(store.get("blob"))),
        ("Consensus", text(store.get("consensus"))),
        ("Engine", text(status.get("engineVersion"))),
        ("Created", ago(metadata.get("creationTimestamp"), now_ms)),
        ("Paused", "yes" if pausing.is_paused(resource) else ""),
        ("Deletion", "requested" if metadata.get("deletionTimestamp") else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _sizes(storage: Mapping[str, Any]) -> str:
    if "liveBytes" not in storage:
        return ""
    counts = [
        counted(number(storage.get(name)) or 0, noun)
        for name, noun in (("batches", "batch"), ("runs", "run"), ("parts", "part"))
    ]
    return f"{size(storage.get('liveBytes'))} in {', '.join(counts)}"


def _log(storage: Mapping[str, Any]) -> str:
    if "latestRollupSeqno" not in storage:
        return ""
    live = counted(number(storage.get("liveDiffs")) or 0, "live version")
    return f"{live}, newest rollup v{storage['latestRollupSeqno']}"


def _frontier(frontiers: Mapping[str, Any], name: str, lag: str) -> str:
    if name not in frontiers:
        return ""
    behind = seconds(frontiers.get(lag))
    return f"{instant(frontiers[name] or None)}{f' ({behind} behind)' if behind else ''}"


def _pictures(
    status: Mapping[str, Any], seen: EngineView | None, spine: Sequence[SpineBatch], holds: Sequence[HoldRow]
) -> tuple[Picture | None, Picture | None]:
    """The frontiers, from the stores or else from the status, and the spine."""
    frontiers = block(status, "frontiers")
    if seen is None and not ("since" in frontiers and "upper" in frontiers):
        return None, None
    since = seen.since if seen else number(frontiers["since"])
    upper = seen.upper if seen else number(frontiers["upper"])
    # The operator's own hold names the shard, which this page need not repeat.
    held = [
        ((one.purpose or one.id).removesuffix(f" of {one.namespace}/{one.shard}"), one.since_time)
        for one in holds
        if one.holds_since
    ]
    scale = scale_of(since=since, upper=upper, holds=[at for _, at in held], spine=spine)
    timeline = frontiers_picture(scale, since=since, upper=upper, holds=held)
    return timeline, spine_picture(scale, spine) if spine else None


def _version(row: Resource, now_ms: int) -> VersionRow:
    changed = row.get("changed") or ()
    pairs = changed.items() if isinstance(changed, Mapping) else changed
    named = [(_CHANGED.get(str(name), str(name).replace("_", " ")), count) for name, count in pairs]
    words = [
        noun if noun in {"since", "staging floor", "retention"} else counted(number(count) or 0, noun)
        for noun, count in named
        if noun
    ]
    return VersionRow(
        seqno=f"v{row['seqno']}",
        when=_when_ms(row.get("walltime_ms"), now_ms),
        changed=", ".join(words) or "–",
        bytes=size(row.get("bytes")),
    )


def _when_ms(at_ms: Any, now_ms: int) -> str:
    found = number(at_ms)
    return "" if found is None else f"{span(max(0, now_ms - found))} ago"


def _debt(status: Mapping[str, Any], now_ms: int) -> list[tuple[str, str]]:
    debt, storage = block(status, "debt"), block(status, "storage")
    orphans = storage.get("orphanBlobs")
    facts = [
        ("Compaction would read", size(debt.get("compactionBytes"))),
        ("Batches not compact", grouped(storage.get("uncompactedBatches"))),
        ("Versions to truncate", grouped(debt.get("gcSeqnos"))),
        ("Oldest retraction", seconds(debt.get("oldestUncompactedSeconds"))),
        ("Missing blobs", grouped(storage.get("missingBlobs"))),
        ("Orphans", f"{grouped(orphans)} ({size(storage.get('orphanBytes'))})" if orphans else ""),
        ("Verified", _verdict(block(status, "verification"), now_ms)),
    ]
    return [(name, value) for name, value in facts if value]


def _verdict(verification: Mapping[str, Any], now_ms: int) -> str:
    """`Verified 3h ago`, or the problem in words."""
    found, when = text(verification.get("verdict")), ago(verification.get("time"), now_ms)
    return ", ".join(filter(None, (f"{found} {when}".strip(), text(verification.get("message")))))


def _upkeep(kind: str, upkeep: Mapping[str, Any], now_ms: int) -> UpkeepRow:
    result = text(upkeep.get("lastResult"))
    failures = number(upkeep.get("consecutiveFailures"))
    return UpkeepRow(
        kind=kind,
        last=ago(upkeep.get("lastAttemptTime"), now_ms),
        result=result,
        tone=outcome_tone(result),
        reason=text(upkeep.get("lastReason")),
        took=seconds(upkeep.get("lastDurationSeconds")),
        failures=grouped(failures) if failures else "",
        next=due(upkeep.get("nextRunTime"), now_ms),
        message=text(upkeep.get("message")),
    )


def _run(run: Mapping[str, Any], now_ms: int) -> RunRow:
    outcome = text(run.get("outcome"))
    return RunRow(
        id=text(run.get("id")),
        type=text(run.get("type")) + (" on Spark" if run.get("runner") == "Spark" else ""),
        outcome=outcome,
        tone=outcome_tone(outcome),
        when=ago(run.get("endTime"), now_ms),
        took=took(run),
        reason=text(run.get("reason")),
        read=size(run.get("bytesRead")),
        written=size(run.get("bytesWritten")),
        deleted=grouped(run.get("blobsDeleted")),
        cut=grouped(run.get("diffsTruncated")),
        message=text(run.get("message")),
    )


def took(run: Mapping[str, Any]) -> str:
    """How long a run took; empty when this is unknown."""
    start, end = to_ms(run.get("startTime")), to_ms(run.get("endTime"))
    return "" if start is None or end is None else seconds((end - start) // 1000)


def outcome_tone(outcome: str) -> str:
    """The class of an outcome."""
    return {"Succeeded": "good", "Failed": "bad", "Skipped": "quiet", "Conflict": "wait"}.get(outcome, "wait")
