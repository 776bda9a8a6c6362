"""Plans of one PersistShard, and what of them the tests look at."""

from persist_operator.api import conditions, names
from persist_operator.plan.actions import StartMaintenance
from persist_operator.plan.observed import (
    Phase,
    Run,
    ShardObserved,
)
from persist_operator.plan.shard import plan_shard

SHARD_ID = names.shard_id_of("uid-shard")
ASSIGNED = {"shardId": SHARD_ID}
DEBT = {"seqno": 300, "gc_seqnos": 50, "uncompacted_batches": 100}


def planner(make_shard, settings, now):
    """Plans the shard `flights` from its spec, its status and what was observed."""

    def make(spec=None, *, status=None, at=now, observed=None, inspected=None, runs=(), **metadata):
        found = observed or ShardObserved(inspected=inspected, runs=tuple(runs), shard_id=SHARD_ID)
        return plan_shard(make_shard(spec, status=status, **metadata), found, now_ms=at, settings=settings)

    return make


def reason(plan, condition_type):
    found = conditions.find(plan.status, condition_type)
    return None if found is None else (found["status"], found["reason"])


def started(plan):
    return {one.kind: one for one in plan.actions if isinstance(one, StartMaintenance)}


def run(kind, seqno, now, *, phase=Phase.RUNNING, report=None, **changes):
    verb = names.VERB[kind]
    return Run(
        name=changes.pop("name", f"flights-{verb}-{seqno}"), kind=kind, phase=phase, created_ms=now, started_ms=now,
        finished_ms=now + 2000 if phase.finished else None, seqno=seqno, report=report, **changes,
    )  # fmt: skip
