"""Which of the waiting starts may begin: the order, the limits, and what the objects say while they wait."""

import dataclasses

import pytest
from fake_cluster import FakeCluster
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import InvalidUsage
from persist_operator.api import conditions, names
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK, ApiError
from persist_operator.plan.waiting.places import Place, Wait, wait_of
from persist_operator.settings import (
    AllowedNamespaces,
    LimitSettings,
    OperatorSettings,
    ShardingSettings,
    StorageProfile,
)
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.places import Places, Queued
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry


def place(name, kind="driver", *, namespace="a", store="s", **more):
    return Place(namespace=namespace, name=name, kind=kind, store=store, **more)


def first_of(waiting, limits):
    """The names of those that wait, in the order in which they go through a single place."""
    order, left = [], list(waiting)
    while left:
        (free,) = [one for one in left if wait_of(one, [two for two in left if two != one], [], limits) is None]
        order.append(free.name)
        left.remove(free)
    return order


def test_the_order_is_due_time_then_debt_then_priority_then_drivers_then_the_longest_wait():
    waiting = [
        place("late", asked_ms=9),
        place("early", asked_ms=1),
        place("rollup", "maintenance", asked_ms=0),
        place("debt", "maintenance", debt_bytes=5, asked_ms=7),
        place("favoured", "maintenance", priority=1, asked_ms=9),
        place("least", priority=-1, asked_ms=0),
        place("more-debt", "maintenance", debt_bytes=9, asked_ms=8),
        place("due-later", "maintenance", due_ms=200),
        place("due", due_ms=100, asked_ms=9),
    ]
    expected = ["due", "due-later", "more-debt", "debt", "favoured", "early", "late", "rollup", "least"]
    assert first_of(waiting, LimitSettings(total=1)) == expected
    last = waiting[2]
    assert wait_of(last, waiting[:2] + waiting[3:], [], LimitSettings(total=1)) == Wait(7, "limits.total")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"total": 3}, "limits.total"),
        ({"total": 4}, None),
        ({"drivers": 2}, "limits.drivers"),
        ({"drivers": 3, "maintenance": 1}, None),
        ({"per_namespace": 2}, "limits.perNamespace, of namespace a"),
        ({"per_namespace": 3}, None),
        ({"per_store": 2}, "limits.perStore, of store s"),
        ({"inspections": 1}, None),
    ],
)
def test_each_limit_counts_what_it_names(limits, expected):
    running = [
        place("one"),
        place("other", store="t"),
        place("compaction", "maintenance", namespace="b"),
        place("look", "inspection"),
    ]
    found = wait_of(place("next"), [], running, LimitSettings(**limits))
    assert (found and found.limit) == expected


def test_a_start_that_its_own_store_holds_back_holds_no_other_back():
    limits = LimitSettings(total=2, per_store=1)
    running, held = [place("one")], place("held", due_ms=1)
    assert wait_of(held, [], running, limits) == Wait(1, "limits.perStore, of store s")
    assert wait_of(place("free", store="t"), [held], running, limits) is None


def test_a_driver_never_waits_behind_inspections():
    looks = [place(f"look-{number}", "inspection", due_ms=0) for number in range(9)]
    limits = LimitSettings(total=1, drivers=1, per_namespace=1, per_store=1, inspections=1)
    assert wait_of(place("load"), looks[1:], looks[:1], limits) is None
    assert wait_of(looks[1], [place("load")], [], limits) is None


PLACES = st.builds(
    Place,
    namespace=st.sampled_from("ab"),
    name=st.integers(0, 30).map(str),
    kind=st.sampled_from(["driver", "maintenance", "inspection"]),
    store=st.sampled_from("st"),
    due_ms=st.none() | st.integers(0, 3),
    debt_bytes=st.integers(0, 2),
    priority=st.integers(-1, 1),
    asked_ms=st.integers(0, 3),
)
NUMBER = st.none() | st.integers(1, 4)
LIMITS = st.builds(
    LimitSettings,
    total=NUMBER,
    drivers=NUMBER,
    maintenance=NUMBER,
    inspections=NUMBER,
    per_namespace=NUMBER,
    per_store=NUMBER,
)


