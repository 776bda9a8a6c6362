"""The loop of the local runner: observe, plan, write the status, act. The order and the plans are the same as in the cluster.

A lock file lets one runner at a time hold a state folder. After a kill at any point, the next `up` continues from the files.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import Owner

from persist_operator.api import conditions, pausing
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.schema_check import ResourceSchemas
from persist_operator.api.shard import Shard, ShardSchema
from persist_operator.api.shard_status import ShardStatus, Upkeep
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge
from persist_operator.local import chains, hints, inputs
from persist_operator.local.act import LocalActor
from persist_operator.local.due import Ticks
from persist_operator.local.objects import Document, Objects
from persist_operator.local.observe import runs_of
from persist_operator.local.podless import without_pods
from persist_operator.local.processes import Child, Processes
from persist_operator.plan import maintenance
from persist_operator.plan.actions import KeepFinalizer, Note, Plan, StartMaintenance, action_key, done_note
from persist_operator.plan.keeping.evolving import schema_problem
from persist_operator.plan.keeping.reclaiming import owner_state
from persist_operator.plan.observed import (
    ActionFailure,
    Inspected,
    NotInspected,
    OwnerState,
    Run,
    Seen,
    ShardObserved,
    SinkObserved,
    StoreFailure,
)
from persist_operator.plan.shard import is_to_be_asked, plan_shard
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import OperatorSettings

#: The pause between two passes. It is short after a change and longer while nothing changes, because a pass takes cores from the children.
_LOOK_FIRST_S, _LOOK_MAX_S = 0.1, 1.0
#: The most values of a document. Aliases can make any number of values from a few lines. A resource has at most a few thousand.
_VALUES_MAX = 1_000_000
#: `up` waits for maintenance that is due within this time. Later maintenance is left to the next `up`, or to `--watch`.
_PATIENCE_MS = 15_000
#: Reasons why a sink's shard or its input shard is not usable, which end only with a change of a resource or a write from elsewhere. `up`
#: does not wait for these shards.
_HOPELESS = {"ShardNotFound", "ShardStalled", "InputNotFound", "InputStalled", "InputClosed", "InputNotWritten"}
OnNote = Callable[[str, Note], None]


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """All YAML documents of the files, and of the *.yaml and *.yml files in the folders (by name). The path `-` is the standard input.
    Raises InvalidUsage, which names a path that cannot be read, or paths without resources.
    """
    files: list[Path] = []
    for path in paths:
        if path == Path("-"):
            files.append(Path("/dev/stdin"))
        elif path.is_dir():
            found = sorted(one for one in path.iterdir() if one.suffix in {".yaml", ".yml"})
            if not found:
                raise InvalidUsage(f"no *.yaml or *.yml in {path}")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise InvalidUsage(f"no such file or folder: {path}")
    documents: list[Document] = []
    for file in files:
        try:
            documents += [one for one in _loaded(file.read_text(encoding="utf-8"), file) if one is not None]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsage(f"{file} cannot be read: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
            raise InvalidUsage(f"{file} is not YAML: {error}") from error
    if not documents:
        raise InvalidUsage(f"no resources in {', '.join(map(str, paths))}")
    return documents


def _loaded(text: str, file: Path) -> Iterator[Any]:
    """The documents. Raises InvalidUsage, before it makes the document, if aliases repeat too many values, or a mapping names a key twice.
    PyYAML would take the last value of such a key, and `kubectl apply` refuses it.
    """
    # This does not use the C loader, because deep nesting ends its process.
    loader = yaml.SafeLoader(text)
    while (node := loader.get_node() if loader.check_node() else None) is not None:
        if _values_in(node, {}) > _VALUES_MAX:
            raise InvalidUsage(
                f"{file}: a document has more than {_VALUES_MAX:,} values, counting those that aliases (*name) repeat: use fewer"
            )
        for key in _doubled(node, set()):
            raise InvalidUsage(
                f"{file}, line {key.start_mark.line + 1}: {key.value} is named twice; remove one of the two"
            )
        yield loader.construct_document(node)


def _doubled(node: yaml.Node, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    """The keys within a node that their mapping has before."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in names:
                    yield key
                names.add(key.value)
    for each in chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value:
        yield from _doubled(each, seen)


