"""A shard with its sinks and pods, as a value for programs and as a tree for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persist_engine.base.wording import counted

from persist_operator.api import names, pausing
from persist_operator.api.redact import redact
from persist_operator.kubectl import figures
from persist_operator.views.tables import instant

Json = Mapping[str, Any]
_STATE = {"True": "ready", "False": "not ready"}


def shard_node(shard: Json, sinks: Iterable[Json], pods: Sequence[Json], *, now_ms: int) -> dict[str, Any]:
    """The shard, its sinks among `sinks`, and their pods among `pods`."""
    metadata, status = shard["metadata"], figures.status_of(shard)
    namespace, name = metadata.get("namespace"), metadata["name"]
    near = [one for one in pods if one["metadata"].get("namespace") == namespace]
    own = [
        one
        for one in sinks
        if one["metadata"].get("namespace") == namespace and one["spec"]["shardRef"]["name"] == name
    ]
    return {
        "kind": "PersistShard",
        "namespace": namespace,
        "name": name,
        **figures.ready(shard),
        "suspended": bool(shard["spec"].get("suspend")),
        "paused": pausing.is_paused(shard),
        "deleting": bool(metadata.get("deletionTimestamp")),
        "shardId": status.get("shardId"),
        "contents": figures.contents(shard),
        "upperLagSeconds": figures.lag_seconds(shard),
        "debt": {**(status.get("debt") or {})},
        "debtText": figures.debt(shard, now_ms),
        "usedBy": figures.used_by(shard),
        "holds": [{**one, "text": figures.hold_line(one, now_ms)} for one in figures.holds(shard)],
        "plan": {**figures.plan(shard)},
        "nextRuns": figures.next_runs(shard),
        "waits": figures.waits(shard),
        "running": figures.going(shard),
        "problems": figures.problems(shard),
        "pods": [figures.pod_facts(one) for one in figures.pods_of(near, names.LABEL_SHARD, name)],
        "sinks": [sink_node(one, near) for one in sorted(own, key=lambda one: str(one["metadata"]["name"]))],
    }


def sink_node(sink: Json, pods: Sequence[Json]) -> dict[str, Any]:
    """One sink and its pods."""
    status, name = figures.status_of(sink), sink["metadata"]["name"]
    rollout, failure = status.get("rollout") or {}, status.get("lastFailure") or {}
    return {
        "kind": "SparkSink",
        "namespace": sink["metadata"].get("namespace"),
        "name": name,
        "mode": sink["spec"].get("mode"),
        **figures.ready(sink),
        "suspended": bool(sink["spec"].get("suspend")),
        "paused": pausing.is_paused(sink),
        "deleting": bool(sink["metadata"].get("deletionTimestamp")),
        "lagSeconds": figures.lag_seconds(sink),
        "upper": (status.get("progress") or {}).get("upper"),
        "nextRuns": figures.next_runs(sink),
        "rollout": rollout.get("state"),
        "lastFailure": {key: failure[key] for key in ("class", "reason", "time", "message") if key in failure},
        "problems": figures.problems(sink),
        "pods": [figures.pod_facts(one) for one in figures.pods_of(pods, names.LABEL_SINK, name)],
    }


def lines(node: Json) -> list[str]:
    """The tree of one shard. No line has a control character or a secret."""
    children = [*node["sinks"], *node["pods"]]
    found = [_head(node), *(f"{'│' if children else ' '}  {line}" for line in _shard_facts(node))]
    for number, child in enumerate(children):
        last = number == len(children) - 1
        branch, stem = ("└─ ", "   ") if last else ("├─ ", "│  ")
        found += _sink_lines(child, branch, stem) if child.get("kind") == "SparkSink" else [branch + _pod_line(child)]
    return [redact(line).replace("\n", " ") for line in found]


def _head(node: Json) -> str:
    state = _STATE.get(node["ready"], "not known yet")
    marks = "".join(
        f" ({word})"
        for word, key in (("paused", "paused"), ("suspended", "suspended"), ("being deleted", "deleting"))
        if node[key]
    )
    return f"{node['kind']}/{node['name']} is {state}: {node['reason']}{marks}"


def _shard_facts(node: Json) -> list[str]:
    found = [node["message"]] if node["ready"] != "True" and node["message"] else []
    found += [node["contents"]] if node["contents"] else []
    found += [f"owes {node['debtText']}"] if node["debtText"] else []
    found += [f"used by {node['usedBy']}"] if node["usedBy"] else []
    found += [f"since is held back by {one['text']}" for one in node["holds"]]
    plan = figures.plan_line(node["plan"])
    found += [f"plan {plan}"] if plan else []
    found += [f"runs {', '.join(node['running'])}"] if node["running"] else []
    return found + _next(node) + _problems(node)


def _next(node: Json) -> list[str]:
    waits: Mapping[str, str] = node.get("waits") or {}
    times = {**dict.fromkeys(waits, ""), **{kind: f" not before {at}" for kind, at in node["nextRuns"].items()}}
    runs = [f"{kind}{at}{f' ({waits[kind]})' if kind in waits else ''}" for kind, at in times.items()]
    return [f"next {', '.join(runs)}"] if runs else []


def _problems(node: Json) -> list[str]:
    return [
        f"{one['type']} is False: {one['reason']}{': ' if one['message'] else ''}{one['message']}"
        for one in node["problems"]
    ]


def _sink_lines(node: Json, branch: str, stem: str) -> list[str]:
    facts = [node["message"]] if node["ready"] != "True" and node["message"] else []
    if node["upper"] is not None:
        facts.append(f"last run up to {instant(node['upper'], with_number=False)}")
    if node["lagSeconds"] is not None:
        facts.append(f"lag {counted(node['lagSeconds'], 'second')}")
    facts += [f"rollout {node['rollout']}"] if node["rollout"] else []
    if node["lastFailure"]:
        failure = node["lastFailure"]
        first = (str(failure.get("message") or "no message").splitlines() or [""])[0]
        facts.append(f"last failure {failure.get('time', '')} {failure.get('class', '')}: {first}")
    facts += _next(node) + _problems(node)
    bar = "│  " if node["pods"] else "   "
    found = [f"{branch}{_head(node)}", *(f"{stem}{bar}{fact}" for fact in facts)]
    for number, pod in enumerate(node["pods"]):
        found.append(f"{stem}{'└─ ' if number == len(node['pods']) - 1 else '├─ '}{_pod_line(pod)}")
    return found


def _pod_line(pod: Json) -> str:
    role = f" ({pod['role']})" if pod["role"] else ""
    reason = f": {pod['reason']}" if pod["reason"] else ""
    on = f" on {pod['node']}" if pod["node"] else ""
    return f"Pod/{pod['name']}{role} {pod['phase']}{reason}{on}"
