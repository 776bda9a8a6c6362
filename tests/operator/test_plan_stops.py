"""Planned stops of drivers that can be asked to end: how long each has for it, and what follows from its end."""

import dataclasses

import pytest
from persist_operator.api import times
from persist_operator.api.sink_status import RunningProgress
from persist_operator.plan.actions import StopRun
from persist_operator.plan.observed import ActionFailure, Phase
from rollout_world import Rollout

MINUTE = 60_000
GRACE_MS = 60_000
REPORT = {"message": "batches: 3, updates: 15; stopped", "batches": 3}


@pytest.fixture
def stream(world):
    """A stream whose driver runs and can be asked to end."""
    made = world({"mode": "Streaming"})
    made.step()
    made.change(phase=Phase.RUNNING, started_ms=made.now, hears_stop=True)
    made.step()
    return made


def suspended(world, **changes):
    """The name of the driver, and the stop that the plan wants."""
    name = world.status["driver"]["podName"]
    world.spec["suspend"] = True
    world.step(**changes)
    (stop,) = world.stops()
    assert (stop.name, stop.event) == (name, "DriverStopped")
    return name, stop


def left_s(world):
    return world.plan.requeue_after_s


def test_a_suspended_stream_is_asked_to_end_and_left_alone_until_it_has_ended(stream):
    name, stop = suspended(stream)
    assert (stop.asks, stop.grace_seconds, left_s(stream)) == (True, 60, 60.0)
    assert stream.reason("Ready") == ("False", "Stopping")
    for _ in range(5):
        stream.step(after=10_000)
        assert stream.plan.actions == ()
    assert 0.5 <= left_s(stream) <= 10
    stream.change(
        name, phase=Phase.SUCCEEDED, finished_ms=stream.now, report={"outcome": "Stopped", "upper": 9, **REPORT}
    )
    stream.step(after=1000)
    assert stream.reason("Ready") == ("True", "Suspended")
    status = stream.status
    assert (status["driver"]["phase"], status["driver"]["endTime"]) == ("Succeeded", times.to_text(stream.now - 1000))
    assert (status["progress"]["upper"], len(status["history"])) == ("9", 1)
    (item,) = status["history"]
    assert (item["outcome"], item["message"]) == ("Stopped", "stopped: suspended; batches: 3, updates: 15; stopped")
    before = stream.status
    stream.step(after=1000)
    assert (stream.status, stream.plan.actions) == (before, ()), "the report is recorded once"


@pytest.mark.parametrize(("retain", "stays"), [("Always", True), ("OnFailure", False), ("Never", False)])
@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
def test_the_pod_of_a_driver_that_ended_by_itself_is_kept_as_one_that_did_not_fail(stream, retain, stays, phase):
    stream.spec["cleanup"] = {"retainDriver": retain}
    name, _ = suspended(stream)
    stream.change(name, phase=phase, finished_ms=stream.now, exit_code=int(phase is Phase.FAILED))
    stream.step()
    assert [one.name for one in stream.stops()] == ([] if stays else [name])
    assert not any(one.asks for one in stream.stops())
    assert stream.status["driver"]["phase"] == phase.value
    assert [one["outcome"] for one in stream.status["history"]] == ["Stopped"]
    assert "lastFailure" not in stream.status
    assert not stream.status.get("consecutiveFailures")
    stream.step(after=3_600_000)
    assert name not in stream.runs


def test_a_driver_that_does_not_end_is_deleted_with_grace_at_its_time_and_then_by_force(stream):
    name, _ = suspended(stream)
    began_ms = stream.now
    stream.step(after=GRACE_MS - 1000)
    assert (stream.plan.actions, left_s(stream)) == ((), 1.0)
    stream.step(after=1000, act=False)
    (stop,) = stream.stops()
    assert (stop.name, stop.asks, stop.grace_seconds, stop.event) == (name, False, 60, "")
    stream.change(name, deleting=True, deleted_ms=began_ms + 2 * GRACE_MS)
    stream.step(after=2 * GRACE_MS + MINUTE)
    (stop,) = stream.stops()
    assert (stop.asks, stop.grace_seconds, stop.event) == (False, 0, "DriverForcedOut")


