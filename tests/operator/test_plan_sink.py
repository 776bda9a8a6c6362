"""The plan of a SparkSink: runs, requests, cleanup, and what the status says."""

import dataclasses

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.plan.observed import Phase, ShardView, SinkObserved
from persist_operator.plan.sink import plan_sink
from sink_world import MINUTE


def test_intent_is_recorded_and_the_driver_gets_all_it_needs(world):
    one = world()
    (start,) = one.step().actions
    assert one.status["driver"] == {
        "podName": start.name,
        "phase": "Creating",
        "startTime": times.to_text(one.now),
    }
    assert start.name == f"load-{start.spec.revision}-1"
    assert (start.run_id, start.run_number, start.attempt) == ("uid-sink-1", 1, 1)
    assert one.status["attempt"] == 1
    assert one.reason("Ready") == ("False", "Running")
    assert one.reason("Reconciling") == ("True", "Running")


def test_a_crash_between_intent_and_create_repeats_the_same_attempt(world):
    one = world()
    (first,) = one.step(act=False).actions
    (second,) = one.step().actions
    assert first == second
    assert one.status["attempt"] == 1


def test_a_once_sink_completes_and_stays_so(world):
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    assert one.reason("Running") == ("True", "DriverRunning")
    assert one.status["executors"]["running"] == 2
    one.succeeds()
    one.step()
    assert one.reason("Ready") == ("True", "Completed")
    assert one.reason("Reconciling") is None
    assert one.status["progress"]["rowsRead"] == 5
    assert one.status["progress"]["upper"] == "77"
    assert [item["outcome"] for item in one.status["history"]] == ["Succeeded"]
    before = one.status
    one.step(after=10 * MINUTE)
    assert one.plan.actions == ()
    assert one.status == before


def test_a_changed_spec_runs_again_with_another_id(world):
    one = world()
    one.step()
    one.succeeds()
    one.step()
    one.spec["envelope"] = {"type": "Mirror"}
    one.step()
    (start,) = one.starts()
    assert (start.run_id, start.attempt) == ("uid-sink-2", 2)


def test_a_changed_spec_stops_the_driver_and_waits_for_its_end(world):
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    old = one.status["driver"]["podName"]
    one.spec["write"] = {"parallelism": 7}
    one.step(act=False)
    assert [stop.name for stop in one.stops()] == [old]
    assert one.starts() == []
    one.change(deleting=True)
    one.step()
    assert one.plan.actions == ()
    one.runs.clear()
    one.step()
    assert [start.run_id for start in one.starts()] == ["uid-sink-2"]


def test_a_driver_that_is_being_deleted_is_awaited(world):
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    one.change(deleting=True)
    one.step()
    assert one.plan.actions == ()
    assert "lastFailure" not in one.status


def test_a_driver_whose_deletion_does_not_end_is_deleted_by_force(world):
    """The node of the driver is cut off. Its end will never be reported, and no other driver would start."""
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    one.change(deleting=True, deleted_ms=one.now + 30_000)
    one.step(after=80_000)
    assert (one.stops(), one.plan.requeue_after_s) == ([], 10)
    assert one.reason("Running") == ("Unknown", "DriverEnding")
    one.step(after=10_000)
    assert [(stop.name, stop.grace_seconds) for stop in one.stops()] == [(one.status["driver"]["podName"], 0)]
    one.step()
    assert one.status["lastFailure"]["reason"] == "DriverLost"
    one.step(after=11_000)
    assert [(start.run_id, start.attempt) for start in one.starts()] == [("uid-sink-1", 2)]


@pytest.mark.parametrize("change", [{"suspend": True}, {"write": {"parallelism": 7}}])
def test_an_intended_driver_that_is_cancelled_leaves_nothing_behind(world, change):
    """Its ConfigMap and Service may exist, if the operator crashed before it created the pod."""
    one = world()
    (start,) = one.step(act=False).actions
    one.spec.update(change)
    one.step()
    assert [stop.name for stop in one.stops()] == [start.name]
    assert start.name not in {again.name for again in one.starts()}


