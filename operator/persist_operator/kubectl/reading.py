"""The engine's commands on a shard of the cluster, by the name of its resource: `read`, `deletions`, and the part of `holds --expire` that
needs the stores.

There are two ways to the stores. A command runs in this process, with the user's own credentials. status.store names the stores, unless
--blob and --consensus (or $PERSIST_BLOB and $PERSIST_CONSENSUS) do. With --pod, the command runs in a pod of the shard's namespace, which
has the image, the stores and the Secret of the shard's newest maintenance Job, and is deleted afterwards. The user needs the right to
create pods there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names, times
from persist_operator.api.redact import printable
from persist_operator.cluster.port import JOB, POD, Resource
from persist_operator.kubectl.completion import complete_shard
from persist_operator.kubectl.options import Ended, Session, clustered

_PANEL = "Store"
Blob = Annotated[
    str | None,
    typer.Option(
        "--blob", envvar="PERSIST_BLOB", rich_help_panel=_PANEL, help="URL of the blob store; default: of status.store."
    ),
]
Consensus = Annotated[
    str | None,
    typer.Option(
        "--consensus",
        envvar="PERSIST_CONSENSUS",
        rich_help_panel=_PANEL,
        help="URL of the consensus store; default: of status.store.",
    ),
]
InPod = Annotated[
    bool,
    typer.Option(
        "--pod", rich_help_panel=_PANEL, help="Run in a pod like the shard's maintenance pods, with their credentials."
    ),
]
#: The placeholder for the id of the shard in the arguments of a command.
SHARD = "{shard}"
#: The engine parses what follows the name.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_PURPOSE = "kubectl"
_POD_DEADLINE_S, _START_S = 3600, 300.0


@clustered
def read(
    session: Session,
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the PersistShard.", autocompletion=complete_shard)],
    *,
    blob: Blob = None,
    consensus: Consensus = None,
    pod: InPod = False,
) -> None:
    """Read a shard, with the options of `persist read` after the name: its contents, or with --from what changed.

    Example: kubectl persist read flights --as-of latest --limit 10
    """
    engine(session, session.shard(name), ["read", SHARD, *ctx.args], blob=blob, consensus=consensus, pod=pod)


@clustered
def deletions(
    session: Session,
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the PersistShard.", autocompletion=complete_shard)],
    *,
    blob: Blob = None,
    consensus: Consensus = None,
    pod: InPod = False,
) -> None:
    """Show which blobs of a shard were deleted, when and by which run, with the options of `persist admin deletions` after the name.

    Example: kubectl persist deletions flights --since -7d --blobs
    """
    command = ["admin", "deletions", SHARD, *ctx.args]
    engine(session, session.shard(name), command, blob=blob, consensus=consensus, pod=pod)


def engine(
    session: Session, shard: Resource, arguments: Sequence[str], *, blob: str | None, consensus: str | None, pod: bool
) -> None:
    """Run the engine's command line `arguments` on this shard, and end with its exit code unless that is 0."""
    status, name = shard.get("status") or {}, shard["metadata"]["name"]
    shard_id = status.get("shardId")
    if shard_id is None:
        raise InvalidUsage(f"{name} has no shard yet: `kubectl persist status {name}` says why")
    command = [str(shard_id) if one == SHARD else one for one in arguments]
    if pod:
        code = _in_pod(session, shard, command)
    else:
        stores = status.get("store") or {}
        known = {"--blob": blob or stores.get("blob"), "--consensus": consensus or stores.get("consensus")}
        if not all(known.values()):
            raise InvalidUsage(f"the status of {name} names no stores: give --blob and --consensus, or --pod")
        code = _here([*command, *(part for option, url in known.items() for part in (option, str(url)))])
    if code:
        raise Ended(code)


def _here(arguments: list[str]) -> int:
    """Run the command in this process."""
    from persist_engine.cli.main import parser

    return int(parser().main(arguments, prog_name="persist", standalone_mode=False) or 0)


