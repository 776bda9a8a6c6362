"""`kubectl persist status|plan|history|holds|top`: the facts on the resources, as text or for programs. Reads only."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from persist_engine.base.wording import sized

from persist_operator.api import names
from persist_operator.api.redact import redact
from persist_operator.cluster.port import POD, Resource
from persist_operator.kubectl import figures, reading, tree
from persist_operator.kubectl.completion import complete_any, complete_shard
from persist_operator.kubectl.options import (
    Format,
    Output,
    Session,
    Wide,
    clustered,
    print_lines,
    print_table,
    print_values,
    width,
)
from persist_operator.views import tables

OptionalShard = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Only this PersistShard.", autocompletion=complete_shard)
]
OptionalAny = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Only this shard or sink.", autocompletion=complete_any)
]


@clustered
def status(session: Session, name: OptionalShard = None, *, output: Output = Format.TABLE) -> None:
    """Show shards with their sinks and pods, as trees.

    With readiness, lag, debt and deadline, holds, the plan, next runs, and refused creations.

    Example: kubectl persist status flights
    """
    shards = _shards(session, name)
    sinks = session.sinks(of_shard=name)
    pods = session.cluster.find(POD, session.namespace, {names.LABEL_MANAGED_BY: names.MANAGER})
    now_ms = session.env.now_ms()
    nodes = [tree.shard_node(one, sinks, pods, now_ms=now_ms) for one in shards]
    known = {(one["namespace"], sink["name"]) for one in nodes for sink in one["sinks"]}
    lost = [
        tree.sink_node(one, pods)
        for one in sinks
        if name is None and (one["metadata"].get("namespace"), one["metadata"]["name"]) not in known
    ]
    if output is not Format.TABLE:
        print_values({"kind": "List", "items": [*nodes, *lost]}, output)
        return
    cut = width()
    for number, node in enumerate(nodes):
        if number:
            typer.echo()
        if session.namespace is None:
            typer.echo(f"namespace {node['namespace']}")
        print_lines(line if cut is None or len(line) <= cut else f"{line[: cut - 1]}…" for line in tree.lines(node))
    words = "writes to a PersistShard that does not exist"
    print_lines((redact(f"SparkSink/{one['name']} {words}: {one['reason']}") for one in lost), header=False)
    if not nodes and not lost:
        typer.echo(
            f"no PersistShards in {_place(session)}; -n names another namespace, -A looks into all of them", err=True
        )


@clustered
def plan(session: Session, name: OptionalShard = None, *, output: Output = Format.TABLE, wide: Wide = False) -> None:
    """Show what the operator would do next on each shard.

    Also why, and whether it waits for an approval.

    Example: kubectl persist plan
    """
    rows, found = [], []
    for shard in _shards(session, name):
        one = figures.plan(shard)
        if not one:
            continue
        found.append({**_named(shard), **one})
        waits = "waits" if one.get("approved") is False else ""
        size = sized(one["estimatedBytes"]) if isinstance(one.get("estimatedBytes"), int) else ""
        long = tables.duration(1000 * one["estimatedSeconds"]) if isinstance(one.get("estimatedSeconds"), int) else ""
        kind, runner = str(one.get("type", "")), str(one.get("runner", ""))
        rows.append(
            [
                *_cells(session, shard),
                str(one.get("id", "")),
                kind,
                runner,
                size,
                long,
                waits,
                str(one.get("reason", "")),
            ]
        )
    _listed(session, ["ID", "TYPE", "RUNNER", "BYTES", "TIME", "APPROVAL", "WHY"], rows, found, output, wide=wide)


@clustered
def history(session: Session, name: OptionalAny = None, *, output: Output = Format.TABLE, wide: Wide = False) -> None:
    """Show the runs of shards and sinks that their statuses remember.

    Example: kubectl persist history flights --wide
    """
    documents = [session.either(name)[1]] if name else [*session.shards(), *session.sinks()]
    if output is Format.TABLE:
        print_lines(tables.runs_table(documents, (), wide=wide, now_ms=session.env.now_ms(), width=width(wide=wide)))
    else:
        print_values({"kind": "List", "items": tables.runs(documents, ())}, output)


@clustered
def holds(
    session: Session,
    name: OptionalShard = None,
    *,
    expire: Annotated[
        str | None, typer.Option("--expire", metavar="ID", help="Expire this reader of the shard.")
    ] = None,
    commit: Annotated[
        bool, typer.Option("--commit", help="With --expire: do it; without, say what would happen.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --expire: also a critical reader, whose owner loses its place for good."),
    ] = False,
    blob: reading.Blob = None,
    consensus: reading.Consensus = None,
    pod: reading.InPod = False,
    output: Output = Format.TABLE,
    wide: Wide = False,
) -> None:
    """Show the readers that hold a shard's since back.

    --expire ends one, through the engine, which needs the stores: with your own credentials, or in a pod (--pod).

    Example: kubectl persist holds flights --expire r0d6f3c1e-5b7a-4c55-9f5e-3d1f6f0a7b11
    """
    if expire is not None:
        if name is None:
            raise typer.BadParameter("--expire needs the name of the shard")
        flags = [flag for flag, is_given in (("--force", force), ("--commit", commit)) if is_given]
        arguments = ["admin", "holds", reading.SHARD, "--expire", expire, *flags]
        reading.engine(session, session.shard(name), arguments, blob=blob, consensus=consensus, pod=pod)
        return
    rows, found, now_ms = [], [], session.env.now_ms()
    for shard in _shards(session, name):
        for one in figures.holds(shard):
            found.append({**_named(shard), **one})
            host = str(one.get("host") or one.get("hostname") or "")
            cells = [str(one.get("id", "")), str(one.get("purpose", "")), host, str(one.get("kind", ""))]
            rows.append([*_cells(session, shard), *cells, figures.held(one, now_ms)])
    _listed(session, ["ID", "PURPOSE", "HOST", "KIND", "HELD"], rows, found, output, wide=wide)


@clustered
def top(session: Session, *, output: Output = Format.TABLE, wide: Wide = False) -> None:
    """Show lag, size and last run of shards and sinks, the greatest lag first.

    Example: kubectl persist top -A
    """
    documents = sorted([*session.shards(), *session.sinks()], key=lambda one: -(figures.lag_seconds(one) or 0))
    rows, found = [], []
    for one in documents:
        run, stored, debt = (
            figures.last_run(one),
            *(figures.status_of(one).get(key) or {} for key in ("storage", "debt")),
        )
        read, written = run.get("bytesRead"), run.get("bytesWritten")
        figure = {
            "lagSeconds": figures.lag_seconds(one),
            "liveBytes": stored.get("liveBytes"),
            "debtBytes": debt.get("compactionBytes"),
            "lastRun": {key: run[key] for key in sorted(run)},
        }
        found.append({"kind": one["kind"], **_named(one), **figure})
        last = "" if not run else f"{run.get('type') or 'Sink'} {run.get('outcome', '')}".strip()
        sizes = [sized(each) if isinstance(each, int) else "" for each in (stored.get("liveBytes"), read, written)]
        owed = sized(debt["compactionBytes"]) if debt.get("compactionBytes") else ""
        name = f"{one['kind'].lower()}/{one['metadata']['name']}"
        place = [str(one["metadata"].get("namespace"))] if session.namespace is None else []
        cells = [
            figures.lag(one),
            sizes[0],
            owed,
            last,
            figures.took(run),
            *sizes[1:],
            figures.cpu(run.get("cpuSeconds")),
        ]
        rows.append([*place, name, *cells])
    _listed(
        session, ["LAG", "BYTES", "DEBT", "LAST RUN", "TOOK", "READ", "WRITTEN", "CPU"], rows, found, output, wide=wide
    )


def _shards(session: Session, name: str | None) -> list[Resource]:
    return [session.shard(name)] if name else session.shards()


def _named(document: Resource) -> dict[str, Any]:
    return {"namespace": document["metadata"].get("namespace"), "name": document["metadata"]["name"]}


def _cells(session: Session, document: Resource) -> list[str]:
    """The first cells of a row: the name, and before it the namespace if there may be several."""
    named = [str(one) for one in _named(document).values()]
    return named if session.namespace is None else named[1:]


def _listed(
    session: Session,
    header: list[str],
    rows: list[list[str]],
    found: list[dict[str, Any]],
    output: Format,
    *,
    wide: bool,
) -> None:
    begin = ["NAMESPACE", "NAME"] if session.namespace is None else ["NAME"]
    print_table([*begin, *header], rows, found, output, wide=wide)
    if not rows and output is Format.TABLE:
        typer.echo(f"nothing in {_place(session)}", err=True)


def _place(session: Session) -> str:
    return "any namespace" if session.namespace is None else f"namespace {session.namespace}"
