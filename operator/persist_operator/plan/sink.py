"""The plan of one SparkSink: which run is due, its attempts, what became of them, what to clear away. Pure.

A *run* is one logical write (of a Once sink's revision into one shard, or of a tick); its *attempts* are drivers that share the
run's id, so that
data is committed once however often a driver is lost. At most one attempt goes at a time, and it is on the status
before it starts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names, sink_pods, times
from persist_operator.api.redact import redact
from persist_operator.api.sink import Sink
from persist_operator.plan import failures, refusals, schedule, sink_status
from persist_operator.plan.actions import Action, Note, Plan, StartDriver, StopRun
from persist_operator.plan.failures import Failure
from persist_operator.plan.observed import Phase, Run, SinkObserved
from persist_operator.settings import OperatorSettings

_OPEN = {"Creating", "Pending", "Running"}
#: How long after its grace period a driver that is being deleted is waited for. One on a node that is cut off never
#: goes by itself; that two may run then costs no data, since the shard takes one of them.
_GONE_AFTER_MS = 60_000
_RESTART_REQUEST = "restart"


@dataclass(slots=True)
class Draft:
    """The plan while it is made. `status` is a private copy."""

    sink: Sink
    observed: SinkObserved
    now_ms: int
    status: dict[str, Any]
    actions: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    wake_ms: list[int] = field(default_factory=list)

    @property
    def run(self) -> dict[str, Any]:
        """status.run, made when absent."""
        block: dict[str, Any] = self.status.setdefault("run", {})
        return block

    @property
    def driver(self) -> dict[str, Any]:
        """status.driver, made when absent."""
        block: dict[str, Any] = self.status.setdefault("driver", {})
        return block

    @property
    def is_open(self) -> bool:
        """Whether an attempt is going, as far as the status knows."""
        return is_under_way(self.status)

    def child(self) -> Run | None:
        """The newest attempt as observed."""
        return next((one for one in self.observed.runs if one.name == self.driver.get("podName")), None)


def is_under_way(status: Mapping[str, Any]) -> bool:
    """Whether the status knows of an attempt that has not ended."""
    return status.get("driver", {}).get("phase") in _OPEN


def plan_sink(sink: Sink, observed: SinkObserved, *, now_ms: int, settings: OperatorSettings) -> Plan:
    """The next steps for `sink`. Deterministic; the same inputs give the same plan."""
    if sink.meta.deleting:
        return Plan(status=sink.status)
    draft = Draft(sink, observed, now_ms, copy.deepcopy(dict(sink.status)))
    draft.status["activeRevision"] = sink.spec.revision
    problem: InvalidUsage | None = None
    _adopt(draft)
    _follow(draft)
    _force_out(draft)
    _handle_requests(draft)
    try:
        sink_pods.check(sink.spec, settings.workload)
        _choose_run(draft)
    except InvalidUsage as error:
        problem = error
    _stop_strays(draft)
    if problem is None:
        _start_attempt(draft)
    _clear_away(draft)
    sink_status.finish(draft.status, sink, observed, problem=problem, now_ms=now_ms)
    requeue_s = min(((at - now_ms) / 1000 for at in draft.wake_ms), default=settings.loop.resync_seconds)
    plan = Plan(
        status={name: value for name, value in draft.status.items() if value not in ({}, None)},
        actions=tuple(draft.actions),
        requeue_after_s=max(0.5, requeue_s),
        notes=tuple(draft.notes),
        is_periodic=not draft.wake_ms,
    )
    return refusals.told(
        plan, observed.failures, wanted=plan.actions, meta=sink.meta, before=sink.status, now_ms=now_ms
    )


def _adopt(draft: Draft) -> None:
    """A child newer than the status: the intent was lost with the status, or never seen. Go on from the child."""
    newest = max(draft.observed.runs, key=lambda one: one.attempt, default=None)
    if newest is None or newest.attempt <= draft.status.get("attempt", 0):
        return
    draft.status["attempt"] = newest.attempt
    draft.status["run"] = {
        "number": newest.run_number,
        "id": newest.run_id,
        "revision": newest.revision,
        **({"shardId": draft.observed.shard.shard_id} if draft.observed.shard.usable else {}),
        "firstAttempt": newest.attempt,
        "state": "Running",
        **({} if newest.scheduled_ms is None else {"scheduledTime": times.to_text(newest.scheduled_ms)}),
    }
    draft.status["driver"] = {
        "podName": newest.name,
        "phase": "Pending",
        "startTime": times.to_text(newest.started_ms or newest.created_ms),
    }


def _follow(draft: Draft) -> None:
    """Bring the open attempt's block up to what was observed, and settle it when it is over."""
    if not draft.is_open:
        return
    child, spec = draft.child(), draft.sink.spec
    if child is None:
        if draft.driver["phase"] == "Creating":
            _watch_creation(draft)
        else:
            name = str(draft.driver.get("podName"))
            # The pod is gone, its Service and ConfigMap are not.
            draft.actions.append(StopRun(kind="driver", name=name, reason="the driver is lost", grace_seconds=0))
            _fail(draft, failures.lost(name), phase="Lost", end_ms=draft.now_ms)
        return
    if child.phase is Phase.SUCCEEDED and (child.report or {}).get("outcome", "Succeeded") == "Succeeded":
        _succeed(draft, child)
    elif child.phase.finished:
        _fail(draft, failures.classify(child), phase="Failed", end_ms=child.finished_ms or draft.now_ms)
    elif child.deleting:
        # Somebody is deleting it: wait for its end (see `_force_out`), which is then its failure.
        draft.driver["phase"] = child.phase.value
    elif spec.suspend or _outdated(draft):
        _stop(draft, child, "suspended" if spec.suspend else _outdated(draft))
    else:
        _watch_limits(draft, child)


