"""Requests to the operator: annotations, which GitOps does not touch, and the two changes of a spec that a user may want at once.

A request is `persistshard.io/request-<verb>: <token>`. The operator handles each token once, so a repeated patch changes nothing.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer
import yaml
from persist_engine.base.errors import InvalidUsage

from persist_operator.api import conditions, names, pausing
from persist_operator.api.redact import one_line
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK, Kind, Resource
from persist_operator.kubectl import waiting
from persist_operator.kubectl.completion import complete_any, complete_shard, complete_sink
from persist_operator.kubectl.options import Ended, NotFound, Session, clustered

#: Exit codes of --wait: the run failed; the time ran out, and the run may continue.
EXIT_FAILED, EXIT_TIMEOUT = 1, 2
_TIMEOUT_S = 600.0
_GITOPS = "A GitOps tool that owns the field reverts it at its next sync: change the field in its source to keep it."

ShardName = Annotated[str, typer.Argument(help="Name of the PersistShard.", autocompletion=complete_shard)]
SinkName = Annotated[str, typer.Argument(help="Name of the SparkSink.", autocompletion=complete_sink)]
AnyName = Annotated[
    str, typer.Argument(help="Name of a shard or a sink; pshard/NAME or ssink/NAME.", autocompletion=complete_any)
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the run has ended: exit code 0 done, 1 failed, 2 too late.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="With --wait: how long.")]


def _shard_verb(verb: str, what: str) -> Any:
    def command(session: Session, name: ShardName, *, wait: Wait = False, timeout: Timeout = _TIMEOUT_S) -> None:
        _request(session, PERSIST_SHARD, session.shard(name), verb, wait_s=timeout if wait else None)

    command.__doc__ = f"""Request {what} of a shard now, due or not.

    Example: kubectl persist {"orphans" if verb == "orphan-scan" else verb} flights --wait
    """
    return clustered(command)


compact = _shard_verb("compact", "a compaction")
gc = _shard_verb("gc", "a garbage collection")
rollup = _shard_verb("rollup", "a rollup")
verify = _shard_verb("verify", "a verification")
orphans = _shard_verb("orphan-scan", "a scan for orphans")


@clustered
def accept_log(session: Session, name: ShardName, *, wait: Wait = False, timeout: Timeout = _TIMEOUT_S) -> None:
    """Accept the log of a shard as it is.

    For a shard whose consensus store lost versions. What was lost stays lost.

    Example: kubectl persist accept-log flights
    """
    _request(session, PERSIST_SHARD, session.shard(name), "accept-log", wait_s=timeout if wait else None)


@clustered
def restart(session: Session, name: SinkName, *, wait: Wait = False, timeout: Timeout = _TIMEOUT_S) -> None:
    """Run a sink again.

    A failed run continues under its id; otherwise another run begins. --wait on a stream waits until its driver runs.

    Example: kubectl persist restart load --wait
    """
    _request(session, SPARK_SINK, session.sink(name), "restart", wait_s=timeout if wait else None)


@clustered
def promote(session: Session, name: SinkName, *, wait: Wait = False, timeout: Timeout = _TIMEOUT_S) -> None:
    """Let the new revision of a stream take over now.

    Example: kubectl persist promote load --wait
    """
    document = session.sink(name)
    if not (document.get("status") or {}).get("rollout"):
        raise InvalidUsage(f"sparksink/{name} has no rollout: there is nothing to promote")
    _request(session, SPARK_SINK, document, "promote", wait_s=timeout if wait else None)


@clustered
def approve(
    session: Session,
    name: ShardName,
    plan_id: Annotated[str | None, typer.Option("--id", help="Approve only if this plan still waits.")] = None,
    *,
    wait: Wait = False,
    timeout: Timeout = _TIMEOUT_S,
) -> None:
    """Approve what the operator would do next on a shard.

    `kubectl persist plan NAME` shows it. An approval is for exactly one plan.

    Example: kubectl persist approve flights --id 4f2c1a90
    """
    document = session.shard(name)
    status = document.get("status") or {}
    plan = status.get("plan") or {}
    waits = str(plan.get("id") or "")
    if not waits:
        raise NotFound(f"persistshard/{name} has no plan that waits for an approval")
    if plan_id is not None and plan_id != waits:
        raise InvalidUsage(
            f"persistshard/{name} has another plan by now: {waits}; `kubectl persist plan {name}` shows it"
        )
    before = frozenset(str(one.get("id")) for one in status.get("history") or ())
    request = waiting.Request(verb="approve", token=waits, kind=str(plan.get("type") or "run"), before=before)
    if plan.get("approved"):
        typer.echo(f"persistshard/{name} plan {waits} needs no approval, or has one")
        _wait(session, PERSIST_SHARD, document, request, timeout if wait else None)
        return
    _request(session, PERSIST_SHARD, document, "approve", wait_s=timeout if wait else None, request=request)


@clustered
def suspend(session: Session, name: AnyName) -> None:
    """Set spec.suspend: a shard gets no maintenance, and a sink's driver is stopped."""
    _suspend(session, name, suspended=True)


@clustered
def resume(session: Session, name: AnyName) -> None:
    """Take spec.suspend back."""
    _suspend(session, name, suspended=False)


suspend.__doc__ = f"{suspend.__doc__}\n\n{_GITOPS}\n\nExample: kubectl persist suspend pshard/flights"
resume.__doc__ = f"{resume.__doc__}\n\n{_GITOPS}\n\nExample: kubectl persist resume pshard/flights"


