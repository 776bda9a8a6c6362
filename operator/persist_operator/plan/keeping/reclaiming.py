"""The deletion of a PersistShard whose reclaimPolicy is Tombstone or Purge, and the finalizer that keeps the resource until then. Pure.

A resource with Retain has no finalizer, and its deletion touches no store. With another policy, a pod reclaims the shard
(persist_engine.client.reclaiming) when no SparkSink refers to it any more. The stores show whether readers hold it. The finalizer is
removed when a pod reports that nothing is left to do. A lost report does no harm, because another run finds the work done. If the status
names no shard, for example after a restore from a backup without a status, the operator looks the shard up in the stores; for inline
storage the pod does.
"""

from __future__ import annotations

from dataclasses import replace

from persist_operator.api import conditions, names, times
from persist_operator.api.conditions import Condition
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard import Shard, StorageRefused, StoreLocation
from persist_operator.api.shard_status import Deletion
from persist_operator.plan import maintenance, ownership
from persist_operator.plan.actions import KeepFinalizer, Plan, StartReclaim, action_key
from persist_operator.plan.observed import OwnerState, Phase, Run, ShardObserved, StoreFailure
from persist_operator.settings import OperatorSettings

#: Verdicts after which the resource has nothing more to do for the shard.
_DONE = {"Reclaimed", "NotOwned", "NoShard"}
_FIRST_S, _MAX_S, _HELD_S, _LOOK_S = 10, 600, 60, 30
_SINKS_SHOWN, _MESSAGE_MAX = 5, 2048


def is_reclaimed(shard: Shard) -> bool:
    """Whether the deletion of the resource needs more work from the operator than the removal of the finalizer. A change of the policy to
    Retain does not stop a pod that has begun.
    """
    known = shard.known.deletion
    has_begun = known.job_name not in {None, known.settled_job}
    return shard.meta.deleting and _has_finalizer(shard) and (has_begun or shard.spec.reclaim_policy != "Retain")


def owner_state(shard: Shard | None) -> OwnerState:
    """See plan.observed. None: there is no such resource."""
    if shard is None:
        return "Gone"
    if not shard.meta.deleting:
        return "Keeps"
    return "Ends" if is_reclaimed(shard) else "Gone"


def with_finalizer(plan: Plan, shard: Shard) -> Plan:
    """`plan` for a resource that is not being deleted, with the finalizer set or removed as its policy requires."""
    is_wanted = shard.spec.reclaim_policy != "Retain"
    if shard.meta.deleting or is_wanted == _has_finalizer(shard):
        return plan
    return replace(plan, actions=(KeepFinalizer(present=is_wanted), *plan.actions))


def plan_deletion(shard: Shard, observed: ShardObserved, *, now_ms: int, settings: OperatorSettings) -> Plan:
    """The next step of the deletion of the resource."""
    if not _has_finalizer(shard):
        return Plan(status=shard.status)
    if not is_reclaimed(shard):
        return _released(shard)
    known = shard.known.deletion
    run = next((one for one in observed.runs if one.kind == "reclaim" and one.name == known.job_name), None)
    if run is not None and not run.phase.finished:
        why = f" is under way: {run.message}" if run.message else " is under way"
        if run.is_stuck(now_ms) and not run.refused:
            why = f" does not start: {maintenance.why_stuck(run)}"
        return _blocked(shard, known, "PurgeIncomplete", f"{run.name}{why}", now_ms, wait_s=_LOOK_S)
    is_done = run is not None and (run.report or {}).get("verdict") in _DONE
    if is_done or shard.spec.reclaim_policy == "Retain":
        return _released(shard)
    if shard.known.shard_id is None:
        if isinstance(observed.inspected, StoreFailure):
            text = f"the stores do not say whether the resource has a shard: {observed.inspected.message}"
            return _blocked(shard, shard.known.deletion, "PurgeIncomplete", text, now_ms, wait_s=_HELD_S)
        if observed.shard_id is not None:
            shard = replace(shard, status=replace(shard.known, shard_id=observed.shard_id).wire())
        elif not _may_have_shard_inline(shard):
            return _released(shard)
    try:
        location = shard.location(settings, observed.namespace_labels)
    except StorageRefused as error:
        return _blocked(shard, shard.known.deletion, "PurgeIncomplete", str(error), now_ms, wait_s=_MAX_S)
    deletion = known if run is None else _settled(known, run, now_ms)
    if observed.sinks:
        text = f"SparkSinks refer to the shard: {', '.join(observed.sinks[:_SINKS_SHOWN])}. Delete them first"
        return _blocked(shard, deletion, "SinksAttached", text, now_ms, wait_s=_LOOK_S)
    next_ms = times.to_ms(deletion.next_attempt_time) or 0
    if 0 < next_ms - now_ms <= 1000 * _MAX_S:
        reason, text = deletion.reason or "PurgeIncomplete", deletion.message or ""
        return _blocked(shard, deletion, reason, text, now_ms, wait_s=(next_ms - now_ms) / 1000)
    return _started(shard, deletion, location, observed, now_ms=now_ms, settings=settings)


