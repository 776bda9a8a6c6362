"""Shards on inline storage: the answers of their inspection pods, and the time of the next inspection. Pure.

The operator never connects to inline storage. A pod in the resource's namespace claims the shard, creates it, holds its since and reads
its state, with a Secret of that namespace (persist_engine.model.tending).
Invariant: users with rights on pods of the namespace can forge a report. So the operator uses a report only for that resource, and takes no
store and no Secret from it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.tending import decode_report, encode_wish
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import OwnedElsewhere, Unowned
from persist_engine.model.tending import (
    KnownLog,
    NoSuchShard,
    NotTended,
    Tended,
    Tending,
    WantedHold,
    WantedSchema,
    Wish,
    since_target_ms,
)
from persist_engine.rows.schema import Schema

from persist_operator.api import conditions, names, times
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard import InlineLocation, Shard, ShardSchema
from persist_operator.api.shard_status import Inspections, ShardStatus, Upkeep
from persist_operator.plan import maintenance, ownership, refusals, shard_log, shard_status
from persist_operator.plan.actions import Plan, StartInspection, StopRun
from persist_operator.plan.keeping import evolving
from persist_operator.plan.observed import (
    ActionFailure,
    Awaited,
    Inspected,
    NotOwned,
    Run,
    ShardMissing,
    ShardObserved,
    StoreFailure,
)
from persist_operator.plan.waiting import deadline, windows
from persist_operator.settings import InlineStorage, OperatorSettings

_FIRST_S, _MAX_S = 10, 300
#: The least time between two inspections of one shard, for any reason.
_APART_S = 5
_MESSAGE_MAX = 1024
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
#: Kinds of permanent failures, with the bridge's reasons for them. Other failures can pass without an action.
_PERMANENT: Mapping[str, str] = {
    "ForkedLog": "ShardLost",
    "ShardLost": "ShardLost",
    "Corrupt": "CorruptState",
    "MissingBlob": "CorruptState",
    "Invariant": "CorruptState",
    "Incompatible": "IncompatibleState",
    "UnsafeStore": "UnsafeStore",
    "StoreLost": "StoreLost",
    "StoreMismatch": "StoreMismatch",
    "SchemaMismatch": "SchemaMismatch",
    "CodecMismatch": "CodecMismatch",
    "InvalidArgument": "InvalidStorage",
    "ReportTooLong": "ReportTooLong",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of inspection pods. `at_ms` is a time before all reads of the answer; None while there is no answer."""

    inspected: Inspected
    shard_id: str | None = None
    at_ms: int | None = None
    left_out: tuple[int, int] = (0, 0)
    failures: Mapping[str, ActionFailure] = field(default_factory=dict)


def answer(
    shard: Shard, runs: Sequence[Run], location: InlineLocation, *, now_ms: int, settings: OperatorSettings
) -> Answer:
    """The answer of the newest inspection that ended, or the reason why there is none."""
    going = [one for one in runs if not one.phase.finished]
    for one in going:
        if one.is_stuck(now_ms):
            return _awaited(one.reason or "Pending", f"{one.name} does not start: {maintenance.why_stuck(one)}")
    ended = _ended(shard, runs, location)
    if not ended:
        why = f"; {going[-1].name}: {maintenance.why_stuck(going[-1])}" if going and going[-1].reason else ""
        return _awaited("Inspecting", f"waiting for a pod that inspects {location.blob} and {location.consensus}{why}")
    last, inline = ended[-1], settings.inline_storage
    if now_ms - _end_ms(last) > 1000 * (_MAX_S + inline.inspect_seconds + inline.deadline_seconds):
        return _awaited(
            "InspectionOverdue", f"the last answer, of {last.name}, is too old to show the current state of the shard"
        )
    tending = _reported(last)
    if isinstance(tending, str):
        return _awaited("InspectionFailed", f"{last.name}: {tending}")
    return _answer_of(shard, last, tending, location)


def _awaited(reason: str, message: str) -> Answer:
    word = reason if _WORD.fullmatch(reason) else "InspectionFailed"
    return Answer(inspected=Awaited(reason=word, message=clip(redact(message), _MESSAGE_MAX)))


def _end_ms(run: Run) -> int:
    return run.finished_ms or run.created_ms


