"""Verification and orphan scans: when they are due, what their reports change, and the condition Verified."""

import hashlib
import json

import pytest
from persist_operator.api import conditions, names, times
from persist_operator.plan.actions import StartMaintenance
from persist_operator.plan.keeping import auditing
from persist_operator.plan.observed import Phase, Run, ShardObserved
from persist_operator.plan.shard import plan_shard

SHARD_ID = names.shard_id_of("uid-shard")
DAY_MS, HOUR_MS = 86_400_000, 3_600_000
VERIFIED = {
    "outcome": "Succeeded",
    "verdict": "Verified",
    "mode": "Metadata",
    "missing_blobs": 0,
    "errors": 0,
    "message": "all",
}
MISSING = {
    **VERIFIED,
    "verdict": "MissingBlobs",
    "missing_blobs": 2,
    "errors": 2,
    "message": "MissingBlob s1/n0/p1: gone",
}
ORPHANS = {"outcome": "Succeeded", "orphan_blobs": 4, "orphan_bytes": 400, "complete": True, "message": "4 orphans"}


class Life:
    """A resource, planned again and again at times of its own clock."""

    def __init__(self, make_shard, make_inspection, settings, now):
        self.make_shard, self.make_inspection, self.settings, self.now = make_shard, make_inspection, settings, now
        self.status = {"shardId": SHARD_ID}

    def plan(self, spec=None, *, runs=(), after_ms=0, **metadata):
        self.now += after_ms
        shard = self.make_shard(spec, status=self.status, **metadata)
        observed = ShardObserved(inspected=self.make_inspection(), shard_id=SHARD_ID, runs=tuple(runs))
        plan = plan_shard(shard, observed, now_ms=self.now, settings=self.settings)
        self.status = json.loads(json.dumps(plan.status))
        return {one.kind: one for one in plan.actions if isinstance(one, StartMaintenance)}

    def ended(self, action, report, *, phase=Phase.SUCCEEDED, seconds=2):
        self.now += 1000 * seconds
        return Run(
            name=action.name, kind=action.kind, phase=phase, created_ms=self.now, started_ms=self.now,
            finished_ms=self.now + 1000, seqno=action.seqno, report=report,
        )  # fmt: skip

    def due(self, kind, spec=None):
        """Lets time pass to the next run of `kind`."""
        self.plan(spec)
        return self.plan(spec, after_ms=self.next_ms(kind) - self.now)[kind]

    def next_ms(self, kind):
        return times.to_ms(self.status["maintenance"][kind]["nextRunTime"])

    def condition(self):
        found = conditions.find(self.status, "Verified")
        return None if found is None else (found["status"], found["reason"])


@pytest.fixture
def life(make_shard, make_inspection, settings, now):
    return Life(make_shard, make_inspection, settings, now)


def test_a_new_shard_is_not_verified_at_once_and_says_when(life):
    assert life.plan() == {}
    assert life.condition() == ("Unknown", "NotYet")
    for kind in names.AUDIT_KINDS:
        assert life.now <= life.next_ms(kind) < life.now + DAY_MS
    before = life.status
    assert life.plan(after_ms=1000) == {}
    assert life.status == before, "the time of the first run stays"


def test_no_uid_makes_a_new_shard_be_audited_at_once(life):
    """One of 256 was: its creation and the first run of a sink came beside an audit of nothing."""
    for kind in names.AUDIT_KINDS:
        uids = (f"uid-{number}" for number in range(10_000))
        life.status = {"shardId": SHARD_ID}
        uid = next(uid for uid in uids if hashlib.sha256(f"{kind}/{uid}".encode()).digest()[0] == 0)
        assert life.plan(uid=uid) == {}
        assert life.next_ms(kind) - life.now > DAY_MS // 300


