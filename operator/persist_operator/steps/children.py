"""Converts Pods and Jobs to the types of the plan. Total: every status of a Pod gives a result, even one without container statuses."""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from persist_operator.api import names, times
from persist_operator.api.names import MAINTENANCE_KINDS, MaintenanceKind
from persist_operator.api.shard_status import Runner
from persist_operator.api.sink_status import RunningProgress
from persist_operator.plan.observed import Executors, Phase, Run

Resource = Mapping[str, Any]
#: The prefix of the message when Kubernetes combines Events of a Job that differ only in their messages.
_COMBINED = "(combined from similar events): "
#: The name of a Job's pod is the Job's name, cut to _NAME_MAX, and _DRAWN random characters.
_NAME_MAX, _DRAWN = 58, 5
#: The greatest number that a status holds.
_STATUS_MAX = (1 << 63) - 1
#: Attempts and runs are counted from 1. A driver with a greater number would have a name that is too long.
_NUMBER_MAX = 10**9
_DEFAULT_SCHEDULER = "default-scheduler"
#: Reasons of a container that says nothing of why it waits.
_CREATED_SOON = ("ContainerCreating", "PodInitializing")
_CONTAINERS = {names.DRIVER_CONTAINER, names.EXECUTOR_CONTAINER, names.MAINTENANCE_CONTAINER}
_PHASES = {"Succeeded": Phase.SUCCEEDED, "Failed": Phase.FAILED, "Running": Phase.RUNNING, "Unknown": Phase.RUNNING}


def maintenance_run(job: Resource, pods: Iterable[Resource]) -> Run | None:
    """The run of a Job, of maintenance or an inspection; None for a Job of another kind."""
    labels = job["metadata"].get("labels") or {}
    kind = _job_kind(labels.get(names.LABEL_KIND, ""))
    if kind is None:
        return None
    name, status = job["metadata"]["name"], job.get("status") or {}
    mine = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-name") == name]
    pod = max(mine, key=lambda one: str(one["metadata"].get("creationTimestamp", "")), default=None)
    ended = {one["type"]: one for one in status.get("conditions") or () if one.get("status") == "True"}
    phase = _job_phase(ended, pod)
    end = ended.get("Complete") or ended.get("Failed") or ended.get("FailureTarget") or {}
    facts = _Facts() if pod is None else _pod_facts(pod)
    if pod is None and phase is Phase.PENDING:
        facts = _no_pod(name)
    if phase is Phase.FAILED:
        # BackoffLimitExceeded only means that the one pod failed. The pod has the cause.
        cause = "" if end.get("reason") == "BackoffLimitExceeded" else end.get("reason", "")
        facts = replace(
            facts, reason=cause or facts.reason or "PodLost", message=facts.message or end.get("message", "")
        )
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
        deleted_ms=times.to_ms(job["metadata"].get("deletionTimestamp")),
        held_by=tuple(job["metadata"].get("finalizers") or ()) if job["metadata"].get("deletionTimestamp") else (),
        seqno=_integer(labels.get(names.LABEL_SEQNO)),
        runner=next((one for one in get_args(Runner) if one == labels.get(names.LABEL_RUNNER)), None),
        revision=labels.get(names.LABEL_REVISION, ""),
        planned_reason=(job["metadata"].get("annotations") or {}).get(names.ANNOTATION_REASON, ""),
        exit_code=facts.exit_code,
        reason=facts.reason,
        message=facts.message,
        # If a pod ends together with its Job, the Job counts it as failed.
        podless=pod is None and (phase is Phase.PENDING or (phase is Phase.FAILED and not status.get("failed"))),
        report=facts.report,
    )


def _job_phase(ended: Mapping[str, Resource], pod: Resource | None) -> Phase:
    """The phase of a run whose Job has the true conditions `ended`. Only these conditions end the run, because the Job may count its
    pod later.
    """
    if "Complete" in ended:
        return Phase.SUCCEEDED
    if "Failed" in ended or "FailureTarget" in ended:
        # SUBTLE: Kubernetes sets Failed only when the last pod is gone. A pod on a disconnected node never goes.
        return Phase.FAILED
    return Phase.PENDING if pod is None or _phase(pod) is Phase.PENDING else Phase.RUNNING


def refusal(job: Resource, events: Iterable[Resource]) -> str:
    """The message of the newest of a Job's Events; empty when there are none. The Job's name replaces the names of pods, because each try
    has a pod with a new random name, and the status must not change with each try.
    """
    newest = max(events, key=_observed_ms, default=None)
    if newest is None:
        return ""
    message = str(newest.get("message") or "").removeprefix(_COMBINED)
    name = job["metadata"]["name"]
    drawn = re.escape(f"{name}-"[:_NAME_MAX]) + f"[a-z0-9]{{{_DRAWN}}}(?![a-z0-9])"
    return re.sub(drawn, name, message)


