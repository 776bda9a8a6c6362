"""The plan of a PersistShard: its creation, its owner, its since, and what the status says."""

import dataclasses

import pytest
from persist_engine.model.inspection import ReaderInfo
from persist_engine.model.ownership import Owner
from persist_operator.api import conditions, times
from persist_operator.api.shard import Shard, StoreLocation
from persist_operator.plan.actions import AdvanceSince, InitialiseShard
from persist_operator.plan.observed import (
    ActionFailure,
    NotOwned,
    Phase,
    ShardMissing,
    ShardObserved,
    ShardView,
    StoreFailure,
)
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.shard_status import stores
from shard_plans import ASSIGNED, DEBT, SHARD_ID, planner, reason, run, started


@pytest.fixture
def plan(make_shard, settings, now):
    return planner(make_shard, settings, now)


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
    failure = ActionFailure(reason="SchemaMismatch", message="differs", permanent=True, at_ms=now, generation=1)
    observed = ShardObserved(inspected=ShardMissing(), failures={"InitialiseShard": failure}, shard_id=SHARD_ID)
    refused = plan(status=ASSIGNED, observed=observed)
    assert refused.actions == ()
    assert reason(refused, "Stalled") == ("True", "SchemaMismatch")
    assert len(plan(status=ASSIGNED, observed=observed, at=now + 301_000).actions) == 1


@pytest.mark.parametrize("permanent", [True, False])
def test_a_refused_initialisation_says_nothing_of_a_spec_that_was_changed(make_shard, settings, now, permanent):
    """The refusal of the former spec stood on the status for five minutes, and the new one was not tried."""
    failure = ActionFailure(reason="ShardLost", message="s1 is gone", permanent=permanent, at_ms=now, generation=1)
    observed = ShardObserved(inspected=ShardMissing(), failures={"InitialiseShard": failure}, shard_id=SHARD_ID)
    shard = make_shard({"shardId": SHARD_ID}, status=ASSIGNED)
    changed = dataclasses.replace(shard, meta=dataclasses.replace(shard.meta, generation=2))
    tried = plan_shard(changed, observed, now_ms=now, settings=settings)
    assert [type(one) for one in tried.actions] == [InitialiseShard]
    assert reason(tried, "Reconciling") == ("True", "Initialising")


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
    later = plan(spec, status=first.status, inspected=make_inspection(upper=upper + 20_000), at=now + 41_000)
    assert [one.since_ms for one in later.actions] == [upper - 40_000]
    reached = make_inspection(upper=upper, since=upper - 60_000, readers=(make_own_reader(upper - 60_000),))
    assert plan(spec, status=first.status, inspected=reached, at=now + 41_000).actions == ()


def test_the_newest_complete_time_stays_readable_without_lag(plan, make_inspection):
    (action,) = plan(
        {"retention": {"sinceLagSeconds": 0}}, status=ASSIGNED, inspected=make_inspection(upper=500)
    ).actions
    assert action.since_ms == 499


def test_the_hold_is_registered_before_there_is_anything_to_advance(plan, make_inspection):
    (action,) = plan(status=ASSIGNED, inspected=make_inspection(upper=0, readers=())).actions
    assert isinstance(action, AdvanceSince)
    assert action.since_ms == 0


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
    later = plan(status=first.status, inspected=make_inspection(seqno=11), at=now + 41_000)
    assert later.status["frontiers"]["seqno"] == 11
    idle = plan(status=first.status, inspected=make_inspection(seqno=10), at=now + 3_000_000)
    assert idle.status == first.status


def test_a_shard_is_settled_while_only_news_can_make_work_for_it(plan, make_inspection, now):
    first = plan(status=ASSIGNED, inspected=make_inspection())
    assert first.is_settled
    assert plan(status=first.status, inspected=make_inspection()).is_settled
    busy = [
        {"inspected": make_inspection(seqno=11), "at": now + 5000},  # its numbers are yet to be written
        {"inspected": make_inspection(waits_from_ms=now)},
        {"inspected": make_inspection(uncollected_from_ms=now)},
        {"inspected": make_inspection(), "runs": [run("gc", 10, now)]},
        {"inspected": make_inspection(since=0, upper=now)},  # since follows
        {"inspected": make_inspection(gc_seqnos=50)},
        # a label may be taken away
        {"observed": ShardObserved(inspected=make_inspection(), shard_id=SHARD_ID, namespace_labels={"team": "red"})},
    ]
    for changes in busy:
        assert not plan(status=first.status, **changes).is_settled, changes
    audited = {"verify": {"mode": "Metadata", "intervalSeconds": 3600}}
    planned = plan(audited, status=ASSIGNED, inspected=make_inspection())
    due_ms = times.to_ms(planned.status["maintenance"]["verify"]["nextRunTime"])
    for early_ms, is_settled in ((400_000, True), (200_000, False)):
        again = plan(audited, status=planned.status, inspected=make_inspection(), at=due_ms - early_ms)
        assert again.is_settled is is_settled, early_ms


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


@pytest.mark.parametrize("unit", [1000, 1_000_000])
def test_times_that_are_no_milliseconds_have_no_lag(plan, make_inspection, now, unit):
    """Of microseconds it would be 57,000 years before now, and the greatest lag of a fleet never that of such a shard."""
    found = plan(status=ASSIGNED, inspected=make_inspection(upper=now * unit, since=(now - 7) * unit))
    assert not {"upperLagSeconds", "sinceLagSeconds"} & found.status["frontiers"].keys()
    assert found.status["frontiers"]["upper"] == str(now * unit)