def goes_first(one, two):
    """Whether one goes before two: the first of the keys of the queue in which they differ decides. As documented, key by key."""
    due = [float("inf") if each.due_ms is None else each.due_ms for each in (one, two)]
    if due[0] != due[1]:
        return due[0] < due[1]
    if one.debt_bytes != two.debt_bytes:
        return one.debt_bytes > two.debt_bytes
    if one.priority != two.priority:
        return one.priority > two.priority
    if one.kind != two.kind:
        return one.kind == "driver"
    return (one.asked_ms, one.key) < (two.asked_ms, two.key)


@given(
    waiting=st.lists(
        PLACES.filter(lambda one: one.kind != "inspection"), min_size=2, max_size=8, unique_by=lambda one: one.key
    )
)
def test_the_order_is_total_and_as_stated_for_drivers_and_maintenance(waiting):
    """Of any two, exactly one goes first, whatever else waits; so the first of all is first before each."""
    one, two, *_ = waiting
    limits = LimitSettings(total=1)
    begins = [wait_of(each, [other], [], limits) is None for each, other in ((one, two), (two, one))]
    assert begins == [goes_first(one, two), goes_first(two, one)]
    assert sum(begins) == 1
    (first,) = (
        each for each in waiting if wait_of(each, [other for other in waiting if other != each], [], limits) is None
    )
    assert all(goes_first(first, other) for other in waiting if other != first)


@given(waiting=st.lists(PLACES, max_size=12, unique_by=lambda one: one.key), limits=LIMITS)
def test_no_limit_is_exceeded_and_some_start_may_always_begin(waiting, limits):
    begun = []
    while waiting:
        free = [one for one in waiting if wait_of(one, [two for two in waiting if two != one], begun, limits) is None]
        if not free:
            break
        begun.append(free[0])
        waiting.remove(free[0])
        counted = [one for one in begun if one.kind != "inspection"]
        for limit, counts in (
            (limits.total, [len(counted)]),
            (limits.drivers, [sum(one.kind == "driver" for one in begun)]),
            (limits.maintenance, [sum(one.kind == "maintenance" for one in begun)]),
            (limits.inspections, [len(begun) - len(counted)]),
            (limits.per_namespace, [sum(one.namespace == name for one in counted) for name in "ab"]),
            (limits.per_store, [sum(one.store == name for one in counted) for name in "st"]),
        ):
            assert limit is None or max(counts) <= limit
    for one in waiting:
        assert wait_of(one, [], begun, limits) is not None, "what waits at the end waits for what runs"


@pytest.mark.parametrize(("field", "value"), [("total", 0), ("perStore", -1), ("drivers", True), ("maintenance", "3")])
def test_a_limit_that_would_let_nothing_run_is_refused(field, value):
    with pytest.raises(InvalidUsage, match="give a whole number from 1 on"):
        OperatorSettings.parse(f"limits: {{{field}: {value!r}}}".replace("True", "true"))


@pytest.fixture
def env(now):
    return SeededEnv(start_ms=now)


@pytest.fixture
def places(env, settings):
    """Places with this limit, on a cluster."""

    def make(**limits):
        cluster = FakeCluster(now_ms=env.now_ms)
        return Places(cluster, dataclasses.replace(settings, limits=LimitSettings(**limits)), env), cluster

    return make


def waits(places, start):
    try:
        places.enter(start)
    except Queued as queued:
        return queued.place
    return 0


def test_a_start_that_no_longer_asks_is_forgotten(places, env):
    found, _ = places(drivers=1)
    assert waits(found, place("one")) == 0
    assert waits(found, place("gone", due_ms=1)) == 1
    assert waits(found, place("next")) == 2
    env.advance_ms(31_000)
    assert waits(found, place("next")) == 0, "one never came to be, and gone asks no more"


def test_a_start_that_is_repeated_takes_no_second_place(places):
    found, _ = places(drivers=1)
    assert [waits(found, place("one")) for _ in range(3)] == [0, 0, 0]
    assert waits(found, place("two")) == 1


