"""Runs of sinks on request, and the ticks of their schedules in the form that the planner gets. The planner decides which run starts. A
stream counts as a schedule here: without `watch` it runs once.

Pure except `ask`, which writes the annotation that requests a run in a cluster too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names, times
from persist_operator.api.sink import SinkSpec
from persist_operator.api.sink_status import RunState, SinkStatus
from persist_operator.local import inputs
from persist_operator.local.objects import Document, Objects
from persist_operator.plan import schedule
from persist_operator.plan.actions import Plan

_RESTART = "restart"


def ask(objects: Objects, document: Mapping[str, Any], *, now_ms: int, is_another: bool = False) -> None:
    """Request a run of the sink, due or not. While an attempt is under way, that attempt is the run, unless the run `is_another`: the
    attempt may have read the input before it changed.
    """
    if is_another or not _known(document).is_under_way:
        objects.annotate("SparkSink", document["metadata"]["name"], f"{names.REQUEST_PREFIX}{_RESTART}", str(now_ms))


def has_failed(document: Mapping[str, Any]) -> bool:
    """Whether the run of the sink's present spec failed, and the planner does not repeat it without a request."""
    run = _known(document).run
    return run.state == "Failed" and run.revision in {None, SinkSpec.of(document["spec"]).revision}


def is_mended(document: Mapping[str, Any]) -> bool:
    """Whether the files of a failed sink's input changed since its last attempt began."""
    began_ms = times.to_ms(_known(document).driver.start_time)
    if began_ms is None or not has_failed(document):
        return False
    changed_ms = inputs.changed_ms(document)
    return changed_ms is not None and changed_ms > began_ms


@dataclass(slots=True)
class Ticks:
    """The ticks of schedules during one `up`. With `watch` ticks come as in a cluster. Without it each Scheduled sink runs at most once:
    when a tick came after the last run tick, when the sink never ran, or on request. A Streaming sink then runs once, until its source has
    no new rows.
    """

    watch: bool
    _numbers: dict[str, int] = field(default_factory=dict)
    """By sink: the number of the last run that had ended when this `up` began."""

    def is_over(self, document: Mapping[str, Any]) -> bool:
        """Whether the sink has had its run in this `up`, and no other run is requested."""
        return self._has_run(document) and _known(document).run.state != "Running" and not _is_asked(document)

    def shown(self, document: Document, *, now_ms: int) -> Document:
        """The sink in the form that the planner gets: with a due tick, or without one."""
        if document["spec"]["mode"] == "Streaming":
            return document if self._has_run(document) else _without_pause(document)
        if document["spec"]["mode"] != "Scheduled":
            return document
        if self._has_run(document):
            return _with_last_tick(document, now_ms)
        return _with_due_tick(document, now_ms) if self._is_wanted(document) else document

    def kept(self, plan: Plan, document: Mapping[str, Any], shown: Mapping[str, Any]) -> Plan:
        """The plan for the sink as it was `shown`. If the planner opened no run, the status keeps the last tick of `document`."""
        run, before = plan.status.get("run"), (document.get("status") or {}).get("run")
        if shown is document or (run or {}).get("number") != (before or {}).get("number"):
            return plan
        ticks = dict(plan.status.get("schedule") or {})
        last = ((document.get("status") or {}).get("schedule") or {}).get("lastTime")
        ticks = ticks | {"lastTime": last} if last else {name: at for name, at in ticks.items() if name != "lastTime"}
        return replace(plan, status={**plan.status, "schedule": ticks})

    def _has_run(self, document: Mapping[str, Any]) -> bool:
        if self.watch or document["spec"]["mode"] == "Once":
            return False
        run = _known(document).run
        number = run.number or 0
        return number > self._numbers.setdefault(document["metadata"]["name"], number - (run.state == "Running"))

    def _is_wanted(self, document: Mapping[str, Any]) -> bool:
        known = _known(document)
        if self.watch or known.run != RunState() or known.is_under_way:
            return False
        return not _is_asked(document)  # the planner opens the run of a request


def _is_asked(document: Mapping[str, Any]) -> bool:
    """Whether a run is requested that the planner has not opened yet."""
    token = names.request_token(document["metadata"].get("annotations") or {}, _RESTART)
    return bool(token) and (_known(document).last_handled_requests or {}).get(_RESTART) != token


def _known(document: Mapping[str, Any]) -> SinkStatus:
    return SinkStatus.of(document.get("status") or {})


def _with_due_tick(document: Document, now_ms: int) -> Document:
    """The sink with the newest past tick as the next one to run, however late it is."""
    spec = SinkSpec.of(document["spec"])
    if spec.schedule is None or spec.suspend:
        return document
    try:
        tick_ms = schedule.last_tick_ms(spec.schedule, after_ms=0, until_ms=now_ms)
    except InvalidUsage:
        return document  # the planner reports the error
    if tick_ms is None:
        return document
    on_time = {name: one for name, one in document["spec"]["schedule"].items() if name != "startingDeadlineSeconds"}
    return {**_with_last_tick(document, tick_ms - 1000), "spec": {**document["spec"], "schedule": on_time}}


def _without_pause(document: Document) -> Document:
    """The ended stream, without the pause before it looks at its source again, because an `up` requests a look now."""
    if _known(document).run.state != "Succeeded":
        return document
    status = {name: one for name, one in document["status"].items() if name != "nextAttemptTime"}
    return {**document, "status": status}


def _with_last_tick(document: Document, at_ms: int) -> Document:
    status = document.get("status") or {}
    ticks = {**(status.get("schedule") or {}), "lastTime": times.to_text(at_ms)}
    return {**document, "status": {**status, "schedule": ticks}}
