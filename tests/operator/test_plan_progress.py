"""What a driver reports while it runs, on the status of its sink: what is believed, and how often the status changes."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from persist_kit.depth import draws
from persist_operator.api import names
from persist_operator.api.sink_status import RunningProgress
from persist_operator.plan.observed import Phase
from persist_operator.steps import children

SPARK = {"task_ms": 61_900, "gc_ms": 999, "shuffle_bytes": 4096}
REPORTED = {"stage": "Reading", "rows_read": 10, "bytes_read": 2048, "tasks": 8, "tasks_done": 3, **SPARK}


def reported(**changes):
    return RunningProgress.parse(json.dumps({**REPORTED, **changes}))


@pytest.fixture
def running(world):
    """A World whose driver runs and has reported REPORTED."""
    one = world()
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now, running=reported())
    one.step()
    return one


def shown(world):
    return world.status.get("progress", {}).get("running", {})


def test_the_numbers_of_a_running_driver_stand_on_the_status(running, refused, sink_resource):
    assert {name: one for name, one in shown(running).items() if name != "observedTime"} == {
        "stage": "Reading", "rowsRead": 10, "bytesRead": 2048, "tasks": 8, "tasksDone": 3,
        "taskSeconds": 61, "gcSeconds": 0, "shuffleBytes": 4096,
    }  # fmt: skip
    assert refused(sink_resource(), running.status) == []


def test_new_numbers_change_the_status_every_30_seconds(running):
    before = shown(running)
    running.change(running=reported(rows_read=11))
    running.step(after=29_000)
    assert shown(running) == before
    assert running.plan.requeue_after_s == 1
    running.step(after=1_000)
    assert shown(running)["rowsRead"] == 11


def test_equal_numbers_never_change_the_status(running):
    before = shown(running)
    running.step(after=3_600_000)
    assert shown(running) == before


def test_a_new_stage_changes_the_status_at_once_but_not_twice_in_two_seconds(running):
    running.step(after=60_000)
    running.change(running=reported(stage="Appending"))
    running.step(after=1_000)
    assert shown(running)["stage"] == "Appending"
    running.change(running=reported())
    running.step(after=1_000)
    assert (shown(running)["stage"], running.plan.requeue_after_s) == ("Appending", 1)
    running.step(after=1_000)
    assert shown(running)["stage"] == "Reading"


def test_a_clock_that_was_set_back_does_not_stop_the_numbers(running):
    running.change(running=reported(rows_read=11))
    running.step(after=-3_600_000)
    assert shown(running)["rowsRead"] == 11


def test_the_first_errors_of_a_driver_are_an_event(running):
    def warnings():
        return [note.message for note in running.plan.notes if note.reason == "ErrorsCollected"]

    running.change(running=reported(errors=0))
    running.step(after=30_000)
    assert (shown(running)["errors"], warnings()) == (0, [])
    running.change(running=reported(errors=3))
    running.step(after=30_000)
    assert shown(running)["errors"] == 3
    assert [text.split(": ", 1)[1] for text in warnings()] == [
        "3 rows that could not be written are errors in the shard; see its column err"
    ]
    running.change(running=reported(errors=7))
    running.step(after=30_000)
    assert (shown(running)["errors"], warnings()) == (7, [])


@pytest.mark.parametrize("end", ["fails", "succeeds"])
def test_what_a_driver_reported_ends_with_it(running, end):
    getattr(running, end)()
    running.step()
    assert shown(running) == {}


def test_a_pod_that_does_not_run_tells_nothing(world):
    one = world()
    one.step()
    one.change(running=reported())
    one.step()
    assert shown(one) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from([*REPORTED, "errors", "updates_written", "batches", "lag_ms", "upper", "input_upper", "other"])


@settings(max_examples=draws(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.dictionaries(FIELDS, JSON, max_size=8), stage=st.sampled_from(["Reading", None]))
def test_whatever_a_driver_tells_the_status_is_valid(refused, sink_resource, document, stage):
    document = document if stage is None else {**document, "stage": stage}
    found = RunningProgress.parse(json.dumps(document))
    if found is not None:
        assert refused(sink_resource(), {"progress": {"running": found.wire()}}) == []


@pytest.mark.parametrize(
    "text", [None, "", "[]", "7", "{", "{}", '{"stage": "Sleeping"}', '{"stage": ["Reading"]}', "[" * 1000, " " * 1100]
)
def test_a_text_that_no_driver_writes_is_ignored(text):
    assert RunningProgress.parse(text) is None


def test_an_oversized_text_is_ignored_even_if_it_is_valid():
    assert RunningProgress.parse(json.dumps(REPORTED)) is not None
    assert RunningProgress.parse(json.dumps({**REPORTED, "x": "y" * 1000})) is None


def test_the_observer_takes_the_annotation_of_the_pod(now):
    pod = {"metadata": {"name": "a", "annotations": {names.ANNOTATION_PROGRESS: json.dumps(REPORTED)}}}
    assert children.driver_run(pod).running == reported()
    assert children.driver_run({"metadata": {"name": "a"}}).running is None


@pytest.mark.parametrize("wrong", [-1, 1 << 64, True, 1.5, "x" * 4000, [1], {"a": 1}], ids=range(7))
def test_a_run_ends_whatever_its_report_holds(world, refused, sink_resource, wrong):
    """The code of a user runs in the driver's pod. The API server refused the status, so the end of the run was never recorded, and no
    other run began.
    """
    one = world()
    one.step()
    names_told = ("upper", "input_upper", "rows_read", "errors", "updates_written", "missing", "extra", "message")
    one.succeeds(**dict.fromkeys(names_told, wrong))
    one.step()
    assert one.status["run"]["state"] == "Succeeded"
    assert refused(sink_resource(), one.status) == []
    assert all(value < 1 << 63 for value in one.status["progress"].values() if isinstance(value, int))
    assert "x" * 200 not in "".join(note.message for note in one.plan.notes if note.reason == "RunSucceeded")
