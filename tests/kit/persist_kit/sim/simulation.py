"""Deterministic simulation: the shipped engine under seeded schedules, clocks and faults (`make sim SEEDS=2000`).

    plan (from the seed) -> History: processes with actors -> Network -> stores <- Witness judges every commit
                               all on one Scheduler, which runs one thread at a time

This module starts, ends and reports a history. A seed gives the same history everywhere, to the byte of its
event log. Interleaving, not volume, finds bugs: histories are short, and their settings make rare paths common (tiny parts, rollups every
few versions, very short leases).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from persist_engine.base.errors import ForkedLog, MissingBlob, PersistError
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.state import ShardState
from persist_engine.rows.errors_column import with_errors

from persist_kit.sim.actors.actor import Actor, Host
from persist_kit.sim.actors.admin import Administrator
from persist_kit.sim.actors.names import Registrar
from persist_kit.sim.actors.reader import Examiner, Reader
from persist_kit.sim.actors.recoverer import Recoverer
from persist_kit.sim.actors.sinks import Correcting, DesiredCollection, Sinker
from persist_kit.sim.actors.streams import Driver, Note
from persist_kit.sim.actors.tables import Tabler, Transaction
from persist_kit.sim.actors.upkeep import BackgroundWriter, Closer, Downgrader, Maintainer
from persist_kit.sim.actors.upserts import Upserter
from persist_kit.sim.actors.writer import Letter, Writer
from persist_kit.sim.final import settle
from persist_kit.sim.fork import Branches, JudgedBlob, RoutedConsensus, watched_looks
from persist_kit.sim.locks import SimEvent
from persist_kit.sim.network import Network, PagedBlob
from persist_kit.sim.plan import Plan, plan_of
from persist_kit.sim.push import SimPush
from persist_kit.sim.scheduler import Process, Scheduler
from persist_kit.sim.threads import SimEnv, simulated_threads
from persist_kit.sim.watched import PathCounts
from persist_kit.sim.witness import Witness
from persist_kit.world import SCHEMA

STEPS_MAX = 60_000
_KINDS: dict[str, type[Actor]] = {
    "writer": Writer,
    "reader": Reader,
    "examiner": Examiner,
    "compactor": Maintainer,
    "collector": Maintainer,
    "roller": Maintainer,
    "downgrader": Downgrader,
    "closer": Closer,
    "sweeper": Maintainer,
    "sinker": Sinker,
    "upserter": Upserter,
    "driver": Driver,
    "tabler": Tabler,
    "admin": Administrator,
    "registrar": Registrar,
    "recoverer": Recoverer,
}


@dataclass(frozen=True)
class Report:
    """The result of a history. `failure`: the first broken rule; `trace`: the hash of `events`, equal for equal seeds."""

    plan: Plan
    failure: str | None
    events: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def trace(self) -> str:
        """The hash of the events. Equal seeds give equal traces."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()[:16]


