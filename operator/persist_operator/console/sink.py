"""The view of one sink's page. Pure: the resource, its log, its events and the time in; texts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from persist_operator.api import pausing
from persist_operator.api.redact import redact
from persist_operator.console.fleet import Readiness, mode_of
from persist_operator.console.port import Event, Log, Resource, Unseen
from persist_operator.console.shard import ConditionRow, condition_rows, outcome_tone, took
from persist_operator.console.texts import ago, block, due, grouped, instant, items, number, seconds, size, text

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """An attempt that ended."""

    attempt: str
    run: str
    revision: str
    outcome: str
    tone: str
    when: str
    took: str
    cause: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPage:
    """The page. `done` and `tasks` are numbers of the running stage; 0 without one."""

    namespace: str
    name: str
    shard: str
    ready: Readiness
    facts: Facts
    progress: Facts
    running: Facts
    done: int
    tasks: int
    failure: Facts
    failure_message: str
    rollout: Facts
    history: tuple[AttemptRow, ...]
    conditions: tuple[ConditionRow, ...]
    events: tuple[Event, ...]
    events_unseen: str
    log: Log


def sink_page(resource: Resource, log: Log, events: Sequence[Event] | Unseen, *, now_ms: int) -> SinkPage:
    """The page of `resource`."""
    metadata, status, spec = block(resource, "metadata"), block(resource, "status"), block(resource, "spec")
    running, failure = block(status, "progress", "running"), block(status, "lastFailure")
    return SinkPage(
        namespace=text(metadata.get("namespace")),
        name=text(metadata.get("name")),
        shard=text(block(spec, "shardRef").get("name")),
        ready=Readiness.of(resource),
        facts=_given(_facts(resource, now_ms)),
        progress=_given(_progress(block(status, "progress"), block(status, "freshness"), now_ms)),
        running=_given(_running(running, now_ms)),
        done=min(number(running.get("tasksDone")) or 0, number(running.get("tasks")) or 0),
        tasks=number(running.get("tasks")) or 0,
        failure=_given(
            [
                ("When", ago(failure.get("time"), now_ms)),
                ("Cause", text(failure.get("class"))),
                ("Reason", text(failure.get("reason"))),
                ("Exit code", text(failure.get("exitCode"))),
                ("Pod", text(failure.get("podName"))),
            ]
        ),
        failure_message=text(failure.get("message")),
        rollout=_given(_rollout(block(status, "rollout"), now_ms)),
        history=tuple(_attempt(one, now_ms) for one in items(status.get("history"))),
        conditions=tuple(condition_rows(status, now_ms)),
        events=() if isinstance(events, Unseen) else tuple(events),
        events_unseen=events.why if isinstance(events, Unseen) else "",
        # The driver hides secrets in its output, but its other containers, and programs that it starts, may not.
        log=replace(log, text=redact(log.text)),
    )


def _given(facts: Sequence[tuple[str, str]]) -> Facts:
    return tuple((name, value) for name, value in facts if value)


def _facts(resource: Resource, now_ms: int) -> list[tuple[str, str]]:
    status, spec = block(resource, "status"), block(resource, "spec")
    source, driver, run, ticks = (
        block(spec, "input"),
        block(status, "driver"),
        block(status, "run"),
        block(status, "schedule"),
    )
    function = block(source, "python")
    reads = text(block(source, "format").get("name")) or text(function.get("module")) or text(source.get("type"))
    shard = text(block(source, "shard").get("name"))
    executors = block(status, "executors")
    return [
        ("Reads", f"shard {shard}" if shard else reads),
        ("Writes", f"{text(block(spec, 'envelope').get('type'))} to {text(block(spec, 'shardRef').get('name'))}"),
        ("Mode", mode_of(resource)),
        ("Paused", "yes" if pausing.is_paused(resource) else ""),
        ("Suspended", "yes" if spec.get("suspend") is True else ""),
        ("Revision", text(status.get("activeRevision"))),
        ("Run", f"{text(run.get('number'))} {text(run.get('state'))}".strip()),
        ("Attempt", text(status.get("attempt"))),
        ("Driver", f"{text(driver.get('podName'))} {text(driver.get('phase'))}".strip()),
        ("Executors", f"{grouped(executors.get('running'))} running" if "running" in executors else ""),
        ("Failures in a row", grouped(status.get("consecutiveFailures"))),
        ("Next attempt", due(status.get("nextAttemptTime"), now_ms)),
        ("Last tick", ago(ticks.get("lastTime"), now_ms)),
        ("Next tick", due(ticks.get("nextTime"), now_ms)),
        ("Last success", ago(ticks.get("lastSuccessTime"), now_ms)),
        ("Created", ago(block(resource, "metadata").get("creationTimestamp"), now_ms)),
    ]


def _progress(progress: Mapping[str, Any], freshness: Mapping[str, Any], now_ms: int) -> list[tuple[str, str]]:
    return [
        ("Written up to", instant(progress["upper"] or None) if "upper" in progress else ""),
        ("Has read up to", instant(progress["inputUpper"] or None) if "inputUpper" in progress else ""),
        ("Rows read", grouped(progress.get("rowsRead"))),
        ("Errors", grouped(progress.get("errors"))),
        ("Updates written", grouped(progress.get("updatesWritten"))),
        ("Missing", grouped(progress.get("missing"))),
        ("Too many", grouped(progress.get("extra"))),
        ("Last commit", ago(progress.get("lastCommitTime"), now_ms)),
        ("Has the input as of", text(freshness.get("time"))),
    ]


def _running(running: Mapping[str, Any], now_ms: int) -> list[tuple[str, str]]:
    tasks = number(running.get("tasks"))
    return [
        ("Stage", text(running.get("stage"))),
        ("Tasks", f"{grouped(running.get('tasksDone')) or '0'} of {grouped(tasks)}" if tasks else ""),
        ("Lag", seconds(running.get("lagSeconds"))),
        ("Batches", grouped(running.get("batches"))),
        ("Rows read", grouped(running.get("rowsRead"))),
        ("Bytes read", size(running.get("bytesRead"))),
        ("Bytes shuffled", size(running.get("shuffleBytes"))),
        ("Time in tasks", seconds(running.get("taskSeconds"))),
        ("Of it in garbage collection", seconds(running.get("gcSeconds"))),
        ("Updates written", grouped(running.get("updatesWritten"))),
        ("Errors", grouped(running.get("errors"))),
        ("Compared", grouped(running.get("compared"))),
        ("Missing", grouped(running.get("missing"))),
        ("Too many", grouped(running.get("extra"))),
        ("Written up to", instant(running["upper"] or None) if "upper" in running else ""),
        ("Observed", ago(running.get("observedTime"), now_ms)),
    ]


def _rollout(rollout: Mapping[str, Any], now_ms: int) -> list[tuple[str, str]]:
    if not rollout:
        return []
    revisions = f"{text(rollout.get('from'))} → {text(rollout.get('to'))}" if rollout.get("to") else ""
    return [
        ("State", text(rollout.get("state"))),
        ("Revisions", revisions),
        ("Began", ago(rollout.get("startTime"), now_ms)),
        ("Promoted", ago(rollout.get("promoteTime"), now_ms)),
        ("Lag", seconds(rollout.get("lagSeconds"))),
        ("Compared", grouped(rollout.get("compared"))),
        ("Missing", grouped(rollout.get("missing"))),
        ("Too many", grouped(rollout.get("extra"))),
        ("Failures", grouped(rollout.get("failures"))),
        ("Message", text(rollout.get("message"))),
    ]


def _attempt(entry: Mapping[str, Any], now_ms: int) -> AttemptRow:
    outcome = text(entry.get("outcome"))
    return AttemptRow(
        attempt=text(entry.get("attempt")),
        run=text(entry.get("run")),
        revision=text(entry.get("revision")),
        outcome=outcome,
        tone=outcome_tone(outcome),
        when=ago(entry.get("endTime"), now_ms),
        took=took(entry),
        cause=text(entry.get("class")),
        message=text(entry.get("message")),
    )
