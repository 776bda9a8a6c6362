"""The real client and kopf's watches against a small HTTP API server on the in-memory cluster."""

import threading
from urllib.parse import quote

import pytest
from persist_engine.base.env import SystemEnv
from persist_operator.api import names
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import CONFIG_MAP, EVENT, JOB, PERSIST_SHARD, POD, SECRET, ApiError
from persist_operator.handlers.controller import Controller
from persist_operator.handlers.watch import Watches
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Reconciler
from prometheus_client import CollectorRegistry


def config_map(name, **labels):
    return {"metadata": {"namespace": "team", "name": name, "labels": labels}, "data": {"a": "b"}}


@pytest.mark.slow
def test_every_verb_of_the_client_keeps_the_contract_of_the_port(kube, server):
    assert kube.get(CONFIG_MAP, "team", "a") is None
    assert kube.create(CONFIG_MAP, config_map("a", x="1")) is True
    assert kube.create(CONFIG_MAP, config_map("a")) is False
    stored = kube.get(CONFIG_MAP, "team", "a")
    assert stored["data"] == {"a": "b"}
    assert kube.replace(CONFIG_MAP, {**stored, "data": {"a": "c"}}) is True
    assert kube.replace(CONFIG_MAP, {**stored, "data": {"a": "d"}}) is False
    assert kube.delete(CONFIG_MAP, "team", "a", grace_seconds=0) is True
    assert kube.delete(CONFIG_MAP, "team", "a") is False
    headers = server.requests[0][3]
    assert headers["authorization"].lower() == "bearer the-token"


@pytest.mark.slow
def test_a_dry_run_creates_nothing_and_carries_the_refusal_of_the_server(kube, server):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "team", "name": "x"}}
    kube.try_create(POD, pod)
    assert server.requests[-1][2] == {"dryRun": "All"}
    assert kube.get(POD, "team", "x") is None
    server.cluster.deny["create", "Pod"] = ApiError("pods is forbidden: exceeded quota: small", status=403)
    with pytest.raises(ApiError, match="exceeded quota: small") as refusal:
        kube.try_create(POD, pod)
    assert refusal.value.status == 403
    server.cluster.deny["create", "Pod"] = ApiError('admission webhook "pods" denied: no job "x"', status=404)
    for create in (kube.create, kube.try_create):
        with pytest.raises(ApiError, match='no job "x"') as missing:
            create(POD, pod)
        assert missing.value.status == 404


@pytest.mark.slow
@pytest.mark.parametrize("kind", [POD, SECRET], ids=lambda kind: kind.kind)
def test_a_creation_that_a_changing_quota_refuses_is_no_object_that_exists(kube, server, kind):
    """The code is that of an object that exists. A driver was created whose Secret did not exist, and never started."""
    manifest = {"apiVersion": "v1", "kind": kind.kind, "metadata": {"namespace": "team", "name": "x"}}
    words = 'Operation cannot be fulfilled on resourcequotas "small": the object has been modified'
    server.cluster.deny["create", kind.kind] = ApiError(words, status=409)
    with pytest.raises(ApiError, match="resourcequotas") as refusal:
        kube.create(kind, manifest)
    assert refusal.value.status == 409


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../secrets/x", "a/log", "a?b=c"])
def test_a_name_is_one_segment_of_a_path(kube, server, name):
    assert kube.get(POD, "team", name) is None
    assert server.requests[-1][1:3] == (f"/api/v1/namespaces/team/pods/{quote(name, safe='')}", {})


@pytest.mark.slow
def test_lists_follow_pages_and_select_by_label(kube, server):
    for index in range(7):
        kube.create(CONFIG_MAP, config_map(f"a{index}", x=str(index % 2)))
    full = server.page
    server.page = lambda kind, namespace, query: full(kind, namespace, {**query, "limit": "2"})
    assert len(kube.find(CONFIG_MAP, "team", {})) == 7
    found = kube.find(CONFIG_MAP, None, {"x": "1"})
    assert [one["metadata"]["name"] for one in found] == ["a1", "a3", "a5"]
    assert all(one["kind"] == "ConfigMap" for one in found)


