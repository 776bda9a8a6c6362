"""The real client and kopf's watches against a small HTTP API server on the in-memory cluster."""

import http.server
import json
import threading
from urllib.parse import parse_qs, urlsplit

import kubernetes
import pytest
import yaml
from persist_engine.base.env import SystemEnv
from persist_operator.api import names
from persist_operator.bridge import Bridge
from persist_operator.cluster.fake import FakeCluster
from persist_operator.cluster.kube import KubeCluster, load_client
from persist_operator.cluster.port import BY_KIND, CONFIG_MAP, JOB, PERSIST_SHARD, POD, ApiError, Kind
from persist_operator.handlers.controller import Controller
from persist_operator.handlers.watch import watch
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Reconciler
from prometheus_client import CollectorRegistry

BY_PLURAL = {one.plural: one for one in BY_KIND.values()}


class ApiServer:
    """REST over a FakeCluster: discovery, get, paged lists, watches, create, delete, apply of a status, logs."""

    def __init__(self):
        self.cluster = FakeCluster(now_ms=SystemEnv().now_ms)
        self.seen = []
        self.stopping = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                url = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                server.seen.append((self.command, url.path, query, dict(self.headers)))
                if query.get("watch") == "true":
                    self.stream(url.path, query)
                    return
                code, document = server.answer(self.command, url.path, query, body)
                raw = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def stream(self, path, query):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.end_headers()
                known, kind, namespace, _ = {}, *server.parse(path)
                while not server.stopping.wait(0.02):
                    for one in server.cluster.find(kind, namespace, labels_of(query)):
                        version, uid = one["metadata"]["resourceVersion"], one["metadata"]["uid"]
                        if known.get(uid) != version:
                            known[uid] = version
                            line = json.dumps({"type": "MODIFIED", "object": one}).encode() + b"\n"
                            try:
                                self.wfile.write(line)
                                self.wfile.flush()
                            except OSError:
                                return
                self.close_connection = True

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def stop(self):
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def parse(self, path):
        parts = path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = None
        if parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        return BY_PLURAL[parts[0]], namespace, parts[1:]

    def answer(self, method, path, query, body):
        discovered = discovery(path)
        if discovered is not None:
            return 200, discovered
        kind, namespace, rest = self.parse(path)
        if method == "POST":
            if not self.cluster.create(kind, body):
                return 409, {"message": "exists already"}
            return 201, body
        if not rest:
            return 200, self.page(kind, namespace, query)
        found = self.cluster.get(kind, namespace, rest[0])
        if found is None:
            return 404, {"message": "not found"}
        if rest[1:] == ["log"]:
            return 200, b"one\ntwo\n"
        if method == "PATCH":
            try:
                self.cluster.apply_status(
                    kind, namespace, rest[0], body["status"], version=body["metadata"]["resourceVersion"]
                )
            except ApiError as error:
                return error.status, {"message": str(error)}
        if method == "PUT" and not self.cluster.replace(kind, body):
            return 409, {"message": "conflict"}
        if method == "DELETE":
            self.cluster.delete(kind, namespace, rest[0])
        return 200, self.cluster.get(kind, namespace, rest[0]) or {}

    def page(self, kind, namespace, query):
        found = self.cluster.find(kind, namespace, labels_of(query))
        start, limit = int(query.get("continue", 0)), int(query.get("limit", 1000))
        metadata = {"resourceVersion": "1"}
        if start + limit < len(found):
            metadata["continue"] = str(start + limit)
        return {"kind": f"{kind.kind}List", "metadata": metadata, "items": found[start : start + limit]}


def labels_of(query):
    selector = query.get("labelSelector", "")
    return dict(one.split("=", 1) for one in selector.split(",") if one)


def discovery(path):
    """What kopf asks before it watches: groups, versions, resources."""
    groups = {"batch": "v1", names.GROUP: names.VERSION}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {
            "groups": [
                {
                    "name": name,
                    "preferredVersion": {"version": version, "groupVersion": f"{name}/{version}"},
                    "versions": [{"version": version, "groupVersion": f"{name}/{version}"}],
                }
                for name, version in groups.items()
            ]
        }
    if path == "/version":
        return {"major": "1", "minor": "34"}
    prefixes = {"/api/v1": "v1", **{f"/apis/{name}/{version}": f"{name}/{version}" for name, version in groups.items()}}
    if path not in prefixes:
        return None
    kinds = [*BY_PLURAL.values(), Kind("v1", "Namespace", "namespaces")]
    return {
        "resources": [
            {
                "name": one.plural,
                "singularName": one.kind.lower(),
                "kind": one.kind,
                "namespaced": True,
                "verbs": ["get", "list", "watch", "patch", "create", "delete"],
            }
            for one in kinds
            if one.api_version == prefixes[path]
        ]
    }


@pytest.fixture
def server():
    made = ApiServer()
    yield made
    made.stop()


@pytest.fixture
def kubeconfig(server, tmp_path, monkeypatch):
    path = tmp_path / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "the-token"}}],
    }
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    return path


@pytest.fixture
def kube(kubeconfig):
    return KubeCluster(load_client())


def config_map(name, **labels):
    return {"metadata": {"namespace": "team", "name": name, "labels": labels}, "data": {"a": "b"}}


