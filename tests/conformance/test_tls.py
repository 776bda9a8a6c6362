"""Stores behind TLS: the CAs that a client trusts, its own certificate and user, and the encryption that it asks for. On real servers."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, PersistError, StorageError, StoreRefused, UnsafeStore
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.addresses import with_credentials
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.open import open_blob, open_consensus, open_push
from persist_kit.servers import RedisServer, S3Server, certificates, redis_server, s3_server

KEY = "s00000000-0000-0000-0000-000000000001"
PASSWORD = "pass phrase/%"  # noqa: S105 - of a server of this test


def blob_at(url: str) -> Blob:
    return open_blob(url, env=SystemEnv(), metrics=NoMetrics())


def consensus_at(url: str) -> Consensus:
    return open_consensus(url, env=SystemEnv(), metrics=NoMetrics())


@pytest.fixture(scope="module")
def strict_redis() -> Iterator[RedisServer]:
    """Wants a certificate, and a user with a password."""
    with redis_server(tls=True, wants_certificate=True, password="admin") as server:  # noqa: S106
        server.command(
            "ACL", "SETUSER", "team", "on", f">{PASSWORD}", "~team*", "&team*", "+@all", "-@admin", "+config|get"
        )
        yield server


def folder_for(server: RedisServer, folder: Path, **changes: str) -> Path:
    """The mounted keys of a Secret, with `changes`; an empty text leaves a key out."""
    texts = {
        "redis-username": "team\n",
        "redis-password": f"{PASSWORD}\n",
        "redis-ca.crt": Path(str(server.ca_file)).read_text(),
        "redis-tls.crt": server.cert_file.read_text(),
        "redis-tls.key": server.key_file.read_text(),
    }
    folder.mkdir()
    for name, text in (texts | changes).items():
        if text:
            (folder / name).write_text(text)
    return folder


def bare(server: RedisServer) -> str:
    return f"rediss://{server.address}/0?prefix=team"


@pytest.mark.redis
def test_a_folder_names_user_password_authority_and_certificate(strict_redis: RedisServer, tmp_path: Path) -> None:
    url = with_credentials(bare(strict_redis), str(folder_for(strict_redis, tmp_path / "secret")))
    consensus = consensus_at(url)
    assert consensus.head(KEY) is None
    assert strict_redis.command("ACL", "LOG").startswith(b"*0"), "nothing was refused"
    consensus.close()


@pytest.mark.redis
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"redis-ca.crt": ""}, "certificate verify failed"),
        ({"redis-tls.key": ""}, "(?i)PEM"),
        ({"redis-password": "wrong"}, "(?i)WRONGPASS|invalid username-password"),
        ({"redis-username": ""}, "(?i)WRONGPASS|invalid username-password"),
        ({"redis-username": "stranger"}, "(?i)WRONGPASS|invalid username-password"),
    ],
)
def test_without_one_of_them_the_store_is_refused_in_its_words(
    strict_redis: RedisServer, tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    folder = folder_for(strict_redis, tmp_path / "secret", **changes)
    with pytest.raises(StoreRefused, match=words) as caught:
        consensus_at(with_credentials(bare(strict_redis), str(folder)))
    assert strict_redis.address in str(caught.value)
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
    assert PASSWORD not in shown
    assert "PRIVATE KEY" not in shown


@pytest.mark.redis
def test_without_a_certificate_nothing_is_answered(strict_redis: RedisServer, tmp_path: Path) -> None:
    """The server says why, and closes. It is a race whether the client reads that before it meets the closed connection."""
    folder = folder_for(strict_redis, tmp_path / "secret", **{"redis-tls.crt": "", "redis-tls.key": ""})
    with pytest.raises(PersistError, match=f"{strict_redis.address}.*(?i:certificate required|EOF|reset|broken pipe)"):
        consensus_at(with_credentials(bare(strict_redis), str(folder)))


@pytest.mark.redis
def test_another_authority_is_not_trusted(strict_redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = certificates(tmp_path / "other").read_text()
    folder = folder_for(strict_redis, tmp_path / "secret", **{"redis-ca.crt": other})
    with pytest.raises(StoreRefused, match="certificate verify failed"):
        consensus_at(with_credentials(bare(strict_redis), str(folder)))


@pytest.mark.redis
def test_an_address_names_its_own_files(strict_redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("admin")
    url = f"rediss://{strict_redis.address}/0?password_file={tmp_path}/password&ca_file={strict_redis.ca_file}"
    consensus_at(f"{url}&cert_file={strict_redis.cert_file}&key_file={strict_redis.key_file}").close()
    with pytest.raises(InvalidUsage, match="there is no file /nowhere"):
        consensus_at(f"{url}&cert_file={strict_redis.cert_file}&key_file=/nowhere")


@pytest.mark.redis
def test_a_file_that_is_no_pem_is_named(strict_redis: RedisServer, tmp_path: Path) -> None:
    """OpenSSL says that something is wrong, and not with which file."""
    (tmp_path / "password").write_text("admin")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    url = f"rediss://{strict_redis.address}/0?password_file={tmp_path}/password"
    with pytest.raises(StoreRefused, match=f"{strict_redis.address}.*{wrong} holds no certificates as PEM"):
        consensus_at(f"{url}&ca_file={wrong}")
    url += f"&ca_file={strict_redis.ca_file}"
    other = f"{url}&cert_file={strict_redis.cert_file}&key_file={wrong}"
    with pytest.raises(StoreRefused, match=f"{strict_redis.cert_file} and {wrong} are not a certificate and its"):
        consensus_at(other)
    with pytest.raises(StoreRefused, match=f"{wrong} holds no certificates as PEM"):
        blob_at(f"s3://bucket/p?endpoint=https%3A%2F%2Flocalhost&region=us-east-1&ca_file={wrong}")
    folder = folder_for(strict_redis, tmp_path / "secret", **{"redis-ca.crt": "none"})
    with pytest.raises(StoreRefused, match=r"redis-ca\.crt holds no certificates as PEM"):
        consensus_at(with_credentials(bare(strict_redis), str(folder)))


@pytest.mark.redis
def test_rotated_files_are_used_by_the_next_connection(strict_redis: RedisServer, tmp_path: Path) -> None:
    folder = folder_for(strict_redis, tmp_path / "secret")
    consensus = consensus_at(with_credentials(bare(strict_redis), str(folder)))
    strict_redis.command("ACL", "SETUSER", "team", "resetpass", ">rotated")
    (folder / "redis-password").write_text("rotated")
    assert strict_redis.command("CLIENT", "KILL", "USER", "team").startswith(b":1")
    with contextlib.suppress(StorageError):
        consensus.head(KEY)  # meets the connection that was killed, or makes a new one
    assert consensus.head(KEY) is None
    consensus.close()
    strict_redis.command("ACL", "SETUSER", "team", "resetpass", f">{PASSWORD}")


@pytest.mark.redis
def test_news_arrive_over_the_same_connection_rules(strict_redis: RedisServer, tmp_path: Path) -> None:
    folder = folder_for(strict_redis, tmp_path / "secret")
    push = open_push(with_credentials(bare(strict_redis), str(folder)), env=SystemEnv(), metrics=NoMetrics())
    push.close()


@pytest.fixture(scope="module")
def s3_behind_tls() -> Iterator[S3Server]:
    with s3_server(tls=True) as server:
        yield server


@pytest.fixture
def keys(s3_behind_tls: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_behind_tls.environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.s3
def test_a_bundle_is_what_is_trusted(s3_behind_tls: S3Server, keys: None, tmp_path: Path) -> None:
    url = s3_behind_tls.location("bundle")
    with pytest.raises(StoreRefused, match="certificate verify failed"):
        blob_at(url)
    with pytest.raises(InvalidUsage, match="there is no file /nowhere"):
        blob_at(f"{url}&ca_file=/nowhere")
    shutil.copy(str(s3_behind_tls.ca_file), tmp_path / "s3-ca.crt")
    for trusting in (f"{url}&ca_file={s3_behind_tls.ca_file}", with_credentials(url, str(tmp_path))):
        blob = blob_at(trusting)
        blob.set("a", b"x" * 100_000)
        assert blob.get("a") == b"x" * 100_000
        assert [one.key for one in blob.list_prefix("")] == ["a"]
        blob.close()


@pytest.mark.s3
def test_many_puts_of_a_key_that_exists_end_as_refusals(s3_behind_tls: S3Server, keys: None) -> None:
    """Regression: behind TLS, boto3 sent a checksum after the body. The server had refused the put and closed by then."""
    for number in range(5):
        blob_at(f"{s3_behind_tls.location(f'race{number}')}&ca_file={s3_behind_tls.ca_file}").close()


class Encrypting(http.server.BaseHTTPRequestHandler):
    """Passes everything to a real server, and says of puts that they are encrypted as they ask. Records what puts ask."""

    protocol_version = "HTTP/1.1"
    target: S3Server
    asked: list[tuple[str, str | None, str | None]]

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self.target.address)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        wish = self.headers.get("x-amz-server-side-encryption")
        if self.command == "PUT":
            key = self.headers.get("x-amz-server-side-encryption-aws-kms-key-id")
            self.asked.append((self.path.partition("?")[0], wish, key))
            if wish is not None:
                self.send_header("x-amz-server-side-encryption", wish)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_DELETE = serve

    def log_message(self, *_: object) -> None:
        pass


class Patient(http.server.ThreadingHTTPServer):
    request_queue_size = 64
    """The probe makes sixteen connections at once. Those that do not fit into the queue are reset."""


@contextmanager
def encrypting(target: S3Server) -> Iterator[tuple[str, list[tuple[str, str | None, str | None]]]]:
    asked: list[tuple[str, str | None, str | None]] = []
    handler = type("Bound", (Encrypting,), {"target": target, "asked": asked})
    with Patient(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.s3
@pytest.mark.parametrize(
    ("parameters", "wish"),
    [
        ("", (None, None)),
        ("&encryption=SSE-S3", ("AES256", None)),
        ("&encryption=SSE-KMS", ("aws:kms", None)),
        ("&encryption=SSE-KMS&kms_key_id=arn:aws:kms:eu-central-1:111122223333:key/k", ("aws:kms", "arn:aws:kms:eu-central-1:111122223333:key/k")),
    ],
)  # fmt: skip
def test_every_put_asks_for_the_encryption_of_the_address(
    s3: S3Server, fresh_name: str, parameters: str, wish: tuple[str | None, str | None]
) -> None:
    with encrypting(s3) as (address, asked):
        blob = blob_at(s3.location(fresh_name).replace(s3.address.replace(":", "%3A"), address) + parameters)
        probes = len(asked)
        assert probes >= 16, "the probe asks too: a bucket's policy may refuse every other put"
        blob.set("a", b"x")
        assert blob.get("a") == b"x"
        blob.close()
    assert len(asked) == probes + 1
    assert {one[1:] for one in asked} == {wish}


@pytest.mark.s3
def test_a_server_that_ignores_the_wish_is_refused(s3: S3Server, fresh_name: str) -> None:
    """versitygw stores in the clear and says nothing: data that had to be encrypted would not be."""
    with pytest.raises(UnsafeStore, match="does not say that it encrypts"):
        blob_at(f"{s3.location(fresh_name)}&encryption=SSE-S3")
    blob_at(s3.location(fresh_name)).close()
    with pytest.raises(UnsafeStore, match="does not say that it encrypts"):
        blob_at(f"{s3.location(fresh_name)}&encryption=SSE-S3")  # the test without encryption says nothing of this one
