"""`kubectl persist uninstall-check`: what an uninstallation would leave behind, and what would hang. Reads only.

A deletion hangs if it waits for a finalizer that only the operator removes. So resources with a finalizer must be deleted first, while the
operator still runs. The data in the stores stay, under each shard's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import typer

from persist_operator.api import names
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD, SPARK_SINK, Kind, Resource
from persist_operator.cluster.user import Forbidden
from persist_operator.kubectl.options import Ended, Format, Output, Session, Wide, clustered, print_table

Verdict = Literal["hangs", "stays", "goes"]
EXIT_STAYS, EXIT_HANGS = 1, 2
_ORDER: Sequence[Verdict] = ("hangs", "stays", "goes")


@dataclass(frozen=True, slots=True)
class Finding:
    """The effect on one object of uninstalling the operator and deleting its resources, and the remedy."""

    verdict: Verdict
    namespace: str
    object: str
    what: str


def findings(resources: Sequence[Mapping[str, Any]], children: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The findings for shards and sinks, and for the operator's pods and Jobs; the worst first. Pure."""
    found = [one for resource in resources for one in _of_resource(resource)]
    owners = {str(one["metadata"].get("uid")) for one in resources}
    for child in children:
        kind, metadata = str(child["kind"]), child["metadata"]
        name = f"{kind.lower()}/{metadata['name']}"
        owned = {str(one.get("uid")) for one in metadata.get("ownerReferences") or ()}
        by = (metadata.get("labels") or {}).get(names.LABEL_OWNER_UID)
        if owned & owners or (owned and by in owners):
            found.append(Finding("goes", _place(child), name, "deleted with its resource"))
        elif not owned:
            found.append(Finding("stays", _place(child), name, "has no owner: delete it by hand"))
    return sorted(found, key=lambda one: (_ORDER.index(one.verdict), one.namespace, one.object))


def _of_resource(resource: Mapping[str, Any]) -> list[Finding]:
    metadata, spec, status = resource["metadata"], resource.get("spec") or {}, resource.get("status") or {}
    kind = "persistshard" if resource["kind"] == "PersistShard" else "sparksink"
    name, place = f"{kind}/{metadata['name']}", _place(resource)
    finalizers = [str(one) for one in metadata.get("finalizers") or ()]
    ours = [one for one in finalizers if one.startswith(f"{names.GROUP}/")]
    if metadata.get("deletionTimestamp"):
        waits = ", ".join(finalizers) or "the API server"
        return [
            Finding(
                "hangs", place, name, f"is being deleted since {metadata['deletionTimestamp']} and waits for {waits}"
            )
        ]
    found = []
    if ours:
        what = f"delete it before the operator, which alone takes away {', '.join(ours)}"
        found.append(Finding("hangs", place, name, what))
    elif finalizers:
        found.append(Finding("hangs", place, name, f"waits for {', '.join(finalizers)} of another controller"))
    policy, shard_id = spec.get("reclaimPolicy", "Retain"), status.get("shardId")
    if kind == "persistshard" and shard_id and policy == "Retain":
        stores = status.get("store") or {}
        at = f" at {stores['blob']} and {stores['consensus']}" if {"blob", "consensus"} <= set(stores) else ""
        found.append(Finding("stays", place, name, f"the data of {shard_id}{at}; the same name adopts it again"))
    elif not found:
        found.append(Finding("goes", place, name, "deleted at once"))
    return found


def _place(resource: Mapping[str, Any]) -> str:
    return str(resource["metadata"].get("namespace") or "")


@clustered
def uninstall_check(session: Session, *, output: Output = Format.TABLE, wide: Wide = False) -> None:
    """Show what an uninstallation would leave behind, and what would hang.

    Changes nothing. Exit codes: 0 all goes, 1 something stays (data under Retain), 2 something would hang.

    Example: kubectl persist uninstall-check -A
    """
    resources = [*session.shards(), *session.sinks()]
    children: list[Resource] = []
    labels = {names.LABEL_MANAGED_BY: names.MANAGER}
    for kind in (JOB, POD):
        children += _visible(session, kind, labels)
    found = findings(resources, children)
    rows = [[one.verdict, one.namespace, one.object, one.what] for one in found]
    values = [
        {"verdict": one.verdict, "namespace": one.namespace, "object": one.object, "what": one.what} for one in found
    ]
    print_table(["VERDICT", "NAMESPACE", "OBJECT", "WHAT"], rows, values, output, wide=wide)
    if output is Format.TABLE:
        _advise(found, resources)
    verdicts = {one.verdict for one in found}
    if "hangs" in verdicts:
        raise Ended(EXIT_HANGS)
    if "stays" in verdicts:
        raise Ended(EXIT_STAYS)


def _visible(session: Session, kind: Kind, labels: Mapping[str, str]) -> list[Resource]:
    try:
        return session.cluster.find(kind, session.namespace, labels)
    except Forbidden as error:
        typer.echo(f"note: {error}; {kind.plural} are not checked", err=True)
        return []


def _advise(found: Sequence[Finding], resources: Sequence[Resource]) -> None:
    if not found:
        typer.echo("there are no objects of the operator", err=True)
        return
    kinds = {one["kind"] for one in resources}
    steps = [
        *(["delete the SparkSinks"] if SPARK_SINK.kind in kinds else []),
        *(["delete the PersistShards, and wait until they are gone"] if PERSIST_SHARD.kind in kinds else []),
        "uninstall the chart (the resource definitions stay: helm keeps them)",
        "delete the definitions persistshards.persistshard.io and sparksinks.persistshard.io",
    ]
    typer.echo("\nIn this order: " + "; ".join(f"{number}. {step}" for number, step in enumerate(steps, 1)))