def failed_create(name, uid, message, **changes):
    return {
        "metadata": {"namespace": "team", "name": name},
        "involvedObject": {"kind": "Job", "namespace": "team", "name": "j", "uid": uid},
        "reason": "FailedCreate",
        "message": message,
        **changes,
    }


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("way", ["find", "pages"])
def test_a_list_that_expires_before_its_last_page_begins_again(kube, server, monkeypatch, way):
    monkeypatch.setattr("persist_operator.cluster.kube._PAGE", 2)
    for number in range(5):
        kube.create(CONFIG_MAP, config_map(f"c{number}"))
    answer, expired = server.answer, []

    def compacts_once(method, path, query, body):
        if query.get("continue") == "2" and not expired:
            expired.append(path)
            return 410, {"message": "the provided continue parameter is too old"}
        return answer(method, path, query, body)

    server.answer = compacts_once
    found = kube.find(CONFIG_MAP, "team", {})
    assert [one["metadata"]["name"] for one in found] == [f"c{number}" for number in range(5)]
    expired.clear()
    paged = [one["metadata"]["name"] for page in kube.pages(CONFIG_MAP, "team", {}) for one in page]
    assert paged == ["c0", "c1", "c0", "c1", "c2", "c3", "c4"]

    server.answer = lambda method, path, query, body: (
        (410, {}) if "continue" in query else answer(method, path, query, body)
    )
    with pytest.raises(ApiError) as refused:
        list(getattr(kube, way)(CONFIG_MAP, "team", {}))
    assert refused.value.status == 410


@pytest.mark.slow
@pytest.mark.parametrize("page", [{"items": None}, {"items": None, "metadata": None}, {}])
def test_a_list_without_items_is_empty(kube, server, page):
    """Programs in Go write a list that they never made as null."""
    server.answer = lambda method, path, query, body: (200, page)
    assert kube.find(CONFIG_MAP, "team", {}) == []


@pytest.mark.slow
def test_a_list_that_does_not_end_is_an_error(kube, server, monkeypatch):
    monkeypatch.setattr("persist_operator.cluster.kube._PAGES_MAX", 4)
    server.answer = lambda method, path, query, body: (200, {"items": [], "metadata": {"continue": "again"}})
    with pytest.raises(ApiError, match="the list of configmaps does not end"):
        kube.find(CONFIG_MAP, "team", {})
    assert len(server.requests) == 4


@pytest.mark.slow
def test_an_answer_that_is_no_object_is_an_error(kube, server):
    server.answer = lambda method, path, query, body: (200, [])
    with pytest.raises(ApiError, match="no object"):
        kube.find(CONFIG_MAP, "team", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "pause_s"), [("7", 7), ("0", 0), ("86400", 300), ("Wed, 21 Oct 2026 07:28:00 GMT", 0), ("-1", 0)]
)
def test_the_pause_that_a_busy_server_asks_for_is_on_the_error(kube, server, header, pause_s):
    server.headers["Retry-After"] = header
    server.answer = lambda *_: (429, {"message": "too many requests"})
    with pytest.raises(ApiError) as refused:
        kube.get(CONFIG_MAP, "team", "one")
    assert (refused.value.status, refused.value.retry_after_s) == (429, pause_s)


def test_events_of_an_object_are_listed_by_its_uid_up_to_the_limit(kube, server):
    for index in range(4):
        kube.create(EVENT, failed_create(f"j.{index}", "uid-new", f"no {index}"))
    kube.create(EVENT, failed_create("j.old", "uid-old", "of one before"))
    kube.create(EVENT, failed_create("j.made", "uid-new", "Created pod", reason="SuccessfulCreate"))
    found = kube.events_about("team", "uid-new", reason="FailedCreate", limit=3)
    assert [one["message"] for one in found] == ["no 0", "no 1", "no 2"]
    query = {"fieldSelector": "involvedObject.uid=uid-new,reason=FailedCreate", "limit": "3"}
    assert server.requests[-1][:3] == ("GET", "/api/v1/namespaces/team/events", query)
    server.cluster.deny["find", "Event"] = ApiError("events is forbidden: cannot list", status=403)
    with pytest.raises(ApiError, match="cannot list") as refusal:
        kube.events_about("team", "uid-new", reason="FailedCreate", limit=3)
    assert refusal.value.status == 403