def _ended(shard: Shard, runs: Sequence[Run], location: InlineLocation) -> list[Run]:
    """The ended inspections that count, oldest first: those of these stores that are not older than the last recorded one. The inspection
    that was intended last counts as the newest, regardless of clocks. Otherwise, after a clock was set back, it would be ignored, and the
    operator would make another one at once.
    """
    block, stores = shard.known.inspection or Inspections(), _stores(location)
    believed_ms, newest = times.to_ms(block.settled_time) or 0, block.job_name
    found = [
        one
        for one in runs
        if one.phase.finished
        and one.revision.startswith(stores)
        and (one.created_ms >= believed_ms or one.name == newest)
    ]
    return sorted(found, key=lambda one: (one.name == newest, one.created_ms, one.name))


def _reported(run: Run) -> Tending | str:
    """The report of an inspection, or the reason why there is none."""
    if run.report is None:
        text = run.message or (
            "it ended without a report" if run.exit_code is None else f"exit code {run.exit_code}, no report"
        )
        return f"{run.reason}: {text}" if run.reason else text
    try:
        return decode_report(run.report)
    except InvalidUsage as error:
        return f"its report is refused: {error}"


def _answer_of(shard: Shard, run: Run, tending: Tending, location: InlineLocation) -> Answer:
    match tending:
        case Tended(inspection=found):
            if shard_log.known_seqno(shard) != run.seqno:
                # The pod read the tag of a version that differs from the version on the present status.
                found = replace(found, known_tag=None)
            return Answer(
                inspected=found,
                shard_id=found.shard_id,
                at_ms=run.created_ms,
                left_out=(tending.readers_left_out, tending.writers_left_out),
                failures=_failures(tending, run.created_ms),
            )
        case NoSuchShard(shard_id):
            return Answer(inspected=ShardMissing(), shard_id=shard_id, at_ms=run.created_ms)
        case OwnedElsewhere(shard_id, owner):
            return Answer(inspected=NotOwned(shard_id=shard_id, owner=owner), at_ms=run.created_ms)
        case Unowned(shard_id):
            return Answer(inspected=NotOwned(shard_id=shard_id, owner=None), at_ms=run.created_ms)
        case NotTended(kind, message):
            text = message if "://" in message else f"{message} ({location.blob} or {location.consensus})"
            reason = _PERMANENT.get(kind, "StorageUnreachable")
            failed = StoreFailure(reason=reason, message=redact(text), permanent=kind in _PERMANENT)
            return Answer(inspected=failed, at_ms=run.created_ms)


def _failures(tended: Tended, at_ms: int) -> dict[str, ActionFailure]:
    """The failures of the pod, by the actions that do the same work on the stores of a profile."""
    found = {}
    if problem := redact(tended.hold_problem):
        found["AdvanceSince"] = ActionFailure(reason="HoldFailed", message=problem, permanent=False, at_ms=at_ms)
    if problem := redact(tended.schema_problem):
        found["EvolveSchema"] = ActionFailure(
            reason="Refused",
            message=f"spec.schema cannot succeed the shard's: {problem}",
            permanent=True,
            at_ms=at_ms,
            generation=tended.schema_generation,
        )
    return found


def is_behind(observed: ShardObserved, blocks: Mapping[MaintenanceKind, Upkeep]) -> bool:
    """Whether maintenance ended after the last inspection. The next inspection must then come before a decision about due work."""
    if observed.inspected_ms is None:
        return False
    ends = [_end_ms(one) for one in observed.runs if one.phase.finished]
    ends += [times.to_ms(block.last_success_time) or 0 for block in blocks.values()]
    return observed.inspected_ms <= max(ends, default=0)


