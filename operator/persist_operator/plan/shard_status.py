"""The parts of a PersistShard's status that report an inspection: the blocks frontiers, sizes, holds and debt, and the conditions of
upkeep.

CompactionCurrent and GarbageCollected show whether maintenance keeps up, and what it waits for. A missed deletion deadline comes before
every other reason. Its message shows since when updates are owed a deletion, and what holds up the deletion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from persist_engine.base.secrets import shown_url
from persist_engine.base.wording import is_instant, iso_text
from persist_engine.model.inspection import Inspection, ReaderInfo

from persist_operator.api import times
from persist_operator.api.conditions import Condition
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard import Shard, StoreLocation
from persist_operator.api.shard_status import Codecs, Ddl, Debt, Frontiers, Holds, ShardStatus, Storage, Stores, Upkeep
from persist_operator.plan import maintenance, shard_log
from persist_operator.plan.keeping import holding
from persist_operator.plan.observed import ACTION_REFUSED, STUCK_MS, ActionFailure, Run, ShardObserved
from persist_operator.plan.waiting import deadline
from persist_operator.plan.waiting.gate import Wanted
from persist_operator.plan.waiting.next_run import Outlook

_MESSAGE_MAX = 1024
_UPKEEP: tuple[tuple[str, MaintenanceKind], ...] = (("CompactionCurrent", "compaction"), ("GarbageCollected", "gc"))


def stores(location: StoreLocation) -> Stores:
    """The stores' URLs for display, without credentials and parameters."""
    return Stores(blob=shown_url(location.blob)[:1024], consensus=shown_url(location.consensus)[:1024])


def with_facts(status: ShardStatus, inspection: Inspection) -> ShardStatus:
    """`status` with the facts of `inspection` that are no numbers: the engine's version, schema and codecs."""
    found = inspection.codecs
    return replace(
        status,
        engine_version=_engine_version(inspection),
        schema=Ddl(key=inspection.key_schema, value=inspection.val_schema),
        codecs=Codecs(key=found.key, value=found.val, time=found.time, diff=found.diff),
    )


