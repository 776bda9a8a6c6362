"""What holds a compaction back that is due: a window, the budget of the day, an approval. What the status says of it, and what goes first."""

import dataclasses

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.api.shard_status import RewrittenHour
from persist_operator.plan.actions import StartMaintenance
from persist_operator.plan.observed import ActionFailure, Phase, Run, ShardObserved, ShardView, StoreFailure
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.waiting import budget

SHARD_ID = names.shard_id_of("uid-shard")
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
MIB = 1 << 20
#: Noon of a day without a change of the clock.
NOON = times.to_ms("2026-11-25T12:00:00Z")
NIGHTLY = {"windows": [{"schedule": "0 2 * * *", "durationSeconds": 7200, "timeZone": "Etc/UTC"}]}
DUE = {
    "uncompacted_batches": 70,
    "compaction_bytes": 100 * MIB,
    "live_bytes": 300 * MIB,
    "smallest_request_bytes": 40 * MIB,
}
APPROVE = f"{names.REQUEST_PREFIX}approve"


class House:
    """One shard, planned again and again: the status of each plan is that of the next."""

    def __init__(self, make_shard, make_inspection, settings):
        self._make_shard, self._make_inspection, self._settings = make_shard, make_inspection, settings
        self.status = {"shardId": SHARD_ID, "conditions": [{"type": "Ready", "status": "Unknown"}]}
        self.maintenance, self.spec, self.annotations, self.generation = {}, {}, {}, 1
        self.plan = None

    def step(self, now_ms=NOON, *, runs=(), failures=None, inspected=None, **inspection):
        shard = self._make_shard(
            {**self.spec, "maintenance": self.maintenance},
            status=self.status,
            annotations=self.annotations,
            generation=self.generation,
        )
        seen = inspected or self._make_inspection(**{**DUE, **inspection})
        observed = ShardObserved(inspected=seen, runs=tuple(runs), shard_id=SHARD_ID, failures=failures or {})
        self.plan = plan_shard(shard, observed, now_ms=now_ms, settings=self._settings)
        self.status = self.plan.status
        return self

    @property
    def started(self):
        found = [one for one in self.plan.actions if isinstance(one, StartMaintenance) and one.kind == "compaction"]
        return found[0] if found else None

    @property
    def current(self):
        found = conditions.find(self.status, "CompactionCurrent")
        return found["status"], found["reason"], found["message"]

    @property
    def block(self):
        return self.status.get("maintenance", {}).get("compaction", {})

    @property
    def next(self):
        return self.status.get("plan")


@pytest.fixture
def house(make_shard, make_inspection, settings):
    return House(make_shard, make_inspection, settings)


def ran(name, now_ms, *, outcome="Succeeded", took_s=100, report=None, **changes):
    """A compaction that ended at `now_ms`."""
    phase = Phase.FAILED if outcome == "Failed" else Phase.SUCCEEDED
    report = {"outcome": outcome, **report} if report is not None else None
    return Run(
        name=name, kind="compaction", phase=phase, created_ms=now_ms - took_s * 1000, started_ms=now_ms - took_s * 1000,
        finished_ms=now_ms, seqno=10, runner="Pod", report=report, **changes,
    )  # fmt: skip


def spent(hours_ago, mib, now_ms=NOON):
    at_ms = now_ms - hours_ago * HOUR_MS
    return {"time": times.to_text(at_ms - at_ms % HOUR_MS), "bytes": mib * MIB}


# -- windows -----------------------------------------------------------------------------------------------------------


def test_outside_its_windows_a_compaction_waits_and_the_status_says_until_when(house):
    house.maintenance = NIGHTLY
    house.step()
    assert house.started is None
    assert house.current[:2] == ("False", "WindowClosed")
    assert "the next window opens at 2026-11-26T02:00:00Z" in house.current[2]
    assert (house.block["nextRunTime"], house.block["waitReason"]) == ("2026-11-26T02:00:00Z", "WindowClosed")
    assert house.next["type"] == "Compaction"
    opens = times.to_ms("2026-11-26T02:00:00Z")
    assert house.step(opens - 1000).started is None
    assert house.step(opens).started is not None, "the time on the status holds nothing back"
    assert "waitReason" not in house.block


