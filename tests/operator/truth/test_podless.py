"""Jobs whose pods the API server refuses to Kubernetes, where the operator may not try a pod itself. The refusal comes from the Events
of the Jobs.
"""

import pytest
from persist_operator.api import times
from persist_operator.cluster.port import EVENT, JOB, PERSIST_SHARD, POD, ApiError

QUOTA = "is forbidden: exceeded quota: small, requested: pods=1, used: pods=0, limited: pods=0"


@pytest.fixture
def shard(house, keys, shard_resource):
    house.cluster.create(PERSIST_SHARD, shard_resource())
    house.live(keys[0], 20)
    return keys[0]


@pytest.fixture
def watched(house, shard):
    """A Job of a rollup that is due, reconciled once more, in a namespace where the operator may create no pods."""
    words = 'pods is forbidden: User "system:serviceaccount:sys:o" cannot create resource "pods" in API group ""'
    house.cluster.deny["create", "Pod"] = ApiError(words, status=403)
    house.make_rollup_due(shard)
    house.env.advance_ms(60_000)
    house.look(shard)
    (job,) = house.cluster.find(JOB, "team", {})
    assert house.condition(shard) == ("True", "Healthy")
    return job


def report_refusal(house, job, words=QUOTA, *, drawn="x7k2p", **changes):
    """Create the Event that the Job controller creates at each try."""
    name, now = job["metadata"]["name"], times.to_text(house.env.now_ms())
    event = {
        "metadata": {"namespace": "team", "name": f"{name}.{len(house.cluster.find(EVENT, 'team', {})):x}"},
        "involvedObject": {"kind": "Job", "namespace": "team", "name": name, "uid": job["metadata"]["uid"]},
        "reason": "FailedCreate",
        "message": f'Error creating: pods "{name}-{drawn}" {words}',
        "lastTimestamp": now,
    }
    house.cluster.create(EVENT, event | changes)


def pod_of(house, job):
    labels = {**job["metadata"]["labels"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
    house.cluster.deny.clear()
    house.cluster.create(POD, {"metadata": {"namespace": "team", "name": "of-the-job", "labels": labels}})
    house.cluster.edit(POD, "team", "of-the-job", lambda one: one.update(status={"phase": "Running"}))


def lists_of_events(house):
    """The times of all lists of Events from now on, in ms since now."""
    lists, following, begun = [], house.cluster.intercept, house.env.now_ms()

    def intercept(request):
        lists.extend([house.env.now_ms() - begun] if request.verb == "events_about" else [])
        return following(request)

    house.cluster.intercept = intercept
    return lists


@pytest.mark.parametrize(
    "words",
    [QUOTA, 'is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', "denied by policy p: no"],
    ids=["quota", "security", "policy"],
)
def test_the_refusal_of_a_jobs_pod_is_on_the_status_in_the_words_of_the_server(house, shard, watched, words):
    report_refusal(house, watched, words)
    house.live(shard, 5)
    assert house.condition(shard) == ("False", "ActionRefused")
    assert house.condition(shard, "Reconciling") == ("True", "ActionRefused")
    assert words in house.words(shard, "Reconciling")
    assert house.cluster.events("team").count("ActionRefused") == 1
    house.live(shard, 600)
    assert words in house.words(shard)
    assert house.cluster.events("team").count("ActionRefused") == 1
    pod_of(house, watched)
    house.look(shard)
    assert house.condition(shard) == ("True", "Healthy")
    assert words not in str(house.status(shard))


def test_a_job_without_a_pod_is_requeued_soon_although_no_watch_reports_it(house, shard, watched):
    report_refusal(house, watched)
    assert [house.condition(shard), house.look(shard) <= 2] == [("True", "Healthy"), True]


@pytest.mark.parametrize(("verb", "condition"), [("compact", "CompactionCurrent"), ("gc", "GarbageCollected")])
def test_maintenance_whose_pod_is_refused_is_not_current(house, shard, watched, verb, condition):
    annotations = {f"persistshard.io/request-{verb}": "1"}
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations=annotations))
    house.look(shard)
    kind = {"compact": "compaction"}.get(verb, verb)
    (job,) = house.cluster.find(JOB, "team", {"persistshard.io/kind": kind})
    report_refusal(house, job)
    house.live(shard, 5)
    assert house.condition(shard, condition) == ("False", "ActionRefused")
    assert QUOTA in house.words(shard, condition)


