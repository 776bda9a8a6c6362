"""The rollout of a new revision of a Streaming sink beside the running driver (`rollout.strategy: BlueGreen`). Pure.

The driver of `status.driver` (blue) continues. A second driver (green, `status.rollout.driver`) stands by and compares. When it is
promoted, green becomes `status.driver`, and blue is stopped; the shard has refused blue's commits since green took over. When green is
rolled back, blue continues.

Invariant: a driver that is not ordered to take over never writes. So two drivers never both append, whatever is lost between two plans.
"""

from __future__ import annotations

from dataclasses import replace

from persist_operator.api import names, times
from persist_operator.api.redact import clip, redact
from persist_operator.api.sink_status import (
    STANDBY_STAGES,
    UNDER_WAY,
    DriverPhase,
    DriverState,
    RolloutPhase,
    RolloutState,
)
from persist_operator.plan import failures
from persist_operator.plan.actions import STANDBY_KEY, Note, PromoteDriver
from persist_operator.plan.failures import Failure
from persist_operator.plan.observed import QUEUED, Phase, Run
from persist_operator.plan.sink_draft import Draft, attempt_that_ended, last_failure

PROMOTE = "promote"
_RESTART = "restart"
#: How long a driver has to take over, even if less of the rollout's time is left. The kubelet shows the driver the order within some 90 s.
_TAKE_OVER_MS = 300_000
_MESSAGE_MAX = 1024
_STARTING, _QUEUED = "the driver on standby is starting", "the driver on standby waits in the queue of its scheduler"


def keeps(draft: Draft) -> bool:
    """Whether the running driver continues although its revision is not the sink's. Also false when its revision is the sink's."""
    status, spec, child = draft.status, draft.sink.spec, draft.child()
    is_other = status.run.revision != spec.revision
    if not is_other or spec.rollout is None or spec.mode != "Streaming" or spec.suspend or draft.moved:
        return False
    return status.is_under_way and child is not None and child.phase is Phase.RUNNING and not child.deleting


def is_held(draft: Draft) -> bool:
    """Whether the sink's revision must not start without a request, because it was rolled back and the driver that continued has ended."""
    return draft.status.rollout.state == "RolledBack" and not draft.status.is_under_way


def is_of(draft: Draft, name: str | None) -> bool:
    """Whether `name` is the driver of the rollout and has not ended."""
    state = draft.status.rollout
    return state.is_active and state.driver.phase in UNDER_WAY and name == state.driver.pod_name


def adopted(draft: Draft) -> Draft:
    """Takes over a driver on standby that is newer than the status. Its intent was lost with the status."""
    found = [one for one in draft.observed.runs if one.is_on_standby and one.revision == draft.sink.spec.revision]
    newest = max(found, key=lambda one: one.attempt, default=None)
    if newest is None or newest.phase.finished or newest.attempt <= draft.last_attempt:
        return draft
    start = times.to_text(newest.started_ms or newest.created_ms)
    state = _opened(draft, start=start)
    driver = DriverState(pod_name=newest.name, phase="Pending", start_time=start)
    return draft.having(
        rollout=replace(
            state, attempt=newest.attempt, run_number=newest.run_number, run_id=newest.run_id, driver=driver
        )
    )


def taken_over(draft: Draft) -> Draft:
    """Makes green the driver of the sink when it has taken over. Either green reports this, or the shard has fenced blue."""
    state, child = draft.status.rollout, draft.child()
    if state.state is None or state.driver.pod_name is None:
        return draft
    green = draft.run(state.driver.pod_name)
    stage = None if green is None or green.running is None else green.running.stage
    is_ended = green is not None and green.phase is Phase.SUCCEEDED and (green.report or {}).get("outcome") != "Stopped"
    fenced = child is not None and child.phase is Phase.FAILED and failures.classify(child).failure_class == "Fenced"
    if stage == "Streaming" or is_ended or (fenced and state.promote_time is not None):
        return _switched(draft, "took over")
    return draft


