"""A wrong location is refused at once, with the store's own words; a store out of reach is waited for, and a warning says so."""

from __future__ import annotations

import contextlib
import http.server
import logging
import os
import pty
import subprocess
import sys
import threading
from urllib.parse import quote

import pytest
from persist_engine import Location, PersistClient, Settings
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import ErrorKind, StoreRefused, Unavailable
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.base.settings import RetrySettings
from persist_kit.servers import free_port, redis_server, s3_server
from prometheus_client import CollectorRegistry

PATIENCE_S = 60.0
SECRET = "a-wrong-secret"


@pytest.fixture(scope="module")
def redis_server_with_users():
    with redis_server(password="right") as server:
        server.command("ACL", "SETUSER", "idle", "on", ">pw", "~*", "&*", "+@connection")
        server.command(
            "ACL", "SETUSER", "scripts", "on", ">pw", "~*", "&*", "+@connection", "+@scripting", "+info", "+config|get"
        )
        server.command("ACL", "SETUSER", "other", "on", ">pw", "~other*", "&*", "+@all")
        yield server


@contextlib.contextmanager
def web_server(status=404, body=b"<html>no store</html>"):
    """A server of web pages; everything is answered alike."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_DELETE = do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refused(*, blob="mem:", consensus="mem:", match):
    """Opening is refused at the first attempt, although there is much time for others."""
    registry = CollectorRegistry()
    settings = Settings(retry=RetrySettings(give_up_ms=20_000))
    with pytest.raises(StoreRefused, match=match) as caught:
        PersistClient.open(
            Location(blob=blob, consensus=consensus), settings=settings, metrics=PrometheusMetrics(registry)
        )
    shown = f"{caught.value!r}{caught.value} {caught.value.__cause__!r} {caught.value.__cause__.__cause__!r}"
    assert SECRET not in shown
    assert caught.value.kind is ErrorKind.STORE_REFUSED
    assert (
        registry.get_sample_value("persist_retry_attempts_total", {"kind": "external", "op": "open consensus"}) is None
    )


@pytest.mark.redis
@pytest.mark.parametrize(
    ("user", "database", "words"),
    [
        (f":{SECRET}@", "0", "invalid username-password pair.*; give the location the user and password"),
        (f"unknown:{SECRET}@", "0", "invalid username-password pair"),
        ("", "0", "Authentication required.*; give the location the user and password"),
        ("idle:pw@", "0", "no permissions.*give the Redis user these commands"),
        ("scripts:pw@", "0", "script.*give the Redis user these commands"),
        ("other:pw@", "0", "no permissions|No permissions"),
        (":right@", "99", "DB index is out of range; correct the number of the database"),
    ],
)
def test_regression_an_error_of_redis_is_raised_with_its_words(redis_server_with_users, user, database, words):
    """The client repeated its request without a message for as long as the caller waited."""
    refused(consensus=f"redis://{user}{redis_server_with_users.address}/{database}", match=words)


@pytest.mark.redis
def test_regression_a_server_that_is_no_redis_is_refused(redis_server_with_users, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    plain = redis_server_with_users
    refused(
        consensus=f"redis://{plain.address}/0?password_file={quote(f'{tmp_path}/none')}",
        match="No such file.*; correct the path of the password's file",
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    refused(
        consensus=f"redis://{plain.address}/0?password_file={quote(f'{tmp_path}/binary')}",
        match="can't decode.*; write the password as UTF-8",
    )
    refused(consensus=f"redis://{64 * 'a'}.b/0", match="at redis://aaa.*; correct the host name")
    with web_server() as address:
        refused(
            consensus=f"redis://{address}/0",
            match="open consensus: INFO at redis://127.0.0.1.*; no Redis answers there",
        )
    with redis_server(tls=True) as server:
        refused(consensus=server.url, match="certificate.*; name the file of the authority")
        refused(blob=f"s3://bucket/?endpoint=https%3A%2F%2F{server.address}", match="certificate")


@pytest.mark.redis
@pytest.mark.s3
def test_a_server_with_tls_behind_an_address_without_it_is_named(monkeypatch):
    """Both looked like broken connections, and were waited for."""
    with redis_server(tls=True) as server:
        refused(consensus=f"redis://{server.address}/0", match="the server speaks TLS; use rediss://")
    with redis_server(tls=True, wants_certificate=True) as server:
        refused(consensus=f"redis://{server.address}/0", match="the server speaks TLS; use rediss://")
    with s3_server(tls=True) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = server.location("p").replace("https%3A", "http%3A").partition("&ca_file")[0]
        assert "http%3A" in url
        refused(blob=url, match="the server speaks TLS; use an endpoint with https://")


@pytest.mark.s3
def test_regression_an_error_of_s3_is_raised_with_its_words(s3, monkeypatch):
    refused(blob=s3.location("p", bucket="nowhere"), match="bucket nowhere: NoSuchBucket.*; create the bucket")
    refused(blob=s3.location("p", bucket="nowhere") + "&probe=false", match="NoSuchBucket")
    refused(blob=s3.location("p").replace("http%3A", "https%3A"), match="SSL")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    refused(blob=s3.location("wrong"), match="SignatureDoesNotMatch.*; correct the access key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    refused(
        blob=s3.location("wrong"),
        match="No user exists with the provided access key ID.*; correct endpoint, bucket, region and cred",
    )
    for name in s3.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    refused(blob=s3.location("wrong"), match="Unable to locate credentials; set AWS_ACCESS_KEY_ID")


@pytest.mark.s3
@pytest.mark.parametrize("query", ["", "&probe=false"])
@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b"<html>no store</html>"), (403, b"<Error><Code>AccessDenied</Code></Error>"), (405, b"")],
)
def test_regression_a_server_that_is_no_s3_is_refused(monkeypatch, status, body, query):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with web_server(status, body) as address:
        refused(
            blob=f"s3://bucket/p?endpoint=http%3A%2F%2F{address}&region=us-east-1&path_style=true{query}",
            match=f"open blob store: .*{status}",
        )


@pytest.mark.s3
def test_regression_an_endpoint_that_redirects_is_refused(monkeypatch):
    """As one that wants https: the driver followed until Python's stack was full."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with web_server(301, b"") as address:
        blob = f"s3://bucket/p?endpoint=http%3A%2F%2F{address}&region=us-east-1&path_style=true"
        refused(blob=blob, match="redirects without end")
        refused(blob=f"{blob}&probe=false", match="redirects without end")


