"""Random lives of a shard under the planner: specs, debts, Jobs, refusals and clocks change in any order, and each plan keeps what holds of
every plan. A plan that is made again from its own status starts the same runs.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from persist_kit.depth import draws, generator
from persist_operator.api import conditions, names
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard
from persist_operator.plan.actions import AdvanceSince, StartMaintenance, maintenance_key
from persist_operator.plan.observed import ActionFailure, Phase, Run, ShardObserved
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.waiting import deadline, windows
from shard_plans import SHARD_ID

MIN, HOUR, DAY = 60_000, 3_600_000, 86_400_000
STEPS = 40
REQUESTS = ("compact", "gc", "verify", "orphan-scan", "rollup")
PLANNED = {"Compaction": "compaction", "Rollup": "rollup", "GC": "gc"}
SKEWS = (0, 0, 0, -HOUR, -DAY, HOUR, MIN, -MIN, 5000, -5000, 400 * DAY, -400 * DAY)
schemas = cache(load_schemas)


def drawn_spec(r):
    maintenance: dict[str, Any] = {
        "historyLimit": r.choice([0, 1, 3, 10]),
        "approval": r.choice(["Automatic", "Automatic", "Required"]),
    }
    compaction: dict[str, Any] = {
        "mode": r.choice(["Automatic", "Automatic", "Manual"]),
        "maxUncompactedBatches": r.choice([2, 8, 64]),
        "deadlineSeconds": r.choice([3600, 7200, 86400, 864_000]),
        "runner": r.choice(["Auto", "Pod"]),
    }
    if r.random() < 0.4:
        maintenance["windows"] = [
            {
                "schedule": r.choice(["0 2 * * *", "*/30 * * * *", "30 1 * * 1", "0 0 31 2 *"]),
                "durationSeconds": r.choice([600, 7200]),
                "timeZone": r.choice(["Etc/UTC", "Europe/Berlin", "America/Havana"]),
            }
        ]
    if r.random() < 0.4:
        maintenance["maxRewriteBytesPerDay"] = r.choice(["1", "1Gi", "10Mi"])
    if r.random() < 0.3:
        compaction["maxSpaceAmplificationPercent"] = r.choice([110, 200])
    return {
        "schema": {"key": "id BIGINT"},
        "compaction": compaction,
        "maintenance": maintenance,
        "retention": {"sinceLagSeconds": r.choice([0, 60, 1800, 3599])},
        "rollup": {"everySeqnos": r.choice([8, 64])},
        "gc": {
            "enabled": r.random() < 0.7,
            "intervalSeconds": r.choice([60, 600, 7200]),
            "orphans": {"mode": r.choice(["Off", "Report", "Delete"])},
        },
        "verify": {"mode": r.choice(["Off", "Metadata", "Full"]), "intervalSeconds": r.choice([3600, 86400])},
        "suspend": r.random() < 0.15,
    }


@dataclass
class Life:
    """One shard and its world. `base_ms` is the cluster's clock, `at_ms` that of the operator."""

    r: random.Random
    base_ms: int
    skew_ms: int = 0
    spec: dict[str, Any] = field(default_factory=dict)
    generation: int = 1
    annotations: dict[str, str] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=lambda: {"shardId": SHARD_ID})
    jobs: dict[str, Run] = field(default_factory=dict)
    failures: dict[str, ActionFailure] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.spec = drawn_spec(self.r)
        self.contents = {
            "seqno": 300, "latest_rollup_seqno": 290, "gc_seqnos": 0, "uncompacted_batches": 1, "compaction_requests": 0,
            "compaction_bytes": 0, "waits_from_ms": None, "uncollected_from_ms": None, "upper": self.base_ms - HOUR,
            "since": self.base_ms - 2 * HOUR, "live_bytes": 1 << 30,
        }  # fmt: skip

    @property
    def at_ms(self):
        return self.base_ms + self.skew_ms

    def goes_on(self, step):
        r = self.r
        if r.random() < 0.12:
            self.spec, self.generation = drawn_spec(r), self.generation + 1
        if r.random() < 0.1:
            self.annotations = {f"{names.REQUEST_PREFIX}{r.choice(REQUESTS)}": f"t{step}"}
        if r.random() < 0.1 and (plan := self.status.get("plan", {}).get("id")):
            self.annotations = {f"{names.REQUEST_PREFIX}{names.APPROVE}": plan}
        self.base_ms += r.choice([1000, 5000, MIN, 10 * MIN, HOUR, 6 * HOUR])
        if r.random() < 0.1:
            self.skew_ms = r.choice(SKEWS)
        self._is_written()
        for name, job in list(self.jobs.items()):
            self._goes_on_with(name, job)

    def _is_written(self):
        r, found = self.r, self.contents
        if r.random() < 0.5:
            found["seqno"] += r.randint(1, 40)
            found["upper"] = max(found["upper"], self.at_ms)
            found["uncompacted_batches"] += r.randint(0, 10)
            found["compaction_requests"] = r.randint(0, 3)
            found["compaction_bytes"] += r.choice([0, 1 << 20, 1 << 31])
            found["gc_seqnos"] = r.choice([0, 0, 20])
        for owed in ("waits_from_ms", "uncollected_from_ms"):
            if r.random() < 0.3:
                found[owed] = r.choice([None, self.at_ms - r.choice([0, MIN, HOUR, DAY, 20 * DAY])])

    def _goes_on_with(self, name, job):
        r, what = self.r, self.r.random()
        if job.phase.finished:
            if what < 0.4:
                del self.jobs[name]
        elif what < 0.2:
            self.jobs[name] = replace(job, phase=Phase.RUNNING, started_ms=self.base_ms)
        elif what < 0.5:
            is_good = r.random() < 0.6
            outcome = r.choice(["Succeeded", "Skipped", "Conflict", "Failed", "x"])
            report = {"outcome": outcome, "bytes_read": r.choice([0, 1 << 20, -5, 1 << 70, "x"])}
            self.jobs[name] = replace(
                job,
                phase=Phase.SUCCEEDED if is_good else Phase.FAILED,
                started_ms=job.started_ms or job.created_ms,
                finished_ms=max(self.base_ms, job.created_ms),
                report=r.choice([None, report]),
            )
            if is_good and job.kind == "compaction":
                self.contents |= {"uncompacted_batches": 0, "compaction_requests": 0, "compaction_bytes": 0}
            if is_good and job.kind == "rollup":
                self.contents["latest_rollup_seqno"] = self.contents["seqno"]
        elif what < 0.6:
            del self.jobs[name]  # by hand

    def acts(self, plan):
        """What the API server makes of a plan: some starts are refused, some are lost in a crash, some Jobs are deleted at once."""
        self.status = plan.status
        for action in plan.actions:
            if isinstance(action, AdvanceSince):
                self.contents["since"] = max(self.contents["since"], action.since_ms)
        for kind, start in starts_of(plan).items():
            key = maintenance_key(kind)
            if self.r.random() < 0.15:
                self.failures[key] = ActionFailure(
                    reason="ActionRefused", message="403 quota", permanent=False, generation=self.generation, at_ms=self.at_ms, count=1
                )  # fmt: skip
                continue
            self.failures.pop(key, None)
            if self.r.random() < 0.8:
                self.jobs[start.name] = Run(
                    name=start.name, kind=kind, phase=Phase.PENDING, created_ms=self.base_ms + self.r.choice([0, 0, 2000]),
                    seqno=start.seqno, planned_reason=start.reason, runner=start.runner,
                )  # fmt: skip


