"""What an operator with thousands of shards asks of the API server, Redis and S3, counted for one shard; and that copies and remembered
answers change nothing that they should not.
"""

import threading
from dataclasses import replace

import pytest
from persist_engine import PersistClient, ShardId
from persist_engine.base.env import SeededEnv
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.model.ownership import Owner
from persist_kit.servers import redis_server
from persist_operator.api import conditions, names
from persist_operator.api.shard import StoreLocation
from persist_operator.cluster.port import JOB, PERSIST_SHARD, SPARK_SINK, ApiError
from persist_operator.handlers.controller import Controller
from persist_operator.plan.observed import Claim, Seen, ShardMissing, StoreFailure
from persist_operator.steps.answers import Answers
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key
from prometheus_client import CollectorRegistry
from shards_house import LOOP, SHARD, House

pytestmark = pytest.mark.redis

HAPPENS_S = 60


NAME = ("team", "flights")
PLACE = StoreLocation(blob="mem:", consensus="mem:")
CLAIM = Claim(owner=Owner("operator", *NAME), wanted=None, proposed="s1", known_seqno=None)


@pytest.fixture
def answers():
    """Answers with their clock, and what they called for."""
    made = Answers(SeededEnv(), LOOP)
    made.env, made.heard_of = made._env, []
    made.on_news = lambda name, after_s: made.heard_of.append((name, after_s))
    return made


@pytest.fixture
def answer_of(idle):
    """Makes the answer that shows a commit as the newest."""
    client = idle.bridge._stores[next(iter(idle.bridge._stores))].client
    inspection = client.inspect(ShardId(idle.status()["shardId"]))

    def answer(commit):
        return Seen(inspected=replace(inspection, seqno=commit.seqno, tag=commit.tip.tag.hex()), shard_id="s1")

    return answer


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture
def house(tmp_path, redis, now):
    redis.command("FLUSHALL")
    made = House(tmp_path, redis.url, now)
    yield made
    made.close()


@pytest.fixture
def idle(house, shard_resource, request):
    """A house whose one shard is ready, and of which everything is known. The parameter is its spec."""
    house.cluster.create(PERSIST_SHARD, shard_resource(getattr(request, "param", None)))
    house.deliver()
    house.go(6)
    house.deliver()
    assert conditions.is_true(house.status(), "Ready")
    # News of the operator's own commits may still be under way.
    house.hear_all()
    while house.is_heard.is_set():
        house.is_heard.clear()
        house.go()
        house.deliver()
        house.hear_all()
    house.heard.clear()
    return house


@pytest.mark.parametrize(
    "idle",
    [{}, {"reclaimPolicy": "Purge", "deletionConfirmation": "purge-this-shard"}],
    indirect=True,
    ids=["kept", "purged"],
)
def test_an_idle_shard_costs_no_request(idle, redis):
    requests, before = idle.cluster.record(), (idle.commands(redis), idle.blob_calls("get"))
    waits = [idle.go(seconds=30) for _ in range(3)]
    assert requests == []
    assert (idle.commands(redis), idle.blob_calls("get")) == before
    assert all(LOOP.poll_seconds <= wait_s <= 1.1 * LOOP.poll_seconds for wait_s in waits), "nothing falls due before"


def test_a_shard_that_waits_for_a_deadline_is_planned_again_sooner(idle):
    for time, diff in ((1, 1), (2, -1)):
        idle.append(time, diff)
    idle.go(3)
    waits = [idle.go(seconds=30) for _ in range(3)]
    assert all(LOOP.idle_seconds <= wait_s <= 1.1 * LOOP.idle_seconds for wait_s in waits), "a retraction waits"


def test_an_idle_shard_is_asked_for_after_the_polling_interval_with_small_reads_alone(idle, redis):
    requests, before, gets = idle.cluster.record(), idle.commands(redis), idle.blob_calls("get")
    idle.go(seconds=LOOP.poll_seconds)
    assert 0 < idle.commands(redis) - before <= 3, "its name, its owner, and the newest entry of its log"
    assert (requests, idle.blob_calls("get")) == ([], gets)


def test_a_commit_of_another_process_brings_the_shard_back(idle):
    idle.append(1)
    assert idle.is_heard.wait(HAPPENS_S)
    key, after_s = idle.heard[0]
    assert key == SHARD
    assert 0 <= after_s <= LOOP.inspect_seconds
    seqno = idle.status()["frontiers"]["seqno"]
    idle.go(seconds=40)
    assert idle.status()["frontiers"]["seqno"] > seqno


