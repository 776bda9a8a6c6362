"""The plan of a rollout that does not go well: rolled back, failed, overtaken or late."""

import dataclasses

import pytest
from persist_operator.api import times
from persist_operator.plan.observed import ActionFailure, Phase
from rollout_world import MINUTE, Rollout


@pytest.fixture
def rollout(world):
    return lambda **spec: Rollout(world, **spec)


@pytest.mark.parametrize("state", ["Starting", "CatchingUp", "ReadyToPromote"])
def test_a_rollout_that_takes_too_long_is_rolled_back_and_not_tried_again(rollout, state):
    one = rollout(promotion="Manual", timeoutSeconds=600)
    start = one.changed()
    stage = {"Starting": None, "CatchingUp": "Differs", "ReadyToPromote": "Proven"}[state]
    one.runs(start.name, stage, compared=1, missing=1, extra=1) if stage else one.runs(start.name)
    assert one.state == state
    one.world.step(after=10 * MINUTE)
    assert (one.stopped(), one.state, one.notes()) == ([start.name], "RolledBack", ["RolledBack"])
    assert one.world.reason("RolledOut") == ("False", "RolledBack")
    one.check_ready()
    one.world.step(after=1000 * MINUTE)
    assert (one.world.plan.actions, one.state) == ((), "RolledBack")
    one.check_ready()


def test_the_order_to_take_over_has_time_to_arrive(rollout):
    one = rollout(timeoutSeconds=60)
    start = one.changed()
    one.world.now += 59_000
    one.runs(start.name, "Proven", compared=1)
    assert one.state == "Promoting"
    one.world.step(after=4 * MINUTE)
    assert one.state == "Promoting"
    one.world.step(after=MINUTE)
    assert one.state == "RolledBack"


@pytest.mark.parametrize(("request_", "state"), [("promote", "Promoting"), ("restart", "Starting")])
def test_after_a_rollback_a_request_or_another_spec_tries_again(rollout, request_, state):
    one = rollout(timeoutSeconds=60)
    one.changed()
    one.world.step(after=2 * MINUTE)
    assert one.state == "RolledBack"
    one.asked(request_)
    one.world.step()
    (start,) = one.world.starts()
    assert (one.state, start.attempt, start.stands_by) == (state, 3, True)
    one.world.step(after=20 * MINUTE)
    one.world.step(after=20 * MINUTE)
    assert one.state == "RolledBack"
    assert one.changed(9).stands_by
    one.check_ready()


def test_a_green_whose_configuration_is_wrong_is_rolled_back_at_once(rollout):
    one = rollout()
    start = one.changed()
    report = {"class": "Configuration", "message": "create another sink for another source"}
    one.world.change(start.name, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=72, report=report)
    one.world.step()
    assert one.state == "RolledBack"
    assert "another source" in one.world.status["rollout"]["message"]
    assert one.notes() == ["DriverConfigurationFailure", "RolledBack"]
    assert one.world.status["lastFailure"]["podName"] == start.name
    one.check_ready()


def test_a_green_that_fails_is_tried_again_as_often_as_any_attempt(rollout):
    one = rollout()
    for attempt in (2, 3):
        start = one.changed() if attempt == 2 else one.world.starts()[0]
        assert start.attempt == attempt
        one.world.change(start.name, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=1, reason="Error")
        one.world.step()
        assert one.world.status.get("consecutiveFailures", 0) == 0
        one.check_ready()
        one.world.step(after=15_000)
    assert (one.state, one.world.starts()) == ("RolledBack", [])


def test_a_green_that_is_stopped_from_outside_stands_by_again(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "StandingBy")
    report = {"outcome": "Stopped"}
    one.world.change(start.name, phase=Phase.SUCCEEDED, finished_ms=one.world.now, exit_code=0, report=report)
    one.world.step()
    assert one.state == "Starting"
    one.world.step(after=20_000)
    assert [one.attempt for one in one.world.starts()] == [3]


def test_a_green_that_is_refused_shows_on_the_rollout_and_not_on_the_sink(rollout):
    one = rollout()
    one.world.failures = {
        "StartDriver/standby": ActionFailure(
            reason="ActionRefused", message="quota exceeded", permanent=False, at_ms=one.world.now, generation=1
        )
    }
    one.world.spec["write"] = {"parallelism": 7}
    one.world.step(act=False)
    one.world.step(act=False)
    assert "quota exceeded" in one.world.status["rollout"]["message"]
    one.check_ready()


