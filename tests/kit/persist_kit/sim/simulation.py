"""Deterministic simulation: the shipped engine under seeded schedules, clocks and faults (`make sim SEEDS=2000`).

    plan (from the seed) -> History: processes with actors -> Network -> stores <- Witness judges every commit
                               all on one Scheduler, which runs one thread at a time

This module makes a plan from a seed, and starts, ends and reports a history. A seed gives the same history everywhere, to the byte of its
event log. Interleaving, not volume, finds bugs: histories are short, and their settings make rare paths common (tiny parts, rollups every
few versions, very short leases).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from persist_engine.base.errors import ForkedLog, MissingBlob, PersistError
from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    LeaseSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
    WatchSettings,
)
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.state import ShardState

from persist_kit.sim.actors.actor import Actor, Host
from persist_kit.sim.actors.admin import Administrator
from persist_kit.sim.actors.names import Registrar
from persist_kit.sim.actors.reader import Examiner, Reader
from persist_kit.sim.actors.recoverer import Recoverer
from persist_kit.sim.actors.sinks import Correcting, DesiredCollection, Sinker
from persist_kit.sim.actors.tables import Tabler, Transaction
from persist_kit.sim.actors.upkeep import BackgroundWriter, Closer, Downgrader, Maintainer
from persist_kit.sim.actors.upserts import Upserter
from persist_kit.sim.actors.writer import Letter, Writer
from persist_kit.sim.final import settle
from persist_kit.sim.fork import Branches, Disaster, JudgedBlob, RoutedConsensus, disaster_of, watched_looks
from persist_kit.sim.locks import SimEvent
from persist_kit.sim.network import Network, PagedBlob, Weather
from persist_kit.sim.push import SimPush
from persist_kit.sim.recovery import recoverers_of
from persist_kit.sim.scheduler import Process, Scheduler
from persist_kit.sim.threads import SimEnv, simulated_threads
from persist_kit.sim.watched import PathCounts
from persist_kit.sim.witness import Witness

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
    "tabler": Tabler,
    "admin": Administrator,
    "registrar": Registrar,
    "recoverer": Recoverer,
}
#: The actors other than writers: kind, greatest number of actors, and greatest number of operations of each.
_OTHERS = (("reader", 2, 8), ("compactor", 2, 4), ("collector", 2, 4), ("roller", 1, 4), ("downgrader", 2, 3))
#: Short histories with more faults find the most bugs per second. Some bugs need longer histories.
_LENGTHS = {"short": 0.7, "usual": 0.22, "listening": 0.08}
#: The kinds of writers: writers of arbitrary rows with maintenance in the foreground, or in the background; sinks that keep the shard as
#: desired, perhaps beside an independent writer; upserts only.
_WRITTEN_BY = {"writers": 0.7, "background": 0.1, "sinks": 0.1, "upserts": 0.1}

#: The share of the histories of writers that become histories of tables instead.
_TABLES = 0.15
#: The share of the remaining ones without a disaster that become histories of names.
_NAMED = 0.08
#: The shares of the histories with an administrator, and with an examiner, which reads in rare ways.
_ADMINISTERED, _EXAMINED = 0.25, 0.15
_DELETIONS_KEPT_MS = 90 * 24 * 3600 * 1000


@dataclass(frozen=True)
class Plan:
    """The parameters of a history: a function of its seed and of the parts that are left out on purpose."""

    seed: int
    processes: int
    actors: tuple[tuple[str, int], ...]
    """(name, operations)."""
    weather: Weather
    settings: Settings
    lease_ms: int
    writers_maintain: float
    pushes: bool
    """Whether commits are pushed to all processes (with losses)."""
    evolves: bool
    """Whether writers evolve the schema."""
    rows_max: int
    """The most rows of one append. Many rows make runs of several parts."""
    written_by: str = "writers"
    """See _WRITTEN_BY."""
    disaster: Disaster | None = None
    """The disaster in consensus, if any."""
    sleepy: bool = False
    """Whether there is only one sink, which often sleeps past its lease. Then no other reader holds since back for it."""

    retain_ms: int | None = None
    """The retention with which the shard begins; None: it never has one."""
    keeps_blobs: bool = False
    """Whether the blob store keeps deleted blobs, which can be restored."""
    is_purged: bool = False
    """Whether the shard is given up before the end."""

    @property
    def may_be_ambiguous(self) -> bool:
        """Whether an append with an unknown outcome may find its writer expired: leases lapse during a call, or calls are given up."""
        return self.settings.lease.writer_lease_ms < 10_000 or self.settings.retry.give_up_ms is not None


def plan_of(seed: int, *, without: frozenset[str] = frozenset()) -> Plan:
    """The plan of `seed`. Names in `without` are left out: actors ("reader1"), or kinds of weather ("crash")."""
    rng = random.Random(f"plan {seed}")  # noqa: S311 - repeatable on purpose
    length = rng.choices(list(_LENGTHS), weights=list(_LENGTHS.values()))[0]
    actors = _actors(rng, is_short=length == "short")
    fierce = 3 if length == "short" else 1
    stormy = rng.choice([0.0, 0.3, 1.0])
    weather = Weather(
        happens=1 - stormy * rng.uniform(0, 0.25),
        answers=1 - stormy * rng.uniform(0, 0.25),
        late=rng.choice([0.0, 0.5]),
        slow=rng.choice([0.0, 0.1, 0.3]),
        crash=fierce * rng.choice([0.0, 0.0, 0.01, 0.03]),
        freeze=fierce * rng.choice([0.0, 0.01]),
        step=fierce * rng.choice([0.0, 0.0, 0.01]),
    )
    # Some histories have calm weather and long listeners, so that readers see much of a shard's life.
    is_long_listening = length == "listening"
    if is_long_listening:
        weather = replace(weather, crash=0.0, freeze=0.0, step=0.0)
        actors = [("reader1", 14), *((name, operations) for name, operations in actors if name != "reader1")]
    calmed: dict[str, Any] = {
        name: 1.0 if name in {"happens", "answers"} else 0.0 for name in without if hasattr(weather, name)
    }
    is_bulky = rng.random() < 0.12
    settings = Settings(
        batch=BatchSettings(
            target_part_bytes=1024,
            inline_part_bytes_max=rng.choice([0, 4096]),
            inline_total_bytes_max=rng.choice([1_500, 1 << 20]),
            runs_max=rng.choice([1, 3]),
            run_parts_max=2 if is_bulky else rng.choice([None, 2]),
        ),
        lease=LeaseSettings(writer_lease_ms=rng.choice([500, 3_600_000, 3_600_000])),
        maintenance=MaintenanceSettings(
            rollup_threshold=rng.choice([3, 8]),
            rollup_claim_ms=50,
            gc_versions_min=rng.choice([2, 6]),
            gc_claim_ms=100,
            recent_diffs_max=rng.choice([4, 1000]),
            # Records need more store calls, and leave less room for rare events.
            deletions_kept_ms=_DELETIONS_KEPT_MS if seed % 2 else 0,
        ),
        compaction=CompactionSettings(
            sift_bytes_min=0,
            inputs_min=2,
            parts_min=2,
            updates_min=1,
            memory_bytes_max=8192,
            claim_ms=rng.choice([20, 300]),
        ),
        retry=RetrySettings(initial_ms=2, clamp_ms=60, give_up_ms=rng.choice([None, None, None, 40.0])),
        watch=WatchSettings(initial_ms=5, clamp_ms=20, pushed_clamp_ms=60),
        retain_ms=None,
    )
    plan = Plan(
        seed=seed,
        processes=rng.randint(1, 4),
        actors=tuple((name, operations) for name, operations in actors if name not in without),
        weather=replace(weather, **calmed),
        settings=settings,
        lease_ms=5_000 if is_long_listening else rng.choice([200, 600, 5_000]),
        writers_maintain=1.0 if is_long_listening else rng.choice([0.0, 0.5, 1.0]),
        pushes=rng.random() < 0.5 and "push" not in without,
        evolves=rng.random() < 0.3 and "evolution" not in without,
        rows_max=150 if is_bulky else 3,
        disaster=None if "disaster" in without else disaster_of(seed),
    )
    return _recovered(_widened(_rewritten(plan, without), without), without)


def _rewritten(plan: Plan, without: frozenset[str]) -> Plan:
    """`plan`, with its writers replaced by sinks or upserts in some seeds. Drawn separately, so that all other seeds stay the same."""
    rng = random.Random(f"written by {plan.seed}")  # noqa: S311 - repeatable on purpose
    written_by = rng.choices(list(_WRITTEN_BY), weights=list(_WRITTEN_BY.values()))[0]
    if written_by == "writers":
        return plan
    if written_by == "background":
        return replace(plan, written_by=written_by, writers_maintain=1.0)
    kept = [actor for actor in plan.actors if not actor[0].startswith("writer")]
    if written_by == "sinks":
        writer = [actor for actor in plan.actors if actor[0] == "writer1"] if rng.random() < 0.6 else []
        kept += writer + [(f"sinker{index}", rng.randint(3, 8)) for index in range(1, rng.choice([1, 2, 2]) + 1)]
    else:
        kept += [(f"upserter{index}", rng.randint(2, 7)) for index in range(1, rng.randint(1, 3) + 1)]
    lease_ms = rng.choice([200, 200, 600, 5_000])
    sleepy = written_by == "sinks" and rng.random() < 0.3
    if sleepy:
        kept = [("sinker1", rng.randint(4, 8))]
    return replace(
        plan,
        written_by=written_by,
        sleepy=sleepy,
        weather=replace(plan.weather, crash=0.0, freeze=0.0, step=0.0) if sleepy else plan.weather,
        processes=max(2, plan.processes),
        lease_ms=lease_ms,
        actors=tuple(actor for actor in kept if actor[0] not in without),
        settings=replace(plan.settings, lease=replace(plan.settings.lease, reader_lease_ms=lease_ms)),
        evolves=False,
        disaster=None if plan.disaster is None else replace(plan.disaster, is_wipe=False),
    )


def _widened(plan: Plan, without: frozenset[str]) -> Plan:
    """`plan` with tables instead of writers, or with a retention, in some seeds. Drawn separately, as in `_rewritten`."""
    rng = random.Random(f"widened {plan.seed}")  # noqa: S311 - repeatable on purpose
    if plan.written_by == "writers" and rng.random() < _TABLES:
        lease_ms = rng.choice([200, 600, 5_000])
        kept = [actor for actor in plan.actors if not actor[0].startswith("writer")]
        kept += [(f"tabler{index}", rng.randint(3, 8)) for index in range(1, rng.randint(1, 3) + 1)]
        plan = replace(
            plan,
            written_by="tables",
            lease_ms=lease_ms,
            retain_ms=rng.choice([None, 1, 20]),
            actors=tuple(actor for actor in kept if actor[0] not in without),
            settings=replace(plan.settings, lease=replace(plan.settings.lease, reader_lease_ms=lease_ms)),
            disaster=None if plan.disaster is None else replace(plan.disaster, is_wipe=False),
        )
    if plan.sleepy:
        return plan
    if plan.written_by == "writers" and plan.disaster is None and rng.random() < _NAMED:
        registrars = [(f"registrar{index}", rng.randint(5, 15)) for index in range(1, rng.randint(2, 3) + 1)]
        return replace(
            plan,
            written_by="names",
            processes=max(2, plan.processes),
            actors=tuple(actor for actor in registrars if actor[0] not in without),
        )
    if rng.random() < _EXAMINED and "examiner1" not in without:
        plan = replace(plan, actors=(*plan.actors, ("examiner1", rng.randint(2, 6))))
    if rng.random() > _ADMINISTERED:
        return plan
    admin = ("admin1", rng.randint(2, 6))
    retain_ms = plan.retain_ms if plan.written_by in {"tables", "sinks"} else rng.choice([None, 1, 4])
    return replace(
        plan,
        actors=plan.actors if "admin1" in without else (*plan.actors, admin),
        retain_ms=retain_ms,
        is_purged=plan.disaster is None and rng.random() < 0.15,
        settings=replace(plan.settings, retain_ms=retain_ms),
    )


def _recovered(plan: Plan, without: frozenset[str]) -> Plan:
    """`plan` with recoveries in some seeds. Drawn separately, as in `_rewritten`."""
    if plan.written_by not in {"writers", "background"} or plan.is_purged:
        return plan
    added, keeps_blobs = recoverers_of(plan.seed, is_after_disaster=plan.disaster is not None)
    actors = (*plan.actors, *(actor for actor in added if actor[0] not in without))
    return replace(plan, actors=actors, keeps_blobs=keeps_blobs)


def _actors(rng: random.Random, *, is_short: bool) -> list[tuple[str, int]]:
    """Names and operations."""
    if is_short:
        actors = [(f"writer{index}", rng.randint(1, 4)) for index in range(1, rng.randint(1, 3) + 1)]
        actors += [(f"{kind}1", rng.randint(1, 2)) for kind, _, _ in _OTHERS if rng.random() < 0.4]
    else:
        actors = [(f"writer{index}", rng.randint(3, 7)) for index in range(1, rng.randint(2, 4))]
        for kind, most, operations in _OTHERS:
            actors += [(f"{kind}{index}", rng.randint(1, operations)) for index in range(1, rng.randint(0, most) + 1)]
    if rng.random() < 0.15:
        actors.append(("closer1", rng.randint(2, 6)))
    if rng.random() < 0.35:
        actors.append(("sweeper1", rng.randint(1, 5)))
    return actors


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
        self.desired = DesiredCollection(plan.seed)
        self.correcting: list[Correcting] = []
        self.sinks_ended = 0
        self.upserts = 0
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
            "evolved": int(witness.head is not None and len(witness.head.schemas) > 1),
            "staged too early": self.staged_too_early,
            "resurrected blobs": len(witness.resurrected),
            "sinks ended": self.sinks_ended,
            "upserts": self.upserts,
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
