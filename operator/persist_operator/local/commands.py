"""The command line of the local runner, added to `persist` by an entry point. `engine_commands.py` has `read|inspect|admin`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import counted
from rich.console import Console
from rich.live import Live
from rich.text import Text

from persist_operator.api import conditions, names
from persist_operator.api.redact import printable, redact
from persist_operator.api.schema_check import load_schemas, printer_columns
from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR
from persist_operator.bridge import Bridge
from persist_operator.local import due, engine_commands, inputs, podless, view
from persist_operator.local.act import LocalActor, Room, child_environ, java_problem, stop_everything
from persist_operator.local.completion import KindName, LoggedName, OnlyName, ResourceName, SinkName, complete_kind
from persist_operator.local.engine_commands import State, runner_settings
from persist_operator.local.objects import KINDS, STATE, Document, Objects
from persist_operator.local.processes import Processes
from persist_operator.local.runner import Busy, LocalRunner, Refused, checked, read_documents, runner_lock
from persist_operator.local.ui import ui
from persist_operator.plan.actions import Note
from persist_operator.settings import OperatorSettings
from persist_operator.views import tables
from persist_operator.views.describe import description

app = typer.Typer(
    help="Run PersistShards and SparkSinks on this machine: same YAML, same planner, no cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _command in engine_commands.COMMANDS.items():
    app.command(_name, context_settings=engine_commands.PASSED_ON)(_command)
app.command()(ui)
REQUESTS = {
    **dict.fromkeys(("rollup", "compact", "gc", "verify", "orphan-scan", "accept-log", names.APPROVE), "PersistShard"),
    "restart": "SparkSink",
    "promote": "SparkSink",
}

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
Wide = Annotated[bool, typer.Option("--wide", "-w", help="All columns, and messages in full.")]
Config = Annotated[
    Path | None, typer.Option(help="Operator configuration (storage profiles); default: files below --state.")
]
Credentials = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="A folder for each Secret, with its keys as files: by the name of the profile whose secretName it is (with --config), or "
        "by the name in optionsSecretName.",
    ),
]
Drivers = Annotated[
    int | None, typer.Option(min=1, help="Sinks that run at once; default: what cores and memory allow.")
]
_GRACE_S = 10.0
_INTERRUPTED = 130


@app.command()
def up(
    files: Annotated[list[Path], typer.Option("--filename", "-f", help="YAML file, folder, or -. Repeatable.")],
    state: State = STATE,
    *,
    config: Config = None,
    credentials: Credentials = None,
    drivers: Drivers = None,
    retry: Annotated[
        list[str] | None,
        typer.Option("--retry", metavar="NAME", help="Run this sink again, although it failed or is done. Repeatable."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Run until interrupted: schedules, retries, maintenance.")
    ] = False,
) -> None:
    """Apply resources, run what is due once, and end when all sinks are done and no maintenance is due.

    Paths of inputs are relative to the current folder, which has a folder for each ConfigMap that an input names. A Scheduled sink
    runs when it never ran, or when a time of its schedule has come since; with --watch at its times. A Streaming sink runs until its
    source has nothing new; with --watch it runs on. A failed sink runs again when files of its input changed, or with --retry.

    An interrupt (Ctrl-C, SIGTERM) stops the runs within ten seconds. A kill leaves them running.

    In both cases the next `up` continues from there, and nothing is written twice.

    Exit codes: 0 no failure, 1 a resource failed, 64 refused, 130 interrupted.

    Example: persist local up -f examples/flights/
    """
    env, console = SystemEnv(), Console(stderr=True)
    objects, processes = Objects(state, env), Processes(state, env)
    try:
        documents = checked(read_documents(files), load_schemas(), objects, watch=watch)
    except Refused as error:
        for problem in error.problems:
            typer.echo(f"refused: {redact(problem)}", err=True)
        raise InvalidUsage(
            f"nothing was applied: correct {counted(len(error.problems), 'error')} in {', '.join(map(str, files))}"
        ) from error
    again = set(retry or ())
    known = {one["metadata"]["name"] for one in (*documents, *objects.every("SparkSink")) if one["kind"] == "SparkSink"}
    if again - known:
        raise InvalidUsage(f"--retry: no sink called {', '.join(sorted(again - known))}; there are: {_listed(known)}")
    settings = runner_settings(state, config)
    if any(one["kind"] == "SparkSink" for one in documents):
        _check_java()
    with runner_lock(state):
        for document in documents:
            applied, outcome = objects.apply(document)
            shown = f"{applied['kind'].lower()}/{applied['metadata']['name']} {outcome}{podless.no_effect(applied)}"
            console.print(shown, highlight=False, soft_wrap=True)
        for document in objects.every("SparkSink"):
            _ask_again(objects, document, env, console, again)
        failed = _run(objects, processes, settings, env, console, watch=watch, drivers=drivers, credentials=credentials)
    _end(objects, failed, list(KINDS), state)


def _ask_again(objects: Objects, document: Document, env: SystemEnv, console: Console, names_asked: set[str]) -> None:
    """Request another run of a sink that --retry names, or that failed and whose input has changed since."""
    name = document["metadata"]["name"]
    if name in names_asked:
        due.ask(objects, document, now_ms=env.now_ms())
    elif due.is_mended(document):
        console.print(f"sparksink/{name} failed, and its input changed since: it runs again", highlight=False)
        due.ask(objects, document, now_ms=env.now_ms())
    elif due.has_failed(document):
        console.print(
            f"sparksink/{name} failed, and its input did not change: --retry {name} runs it again", highlight=False
        )


def _end(objects: Objects, failed: list[str], kinds: list[str], state: Path) -> None:
    """Print the resources, and end with exit code 1 when some failed."""
    for kind in kinds:
        _print_resources(list(objects.every(kind)), kind, wide=False)
    if failed:
        where = "" if state == STATE else f" --state {state}"
        sinks = [one.partition("/")[2] for one in failed if one.startswith("SparkSink/")]
        commands = [f"`persist local logs {name}{where}`" for name in sinks]
        commands += [
            f"`persist local describe pshard {one.partition('/')[2]}{where}`" for one in failed if "Shard/" in one
        ]
        again = f"; after the repair: `persist local run {sinks[0]}{where}`" if sinks else ""
        typer.echo(f"error: {', '.join(failed)} failed; see {', '.join(commands)}{again}", err=True)
        raise typer.Exit(1)


def _check_java() -> None:
    java = java_problem(os.environ)
    if java is not None:
        raise InvalidUsage(java)


@app.command()
def run(
    name: SinkName,
    state: State = STATE,
    *,
    config: Config = None,
    credentials: Credentials = None,
) -> None:
    """Run a sink now, due or not, done or failed, and end when the run has ended. An earlier `up` applied its resource. Maintenance
    that the run makes due is left to the next `up`.

    When another `persist local` holds the state folder, such as `up --watch`, that process runs the sink.

    Exit codes: as for `up`.

    Example: persist local run airlines
    """
    env, console = SystemEnv(), Console(stderr=True)
    objects = Objects(state, env)
    document = _one(objects, "SparkSink", name)
    if document["spec"].get("suspend"):
        raise InvalidUsage(
            f"sparksink/{name} is suspended: set spec.suspend to false, and run `persist local up -f FILE`"
        )
    shard = objects.get("PersistShard", document["spec"]["shardRef"]["name"])
    problems = inputs.problems(document, shard, waits=False)
    if problems:
        raise InvalidUsage(f"sparksink/{name} was not run: {'; '.join(problems)}")
    _check_java()
    settings = runner_settings(state, config)
    try:
        with runner_lock(state):
            due.ask(objects, document, now_ms=env.now_ms())
            failed = _run(
                objects, Processes(state, env), settings, env, console, credentials=credentials, sinks=frozenset({name})
            )
    except Busy as error:
        due.ask(objects, document, now_ms=env.now_ms(), is_another=True)
        holder = str(error).partition(";")[0]
        console.print(f"sparksink/{name}: a run is requested; {holder} and runs it", highlight=False, soft_wrap=True)
        return
    _end(objects, [one for one in failed if one == f"SparkSink/{name}"], ["SparkSink"], state)


def _run(
    objects: Objects,
    processes: Processes,
    settings: OperatorSettings,
    env: SystemEnv,
    console: Console,
    *,
    credentials: Path | None,
    watch: bool = False,
    drivers: int | None = None,
    sinks: frozenset[str] | None = None,
) -> list[str]:
    began_s = env.monotonic_s()
    memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    room = Room.of_machine(cores=os.cpu_count() or 1, memory_mib=memory_mib, drivers_max=drivers)

    def show(owner: str, note: Note) -> None:
        line = Text(f"{env.monotonic_s() - began_s:5.0f}s  ", style="dim")
        line.append(note.reason, style="yellow" if note.kind == "Warning" else "green")
        line.append(printable(f"  {owner}: {note.message}"), style="not dim")
        console.print(line, soft_wrap=True)

    def look(live: Live) -> None:
        documents = [one for kind in KINDS for one in objects.every(kind)]
        lines = view.progress(documents, processes.every(), now_ms=env.now_ms(), width=console.width)
        live.update(Text("\n".join(lines)))

    signal.signal(signal.SIGTERM, _interrupt)
    secrets = OPERATOR_CREDENTIALS_DIR if credentials is None else str(credentials.resolve())
    with contextlib.closing(Bridge(settings, env=env, credentials_dir=secrets)) as bridge:
        environ = child_environ(os.environ)
        actor = LocalActor(processes, bridge, environ=environ, room=room, credentials_dir=secrets)
        runner = LocalRunner(objects, processes, bridge, actor, settings=settings, env=env, on_note=show, sinks=sinks)
        try:
            if not console.is_terminal:
                return runner.run(watch=watch, after_pass=lambda: None)
            with Live(console=console, transient=True, refresh_per_second=4) as live:
                return runner.run(watch=watch, after_pass=lambda: look(live))
        except KeyboardInterrupt:
            console.print("interrupted: stopping all runs (interrupt again to leave them running)", style="yellow")
            stopped = stop_everything(processes, grace_s=_GRACE_S, objects=objects)
            names_stopped = f"stopped {', '.join(stopped)}; " if stopped else ""
            console.print(
                f"{names_stopped}the next `persist local up` continues from here", soft_wrap=True, highlight=False
            )
            raise typer.Exit(_INTERRUPTED) from None


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@app.command()
def get(
    kind: Annotated[str, typer.Argument(help="pshard, ssink, runs, or all.", autocompletion=complete_kind)] = "all",
    name: OnlyName = None,
    state: State = STATE,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """List resources as `kubectl get` does; `runs` lists sink attempts and maintenance runs.

    Example: persist local get runs
    """
    env = SystemEnv()
    objects = Objects(state, env)
    kinds = list(KINDS) if kind in {"all", "runs"} else [_kind(kind, "runs", "all")]
    documents = [one for each in kinds for one in objects.every(each) if name in {None, one["metadata"]["name"]}]
    if not documents:
        what = "nothing" if name is None else f"no {kind} called {name!r}"
        raise InvalidUsage(f"{what} in {state}; start with `persist local up -f FILE`, or name another --state")
    if kind == "runs":
        owners = {f"{one['kind']}/{one['metadata']['name']}" for one in documents}
        children = [child for child in Processes(state, env).every() if child.owner in owners]
        if as_json:
            typer.echo(json.dumps({"kind": "List", "items": tables.runs(documents, children)}, indent=1))
        else:
            _print(tables.runs_table(documents, children, wide=wide, now_ms=env.now_ms(), width=_width(wide=wide)))
    elif as_json:
        typer.echo(json.dumps({"kind": "List", "items": documents}, indent=1))
    else:
        for each in kinds:
            _print_resources([one for one in documents if one["kind"] == each], each, wide=wide)


def _print_resources(documents: list[Document], kind: str, *, wide: bool) -> None:
    if documents:
        now_ms = SystemEnv().now_ms()
        _print(
            tables.resources_table(documents, printer_columns(kind), wide=wide, now_ms=now_ms, width=_width(wide=wide))
        )
        typer.echo()


def _width(*, wide: bool) -> int | None:
    """The width at which lines are cut, which is the terminal's. None, for whole lines, in a pipe or with `wide`."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() and not wide else None


