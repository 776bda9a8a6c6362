"""`kubectl persist logs`: the log of a sink's newest driver, or of a shard's newest maintenance pod."""

from __future__ import annotations

from typing import Annotated

import typer
from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names, times
from persist_operator.api.redact import printable
from persist_operator.cluster.port import POD, Resource
from persist_operator.kubectl.completion import complete_any
from persist_operator.kubectl.options import NotFound, Session, clustered

_DRIVER = "driver"
_CONTAINERS = {names.DRIVER_CONTAINER, names.EXECUTOR_CONTAINER, names.MAINTENANCE_CONTAINER}
_LINES = 200


@clustered
def logs(
    session: Session,
    name: Annotated[
        str, typer.Argument(help="A sink, a shard, or one of their pods as pod/NAME.", autocompletion=complete_any)
    ],
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the container ends.")] = False,
    lines: Annotated[int, typer.Option("--tail", min=0, help="How many lines; 0 for all.")] = _LINES,
) -> None:
    """Show the log of a sink's driver or of a shard's last maintenance pod.

    Example: kubectl persist logs load -f
    """
    namespace = session.one_namespace
    prefix, slash, rest = name.rpartition("/")
    if slash and prefix.lower() in {"pod", "pods", "po"}:
        pod = rest
        chosen = session.cluster.get(POD, namespace, pod)
        if chosen is None:
            raise NotFound(f"no pod {pod!r} in namespace {namespace}")
    else:
        kind, document = session.either(name)
        own, is_sink = document["metadata"]["name"], kind.kind == "SparkSink"
        label = names.LABEL_SINK if is_sink else names.LABEL_SHARD
        found = session.cluster.find(POD, namespace, {label: own, names.LABEL_MANAGED_BY: names.MANAGER})
        chosen = newest_pod(found, driver=is_sink)
        if chosen is None:
            raise InvalidUsage(_no_pod(document, is_sink=is_sink))
        pod = chosen["metadata"]["name"]
        typer.echo(f"pod/{pod}", err=True)
    own = _own_container(chosen)
    for line in session.cluster.log_lines(namespace, pod, container=own, lines=lines or None, follow=follow):
        typer.echo(printable(line))


def newest_pod(pods: list[Resource], *, driver: bool) -> Resource | None:
    """The pod that was created last, for a sink only among its drivers; None when there is none. Equal times are ordered by name."""
    chosen = [
        one for one in pods if not driver or (one["metadata"].get("labels") or {}).get(names.LABEL_ROLE) == _DRIVER
    ]

    def order(pod: Resource) -> tuple[int, str]:
        return times.to_ms(pod["metadata"].get("creationTimestamp")) or 0, str(pod["metadata"]["name"])

    return max(chosen, key=order, default=None)


def _own_container(pod: Resource) -> str | None:
    """The operator's container in a pod; None in a pod without one."""
    found = [str(one.get("name")) for one in (pod.get("spec") or {}).get("containers") or ()]
    return next((one for one in found if one in _CONTAINERS), None)


def _no_pod(document: Resource, *, is_sink: bool) -> str:
    """The reason why there is no log, with the status' facts about the last run."""
    name, status = document["metadata"]["name"], document.get("status") or {}
    run = next(iter(status.get("history") or ()), None)
    what = "driver" if is_sink else "maintenance"
    if run is None:
        return f"{name} has no {what} pod, and had none: `kubectl persist status {name}` says what it waits for"
    message = f": {run['message']}" if run.get("message") else ""
    return f"{name} has no {what} pod any more; the last run {run.get('outcome', 'ended')} at {run.get('endTime', '?')}{message}"
