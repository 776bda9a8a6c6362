"""The plan of a SparkSink in mode Scheduled: which ticks run, under every behaviour of the clocks."""

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.plan.observed import Phase
from sink_world import MINUTE

SCHEDULED = {"mode": "Scheduled", "schedule": {"cron": "*/10 * * * *"}}


def scheduled(world, **schedule):
    one = world({**SCHEDULED, "schedule": {**SCHEDULED["schedule"], **schedule}})
    one.metadata = {"creationTimestamp": times.to_text(one.now - one.now % (10 * MINUTE) + 1000)}
    one.now -= one.now % (10 * MINUTE) - 2000
    return one


def test_a_schedule_runs_each_tick_once(world):
    one = scheduled(world)
    one.step()
    assert one.plan.actions == ()
    assert one.reason("Ready") == ("True", "Scheduled")
    assert one.plan.requeue_after_s <= 600
    one.step(after=10 * MINUTE)
    (start,) = one.starts()
    assert start.run_id == f"uid-sink-{start.scheduled_ms}"
    assert start.scheduled_ms % (10 * MINUTE) == 0
    one.succeeds()
    one.step()
    assert one.starts() == []
    assert one.reason("Ready") == ("True", "Succeeded")
    one.step(after=10 * MINUTE)
    assert len(one.starts()) == 1


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_restart_that_is_requested_runs_between_ticks(world, ticks):
    one = scheduled(world)
    one.step()
    for _ in range(ticks):
        one.step(after=10 * MINUTE)
        one.succeeds()
        one.step()
    before = one.status.get("run", {}).get("id", "")
    one.metadata = {**one.metadata, "annotations": {f"{names.REQUEST_PREFIX}restart": "now"}}
    one.step(after=MINUTE)
    (start,) = one.starts()
    assert start.scheduled_ms is None
    assert names.run_order(start.run_id) > names.run_order(before)
    one.succeeds()
    one.step()
    assert one.starts() == []
    one.step(after=10 * MINUTE)
    (tick,) = one.starts()
    assert names.run_order(tick.run_id) > names.run_order(start.run_id)


def test_a_tick_waits_for_the_run_in_progress_and_only_the_last_missed_tick_runs(world):
    one = scheduled(world)
    one.step()
    one.step(after=10 * MINUTE)
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step(after=35 * MINUTE)
    assert one.starts() == []
    one.succeeds()
    one.step()
    (start,) = one.starts()
    assert 0 <= one.now - start.scheduled_ms < 10 * MINUTE


def test_a_clock_that_was_ahead_does_not_stop_a_schedule_and_ids_only_rise(world):
    """A driver treats a lower number of its series as an older run."""
    one = scheduled(world)
    one.step()
    one.now += 365 * 24 * 60 * MINUTE
    one.step()
    (early,) = one.starts()
    one.succeeds()
    one.step()
    one.now -= 365 * 24 * 60 * MINUTE
    one.step()
    assert one.starts() == []
    one.step(after=10 * MINUTE)
    (start,) = one.starts()
    assert 0 <= one.now - start.scheduled_ms < 10 * MINUTE
    assert names.run_order(start.run_id) == names.run_order(early.run_id) + 1


def test_a_clock_that_was_a_little_ahead_repeats_no_tick(world):
    one = scheduled(world)
    one.step()
    one.step(after=10 * MINUTE)
    assert len(one.starts()) == 1
    one.succeeds()
    one.step()
    one.now -= 5000
    for _ in range(5):
        one.step(after=2000)
        assert one.starts() == []


def test_a_tick_beyond_its_starting_deadline_is_skipped(world):
    one = scheduled(world, startingDeadlineSeconds=60)
    one.step()
    one.step(after=15 * MINUTE)
    assert one.starts() == []
    assert [note.reason for note in one.plan.notes] == ["ScheduleMissed"]
    one.step()
    assert one.plan.notes == ()


def test_a_failed_tick_does_not_end_the_schedule(world):
    one = scheduled(world)
    one.spec["restart"] = {"policy": "Never"}
    one.step()
    one.step(after=10 * MINUTE)
    one.fails()
    one.step()
    assert one.reason("Ready")[0] == "False"
    assert (
        f"the next run is at {one.status['schedule']['nextTime']}" in conditions.find(one.status, "Stalled")["message"]
    )
    one.step(after=10 * MINUTE)
    assert len(one.starts()) == 1


@pytest.mark.parametrize(
    ("schedule", "text"), [({"cron": "61 * * * *"}, "cron"), ({"timeZone": "Mars/Olympus"}, "timeZone")]
)
def test_a_schedule_that_cannot_be_read_stalls(world, schedule, text):
    one = scheduled(world, **schedule)
    one.step()
    assert one.reason("Stalled") == ("True", "InvalidSchedule")
    assert text in conditions.find(one.status, "Stalled")["message"]


def test_ticks_follow_the_time_zone(world):
    one = scheduled(world, cron="30 2 * * *", timeZone="Asia/Kolkata")
    one.step()
    assert one.status["schedule"]["nextTime"].endswith("T21:00:00Z")