def test_the_children_of_a_driver_that_was_deleted_from_outside_are_removed(make_sink, usable_shard, settings, now):
    status = {"driver": {"podName": "load-aaaaaaaa-2", "phase": "Failed"}, "attempt": 2}
    sink = make_sink({"suspend": True}, status=status)
    observed = SinkObserved(shard=usable_shard, leftovers=("load-aaaaaaaa-1", "load-aaaaaaaa-2"))
    actions = plan_sink(sink, observed, now_ms=now, settings=settings).actions
    assert [action.name for action in actions] == ["load-aaaaaaaa-1", "load-aaaaaaaa-2"]


@pytest.mark.parametrize("errors", [None, 0, 1])
def test_a_run_with_errors_succeeds_with_a_warning(world, errors):
    one = world()
    one.step()
    one.succeeds(**({} if errors is None else {"errors": errors}))
    one.step()
    assert one.status["progress"].get("errors") == errors
    assert conditions.is_true(one.status, "Ready")
    text = "1 row that could not be written is an error in the shard; see its column err"
    assert [note.message.split(": ", 1)[1] for note in one.plan.notes if note.kind == "Warning"] == [text] * (
        errors or 0
    )


def test_a_read_only_sink_says_whether_the_shard_is_what_it_would_make_of_it(world):
    one = world()
    one.spec |= {"writeMode": "ReadOnly", "envelope": {"type": "Mirror"}}
    one.step()
    found = conditions.find(one.status, "Converged")
    assert (found["status"], found["reason"]) == ("Unknown", "NotCompared")
    one.succeeds(updates_written=0, missing=0, extra=0, upper=90)
    one.step()
    found = conditions.find(one.status, "Converged")
    assert (found["status"], found["reason"], found["message"]) == ("True", "Equal", "at upper 90")
    assert conditions.find(one.status, "Ready")["message"] == "run 1 compared the shard with its input: they are equal"
    one.spec["write"] = {"parallelism": 7}
    one.step()
    one.succeeds(updates_written=0, missing=3, extra=1, upper=95)
    one.step()
    found = conditions.find(one.status, "Converged")
    assert (found["status"], found["reason"]) == ("False", "Differs")
    assert found["message"] == "at upper 95: rows missing in the shard: 3, rows too many: 1"
    assert conditions.is_true(one.status, "Ready")
    one.metadata = {"annotations": {f"{names.REQUEST_PREFIX}restart": "again"}}
    one.step()
    one.fails(report={"outcome": "Failed", "class": "Storage", "message": "no answer"})
    one.step()
    found = conditions.find(one.status, "Converged")
    assert (found["status"], found["reason"]) == ("Unknown", "ComparisonFailed")
    assert "the last comparison, at upper 95, found rows missing: 3, too many: 1" in found["message"]
    one.step(after=MINUTE)
    one.succeeds(updates_written=0, missing=0, extra=0, upper=99)
    one.step()
    assert one.reason("Converged") == ("True", "Equal")
    before = one.status["activeRevision"]
    one.spec["writeMode"] = "ReadWrite"
    one.step()
    assert one.status["activeRevision"] != before, "a sink that is to write runs again"
    assert conditions.find(one.status, "Converged") is None


def test_nothing_starts_on_a_shard_that_cannot_be_written(world, usable_shard):
    one = world()
    one.shard = ShardView(found=False, reason="ShardNotFound", message="there is no PersistShard flights")
    one.step()
    assert one.plan.actions == ()
    assert one.reason("ShardResolved") == ("False", "ShardNotFound")
    assert one.reason("Ready") == ("False", "ShardNotFound")
    one.shard = usable_shard
    one.step()
    assert len(one.starts()) == 1


def test_suspend_stops_the_driver_and_resume_continues_the_same_run(world):
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    one.spec["suspend"] = True
    one.step()
    assert len(one.stops()) == 1
    one.step()
    assert one.plan.actions == ()
    assert one.reason("Ready") == ("True", "Suspended")
    one.spec["suspend"] = False
    one.step()
    assert [(start.run_id, start.attempt) for start in one.starts()] == [("uid-sink-1", 2)]


