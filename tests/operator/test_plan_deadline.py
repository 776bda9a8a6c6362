"""When the deletion deadline makes work due, as a table, and what the conditions and the numbers say of it."""

import pytest
from persist_engine.model.inspection import ReaderInfo
from persist_operator.api import conditions, names, times
from persist_operator.api.shard_status import Upkeep
from persist_operator.plan.actions import AdvanceSince
from persist_operator.plan.observed import ShardObserved, StoreFailure
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.waiting import deadline

HOUR_MS = 3_600_000
DAY, LAG = {"compaction": {"deadlineSeconds": 86_400}}, {"retention": {"sinceLagSeconds": 3600}}


def reader(seqno, since=5):
    return ReaderInfo(
        id="r1", kind="leased", since=since, seqno=seqno, purpose="export", hostname="h", last_heartbeat_ms=1
    )


@pytest.mark.parametrize(
    ("spec", "runs_s", "want_s"),
    [
        (DAY, 0, 21_600),  # a quarter
        (DAY, 10_000, 40_000 + 600 + 1800),  # four runs as long, a wait and failures
        ({"compaction": {"deadlineSeconds": 7200}, **LAG}, 0, 2400),
        ({"compaction": {"deadlineSeconds": 4000}, **LAG}, 0, 400),  # no more than the retention leaves
        ({"compaction": {"deadlineSeconds": 3600}, **LAG}, 0, 0),
    ],
)
def test_the_lead_leaves_room_for_runs_and_failures_within_what_retention_leaves(make_shard, spec, runs_s, want_s):
    assert deadline.lead_ms(make_shard(spec), {"compaction": Upkeep(last_duration_seconds=runs_s)}) == want_s * 1000


@pytest.mark.parametrize(
    ("deadline_s", "interval_s", "want_s"),
    [(300, 604_800, 75), (300, 10, 10), (86_400, 604_800, 21_600), (60, 604_800, 60), (1_209_600, 600, 600)],
)
def test_no_interval_of_collections_is_too_long_for_the_deadline(make_shard, deadline_s, interval_s, want_s):
    spec = {
        "compaction": {"deadlineSeconds": deadline_s},
        "retention": {"sinceLagSeconds": 0},
        "gc": {"intervalSeconds": interval_s},
    }
    assert deadline.collection_interval_s(make_shard(spec)) == want_s


@pytest.mark.parametrize(
    ("age_h", "left_h", "due"),
    [(17, None, False), (19, None, True), (19, 19, False), (19, 18, False), (19, 2, True), (30, None, True)],
)
def test_a_merge_is_due_before_the_deadline_and_only_if_it_removes_something(
    make_shard, make_inspection, now, age_h, left_h, due
):
    seen = make_inspection(
        waits_from_ms=now - age_h * HOUR_MS, waits_after_merge_ms=None if left_h is None else now - left_h * HOUR_MS
    )
    assert (deadline.compaction_reason(make_shard(DAY), seen, {}, now) is not None) == due


@pytest.mark.parametrize(
    ("age_h", "gc_seqnos", "held", "due", "holders"),
    [
        (17, 0, 10, False, 0),
        (19, 0, 10, True, 0),
        (19, 0, 3, False, 1),  # the only later rollup is past the reader's version
        (19, 2, 3, True, 0),  # something can go
    ],
)
def test_a_collection_is_due_unless_readers_hold_every_version(
    make_shard, make_inspection, now, age_h, gc_seqnos, held, due, holders
):
    seen = make_inspection(
        uncollected_from_ms=now - age_h * HOUR_MS,
        gc_seqnos=gc_seqnos,
        seqno_since=held,
        latest_rollup_seqno=8,
        readers=(reader(held),),
    )
    assert (deadline.collection_reason(make_shard(DAY), seen, {}, now) is not None) == due
    assert len(deadline.version_holders(seen)) == holders


@pytest.mark.parametrize(
    ("age_h", "idle_h", "want"),
    [
        (19, None, 6 * HOUR_MS),  # the upper was just seen for the first time
        (17, 17, 6 * HOUR_MS),  # not due: the past stays
        (19, 0.5, 6.5 * HOUR_MS),
        (19, 1, 7 * HOUR_MS - 1),  # all but the newest complete time
        (19, 19, 7 * HOUR_MS - 1),
        (19, -5, 6 * HOUR_MS),  # a clock that was set back
    ],
)
def test_the_since_of_an_idle_shard_follows_the_clock_only_while_work_is_due(
    make_shard, make_inspection, now, age_h, idle_h, want
):
    seen = make_inspection(upper=7 * HOUR_MS, waits_from_ms=now - age_h * HOUR_MS)
    seen_ms = None if idle_h is None else round(now - idle_h * HOUR_MS)
    assert deadline.since_target(make_shard(DAY), seen, {}, upper_seen_ms=seen_ms, now_ms=now) == want


