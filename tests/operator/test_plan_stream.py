"""The plan of a Streaming sink: one run that goes on, whose drivers are started again."""

import json

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.api.sink_status import RunningProgress
from persist_operator.local.due import Ticks
from persist_operator.manifests import sink_files
from persist_operator.plan.observed import Phase
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

MINUTE = 60_000


@pytest.fixture
def world(world):
    return world({"mode": "Streaming"})


def running(world):
    world.step()
    world.change(phase=Phase.RUNNING, started_ms=world.now)
    world.step()


def stopped(world):
    world.succeeds(outcome="Stopped", batches=3, message="committed 3 batches with 5 updates; stopped")


def test_a_stream_is_ready_while_its_driver_runs(world):
    world.step()
    assert world.reason("Ready") == ("False", "Running")
    world.change(phase=Phase.RUNNING, started_ms=world.now)
    world.step()
    assert world.reason("Ready") == ("True", "Running")
    world.step(after=1000 * MINUTE)
    assert (world.reason("Ready"), world.plan.actions) == (("True", "Running"), ())


def test_a_driver_that_was_stopped_from_outside_is_started_again_in_the_same_run(world):
    running(world)
    run = world.status["run"]
    for attempt in (2, 3, 4):
        stopped(world)
        world.step()
        assert (world.status["progress"]["upper"], world.status["history"][0]["outcome"]) == ("77", "Stopped")
        world.step(after=20_000)
        world.change(phase=Phase.RUNNING, started_ms=world.now)
        world.step()
        assert (world.status["attempt"], world.status["run"]["id"]) == (attempt, run["id"])
        assert world.reason("Ready") == ("True", "Running")
        assert not world.status.get("consecutiveFailures")


def test_a_suspended_stream_is_not_started_again(world):
    running(world)
    world.spec["suspend"] = True
    world.step()
    assert [type(one).__name__ for one in world.plan.actions] == ["StopRun"]
    world.step(after=60 * MINUTE)
    assert (world.plan.actions, world.reason("Ready")) == ((), ("True", "Suspended"))


@pytest.mark.parametrize("restart", [{}, {"resetAfterSeconds": 7200}])
def test_failures_are_forgotten_when_a_driver_has_run_long_enough(world, restart):
    world.spec["restart"] = restart
    spec = world.make_sink(world.spec).spec
    longest = restart.get("resetAfterSeconds", spec.max_backoff_seconds)
    running(world)
    for expected in (1, 2):
        world.fails()
        world.step()
        assert world.status["consecutiveFailures"] == expected
        world.step(after=MINUTE)
        world.change(phase=Phase.RUNNING, started_ms=world.now)
        world.step()
        assert world.reason("Ready") == ("False", "Running")
    world.step(after=1000 * longest - 1001)
    assert world.status["consecutiveFailures"] == 2
    world.step(after=1001)
    assert (world.status["consecutiveFailures"], world.reason("Ready")) == (0, ("True", "Running"))
    world.fails()
    world.step()
    assert world.status["consecutiveFailures"] == 1
    delay_ms = times.to_ms(world.status["nextAttemptTime"]) - world.now
    assert delay_ms <= 1000 * world.make_sink(world.spec).spec.backoff_seconds


def test_failures_on_a_node_whose_clock_is_behind_are_not_forgotten(world):
    """Regression: each driver there had run long enough as soon as it ran, so a stream that could not run was started for ever."""
    running(world)
    for expected in (1, 2, 3):
        world.fails(started_ms=world.now - 120 * MINUTE, finished_ms=world.now - 119 * MINUTE)
        world.step()
        assert world.status["consecutiveFailures"] == expected
        world.step(after=10 * MINUTE)
        world.change(phase=Phase.RUNNING, started_ms=world.now - 120 * MINUTE)
        world.step()
        assert world.status["consecutiveFailures"] == expected


def test_a_failure_after_a_long_life_is_the_first_one_also_when_the_operator_was_away(world):
    longest = world.make_sink(world.spec).spec.max_backoff_seconds
    running(world)
    world.fails()
    world.step()
    world.step(after=MINUTE)
    world.change(phase=Phase.RUNNING, started_ms=world.now)
    world.now += 1000 * longest
    world.fails()
    world.step()
    assert world.status["consecutiveFailures"] == 1


