"""Describes a resource: its readiness, contents or progress, conditions, runs and spec. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from persist_engine.base.wording import counted, sized

from persist_operator.api import conditions, times
from persist_operator.api.redact import printable
from persist_operator.views import tables

_INDENT = "  "


def description(document: Mapping[str, Any], *, now_ms: int, width: int | None) -> list[str]:
    """The lines, without control characters. Conditions and runs are clipped to `width`; all other lines are whole."""
    metadata, status = document["metadata"], document.get("status") or {}
    ready = conditions.find(status, "Ready") or {
        "status": "Unknown",
        "reason": "Pending",
        "message": "not reconciled yet",
    }
    state = {"True": "ready", "False": "not ready"}.get(ready["status"], "not known yet")
    old = tables.age(times.to_ms(metadata.get("creationTimestamp")), now_ms)
    lines = [f"{document['kind']}/{metadata['name']} is {state}: {ready['reason']}"]
    lines += [_INDENT + line for line in str(ready.get("message", "")).splitlines()]
    facts = [("Created", f"{old} ago, generation {metadata['generation']}")]
    facts += _shard_facts(status) if document["kind"] == "PersistShard" else _sink_facts(document["spec"], status)
    lines += ["", *_two_columns(facts)]
    within = None if width is None else width - len(_INDENT)
    lines += _section("Conditions", _conditions(status, now_ms, within))
    runs = tables.runs_table([document], (), wide=False, now_ms=now_ms, width=within)
    lines += _section("Runs", runs if status.get("history") else ["none yet"])
    spec = yaml.safe_dump(document["spec"], sort_keys=False, width=100, default_flow_style=False)
    lines += _section("Spec", spec.splitlines())
    return [printable(line.replace("\n", " ")) for line in lines]  # names of columns may contain anything


def _two_columns(facts: Sequence[tuple[str, str]]) -> list[str]:
    size = max(len(name) for name, _ in facts) + 3
    return [f"{name:<{size}}{text}" for name, text in facts if text]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(_INDENT + line for line in lines)]


def _conditions(status: Mapping[str, Any], now_ms: int, width: int | None) -> list[str]:
    rows = [
        [
            one["type"],
            one["status"],
            one["reason"],
            tables.age(times.to_ms(one["lastTransitionTime"]), now_ms),
            one["message"],
        ]
        for one in status.get("conditions", ())
    ]
    return (
        tables.text_table(["TYPE", "STATUS", "REASON", "FOR", "MESSAGE"], rows, width=width) if rows else ["none yet"]
    )


def _shard_facts(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    store, schema = status.get("store", {}), status.get("schema", {})
    facts = [("Shard", status.get("shardId", "not assigned yet"))]
    facts += [("Blobs", store.get("blob", "")), ("Consensus", store.get("consensus", ""))]
    facts += [("Key", schema.get("key", "")), ("Value", schema.get("value", ""))]
    frontiers, holds, stored = status.get("frontiers", {}), status.get("holds", {}), status.get("storage", {})
    if stored:
        parts = ", ".join(
            [counted(stored["runs"], "run"), counted(stored["parts"], "part"), sized(stored["liveBytes"])]
        )
        facts.append(
            ("Holds", f"{counted(stored['updates'], 'update')} in {counted(stored['batches'], 'batch')} ({parts})")
        )
        log = f"{counted(stored['liveDiffs'], 'version')} in the log, newest rollup at v{stored['latestRollupSeqno']}"
        facts.append(("State", f"v{frontiers.get('seqno')}, {log}"))
    if frontiers:
        readable = tables.instant(frontiers["since"]) if "since" in frontiers else "none: closed"
        written = tables.instant(frontiers["upper"]) if "upper" in frontiers else "closed"
        facts += [("Readable from", readable), ("Written up to", written)]
    if "amplificationPercent" in stored and stored["amplificationPercent"] > 100:
        facts.append(("Amplification", f"{stored['amplificationPercent']}% of the updates that a merge would leave"))
    facts.append(("Next", _next(status.get("plan", {}))))
    if holds:
        facts.append(("Used by", f"{counted(holds['readers'], 'reader')}, {counted(holds['writers'], 'writer')}"))
    return facts


def _next(plan: Mapping[str, Any]) -> str:
    """The run that the operator would start next; empty when nothing is due."""
    if not plan:
        return ""
    size = f", {sized(plan['estimatedBytes'])}" if "estimatedBytes" in plan else ""
    took = f", about {tables.duration(1000 * plan['estimatedSeconds'])}" if "estimatedSeconds" in plan else ""
    waits = "" if plan["approved"] else "; waits for an approval"
    return f"{plan['type']} {plan['id']}: {plan['reason']}{size}{took}{waits}"


def _function(python: Mapping[str, Any]) -> str:
    code = f" of ConfigMap {python['configMapName']}" if "configMapName" in python else ""
    return f"{python['module']}.{python.get('function', 'load')}{code}"


def _sink_facts(spec: Mapping[str, Any], status: Mapping[str, Any]) -> list[tuple[str, str]]:
    source, envelope = spec["input"], spec["envelope"]
    what = source.get("format", {}).get("name") or source["type"]
    where = source.get("format", {}).get("options", {}).get("path", "")
    if "shard" in source:
        what, where = f"PersistShard/{source['shard']['name']}", ""
    if "python" in source:
        what, where = _function(source["python"]), ""
    columns = {"timestampColumn": " at the times in", "diffColumn": " as often as", "orderColumn": " in the order of"}
    by = "".join(f"{words} {envelope[name]}" for name, words in columns.items() if name in envelope)
    when = f"at `{spec['schedule']['cron']}`" if "schedule" in spec else "once"
    facts = [("Reads", f"{what} {where}".strip())]
    verb, of = ("Compares", "with") if spec.get("writeMode") == "ReadOnly" else ("Writes", "to")
    facts.append((verb, f"{envelope['type']} {of} PersistShard/{spec['shardRef']['name']}{by}, {when}"))
    progress, schedule, failure = status.get("progress", {}), status.get("schedule", {}), status.get("lastFailure", {})
    if progress:
        rows, updates = progress.get("rowsRead", 0), progress.get("updatesWritten", 0)
        upper = f", up to {tables.instant(progress['upper'])}" if "upper" in progress else ""
        if "inputUpper" in progress:
            facts.append(("Has read", f"all before {tables.instant(progress['inputUpper'])}"))
        errors = f" ({counted(progress['errors'], 'error')})" if progress.get("errors") else ""
        did = f"{counted(updates, 'update')} written{upper}"
        if "missing" in progress:
            did = f"compared with the shard{upper}: {progress['missing']} missing, {progress['extra']} too many"
        facts.append(("Last run", f"{counted(rows, 'row')} read{errors}, {did}"))
    facts.append(("Next run", schedule.get("nextTime", "")))
    if "nextAttemptTime" in status:
        facts.append(("Next attempt", status["nextAttemptTime"]))
    if failure:
        first = (failure.get("message") or "no message").splitlines()[0]
        facts.append(("Last failure", f"{failure['time']} {failure['podName']} {failure['class']}: {first}"))
    return facts