@pytest.mark.slow
def test_status_goes_by_server_side_apply_to_the_subresource_alone(kube, server, shard_resource):
    server.cluster.create(PERSIST_SHARD, shard_resource())
    version = server.cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["resourceVersion"]
    stored = kube.apply_status(PERSIST_SHARD, "team", "flights", {"shardId": "s"}, version=version)
    assert stored == server.cluster.get(PERSIST_SHARD, "team", "flights")
    method, path, query, headers = server.requests[-1]
    assert (method, path.endswith("/persistshards/flights/status")) == ("PATCH", True)
    assert query == {"fieldManager": "persist-operator", "force": "true"}
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert kube.apply_status(PERSIST_SHARD, "team", "gone", {}, version=version) is None
    with pytest.raises(ApiError, match="modified") as stale:
        kube.apply_status(PERSIST_SHARD, "team", "flights", {"shardId": "t"}, version=version)
    assert stale.value.status == 409
    assert server.cluster.get(PERSIST_SHARD, "team", "flights")["status"] == {"shardId": "s"}


def test_finalizers_are_patched_alone_and_only_over_the_version_that_was_read(kube, server, shard_resource):
    server.cluster.create(PERSIST_SHARD, shard_resource())
    before = server.cluster.get(PERSIST_SHARD, "team", "flights")
    version = before["metadata"]["resourceVersion"]
    stored = kube.set_finalizers(PERSIST_SHARD, "team", "flights", ["a/b"], version=version)
    assert stored["metadata"]["finalizers"] == ["a/b"]
    assert stored["spec"] == before["spec"]
    method, path, _, headers = server.requests[-1]
    assert (method, path.endswith("/persistshards/flights")) == ("PATCH", True)
    assert headers["Content-Type"] == "application/merge-patch+json"
    with pytest.raises(ApiError, match="modified"):
        kube.set_finalizers(PERSIST_SHARD, "team", "flights", [], version=version)
    assert kube.set_finalizers(PERSIST_SHARD, "team", "gone", [], version=version) is None


def test_the_end_of_a_log_is_read_however_long_its_lines_are(kube, server):
    """The API server limits a log to its first bytes."""
    server.cluster.create(POD, {"metadata": {"namespace": "team", "name": "p"}, "spec": {}})
    server.cluster.log_texts["team/p"] = "first\n" + "x" * 100_000 + "\nthe cause\n"
    text = kube.logs("team", "p", container="driver", lines=2)
    assert text.endswith("x\nthe cause\n")
    assert len(text) == 1 << 16


@pytest.mark.slow
def test_logs_of_what_is_not_there_are_empty(kube, server):
    assert kube.logs("team", "gone", container="driver", lines=5) == ""
    containers = [{"name": "istio-proxy"}, {"name": "driver"}]
    server.cluster.create(POD, {"metadata": {"namespace": "team", "name": "p"}, "spec": {"containers": containers}})
    assert kube.logs("team", "p", container="driver", lines=5) == "one\ntwo\n"
    assert kube.logs("team", "p", container="maintain", lines=5) == ""


@pytest.mark.slow
def test_refusals_and_broken_answers_are_errors_with_the_words_of_the_server(kube, server):
    server.answer = lambda *_: (403, {"message": "pods is forbidden"})
    with pytest.raises(ApiError, match="403 pods is forbidden") as refused:
        kube.get(POD, "team", "p")
    assert refused.value.status == 403

    server.answer = lambda *_: (200, b"<html>sign in</html>")
    with pytest.raises(ApiError, match="not JSON: b'<html>"):
        kube.get(POD, "team", "p")

    def hang_up(*_):
        raise ConnectionResetError

    server.answer = hang_up
    with pytest.raises(ApiError) as silent:
        kube.get(POD, "team", "p")
    assert silent.value.status == 0