def test_a_window_that_is_removed_or_opened_holds_nothing_back(house):
    house.maintenance = NIGHTLY
    house.step()
    house.maintenance, house.generation = {}, 2
    assert house.step(NOON + 60_000).started is not None


def test_rollups_and_collections_are_not_bound_by_windows(house):
    house.maintenance = NIGHTLY
    house.step(seqno=500, gc_seqnos=3)
    assert {one.kind for one in house.plan.actions if isinstance(one, StartMaintenance)} == {"rollup", "gc"}


def test_a_request_goes_at_any_time_also_when_its_job_was_lost(house):
    house.maintenance = {**NIGHTLY, "maxRewriteBytesPerDay": 1, "approval": "Required"}
    house.annotations = {f"{names.REQUEST_PREFIX}compact": "now"}
    assert house.step().started.max_bytes is None
    assert house.step(NOON + 60_000).started is not None, "no Job was made: the intent stands, and is a request still"


def test_an_intent_that_waited_until_its_window_closed_waits_for_the_next(house):
    house.maintenance = NIGHTLY
    open_ms = times.to_ms("2026-11-25T03:59:30Z")
    queued = {"StartMaintenance/compaction": ActionFailure(
        reason="Queued", message="waits for a place", permanent=False, at_ms=open_ms, place=1
    )}  # fmt: skip
    assert house.step(open_ms).started is not None
    assert house.step(open_ms + 10_000, failures=queued).current[1] == "Queued"
    assert house.step(open_ms + 60_000, failures=queued).started is None
    assert house.current[1] == "WindowClosed"


def test_a_backoff_is_shown_before_a_closed_window_and_both_hold(house):
    house.maintenance = NIGHTLY
    close_ms = times.to_ms("2026-11-25T04:00:00Z")
    house.step(close_ms - 60_000)
    failed = ran(house.started.name, close_ms - 1000, outcome="Failed", report={"bytes_read": 5})
    house.step(close_ms - 1000, runs=[failed])
    assert house.block["nextRunTime"] == times.to_text(close_ms + 9000)
    assert house.step(close_ms + 5000).block["nextRunTime"] == times.to_text(close_ms + 9000)
    house.step(close_ms + 20_000)
    assert (house.block["waitReason"], house.started) == ("WindowClosed", None)
    assert house.block["consecutiveFailures"] == 1


# The lead of a deadline of a day is 6 hours, and the room that its runs need is 2400 s.
@pytest.mark.parametrize(
    ("moment", "age_h", "starts"),
    [
        ("2026-11-25T12:00:00Z", 19, True),  # at 17:00, and the next window opens at 02:00
        ("2026-11-25T21:00:00Z", 18.5, True),  # at 02:30, half an hour after the window opens
        ("2026-11-25T21:00:00Z", 18.2, False),  # at 02:48
        ("2026-11-25T21:00:00Z", 17.9, False),  # not due yet
        ("2026-11-25T02:10:00Z", 3, True),  # within the window: due before the next one
        ("2026-11-25T02:10:00Z", 0.5, True),
    ],
)
def test_a_deadline_goes_first_when_the_next_window_leaves_it_no_room(house, moment, age_h, starts):
    house.maintenance = NIGHTLY
    now_ms = times.to_ms(moment)
    house.step(now_ms, uncompacted_batches=0, waits_from_ms=round(now_ms - age_h * HOUR_MS))
    assert (house.started is not None) == starts
    if starts:
        assert house.started.full
        assert "must be gone by" in house.started.reason
    elif age_h > 18:
        assert house.current[1] == "WindowClosed"


