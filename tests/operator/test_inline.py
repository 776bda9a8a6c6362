"""Inline shards, whose resource names its own stores. The commands of their pods run on real stores, and the operator itself connects
to no store.
"""

import contextlib
import json

import pytest
from inline_house import SECRET, houses
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.codec.tending import FORMAT
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner
from persist_engine.model.state import CodecNames
from persist_engine.rows.schema import Schema
from persist_engine.storage.addresses import with_credentials
from persist_kit.servers import redis_server, s3_server
from persist_operator.api import names, times
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import InlineLocation, Shard
from persist_operator.bridge import BridgeFailure
from persist_operator.cluster.port import EVENT, JOB, PERSIST_SHARD, POD, ApiError
from persist_operator.plan.observed import ShardView
from persist_operator.steps.reconcile import Key


@pytest.fixture
def house(now, tmp_path):
    with houses(now, tmp_path) as build:
        yield build


@pytest.fixture(scope="module")
def servers():
    with redis_server(password="team's own") as redis, s3_server() as s3:  # noqa: S106
        yield redis, s3


@pytest.fixture
def stores(servers, house, request):
    """(house, spec.storage): an operator that allows these stores, and the Secret of the team mounted."""
    redis, s3 = servers
    made = house(
        allowed_endpoints=(s3.address,),
        allowed_consensus=(redis.address,),
        allowed_secrets=(SECRET,),
        inspect_seconds=60,
    )
    keys = f"[default]\naws_access_key_id = {s3.access_key}\naws_secret_access_key = {s3.secret_key}\n"
    made.kubelet.mount("team", SECRET, {"aws-credentials": keys, "redis-password": "team's own"})
    prefix = request.node.name.replace("[", "-").replace("]", "")
    storage = {
        "blob": {
            "bucket": s3.bucket,
            "prefix": prefix,
            "region": s3.region,
            "endpoint": f"http://{s3.address}",
            "pathStyle": True,
            "auth": {"type": "Secret", "secretName": SECRET},
        },
        "consensus": {"address": redis.address, "keyPrefix": prefix, "authSecretName": SECRET},
    }
    return made, storage


def client_of(made, resource):
    location = Shard.of(resource).location(made.settings)
    folder = str(made.kubelet.secrets["team", SECRET])
    return PersistClient.open(
        Location(blob=with_credentials(location.blob, folder), consensus=with_credentials(location.consensus, folder))
    )


@pytest.mark.slow
def test_pods_of_its_namespace_create_inspect_and_maintain_an_inline_shard(stores, shard_resource, refused):
    made, storage = stores
    resource = shard_resource({"storage": storage, "rollup": {"everySeqnos": 16}})
    assert load_schemas().check(resource) == []
    made.cluster.create(PERSIST_SHARD, resource)
    made.look()
    assert made.condition() == ("Unknown", "Inspecting")
    made.kubelet.starts_processes = True
    made.settle()
    made.kubelet.starts_processes = False
    assert made.condition() == ("True", "Healthy"), made.status()
    status = made.status()
    assert refused(resource, status) == []
    assert status["schema"]["key"] == "id BIGINT"
    with client_of(made, resource) as client:
        shard_id = ShardId(status["shardId"])
        assert client.owner_of(shard_id) == Owner(made.settings.operator_id, "team", "flights")
        hold = names.critical_id_of(shard_id)
        assert hold in {one.id for one in client.inspect(shard_id).readers}
        schema = Schema.from_ddl("id BIGINT")
        with client.open_writer(shard_id, schema, purpose="test") as writer:
            for number in range(20):
                time = 1_700_000_000_000 + number * 1000
                writer.compare_and_append([(((number,), ()), time, 1)], expected_upper=writer.upper, new_upper=time + 1)
    made.env.advance_ms(61_000)
    made.settle(rounds=3)
    status = made.status()
    assert status["frontiers"]["upper"] == str(1_700_000_019_001)
    with client_of(made, resource) as client:
        held = next(one for one in client.inspect(shard_id).readers if one.id == hold)
    lag_ms = resource["spec"]["retention"]["sinceLagSeconds"] * 1000
    assert held.since == 1_700_000_019_001 - lag_ms
    # The report of the inspection made the rollup due. The rollup mounts the same Secret.
    assert made.kubelet.run("rollup") == 1
    assert made.kubelet.waiting() == []
    made.settle(rounds=3)
    assert status["maintenance"]["rollup"]["jobName"]
    rollup = made.status()["maintenance"]["rollup"]
    assert (rollup["lastResult"], made.kubelet.waiting("rollup")) == ("Succeeded", [])
    assert len(made.kubelet.jobs("rollup")) == 1
    assert made.condition("SinceAdvancing") == ("True", "Advancing")
    assert made.condition() == ("True", "Healthy")
    assert len(made.kubelet.jobs()) == 1, "finished Jobs are deleted except the newest"
    assert refused(resource, made.status()) == []


