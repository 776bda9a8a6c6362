"""The deletion of a resource with its shard: what waits for what, the finalizer, and what is left in the stores."""

from dataclasses import replace
from itertools import pairwise

import pytest
from fake_cluster import FakeCluster
from inline_house import ALLOWED, GOOD
from persist_engine.base.env import SeededEnv
from persist_engine.cli.main import application
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions, names, times
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.manifests import maintenance
from persist_operator.plan.actions import KeepFinalizer, StartReclaim
from persist_operator.plan.keeping import reclaiming
from persist_operator.plan.observed import ActionFailure, NotInspected, Phase, Run, ShardObserved, StoreFailure
from persist_operator.plan.shard import plan_shard
from persist_operator.settings import AllowedNamespaces, InlineStorage, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

SHARD_ID = names.shard_id_of("uid-shard")
PURGE = {"reclaimPolicy": "Purge", "deletionConfirmation": "purge-this-shard"}
GOING = {"deletionTimestamp": "2026-11-20T00:00:00Z", "finalizers": [names.FINALIZER]}


@pytest.fixture
def plan(make_shard, settings, now):
    def make(
        spec=PURGE, *, status=None, runs=(), sinks=(), failures=(), at=now, inspected=None, shard_id=None, **metadata
    ):
        status = {"shardId": SHARD_ID} if status is None else status
        shard = make_shard(dict(spec), status=status, **{**GOING, **metadata})
        observed = ShardObserved(
            runs=tuple(runs),
            sinks=tuple(sinks),
            failures=dict(failures),
            inspected=inspected or NotInspected(),
            shard_id=shard_id,
        )
        return plan_shard(shard, observed, now_ms=at, settings=settings)

    return make


def blocked(plan):
    found = conditions.find(plan.status, "DeletionBlocked")
    return None if found is None else (found["status"], found["reason"])


def ended(start, now, *, phase=Phase.SUCCEEDED, **report):
    return Run(
        name=start.name, kind="reclaim", phase=phase, created_ms=now, started_ms=now,
        finished_ms=now + 1000 if phase.finished else None, report=report or None,
    )  # fmt: skip


@pytest.mark.parametrize("spec", [{}, {"reclaimPolicy": "Tombstone"}, PURGE])
@pytest.mark.parametrize("has", [False, True])
def test_only_a_policy_that_deletes_has_the_finalizer(plan, make_shard, spec, has):
    finalizers = ["other/one", *([names.FINALIZER] if has else [])]
    shard = make_shard(spec, finalizers=finalizers)
    given = plan(spec, finalizers=finalizers, deletionTimestamp=None)
    changed = [one for one in reclaiming.with_finalizer(given, shard).actions if isinstance(one, KeepFinalizer)]
    assert changed == ([] if has == bool(spec) else [KeepFinalizer(present=bool(spec))])


def test_a_run_that_does_not_start_says_what_its_pod_waits_for(plan, now):
    (start,) = plan().actions
    status = plan().status

    def message(**changes):
        run = replace(ended(start, now, phase=Phase.PENDING), **changes)
        return conditions.find(plan(status=status, runs=[run], at=now + 61_000).status, "DeletionBlocked")["message"]

    assert f"{start.name} does not start: its pod waits for a node or for a volume, such as a Secret" in message()
    assert "does not start: ImagePullBackOff: no image" in message(reason="ImagePullBackOff", message="no image")
    assert message(phase=Phase.RUNNING) == f"{start.name} is under way"


def test_a_retained_shard_is_let_go_and_no_store_is_touched(plan):
    assert plan({}).actions == (KeepFinalizer(present=False),)
    assert plan({}, finalizers=[]).actions == ()
    assert plan(PURGE, finalizers=[]).actions == (), "the finalizer is gone: there is nothing to wait for"


def test_a_resource_that_never_had_a_shard_is_let_go(plan):
    assert plan(PURGE, status={"conditions": []}).actions == (KeepFinalizer(present=False),)