def follow(draft: Draft) -> Draft:
    """Opens, follows and ends the rollout. The caller must first have recorded the state of the running driver."""
    draft = _again(draft)
    state = draft.status.rollout
    if not keeps(draft):
        return _without_blue(draft)
    if state.state is None or state.to_revision != draft.sink.spec.revision:
        draft = _begun(_dropped(draft, "the spec changed again"))
    if draft.status.rollout.state == "RolledBack":
        return draft
    draft = _promoted_by_request(draft)
    return _timed(_followed(draft))


def start_attempt(draft: Draft) -> Draft:
    """Starts green, or orders the driver on standby to take over. The status already has both intents. A repeated action has no further
    effect.
    """
    state = draft.status.rollout
    if state.state == "Promoting" and draft.run(state.driver.pod_name) is not None:
        draft = draft.acting(PromoteDriver(name=str(state.driver.pod_name)))
    main = draft.child()
    if main is not None and main.is_on_standby and not main.phase.finished and draft.status.is_under_way:
        # Green became the sink's driver when blue ended. No other action would order it to write.
        draft = draft.acting(PromoteDriver(name=main.name))
    if not state.is_active or not keeps(draft):
        return draft
    creating = state.driver.phase == "Creating" and draft.run(state.driver.pod_name) is None
    if state.driver.phase in UNDER_WAY and not creating:
        return draft
    next_ms = times.to_ms(state.next_attempt_time) or 0
    if draft.now_ms < next_ms <= draft.now_ms + 2000 * draft.sink.spec.max_backoff_seconds:
        return draft.waking(next_ms)
    others = [one for one in draft.observed.runs if not one.phase.finished and one.name != draft.status.driver.pod_name]
    if others or draft.observed.obstacle is not None:
        return draft.waking(draft.now_ms + 5000)
    if not creating:
        draft = _next_attempt(draft)
    start = draft.starting(stands_by=True)
    return draft if start is None else draft.acting(start)


def _opened(draft: Draft, *, start: str) -> RolloutState:
    """A rollout from the run under way to the sink's revision, without a driver yet."""
    spec, run = draft.sink.spec, draft.status.run
    number = (run.number or 0) + 1
    order = max(number, names.run_order(run.id or "") + 1)
    return RolloutState(
        state="Starting",
        from_revision=run.revision,
        to_revision=spec.revision,
        start_time=start,
        run_number=number,
        run_id=names.run_id(draft.sink.meta.uid, order),
        message=_STARTING,
    )


def _begun(draft: Draft) -> Draft:
    state = _opened(draft, start=draft.now)
    text = f"revision {state.to_revision} stands by while {draft.status.driver.pod_name} runs on"
    return draft.having(rollout=state).noting(Note("Normal", "RolloutStarted", text))


def _next_attempt(draft: Draft) -> Draft:
    attempt, revision = draft.last_attempt + 1, draft.sink.spec.revision
    name = names.driver_name(draft.sink.meta.name, revision, attempt)
    driver = DriverState(pod_name=name, phase="Creating", start_time=draft.now)
    return draft.having_rollout(attempt=attempt, driver=driver, next_attempt_time=None)


def _again(draft: Draft) -> Draft:
    """Tries a rolled-back rollout again when a restart or a promotion is requested."""
    if draft.status.rollout.state != "RolledBack":
        return draft
    restart = _token(draft, _RESTART)
    if restart:
        draft = _handled(draft, _RESTART, restart).having(consecutive_failures=0, next_attempt_time=None)
    elif not _token(draft, PROMOTE):
        return draft
    return _dropped(draft, "it is tried again")


def _promoted_by_request(draft: Draft) -> Draft:
    """Promotes when the user requests it, regardless of the comparison. A request without a rollout never has an effect."""
    token = _token(draft, PROMOTE)
    if not token:
        return draft
    draft = _handled(draft, PROMOTE, token)
    return _promoting(draft) if draft.status.rollout.is_active else draft


