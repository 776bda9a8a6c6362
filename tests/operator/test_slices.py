"""Replicas that share the resources: the division, which of them are alive, hand-over, and that nothing depends on the division being right."""

import threading
from collections import Counter

import pytest
from fake_cluster import FakeCluster
from hypothesis import given
from hypothesis import strategies as st
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_operator.api import conditions, names
from persist_operator.api.names import ANNOTATION_STARTS
from persist_operator.bridge import Bridge
from persist_operator.cluster.informed import Informed
from persist_operator.cluster.membership import SLICES, Membership, divided, slice_of
from persist_operator.cluster.port import LEASE, PERSIST_SHARD, ApiError
from persist_operator.handlers.controller import Controller
from persist_operator.plan.waiting.places import Place
from persist_operator.settings import (
    AllowedNamespaces,
    LeaderSettings,
    LimitSettings,
    OperatorSettings,
    ShardingSettings,
    StorageProfile,
)
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.places import Places, Queued
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

LEADER, SHARDING = LeaderSettings(namespace="operator"), ShardingSettings(enabled=True)
EVERY = frozenset(range(SLICES))


@pytest.fixture
def env():
    return SeededEnv()


@pytest.fixture
def cluster(env):
    return FakeCluster(now_ms=env.now_ms)


@pytest.fixture
def member(cluster, env):
    return lambda name: Membership(cluster, LEADER, SHARDING, env, member=name)


def settle(env, *members, seconds=4):
    """The slices of each after `seconds` of looks, each second."""
    for _ in range(seconds):
        env.advance_ms(1000)
        for one in members:
            one.tick()
    return [one.tick() for one in members]


# -- the division -----------------------------------------------------------------------------------------------------


