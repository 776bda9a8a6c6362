"""The progress while `persist local up` runs: one line for each run, and for each resource that is not ready. Pure.

Tables and descriptions are in the room `views`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persist_engine.base.wording import sized

from persist_operator.api import conditions
from persist_operator.api.sink_status import RunningProgress
from persist_operator.local.processes import Child
from persist_operator.views.tables import age, text_table


def progress(
    documents: Iterable[Mapping[str, Any]], children: Sequence[Child], *, now_ms: int, width: int
) -> list[str]:
    """The resources that are not ready, and the children that run for them."""
    rows = []
    running = [child for child in children if child.running]
    for document in documents:
        owner, status = f"{document['kind']}/{document['metadata']['name']}", document.get("status") or {}
        ready = conditions.find(status, "Ready") or {}
        own = [child for child in running if child.owner == owner]
        for child in own:
            rows.append([child.name, _kind(child), age(child.started_ms, now_ms), _last_event(child)])
        if ready.get("status") != "True" and not own:
            waits = status.get("driver", {}).get("phase") == "Creating"
            why = "waits for a free place" if waits else str(ready.get("message", ""))
            rows.append([owner, "" if waits else str(ready.get("reason", "Pending")), "", why])
    return text_table(["", "", "", ""], rows, width=width)[1:] if rows else []


def _kind(child: Child) -> str:
    return "sink" if child.labels["kind"] == "driver" else child.labels["kind"]


def _last_event(child: Child) -> str:
    """The progress that a driver reports, or before that the newest event in its log. For maintenance, the reason of the run."""
    if child.labels["kind"] != "driver":
        return child.labels.get("reason", "")
    shown = RunningProgress.parse(child.progress)
    if shown is not None:
        return _numbers(shown)
    for line in reversed(child.log_tail(50).splitlines()):
        try:
            event = json.loads(line)
            name = event["event"]
        except (ValueError, TypeError, KeyError):
            continue
        if name == "stage":
            return f"stage {event.get('stage')}: {event.get('done')} of {event.get('tasks')} tasks"
        return {"starting": "starting Spark", "minted": "reading", "staged": "appending"}.get(name, str(name))
    return "starting"


def _numbers(shown: RunningProgress) -> str:
    numbers = [
        f"{shown.tasks_done or 0} of {shown.tasks} tasks" if shown.tasks else "",
        "" if shown.batches is None else f"{shown.batches:,} batches",
        f"{shown.rows_read:,} rows" if shown.rows_read else "",
        f"{shown.errors:,} errors" if shown.errors else "",
        f"{sized(shown.bytes_read)} read" if shown.bytes_read else "",
        "" if shown.lag_seconds is None else f"lag {shown.lag_seconds}s",
    ]
    return f"{str(shown.stage).lower()}: {', '.join(filter(None, numbers))}".removesuffix(": ")
