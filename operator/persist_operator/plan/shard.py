"""The plan of one PersistShard: create, inspect, maintain. Pure.

The order is fixed. The first status is written before the stores are asked. The operator shows, advances and maintains a shard only after
the stores name this resource as its owner. The intent of an action is on the status before the action is taken. The intent of a creation is
in the stores instead, because the claim has registered the id there.
A shard that existed and is gone, or whose state went back, is never created again, because that would hide a loss of acknowledged data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from persist_engine.model.inspection import Inspection

from persist_operator.api import conditions, names, times
from persist_operator.api.conditions import Condition
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.shard import InlineLocation, Shard, ShardSchema, StorageRefused, StoreLocation
from persist_operator.api.shard_status import ShardStatus, Upkeep
from persist_operator.plan import (
    inspecting,
    maintenance,
    ownership,
    podless,
    refusals,
    shard_log,
    shard_status,
)
from persist_operator.plan.actions import (
    Action,
    AdvanceSince,
    EvolveSchema,
    InitialiseShard,
    Note,
    Plan,
    StartMaintenance,
    maintenance_key,
)
from persist_operator.plan.hints import Recover, Words, cluster_words
from persist_operator.plan.keeping import auditing, evolving, holding, reclaiming
from persist_operator.plan.observed import (
    ActionFailure,
    Awaited,
    NotInspected,
    NotOwned,
    ShardMissing,
    ShardObserved,
    StoreFailure,
)
from persist_operator.plan.waiting import deadline, next_run, starts
from persist_operator.settings import OperatorSettings

_RETRY_PERMANENT_S, _RETRY_S = 300, 30


@dataclass(frozen=True, slots=True)
class _Case:
    """A shard that the resource owns, with everything on which its plan depends. `base` is the status so far."""

    shard: Shard
    base: ShardStatus
    location: StoreLocation
    observed: ShardObserved
    now_ms: int
    settings: OperatorSettings
    words: Words
    refused: tuple[str, str] | None = None
    """The reason and the message why no maintenance may start; None when it may."""


def is_to_be_asked(shard: Shard) -> bool:
    """Whether the stores may be asked about `shard`: the resource is not being deleted, and it has a status."""
    return not shard.meta.deleting and bool(shard.status)


def plan_shard(
    shard: Shard, observed: ShardObserved, *, now_ms: int, settings: OperatorSettings, words: Words = cluster_words
) -> Plan:
    """The next steps for `shard`. Deterministic: the same inputs give the same plan. `words` renders the hints in its messages."""
    if shard.meta.deleting:
        return reclaiming.plan_deletion(shard, observed, now_ms=now_ms, settings=settings)
    try:
        location = shard.location(settings, observed.namespace_labels)
    except StorageRefused as error:
        return _stalled(shard, shard.known, error.reason, str(error), now_ms)
    refused = starts.refused(shard, settings.workload, now_ms)
    if refused is not None:
        if isinstance(location, InlineLocation) and refused[0] != "InvalidWindow":
            return _stalled(shard, shard.known, *refused, now_ms)  # an inspection needs the same kind of pod
        shard = replace(shard, spec=replace(shard.spec, windows=()))
    plan = _planned(shard, location, observed, now_ms, settings, words=words, refused=refused)
    if isinstance(location, InlineLocation) and is_to_be_asked(shard):
        plan = inspecting.with_next(plan, shard, observed, location, now_ms=now_ms, settings=settings)
    return podless.with_look(plan, (*observed.runs, *observed.inspections), shard.known, now_ms=now_ms)


def _planned(
    shard: Shard,
    location: StoreLocation,
    observed: ShardObserved,
    now_ms: int,
    settings: OperatorSettings,
    *,
    words: Words,
    refused: tuple[str, str] | None,
) -> Plan:
    """The plan that follows from the answer of the stores."""
    base = replace(shard.known, store=shard_status.stores(location))
    match observed.inspected:
        case Awaited(reason=reason, message=message):
            return _conditioned(
                shard, base, conditions.reconciling(reason, message, ready="Unknown"), now_ms, requeue_after_s=1
            )
        case NotInspected():
            found = conditions.reconciling("Inspecting", "the stores are not inspected yet", ready="Unknown")
            return _conditioned(shard, base, found, now_ms, requeue_after_s=1 if is_to_be_asked(shard) else 0)
        case NotOwned() as not_owned:
            refusal = ownership.refusal(shard, not_owned, settings, words)
            return _stalled(shard, base, *refusal, now_ms, retry_s=settings.loop.inspect_seconds, reachable=True)
        case StoreFailure() as failure:
            return _store_failed(shard, base, failure, now_ms, settings)
        case ShardMissing():
            return _missing(_Case(*_owning(shard, base, observed), location, observed, now_ms, settings, words))
        case Inspection() as inspection:
            case = _Case(*_owning(shard, base, observed), location, observed, now_ms, settings, words, refused)
            problem = _problem(case, inspection)
            if problem is not None:
                return _stalled(case.shard, case.base, *problem, now_ms, reachable=True)
            return _healthy(case, inspection)


def _owning(shard: Shard, base: ShardStatus, observed: ShardObserved) -> tuple[Shard, ShardStatus]:
    """The resource and its status with the id of its shard. The status drops every block of a former shard."""
    shard_id, known = observed.shard_id, shard.known
    if known.shard_id in {None, shard_id}:
        return shard, replace(base, shard_id=shard_id)
    kept = ShardStatus(conditions=known.conditions, last_handled_requests=known.last_handled_requests)
    return replace(shard, status=kept.wire()), replace(kept, store=base.store, shard_id=shard_id)


def _conditioned(
    shard: Shard,
    status: ShardStatus,
    found: list[Condition],
    now_ms: int,
    *,
    requeue_after_s: float | None,
    actions: tuple[Action, ...] = (),
    notes: tuple[Note, ...] = (),
) -> Plan:
    if shard.spec.suspend:
        found = [
            *found,
            Condition(
                "Suspended",
                "True",
                "Suspended",
                "spec.suspend is true: no maintenance is started and since does not move",
            ),
        ]
    rendered = conditions.render(
        found, shard.status.get("conditions", ()), generation=shard.meta.generation, now_ms=now_ms
    )
    return Plan(
        status=replace(status, observed_generation=shard.meta.generation, conditions=tuple(rendered)).wire(),
        actions=actions,
        requeue_after_s=requeue_after_s,
        notes=notes,
        is_periodic=True,
    )


def _stalled(
    shard: Shard,
    status: ShardStatus,
    reason: str,
    message: str,
    now_ms: int,
    *,
    reachable: bool = False,
    retry_s: float = _RETRY_PERMANENT_S,
) -> Plan:
    found = conditions.stalled(reason, message)
    if reachable:
        found.append(_reachable(status))
    notes = _note(shard, "Stalled", (reason, message))
    return _conditioned(shard, status, found, now_ms, requeue_after_s=retry_s, notes=notes)


def _note(shard: Shard, condition_type: str, why: tuple[str, str] | None) -> tuple[Note, ...]:
    """The Event of a resource whose condition gets this reason, with this message; none when it has the reason already."""
    has = (conditions.find(shard.status, condition_type) or {}).get("reason")
    return () if why is None or has == why[0] else (Note("Warning", *why),)


def _reachable(status: ShardStatus) -> Condition:
    """StorageReachable. Its text is about two moments, because an observation reads only the log."""
    stores = status.store
    text = f"{stores.consensus} answers, and {stores.blob} did when it was opened"
    return Condition("StorageReachable", "True", "Reachable", text)


def _store_failed(
    shard: Shard, base: ShardStatus, failure: StoreFailure, now_ms: int, settings: OperatorSettings
) -> Plan:
    """The plan while a store does not answer. Numbers on the status stay. A failure that is not permanent ends when the outage ends."""
    if failure.permanent:
        return _stalled(shard, base, failure.reason, failure.message, now_ms)
    found = [
        Condition("Ready", "False", failure.reason, failure.message),
        Condition("Reconciling", "True", failure.reason, "waiting for the store to come back"),
        Condition("StorageReachable", "False", failure.reason, failure.message),
    ]
    notes = _note(shard, "StorageReachable", (failure.reason, failure.message))
    return _conditioned(shard, base, found, now_ms, requeue_after_s=settings.loop.store_breaker_seconds, notes=notes)


def _missing(case: _Case) -> Plan:
    shard, base, now_ms = case.shard, case.base, case.now_ms
    shard_id, seqno = _id(base), shard_log.known_seqno(shard)
    if seqno is not None:
        message = (
            f"shard {shard_id} was at v{seqno} and is gone from {base.store.consensus}: "
            "the store was emptied, restored or replaced; restore its data, or see what the blob store holds with "
            f"{case.words(Recover(shard_id))}"
        )
        return _stalled(shard, base, "ShardLost", message, now_ms, reachable=True)
    if shard.spec.schema is None:
        message = (
            f"there is no shard {shard_id} in {base.store.consensus}; "
            "add spec.schema to create it, or correct spec.shardId"
        )
        return _stalled(shard, base, "ShardNotFound", message, now_ms, reachable=True)
    problem = evolving.schema_problem(shard.spec.schema, None)
    if problem is not None:
        return _stalled(shard, base, "InvalidSchema", problem, now_ms, reachable=True)
    action = InitialiseShard(
        owner=ownership.owner_of(shard, case.settings),
        shard_id=shard_id,
        location=case.location,
        schema=shard.spec.schema,
        codecs=shard.spec.codecs,
    )
    failure = case.observed.failures.get("InitialiseShard")
    if failure is not None and failure.generation == shard.meta.generation:
        return _initialise_failed(shard, base, action, failure, now_ms)
    found = [*conditions.reconciling("Initialising", f"creating shard {shard_id}"), _reachable(base)]
    # On inline storage, the inspection pod creates the shard.
    actions = () if isinstance(case.location, InlineLocation) else (action,)
    return _conditioned(shard, base, found, now_ms, requeue_after_s=1, actions=actions)


def _initialise_failed(
    shard: Shard, base: ShardStatus, action: InitialiseShard, failure: ActionFailure, now_ms: int
) -> Plan:
    wait_s = (_RETRY_PERMANENT_S if failure.permanent else _RETRY_S) - abs(now_ms - failure.at_ms) / 1000
    if failure.permanent and wait_s > 0:
        return _stalled(shard, base, failure.reason, failure.message, now_ms, reachable=True)
    found = conditions.reconciling(failure.reason, failure.message)
    actions: tuple[Action, ...] = (action,) if wait_s <= 0 else ()
    return _conditioned(shard, base, found, now_ms, requeue_after_s=max(1.0, wait_s), actions=actions)


def _problem(case: _Case, inspection: Inspection) -> tuple[str, str] | None:
    """The problem that a person must solve before the operator changes this shard, as (reason, message); None when there is none."""
    lost = shard_log.loss(case.shard, inspection, case.words)
    if lost is not None:
        return "ShardLost", lost
    codecs = evolving.codecs_problem(case.shard, inspection)
    if codecs is not None:
        return "CodecMismatch", codecs
    schema = _schema_standing(case, inspection)
    return (schema.reason, schema.message) if isinstance(schema, evolving.Stopped) else None


def _schema_standing(case: _Case, inspection: Inspection) -> evolving.Standing:
    actual = ShardSchema(key=inspection.key_schema, value=inspection.val_schema)
    return evolving.standing(case.shard, actual, case.observed.failures.get("EvolveSchema"), now_ms=case.now_ms)


def _evolve(case: _Case, found: evolving.Standing) -> tuple[EvolveSchema, ...]:
    if not isinstance(found, evolving.Evolves) or not found.is_due or isinstance(case.location, InlineLocation):
        return ()  # on inline storage the next inspection pod evolves the schema
    owner = ownership.owner_of(case.shard, case.settings)
    return (EvolveSchema(owner=owner, shard_id=_id(case.base), location=case.location, schema=found.schema),)


def _healthy(case: _Case, inspection: Inspection) -> Plan:
    shard, now_ms = case.shard, case.now_ms
    folded = maintenance.fold(shard, case.observed.runs, now_ms)
    ahead = _outlook(case, inspection, folded)
    target = _since_target(case, inspection, folded.maintenance, ahead.horizon_ms)
    advance = _advance_since(case, inspection, target)
    begun = _begun(case, inspection, folded.maintenance, ahead)
    started, blocks = begun.started, begun.blocks
    approved, answers = next_run.answers(shard, ahead)
    accepted, recoveries = _log_news(shard, inspection)
    critical_id, known = names.critical_id_of(_id(case.base)), shard.known.holds
    held = holding.holders(known, inspection, critical_id=critical_id, now_ms=_seen_ms(case))
    is_new_hold = holding.is_held_back(inspection, target, held) and holding.has_news(known, held)
    forced = bool(folded.notes or recoveries or accepted or is_new_hold)
    numbers = _with_numbers(case, inspection, held, forced=forced, advanced=advance is not None)
    status = replace(
        shard_status.with_facts(numbers, inspection),
        plan=ahead.plan,
        rewritten=folded.rewritten or None,
        maintenance=blocks,
        last_handled_requests={**(shard.known.last_handled_requests or {}), **begun.handled, **approved, **accepted},
        history=folded.history,
    )
    status = auditing.with_findings(status, shard.known, folded.maintenance, case.observed.runs)
    ready = "Suspended" if shard.spec.suspend else "Healthy"
    healthy = Condition("Ready", "True", ready, f"shard {case.base.shard_id} is initialised and its log answers")
    schema = _schema_standing(case, inspection)
    refused = _refused_runs(case, started)
    found = [
        *(evolving.conditions(schema, healthy) if case.refused is None else conditions.stalled(*case.refused)),
        _reachable(case.base),
        *shard_status.upkeep_conditions(
            shard, inspection, blocks, case.observed, refused=refused, held=held, ahead=ahead, now_ms=now_ms
        ),
        holding.since_condition(
            inspection,
            held,
            target=target,
            own_since=shard_status.own_since_ms(inspection, critical_id),
            failure=case.observed.failures.get("AdvanceSince"),
            words=case.words,
        ),
        *auditing.condition(shard, status, blocks, case.words),
    ]
    plan = _conditioned(
        shard,
        status,
        found,
        now_ms,
        requeue_after_s=case.settings.loop.inspect_seconds,
        actions=(*_evolve(case, schema), *((advance,) if advance else ()), *started),
        notes=(*folded.notes, *recoveries, *answers, *_note(shard, "Stalled", case.refused)),
    )
    if not plan.actions and status.frontiers.seqno == inspection.seqno:
        plan = replace(plan, is_settled=_is_settled(case, inspection, folded, ahead))
    return refusals.with_refusals(
        plan,
        case.observed.failures,
        wanted=started,
        meta=shard.meta,
        before=shard.status,
        now_ms=now_ms,
        runs=[one for one in case.observed.runs if not one.phase.finished],
    )


def _is_settled(case: _Case, inspection: Inspection, folded: maintenance.Folded, ahead: next_run.Outlook) -> bool:
    """Whether, without news, nothing becomes due before the stores are asked again. `ahead`: the present outlook."""
    # Labels of namespaces bring no news, and a removed label may forbid the stores.
    if case.observed.namespace_labels:
        return False
    # While no deletion is owed, time alone adds no run to the outlook.
    if ahead.plan.id or inspection.owed_from_ms is not None:
        return False
    if any(not run.phase.finished for run in case.observed.runs):
        return False
    # The wait is spread, so it may be a tenth longer.
    later = replace(case, now_ms=case.now_ms + round(1100 * case.settings.loop.poll_seconds))
    target = _since_target(later, inspection, folded.maintenance, later.now_ms)
    audits = [
        auditing.due_reason(later.shard, folded.maintenance.get(kind, Upkeep()), kind, later.now_ms)
        for kind in names.AUDIT_KINDS
    ]
    return not any(audits) and _advance_since(later, inspection, target) is None


def _log_news(shard: Shard, inspection: Inspection) -> tuple[Mapping[str, str], tuple[Note, ...]]:
    """The request to accept the log, if this plan handles it, and the Event of a log that was begun anew."""
    accepted, note = shard_log.accept_token(shard), f"the log was begun anew at v{inspection.seqno}"
    recoveries = (Note("Warning", "LogRecovered", note),) if shard_log.was_recovered(shard, inspection) else ()
    return {} if accepted is None else {shard_log.ACCEPT: accepted}, recoveries


def _refused_runs(case: _Case, started: Iterable[StartMaintenance]) -> Mapping[MaintenanceKind, ActionFailure]:
    failures, kinds = case.observed.failures, {each.kind for each in started}
    return {kind: one for kind in kinds if (one := failures.get(maintenance_key(kind))) is not None}


def _outlook(case: _Case, inspection: Inspection, folded: maintenance.Folded) -> next_run.Outlook:
    refusal = case.observed.failures.get(maintenance_key("compaction"))
    return next_run.outlook(
        case.shard,
        inspection,
        folded,
        case.observed.runs,
        is_refused=refusal is not None and not refusal.place,
        is_renewed=not _is_young(case, inspection),
        workload=case.settings.workload,
        words=case.words,
        now_ms=case.now_ms,
    )


def _begun(
    case: _Case, inspection: Inspection, blocks: Mapping[MaintenanceKind, Upkeep], ahead: next_run.Outlook
) -> starts.Begun:
    if case.refused is not None or inspecting.is_behind(case.observed, blocks):
        return starts.Begun((), blocks, {})
    return starts.begun(
        case.shard,
        inspection,
        blocks,
        case.observed,
        ahead=ahead,
        shard_id=_id(case.base),
        location=case.location,
        workload=case.settings.workload,
        now_ms=case.now_ms,
    )


def _with_numbers(
    case: _Case, inspection: Inspection, held: tuple[holding.Held, ...], *, forced: bool, advanced: bool
) -> ShardStatus:
    """The status so far with new numbers. It keeps the known numbers while they are young or the shard has not changed.

    So the status of a busy shard is written every `numbers_seconds`, and the status of an idle shard is not written.
    """
    if not forced and not advanced and _is_young(case, inspection):
        return case.base
    return shard_status.with_numbers(
        case.base,
        inspection,
        now_ms=_seen_ms(case),
        held=held,
        left_out=(case.observed.readers_left_out, case.observed.writers_left_out),
        since_advanced=times.to_text(case.now_ms) if advanced else case.shard.known.frontiers.since_advanced_time,
        deadline_seconds=case.shard.spec.deadline_seconds,
    )


def _is_young(case: _Case, inspection: Inspection) -> bool:
    """Whether the numbers on the status need no renewal by their age."""
    frontiers = case.shard.known.frontiers
    observed_ms = times.to_ms(frontiers.observed_time)
    if observed_ms is None or case.shard.known.observed_generation != case.shard.meta.generation:
        return False
    # A time ahead of now comes from before a clock was set back. It must not delay the update.
    young_s: float = case.settings.loop.numbers_seconds
    if frontiers.seqno == inspection.seqno:
        # Only the age of the owed deletions has changed. The status shows it to a hundredth of the deadline.
        deadline_s, owed_ms = case.shard.spec.deadline_seconds, inspection.owed_from_ms
        young_s = max(young_s, deadline_s / 100)
        until = None if owed_ms is None else times.to_text(owed_ms + 1000 * deadline_s)
        if case.shard.known.debt.deadline_time != until:
            return False  # the deadline changed in a generation that was observed while the stores did not answer
    young = 0 <= case.now_ms - observed_ms < young_s * 1000
    return young or (frontiers.seqno == inspection.seqno and inspection.owed_from_ms is None)


def _id(status: ShardStatus) -> str:
    """The id of the shard that the resource owns. The status must come from `_owning`."""
    return str(status.shard_id)


def _since_target(
    case: _Case, inspection: Inspection, blocks: Mapping[MaintenanceKind, Upkeep], horizon_ms: int
) -> int | None:
    seen_ms = shard_status.upper_seen_ms(case.shard.known, inspection)
    return deadline.since_target(
        case.shard, inspection, blocks, upper_seen_ms=seen_ms, now_ms=case.now_ms, horizon_ms=horizon_ms
    )


def _advance_since(case: _Case, inspection: Inspection, target: int | None) -> AdvanceSince | None:
    shard = case.shard
    if shard.spec.suspend or inspection.is_tombstone or target is None or isinstance(case.location, InlineLocation):
        return None
    critical_id = names.critical_id_of(_id(case.base))
    held = shard_status.own_since_ms(inspection, critical_id)
    last_ms = times.to_ms(shard.known.frontiers.since_advanced_time)
    too_soon = last_ms is not None and 0 <= case.now_ms - last_ms < case.settings.loop.since_seconds * 1000
    is_reached = held is not None and target <= held
    if too_soon or (is_reached and not shard_status.is_since_behind(inspection)):
        return None
    return AdvanceSince(
        owner=ownership.owner_of(shard, case.settings),
        shard_id=_id(case.base),
        location=case.location,
        critical_id=critical_id,
        since_ms=max(target, held or 0),
    )


def _seen_ms(case: _Case) -> int:
    """The time of the numbers. For an answer of a pod, it is a time before the pod's reads."""
    return case.observed.inspected_ms or case.now_ms