def starts_of(plan):
    return {one.kind: one for one in plan.actions if isinstance(one, StartMaintenance)}


def condition(plan, kind):
    return (conditions.find(plan.status, kind) or {}).get("status")


def holds_of_every_plan(life, shard, plan, inspection, resource):
    status, starts, at_ms = plan.status, starts_of(plan), life.at_ms
    assert schemas().check({**resource, "status": status}) == []
    assert sum(condition(plan, kind) == "True" for kind in ("Ready", "Reconciling", "Stalled")) == 1
    if shard.spec.suspend:
        assert not starts
        assert not any(isinstance(one, AdvanceSince) for one in plan.actions)
    going = {job.kind for job in life.jobs.values() if not job.phase.finished}
    assert not going & set(starts), "one run of a kind at a time"
    history = [one["id"] for one in status.get("history") or ()]
    assert len(history) == len(set(history)) <= shard.spec.history_limit
    for kind, start in starts.items():
        is_asked = start.reason.startswith("requested")
        assert is_asked or not shard.spec.switched_off(kind)
        assert status["maintenance"][kind]["jobName"] == start.name or maintenance_key(kind) in life.failures
        assert start.name not in {*history, *life.jobs}, "a name is used once"
        assert start.max_bytes is None or start.max_bytes >= (inspection.smallest_request_bytes or 0), (
            "it can do something"
        )
        if kind == "compaction" and not is_asked:
            assert not shard.spec.needs_approval or status["plan"]["approved"]
            if not windows.is_open(shard.spec.windows, at_ms):
                blocks = Shard.of({**resource, "status": status}).known.maintenance
                opens_ms = windows.next_opening_ms(shard.spec.windows, at_ms)
                assert deadline.cannot_wait(shard, inspection.waits_from_ms, blocks, opens_ms), start.reason
    if (waits := status.get("plan") or {}).get("id"):
        kind = PLANNED[waits["type"]]
        assert not shard.spec.switched_off(kind)
        assert kind not in going
    limit_ms = 1000 * shard.spec.deadline_seconds
    for kind, owed_ms in (
        ("CompactionCurrent", inspection.waits_from_ms),
        ("GarbageCollected", inspection.uncollected_from_ms),
    ):
        assert owed_ms is None or at_ms <= owed_ms + limit_ms or condition(plan, kind) == "False"
    assert plan.requeue_after_s is None or plan.requeue_after_s > 0
    assert all(one["bytes"] > 0 for one in status.get("rewritten") or ())


