"""A log that lost versions: the shard stalls although the log has grown again and the operator was restarted, until an annotation
accepts the log.
"""

import pytest
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.rebirth import recovered_birth
from persist_engine.rows.schema import Schema
from persist_engine.work.repair.recover import recover_shard
from persist_engine.work.rollup import write_rollup
from persist_kit.disk import Disk
from persist_operator.api import conditions, names
from persist_operator.cluster.port import PERSIST_SHARD
from persist_operator.plan.observed import ShardObserved
from persist_operator.plan.shard import plan_shard

OLD, NEW = "0b" * 16, "0c" * 16
TAG, OTHER = "aa" * 16, "bb" * 16
LOG = {"birth": OLD, "seqno": 8, "tag": TAG}
ACCEPT = f"{names.REQUEST_PREFIX}accept-log"


@pytest.fixture
def planned(make_shard, make_inspection, settings, now):
    def make(log=LOG, *, status=None, annotations=None, **inspected):
        shown = {"birth": OLD, "tag": TAG, "seqno": 10, "known_tag": TAG, **inspected}
        before = {"shardId": names.shard_id_of("uid-shard"), "frontiers": {"seqno": 8}, "log": log, **(status or {})}
        shard = make_shard(status=before, annotations=annotations or {})
        observed = ShardObserved(inspected=make_inspection(**shown), shard_id=before["shardId"])
        return plan_shard(shard, observed, now_ms=now, settings=settings)

    return make


def stalled(plan):
    found = conditions.find(plan.status, "Stalled")
    return None if found is None else (found["reason"], found["message"])


def test_the_status_records_the_log_and_accepts_the_same_history(planned, shard_resource, refused):
    plan = planned()
    assert stalled(plan) is None
    assert plan.status["log"] == {"birth": OLD, "seqno": 10, "tag": TAG}
    assert refused(shard_resource(), plan.status) == []
    assert stalled(planned(known_tag=None)) is None  # the version was truncated: the birth alone identifies the log
    assert stalled(planned(log={})) is None


@pytest.mark.parametrize(
    ("inspected", "text"),
    [
        ({"birth": NEW}, f"born as {OLD}, was replaced by one born as {NEW}"),
        ({"seqno": 7, "known_tag": None}, "went back from v8 to v7"),
        ({"known_tag": OTHER}, "v8 is another entry"),
    ],
)
def test_another_history_stops_every_action_and_names_the_remedy(planned, inspected, text):
    plan = planned(**inspected)
    reason, message = stalled(plan)
    assert (reason, plan.actions) == ("ShardLost", ())
    assert text in message
    assert f"persist admin recover {names.shard_id_of('uid-shard')}" in message
    assert ACCEPT in message
    assert plan.status["log"] == LOG  # otherwise the next inspection would accept the log


def test_an_annotation_accepts_another_history_once(planned):
    plan = planned(birth=NEW, annotations={ACCEPT: "1"})
    assert stalled(plan) is None
    assert plan.status["log"]["birth"] == NEW
    assert plan.status["lastHandledRequests"]["accept-log"] == "1"
    again = planned(status=plan.status, log=plan.status["log"], birth=OLD, annotations={ACCEPT: "1"})
    assert stalled(again)[0] == "ShardLost"
    early = planned(
        annotations={ACCEPT: "2"}
    )  # nothing was lost: the annotation is spent and does not accept a later loss
    assert early.status["lastHandledRequests"]["accept-log"] == "2"


def test_a_recovered_log_is_accepted_with_a_note(planned):
    birth = recovered_birth(bytes.fromhex(OLD), b"12345678").hex()
    plan = planned(birth=birth, seqno=1_000_010, known_tag=None)
    assert stalled(plan) is None
    assert plan.status["log"]["birth"] == birth
    assert "LogRecovered" in {note.reason for note in plan.notes}


# -- on real stores ------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path, operated):
    return Site(Disk(tmp_path / "stores"), operated)


class Site:
    """An operator on files and SQLite, whose log the test sets back."""

    def __init__(self, disk, operated):
        disk.blobs.parent.mkdir()
        self.disk, self.operated = disk, operated(disk.location)
        self.shard_id = ShardId(self.operated.settle(6)["shardId"])
        assert self.reason() == "Healthy"

    def append(self, count):
        schema = Schema.from_ddl("id BIGINT")
        with (
            PersistClient.open(self.disk.location) as client,
            client.open_writer(self.shard_id, schema, purpose="test") as writer,
        ):
            for _ in range(count):
                time = writer.fetch_recent_upper().time
                writer.append([(((time,), ()), time, 1)], lower=Antichain.of(time), upper=Antichain.of(time + 1))

    def reason(self):
        return self.operated.condition()["reason"]


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "running"])
def test_a_log_that_went_back_and_grew_again_is_lost(site, restarts):
    backup = site.disk.diffs(site.shard_id)
    site.append(5)
    known = site.operated.settle()["log"]
    if restarts:
        site.operated.stop()
    site.disk.set_diffs(site.shard_id, backup)
    site.append(12)
    if restarts:
        site.operated.restart()
    for _ in range(2):  # an operator that was running opens the stores again, and must not accept the log then either
        status = site.operated.settle()
        assert site.reason() == "ShardLost"
        assert status["log"] == known
    site.operated.restart()
    site.operated.settle()
    assert site.reason() == "ShardLost"
    site.operated.cluster.edit(
        PERSIST_SHARD,
        "team",
        "flights",
        lambda one: one["metadata"].setdefault("annotations", {}).update({ACCEPT: "1"}),
    )
    site.operated.settle()
    assert site.reason() == "Healthy"


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "running"])
def test_a_log_that_is_gone_is_lost_and_a_recovered_log_is_accepted(site, restarts):
    site.append(5)
    with PersistClient.open(site.disk.location) as client:
        write_rollup(client.machine(site.shard_id))
    site.operated.settle()
    site.disk.set_diffs(site.shard_id, {})
    if restarts:
        site.operated.restart()
    site.operated.settle()
    assert site.reason() == "ShardLost"
    assert site.disk.diffs(site.shard_id) == {}
    with PersistClient.open(site.disk.location) as client:
        assert recover_shard(client.versions, site.shard_id, commit=True).seqno
    site.operated.settle()
    site.operated.settle()
    assert site.reason() == "Healthy"


def test_a_resource_without_status_creates_no_log_over_orphaned_blobs(site, shard_resource):
    site.disk.set_diffs(site.shard_id, {})
    site.operated.cluster.delete(PERSIST_SHARD, "team", "flights")
    site.operated.restart()
    site.operated.cluster.create(PERSIST_SHARD, shard_resource())
    site.operated.settle()
    assert site.reason() == "ShardLost"
    assert site.disk.diffs(site.shard_id) == {}
    assert "persist admin recover" in site.operated.condition("Stalled")["message"]
