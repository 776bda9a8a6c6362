"""The age of the rows that a sink keeps in its shard: the time up to which the shard has all rows of the input, and the condition Fresh.
Pure.

The driver of a stream reports the time at which it last had all rows of its source. A look that finds no new rows also counts. A run of
another mode has the rows that its input had when its driver started. The time does not change when drivers fail, so the age grows.
"""

from __future__ import annotations

from persist_operator.api import times
from persist_operator.api.conditions import Condition
from persist_operator.api.sink import Sink
from persist_operator.api.sink_status import Freshness, SinkStatus
from persist_operator.plan.observed import Phase, Run
from persist_operator.plan.sink_draft import Draft, stale_ms

#: How much later a time must be to change the status of a fresh sink. Each change is a request to the API server.
_STEP_MS = 30_000


def of_this_shard(draft: Draft) -> Draft:
    """Forgets the time if the sink now writes another shard, which has no rows of the input yet."""
    return draft.having(freshness=Freshness()) if draft.moved else draft


def followed(draft: Draft) -> Draft:
    """Records the newest time from the running driver. Requests the next plan for the moment when the rows become too old."""
    child = draft.child()
    if draft.sink.spec.fresh_seconds is None:
        return draft.having(freshness=Freshness())
    reports = child is not None and child.phase is Phase.RUNNING and draft.status.is_under_way
    if child is not None and child.running is not None and reports:
        draft = _moved(draft, times.to_ms(child.running.fresh_time), step_ms=_STEP_MS)
    due_ms = stale_ms(draft.status, draft.sink) or 0
    return draft.waking(due_ms) if draft.now_ms < due_ms else draft


def succeeded(draft: Draft, child: Run) -> Draft:
    """Records that the run of `child` has committed. If an earlier attempt committed the run, only the run's tick is certain to be before
    that commit.
    """
    if draft.sink.spec.fresh_seconds is None:
        return draft
    if (child.report or {}).get("already_done"):
        return _moved(draft, times.to_ms(draft.status.run.scheduled_time))
    return _moved(draft, child.started_ms or child.created_ms)


def condition(status: SinkStatus, sink: Sink, *, now_ms: int) -> Condition:
    """Whether the rows are as fresh as spec.freshness requires. The text changes only with the time on the status."""
    target_s, known_ms = sink.spec.fresh_seconds or 0, times.to_ms(status.freshness.time)
    is_late = now_ms >= (stale_ms(status, sink) or 0)
    if known_ms is None:
        text = "nothing has brought the shard up to date yet"
        return Condition("Fresh", "False" if is_late else "Unknown", "NeverFresh" if is_late else "NotKnown", text)
    if not is_late:
        text = f"the shard has everything that the input had at {status.freshness.time}"
        return Condition("Fresh", "True", "Current", text)
    text = f"rows that the input got after {status.freshness.time}, more than {target_s} s ago, may be missing"
    return Condition("Fresh", "False", *_cause(status, sink, text))


def _cause(status: SinkStatus, sink: Sink, text: str) -> tuple[str, str]:
    if sink.spec.suspend:
        return "Suspended", f"{text}: the sink is suspended"
    if status.driver.phase == "Running":
        return "Behind", f"{text}: {status.driver.pod_name} runs and is behind"
    if status.run.state == "Failed":
        return "RunFailed", f"{text}: the run has failed"
    next_time = status.schedule.next_time if status.run.state != "Running" else status.next_attempt_time
    return "NoDriver", f"{text}: no driver runs{f'; the next one starts at {next_time}' if next_time else ''}"


def _moved(draft: Draft, at_ms: int | None, *, step_ms: int = 0) -> Draft:
    """The draft with a later time, but not later than now, because the clock of the driver's node may be ahead. `step_ms` does not apply to
    the first time, and while the rows are not fresh.
    """
    if at_ms is None:
        return draft
    at_ms, known_ms = min(at_ms, draft.now_ms), times.to_ms(draft.status.freshness.time)
    if known_ms is not None and known_ms <= draft.now_ms:
        is_late = draft.now_ms >= (stale_ms(draft.status, draft.sink) or 0)
        if at_ms < known_ms + (1000 if is_late else max(1000, step_ms)):
            return draft
    return draft.having(freshness=Freshness(time=times.to_text(at_ms)))