class Fleet:
    """Three sinks on one shard, under an operator that may run one driver at once."""

    def __init__(self, folder, env, shard_resource, sink_resource, *, is_sharded=False):
        self.env, self.cluster = env, FakeCluster(now_ms=env.now_ms)
        profile = StorageProfile(
            allowed_namespaces=AllowedNamespaces(names=("*",)),
            blob=f"file://{folder}/blob",
            consensus=f"sqlite://{folder}/log.db",
        )
        limits, sharding = LimitSettings(drivers=1), ShardingSettings(enabled=is_sharded)
        self.settings = OperatorSettings(storage_profiles={"default": profile}, limits=limits, sharding=sharding)
        self.bridge = Bridge(self.settings, env=env)
        self.restart()
        self.cluster.create(PERSIST_SHARD, shard_resource())
        for _ in range(4):
            self.step(Key("PersistShard", "team", "flights"))
        for name in ("a", "b", "c"):
            self.cluster.create(SPARK_SINK, sink_resource(name=name, uid=f"uid-{name}"))

    def restart(self):
        metrics = OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, metrics)

    def step(self, key):
        self.env.advance_ms(6000)
        self.reconciler.reconcile(key)

    def sweep(self, times=2):
        for _ in range(times):
            for name in ("a", "b", "c"):
                self.step(Key("SparkSink", "team", name))

    def ready(self, name):
        found = conditions.find(self.cluster.get(SPARK_SINK, "team", name)["status"], "Ready")
        return found["reason"], found["message"]

    def runs(self):
        """The drivers have started."""
        for pod in self.cluster.find(POD, "team", {names.LABEL_ROLE: "driver"}):
            self.cluster.edit(POD, "team", pod["metadata"]["name"], lambda one: one.update(status={"phase": "Running"}))

    def drivers(self):
        found = self.cluster.find(POD, "team", {names.LABEL_ROLE: "driver"})
        return sorted(one["metadata"]["labels"][names.LABEL_SINK] for one in found)


@pytest.fixture
def fleet(tmp_path, env, shard_resource, sink_resource, request):
    is_sharded = getattr(request, "param", "") == "sharded"
    made = Fleet(tmp_path, env, shard_resource, sink_resource, is_sharded=is_sharded)
    yield made
    made.bridge.close()


def test_sinks_wait_for_a_place_and_their_objects_say_so_and_a_restart_changes_nothing(fleet):
    fleet.sweep()
    assert fleet.drivers() == ["a"]
    assert fleet.ready("a")[0] == "Running"
    assert fleet.ready("b") == ("Queued", "place 1 in the queue; limits.drivers is reached")
    assert fleet.ready("c") == ("Queued", "place 2 in the queue; limits.drivers is reached")
    fleet.runs()
    fleet.restart()
    fleet.sweep(30)
    assert fleet.drivers() == ["a"]
    for name in ("b", "c"):
        status = fleet.cluster.get(SPARK_SINK, "team", name)["status"]
        assert (fleet.ready(name)[0], status["attempt"], status.get("lastFailure")) == ("Queued", 1, None)
    fleet.cluster.edit(SPARK_SINK, "team", "a", lambda one: one["spec"].update(suspend=True))
    fleet.sweep(3)
    assert fleet.drivers() == ["b"]
    assert fleet.ready("c") == ("Queued", "place 1 in the queue; limits.drivers is reached")


@pytest.mark.parametrize("fleet", ["alone", "sharded"], indirect=True)
@pytest.mark.parametrize(("status", "first"), [(403, ["b"]), (0, []), (503, [])])
def test_a_start_that_is_refused_gives_its_place_back_and_one_of_unknown_outcome_keeps_it(fleet, status, first):
    """The quota of one namespace kept the places of an installation from all others: each refused start held one for half a minute."""
    fleet.cluster.deny["create", "Pod"] = ApiError("exceeded quota: small", status=status)
    fleet.step(Key("SparkSink", "team", "a"))
    assert fleet.cluster.denied["create", "Pod"] == 1
    del fleet.cluster.deny["create", "Pod"]
    if fleet.settings.sharding.enabled:
        fleet.restart()  # as another replica, which knows of the start by the Lease alone
    fleet.step(Key("SparkSink", "team", "b"))
    assert fleet.drivers() == first
