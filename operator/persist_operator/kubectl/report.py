"""`kubectl persist report`: a support bundle as a zip file, without secrets. Reads only.

Owns the contents and the layout of the file. A part that the user may not read is left out, and the bundle lists it.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
import yaml
from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.version import APPLIER_VERSION

from persist_operator.api import names, times
from persist_operator.cluster.port import CONFIG_MAP, EVENT, JOB, PERSIST_SHARD, POD, SPARK_SINK, Kind, Resource
from persist_operator.kubectl import bundle, tree
from persist_operator.kubectl.masking import masked
from persist_operator.kubectl.options import Session, clustered

_OURS = {names.LABEL_MANAGED_BY: names.MANAGER}
#: The labels of the operator's own pods, from the chart.
_OPERATOR = {"app.kubernetes.io/name": "persist-operator"}
_LINES, _PODS_MAX, _LINE_MAX = 5000, 200, 4000
#: A line is masked before it is cut, because half a URL with a password does not look like one.
_MASKED_MAX = 16 * _LINE_MAX
_LISTED: Sequence[Kind] = (PERSIST_SHARD, SPARK_SINK, JOB, POD)


@dataclass
class _Bundle:
    """The zip file, and the session that fills it. `missing` lists the parts that could not be read, with the reasons."""

    archive: zipfile.ZipFile
    session: Session
    lines: int
    missing: list[str] = field(default_factory=list)

    def add(self, path: str, text: str) -> None:
        """Add a file, with a fixed date, so that two bundles of the same state are equal."""
        entry = zipfile.ZipInfo(path)
        entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
        self.archive.writestr(entry, text)

    def add_resources(self, path: str, found: Sequence[Resource]) -> None:
        """Add the resources as YAML, without secrets."""
        documents = [bundle.cleaned(one) for one in found]
        self.add(path, yaml.safe_dump_all(documents, sort_keys=False, width=140))

    def find(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[Resource]:
        """The resources of a kind; nothing, and a line in `missing`, if the user may not read them."""
        try:
            return self.session.cluster.find(kind, namespace, labels)
        except PersistError as error:
            self.missing.append(f"{kind.plural}: {masked(str(error))}")
            return []

    def add_logs(self, pod: Resource, path: str) -> None:
        """Add the logs of a pod's containers. For a container that was started again, also add the log of the run before."""
        states = (pod.get("status") or {}).get("containerStatuses") or ()
        restarted = {str(one.get("name")) for one in states if one.get("restartCount")}
        for container in (pod.get("spec") or {}).get("containers") or ():
            name = str(container["name"])
            for previous in (False, True) if name in restarted else (False,):
                text = masked("\n".join(self._log(pod, name, previous=previous)))
                shown = "".join(f"{line[:_LINE_MAX]}\n" for line in text.split("\n"))
                self.add(f"{path}.{_safe(name)}{'.previous' if previous else ''}.log", shown)

    def _log(self, pod: Resource, container: str, *, previous: bool) -> Iterator[str]:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        found = self.session.cluster.log_lines(
            namespace, name, container=container, lines=self.lines, follow=False, previous=previous
        )
        try:
            with contextlib.closing(found):
                for line in itertools.islice(found, self.lines):
                    yield line[:_MASKED_MAX]
        except PersistError as error:
            self.missing.append(f"log of {namespace}/{name}: {masked(str(error))}")


@clustered
def report(
    session: Session,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Name of the new file; default: persist-report-<time>.zip.")
    ] = None,
    operator_namespace: Annotated[
        str, typer.Option("--operator-namespace", help="Where the operator runs, for its log.")
    ] = "persist-system",
    lines: Annotated[int, typer.Option("--tail", min=1, help="Lines of each log.")] = _LINES,
) -> None:
    """Write a support bundle without secrets.

    It holds shards, sinks, their Jobs, pods, events and logs, and the operator's log. Look through it before you hand it on.

    Example: kubectl persist report -n team
    """
    now_ms = session.env.now_ms()
    stamp = times.to_text(now_ms).replace(":", "").replace("-", "")
    target = file or Path(f"persist-report-{stamp}.zip")
    try:
        opened = target.open("xb")
    except FileExistsError as error:
        raise InvalidUsage(f"{target} exists: name another --file") from error
    with opened, zipfile.ZipFile(opened, "w") as archive:
        _collect(_Bundle(archive, session, lines), operator_namespace, now_ms=now_ms)
    typer.echo(
        f"{target}: {target.stat().st_size:,} bytes; secrets are left out, but look through it before you hand it on"
    )


def _collect(out: _Bundle, operator_namespace: str, *, now_ms: int) -> None:
    namespace, found = out.session.namespace, {}
    for kind in _LISTED:
        found[kind.kind] = out.find(kind, namespace, {} if kind in {PERSIST_SHARD, SPARK_SINK} else _OURS)
        out.add_resources(f"resources/{kind.plural}.yaml", found[kind.kind])
    # The ConfigMap of a driver has its configuration, so only its keys are listed.
    maps = out.find(CONFIG_MAP, namespace, _OURS)
    listed = [f"{_path(one)}: {', '.join(sorted(one.get('data') or {}))}\n" for one in maps]
    out.add("resources/configmaps.txt", "".join(listed))
    nodes = [tree.shard_node(one, found["SparkSink"], found["Pod"], now_ms=now_ms) for one in found["PersistShard"]]
    trees = ["\n".join([f"namespace {node['namespace']}", *tree.lines(node)]) for node in nodes]
    out.add("status.txt", masked("\n\n".join(trees)) + "\n")
    uids = {str(one["metadata"].get("uid")) for each in found.values() for one in each}
    events = [one for one in out.find(EVENT, namespace, {}) if (one.get("involvedObject") or {}).get("uid") in uids]
    out.add_resources("events.yaml", sorted(events, key=_event_time))
    for pod in found["Pod"][:_PODS_MAX]:
        out.add_logs(pod, f"logs/{_path(pod)}")
    if len(found["Pod"]) > _PODS_MAX:
        out.missing.append(f"logs of {len(found['Pod']) - _PODS_MAX} more pods")
    operators = out.find(POD, operator_namespace, _OPERATOR)
    out.add_resources("operator/pods.yaml", operators)
    for pod in operators:
        out.add_logs(pod, f"operator/{_safe(pod['metadata']['name'])}")
    if not operators:
        out.missing.append(
            f"no pod of the operator in namespace {operator_namespace}: --operator-namespace names another"
        )
    about = {
        "kubectlPersist": APPLIER_VERSION,
        "python": platform.python_version(),
        "time": times.to_text(now_ms),
        "namespace": namespace or "all",
        "missing": out.missing,
    }
    out.add("about.yaml", yaml.safe_dump(about, sort_keys=False))


def _event_time(event: Resource) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _path(resource: Resource) -> str:
    """`<namespace>/<name>` as a path in the archive."""
    return f"{_safe(resource['metadata'].get('namespace'))}/{_safe(resource['metadata']['name'])}"


def _safe(name: object) -> str:
    """The name as a part of a path that never leaves its folder, for any name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in str(name or "")).lstrip(".") or "_"
