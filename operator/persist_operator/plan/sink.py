"""The plan of one SparkSink: which run is due, its attempts, their outcomes, and which objects to remove. Pure.

A *run* is one logical write: a Once or Streaming sink has one for each revision and shard, a Scheduled sink one for each tick. The
*attempts* of a run are drivers that share the run's id, so that the data is committed once even when drivers are lost. At most one attempt
is under way, and the status shows it before it starts. The run of a Streaming sink never ends: a driver that ends is started again.
"""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names, sink_pods, times
from persist_operator.api.redact import redact
from persist_operator.api.sink import Sink
from persist_operator.api.sink_status import (
    AttemptOutcome,
    DriverPhase,
    DriverState,
    Progress,
    RunState,
)
from persist_operator.plan import failures, freshness, refusals, rollout, schedule, sink_status
from persist_operator.plan.actions import Note, Plan, StopRun
from persist_operator.plan.failures import Failure
from persist_operator.plan.hints import Words, cluster_words
from persist_operator.plan.observed import Phase, Run, SinkObserved
from persist_operator.plan.sink_draft import Draft, attempt_that_ended, last_failure
from persist_operator.settings import OperatorSettings

#: How long the plan waits, after the grace period, for a driver that is being deleted. On a disconnected node the deletion never ends. Then
#: two drivers may run, but no data is lost or doubled, because the shard accepts the commit of only one.
_GONE_AFTER_MS = 60_000
_RESTART_REQUEST = "restart"


def plan_sink(
    sink: Sink, observed: SinkObserved, *, now_ms: int, settings: OperatorSettings, words: Words = cluster_words
) -> Plan:
    """The next steps for `sink`. Deterministic: the same inputs give the same plan. `words` renders the hints in its messages."""
    if sink.meta.deleting:
        return Plan(status=sink.status)
    draft = Draft(sink, observed, now_ms, replace(sink.known, active_revision=sink.spec.revision))
    problem: InvalidUsage | None = None
    draft = _follow(rollout.taken_over(rollout.adopted(_adopt(freshness.of_this_shard(draft)))))
    draft = _handle_requests(_force_out(rollout.follow(draft)))
    try:
        sink_pods.check(sink.spec, settings.workload)
        draft = _choose_run(draft)
    except InvalidUsage as error:
        problem = error
    draft = _stop_strays(draft)
    if problem is None:
        draft = rollout.start_attempt(_start_attempt(draft))
    draft = _clear_away(draft)
    running, shown_ms = sink_status.running(draft.status, draft.child(), now_ms=now_ms)
    if running.errors and not draft.status.progress.running.errors:
        draft = draft.noting(sink_status.errors_note(str(draft.status.driver.pod_name), running.errors))
    draft = draft.having(progress=replace(draft.status.progress, running=running)).waking(*shown_ms)
    stuck_ms = observed.executors.stuck_ms
    draft = draft if stuck_ms is None or stuck_ms <= now_ms else draft.waking(stuck_ms)
    draft = freshness.followed(draft)
    status = sink_status.finished(draft.status, sink, observed, problem=problem, now_ms=now_ms, words=words)
    requeue_s = min(((at - now_ms) / 1000 for at in draft.wake_ms), default=settings.loop.resync_seconds)
    plan = Plan(
        status=status.wire(),
        actions=draft.actions,
        requeue_after_s=max(0.5, requeue_s),
        notes=draft.notes,
        is_periodic=not draft.wake_ms,
    )
    return refusals.with_refusals(
        plan, observed.failures, wanted=plan.actions, meta=sink.meta, before=sink.status, now_ms=now_ms
    )


