"""A call of S3 ends in the time that its bytes may take, whatever the server does; and refused credentials cost one client."""

from __future__ import annotations

import contextlib
import gc
import http.server
import logging
import subprocess
import sys
import threading
import weakref

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Determinate, Indeterminate
from persist_engine.base.metrics import NoMetrics, PrometheusMetrics
from persist_engine.storage.addresses import S3Address
from persist_engine.storage.s3 import blob as blob_s3
from persist_engine.storage.s3 import deadlines as deadlines_s3
from persist_engine.storage.s3.blob import S3Blob
from persist_engine.storage.s3.connect import s3_client
from persist_engine.storage.s3.deadlines import CallLimits, Deadlines, LeftBehind, NotBegun
from persist_kit.fault_proxy import FaultProxy
from prometheus_client import CollectorRegistry

pytestmark = pytest.mark.s3
PATIENCE_S = 60.0
#: At the proxy's pace the first line of an answer takes longer.
SHORT = CallLimits(base_s=0.5, bytes_per_s=1 << 30, threads_max=4)


def blob_at(port, bucket, *, limits=blob_s3.LIMITS, metrics=None, env=None, connects=None):
    endpoint = f"http://127.0.0.1:{port}"
    at = S3Address.parse(f"s3://{bucket}/p?region=us-east-1&path_style=true&endpoint={endpoint}")

    def connect():
        if connects is not None:
            connects.append(port)
        return s3_client(at)

    return S3Blob(
        connect,
        bucket=bucket,
        prefix="trickle/",
        address=f"s3://{bucket}/trickle",
        env=env or SystemEnv(),
        metrics=metrics or NoMetrics(),
        limits=limits,
    )


@pytest.fixture
def proxy(s3):
    with FaultProxy(s3.port) as proxy:
        yield proxy


def wait_until(condition):
    waiting = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        if condition():
            return
        waiting.wait(0.05)
    raise AssertionError("it did not come")


@pytest.mark.parametrize("verb", ["get", "set", "delete", "list", "restore"])
def test_regression_a_server_that_trickles_hangs_no_call(s3, proxy, caplog, verb):
    """A byte now and then was enough for a call to last for ever: silence alone was bounded."""
    registry = CollectorRegistry()
    slow = blob_at(proxy.port, s3.bucket, limits=SHORT, metrics=PrometheusMetrics(registry))
    direct = blob_at(s3.port, s3.bucket)
    direct.set("a", b"x")
    calls = {
        "get": lambda: slow.get("a"),
        "set": lambda: slow.set("b", b"y" * 1000),
        "delete": lambda: slow.delete("a"),
        "list": lambda: list(slow.list_prefix("")),
        "restore": lambda: slow.restore("none"),
    }

    def running():
        return registry.get_sample_value("persist_blob_left_behind_running")

    with caplog.at_level(logging.WARNING), proxy.trickling():
        with pytest.raises(Indeterminate, match=f"{verb}.* at s3://{s3.bucket}/trickle: .* was left behind"):
            calls[verb]()
        assert running() == 1
    assert [record.getMessage() for record in caplog.records if record.name.endswith("deadlines")] == [
        f"{verb} at s3://{s3.bucket}/trickle exceeded its time limit and was left behind"
    ]
    assert registry.get_sample_value("persist_blob_left_behind_total", {"verb": verb}) == 1
    wait_until(lambda: running() == 0)
    patient = blob_at(proxy.port, s3.bucket)
    patient.set("b", b"y" * 1000)
    assert patient.get("b") == b"y" * 1000
    for blob in (slow, direct, patient):
        blob.close()


def test_threads_that_hang_are_bounded_and_then_nothing_is_sent(s3, proxy):
    blob = blob_at(proxy.port, s3.bucket, limits=SHORT)
    with proxy.trickling():
        for _ in range(SHORT.threads_max):
            with pytest.raises(Indeterminate, match="left behind"):
                blob.get("a")
        exchanges = proxy.exchanges
        hanging = sum(thread.name == "persist-get" for thread in threading.enumerate())
        assert hanging == SHORT.threads_max
        with pytest.raises(Determinate, match="all 4 threads are busy or hang"):
            blob.set("never", b"x")
        assert proxy.exchanges == exchanges
    wait_until(lambda: not any(thread.name == "persist-get" for thread in threading.enumerate()))

    def is_answered():
        with contextlib.suppress(Indeterminate):  # a busy machine may take longer for an answer than this client waits
            return blob.get("never") is None

    wait_until(is_answered)
    blob.close()


def deadlines(**limits):
    whole = CallLimits(**{"base_s": 0.1, "bytes_per_s": 1, "threads_max": 2} | limits)
    return Deadlines(whole, address="s3://b", env=SystemEnv(), metrics=NoMetrics())


