"""The parts of a SparkSink's status that only report: executors and conditions."""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import conditions, names, times
from persist_operator.api.conditions import Condition
from persist_operator.api.pod_template import PodRefused
from persist_operator.api.redact import clip, redact
from persist_operator.api.sink import Sink, SinkSpec
from persist_operator.api.sink_status import (
    ExecutorCounts,
    LastFailure,
    Progress,
    RunningProgress,
    RunState,
    SinkStatus,
)
from persist_operator.plan import failures, freshness
from persist_operator.plan.actions import Note
from persist_operator.plan.hints import Request, Restart, Words
from persist_operator.plan.observed import QUEUED, Executors, Phase, Run, SinkObserved

#: The least intervals at which the numbers and the stage of a running driver change the status. Each change is a request to the API server.
_NUMBERS_MS, _STAGE_MS = 30_000, 2_000


def running(status: SinkStatus, child: Run | None, *, now_ms: int) -> tuple[RunningProgress, tuple[int, ...]]:
    """The progress of the running driver (`child`, None without one). A new stage is shown after _STAGE_MS, and new numbers after
    _NUMBERS_MS. The second value is the time at which a newer report must be shown, if there is one. An ended driver has no progress.
    """
    newest = None if child is None or child.phase is not Phase.RUNNING else child.running
    if newest is None or not status.is_under_way:
        return RunningProgress(), ()
    known = status.progress.running
    if replace(known, observed_time=None) == newest:
        return known, ()
    # A time after now comes from before a clock was set back. It must not delay the numbers.
    since_ms = now_ms - (times.to_ms(known.observed_time) or 0)
    wait_ms = (_NUMBERS_MS if known.stage == newest.stage else _STAGE_MS) - since_ms
    if since_ms >= 0 and wait_ms > 0:
        return known, (now_ms + wait_ms,)
    return replace(newest, observed_time=times.to_text(now_ms)), ()


def errors_note(driver: str, errors: int) -> Note:
    """The Event for errors that a driver collected. Its run commits them."""
    rows = "1 row that could not be written is an error"
    if errors > 1:
        rows = f"{errors} rows that could not be written are errors"
    return Note("Warning", "ErrorsCollected", f"{driver}: {rows} in the shard; see its column err")


def finished(
    status: SinkStatus, sink: Sink, observed: SinkObserved, *, problem: InvalidUsage | None, now_ms: int, words: Words
) -> SinkStatus:
    """`status` with executors, conditions and observedGeneration. `problem` is the error in the spec, if there is one."""
    counts = observed.executors if status.is_under_way else Executors()
    executors = ExecutorCounts(
        running=counts.running,
        pending=counts.pending,
        failed=counts.failed,
        selector=f"{names.LABEL_SINK}={sink.meta.name},{names.LABEL_ROLE}=executor",
    )
    found = [*_ready(status, sink, observed, problem, words, now_ms=now_ms), *_resolved(observed)]
    found.append(_running(status, observed, sink.spec, now_ms))
    if sink.spec.write_mode == "ReadOnly":
        found.append(_converged(status, sink))
    if sink.spec.fresh_seconds is not None:
        found.append(freshness.condition(status, sink, now_ms=now_ms))
    if sink.spec.rollout is not None:
        found.append(_rolled_out(status, sink))
    if sink.spec.suspend:
        found.append(Condition("Suspended", "True", "Suspended", "spec.suspend is true: no driver is started"))
    rendered = conditions.render(found, status.conditions or (), generation=sink.meta.generation, now_ms=now_ms)
    return replace(status, executors=executors, conditions=tuple(rendered), observed_generation=sink.meta.generation)


def _resolved(observed: SinkObserved) -> list[Condition]:
    """Whether the shard that the sink writes is usable, and the shard that it reads, if there is one."""
    shard, source = observed.shard, observed.input
    resolved: conditions.Status = (
        "True" if shard.found and shard.reason not in {"ShardNotReady", "ShardStalled"} else "False"
    )
    found = [Condition("ShardResolved", resolved, shard.reason, shard.message)]
    if source is not None:
        found.append(Condition("InputResolved", "True" if source.usable else "False", source.reason, source.message))
    return found


def _converged(status: SinkStatus, sink: Sink) -> Condition:
    """Whether the last comparison found the contents that a run would give the shard. Unknown when a later comparison failed, and when the
    spec has changed, because the old result then does not apply.
    """
    progress, run, last = status.progress, status.run, status.last_failure
    if progress.running.compared is not None:
        return _converged_so_far(progress.running)
    missing, extra = progress.missing, progress.extra
    found = f"the last comparison, at upper {progress.upper}, found rows missing: {missing}, too many: {extra}"
    compared_ms, failed_ms = times.to_ms(progress.last_commit_time), times.to_ms(last.time)
    if compared_ms is None or missing is None or extra is None:
        found = "no comparison has succeeded"
    if failed_ms is not None and failed_ms > (compared_ms or 0):
        return Condition("Converged", "Unknown", "ComparisonFailed", f"{last.reason} at {last.time}; {found}")
    if compared_ms is not None and run.state == "Succeeded" and run.revision != sink.spec.revision:
        return Condition("Converged", "Unknown", "SpecChanged", f"the spec has changed since; {found}")
    if missing is None or extra is None:
        return Condition("Converged", "Unknown", "NotCompared", "no run has compared the shard with the input")
    if missing or extra:
        text = f"rows missing in the shard: {missing}, rows too many: {extra}"
        return Condition("Converged", "False", "Differs", f"at upper {progress.upper}: {text}")
    return Condition("Converged", "True", "Equal", f"at upper {progress.upper}")