class History:
    """One run of a plan. Used once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(random.Random(f"run {plan.seed}"), steps_max=STEPS_MAX)  # noqa: S311 - repeatable
        self.network = Network(self.scheduler, plan.weather)
        self.shard_id = ShardId.from_bytes(plan.seed.to_bytes(16, "big"))
        self.branches = Branches(self.scheduler, Witness(self.scheduler, self.shard_id), plan.disaster)
        if plan.keeps_blobs:
            self.branches.main.kept = {}
        self.mail: list[Letter] = []
        self.rows_written = 0
        self.ambiguous = 0
        self.staged_too_early = 0
        self.schema = with_errors(SCHEMA) if plan.errs else SCHEMA
        """The first schema of the shard."""
        self.desired = DesiredCollection(plan.seed, errs=plan.errs)
        self.correcting: list[Correcting] = []
        self.sinks_ended = 0
        self.upserts = 0
        self.notes: list[Note] = []
        self.streamed = self.takeovers = self.compared = 0
        self.transactions: list[Transaction] = []
        self.table_writes = self.table_changes = 0
        self.paths = PathCounts(self.scheduler)
        self._init = Process("init")
        self._incarnations: dict[int, Host] = {}
        self._guests: list[Process] = []
        self._started = 0
        self._done = SimEvent(self.scheduler)
        kinds = dict(_KINDS)
        if plan.written_by == "background":
            kinds["writer"] = BackgroundWriter
        self._actors = [kinds[name.rstrip("0123456789")](self, name, operations) for name, operations in plan.actors]

    @property
    def witness(self) -> Witness:
        """The witness that judges the running process."""
        return self.branches.judge(self.scheduler.current.process)

    @property
    def may_be_ambiguous(self) -> bool:
        """See Plan. Also true for a finalized shard, which has no record of its appends."""
        return self.plan.may_be_ambiguous or self.witness.is_past()

    def run(self) -> Report:
        """Runs the history, from the first commit to the last check."""
        with simulated_threads(self.scheduler, self._is_expected), watched_looks(self.branches):
            self.scheduler.run(self._init, self._root)
        network, witness = self.network, self.branches.main
        counts = {
            "versions": witness.seqno,
            "appends": sum(append.answer == "appended" for append in witness.appends),
            "refusals": sum(append.answer == "refused" for append in witness.appends),
            "unknown": sum(not append.answer for append in witness.appends),
            "ambiguous": self.ambiguous,
            "calls": network.calls,
            "faults": network.injected,
            "late calls": network.late_calls,
            "crashes": network.crashes,
            "freezes": network.freezes,
            "steps": self.scheduler.steps,
            "listings": witness.listings,
            "news": witness.wire.delivered,
            "evolved": 0 if witness.head is None else len(witness.head.schemas) - 1,
            "staged too early": self.staged_too_early,
            "resurrected blobs": len(witness.resurrected),
            "sinks ended": self.sinks_ended,
            "upserts": self.upserts,
            "positions": self.streamed,
            "takeovers": self.takeovers,
            "comparisons on standby": self.compared,
            "writes of tables": self.table_writes,
            "changes of tables": self.table_changes,
            "steps of names": len(witness.names.moments) - 1,
            "closed": int(witness.head is not None and witness.head.trace.upper.is_empty()),
            "lost versions": self.branches.lost_versions,
            "forked logs found": self.branches.detected,
            "lost logs": int(self.branches.wiped() is not None),
            "recoveries": self.branches.recovered,
            "losses of blobs": int(bool(self.branches.lost_blobs)),
            **self.paths.totals,
        }
        return Report(self.plan, self.scheduler.failure, tuple(self.scheduler.events), counts)

    def finished(self) -> None:
        """An actor has finished all its operations."""
        if all(actor.is_finished for actor in self._actors):
            self._done.set()

    def astray(self, error: PersistError) -> NoReturn:
        """The engine raised `error` in the running process because its log lost versions. The process restarts, as `error` demands."""
        task = self.scheduler.current
        if not self.branches.may_find_out(task):
            self.scheduler.fail(f"{task.process.name} knows no lost version, but: {error}")
        self.branches.detected += 1
        self.scheduler.note(f"starts again: {error}")
        self.network.crash()

    def _is_expected(self, error: object) -> bool:
        if isinstance(error, SeqNo):  # the earliest version, which should have been truncated
            return self.branches.lost_truncation_past(error)
        if isinstance(error, MissingBlob):
            return bool(self.branches.lost_blobs)
        return isinstance(error, ForkedLog) and self.branches.may_find_out(self.scheduler.current)

    def may_be_recovered(self) -> bool:
        """Whether a recovery may still come."""
        return any(isinstance(actor, Recoverer) and not actor.is_finished for actor in self._actors)

    def client_upper(self, client: PersistClient) -> Antichain:
        """The shard's upper, fetched."""
        return client.recent_upper(self.shard_id)

    def process(self, name: str) -> Host:
        """A new process. It shares only the stores with others."""
        self._started += 1
        process = Process(f"{name}.{self._started}")
        seed = f"{self.plan.seed} {process.name}"
        env = SimEnv(self.scheduler, process, seed=f"env {seed}")
        branches = self.branches
        client = PersistClient(
            PagedBlob(
                JudgedBlob(branches, process, self.scheduler),
                self.network,
                random.Random(f"pages {seed}"),  # noqa: S311 - repeatable on purpose
                is_paged=self.plan.seed % 3 == 0,
            ),
            RoutedConsensus(branches, process, self.network, self.scheduler),
            settings=self.plan.settings,
            env=env,
            metrics=self.paths,
            push=SimPush(lambda: branches.talks_to(process).wire, process) if self.plan.pushes else None,
        )
        branches.started(process, partial(self._known, client))
        return Host(process, client)

    def _known(self, client: PersistClient) -> ShardState | None:
        """The state that the process has cached. Does not change it."""
        applier = client._appliers.get(self.shard_id)
        return None if applier is None else applier._state

    @property
    def guest(self) -> Process:
        """The process of the latest visit."""
        return self._guests[-1]

    def visit(self, name: str, body: Callable[[Host], None]) -> SimEvent:
        """Runs `body` in a new process, which is not restarted when it dies. The event is set when it has ended."""
        host, ended = self.process(name), SimEvent(self.scheduler)
        self._guests.append(host.process)
        self.scheduler.spawn(host.process, "guest", partial(body, host)).on_finished.append(ended.set)
        return ended

    def _root(self) -> None:
        self.network.on_crash = self._crashed
        for slot in range(self.plan.processes):
            self._boot(slot)
        if self._actors:
            self._done.wait()
        self.network.calm_down()
        self.branches.end()
        for process in [*(host.process for host in self._incarnations.values()), *self._guests]:
            self.scheduler.kill(process)
        if not self.branches.lacks_blobs():
            settle(self)
        self.scheduler.stop()

    def _boot(self, slot: int) -> None:
        """Starts or restarts process `slot` with its unfinished actors."""
        host = self.process(f"p{slot}")
        self._incarnations[slot] = host
        for index, actor in enumerate(self._actors):
            if index % self.plan.processes == slot and not actor.is_finished:
                self.scheduler.spawn(host.process, actor.name, partial(actor.live, host))

    def _crashed(self, process: Process) -> None:
        if process in self._guests:
            return
        slot = next(slot for slot, host in self._incarnations.items() if host.process is process)

        def restart() -> None:
            self.scheduler.pause(self.scheduler.rng.choice([0, 20, 500]))
            self._boot(slot)

        self.scheduler.spawn(self._init, f"restart{slot}", restart)


def simulate(seed: int, *, without: frozenset[str] = frozenset()) -> Report:
    """Runs one seed."""
    return History(plan_of(seed, without=without)).run()
