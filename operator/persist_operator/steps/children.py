"""From Pods and Jobs to the plan's words. Total: whatever a kubelet leaves out (also all container statuses) has a meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from persist_operator.api import names, times
from persist_operator.api.names import MAINTENANCE_KINDS, MaintenanceKind
from persist_operator.manifests import driver, maintenance
from persist_operator.plan.observed import Executors, Phase, Run

Resource = Mapping[str, Any]
#: Put before the words when many Events of a Job differ in their words only.
_COMBINED = "(combined from similar events): "
#: Kubernetes cuts the name of a Job to this before it appends so many characters, drawn for each pod.
_NAME_MAX, _DRAWN = 58, 5
_CONTAINERS = {driver.CONTAINER, maintenance.CONTAINER}
_PHASES = {"Succeeded": Phase.SUCCEEDED, "Failed": Phase.FAILED, "Running": Phase.RUNNING, "Unknown": Phase.RUNNING}


def maintenance_run(job: Resource, pods: Iterable[Resource]) -> Run | None:
    """The run that a Job stands for, of maintenance or a look at a shard; None for Jobs that are not ours."""
    labels = job["metadata"].get("labels") or {}
    kind = _job_kind(labels.get(names.LABEL_KIND, ""))
    if kind is None:
        return None
    name, status = job["metadata"]["name"], job.get("status") or {}
    mine = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-name") == name]
    pod = max(mine, key=lambda one: str(one["metadata"].get("creationTimestamp", "")), default=None)
    ended = {one["type"]: one for one in status.get("conditions") or () if one.get("status") == "True"}
    phase = Phase.PENDING
    if "Complete" in ended:
        phase = Phase.SUCCEEDED
    elif "Failed" in ended or "FailureTarget" in ended:
        # SUBTLE: Kubernetes says Failed only when the last pod is gone, which one on a node that is cut off never is.
        phase = Phase.FAILED
    elif pod is not None and _phase(pod) is not Phase.PENDING:
        # The Job's own word is what ends a run: its pod may be counted later.
        phase = Phase.RUNNING
    facts = _pod_facts(pod) if pod is not None else {}
    if pod is None and phase is Phase.PENDING:
        facts = _no_pod(name)
    end = ended.get("Complete") or ended.get("Failed") or ended.get("FailureTarget") or {}
    if phase is Phase.FAILED:
        # BackoffLimitExceeded only says that the one pod failed: the pod knows better.
        said = "" if end.get("reason") == "BackoffLimitExceeded" else end.get("reason", "")
        facts["reason"] = said or facts.get("reason") or "PodLost"
        facts["message"] = facts.get("message") or end.get("message", "")
    return Run(
        name=name,
        kind=kind,
        phase=phase,
        created_ms=_created_ms(job),
        started_ms=times.to_ms(status.get("startTime")),
        finished_ms=times.to_ms(status.get("completionTime") or end.get("lastTransitionTime"))
        if phase.finished
        else None,
        deleting=bool(job["metadata"].get("deletionTimestamp")),
        seqno=_integer(labels.get(names.LABEL_SEQNO)),
        revision=labels.get(names.LABEL_REVISION, ""),
        planned_reason=(job["metadata"].get("annotations") or {}).get(names.ANNOTATION_REASON, ""),
        exit_code=facts.get("exit_code"),
        reason=facts.get("reason", ""),
        message=facts.get("message", ""),
        # One that was ended with its Job was counted as failed.
        podless=pod is None and (phase is Phase.PENDING or (phase is Phase.FAILED and not status.get("failed"))),
        report=facts.get("report"),
    )


def refusal(job: Resource, events: Iterable[Resource]) -> str:
    """What the newest of a Job's Events says; empty when there are none. Pods' names are the Job's: a name that is drawn for each
    try would make the status another one each time.
    """
    newest = max(events, key=_told_ms, default=None)
    if newest is None:
        return ""
    said = str(newest.get("message") or "").removeprefix(_COMBINED)
    name = job["metadata"]["name"]
    drawn = re.escape(f"{name}-"[:_NAME_MAX]) + f"[a-z0-9]{{{_DRAWN}}}(?![a-z0-9])"
    return re.sub(drawn, name, said)


def _told_ms(event: Resource) -> int:
    """When it was last told, in whichever way its recorder says so."""
    series, head = event.get("series") or {}, event.get("metadata") or {}
    told = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return times.to_ms(told or head.get("creationTimestamp")) or 0


def _no_pod(job: str) -> dict[str, Any]:
    """Kubernetes makes the pods of Jobs, and tells in Events only what it is refused."""
    return {"reason": "NoPod", "message": f"the Job has no pod; `kubectl describe job {job}` tells who refuses it"}


def driver_run(pod: Resource, *, log_tail: str = "") -> Run:
    """The attempt that a driver pod stands for."""
    metadata = pod["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    phase, facts = _phase(pod), _pod_facts(pod)
    finished_ms = facts.get("finished_ms") or (
        times.to_ms(metadata.get("deletionTimestamp")) if phase.finished else None
    )
    return Run(
        name=metadata["name"],
        kind="driver",
        phase=phase,
        created_ms=_created_ms(pod),
        started_ms=facts.get("started_ms"),
        finished_ms=finished_ms if phase.finished else None,
        deleting=bool(metadata.get("deletionTimestamp")),
        deleted_ms=times.to_ms(metadata.get("deletionTimestamp")),
        attempt=_integer(labels.get(names.LABEL_ATTEMPT)),
        run_number=_integer(labels.get(names.LABEL_RUN)),
        run_id=annotations.get(names.ANNOTATION_RUN_ID, ""),
        revision=labels.get(names.LABEL_REVISION, ""),
        scheduled_ms=times.to_ms(annotations.get(names.ANNOTATION_SCHEDULED_TIME)),
        exit_code=facts.get("exit_code"),
        reason=facts.get("reason", ""),
        message=facts.get("message", ""),
        report=facts.get("report"),
        log_tail=log_tail,
    )


def executors(pods: Iterable[Resource], attempt: int) -> Executors:
    """Executor pods of one attempt, counted."""
    counts = {Phase.RUNNING: 0, Phase.PENDING: 0, Phase.FAILED: 0, Phase.SUCCEEDED: 0}
    for pod in pods:
        if (pod["metadata"].get("labels") or {}).get(names.LABEL_ATTEMPT) == str(attempt):
            counts[_phase(pod)] += 1
    return Executors(running=counts[Phase.RUNNING], pending=counts[Phase.PENDING], failed=counts[Phase.FAILED])


def _phase(pod: Resource) -> Phase:
    return _PHASES.get((pod.get("status") or {}).get("phase", ""), Phase.PENDING)


def _pod_facts(pod: Resource) -> dict[str, Any]:
    """exit_code, reason, message, report, started_ms, finished_ms: what is known of them."""
    status = pod.get("status") or {}
    statuses = status.get("containerStatuses") or ()
    # Others may have been put beside ours on the way in.
    ours = [one for one in statuses if one.get("name") in _CONTAINERS]
    container: Resource = next(iter([*ours, *statuses]), {})
    state = container.get("state") or {}
    terminated, waiting, running = state.get("terminated"), state.get("waiting") or {}, state.get("running") or {}
    # The pod's own reason (Evicted, NodeLost) and what disrupted it go before what the container died of.
    reason, message = status.get("reason", ""), status.get("message", "")
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    disrupted, scheduled = conditions.get("DisruptionTarget", {}), conditions.get("PodScheduled", {})
    if not reason and disrupted.get("status") == "True":
        reason, message = disrupted.get("reason", ""), disrupted.get("message", "")
    facts: dict[str, Any] = {}
    if terminated:
        report, text = _report(terminated.get("message", ""))
        facts.update(
            exit_code=terminated.get("exitCode"),
            report=report,
            started_ms=times.to_ms(terminated.get("startedAt")),
            finished_ms=times.to_ms(terminated.get("finishedAt")),
        )
        reason, message = reason or terminated.get("reason", ""), message or text
    elif running:
        facts["started_ms"] = times.to_ms(running.get("startedAt"))
    elif waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
        reason, message = reason or waiting["reason"], message or waiting.get("message", "")
    elif scheduled.get("status") == "False":
        reason, message = reason or scheduled.get("reason", ""), message or scheduled.get("message", "")
    return {**facts, "reason": reason, "message": message}


def _report(message: str) -> tuple[Mapping[str, Any] | None, str]:
    """The report that a container left as its termination message, or the text when it is none."""
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):
        return None, message
    return (document, "") if isinstance(document, dict) else (None, message)


def _job_kind(text: str) -> MaintenanceKind | Literal["inspection"] | None:
    if text == names.INSPECTION:
        return "inspection"
    return next((kind for kind in MAINTENANCE_KINDS if kind == text), None)


def _created_ms(resource: Resource) -> int:
    return times.to_ms(resource["metadata"].get("creationTimestamp")) or 0


def _integer(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