def _force_out(draft: Draft) -> None:
    """Remove drivers whose deletion does not come to an end: nothing else starts while they are there."""
    for run in draft.observed.runs:
        if run.phase.finished or not run.deleting or run.deleted_ms is None:
            continue
        limit_ms = run.deleted_ms + _GONE_AFTER_MS
        if draft.now_ms < limit_ms:
            draft.wake_ms.append(limit_ms)
        else:
            reason = "its node does not say that it ended"
            draft.actions.append(
                StopRun(kind="driver", name=run.name, reason=reason, grace_seconds=0, event="DriverForcedOut")
            )


def _start_limit_ms(draft: Draft) -> int:
    """Until when the driver has to run. It counts from the intent: what is refused takes up the time as what is not scheduled."""
    intended_ms = times.to_ms(draft.driver.get("startTime"))
    if intended_ms is None or intended_ms > draft.now_ms:
        # Written by a clock that has gone back since.
        intended_ms = draft.now_ms
        draft.driver["startTime"] = times.to_text(intended_ms)
    return intended_ms + 1000 * draft.sink.spec.driver_start_seconds


def _watch_creation(draft: Draft) -> None:
    """End an attempt that is refused for too long. One that was never asked for (no operator ran, or there is no room) begins
    anew: its time-out tells of refusals only.
    """
    limit_ms, refusal = _start_limit_ms(draft), draft.observed.failures.get("StartDriver")
    if draft.now_ms < limit_ms:
        draft.wake_ms.append(limit_ms)
    elif refusal is None:
        draft.driver["startTime"] = times.to_text(draft.now_ms)
    else:
        # What was made of it goes as a leftover: what it was refused for may be another's of the same name.
        name, seconds = str(draft.driver["podName"]), draft.sink.spec.driver_start_seconds
        _fail(draft, failures.not_created(name, seconds, refusal), phase="Failed", end_ms=draft.now_ms)


def _watch_limits(draft: Draft, child: Run) -> None:
    spec = draft.sink.spec
    draft.driver["phase"] = child.phase.value
    if child.phase is Phase.PENDING:
        limit_ms, failure = _start_limit_ms(draft), failures.not_started(child, spec.driver_start_seconds)
    elif spec.active_deadline_seconds is not None:
        limit_ms = (child.started_ms or child.created_ms) + 1000 * spec.active_deadline_seconds
        failure = failures.too_long(child, spec.active_deadline_seconds)
    else:
        return
    if draft.now_ms < limit_ms:
        draft.wake_ms.append(limit_ms)
        return
    draft.actions.append(
        StopRun(kind="driver", name=child.name, reason=failure.reason, grace_seconds=spec.termination_grace_seconds)
    )
    _fail(draft, failure, phase="Failed", end_ms=draft.now_ms)


