"""The request to a driver to stop, on real sockets, and what the operator does with each answer."""

import base64
import hashlib
import hmac
import http.server
import socket
import socketserver
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_operator.api import names
from persist_operator.api.resource import Meta
from persist_operator.cluster import stops as stops_module
from persist_operator.cluster.port import CONFIG_MAP, POD, SECRET, SERVICE, ApiError
from persist_operator.cluster.stops import DriverStops, create_key
from persist_operator.plan.actions import StopRun
from persist_operator.settings import OperatorSettings, StopSettings
from persist_operator.steps import children
from persist_operator.steps.act import Actor
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

UID, NAME = "uid-sink", "load-0123abcd-1"
ADDRESS = "10.1.2.3"
KEY = bytes(range(32))
TOKEN = hmac.new(KEY, f"{UID}/{NAME}".encode(), hashlib.sha256).hexdigest()


@pytest.fixture
def stops(tmp_path):
    (tmp_path / "key").write_bytes(KEY)
    return DriverStops(tmp_path / "key")


@pytest.fixture
def patient(monkeypatch):
    """A driver that answers right may take longer on a busy machine than the operator waits."""
    monkeypatch.setattr(stops_module, "_ANSWER_S", 60.0)


@contextmanager
def listener(answer):
    """The port of a server that hands each connection to `answer`, as (connection, the request's head)."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            head = b""
            while b"\r\n\r\n" not in head and (chunk := self.request.recv(4096)):
                head += chunk
            with suppress(OSError):
                answer(self.request, head)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def asked(stops, answer, *, host="127.0.0.1"):
    """Whether the driver counts as asked, and the heads of the requests that it got."""
    heads = []

    def kept(connection, head):
        heads.append(head.decode())
        answer(connection)

    with listener(kept) as port:
        return stops.ask(host, port, uid=UID, pod=NAME), heads


@pytest.mark.usefixtures("patient")
def test_the_driver_gets_the_token_of_its_pod_and_nothing_else(stops, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    accepted, (head,) = asked(stops, lambda one: one.sendall(b"HTTP/1.0 202 Accepted\r\n\r\n"))
    assert accepted
    line, *headers = head.splitlines()
    assert line == "POST /stop HTTP/1.1"
    assert f"Authorization: Bearer {TOKEN}" in headers
    assert {one.partition(":")[0] for one in headers if one} == {
        "Host",
        "Authorization",
        "Content-Length",
        "Connection",
    }
    assert stops.digest(UID, NAME) == hashlib.sha256(TOKEN.encode()).hexdigest()


def test_a_token_is_of_one_pod_of_one_resource(stops):
    made = {stops.digest(uid, pod) for uid in (UID, "uid-other") for pod in (NAME, "load-0123abcd-2")}
    assert len(made) == 4


def dribbled(connection):
    """The right answer, with no byte late and the last one too late."""
    for one in b"HTTP/1.1 202 Accepted\r\n\r\n":
        connection.sendall(bytes([one]))
        time.sleep(2)


def endless(connection):
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def kept_silent(connection):
    connection.recv(1)


ANSWERS = {
    "401": b"HTTP/1.0 401 Unauthorized\r\n\r\n",
    "200": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "redirect": b"HTTP/1.1 307 x\r\nLocation: http://127.0.0.1:1/stop\r\n\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n",
    "garbage": b"\x00" * 4096,
    "202 somewhere": b"no HTTP 202 \r\n\r\n",
    "another protocol": b"HTTP/2.0 202 Accepted\r\n\r\n",
    "short": b"HTTP/1.1 2",
    "nothing": b"",
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_every_other_answer_is_none(stops, answer):
    accepted, heads = asked(stops, lambda one: one.sendall(answer))
    assert (accepted, len(heads)) == (False, 1), "nothing is followed or repeated"


@pytest.mark.parametrize("answer", [dribbled, endless, kept_silent])
def test_a_driver_that_answers_for_ever_holds_no_worker(stops, answer):
    accepted, _ = asked(stops, answer)  # it returns
    assert not accepted


def test_a_driver_that_takes_no_connection_in_time_is_not_asked(stops):
    """Its backlog is full."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert not stops.ask("127.0.0.1", full.getsockname()[1], uid=UID, pod=NAME)
        for one in held:
            one.close()


