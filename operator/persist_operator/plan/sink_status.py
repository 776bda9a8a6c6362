"""The blocks of a SparkSink's status that only report: executors and conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import conditions, names
from persist_operator.api.conditions import Condition
from persist_operator.api.pod_template import PodRefused
from persist_operator.api.redact import clip, redact
from persist_operator.api.sink import Sink
from persist_operator.plan.observed import Phase, SinkObserved

_GOING = {"Creating", "Pending", "Running"}


def finish(
    status: dict[str, Any], sink: Sink, observed: SinkObserved, *, problem: InvalidUsage | None, now_ms: int
) -> None:
    """Complete `status` in place: executors, conditions, observedGeneration. `problem`: why the spec cannot be
    followed.
    """
    going = status.get("driver", {}).get("phase") in _GOING
    status["executors"] = {
        "running": observed.executors.running if going else 0,
        "pending": observed.executors.pending if going else 0,
        "failed": observed.executors.failed if going else 0,
        "selector": f"{names.LABEL_SINK}={sink.meta.name},{names.LABEL_ROLE}=executor",
    }
    found = [*_ready(status, sink, observed, problem), _shard_resolved(observed), _running(status, observed)]
    if sink.spec.suspend:
        found.append(Condition("Suspended", "True", "Suspended", "spec.suspend is true: no driver is started"))
    status["conditions"] = conditions.render(
        found, sink.status.get("conditions", ()), generation=sink.meta.generation, now_ms=now_ms
    )
    status["observedGeneration"] = sink.meta.generation


def _shard_resolved(observed: SinkObserved) -> Condition:
    shard = observed.shard
    resolved: conditions.Status = (
        "True" if shard.found and shard.reason not in {"ShardNotReady", "ShardStalled"} else "False"
    )
    return Condition("ShardResolved", resolved, shard.reason, shard.message)


def _running(status: Mapping[str, Any], observed: SinkObserved) -> Condition:
    driver = status.get("driver", {})
    if driver.get("phase") == "Running":
        return Condition("Running", "True", "DriverRunning", f"{driver.get('podName')} runs")
    if driver.get("phase") in {"Creating", "Pending"}:
        child = next((one for one in observed.runs if one.name == driver.get("podName")), None)
        why = redact(f": {child.reason} {child.message}".rstrip()) if child is not None and child.reason else ""
        return Condition("Running", "False", "DriverPending", f"{driver.get('podName')} is starting{why}")
    return Condition("Running", "False", "NoDriver", "")


def _ready(
    status: Mapping[str, Any], sink: Sink, observed: SinkObserved, problem: InvalidUsage | None
) -> list[Condition]:
    """Ready=True, or Reconciling or Stalled beside Ready=False: exactly one of the three, so that who waits by kstatus gets an
    answer. Suspended is Ready: nothing is to go, and nothing goes.
    """
    if problem is not None:
        return _stalled(problem.reason if isinstance(problem, PodRefused) else "InvalidSchedule", str(problem))
    run, last = status.get("run", {}), status.get("lastFailure", {})
    scheduled, state = sink.spec.mode == "Scheduled", run.get("state")
    if state == "Failed":
        reason = (
            "FailuresExceeded"
            if sink.spec.restart_policy != "Never" and last.get("class") != "Configuration"
            else f"{last.get('class', 'Run')}Failed"
        )
        hint = "change the spec, or set the annotation " + names.REQUEST_PREFIX + "restart"
        # A Scheduled sink's next tick opens another run by itself. Until then nothing goes on that could be waited for.
        later = f"; the next run is at {status.get('schedule', {}).get('nextTime')}" if scheduled else ""
        return _stalled(reason, f"{last.get('reason', '')}: {_first_line(last)}{later}; {hint}")
    is_done = not scheduled and state == "Succeeded" and run.get("revision") == sink.spec.revision
    if sink.spec.suspend and not is_done:
        return _suspended(observed)
    if not scheduled and state == "Succeeded":
        return [
            Condition(
                "Ready",
                "True",
                "Completed",
                _wrote(run, status.get("progress", {})),
            )
        ]
    if scheduled and state != "Running":
        reason = "Scheduled" if state is None else "Succeeded"
        return [Condition("Ready", "True", reason, f"the next run is at {status.get('schedule', {}).get('nextTime')}")]
    return _under_way(status, observed, scheduled=scheduled, was_ready=conditions.is_true(sink.status, "Ready"))


def _suspended(observed: SinkObserved) -> list[Condition]:
    going = [one.name for one in observed.runs if not one.phase.finished]
    if going:
        reason, text = "Stopping", f"spec.suspend is true; {', '.join(going)} is being stopped"
        return [Condition("Ready", "False", reason, text), Condition("Reconciling", "True", reason, text)]
    return [Condition("Ready", "True", "Suspended", "spec.suspend is true: no driver is started")]


def _under_way(
    status: Mapping[str, Any], observed: SinkObserved, *, scheduled: bool, was_ready: bool
) -> list[Condition]:
    run, last = status.get("run", {}), status.get("lastFailure", {})
    phase = status.get("driver", {}).get("phase")
    held_up = not observed.shard.usable and (phase not in _GOING or (phase == "Creating" and not observed.runs))
    if phase in _GOING and not held_up:
        reason, text = "Running", f"run {run.get('number')}, attempt {status.get('attempt')}"
    elif "nextAttemptTime" in status:
        reason, text = (
            "BackingOff",
            f"the next attempt is at {status['nextAttemptTime']}, after {last.get('reason')}: {_first_line(last)}",
        )
    elif held_up:
        reason, text = observed.shard.reason, observed.shard.message
    else:
        reason, text = "Starting", "waiting for the driver of the former attempt to be gone"
    retried = run.get("firstAttempt", 0) < status.get("attempt", 0)
    if (
        scheduled
        and not retried
        and reason == "Running"
        and (phase == "Running" or (was_ready and _starts_well(observed)))
    ):
        # A Scheduled sink is as wanted while its run goes: runs may take longer than anybody waits.
        return [Condition("Ready", "True", reason, text)]
    return [Condition("Ready", "False", reason, text), Condition("Reconciling", "True", reason, text)]


def _starts_well(observed: SinkObserved) -> bool:
    """Whether nothing keeps a driver that does not run yet."""
    return not any(one.reason for one in observed.runs if one.phase is Phase.PENDING)


def _wrote(run: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    """Nobody knows how much when the attempt that committed was lost before it could report."""
    written = progress.get("updatesWritten")
    return (
        f"run {run.get('number')} is committed"
        if written is None
        else f"run {run.get('number')} wrote {written} updates"
    )


def _stalled(reason: str, message: str) -> list[Condition]:
    return [Condition("Ready", "False", reason, message), Condition("Stalled", "True", reason, message)]


def _first_line(failure: Mapping[str, Any]) -> str:
    # Cut in the middle: the innermost cause stands at its end.
    return clip(str(failure["message"]).splitlines()[0], 1000) if failure.get("message") else "no message"