@pytest.mark.slow
def test_an_idle_inline_shard_is_inspected_once_an_interval_and_its_status_rests(stores, shard_resource):
    made, storage = stores
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.settle()
    made.env.advance_ms(61_000)
    made.settle(rounds=1)
    before, version = len(made.kubelet.arguments), made.status()["conditions"]
    for _ in range(10):
        made.env.advance_ms(5_000)
        made.look()
    assert made.kubelet.waiting() == []
    made.env.advance_ms(12_000)
    made.look()
    assert len(made.kubelet.waiting()) == 1
    assert (len(made.kubelet.arguments), made.status()["conditions"]) == (before, version)


@pytest.mark.redis
def test_an_intent_is_on_the_status_before_its_job_and_a_crash_between_repeats_the_name(stores, shard_resource):
    made, storage = stores
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.cluster.deny["create", "Job"] = ApiError("POST jobs: 500 gone away", status=500)
    made.look()
    intended = made.status()["inspection"]["jobName"]
    del made.cluster.deny["create", "Job"]
    made.env.advance_ms(300_000)
    made.restart()
    made.look()
    (job,) = made.kubelet.jobs()
    assert job["metadata"]["name"] == intended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("refused", ("False", "ActionRefused")),
        ("image", ("Unknown", "ImagePullBackOff")),
        ("nothing", ("Unknown", "NoPod")),
        ("secret", ("Unknown", "Pending")),
        ("killed", ("Unknown", "InspectionFailed")),
        ("late", ("Unknown", "InspectionFailed")),
    ],
)
def test_the_status_shows_why_an_inspection_pod_does_not_answer(stores, shard_resource, refused, what, expected):
    made, storage = stores
    resource = shard_resource({"storage": storage})
    made.cluster.create(PERSIST_SHARD, resource)
    if what == "refused":
        made.cluster.deny["create", "Job"] = ApiError("POST jobs: 403 exceeded quota: small", status=403)
    made.look()
    if what == "refused":
        made.look()
        assert "exceeded quota" in made.words()
        assert made.condition("Reconciling") == ("True", "ActionRefused")
    else:
        (job,) = made.kubelet.waiting()
    if what == "image":
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        made.kubelet.pod(job, {"phase": "Pending"}, waiting)
        made.look()
        assert "no such image" in made.words()
    if what == "secret":
        made.kubelet.pod(job, {"phase": "Pending"}, {"waiting": {"reason": "ContainerCreating"}})
    if what in {"image", "nothing", "secret"}:
        made.env.advance_ms(61_000)
    if what == "killed":
        made.kubelet.end(job, 137, "", reason="OOMKilled")
    if what == "late":
        made.kubelet.end(job, 1, "", reason="DeadlineExceeded")
    made.look()
    assert made.condition() == expected
    assert ("Secret that is missing" in made.words()) == (what == "secret")
    assert made.condition("Reconciling")[0] == "True"
    assert refused(resource, made.status()) == []
    if what in {"killed", "late"}:
        assert {"killed": "OOMKilled", "late": "DeadlineExceeded"}[what] in made.words()
        made.env.advance_ms(11_000)
        made.look()
        assert len(made.kubelet.waiting()) == 1, "tried again"
        made.settle()
        assert made.condition() == ("True", "Healthy")
    assert made.kubelet.run() in {0, 1}


@pytest.mark.slow
def test_the_refusal_of_an_inspection_pod_stays_on_the_status_until_a_pod_runs(stores, shard_resource):
    """The refusal also stays after the Job failed, because nothing else is known until the next Job has a pod."""
    made, storage = stores
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.look()
    (job,) = made.kubelet.waiting()
    head = job["metadata"]
    event = {
        "metadata": {"namespace": "team", "name": "refused.1"},
        "involvedObject": {"kind": "Job", "namespace": "team", "name": head["name"], "uid": head["uid"]},
        "reason": "FailedCreate",
        "message": f'Error creating: pods "{head["name"]}-abcde" is forbidden: exceeded quota: small',
    }
    made.cluster.create(EVENT, event)
    made.env.advance_ms(2500)
    made.look()
    assert (made.condition(), made.condition("Reconciling")) == (("False", "ActionRefused"), ("True", "ActionRefused"))
    assert "exceeded quota: small" in made.words()
    made.env.advance_ms(120_000)
    now = times.to_text(made.env.now_ms())
    ended = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "lastTransitionTime": now}
    made.cluster.edit(JOB, "team", head["name"], lambda one: one.update(status={"conditions": [ended]}))
    for _ in range(3):
        made.look()
        assert made.condition() == ("False", "ActionRefused")
        assert "exceeded quota: small" in made.words()
        made.env.advance_ms(4000)
    made.look()
    made.settle()
    assert made.condition() == ("True", "Healthy")
    assert "exceeded quota" not in str(made.status())


