"""Finds whether a request was handled and its run ended, from successive states of a resource. Pure.

The operator handles a request when it starts the run. It then writes the token to status.lastHandledRequests together with the name of the
run. The run has ended when the status has settled that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from persist_operator.api import conditions, pausing

Stage = Literal["Waiting", "Running", "Succeeded", "Failed", "Gone"]
#: The block of status.maintenance of each verb.
BLOCK = {"compact": "compaction", "rollup": "rollup", "gc": "gc", "verify": "verify", "orphan-scan": "orphanScan"}
#: The longest token that a status holds.
TOKEN_MAX = 64
_ENDED = ("Succeeded", "Failed", "Gone")
_GOOD = {"Succeeded", "Skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: its verb and its token. `run` is the name of its run, when it is known. For an approval: the `kind` of the planned run,
    and the runs that were in the history before.
    """

    verb: str
    token: str
    run: str | None = None
    kind: str | None = None
    before: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Seen:
    """The stage of a request in one state of the resource. `text` is for people."""

    request: Request
    stage: Stage
    text: str

    @property
    def ended(self) -> bool:
        """Whether this is the last stage."""
        return self.stage in _ENDED


def seen(document: Mapping[str, Any] | None, request: Request) -> Seen:
    """The stage of the request in this state of its resource; None: the resource is gone."""
    if document is None:
        return Seen(request, "Gone", "the resource is gone")
    status = document.get("status") or {}
    handled = (status.get("lastHandledRequests") or {}).get(request.verb)
    if request.run is None and handled != request.token[:TOKEN_MAX]:
        return Seen(request, "Waiting", _why_it_waits(document, status))
    return _sink(document, status, request) if document.get("kind") == "SparkSink" else _shard(status, request)


def _shard(status: Mapping[str, Any], request: Request) -> Seen:
    block = (status.get("maintenance") or {}).get(BLOCK.get(request.verb, ""))
    if block is None:
        return _by_history(status, request)
    named = replace(request, run=request.run or block.get("jobName"))
    for entry in status.get("history") or ():
        if named.run is not None and entry.get("id") == named.run:
            return _ended(named, str(entry.get("outcome")), str(entry.get("message", "")))
    if named.run is None or block.get("settledJob") == named.run:
        return _ended(named, str(block.get("lastResult")), str(block.get("message", "")))
    return Seen(named, "Running", f"{named.run} runs")


def _by_history(status: Mapping[str, Any], request: Request) -> Seen:
    """The stage of a verb without a block: an approval starts a run, and other verbs end when they are handled."""
    if request.verb != "approve" or request.kind is None:
        return Seen(request, "Succeeded", "done")
    for entry in status.get("history") or ():
        is_kind = str(entry.get("type", "")).lower() == request.kind.lower()
        if is_kind and str(entry.get("id")) not in request.before:
            named = replace(request, run=str(entry.get("id")))
            return _ended(named, str(entry.get("outcome")), str(entry.get("message", "")))
    return Seen(request, "Running", f"the {request.kind.lower()} is approved")


def _sink(document: Mapping[str, Any], status: Mapping[str, Any], request: Request) -> Seen:
    rollout, run, driver = (status.get(name) or {} for name in ("rollout", "run", "driver"))
    if request.verb == "promote":
        state = rollout.get("state")
        if state == "RolledBack":
            return Seen(request, "Failed", f"the rollout was rolled back: {rollout.get('message', '')}".rstrip(": "))
        done = state is None
        return Seen(
            request, "Succeeded" if done else "Running", "the new revision runs" if done else f"rollout: {state}"
        )
    state, phase = run.get("state"), driver.get("phase")
    name = str(driver.get("podName", "the driver"))
    if state == "Succeeded":
        return Seen(request, "Succeeded", f"{name} succeeded")
    if state == "Failed":
        failure = status.get("lastFailure") or {}
        return Seen(
            request, "Failed", f"{name} failed: {failure.get('message') or failure.get('reason') or 'no message'}"
        )
    # A stream has no end, so its restart is over when the driver runs.
    if phase == "Running" and document["spec"].get("mode") == "Streaming":
        return Seen(request, "Succeeded", f"{name} runs")
    return Seen(request, "Running", f"{name} is {str(phase or 'not created').lower()}")


def _ended(request: Request, outcome: str, message: str) -> Seen:
    first = (message.splitlines() or [""])[0]
    name = request.run or request.verb
    return Seen(
        request, "Succeeded" if outcome in _GOOD else "Failed", f"{name} {outcome}{': ' if first else ''}{first}"
    )


def _why_it_waits(document: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if pausing.is_paused(document):
        return "waits: the resource is paused"
    if (document.get("spec") or {}).get("suspend"):
        return "waits: the resource is suspended"
    for name in ("Stalled", "Ready", "CompactionCurrent"):
        one = conditions.find(status, name)
        if one is not None and one.get("status") == ("True" if name == "Stalled" else "False"):
            return f"waits: {one.get('reason')}: {one.get('message') or 'no message'}"
    return "waits for the operator"