def test_a_first_question_hears_of_nothing_that_was_before_it(idle):
    """The subscription itself says that news may have been lost. It is waited for, so the answer is newer."""
    for _ in range(3):
        idle.restart()
        idle.heard.clear()
        idle.go(2)
        idle.hear_all()
        assert idle.heard == []
    idle.append(1)
    assert idle.is_heard.wait(60)


def asked(answers, name, seen=None):
    """Ask the stores, which answer at once. Returns the ear."""
    ear = answers.begin(name)
    answers.keep(name, PLACE, CLAIM, seen or Seen(inspected=ShardMissing()))
    return ear


def test_many_commits_of_a_shard_are_one_item_of_news_until_it_is_looked_at(answers):
    env, heard = answers.env, answers.heard_of
    answers.heard(NAME, object())
    assert heard == [], "the stores were not asked about the shard"
    ear = asked(answers, NAME)
    env.advance_ms(4000)
    for _ in range(5):
        ear.hear(object())
    assert heard == [(NAME, LOOP.inspect_seconds - 4)]
    asked(answers, NAME)
    env.advance_ms(100_000)
    ear.hear(object())
    assert heard[1:] == [(NAME, 0)]
    answers.forget(NAME)
    ear.hear(object())
    assert len(heard) == 2


def test_looks_after_a_lost_connection_are_spread(answers):
    ears = [asked(answers, ("team", str(number))) for number in range(100)]
    answers.env.advance_ms(3600_000)
    for ear in ears:
        ear.hear(None)
    waits = [after_s for _, after_s in answers.heard_of]
    assert max(waits) <= LOOP.inspect_seconds
    assert len({round(one) for one in waits}) > 10


def test_looks_at_thousands_after_a_lost_connection_take_longer_but_not_longer_than_a_poll(answers):
    for count, least_s, most_s in ((1500, 20.0, 30.0), (30_000, LOOP.poll_seconds - 30, LOOP.poll_seconds)):
        ears = [asked(answers, ("team", str(number))) for number in range(count)]
        answers.env.advance_ms(3600_000)
        answers.heard_of.clear()
        for ear in ears:
            ear.hear(None)
        assert least_s < max(after_s for _, after_s in answers.heard_of) <= most_s


COMMITS = [VersionedData(SeqNo(number), b"%d" % number) for number in (6, 7, 8)]
OF_OTHERS = {
    "an older version": [COMMITS[0]],
    "a newer version": [COMMITS[2]],
    "the same version of another log": [VersionedData(SeqNo(7), b"other")],
    "a commit too large for its message": [VersionedData(SeqNo(7), b"")],
    "news may be lost": [None],
    "the commit of the answer, then another": [COMMITS[1], COMMITS[2]],
    "another, twice": [COMMITS[2], COMMITS[2], COMMITS[1]],
}


@pytest.mark.parametrize("is_late", [False, True], ids=["while the stores are asked", "after the answer"])
@pytest.mark.parametrize("what", OF_OTHERS)
def test_news_counts_unless_it_is_of_the_commit_that_the_answer_shows(answers, answer_of, what, is_late):
    ear = answers.begin(NAME)
    for news in [] if is_late else OF_OTHERS[what]:
        ear.hear(news)
    assert answers.heard_of == [], "the answer may show it"
    answers.keep(NAME, PLACE, CLAIM, answer_of(COMMITS[1]))
    for news in OF_OTHERS[what] if is_late else []:
        ear.hear(news)
    assert [name for name, _ in answers.heard_of] == [NAME]
    assert answers.current(NAME, PLACE, CLAIM) is None


@pytest.mark.parametrize("is_late", [False, True], ids=["while the stores are asked", "after the answer"])
def test_the_commit_that_an_answer_shows_is_no_news(answers, answer_of, is_late):
    ear, seen = answers.begin(NAME), answer_of(COMMITS[1])
    if is_late:
        answers.keep(NAME, PLACE, CLAIM, seen)
    ear.hear(COMMITS[1])
    ear.hear(COMMITS[1])
    answers.keep(NAME, PLACE, CLAIM, seen)
    assert answers.heard_of == []
    assert answers.current(NAME, PLACE, CLAIM) == seen


def test_news_that_came_before_the_question_is_none(answers, answer_of):
    ear = answers.begin(NAME)
    ear.hear(None)
    answers.begin(NAME)
    answers.keep(NAME, PLACE, CLAIM, answer_of(COMMITS[1]))
    assert answers.heard_of == []


