"""Inline shards, whose resource names its own stores. The commands of their pods run as real processes on real stores, and the
process of the operator connects to no store.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.codec.tending import decode_wish, encode_report
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import OwnedElsewhere, Owner
from persist_engine.model.tending import Tended
from persist_engine.rows.schema import Schema
from persist_engine.storage.addresses import with_credentials
from persist_kit.servers import redis_server, s3_server
from persist_operator.api import conditions, names, times
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import CREDENTIALS_DIR, InlineLocation, Shard
from persist_operator.bridge import Bridge, BridgeFailure
from persist_operator.cluster.port import EVENT, JOB, PERSIST_SHARD, POD, ApiError
from persist_operator.manifests.maintenance import TERMINATION_LOG
from persist_operator.plan import inspecting
from persist_operator.plan.actions import StartInspection
from persist_operator.plan.observed import Awaited, Phase, Run, ShardMissing, ShardObserved, ShardView
from persist_operator.plan.shard import plan_shard
from persist_operator.settings import InlineStorage, LoopSettings, OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

SHARD = Key("PersistShard", "team", "flights")
SECRET = "team-store"  # noqa: S105 - its name


class Kubelet:
    """Runs the Jobs of a cluster as processes of this machine and reports their ends as Kubernetes does."""

    def __init__(self, cluster, env, folder):
        self.cluster, self.env, self.folder = cluster, env, folder
        self.secrets, self.arguments, self.reports = {}, [], {}

    def mount(self, namespace, name, files):
        folder = self.folder / "secrets" / namespace / name
        folder.mkdir(parents=True)
        for key, text in files.items():
            (folder / key).write_text(text)
        self.secrets[namespace, name] = folder

    def jobs(self, kind=names.INSPECTION):
        found = self.cluster.find(JOB, None, {names.LABEL_KIND: kind})
        return sorted(found, key=lambda one: one["metadata"]["creationTimestamp"])

    def waiting(self, kind=names.INSPECTION):
        return [one for one in self.jobs(kind) if not one.get("status")]

    def run(self, kind=names.INSPECTION):
        """Run every waiting Job to its end. Returns their number."""
        todo = self.waiting(kind)
        for job in todo:
            spec = job["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            report = self.folder / f"{job['metadata']['name']}.report"
            volumes = [one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one]
            mounted = self.secrets.get((job["metadata"]["namespace"], volumes[0])) if volumes else None
            arguments = [
                one.replace(CREDENTIALS_DIR, str(mounted)).replace(TERMINATION_LOG, str(report))
                for one in container["args"]
            ]
            self.arguments.append(arguments)
            done = subprocess.run(
                [sys.executable, "-m", "persist_engine.cli", *arguments],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
            )
            message = report.read_text() if report.exists() else done.stderr
            self.end(job, done.returncode, message)
        return len(todo)

    def end(self, job, code, message, **terminated):
        name, namespace, now = job["metadata"]["name"], job["metadata"]["namespace"], times.to_text(self.env.now_ms())
        state = {"exitCode": code, "message": message[-4096:], "startedAt": now, "finishedAt": now, **terminated}
        self.pod(job, {"phase": "Failed" if code else "Succeeded"}, {"terminated": state})
        condition = {"type": "Failed" if code else "Complete", "status": "True", "lastTransitionTime": now}
        status = {"startTime": now, "completionTime": now, "conditions": [condition]}
        self.cluster.edit(JOB, namespace, name, lambda one: one.update(status=status))

    def pod(self, job, status, state):
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        labels = {**job["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
        metadata = {"namespace": namespace, "name": f"{name}-x", "labels": labels}
        self.cluster.create(POD, {"metadata": metadata})
        status = {**status, "containerStatuses": [{"name": "maintain", "state": state}]}
        self.cluster.edit(POD, namespace, f"{name}-x", lambda one: one.update(status=status))


class House:
    """An operator with inline storage on and no profile at all."""

    def __init__(self, now, folder, **inline):
        self.env = SeededEnv(start_ms=now)
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        self.kubelet = Kubelet(self.cluster, self.env, folder)
        self.settings = OperatorSettings(inline_storage=InlineStorage(enabled=True, **inline), loop=LoopSettings())
        self.opened = []
        self.restart()

    def restart(self):
        def open_client(location):
            self.opened.append(location)
            raise AssertionError("the operator connects to a store")

        self.bridge = Bridge(self.settings, env=self.env, open_client=open_client)
        metrics = OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, metrics)

    def look(self, key=SHARD):
        return self.reconciler.reconcile(key)

    def settle(self, key=SHARD, rounds=6):
        """Reconcile and run pods `rounds` times while time passes. Returns the status."""
        for _ in range(rounds):
            self.env.advance_ms(6000)
            self.look(key)
            self.kubelet.run()
            self.look(key)
        return self.status(key)

    def status(self, key=SHARD):
        return self.cluster.get(PERSIST_SHARD, key.namespace, key.name).get("status") or {}

    def condition(self, condition="Ready", key=SHARD):
        found = conditions.find(self.status(key), condition)
        return None if found is None else (found["status"], found["reason"])

    def words(self, condition="Ready", key=SHARD):
        return conditions.find(self.status(key), condition)["message"]


@pytest.fixture
def house(now, tmp_path):
    made = []

    def build(**inline):
        made.append(House(now, tmp_path, **inline))
        return made[-1]

    yield build
    for one in made:
        one.bridge.close()
        assert one.opened == []


@pytest.fixture(scope="module")
def servers():
    with redis_server(password="team's own") as redis, s3_server() as s3:  # noqa: S106
        yield redis, s3


@pytest.fixture
def stores(servers, house, request):
    """(house, spec.storage, a client with the team's credentials)."""
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
        },
        "consensus": {"address": redis.address, "keyPrefix": prefix},
        "secretName": SECRET,
    }
    return made, storage