def _in_pod(session: Session, shard: Resource, command: list[str]) -> int:
    namespace, name = session.one_namespace, shard["metadata"]["name"]
    jobs = session.cluster.find(JOB, namespace, {names.LABEL_SHARD: name, names.LABEL_MANAGED_BY: names.MANAGER})
    manifest = pod_like(jobs, shard, command, suffix=session.env.random_bytes(4).hex())
    if manifest is None:
        raise InvalidUsage(
            f"{name} has no maintenance Job whose pod this one could be like: `kubectl persist rollup {name} --wait` makes one"
        )
    pod = manifest["metadata"]["name"]
    session.cluster.create(POD, manifest)
    try:
        _started(session, namespace, pod)
        for line in session.cluster.log_lines(
            namespace, pod, container=names.MAINTENANCE_CONTAINER, lines=None, follow=True
        ):
            # A pipe gets the rows unchanged. typer.echo would remove colours from them.
            sys.stdout.write(f"{printable(line) if sys.stdout.isatty() else line}\n")
        return _exit_code(session, namespace, pod)
    finally:
        session.cluster.delete(POD, namespace, pod)


def pod_like(jobs: Sequence[Resource], shard: Resource, command: Sequence[str], *, suffix: str) -> Resource | None:
    """A pod that runs `command` in the same way as the newest of the shard's Jobs runs the engine. None when there is no such Job. Pure."""
    fit = [one for one in jobs if _engine_container(one) is not None]
    if not fit:
        return None
    newest = max(fit, key=lambda one: times.to_ms(one["metadata"].get("creationTimestamp")) or 0)
    template = copy.deepcopy(newest["spec"]["template"])
    container = _engine_container({"spec": {"template": template}})
    assert container is not None, "the same template"
    container["args"] = [*command, *_stores(container.get("args") or ())]
    container.pop("terminationMessagePath", None)
    metadata = shard["metadata"]
    # The pod must not have the operator's labels, because the operator would count it among its own pods.
    labels = {"app.kubernetes.io/name": "persist", names.LABEL_COMPONENT: _PURPOSE}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-{_PURPOSE}-{suffix}",
            "namespace": metadata["namespace"],
            "labels": labels,
        },
        "spec": {**template["spec"], "restartPolicy": "Never", "activeDeadlineSeconds": _POD_DEADLINE_S},
    }


def _engine_container(job: Resource) -> dict[str, Any] | None:
    """The container that runs the engine; None in the Job of a compaction on Spark."""
    containers: list[dict[str, Any]] = job["spec"]["template"]["spec"].get("containers") or []
    return next(
        (
            one
            for one in containers
            if one.get("name") == names.MAINTENANCE_CONTAINER and "--blob" in (one.get("args") or ())
        ),
        None,
    )


def _stores(arguments: Sequence[str]) -> list[str]:
    """The options of a Job's command that name the stores."""
    found = []
    for option in ("--blob", "--consensus"):
        if option in arguments[:-1]:
            found += [option, arguments[list(arguments).index(option) + 1]]
    return found


def _started(session: Session, namespace: str, pod: str) -> None:
    """Wait until the container has started or ended. Raises InvalidUsage, with the pod's reason, when it does neither in time."""
    until_s, reason = session.env.monotonic_s() + _START_S, "no node took it"
    for state in session.cluster.follow(POD, namespace, pod, until_s=until_s):
        if state is None:
            raise InvalidUsage(f"pod {pod} was deleted before it ran")
        status = state.get("status") or {}
        if status.get("phase") in {"Running", "Succeeded", "Failed"}:
            return
        for one in status.get("containerStatuses") or ():
            waiting = (one.get("state") or {}).get("waiting") or {}
            reason = (
                f"{waiting.get('reason')}: {waiting.get('message') or 'no message'}"
                if waiting.get("reason")
                else reason
            )
    raise InvalidUsage(f"pod {pod} did not start in {_START_S:g} seconds: {reason}")


def _exit_code(session: Session, namespace: str, pod: str) -> int:
    for state in session.cluster.follow(POD, namespace, pod, until_s=session.env.monotonic_s() + _START_S):
        for one in ((state or {}).get("status") or {}).get("containerStatuses") or ():
            ended = (one.get("state") or {}).get("terminated")
            if ended is not None:
                return int(ended.get("exitCode", 1))
        if ((state or {}).get("status") or {}).get("phase") in {"Succeeded", "Failed"}:
            return 0 if (state or {})["status"]["phase"] == "Succeeded" else 1
    return 1
