"""The loop of the local runner: observe, plan, write status, act; the same order and the same plans as in the cluster.

One runner per state folder (a lock file held while it lives). Killed at any point, the next `up` goes on from the files.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.model.inspection import Inspection

from persist_operator.api import conditions
from persist_operator.api.names import MAINTENANCE_KINDS
from persist_operator.api.schema_check import ResourceSchemas
from persist_operator.api.shard import Shard
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge
from persist_operator.local.act import LocalActor
from persist_operator.local.objects import NAMESPACE, Document, Objects
from persist_operator.local.observe import runs_of
from persist_operator.local.processes import Processes
from persist_operator.plan import maintenance
from persist_operator.plan.actions import Note, Plan
from persist_operator.plan.observed import ActionFailure, Claim, ShardObserved, ShardView, SinkObserved
from persist_operator.plan.shard import assigned_id, plan_shard
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import OperatorSettings

#: Between two looks at the children; they tell of themselves through files.
_LOOK_S = 0.25
Told = Callable[[str, Note], None]


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """All YAML documents of files, and of the *.yaml and *.yml files of folders, sorted. InvalidUsage names what cannot be read."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(one for one in path.iterdir() if one.suffix in {".yaml", ".yml"})
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidUsage(f"no such file or folder: {path}")
    documents: list[Document] = []
    for file in files:
        try:
            found = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one is not None]
        except yaml.YAMLError as error:
            raise InvalidUsage(f"{file} is not YAML: {error}") from error
        documents += found
    if not documents:
        raise InvalidUsage(f"no resources in {', '.join(map(str, paths))}")
    return documents


def checked(documents: Sequence[Mapping[str, Any]], schemas: ResourceSchemas, objects: Objects) -> list[Document]:
    """The documents with defaults filled in, shards before sinks. InvalidUsage lists everything that is wrong, and nothing is applied."""
    out, problems = [], []
    for document in documents:
        kind, name = document.get("kind"), (document.get("metadata") or {}).get("name", "?")
        old = objects.get(str(kind), str(name))
        errors = schemas.check(document, old)
        problems += [f"{kind}/{name}: {error}" for error in errors]
        if not errors:
            out.append(schemas.default(document))
    if problems:
        raise InvalidUsage("\n".join(problems))
    return sorted(out, key=lambda one: one["kind"])


@contextmanager
def runner_lock(state: Path) -> Iterator[None]:
    """Hold the state folder, or raise InvalidUsage when another runner does."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidUsage(
                f"another `persist local` runs in {state}; stop it, or choose another --state"
            ) from error
        yield


@dataclass(slots=True)
class Pass:
    """What one pass over all resources saw. `settled` iff nothing goes, nothing is due and nothing waits to be repeated."""

    settled: bool
    failed: list[str]


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
        tell: Told,
    ) -> None:
        self._objects, self._processes, self._bridge, self._actor = objects, processes, bridge, actor
        self._settings, self._env, self._tell = settings, env, tell
        self._failures: dict[str, dict[str, ActionFailure]] = {}

    def run(self, *, watch: bool, seen: Callable[[], None]) -> list[str]:
        """Pass after pass until everything has settled (for ever with `watch`); the resources that failed.

        `seen` is called after each pass.
        """
        quiet = 0
        while True:
            result = self.one_pass()
            seen()
            # One settled look may fall between a child's end and what it makes due.
            quiet = quiet + 1 if result.settled else 0
            if quiet >= 2 and not watch:
                return result.failed
            self._env.sleep(_LOOK_S)

    def one_pass(self) -> Pass:
        """Observe, plan, write status and act for every shard, then for every sink."""
        children = self._processes.every()
        settled, failed = True, []
        shards = {one["metadata"]["name"]: one for one in self._objects.every("PersistShard")}
        for document in shards.values():
            shard = Shard.of(document)
            owner = f"PersistShard/{shard.meta.name}"
            observed = ShardObserved(
                inspected=self._inspect(shard),
                runs=runs_of(children, owner),
                claims=self._claims(shard, shards),
                failures=self._failures.get(owner, {}),
            )
            plan = plan_shard(shard, observed, now_ms=self._env.now_ms(), settings=self._settings)
            self._carry_out(owner, document, plan)
            quiet = self._is_quiet(plan, observed.runs) and not self._has_debt(shard, observed)
            settled = settled and (quiet or conditions.is_true(plan.status, "Stalled"))
            failed += [owner] if conditions.is_true(plan.status, "Stalled") else []
        for document in self._objects.every("SparkSink"):
            sink = Sink.of(document)
            owner = f"SparkSink/{sink.meta.name}"
            found = self._objects.get("PersistShard", sink.spec.shard_name)
            view = ShardView.of(sink.spec.shard_name, Shard.of(found) if found else None, self._settings)
            runs = runs_of(children, owner)
            plan = plan_sink(
                sink, SinkObserved(shard=view, runs=runs), now_ms=self._env.now_ms(), settings=self._settings
            )
            self._carry_out(owner, document, plan)
            stalled = conditions.is_true(plan.status, "Stalled")
            settled = settled and (stalled or self._is_quiet(plan, runs))
            failed += [owner] if stalled else []
        return Pass(settled, failed)

    def _carry_out(self, owner: str, document: Document, plan: Plan) -> None:
        kind, name = document["kind"], document["metadata"]["name"]
        self._objects.set_status(kind, name, plan.status)  # the intent stands before anything is done
        for note in plan.notes:
            self._tell(owner, note)
        meta = Shard.of(document).meta if kind == "PersistShard" else Sink.of(document).meta
        for action in plan.actions:
            what = type(action).__name__
            failures = self._failures.setdefault(owner, {})
            try:
                self._actor.act(action, meta, kind)
                failures.pop(what, None)
            except PersistError as error:
                failures[what] = ActionFailure(
                    reason=error.kind.value,
                    message=str(error),
                    permanent=isinstance(error, InvalidUsage),
                    at_ms=self._env.now_ms(),
                )
                self._tell(owner, Note("Warning", error.kind.value, str(error)))

    def _inspect(self, shard: Shard) -> Any:
        shard_id = assigned_id(shard)
        if shard_id is None:
            return ShardObserved().inspected
        return self._bridge.inspect(shard.spec.location(self._settings), shard_id)

    def _claims(self, shard: Shard, shards: Mapping[str, Document]) -> tuple[Claim, ...]:
        mine = assigned_id(shard)
        others = [Shard.of(one) for name, one in shards.items() if name != shard.meta.name]
        return tuple(
            Claim(key=f"{NAMESPACE}/{one.meta.name}", uid=one.meta.uid, created_ms=one.meta.created_ms)
            for one in others
            if mine is not None and (assigned_id(one) or one.spec.shard_id) == mine
        )

    def _has_debt(self, shard: Shard, observed: ShardObserved) -> bool:
        if not isinstance(observed.inspected, Inspection) or shard.spec.suspend:
            return False
        automatic = {
            "rollup": True,
            "gc": shard.spec.gc_enabled,
            "compaction": shard.spec.compaction_mode == "Automatic",
        }
        blocks = shard.status.get("maintenance", {})
        debts = [kind for kind in MAINTENANCE_KINDS if automatic[kind]]
        return any(maintenance.debt_reason(shard, observed.inspected, blocks, kind) for kind in debts)

    @staticmethod
    def _is_quiet(plan: Plan, runs: Sequence[Any]) -> bool:
        going = any(not run.phase.finished for run in runs)
        return not plan.actions and not going and not conditions.is_true(plan.status, "Reconciling")