def _promoting(draft: Draft) -> Draft:
    if draft.status.rollout.state == "Promoting":
        return draft
    return draft.having_rollout(state="Promoting", promote_time=draft.now, message="ordered to take over")


def _token(draft: Draft, request: str) -> str:
    """The token of a request that was not handled; otherwise empty."""
    token = names.request_token(draft.sink.meta.annotations, request)
    return "" if (draft.status.last_handled_requests or {}).get(request) == token else token


def _handled(draft: Draft, request: str, token: str) -> Draft:
    return draft.having(last_handled_requests={**(draft.status.last_handled_requests or {}), request: token})


def _timed(draft: Draft) -> Draft:
    """Rolls back when the time of the rollout is over."""
    state, rollout = draft.status.rollout, draft.sink.spec.rollout
    if not state.is_active or rollout is None:
        return draft
    start_ms = times.to_ms(state.start_time)
    if start_ms is None or start_ms > draft.now_ms:  # the clock was set back after this time was written
        start_ms = draft.now_ms
        draft = draft.having_rollout(start_time=draft.now)
    limit_ms = start_ms + 1000 * rollout.timeout_seconds
    ordered_ms = times.to_ms(state.promote_time)
    if ordered_ms is not None:
        limit_ms = max(limit_ms, min(ordered_ms, draft.now_ms) + _TAKE_OVER_MS)
    if draft.now_ms < limit_ms:
        return draft.waking(limit_ms)
    return _rolled_back(draft, f"{state.state} after {(limit_ms - start_ms) // 1000} s: {state.message}")


def _followed(draft: Draft) -> Draft:
    """Records the phase, the report and the end of green."""
    state = draft.status.rollout
    if state.driver.phase not in UNDER_WAY:
        return draft
    green, name = draft.run(state.driver.pod_name), str(state.driver.pod_name)
    if green is None:
        if state.driver.phase != "Creating":
            return _failed(draft.stopping(name, "the driver is lost"), failures.lost(name), phase="Lost")
        return _watched_start(draft, None)
    if green.phase is Phase.SUCCEEDED:
        # Green was stopped from outside, for example by a drain of its node. The next attempt stands by again.
        again = times.to_text(draft.now_ms + 1000 * draft.sink.spec.backoff_seconds)
        draft = draft.having_green(phase="Succeeded", end_time=draft.now)
        return draft.having_rollout(state=_waiting(state), next_attempt_time=again)
    if green.phase.finished:
        return _failed(draft, failures.classify(green), phase="Failed")
    draft = draft.having_green(phase=green.phase.value)
    if green.deleting:
        return draft
    return _watched_start(draft, green) if green.phase is Phase.PENDING else _reported(draft, green)


def _reported(draft: Draft, green: Run) -> Draft:
    """Records green's report, and decides what follows from it."""
    state, rollout, report = draft.status.rollout, draft.sink.spec.rollout, green.running
    if report is None or rollout is None or report.stage not in STANDBY_STAGES:
        return draft
    draft = draft.having_rollout(
        lag_seconds=report.lag_seconds, compared=report.compared, missing=report.missing, extra=report.extra
    )
    if state.state == "Promoting":
        return draft
    is_near = (report.lag_seconds or 0) <= rollout.max_lag_seconds
    if report.stage == "Proven" and is_near:
        text = f"{report.compared} updates compared, all equal"
        draft = draft.having_rollout(state="ReadyToPromote", message=text)
        return _promoting(draft) if rollout.is_automatic else draft
    if report.stage == "Differs":
        text = (
            f"it would write something else: updates missing in the shard: {report.missing}, too many: {report.extra}"
        )
    elif report.stage == "Proven":
        text = f"equal, but {report.lag_seconds} s behind"
    else:
        text = "the running driver has not committed updates yet that could be compared"
    return draft.having_rollout(state="CatchingUp", message=text)