def test_within_a_window_the_since_of_an_idle_shard_follows_the_clock_for_what_is_due_before_the_next(house):
    """Otherwise the merge would find nothing to cancel, and the deadline would have to break the window later."""
    house.maintenance = NIGHTLY
    open_ms = times.to_ms("2026-11-25T02:10:00Z")
    upper = open_ms - 5 * HOUR_MS
    for at_ms in (open_ms - 5 * HOUR_MS, open_ms):
        house.step(at_ms, uncompacted_batches=0, upper=upper, since=upper - HOUR_MS, waits_from_ms=upper - 1)
    (advance,) = [one for one in house.plan.actions if type(one).__name__ == "AdvanceSince"]
    assert advance.since_ms == upper - 1


@pytest.mark.parametrize("schedule", ["99 * * * *", "0 0 30 2 *"])
def test_a_window_that_never_opens_stalls_the_shard(house, schedule):
    house.maintenance = {"windows": [{**NIGHTLY["windows"][0], "schedule": schedule}]}
    house.step()
    found = conditions.find(house.status, "Stalled")
    assert found["reason"] == "InvalidWindow"
    assert "spec.maintenance.windows[0]" in found["message"]
    assert [note.reason for note in house.plan.notes] == ["InvalidWindow"]
    assert not [one for one in house.plan.actions if type(one).__name__ == "StartMaintenance"]
    assert house.status["storage"]["batches"] > 0, "the shard is looked at all the same"
    house.step()
    assert house.plan.notes == ()


def test_sinks_write_a_shard_whose_windows_never_open(house, make_shard, settings):
    """The windows are of compactions alone."""
    house.maintenance = {"windows": [{**NIGHTLY["windows"][0], "schedule": "99 * * * *"}]}
    house.step()
    shard = make_shard({"maintenance": house.maintenance}, status=house.status)
    assert ShardView.of("flights", shard, settings).usable
    lost = StoreFailure(reason="StoreLost", message="another pair", permanent=True)
    house.step(inspected=lost)
    assert conditions.find(house.status, "Stalled")["reason"] == "StoreLost", "which the windows do not hide"


# -- the budget --------------------------------------------------------------------------------------------------------


def test_a_compaction_that_fits_is_bound_by_what_is_left_since_writes_may_follow_the_estimate(house):
    house.maintenance = {"maxRewriteBytesPerDay": "200Mi"}
    house.status["rewritten"] = [spent(1, 90)]
    assert house.step().started.max_bytes == 110 << 20


def test_a_compaction_that_does_not_fit_is_cut_to_what_is_left(house):
    house.maintenance = {"maxRewriteBytesPerDay": "200Mi"}
    house.status["rewritten"] = [spent(1, 150)]
    house.step()
    assert house.started.max_bytes == 50 * MIB
    assert house.block["plannedBytes"] == 50 * MIB


def test_a_compaction_of_which_nothing_fits_waits_until_hours_are_a_day_ago(house):
    house.maintenance = {"maxRewriteBytesPerDay": "200Mi"}
    house.status["rewritten"] = [spent(2, 100), spent(10, 90)]
    house.step()
    assert house.started is None
    frees = times.to_ms("2026-11-25T02:00:00Z") + 25 * HOUR_MS
    assert (house.current[1], house.block["nextRunTime"]) == ("BudgetExhausted", times.to_text(frees))
    assert "199.2 MB of the 209.7 MB of 24 hours are spent" in house.current[2]
    assert house.step(frees - 1000).started is None
    assert house.step(frees).started is not None


def test_a_merge_larger_than_the_budget_waits_for_a_person(house):
    house.maintenance = {"maxRewriteBytesPerDay": "10Mi"}
    house.step()
    assert house.current[1] == "BudgetExhausted"
    assert "raise maintenance.maxRewriteBytesPerDay" in house.current[2]
    assert "nextRunTime" not in house.block


