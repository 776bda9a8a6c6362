"""The plan of a PersistShard: which maintenance starts when, and what its runs leave on the status."""

import dataclasses

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.plan.observed import (
    ActionFailure,
    Phase,
    ShardObserved,
)
from shard_plans import ASSIGNED, DEBT, SHARD_ID, planner, reason, run, started


@pytest.fixture
def plan(make_shard, settings, now):
    return planner(make_shard, settings, now)


@pytest.mark.parametrize(
    ("spec", "state", "kind"),
    [
        ({"rollup": {"everySeqnos": 9}}, {"seqno": 10, "latest_rollup_seqno": 1}, "rollup"),
        ({}, {"gc_seqnos": 1}, "gc"),
        ({"compaction": {"maxUncompactedBatches": 4}}, {"uncompacted_batches": 4}, "compaction"),
    ],
)
def test_work_starts_exactly_when_the_state_says_it_is_due(plan, make_inspection, spec, state, kind):
    due = started(plan(spec, status=ASSIGNED, inspected=make_inspection(**state)))
    assert set(due) == {kind}
    assert due[kind].name == f"flights-{names.VERB[kind]}-10"
    less = {name: value - 1 for name, value in state.items() if name != "latest_rollup_seqno"}
    assert started(plan(spec, status=ASSIGNED, inspected=make_inspection(**less))) == {}


def test_intent_is_on_the_status_and_one_of_a_kind_goes_at_a_time(plan, make_inspection, now):
    first = plan(status=ASSIGNED, inspected=make_inspection(**DEBT))
    assert set(started(first)) == {"rollup", "gc", "compaction"}
    for kind, action in started(first).items():
        assert first.status["maintenance"][kind]["jobName"] == action.name
    going = [run(kind, 300, now) for kind in ("rollup", "gc", "compaction")]
    assert started(plan(status=first.status, inspected=make_inspection(**DEBT), runs=going)) == {}


def test_a_crash_between_intent_and_start_repeats_the_same_name(plan, make_inspection):
    first = plan(status=ASSIGNED, inspected=make_inspection(**DEBT))
    again = plan(status=first.status, inspected=make_inspection(**DEBT))
    assert {one.name for one in started(first).values()} == {one.name for one in started(again).values()}


@pytest.mark.parametrize(
    ("kind", "off"),
    [
        ("compaction", {"compaction": {"mode": "Manual"}}),
        ("gc", {"gc": {"enabled": False}}),
        ("verify", {"verify": {"mode": "Off"}}),
        ("orphanScan", {"gc": {"orphans": {"mode": "Off"}}}),
    ],
)
def test_regression_what_is_switched_off_does_not_start_by_an_intent_of_before(plan, make_inspection, now, kind, off):
    """A run whose Job the API server refused, or a person removed, was started all the same, outside of every window."""
    status = {**ASSIGNED, "maintenance": {kind: {"jobName": "flights-x-300", "lastReason": "100 batches"}}}
    asked = {
        **ASSIGNED,
        "maintenance": {kind: {"jobName": "flights-x-300", "lastReason": "requested by annotation: x"}},
    }
    seen = make_inspection(seqno=300, latest_rollup_seqno=300)
    found = plan(off, status=status, inspected=seen, at=now + 120_000)
    assert started(found) == {}
    assert found.status["maintenance"][kind]["jobName"] == "flights-x-300"
    on = plan({}, status=found.status, inspected=make_inspection(**DEBT), at=now + 180_000)
    assert started(on)[kind].reason == "100 batches"
    assert set(started(plan(off, status=asked, inspected=seen, at=now + 120_000))) == {kind}


def test_regression_a_compaction_that_is_due_no_longer_starts_in_no_closed_window(plan, make_inspection, now):
    """One whose Job was refused was started again without a look at the windows, the budget or the approval."""
    spec = {"maintenance": {"windows": [{"schedule": "0 3 1 1 *", "durationSeconds": 600, "timeZone": "Etc/UTC"}]}}
    status = {**ASSIGNED, "maintenance": {"compaction": {"jobName": "flights-x-300", "lastReason": "100 batches"}}}
    idle = make_inspection(seqno=300, latest_rollup_seqno=300)
    for seen in (idle, make_inspection(**DEBT)):
        assert "compaction" not in started(plan(spec, status=status, inspected=seen, at=now + 120_000))