def _watched_start(draft: Draft, green: Run | None) -> Draft:
    """Ends an attempt that does not run within its time to start. The message shows a refusal to create it, or what keeps it pending."""
    state, seconds = draft.status.rollout, draft.sink.spec.driver_start_seconds
    intended_ms = min(times.to_ms(state.driver.start_time) or draft.now_ms, draft.now_ms)
    limit_ms, refusal = intended_ms + 1000 * seconds, draft.observed.failures.get(STANDBY_KEY)
    if refusal is not None:
        draft = draft.having_rollout(message=clip(f"{refusal.reason}: {refusal.message}", _MESSAGE_MAX))
    if green.is_queued if green is not None else refusal is not None and bool(refusal.place):
        half_ms = limit_ms - 500 * seconds
        if green is not None:
            draft = draft.having_rollout(message=_QUEUED)
        return draft.waking(half_ms) if draft.now_ms < half_ms else draft.having_green(start_time=draft.now)
    mounted = draft.observed.mounted(draft.sink.spec)
    if green is not None and (green.reason or green.is_stuck(draft.now_ms, intended_ms)):
        why = redact(f"{_STARTING}: {failures.why_pending(green, mounted)}")
        draft = draft.having_rollout(message=clip(why, _MESSAGE_MAX))
    elif green is not None and (state.message or "").startswith((_QUEUED, f"{QUEUED}: ")):
        draft = draft.having_rollout(message=_STARTING)
    if draft.now_ms < limit_ms:
        stuck_ms = limit_ms if green is None else green.stuck_ms(intended_ms)
        return draft.waking(min(limit_ms, stuck_ms) if draft.now_ms < stuck_ms else limit_ms)
    name = str(state.driver.pod_name)
    if green is not None:
        failure = failures.not_started(green, seconds, mounted=mounted)
    elif refusal is not None:
        failure = failures.not_created(name, seconds, refusal)
    else:  # its creation was never tried, because no operator ran or there was no free place
        return draft.having_green(start_time=draft.now)
    return _failed(draft.stopping(name, failure.reason), failure, phase="Failed")


def _failed(draft: Draft, failure: Failure, *, phase: DriverPhase) -> Draft:
    """Records the failure of green, and tries again as for any attempt, or rolls back."""
    state, spec = draft.status.rollout, draft.sink.spec
    name, count = str(state.driver.pod_name), (state.failures or 0) + failure.counts
    draft = draft.having_green(phase=phase, end_time=draft.now).having_rollout(failures=count)
    draft = _recorded(draft, "Failed", failure.failure_class, failure.message)
    draft = draft.having(last_failure=last_failure(failure, driver=name, time=draft.now))
    draft = draft.noting(Note("Warning", f"Driver{failure.failure_class}Failure", f"{name}: {failure.message[:500]}"))
    is_exhausted = failure.counts and count >= spec.max_consecutive_failures
    if spec.restart_policy == "Never" or failure.is_final or is_exhausted:
        return _rolled_back(draft, f"{failure.reason}: {failure.message}")
    delay_s = times.backoff_s(count, first_s=spec.backoff_seconds, max_s=spec.max_backoff_seconds)
    again = times.to_text(draft.now_ms + 1000 * delay_s)
    text = clip(f"{failure.reason}: {failure.message}", _MESSAGE_MAX)
    return draft.having_rollout(state=_waiting(state), next_attempt_time=again, message=text)


def _waiting(state: RolloutState) -> RolloutPhase:
    """The state of a rollout without a driver. A promotion that was ordered stays."""
    return "Promoting" if state.state == "Promoting" else "Starting"