def _may_have_shard_inline(shard: Shard) -> bool:
    """Whether a pod may have claimed a shard on inline storage. False only if no inspection can have been intended."""
    return shard.spec.storage is not None and (not shard.status or shard.known.inspection is not None)


def _has_finalizer(shard: Shard) -> bool:
    return names.FINALIZER in shard.meta.finalizers


def _released(shard: Shard) -> Plan:
    return Plan(status=shard.status, actions=(KeepFinalizer(present=False),))


def _settled(known: Deletion, run: Run, now_ms: int) -> Deletion:
    """The block with the end of `run`, recorded once."""
    if not run.phase.finished or known.settled_job == run.name:
        return known
    report = run.report or {}
    verdict = report.get("verdict") if run.phase is Phase.SUCCEEDED else None
    message = clip(redact(str(report.get("message") or run.message or run.reason or "it left no report")), _MESSAGE_MAX)
    failures = 0 if verdict in {"Held", "Incomplete"} else (known.consecutive_failures or 0) + 1
    wait_s = {"Held": _HELD_S, "Incomplete": 0}.get(
        str(verdict), times.backoff_s(failures, first_s=_FIRST_S, max_s=_MAX_S)
    )
    return replace(
        known,
        settled_job=run.name,
        consecutive_failures=failures,
        next_attempt_time=times.to_text(now_ms + 1000 * wait_s) if wait_s else None,
        reason="ReadersHold" if verdict == "Held" else "PurgeIncomplete",
        message=message,
    )


def _started(
    shard: Shard,
    deletion: Deletion,
    location: StoreLocation,
    observed: ShardObserved,
    *,
    now_ms: int,
    settings: OperatorSettings,
) -> Plan:
    """The start of the next run. An intended run without a Job keeps its name."""
    if deletion.job_name is None or deletion.job_name == deletion.settled_job:
        attempt = (deletion.attempt or 0) + 1
        deletion = replace(
            deletion,
            attempt=attempt,
            job_name=names.reclaim_name(shard.meta.name, attempt),
            last_attempt_time=times.to_text(now_ms),
            next_attempt_time=None,
        )
    spec = shard.spec
    start = StartReclaim(
        name=str(deletion.job_name),
        shard_id=shard.known.shard_id or spec.shard_id,
        owner=str(ownership.owner_of(shard, settings)),
        purge=spec.reclaim_policy == "Purge",
        deletes_max=spec.gc_deletes_max,
        record_days=spec.record_days,
        queue_priority=spec.queue_priority,
        location=location,
        ttl_seconds=spec.ttl_seconds_after_finished,
        priority_class_name=spec.priority_class_name,
        service_account_name=spec.service_account_name,
        template=spec.maintenance_template,
    )
    failure = observed.failures.get(action_key(start))
    text = f"{start.name} is to begin" if failure is None else f"{start.name} cannot begin: {failure.message}"
    plan = _blocked(shard, deletion, "PurgeIncomplete", text, now_ms, wait_s=_FIRST_S)
    if failure is not None and abs(now_ms - failure.at_ms) < 1000 * _FIRST_S:
        return replace(plan, refused=frozenset({action_key(start)}))
    return replace(plan, actions=(start,), refused=frozenset({action_key(start)}))


def _blocked(shard: Shard, deletion: Deletion, reason: str, message: str, now_ms: int, *, wait_s: float) -> Plan:
    """A plan that only shows why the resource still exists."""
    text = clip(redact(message), _MESSAGE_MAX)
    found = [
        Condition("Ready", "False", "Deleting", f"reclaimPolicy {shard.spec.reclaim_policy}: {text}"),
        Condition("Reconciling", "True", "Deleting", text),
        Condition("DeletionBlocked", "True", reason, text),
    ]
    rendered = conditions.render(
        found, shard.status.get("conditions", ()), generation=shard.meta.generation, now_ms=now_ms
    )
    status = replace(
        shard.known, deletion=deletion, observed_generation=shard.meta.generation, conditions=tuple(rendered)
    )
    return Plan(status=status.wire(), requeue_after_s=max(1.0, wait_s))