def _stop(draft: Draft, child: Run, why: str) -> None:
    grace = draft.sink.spec.termination_grace_seconds
    draft.actions.append(
        StopRun(kind="driver", name=child.name, reason=why, grace_seconds=grace, event="DriverStopped")
    )
    draft.driver.update(phase="Deleted", endTime=times.to_text(draft.now_ms))
    _remember(draft, "Stopped", None, f"stopped: {why}")


def _succeed(draft: Draft, child: Run) -> None:
    report, end = child.report or {}, times.to_text(child.finished_ms or draft.now_ms)
    draft.driver.update(phase="Succeeded", endTime=end)
    draft.run["state"] = "Succeeded"
    draft.status["consecutiveFailures"] = 0
    draft.status.pop("nextAttemptTime", None)
    upper = report.get("upper")
    progress = {"rowsRead": report.get("rows_read"), "updatesWritten": report.get("updates_written")}
    # An attempt that was lost had committed: its numbers are lost with it, those of the run before are not this one's.
    done = bool(report.get("already_done"))
    draft.status["progress"] = {
        **({"upper": str(upper)} if upper is not None else {}),
        **{name: value for name, value in progress.items() if isinstance(value, int) and not done},
        "lastCommitTime": end,
    }
    if draft.sink.spec.mode == "Scheduled":
        draft.status.setdefault("schedule", {})["lastSuccessTime"] = end
    message = "the data was already there" if done else redact(str(report.get("message") or ""))
    _remember(draft, "Succeeded", None, message)
    numbers = f"{report.get('rows_read', 0)} rows read, {report.get('updates_written', 0)} updates written"
    draft.notes.append(Note("Normal", "RunSucceeded", f"{child.name}: {message if done else numbers}"))


def _fail(draft: Draft, failure: Failure, *, phase: str, end_ms: int) -> None:
    """Enter a failure and decide whether and when there is another attempt."""
    spec, status, end = draft.sink.spec, draft.status, times.to_text(end_ms)
    draft.driver.update(phase=phase, endTime=end)
    if failure.counts:
        status["consecutiveFailures"] = status.get("consecutiveFailures", 0) + 1
    status["lastFailure"] = {
        "class": failure.failure_class,
        "reason": failure.reason,
        **({} if failure.exit_code is None else {"exitCode": failure.exit_code}),
        "podName": str(draft.driver.get("podName")),
        "time": end,
        "message": failure.message,
    }
    _remember(draft, "Failed", failure.failure_class, failure.message)
    draft.notes.append(
        Note(
            "Warning",
            f"Driver{failure.failure_class}Failure",
            f"{draft.driver.get('podName')}: {failure.message[:500]}",
        )
    )
    exhausted = failure.counts and status["consecutiveFailures"] >= spec.max_consecutive_failures
    if spec.restart_policy == "Never" or failure.is_final or exhausted:
        draft.run["state"] = "Failed"
        status.pop("nextAttemptTime", None)
        return
    exponent = min(20, max(0, status.get("attempt", 1) - draft.run.get("firstAttempt", 1)))
    delay_s = min(spec.max_backoff_seconds, spec.backoff_seconds * 2**exponent)
    status["nextAttemptTime"] = times.to_text(draft.now_ms + 1000 * delay_s)


def _remember(draft: Draft, outcome: str, failure_class: str | None, message: str) -> None:
    item = {
        "attempt": draft.status.get("attempt", 0),
        "run": str(draft.run.get("id", ""))[:128],
        "revision": str(draft.run.get("revision", "")),
        "startTime": draft.driver.get("startTime") or times.to_text(draft.now_ms),
        "endTime": draft.driver["endTime"],
        "outcome": outcome,
        **({} if failure_class is None else {"class": failure_class}),
        "message": message[:512],
    }
    draft.status["history"] = [item, *draft.status.get("history", ())][: draft.sink.spec.history_limit]


