"""Where the console listens, and what it allows there."""

import builtins
import queue
import socket
import sys
import threading

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import InvalidUsage
from persist_kit.command_line import persist
from persist_operator.console import commands, serve
from persist_operator.console.guard import Hosts
from persist_operator.console.patience import PatientForAWhile
from persist_operator.console.web import console
from starlette.testclient import TestClient


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("host.example", False),
    ],
)
def test_only_a_loopback_is_reached_by_this_machine_alone(address, is_own):
    assert serve.is_loopback(address) == is_own


class Served(Exception):
    """Ends `serve` where it would wait for requests."""


def made_for(monkeypatch, address, source):
    """The application that `serve` makes for this address."""
    apps = []

    def run(self, sockets):
        apps.append(self.config.app)
        raise Served

    monkeypatch.setattr(serve.uvicorn.Server, "run", run)
    with pytest.raises(Served):
        serve.serve(
            source, env=SeededEnv(1), address=address, port=0, host_names=["console.example"], announce=lambda url: None
        )
    return apps[0]


@pytest.mark.parametrize(("address", "offers"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_console_that_other_machines_reach_only_reads(monkeypatch, filled_laptop, address, offers):
    filled_laptop.plan()
    source = filled_laptop.source()
    client = TestClient(
        made_for(monkeypatch, address, source), base_url="http://console.example", follow_redirects=False
    )
    page = client.get("/shards/local/orders").text
    assert ("Approve</button>" in page) == offers
    assert (serve.ONLY_READS.partition(".")[0] in page) != offers
    source.close()


@pytest.fixture
def running(monkeypatch, filled_laptop):
    """The port of a console that waits a quarter of a second for a request."""
    servers, urls = [], queue.Queue()

    class Kept(serve.uvicorn.Server):
        def __init__(self, config):
            config.timeout_keep_alive = 600  # only the limit of a request ends a connection
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(serve.uvicorn, "Server", Kept)
    monkeypatch.setattr(PatientForAWhile, "request_s", 0.25)
    source = filled_laptop.source()
    options = {"env": SeededEnv(1), "address": "127.0.0.1", "port": 0, "host_names": (), "announce": urls.put}
    thread = threading.Thread(target=serve.serve, args=(source,), kwargs=options)
    thread.start()
    yield int(urls.get(timeout=60).rstrip("/").rpartition(":")[2])
    servers[0].should_exit = True
    thread.join(60)
    source.close()


HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "half",
    [
        b"",
        HEAD,
        b"POST /shards/local/orders/approve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nplan",
    ],
    ids=["nothing", "half a request", "half a form"],
)
def test_a_client_that_does_not_finish_its_request_loses_its_connection(running, half):
    with socket.create_connection(("127.0.0.1", running), timeout=60) as slow:
        slow.sendall(half)
        assert slow.recv(4096) == b""


def test_a_second_request_must_be_finished_too(running, monkeypatch):
    monkeypatch.setattr(PatientForAWhile, "request_s", 60.0)
    with socket.create_connection(("127.0.0.1", running), timeout=60) as slow:
        slow.sendall(HEAD + b"\r\n")
        answer = b""
        while not answer.endswith(b"ok\n"):
            answer += slow.recv(4096)
        monkeypatch.setattr(PatientForAWhile, "request_s", 0.25)
        slow.sendall(HEAD)
        assert slow.recv(4096) == b""


def test_no_form_is_accepted_by_a_console_that_only_reads(filled_laptop):
    filled_laptop.plan()
    source = filled_laptop.source()
    apps = [console(source, env=SeededEnv(1), hosts=Hosts.of([]), only_reads=why) for why in ("", "It only reads.")]
    clients = [TestClient(app, base_url="http://127.0.0.1:8787", follow_redirects=False) for app in apps]
    # Both have the same key and cookie, so the form of the one is right for the other.
    token = clients[0].get("/shards/local/orders").text.partition('name="token" value="')[2].partition('"')[0]
    clients[1].get("/")
    form = {"plan": "compact-9", "token": token}
    answer = clients[1].post("/shards/local/orders/approve", data=form, headers={"Origin": "http://127.0.0.1:8787"})
    source.close()
    assert answer.status_code == 403
    assert "It only reads." in answer.text
    assert filled_laptop.approved() == ""


def test_a_port_that_is_taken_is_an_error_that_says_so(filled_laptop):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = persist("local", "ui", "--state", str(filled_laptop.state), "--port", str(port))
    assert done.returncode == 64
    assert f"127.0.0.1:{port} cannot be taken" in done.stderr
    assert "--port" in done.stderr


def test_without_the_extra_the_error_names_it(monkeypatch):
    whole = builtins.__import__

    def missing(name, *arguments, **options):
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return whole(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "persist_operator.console.serve")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidUsage, match=r"needs the Python module uvicorn.*install persist-operator\[ui\]"):
        commands.started(None, env=None, address="127.0.0.1", port=0, host_names=())


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (["--trust-proxy", "10.0.0.1", "--trust-user-header", "X-User"], {}, "--trust-proxy needs --in-cluster"),
        (["--in-cluster", "--trust-proxy", "10.0.0.1"], {}, "go together"),
        (["--in-cluster", "--trust-proxy", "x", "--trust-user-header", "X-User"], {}, "such as 10.0.0.0/8"),
        (["--context", "absent"], {}, "no context 'absent' in the kubeconfig; there are: c"),
        ([], {"PERSIST_BLOB": "s3://b"}, "set both or none"),
    ],
)
def test_options_that_contradict_each_other_are_refused(kubeconfig, monkeypatch, arguments, environ, says):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = persist("ui", *arguments)
    assert done.returncode == 64
    assert says in done.stderr


def test_a_folder_without_resources_is_refused(tmp_path):
    done = persist("local", "ui", "--state", str(tmp_path))
    assert done.returncode == 64
    assert "no resources in" in done.stderr