@pytest.mark.parametrize(("age_h", "starts"), [(10, False), (19, False), (23.5, True)])
def test_a_deadline_goes_before_the_budget_when_it_cannot_wait(house, age_h, starts):
    house.maintenance = {"maxRewriteBytesPerDay": "400Mi"}
    house.status["rewritten"] = [spent(23, 300)]
    owed = round(NOON - age_h * HOUR_MS)
    house.step(uncompacted_batches=0, waits_from_ms=owed)
    assert (house.started is not None) == starts
    if starts:
        assert house.started.max_bytes is None
    elif age_h == 19:
        assert house.current[1] == "BudgetExhausted"


def test_a_deadline_goes_before_a_budget_that_would_never_hold_its_merge(house):
    house.maintenance = {"maxRewriteBytesPerDay": "10Mi"}
    assert house.step(uncompacted_batches=0, waits_from_ms=NOON - 19 * HOUR_MS).started.full


@pytest.mark.parametrize(
    ("run", "counts"),
    [
        ({"report": {"bytes_read": 70}}, 70),
        ({"report": {"bytes_read": 0}}, None),
        ({"outcome": "Failed", "report": {"bytes_read": 33}}, 33),
        ({"outcome": "Failed", "exit_code": 137}, 100 * MIB),  # no report: it may have read all
        ({"outcome": "Failed", "podless": True}, None),
    ],
)
def test_what_each_run_read_counts_once(house, run, counts):
    house.maintenance = {"maxRewriteBytesPerDay": "1Gi"}
    house.step()
    ended = ran(house.started.name, NOON + 50_000, **run)
    for _ in range(3):
        house.step(NOON + 60_000, runs=[ended], uncompacted_batches=0)
    assert house.status.get("rewritten") == (
        None if counts is None else [{"time": "2026-11-25T12:00:00Z", "bytes": counts}]
    )


@pytest.mark.parametrize("ahead_ms", [0, DAY_MS * 365])
def test_a_run_that_ended_by_a_clock_ahead_counts_for_a_day_and_the_hours_before_it_too(house, ahead_ms):
    """Regression: it counted for a year, and the hours before it no more."""
    house.maintenance = {"maxRewriteBytesPerDay": "200Mi"}
    house.status["rewritten"] = [spent(1, 30)]
    name = house.step().started.name
    house.step(NOON + 60_000, runs=[ran(name, NOON + 50_000 + ahead_ms, report={"bytes_read": 150 * MIB})])
    assert budget.used_bytes(hours_of(house), NOON + 60_000) == 180 * MIB
    house.step(NOON + DAY_MS + HOUR_MS)
    assert house.started is not None


def test_hours_that_a_clock_wrote_which_was_set_back_count_for_a_day_from_now(house):
    house.maintenance = {"maxRewriteBytesPerDay": "200Mi"}
    house.status["rewritten"] = [spent(-24 * 365, 190), spent(10, 5)]
    house.step()
    assert house.started is None
    assert [hour.time for hour in hours_of(house)] == ["2026-11-25T12:00:00Z", "2026-11-25T02:00:00Z"]
    assert house.step(NOON + DAY_MS).started is None
    assert house.step(NOON + DAY_MS + HOUR_MS).started is not None


def hours_of(house):
    return tuple(RewrittenHour(time=one["time"], bytes=one["bytes"]) for one in house.status["rewritten"])


# -- approval ----------------------------------------------------------------------------------------------------------


def required(house):
    house.maintenance = {"approval": "Required"}
    return house.step()


def test_a_plan_waits_for_its_approval_and_only_its_own(house):
    required(house)
    assert house.started is None
    assert [one.reason for one in house.plan.notes] == ["AwaitingApproval"]
    assert house.current[:2] == ("False", "AwaitingApproval")
    assert house.next["approved"] is False
    plan_id = house.next["id"]
    assert f"{APPROVE}={plan_id}" in house.current[2]
    assert house.step(NOON + 50_000).plan.notes == (), "said once"
    house.annotations = {APPROVE: "compact-000000000000"}
    house.step(NOON + 60_000)
    assert house.started is None
    assert "request-approve is compact-000000000000, which names no plan that waits" in house.current[2]
    (note,) = [one for one in house.plan.notes if one.reason == "ApprovalRefused"]
    assert (note.kind, plan_id in note.message) == ("Warning", True)
    assert house.step(NOON + 70_000).plan.notes == (), "refused once"
    house.annotations = {APPROVE: plan_id}
    house.step(NOON + 80_000)
    assert house.started is not None
    assert [one.reason for one in house.plan.notes] == ["PlanApproved"]
    assert house.status["lastHandledRequests"]["approve"] == plan_id