@pytest.mark.slow
def test_the_status_shows_the_words_of_a_store_that_refuses_the_password(stores, shard_resource):
    made, storage = stores
    (made.kubelet.secrets["team", SECRET] / "redis-password").write_text("wrong")
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.settle(rounds=1)
    assert made.condition() == ("False", "StorageUnreachable")
    assert "invalid username-password pair" in made.words()
    (made.kubelet.secrets["team", SECRET] / "redis-password").write_text("team's own")
    made.env.advance_ms(61_000)
    made.settle()
    assert made.condition() == ("True", "Healthy")


@pytest.mark.slow
def test_a_shard_with_another_owner_stalls_and_an_annotation_takes_it_over(stores, shard_resource):
    made, storage = stores
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}, name="first", uid="uid-first"))
    first = Key("PersistShard", "team", "first")
    shard_id = made.settle(first)["shardId"]
    second = Key("PersistShard", "team", "second")
    spec = {"storage": storage, "shardId": shard_id}
    made.cluster.create(PERSIST_SHARD, shard_resource(spec, name="second", uid="uid-second"))
    made.settle(second)
    assert made.condition("Stalled", second) == ("True", "ShardIdConflict")
    assert "team/first" in made.words(key=second)
    assert "frontiers" not in made.status(second)
    word = {names.ANNOTATION_TAKE_OVER: shard_id}
    made.cluster.edit(PERSIST_SHARD, "team", "second", lambda one: one["metadata"].update(annotations=word))
    made.settle(second)
    assert made.condition(key=second) == ("True", "Healthy")
    made.env.advance_ms(61_000)
    made.settle(first)
    assert made.condition("Stalled", first) == ("True", "ShardIdConflict")


@pytest.mark.slow
def test_an_inline_shard_is_purged_although_its_resource_lost_its_status(stores, shard_resource):
    """A backup brings a resource back with its finalizer and without its status, under another uid."""
    made, storage = stores
    spec = {"storage": storage, "reclaimPolicy": "Purge", "deletionConfirmation": "purge-this-shard"}
    resource = shard_resource(spec)
    made.cluster.create(PERSIST_SHARD, resource)
    shard_id = ShardId(made.settle()["shardId"])
    kept = made.cluster.stored("PersistShard", "team", "flights")
    made.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(finalizers=[]))
    made.cluster.delete(PERSIST_SHARD, "team", "flights")
    kept.pop("status")
    kept["metadata"].update(uid="uid-other")
    made.cluster.create(PERSIST_SHARD, kept)
    assert made.cluster.delete(PERSIST_SHARD, "team", "flights")
    made.look()
    assert made.kubelet.run(names.RECLAIM) == 1
    made.env.advance_ms(31_000)
    made.look()
    assert made.cluster.get(PERSIST_SHARD, "team", "flights") is None
    with client_of(made, resource) as client:
        assert client.is_finalized(shard_id)
        assert client.registered(Owner(made.settings.operator_id, "team", "flights")) is None


@pytest.mark.slow
def test_a_lost_inline_shard_is_not_created_again(stores, servers, shard_resource):
    made, storage = stores
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.settle()
    redis, _ = servers
    redis.command("FLUSHALL")
    made.env.advance_ms(61_000)
    made.settle()
    assert made.condition("Stalled") == ("True", "StoreLost")


@pytest.mark.slow
def test_sinks_of_an_inline_shard_use_its_stores_and_its_secret(stores, make_shard, shard_resource):
    made, storage = stores
    resource = shard_resource({"storage": storage})
    made.cluster.create(PERSIST_SHARD, resource)
    view = ShardView.of("flights", make_shard({"storage": storage}, status=made.settle()), made.settings)
    assert view.usable
    assert isinstance(view.location, InlineLocation)
    assert {one.name for one in view.location.secrets} == {SECRET}