def _handle_requests(draft: Draft) -> None:
    """`request-restart`: a failed run is opened again, with its id; a Once sink that completed gets another run."""
    token = draft.sink.meta.annotations.get(f"{names.REQUEST_PREFIX}{_RESTART_REQUEST}", "")[:64]
    handled = draft.status.setdefault("lastHandledRequests", {})
    if not token or handled.get(_RESTART_REQUEST) == token or draft.is_open:
        return
    handled[_RESTART_REQUEST] = token
    draft.status["consecutiveFailures"] = 0
    draft.status.pop("nextAttemptTime", None)
    if draft.run.get("state") == "Failed":
        draft.run["state"] = "Running"
    elif draft.run.get("state") == "Succeeded" and draft.sink.spec.mode == "Once":
        _open_run(draft, None)


def _choose_run(draft: Draft) -> None:
    """Open a run when one is due. InvalidUsage when the schedule cannot be read."""
    spec, run = draft.sink.spec, draft.run
    if spec.mode == "Once":
        if not draft.is_open and _outdated(draft) and not spec.suspend:
            _open_run(draft, None)
        return
    if spec.schedule is None:
        raise InvalidUsage("schedule is missing although mode is Scheduled")
    ticks = draft.status.setdefault("schedule", {})
    following_ms = schedule.next_tick_ms(spec.schedule, draft.now_ms)
    ticks["nextTime"] = times.to_text(following_ms)
    draft.wake_ms.append(following_ms)
    if run.get("state") == "Running" and run.get("revision") != spec.revision and not draft.is_open:
        run["revision"] = spec.revision
    if run.get("state") == "Running" or spec.suspend:
        return
    after_ms = times.to_ms(ticks.get("lastTime")) or draft.sink.meta.created_ms
    if after_ms > following_ms:
        # The clock was ahead by more than a tick when that one ran. It does not stop the schedule until it is due again.
        after_ms = draft.now_ms
        ticks["lastTime"] = times.to_text(after_ms)
    tick_ms = schedule.last_tick_ms(spec.schedule, after_ms=after_ms, until_ms=draft.now_ms)
    if tick_ms is None:
        return
    ticks["lastTime"] = times.to_text(tick_ms)
    deadline_s = spec.schedule.starting_deadline_seconds
    if deadline_s is not None and draft.now_ms - tick_ms > 1000 * deadline_s:
        draft.notes.append(
            Note(
                "Warning",
                "ScheduleMissed",
                f"the tick of {times.to_text(tick_ms)} is older than {deadline_s} s and is skipped",
            )
        )
        return
    _open_run(draft, tick_ms)


def _outdated(draft: Draft) -> str:
    """Why the run is no more what the sink asks for, "" when it is: another shard is as good as another spec."""
    run, shard = draft.run, draft.observed.shard
    if run.get("revision") != draft.sink.spec.revision:
        return "the spec changed"
    moved = shard.usable and run.get("shardId") not in {None, shard.shard_id}
    return "the shard is another one" if moved else ""


def _open_run(draft: Draft, scheduled_ms: int | None) -> None:
    """The next run, of a tick or not. Ids of a sink end in a number that only rises, whatever the clock does: a driver that
    comes back after a newer run knows by it that it is over (persist_engine.flow.mint_run).
    """
    number = draft.run.get("number", 0) + 1
    least = names.run_order(str(draft.run.get("id", ""))) + 1
    draft.status["run"] = {
        "number": number,
        "id": names.run_id(draft.sink.meta.uid, max(scheduled_ms or number, least)),
        "revision": draft.sink.spec.revision,
        "firstAttempt": draft.status.get("attempt", 0) + 1,
        "state": "Running",
        **({} if scheduled_ms is None else {"scheduledTime": times.to_text(scheduled_ms)}),
    }
    draft.status["consecutiveFailures"] = 0
    draft.status.pop("nextAttemptTime", None)