def _print(lines: Iterable[str], *, header: bool = True) -> None:
    for number, line in enumerate(lines):
        typer.echo(typer.style(line, bold=True) if header and number == 0 else line)


@app.command()
def describe(
    kind: KindName,
    name: ResourceName,
    state: State = STATE,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Describe one resource: readiness, contents or progress, conditions, runs, spec.

    Example: persist local describe ssink flights
    """
    env = SystemEnv()
    document = _one(Objects(state, env), _kind(kind), name)
    if as_json:
        typer.echo(json.dumps(document, indent=1))
    else:
        _print(description(document, now_ms=env.now_ms(), width=_width(wide=wide)))


@app.command()
def logs(
    name: LoggedName,
    state: State = STATE,
    lines: Annotated[int, typer.Option("--tail", min=0, help="How many lines; 0 for all.")] = 0,
) -> None:
    """Show the output of a run, at most its last MiB.

    Example: persist local logs flights --tail 20
    """
    env = SystemEnv()
    processes = Processes(state, env)
    child = processes.get(name)
    if child is None:
        document = Objects(state, env).get("SparkSink", name)
        newest = (document or {}).get("status", {}).get("driver", {}).get("podName")
        child = processes.get(newest) if newest else None
    if child is None:
        raise InvalidUsage(f"no run and no sink with runs called {name!r} in {state}; see `persist local get runs`")
    typer.echo(printable(child.log_tail(lines or sys.maxsize)))


@app.command()
def request(
    what: Annotated[
        str,
        typer.Argument(
            help="rollup, compact, gc, verify, orphan-scan, approve or accept-log of a shard; restart or promote of a sink.",
            autocompletion=lambda: list(REQUESTS),
        ),
    ],
    name: ResourceName,
    state: State = STATE,
    plan: Annotated[
        str | None,
        typer.Option(help="With approve: the id of the plan, as `describe` shows it; default: the one that waits."),
    ] = None,
) -> None:
    """Request one run now, due or not, or approve a plan: sets the annotation persistshard.io/request-..., as on a cluster.

    The next `up` carries it out, or the `up --watch` that runs.

    Example: persist local request compact flights
    """
    if what not in REQUESTS:
        raise InvalidUsage(f"unknown request {what!r}; use {', '.join(REQUESTS)}")
    if plan is not None and what != names.APPROVE:
        raise InvalidUsage(f"--plan is for {names.APPROVE}, not for {what}: leave it out")
    env = SystemEnv()
    objects, kind = Objects(state, env), REQUESTS[what]
    document = _one(objects, kind, name)
    token = _plan_to_approve(document, plan) if what == names.APPROVE else str(env.now_ms())
    objects.annotate(kind, name, f"{names.REQUEST_PREFIX}{what}", token)
    typer.echo(f"{kind.lower()}/{name} {what} requested; `persist local up` carries it out")


def _plan_to_approve(document: Document, wanted: str | None) -> str:
    """The id of the plan that waits for an approval. Raises InvalidUsage when no plan waits, or when it is not `wanted`."""
    name, found = document["metadata"]["name"], (document.get("status") or {}).get("plan", {})
    waits = found.get("id") if found.get("approved") is False else None
    if waits is None:
        raise InvalidUsage(f"no plan of {name} waits for an approval; see `persist local describe pshard {name}`")
    if wanted not in {None, waits}:
        raise InvalidUsage(f"the plan of {name} that waits is {waits}, not {wanted}: {found.get('reason', '')}")
    return str(waits)


@app.command()
def delete(
    kind: KindName,
    name: ResourceName,
    state: State = STATE,
    *,
    config: Config = None,
    credentials: Credentials = None,
) -> None:
    """Delete a resource. The data of a shard follow its spec.reclaimPolicy: Retain keeps them, and a resource of the same name takes
    them up again; Tombstone empties the shard; Purge (with spec.deletionConfirmation) also deletes blobs that no version names.

    Runs of the resource are stopped. A shard is not emptied while a sink refers to it, or a reader holds it: the message says which,
    and the command may be repeated.

    Exit codes: 0 deleted, 1 held back, 64 refused.

    Example: persist local delete pshard things
    """
    env, console = SystemEnv(), Console(stderr=True)
    objects, processes, kind = Objects(state, env), Processes(state, env), _kind(kind)
    document = _one(objects, kind, name)
    policy, shard_id = document["spec"].get("reclaimPolicy"), (document.get("status") or {}).get("shardId")
    settings = runner_settings(state, config)
    with runner_lock(state):
        if kind == "SparkSink":
            processes.forget(f"{kind}/{name}", grace_s=_GRACE_S)
            objects.remove(kind, name)
            typer.echo(f"sparksink/{name} deleted")
            return
        for child in processes.every():
            if child.owner == f"{kind}/{name}" and child.labels["kind"] != names.RECLAIM:
                processes.discard(child.name, grace_s=_GRACE_S)
        objects.mark_deleted(kind, name, () if policy == "Retain" else (names.FINALIZER,))
        _try_now(objects, kind, name)
        _run(objects, processes, settings, env, console, credentials=credentials, sinks=frozenset())
    held = objects.get(kind, name)
    if held is not None:
        found = conditions.find(held["status"], "DeletionBlocked") or {}
        typer.echo(f"error: persistshard/{name} is held back: {found.get('reason')}: {found.get('message')}", err=True)
        raise typer.Exit(1)
    kept = f"; the data of {shard_id} stay" if policy == "Retain" and shard_id else ""
    typer.echo(f"persistshard/{name} deleted (reclaimPolicy {policy}){kept}")


def _try_now(objects: Objects, kind: str, name: str) -> None:
    """Makes the deletion try again now, because a person requested it."""
    status = (objects.get(kind, name) or {}).get("status") or {}
    if deletion := status.get("deletion"):
        kept = {field: value for field, value in deletion.items() if field != "nextAttemptTime"}
        objects.set_status(kind, name, {**status, "deletion": kept})


@app.command()
def down(
    state: State = STATE,
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete resources, logs and the local stores with their data.")
    ] = False,
) -> None:
    """Stop all runs. Data and resources stay, unless --purge."""
    if not state.is_dir():
        raise InvalidUsage(f"no state folder {state}; name another with --state")
    env = SystemEnv()
    with runner_lock(state):
        stopped = stop_everything(Processes(state, env), grace_s=_GRACE_S, objects=Objects(state, env))
        for name in stopped:
            typer.echo(f"stopped {name}")
        if not stopped:
            typer.echo("nothing was running")
        if purge:
            for part in ("objects", "children", "store"):
                shutil.rmtree(state / part, ignore_errors=True)
            typer.echo(f"deleted the resources, logs and data in {state}")


def _kind(text: str, *also: str) -> str:
    """The kind of a resource by one of its names. Raises InvalidUsage, which lists these names and the words in `also`."""
    for kind, forms in KINDS.items():
        if text.lower() in forms:
            return kind
    *words, last = (*(forms[0] for forms in KINDS.values()), *also)
    raise InvalidUsage(f"unknown kind {text!r}; use {', '.join(words)} or {last}")


def _one(objects: Objects, kind: str, name: str) -> Document:
    found = objects.get(kind, name)
    if found is None:
        known = _listed(one["metadata"]["name"] for one in objects.every(kind))
        raise InvalidUsage(f"no {kind} called {name!r}; there are: {known}")
    return found


def _listed(found: Iterable[str]) -> str:
    return ", ".join(sorted(found)) or "none"
