"""The plan of a rollout beside the driver that runs: blue runs, green stands by."""

import dataclasses

import pytest
from persist_operator.api.sink_status import RunningProgress
from persist_operator.manifests import sink_files
from persist_operator.plan.observed import Phase
from rollout_world import MINUTE, Rollout


@pytest.fixture
def rollout(world):
    return lambda **spec: Rollout(world, **spec)


def test_a_new_revision_stands_by_while_the_driver_runs_on(rollout):
    one = rollout()
    start = one.changed()
    assert (start.stands_by, start.attempt, start.run_id != one.first, one.stopped()) == (True, 2, True, [])
    document = sink_files.sink_document(start, one.world.make_sink(one.world.spec).meta, credentials_dir="/c")
    assert document["stream"]["standby"] is True
    status = one.world.status
    assert (status["driver"]["podName"], status["run"]["id"], status["attempt"]) == (one.blue, one.first, 1)
    assert (one.state, status["rollout"]["from"], status["rollout"]["to"]) == (
        "Starting",
        status["run"]["revision"],
        start.spec.revision,
    )
    assert one.notes() == ["RolloutStarted"]
    assert one.world.reason("RolledOut") == ("False", "Starting")
    one.check_ready()


def test_an_equal_revision_is_promoted_by_itself_and_blue_is_stopped_when_it_writes(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name)
    assert (one.state, one.promoted) == ("Starting", [])
    one.runs(start.name, "StandingBy")
    assert (one.state, one.promoted) == ("CatchingUp", [])
    one.runs(start.name, "Proven", compared=5, missing=0, extra=0, lag_seconds=2)
    assert (one.state, one.promoted, one.stopped()) == ("Promoting", [start.name], [])
    assert one.world.status["rollout"]["compared"] == 5
    one.check_ready()
    one.runs(start.name, "Streaming")
    assert (one.stopped(), one.state, one.promoted) == ([one.blue], None, [])
    assert (one.notes(), one.world.reason("RolledOut")) == (["Promoted"], ("True", "Current"))
    status = one.world.status
    assert (status["driver"]["podName"], status["run"]["id"], status["attempt"]) == (start.name, start.run_id, 2)
    assert [(item["attempt"], item["outcome"]) for item in status["history"]] == [(1, "Stopped")]
    one.check_ready()
    one.world.step(after=1000 * MINUTE)
    assert one.world.plan.actions == ()
    one.check_ready()


def test_manual_promotion_waits_for_the_request_and_a_request_promotes_in_any_case(rollout):
    one = rollout(promotion="Manual")
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    assert (one.state, one.promoted) == ("ReadyToPromote", [])
    one.runs(start.name, "Differs", compared=5, missing=1, extra=2)
    assert (one.state, one.promoted) == ("CatchingUp", [])
    assert "missing in the shard: 1, too many: 2" in one.world.status["rollout"]["message"]
    one.asked("promote")
    one.world.step()
    assert (one.state, one.promoted) == ("Promoting", [start.name])
    assert one.world.status["lastHandledRequests"] == {"promote": "1"}


def test_a_revision_that_differs_or_lags_is_not_promoted_by_itself(rollout):
    one = rollout(maxLagSeconds=5)
    start = one.changed()
    for stage, lag in (("Differs", 0), ("Proven", 6), ("StandingBy", 0)):
        one.runs(start.name, stage, compared=5, missing=1, extra=0, lag_seconds=lag)
        assert (one.state, one.promoted) == ("CatchingUp", [])
    one.runs(start.name, "Proven", compared=5, lag_seconds=5)
    assert one.state == "Promoting"


def test_a_request_without_a_rollout_promotes_nothing_later(rollout):
    one = rollout(promotion="Manual")
    one.asked("promote")
    one.world.step()
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    assert (one.state, one.promoted) == ("ReadyToPromote", [])


def test_a_spec_and_a_request_that_come_together_promote_at_once(rollout):
    one = rollout(promotion="Manual")
    one.asked("promote")
    start = one.changed()
    assert one.state == "Promoting"
    one.world.step()
    assert one.promoted == [start.name]


def test_a_change_of_the_rollout_alone_starts_none(rollout, make_sink):
    one = rollout()
    one.world.spec["rollout"] = {"strategy": "BlueGreen", "promotion": "Manual", "timeoutSeconds": 60}
    one.world.step()
    assert (one.state, one.world.plan.actions) == (None, ())
    plain = make_sink({"mode": "Streaming"}).spec.revision
    assert make_sink({"mode": "Streaming", "rollout": {"strategy": "BlueGreen"}}).spec.revision == plain


def test_without_blue_green_the_driver_is_replaced_as_ever(rollout):
    one = rollout()
    one.world.spec["rollout"] = {"strategy": "Recreate"}
    one.world.spec["write"] = {"parallelism": 7}
    one.world.step()
    assert (one.stopped(), one.world.reason("RolledOut")) == ([one.blue], None)
    one.world.step()
    (start,) = one.world.starts()
    assert not start.stands_by


def test_a_change_to_recreate_lets_green_take_over_as_it_is(rollout):
    one = rollout(promotion="Manual")
    start = one.changed()
    one.runs(start.name, "Differs", compared=1, missing=1, extra=1)
    one.world.spec["rollout"] = {"strategy": "Recreate"}
    one.world.step()
    assert (one.stopped(), one.promoted, one.state) == ([one.blue], [start.name], None)
    assert one.world.status["driver"]["podName"] == start.name


