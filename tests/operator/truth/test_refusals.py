"""Requests that the API server refuses and reconciles that raise: the status shows them at once in the words of the server, and the
operator tries again at growing intervals.
"""

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_operator.api import conditions
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard
from persist_operator.cluster.port import CONFIG_MAP, EVENT, JOB, PERSIST_SHARD, POD, SPARK_SINK, ApiError
from persist_operator.handlers.controller import CONFLICT_S, Controller
from persist_operator.plan.observed import ShardView

REFUSALS = {
    "quota": ApiError("403 pods is forbidden: exceeded quota: small", status=403),
    "security": ApiError('403 pods is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', status=403),
    "terminating": ApiError(
        "409 unable to create new content in namespace team because it is being terminated", status=409
    ),
    "busy": ApiError("429 too many requests", status=429),
    "broken": ApiError("500 etcdserver: leader changed", status=500),
    "silent": ApiError("POST: timed out", status=0),
}
#: By kind of resource: the kind of child that a reconcile lists first.
OBSERVED = {"PersistShard": "Job", "SparkSink": "Pod"}


@pytest.fixture
def shard(house, keys, shard_resource):
    house.cluster.create(PERSIST_SHARD, shard_resource())
    house.live(keys[0], 20)
    return keys[0]


@pytest.fixture
def sink(house, keys, shard, sink_resource):
    house.cluster.create(SPARK_SINK, sink_resource())
    return keys[1]


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refused_driver_is_on_the_status_at_once_and_starts_when_it_is_allowed(house, sink, what):
    house.cluster.deny["create", "Pod"] = refusal = REFUSALS[what]
    house.live(sink, 5)
    assert house.condition(sink) == ("False", "ActionRefused")
    assert house.condition(sink, "Reconciling") == ("True", "ActionRefused")
    assert str(refusal) in house.words(sink, "Reconciling")
    house.cluster.deny.clear()
    house.live(sink, 15)
    name = house.status(sink)["driver"]["podName"]
    assert house.cluster.get(POD, "team", name) is not None
    assert house.condition(sink, "Reconciling") == ("True", "Running")


def test_a_driver_that_is_invalid_stalls_until_the_spec_changes(house, sink):
    house.cluster.deny["create", "Pod"] = ApiError("422 Pod is invalid: spec.containers[0].image: required", status=422)
    house.live(sink, 5)
    assert house.condition(sink, "Stalled") == ("True", "ActionRefused")
    assert "image: required; change the spec" in house.words(sink, "Stalled")
    house.cluster.deny.clear()
    house.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"]["spark"].update(image="mine:1"))
    house.live(sink, 1)
    assert house.condition(sink, "Stalled") is None
    assert len(house.cluster.find(POD, "team", {})) == 1


def test_a_refused_driver_is_tried_ever_later_and_its_status_written_once(house, sink):
    house.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"]["timeouts"].update(driverStartSeconds=86400))
    house.live(sink, 1)
    house.cluster.deny["create", "Pod"] = REFUSALS["quota"]
    house.cluster.delete(POD, "team", house.status(sink)["driver"]["podName"])
    house.live(sink, 60)
    house.cluster.requests.clear()
    requests = house.cluster.record()
    house.live(sink, 1200)
    assert 9 <= len([one for one in requests if (one.verb, one.kind) == ("create", "Pod")]) <= 14
    assert [one for one in house.cluster.requests if one[0] == "status"] == []


def test_a_driver_that_is_refused_for_all_of_its_time_to_start_has_failed(house, sink):
    house.cluster.deny["create", "Pod"] = REFUSALS["quota"]
    house.live(sink, 310)
    failure = house.status(sink)["lastFailure"]
    assert (failure["class"], failure["reason"]) == ("Scheduling", "ActionRefused")
    assert "exceeded quota: small" in failure["message"]
    assert house.status(sink)["attempt"] == 1 or house.condition(sink, "Reconciling") is not None
    house.live(sink, 5 * 400)
    assert house.condition(sink, "Stalled") == ("True", "FailuresExceeded")
    assert house.cluster.find(CONFIG_MAP, "team", {}) == []