def test_first_runs_of_many_resources_are_spread_over_the_interval(life):
    first = set()
    for index in range(40):
        life.status = {"shardId": SHARD_ID}
        life.plan(uid=f"uid-{index}")
        first.add((life.next_ms("verify") - life.now) // HOUR_MS)
    assert len(first) > 10


@pytest.mark.parametrize(
    ("spec", "kind", "audit"),
    [
        ({}, "verify", auditing.Audit(mode="Metadata")),
        ({"verify": {"mode": "Full"}}, "verify", auditing.Audit(mode="Full")),
        ({}, "orphanScan", auditing.Audit(min_age_seconds=259_200)),
        (
            {"gc": {"maxDeletesPerRun": 7, "orphans": {"mode": "Delete", "minAgeSeconds": 90_000}}},
            "orphanScan",
            auditing.Audit(min_age_seconds=90_000, deletes_max=7),
        ),
    ],
)
def test_a_run_does_what_the_spec_says(life, spec, kind, audit):
    action = life.due(kind, spec)
    assert (action.audit, action.due_ms, action.debt_bytes) == (audit, None, 0)


def test_off_starts_nothing_and_a_request_still_looks_and_deletes_nothing(life):
    off = {"verify": {"mode": "Off"}, "gc": {"orphans": {"mode": "Off"}}}
    assert life.plan(off) == {}
    assert life.plan(off, after_ms=3 * DAY_MS) == {}
    assert life.condition() is None
    started = life.plan(
        off, annotations={"persistshard.io/request-verify": "a", "persistshard.io/request-orphan-scan": "b"}
    )
    assert started["verify"].audit == auditing.Audit(mode="Metadata")
    assert started["orphanScan"].audit.deletes_max is None
    assert life.status["lastHandledRequests"] == {"verify": "a", "orphan-scan": "b"}
    assert life.condition() == ("Unknown", "NotYet")


def test_a_request_that_was_handled_is_not_handled_again(life):
    asked = {"annotations": {"persistshard.io/request-verify": "a"}}
    action = life.plan(**asked)["verify"]
    assert life.plan(runs=[life.ended(action, VERIFIED)], **asked) == {}


def test_missing_blobs_are_on_status_and_condition_until_a_run_finds_them(life):
    action = life.due("verify")
    life.plan(runs=[life.ended(action, VERIFIED)])
    assert life.condition() == ("True", "Verified")
    assert life.status["storage"]["missingBlobs"] == 0
    assert life.next_ms("verify") == pytest.approx(life.now + DAY_MS, abs=5000)
    action = life.due("verify")
    run = life.ended(action, MISSING)
    life.plan(runs=[run])
    found = conditions.find(life.status, "Verified")
    assert (found["status"], found["reason"]) == ("False", "MissingBlobs")
    for words in ("s1/n0/p1", f"persist admin restore {SHARD_ID} --commit", "request-verify"):
        assert words in found["message"]
    assert life.status["storage"]["missingBlobs"] == 2
    life.plan(after_ms=HOUR_MS)
    assert life.condition() == ("False", "MissingBlobs"), "the Job is gone, and what it found stays"
    action = life.due("verify")
    life.plan(runs=[life.ended(action, VERIFIED)])
    assert (life.condition(), life.status["storage"]["missingBlobs"]) == (("True", "Verified"), 0)


@pytest.mark.parametrize(
    ("report", "phase"),
    [
        ({"outcome": "Failed", "message": "Unavailable: s3"}, Phase.FAILED),
        (None, Phase.FAILED),
        (None, Phase.SUCCEEDED),
        ({**VERIFIED, "outcome": "Failed"}, Phase.SUCCEEDED),
        (VERIFIED, Phase.FAILED),
        ({**MISSING, "verdict": "Fine"}, Phase.SUCCEEDED),
        ({**VERIFIED, "missing_blobs": -1}, Phase.SUCCEEDED),
        ({**VERIFIED, "missing_blobs": True}, Phase.SUCCEEDED),
    ],
)
def test_a_run_that_could_not_look_changes_no_verdict(life, report, phase):
    life.plan(runs=[life.ended(life.due("verify"), MISSING)])
    life.plan(runs=[life.ended(life.due("verify"), report, phase=phase)])
    assert life.condition() == ("False", "MissingBlobs")


def test_a_first_verification_that_fails_says_why(life):
    action = life.due("verify")
    life.plan(runs=[life.ended(action, {"outcome": "Failed", "message": "Unavailable: s3"}, phase=Phase.FAILED)])
    assert life.condition() == ("Unknown", "NotYet")
    assert "Unavailable: s3" in conditions.find(life.status, "Verified")["message"]
    assert life.next_ms("verify") < life.now + 60_000, "a failure waits its backoff, not a day"


def test_orphans_are_counted_on_the_status(life):
    life.plan(runs=[life.ended(life.due("orphanScan"), ORPHANS)])
    assert (life.status["storage"]["orphanBlobs"], life.status["storage"]["orphanBytes"]) == (4, 400)
    life.plan(after_ms=HOUR_MS)
    assert life.status["storage"]["orphanBytes"] == 400


def test_a_scan_that_stopped_at_its_limit_goes_on_at_once(life):
    spec = {"gc": {"orphans": {"mode": "Delete"}}}
    action = life.due("orphanScan", spec)
    run = life.ended(action, {**ORPHANS, "complete": False})
    again = life.plan(spec, runs=[run], after_ms=5000)["orphanScan"]
    assert again.name != action.name
    done = life.ended(again, ORPHANS)
    assert "orphanScan" not in life.plan(spec, runs=[run, done], after_ms=5000)


def test_a_shorter_interval_counts_from_now_on(life):
    life.plan(runs=[life.ended(life.due("verify"), VERIFIED)])
    life.plan({"verify": {"intervalSeconds": 3600}}, after_ms=60_000)
    assert life.next_ms("verify") <= life.now + HOUR_MS


def test_a_suspended_shard_is_not_looked_at(life):
    spec = {"suspend": True}
    life.plan(spec)
    assert life.plan(spec, after_ms=2 * DAY_MS) == {}


def test_statuses_fit_the_crd_and_the_names_fit_kubernetes(life, shard_resource, refused):
    life.plan(runs=[life.ended(life.due("verify"), {**MISSING, "message": "x" * 9000})])
    life.plan(runs=[life.ended(life.due("orphanScan"), {**ORPHANS, "orphan_bytes": 1 << 80})])
    assert refused(shard_resource(), life.status) == []
    for kind in names.MAINTENANCE_KINDS:
        assert len(names.maintenance_name("a" * 40, kind, 10**12, retry=99)) <= 63