@pytest.mark.parametrize("stage", [None, "StandingBy", "Differs"])
def test_green_takes_the_place_of_a_blue_that_fails(rollout, stage):
    one = rollout(promotion="Manual")
    start = one.changed()
    one.runs(start.name, stage)
    one.world.change(one.blue, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=1, reason="Error")
    one.world.step()
    assert (one.world.status["driver"]["podName"], one.state, one.promoted) == (start.name, None, [start.name])
    assert "Promoted" in one.notes()
    one.world.step()
    assert one.promoted == [start.name]
    one.runs(start.name, "Streaming")
    assert one.promoted == []
    one.check_ready()


def test_a_new_revision_starts_directly_when_blue_fails_before_green_is_there(rollout):
    one = rollout()
    one.changed(act=False)
    one.world.change(one.blue, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=1, reason="Error")
    one.world.step()
    starts = one.world.starts()
    assert [(start.stands_by, start.attempt) for start in starts] == [(False, 3)]
    assert one.state is None


def test_a_blue_that_is_fenced_while_green_takes_over_is_no_failure(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    report = {"class": "Fenced", "message": "driver of run r-2 appended"}
    one.world.change(one.blue, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=71, report=report)
    one.world.step()
    assert (one.world.status["driver"]["podName"], one.notes()) == (start.name, ["Promoted"])
    assert "lastFailure" not in one.world.status
    assert one.stopped() == [one.blue], "no failed driver that is kept to be looked at"
    one.check_ready()


def test_a_blue_that_ends_after_a_rollback_is_not_replaced_by_what_was_rolled_back(rollout):
    one = rollout(timeoutSeconds=60)
    before = dict(one.world.spec)
    one.changed()
    one.world.step(after=2 * MINUTE)
    one.world.change(one.blue, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=1, reason="Error")
    one.world.step()
    one.world.step(after=60 * MINUTE)
    assert (one.world.starts(), one.world.reason("Stalled")) == ([], ("True", "RolledBack"))
    held = (dict(one.world.spec), one.world.status)
    one.world.spec = before
    one.world.step()
    assert [start.spec.revision for start in one.world.starts()] == [one.world.status["run"]["revision"]]
    for request in ("promote", "restart"):
        one.world.spec, one.world.status, one.world.runs = held[0], held[1], {}
        one.asked(request, "2")
        one.world.step()
        assert [start.stands_by for start in one.world.starts()] == [False]
        assert one.state is None


def test_a_green_that_took_over_as_it_was_rolled_back_is_the_driver(rollout):
    one = rollout(timeoutSeconds=60)
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    one.world.step(after=6 * MINUTE, act=False)
    assert one.state == "RolledBack"
    report = {"class": "Fenced", "message": "driver of run r-2 appended"}
    one.world.change(one.blue, phase=Phase.FAILED, finished_ms=one.world.now, exit_code=71, report=report)
    one.world.runs.pop(start.name)
    one.world.step()
    one.world.step(after=20_000)
    (again,) = one.world.starts()
    assert (again.stands_by, one.state, again.spec.revision) == (False, None, start.spec.revision)


def test_no_driver_but_the_two_of_a_rollout_lives(rollout):
    one = rollout()
    start = one.changed()
    stray = dataclasses.replace(one.world.runs[start.name], name="stray", attempt=0, phase=Phase.RUNNING)
    one.world.runs["stray"] = stray
    one.world.step()
    assert one.stopped() == ["stray"]


def test_a_clock_that_is_set_back_does_not_keep_a_rollout_for_ever(rollout):
    one = rollout(timeoutSeconds=60)
    one.changed()
    one.world.now -= 1000 * MINUTE
    one.world.step()
    one.world.step(after=61_000)
    assert one.state == "RolledBack"
    assert times.to_ms(one.world.status["rollout"]["startTime"]) <= one.world.now


def test_a_driver_on_standby_may_wait_in_a_queue_for_longer_than_its_time_to_start(rollout):
    one = rollout(timeoutSeconds=604_800)
    start = one.changed()
    for _ in range(20):
        one.world.change(start.name, reason="SchedulingGated")
        one.world.step(after=MINUTE)
        assert one.state == "Starting"
        assert "waits in the queue" in one.world.status["rollout"]["message"]
    one.world.change(start.name, reason="")
    one.world.step(after=MINUTE)
    assert one.world.status["rollout"]["message"].startswith("the driver on standby is starting")
    one.world.change(start.name, reason="ErrImagePull", message="no such image")
    one.world.step()
    assert one.world.status["rollout"]["message"] == "the driver on standby is starting: ErrImagePull: no such image"
    one.world.change(start.name, reason="", message="")
    one.world.step(after=MINUTE)
    assert "it needs Secret persist-store in its namespace" in one.world.status["rollout"]["message"]
    one.world.step(after=5 * MINUTE)
    assert one.world.status["lastFailure"]["class"] == "Scheduling"
    one.check_ready()