def test_a_changed_spec_starts_its_driver_when_the_former_one_has_ended(stream):
    name = stream.status["driver"]["podName"]
    stream.spec["commitIntervalSeconds"] = 3
    stream.step()
    assert (stream.asked, stream.starts()) == ([name], [])
    for _ in range(8):
        stream.step(after=5000)
        assert stream.plan.actions == ()
    stream.change(name, phase=Phase.SUCCEEDED, finished_ms=stream.now, report={"outcome": "Stopped", **REPORT})
    stream.step()
    (start,) = stream.starts()
    assert start.attempt == 2
    assert stream.status["history"][0]["message"].startswith("stopped: the spec changed; batches: 3")


def test_a_stream_that_is_resumed_meanwhile_waits_for_its_former_driver(stream):
    name, _ = suspended(stream)
    stream.spec["suspend"] = False
    for _ in range(4):
        stream.step(after=5000)
        assert stream.plan.actions == ()
    stream.change(name, phase=Phase.SUCCEEDED, finished_ms=stream.now, report={"outcome": "Stopped", **REPORT})
    stream.step()
    assert [one.attempt for one in stream.starts()] == [2]


@pytest.mark.parametrize(
    "changes",
    [
        {"hears_stop": False},
        {"hears_stop": False, "phase": Phase.PENDING},
        {"phase": Phase.PENDING, "hears_stop": False, "reason": "Unschedulable"},
    ],
)
def test_a_driver_that_cannot_be_asked_is_deleted_with_grace_at_once(stream, changes):
    stream.change(**changes)
    name, stop = suspended(stream, act=False)
    assert (stop.asks, stop.grace_seconds) == (False, 60)
    stream.step()
    assert [(one.name, one.asks) for one in stream.stops()] == [(name, False)], (
        "the operator ended before it deleted the pod"
    )


def test_without_a_grace_period_nothing_is_asked(stream):
    stream.spec["timeouts"] = {"terminationGraceSeconds": 0}
    _, stop = suspended(stream, act=False)
    assert (stop.asks, stop.grace_seconds) == (False, 0)
    stream.step()
    assert [one.asks for one in stream.stops()] == [False]