def test_a_resource_without_a_status_waits_for_the_stores_to_say_which_shard_it_has(plan, now):
    down = plan(status={}, inspected=StoreFailure(reason="StorageUnreachable", message="redis://r:1/0 does not answer"))
    assert (down.actions, blocked(down)) == ((), ("True", "PurgeIncomplete"))
    assert "redis://r:1/0 does not answer" in conditions.find(down.status, "DeletionBlocked")["message"]
    found = plan(status=down.status, shard_id=SHARD_ID)
    assert (found.actions[0].shard_id, found.status["shardId"]) == (SHARD_ID, SHARD_ID)
    refused = {**PURGE, "storageProfile": "gone"}
    assert plan(refused, status={}).actions == (KeepFinalizer(present=False),), "it never had a store"


@pytest.mark.parametrize(
    ("spec", "status", "starts"),
    [
        ({}, {}, True),
        ({"shardId": SHARD_ID}, {}, True),
        ({}, {"inspection": {"jobName": "flights-inspect-1"}}, True),
        ({}, {"observedGeneration": 1}, False),
    ],
)
def test_the_pod_asks_inline_storage_for_the_shard_unless_none_can_have_been_claimed(
    make_shard, now, spec, status, starts
):
    settings = OperatorSettings(inline_storage=InlineStorage(enabled=True, **ALLOWED))
    shard = make_shard({**PURGE, **spec, "storage": GOOD}, status=status, **GOING)
    (action,) = plan_shard(shard, ShardObserved(), now_ms=now, settings=settings).actions
    assert isinstance(action, StartReclaim) == starts
    if starts:
        assert action.shard_id == spec.get("shardId")
        arguments = maintenance.reclaim_arguments(action, "b", "c")
        assert ("--shard" in arguments, "--own-hold" in arguments) == (bool(spec), bool(spec))
    else:
        assert action == KeepFinalizer(present=False)


@pytest.mark.parametrize(("spec", "purge"), [({"reclaimPolicy": "Tombstone"}, False), (PURGE, True)])
def test_the_run_reclaims_by_the_policy_and_its_intent_is_stored_first(plan, settings, spec, purge):
    planned = plan({**spec, "gc": {"maxDeletesPerRun": 9}})
    (start,) = planned.actions
    assert isinstance(start, StartReclaim)
    assert (start.shard_id, start.purge, start.deletes_max) == (SHARD_ID, purge, 9)
    assert ("--own-hold", names.critical_id_of(SHARD_ID)) in pairwise(maintenance.reclaim_arguments(start, "b", "c"))
    assert start.owner == f"{settings.operator_id.replace('/', '%2F')}/team/flights"
    assert planned.status["deletion"]["jobName"] == start.name == "flights-reclaim-1"
    assert blocked(planned) == ("True", "PurgeIncomplete")
    again = plan(spec, status=planned.status)
    assert again.actions[0].name == start.name, "a run that was intended keeps its name"


def test_sinks_that_refer_to_the_shard_come_first(plan):
    planned = plan(sinks=["load", "copy"])
    assert (planned.actions, blocked(planned)) == ((), ("True", "SinksAttached"))
    assert "load, copy" in conditions.find(planned.status, "DeletionBlocked")["message"]
    assert len(plan(status=planned.status).actions) == 1


def test_readers_that_hold_the_shard_are_named_and_it_is_tried_again(plan, now):
    first = plan()
    text = "since is held at {3} by reader r1 (report), its lease ends in 60 s"
    run = ended(first.actions[0], now, verdict="Held", message=text)
    held = plan(status=first.status, runs=[run])
    assert (held.actions, blocked(held)) == ((), ("True", "ReadersHold"))
    assert "r1 (report)" in conditions.find(held.status, "DeletionBlocked")["message"]
    assert plan(status=held.status, runs=[run], at=now + 30_000).status == held.status
    (again,) = plan(status=held.status, runs=[run], at=now + 61_000).actions
    assert again.name == "flights-reclaim-2"


def test_an_incomplete_purge_goes_on_at_once(plan, now):
    first = plan()
    run = ended(first.actions[0], now, verdict="Incomplete", message="stopped at the limit of deletes")
    (again,) = plan(status=first.status, runs=[run]).actions
    assert again.name == "flights-reclaim-2"