def test_a_changed_spec_stops_the_stream_and_starts_another_run(world):
    running(world)
    before = world.status["run"]["id"]
    world.spec["commitIntervalSeconds"] = 3
    world.step()
    assert [type(one).__name__ for one in world.plan.actions][:1] == ["StopRun"]
    world.step()
    start = world.plan.actions[0]
    assert start.run_id != before
    document = sink_files.sink_document(start, world.make_sink(world.spec).meta, credentials_dir="/c")
    assert document["stream"] == {"commitIntervalSeconds": 3, "bounded": False, "stopSeconds": 45}


def test_a_field_of_streams_changes_no_revision_of_other_sinks(make_sink, sink_resource):
    plain = sink_resource()["spec"]
    former = {name: plain.get(name) for name in ("shardRef", "input", "envelope", "write", "spark")}
    assert make_sink().spec.revision == names.revision_of(former)
    assert make_sink({"writeMode": "ReadWrite"}).spec.revision == names.revision_of(former)
    assert make_sink({"mode": "Streaming", "commitIntervalSeconds": 5}).spec.revision != make_sink().spec.revision


def test_a_stream_whose_source_has_nothing_new_looks_again_after_a_pause(world):
    running(world)
    run = world.status["run"]["number"]
    world.succeeds(batches=2, message="committed 2 batches with 5 updates; the source has nothing new")
    world.step()
    assert (world.status["run"]["state"], world.reason("Ready")) == ("Succeeded", ("True", "Completed"))
    assert "the source has nothing new" in world.plan.notes[0].message
    world.step()
    assert world.status["run"]["number"] == run
    world.step(after=world.make_sink(world.spec).spec.backoff_seconds * 1000)
    assert (world.status["run"]["number"], world.status["run"]["state"]) == (run + 1, "Running")


def test_up_without_watch_looks_at_a_stream_once(world):
    ticks = Ticks(watch=False)
    document = {"metadata": {"name": "s"}, "spec": world.sink_resource(world.spec)["spec"], "status": {}}
    running(world)
    assert not ticks.is_over({**document, "status": {}})
    assert not ticks.is_over({**document, "status": world.status})
    world.succeeds()
    world.step()
    ended = {**document, "status": json.loads(json.dumps(world.status))}
    assert ticks.is_over(ended)
    again = Ticks(watch=False)
    assert not again.is_over(ended)
    assert "nextAttemptTime" not in again.shown(ended, now_ms=world.now)["status"]
    assert not Ticks(watch=True).is_over(ended)


def test_a_read_only_stream_says_while_it_runs_whether_it_would_write_something(world):
    world.spec |= {"writeMode": "ReadOnly", "envelope": {"type": "Upsert"}}
    running(world)
    assert world.reason("Converged") == ("Unknown", "NotCompared")
    for compared, missing, extra, found in (
        (0, 0, 0, ("Unknown", "NotCompared")),
        (7, 0, 0, ("True", "Equal")),
        (9, 0, 2, ("False", "Differs")),
        (9, 1, 2, ("False", "Differs")),
    ):
        report = {"stage": "Proven", "compared": compared, "missing": missing, "extra": extra}
        world.change(running=RunningProgress.parse(json.dumps(report)))
        world.step(after=MINUTE)
        assert world.reason("Converged") == found
    registry = CollectorRegistry()
    OperatorMetrics(registry).set_sink("team", "s", world.status)
    labels = {"namespace": "team", "name": "s"}
    assert [registry.get_sample_value(f"spark_sink_{name}", labels) for name in ("missing", "extra")] == [1, 2]
    message = "rows compared since the driver began: 9, missing in the shard: 1, too many: 2"
    assert conditions.find(world.status, "Converged")["message"] == message
    world.succeeds(outcome="Stopped", batches=3, missing=1, extra=2, updates_written=0)
    world.step()
    assert world.reason("Converged") == ("False", "Differs")


@pytest.mark.parametrize(("missing", "extra", "shown"), [(0, 0, "Completed"), (1, 0, "Differs"), (0, 2, "Differs")])
def test_a_read_only_stream_at_its_end_shows_a_difference_in_the_table(world, missing, extra, shown):
    world.spec |= {"writeMode": "ReadOnly", "envelope": {"type": "Upsert"}}
    running(world)
    world.succeeds(batches=3, missing=missing, extra=extra, updates_written=0)
    world.step()
    assert world.reason("Ready") == ("True", shown)
    found = f"rows missing in the shard: {missing}, rows too many: {extra}" if shown == "Differs" else "they are equal"
    assert conditions.find(world.status, "Ready")["message"] == f"run 1 compared the shard with its input: {found}"