@pytest.mark.parametrize("host", ["localhost", "metadata.internal", "127.0.0.1/x", "", "[::1]"])
def test_only_an_address_is_asked(stops, host):
    accepted, heads = asked(stops, lambda one: one.sendall(b"HTTP/1.0 202 x\r\n\r\n"), host=host)
    assert (accepted, heads) == (False, [])


@pytest.mark.usefixtures("patient")
def test_an_address_of_ipv6_is_asked(stops):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    heads = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heads.append(self.headers["Host"])
            self.send_response(202)
            self.end_headers()

        def log_message(self, *_):
            pass

    class Server(http.server.HTTPServer):
        address_family = socket.AF_INET6

    with Server(("::1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        port = server.server_address[1]
        assert stops.ask("::1", port, uid=UID, pod=NAME)
        thread.join()
    assert heads == [f"[::1]:{port}"]


@pytest.mark.parametrize("key", [None, b"", b"x" * 31])
def test_without_a_good_key_there_is_no_token(tmp_path, key):
    if key is not None:
        (tmp_path / "key").write_bytes(key)
    stops = DriverStops(tmp_path / "key")
    assert (stops.is_ready(), stops.digest(UID, NAME)) == (False, None)
    accepted, heads = asked(stops, lambda one: one.sendall(b"HTTP/1.0 202 x\r\n\r\n"))
    assert (accepted, heads) == (False, [])
    (tmp_path / "key").write_bytes(KEY)
    assert stops.is_ready(), "the kubelet may show it later"


def test_the_key_is_created_once_and_random():
    env = SeededEnv(start_ms=0)
    cluster = FakeCluster(now_ms=env.now_ms)
    settings = StopSettings(port=7080, namespace="sys", secret_name="persist-stop-key")
    assert create_key(cluster, settings, env)
    first = cluster.stored("Secret", "sys", "persist-stop-key")
    assert len(base64.b64decode(first["data"]["key"])) == 32
    assert not create_key(cluster, settings, env)
    assert cluster.stored("Secret", "sys", "persist-stop-key") == first
    assert cluster.requests == [("create", "Secret", "persist-stop-key")] * 2, "no Secret is read"


def pod(**changes):
    """A driver that runs."""
    made = {
        "metadata": {
            "namespace": "team",
            "name": NAME,
            "labels": {names.LABEL_OWNER_UID: UID, names.LABEL_ROLE: "driver"},
            "ownerReferences": [{"kind": "SparkSink", "uid": UID}],
        },
        "spec": {
            "containers": [
                {"name": "mesh", "ports": [{"name": "stop", "containerPort": 1}]},
                {
                    "name": "driver",
                    "ports": [{"name": "driver", "containerPort": 7078}, {"name": "stop", "containerPort": 7080}],
                },
            ]
        },
        "status": {"phase": "Running", "podIP": ADDRESS},
    }
    for path, value in changes.items():
        *blocks, last = path.split("__")
        block = made
        for one in blocks:
            block = block[one]
        block[last] = value
    return made


NOT_ASKED = {
    "pending": {"status__phase": "Pending"},
    "ended": {"status__phase": "Succeeded"},
    **{
        f"the address {one!r}": {"status__podIP": one}
        for one in (
            "",
            "node-1",
            "127.0.0.1",
            "::1",
            "169.254.169.254",
            "fe80::1",
            "0.0.0.0",
            "::ffff:127.0.0.1",
            "224.0.0.1",
        )
    },
    "being deleted": {"metadata__deletionTimestamp": "2026-11-28T00:00:00Z"},
    "on the network of its node": {"spec__hostNetwork": True},
    "no port": {"spec__containers": [{"name": "driver"}]},
    "a port of another container": {
        "spec__containers": [{"name": "x", "ports": [{"name": "stop", "containerPort": 1}]}]
    },
    "not owned": {"metadata__ownerReferences": []},
    "owned by another": {"metadata__ownerReferences": [{"uid": "uid-other"}]},
    "of another resource": {
        "metadata__labels": {names.LABEL_OWNER_UID: "uid-other"},
        "metadata__ownerReferences": [{"uid": "uid-other"}],
    },
}


class Here:
    """Drivers at ADDRESS, which listen on this machine."""

    def __init__(self, stops):
        self._stops = stops

    def digest(self, uid, pod):
        return self._stops.digest(uid, pod)

    def ask(self, host, port, *, uid, pod):
        assert host == ADDRESS
        return self._stops.ask("127.0.0.1", port, uid=uid, pod=pod)


class House:
    """An Actor on a cluster with one driver, whose listener is the function `answer`."""

    def __init__(self, stops, answer, changes):
        env = SeededEnv(start_ms=0)
        self.cluster, self.heads = FakeCluster(now_ms=env.now_ms), []
        self.stops, self.answer, self.changes = stops, answer, changes
        metrics = OperatorMetrics(CollectorRegistry())
        self.actor = Actor(self.cluster, None, OperatorSettings(), env, metrics, stops=Here(stops))

    def stopped(self, *, asks=True):
        """Whether the stop had an effect, and the kinds that were deleted."""

        def answer(connection, head):
            self.heads.append(head)
            self.answer(connection)

        with listener(answer) as port:
            made = pod(**self.changes)
            for container in made["spec"]["containers"]:
                for one in container.get("ports", ()):
                    one["containerPort"] = port
            self.cluster.create(POD, made)
            for kind in (CONFIG_MAP, SERVICE, SECRET):
                name = names.rpc_secret_name(NAME, UID) if kind is SECRET else NAME
                self.cluster.create(kind, {"metadata": {"namespace": "team", "name": name}})
            self.cluster.requests.clear()
            stop = StopRun(
                kind="driver", name=NAME, reason="suspended", grace_seconds=60, event="DriverStopped", asks=asks
            )
            meta = Meta.of({"metadata": {"namespace": "team", "name": "load", "uid": UID, "generation": 1}})
            done = self.actor.act(stop, meta)
        return done, [kind for verb, kind, _ in self.cluster.requests if verb == "delete"]


ACCEPTS = ANSWERS | {"202": b"HTTP/1.0 202 Accepted\r\n\r\n"}
ALL = ["Pod", "ConfigMap", "Service", "Secret", "ConfigMap"]


def test_nothing_of_a_driver_that_accepts_is_deleted(stops):
    house = House(stops, lambda one: one.sendall(ACCEPTS["202"]), {})
    assert house.stopped() == (True, [])
    assert len(house.heads) == 1


@pytest.mark.parametrize("answer", ["401", "redirect", "garbage", "nothing"])
def test_a_driver_that_does_not_accept_is_deleted_at_once(stops, answer):
    house = House(stops, lambda one: one.sendall(ACCEPTS[answer]), {})
    assert house.stopped() == (True, ALL)


@pytest.mark.parametrize("changes", NOT_ASKED.values(), ids=NOT_ASKED)
def test_no_other_pod_is_asked(stops, changes):
    house = House(stops, lambda one: one.sendall(ACCEPTS["202"]), changes)
    assert house.stopped() == (True, ALL)
    assert house.heads == []
    made = pod(**changes)
    is_other = made["metadata"]["labels"][names.LABEL_OWNER_UID] != UID
    assert children.driver_run(made).hears_stop is is_other


def test_a_stop_that_does_not_ask_deletes(stops):
    house = House(stops, lambda one: one.sendall(ACCEPTS["202"]), {})
    assert house.stopped(asks=False) == (True, ALL)
    assert house.heads == []


def test_a_pod_that_cannot_be_read_is_deleted(stops):
    house = House(stops, lambda one: one.sendall(ACCEPTS["202"]), {})
    house.cluster.deny["get", "Pod"] = ApiError("500", status=500)
    assert house.stopped() == (True, ALL)
    assert house.heads == []
