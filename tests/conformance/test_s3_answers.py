"""Answers that no good S3 gives, and what stands between it and us does: cut off, stripped of headers, never sent."""

from __future__ import annotations

import base64
import http.server
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import botocore.loaders
import pytest
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import Determinate, Indeterminate, InvalidUsage, UnsafeStore
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.addresses import S3Address
from persist_engine.storage.open import open_blob
from persist_engine.storage.s3.blob import CREDENTIALS_S, S3Blob
from persist_engine.storage.s3.connect import s3_client

#: What one request is answered with: status, body, and headers, where None takes away one that would be sent.
Answer = tuple[int, bytes, dict[str, str | None]]
MISSING: Answer = (404, b"<Error><Code>NoSuchKey</Code></Error>", {})


class Endpoint(http.server.ThreadingHTTPServer):
    """Gives the answers it was made with, and records the requests."""

    request_queue_size = 64
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[str, str, bytes], Answer | None] = lambda *_: MISSING
        self.authorization = ""
        self.requests: list[tuple[str, str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.authorization = self.headers.get("Authorization", "")
        self.server.requests.append((self.command, self.path, self.client_address[1]))
        answer = self.server.answer(self.command, self.path, body)
        if answer is None:
            self.close_connection = True
            return
        status, content, headers = answer
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content)), "ETag": '"1"'} | headers).items():
            if value is not None:
                self.send_header(name, value)
        if headers:
            self.send_header("Connection", "close")  # the next request needs a connection that is still served
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_DELETE = serve

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url_at(address: str, query: str = "") -> str:
    return f"s3://bucket/p?endpoint={quote(address, safe='')}&region=us-east-1&path_style=true{query}"


class LateEnv(SystemEnv):
    """A clock that is `late_s` ahead of the real one."""

    late_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.late_s


def unprobed(address: str, env: Env | None = None) -> S3Blob:
    at = S3Address.parse(url_at(address))
    return S3Blob(
        lambda: s3_client(at),
        bucket="bucket",
        prefix="p/",
        address="s3://bucket/p",
        env=env or SystemEnv(),
        metrics=NoMetrics(),
    )


CUT_OFF: Answer = (200, b"", {"Content-Length": "700"})
NOWHERE_TO_GO_ON: Answer = (
    200,
    b"<ListBucketResult><Name>bucket</Name><IsTruncated>true</IsTruncated>"
    b"<Contents><Key>p/a</Key><Size>1</Size></Contents></ListBucketResult>",
    {},
)


@pytest.mark.parametrize("answer", [CUT_OFF, NOWHERE_TO_GO_ON], ids=["cut off", "nowhere to go on"])
def test_a_listing_that_is_not_whole_is_never_taken_for_one(endpoint: Endpoint, answer: Answer) -> None:
    """boto3 takes the first for an empty page, the second for the last."""
    endpoint.answer = lambda *_: answer
    blob = unprobed(endpoint.url)
    with pytest.raises(Indeterminate, match="list s1/ at s3://bucket/p: the listing of bucket bucket is incomplete"):
        list(blob.list_prefix("s1/"))
    blob.close()


@pytest.mark.slow
def test_a_restore_that_did_not_see_the_versions_does_not_say_that_there_are_none(endpoint: Endpoint) -> None:
    endpoint.answer = lambda _, path, __: CUT_OFF if "versions" in path else MISSING
    blob = unprobed(endpoint.url)
    with pytest.raises(Indeterminate, match="restore a at .* is incomplete"):
        blob.restore("a")
    blob.close()


def test_a_size_that_a_gateway_dropped_does_not_matter(endpoint: Endpoint) -> None:
    endpoint.answer = lambda verb, *_: (200, b"", {"Content-Length": None}) if verb == "HEAD" else (204, b"", {})
    blob = unprobed(endpoint.url)
    assert blob.delete("a") == 0
    assert [verb for verb, *_ in endpoint.requests] == ["HEAD", "DELETE"]
    blob.close()


def test_a_piece_that_came_with_the_checksum_of_the_whole_object_is_cut_from_the_whole(endpoint: Endpoint) -> None:
    whole = b"0123456789"
    check = {"x-amz-checksum-crc32": base64.b64encode(zlib.crc32(whole).to_bytes(4, "big")).decode()}
    pieces: list[Answer] = [(206, b"345", {**check, "Content-Range": "bytes 3-5/10"})]
    endpoint.answer = lambda *_: pieces.pop() if pieces else (200, whole, check)
    blob = unprobed(endpoint.url)
    assert blob.get_range("a", 3, 3) == b"345"
    assert not pieces
    assert [verb for verb, *_ in endpoint.requests] == ["GET", "GET"]
    blob.close()