def with_next(
    plan: Plan,
    shard: Shard,
    observed: ShardObserved,
    location: InlineLocation,
    *,
    now_ms: int,
    settings: OperatorSettings,
) -> Plan:
    """`plan` with the next inspection if it is due, with its intent on the status, and without the Jobs of former inspections."""
    runs, inline = observed.inspections, settings.inline_storage
    ended = _ended(shard, runs, location)
    planned, block = ShardStatus.of(plan.status), _settled(shard.known.inspection or Inspections(), ended)
    # The wish uses the planned status. A shard that the resource had before is no longer on it.
    planned_shard = replace(shard, status=plan.status)
    since_min = _since_min(planned_shard, observed, now_ms)
    wish = replace(
        _wish(planned_shard, settings, take_over=_overruled(observed), since_min=since_min),
        evolve=_successor(shard, observed, now_ms),
    )
    revision = _stores(location) + _revision(wish)
    left_s = _left_s(plan, observed, ended, block, revision, now_ms=now_ms, inline=inline)
    stale = [one for one in runs if one.phase.finished and one not in ended[-1:] and not one.deleting]
    actions = [
        StopRun(kind="inspection", name=one.name, reason="a newer one has ended", grace_seconds=0)
        for one in (stale if ended else ())
    ]
    wanted: tuple[StartInspection, ...] = ()
    if left_s <= 0 and not any(not one.phase.finished for one in runs):
        block, start = _intended(block, shard, wish, revision, location, runs=runs, now_ms=now_ms, inline=inline)
        wanted = (start,)
    inspected = replace(
        plan,
        status=replace(planned, inspection=block).wire(),
        actions=(*plan.actions, *actions, *wanted),
        requeue_after_s=_again_s(plan, left_s, wanted),
    )
    return refusals.with_refusals(
        inspected,
        observed.failures,
        wanted=(*wanted, *actions),
        meta=shard.meta,
        before=shard.status,
        now_ms=now_ms,
        runs=[*ended[-1:], *(one for one in runs if not one.phase.finished)],
    )


def _again_s(plan: Plan, left_s: float, wanted: tuple[StartInspection, ...]) -> float:
    """Seconds until the next plan, for changes without an event of a pod."""
    own_s = float(_MAX_S) if plan.is_periodic or plan.requeue_after_s is None else plan.requeue_after_s
    return max(1.0, min(own_s, 30.0 if wanted or left_s <= 0 else left_s))


def _settled(block: Inspections, ended: Sequence[Run]) -> Inspections:
    """status.inspection with the newest ended inspection, recorded once."""
    if not ended or block.settled_job == ended[-1].name:
        return block
    last, report = ended[-1], _reported(ended[-1])
    return replace(
        block,
        settled_job=last.name,
        settled_time=times.to_text(last.created_ms),
        consecutive_failures=(block.consecutive_failures or 0) + 1 if isinstance(report, str) else 0,
    )


def _left_s(
    plan: Plan,
    observed: ShardObserved,
    ended: Sequence[Run],
    block: Inspections,
    revision: str,
    *,
    now_ms: int,
    inline: InlineStorage,
) -> float:
    """Seconds until the next inspection is due. A clock that was set back does not prolong the wait. A clock that differs from the
    cluster's does not make every inspection due at once, because the operator's own time of the intent also counts.
    """
    attempt_ms = times.to_ms(block.last_attempt_time) or 0
    if not ended:
        # Users may remove each ended Job. The least distance then limits how often the operator makes a new one.
        is_removed = block.settled_job is not None and block.settled_job == block.job_name
        return max(0.0, _APART_S - abs(now_ms - attempt_ms) / 1000) if is_removed else 0.0
    failures = block.consecutive_failures or 0
    is_news = ended[-1].revision != revision or is_behind(observed, ShardStatus.of(plan.status).maintenance or {})
    whole_s = inline.inspect_seconds
    if failures:
        whole_s = times.backoff_s(failures, first_s=_FIRST_S, max_s=_MAX_S)
    elif is_news:
        whole_s = min(whole_s, _APART_S)
    elif conditions.is_true(plan.status, "Stalled"):
        whole_s = max(whole_s, min(_MAX_S, plan.requeue_after_s or 0.0))
    ages_ms = [abs(now_ms - ended[-1].created_ms)]
    if block.job_name == ended[-1].name:
        ages_ms.append(abs(now_ms - attempt_ms))
    return max(0.0, whole_s - min(ages_ms) / 1000)


