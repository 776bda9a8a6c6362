"""The plan of a SparkSink: attempts that wait, fail, and are tried again."""

import dataclasses

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.plan.observed import ActionFailure, Executors, Phase
from persist_operator.settings import WorkloadAllow
from sink_world import MINUTE


def test_retries_share_the_run_and_wait_longer_each_time(world):
    one = world({"restart": {"backoffSeconds": 10, "maxBackoffSeconds": 30, "maxConsecutiveFailures": 9}})
    one.step()
    ids, waits = set(), []
    for _ in range(4):
        ids.add(one.runs[one.status["driver"]["podName"]].run_id)
        one.fails()
        one.step()
        assert one.starts() == []
        assert one.reason("Ready") == ("False", "BackingOff")
        waits.append((times.to_ms(one.status["nextAttemptTime"]) - one.now) // 1000)
        one.step(after=waits[-1] * 1000)
        assert len(one.starts()) == 1
    assert ids == {"uid-sink-1"}
    assert waits == [10, 20, 30, 30]
    assert one.status["consecutiveFailures"] == 4


def test_too_many_failures_stall_until_the_spec_changes_or_a_restart_is_requested(world):
    one = world({"restart": {"maxConsecutiveFailures": 2, "backoffSeconds": 1}})
    one.step()
    for _ in range(2):
        one.fails(report={"outcome": "Failed", "class": "Application", "message": "boom"})
        one.step()
        one.step(after=MINUTE)
    assert one.reason("Stalled") == ("True", "FailuresExceeded")
    assert "boom" in conditions.find(one.status, "Stalled")["message"]
    assert one.plan.actions == ()
    one.metadata = {"annotations": {f"{names.REQUEST_PREFIX}restart": "again"}}
    one.step()
    (start,) = one.starts()
    assert (start.run_id, start.attempt) == ("uid-sink-1", 3)
    assert one.reason("Stalled") is None


@pytest.mark.parametrize(
    ("changes", "failure_class", "reason"),
    [
        ({"exit_code": 70}, "Storage", "StoreFailed"),
        ({"exit_code": 71}, "Fenced", "Fenced"),
        (
            {"exit_code": 72, "report": {"class": "Configuration", "message": "no column x"}},
            "Configuration",
            "InvalidConfiguration",
        ),
        ({"exit_code": 73}, "Application", "Diverged"),
        ({"exit_code": 73, "report": {"class": "Storage", "message": "part p is damaged"}}, "Application", "Diverged"),
        ({"exit_code": 1, "report": {"class": "Infrastructure", "message": "m"}}, "Infrastructure", "Infrastructure"),
        ({"exit_code": 137, "reason": "OOMKilled"}, "Application", "OOMKilled"),
        ({"exit_code": None, "reason": "Evicted", "message": "low on disk"}, "Infrastructure", "Evicted"),
        ({"exit_code": 0, "report": {"outcome": "Failed", "class": "Application"}}, "Application", "Application"),
    ],
)
def test_failures_are_classified(world, changes, failure_class, reason):
    one = world()
    one.step()
    one.fails(**{"log_tail": "the last line, password=hunter2", **changes})
    one.step()
    failure = one.status["lastFailure"]
    assert (failure["class"], failure["reason"]) == (failure_class, reason)
    assert "the last line" in failure["message"]
    assert "hunter2" not in failure["message"]
    assert failure["podName"] == one.status["driver"]["podName"]


def test_a_wrong_configuration_is_not_tried_again(world):
    one = world()
    one.step()
    one.fails(exit_code=72, report={"class": "Configuration", "message": "input has no column origin"})
    one.step()
    one.step(after=60 * MINUTE)
    assert one.plan.actions == () or one.starts() == []
    assert one.reason("Stalled") == ("True", "ConfigurationFailed")
    assert "no column origin" in conditions.find(one.status, "Stalled")["message"]


def test_store_failures_never_count_towards_the_limit(world):
    one = world({"restart": {"maxConsecutiveFailures": 1, "backoffSeconds": 1, "maxBackoffSeconds": 2}})
    one.step()
    for _ in range(5):
        one.fails(exit_code=70)
        one.step()
        one.step(after=3000)
        assert len(one.starts()) == 1


def test_a_driver_that_disappears_counts_as_lost_and_is_tried_again(world):
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    one.runs.clear()
    one.step()
    assert (one.status["lastFailure"]["class"], one.status["driver"]["phase"]) == ("Infrastructure", "Lost")
    one.step(after=11_000)
    assert [start.run_id for start in one.starts()] == ["uid-sink-1"]


def test_a_run_whose_committing_attempt_was_lost_does_not_show_the_numbers_of_another(world):
    one = world()
    one.step()
    one.succeeds(updates_written=100)
    one.step()
    one.spec["write"] = {"parallelism": 7}
    one.step()
    one.succeeds(already_done=True, rows_read=0, updates_written=0, upper=90)
    one.step()
    assert set(one.status["progress"]) == {"upper", "lastCommitTime"}
    assert one.status["progress"]["upper"] == "90"
    assert conditions.find(one.status, "Ready")["message"] == "run 2 is committed"


def test_the_status_shows_why_a_driver_waits_without_secrets(world):
    one = world()
    one.step()
    one.change(reason="ErrImagePull", message="https://user:hunter2@registry/spark: 401")
    one.step()
    assert "ErrImagePull" in conditions.find(one.status, "Running")["message"]
    assert "hunter2" not in conditions.find(one.status, "Running")["message"]


def test_a_driver_that_does_not_start_in_its_time_has_failed(world):
    one = world({"timeouts": {"driverStartSeconds": 60}})
    one.step()
    one.change(reason="ImagePullBackOff", message="no such image")
    one.step()
    assert one.stops() == []
    one.step(after=MINUTE)
    assert len(one.stops()) == 1
    assert (one.status["lastFailure"]["class"], one.status["lastFailure"]["reason"]) == (
        "Scheduling",
        "ImagePullBackOff",
    )


def test_an_attempt_beyond_its_time_limit_is_stopped_and_has_failed(world):
    one = world({"timeouts": {"activeDeadlineSeconds": 60}})
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    assert one.plan.requeue_after_s <= 60
    one.step(after=MINUTE)
    assert len(one.stops()) == 1
    assert one.status["lastFailure"]["class"] == "Timeout"


def test_the_time_limit_of_an_attempt_on_a_node_whose_clock_is_behind_counts_from_its_intent(world):
    """Regression: each attempt on such a node was stopped as soon as it ran."""
    one = world({"timeouts": {"activeDeadlineSeconds": 60}})
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now - 60 * MINUTE)
    one.step(after=MINUTE // 2)
    assert one.stops() == []
    one.step(after=MINUTE)
    assert len(one.stops()) == 1


def test_the_time_limit_of_an_attempt_that_a_clock_intended_which_was_ahead_counts_from_its_start(world):
    one = world({"timeouts": {"activeDeadlineSeconds": 60}})
    one.step()
    one.now -= 365 * 24 * 60 * MINUTE
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.step()
    assert one.stops() == []
    one.step(after=MINUTE)
    assert len(one.stops()) == 1


def test_a_backoff_written_by_a_clock_that_was_ahead_is_not_awaited(world):
    one = world()
    one.step()
    one.now += 365 * 24 * 60 * MINUTE
    one.fails()
    one.step()
    one.now -= 365 * 24 * 60 * MINUTE
    one.step()
    assert len(one.starts()) == 1


def test_a_long_request_is_new_when_its_end_is(world, refused):
    """People put a reason before the date."""
    one = world()
    one.step()
    for day in (26, 27):
        one.succeeds()
        one.step()
        asked = {
            f"{names.REQUEST_PREFIX}restart": f"{'asked for by the team that owns the reports, ' * 3}2026-11-{day}"
        }
        one.metadata = {"annotations": asked}
        one.step()
        assert len(one.starts()) == 1
        one.step()
        assert one.starts() == [], "each request is handled once"
        assert refused(one.sink_resource(), one.status) == []


def test_a_driver_that_waits_for_the_secret_of_its_options_says_so(world):
    one = world({"input": {"type": "Format", "format": {"name": "jdbc", "optionsSecretName": "orders-db"}}})
    one.settings = dataclasses.replace(
        one.settings, workload=dataclasses.replace(one.settings.workload, allow=WorkloadAllow(secrets=("orders-db",)))
    )
    one.step()
    one.step()
    assert "needs Secret orders-db in its namespace" in conditions.find(one.status, "Running")["message"]
    one.change(reason="Unschedulable", message="no node")
    one.step()
    assert "orders-db" not in conditions.find(one.status, "Running")["message"]
    one.change(reason="", message="")
    one.step(after=10 * MINUTE)
    assert one.status["lastFailure"]["class"] == "Scheduling"
    assert "needs Secret orders-db" in one.status["lastFailure"]["message"]


def test_a_driver_that_waits_for_the_files_of_its_function_says_so(world):
    one = world({"input": {"type": "Python", "python": {"module": "orders", "configMapName": "orders-input"}}})
    one.step()
    one.step()
    assert "needs ConfigMap orders-input in its namespace" in conditions.find(one.status, "Running")["message"]
    one.step(after=10 * MINUTE)
    assert "needs ConfigMap orders-input" in one.status["lastFailure"]["message"]


def test_a_driver_whose_container_is_not_created_says_within_a_minute_what_it_mounts(world):
    one = world()
    one.step()
    one.change(message="its node has not created its container yet")
    one.step()
    assert one.reason("Ready") == ("False", "Running"), "every start takes some seconds"
    assert one.plan.requeue_after_s <= 60
    one.step(after=MINUTE)
    assert one.reason("Ready") == ("False", "DriverPending")
    for condition in ("Ready", "Running"):
        message = conditions.find(one.status, condition)["message"]
        assert "its node has not created its container yet; it needs Secret persist-store in its namespace" in message
    one.step(after=10 * MINUTE)
    assert "needs Secret persist-store" in one.status["lastFailure"]["message"]
    assert "not scheduled" not in one.status["lastFailure"]["message"]


def test_a_driver_whose_executors_do_not_start_says_why(world):
    one = world({"mode": "Streaming"})
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    why = "Unschedulable: 0/3 nodes are available"
    one.executors = Executors(pending=2, pending_from_ms=one.now, why_pending=why)
    one.step()
    assert conditions.find(one.status, "Running")["message"] == f"{one.status['driver']['podName']} runs"
    assert one.plan.requeue_after_s <= 60
    one.step(after=MINUTE)
    assert conditions.find(one.status, "Running")["message"].endswith(f"runs; executors do not start: {why}")
    assert one.reason("Running") == ("True", "DriverRunning")
    one.executors = Executors(running=2)
    one.step()
    assert conditions.find(one.status, "Running")["message"].endswith(" runs")


def test_a_long_reason_for_which_a_driver_does_not_start_fits_the_status(world, refused):
    one = world()
    one.step()
    one.change(reason="ErrImagePull" * 100, message="x" * 40_000)
    one.step(after=10 * MINUTE)
    assert one.status["lastFailure"]["reason"].startswith("ErrImagePull")
    assert refused(one.sink_resource(), one.status) == []


@pytest.mark.parametrize("mode", ["Once", "Streaming"])
def test_a_driver_that_finalizers_of_others_hold_is_deleted_by_force_once_and_the_status_names_them(world, mode):
    one = world({"mode": mode})
    one.step()
    name = one.status["driver"]["podName"]
    one.change(phase=Phase.RUNNING, started_ms=one.now, deleting=True, deleted_ms=one.now)
    one.step(after=2 * MINUTE, act=False)
    assert [stop.name for stop in one.stops()] == [name]
    one.change(held_by=("mesh.example/drain",))
    one.step(after=5000, act=False)
    assert one.plan.actions == ()
    for condition, status in (("Ready", "False"), ("Running", "Unknown")):
        assert one.reason(condition) == (status, "DriverEnding")
        assert f"{name} (finalizers mesh.example/drain)" in conditions.find(one.status, condition)["message"]
    one.fails(reason="Error")
    one.step(act=False)
    one.step(after=MINUTE)
    assert [start.attempt for start in one.starts()] == [2], "what has ended delays nothing"


GATED = {"reason": "SchedulingGated", "message": "Scheduling is blocked due to non-empty scheduling gates"}


@pytest.mark.parametrize("minutes", [4, 120])
def test_the_time_in_a_queue_does_not_count_towards_the_start(world, minutes):
    one = world({"timeouts": {"driverStartSeconds": 300}})
    one.step()
    name = one.status["driver"]["podName"]
    one.change(**GATED)
    changes = 0
    for _ in range(minutes):
        before = one.status
        one.step(after=MINUTE)
        changes += one.status != before
        assert one.reason("Ready") == ("False", "Queued")
        assert one.plan.actions == ()
    assert changes <= 1 + minutes // 2, "the status changes when half of the time is over, not with each look"
    one.change(reason="Unschedulable", message="no node")
    one.step(after=149_000)
    assert one.reason("Ready") == ("False", "DriverPending")
    assert conditions.find(one.status, "Ready")["message"] == "run 1, attempt 1: Unschedulable no node"
    one.step(after=300_000)
    assert (one.status["lastFailure"]["class"], one.status["lastFailure"]["podName"]) == ("Scheduling", name)


def test_the_wait_for_a_place_does_not_count_towards_the_start_either(world):
    one = world({"timeouts": {"driverStartSeconds": 300}})
    one.step(act=False)
    for _ in range(4):
        one.failures = {
            "StartDriver": ActionFailure(
                reason="Queued", message="place 20", permanent=False, at_ms=one.now, place=20, generation=1
            )
        }
        one.step(after=MINUTE, act=False)
        assert one.reason("Ready") == ("False", "Queued")
        assert one.starts() == [], "the twentieth asks again after 100 s"
        assert one.plan.requeue_after_s <= 100
    one.failures = {}
    one.step()
    one.step(after=149_000)
    assert one.reason("Ready") == ("False", "DriverPending")
    assert not one.status.get("lastFailure")


@pytest.mark.parametrize("report", [None, {}])
def test_a_driver_that_ends_well_without_a_report_has_not_succeeded(world, report):
    """The code of a user runs in it, and may end the process. The sink showed Completed, with no rows read, and nothing was written."""
    one = world()
    one.step()
    one.change(phase=Phase.SUCCEEDED, finished_ms=one.now, exit_code=0, reason="Completed", report=report)
    one.step()
    failure = one.status["lastFailure"]
    assert (failure["class"], failure["reason"]) == ("Application", "NoReport")
    assert "exit code 0 before it reported what it did" in failure["message"]
    assert one.reason("Ready") != ("True", "Completed")
    one.step(after=10 * MINUTE)
    assert len(one.starts()) == 1
