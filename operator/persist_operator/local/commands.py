"""`persist local up|get|describe|logs|down`: the command line of the local runner, added to `persist` by an entry point."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from rich.console import Console
from rich.live import Live
from rich.table import Table

from persist_operator.api.schema_check import crd_dir, load_schemas
from persist_operator.bridge import Bridge
from persist_operator.local import view
from persist_operator.local.act import LocalActor, child_environ
from persist_operator.local.objects import Document, Objects
from persist_operator.local.processes import Processes
from persist_operator.local.runner import LocalRunner, checked, read_documents, runner_lock
from persist_operator.plan.actions import Note
from persist_operator.settings import OperatorSettings, StorageProfile

app = typer.Typer(
    help="Run PersistShards and SparkSinks on this machine: same YAML, same planner, no cluster.", no_args_is_help=True
)
KINDS = {"persistshard": "PersistShard", "pshard": "PersistShard", "persistshards": "PersistShard"}
KINDS |= {"sparksink": "SparkSink", "ssink": "SparkSink", "sparksinks": "SparkSink"}

State = Annotated[
    Path, typer.Option("--state", envvar="PERSIST_LOCAL_STATE", help="Folder of resources, logs, stores.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
_STATE = Path(".persist")
_USAGE = 64


@contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except InvalidUsage as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_USAGE) from error


def _settings(state: Path, config: Path | None) -> OperatorSettings:
    """The operator's own configuration file, or one profile on files below `state`."""
    if config is not None:
        return OperatorSettings.load(config)
    store = state.resolve() / "store"
    profile = StorageProfile(blob=f"file://{store}/blobs", consensus=f"sqlite://{store}/consensus.db")
    return OperatorSettings(storage_profiles={"default": profile})


def _columns(kind: str) -> list[Mapping[str, Any]]:
    for path in crd_dir().glob("*.yaml"):
        crd = yaml.safe_load(path.read_text(encoding="utf-8"))
        if crd["spec"]["names"]["kind"] == kind:
            columns: list[Mapping[str, Any]] = crd["spec"]["versions"][0].get("additionalPrinterColumns", [])
            return columns
    return []


def _tables(objects: Objects, *, wide: bool) -> list[Table]:
    now_ms = SystemEnv().now_ms()
    kinds = ("PersistShard", "SparkSink")
    return [view.resources_table(objects.every(one), _columns(one), wide=wide, now_ms=now_ms) for one in kinds]


@app.command()
def up(
    files: Annotated[list[Path], typer.Option("--filename", "-f", help="YAML file, or folder of them. Repeatable.")],
    state: State = _STATE,
    config: Annotated[
        Path | None, typer.Option(help="Operator configuration (storage profiles); default: files below --state.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until interrupted: schedules, retries, maintenance.")
    ] = False,
) -> None:
    """Apply resources and run what they ask for, until every sink is done and no maintenance is due.

    Paths of inputs are relative to the current folder. Interrupted or killed, the next `up` goes on.
    Example: persist local up -f examples/flights/
    """
    env, console = SystemEnv(), Console(stderr=True)
    with _user_errors():
        schemas = load_schemas()
        objects, processes = Objects(state, env), Processes(state, env)
        documents = checked(read_documents(files), schemas, objects)
        settings = _settings(state, config)
        with runner_lock(state):
            for document in documents:
                applied, outcome = objects.apply(document)
                console.print(f"{applied['kind'].lower()}/{applied['metadata']['name']} {outcome}", highlight=False)
            failed = _run(objects, processes, settings, env, console, watch=watch)
    out = Console()
    for table in _tables(objects, wide=False):
        out.print(table)
        out.print()
    if failed:
        names = ", ".join(failed)
        typer.echo(f"error: {names} failed; see `persist local describe` and `persist local logs`", err=True)
        raise typer.Exit(1)


def _run(
    objects: Objects, processes: Processes, settings: OperatorSettings, env: SystemEnv, console: Console, *, watch: bool
) -> list[str]:
    environ = child_environ(os.environ)
    with contextlib.closing(Bridge(settings, env=env)) as bridge:
        actor = LocalActor(processes, bridge, environ=environ, cores=os.cpu_count() or 1)

        def tell(owner: str, note: Note) -> None:
            color = "yellow" if note.kind == "Warning" else "green"
            console.print(f"[{color}]{note.reason}[/] {owner}: {note.message}", highlight=False)

        runner = LocalRunner(objects, processes, bridge, actor, settings=settings, env=env, tell=tell)
        if not console.is_terminal:
            return runner.run(watch=watch, seen=lambda: None)
        with Live(console=console, transient=True, refresh_per_second=4) as live:
            return runner.run(watch=watch, seen=lambda: live.update(_progress(objects, processes, env)))