def _adopt(draft: Draft) -> Draft:
    """Take over a driver that is newer than the status. Its intent was lost with the status, and the plan continues from the driver. A
    driver on standby is the driver of the sink when there is no other driver.
    """
    writing = [one for one in draft.observed.runs if not one.is_on_standby]
    is_alone = not writing and not draft.status.is_under_way
    newest = max(draft.observed.runs if is_alone else writing, key=lambda one: one.attempt, default=None)
    if newest is None or newest.attempt <= draft.last_attempt:
        return draft
    run = RunState(
        number=newest.run_number,
        id=newest.run_id,
        revision=newest.revision,
        shard_id=draft.observed.shard.shard_id if draft.observed.shard.usable else None,
        input_shard_id=draft.observed.input_id,
        first_attempt=newest.attempt,
        state="Running",
        scheduled_time=None if newest.scheduled_ms is None else times.to_text(newest.scheduled_ms),
    )
    start_time = times.to_text(newest.started_ms or newest.created_ms)
    driver = DriverState(pod_name=newest.name, phase="Pending", start_time=start_time)
    return draft.having(attempt=newest.attempt, run=run, driver=driver)


def _follow(draft: Draft) -> Draft:
    """Update the status of the attempt under way from the observation, and record its end when it has ended."""
    if not draft.status.is_under_way:
        return _ended_by_itself(draft)
    child, spec, driver = draft.child(), draft.sink.spec, draft.status.driver
    if child is None:
        if driver.phase == "Creating":
            return _watch_creation(draft)
        # The pod is gone, but its Service and ConfigMap still exist.
        draft = draft.stopping(driver.pod_name, "the driver is lost")
        return _fail(draft, failures.lost(str(driver.pod_name)), phase="Lost", end_ms=draft.now_ms)
    outcome = (child.report or {}).get("outcome") if child.phase is Phase.SUCCEEDED else None
    if outcome == "Succeeded":
        return _succeed(draft, child)
    if outcome == "Stopped":
        return _interrupted(_well_run(draft, child), child)
    draft = _well_run(draft, child)
    if child.phase.finished:
        return _fail(draft, failures.classify(child), phase="Failed", end_ms=child.finished_ms or draft.now_ms)
    if child.deleting:
        # The pod is being deleted from outside. Its end (see `_force_out`) will be the attempt's failure.
        return draft.having_driver(phase=child.phase.value)
    if (spec.suspend or draft.outdated) and not rollout.keeps(draft):
        return _stop(draft, child, "suspended" if spec.suspend else draft.outdated)
    return _watch_limits(draft, child)


def _force_out(draft: Draft) -> Draft:
    """Delete by force each driver whose deletion does not end. While such a driver exists, no attempt can start. One that finalizers of
    others hold was deleted by force already.
    """
    for run in draft.observed.runs:
        if run.phase.finished or not run.deleting or run.deleted_ms is None or run.is_held:
            continue
        limit_ms = run.deleted_ms + _GONE_AFTER_MS
        if draft.now_ms < limit_ms:
            draft = draft.waking(limit_ms)
        else:
            draft = draft.stopping(run.name, "its node does not report that it ended", event="DriverForcedOut")
    return draft


def _with_start_limit(draft: Draft) -> tuple[Draft, int]:
    """The draft with the time of the intent, and the time by which the driver must run. The time counts from the intent, so that it
    includes refusals as well as the wait for a node.
    """
    intended_ms = times.to_ms(draft.status.driver.start_time)
    if intended_ms is None or intended_ms > draft.now_ms:
        # The clock was set back after this time was written.
        intended_ms = draft.now_ms
        draft = draft.having_driver(start_time=draft.now)
    return draft, intended_ms + 1000 * draft.sink.spec.driver_start_seconds


def _watch_creation(draft: Draft) -> Draft:
    """End an attempt whose creation is refused for too long. When the creation was never tried (no operator ran, or there was no free
    place), the time starts again, because this time-out is for refusals only.
    """
    draft, limit_ms = _with_start_limit(draft)
    refusal = draft.observed.failures.get("StartDriver")
    if refusal is not None and refusal.place:
        return _queued(draft)
    if draft.now_ms < limit_ms:
        return draft.waking(limit_ms)
    if refusal is None:
        return draft.having_driver(start_time=draft.now)
    # Objects of the attempt are removed as leftovers, not here: the refusal may come from an object of the same name with another owner.
    name, seconds = str(draft.status.driver.pod_name), draft.sink.spec.driver_start_seconds
    return _fail(draft, failures.not_created(name, seconds, refusal), phase="Failed", end_ms=draft.now_ms)