@pytest.mark.parametrize("left", [1, 2])
@pytest.mark.parametrize("limit", [0, 1])
def test_regression_a_clock_behind_that_of_the_cluster_loses_no_intent(plan, make_inspection, now, limit, left):
    """Finished Jobs that history no longer names counted as newer than the intent: the request was handled, and no run came of it. So did
    one that outlived the Job that was recorded last.
    """
    spec, seen = {"maintenance": {"historyLimit": limit}}, make_inspection(seqno=300, latest_rollup_seqno=300)
    ran = [
        run("gc", number, now + number * 1000, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded"})
        for number in (298, 299)
    ]
    after = plan(spec, status=ASSIGNED, inspected=seen, runs=ran, at=now + 400_000)
    ran = ran[:left]
    asked = {"annotations": {f"{names.REQUEST_PREFIX}gc": "now-please"}}
    intended = plan(spec, status=after.status, inspected=seen, runs=ran, at=now + 1000, **asked)
    again = plan(spec, status=intended.status, inspected=seen, runs=ran, at=now + 6000, **asked)
    assert started(again)["gc"].name == started(intended)["gc"].name == "flights-gc-300"
    assert (again.notes, again.status["history"]) == ((), intended.status["history"])


def test_a_run_without_a_job_keeps_its_name_though_the_shard_moved_on(plan, make_inspection, now):
    """Another process wrote the intent and is about to create the Job. Under another name there would be two."""
    first = plan(status=ASSIGNED, inspected=make_inspection(**DEBT))
    moved = make_inspection(**{**DEBT, "seqno": 301})
    again = started(plan(status=first.status, inspected=moved, at=now + 5_000))
    assert {(one.name, one.seqno) for one in again.values()} == {
        (one.name, one.seqno) for one in started(first).values()
    }
    late = started(plan(status=first.status, inspected=moved, at=now + 120_000))
    assert {one.seqno for one in late.values()} == {301}


def test_a_child_newer_than_the_status_is_adopted(plan, make_inspection, now):
    adopted = plan(status=ASSIGNED, inspected=make_inspection(seqno=300), runs=[run("rollup", 290, now)])
    assert started(adopted) == {}
    assert adopted.status["maintenance"]["rollup"]["jobName"] == "flights-rollup-290"


def test_a_job_that_is_deleted_and_stays_is_named_with_what_keeps_it(plan, make_inspection, now):
    state = make_inspection(seqno=300)
    going = run("compaction", 300, now, deleting=True, deleted_ms=now + 1000, held_by=("foregroundDeletion",))
    seen = plan(status=ASSIGNED, inspected=state, runs=[going], at=now + 5000)
    assert reason(seen, "CompactionCurrent") == ("True", "Current"), "a deletion takes some seconds"
    stays = plan(status=seen.status, inspected=state, runs=[going], at=now + 63_000)
    assert reason(stays, "CompactionCurrent") == ("False", "Ending")
    message = conditions.find(stays.status, "CompactionCurrent")["message"]
    assert "flights-compact-300 is being deleted, and finalizers (foregroundDeletion) keep it" in message


def test_a_rollup_that_does_not_start_or_fails_is_on_the_condition_of_what_needs_it(plan, make_inspection, now):
    """Rollups have no condition of their own, and without them nothing can be collected."""
    state = make_inspection(seqno=300)
    pending = run("rollup", 300, now, phase=Phase.PENDING)
    intended = plan(status=ASSIGNED, inspected=state, runs=[pending])
    assert reason(intended, "GarbageCollected") == ("True", "Current")
    stuck = plan(status=intended.status, inspected=state, runs=[pending], at=now + 61_000)
    assert reason(stuck, "GarbageCollected") == ("False", "Pending")
    assert "flights-rollup-300 does not start" in conditions.find(stuck.status, "GarbageCollected")["message"]
    status = ASSIGNED
    for number in range(3):
        failed = run("rollup", 300 + number, now + number, phase=Phase.FAILED, exit_code=1)
        failing = plan(status=status, inspected=state, runs=[failed], at=now + 1000 + number)
        status = failing.status
    assert reason(failing, "GarbageCollected") == ("False", "Failing")
    assert "3 rollups failed in a row" in conditions.find(failing.status, "GarbageCollected")["message"]


@pytest.mark.parametrize("gone", ["suspend", "disabled"])
def test_nothing_is_started_that_is_switched_off(plan, make_inspection, gone):
    off = {"compaction": {"mode": "Disabled"}, "gc": {"enabled": False}, "rollup": {"everySeqnos": 100_000}}
    spec = {"suspend": True} if gone == "suspend" else off
    off_plan = plan(spec, status=ASSIGNED, inspected=make_inspection(**DEBT))
    assert started(off_plan) == {}
    assert reason(off_plan, "CompactionCurrent") == ("False", "DebtExceeded")
    assert (reason(off_plan, "Suspended") is not None) == (gone == "suspend")


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_number_outside_the_definitions_range_is_left_out_of_the_status(plan, make_inspection, now, number):
    """With such a number the API server would refuse the whole status, and every later one."""
    report = {"outcome": "Succeeded", "bytes_read": number, "bytes_written": 7}
    done = run("gc", 300, now, phase=Phase.SUCCEEDED, report=report)
    (item,) = plan(status=ASSIGNED, inspected=make_inspection(), runs=[done], at=now + 3000).status["history"]
    assert ("bytesRead" in item, item["bytesWritten"]) == (False, 7)


def test_a_finished_run_is_entered_once_with_its_report(plan, make_inspection, now):
    record = "d001710000000000/d018bcfe5-6800-7000-8000-000000000000"
    report = {"type": "GC", "outcome": "Succeeded", "message": "done", "blobs_deleted": 7, "diffs_truncated": 40}
    report["deletion_record"] = record
    done = run("gc", 300, now, phase=Phase.SUCCEEDED, report=report, planned_reason="40 versions can be truncated")
    first = plan(status=ASSIGNED, inspected=make_inspection(), runs=[done], at=now + 3000)
    block = first.status["maintenance"]["gc"]
    assert (block["lastResult"], block["consecutiveFailures"], block["lastDurationSeconds"]) == ("Succeeded", 0, 2)
    (item,) = first.status["history"]
    assert (item["type"], item["blobsDeleted"], item["diffsTruncated"]) == ("GC", 7, 40)
    assert item["deletionRecord"] == record
    assert [note.reason for note in first.notes] == ["GCSucceeded"]
    second = plan(status=first.status, inspected=make_inspection(), runs=[done], at=now + 4000)
    assert second.status["history"] == first.status["history"]
    assert second.notes == ()


@pytest.mark.parametrize("key", ["", "d1/d2", "x" * 10_000, 7, None, "../d018bcfe5-6800-7000-8000-000000000000"])
def test_what_is_no_key_of_a_record_stays_out_of_the_status(plan, make_inspection, now, key):
    """Pods of the resource's namespace write what they like."""
    done = run("gc", 300, now, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded", "deletion_record": key})
    (item,) = plan(status=ASSIGNED, inspected=make_inspection(), runs=[done], at=now + 3000).status["history"]
    assert "deletionRecord" not in item


def test_the_reason_of_a_request_has_nothing_that_a_terminal_obeys(plan, make_inspection, now):
    annotations = {"persistshard.io/request-gc": "\x1b[31mgo\n\nPassword: s3://k:secret@b"}
    run = started(plan({}, status=ASSIGNED, inspected=make_inspection(), at=now, annotations=annotations))["gc"]
    assert run.reason.startswith("requested by annotation: [31mgo Password: ")
    assert run.reason.isprintable()
    assert "secret" not in run.reason


def test_gc_waits_for_its_interval_and_a_request_does_not(plan, make_inspection, now):
    done = run("gc", 300, now, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded"})
    spec = {"gc": {"intervalSeconds": 100}}
    first = plan(spec, status=ASSIGNED, inspected=make_inspection(**DEBT), runs=[done], at=now + 3000)
    assert "gc" not in started(first)
    later = plan(spec, status=first.status, inspected=make_inspection(**DEBT), at=now + 103_000)
    assert "gc" in started(later)
    annotations = {f"{names.REQUEST_PREFIX}gc": "now-please"}
    idle = make_inspection(seqno=300, latest_rollup_seqno=300)
    first = plan(spec, status=ASSIGNED, inspected=idle, runs=[done], at=now + 3000)
    requested = plan(spec, status=first.status, inspected=idle, at=now + 4000, annotations=annotations)
    assert started(requested)["gc"].name == "flights-gc-300-r1"
    assert requested.status["lastHandledRequests"] == {"gc": "now-please"}
    crashed = plan(spec, status=requested.status, inspected=idle, at=now + 5000, annotations=annotations)
    assert started(crashed)["gc"].name == "flights-gc-300-r1"
    second = dataclasses.replace(done, name="flights-gc-300-r1", created_ms=now + 4000)
    settled = plan(spec, status=requested.status, inspected=idle, at=now + 5000, runs=[second], annotations=annotations)
    assert started(settled) == {}
    assert started(plan(spec, status=settled.status, inspected=idle, at=now + 500_000, annotations=annotations)) == {}


@pytest.mark.parametrize(
    ("rollup_began_s", "outcome", "is_due"),
    [(None, None, True), (1, "Succeeded", True), (2, "Succeeded", True), (3, "Succeeded", False), (3, "Failed", True)],
    ids=["none-yet", "under-way-meanwhile", "in-the-same-second", "begun-after", "failed"],
)
def test_a_rollup_is_due_after_a_compaction_was_applied(plan, make_inspection, now, rollup_began_s, outcome, is_due):
    """Few versions have passed, but GC deletes the replaced parts only after a rollup past the compaction."""
    compacted = run("compaction", 8, now, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded"})
    runs = [compacted]
    if rollup_began_s is not None:
        phase = Phase.FAILED if outcome == "Failed" else Phase.SUCCEEDED
        began = now + 1000 * rollup_began_s
        runs.append(run("rollup", 9, began, phase=phase, report={"outcome": outcome}))
    inspection = make_inspection(seqno=10, latest_rollup_seqno=9)
    first = plan(status=ASSIGNED, inspected=inspection, runs=runs, at=now + 30_000)
    again = plan(status=first.status, inspected=inspection, runs=runs, at=now + 60_000)
    assert ("rollup" in started(first) or "rollup" in started(again)) == is_due


@pytest.mark.parametrize("ahead_ms", [-3_600_000, 0, 3_600_000])
def test_one_rollup_follows_a_compaction_whatever_the_clock_of_the_cluster_says(plan, make_inspection, now, ahead_ms):
    """Regression: the start of a rollup was a time of the operator's clock, the end of a compaction one of the cluster's. With the cluster
    behind, the inputs of the compaction stayed; with it ahead, rollups followed each other until the operator's clock came there.
    """
    spec, status, runs, kinds = {"rollup": {"everySeqnos": 200}}, ASSIGNED, [], []
    for step in range(10):
        at = now + 10_000 * step
        merged = step > 3 or "compaction" in kinds
        state = make_inspection(
            seqno=300 + step,
            latest_rollup_seqno=301 if kinds else 1,
            uncompacted_batches=0 if merged or step < 3 else 100,
        )
        found = plan(spec, status=status, inspected=state, runs=runs, at=at)
        status, runs = found.status, []
        for kind, start in started(found).items():
            kinds.append(kind)
            ended = {"phase": Phase.SUCCEEDED, "report": {"outcome": "Succeeded"}}
            runs.append(run(kind, start.seqno, at + 1000 + ahead_ms, name=start.name, **ended))
    assert kinds == ["rollup", "compaction", "rollup"]


def test_a_compaction_that_found_nothing_asks_for_no_rollup(plan, make_inspection, now):
    skipped = run("compaction", 8, now, phase=Phase.SUCCEEDED, report={"outcome": "Skipped"})
    inspection = make_inspection(seqno=10, latest_rollup_seqno=9)
    assert started(plan(status=ASSIGNED, inspected=inspection, runs=[skipped], at=now + 30_000)) == {}


@pytest.mark.slow
def test_an_idle_shard_comes_to_rest(plan, make_inspection, now):
    """Under the smallest thresholds, the commits of maintenance itself do not make maintenance due for ever."""
    spec = {"rollup": {"everySeqnos": 4}, "gc": {"intervalSeconds": 10}, "compaction": {"maxUncompactedBatches": 1}}
    state = {"seqno": 9, "latest_rollup_seqno": 1, "earliest_seqno": 1, "uncompacted_batches": 3}
    status, count, at = ASSIGNED, 0, now
    for _ in range(60):
        gc_seqnos = state["latest_rollup_seqno"] - state["earliest_seqno"]
        found = plan(spec, status=status, inspected=make_inspection(**state, gc_seqnos=gc_seqnos), at=at)
        runs = []
        for kind, action in started(found).items():
            runs.append(
                run(kind, state["seqno"], at, name=action.name, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded"})
            )
            if kind == "rollup":
                state["latest_rollup_seqno"] = state["seqno"]
            elif kind == "gc":
                state["earliest_seqno"] = state["latest_rollup_seqno"]
            else:
                state["uncompacted_batches"] = 0
            state["seqno"] += 1
        count += len(runs)
        at += 5000
        status = plan(spec, status=found.status, inspected=make_inspection(**state), runs=runs, at=at).status
        idle = not runs
    assert idle
    assert 3 <= count <= 7
    assert state["latest_rollup_seqno"] == state["earliest_seqno"]


def test_failed_maintenance_backs_off_under_new_names_with_its_message(plan, make_inspection, now):
    status, at, waits = ASSIGNED, now, []
    for attempt in range(4):
        first = plan(status=status, inspected=make_inspection(seqno=300), at=at)
        action = started(first)["rollup"]
        assert action.name == "flights-rollup-300" + (f"-r{attempt}" if attempt else "")
        failed = run("rollup", 300, at, name=action.name, phase=Phase.FAILED, exit_code=70, message="no answer")
        after = plan(status=first.status, inspected=make_inspection(seqno=300), runs=[failed], at=at + 2000)
        assert "rollup" not in started(after)
        next_ms = times.to_ms(after.status["maintenance"]["rollup"]["nextRunTime"])
        waits.append((next_ms - at - 2000) // 1000)
        status, at = after.status, next_ms
    assert waits == [10, 20, 40, 80]
    assert status["maintenance"]["rollup"]["consecutiveFailures"] == 4
    assert "no answer" in status["maintenance"]["rollup"]["message"]


@pytest.mark.parametrize(
    ("kind", "advice"), [("compaction", "raise compaction.memoryLimit"), ("gc", "raise the operator's workload.maint")]
)
def test_a_run_out_of_memory_names_the_setting_to_raise(plan, make_inspection, now, kind, advice):
    died = run(kind, 300, now, phase=Phase.FAILED, exit_code=137, reason="OOMKilled")
    after = plan(status=ASSIGNED, inspected=make_inspection(), runs=[died], at=now + 2000)
    assert advice in after.status["maintenance"][kind]["message"]
    assert "OOMKilled (exit code 137)" in after.status["maintenance"][kind]["message"]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("compaction", "debt_bytes", "may_choose", "runner"),
    [
        ({}, 4 * GIB - 1, True, "Pod"),
        ({}, 4 * GIB, True, "Spark"),
        ({}, 4 * GIB, False, "Pod"),
        ({"sparkThreshold": "1Mi"}, 1 << 20, True, "Spark"),
        ({"sparkThreshold": 0}, 0, True, "Spark"),
        ({"runner": "Pod"}, 100 * GIB, True, "Pod"),
        ({"runner": "Spark"}, 0, False, "Spark"),
    ],
)
def test_the_runner_of_a_compaction_follows_its_debt(
    plan, make_inspection, settings, compaction, debt_bytes, may_choose, runner
):
    workload = dataclasses.replace(settings.workload, spark_compaction=may_choose)
    object.__setattr__(settings, "workload", workload)
    state = make_inspection(**DEBT, compaction_bytes=debt_bytes)
    found = plan({"compaction": {**compaction, "sparkExecutors": 7}}, status=ASSIGNED, inspected=state)
    assert (started(found)["compaction"].runner, started(found)["compaction"].spark_executors) == (runner, 7)
    assert found.status["maintenance"]["compaction"]["runner"] == runner
    assert started(found)["gc"].runner is None
    assert "runner" not in found.status["maintenance"]["gc"]


@pytest.mark.parametrize(("spec", "second"), [({}, "Pod"), ({"compaction": {"runner": "Spark"}}, "Spark")])
def test_after_a_failure_on_spark_auto_compacts_in_a_pod(plan, make_inspection, now, spec, second):
    large = make_inspection(**DEBT, compaction_bytes=4 * GIB)
    first = plan(spec, status=ASSIGNED, inspected=large)
    ended = {"phase": Phase.FAILED, "exit_code": 137, "reason": "OOMKilled", "runner": "Spark"}
    failed = run("compaction", 300, now, name=started(first)["compaction"].name, **ended)
    after = plan(spec, status=first.status, inspected=large, runs=[failed], at=now + 2000)
    assert (after.status["history"][0]["runner"], after.status["history"][0]["outcome"]) == ("Spark", "Failed")
    assert "runner: Pod" in after.status["maintenance"]["compaction"]["message"]
    at = times.to_ms(after.status["maintenance"]["compaction"]["nextRunTime"])
    again = plan(spec, status=after.status, inspected=large, at=at)
    assert started(again)["compaction"].runner == second
    pod = run("compaction", 300, at, name=started(again)["compaction"].name, phase=Phase.SUCCEEDED, runner=second)
    settled = plan(spec, status=again.status, inspected=large, runs=[pod], at=at + 2000)
    assert settled.status["history"][0]["runner"] == second
    assert started(settled)["compaction"].runner == "Spark", "the next debt may be tried on Spark again"


@pytest.mark.parametrize(("spec", "second"), [({}, "Pod"), ({"compaction": {"runner": "Spark"}}, "Spark")])
def test_where_spark_may_not_run_auto_compacts_in_a_pod(plan, make_inspection, now, spec, second):
    """In a namespace outside workload.namespaces, the API server refuses the Secret of the run."""
    large = make_inspection(**DEBT, compaction_bytes=4 * GIB)
    refused = ActionFailure(
        reason="ActionRefused", message="cannot create secrets", permanent=False, at_ms=now, generation=1
    )
    observed = ShardObserved(inspected=large, failures={"StartMaintenance/compaction": refused}, shard_id=SHARD_ID)
    found = plan(spec, status=ASSIGNED, observed=observed, at=now + 600_000)
    assert started(found)["compaction"].runner == second
    assert "cannot create secrets" in conditions.find(found.status, "CompactionCurrent")["message"]


def test_a_compaction_that_waits_for_a_place_is_on_the_status_and_the_shard_stays_ready(plan, make_inspection, now):
    large = make_inspection(**DEBT, compaction_bytes=4 * GIB)
    waits = ActionFailure(
        reason="Queued", message="place 3 in the queue", permanent=False, at_ms=now, place=3, generation=1
    )
    observed = ShardObserved(inspected=large, failures={"StartMaintenance/compaction": waits}, shard_id=SHARD_ID)
    found = plan(status=ASSIGNED, observed=observed, at=now + 14_000)
    assert "compaction" not in started(found), "the third asks again after 15 s"
    assert reason(found, "CompactionCurrent") == ("False", "Queued")
    assert reason(found, "Ready") == ("True", "Healthy")
    again = started(plan(status=found.status, observed=observed, at=now + 15_000))["compaction"]
    assert (again.runner, again.debt_bytes) == ("Spark", 4 * GIB), "a wait is no reason to choose another runner"


def test_a_run_that_ended_by_a_clock_ahead_of_ours_is_not_repeated_at_once(plan, make_inspection, now):
    spec = {"gc": {"intervalSeconds": 600}}
    first = plan(spec, status=ASSIGNED, inspected=make_inspection(gc_seqnos=5))
    ended = run("gc", 10, now + 60_000, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded"})
    after = plan(spec, status=first.status, inspected=make_inspection(gc_seqnos=5), runs=[ended], at=now + 3000)
    assert started(after) == {}