def _progress(objects: Objects, processes: Processes, env: SystemEnv) -> Table:
    grid = Table.grid(padding=(0, 2))
    for kind in ("PersistShard", "SparkSink"):
        for document in objects.every(kind):
            reason = view.lookup(document, ".status.conditions[?(@.type=='Ready')].reason") or "Pending"
            grid.add_row(f"{kind.lower()}/{document['metadata']['name']}", str(reason))
    for child in processes.every():
        if child.running:
            grid.add_row(f"  {child.name}", f"{child.labels['kind']} for {(env.now_ms() - child.started_ms) // 1000}s")
    return grid


@app.command()
def get(
    kind: Annotated[str, typer.Argument(help="pshard, ssink, runs, or all.")] = "all",
    state: State = _STATE,
    wide: Annotated[bool, typer.Option("--wide", "-w", help="All columns.")] = False,
    as_json: AsJson = False,
) -> None:
    """Resources as `kubectl get` would show them; `runs` lists sink attempts and maintenance runs."""
    with _user_errors():
        objects = Objects(state, SystemEnv())
        kinds = ["PersistShard", "SparkSink"] if kind in {"all", "runs"} else [_kind(kind)]
        documents = [one for name in kinds for one in objects.every(name)]
        if as_json:
            typer.echo(json.dumps({"kind": "List", "items": documents}, indent=1))
            return
        if not documents:
            raise InvalidUsage(f"nothing in {state}; start with `persist local up -f FILE`")
        out = Console()
        if kind == "runs":
            out.print(view.runs_table(documents))
            return
        for name in kinds:
            of_kind = [one for one in documents if one["kind"] == name]
            now_ms = SystemEnv().now_ms()
            out.print(view.resources_table(of_kind, _columns(name), wide=wide, now_ms=now_ms))
            out.print()


@app.command()
def describe(
    kind: Annotated[str, typer.Argument(help="pshard or ssink.")],
    name: Annotated[str, typer.Argument(help="Name of the resource.")],
    state: State = _STATE,
    as_json: AsJson = False,
) -> None:
    """Everything about one resource: conditions first."""
    with _user_errors():
        document = _one(Objects(state, SystemEnv()), kind, name)
        if as_json:
            typer.echo(json.dumps(document, indent=1))
        else:
            Console().print(view.describe(document), highlight=False)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="A run (see `get runs`), or a sink: then its newest attempt.")],
    state: State = _STATE,
    lines: Annotated[int, typer.Option("--tail", help="How many lines; 0 for all.")] = 0,
) -> None:
    """What a run printed."""
    with _user_errors():
        processes = Processes(state, SystemEnv())
        child = processes.get(name)
        if child is None:
            document = Objects(state, SystemEnv()).get("SparkSink", name)
            newest = (document or {}).get("status", {}).get("driver", {}).get("podName")
            child = processes.get(newest) if newest else None
        if child is None:
            raise InvalidUsage(f"no run and no sink with runs called {name!r} in {state}; see `persist local get runs`")
        typer.echo(child.log_tail(lines or 1_000_000))


@app.command()
def down(
    state: State = _STATE,
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete resources, logs and the local stores with their data.")
    ] = False,
) -> None:
    """Stop everything that runs. Data and resources stay unless --purge."""
    with _user_errors(), runner_lock(state):
        processes = Processes(state, SystemEnv())
        running = [child for child in processes.every() if child.running]
        for child in running:
            processes.stop(child.name, grace_s=10)
            typer.echo(f"stopped {child.name}")
        if not running:
            typer.echo("nothing was running")
        if purge:
            for part in ("objects", "children", "store"):
                shutil.rmtree(state / part, ignore_errors=True)
            typer.echo(f"deleted the resources, logs and data in {state}")


def _kind(text: str) -> str:
    if text.lower() not in KINDS:
        raise InvalidUsage(f"unknown kind {text!r}; use pshard, ssink, runs or all")
    return KINDS[text.lower()]


def _one(objects: Objects, kind: str, name: str) -> Document:
    found = objects.get(_kind(kind), name)
    if found is None:
        known = ", ".join(one["metadata"]["name"] for one in objects.every(_kind(kind))) or "none"
        raise InvalidUsage(f"no {_kind(kind)} called {name!r}; there are: {known}")
    return found
