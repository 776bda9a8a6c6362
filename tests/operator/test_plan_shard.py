"""The plan of a PersistShard: what is started when, and what the status says."""

import dataclasses

import pytest
from persist_engine.model.inspection import ReaderInfo
from persist_engine.model.ownership import Owner
from persist_operator.api import conditions, names, times
from persist_operator.api.shard import Shard, StoreLocation
from persist_operator.plan.actions import AdvanceSince, InitialiseShard, StartMaintenance
from persist_operator.plan.observed import (
    ActionFailure,
    NotOwned,
    Phase,
    Run,
    ShardMissing,
    ShardObserved,
    ShardView,
    StoreFailure,
)
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.shard_status import stores

SHARD_ID = names.shard_id_of("uid-shard")
ASSIGNED = {"shardId": SHARD_ID}


def reason(plan, condition_type):
    found = conditions.find(plan.status, condition_type)
    return None if found is None else (found["status"], found["reason"])


def started(plan):
    return {one.kind: one for one in plan.actions if isinstance(one, StartMaintenance)}


@pytest.fixture
def plan(make_shard, settings, now):
    def make(spec=None, *, status=None, at=now, observed=None, inspected=None, runs=(), **metadata):
        found = observed or ShardObserved(inspected=inspected, runs=tuple(runs), shard_id=SHARD_ID)
        return plan_shard(make_shard(spec, status=status, **metadata), found, now_ms=at, settings=settings)

    return make


def run(kind, seqno, now, *, phase=Phase.RUNNING, report=None, **changes):
    verb = names.VERB[kind]
    return Run(
        name=changes.pop("name", f"flights-{verb}-{seqno}"), kind=kind, phase=phase, created_ms=now, started_ms=now,
        finished_ms=now + 2000 if phase.finished else None, seqno=seqno, report=report, **changes,
    )  # fmt: skip


def test_the_first_status_is_written_before_any_store_is_read_or_changed(plan):
    first = plan(status={}, observed=ShardObserved())
    assert "shardId" not in first.status
    assert first.actions == ()
    assert first.requeue_after_s == 0
    assert reason(first, "Ready") == ("Unknown", "Inspecting")
    assert reason(first, "Reconciling") == ("True", "Inspecting")


def test_the_stores_decide_which_shard_a_resource_has(plan, make_inspection):
    named = "s01234567-89ab-cdef-0123-456789abcdef"
    assert plan(observed=ShardObserved(inspected=ShardMissing(), shard_id=named)).status["shardId"] == named
    before = plan(status=ASSIGNED, inspected=make_inspection())
    assert "frontiers" in before.status
    moved = plan(status=before.status, observed=ShardObserved(inspected=ShardMissing(), shard_id=named))
    assert moved.status["shardId"] == named
    assert "frontiers" not in moved.status, "the status shows nothing of the former shard, and the new one is not lost"
    assert isinstance(moved.actions[0], InitialiseShard)


def test_a_missing_shard_is_created_with_its_schema(plan):
    created = plan(inspected=ShardMissing())
    assert created.status["shardId"] == SHARD_ID, "on the status before the shard is created"
    (action,) = created.actions
    assert isinstance(action, InitialiseShard)
    assert (action.shard_id, action.schema.key) == (SHARD_ID, "id BIGINT")
    assert reason(created, "Reconciling") == ("True", "Initialising")


def test_a_refused_initialisation_is_on_the_status_and_tried_again_later(plan, now):
    failure = ActionFailure(reason="SchemaMismatch", message="differs", permanent=True, at_ms=now)
    observed = ShardObserved(inspected=ShardMissing(), failures={"InitialiseShard": failure}, shard_id=SHARD_ID)
    refused = plan(status=ASSIGNED, observed=observed)
    assert refused.actions == ()
    assert reason(refused, "Stalled") == ("True", "SchemaMismatch")
    assert len(plan(status=ASSIGNED, observed=observed, at=now + 301_000).actions) == 1


def test_a_shard_that_existed_is_never_created_again(plan):
    lost = plan(status={**ASSIGNED, "frontiers": {"seqno": 12}}, inspected=ShardMissing())
    assert lost.actions == ()
    assert reason(lost, "Stalled") == ("True", "ShardLost")


def test_a_seqno_that_went_back_stops_maintenance(plan, make_inspection):
    back = plan(
        {"rollup": {"everySeqnos": 4}},
        status={**ASSIGNED, "frontiers": {"seqno": 12}},
        inspected=make_inspection(seqno=11),
    )
    assert back.actions == ()
    assert reason(back, "Stalled") == ("True", "ShardLost")