def test_the_id_stays_while_writes_go_on_and_changes_with_what_the_approval_must_not_cover(house):
    ids = [required(house).next["id"]]
    created = house.next["createdTime"]
    house.step(NOON + 600_000, seqno=20, uncompacted_batches=90, compaction_bytes=120 * MIB)
    assert (house.next["id"], house.next["createdTime"]) == (ids[0], created)
    ids.append(house.step(NOON + 700_000, seqno=30, compaction_bytes=200 * MIB).next["id"])
    # All of the shard, not only what is new, of the same size.
    owed = {"waits_from_ms": NOON - 20 * HOUR_MS, "live_bytes": 200 * MIB}
    everything = house.step(NOON + 800_000, seqno=40, **owed)
    ids.append(everything.next["id"])
    house.generation = 2
    ids.append(house.step(NOON + 900_000, seqno=50).next["id"])
    done = ran("flights-compact-10", NOON + 1000_000, report={"bytes_read": 5})
    ids.append(house.step(NOON + 1000_000, seqno=60, runs=[done]).next["id"])
    assert len(set(ids)) == len(ids)


def test_an_approval_is_of_one_resource(house, make_shard, make_inspection, settings):
    """A resource that is created again from its manifest, with the annotation, or another one like it, is not approved by it."""
    house.annotations = {APPROVE: required(house).next["id"]}
    assert house.step(NOON + 1000).started is not None

    def with_another_uid(*arguments, **options):
        made = make_shard(*arguments, **options)
        return dataclasses.replace(made, meta=dataclasses.replace(made.meta, uid="another"))

    other = House(with_another_uid, make_inspection, settings)
    other.annotations = house.annotations
    required(other)
    assert (other.started, other.current[1]) == (None, "AwaitingApproval")


def test_an_approval_stands_over_failures_and_ends_with_the_success(house):
    house.annotations = {APPROVE: required(house).next["id"]}
    house.step(NOON + 1000)
    failed = ran(house.started.name, NOON + 50_000, outcome="Failed", report={"bytes_read": 1})
    house.annotations = {}
    house.step(NOON + 60_000, runs=[failed])
    house.step(NOON + 120_000, runs=[failed])
    again = house.started
    assert again is not None, "the approval stands, also when its annotation is removed"
    house.step(NOON + 300_000, runs=[ran(again.name, NOON + 290_000, report={"bytes_read": 1})])
    assert (house.started, house.current[1]) == (None, "AwaitingApproval")


def test_another_token_takes_an_approval_back(house):
    house.maintenance = {"approval": "Required", **NIGHTLY}
    plan_id = house.step().next["id"]
    house.annotations = {APPROVE: plan_id}
    assert house.step(NOON + 1000).current[1] == "WindowClosed"
    house.annotations = {APPROVE: "no"}
    assert house.step(NOON + 2000).current[1] == "AwaitingApproval"


def test_no_deadline_overrides_a_missing_approval(house):
    house.maintenance = {"approval": "Required"}
    house.step(waits_from_ms=NOON - 25 * HOUR_MS)
    assert house.started is None
    assert house.current[1] == "DeadlineMissed"
    assert "waits for an approval" in house.current[2]