def _converged_so_far(running: RunningProgress) -> Condition:
    """Whether the batches that a stream's driver has compared would have written nothing."""
    so_far = f"rows compared since the driver began: {running.compared}"
    if running.missing or running.extra:
        text = f"{so_far}, missing in the shard: {running.missing}, too many: {running.extra}"
        return Condition("Converged", "False", "Differs", text)
    if not running.compared:
        return Condition("Converged", "Unknown", "NotCompared", so_far)
    return Condition("Converged", "True", "Equal", so_far)


def _rolled_out(status: SinkStatus, sink: Sink) -> Condition:
    """Whether the driver of the sink runs the sink's revision."""
    rollout, revision = status.rollout, sink.spec.revision
    if rollout.state is None:
        is_current = status.run.revision == revision
        return Condition("RolledOut", "True" if is_current else "False", "Current" if is_current else "Starting", "")
    text = f"revision {rollout.to_revision}: {rollout.message}"
    return Condition("RolledOut", "False", str(rollout.state), text)


def _running(status: SinkStatus, observed: SinkObserved, spec: SinkSpec, now_ms: int) -> Condition:
    driver = status.driver
    child = next((one for one in observed.runs if one.name == driver.pod_name), None)
    if driver.phase == "Running" and _held(observed):
        return Condition("Running", "Unknown", "DriverEnding", _held(observed))
    if driver.phase == "Running" and child is not None and child.deleting:
        what = "is being deleted; if its node does not report its end a minute after the grace period, it is deleted by force"
        return Condition("Running", "Unknown", "DriverEnding", f"{driver.pod_name} {what}")
    if driver.phase == "Running":
        return Condition("Running", "True", "DriverRunning", f"{driver.pod_name} runs{_short_of(observed, now_ms)}")
    if driver.phase in {"Creating", "Pending"}:
        why = f": {_why_pending(child)}" if child is not None and child.reason else ""
        if child is not None and not child.reason and child.is_stuck(now_ms, times.to_ms(driver.start_time)):
            why = f": {redact(failures.why_pending(child, observed.mounted(spec)))}"
        elif child is not None and child.phase is Phase.PENDING and failures.waits_for(child, spec.mounted):
            why = f"{why}; {failures.waits_for(child, spec.mounted)}"
        return Condition("Running", "False", "DriverPending", f"{driver.pod_name} is starting{why}")
    return Condition("Running", "False", "NoDriver", "")


def _short_of(observed: SinkObserved, now_ms: int) -> str:
    """Why executors of a driver that runs do not start, when they have waited for a minute; empty otherwise."""
    stuck_ms = observed.executors.stuck_ms
    if stuck_ms is None or now_ms < stuck_ms:
        return ""
    return f"; executors do not start: {clip(redact(observed.executors.why_pending), 1000)}"


def _ready(
    status: SinkStatus,
    sink: Sink,
    observed: SinkObserved,
    problem: InvalidUsage | None,
    words: Words,
    *,
    now_ms: int,
) -> list[Condition]:
    """Ready=True, or Ready=False with either Reconciling or Stalled. Exactly one of the three is True, so that a wait by kstatus ends. A
    suspended sink is Ready, because no driver should run and none does.
    """
    if problem is not None:
        return conditions.stalled(
            problem.reason if isinstance(problem, PodRefused) else "InvalidSchedule", str(problem)
        )
    run, last = status.run, status.last_failure
    scheduled, state = sink.spec.mode == "Scheduled", run.state
    if state == "Failed":
        reason = (
            "FailuresExceeded"
            if sink.spec.restart_policy != "Never" and last.failure_class != "Configuration"
            else f"{last.failure_class or 'Run'}Failed"
        )
        hint = f"change the spec, or {words(Restart())}"
        # The next tick opens another run. Until then no run is under way, so the sink is not Reconciling.
        later = f"; the next run is at {status.schedule.next_time}" if scheduled else ""
        return conditions.stalled(reason, f"{last.reason or ''}: {_first_line(last)}{later}; {hint}")
    if status.rollout.state == "RolledBack" and not status.is_under_way:
        again = f"restore the spec of revision {run.revision}, change it, or {words(Request('promote'))}"
        text = f"revision {status.rollout.to_revision} was rolled back, and the driver of {run.revision} has ended"
        return conditions.stalled("RolledBack", f"{text}; {again}")
    is_done = not scheduled and state == "Succeeded" and run.revision == sink.spec.revision
    if sink.spec.suspend and not is_done:
        return _suspended(observed)
    if not scheduled and state == "Succeeded":
        reason = "Differs" if _differs(status, sink) else "Completed"
        return [Condition("Ready", "True", reason, _wrote(run, status.progress))]
    if scheduled and state != "Running":
        reason = "Scheduled" if state is None else "Differs" if _differs(status, sink) else "Succeeded"
        return [Condition("Ready", "True", reason, f"the next run is at {status.schedule.next_time}")]
    was_ready = conditions.is_true(sink.status, "Ready")
    return _under_way(status, observed, sink.spec, was_ready=was_ready, now_ms=now_ms)