def test_a_resource_that_names_a_missing_shard_stalls_with_advice(make_shard, settings, now):
    shard = make_shard({"shardId": SHARD_ID}, status=ASSIGNED)
    shard = dataclasses.replace(shard, spec=dataclasses.replace(shard.spec, schema=None))
    missing = plan_shard(
        shard, ShardObserved(inspected=ShardMissing(), shard_id=SHARD_ID), now_ms=now, settings=settings
    )
    assert reason(missing, "Stalled") == ("True", "ShardNotFound")
    assert "add spec.schema" in conditions.find(missing.status, "Stalled")["message"]


def test_a_wrong_ddl_is_refused_before_anything_is_made(plan):
    refused = plan({"schema": {"key": "id NOTHING"}}, status=ASSIGNED, inspected=ShardMissing())
    assert refused.actions == ()
    assert reason(refused, "Stalled") == ("True", "InvalidSchema")


def test_a_schema_that_differs_from_the_shards_stalls_with_both_named(plan, make_inspection):
    differs = plan({"schema": {"key": "id BIGINT, b STRING"}}, status=ASSIGNED, inspected=make_inspection())
    assert reason(differs, "Stalled") == ("True", "SchemaMismatch")
    assert "b" in conditions.find(differs.status, "Stalled")["message"]


def test_a_store_that_does_not_answer_is_a_condition_with_its_address_and_keeps_the_numbers(plan, make_inspection, now):
    healthy = plan(status=ASSIGNED, inspected=make_inspection())
    failure = StoreFailure(reason="StorageUnreachable", message="redis://redis:6379/0: connection refused")
    down = plan(status=healthy.status, inspected=failure, at=now + 60_000)
    assert reason(down, "StorageReachable") == ("False", "StorageUnreachable")
    assert "redis:6379" in conditions.find(down.status, "StorageReachable")["message"]
    assert reason(down, "Stalled") is None
    assert down.status["frontiers"] == healthy.status["frontiers"]
    back = plan(status=down.status, inspected=make_inspection(), at=now + 90_000)
    assert reason(back, "StorageReachable") == ("True", "Reachable")
    assert reason(back, "Ready") == ("True", "Healthy")
    assert reason(back, "Reconciling") is None


def test_corrupt_state_stalls(plan):
    stalled = plan(status=ASSIGNED, inspected=StoreFailure(reason="CorruptState", message="key x", permanent=True))
    assert reason(stalled, "Stalled") == ("True", "CorruptState")


def test_a_shard_of_another_owner_stalls_with_the_owner_and_shows_nothing_else(plan, make_inspection):
    theirs = Owner("other-operator", "finance", "first")
    conflict = plan(observed=ShardObserved(inspected=NotOwned(shard_id=SHARD_ID, owner=theirs)))
    assert reason(conflict, "Stalled") == ("True", "ShardIdConflict")
    message = conditions.find(conflict.status, "Stalled")["message"]
    assert "finance/first of operator other-operator" in message
    assert f"persist admin owner {SHARD_ID} --take-over persist-operator%2Fpersist-operator/team/flights" in message
    assert "annotate" not in message
    assert conflict.actions == ()
    assert not {"shardId", "schema", "frontiers"} & conflict.status.keys()
    assert conflict.requeue_after_s <= 30, "the resource adopts a disowned shard soon"
    near = NotOwned(shard_id=SHARD_ID, owner=Owner("persist-operator/persist-operator", "team", "first"))
    message = conditions.find(plan(observed=ShardObserved(inspected=near)).status, "Stalled")["message"]
    assert f"annotate this resource persistshard.io/take-over={SHARD_ID}" in message
    kept = plan(status=ASSIGNED, inspected=make_inspection())
    assert reason(kept, "Ready") == ("True", "Healthy")


def test_an_unowned_shard_with_data_stalls_and_is_not_touched(plan):
    found = plan(observed=ShardObserved(inspected=NotOwned(shard_id=SHARD_ID, owner=None)))
    assert reason(found, "Stalled") == ("True", "ShardUnowned")
    assert found.actions == ()


def test_an_unknown_profile_is_named(plan):
    unknown = plan({"storageProfile": "cold"}, observed=ShardObserved())
    assert reason(unknown, "Stalled") == ("True", "UnknownStorageProfile")


