"""Plans: the parameters of a simulated history, drawn from its seed.

Owns which kinds of histories there are, and how often. It must not know what actors do. A kind that is added draws from a generator of its
own, so that all seeds that do not become histories of this kind stay the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    LeaseSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
    WatchSettings,
)

from persist_kit.sim.fork import Disaster, disaster_of
from persist_kit.sim.network import Weather
from persist_kit.sim.recovery import recoverers_of

#: The actors other than writers: kind, greatest number of actors, and greatest number of operations of each.
_OTHERS = (("reader", 2, 8), ("compactor", 2, 4), ("collector", 2, 4), ("roller", 1, 4), ("downgrader", 2, 3))
#: Short histories with more faults find the most bugs per second. Some bugs need longer histories.
_LENGTHS = {"short": 0.7, "usual": 0.22, "listening": 0.08}
#: The kinds of writers: writers of arbitrary rows with maintenance in the foreground, or in the background; sinks that keep the shard as
#: desired, perhaps beside an independent writer; upserts only.
_WRITTEN_BY = {"writers": 0.7, "background": 0.1, "sinks": 0.1, "upserts": 0.1}

#: The share of the histories of writers that become histories of tables instead.
_TABLES = 0.15
#: The share of the remaining ones that become histories of streams, and of the others without a disaster that become ones of names.
_STREAMED, _NAMED = 0.12, 0.08
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
    errs: bool = False
    """Whether the collection of the sinks may be in error, so that the shard has a column for errors."""

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
    evolves = written_by == "upserts" and "evolution" not in without and rng.random() < 0.4
    if evolves:
        kept = [(name, operations + 4 if name.startswith("upserter") else operations) for name, operations in kept]
    lease_ms = rng.choice([200, 200, 600, 5_000])
    sleepy = written_by == "sinks" and rng.random() < 0.3
    if sleepy:
        kept = [("sinker1", rng.randint(4, 8))]
    errs = written_by == "sinks" and rng.random() < 0.25
    if errs:
        kept = [actor for actor in kept if actor[0] != "writer1"]
    return replace(
        plan,
        written_by=written_by,
        sleepy=sleepy,
        errs=errs,
        weather=replace(plan.weather, crash=0.0, freeze=0.0, step=0.0) if sleepy else plan.weather,
        processes=max(2, plan.processes),
        lease_ms=lease_ms,
        actors=tuple(actor for actor in kept if actor[0] not in without),
        settings=replace(plan.settings, lease=replace(plan.settings.lease, reader_lease_ms=lease_ms)),
        evolves=evolves,
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
    plan = _streamed(plan, without)
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


def _streamed(plan: Plan, without: frozenset[str]) -> Plan:
    """`plan` with drivers of a stream instead of writers, perhaps beside a writer, in some seeds. Drawn separately, as in `_rewritten`."""
    rng = random.Random(f"streamed {plan.seed}")  # noqa: S311 - repeatable on purpose
    if plan.written_by != "writers" or rng.random() > _STREAMED:
        return plan
    kept = [each for each in plan.actors if not each[0].startswith(("writer", "closer"))]
    kept += [("writer1", rng.randint(1, 4))] if rng.random() < 0.4 else []
    kept += [(f"driver{index}", rng.randint(4, 10)) for index in range(1, rng.choice([2, 2, 3]) + 1)]
    return replace(
        plan,
        written_by="streams",
        processes=max(2, plan.processes),
        actors=tuple(actor for actor in kept if actor[0] not in without),
        evolves=False,
        disaster=None if plan.disaster is None else replace(plan.disaster, is_wipe=False),
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
