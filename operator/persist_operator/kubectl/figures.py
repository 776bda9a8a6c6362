"""The figures of a resource that commands show: lag, debt, holds, plan, next and last runs, refusals. Pure.

Renders the fields of a status. A field that an operator of another version does not write is absent, which is not an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persist_engine.base.wording import counted, sized

from persist_operator.api import conditions, times
from persist_operator.views.tables import age, duration, instant

Json = Mapping[str, Any]
#: Conditions that the line of Ready repeats, or that are good when they are False.
_NOT_SHOWN = {"Ready", "Reconciling", "Stalled", "Suspended", "Running", "DeletionBlocked"}


def status_of(document: Json) -> Json:
    """The status; empty before the operator wrote one."""
    found: Json = document.get("status") or {}
    return found


def ready(document: Json) -> dict[str, str]:
    """Status, reason and message of Ready; Unknown before the operator wrote one."""
    one = conditions.find(status_of(document), "Ready") or {}
    return {
        "ready": str(one.get("status", "Unknown")),
        "reason": str(one.get("reason", "Pending")),
        "message": str(one.get("message", "" if one else "not reconciled yet")),
    }


def problems(document: Json) -> list[dict[str, str]]:
    """Conditions other than Ready that are False: refused creations, debts, holds."""
    return [
        {"type": str(one.get("type")), "reason": str(one.get("reason", "")), "message": str(one.get("message", ""))}
        for one in status_of(document).get("conditions") or ()
        if one.get("status") == "False" and one.get("type") not in _NOT_SHOWN
    ]


def lag_seconds(document: Json) -> int | None:
    """How far the shard's upper, or the sink's shard, is behind now; None when the status does not have it."""
    status = status_of(document)
    if document.get("kind") == "PersistShard":
        lag = (status.get("frontiers") or {}).get("upperLagSeconds")
    else:
        lag = ((status.get("progress") or {}).get("running") or {}).get("lagSeconds")
    return lag if isinstance(lag, int) else None


def lag(document: Json) -> str:
    """The lag in words; empty when it is unknown. An upper ahead of now has no lag."""
    seconds = lag_seconds(document)
    return "" if seconds is None else duration(1000 * max(0, seconds))


def contents(document: Json) -> str:
    """Upper, lag and size of a shard on one line; empty before the first inspection."""
    status = status_of(document)
    frontiers, stored = status.get("frontiers") or {}, status.get("storage") or {}
    upper = frontiers.get("upper")
    behind = lag(document)
    said = [
        "" if upper is None else f"written up to {instant(upper, with_number=False)}" if upper else "closed",
        f"lag {behind}" if behind else "",
        counted(stored["batches"], "batch") if "batches" in stored else "",
        sized(stored["liveBytes"]) if "liveBytes" in stored else "",
        f"v{frontiers['seqno']}" if "seqno" in frontiers else "",
    ]
    return ", ".join(filter(None, said))


def debt(document: Json, now_ms: int) -> str:
    """The outstanding maintenance, and the deadline of an owed deletion; empty when there is none."""
    status = status_of(document)
    owed, stored = status.get("debt") or {}, status.get("storage") or {}
    said = [
        counted(stored["uncompactedBatches"], "uncompacted batch") if stored.get("uncompactedBatches") else "",
        f"{sized(owed['compactionBytes'])} to compact" if owed.get("compactionBytes") else "",
        f"{counted(owed['gcSeqnos'], 'version')} to collect" if owed.get("gcSeqnos") else "",
        deadline(document, now_ms),
    ]
    return ", ".join(filter(None, said))


def deadline(document: Json, now_ms: int) -> str:
    """The deletion deadline and its distance; empty when no deletion is owed."""
    text = (status_of(document).get("debt") or {}).get("deadlineTime")
    at_ms = times.to_ms(text)
    if at_ms is None:
        return ""
    away = f"in {duration(at_ms - now_ms)}" if at_ms >= now_ms else f"missed by {duration(now_ms - at_ms)}"
    return f"deadline {text} ({away})"


def holds(document: Json) -> list[Json]:
    """The readers that hold since back."""
    return list((status_of(document).get("holds") or {}).get("blocking") or ())


def held(hold: Json, now_ms: int) -> str:
    """How long a reader has held since back; empty when the status does not have it."""
    seconds = hold.get("heldSeconds")
    if isinstance(seconds, int):
        return duration(1000 * seconds)
    since = times.to_ms(hold["since"]) if isinstance(hold.get("since"), str) else None
    return age(since, now_ms)


def hold_line(hold: Json, now_ms: int) -> str:
    """One reader in words."""
    host = hold.get("host") or hold.get("hostname")
    said = [
        f"{hold.get('id', '?')}",
        f"`{hold['purpose']}`" if hold.get("purpose") else "",
        f"on {host}" if host else "",
        f"for {age_text}" if (age_text := held(hold, now_ms)) else "",
        f"({hold['kind']})" if hold.get("kind") else "",
    ]
    return " ".join(filter(None, said))


def used_by(document: Json) -> str:
    """Counts of readers and writers; empty before the first inspection."""
    found = status_of(document).get("holds") or {}
    said = [counted(int(found[f"{one}s"]), one) for one in ("reader", "writer") if f"{one}s" in found]
    return ", ".join(said)


def plan(document: Json) -> Json:
    """The run that the operator would start next; empty when there is none."""
    found: Json = status_of(document).get("plan") or {}
    return found


def plan_line(found: Json) -> str:
    """A plan in words."""
    if not found:
        return ""
    size = f", about {sized(found['estimatedBytes'])}" if isinstance(found.get("estimatedBytes"), int) else ""
    long = (
        f", about {duration(1000 * found['estimatedSeconds'])}"
        if isinstance(found.get("estimatedSeconds"), int)
        else ""
    )
    on = f" on {found['runner']}" if found.get("runner") else ""
    state = ", waits for approval" if found.get("approved") is False else ""
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"{found.get('id', '?')} {found.get('type', 'run')}{on}{size}{long}{state}{why}"


def next_runs(document: Json) -> dict[str, str]:
    """By kind of maintenance, or `run` of a sink: the time before which no run starts."""
    status = status_of(document)
    if document.get("kind") != "PersistShard":
        at = (status.get("schedule") or {}).get("nextTime") or status.get("nextAttemptTime")
        return {"run": str(at)} if at else {}
    blocks = status.get("maintenance") or {}
    return {kind: str(one["nextRunTime"]) for kind, one in sorted(blocks.items()) if (one or {}).get("nextRunTime")}


def waits(document: Json) -> dict[str, str]:
    """By kind of maintenance: the reason that holds back a wanted run, such as WindowClosed."""
    blocks = status_of(document).get("maintenance") or {}
    return {kind: str(one["waitReason"]) for kind, one in sorted(blocks.items()) if (one or {}).get("waitReason")}


def going(document: Json) -> list[str]:
    """Names of the maintenance runs of a shard that have not settled."""
    blocks = (status_of(document).get("maintenance") or {}).values()
    return [str(one["jobName"]) for one in blocks if one.get("jobName") and one.get("jobName") != one.get("settledJob")]


def last_run(document: Json) -> Json:
    """The newest ended run; empty when there is none."""
    history: Sequence[Json] = status_of(document).get("history") or ()
    return history[0] if history else {}


def cpu(seconds: object) -> str:
    """`1.5s`, `3m`: CPU time of a run; empty when its report had none."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return ""
    return f"{seconds:.1f}s" if seconds < 120 else duration(round(1000 * seconds))


def took(run: Json) -> str:
    """How long a run took; empty when this is unknown."""
    began, ended = times.to_ms(run.get("startTime")), times.to_ms(run.get("endTime"))
    return "" if began is None or ended is None else duration(ended - began)


def pods_of(pods: Iterable[Json], label: str, name: str) -> list[Json]:
    """The pods with this value of the label, by name."""
    found = [one for one in pods if (one["metadata"].get("labels") or {}).get(label) == name]
    return sorted(found, key=lambda one: str(one["metadata"]["name"]))


def pod_facts(pod: Json) -> dict[str, str]:
    """Role, phase and the first reason why a pod does not run."""
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    role = labels.get("persistshard.io/role") or labels.get("persistshard.io/kind") or ""
    reasons = [status.get("reason")]
    for one in status.get("containerStatuses") or ():
        state = one.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        reasons += [waiting.get("reason"), ended.get("reason") if ended.get("exitCode") else None]
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            reasons.append(one.get("reason"))
    return {
        "name": str(pod["metadata"]["name"]),
        "role": str(role),
        "phase": str(status.get("phase", "Unknown")),
        "reason": str(next(filter(None, reasons), "")),
        "node": str((pod.get("spec") or {}).get("nodeName") or ""),
    }