@pytest.mark.parametrize("verdict", ["Reclaimed", "NotOwned", "NoShard"])
def test_the_finalizer_goes_when_nothing_is_left_to_do(plan, now, verdict):
    first = plan()
    done = plan(status=first.status, runs=[ended(first.actions[0], now, verdict=verdict, message="done")])
    assert done.actions == (KeepFinalizer(present=False),)


@pytest.mark.parametrize(
    "report",
    [{}, {"outcome": "Failed", "message": "Unavailable: s3"}, {"verdict": "Fine", "message": "Unavailable: s3"}],
)
def test_a_run_that_failed_is_repeated_later_and_later(plan, now, report):
    planned, waits = plan(), []
    for _ in range(3):
        (start,) = planned.actions
        at = now + sum(waits) * 1000
        run = ended(start, at, phase=Phase.FAILED, **report)
        planned = plan(status=planned.status, runs=[run], at=at)
        assert (planned.actions, blocked(planned)) == ((), ("True", "PurgeIncomplete"))
        waits.append((times.to_ms(planned.status["deletion"]["nextAttemptTime"]) - at) // 1000)
        planned = plan(status=planned.status, runs=[run], at=at + waits[-1] * 1000)
    assert waits == [10, 20, 40]


def test_a_run_under_way_is_left_alone(plan, now):
    first = plan()
    going = plan(status=first.status, runs=[ended(first.actions[0], now, phase=Phase.RUNNING)])
    assert (going.actions, blocked(going)) == ((), ("True", "PurgeIncomplete"))


def test_a_start_that_the_api_server_refuses_is_shown_and_repeated(plan, now):
    failure = ActionFailure(reason="ActionRefused", message="namespace is being terminated", permanent=False, at_ms=now)
    failures = {"StartReclaim": failure}
    soon, later = plan(failures=failures, at=now + 1000), plan(failures=failures, at=now + 11_000)
    assert soon.actions == ()
    assert "being terminated" in conditions.find(soon.status, "DeletionBlocked")["message"]
    assert len(later.actions) == 1


def test_a_profile_that_is_gone_blocks_the_deletion(plan):
    planned = plan({**PURGE, "storageProfile": "gone"})
    assert (planned.actions, blocked(planned)) == ((), ("True", "PurgeIncomplete"))


def test_the_statuses_fit_the_crd(plan, now, shard_resource, refused):
    first = plan()
    held = plan(status=first.status, runs=[ended(first.actions[0], now, verdict="Held", message="x" * 9000)])
    for one in (first, held):
        assert refused(shard_resource(dict(PURGE)), one.status) == []
    assert len(names.reclaim_name("a" * 40, 10**12)) <= 63


class House:
    """An operator over a cluster in memory and stores on files. Jobs are carried out by `carry_out`."""

    def __init__(self, folder, now, spec, shard_resource):
        self.folder, self.env = folder, SeededEnv(start_ms=now)
        self.urls = (f"file://{folder}/blobs", f"sqlite://{folder}/log.db")
        stores = StorageProfile(
            blob=self.urls[0], consensus=self.urls[1], allowed_namespaces=AllowedNamespaces(names=("team",))
        )
        self.settings = OperatorSettings(storage_profiles={"default": stores})
        self.cluster, self.key = FakeCluster(now_ms=self.env.now_ms), Key("PersistShard", "team", "flights")
        self.cluster.create(PERSIST_SHARD, shard_resource(dict(spec)))
        self.bridge = Bridge(self.settings, env=self.env)
        self.reconciler = Reconciler(
            self.cluster, self.bridge, self.settings, self.env, OperatorMetrics(CollectorRegistry())
        )

    def client(self):
        return PersistClient.open(Location(blob=self.urls[0], consensus=self.urls[1]))

    def look(self, times_=4, seconds=6):
        for _ in range(times_):
            self.env.advance_ms(1000 * seconds)
            self.reconciler.reconcile(self.key)
        return self.cluster.get(PERSIST_SHARD, "team", "flights")

    def blocked(self):
        found = conditions.find(self.look()["status"], "DeletionBlocked")
        return found["reason"], found["message"]

    def carry_out(self):
        """Run the commands of the Jobs that have not ended, and let their pods report."""
        for job in self.cluster.find(JOB, "team", {names.LABEL_KIND: names.RECLAIM}):
            name, head = job["metadata"]["name"], job["metadata"]
            if (job.get("status") or {}).get("conditions"):
                continue
            report = self.folder / f"{name}.json"
            args = job["spec"]["template"]["spec"]["containers"][0]["args"]
            args = [str(report) if one == maintenance.TERMINATION_LOG else one for one in args]
            assert CliRunner().invoke(application(), args).exit_code == 0
            at = times.to_text(self.env.now_ms())
            ended = {"exitCode": 0, "startedAt": at, "finishedAt": at, "message": report.read_text()}
            labels = {**head["labels"], "batch.kubernetes.io/job-name": name}
            pod = {
                "metadata": {"namespace": "team", "name": f"{name}-x", "labels": labels},
                "status": {
                    "phase": "Succeeded",
                    "containerStatuses": [{"name": names.MAINTENANCE_CONTAINER, "state": {"terminated": ended}}],
                },
            }
            self.cluster.create(POD, pod)
            done = {"type": "Complete", "status": "True", "lastTransitionTime": at}
            self.cluster.edit(JOB, "team", name, lambda one, done=done: one.update(status={"conditions": [done]}))

    def parts(self):
        return list((self.folder / "blobs" / SHARD_ID).glob("n*/p*"))


@pytest.fixture
def house(tmp_path, now, shard_resource):
    made = House(tmp_path, now, {**PURGE, "schema": {"key": "id BIGINT", "value": "x INT"}}, shard_resource)
    yield made
    made.bridge.close()


def test_a_purge_waits_for_sinks_and_readers_then_leaves_no_data_and_a_free_name(house, sink_resource):
    schema = Schema.from_ddl("id BIGINT", "x INT")
    assert house.look()["metadata"]["finalizers"] == [names.FINALIZER]
    with house.client() as client, client.open_writer(ShardId(SHARD_ID), schema, purpose="test") as writer:
        rows = [(((key,), (key,)), 0, 1) for key in range(20_000)]
        writer.compare_and_append(rows, expected_upper=0, new_upper=1)
    assert house.parts()
    house.cluster.create(SPARK_SINK, sink_resource())
    assert house.cluster.delete(PERSIST_SHARD, "team", "flights")
    assert house.blocked()[0] == "SinksAttached"
    house.cluster.delete(SPARK_SINK, "team", "load")
    with house.client() as client, client.open_leased_reader(ShardId(SHARD_ID), purpose="nightly report") as reader:
        house.look(seconds=31)
        house.carry_out()
        reason, message = house.blocked()
        assert (reason, "nightly report" in message, reader.reader_id in message) == ("ReadersHold", True, True)
        assert house.parts(), "nothing is deleted under a reader"
    house.look(seconds=31)
    house.carry_out()
    assert house.look() is None, "the finalizer is gone, and with it the resource"
    assert house.parts() == []
    with house.client() as client:
        assert client.owner_of(ShardId(SHARD_ID)) is None
        assert client.is_finalized(ShardId(SHARD_ID))


def test_a_policy_that_goes_back_to_retain_removes_the_finalizer(house):
    house.look()

    def retain(one):
        one["spec"]["reclaimPolicy"] = "Retain"
        del one["spec"]["deletionConfirmation"]

    house.cluster.edit(PERSIST_SHARD, "team", "flights", retain)
    assert house.look()["metadata"]["finalizers"] == []
    assert house.cluster.delete(PERSIST_SHARD, "team", "flights")
    assert house.look(2) is None
    with house.client() as client:
        assert not client.is_finalized(ShardId(SHARD_ID))


@pytest.mark.parametrize("is_restored", [True, False], ids=["restored", "never seen"])
def test_a_resource_that_lost_its_status_is_purged_all_the_same(house, is_restored):
    """A backup brings resources back with their finalizers and without their statuses, under another uid."""
    house.look()
    assert len(list((house.folder / "blobs" / SHARD_ID).iterdir())) > 0

    def restored(one):
        one.pop("status")
        one["metadata"].update(uid="uid-other")
        if not is_restored:
            one["metadata"].update(name="new")

    kept = house.cluster.stored("PersistShard", "team", "flights")
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(finalizers=[]))
    house.cluster.delete(PERSIST_SHARD, "team", "flights")
    restored(kept)
    house.cluster.create(PERSIST_SHARD, kept)
    name = kept["metadata"]["name"]
    house.key = Key("PersistShard", "team", name)
    assert house.cluster.delete(PERSIST_SHARD, "team", name)
    house.look(seconds=31)
    house.carry_out()
    house.look(seconds=31)
    assert house.cluster.get(PERSIST_SHARD, "team", name) is None
    with house.client() as client:
        assert client.is_finalized(ShardId(SHARD_ID)) == is_restored