def _values_in(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values of a node, each counted as often as aliases name it; infinite if the node is part of itself."""
    found = known.get(id(node))
    if found is None:
        known[id(node)] = math.inf
        within = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        below = within if isinstance(node, yaml.CollectionNode) else ()
        found = known[id(node)] = 1 + sum(_values_in(each, known) for each in below)
    return found


class Refused(InvalidUsage):
    """Resources are not valid, and nothing was applied. `problems` has one line for each error."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def checked(
    documents: Sequence[Mapping[str, Any]], schemas: ResourceSchemas, objects: Objects, *, watch: bool = False
) -> list[Document]:
    """The documents with defaults, shards before sinks. Raises Refused with all errors, including those in types of schemas, and those that
    would end a Spark run: in schedules, and in inputs that are files. With `watch` the input of a Scheduled sink may come later.
    """
    out: dict[tuple[str, str], Document] = {}
    problems = []
    for document in documents:
        kind, name = _names(document)
        errors = schemas.check(document, objects.get(kind, name) if kind in schemas.kinds else None)
        problems += [f"{kind}/{name}: {error}" for error in errors]
        if (kind, name) in out:
            problems.append(f"{kind}/{name}: is defined twice; remove one of the two")
        if not errors:
            out[kind, name] = schemas.default(document)
    for (kind, name), document in out.items():
        if kind == "SparkSink":
            shard_name = document["spec"]["shardRef"]["name"]
            shard = out.get(("PersistShard", shard_name)) or objects.get("PersistShard", shard_name)
            problems += [f"{kind}/{name}: {one}" for one in inputs.problems(document, shard, waits=watch)]
        elif (schema := document["spec"].get("schema")) is not None:
            # A schema cannot be changed once it is applied, so a mistake in its types could not be corrected.
            problem = schema_problem(ShardSchema(key=schema["key"], value=schema.get("value") or ""), None)
            problems += [] if problem is None else [f"{kind}/{name}: {problem}"]
    if problems:
        raise Refused(problems)
    return sorted(out.values(), key=lambda one: str(one["kind"]))


def _names(document: Any) -> tuple[str, str]:
    """Kind and name of a document that is not validated yet; `?` for a missing one."""
    if not isinstance(document, Mapping):
        return "?", "?"
    metadata = document.get("metadata")
    name = metadata.get("name", "?") if isinstance(metadata, Mapping) else "?"
    return str(document.get("kind", "?")), str(name)


class Busy(InvalidUsage):
    """Another process holds the state folder."""