def test_a_request_that_a_proxy_took_and_did_not_answer_may_have_happened(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says that it never reached the proxy."""
    monkeypatch.setenv("http_proxy", endpoint.url)
    monkeypatch.setenv("no_proxy", "")
    endpoint.answer = lambda *_: None
    blob = unprobed("http://s3.invalid")
    with pytest.raises(Indeterminate, match="set a at s3://bucket/p"):
        blob.set("a", b"x")
    assert [(verb, path) for verb, path, _ in endpoint.requests] == [("PUT", "http://s3.invalid/bucket/p/a")]
    blob.close()


@pytest.mark.parametrize("body", [b"", b"<html>sign in</html>"])
@pytest.mark.parametrize("status", [200, 201, 204])
def test_a_put_that_another_server_answers_is_not_stored(endpoint: Endpoint, status: int, body: bytes) -> None:
    """S3 names the ETag of what it stored."""
    endpoint.answer = lambda *_: (status, body if status != 204 else b"", {"ETag": None})
    blob = unprobed(endpoint.url)
    with pytest.raises(Indeterminate, match="set a at s3://bucket/p: the answer has no ETag"):
        blob.set("a", b"x")
    blob.close()


PAGE = b"<html>\n<title>Sign in</title>\x1b[31m" + b"x" * 500


@pytest.mark.parametrize("etag", [None, '"5f-1"'])
def test_a_page_of_another_server_is_no_object(endpoint: Endpoint, etag: str | None) -> None:
    """A proxy that asks to sign in: its page was corrupt data, and a deletion that it answered was done."""
    endpoint.answer = lambda *_: (200, PAGE, {"ETag": etag, "Content-Type": "text/html; charset=utf-8"})
    blob = unprobed(endpoint.url)
    said = "S3 did not give this answer: .*534 bytes of type 'text/html' from server 'BaseHTTP[^']*'"
    begun = r", which begin with '<html> <title>Sign in</title>\\x1b\[31mx{70,90}'; look for a proxy"
    for read in (lambda: blob.get("a"), lambda: blob.get_range("a", 0, 9)):
        with pytest.raises(Indeterminate, match=f"^get a at s3://bucket/p: {said}{begun}"):
            read()
    with pytest.raises(Indeterminate, match=f"^delete a at s3://bucket/p: {said}; look for a proxy"):
        blob.delete("a")
    assert {verb for verb, *_ in endpoint.requests} == {"GET", "HEAD"}, "nothing is deleted there"
    blob.close()


def test_bytes_that_may_be_rows_are_in_no_message(endpoint: Endpoint) -> None:
    endpoint.answer = lambda *_: (200, b"SECRET", {"ETag": None, "Content-Type": "binary/octet-stream"})
    blob = unprobed(endpoint.url)
    with pytest.raises(Indeterminate, match="no ETag, 6 bytes of type 'binary/octet-stream'") as refused:
        blob.get("a")
    assert "SECRET" not in str(refused.value)
    blob.close()


@pytest.mark.parametrize("status", [301, 302, 307])
def test_an_endpoint_that_begins_to_redirect_is_a_failure_of_the_store(endpoint: Endpoint, status: int) -> None:
    """A bucket that moved, or a gateway that asks to sign in: calls are repeated, as after each failure of a store."""
    endpoint.answer = lambda *_: (status, b"", {"Location": f"{endpoint.url}/elsewhere"})
    blob = unprobed(endpoint.url)
    calls: list[Callable[[], object]] = [
        lambda: blob.set("a", b"x"),
        lambda: blob.get("a"),
        lambda: blob.get_range("a", 0, 1),
        lambda: blob.delete("a"),
        lambda: list(blob.list_prefix("")),
    ]
    for call in calls:
        with pytest.raises(Indeterminate, match="at s3://bucket/p: the endpoint redirects without end"):
            call()
    blob.close()


def test_a_gateway_that_ran_out_of_patience_does_not_know(endpoint: Endpoint) -> None:
    endpoint.answer = lambda *_: (408, b"", {})
    blob = unprobed(endpoint.url)
    with pytest.raises(Indeterminate, match=r"set a at .*\(408\)"):
        blob.set("a", b"x")
    blob.close()


@pytest.mark.slow
def test_a_store_that_keeps_other_bytes_than_it_was_given_is_refused(endpoint: Endpoint) -> None:
    """Some keep the chunks a body is sent in, with their lengths."""
    won = threading.Lock()

    def answer(verb: str, _: str, __: bytes) -> Answer:
        if verb == "PUT":
            return (200, b"", {}) if won.acquire(blocking=False) else (412, b"", {})
        return (200, b"1\r\n7\r\n0\r\n", {}) if verb == "GET" else (204, b"", {})

    endpoint.answer = answer
    with pytest.raises(UnsafeStore, match="1 of 16 racing puts won"):
        open_blob(url_at(endpoint.url), env=SystemEnv(), metrics=NoMetrics())


@pytest.mark.parametrize("address", ["http://u:SECRET@127.0.0.1:1", "http://u:SECRET@a b", "u:SECRET@host"])
@pytest.mark.parametrize("query", ["", "&probe=false"])
def test_credentials_in_the_endpoint_are_refused_and_not_shown(address: str, query: str) -> None:
    with pytest.raises(InvalidUsage, match="the endpoint has an @") as refused:
        open_blob(url_at(address, query), env=SystemEnv(), metrics=NoMetrics())
    assert "SECRET" not in f"{refused.value!r}{refused.value.__cause__!r}"


@pytest.mark.slow
def test_rotated_credentials_need_no_new_process(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """boto3 reads the file that pods mount once for each client: the revoked key would have been used, and refused, for ever."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    valid = "first"

    def answer(*_: object) -> Answer:
        known = f"Credential={valid}/" in endpoint.authorization
        return (200, b"", {}) if known else (403, b"<Error><Code>InvalidAccessKeyId</Code></Error>", {})

    def mount(name: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = secret\n")

    endpoint.answer = answer
    mount("first")
    env = LateEnv()
    blob = unprobed(endpoint.url, env)
    blob.set("a", b"x")
    valid = "second"
    with pytest.raises(Determinate, match="InvalidAccessKeyId"):
        blob.set("a", b"x")
    file.unlink()
    for _ in range(2):
        env.late_s += CREDENTIALS_S
        with pytest.raises(Determinate, match="set a at s3://bucket/p"):
            blob.set("a", b"x")
    mount("second")
    env.late_s += CREDENTIALS_S
    blob.set("a", b"x")
    blob.close()


def test_a_token_that_expired_is_read_anew_when_only_deletions_notice_it(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers 400 to a HEAD with an expired token, and such an answer has no body that names the reason."""
    valid = "first"

    def answer(verb: str, *_: object) -> Answer:
        if f"Credential={valid}/" in endpoint.authorization:
            return (200, b"", {}) if verb == "HEAD" else (204, b"", {})
        return (400, b"<Error><Code>ExpiredToken</Code></Error>", {})

    endpoint.answer = answer
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    blob = unprobed(endpoint.url)
    assert blob.delete("a") == 0
    valid = "second"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    with pytest.raises(Determinate, match=r"delete a at s3://bucket/p: .*400"):
        blob.delete("a")
    assert blob.delete("a") == 0
    blob.close()


FORKS = """
import os, sys
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.s3.blob import S3Blob
from persist_engine.storage.s3.connect import s3_client
from persist_engine.storage.addresses import S3Address

at = S3Address.parse(sys.argv[1])
where = {"bucket": "bucket", "prefix": "p/", "address": "s3://bucket/p", "env": SystemEnv(), "metrics": NoMetrics()}
blob = S3Blob(lambda: s3_client(at), **where)
blob.get("before")
child = os.fork()
if not child:
    blob.get("child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
blob.get("after")
"""


@pytest.mark.slow
def test_a_fork_takes_no_connection_along(endpoint: Endpoint) -> None:
    """Both sides would read from it, each the other's answers."""
    subprocess.run([sys.executable, "-c", FORKS, url_at(endpoint.url), endpoint.url], check=True, timeout=120)
    connection = {path.rpartition("/")[2]: port for _, path, port in endpoint.requests}
    assert set(connection) == {"before", "child", "after"}
    assert connection["after"] == connection["before"], "connections are kept, or this proves nothing"
    assert connection["child"] != connection["before"]


def test_a_second_client_reads_no_descriptions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = S3Address(bucket="b", region="us-east-1")
    s3_client(address).close()

    def read(*_args: object) -> None:
        raise AssertionError("descriptions of services are read again")

    monkeypatch.setattr(botocore.loaders.JSONFileLoader, "load_file", read)
    s3_client(address).close()


@pytest.mark.slow
def test_regression_a_closed_store_refuses_calls_and_connects_no_more(endpoint: Endpoint) -> None:
    """It opened new connections: a retry with a closed client never ended."""
    blob = unprobed(endpoint.url)
    assert blob.get("a") is None
    blob.close()
    blob.close()
    asked = len(endpoint.requests)
    calls: list[Callable[[], object]] = [
        lambda: blob.get("a"),
        lambda: blob.set("a", b"x"),
        lambda: blob.delete("a"),
        lambda: list(blob.list_prefix("")),
        lambda: blob.restore("a"),
    ]
    for call in calls:
        with pytest.raises(InvalidUsage, match="s3://bucket/p: the store was closed"):
            call()
    assert len(endpoint.requests) == asked
