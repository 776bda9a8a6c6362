"""Inline shards without stores: the plan, the allow-list, and reports that the test writes instead of pods."""

import dataclasses
import json

import pytest
from fake_cluster import FakeCluster
from inline_house import ALLOWED, GOOD, houses
from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.tending import FORMAT, decode_wish, encode_report
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import OwnedElsewhere, Owner
from persist_engine.model.tending import Tended
from persist_operator.api import names, times
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import InlineLocation
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import JOB, PERSIST_SHARD, ApiError
from persist_operator.plan import inspecting
from persist_operator.plan.actions import StartInspection
from persist_operator.plan.observed import Awaited, Phase, Run, ShardMissing, ShardObserved
from persist_operator.plan.shard import plan_shard
from persist_operator.settings import OperatorSettings


@pytest.fixture
def house(now, tmp_path):
    with houses(now, tmp_path) as build:
        yield build


def test_no_action_of_the_bridge_is_planned_for_an_inline_shard(house, make_shard, make_inspection, now):
    made = house(**ALLOWED)
    first = plan_shard(make_shard({"storage": GOOD}), ShardObserved(), now_ms=now, settings=made.settings).status
    shard = make_shard({"storage": GOOD}, status=first)
    for inspected in (ShardMissing(), make_inspection(upper=now, readers=())):
        observed = ShardObserved(inspected=inspected, shard_id=names.shard_id_of("uid-shard"), inspected_ms=now)
        plan = plan_shard(shard, observed, now_ms=now, settings=made.settings)
        assert [type(one) for one in plan.actions] == [StartInspection]


def run_of(name, created_ms, location, report, **changes):
    values = {"phase": Phase.SUCCEEDED, "finished_ms": created_ms, "revision": inspecting._stores(location)}
    return Run(name=name, kind="inspection", created_ms=created_ms, report=report, **{**values, **changes})


def test_only_the_newest_report_of_the_same_stores_counts_and_it_expires(house, make_shard, make_inspection, now):
    made = house(**ALLOWED)
    settled = {"settledTime": times.to_text(now - 60_000), "settledJob": "b"}
    log = {"seqno": 10, "tag": "aa", "birth": "bb"}
    shard = make_shard({"storage": GOOD}, status={"inspection": settled, "log": log})
    here = shard.location(made.settings)
    there = InlineLocation(blob=here.blob, consensus="redis://other:6379/0")

    def answer(*runs, at_ms=now):
        known = inspecting.answer(shard, runs, here, now_ms=at_ms, settings=made.settings).inspected
        return known.reason if isinstance(known, Awaited) else (known.seqno, known.known_tag)

    def report(**changes):
        return json.loads(encode_report(Tended(inspection=make_inspection(**{"readers": (), **changes}))))

    old = run_of("a", now - 90_000, here, report(seqno=5))
    new = run_of("b", now - 60_000, here, report(seqno=12, known_tag="aa"), seqno=10)
    assert answer(old, new) == answer(new, old) == (12, "aa")
    # The newest report was deleted, and an older one describes an older state.
    assert answer(old) == "Inspecting"
    assert answer(run_of("c", now, there, report(seqno=1))) == "Inspecting"
    # The pod compared the log at another version than the one in the status.
    assert answer(dataclasses.replace(new, seqno=9)) == (12, None)
    assert answer(new, at_ms=now + 3_600_000) == "InspectionOverdue"
    failed = run_of("c", now, here, None, phase=Phase.FAILED, reason="Evicted")
    assert answer(new, failed) == "InspectionFailed"
    waiting = run_of("c", now, here, None, phase=Phase.PENDING, finished_ms=None, reason="Unschedulable")
    assert answer(new, waiting, at_ms=now + 1000) == (12, "aa")
    assert answer(new, waiting, at_ms=now + 61_000) == "Unschedulable"


def test_a_take_over_is_for_the_reported_shard_and_not_for_one_that_the_resource_names_later(house, shard_resource):
    """The annotation allows the shard of the report. The resource now names a shard of another namespace."""
    made = house(**ALLOWED)
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD}))
    made.look()
    (job,) = made.kubelet.waiting()
    mine, theirs = (f"s00000000-0000-4000-8000-00000000000{number}" for number in (1, 2))
    owner = Owner(made.settings.operator_id, "team", "other")
    made.kubelet.end(job, 0, encode_report(OwnedElsewhere(ShardId(mine), owner)))
    made.look()

    def rename(one):
        one["spec"]["shardId"] = theirs
        one["metadata"].update(annotations={names.ANNOTATION_TAKE_OVER: mine}, generation=2)

    made.cluster.edit(PERSIST_SHARD, "team", "flights", rename)
    assert load_schemas().check(made.cluster.get(PERSIST_SHARD, "team", "flights")) == []
    made.env.advance_ms(6000)
    made.look()
    (job,) = made.kubelet.waiting()
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    wish = decode_wish(arguments[arguments.index("--wish") + 1])
    assert (wish.wanted, wish.take_over) == (theirs, OwnedElsewhere(ShardId(mine), owner))


