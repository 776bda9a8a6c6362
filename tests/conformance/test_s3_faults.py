"""What S3, or what calls itself S3, does wrong comes back as the right error, with address, bucket and code."""

from __future__ import annotations

import http.server
import threading
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from botocore.exceptions import ClientError
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, Determinate, Indeterminate, InvalidUsage, StoreRefused, UnsafeStore
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.addresses import S3Address
from persist_engine.storage.open import open_blob
from persist_engine.storage.s3.blob import S3Blob
from persist_engine.storage.s3.connect import s3_client
from persist_engine.storage.s3.deadlines import CallLimits
from persist_kit.servers import s3_server

pytestmark = pytest.mark.s3


def opened(url):
    return open_blob(url, env=SystemEnv(), metrics=NoMetrics())


@pytest.fixture
def blob(s3, fresh_name):
    blob = opened(s3.location(fresh_name) + "&probe=false")
    yield blob
    blob.close()


@contextmanager
def lying_s3(*, put_status=200):
    """An endpoint that answers every put alike, whatever its condition, and keeps the last body."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        bodies, headers_seen = [b""], []

        def answer(self, status, body=b""):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self):
            self.headers_seen.append(dict(self.headers))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.bodies.append(body)
            self.answer(put_status)

        def do_GET(self):
            self.answer(200, self.bodies[-1])

        def do_DELETE(self):
            self.answer(204)

        def log_message(self, *_):
            pass

    class Endpoint(http.server.ThreadingHTTPServer):
        request_queue_size = 64  # all racers connect at once

    server = Endpoint(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        endpoint = quote(f"http://127.0.0.1:{server.server_address[1]}", safe="")
        yield f"s3://bucket/p?endpoint={endpoint}&region=us-east-1&path_style=true", Handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_part_of_the_usual_size_is_put_by_one_request_that_still_excludes(blob):
    """Multipart uploads have their conditions checked at the end, by fewer servers: nothing here needs them."""
    value = bytes(range(256)) * (64 << 12)
    blob.set("s1/p1", value)
    assert blob.get("s1/p1") == value
    put = {"Bucket": blob._inner._bucket, "Key": blob._inner._prefix + "s1/p1", "IfNoneMatch": "*"}
    with pytest.raises(ClientError, match="PreconditionFailed"):
        blob._inner._client.put_object(Body=value[::-1], **put)
    assert [row.size_bytes for row in blob.list_prefix("s1/")] == [64 << 20]


@pytest.mark.usefixtures("s3")
def test_a_store_that_ignores_conditions_is_refused():
    with lying_s3() as (url, _), pytest.raises(UnsafeStore, match="16 of 16 racing puts won"):
        opened(url)


@pytest.mark.usefixtures("s3")
def test_a_store_that_does_not_know_conditions_is_refused():
    with lying_s3(put_status=501) as (url, _), pytest.raises(UnsafeStore, match="not implemented"):
        opened(url)


@pytest.mark.usefixtures("s3")
def test_a_store_where_no_writer_wins_is_refused():
    with lying_s3(put_status=409) as (url, _), pytest.raises(UnsafeStore, match="0 of 16"):
        opened(url)


@pytest.mark.usefixtures("s3")
def test_puts_do_not_ask_for_permission_to_send():
    """`Expect: 100-continue` would double every put's latency."""
    with lying_s3() as (url, handler), pytest.raises(UnsafeStore):
        opened(url)
    assert handler.headers_seen
    assert all(headers["If-None-Match"] == "*" and "Expect" not in headers for headers in handler.headers_seen)


class CountingEnv(SystemEnv):
    """Counts the draws of random bytes, of which a probe takes its key."""

    draws = 0

    def random_bytes(self, count):
        self.draws += 1
        return super().random_bytes(count)


def test_the_probe_runs_once_and_leaves_nothing(s3, fresh_name):
    env = CountingEnv()
    open_blob(s3.location(fresh_name), env=env, metrics=NoMetrics()).close()
    assert env.draws == 1
    blob = open_blob(s3.location(fresh_name), env=env, metrics=NoMetrics())
    assert env.draws == 1
    assert list(blob.list_prefix("")) == []
    assert [path for path in s3.object_path("").rglob("*") if ".persist-probe" in str(path) and path.is_file()] == []
    blob.close()