@pytest.mark.slow
def test_a_watch_brings_a_new_resource_to_its_reconcile(kube, server, shard_resource, tmp_path):
    """Every part but the process takes part: kopf watches, queue, worker, engine on files, status by the real client."""
    profile = StorageProfile(
        blob=f"file://{tmp_path}/blob",
        consensus=f"sqlite://{tmp_path}/consensus.db",
        allowed_namespaces=AllowedNamespaces(names=("team",)),
    )
    loop = LoopSettings(resync_seconds=3600, inspect_seconds=1)
    settings = OperatorSettings(storage_profiles={"default": profile}, loop=loop)
    env, metrics = SystemEnv(), OperatorMetrics(CollectorRegistry())
    with Bridge(settings) as bridge:
        controller = Controller(Reconciler(kube, bridge, settings, env, metrics), kube, settings, env, metrics)
        watches = Watches(controller.changed, kube, settings, env)
        controller.start()
        watches.start()
        try:
            assert eventually(lambda: watches.waits_for is None and controller.waits_for is None)
            server.cluster.create(PERSIST_SHARD, shard_resource())
            assert eventually(lambda: reason(server, "flights") == "Healthy")
            job = {"metadata": {"namespace": "team", "name": "j", "labels": labels_of_child()}}
            before = reconciles(metrics)
            server.cluster.create(JOB, job)
            assert eventually(lambda: reconciles(metrics) > before)
            assert controller.is_healthy()
        finally:
            ended = watches.stop(timeout_s=60)
            controller.stop()
    assert ended
    stored = server.cluster.get(PERSIST_SHARD, "team", "flights")
    assert set(stored["metadata"]) == {"namespace", "name", "uid", "generation", "creationTimestamp", "resourceVersion"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        ApiError('pods is forbidden: cannot create resource "pods"', status=403),
        ApiError('admission webhook "pods" denied: no job "x"', status=404),
    ],
    ids=["no-right", "webhook-looks-for-the-job"],
)
def test_the_words_of_a_jobs_events_reach_the_status_before_the_next_resync(
    kube, server, shard_resource, tmp_path, answer
):
    """The next inspection and resync are an hour away, and Events are not watched."""
    profile = StorageProfile(
        blob=f"file://{tmp_path}/blob",
        consensus=f"sqlite://{tmp_path}/consensus.db",
        allowed_namespaces=AllowedNamespaces(names=("team",)),
    )
    loop = LoopSettings(resync_seconds=3600, inspect_seconds=3600)
    settings = OperatorSettings(storage_profiles={"default": profile}, loop=loop)
    env, metrics = SystemEnv(), OperatorMetrics(CollectorRegistry())
    server.cluster.deny["create", "Pod"] = answer

    def as_kubernetes(request):
        answer = request.send()
        if (request.verb, request.kind, answer) == ("create", JOB.kind, True):
            job = server.cluster.get(JOB, "team", request.arguments[1]["metadata"]["name"])
            refusal = failed_create("j.1", job["metadata"]["uid"], "Error creating: pods: exceeded quota: small")
            server.cluster.create(EVENT, refusal)
        return answer

    server.cluster.intercept = as_kubernetes
    with Bridge(settings) as bridge:
        controller = Controller(Reconciler(kube, bridge, settings, env, metrics), kube, settings, env, metrics)
        watches = Watches(controller.changed, kube, settings, env)
        controller.start()
        watches.start()
        try:
            resource = shard_resource()
            resource["metadata"]["annotations"] = {"persistshard.io/request-gc": "1"}
            server.cluster.create(PERSIST_SHARD, resource)
            assert eventually(lambda: reason(server, "flights") == "ActionRefused")
            written = server.cluster.get(PERSIST_SHARD, "team", "flights")["status"]["conditions"]
            assert all("exceeded quota: small" in one["message"] for one in written if one["reason"] == "ActionRefused")
        finally:
            watches.stop(timeout_s=60)
            controller.stop()


def labels_of_child():
    return {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_SHARD: "flights"}


def reconciles(metrics):
    return sum(
        sample.value for one in metrics.reconciles.collect() for sample in one.samples if sample.name.endswith("_total")
    )


def reason(server, name):
    status = server.cluster.get(PERSIST_SHARD, "team", name).get("status") or {}
    return next((one["reason"] for one in status.get("conditions", ()) if one["type"] == "Ready"), None)


def eventually(condition, timeout_s=60.0):
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if condition():
            return True
        waiting.wait(0.05)
    return False