def test_an_approval_that_nothing_waits_for_is_refused(house):
    house.annotations = {APPROVE: "x"}
    house.step()
    assert house.started is not None
    assert [one.message for one in house.plan.notes if one.reason == "ApprovalRefused"] == [
        f"{APPROVE} is x, which names no plan that waits: no plan waits for an approval"
    ]


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_is_next_also_when_nothing_may_start(house):
    house.spec = {"suspend": True}
    house.step()
    assert house.started is None
    assert house.next == {
        "id": house.next["id"], "type": "Compaction", "reason": "70 uncompacted batches", "runner": "Pod",
        "estimatedBytes": 100 * MIB, "createdTime": times.to_text(NOON), "approved": True,
    }  # fmt: skip
    assert house.next["id"].startswith("compact-")
    house.spec = {"suspend": True, "compaction": {"mode": "Manual"}}
    assert house.step(gc_seqnos=2).next["type"] == "GC"
    assert house.step(uncompacted_batches=0).next is None


def test_the_estimate_follows_past_runs_on_the_same_runner(house):
    house.maintenance = NIGHTLY
    history = [("Pod", 100, 10), ("Pod", 300, 30), ("Spark", 5000, 1)]
    house.status["history"] = [
        {
            "id": str(number), "type": "Compaction", "runner": runner, "outcome": "Succeeded", "bytesRead": mib * MIB,
            "startTime": times.to_text(NOON - took_s * 1000), "endTime": times.to_text(NOON),
        }
        for number, (runner, mib, took_s) in enumerate(history)
    ]  # fmt: skip
    house.step()
    assert house.next["estimatedSeconds"] == 10


def test_a_plan_that_waits_is_not_written_again_while_writes_go_on(house):
    house.maintenance = NIGHTLY
    house.step()
    before = house.status
    # Within `numbers_seconds`, whatever was written.
    house.step(NOON + 2000, seqno=11, uncompacted_batches=75, compaction_bytes=110 * MIB)
    assert house.status == before


def test_a_run_under_way_is_no_plan(house):
    house.step()
    name = house.started.name
    running = dataclasses.replace(ran(name, NOON), phase=Phase.RUNNING, finished_ms=None)
    assert house.step(NOON + 2000, runs=[running]).next is None
    assert house.current[:2] == ("True", "Compacting")


# -- amplification -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "updates", "net", "merged", "left", "starts"),
    [
        (None, 900, 100, 100, None, False),  # by default nothing is rewritten for space
        (200, 200, 100, 100, None, True),
        (200, 199, 100, 99, None, False),
        (200, 200, 100, 150, None, False),  # the last merge could not cancel it, and little came since
        (200, 200, 0, 0, None, True),  # all was retracted
        (200, 200, 100, 100, "same", False),  # since holds the retractions
        (200, 200, 100, 100, "later", True),
        (110, 0, 0, 0, None, False),
    ],
)
def test_a_merge_is_due_for_space_only_when_it_frees_some(house, limit, updates, net, merged, left, starts):
    house.spec = {"compaction": {} if limit is None else {"maxSpaceAmplificationPercent": limit}}
    owed = NOON - HOUR_MS if updates else None
    left_ms = {None: None, "same": owed, "later": NOON - 1}[left]
    house.step(
        uncompacted_batches=0, updates=updates, net_updates=net, merged_updates=merged, waits_from_ms=owed,
        waits_after_merge_ms=left_ms,
    )  # fmt: skip
    assert (house.started is not None) == starts
    if starts:
        assert (house.started.full, house.block["plannedBytes"]) == (True, 300 * MIB)


def test_cpu_seconds_are_rounded_up_and_absent_without_a_report(house):
    house.step()
    done = ran(house.started.name, NOON + 50_000, report={"bytes_read": 1, "cpu_ms": 1200})
    house.step(NOON + 60_000, runs=[done], uncompacted_batches=0)
    assert house.status["history"][0]["cpuSeconds"] == 2
    house.step(NOON + 220_000, runs=[ran("flights-compact-11", NOON + 210_000)], uncompacted_batches=0)
    assert "cpuSeconds" not in house.status["history"][0]