def test_a_foreign_pod_of_the_same_name_is_never_removed(house, sink):
    """This holds for as long as the foreign pod blocks the driver."""
    house.cluster.deny["create", "Pod"] = REFUSALS["quota"]
    house.live(sink, 1)
    name = house.status(sink)["driver"]["podName"]
    house.cluster.deny.clear()
    house.cluster.create(POD, {"metadata": {"namespace": "team", "name": name, "labels": {"app": "other"}}})
    while house.status(sink).get("lastFailure") is None:
        house.live(sink, 60)
    assert "does not belong to this load" in house.status(sink)["lastFailure"]["message"]
    assert house.cluster.get(POD, "team", name)["metadata"]["labels"] == {"app": "other"}


def test_the_time_to_start_counts_from_the_intent(house, sink):
    """A driver that was refused for most of its time to start has the rest of it."""
    house.cluster.deny["create", "Pod"] = REFUSALS["quota"]
    house.live(sink, 270)
    house.cluster.deny.clear()
    house.live(sink, 125)
    assert house.status(sink)["lastFailure"]["reason"] == "DriverStartTimeout"


def test_a_driver_whose_pod_was_never_created_gets_its_whole_time_to_start(house, sink):
    """The operator was down between the intent and the creation of the pod."""
    house.cluster.deny["create", "Pod"] = house.cluster.deny["create", "ConfigMap"] = REFUSALS["silent"]
    house.look(sink)
    assert house.status(sink)["driver"]["phase"] == "Creating"
    house.restart()
    house.cluster.deny.clear()
    house.env.advance_ms(3_600_000)
    house.live(sink, 60)
    assert "lastFailure" not in house.status(sink)
    assert len(house.cluster.find(POD, "team", {})) == 1


def test_a_restarted_operator_does_not_call_a_refused_shard_ready(house, keys, shard, shard_resource):
    house.cluster.deny["create", "Job"] = REFUSALS["quota"]
    house.cluster.edit(PERSIST_SHARD, "team", "flights", request("rollup"))
    house.live(shard, 2)
    assert house.condition(shard) == ("False", "ActionRefused")
    requests = house.cluster.record()
    house.restart()
    house.live(shard, 60)
    written = [one.arguments[3] for one in requests if one.verb == "apply_status"]
    assert {conditions.find(status, "Ready")["status"] for status in written} <= {"False"}
    assert house.condition(shard) == ("False", "ActionRefused")
    house.cluster.deny.clear()
    house.live(shard, 130)
    assert house.condition(shard) == ("True", "Healthy")


def request(verb):
    return lambda one: one["metadata"].setdefault("annotations", {}).update({f"persistshard.io/request-{verb}": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "condition"), [("compact", "CompactionCurrent"), ("gc", "GarbageCollected")])
def test_refused_maintenance_is_not_current_and_has_no_start_event(house, shard, verb, condition):
    house.cluster.deny["create", "Job"] = REFUSALS["quota"]
    house.cluster.edit(PERSIST_SHARD, "team", "flights", request(verb))
    house.live(shard, 3600)
    assert house.condition(shard, condition) == ("False", "ActionRefused")
    assert "exceeded quota" in house.words(shard, condition)
    assert house.condition(shard) == ("False", "ActionRefused")
    events = house.cluster.events("team")
    assert "MaintenanceStarted" not in events
    assert events.count("ActionRefused") == 1
    house.cluster.deny.clear()
    house.live(shard, 125)
    assert house.cluster.events("team").count("MaintenanceStarted") == 1
    assert len(house.cluster.find(JOB, "team", {})) == 1
    assert house.condition(shard) == ("True", "Healthy")
    # In this test no kubelet creates the pod of the Job. The status shows that as well.
    house.live(shard, 90)
    assert house.condition(shard, condition) == ("False", "Pending")


def test_a_shard_whose_maintenance_is_refused_is_usable_by_sinks(house, shard):
    house.cluster.deny["create", "Job"] = ApiError("422 Job is invalid", status=422)
    house.cluster.edit(PERSIST_SHARD, "team", "flights", request("rollup"))
    house.live(shard, 2)
    assert house.condition(shard, "Stalled") == ("True", "ActionRefused")
    view = ShardView.of("flights", Shard.of(load_schemas().default(house.resource(shard))), house.settings)
    assert view.usable


