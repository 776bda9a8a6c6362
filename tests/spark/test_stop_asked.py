"""The listener of a driver: which requests stop it, and what clients cannot do to it. In this process, with SIGTERM caught."""

import contextlib
import hashlib
import http.client
import io
import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest
from persist_engine.base.env import SystemEnv
from persist_kit.servers import free_port
from persist_operator.cluster import stops as stops_module
from persist_operator.cluster.stops import DriverStops
from persist_spark.main import main
from persist_spark.progress import stop_asked
from persist_spark.progress.stop_asked import CONNECTIONS_MAX, StopPort, stop_served
from persist_spark.report import Log, write_report

TOKEN = "5f" * 32
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
OTHERS = [("uid-1", "load-2"), ("uid-2", "load-1"), ("", "uid-1/load-1")]
ALLOWED = {"Authorization": f"Bearer {TOKEN}"}


class Driver:
    """A listener, and how often this process got SIGTERM."""

    def __init__(self) -> None:
        self.log, self.stops = io.StringIO(), 0

    def event(self, name: str) -> dict:
        found = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return next(one for one in found if one["event"] == name)

    @property
    def port(self) -> int:
        return self.event("stop_served")["port"]

    def ask(self, method: str = "POST", path: str = "/stop", *, host: str = "127.0.0.1", **headers: str):
        """Code and headers of the answer."""
        connection = http.client.HTTPConnection(host, self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            assert answer.read() == b""
            return answer.status, dict(answer.getheaders())
        finally:
            connection.close()

    def raw(self, sent: bytes) -> bytes:
        """All that the listener answers to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall(sent)
            found = b""
            while chunk := client.recv(4096):
                found += chunk
            return found


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()

    def stopped(*_: object) -> None:
        made.stops += 1

    before = signal.signal(signal.SIGTERM, stopped)
    try:
        with stop_served(StopPort(0, DIGEST), Log(made.log, SystemEnv())):
            yield made
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_token_stops_the_driver_each_time(driver, host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    for count in (1, 2, 3):
        code, headers = driver.ask(host=host, **ALLOWED)
        assert (code, driver.stops) == (202, count)
    assert headers == {"Content-Length": "0"}, "no banner"
    assert driver.event("stop_asked")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {DIGEST}",
        f"Bearer  {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xff",
    ],
)
def test_without_the_token_nothing_stops(driver, header):
    code, _ = driver.ask(**({} if header is None else {"Authorization": header}))
    assert (code, driver.stops) == (401, 0)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/stop", 405),
        ("HEAD", "/stop", 405),
        ("PUT", "/stop", 405),
        ("ANY", "/stop", 405),
        ("POST", "/", 404),
        ("POST", "/stop/", 404),
        ("POST", "/stop?now", 404),
        ("GET", "/metrics", 404),
    ],
)
def test_other_requests_are_refused(driver, method, path, code):
    found, headers = driver.ask(method, path, **ALLOWED)
    assert (found, driver.stops, headers.get("Allow")) == (code, 0, "POST" if code == 405 else None)


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
        b"POST\r\n\r\n",
        b"POST /stop HTTP/9.9\r\n\r\n",
        b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /stop HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"POST /stop HTTP/1.1\r\nContent-Length: 9\r\n\r\nhunter2-9",
    ],
)
def test_garbage_stops_nothing_and_is_logged_nowhere(driver, sent, capsys):
    try:
        answer = driver.raw(sent)
    except ConnectionResetError:
        answer = b""
    assert not answer.startswith(b"HTTP/1.0 2")
    assert driver.ask(**ALLOWED)[0] == 202
    events = [json.loads(line)["event"] for line in driver.log.getvalue().splitlines()]
    assert events == ["stop_served", "stop_asked"]
    assert capsys.readouterr() == ("", "")


def test_the_operators_request_stops_the_driver_of_its_pod_and_no_other(tmp_path, monkeypatch):
    """Operator and driver share no code. This is what they agree on."""
    monkeypatch.setattr(stops_module, "_ANSWER_S", 60.0)
    (tmp_path / "key").write_bytes(bytes(range(32)))
    operator, log, stops = DriverStops(tmp_path / "key"), io.StringIO(), []
    before = signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    try:
        at = StopPort(0, str(operator.digest("uid-1", "load-1")))
        with stop_served(at, Log(log, SystemEnv())):
            port = json.loads(log.getvalue())["port"]
            asked = [operator.ask("127.0.0.1", port, uid=uid, pod=pod) for uid, pod in OTHERS]
            assert (asked, stops) == ([False] * len(OTHERS), [])
            assert operator.ask("127.0.0.1", port, uid="uid-1", pod="load-1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stops == [1]


def test_more_clients_than_there_are_places_are_turned_away(driver, monkeypatch):
    monkeypatch.setattr(stop_asked, "REQUEST_S", 300.0)
    clients = [socket.create_connection(("127.0.0.1", driver.port)) for _ in range(CONNECTIONS_MAX)]
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        driver.ask(**ALLOWED)
    assert driver.stops == 0
    for client in clients:
        client.close()

    def is_heard() -> bool:
        try:
            return driver.ask(**ALLOWED)[0] == 202
        except (http.client.RemoteDisconnected, ConnectionError):
            return False

    while not is_heard():
        pass
    assert driver.stops == 1


def test_a_client_that_sends_a_byte_at_a_time_is_cut_off(driver, monkeypatch):
    monkeypatch.setattr(stop_asked, "REQUEST_S", 0.5)
    with socket.create_connection(("127.0.0.1", driver.port), timeout=0.05) as client:
        is_open = True
        while is_open:
            with contextlib.suppress(TimeoutError):
                try:
                    client.send(b"P")
                    is_open = client.recv(1) != b""
                except ConnectionError:
                    is_open = False
    monkeypatch.undo()
    assert driver.ask(**ALLOWED)[0] == 202


def test_the_end_of_a_run_waits_for_no_client_and_frees_the_port(driver, monkeypatch):
    for owner, name in ((stop_asked, "REQUEST_S"), (stop_asked._Request, "timeout")):
        monkeypatch.setattr(owner, name, 600)
    log = Log(io.StringIO(), SystemEnv())
    port = free_port()
    with stop_served(StopPort(port, DIGEST), log):
        client = socket.create_connection(("127.0.0.1", port))
        client.send(b"POST ")
    client.close()
    with stop_served(StopPort(port, DIGEST), log):
        client = socket.create_connection(("127.0.0.1", port))
        client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_port_that_is_taken_is_said_and_no_failure(driver):
    second = io.StringIO()
    with stop_served(StopPort(driver.port, DIGEST), Log(second, SystemEnv())):
        assert driver.ask(**ALLOWED)[0] == 202
    (said,) = [json.loads(line) for line in second.getvalue().splitlines()]
    assert (said["event"], said["port"]) == ("stop_not_served", driver.port)


@pytest.mark.parametrize(
    "given", [["--stop-port", "1"], ["--stop-digest", DIGEST], ["--stop-port", "1", "--stop-digest", TOKEN.upper()]]
)
def test_half_an_option_is_refused(given, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["driver", "--spec", str(tmp_path / "sink.json"), *given])
    assert "--stop" in capsys.readouterr().err


def test_a_stop_after_the_end_of_a_run_does_not_cost_its_report(tmp_path, monkeypatch, capsys):
    """The run ends before it begins, because it has no spec. The signal comes while the report is written."""

    def late(report, **given):
        os.kill(os.getpid(), signal.SIGTERM)
        write_report(report, **given)

    monkeypatch.setattr("persist_spark.main.write_report", late)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["driver", "--spec", str(tmp_path / "none.json"), "--report", str(tmp_path / "report.json")]) == 72
    finally:
        signal.signal(signal.SIGTERM, before)
    assert json.loads((tmp_path / "report.json").read_text())["class"] == "Configuration"
    assert "stopped by SIGTERM" not in capsys.readouterr().err