def test_a_clock_that_was_ahead_does_not_keep_since_from_following_once_it_is_set_back(
    make_shard, make_inspection, settings, now
):
    """Regression: the time at which the upper was seen stayed a year ahead, so since stood still for a year, and the deadline was missed."""
    shard_id, upper = names.shard_id_of("uid-shard"), now - 19 * HOUR_MS
    seen = make_inspection(upper=upper, since=upper - 2 * HOUR_MS, waits_from_ms=upper)
    status, moved = {"shardId": shard_id, "conditions": [{"type": "Ready", "status": "Unknown"}]}, []
    for at in (now + 365 * 24 * HOUR_MS, now, now + HOUR_MS // 2, now + HOUR_MS + 1000):
        shard = make_shard({**DAY, **LAG}, status=status)
        plan = plan_shard(shard, ShardObserved(inspected=seen, shard_id=shard_id), now_ms=at, settings=settings)
        status = plan.status
        moved.append(max((one.since_ms for one in plan.actions if isinstance(one, AdvanceSince)), default=None))
    assert moved[-2:] == [upper - HOUR_MS // 2, upper - 1]


@pytest.fixture
def planned(make_shard, make_inspection, settings, now):
    """The status of a shard that was inspected so, and its actions."""
    assigned = {"shardId": names.shard_id_of("uid-shard"), "conditions": [{"type": "Ready", "status": "Unknown"}]}

    def plan(spec=None, **inspection):
        observed = ShardObserved(inspected=make_inspection(**inspection), shard_id=names.shard_id_of("uid-shard"))
        return plan_shard(make_shard(spec or DAY, status=assigned), observed, now_ms=now, settings=settings)

    return plan


@pytest.mark.parametrize(
    ("spec", "inspection", "name", "want", "says"),
    [
        (DAY, {"waits": 10}, "CompactionCurrent", ("True", "Current"), ""),
        (DAY, {"waits": 20}, "CompactionCurrent", ("False", "DebtExceeded"), "must be gone by"),
        (DAY, {"waits": 25}, "CompactionCurrent", ("False", "DeadlineMissed"), "should be gone since"),
        (
            DAY,
            {"waits": 25, "since": 5, "upper": 9, "left": 25},
            "CompactionCurrent",
            ("False", "DeadlineMissed"),
            "export",
        ),
        (
            DAY,
            {"waits": 25, "left": 25, "upper": 9},
            "CompactionCurrent",
            ("False", "DeadlineMissed"),
            "sinceLagSeconds",
        ),
        (
            {**DAY, "suspend": True},
            {"waits": 25},
            "CompactionCurrent",
            ("False", "DeadlineMissed"),
            "spec.suspend is true",
        ),
        (
            {"compaction": {"deadlineSeconds": 86_400, "mode": "Manual"}},
            {"waits": 20},
            "CompactionCurrent",
            ("False", "DebtExceeded"),
            "compaction.mode is Manual",
        ),
        (DAY, {"uncollected": 20}, "GarbageCollected", ("True", "Current"), ""),
        (DAY, {"uncollected": 25}, "GarbageCollected", ("False", "BehindSchedule"), "the next collection"),
        (
            {**DAY, "gc": {"enabled": False}},
            {"uncollected": 25},
            "GarbageCollected",
            ("False", "BehindSchedule"),
            "gc.enabled",
        ),
        (DAY, {"uncollected": 20, "held": 3}, "GarbageCollected", ("False", "BlockedByReader"), "export"),
        (DAY, {"uncollected": 17, "held": 3}, "GarbageCollected", ("True", "Current"), ""),
    ],
)
def test_the_conditions_say_why_and_who(planned, now, spec, inspection, name, want, says):
    ago = lambda key: now - inspection[key] * HOUR_MS if key in inspection else None  # noqa: E731
    held = inspection.get("held", 10)
    status = planned(
        spec,
        waits_from_ms=ago("waits"),
        waits_after_merge_ms=ago("left"),
        uncollected_from_ms=ago("uncollected"),
        since=inspection.get("since", 0),
        upper=inspection.get("upper", 0),
        seqno_since=held,
        latest_rollup_seqno=8,
        readers=(reader(held),),
    ).status
    found = conditions.find(status, name)
    assert (found["status"], found["reason"]) == want
    assert says in found.get("message", "")


def test_the_debt_has_the_older_age_and_the_date_and_neither_without_debt(planned, now):
    debt = planned(waits_from_ms=now - HOUR_MS, uncollected_from_ms=now - 2 * HOUR_MS).status["debt"]
    assert debt["oldestUncompactedSeconds"] == 7200
    assert debt["deadlineTime"] == times.to_text(now + 22 * HOUR_MS)
    assert not {"oldestUncompactedSeconds", "deadlineTime"} & set(planned().status["debt"])


def test_the_date_follows_a_deadline_that_was_changed_while_the_stores_did_not_answer(
    make_shard, make_inspection, settings, now
):
    """The status of the outage has observed the generation, with the numbers from before."""
    owed = make_inspection(waits_from_ms=now - HOUR_MS)
    status = {"conditions": [], "shardId": owed.shard_id}
    answers = [(86_400, owed), (7200, StoreFailure(reason="StorageUnreachable", message="down")), (7200, owed)]
    for generation, (deadline_seconds, answer) in enumerate(answers, start=1):
        shard = make_shard(
            {"compaction": {"deadlineSeconds": deadline_seconds}}, status=status, generation=min(generation, 2)
        )
        observed = ShardObserved(inspected=answer, shard_id=owed.shard_id)
        status = plan_shard(shard, observed, now_ms=now + 1000 * generation, settings=settings).status
    assert status["debt"]["deadlineTime"] == times.to_text(now + HOUR_MS)


def test_runs_for_the_deadline_are_full_and_others_are_not(planned, now):
    due = planned(waits_from_ms=now - 20 * HOUR_MS, uncollected_from_ms=now - 20 * HOUR_MS)
    assert {one.kind: one.full for one in due.actions if hasattr(one, "kind")} == {"compaction": True, "gc": True}
    plain = planned(uncompacted_batches=99, gc_seqnos=5)
    assert {one.kind: one.full for one in plain.actions if hasattr(one, "kind")} == {"compaction": False, "gc": False}
