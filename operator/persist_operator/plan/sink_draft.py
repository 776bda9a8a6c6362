"""The unfinished plan of a SparkSink, which its steps share. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from persist_operator.api import names, times
from persist_operator.api.sink import Sink
from persist_operator.api.sink_status import Attempt, AttemptOutcome, LastFailure, RolloutState, SinkStatus
from persist_operator.plan.actions import Action, Note, StartDriver, StopEvent, StopRun, action_key
from persist_operator.plan.failures import Failure
from persist_operator.plan.observed import Run, SinkObserved


@dataclass(frozen=True, slots=True)
class Draft:
    """An unfinished plan. Each step of `plan_sink` takes a draft and returns a new one."""

    sink: Sink
    observed: SinkObserved
    now_ms: int
    status: SinkStatus
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    wake_ms: tuple[int, ...] = ()

    @property
    def now(self) -> str:
        """The current time as a text for the status."""
        return times.to_text(self.now_ms)

    def child(self) -> Run | None:
        """The observed driver of the newest attempt; None when there is none."""
        return self.run(self.status.driver.pod_name)

    def run(self, name: str | None) -> Run | None:
        """The observed driver of this name; None when there is none."""
        return next((one for one in self.observed.runs if one.name == name), None)

    @property
    def outdated(self) -> str:
        """The reason why the run no longer matches the sink (another shard or a changed spec); "" when it matches."""
        return self.moved or ("the spec changed" if self.status.run.revision != self.sink.spec.revision else "")

    @property
    def moved(self) -> str:
        """The reason why the run no longer matches the sink's shards; "" when it matches."""
        run, shard, input_id = self.status.run, self.observed.shard, self.observed.input_id
        if input_id is not None and run.input_shard_id not in {None, input_id}:
            return "the shard that it reads is another one"
        return "the shard is another one" if shard.usable and run.shard_id not in {None, shard.shard_id} else ""

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt, of the run or of a rollout."""
        return max(self.status.attempt or 0, self.status.rollout.attempt or 0)

    def having(self, **changes: Any) -> Draft:
        """The draft with these fields of the status changed."""
        return replace(self, status=replace(self.status, **changes))

    def having_run(self, **changes: Any) -> Draft:
        """The draft with these fields of status.run changed."""
        return self.having(run=replace(self.status.run, **changes))

    def having_driver(self, **changes: Any) -> Draft:
        """The draft with these fields of status.driver changed."""
        return self.having(driver=replace(self.status.driver, **changes))

    def having_rollout(self, **changes: Any) -> Draft:
        """The draft with these fields of status.rollout changed."""
        return self.having(rollout=replace(self.status.rollout, **changes))

    def having_green(self, **changes: Any) -> Draft:
        """The draft with these fields of status.rollout.driver changed."""
        return self.having_rollout(driver=replace(self.status.rollout.driver, **changes))

    def acting(self, action: Action) -> Draft:
        """The draft with one more action."""
        return replace(self, actions=(*self.actions, action))

    def stopping(self, name: str | None, reason: str, *, grace_seconds: int = 0, event: StopEvent = "") -> Draft:
        """The draft with the stop of one more driver."""
        stop = StopRun(kind="driver", name=str(name), reason=reason, grace_seconds=grace_seconds, event=event)
        return self.acting(stop)

    def ending(self, name: str | None, reason: str) -> Draft:
        """The draft with the planned stop of a driver. A driver that can be asked has the grace period to end by itself. After it, or at
        once if the driver cannot be asked, its pod is deleted, with another grace period.
        """
        run, grace_s = self.run(name), self.sink.spec.termination_grace_seconds
        draft = self.stopping(name, reason, grace_seconds=grace_s, event="DriverStopped")
        if run is None or not run.hears_stop or not grace_s:
            return draft
        *others, stop = draft.actions
        assert isinstance(stop, StopRun)
        return replace(draft, actions=(*others, replace(stop, asks=True))).waking(self.now_ms + 1000 * grace_s)

    def ends_until_ms(self, run: Run) -> int | None:
        """Until when a driver that was asked to end has time for it. None when it has none: no stop was planned, the driver cannot be
        asked, its deletion was refused, or the time is over. Whether it was asked is not known, because the operator may have ended before
        it did. Then the end of this time leads to the deletion.
        """
        grace_ms = 1000 * self.sink.spec.termination_grace_seconds
        stop = StopRun(kind="driver", name=run.name, reason="", grace_seconds=0)
        ended_ms = times.to_ms(self._stopped(run))
        if ended_ms is None or not run.hears_stop or action_key(stop) in self.observed.failures:
            return None
        # A time beyond this comes from before a clock was set back.
        until_ms = ended_ms + grace_ms
        return until_ms if self.now_ms < until_ms <= self.now_ms + 2 * grace_ms else None

    def _stopped(self, run: Run) -> str | None:
        """When the stop of this driver was planned; None if it was not. The history may be short or off."""
        for item in self.status.history or ():
            if item.attempt == run.attempt and item.outcome == "Stopped":
                return item.end_time
        known = (self.status.driver, self.status.rollout.driver)
        return next((one.end_time for one in known if one.pod_name == run.name and one.phase == "Deleted"), None)

    def noting(self, note: Note) -> Draft:
        """The draft with one more Event."""
        return replace(self, notes=(*self.notes, note))

    def waking(self, *at_ms: int) -> Draft:
        """The draft with a requeue at each time of `at_ms`, or earlier."""
        return replace(self, wake_ms=(*self.wake_ms, *at_ms))

    def remembering(self, item: Attempt) -> Draft:
        """The draft with one more attempt in the history."""
        return self.having(history=(item, *(self.status.history or ()))[: self.sink.spec.history_limit])

    def starting(self, *, stands_by: bool = False) -> StartDriver | None:
        """The start of the attempt on the status; with `stands_by`, of the rollout's attempt. None when no driver can start on
        the shard.
        """
        shard, status = self.observed.shard, self.status
        owner = status.rollout if stands_by else status
        if self.observed.obstacle is not None or shard.schema is None or shard.location is None:
            return None
        attempt = owner.attempt or 0
        return StartDriver(
            name=str(owner.driver.pod_name),
            attempt=attempt,
            run_number=owner.run.number or 0,
            run_id=str(owner.run.id),
            scheduled_ms=times.to_ms(owner.run.scheduled_time),
            executor_prefix=names.executor_prefix(self.sink.meta.name, self.sink.meta.uid, attempt),
            shard_id=shard.shard_id,
            schema=shard.schema,
            location=shard.location,
            spec=self.sink.spec,
            source=self.observed.source,
            stands_by=stands_by,
            due_ms=stale_ms(status, self.sink),
        )


def stale_ms(status: SinkStatus, sink: Sink) -> int | None:
    """When the rows become too old. Without a known time, a new sink has the same time to become fresh. None without spec.freshness."""
    target_s, known_ms = sink.spec.fresh_seconds, times.to_ms(status.freshness.time)
    if target_s is None:
        return None
    return (sink.meta.created_ms if known_ms is None else known_ms) + 1000 * target_s


def attempt_that_ended(
    owner: SinkStatus | RolloutState,
    *,
    attempt: int,
    outcome: AttemptOutcome,
    failure_class: str | None,
    message: str,
    now: str,
) -> Attempt:
    """The item of the history for the attempt under `owner`."""
    return Attempt(
        attempt=attempt,
        run=(owner.run.id or "")[:128],
        revision=owner.run.revision or "",
        start_time=owner.driver.start_time or now,
        end_time=owner.driver.end_time,
        outcome=outcome,
        failure_class=failure_class,
        message=message[:512],
    )


def last_failure(failure: Failure, *, driver: str, time: str) -> LastFailure:
    """The failure of a driver in the form of the status."""
    return LastFailure(
        failure_class=failure.failure_class,
        reason=failure.reason[:256],
        exit_code=failure.exit_code,
        pod_name=driver,
        time=time,
        message=failure.message,
    )