def test_bytes_give_a_call_more_time():
    """Spec 4.3."""
    is_over = threading.Event()

    def rests_for_ever(_):
        is_over.wait(PATIENCE_S)

    def rests(_):
        is_over.wait(0.5)
        return "whole"

    def rests_and_says_so(allowance):
        allowance.add(60)
        return rests(allowance)

    with pytest.raises(LeftBehind):
        deadlines().run("get", rests_for_ever)
    assert deadlines().run("set", rests, byte_count=60) == "whole"
    assert deadlines().run("get", rests_and_says_so) == "whole"
    is_over.set()


def test_calls_one_after_the_other_share_a_thread_and_calls_at_once_do_not():
    bounded, both = deadlines(base_s=PATIENCE_S), threading.Barrier(2)
    used = {bounded.run("get", lambda _: threading.get_ident()) for _ in range(50)}
    assert len(used) == 1
    at_once = []

    def meets(_):
        both.wait(PATIENCE_S)
        return threading.get_ident()

    callers = [threading.Thread(target=lambda: at_once.append(bounded.run("get", meets))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(at_once)) == 2


def test_a_thread_without_a_call_ends_and_the_next_call_has_another(monkeypatch):
    monkeypatch.setattr(deadlines_s3, "IDLE_S", 0.05)
    bounded, seen = deadlines(base_s=PATIENCE_S), []
    for number in range(3):
        assert bounded.run("get", lambda _: seen.append(threading.current_thread()) or number) == number  # noqa: B023
        wait_until(lambda: not seen[-1].is_alive())
    assert len(set(seen)) == 3


def test_calls_while_threads_end_are_all_answered(monkeypatch):
    monkeypatch.setattr(deadlines_s3, "IDLE_S", 0.0001)
    bounded = deadlines(base_s=PATIENCE_S)
    pause = threading.Event()
    for number in range(300):
        assert bounded.run("get", lambda _: number) == number  # noqa: B023
        pause.wait(0.0001)


def test_what_a_call_raises_is_raised_and_its_thread_is_free_again():
    bounded = deadlines(threads_max=1, base_s=PATIENCE_S)

    def fails(_):
        raise TimeoutError("of its own")

    for _ in range(3):
        with pytest.raises(TimeoutError, match="of its own") as raised:
            bounded.run("get", fails)
        assert not isinstance(raised.value, LeftBehind | NotBegun)
    assert bounded.run("get", lambda _: 5) == 5


@contextlib.contextmanager
def forbidding():
    """Refuses all credentials."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = b"<Error><Code>InvalidAccessKeyId</Code></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Clock(SystemEnv):
    past_s = 0.0

    def monotonic_s(self):
        return self.past_s


def test_regression_an_error_lets_go_of_the_bytes_of_its_call_when_it_is_dropped():
    """It held itself, until the collector of cycles ran."""

    class Body:
        """Stands for the bytes of an upload."""

    def failed():
        body = Body()

        def put(_allowance):
            raise ValueError(str(body))

        with contextlib.suppress(ValueError):
            bounded.run("put", put)
        return weakref.ref(body)

    bounded = deadlines(threads_max=1, base_s=PATIENCE_S)
    bounded.run("get", lambda _: None)
    gc.disable()
    try:
        body = failed()
        bounded.run("get", lambda _: None)  # the thread has gone on
        assert body() is None
    finally:
        gc.enable()


def test_regression_refused_credentials_cost_a_client_now_and_then(monkeypatch):
    """They cost one for every call."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    connects, clock = [], Clock()
    with forbidding() as port:
        blob = blob_at(port, "bucket", env=clock, connects=connects)
        for rounds in (1, 2):
            for _ in range(10):
                with pytest.raises(Determinate, match="InvalidAccessKeyId"):
                    blob.get("a")
            assert len(connects) == 1 + rounds
            clock.past_s += blob_s3.CREDENTIALS_S
        blob.close()


FORKS = """
import os, threading
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.s3 import deadlines
from persist_engine.storage.s3.deadlines import CallLimits, Deadlines

made = Deadlines(CallLimits(60.0, 1 << 20, 4), address="s3://bucket", env=SystemEnv(), metrics=NoMetrics())
made.run("get", lambda _: None)
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

begins, second_is_done = threading.Event(), threading.Event()
real = threading.BoundedSemaphore

def slow(value):
    deadlines.threading.BoundedSemaphore = real
    begins.set()
    second_is_done.wait()
    return real(value)

deadlines.threading.BoundedSemaphore = slow
answers = []
first = threading.Thread(target=lambda: answers.append(made.run("get", lambda _: "first")))
first.start()
begins.wait()
try:
    answers.append(made.run("get", lambda _: "second"))
finally:
    second_is_done.set()
    first.join()
os._exit(0 if sorted(answers) == ["first", "second"] else 1)
"""


def test_regression_two_threads_of_a_forked_child_begin_at_once() -> None:
    """The second one handed its call to a thread of the parent, which no fork copies, and the call was left behind."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)