def test_driver_events_report_only_what_happened(house, sink):
    house.cluster.deny["create", "Pod"] = REFUSALS["quota"]
    house.live(sink, 60)
    assert "DriverStarted" not in house.cluster.events("team")
    house.cluster.deny.clear()
    house.live(sink, 30)
    assert house.cluster.events("team").count("DriverStarted") == 1
    house.pod_runs(house.status(sink)["driver"]["podName"])
    house.cluster.deny["delete", "Pod"] = ApiError("403 pods is forbidden: cannot delete", status=403)
    house.cluster.edit(SPARK_SINK, "team", "load", lambda one: one["spec"].update(suspend=True))
    house.live(sink, 30)
    assert "DriverStopped" not in house.cluster.events("team")
    assert house.condition(sink) == ("False", "ActionRefused")
    house.cluster.deny.clear()
    house.live(sink, 60)
    assert house.condition(sink) == ("True", "Suspended")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("flux"), ("Stalled", "InternalError", "KeyError: 'flux'")),
        (InvalidUsage("spec.spark.driver.memory 1Q is no quantity"), ("Stalled", "InvalidSpec", "1Q is no quantity")),
        (
            ApiError("403 pods is forbidden: cannot list", status=403),
            ("Reconciling", "ObservationRefused", "cannot list"),
        ),
        (ApiError("503 try later", status=503), ("Reconciling", "ObservationRefused", "503 try later")),
        (RuntimeError("redis://me:hunter2@r:1 was not there"), ("Stalled", "InternalError", "was not there")),
    ],
)
@pytest.mark.parametrize("kind", ["PersistShard", "SparkSink"])
def test_an_error_before_the_plan_is_on_the_status_and_the_queue_repeats_the_key(
    house, keys, sink, kind, error, expected
):
    """The worker of the controller continues, the status shows the error, and the queue backs off."""
    key = keys[0] if kind == "PersistShard" else keys[1]
    controller = Controller(house.reconciler, house.cluster, house.settings, house.env, house.metrics)
    house.cluster.deny["find", OBSERVED[kind]] = error
    for _ in range(3):
        controller._one(key)
        house.env.advance_ms(1500)
    second, reason, words = expected
    assert house.condition(key, second) == ("True", reason)
    assert words in house.words(key, second)
    assert "hunter2" not in house.words(key, second)
    assert "Traceback" not in house.words(key, second)
    assert house.condition(key)[0] != "True"
    assert house.status(key).get("shardId", "s")[0] == "s"
    house.cluster.deny.clear()
    controller._one(key)
    assert house.condition(key, "Stalled") is None
    assert house.metrics.registry.get_sample_value("persist_operator_refusals_total", {"what": "plan"}) >= 2


def test_a_lost_race_is_tried_again_soon_however_often_it_was_lost(house, shard):
    """Regression: a client that changed a resource 50 times a second made the operator try every 15 s only."""
    controller = Controller(house.reconciler, house.cluster, house.settings, house.env, house.metrics)
    house.cluster.deny["get", "PersistShard"] = ApiError("the object has been modified", status=409)
    controller._queue.add(shard)
    for _ in range(20):
        assert controller._queue.take(timeout_s=0) == shard
        controller._one(shard)
        house.env.advance_ms(int(CONFLICT_S * 1200))
    assert controller._queue.depth == 1


def test_a_transient_api_error_leaves_the_status_unchanged(house, shard):
    before = house.status(shard)
    house.cluster.deny["find", "Job"] = REFUSALS["broken"]
    with pytest.raises(ApiError):
        house.look(shard)
    assert house.status(shard) == before


def test_a_refused_status_is_counted_and_replaced_by_its_refusal(house, shard):
    """The definition is older than the operator, or there is a bug: the API server refuses the planned status."""

    def refuse_plans(request):
        known = ("InternalError", "ActionRefused", "invalid")
        if request.verb == "apply_status" and not any(word in str(request.arguments[3]) for word in known):
            raise ApiError("422 PersistShard is invalid: status.debt: unknown", status=422)
        return request.send()

    house.cluster.intercept = refuse_plans
    house.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(suspend=True))
    with pytest.raises(ApiError):
        house.look(shard)
    assert "status.debt: unknown" in house.words(shard, "Reconciling")
    assert house.metrics.registry.get_sample_value("persist_operator_refusals_total", {"what": "status"}) == 1