def test_a_refused_pod_is_tried_later_and_writes_its_status_once(house, shard_resource):
    """A status that changes at each reconcile triggers the next one: a loop for as long as the refusal lasts."""
    made = house(**ALLOWED)
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD}))
    made.cluster.deny["create", "Job"] = ApiError("POST jobs: 403 exceeded quota: small", status=403)
    made.look()
    made.look()
    before = made.cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["resourceVersion"]
    for _ in range(4):
        made.env.advance_ms(1100)
        assert made.look() >= 0.2
    assert made.cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["resourceVersion"] == before


@pytest.mark.slow
@pytest.mark.parametrize(("back_s", "behind_s"), [(3600, 0), (0, 100), (0, -100)])
def test_clocks_that_go_back_or_differ_start_no_more_inspections(
    house, shard_resource, make_inspection, back_s, behind_s
):
    """`behind_s`: by how much the clock of the cluster is behind the clock of the operator."""
    made = house(**ALLOWED)
    made.cluster = made.kubelet.cluster = FakeCluster(now_ms=lambda: made.env.now_ms() - behind_s * 1000)
    made.restart()
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD}))
    report, looks = encode_report(Tended(inspection=make_inspection(readers=(), birth="bb", tag="aa"))), []
    for second in range(80):
        made.env.advance_ms((1 - (back_s if second == 40 else 0)) * 1000)
        made.look()
        for job in made.kubelet.waiting():
            looks.append(job["metadata"]["name"])
            made.kubelet.end(job, 0, report)
        made.look()
    assert made.condition() == ("True", "Healthy")
    # One without the shard id, one with it, then one a minute or for the step of the clock.
    assert len(looks) <= 4, looks
    assert made.status()["inspection"]["settledJob"] == looks[-1]


def test_inspections_keep_their_distance_when_finished_jobs_are_deleted(house, shard_resource, make_inspection):
    made = house(**ALLOWED)
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD}))
    report, looks = encode_report(Tended(inspection=make_inspection(readers=(), birth="bb", tag="aa"))), 0
    for _ in range(30):
        made.env.advance_ms(1000)
        made.look()
        for job in made.kubelet.waiting():
            looks += 1
            made.kubelet.end(job, 0, report)
            made.look()
            made.cluster.delete(JOB, "team", job["metadata"]["name"])
    assert 1 < looks <= 30 // 5 + 1