def _watch_limits(draft: Draft, child: Run) -> Draft:
    spec = draft.sink.spec
    draft = draft.having_driver(phase=child.phase.value)
    if child.is_queued:
        return _queued(draft)
    if child.phase is Phase.PENDING:
        draft, limit_ms = _with_start_limit(draft)
        failure = failures.not_started(child, spec.driver_start_seconds, mounted=draft.observed.mounted(spec))
    elif spec.active_deadline_seconds is not None:
        limit_ms = _started_ms(draft, child) + 1000 * spec.active_deadline_seconds
        failure = failures.too_long(child, spec.active_deadline_seconds)
    else:
        return draft
    if draft.now_ms < limit_ms:
        stuck_ms = child.stuck_ms(times.to_ms(draft.status.driver.start_time))
        is_young = child.phase is Phase.PENDING and draft.now_ms < stuck_ms
        return draft.waking(min(limit_ms, stuck_ms) if is_young else limit_ms)
    draft = draft.stopping(child.name, failure.reason, grace_seconds=spec.termination_grace_seconds)
    return _fail(draft, failure, phase="Failed", end_ms=draft.now_ms)


def _queued(draft: Draft) -> Draft:
    """The time in a queue does not count towards the start. The time to start begins anew before half of it is over, so that a driver has
    at least half of it after its admission.
    """
    draft, limit_ms = _with_start_limit(draft)
    half_ms = limit_ms - 500 * draft.sink.spec.driver_start_seconds
    return draft.waking(half_ms) if draft.now_ms < half_ms else draft.having_driver(start_time=draft.now)


def _stop(draft: Draft, child: Run, why: str) -> Draft:
    draft = draft.ending(child.name, why)
    draft = draft.having_driver(phase="Deleted", end_time=draft.now)
    return _remember(draft, "Stopped", None, f"stopped: {why}")


def _ended_by_itself(draft: Draft) -> Draft:
    """Records the report of a driver whose stop was planned, when it has ended. It changes no outcome: the attempt stays Stopped, however
    the driver ended.
    """
    child, status = draft.child(), draft.status
    if status.driver.phase != "Deleted" or child is None or not child.phase.finished:
        return draft
    report, end = child.report or {}, times.to_text(child.finished_ms or draft.now_ms)
    if report.get("outcome") == "Stopped":
        draft = _with_progress(draft, child)
    elif child.deleting:
        return draft
    history = list(status.history or ())
    for index, item in enumerate(history):
        if item.attempt == child.attempt and item.outcome == "Stopped":
            message = "; ".join(filter(None, (item.message, redact(str(report.get("message") or "")))))
            history[index] = replace(item, end_time=end, message=message[:512])
            break
    return draft.having(history=tuple(history) or None).having_driver(phase=child.phase.value, end_time=end)


def _well_run(draft: Draft, child: Run) -> Draft:
    """Resets the count of failures when the driver of a stream has run for restart.resetAfterSeconds."""
    spec, status = draft.sink.spec, draft.status
    if spec.mode != "Streaming" or child.started_ms is None or status.run.first_attempt == status.attempt:
        return draft
    long_ms = 1000 * spec.reset_after_seconds
    well_ms = _started_ms(draft, child) + long_ms
    # Both ends are times of the driver's node.
    is_well = draft.now_ms >= well_ms if child.finished_ms is None else child.finished_ms - child.started_ms >= long_ms
    if is_well:
        return draft.having(consecutive_failures=0).having_run(first_attempt=status.attempt)
    return draft if child.phase.finished else draft.waking(well_ms)


def _started_ms(draft: Draft, child: Run) -> int:
    """When the driver started, by the clock of its node. It is not before the time of the intent, because the node's clock may be behind. A
    time of the intent that is ahead of now comes from before a clock was set back.
    """
    started_ms, intended_ms = child.started_ms or child.created_ms, times.to_ms(draft.status.driver.start_time) or 0
    return started_ms if intended_ms > draft.now_ms else max(started_ms, intended_ms)