def test_since_follows_upper_by_the_lag_and_not_too_often(plan, make_inspection, make_own_reader, now):
    upper = now
    spec = {"retention": {"sinceLagSeconds": 60}}
    inspection = make_inspection(upper=upper, since=0)
    first = plan(spec, status=ASSIGNED, inspected=inspection)
    (action,) = first.actions
    assert isinstance(action, AdvanceSince)
    assert action.since_ms == upper - 60_000
    assert action.owner == Owner("persist-operator/persist-operator", "team", "flights")
    assert plan(spec, status=first.status, inspected=inspection, at=now + 10_000).actions == ()
    later = plan(spec, status=first.status, inspected=make_inspection(upper=upper + 20_000), at=now + 31_000)
    assert [one.since_ms for one in later.actions] == [upper - 40_000]
    reached = make_inspection(upper=upper, since=upper - 60_000, readers=(make_own_reader(upper - 60_000),))
    assert plan(spec, status=first.status, inspected=reached, at=now + 31_000).actions == ()


def test_the_newest_complete_time_stays_readable_without_lag(plan, make_inspection):
    (action,) = plan(
        {"retention": {"sinceLagSeconds": 0}}, status=ASSIGNED, inspected=make_inspection(upper=500)
    ).actions
    assert action.since_ms == 499


def test_the_hold_is_registered_before_there_is_anything_to_advance(plan, make_inspection):
    (action,) = plan(status=ASSIGNED, inspected=make_inspection(upper=0, readers=())).actions
    assert isinstance(action, AdvanceSince)
    assert action.since_ms == 0


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


DEBT = {"seqno": 300, "gc_seqnos": 50, "uncompacted_batches": 100}


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
    report = {"type": "GC", "outcome": "Succeeded", "message": "done", "blobs_deleted": 7, "diffs_truncated": 40}
    done = run("gc", 300, now, phase=Phase.SUCCEEDED, report=report, planned_reason="40 versions can be truncated")
    first = plan(status=ASSIGNED, inspected=make_inspection(), runs=[done], at=now + 3000)
    block = first.status["maintenance"]["gc"]
    assert (block["lastResult"], block["consecutiveFailures"], block["lastDurationSeconds"]) == ("Succeeded", 0, 2)
    (item,) = first.status["history"]
    assert (item["type"], item["blobsDeleted"], item["diffsTruncated"]) == ("GC", 7, 40)
    assert [note.reason for note in first.notes] == ["GCSucceeded"]
    second = plan(status=first.status, inspected=make_inspection(), runs=[done], at=now + 4000)
    assert second.status["history"] == first.status["history"]
    assert second.notes == ()


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


def test_a_since_that_could_not_advance_is_on_the_status(plan, make_inspection, make_own_reader, now):
    """For example, the reader of the operator has another owner. No other condition would explain why since stands still."""
    refused = ActionFailure(reason="InvalidArgument", message="reader c1 has another owner", permanent=True, at_ms=now)
    inspection = make_inspection(upper=now, since=5, readers=(make_own_reader(5),))
    observed = ShardObserved(inspected=inspection, failures={"AdvanceSince": refused}, shard_id=SHARD_ID)
    found = plan(status=ASSIGNED, observed=observed)
    assert reason(found, "SinceAdvancing") == ("False", "InvalidArgument")
    assert "another owner" in conditions.find(found.status, "SinceAdvancing")["message"]
    there = make_inspection(upper=now, since=now, readers=(make_own_reader(now),))
    observed = ShardObserved(inspected=there, failures={"AdvanceSince": refused}, shard_id=SHARD_ID)
    assert reason(plan(status=ASSIGNED, observed=observed), "SinceAdvancing") == ("True", "Advancing")


def test_times_written_by_a_clock_that_was_ahead_delay_nothing(plan, make_inspection, make_own_reader, now):
    """The times lie a year ahead: of the backoff, the interval, the numbers, and the last advance of since."""
    year_ms = 365 * 24 * 3_600_000
    state = {"seqno": 300, "upper": now, "since": 0}
    early = plan(status=ASSIGNED, inspected=make_inspection(**state), at=now + year_ms)
    failed = run("rollup", 300, now + year_ms, phase=Phase.FAILED, exit_code=70)
    early = plan(status=early.status, inspected=make_inspection(**state), runs=[failed], at=now + year_ms + 2000)
    assert times.to_ms(early.status["maintenance"]["rollup"]["nextRunTime"]) > now + year_ms
    state = {"seqno": 301, "upper": now + 60_000, "since": 0, "readers": (make_own_reader(0),)}
    right = plan(status=early.status, inspected=make_inspection(**state), at=now)
    assert "rollup" in started(right)
    assert any(isinstance(action, AdvanceSince) for action in right.actions)
    assert right.status["frontiers"]["seqno"] == 301