def _suspended(observed: SinkObserved) -> list[Condition]:
    going = [one.name for one in observed.runs if not one.phase.finished]
    if going:
        reason, text = "Stopping", f"spec.suspend is true; {_held(observed) or ', '.join(going) + ' is being stopped'}"
        return conditions.reconciling(reason, text)
    return [Condition("Ready", "True", "Suspended", "spec.suspend is true: no driver is started")]


def _under_way(
    status: SinkStatus, observed: SinkObserved, spec: SinkSpec, *, was_ready: bool, now_ms: int
) -> list[Condition]:
    run, last, phase = status.run, status.last_failure, status.driver.phase
    is_going = status.is_under_way
    obstacle = observed.obstacle
    held_up = obstacle is not None and (not is_going or (phase == "Creating" and not observed.runs))
    driver = next((one for one in observed.runs if one.name == status.driver.pod_name), None)
    if is_going and driver is not None and driver.is_queued:
        reason, text = QUEUED, f"run {run.number}: {driver.name} waits in the queue of its scheduler"
    elif _held(observed):
        reason, text = "DriverEnding", _held(observed)
    elif is_going and driver is not None and driver.phase is Phase.PENDING and driver.reason:
        reason, text = "DriverPending", f"run {run.number}, attempt {status.attempt}: {_why_pending(driver)}"
    elif is_going and driver is not None and driver.is_stuck(now_ms, times.to_ms(status.driver.start_time)):
        why = redact(failures.why_pending(driver, observed.mounted(spec)))
        reason, text = "DriverPending", f"run {run.number}, attempt {status.attempt}: {why}"
    elif is_going and not held_up:
        reason, text = "Running", f"run {run.number}, attempt {status.attempt}"
    elif status.next_attempt_time is not None:
        reason, text = (
            "BackingOff",
            f"the next attempt is at {status.next_attempt_time}, after {last.reason}: {_first_line(last)}",
        )
    elif obstacle is not None and held_up:
        reason, text = obstacle.reason, obstacle.message
    else:
        reason, text = "Starting", "waiting for the driver of the former attempt to be gone"
    retried = (run.first_attempt or 0) < (status.attempt or 0)
    if (
        spec.mode != "Once"
        and not retried
        and reason == "Running"
        and (phase == "Running" or (was_ready and _starts_well(observed)))
    ):
        # A lasting sink matches its spec while its run is under way. A run may take longer than the time-out of a waiting client.
        return [Condition("Ready", "True", reason, text)]
    return conditions.reconciling(reason, text)


def _held(observed: SinkObserved) -> str:
    """Why a driver that was deleted by force is still there, and what to do; empty when there is none."""
    held = [f"{one.name} (finalizers {', '.join(one.held_by)})" for one in observed.runs if one.is_held]
    if not held:
        return ""
    what = "is deleted, and finalizers of other controllers keep its pod: end what they wait for, or remove them"
    return f"{clip(redact('; '.join(held)), 512)} {what}"


def _why_pending(child: Run) -> str:
    """What Kubernetes reports about a driver that does not start."""
    return redact(f"{child.reason} {child.message}".rstrip())


def _starts_well(observed: SinkObserved) -> bool:
    """Whether no pending driver reports a problem with its start."""
    return not any(one.reason for one in observed.runs if one.phase is Phase.PENDING)


def _differs(status: SinkStatus, sink: Sink) -> bool:
    """Whether the last run of a ReadOnly sink found a difference. The table of `get` must not show this as success."""
    progress = status.progress
    return sink.spec.write_mode == "ReadOnly" and bool(progress.missing or progress.extra)


def _wrote(run: RunState, progress: Progress) -> str:
    """The message of a run that succeeded. The number of updates is unknown when the attempt was lost after its commit."""
    written, missing, extra = progress.updates_written, progress.missing, progress.extra
    if missing is not None:
        found = (
            f"rows missing in the shard: {missing}, rows too many: {extra}" if missing or extra else "they are equal"
        )
        return f"run {run.number} compared the shard with its input: {found}"
    return f"run {run.number} is committed" if written is None else f"run {run.number} wrote {written} updates"


def _first_line(failure: LastFailure) -> str:
    # `clip` cuts in the middle, so it keeps the innermost cause at the end of the line.
    return clip(failure.message.splitlines()[0], 1000) if failure.message else "no message"