def test_every_verb_reaches_the_server_and_answers_as_the_port_says(kube, server):
    assert kube.get(CONFIG_MAP, "team", "a") is None
    assert kube.create(CONFIG_MAP, config_map("a", x="1")) is True
    assert kube.create(CONFIG_MAP, config_map("a")) is False
    stored = kube.get(CONFIG_MAP, "team", "a")
    assert stored["data"] == {"a": "b"}
    assert kube.replace(CONFIG_MAP, {**stored, "data": {"a": "c"}}) is True
    assert kube.replace(CONFIG_MAP, {**stored, "data": {"a": "d"}}) is False
    assert kube.delete(CONFIG_MAP, "team", "a", grace_seconds=0) is True
    assert kube.delete(CONFIG_MAP, "team", "a") is False
    headers = server.seen[0][3]
    assert headers["authorization"].lower() == "bearer the-token"


def test_lists_follow_pages_and_select_by_label(kube, server):
    for index in range(7):
        kube.create(CONFIG_MAP, config_map(f"a{index}", x=str(index % 2)))
    full = server.page
    server.page = lambda kind, namespace, query: full(kind, namespace, {**query, "limit": "2"})
    assert len(kube.find(CONFIG_MAP, "team", {})) == 7
    found = kube.find(CONFIG_MAP, None, {"x": "1"})
    assert [one["metadata"]["name"] for one in found] == ["a1", "a3", "a5"]
    assert all(one["kind"] == "ConfigMap" for one in found)


def test_status_goes_by_server_side_apply_to_the_subresource_alone(kube, server, shard_resource):
    server.cluster.create(PERSIST_SHARD, shard_resource())
    version = server.cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["resourceVersion"]
    assert kube.apply_status(PERSIST_SHARD, "team", "flights", {"shardId": "s"}, version=version) is True
    method, path, query, headers = server.seen[-1]
    assert (method, path.endswith("/persistshards/flights/status")) == ("PATCH", True)
    assert query == {"fieldManager": "persist-operator", "force": "true"}
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert kube.apply_status(PERSIST_SHARD, "team", "gone", {}, version=version) is False
    with pytest.raises(ApiError, match="modified") as stale:
        kube.apply_status(PERSIST_SHARD, "team", "flights", {"shardId": "t"}, version=version)
    assert stale.value.status == 409
    assert server.cluster.get(PERSIST_SHARD, "team", "flights")["status"] == {"shardId": "s"}


def test_logs_of_what_is_not_there_are_empty(kube, server):
    assert kube.logs("team", "gone", lines=5) == ""
    server.cluster.create(POD, {"metadata": {"namespace": "team", "name": "p"}})
    assert kube.logs("team", "p", lines=5) == "one\ntwo\n"


def test_refusals_and_silence_are_errors_with_the_servers_words(kube, server):
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


def test_a_new_resource_is_seen_by_the_watch_and_reconciled(kube, server, shard_resource, tmp_path):
    """Everything but the process: kopf watches, the queue, a worker, the engine on files, the status by the real client."""
    profile = StorageProfile(
        blob=f"file://{tmp_path}/blob",
        consensus=f"sqlite://{tmp_path}/consensus.db",
        allowed_namespaces=AllowedNamespaces(names=("team",)),
    )
    loop = LoopSettings(resync_seconds=3600, inspect_seconds=1)
    settings = OperatorSettings(storage_profiles={"default": profile}, loop=loop)
    env, metrics = SystemEnv(), OperatorMetrics(CollectorRegistry())
    stop, ready = threading.Event(), threading.Event()
    with Bridge(settings) as bridge:
        controller = Controller(Reconciler(kube, bridge, settings, env, metrics), kube, settings, env, metrics)
        controller.start()
        watcher = threading.Thread(
            target=watch, args=(controller.changed, settings), kwargs={"stop": stop, "ready": ready}
        )
        watcher.start()
        try:
            assert ready.wait(20)
            server.cluster.create(PERSIST_SHARD, shard_resource())
            assert eventually(lambda: reason(server, "flights") == "Healthy")
            job = {"metadata": {"namespace": "team", "name": "j", "labels": labels_of_child()}}
            before = reconciles(metrics)
            server.cluster.create(JOB, job)
            assert eventually(lambda: reconciles(metrics) > before)
            assert controller.is_healthy()
        finally:
            stop.set()
            watcher.join(20)
            controller.stop()
    stored = server.cluster.get(PERSIST_SHARD, "team", "flights")
    assert set(stored["metadata"]) == {"namespace", "name", "uid", "generation", "creationTimestamp", "resourceVersion"}
    assert not watcher.is_alive()


def labels_of_child():
    return {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_SHARD: "flights"}


def reconciles(metrics):
    return sum(
        sample.value for one in metrics.reconciles.collect() for sample in one.samples if sample.name.endswith("_total")
    )


def reason(server, name):
    status = server.cluster.get(PERSIST_SHARD, "team", name).get("status") or {}
    return next((one["reason"] for one in status.get("conditions", ()) if one["type"] == "Ready"), None)


def eventually(condition, timeout_s=20.0):
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if condition():
            return True
        waiting.wait(0.05)
    return False