def _stop_strays(draft: Draft) -> None:
    """Stop every driver that goes and is not the attempt under way: one that came back, or one whose stop was decided but
    never done, since the operator was ended in between. It would hold up the next attempt for as long as it likes.
    """
    stopped = {action.name for action in draft.actions if isinstance(action, StopRun)}
    for run in draft.observed.runs:
        current = draft.is_open and run.name == draft.driver.get("podName")
        if current or run.phase.finished or run.deleting or run.name in stopped:
            continue
        grace = draft.sink.spec.termination_grace_seconds
        reason = "it is not the attempt under way"
        draft.actions.append(StopRun(kind="driver", name=run.name, reason=reason, grace_seconds=grace))


def _start_attempt(draft: Draft) -> None:
    """Start the next attempt of an open run: recorded first, one at a time, after its backoff, on a shard that can
    be written.
    """
    spec, shard, status = draft.sink.spec, draft.observed.shard, draft.status
    creating = draft.driver.get("phase") == "Creating" and draft.child() is None
    if draft.run.get("state") != "Running" or (draft.is_open and not creating):
        return
    if spec.suspend:
        if creating:
            _forgo(draft, "suspended")
            draft.driver.update(phase="Deleted", endTime=times.to_text(draft.now_ms))
        return
    next_ms = times.to_ms(status.get("nextAttemptTime")) or 0
    # Further ahead than any backoff could be it was written by a clock that has gone back since.
    if draft.now_ms < next_ms <= draft.now_ms + 2000 * spec.max_backoff_seconds:
        draft.wake_ms.append(next_ms)
        return
    leaving = [one for one in draft.observed.runs if not one.phase.finished]
    if leaving or not shard.usable or shard.schema is None or shard.location is None:
        draft.wake_ms.append(draft.now_ms + 5000)
        return
    if not creating or _outdated(draft):
        if creating:
            _forgo(draft, _outdated(draft))
        status["attempt"] = status.get("attempt", 0) + 1
        draft.run.update(revision=spec.revision, shardId=shard.shard_id)
        name = names.driver_name(draft.sink.meta.name, spec.revision, status["attempt"])
        status["driver"] = {"podName": name, "phase": "Creating", "startTime": times.to_text(draft.now_ms)}
        status.pop("nextAttemptTime", None)
    attempt = int(status["attempt"])
    draft.actions.append(
        StartDriver(
            name=str(draft.driver["podName"]),
            attempt=attempt,
            run_number=int(draft.run["number"]),
            run_id=str(draft.run["id"]),
            scheduled_ms=times.to_ms(draft.run.get("scheduledTime")),
            executor_prefix=names.executor_prefix(draft.sink.meta.name, draft.sink.meta.uid, attempt),
            shard_id=shard.shard_id,
            schema=shard.schema,
            location=shard.location,
            spec=spec,
        )
    )


def _forgo(draft: Draft, why: str) -> None:
    """The intended attempt is not to be: some of it may be there."""
    name = str(draft.driver["podName"])
    draft.actions.append(StopRun(kind="driver", name=name, reason=why, grace_seconds=0))


def _clear_away(draft: Draft) -> None:
    """Remove finished drivers, at once or after their time, as spec.cleanup says, and what is left of drivers that others
    removed.
    """
    spec = draft.sink.spec
    for name in draft.observed.leftovers:
        if not draft.is_open or name != draft.driver.get("podName"):
            draft.actions.append(StopRun(kind="driver", name=name, reason="its driver is gone", grace_seconds=0))
    for run in draft.observed.runs:
        current = run.name == draft.driver.get("podName")
        if not run.phase.finished or run.deleting or (current and draft.is_open):
            continue
        failed = run.phase is Phase.FAILED
        retained = spec.retain_driver == "Always" or (spec.retain_driver == "OnFailure" and failed)
        expires_ms = (run.finished_ms or run.created_ms) + 1000 * spec.ttl_seconds_after_finished
        if retained and draft.now_ms < expires_ms:
            draft.wake_ms.append(expires_ms)
            continue
        draft.actions.append(StopRun(kind="driver", name=run.name, reason="finished", grace_seconds=0))