class HurriedEnv(SystemEnv):
    """A clock that runs thirty times as fast."""

    def monotonic_s(self):
        return super().monotonic_s() * 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blob", "consensus"),
    [
        ("mem:", "redis://no-such-host.invalid:6379/0"),
        ("s3://bucket/p?endpoint=http%3A%2F%2Fno-such-host.invalid%3A1&region=us-east-1&path_style=true", "mem:"),
    ],
)
def test_regression_an_unknown_host_is_waited_for_a_while(monkeypatch, blob, consensus):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    waited = []
    with pytest.raises(StoreRefused, match="no-such-host.invalid.* did not resolve"):
        PersistClient.open(
            Location(blob=blob, consensus=consensus), env=HurriedEnv(), on_wait=lambda what, _: waited.append(what)
        )
    assert waited or blob != "mem:", "the first look for a name may take all of the time"


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    ("blob", "consensus", "words"),
    [
        ("file://{}/file", "mem:", "Not a directory; correct the path"),
        ("file://{}/file/blobs", "mem:", "Not a directory"),
        ("file://{}/" + "x" * 300, "mem:", "File name too long"),
        ("mem:", "sqlite://{}/file/log.db", "Not a directory|File exists"),
        ("mem:", "sqlite://{}", "Is a directory"),
    ],
)
def test_regression_a_path_that_cannot_be_a_store_is_refused(tmp_path, blob, consensus, words, create):
    """It was waited for without end. Now nothing is waited for, with or without the right to make the store."""
    (tmp_path / "file").write_bytes(b"x")
    location = Location(blob=blob.format(tmp_path), consensus=consensus.format(tmp_path))
    waited = []
    settings = Settings(retry=RetrySettings(give_up_ms=200))  # so that the test ends when it fails
    with pytest.raises(StoreRefused, match=words):
        PersistClient.open(location, settings=settings, create=create, on_wait=lambda *wait: waited.append(wait))
    assert not waited


@pytest.mark.redis
def test_a_redis_that_is_down_is_waited_for_loudly(caplog):
    registry = CollectorRegistry()
    waits, clients = [], []
    is_waiting = threading.Event()

    def on_wait(what, error):
        waits.append(f"{what}: {error}")
        is_waiting.set()

    with redis_server() as server:
        server.stop()
        location = Location(blob="mem:", consensus=server.url)
        thread = threading.Thread(
            target=lambda: clients.append(
                PersistClient.open(location, metrics=PrometheusMetrics(registry), on_wait=on_wait)
            )
        )
        with caplog.at_level(logging.WARNING):
            thread.start()
            assert is_waiting.wait(PATIENCE_S)
            assert caplog.records[0].getMessage() == waits[0].replace(": ", " failed, waiting for it: ", 1)
        assert waits[0].startswith(f"open consensus: INFO at redis://{server.address}/0: Error 111")
        labels = {"kind": "external", "op": "open consensus"}
        assert registry.get_sample_value("persist_retry_attempts_total", labels) >= 1
        server.start()
        thread.join(PATIENCE_S)
        with clients[0] as client:
            assert list(client.shards()) == []
            waits.clear()
            client.versions.retry.external("later", iter([1]).__next__)
            assert not waits


@pytest.mark.redis
def test_credentials_that_are_revoked_later_are_tried_as_long_as_any_failure():
    with redis_server(password="right") as server:
        settings = Settings(retry=RetrySettings(give_up_ms=500))
        with PersistClient.open(Location(blob="mem:", consensus=server.url), settings=settings) as client:
            server.command("CONFIG", "SET", "requirepass", "another")
            server._password = "another"
            server.command("CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(Unavailable, match="gave up after .*invalid username-password pair") as ended:
                client.recent_upper("s00000000-0000-0000-0000-000000000001")
            assert not isinstance(ended.value, StoreRefused)


def _read_until(descriptor, word):
    shown = b""
    while word not in shown:
        try:
            shown += os.read(descriptor, 4096)
        except OSError:  # every process that had it open has ended
            break
    return shown.decode()


@pytest.mark.slow
def test_a_command_says_on_a_terminal_what_it_waits_for():
    """It printed nothing, for minutes."""
    port = free_port()
    stores = ["--blob", "mem:", "--consensus", f"redis://:{SECRET}@127.0.0.1:{port}/0"]
    command = [sys.executable, "-m", "persist_engine.cli", "read", "s00000000-0000-0000-0000-000000000001", *stores]
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen([*command, "--give-up", "60"], stdout=subprocess.DEVNULL, stderr=theirs) as process:
            os.close(theirs)
            shown = _read_until(
                ours, b"waiting, for 60 s at most (--give-up): open consensus: INFO at redis://127.0.0.1"
            )
            process.kill()
    finally:
        os.close(ours)
    assert "waiting, for 60 s at most" in shown
    assert SECRET not in shown
    piped = subprocess.run(
        [*command, "--give-up", "1"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (piped.returncode, piped.stdout, "waiting, for" in piped.stderr) == (70, "", False)