@pytest.mark.parametrize("seed", dict.fromkeys([*range(draws(12)), 43]))
def test_each_plan_of_a_life_keeps_the_rules(seed, shard_resource, make_inspection, settings, now):
    """43: a clock was set back, and a Job outlived a later one, which history had no room for. It was taken for a new run, recorded twice, and
    the run that was due was forgotten.
    """
    life = Life(generator(seed), now)
    for step in range(STEPS):
        life.goes_on(step)
        few = life.contents["compaction_bytes"] // 2 if life.contents["compaction_requests"] else None
        inspection = make_inspection(**life.contents, smallest_request_bytes=few, batches=3, updates=100)
        observed = ShardObserved(
            inspected=inspection, runs=tuple(life.jobs.values()), shard_id=SHARD_ID, failures=dict(life.failures)
        )

        def planned(status, observed=observed):
            made = shard_resource(life.spec, status=status, generation=life.generation, annotations=life.annotations)
            return made, Shard.of(made), plan_shard(Shard.of(made), observed, now_ms=life.at_ms, settings=settings)

        resource, shard, plan = planned(life.status)
        assert planned(life.status)[2] == plan
        holds_of_every_plan(life, shard, plan, inspection, resource)
        _, _, again = planned(plan.status)
        assert {kind: one.name for kind, one in starts_of(again).items()} == {
            kind: one.name for kind, one in starts_of(plan).items()
        }, "an intent whose Job is not there yet"
        assert not again.notes, "what was recorded is not recorded again"
        life.acts(plan)