def _intended(
    block: Inspections,
    shard: Shard,
    wish: Wish,
    revision: str,
    location: InlineLocation,
    *,
    runs: Sequence[Run],
    now_ms: int,
    inline: InlineStorage,
) -> tuple[Inspections, StartInspection]:
    """status.inspection with the intent of an inspection, and its action. An intended inspection without a Job keeps its name."""
    name = block.job_name or ""
    if not name or name == block.settled_job or any(one.name == name for one in runs):
        # SUBTLE: the time changes only with the name. A new time in each plan would change the status, and so cause the next plan.
        name = names.inspection_name(shard.meta.name, now_ms // 1000)
        block = replace(block, job_name=name, last_attempt_time=times.to_text(now_ms))
    start = StartInspection(
        name=name,
        location=location,
        wish=encode_wish(wish),
        known_seqno=0 if wish.known is None else wish.known.seqno,
        revision=revision,
        # The next inspection removes this Job. An earlier removal would lose its report.
        ttl_seconds=round(inline.inspect_seconds) + 2 * _MAX_S,
        priority_class_name=shard.spec.priority_class_name,
        service_account_name=shard.spec.service_account_name,
        template=shard.spec.maintenance_template,
    )
    return block, start


def _overruled(observed: ShardObserved) -> OwnedElsewhere | None:
    """The shard that the pod may take over, with its owner. The permission is only for this shard and this owner, even if the resource or
    the stores have changed when the pod runs.
    """
    found = observed.inspected
    if not observed.may_take_over or not isinstance(found, NotOwned) or found.owner is None:
        return None
    return OwnedElsewhere(ShardId(found.shard_id), found.owner)


def _since_min(shard: Shard, observed: ShardObserved, now_ms: int) -> int:
    """The since that the deletion deadline requires, from the last inspection; 0 when `retention.sinceLagSeconds` already moves since that
    far.
    """
    found = observed.inspected
    if not isinstance(found, Inspection):
        return 0
    blocks, seen_ms = shard.known.maintenance or {}, shard_status.upper_seen_ms(shard.known, found)
    horizon_ms = windows.horizon_ms(shard.spec.windows, now_ms)
    target = deadline.since_target(shard, found, blocks, upper_seen_ms=seen_ms, now_ms=now_ms, horizon_ms=horizon_ms)
    plain = since_target_ms(found.upper, shard.spec.since_lag_seconds * 1000)
    return target if target is not None and plain is not None and target > plain else 0


def _successor(shard: Shard, observed: ShardObserved, now_ms: int) -> WantedSchema | None:
    """The schema of the spec, if it may succeed the schema of the last inspection."""
    found = observed.inspected
    if not isinstance(found, Inspection):
        return None
    actual, failure = ShardSchema(key=found.key_schema, value=found.val_schema), observed.failures.get("EvolveSchema")
    standing = evolving.standing(shard, actual, failure, now_ms=now_ms)
    if not isinstance(standing, evolving.Evolves):
        return None
    schema, generation = standing.schema, shard.meta.generation
    return WantedSchema(shard_id=ShardId(found.shard_id), key=schema.key, value=schema.value, generation=generation)


def _wish(shard: Shard, settings: OperatorSettings, *, take_over: OwnedElsewhere | None, since_min: int) -> Wish:
    claim = ownership.claim_of(shard, settings)
    shard_id, log, codecs = shard.known.shard_id, shard.known.log, shard.spec.codecs
    known = None
    if claim.known_seqno is not None:
        known = KnownLog(seqno=claim.known_seqno, birth=log.birth or "", tag=log.tag or "")
    hold = None
    if shard_id and not shard.spec.suspend:
        critical_id = CriticalReaderId(names.critical_id_of(shard_id))
        hold = WantedHold(
            shard_id=ShardId(shard_id),
            critical_id=critical_id,
            purpose=names.critical_purpose(shard.meta.namespace, shard.meta.name),
            since_lag_ms=shard.spec.since_lag_seconds * 1000,
            since_min=since_min,
        )
    return Wish(
        owner=claim.owner,
        wanted=None if claim.wanted is None else ShardId(claim.wanted),
        proposed=ShardId(claim.proposed),
        take_over=take_over,
        known=known,
        # A shard that existed is never created again, because that would hide a loss.
        schema=_schema(shard) if known is None else None,
        codecs=None if codecs is None else (codecs.key, codecs.value),
        hold=hold,
    )


def _schema(shard: Shard) -> tuple[str, str] | None:
    wanted = shard.spec.schema
    if wanted is None:
        return None
    try:
        Schema.from_ddl(wanted.key, wanted.value)
    except InvalidUsage:
        return None
    return (wanted.key, wanted.value)


def _stores(location: InlineLocation) -> str:
    secrets = [dataclasses.astuple(one) for one in location.secrets]
    return names.revision_of({"blob": location.blob, "consensus": location.consensus, "secrets": secrets})


def _revision(wish: Wish) -> str:
    """The revision of a wish, without its known facts. A wish with a new revision is due at once, unless only `since_min` differs, which
    moves with the clock.
    """
    hold = None if wish.hold is None else replace(wish.hold, since_min=0)
    return names.revision_of({**dataclasses.asdict(replace(wish, known=None, hold=hold)), "owner": str(wish.owner)})