def _interrupted(draft: Draft, child: Run) -> Draft:
    """Records that the driver of a stream was stopped from outside, for example by a drain of its node. It stopped at a commit, and the
    next driver continues there.
    """
    end = times.to_text(child.finished_ms or draft.now_ms)
    again = times.to_text(draft.now_ms + 1000 * draft.sink.spec.backoff_seconds)
    draft = _with_progress(draft, child).having_driver(phase="Succeeded", end_time=end)
    if not draft.status.consecutive_failures:  # the next driver is not a retry
        draft = draft.having_run(first_attempt=(draft.status.attempt or 0) + 1)
    message = redact(str((child.report or {}).get("message") or ""))
    return _remember(draft.having(next_attempt_time=again), "Stopped", None, message)


def _with_progress(draft: Draft, child: Run) -> Draft:
    end = times.to_text(child.finished_ms or draft.now_ms)
    return draft.having(progress=Progress.reported(child.report or {}, end=end))


def _succeed(draft: Draft, child: Run) -> Draft:
    report, end = child.report or {}, times.to_text(child.finished_ms or draft.now_ms)
    spec, done = draft.sink.spec, bool(report.get("already_done"))
    is_stream = spec.mode == "Streaming"
    # A bounded stream ends when its source has no new rows. It looks again after a pause.
    again_ms = draft.now_ms + 1000 * spec.backoff_seconds
    again = times.to_text(again_ms) if is_stream else None
    draft = freshness.succeeded(_with_progress(draft, child), child)
    progress = draft.status.progress
    draft = draft.having(consecutive_failures=0, next_attempt_time=again)
    draft = draft.waking(again_ms) if is_stream else draft
    draft = draft.having_run(state="Succeeded").having_driver(phase="Succeeded", end_time=end)
    if spec.mode == "Scheduled":
        draft = draft.having(schedule=replace(draft.status.schedule, last_success_time=end))
    message = "the data was already there" if done else redact(str(report.get("message") or ""))
    draft = _remember(draft, "Succeeded", None, message)
    shown = message
    if not (done or is_stream or spec.write_mode == "ReadOnly"):
        shown = f"{progress.rows_read or 0} rows read, {progress.updates_written or 0} updates written"
    errors = progress.errors
    if errors and not is_stream:  # the first errors of a stream were noted while it ran
        draft = draft.noting(sink_status.errors_note(child.name, errors))
    return draft.noting(Note("Normal", "RunSucceeded", f"{child.name}: {shown}"))


def _fail(draft: Draft, failure: Failure, *, phase: DriverPhase, end_ms: int) -> Draft:
    """Record a failure, and decide whether and when the next attempt starts."""
    spec, end, name = draft.sink.spec, times.to_text(end_ms), str(draft.status.driver.pod_name)
    draft = draft.having_driver(phase=phase, end_time=end)
    if failure.counts:
        draft = draft.having(consecutive_failures=(draft.status.consecutive_failures or 0) + 1)
    draft = draft.having(last_failure=last_failure(failure, driver=name, time=end))
    draft = _remember(draft, "Failed", failure.failure_class, failure.message)
    draft = draft.noting(Note("Warning", f"Driver{failure.failure_class}Failure", f"{name}: {failure.message[:500]}"))
    status = draft.status
    exhausted = failure.counts and (status.consecutive_failures or 0) >= spec.max_consecutive_failures
    if spec.restart_policy == "Never" or failure.is_final or exhausted:
        return draft.having_run(state="Failed").having(next_attempt_time=None)
    exponent = min(20, max(0, _or(status.attempt, 1) - _or(status.run.first_attempt, 1)))
    delay_s = min(spec.max_backoff_seconds, spec.backoff_seconds * 2**exponent)
    return draft.having(next_attempt_time=times.to_text(draft.now_ms + 1000 * delay_s))


def _or(number: int | None, default: int) -> int:
    return default if number is None else number


def _remember(draft: Draft, outcome: AttemptOutcome, failure_class: str | None, message: str) -> Draft:
    item = attempt_that_ended(
        draft.status,
        attempt=draft.status.attempt or 0,
        outcome=outcome,
        failure_class=failure_class,
        message=message,
        now=draft.now,
    )
    return draft.remembering(item)