@contextmanager
def runner_lock(state: Path) -> Iterator[None]:
    """Hold the state folder. Raises Busy when another process holds it, and InvalidUsage when it cannot be written."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        file = (state / "lock").open("a+", encoding="ascii")
    except OSError as error:
        raise InvalidUsage(
            f"the state folder {state} cannot be written: {error.strerror}; choose another --state"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = f"another `persist local` (process {file.read().strip() or '?'}) works in {state}"
            raise Busy(f"{holder}; interrupt it, or choose another --state") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@dataclass(slots=True)
class Pass:
    """The outcome of one pass over all resources. `settled` iff no run is in progress, no run is due, and no run waits for another try."""

    settled: bool
    changed: bool
    failed: list[str]


def _upkeep(plan: Plan) -> Mapping[MaintenanceKind, Upkeep]:
    return ShardStatus.of(plan.status).maintenance or {}


class LocalRunner:
    """Reconciles every resource of one state folder, one after the other."""

    def __init__(
        self,
        objects: Objects,
        processes: Processes,
        bridge: Bridge,
        actor: LocalActor,
        *,
        settings: OperatorSettings,
        env: Env,
        on_note: OnNote,
        sinks: Collection[str] | None = None,
    ) -> None:
        """`on_note` gets each new note on a resource. `sinks`: only sinks with these names run, and maintenance waits for a runner of all
        sinks. None: all sinks and maintenance run.
        """
        self._objects, self._processes, self._bridge, self._actor = objects, processes, bridge, actor
        self._settings, self._env, self._on_note = settings, env, on_note
        self._failures: dict[str, dict[str, ActionFailure]] = {}
        self._inspected: dict[str, Inspected] = {}
        self._notes: dict[str, set[Note]] = {}
        self._changed = False
        self._sinks = sinks
        self._ticks = Ticks(watch=True)

    def run(self, *, watch: bool, after_pass: Callable[[], None]) -> list[str]:
        """Repeat `one_pass` until all resources have settled; with `watch`, for ever. Returns the resources that failed.

        Calls `after_pass` after each pass. Without `watch`, a Scheduled sink runs at most once, and a stream runs until its source has no
        new rows.
        """
        self._ticks, self._actor.is_bounded = Ticks(watch=watch), not watch
        quiet, look_s = 0, _LOOK_FIRST_S
        while True:
            result = self.one_pass()
            after_pass()
            # One settled pass may fall between the end of a child and the work that it makes due.
            quiet = quiet + 1 if result.settled else 0
            if quiet >= 2 and not watch:
                return result.failed
            look_s = _LOOK_FIRST_S if result.changed or quiet else min(_LOOK_MAX_S, look_s * 2)
            self._env.sleep(look_s)

    def one_pass(self) -> Pass:
        """Observe, plan, write status and act for every shard, then for every sink."""
        children = self._processes.every()
        results: list[tuple[str, bool, bool]] = []  # owner, settled, failed
        self._changed = False
        sinks = [
            one
            for one in self._objects.every("SparkSink")
            if self._sinks is None or one["metadata"]["name"] in self._sinks
        ]
        used = {name for one in sinks for name in (chains.written_by(one), *chains.read_by(one))}
        for document in self._objects.every("PersistShard"):
            name = document["metadata"]["name"]
            owner = f"PersistShard/{name}"
            if self._is_left_alone(document):
                results.append((owner, True, False))
            elif document["metadata"].get("deletionTimestamp"):
                results.append((owner, *self._one_deletion(document, children)))
            elif self._sinks is None:
                results.append((owner, *self._one_shard(document, children)))
            elif name in used:
                self._one_shard(document, children, maintains=False)
        busy: set[str] = set()
        for document in chains.upstream_first(sinks):
            is_settled, has_failed = self._one_sink(document, children, busy if self._actor.is_bounded else frozenset())
            results.append((f"SparkSink/{document['metadata']['name']}", is_settled, has_failed))
            if not is_settled and (written := chains.written_by(document)) is not None:
                busy.add(written)
        return Pass(
            settled=all(is_settled for _, is_settled, _ in results),
            changed=self._changed,
            failed=[owner for owner, _, has_failed in results if has_failed],
        )

    def _is_left_alone(self, document: Document) -> bool:
        """Whether the resource is paused. If it is, shows this on the status."""
        if not pausing.is_paused(document):
            return False
        status = pausing.paused_status(document, now_ms=self._env.now_ms())
        self._changed = self._changed or status != document["status"]
        self._objects.set_status(document["kind"], document["metadata"]["name"], status)
        return True

    def _one_shard(self, document: Document, children: Sequence[Child], *, maintains: bool = True) -> tuple[bool, bool]:
        """Reconcile one shard. Returns whether it has settled (no run, nothing due soon, or stalled), and whether it failed."""
        shard = Shard.of(without_pods(document))
        owner = f"PersistShard/{shard.meta.name}"
        answer = self._inspect(shard)
        self._inspected[shard.meta.name] = answer.inspected
        observed = ShardObserved(
            inspected=answer.inspected,
            shard_id=answer.shard_id,
            runs=runs_of(children, owner),
            failures=self._failures.get(owner, {}),
        )
        plan = plan_shard(
            shard,
            observed,
            now_ms=self._env.now_ms(),
            settings=self._settings,
            words=hints.local_words(shard.meta.name),
        )
        if not maintains:
            plan = replace(plan, actions=tuple(one for one in plan.actions if not isinstance(one, StartMaintenance)))
        self._carry_out(owner, document, plan)
        stalled = conditions.is_true(plan.status, "Stalled")
        quiet = self._is_quiet(plan, observed.runs) and not self._is_due_soon(shard, observed.inspected, plan)
        failing = any(block.consecutive_failures for block in _upkeep(plan).values())
        return quiet or stalled, stalled or failing

    def _one_deletion(self, document: Document, children: Sequence[Child]) -> tuple[bool, bool]:
        """The next step of the deletion of a shard, which ends with the removal of its resource. Returns whether it has settled (gone, or
        nothing to do before another try), and whether something holds it back.
        """
        shard = Shard.of(document)
        owner = f"PersistShard/{shard.meta.name}"
        every = self._objects.every("SparkSink")
        sinks = [one for one in every if shard.meta.name in (chains.written_by(one), *chains.read_by(one))]
        observed = ShardObserved(
            inspected=NotInspected(),
            runs=runs_of(children, owner),
            sinks=tuple(one["metadata"]["name"] for one in sinks),
            failures=self._failures.get(owner, {}),
        )
        plan = plan_shard(shard, observed, now_ms=self._env.now_ms(), settings=self._settings)
        if not shard.meta.finalizers or KeepFinalizer(present=False) in plan.actions:
            self._processes.forget(owner, grace_s=0)
            self._objects.remove("PersistShard", shard.meta.name)
            self._changed = True
            return True, False
        self._carry_out(owner, document, plan)
        is_held = not plan.actions and all(one.phase.finished for one in observed.runs)
        return is_held, is_held

    def _one_sink(self, document: Document, children: Sequence[Child], busy: Set[str]) -> tuple[bool, bool]:
        """Reconcile one sink. Returns whether it has settled (no run, nothing due, or stalled), and whether it failed. `busy`: the shards
        that other sinks have yet to write.
        """
        if self._is_left_alone(document):
            return True, False
        if self._ticks.is_over(document):
            return True, conditions.is_true(document["status"], "Stalled")
        shown = self._ticks.shown(document, now_ms=self._env.now_ms())
        sink = Sink.of(without_pods(shown))
        owner = f"SparkSink/{sink.meta.name}"
        view = chains.target_of(sink, self._found(sink.spec.shard_name), self._settings, busy=busy)
        read = chains.with_news(self._found(sink.spec.input_shard), self._inspected.get(str(sink.spec.input_shard)))
        source = chains.input_of(sink, read, self._settings, busy=busy)
        runs = runs_of(children, owner)
        observed = SinkObserved(shard=view, input=source, runs=runs, failures=self._failures.get(owner, {}))
        plan = plan_sink(
            sink,
            observed,
            now_ms=self._env.now_ms(),
            settings=self._settings,
            words=hints.local_words(sink.meta.name),
        )
        plan = self._ticks.kept(plan, document, shown)
        self._carry_out(owner, document, plan)
        obstacle = observed.obstacle
        hopeless = obstacle is not None and obstacle.reason in _HOPELESS and all(run.phase.finished for run in runs)
        stalled = conditions.is_true(plan.status, "Stalled") or (hopeless and not self._is_done(plan))
        return stalled or self._is_quiet(plan, runs), stalled

    def _found(self, name: str | None) -> Document | None:
        return None if name is None else self._objects.get("PersistShard", name)

    def _carry_out(self, owner: str, document: Document, plan: Plan) -> None:
        kind, name = document["kind"], document["metadata"]["name"]
        self._changed = self._changed or plan.status != (document.get("status") or {})
        self._objects.set_status(kind, name, plan.status)  # the intent is written before any action
        notes = list(plan.notes)
        meta = Shard.of(document).meta if kind == "PersistShard" else Sink.of(document).meta
        for action in plan.actions:
            what = action_key(action)
            failures = self._failures.setdefault(owner, {})
            try:
                done = self._actor.act(action, meta, kind)
                failures.pop(what, None)
                note = done_note(action) if done else None
                notes += [] if note is None else [note]
            except PersistError as error:
                message = hints.by_name(str(error), plan.status.get("shardId"), name)
                failures[what] = ActionFailure(
                    reason=error.kind.value,
                    message=message,
                    permanent=isinstance(error, InvalidUsage),
                    at_ms=self._env.now_ms(),
                    generation=meta.generation,
                )
                notes.append(Note("Warning", error.kind.value, message))
        # A note that is the same in each pass is passed on once.
        for note in notes:
            if note not in self._notes.get(owner, ()):
                self._on_note(owner, note)
        self._notes[owner] = set(notes)

    def _inspect(self, shard: Shard) -> Seen:
        """Ask the stores, as in a cluster. This makes the resource the owner of its shard, unless another resource owns it."""
        try:
            location = shard.location(self._settings)
        except InvalidUsage:
            return Seen(inspected=NotInspected())  # the plan reports the error
        if not is_to_be_asked(shard):
            return Seen(inspected=NotInspected())
        answer = self._bridge.claim(shard, location, self._settings, owner_state=self._owner_state)
        if not isinstance(answer.inspected, StoreFailure):
            return answer
        message = hints.by_name(answer.inspected.message, shard.known.shard_id, shard.meta.name)
        return replace(answer, inspected=replace(answer.inspected, message=message))

    def _owner_state(self, owner: Owner) -> OwnerState:
        found = self._objects.get("PersistShard", owner.name)
        return owner_state(None if found is None else Shard.of(found))

    def _is_due_soon(self, shard: Shard, inspected: Inspected, plan: Plan) -> bool:
        """Whether maintenance of the shard is due within the time that `up` waits."""
        if not isinstance(inspected, Inspection) or shard.spec.suspend:
            return False
        until_ms = self._env.now_ms() + _PATIENCE_MS
        blocks = _upkeep(plan)
        for kind in maintenance.automatic_kinds(shard):
            block = blocks.get(kind, Upkeep())
            is_soon = block.wait_reason is None and maintenance.not_before_ms(block) <= until_ms
            if is_soon and maintenance.debt_reason(shard, inspected, blocks, kind):
                return True
        return False

    @staticmethod
    def _is_done(plan: Plan) -> bool:
        return conditions.is_true(plan.status, "Ready")

    @staticmethod
    def _is_quiet(plan: Plan, runs: Sequence[Run]) -> bool:
        going = any(not run.phase.finished for run in runs)
        return not plan.actions and not going and not conditions.is_true(plan.status, "Reconciling")