def readiness_of_another(house, shard_resource, **annotations):
    """Of another resource of the namespace that names the shard, and its message."""
    other = shard_resource(
        {"shardId": SHARD_ID, "schema": {"key": "id BIGINT", "value": "x INT"}}, name="other", uid="uid-other"
    )
    other["metadata"]["annotations"] = annotations
    if house.cluster.get(PERSIST_SHARD, "team", "other") is None:
        house.cluster.create(PERSIST_SHARD, other)
    for _ in range(4):
        house.env.advance_ms(6000)
        house.reconciler.reconcile(Key("PersistShard", "team", "other"))
    found = conditions.find(house.cluster.get(PERSIST_SHARD, "team", "other")["status"], "Ready")
    return (found["status"], found["reason"]), found["message"]


@pytest.mark.parametrize("annotations", [{}, {names.ANNOTATION_TAKE_OVER: SHARD_ID}])
def test_no_other_resource_takes_a_shard_over_while_it_is_purged(house, shard_resource, annotations):
    """It would write rows that the purge deletes a moment later: its pod asks for the owner once, before it begins."""
    house.look()
    house.cluster.delete(PERSIST_SHARD, "team", "flights")
    ready, message = readiness_of_another(house, shard_resource, **annotations)
    assert ready == ("False", "ShardIdConflict")
    assert "is being deleted" in message
    assert "reclaimPolicy to Retain" in message
    assert "annotate" not in message
    with house.client() as client:
        assert client.owner_of(ShardId(SHARD_ID)).name == "flights"
    house.look(seconds=31)
    house.carry_out()
    assert house.look() is None