@pytest.mark.slow
def test_pods_evolve_the_schema_refuse_one_that_cannot_be_and_forget_it_when_the_spec_is_put_back(
    stores, shard_resource
):
    made, storage = stores
    made.cluster.create(
        PERSIST_SHARD, shard_resource({"storage": storage, "schema": {"key": "id BIGINT", "value": "x INT"}})
    )
    made.settle()
    shard_id = ShardId(made.status()["shardId"])

    def change(value):
        made.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"]["schema"].update(value=value))
        made.look()
        planned = made.condition()
        made.settle(rounds=3)
        return planned, made.condition(), made.status()["schema"]["value"]

    with client_of(made, made.cluster.get(PERSIST_SHARD, "team", "flights")) as client:
        with client.open_writer(shard_id, Schema.from_ddl("id BIGINT", "x INT"), purpose="test") as writer:
            writer.compare_and_append([(((7,), (70,)), 0, 1)], expected_upper=0, new_upper=1)
        grown = "x BIGINT, note STRING"
        assert change(grown) == (("False", "EvolvingSchema"), ("True", "Healthy"), grown)
        before = client.machine(shard_id).refresh().schemas
        assert change("x BIGINT") == (("False", "SchemaRefused"), ("False", "SchemaRefused"), grown)
        assert "note is dropped" in made.words()
        assert change(grown) == (("True", "Healthy"), ("True", "Healthy"), grown)
        assert made.condition("Stalled") is None
        assert client.machine(shard_id).refresh().schemas == before
        wider = Schema.from_ddl("id BIGINT", grown)
        with client.open_leased_reader(shard_id, wider, purpose="test") as reader, reader.snapshot(0) as snapshot:
            (batch,) = snapshot.to_batches()
            assert batch.column("val").to_pylist() == [{"x": 70, "note": None}]


@pytest.mark.slow
def test_pods_create_a_shard_with_the_codecs_of_the_spec_and_refuse_one_that_records_others(
    stores, shard_resource, refused
):
    made, storage = stores
    pinned = {"storage": storage, "codecs": {"key": "struct", "value": "struct"}}
    resource = shard_resource(pinned)
    made.cluster.create(PERSIST_SHARD, resource)
    status = made.settle()
    assert made.condition() == ("True", "Healthy")
    assert status["codecs"] == {"key": "struct", "value": "struct", "time": "u64", "diff": "i64"}
    assert refused(resource, status) == []
    shard_id = ShardId("s00000000-0000-0000-0000-00000000c0de")
    with client_of(made, resource) as client:
        client.adopt(Owner(made.settings.operator_id, "team", "other"), shard_id, shard_id)
        codecs, schema = CodecNames(key="row", val="struct"), Schema.from_ddl("id BIGINT")
        client.versions.maybe_init_shard(shard_id, codecs, schema.to_pair())
    other = shard_resource(
        {**pinned, "shardId": str(shard_id), "rollup": {"everySeqnos": 4}}, uid="uid-other", name="other"
    )
    made.cluster.create(PERSIST_SHARD, other)
    key = Key("PersistShard", "team", "other")
    status = made.settle(key)
    assert made.condition("Stalled", key) == ("True", "CodecMismatch")
    assert all(one in made.words("Stalled", key) for one in (str(shard_id), "key row", "key struct", "use a release"))
    assert refused(other, status) == []
    before = len(made.kubelet.arguments)
    made.settle(key, rounds=3)
    assert len(made.kubelet.arguments) == before, "a stalled shard is inspected less often"
    assert {one["metadata"]["labels"][names.LABEL_KIND] for one in made.cluster.find(JOB, None, {})} == {
        names.INSPECTION
    }


@pytest.mark.slow
def test_a_forged_report_is_a_condition_and_nothing_else(stores, shard_resource, refused):
    made, storage = stores
    resource = shard_resource({"storage": storage})
    made.cluster.create(PERSIST_SHARD, resource)
    made.settle()
    good = json.loads(
        made.cluster.find(POD, "team", {})[-1]["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    )
    forged = [
        "", "{}", "[" * 4000, '{"a":' * 600, "nonsense", "null", "[]", '{"format": 1}', f'{{"format": {FORMAT}, "answer": "Tended"}}',
        json.dumps({"format": FORMAT, "packed": "eJw="}), json.dumps({"format": FORMAT, "packed": "!"}),
        json.dumps({**good, "more": 1}), json.dumps({**good, "seqno": -1}), json.dumps({**good, "upper": 2**70}),
        json.dumps({**good, "seqno": 2**63 - 1}), json.dumps({**good, "upper": 2**64 - 1, "since": 2**64 - 1}),
        json.dumps({**good, "key_schema": "id BOGUS"}), json.dumps({**good, "shard_id": "../../x"}),
        json.dumps({"format": FORMAT, "answer": "OwnedElsewhere", "shard_id": good["shard_id"], "owner": "a/b"}),
        json.dumps({"format": FORMAT, "answer": "NotTended", "kind": "a b", "message": "x"}),
    ]  # fmt: skip
    for text in forged:
        made.env.advance_ms(400_000)
        made.look()
        (job,) = made.kubelet.waiting()
        made.kubelet.end(job, 0, text)
        with contextlib.suppress(BridgeFailure):
            made.look()
        assert made.condition() in {("Unknown", "InspectionFailed"), ("True", "Healthy"), ("False", "ShardLost")}, text
        assert refused(resource, made.status()) == [], text
    made.env.advance_ms(400_000)
    made.settle()
    assert made.cluster.find(JOB, None, {names.LABEL_KIND: "rollup"}) == []