def _handle_requests(draft: Draft) -> Draft:
    """Handle `request-restart`: reopen a failed run under its id, or open another run. A schedule is not affected."""
    token = names.request_token(draft.sink.meta.annotations, _RESTART_REQUEST)
    handled = draft.status.last_handled_requests or {}
    if not token or handled.get(_RESTART_REQUEST) == token or draft.status.is_under_way:
        return draft
    handled = {**handled, _RESTART_REQUEST: token}
    draft = draft.having(last_handled_requests=handled, consecutive_failures=0, next_attempt_time=None)
    if draft.status.run.state == "Failed":
        return draft.having_run(state="Running")
    if draft.status.run.state in {None, "Succeeded"}:
        return _open_run(draft, None)
    return draft


def _choose_run(draft: Draft) -> Draft:
    """Open a run when one is due. InvalidUsage when the schedule is missing or invalid."""
    spec = draft.sink.spec
    if spec.mode != "Scheduled":
        is_due = not draft.status.is_under_way and (draft.outdated or _has_more(draft)) and not spec.suspend
        is_due = is_due and not rollout.is_held(draft)
        return _open_run(draft, None) if is_due else draft
    if spec.schedule is None:
        raise InvalidUsage("schedule is missing although mode is Scheduled")
    following_ms = schedule.next_tick_ms(spec.schedule, draft.now_ms)
    ticks = replace(draft.status.schedule, next_time=times.to_text(following_ms))
    draft = draft.having(schedule=ticks).waking(following_ms)
    run = draft.status.run
    if run.state == "Running" and run.revision != spec.revision and not draft.status.is_under_way:
        draft = draft.having_run(revision=spec.revision)
    if run.state == "Running" or spec.suspend:
        return draft
    after_ms = times.to_ms(ticks.last_time) or draft.sink.meta.created_ms
    if after_ms > following_ms:
        # At the last run the clock was ahead by more than one tick. The schedule must not wait until that time comes.
        after_ms, ticks = draft.now_ms, replace(ticks, last_time=draft.now)
        draft = draft.having(schedule=ticks)
    tick_ms = schedule.last_tick_ms(spec.schedule, after_ms=after_ms, until_ms=draft.now_ms)
    if tick_ms is None:
        return draft
    draft = draft.having(schedule=replace(ticks, last_time=times.to_text(tick_ms)))
    deadline_s = spec.schedule.starting_deadline_seconds
    if deadline_s is not None and draft.now_ms - tick_ms > 1000 * deadline_s:
        text = f"the tick of {times.to_text(tick_ms)} is older than {deadline_s} s and is skipped"
        return draft.noting(Note("Warning", "ScheduleMissed", text))
    return _open_run(draft, tick_ms)


def _has_more(draft: Draft) -> bool:
    """Whether a stream whose source had no new rows must look again."""
    next_ms = times.to_ms(draft.status.next_attempt_time) or 0
    is_ended = draft.sink.spec.mode == "Streaming" and draft.status.run.state == "Succeeded"
    return is_ended and not draft.now_ms < next_ms <= draft.now_ms + 1000 * draft.sink.spec.backoff_seconds


def _open_run(draft: Draft, scheduled_ms: int | None) -> Draft:
    """Open the next run, for a tick or (None) without one. The ids of a sink's runs end in a number that always rises, regardless of the
    clock. The number lets a driver that returns after a newer run recognise that its run is over (persist_engine.flow.mint_run).
    """
    number = (draft.status.run.number or 0) + 1
    least = names.run_order(draft.status.run.id or "") + 1
    run = RunState(
        number=number,
        id=names.run_id(draft.sink.meta.uid, max(scheduled_ms or number, least)),
        revision=draft.sink.spec.revision,
        first_attempt=draft.last_attempt + 1,
        state="Running",
        scheduled_time=None if scheduled_ms is None else times.to_text(scheduled_ms),
    )
    return draft.having(run=run, consecutive_failures=0, next_attempt_time=None)