def test_news_that_came_while_the_stores_failed_is_news(answers):
    ear = answers.begin(NAME)
    ear.hear(COMMITS[1])
    answers.keep(NAME, PLACE, CLAIM, Seen(inspected=StoreFailure(reason="StorageUnreachable", message="down")))
    assert [name for name, _ in answers.heard_of] == [NAME]


def test_a_shard_whose_store_pushes_nothing_is_asked_as_often_as_before(tmp_path, now, shard_resource):
    house = House(tmp_path, f"sqlite://{tmp_path}/consensus.db", now)
    try:
        house.cluster.create(PERSIST_SHARD, shard_resource())
        house.deliver()
        wait_s = house.go(6)
        assert LOOP.inspect_seconds <= wait_s <= 1.1 * LOOP.inspect_seconds
        house.append(1)
        house.go(seconds=40)
        assert house.status()["frontiers"]["upper"] == "2"
    finally:
        house.close()


def test_a_new_shard_costs_a_bounded_number_of_round_trips(idle, redis, shard_resource):
    """Beside one that is there already, so that no client is opened."""
    idle.cluster.create(PERSIST_SHARD, shard_resource(name="second", uid="uid-second"))
    idle.deliver()
    requests, commands = idle.cluster.record(), idle.commands(redis)
    gets, lists = idle.blob_calls("get"), idle.blob_calls("list_prefix")
    for _ in range(3):
        idle.env.advance_ms(1000)
        idle.reconciler.reconcile(Key("PersistShard", "team", "second"))
    assert conditions.is_true(idle.cluster.stored("PersistShard", "team", "second")["status"], "Ready")
    assert [one.verb for one in requests] == ["apply_status"]
    assert idle.commands(redis) - commands <= 14
    assert (idle.blob_calls("get") - gets, idle.blob_calls("list_prefix") - lists) == (0, 1)


# -- copies decide nothing --------------------------------------------------------------------------------------------


def test_a_silent_watch_starts_no_child(idle):
    """The spec was suspended, and the watch did not bring that. A request for a run, which the watch brought, is not carried out."""
    request = {f"{names.REQUEST_PREFIX}rollup": "a"}
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations=request))
    shown = idle.cluster.stored("PersistShard", "team", "flights")
    idle.append(1)
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(suspend=True))
    idle.controller.changed(shown, is_gone=False)
    idle.go(3)
    assert idle.cluster.find(JOB, "team", {}) == []
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(suspend=False))
    idle.deliver()
    idle.go(2)
    assert len(idle.cluster.find(JOB, "team", {})) == 1


def test_a_status_from_an_old_copy_is_refused_and_the_next_reconcile_reads_the_resource(idle):
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(labels={"a": "b"}))
    idle.append(1)
    assert idle.is_heard.wait(HAPPENS_S)
    idle.env.advance_ms(40_000)
    with pytest.raises(ApiError) as refused:
        idle.reconciler.reconcile(SHARD)
    assert refused.value.status == 409
    idle.go()
    assert idle.status()["frontiers"]["upper"] == "2"


def test_what_a_silent_watch_hides_is_known_after_the_resync(idle):
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(suspend=True))
    idle.go(2, seconds=60)
    assert conditions.find(idle.status(), "Ready")["reason"] == "Healthy"
    idle.controller.resync()
    idle.go()
    assert conditions.find(idle.status(), "Ready")["reason"] == "Suspended"
    idle.cluster.delete(PERSIST_SHARD, "team", "flights")
    idle.controller.resync()
    assert idle.go() is None
    assert idle.informed.resource(PERSIST_SHARD, "team", "flights") is None


def test_a_resync_lists_each_kind_of_resource_once(idle):
    requests = idle.cluster.record()
    idle.controller.resync()
    listed = [one.arguments[0].kind for one in requests if one.verb == "find"]
    assert sorted(listed) == ["Job", "PersistShard", "Pod", "Pod", "SparkSink"], (
        "and the pods of sinks are only counted"
    )


def test_a_resource_that_no_watch_has_brought_is_asked_for(house, shard_resource):
    house.cluster.create(PERSIST_SHARD, shard_resource())
    house.go(4)
    assert conditions.is_true(house.status(), "Ready")


def test_an_own_write_does_not_bring_the_shard_back_but_the_sinks_that_use_it(house, shard_resource, sink_resource):
    house.cluster.create(PERSIST_SHARD, shard_resource())
    house.cluster.create(SPARK_SINK, sink_resource())
    house.deliver()
    queue = house.controller._queue
    while (key := queue.take(timeout_s=0)) is not None:
        queue.done(key)
    house.go(4)
    house.controller.changed(house.cluster.stored("PersistShard", "team", "flights"), is_gone=False)
    assert [str(one) for one in iter(lambda: queue.take(timeout_s=0), None)] == ["SparkSink/team/load"]