def test_a_shard_that_is_retained_may_be_taken_over_while_its_resource_goes(house, shard_resource):
    house.look()
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(reclaimPolicy="Retain"))
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(finalizers=["other/one"]))
    house.cluster.delete(PERSIST_SHARD, "team", "flights")
    assert readiness_of_another(house, shard_resource)[0] == ("True", "Healthy")


def test_a_purge_that_is_given_up_leaves_the_shard_to_be_taken_over(house, shard_resource):
    house.look()
    house.cluster.delete(PERSIST_SHARD, "team", "flights")
    taken = {names.ANNOTATION_TAKE_OVER: SHARD_ID}
    assert readiness_of_another(house, shard_resource, **taken)[0] == ("False", "ShardIdConflict")
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(reclaimPolicy="Retain"))
    house.look()
    assert readiness_of_another(house, shard_resource)[0] == ("True", "Healthy")


def test_a_purge_that_is_given_up_too_late_is_waited_for(house, shard_resource):
    """Its pod goes on. Another owner would write rows that it deletes."""
    house.look()
    house.cluster.delete(PERSIST_SHARD, "team", "flights")
    house.look()
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(reclaimPolicy="Retain"))
    reason, message = house.blocked()
    assert reason == "PurgeIncomplete"
    assert "flights-reclaim-1 is under way" in message
    assert readiness_of_another(house, shard_resource)[0] == ("False", "ShardIdConflict")
    house.carry_out()
    assert house.look(seconds=31) is None