@given(st.frozensets(st.text(min_size=1, max_size=8), min_size=1, max_size=SLICES + 6))
def test_each_slice_has_one_owner_and_no_member_has_more_than_its_share(members):
    owners = divided(members)
    assert owners.keys() == EVERY
    assert max(Counter(owners.values()).values()) <= -(-SLICES // len(members))


@given(st.frozensets(st.text(min_size=1, max_size=8), min_size=3, max_size=8))
def test_most_slices_stay_when_a_member_goes(members):
    gone = min(members)
    before, after = divided(members), divided(members - {gone})
    moved = sum(1 for number in EVERY if before[number] not in {gone, after[number]})
    assert moved <= SLICES // 2


def test_the_slice_of_a_name_never_changes():
    """Replicas of two versions run side by side during a rollout."""
    assert [slice_of("team", name) for name in ("flights", "airlines", "a")] == [49, 1, 46]
    assert len({slice_of("team", f"s{number}") for number in range(2000)}) == SLICES


# -- which are alive --------------------------------------------------------------------------------------------------


def test_members_divide_all_slices_and_a_late_one_gets_its_share(env, member):
    one, two = member("one"), member("two")
    assert one.tick() == frozenset(), "the others must see it first"
    first, second = settle(env, one, two)
    assert (len(first), len(second)) == (32, 32)
    assert first | second == EVERY
    shares = settle(env, one, two, late := member("late"))
    assert frozenset().union(*shares) == EVERY
    assert sum(map(len, shares)) == SLICES
    assert late.is_member


@pytest.mark.parametrize("spec", [None, "text", {"leaseDurationSeconds": 2**31 - 1}, {"leaseDurationSeconds": "long"}, {"leaseDurationSeconds": float("nan")}])  # fmt: skip
def test_a_stray_lease_takes_its_share_for_minutes_at_most_and_stops_no_replica(env, cluster, member, spec):
    one = member("one")
    settle(env, one)
    labels = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_MEMBER_OF: LEADER.lease_name}
    head = {"namespace": LEADER.namespace, "name": f"{LEADER.lease_name}-stray", "labels": labels}
    spec = {"holderIdentity": "stray", **spec} if isinstance(spec, dict) else spec
    assert cluster.create(LEASE, {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": head, "spec": spec})
    assert len(one.tick()) >= SLICES // 2
    assert settle(env, one, seconds=125) == [EVERY]


def test_a_late_member_owns_nothing_before_the_others_have_let_go(env, member):
    one = member("one")
    settle(env, one)
    late = member("late")
    late.tick()
    env.advance_ms(1000)
    assert late.tick() == frozenset()
    kept = one.tick()
    assert len(kept) == 32
    assert not settle(env, one, late)[1] & kept


def test_a_dead_member_loses_its_slices_within_its_lease_and_not_before(env, member):
    one, two = member("one"), member("two")
    settle(env, one, two)
    waited = 0
    while one.tick() != EVERY:
        env.advance_ms(1000)
        waited += 1
    assert 7 <= waited <= 14


def test_a_member_that_leaves_is_replaced_at_the_next_look(env, member):
    one, two = member("one"), member("two")
    settle(env, one, two)
    two.leave()
    assert not two.is_member
    assert one.tick() == EVERY


def test_a_member_without_the_api_server_owns_nothing_after_its_lease(env, cluster, member):
    one = member("one")
    settle(env, one)
    cluster.deny = {(verb, "Lease"): ApiError("down", status=503) for verb in ("get", "find", "replace")}
    env.advance_ms(5000)
    assert one.tick() == EVERY, "an outage that is shorter than the Lease moves nothing"
    env.advance_ms(6000)
    assert one.tick() == frozenset()
    assert not one.is_member
    cluster.deny = {}
    assert settle(env, one) == [EVERY]


def test_the_lease_belongs_to_its_pod(env, cluster):
    Membership(cluster, LEADER, SHARDING, env, member="pod-1", pod_uid="uid-1").tick()
    owner = cluster.get(LEASE, "operator", "persist-operator-pod-1")["metadata"]["ownerReferences"]
    assert owner == [{"apiVersion": "v1", "kind": "Pod", "name": "pod-1", "uid": "uid-1"}]


@pytest.mark.parametrize("wrong", [{"renew_seconds": 6}, {"poll_seconds": 4}, {"poll_seconds": 0}])
def test_times_that_do_not_fit_are_refused(wrong):
    with pytest.raises(InvalidUsage, match="sharding"):
        ShardingSettings(**wrong)


# -- limits over all replicas -----------------------------------------------------------------------------------------


def test_two_replicas_never_take_the_same_place(env, cluster):
    """Each counts what runs by lists that show none of the starts yet."""
    settings = OperatorSettings(limits=LimitSettings(total=3), leader=LEADER, sharding=SHARDING)
    replicas = [Places(cluster, settings, env) for _ in range(3)]
    taken = 0
    for number in range(12):
        start = Place(namespace="team", name=f"run-{number}", kind="maintenance", store="s")
        try:
            replicas[number % 3].enter(start)
            taken += 1
        except Queued:
            pass
    assert taken == 3


@pytest.mark.parametrize(
    "text",
    ["", "5", "{}", "[null]", "[{}]", '[{"atMs":Infinity}]', "[" * 100_000, '[{"atMs":NOW,"namespace":[],"name":"a","kind":"driver","store":"s"}]'],
    ids=range(8),
)  # fmt: skip
def test_starts_that_are_no_list_of_starts_count_as_none_and_are_replaced(env, cluster, text):
    """Otherwise no replica could start anything until a person removes the annotation."""
    settings = OperatorSettings(limits=LimitSettings(total=1), leader=LEADER, sharding=SHARDING)
    notes = {ANNOTATION_STARTS: text.replace("NOW", str(env.now_ms()))}
    head = {"namespace": "operator", "name": f"{LEADER.lease_name}-starts", "annotations": notes}
    cluster.create(LEASE, {"metadata": head, "spec": {}})
    Places(cluster, settings, env).enter(Place(namespace="team", name="a", kind="driver", store="s"))
    with pytest.raises(Queued):
        Places(cluster, settings, env).enter(Place(namespace="team", name="b", kind="driver", store="s"))


def test_a_place_that_another_replica_takes_in_between_is_not_taken_twice(env, cluster):
    settings = OperatorSettings(limits=LimitSettings(total=1), leader=LEADER, sharding=SHARDING)
    one, two = Places(cluster, settings, env), Places(cluster, settings, env)
    asked, send = [], cluster.intercept

    def between(request):
        if request.kind == "Lease" and request.verb in {"create", "replace"} and not asked:
            asked.append(True)
            two.enter(Place(namespace="team", name="other", kind="driver", store="s"))
        return send(request)

    cluster.intercept = between
    with pytest.raises(Queued):
        one.enter(Place(namespace="team", name="mine", kind="driver", store="s"))
    assert asked


# -- controllers ------------------------------------------------------------------------------------------------------


class House:
    """One replica: its own copies, stores and metrics, on a cluster that it shares."""

    def __init__(self, cluster, location, env):
        profile = StorageProfile(
            blob=location.blob, consensus=location.consensus, allowed_namespaces=AllowedNamespaces(names=("team",))
        )
        self.settings = OperatorSettings(storage_profiles={"default": profile})
        self.registry, informed = CollectorRegistry(), Informed()
        self.metrics = OperatorMetrics(self.registry)
        self.bridge = Bridge(self.settings, env=env)
        reconciler = Reconciler(cluster, self.bridge, self.settings, env, self.metrics, informed=informed)
        self.controller = Controller(reconciler, cluster, self.settings, env, self.metrics, informed=informed)

    def shown(self):
        families = [one for one in self.registry.collect() if one.name == "persist_shard_ready"]
        return {sample.labels["name"] for one in families for sample in one.samples}


@pytest.fixture
def houses(tmp_path):
    location = Location(blob=f"file://{tmp_path}/blob", consensus=f"sqlite://{tmp_path}/consensus.db")
    env = SystemEnv()
    cluster = FakeCluster(now_ms=env.now_ms)
    made = [House(cluster, location, env) for _ in range(2)]
    yield cluster, location, made
    for house in made:
        house.controller.stop()
        house.bridge.close()


def wait(holds, seconds=100):
    done = threading.Event()
    for _ in range(seconds * 20):
        if holds():
            return
        done.wait(0.05)
    raise AssertionError("it did not happen")


def ready(cluster, names):
    found = [cluster.get(PERSIST_SHARD, "team", name) for name in names]
    return all(conditions.is_true(one.get("status") or {}, "Ready") for one in found)


@pytest.mark.slow
def test_two_replicas_that_both_believe_to_own_all_create_nothing_twice(houses, shard_resource):
    cluster, location, (one, two) = houses
    names = [f"s{number}" for number in range(12)]
    rollup = {"persistshard.io/request-rollup": "a"}
    for name in names:
        made = shard_resource(name=name, uid=f"uid-{name}")
        made["metadata"]["annotations"] = rollup
        cluster.create(PERSIST_SHARD, made)
    created, send = Counter(), cluster.intercept

    def counted(request):
        answer = send(request)
        if request.verb == "create" and answer:
            created[request.kind, request.arguments[1]["metadata"]["name"]] += 1
        return answer

    cluster.intercept = counted
    for house in (one, two):
        house.controller.own(EVERY)
        house.controller.start()
    wait(lambda: ready(cluster, names))

    def rollups():
        return [name for kind, name in list(created) if kind == "Job" and "rollup" in name]

    wait(lambda: len(rollups()) >= len(names))
    assert max(created.values()) == 1
    assert len(rollups()) == len(names)
    ids = {cluster.get(PERSIST_SHARD, "team", name)["status"]["shardId"] for name in names}
    with PersistClient.open(location) as client:
        assert {str(one) for one in client.shards()} == ids
        assert all(client.owner_of(ShardId(one)) for one in ids)


@pytest.mark.slow
def test_a_slice_that_moves_takes_its_keys_and_their_series_along(houses, shard_resource):
    cluster, _, (one, two) = houses
    names = [f"s{number}" for number in range(6)]
    for name in names:
        cluster.create(PERSIST_SHARD, shard_resource(name=name, uid=f"uid-{name}"))
    mine = frozenset(slice_of("team", name) for name in names[:3])
    others = {name for name in names if slice_of("team", name) not in mine}
    one.controller.own(mine)
    two.controller.own(EVERY - mine)
    for house in (one, two):
        house.controller.start()
    wait(lambda: ready(cluster, names))
    wait(lambda: one.shown() == set(names) - others and two.shown() == others)
    one.controller.own(EVERY)
    two.controller.own(frozenset())
    wait(lambda: one.shown() == set(names) and two.shown() == set())
    # What another replica owns is dropped, whatever an event says.
    two.controller.changed(cluster.get(PERSIST_SHARD, "team", names[0]))
    two.controller.export()
    assert two.registry.get_sample_value("persist_operator_queue_depth") == 0


def test_a_gained_slice_is_read_live_until_its_list_is_complete(cluster, shard_resource):
    informed = Informed()
    listing = informed.begin_list(PERSIST_SHARD, None)
    informed.unlist()
    informed.note({"kind": "PersistShard", **shard_resource()})
    informed.end_list(listing, {("team", "flights")}, is_last=True)
    assert informed.resource(PERSIST_SHARD, "team", "flights") is None, "the list began before the slice was gained"
    listing = informed.begin_list(PERSIST_SHARD, None)
    informed.end_list(listing, {("team", "flights")}, is_last=True)
    assert informed.resource(PERSIST_SHARD, "team", "flights") is not None


def test_a_key_of_another_replica_is_let_go_and_not_reconciled(houses, shard_resource):
    cluster, _, (one, _) = houses
    cluster.create(PERSIST_SHARD, shard_resource())
    one.controller.own(EVERY - {slice_of("team", "flights")})
    requests = cluster.record()
    one.controller.news(Key("PersistShard", "team", "flights"), 0.0)
    one.controller.start()
    wait(lambda: one.controller.waits_for is None)
    assert [request.verb for request in requests if request.verb in {"apply_status", "get"}] == []