def test_a_child_newer_than_the_status_is_adopted(world):
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.status = {}
    one.step()
    assert one.plan.actions == ()
    assert (one.status["attempt"], one.status["run"]["id"]) == (1, "uid-sink-1")
    one.succeeds()
    one.step()
    assert one.reason("Ready") == ("True", "Completed")


def test_a_stray_driver_is_stopped_before_another_starts(world):
    one = world()
    one.step(act=False)
    start = one.starts()[0]
    one.runs["stray"] = dataclasses.replace(one.driver(start), name="stray", attempt=0, phase=Phase.RUNNING)
    one.step()
    assert [stop.name for stop in one.stops()] == ["stray"]
    assert one.starts() == []
    one.step()
    assert len(one.starts()) == 1


@pytest.mark.parametrize("spec", [{}, {"suspend": True}, {"write": {"parallelism": 7}}])
def test_a_stop_that_a_crash_prevented_is_repeated(world, spec):
    """The operator crashes between the status and the deletion. Without the repetition it would wait for a hanging driver for ever."""
    one = world({"timeouts": {"activeDeadlineSeconds": 60}})
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    one.spec.update(spec)
    one.step(after=MINUTE, act=False)
    (stop,) = one.stops()
    assert one.status["driver"]["phase"] in {"Failed", "Deleted"}
    one.step(after=MINUTE)
    assert [again.name for again in one.stops()] == [stop.name]
    one.step()
    assert one.stops() == []
    assert len(one.starts()) == (0 if one.spec.get("suspend") else 1)


def test_a_driver_that_comes_back_after_its_run_is_stopped(world):
    one = world()
    (start,) = one.step().actions
    one.succeeds()
    one.step()
    one.step()
    one.runs["late"] = dataclasses.replace(one.driver(start), phase=Phase.RUNNING, name="late")
    one.step()
    assert [stop.name for stop in one.stops()] == ["late"]


@pytest.mark.parametrize(("retain", "outcome", "kept"), [
    ("OnFailure", "succeeds", False), ("OnFailure", "fails", True),
    ("Never", "fails", False), ("Always", "succeeds", True),
])  # fmt: skip
def test_finished_drivers_beyond_the_retained_ones_are_deleted(world, retain, outcome, kept):
    one = world({"cleanup": {"retainDriver": retain, "ttlSecondsAfterFinished": 100}, "restart": {"policy": "Never"}})
    one.step()
    getattr(one, outcome)()
    one.step()
    assert (len(one.stops()) == 0) == kept
    if kept:
        assert one.plan.requeue_after_s <= 100
        one.step(after=100_000)
        assert len(one.stops()) == 1
    one.step()
    assert one.plan.actions == ()


def test_every_status_fits_the_crd(world, refused):
    one = world({"restart": {"backoffSeconds": 1}})
    for change in (lambda: None, lambda: one.fails(log_tail="x" * 9000), lambda: None, one.succeeds):
        change()
        one.step(after=5000)
        assert refused(one.sink_resource(), one.status) == []


def test_a_deleted_sink_is_left_alone(world):
    one = world()
    one.metadata = {"deletionTimestamp": "2026-11-20T00:00:00Z"}
    assert one.step().actions == ()


def test_a_comparison_that_failed_first_or_before_a_change_of_the_spec_is_unknown(world):
    schedule = {"mode": "Scheduled", "schedule": {"cron": "*/10 * * * *"}}
    one = world({**schedule, "writeMode": "ReadOnly", "envelope": {"type": "Mirror"}})
    one.step(after=10 * MINUTE)
    one.fails()
    one.step()
    assert one.reason("Converged") == ("Unknown", "ComparisonFailed")
    one.step(after=MINUTE)
    one.succeeds(missing=0, extra=0, upper=95)
    one.step(after=2000)
    assert one.reason("Converged") == ("True", "Equal")
    one.spec["write"] = {"parallelism": 7}
    one.step()
    assert one.reason("Converged") == ("Unknown", "SpecChanged")