@pytest.mark.parametrize("name", ["../../../../../api/v1/namespaces/other/pods/x", "..", "a/b", "A", "", "a?b"])
def test_a_reported_owner_is_never_a_path_at_the_api_server(house, shard_resource, name):
    made = house(**ALLOWED)
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD}))
    made.look()
    (job,) = made.kubelet.waiting()
    owner = str(Owner(made.settings.operator_id, "team", name)) if name else f"{made.settings.operator_id}/team/"
    shard_id = names.shard_id_of("uid-shard")
    report = {"format": FORMAT, "answer": "OwnedElsewhere", "shard_id": shard_id, "owner": owner}
    made.kubelet.end(job, 0, json.dumps(report))
    requests = made.cluster.record()
    made.look()
    assert {request.arguments for request in requests if request.verb == "get"} == {(PERSIST_SHARD, "team", "flights")}
    assert made.condition() == (("False", "ShardIdConflict") if name else ("Unknown", "InspectionFailed"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"endpoint": None}, None),
        ({"endpoint": "https://S3.Example:443"}, None),
        ({"endpoint": "http://s3.example"}, None),
        ({"endpoint": "http://s3.example:443"}, "EndpointNotAllowed"),
        ({"endpoint": "https://s3.example:9000"}, "EndpointNotAllowed"),
        ({"endpoint": "https://x.s3.example"}, "EndpointNotAllowed"),
        ({"endpoint": "https://evils3.example"}, "EndpointNotAllowed"),
        ({"endpoint": "https://s3.example.evil"}, "EndpointNotAllowed"),
        ({"endpoint": "http://a.minio.svc:9000"}, None),
        ({"endpoint": "http://minio.svc:9000"}, "EndpointNotAllowed"),
        ({"endpoint": "http://aminio.svc:9000"}, "EndpointNotAllowed"),
        ({"endpoint": "http://a.minio.svc"}, "EndpointNotAllowed"),
        ({"endpoint": "https://s3.example@evil"}, "InvalidStorage"),
        ({"endpoint": "https://evil#s3.example"}, "InvalidStorage"),
        ({"endpoint": "https://evil\\.s3.example"}, "InvalidStorage"),
        ({"endpoint": "https://[::1]"}, "EndpointNotAllowed"),
        ({"address": "redis.example:6380"}, "EndpointNotAllowed"),
        ({"address": "x.redis.svc:7000"}, None),
        ({"address": "redis.svc:7000"}, "EndpointNotAllowed"),
        ({"address": "redis.example"}, "InvalidStorage"),
        ({"address": "u:p@redis.example:6379"}, "InvalidStorage"),
        ({"address": "evil:6379?x=redis.example:6379"}, "InvalidStorage"),
        ({"blob": {"auth": {"type": "Secret", "secretName": "other"}}}, "SecretNotAllowed"),
        ({"blob": {"caSecretRef": {"name": "other", "key": "ca.crt"}}}, "SecretNotAllowed"),
        ({"consensus": {"authSecretName": "other"}}, "SecretNotAllowed"),
        ({"consensus": {"tls": True, "tlsSecretName": "other"}}, "SecretNotAllowed"),
        ({"consensus": {"tls": True, "tlsSecretName": "team-tls", "authSecretName": "team-store"}}, None),
        ({"consensus": {"tlsSecretName": "team-tls"}}, "InvalidStorage"),
        ({"consensus": {"tls": "yes"}}, "InvalidStorage"),
        ({"blob": {"encryption": {"type": "SSE-KMS", "kmsKeyId": "k&probe=false"}}}, "InvalidStorage"),
        ({"blob": {"encryption": {"type": "SSE-S3", "kmsKeyId": "k"}}}, "InvalidStorage"),
        ({"blob": {"encryption": {"type": "Other"}}}, "InvalidStorage"),
    ],
)
def test_the_allow_list_is_compared_field_by_field(house, make_shard, change, reason):
    made = house(**ALLOWED)
    blob, consensus = dict(GOOD["blob"]), dict(GOOD["consensus"])
    if "endpoint" in change:
        blob["endpoint"] = change["endpoint"]
        if change["endpoint"] is None:
            del blob["endpoint"]
    consensus["address"] = change.get("address", consensus["address"])
    storage = {"blob": blob | change.get("blob", {}), "consensus": consensus | change.get("consensus", {})}
    shard = make_shard({"storage": storage})
    if reason is None:
        assert isinstance(shard.location(made.settings), InlineLocation)
        return
    with pytest.raises(InvalidUsage) as refusal:
        shard.location(made.settings)
    assert refusal.value.reason == reason
    if reason == "EndpointNotAllowed":
        assert "storage.inline.allowed" in str(refusal.value)


def test_no_job_starts_on_inline_stores_that_are_not_allowed_or_off(house, shard_resource):
    for inline, reason in (({}, "EndpointNotAllowed"), ({**ALLOWED, "allowed_consensus": ()}, "EndpointNotAllowed")):
        made = house(**inline)
        made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD}))
        for _ in range(3):
            made.look()
        assert made.condition("Stalled") == ("True", reason)
        assert made.cluster.find(JOB, None, {}) == []


def test_the_bridge_refuses_an_inline_location_by_its_type():
    at = InlineLocation(blob="mem:a", consensus="mem:a")
    with Bridge(OperatorSettings()) as bridge, pytest.raises(InvalidUsage, match="does not connect"):
        bridge._call(at, lambda client: client)


def test_a_refusal_of_the_engine_stands_until_the_resource_changes(house, shard_resource, make_inspection):
    """The pod found the shard finalized, or another schema than the one that the operator saw."""
    made = house(**ALLOWED)
    schema = {"key": "id BIGINT", "value": ""}
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": GOOD, "schema": schema}))

    def end(**changes):
        (job,) = made.kubelet.waiting()
        found = make_inspection(key_schema="id BIGINT", val_schema="", readers=(), writers=(), progress={})
        wish = decode_wish(job["spec"]["template"]["spec"]["containers"][0]["args"][3])
        made.kubelet.end(job, 0, encode_report(Tended(inspection=found, **changes)))
        made.env.advance_ms(6000)
        made.look()
        return wish

    made.look()
    assert end().evolve is None
    made.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"]["schema"].update(value="note STRING"))
    generation = made.cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["generation"]
    made.look()
    assert made.condition() == ("False", "EvolvingSchema")
    assert end().evolve is None, "this pod was intended before the change"
    wish = end(schema_problem="the shard is finalized", schema_generation=generation)
    assert (wish.evolve.value, wish.evolve.generation) == ("note STRING", generation)
    assert made.condition("Stalled") == ("True", "SchemaRefused")
    assert "the shard is finalized" in made.words()
    made.env.advance_ms(61_000)
    made.look()
    assert end().evolve is None, "the same schema is not asked for again"