def _rolled_back(draft: Draft, why: str) -> Draft:
    """Ends the rollout without a change. Green is stopped, and the running driver continues."""
    draft = _stopped(draft, "the rollout is rolled back")
    message = clip(why, _MESSAGE_MAX)
    draft = draft.having_rollout(state="RolledBack", next_attempt_time=None, message=message)
    state = draft.status.rollout
    text = f"revision {state.to_revision} is rolled back, and {state.from_revision} runs on: {why}"
    return draft.noting(Note("Warning", "RolledBack", clip(text, _MESSAGE_MAX)))


def _without_blue(draft: Draft) -> Draft:
    """Ends the rollout when blue has ended or there is nothing to roll out. When blue has ended, green takes its place without a
    comparison.
    """
    state, spec = draft.status.rollout, draft.sink.spec
    if state.state is None:
        return _promoted_by_request(draft)
    is_wanted = state.to_revision == spec.revision and not (spec.suspend or draft.moved)
    is_other = draft.status.run.revision != spec.revision
    if is_wanted and is_other and state.state == "RolledBack" and spec.rollout is not None:
        return draft  # is_held, or blue is about to end
    green = draft.run(state.driver.pod_name)
    is_there = green is not None and not green.phase.finished and not green.deleting
    child = draft.child()
    if child is not None and not child.phase.finished and draft.status.is_under_way and is_wanted and is_other:
        return draft  # blue is leaving; its end decides
    if is_wanted and is_other and state.is_active and is_there:
        return _switched(draft, "takes over, because the former driver has ended")
    return _promoted_by_request(_dropped(draft, "there is nothing to roll out"))


def _switched(draft: Draft, how: str) -> Draft:
    """Makes green the driver of the sink from now on."""
    state, status, blue = draft.status.rollout, draft.status, draft.child()
    if status.is_under_way:
        ended = replace(status, driver=replace(status.driver, end_time=draft.now))
        message = f"stopped: revision {state.to_revision} {how}"
        draft = draft.remembering(
            attempt_that_ended(
                ended,
                attempt=status.attempt or 0,
                outcome="Stopped",
                failure_class=None,
                message=message,
                now=draft.now,
            )
        )
        if blue is not None and not blue.phase.finished and not blue.deleting:
            draft = draft.ending(blue.name, message)
    driver = state.driver if state.driver.phase in UNDER_WAY else replace(state.driver, phase="Running", end_time=None)
    draft = draft.having(
        run=replace(
            state.run,
            first_attempt=state.attempt,
            shard_id=status.run.shard_id,
            input_shard_id=draft.observed.input_id or status.run.input_shard_id,
        ),
        driver=driver,
        attempt=state.attempt,
        consecutive_failures=0,
        next_attempt_time=None,
        rollout=RolloutState(),
    )
    return draft.noting(Note("Normal", "Promoted", f"{driver.pod_name}: revision {state.to_revision} {how}"))


def _dropped(draft: Draft, why: str) -> Draft:
    """Stops green and forgets the rollout. The number of its last attempt is never used again."""
    draft = _stopped(draft, why)
    added = draft.last_attempt - (draft.status.attempt or 0)
    first = draft.status.run.first_attempt
    draft = draft.having_run(first_attempt=None if first is None else first + added)
    return draft.having(attempt=draft.last_attempt or None, rollout=RolloutState())


def _stopped(draft: Draft, why: str) -> Draft:
    state = draft.status.rollout
    if not state.is_active or state.driver.phase not in UNDER_WAY:
        return draft
    draft = draft.ending(state.driver.pod_name, why)
    draft = draft.having_green(phase="Deleted", end_time=draft.now)
    return _recorded(draft, "Stopped", None, f"stopped: {why}")


def _recorded(draft: Draft, outcome: str, failure_class: str | None, message: str) -> Draft:
    state = draft.status.rollout
    return draft.remembering(
        attempt_that_ended(
            state,
            attempt=state.attempt or 0,
            outcome="Failed" if outcome == "Failed" else "Stopped",
            failure_class=failure_class,
            message=message,
            now=draft.now,
        )
    )