def with_numbers(
    status: ShardStatus,
    inspection: Inspection,
    *,
    now_ms: int,
    since_advanced: str | None,
    deadline_seconds: int,
    held: tuple[holding.Held, ...],
    left_out: tuple[int, int] = (0, 0),
) -> ShardStatus:
    """`status` with frontiers, storage, holds, debt and log of `inspection`. `held`: the readers that hold since at its present time.
    `left_out`: the numbers of readers and writers that the inspection does not list.
    """
    oldest_ms = inspection.owed_from_ms
    seen_ms = upper_seen_ms(status, inspection)
    # A time ahead of now comes from before a clock was set back. It would stop since until that time comes.
    seen_ms = now_ms if seen_ms is None else min(seen_ms, now_ms)
    return replace(
        status,
        frontiers=_frontiers(inspection, now_ms, since_advanced, times.to_text(seen_ms)),
        storage=Storage(
            batches=inspection.batches,
            uncompacted_batches=inspection.uncompacted_batches,
            runs=inspection.runs,
            parts=inspection.parts,
            updates=inspection.updates,
            live_bytes=inspection.data_bytes,
            amplification_percent=inspection.amplification_percent,
            inline_bytes=inspection.inline_bytes,
            rollups=inspection.rollups,
            latest_rollup_seqno=int(inspection.latest_rollup_seqno),
            live_diffs=inspection.live_diffs,
        ),
        holds=Holds(
            readers=len(inspection.readers) + left_out[0],
            writers=len(inspection.writers) + left_out[1],
            blocking=tuple(one.block(now_ms) for one in held) or None,
        ),
        debt=Debt(
            compaction_bytes=inspection.compaction_bytes,
            gc_seqnos=inspection.gc_seqnos,
            oldest_uncompacted_seconds=None if oldest_ms is None else max(0, (now_ms - oldest_ms) // 1000),
            deadline_time=None if oldest_ms is None else times.to_text(oldest_ms + 1000 * deadline_seconds),
        ),
        log=shard_log.entry(inspection),
    )


def upper_seen_ms(known: ShardStatus, inspection: Inspection) -> int | None:
    """The time at which the status first had the present upper. It is not earlier than the append that moved the upper there. None while
    the status does not have this upper.
    """
    frontiers = known.frontiers
    return times.to_ms(frontiers.upper_time) if frontiers.upper == frontier_text(inspection.upper) else None


def is_since_behind(inspection: Inspection) -> bool:
    """Whether since is behind all holds. The end of a reader moves since only with the next commit that checks the holds."""
    holds = [one.since for one in inspection.readers if one.since is not None]
    return inspection.since is not None and bool(holds) and inspection.since < min(holds)


def own_since_ms(inspection: Inspection, critical_id: str) -> int | None:
    """The since of the operator's critical reader; None when the reader is not registered."""
    return next((one.since for one in inspection.readers if one.id == critical_id and one.since is not None), None)


def frontier_text(time: int | None) -> str:
    """The text of a frontier in a status: the time, or the empty text when the frontier is closed."""
    return "" if time is None else str(time)


def _frontiers(inspection: Inspection, now_ms: int, since_advanced: str | None, upper_time: str | None) -> Frontiers:
    upper, since = inspection.upper, inspection.since
    wall_clock = upper is not None and is_instant(upper)
    return Frontiers(
        since=frontier_text(since),
        upper=frontier_text(upper),
        seqno=int(inspection.seqno),
        upper_lag_seconds=(now_ms - upper) // 1000 if upper is not None and wall_clock else None,
        since_lag_seconds=(upper - since) // 1000 if upper is not None and since is not None and wall_clock else None,
        observed_time=times.to_text(now_ms),
        since_advanced_time=since_advanced,
        upper_time=upper_time,
    )


def _engine_version(inspection: Inspection) -> str:
    """The version of the engine that wrote the newest state."""
    return inspection.applier_version[:64]


# -- CompactionCurrent and GarbageCollected ---------------------------------------------------------------------------


def upkeep_conditions(
    shard: Shard,
    inspection: Inspection,
    blocks: Mapping[MaintenanceKind, Upkeep],
    observed: ShardObserved,
    *,
    refused: Mapping[MaintenanceKind, ActionFailure],
    held: tuple[holding.Held, ...],
    ahead: Outlook,
    now_ms: int,
) -> list[Condition]:
    """Both conditions. `refused`: the refusals of runs that are wanted now. `held`: the readers that hold since at its present time."""
    case = _Case(shard, inspection, blocks, held, ahead, now_ms)

    def trouble(name: str, kind: MaintenanceKind) -> tuple[Run | None, Condition | None]:
        run = next((one for one in observed.runs if one.name == blocks.get(kind, Upkeep()).job_name), None)
        return run, _trouble(case, name, kind, run=run, refusal=refused.get(kind))

    out = []
    for name, kind in _UPKEEP:
        run, found = trouble(name, kind)
        plain = found or _plain(case, name, kind, run)
        if kind == "gc" and plain.status == "True":
            # Nothing is collected that no rollup has, and rollups have no condition of their own.
            plain = trouble(name, "rollup")[1] or plain
        out.append(_missed(case, name, kind, plain) or plain)
    return out


@dataclass(frozen=True, slots=True)
class _Case:
    """The facts on which both conditions depend."""

    shard: Shard
    inspection: Inspection
    blocks: Mapping[MaintenanceKind, Upkeep]
    held: tuple[holding.Held, ...]
    ahead: Outlook
    now_ms: int

    def owed_from_ms(self, kind: MaintenanceKind) -> int | None:
        return self.inspection.waits_from_ms if kind == "compaction" else self.inspection.uncollected_from_ms


def _trouble(
    case: _Case, name: str, kind: MaintenanceKind, *, run: Run | None, refusal: ActionFailure | None
) -> Condition | None:
    """The condition while runs of this kind are refused, do not start or fail; None while nothing is wrong with them."""
    block = case.blocks.get(kind, Upkeep())
    failures = block.consecutive_failures or 0
    if refusal is not None:
        return Condition(name, "False", refusal.reason, refusal.message)
    if run is not None and run.refused and not run.phase.finished:
        return Condition(name, "False", ACTION_REFUSED, run.message)
    if run is not None and run.is_held and case.now_ms - (run.deleted_ms or 0) > STUCK_MS:
        held = clip(redact(", ".join(run.held_by)), 256)
        what = f"{run.name} is being deleted, and finalizers ({held}) keep it; no other run of its kind starts before it is gone"
        return Condition(name, "False", "Ending", f"{what}: end what their controllers wait for, or remove them")
    if run is not None and run.is_stuck(case.now_ms):
        return Condition(name, "False", "Pending", f"{run.name} does not start: {redact(maintenance.why_stuck(run))}")
    if failures >= maintenance.FAILURES_SHOWN_MIN:
        runs = "rollups" if kind == "rollup" else "runs"
        return Condition(name, "False", "Failing", f"{failures} {runs} failed in a row: {block.message or ''}")
    return None


def _plain(case: _Case, name: str, kind: MaintenanceKind, run: Run | None) -> Condition:
    """The condition without regard to whether a deadline was missed, while nothing is wrong with the runs of this kind."""
    shard, inspection, blocks, now_ms = case.shard, case.inspection, case.blocks, case.now_ms
    if kind == "gc":
        return _collection(case)
    wanted = maintenance.wanted(shard, inspection, blocks, kind, now_ms=now_ms, horizon_ms=case.ahead.horizon_ms)
    if wanted is not None:
        return _compaction_debt(case, run, wanted)
    return Condition(name, "True", "Current", "")


def _compaction_debt(case: _Case, run: Run | None, wanted: Wanted) -> Condition:
    # The number of batches changes with each write, but the condition must not.
    name, limit = "CompactionCurrent", case.shard.spec.max_uncompacted_batches
    stopped = _stopped(case.shard, "compaction")
    if stopped:
        what = wanted.reason if wanted.full else f"more than {limit} uncompacted batches"
        return Condition(name, "False", "DebtExceeded", f"{what}, and {stopped}")
    if run is not None and not run.phase.finished:
        return Condition(name, "True", "Compacting", f"{run.name} is under way")
    hold = case.ahead.hold
    if hold is not None:
        return Condition(name, "False", hold.reason, clip(hold.message, _MESSAGE_MAX))
    what = wanted.reason if wanted.full else f"at least {limit} uncompacted batches wait for the next run"
    return Condition(name, "False", "DebtExceeded", what)


def _collection(case: _Case) -> Condition:
    inspection = case.inspection
    holders = deadline.version_holders(inspection)
    if holders and deadline.is_due(case.shard, inspection.uncollected_from_ms, case.blocks, case.now_ms):
        return Condition(
            "GarbageCollected", "False", "BlockedByReader", f"v{inspection.earliest_seqno} is held by {_named(holders)}"
        )
    return Condition("GarbageCollected", "True", "Current", "")


def _missed(case: _Case, name: str, kind: MaintenanceKind, plain: Condition) -> Condition | None:
    """The condition of a missed deadline; None while it is not missed, or when another reason is more specific."""
    shard, owed_ms = case.shard, case.owed_from_ms(kind)
    if owed_ms is None or not deadline.is_missed(shard, owed_ms, case.now_ms) or plain.reason == "BlockedByReader":
        return None
    what = "updates retracted" if kind == "compaction" else "content that holds updates retracted"
    since = iso_text(owed_ms) or f"time {owed_ms}"
    until = times.to_text(deadline.deadline_ms(shard, owed_ms))
    why = _stopped(shard, kind) or plain.message or _held_up(case, kind)
    text = f"{what} since {since} should be gone since {until}: {why}"
    reason = "DeadlineMissed" if kind == "compaction" else "BehindSchedule"
    return Condition(name, "False", reason, clip(text, _MESSAGE_MAX))


def _held_up(case: _Case, kind: MaintenanceKind) -> str:
    """What holds up a deletion, if no run reports it."""
    if kind == "gc":
        return "the next collection deletes it"
    since, lag_s = case.inspection.since, case.shard.spec.since_lag_seconds
    if case.held:
        return f"since is held at {since} by {_named([one.reader for one in case.held])}"
    return f"since is {since}, and retention.sinceLagSeconds ({lag_s}) keeps it there while the shard is written"


def _stopped(shard: Shard, kind: MaintenanceKind) -> str:
    """The setting that stops the work; empty when there is none."""
    return "spec.suspend is true" if shard.spec.suspend else shard.spec.switched_off(kind)


def _named(readers: list[ReaderInfo]) -> str:
    return ", ".join(holding.named(one) for one in readers[: holding.BLOCKING_MAX])
