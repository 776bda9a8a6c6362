"""The options that every command shares with kubectl, the session that they open, and the output of a command."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer
import yaml
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import InvalidUsage, PersistError

from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK, Kind, Resource
from persist_operator.cluster.user import UserCluster, load_access
from persist_operator.views import tables

_PANEL = "Cluster"
_LISTED_MAX = 20

Kubeconfig = Annotated[
    str | None,
    typer.Option("--kubeconfig", metavar="FILE", rich_help_panel=_PANEL, help="As for kubectl; default: $KUBECONFIG."),
]
Context = Annotated[
    str | None,
    typer.Option("--context", rich_help_panel=_PANEL, help="Context of the kubeconfig; default: the current one."),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", rich_help_panel=_PANEL, help="Default: the namespace of the context.")
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", rich_help_panel=_PANEL, help="All namespaces.")]


class Format(enum.StrEnum):
    """The form of a command's output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, typer.Option("--output", "-o", help="table for people, json or yaml for programs.")]
Wide = Annotated[bool, typer.Option("--wide", "-w", help="All columns, and messages in full.")]


class NotFound(PersistError):
    """There is no resource of this name. The message lists the names that exist."""


class Ended(Exception):
    """Ends the command with this exit code. The output has the reason. The parser's own exit could not distinguish the code from a
    usage error.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Session:
    """One command's access to the cluster. `namespace` is None for all namespaces."""

    cluster: UserCluster
    namespace: str | None
    env: Env

    def shards(self) -> list[Resource]:
        """The PersistShards that the command covers."""
        return self.cluster.find(PERSIST_SHARD, self.namespace)

    def sinks(self, *, of_shard: str | None = None) -> list[Resource]:
        """The SparkSinks that the command covers; only those that write the shard `of_shard`, if it is given."""
        field = None if of_shard is None else ("spec.shardRef.name", of_shard)
        return self.cluster.find(SPARK_SINK, self.namespace, field=field)

    @property
    def one_namespace(self) -> str:
        """The namespace of a command on one resource. Raises InvalidUsage with -A."""
        if self.namespace is None:
            raise InvalidUsage("a name is unique within a namespace only: give -n NAMESPACE instead of -A")
        return self.namespace

    def shard(self, name: str) -> Resource:
        """The PersistShard of this name. Raises NotFound when there is none."""
        return self._one(PERSIST_SHARD, name)

    def sink(self, name: str) -> Resource:
        """The SparkSink of this name. Raises NotFound when there is none."""
        return self._one(SPARK_SINK, name)

    def either(self, name: str) -> tuple[Kind, Resource]:
        """The shard or sink that `name` means: `pshard/NAME`, `ssink/NAME`, or only NAME if just one of them exists."""
        prefix, slash, rest = name.rpartition("/")
        kinds = {"pshard": PERSIST_SHARD, "persistshard": PERSIST_SHARD, "persistshards": PERSIST_SHARD}
        kinds |= {"ssink": SPARK_SINK, "sparksink": SPARK_SINK, "sparksinks": SPARK_SINK}
        if slash:
            if prefix.lower() not in kinds:
                raise InvalidUsage(f"unknown kind {prefix!r}; use pshard/{rest} or ssink/{rest}")
            kind = kinds[prefix.lower()]
            return kind, self._one(kind, rest)
        found = [(kind, self.cluster.get(kind, self.one_namespace, name)) for kind in (PERSIST_SHARD, SPARK_SINK)]
        there = [(kind, one) for kind, one in found if one is not None]
        if len(there) > 1:
            raise InvalidUsage(f"a shard and a sink are called {name!r}: say pshard/{name} or ssink/{name}")
        if not there:
            known = [f"pshard/{one}" for one in _names(self.shards())] + [
                f"ssink/{one}" for one in _names(self.sinks())
            ]
            raise NotFound(f"no PersistShard and no SparkSink {name!r} in namespace {self.namespace}; {_known(known)}")
        return there[0]

    def _one(self, kind: Kind, name: str) -> Resource:
        found = self.cluster.get(kind, self.one_namespace, name)
        if found is None:
            known = _names(self.cluster.find(kind, self.namespace))
            raise NotFound(f"no {kind.kind} {name!r} in namespace {self.namespace}; {_known(known)}")
        return found


def _names(documents: Iterable[Resource]) -> list[str]:
    return sorted(str(one["metadata"]["name"]) for one in documents)


def _known(found: Sequence[str]) -> str:
    if not found:
        return "there are none; -n names another namespace, -A looks into all of them"
    more = f" and {len(found) - _LISTED_MAX} more" if len(found) > _LISTED_MAX else ""
    return f"there are: {', '.join(found[:_LISTED_MAX])}{more}"


def open_session(
    kubeconfig: str | None, context: str | None, namespace: str | None, *, all_namespaces: bool = False
) -> Session:
    """The session of these options. Raises InvalidUsage when they contradict each other or give no cluster."""
    if namespace is not None and all_namespaces:
        raise InvalidUsage("-n and -A exclude each other")
    access, env = load_access(kubeconfig, context), SystemEnv()
    chosen = None if all_namespaces else namespace or access.namespace
    on_wait = _say if sys.stderr.isatty() else None
    return Session(UserCluster(access.client, env, on_wait=on_wait), chosen, env)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def clustered(function: Callable[..., None]) -> Callable[..., None]:
    """A command with kubectl's options instead of its first parameter, which gets the Session of these options."""
    hints = get_type_hints(function, include_extras=True)
    _, *own = inspect.signature(function).parameters.values()
    options = {"kubeconfig": Kubeconfig, "context": Context, "namespace": Namespace, "all_namespaces": AllNamespaces}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(annotation=hints[one.name]) for one in own]
    parameters += [
        inspect.Parameter(name, keyword, default=False if name == "all_namespaces" else None, annotation=annotation)
        for name, annotation in options.items()
    ]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in options}
        function(open_session(**chosen), **given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def width(*, wide: bool = False) -> int | None:
    """The width at which lines are cut, which is the terminal's. None, for whole lines, in a pipe or with `wide`."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() and not wide else None


def print_lines(lines: Iterable[str], *, header: bool = True) -> None:
    """Print the lines, the first one bold if a terminal shows colours."""
    for number, line in enumerate(lines):
        typer.echo(typer.style(line, bold=True) if header and number == 0 else line)


def print_values(found: Any, output: Format) -> None:
    """Print `found` for programs. Both forms escape control characters."""
    if output is Format.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(yaml.safe_dump(found, sort_keys=False, default_flow_style=False), nl=False)


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    found: Sequence[Mapping[str, Any]],
    output: Format,
    *,
    wide: bool,
) -> None:
    """Print the rows as a table, or `found`, the same data for programs, as a List."""
    if output is Format.TABLE:
        print_lines(tables.text_table(header, rows, width=width(wide=wide)))
    else:
        print_values({"kind": "List", "items": list(found)}, output)