def client_of(made, resource):
    location = Shard.of(resource).location(made.settings)
    folder = str(made.kubelet.secrets["team", SECRET])
    return PersistClient.open(
        Location(blob=with_credentials(location.blob, folder), consensus=with_credentials(location.consensus, folder))
    )


def test_pods_of_its_namespace_create_inspect_and_maintain_an_inline_shard(stores, shard_resource, refused):
    made, storage = stores
    resource = shard_resource({"storage": storage, "rollup": {"everySeqnos": 16}})
    assert load_schemas().check(resource) == []
    made.cluster.create(PERSIST_SHARD, resource)
    made.look()
    assert made.condition() == ("Unknown", "Inspecting")
    made.settle()
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


def test_a_lost_inline_shard_is_not_created_again(stores, servers, shard_resource):
    made, storage = stores
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.settle()
    redis, _ = servers
    redis.command("FLUSHALL")
    made.env.advance_ms(61_000)
    made.settle()
    assert made.condition("Stalled") == ("True", "StoreLost")


def test_sinks_of_an_inline_shard_use_its_stores_and_its_secret(stores, make_shard, shard_resource):
    made, storage = stores
    resource = shard_resource({"storage": storage})
    made.cluster.create(PERSIST_SHARD, resource)
    view = ShardView.of("flights", make_shard({"storage": storage}, status=made.settle()), made.settings)
    assert view.usable
    assert (type(view.location), view.location.secret_name) == (InlineLocation, SECRET)


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
    report = {"format": 1, "answer": "OwnedElsewhere", "shard_id": shard_id, "owner": owner}
    made.kubelet.end(job, 0, json.dumps(report))
    requests = made.cluster.record()
    made.look()
    assert {request.arguments for request in requests if request.verb == "get"} == {(PERSIST_SHARD, "team", "flights")}
    assert made.condition() == (("False", "ShardIdConflict") if name else ("Unknown", "InspectionFailed"))


# -- what may be named ------------------------------------------------------------------------------------------------

GOOD = {"blob": {"bucket": "bbb", "endpoint": "https://s3.example"}, "consensus": {"address": "redis.example:6379"}}
ALLOWED = {
    "allowed_endpoints": ("s3.example", "*.minio.svc:9000"),
    "allowed_consensus": ("redis.example", "*.redis.svc:7000"),
}


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
        ({"secretName": "other"}, "SecretNotAllowed"),
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
    storage = {"blob": blob, "consensus": consensus}
    if "secretName" in change:
        storage["secretName"] = change["secretName"]
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


# -- forged reports ---------------------------------------------------------------------------------------------------


def test_a_forged_report_is_a_condition_and_nothing_else(stores, shard_resource, refused):
    made, storage = stores
    resource = shard_resource({"storage": storage})
    made.cluster.create(PERSIST_SHARD, resource)
    made.settle()
    good = json.loads(
        made.cluster.find(POD, "team", {})[-1]["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    )
    forged = [
        "", "{}", "[" * 4000, '{"a":' * 600, "nonsense", "null", "[]", '{"format": 2}', '{"format": 1, "answer": "Tended"}',
        json.dumps({"format": 1, "packed": "eJw="}), json.dumps({"format": 1, "packed": "!"}),
        json.dumps({**good, "more": 1}), json.dumps({**good, "seqno": -1}), json.dumps({**good, "upper": 2**70}),
        json.dumps({**good, "seqno": 2**63 - 1}), json.dumps({**good, "upper": 2**64 - 1, "since": 2**64 - 1}),
        json.dumps({**good, "key_schema": "id BOGUS"}), json.dumps({**good, "shard_id": "../../x"}),
        json.dumps({"format": 1, "answer": "OwnedElsewhere", "shard_id": good["shard_id"], "owner": "a/b"}),
        json.dumps({"format": 1, "answer": "NotTended", "kind": "a b", "message": "x"}),
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