def test_a_rollout_ends_when_the_shard_is_another_one(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "Proven", compared=1)
    one.world.shard = dataclasses.replace(one.world.shard, shard_id="s11111111-1111-1111-1111-111111111111")
    one.world.step()
    assert (sorted(one.stopped()), one.state) == (sorted([one.blue, start.name]), None)


def test_a_blue_that_is_leaving_is_waited_for(rollout):
    """A driver that is drained is about to end. Nothing is decided before its end."""
    one = rollout()
    start = one.changed()
    one.runs(start.name, "StandingBy")
    one.world.change(one.blue, deleting=True)
    one.world.step()
    assert (one.world.plan.actions, one.state) == ((), "CatchingUp")
    report = {"outcome": "Stopped", "message": "stopped"}
    one.world.change(one.blue, phase=Phase.SUCCEEDED, finished_ms=one.world.now, exit_code=0, report=report)
    one.world.step()
    assert (one.promoted, one.world.status["driver"]["podName"]) == ([start.name], start.name)
    one.check_ready()


def test_without_a_driver_that_runs_a_new_revision_starts_directly(world):
    one = world({"mode": "Streaming", "rollout": {"strategy": "BlueGreen"}})
    one.step()
    one.spec["write"] = {"parallelism": 7}
    one.step()
    one.step()
    (start,) = one.starts()
    assert (start.stands_by, one.status.get("rollout")) == (False, None)


@pytest.mark.parametrize("crash", ["before", "after"])
def test_a_crash_around_the_start_of_green_repeats_the_same_attempt(rollout, crash):
    one = rollout()
    first = one.changed(act=crash == "after")
    if crash == "after":
        one.world.runs.pop(first.name)  # the operator ended before its cache knew of the pod
    one.world.step()
    assert one.world.starts() == [first]
    one.check_ready()


def test_a_crash_between_the_order_and_its_effect_repeats_the_order(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    for _ in range(2):
        one.world.step()
        assert (one.state, one.promoted) == ("Promoting", [start.name])


def test_a_crash_after_the_takeover_was_recorded_stops_blue_all_the_same(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    one.world.change(start.name, running=RunningProgress(stage="Streaming"))
    one.world.step(act=False)
    one.world.step()
    assert (one.stopped(), one.world.status["driver"]["podName"]) == ([one.blue], start.name)


def test_with_a_lost_status_blue_and_green_go_on(rollout):
    one = rollout(promotion="Manual")
    start = one.changed()
    one.runs(start.name, "StandingBy")
    one.world.status = {}
    one.world.step()
    one.world.step()
    assert (one.world.plan.actions, one.state, one.green) == ((), "CatchingUp", start.name)
    assert one.world.status["driver"]["podName"] == one.blue
    assert one.world.status["rollout"]["runId"] == start.run_id
    one.check_ready()


def test_with_a_lost_status_a_green_that_writes_is_the_driver(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    one.world.change(start.name, running=RunningProgress(stage="Streaming"))
    for with_blue in (True, False):
        one.world.status = {}
        one.world.runs = {name: run for name, run in one.world.runs.items() if with_blue or name == start.name}
        one.world.step()
        one.world.step()
        assert (one.world.status["driver"]["podName"], one.state) == (start.name, None)
        one.check_ready()


def test_with_a_lost_status_a_promoted_driver_is_blue_again_in_the_next_rollout(rollout):
    """Both drivers began on standby. Only one of them writes."""
    one = rollout(promotion="Manual")
    first = one.changed(7)
    one.asked("promote")
    one.world.step()
    one.runs(first.name, "Streaming")
    second = one.changed(8)
    one.runs(second.name, "StandingBy")
    one.world.status = {}
    one.asked("promote", "")
    one.world.step()
    one.world.step()
    assert (one.world.plan.actions, one.state, one.green) == ((), "CatchingUp", second.name)
    assert one.world.status["driver"]["podName"] == first.name


def test_a_spec_that_changes_twice_stops_the_first_green(rollout):
    one = rollout()
    first = one.changed(7)
    one.runs(first.name, "StandingBy")
    one.world.spec["write"] = {"parallelism": 8}
    one.world.step(act=False)
    assert (one.stopped(), one.world.starts()) == ([first.name], [])
    one.world.act()
    one.world.step()
    (second,) = one.world.starts()
    assert (second.attempt, second.stands_by, one.world.status["rollout"]["to"]) == (3, True, second.spec.revision)
    one.runs(second.name, "Proven", compared=1)
    one.runs(second.name, "Streaming")
    assert (one.world.status["driver"]["podName"], one.stopped()) == (second.name, [one.blue])
    one.check_ready()


def test_a_spec_that_is_restored_ends_the_rollout(rollout):
    one = rollout()
    before = dict(one.world.spec)
    start = one.changed()
    one.runs(start.name, "StandingBy")
    one.world.spec = before
    one.world.step()
    assert (one.stopped(), one.state, one.world.reason("RolledOut")) == ([start.name], None, ("True", "Current"))
    one.check_ready()
    assert one.changed(9).attempt == 3


def test_suspend_stops_both_and_a_deletion_leaves_them_to_their_owner(rollout):
    one = rollout()
    start = one.changed()
    one.runs(start.name, "Proven", compared=5)
    one.world.spec["suspend"] = True
    one.world.step()
    assert (sorted(one.stopped()), one.state) == (sorted([one.blue, start.name]), None)
    assert one.promoted == []
    one.world.metadata = {"deletionTimestamp": "2024-01-01T00:00:00Z"}
    one.world.step()
    assert one.world.plan.actions == ()