@pytest.mark.parametrize("limit", [0, 1, 10])
def test_an_operator_that_ends_before_it_asks_deletes_the_driver_at_its_time(stream, limit):
    """Also without a history: then the status of the driver has the time."""
    stream.spec["cleanup"] = {"historyLimit": limit}
    name, _ = suspended(stream, act=False)
    stream.step(after=GRACE_MS // 2)
    assert stream.plan.actions == ()
    stream.step(after=GRACE_MS // 2)
    assert [(one.name, one.asks) for one in stream.stops()] == [(name, False)]


def test_a_deletion_that_was_refused_is_tried_again_at_once(stream):
    """The driver did not accept, and the API server refused the deletion. Then there is nothing to wait for."""
    name, _ = suspended(stream)
    refusal = ActionFailure(reason="ActionRefused", message="500", permanent=False, at_ms=stream.now, generation=1)
    stream.failures = {f"StopRun/{name}": refusal}
    stream.step(after=1000)
    assert stream.plan.actions == ()
    assert stream.reason("Ready") == ("False", "ActionRefused")
    stream.step(after=10_000)
    assert [(one.name, one.asks) for one in stream.stops()] == [(name, False)]


@pytest.mark.parametrize(("set_back_ms", "waits"), [(30_000, True), (59_000, True), (90_000, False), (10**9, False)])
def test_a_clock_that_was_set_back_prolongs_the_time_by_the_grace_period_at_most(stream, set_back_ms, waits):
    suspended(stream)
    stream.step(after=-set_back_ms)
    assert (stream.plan.actions == ()) is waits
    if waits:
        assert left_s(stream) <= 2 * GRACE_MS / 1000
        stream.step(after=2 * GRACE_MS)
        assert [one.asks for one in stream.stops()] == [False]


def test_a_clock_that_leaps_forward_deletes_with_grace(stream):
    suspended(stream)
    stream.step(after=10**9)
    assert [(one.asks, one.grace_seconds) for one in stream.stops()] == [(False, 60)]


def test_a_driver_that_returns_from_the_dead_is_not_asked(stream):
    name = stream.status["driver"]["podName"]
    back = stream.runs.pop(name)
    stream.step()
    assert stream.status["driver"]["phase"] == "Lost"
    stream.runs[name] = back
    stream.step(act=False)
    assert [(one.name, one.asks) for one in stream.stops()] == [(name, False)]


def test_a_run_that_is_too_long_is_not_asked(world):
    made = world({"timeouts": {"activeDeadlineSeconds": 100}})
    made.step()
    made.change(phase=Phase.RUNNING, started_ms=made.now, hears_stop=True)
    made.step(after=100_000)
    assert [one.asks for one in made.stops()] == [False]


def test_the_end_of_a_batch_run_that_was_stopped_is_no_failure(world):
    made = world()
    made.step()
    made.change(phase=Phase.RUNNING, started_ms=made.now, hears_stop=True)
    made.step()
    name, stop = suspended(made)
    assert stop.asks
    report = {"outcome": "Failed", "class": "Application", "message": "stopped by SIGTERM; the run was not finished"}
    made.change(name, phase=Phase.FAILED, exit_code=1, finished_ms=made.now, report=report)
    made.step()
    assert made.reason("Ready") == ("True", "Suspended")
    assert made.status["history"][0]["message"].endswith("the run was not finished")
    made.spec["suspend"] = False
    made.step()
    (start,) = made.starts()
    assert (start.attempt, start.run_number) == (2, 1)
    assert not made.status.get("consecutiveFailures")


@pytest.fixture
def rollout(world):
    """Blue runs, green proves itself beside it, and both can be asked to end."""
    made = Rollout(world, promotion="Manual")
    made.world.change(made.blue, hears_stop=True)
    made.changed()
    made.runs(made.green, "StandingBy")
    made.world.change(made.green, hears_stop=True)
    made.world.step()
    return made


def test_the_former_driver_is_asked_to_end_after_a_promotion(rollout):
    world, green = rollout.world, rollout.green
    world.change(green, running=RunningProgress(stage="Streaming"))
    world.step()
    assert (world.asked, world.status["driver"]["podName"]) == ([rollout.blue], green)
    for _ in range(5):
        world.step(after=10_000)
        assert world.plan.actions == ()
        rollout.check_ready()
    fenced = {"outcome": "Failed", "class": "Fenced", "message": "fenced"}
    world.change(rollout.blue, phase=Phase.FAILED, exit_code=71, finished_ms=world.now, report=fenced)
    world.step()
    assert rollout.stopped() == [rollout.blue], "it was stopped and did not fail, so it is not kept"
    rollout.check_ready()


def test_a_new_revision_that_is_dropped_is_asked_to_end_and_gets_its_time(rollout):
    world, green = rollout.world, rollout.green
    del world.spec["write"]
    world.step()
    assert (world.asked, rollout.state) == ([green], None)
    for _ in range(5):
        world.step(after=10_000)
        assert world.plan.actions == ()
        rollout.check_ready()
    world.step(after=10_000, act=False)
    assert [(one.name, one.asks) for one in world.stops()] == [(green, False)]
    rollout.check_ready()


def test_a_rolled_back_driver_that_ends_is_followed_by_nothing(rollout):
    world, green = rollout.world, rollout.green
    world.step(after=1000 * world.make_sink(world.spec).spec.rollout.timeout_seconds)
    assert (world.asked, rollout.state) == ([green], "RolledBack")
    stopped = {"outcome": "Stopped", "batches": 0, "message": "batches: 0, updates: 0; stopped"}
    world.change(green, phase=Phase.SUCCEEDED, finished_ms=world.now, exit_code=0, report=stopped)
    world.step()
    assert (rollout.state, world.status["driver"]["podName"], world.starts()) == ("RolledBack", rollout.blue, [])
    rollout.check_ready()


def test_a_suspended_rollout_asks_both_drivers(rollout):
    world, both = rollout.world, {rollout.blue, rollout.green}
    world.spec["suspend"] = True
    world.step()
    assert set(world.asked) == both
    world.step(after=30_000)
    assert world.plan.actions == ()


def test_a_stop_is_asked_once(stream):
    suspended(stream)
    stops = []
    for _ in range(200):
        stream.step(after=1000)
        stops += [one for one in stream.plan.actions if isinstance(one, StopRun)]
    assert [one.asks for one in stops] == [False]
    assert dataclasses.replace(stops[0], reason="").grace_seconds == 60