@pytest.mark.parametrize("is_changed", [False, True], ids=["only the write", "and another change"])
def test_a_watch_that_brings_an_own_write_before_its_answer_brings_no_second_reconcile(
    house, shard_resource, is_changed, monkeypatch
):
    house.cluster.create(PERSIST_SHARD, shard_resource())
    house.deliver()
    house.go()
    before = house.cluster.apply_status

    def applied(kind, *name, **rest):
        stored = before(kind, *name, **rest)
        house.controller.changed(house.cluster.stored("PersistShard", "team", "flights"), is_gone=False)
        if is_changed:
            house.cluster.edit(
                PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations={"a": "b"})
            )
            house.controller.changed(house.cluster.stored("PersistShard", "team", "flights"), is_gone=False)
        return stored

    monkeypatch.setattr(house.cluster, "apply_status", applied)
    came = threading.Event()  # news of a commit is no second reconcile
    monkeypatch.setattr(house.reconciler._observer.answers, "on_news", lambda *_: came.set())
    queue = house.controller._queue
    while (key := queue.take(timeout_s=0)) is not None:
        queue.done(key)
    house.append(1)
    assert came.wait(HAPPENS_S)
    house.go(2, seconds=60)
    assert queue.take(timeout_s=0) is None
    assert any(after_s == 0 for _, after_s in house.heard) is is_changed


def ends_before_the_creation(idle):
    """The intent of a run is on the status. The operator ended before it created the Job, and is there again."""
    request = {f"{names.REQUEST_PREFIX}rollup": "a"}
    idle.append(1)
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations=request))
    idle.deliver()
    idle.cluster.deny["create", "Job"] = ApiError("the operator ends", status=0)
    idle.go()
    assert idle.status()["maintenance"]["rollup"]["jobName"]
    assert idle.cluster.find(JOB, "team", {}) == []
    del idle.cluster.deny["create", "Job"]
    idle.restart()


def test_an_operator_that_ends_between_intent_and_creation_makes_the_job_once(idle):
    ends_before_the_creation(idle)
    idle.go(3, seconds=60)
    (job,) = idle.cluster.find(JOB, "team", {})
    assert job["metadata"]["name"] == idle.status()["maintenance"]["rollup"]["jobName"]
    idle.restart()
    idle.go(2)
    assert len(idle.cluster.find(JOB, "team", {})) == 1


def test_a_silent_watch_starts_no_child_that_was_intended_before(idle):
    """The children of such a run are read live. The resource was not, and its status, with the intent, was not written again."""
    ends_before_the_creation(idle)
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(suspend=True))
    idle.reconciler.reconcile(SHARD)
    assert idle.cluster.find(JOB, "team", {}) == []


def test_the_children_of_a_run_under_way_are_read_live(idle):
    """Jobs and Pods come by two watches. The end of a run without its report would be recorded as a run without one."""
    request = {f"{names.REQUEST_PREFIX}rollup": "a"}
    idle.append(1)
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations=request))
    idle.deliver()
    idle.go(2)
    idle.deliver()
    requests = idle.cluster.record()
    idle.go()
    assert [one.arguments[0] for one in requests if one.verb == "find"][:1] == [JOB]


def test_a_pause_that_the_api_server_asks_for_is_kept(house):
    class Refusing:
        def reconcile(self, key):
            raise ApiError("slow down", status=429, retry_after_s=40)

    metrics = OperatorMetrics(CollectorRegistry())
    controller = Controller(Refusing(), house.cluster, house.settings, house.env, metrics)
    controller._queue.add(SHARD)
    assert controller._queue.take(timeout_s=0) == SHARD
    controller._one(SHARD)
    house.env.advance_ms(39_000)
    assert controller._queue.take(timeout_s=0) is None
    house.env.advance_ms(22_000)
    assert controller._queue.take(timeout_s=0) == SHARD


def test_a_status_is_planned_from_what_the_stores_say_now(idle):
    """Another process took the shard's owner away, of which no store brings news. A change of the spec calls for another status."""
    with PersistClient.open(idle.location) as client:
        client.disown(ShardId(idle.status()["shardId"]))
    idle.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(suspend=True))
    idle.deliver()
    idle.go()
    assert conditions.find(idle.status(), "Stalled")["reason"] == "ShardUnowned"