def test_a_resource_is_in_progress_before_anything_is_observed(
    house, keys, sink_resource, shard_resource, kstatus_twin
):
    observed, following = [], house.cluster.intercept

    def intercept(request):
        if request.verb == "find":
            observed.append((request.kind, house.cluster.stored(key.kind, "team", key.name)))
        return following(request)

    house.cluster.intercept = intercept
    for kind, made, key in ((PERSIST_SHARD, shard_resource(), keys[0]), (SPARK_SINK, sink_resource(), keys[1])):
        observed.clear()
        house.cluster.create(kind, made)
        while not observed:
            house.look(key)
        assert observed[0][0] == OBSERVED[key.kind]
        assert kstatus_twin(observed[0][1]) == "InProgress"


def test_secrets_of_a_refusal_are_redacted(house, sink):
    house.cluster.deny["create", "Pod"] = ApiError(
        "403 denied: redis://me:hunter2@r:6379 aws_secret_access_key=abcd", status=403
    )
    house.live(sink, 400)
    everything = str([house.resource(sink), house.cluster.find(EVENT, "team", {})])
    assert "denied" in everything
    assert "hunter2" not in everything
    assert "abcd" not in everything


@pytest.mark.parametrize("what", ["quota", "security", "terminating"])
def test_a_job_whose_pod_would_be_refused_is_on_the_status_in_seconds_and_starts_when_allowed(house, shard, what):
    """Kubernetes accepts the Job. Without the dry run only the Events of the Job would show the refusal of its pod."""
    house.cluster.deny["create", "Pod"] = refusal = REFUSALS[what]
    house.make_rollup_due(shard)
    house.live(shard, 20)
    assert house.condition(shard) == ("False", "ActionRefused")
    assert str(refusal) in house.words(shard, "Reconciling")
    assert house.cluster.find(JOB, "team", {}) == []
    house.cluster.deny.clear()
    house.live(shard, 130)
    assert house.condition(shard) == ("True", "Healthy")
    (job,) = house.cluster.find(JOB, "team", {})
    assert "MaintenanceStarted" in house.cluster.events("team")
    # The pod of the Job itself may fill the quota now. A Job that exists is not refused again.
    house.cluster.deny["create", "Pod"] = refusal
    house.reconciler._actor._try_pod(job)


def test_a_job_is_created_where_the_operator_may_create_no_pods(house, shard):
    words = 'pods is forbidden: User "system:serviceaccount:sys:o" cannot create resource "pods" in API group "" in the namespace "team"'
    house.cluster.deny["create", "Pod"] = ApiError(words, status=403)
    house.make_rollup_due(shard)
    house.live(shard, 20)
    assert house.condition(shard) == ("True", "Healthy")
    assert len(house.cluster.find(JOB, "team", {})) == 1


def test_the_dry_run_pod_has_a_job_as_owner(house, shard):
    """The pod of the dry run equals the pod that Kubernetes creates, so a policy against bare pods refuses no Job."""
    tried = []

    def refuse_bare_pods(request):
        if request.verb == "try_create":
            tried.append(request.arguments[1])
            owners = tried[-1]["metadata"].get("ownerReferences", ())
            if not any(one["kind"] == "Job" and one["controller"] for one in owners):
                raise ApiError("POST pods: 403 admission webhook denied the request: no bare pods", status=403)
        return request.send()

    house.cluster.intercept = refuse_bare_pods
    house.make_rollup_due(shard)
    house.live(shard, 20)
    assert house.condition(shard) == ("True", "Healthy")
    (job,) = house.cluster.find(JOB, "team", {})
    (reference,) = tried[0]["metadata"]["ownerReferences"]
    assert (reference["name"], reference["blockOwnerDeletion"]) == (job["metadata"]["name"], False)
    assert reference["uid"]