def _stop_strays(draft: Draft) -> Draft:
    """Stop every running driver that is not the attempt under way: a driver that came back, or one whose planned stop did not happen
    because the operator ended. Otherwise it would delay the next attempt without limit. A driver that was asked to end first has its time
    for that.
    """
    stopped = {action.name for action in draft.actions if isinstance(action, StopRun)}
    grace = draft.sink.spec.termination_grace_seconds
    for run in draft.observed.runs:
        current = draft.status.is_under_way and run.name == draft.status.driver.pod_name
        current = current or rollout.is_of(draft, run.name)
        if current or run.phase.finished or run.deleting or run.name in stopped:
            continue
        until_ms = draft.ends_until_ms(run)
        if until_ms is None:
            draft = draft.stopping(run.name, "it is not the attempt under way", grace_seconds=grace)
        else:
            draft = draft.waking(until_ms)
    return draft


def _start_attempt(draft: Draft) -> Draft:
    """Start the next attempt of an open run. It is recorded first, and starts after its backoff, on a usable shard, when there is no other
    driver.
    """
    spec, shard, status = draft.sink.spec, draft.observed.shard, draft.status
    creating = status.driver.phase == "Creating" and draft.child() is None
    if status.run.state != "Running" or (status.is_under_way and not creating) or rollout.is_held(draft):
        return draft
    if spec.suspend:
        return _forgo(draft, "suspended").having_driver(phase="Deleted", end_time=draft.now) if creating else draft
    next_ms = times.to_ms(status.next_attempt_time) or 0
    # A time beyond any backoff comes from before a clock was set back. It must not delay the attempt.
    if draft.now_ms < next_ms <= draft.now_ms + 2000 * spec.max_backoff_seconds:
        return draft.waking(next_ms)
    leaving = [one for one in draft.observed.runs if not one.phase.finished]
    if leaving or draft.observed.obstacle is not None or shard.schema is None or shard.location is None:
        return draft.waking(draft.now_ms + 5000)
    if not creating or draft.outdated:
        draft = _next_attempt(_forgo(draft, draft.outdated) if creating else draft)
    start = draft.starting()
    return draft if start is None else draft.acting(start)


def _next_attempt(draft: Draft) -> Draft:
    revision, attempt = draft.sink.spec.revision, draft.last_attempt + 1
    name = names.driver_name(draft.sink.meta.name, revision, attempt)
    driver = DriverState(pod_name=name, phase="Creating", start_time=draft.now)
    read, written = draft.observed.input_id, draft.observed.shard.shard_id
    draft = draft.having_run(revision=revision, shard_id=written, input_shard_id=read)
    return draft.having(attempt=attempt, driver=driver, next_attempt_time=None)


def _forgo(draft: Draft, why: str) -> Draft:
    """Give up the intended attempt, and remove objects of it that may already exist."""
    return draft.stopping(draft.status.driver.pod_name, why)


def _clear_away(draft: Draft) -> Draft:
    """Remove finished drivers, at once or after their time, as spec.cleanup says. Remove the objects of drivers that are gone."""
    spec, status = draft.sink.spec, draft.status
    for name in draft.observed.leftovers:
        if not ((status.is_under_way and name == status.driver.pod_name) or rollout.is_of(draft, name)):
            draft = draft.stopping(name, "its driver is gone")
    for run in draft.observed.runs:
        current = run.name == status.driver.pod_name
        if (
            not run.phase.finished
            or run.deleting
            or (current and status.is_under_way)
            or rollout.is_of(draft, run.name)
        ):
            continue
        # A driver that was fenced by its successor before its own stop has failed, but the history records that it was stopped.
        stopped = any(one.attempt == run.attempt and one.outcome == "Stopped" for one in draft.status.history or ())
        failed = run.phase is Phase.FAILED and not stopped
        retained = spec.retain_driver == "Always" or (spec.retain_driver == "OnFailure" and failed)
        expires_ms = (run.finished_ms or run.created_ms) + 1000 * spec.ttl_seconds_after_finished
        stays = retained and draft.now_ms < expires_ms
        draft = draft.waking(expires_ms) if stays else draft.stopping(run.name, "finished")
    return draft