def _suspend(session: Session, name: str, *, suspended: bool) -> None:
    kind, document = session.either(name)
    own, word = document["metadata"]["name"], "suspended" if suspended else "resumed"
    if bool(document["spec"].get("suspend")) == suspended:
        typer.echo(f"{kind.kind.lower()}/{own} is {'suspended' if suspended else 'not suspended'} already")
        return
    if session.cluster.patch(kind, session.one_namespace, own, {"spec": {"suspend": suspended}}) is None:
        raise NotFound(f"{kind.kind} {own!r} was deleted meanwhile")
    typer.echo(f"{kind.kind.lower()}/{own} {word}")
    manager = _other_owner(document)
    if manager:
        typer.echo(f"note: {one_line(manager)} owns fields of this spec and may revert it at its next sync", err=True)


def _other_owner(document: Resource) -> str:
    """The name of a field manager other than kubectl that applies this spec; empty when there is none."""
    for entry in document["metadata"].get("managedFields") or ():
        manager = str(entry.get("manager", ""))
        is_spec = "f:spec" in (entry.get("fieldsV1") or {}) and not entry.get("subresource")
        if is_spec and not manager.startswith(("kubectl", names.MANAGER)):
            return manager
    return ""


@clustered
def adopt(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the PersistShard; created when there is none.")],
    shard_id: Annotated[str, typer.Option("--shard-id", help="The shard: s and a UUID.")],
    profile: Annotated[str | None, typer.Option("--profile", help="Storage profile; default: the operator's.")] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be created or set, for GitOps.")] = False,
) -> None:
    """Make a resource the owner of a shard that exists.

    Creates the resource, or sets the annotation take-over on the one of this name. The operator decides whether the owner may change
    (docs/operations.md, on owners).

    Example: kubectl persist adopt flights --shard-id s0d6f3c1e-5b7a-4c55-9f5e-3d1f6f0a7b11
    """
    found = session.cluster.get(PERSIST_SHARD, session.one_namespace, name)
    manifest: Resource = {
        "apiVersion": names.API_VERSION,
        "kind": "PersistShard",
        "metadata": {"name": name, "namespace": session.one_namespace},
        "spec": {"shardId": shard_id, **({"storageProfile": profile} if profile else {})},
    }
    if found is None:
        if dry_run:
            session.cluster.try_create(PERSIST_SHARD, manifest)
            typer.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)
            return
        if not session.cluster.create(PERSIST_SHARD, manifest):
            raise InvalidUsage(f"another client created PersistShard {name!r} meanwhile: run the command again")
        typer.echo(f"persistshard/{name} created; `kubectl persist status {name}` shows whether it owns the shard")
        return
    status, wanted = found.get("status") or {}, found["spec"].get("shardId")
    if status.get("shardId") == shard_id and not conditions.is_true(status, "Stalled"):
        typer.echo(f"persistshard/{name} owns {shard_id} already")
        return
    if wanted not in {None, shard_id} or (wanted is None and status.get("shardId") not in {None, shard_id}):
        raise InvalidUsage(
            f"persistshard/{name} is for shard {wanted or status.get('shardId')}: adopt under another name"
        )
    change = {"metadata": {"annotations": {names.ANNOTATION_TAKE_OVER: shard_id}}}
    if dry_run:
        typer.echo(yaml.safe_dump(change, sort_keys=False), nl=False)
        return
    if session.cluster.patch(PERSIST_SHARD, session.one_namespace, name, change) is None:
        raise NotFound(f"PersistShard {name!r} was deleted meanwhile")
    typer.echo(f"persistshard/{name} asks to take over {shard_id}; `kubectl persist status {name}` shows the answer")


def _request(
    session: Session,
    kind: Kind,
    document: Resource,
    verb: str,
    *,
    wait_s: float | None,
    request: waiting.Request | None = None,
) -> None:
    """Set the annotation, and with `wait_s` wait until the run has ended."""
    name = document["metadata"]["name"]
    request = request or waiting.Request(verb=verb, token=str(session.env.now_ms()))
    change = {"metadata": {"annotations": {f"{names.REQUEST_PREFIX}{verb}": request.token}}}
    if session.cluster.patch(kind, session.one_namespace, name, change) is None:
        raise NotFound(f"{kind.kind} {name!r} was deleted meanwhile")
    typer.echo(f"{kind.kind.lower()}/{name} {verb} requested")
    if pausing.is_paused(document):
        typer.echo(
            f"note: it is paused, so the operator handles it without the annotation {names.ANNOTATION_PAUSED}", err=True
        )
    elif (document.get("spec") or {}).get("suspend"):
        typer.echo(f"note: it is suspended, so the operator handles it after `kubectl persist resume {name}`", err=True)
    _wait(session, kind, document, request, wait_s)


def _wait(session: Session, kind: Kind, document: Resource, request: waiting.Request, wait_s: float | None) -> None:
    """Show the progress of the request. Ends the command with 1 when its run failed, and with 2 when the time ran out."""
    if wait_s is None:
        return
    name, shown, uid = document["metadata"]["name"], "", document["metadata"].get("uid")
    until_s = session.env.monotonic_s() + wait_s
    with contextlib.closing(session.cluster.follow(kind, session.one_namespace, name, until_s=until_s)) as states:
        for state in states:
            same = state is not None and state["metadata"].get("uid") == uid
            seen = waiting.seen(state if same else None, request)
            request, text = seen.request, one_line(seen.text)
            if seen.ended:
                typer.echo(f"{kind.kind.lower()}/{name} {request.verb}: {text}")
                if seen.stage != "Succeeded":
                    raise Ended(EXIT_FAILED)
                return
            if text != shown:
                typer.echo(text, err=True)
                shown = text
    typer.echo(f"error: the time ran out after {wait_s:g} seconds: {shown}; the run may continue", err=True)
    raise Ended(EXIT_TIMEOUT)