def _observed_ms(event: Resource) -> int:
    """When the Event was last observed, from the field that its recorder sets."""
    series, head = event.get("series") or {}, event.get("metadata") or {}
    observed = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return times.to_ms(observed or head.get("creationTimestamp")) or 0


def _no_pod(job: str) -> _Facts:
    """The facts of a Job without a pod. Kubernetes creates the pods of Jobs, and reports a refusal only in Events."""
    return _Facts(reason="NoPod", message=f"the Job has no pod; see the Events in `kubectl describe job {job}`")


def driver_run(pod: Resource, *, log_tail: str = "") -> Run:
    """The attempt of a driver pod."""
    metadata = pod["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    phase, facts = _phase(pod), _pod_facts(pod)
    deleted_ms = times.to_ms(metadata.get("deletionTimestamp"))
    return Run(
        name=metadata["name"],
        kind="driver",
        phase=phase,
        created_ms=_created_ms(pod),
        started_ms=facts.started_ms,
        finished_ms=(facts.finished_ms or deleted_ms) if phase.finished else None,
        deleting=bool(metadata.get("deletionTimestamp")),
        deleted_ms=deleted_ms,
        held_by=tuple(metadata.get("finalizers") or ()) if metadata.get("deletionGracePeriodSeconds") == 0 else (),
        attempt=_integer(labels.get(names.LABEL_ATTEMPT), _NUMBER_MAX),
        run_number=_integer(labels.get(names.LABEL_RUN), _NUMBER_MAX),
        run_id=annotations.get(names.ANNOTATION_RUN_ID, ""),
        revision=labels.get(names.LABEL_REVISION, ""),
        scheduled_ms=times.to_ms(annotations.get(names.ANNOTATION_SCHEDULED_TIME)),
        stands_by=annotations.get(names.ANNOTATION_STANDBY) == "true",
        exit_code=facts.exit_code,
        reason=facts.reason,
        message=facts.message,
        report=facts.report,
        running=RunningProgress.parse(annotations.get(names.ANNOTATION_PROGRESS)),
        hears_stop=stop_address(pod) is not None,
        log_tail=log_tail,
    )


def is_numbered(pod: Resource) -> bool:
    """Whether a driver pod has numbers of an attempt and a run that an operator may have written. Users with rights on pods can write any
    labels, and the status could not count on from a larger number.
    """
    labels = pod["metadata"].get("labels") or {}
    return all(_integer(labels.get(one), _NUMBER_MAX) for one in (names.LABEL_ATTEMPT, names.LABEL_RUN))


def stop_address(pod: Resource) -> tuple[str, int] | None:
    """Host and port at which a driver that runs can be asked to stop; None for none. The pod must belong to the resource in its label, and
    have a network and an address of its own: not those of its node, and none that means this process or a service of the node.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    uid = (metadata.get("labels") or {}).get(names.LABEL_OWNER_UID)
    is_owned = any(one.get("uid") == uid for one in metadata.get("ownerReferences") or ())
    is_going = _phase(pod) is Phase.RUNNING and not metadata.get("deletionTimestamp")
    ports = [
        one.get("containerPort")
        for container in spec.get("containers") or ()
        if container.get("name") == names.DRIVER_CONTAINER
        for one in container.get("ports") or ()
        if one.get("name") == names.STOP_PORT
    ]
    host = str(status.get("podIP") or "")
    is_own = _is_address_of_a_pod(host) and not spec.get("hostNetwork")
    return (host, ports[0]) if is_own and ports and is_owned and is_going else None


def _is_address_of_a_pod(text: str) -> bool:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return False
    inner = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    one = found if inner is None else inner
    return not (one.is_loopback or one.is_link_local or one.is_multicast or one.is_unspecified)


def executors(pods: Iterable[Resource], attempt: int) -> Executors:
    """The numbers of executor pods of one attempt, and what keeps the oldest of them from running that are pending."""
    mine = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get(names.LABEL_ATTEMPT) == str(attempt)]
    counts = Counter(map(_phase, mine))
    oldest = min((pod for pod in mine if _phase(pod) is Phase.PENDING), key=_created_ms, default=None)
    facts = _Facts() if oldest is None else _pod_facts(oldest)
    return Executors(
        running=counts[Phase.RUNNING],
        pending=counts[Phase.PENDING],
        failed=counts[Phase.FAILED],
        pending_from_ms=0 if oldest is None else _created_ms(oldest),
        why_pending=": ".join(one for one in (facts.reason, facts.message) if one),
    )


def _phase(pod: Resource) -> Phase:
    return _PHASES.get((pod.get("status") or {}).get("phase", ""), Phase.PENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts about a run that its pod shows."""

    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    report: Mapping[str, Any] | None = None
    started_ms: int | None = None
    finished_ms: int | None = None


def _pod_facts(pod: Resource) -> _Facts:
    status = pod.get("status") or {}
    statuses = status.get("containerStatuses") or ()
    # Admission may have added containers beside the operator's own.
    ours = [one for one in statuses if one.get("name") in _CONTAINERS]
    container: Resource = next(iter([*ours, *statuses]), {})
    state = container.get("state") or {}
    terminated, waiting, running = state.get("terminated"), state.get("waiting") or {}, state.get("running") or {}
    # The reason of the pod (Evicted, NodeLost) or of its disruption goes before that of the container.
    reason, message = status.get("reason", ""), status.get("message", "")
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    disrupted, scheduled = conditions.get("DisruptionTarget", {}), conditions.get("PodScheduled", {})
    if not reason and disrupted.get("status") == "True":
        reason, message = disrupted.get("reason", ""), disrupted.get("message", "")
    if terminated:
        report, text = _report(terminated.get("message", ""))
        return _Facts(
            reason=reason or terminated.get("reason", ""),
            message=message or text,
            exit_code=terminated.get("exitCode"),
            report=report,
            started_ms=times.to_ms(terminated.get("startedAt")),
            finished_ms=times.to_ms(terminated.get("finishedAt")),
        )
    if running:
        return _Facts(reason=reason, message=message, started_ms=times.to_ms(running.get("startedAt")))
    if waiting.get("reason") not in {None, *_CREATED_SOON}:
        reason, message = reason or waiting["reason"], message or waiting.get("message", "")
    elif scheduled.get("status") == "False":
        reason, message = reason or scheduled.get("reason", ""), message or scheduled.get("message", "")
    elif not reason and scheduled.get("status") != "True" and _awaits_other_scheduler(pod):
        reason, message = "Unscheduled", f"the scheduler {pod['spec']['schedulerName']} has not placed the pod yet"
    elif not reason:
        reason, message = _before_the_container(pod)
    return _Facts(reason=reason, message=message)


def _before_the_container(pod: Resource) -> tuple[str, str]:
    """Reason and message of a pod with a node whose own container does not exist yet. Containers that admission added may have to end
    before. Only Events say what else a node waits for.
    """
    for one in (pod.get("status") or {}).get("initContainerStatuses") or ():
        state, what = one.get("state") or {}, f"init container {one.get('name')}"
        ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
        if ended.get("exitCode"):
            text = f"{what} ended with exit code {ended['exitCode']}: {ended.get('message', '')}"
            return ended.get("reason") or "Error", text.rstrip(": ")
        if waiting.get("reason") not in {None, *_CREATED_SOON}:
            return waiting["reason"], f"{what}: {waiting.get('message', '')}".rstrip(": ")
        if state.get("running") is not None and not one.get("started"):
            return "", f"{what} has not ended yet; see `kubectl logs {pod['metadata']['name']} -c {one.get('name')}`"
    if _phase(pod) is not Phase.PENDING or not (pod.get("spec") or {}).get("nodeName"):
        return "", ""
    what = "its node has not created its container yet; it may wait for a volume, such as a Secret that is missing"
    return "", f"{what}; see `kubectl describe pod {pod['metadata']['name']}`"


def _awaits_other_scheduler(pod: Resource) -> bool:
    """Whether a pod without a node is for another scheduler than that of Kubernetes. Other schedulers may report only in Events that a pod
    waits.
    """
    spec = pod.get("spec") or {}
    return not spec.get("nodeName") and spec.get("schedulerName", _DEFAULT_SCHEDULER) != _DEFAULT_SCHEDULER


def _report(message: str) -> tuple[Mapping[str, Any] | None, str]:
    """The report in a container's termination message; None and the text when the message is not a report."""
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):
        return None, message
    return (document, "") if isinstance(document, dict) else (None, message)


def _job_kind(text: str) -> MaintenanceKind | Literal["inspection", "reclaim"] | None:
    if text == names.INSPECTION:
        return "inspection"
    if text == names.RECLAIM:
        return "reclaim"
    return next((kind for kind in MAINTENANCE_KINDS if kind == text), None)


def _created_ms(resource: Resource) -> int:
    return times.to_ms(resource["metadata"].get("creationTimestamp")) or 0


def _integer(text: str | None, most: int = _STATUS_MAX) -> int:
    """The number in a label; 0 for a text that is no number up to `most`."""
    number = int(text) if text and text.isdecimal() else 0
    return number if number <= most else 0