def test_leftover_probes_are_not_listed(s3, blob, fresh_name):
    whole_bucket = opened(s3.location(""))
    blob.set("a", b"x")
    left = s3.object_path(".persist-probe/dead")
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"1")
    try:
        keys = [row.key for row in whole_bucket.list_prefix("")]
        assert f"{fresh_name}/a" in keys
        assert not any("probe" in key for key in keys)
    finally:
        left.unlink()
        whole_bucket.close()


def test_a_missing_bucket_is_named(s3):
    with pytest.raises(StoreRefused, match=rf"s3://nowhere/ \({s3.address}\): bucket nowhere: NoSuchBucket"):
        opened(s3.location("", bucket="nowhere"))
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        opened(s3.location("", bucket="nowhere") + "&probe=false")


def test_a_bucket_deleted_later_is_an_error_not_an_empty_store():
    with s3_server(bucket="brief") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        blob = opened(server.location("p"))
        server.object_path("").rename(server.object_path("").with_name("elsewhere"))
        calls = {
            "get": lambda: blob.get("a"),
            "set": lambda: blob.set("a", b"x"),
            "list": lambda: list(blob.list_prefix("")),
            "delete": lambda: blob.delete("a"),
            "restore": lambda: blob.restore("a"),
        }
        for verb, call in calls.items():
            with pytest.raises(Determinate, match=f"{verb} .*bucket brief: NoSuchBucket"):
                call()
        blob.close()


def test_refused_credentials_are_named_and_never_shown(s3, fresh_name, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    with pytest.raises(StoreRefused, match="bucket persist: SignatureDoesNotMatch") as caught:
        opened(s3.location(fresh_name))
    assert "a-wrong-secret" not in f"{caught.value!r}{caught.value.__cause__!r}"
    with pytest.raises(InvalidUsage, match="a URL cannot hold S3 credentials") as refused:
        opened("s3://key:a-wrong-secret@bucket/x")
    assert "a-wrong-secret" not in f"{refused.value!r}"


def test_missing_credentials_are_reported_at_open(s3, fresh_name, monkeypatch, tmp_path):
    for name in s3.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreRefused, match="credentials"):
        opened(s3.location(fresh_name))


def impatient(server):
    """A store whose calls end after half a second without an answer. A test calls it only where no answer can come: a busy machine may need
    longer for a right one.
    """
    at = S3Address.parse(server.location("p"))
    return S3Blob(
        lambda: s3_client(at),
        bucket=at.bucket,
        prefix="p/",
        address=f"s3://{at.bucket}/p ({server.address})",
        env=SystemEnv(),
        metrics=NoMetrics(),
        limits=CallLimits(base_s=0.5, bytes_per_s=128 << 10, threads_max=64),
    )


def test_a_server_that_is_down_comes_back(monkeypatch):
    """Down: Determinate with the address. Frozen: Indeterminate. Back: the same client goes on with the same data."""
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        blob, hasty = opened(server.location("p")), impatient(server)
        blob.set("a", b"x")
        server.kill()
        for call in (lambda: blob.get("a"), lambda: blob.set("b", b"x"), lambda: blob.delete("a")):
            with pytest.raises((Determinate, Indeterminate), match=server.address):
                call()
        with pytest.raises(Determinate, match=server.address):
            opened(server.location("q"))
        server.start()
        assert blob.get("a") == b"x"
        with server.paused(), pytest.raises(Indeterminate, match="set b"):
            hasty.set("b", b"x")
        assert blob.get("a") == b"x"
        blob.close()
        hasty.close()


def test_damaged_bytes_are_never_handed_out(s3, blob, fresh_name):
    blob.set("s1/p1", b"these bytes")
    s3.object_path(f"{fresh_name}/s1/p1").open("r+b").write(b"THESE")
    with pytest.raises(CorruptData, match="s1/p1") as caught:
        blob.get("s1/p1")
    assert caught.value.detail["key"] == "s1/p1"


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:bucket", "s3://bucket:80/x", "s3://bucket/x?regoin=eu", "s3://bucket/x?path_style=1", "S4://bucket"],
)
def test_a_wrong_url_is_refused(url):
    with pytest.raises(InvalidUsage):
        opened(url)