def test_a_run_that_ended_by_a_clock_ahead_of_ours_is_not_repeated_at_once(plan, make_inspection, now):
    spec = {"gc": {"intervalSeconds": 600}}
    first = plan(spec, status=ASSIGNED, inspected=make_inspection(gc_seqnos=5))
    ended = run("gc", 10, now + 60_000, phase=Phase.SUCCEEDED, report={"outcome": "Succeeded"})
    after = plan(spec, status=first.status, inspected=make_inspection(gc_seqnos=5), runs=[ended], at=now + 3000)
    assert started(after) == {}


def test_a_reader_that_holds_since_is_named(plan, make_inspection, make_own_reader, now):
    other = ReaderInfo(
        id="r01234567-89ab-cdef-0123-456789abcdef", kind="leased", since=5, seqno=3, purpose="monthly report",
        hostname="laptop", last_heartbeat_ms=now,
    )  # fmt: skip
    inspection = make_inspection(upper=now, since=5, readers=(make_own_reader(now - 3_600_000), other))
    held = plan(status=ASSIGNED, inspected=inspection)
    assert reason(held, "SinceAdvancing") == ("False", "HeldByReader")
    assert "monthly report" in conditions.find(held.status, "SinceAdvancing")["message"]
    assert [one["purpose"] for one in held.status["holds"]["blocking"]] == ["monthly report"]


def test_a_busy_shard_writes_its_numbers_rarely_and_an_idle_one_never(plan, make_inspection, now):
    first = plan(status=ASSIGNED, inspected=make_inspection(seqno=10))
    soon = plan(status=first.status, inspected=make_inspection(seqno=11), at=now + 5000)
    assert soon.status == first.status
    later = plan(status=first.status, inspected=make_inspection(seqno=11), at=now + 31_000)
    assert later.status["frontiers"]["seqno"] == 11
    idle = plan(status=first.status, inspected=make_inspection(seqno=10), at=now + 3_000_000)
    assert idle.status == first.status


def test_every_status_fits_the_crd(plan, make_inspection, shard_resource, refused, now):
    done = run("gc", 300, now, phase=Phase.FAILED, report=None, exit_code=1, reason="Error", message="x" * 5000)
    plans = [
        plan(observed=ShardObserved()),
        plan(status=ASSIGNED, inspected=ShardMissing()),
        plan(status=ASSIGNED, inspected=StoreFailure(reason="StorageUnreachable", message="m")),
        plan(status=ASSIGNED, inspected=make_inspection(**DEBT, upper=now, waits_from_ms=now - 5000), runs=[done]),
        plan({"suspend": True}, status=ASSIGNED, inspected=make_inspection(upper=None, since=None)),
    ]
    for one in plans:
        assert refused(shard_resource(), one.status) == []


def test_status_is_stable_when_nothing_changes(plan, make_inspection, now):
    first = plan(status=ASSIGNED, inspected=make_inspection())
    assert plan(status=first.status, inspected=make_inspection(), at=now + 1000).status == first.status


def test_a_deleted_resource_is_left_alone(plan, make_inspection):
    gone = plan(status=ASSIGNED, inspected=make_inspection(**DEBT), deletionTimestamp="2026-11-20T00:00:00Z")
    assert gone.actions == ()
    assert gone.requeue_after_s is None


def test_credentials_do_not_reach_the_status():
    address = "redis://user:hunter2@redis:6379/0?password_file=/x&prefix=p"
    shown = stores(StoreLocation(blob="s3://b", consensus=address)).wire()
    assert "hunter2" not in shown["consensus"]
    assert shown["consensus"].endswith("@redis:6379/0")


def test_sinks_see_a_shard_only_when_all_they_need_is_known(plan, make_inspection, shard_resource, settings):
    def view(status):
        return ShardView.of("flights", Shard.of(shard_resource(status=status)), settings)

    assert ShardView.of("flights", None, settings).reason == "ShardNotFound"
    assert view(plan(observed=ShardObserved()).status).reason == "ShardNotReady"
    assert view(plan(status=ASSIGNED, inspected=make_inspection()).status).usable
    down = plan(status=ASSIGNED, inspected=StoreFailure(reason="StorageUnreachable", message="redis://r")).status
    assert view(down).reason == "StorageUnreachable"
    corrupt = plan(status=ASSIGNED, inspected=StoreFailure(reason="CorruptState", message="k", permanent=True)).status
    assert view(corrupt).reason == "ShardStalled"
