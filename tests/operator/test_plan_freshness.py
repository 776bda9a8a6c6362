"""How old the rows of a sink are: the time on the status, and the condition Fresh."""

import json

import pytest
from persist_operator.api import conditions, times
from persist_operator.api.sink_status import RunningProgress
from persist_operator.plan.observed import Phase

MINUTE, TARGET_MS = 60_000, 300_000


def reported(fresh_ms, stage="Streaming"):
    return RunningProgress.parse(json.dumps({"stage": stage, "fresh_ms": fresh_ms}))


@pytest.fixture
def stream(world):
    """A stream whose driver runs and reported at the last step that nothing was missing."""
    one = world({"mode": "Streaming", "freshness": {"targetSeconds": 300}})
    one.metadata = {"creationTimestamp": times.to_text(one.now)}
    one.step()
    one.change(phase=Phase.RUNNING, started_ms=one.now, running=reported(one.now))
    one.step()
    return one


def fresh(world):
    found = conditions.find(world.status, "Fresh")
    return found["status"], found["reason"]


def fresh_ms(world):
    return times.to_ms(world.status["freshness"]["time"])


def test_rows_are_fresh_until_the_target_and_the_plan_wakes_then(stream, refused, sink_resource):
    assert fresh(stream) == ("True", "Current")
    assert refused(sink_resource(), stream.status) == []
    left_s = (fresh_ms(stream) + TARGET_MS - stream.now) / 1000
    assert stream.plan.requeue_after_s <= left_s
    before = stream.status["conditions"]
    stream.step(after=round(1000 * left_s) - 1)
    assert stream.status["conditions"] == before, "no new words while nothing changes"
    stream.step(after=1)
    assert fresh(stream) == ("False", "Behind")
    at = stream.status["freshness"]["time"]
    assert conditions.find(stream.status, "Fresh")["message"] == (
        f"rows that the input got after {at}, more than 300 s ago, may be missing: {stream.status['driver']['podName']} runs and is behind"
    )
    assert conditions.is_true(stream.status, "Ready"), "Fresh says nothing of whether the sink is as its spec wants it"


def test_a_source_without_new_rows_is_fresh(stream):
    for _ in range(20):
        stream.change(running=reported(stream.now))
        stream.step(after=MINUTE)
        assert fresh(stream) == ("True", "Current")


def test_the_age_goes_on_when_the_driver_is_dead_and_ends_when_the_next_one_has_caught_up(stream):
    known = fresh_ms(stream)
    stream.fails()
    stream.step()
    assert (fresh(stream), fresh_ms(stream)) == (("True", "Current"), known)
    stream.step(after=TARGET_MS, act=False)
    assert (fresh(stream), fresh_ms(stream)) == (("False", "NoDriver"), known)
    stream.act()
    stream.change(phase=Phase.RUNNING, started_ms=stream.now)
    stream.step()
    assert fresh(stream) == ("False", "Behind"), "it runs, and has not reported"
    stream.change(running=reported(known + 2000))
    stream.step()
    assert (fresh(stream), fresh_ms(stream)) == (("False", "Behind"), (known + 2000) // 1000 * 1000)
    stream.change(running=reported(stream.now))
    stream.step()
    assert fresh(stream) == ("True", "Current")


def test_small_steps_change_no_status_that_is_fresh(stream):
    known = fresh_ms(stream)
    stream.change(running=reported(known + 29_000))
    stream.step(after=29_000)
    assert fresh_ms(stream) == known
    stream.change(running=reported(known + 30_000))
    stream.step(after=1_000)
    assert fresh_ms(stream) == known + 30_000


@pytest.mark.parametrize("ahead_ms", [1_000_000, 10**13, 2**62])
def test_a_clock_that_is_ahead_makes_no_row_fresher(stream, ahead_ms):
    known = fresh_ms(stream)
    stream.change(running=reported(stream.now + ahead_ms))
    stream.step(after=100_000)
    assert known <= fresh_ms(stream) <= stream.now
    stream.change(running=None)
    stream.step(after=TARGET_MS)
    assert fresh(stream) == ("False", "Behind")


def test_a_suspended_stream_and_a_failed_one_say_why_their_rows_are_old(stream):
    stream.fails(report={"outcome": "Failed", "class": "Configuration", "message": "no such table"})
    stream.step()
    stream.step(after=TARGET_MS)
    assert fresh(stream) == ("False", "RunFailed")
    stream.spec["suspend"] = True
    stream.step()
    assert fresh(stream) == ("False", "Suspended")


def test_another_shard_has_nothing_of_the_input(stream, world):
    stream.shard = stream.shard.__class__(
        found=True,
        reason="Resolved",
        message="",
        shard_id="s" + "1" * 8 + "-0000-0000-0000-000000000001",
        schema=stream.shard.schema,
        location=stream.shard.location,
    )
    stream.step()
    assert fresh(stream) == ("Unknown", "NotKnown")
    stream.step(after=TARGET_MS)
    assert fresh(stream) == ("False", "NeverFresh")


def test_a_run_has_what_its_input_had_when_its_driver_started(world):
    one = world({"mode": "Scheduled", "schedule": {"cron": "*/10 * * * *"}, "freshness": {"targetSeconds": 900}})
    one.metadata = {"creationTimestamp": times.to_text(one.now)}
    one.step()
    assert fresh(one) == ("Unknown", "NotKnown")
    one.step(after=10 * MINUTE)
    started = one.now // 1000 * 1000
    one.change(phase=Phase.RUNNING, started_ms=started)
    one.step(after=MINUTE)
    one.succeeds()
    one.step(after=MINUTE)
    assert (fresh(one), fresh_ms(one)) == (("True", "Current"), started)
    one.spec["suspend"] = True
    one.step(after=13 * MINUTE)
    assert fresh(one) == ("False", "Suspended")


def test_a_run_that_an_earlier_attempt_committed_counts_from_its_tick(world):
    one = world({"mode": "Scheduled", "schedule": {"cron": "*/10 * * * *"}, "freshness": {"targetSeconds": 900}})
    one.metadata = {"creationTimestamp": times.to_text(one.now)}
    one.step()
    one.step(after=10 * MINUTE)
    one.step(after=3 * MINUTE)
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.succeeds(already_done=True)
    one.step()
    assert fresh_ms(one) == times.to_ms(one.status["run"]["scheduledTime"]) < one.now - 2 * MINUTE


def test_without_a_target_there_is_no_condition_and_no_time(stream):
    del stream.spec["freshness"]
    stream.step()
    assert conditions.find(stream.status, "Fresh") is None
    assert "freshness" not in stream.status


def test_a_target_is_a_new_revision_of_a_stream_only(make_sink):
    def revision(**spec):
        return make_sink(spec).spec.revision

    scheduled = {"mode": "Scheduled", "schedule": {"cron": "0 * * * *"}}
    assert revision(**scheduled) == revision(**scheduled, freshness={"targetSeconds": 60})
    assert revision(mode="Streaming") != revision(mode="Streaming", freshness={"targetSeconds": 60})