def test_an_event_of_an_earlier_job_of_the_same_name_is_not_shown(house, shard, watched):
    report_refusal(house, watched)
    name = watched["metadata"]["name"]
    house.cluster.delete(JOB, "team", name)
    house.cluster.create(JOB, {**watched, "metadata": {**watched["metadata"], "uid": "another"}})
    house.live(shard, 30)
    assert house.condition(shard) == ("True", "Healthy")
    report_refusal(house, house.cluster.get(JOB, "team", name), "denied by policy p: no")
    house.live(shard, 30)
    assert "denied by policy p: no" in house.words(shard)
    assert "exceeded quota" not in str(house.status(shard))


def test_events_are_listed_only_for_jobs_without_pods_and_ever_more_rarely(house, shard, watched):
    lists = lists_of_events(house)
    house.live(shard, 55)
    assert lists[0] >= 1000
    assert lists[1] <= 5000
    assert len(lists) <= 8
    pod_of(house, watched)
    lists.clear()
    house.live(shard, 600)
    assert lists == []


@pytest.mark.parametrize("skew_s", [-3600, -7, 7, 3600])
def test_a_clock_that_differs_from_the_servers_delays_no_refusal(house, shard, watched, skew_s):
    made = times.to_text(house.env.now_ms() + 1000 * skew_s)
    house.cluster.edit(
        JOB, "team", watched["metadata"]["name"], lambda one: one["metadata"].update(creationTimestamp=made)
    )
    after_s = house.look(shard)
    assert after_s <= 2
    report_refusal(house, watched)
    house.env.advance_ms(round(1000 * after_s))
    house.look(shard)
    assert QUOTA in house.words(shard)


def test_the_message_is_one_clean_line_of_the_newest_event_and_stable_over_tries(house, shard, watched):
    report_refusal(house, watched, "of long ago", lastTimestamp="2020-01-01T00:00:00Z")
    report_refusal(house, watched, "is \x1b[31mred\r\nat redis://me:hunter2@r:6379 \u202e" + "and so on " * 900)
    house.live(shard, 5)
    message, before = house.words(shard), house.status(shard)
    assert message.isprintable()
    assert len(message) < 1400
    assert f'pods "{watched["metadata"]["name"]}" is' in message
    assert "hunter2" not in str(before)
    assert "of long ago" not in message
    house.env.advance_ms(60_000)
    report_refusal(house, watched, drawn="aaaa1")
    house.live(shard, 15)
    after = house.status(shard)
    report_refusal(
        house,
        watched,
        message=f'(combined from similar events): Error creating: pods "{watched["metadata"]["name"]}-zzzz9" {QUOTA}',
        lastTimestamp=None,
        series={"count": 9, "lastObservedTime": times.to_text(house.env.now_ms() + 1000)[:-1] + ".123456Z"},
    )
    house.live(shard, 15)
    assert house.status(shard)["conditions"] == after["conditions"]


def test_a_missing_pod_is_on_the_status_when_events_may_not_be_read(house, shard, watched):
    report_refusal(house, watched)
    house.cluster.deny["find", "Event"] = ApiError("GET events: 403 events is forbidden: cannot list", status=403)
    house.live(shard, 30)
    assert house.condition(shard) == ("True", "Healthy")
    house.cluster.deny["find", "Event"] = ApiError("500 etcdserver: leader changed", status=500)
    with pytest.raises(ApiError):
        house.look(shard)


def test_a_job_that_ended_without_a_pod_carries_the_words_of_the_refusal(house, shard, watched):
    report_refusal(house, watched)
    ended = {
        "type": "Failed",
        "status": "True",
        "reason": "DeadlineExceeded",
        "message": "active longer than deadline",
        "lastTransitionTime": times.to_text(house.env.now_ms()),
    }
    house.cluster.edit(JOB, "team", watched["metadata"]["name"], lambda one: one.update(status={"conditions": [ended]}))
    house.look(shard)
    (item,) = [one for one in house.status(shard)["history"] if one["outcome"] == "Failed"]
    assert "active longer than deadline; Job" in item["message"]
    assert QUOTA in item["message"]
    assert QUOTA in house.status(shard)["maintenance"]["rollup"]["message"]
