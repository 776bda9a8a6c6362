"""Blob on S3 and compatible servers, through boto3. Credentials come from the address's folder, or else from boto3's own chain.

The client differs from boto3's defaults. It sends no `Expect: 100-continue`, which doubles the latency of a put. The SDK does not
retry, because a retry turns the lost answer of a winning conditional put into a refusal; callers retry. Time-outs are seconds. The
driver's time-outs bound only silence, so `deadlines` bounds each call as a whole. A CRC32 is sent with every put and stored, and
every get is checked against it.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar
from urllib.parse import urlsplit

import botocore.exceptions
import botocore.parsers

from persist_engine.base.env import Env
from persist_engine.base.errors import (
    CorruptData,
    Determinate,
    Indeterminate,
    InvalidUsage,
    NotKept,
    PersistError,
    StorageError,
    StoreRefused,
    UnsafeStore,
)
from persist_engine.base.metrics import Metrics
from persist_engine.storage.addresses import S3Address
from persist_engine.storage.blob import BlobInfo, KeptBlob
from persist_engine.storage.checks import check_blob_key, check_blob_value, check_prefix, check_range
from persist_engine.storage.refusals import check_pem, is_untrusted, speaks_tls
from persist_engine.storage.s3.answers import REQUEST_TIMEOUT, UNDECIDED_CODES, code_of, from_s3, is_refusal, status_of
from persist_engine.storage.s3.connect import NOT_ENCRYPTED, encryption_of, remedy, s3_client, trusted
from persist_engine.storage.s3.deadlines import Allowance, CallLimits, Deadlines, NotBegun, race

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: The limits of a whole call: connecting, silence before and after the bytes, and the bytes on the slowest plausible line.
LIMITS = CallLimits(base_s=60.0, bytes_per_s=128 << 10, threads_max=64)
#: Refused credentials are read again at most once in this time, because a new client costs 15 ms of a core and new connections.
CREDENTIALS_S = 5.0
#: The number of concurrent puts of the probe. Servers that only pretend conditional writes showed 2 to 16 winners of 16.
PROBE_RACERS = 16
#: The limit on rounds. A round without a winner (all answers are 409, "conflict, try again") is repeated.
PROBE_ROUNDS_MAX = 5
#: The answer of servers without object versions to a request for versions.
NOT_IMPLEMENTED = 501
#: The answer to a range that begins past the end of the object.
NOT_IN_OBJECT = 416
#: Where probes write; excluded from every listing.
PROBE_FOLDER = ".persist-probe/"

T = TypeVar("T")


class _Place(TypedDict):
    Bucket: str
    Key: str


_probed: set[str] = set()
_probed_lock = threading.Lock()


def open_s3_blob(at: S3Address, *, env: Env, metrics: Metrics) -> S3Blob:
    """Connect, check that the bucket answers and, once per process and location, that conditional writes exclude each other.

    Raises UnsafeStore if they do not, InvalidUsage if the ca_file does not exist, and StoreRefused if bucket, credentials or endpoint
    are wrong. Raises Determinate or Indeterminate, which name address, bucket and code, if the store cannot be reached.
    `probe=False` skips the check of conditional writes, for readers that may not write.
    """
    address = f"s3://{at.bucket}/{at.prefix}" + (f" ({_host_of(at.endpoint)})" if at.endpoint else "")
    prefix = f"{at.prefix}/" if at.prefix else ""
    # boto3's own error does not name the file, and looks like a broken network.
    if at.ca_file is not None and not Path(at.ca_file).is_file():
        raise InvalidUsage(f"open {address}: there is no file {at.ca_file}; correct the parameter, or mount the file")
    check_pem(address, ca=trusted(at))
    try:
        blob = S3Blob(
            lambda: s3_client(at),
            bucket=at.bucket,
            prefix=prefix,
            address=address,
            env=env,
            metrics=metrics,
            encryption=encryption_of(at),
        )
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise InvalidUsage(f"open {address}: {error}") from error
    try:
        if at.probe:
            blob.probe()
        else:
            next(blob.list_prefix("probe"), None)
    except StorageError as error:
        blob.close()
        if isinstance(error.__cause__, RecursionError):
            raise StoreRefused(f"open blob store: {error}: check that it is S3, and whether it needs https") from error
        if _needs_https(at.endpoint):
            raise StoreRefused(
                f"open blob store: {error}: the server speaks TLS; use an endpoint with https://"
            ) from error
        if is_refusal(error.__cause__):
            raise StoreRefused(f"open blob store: {error}; {remedy(error.__cause__)}") from error
        raise
    except BaseException:
        blob.close()
        raise
    return blob


class S3Blob:
    """Objects under `prefix` (empty or ending in a slash) of one bucket. Thread-safe, and usable on both sides of a fork."""

    def __init__(
        self,
        connect: Callable[[], S3Client],
        *,
        bucket: str,
        prefix: str,
        address: str,
        env: Env,
        metrics: Metrics,
        limits: CallLimits = LIMITS,
        encryption: Mapping[str, str] = NOT_ENCRYPTED,
    ) -> None:
        """`encryption` holds the arguments of every put that request encryption from the server."""
        self._connect = connect
        self._encryption = encryption
        self._env = env
        self._deadlines = Deadlines(limits, address=address, env=env, metrics=metrics)
        self._renewed_s = -math.inf
        self._opened: tuple[int, S3Client] = os.getpid(), connect()
        self._closed = False
        self._bucket = bucket
        self._prefix = prefix
        self._address = address

    def get(self, key: str) -> bytes | None:
        """See Blob. Bytes that fail their checksum are fetched once more. A second failure raises CorruptData."""
        check_blob_key(key)
        try:
            return self._fetch(key, lambda: self._read(key, "get"))
        except botocore.exceptions.FlexibleChecksumError:
            pass  # the bytes were damaged in transit or at rest; the second fetch decides which
        try:
            return self._fetch(key, lambda: self._read(key, "get"))
        except botocore.exceptions.FlexibleChecksumError as error:
            raise CorruptData(f"get {key} at {self._address}: {error}", key=key) from error

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """See Blob. Makes one request. If a server ignores the range and sends the whole object, this still returns the range."""
        check_range(key, start, size_bytes)

        def read(client: S3Client, allowance: Allowance) -> bytes:
            found = from_s3(client.get_object(**self._at(key), Range=f"bytes={start}-{start + size_bytes - 1}"))
            allowance.add(found.get("ContentLength", 0))
            data = found["Body"].read()
            return data if "ContentRange" in found else data[start : start + size_bytes]

        try:
            return self._fetch(key, lambda: self._run("get", read))
        except botocore.exceptions.FlexibleChecksumError:  # some servers send the whole object's checksum with a piece
            return None if (whole := self.get(key)) is None else whole[start : start + size_bytes]

    def set(self, key: str, value: bytes) -> None:
        """See Blob. Makes one request, whatever the size. S3 names the ETag of what it stored. An answer without an ETag comes from another
        server, for example from a proxy that asks to sign in, although the driver takes every 200 for success.
        """
        check_blob_value(key, value)
        at, body = self._at(key), self._body(value)
        try:
            stored = self._run("set", lambda client, _: client.put_object(**at, **body), byte_count=len(value))
        except _DRIVER_ERRORS as error:
            raise self._mapped("set", key, error) from error
        if not stored.get("ETag"):
            raise Indeterminate(
                f"set {key} at {self._address}: the answer has no ETag, so it is not known to be stored", key=key
            )

    def delete(self, key: str) -> int | None:
        """See Blob. The size is read just before the delete; it is 0 if a proxy dropped it from the answer."""
        check_blob_key(key)
        size = self._size(key, "delete")
        if size is None:
            return None
        at = self._at(key)
        try:
            self._run("delete", lambda client, _: client.delete_object(**at))
        except _DRIVER_ERRORS as error:
            if code_of(error) in _MISSING_CODES:
                return None
            raise self._mapped("delete", key, error) from error
        return size

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob. One request per thousand objects."""
        check_prefix(prefix)
        try:
            for page in self._pages("list_objects_v2", "list", self._prefix + prefix):
                self._check_whole(page, "NextContinuationToken", "list", prefix)
                for row in page.get("Contents", ()):
                    key = row["Key"].removeprefix(self._prefix)
                    if not key.startswith(PROBE_FOLDER):
                        yield BlobInfo(key, row["Size"])
        except _DRIVER_ERRORS as error:
            raise self._mapped("list", prefix, error) from error

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob. Yields the versions of a bucket's keys that are not the latest. A store without versions keeps none."""
        check_prefix(prefix)
        try:
            for page in self._pages("list_object_versions", "list versions", self._prefix + prefix):
                self._check_whole(page, "NextKeyMarker", "list versions", prefix)
                for row in page.get("Versions", ()):
                    if not row["IsLatest"]:
                        yield KeptBlob(row["Key"].removeprefix(self._prefix), row["VersionId"], row["Size"])
        except _DRIVER_ERRORS as error:
            if status_of(error) != NOT_IMPLEMENTED:
                raise self._mapped("list versions", prefix, error) from error

    def restore(self, key: str) -> None:
        """See Blob. In a bucket with versions, removing its delete markers brings a deleted object back.

        Any of several versions will do, because the content under a key is fixed.
        """
        check_blob_key(key)
        if self._size(key, "restore") is not None:
            return
        name = self._prefix + key
        markers: list[str] = []
        kept = 0
        try:
            for page in self._pages("list_object_versions", "restore", name):
                self._check_whole(page, "NextKeyMarker", "restore", key)
                kept += sum(row["Key"] == name for row in page.get("Versions", ()))
                markers += [row["VersionId"] for row in page.get("DeleteMarkers", ()) if row["Key"] == name]
            for marker in markers if kept else ():
                self._unmark(key, marker)
        except _DRIVER_ERRORS as error:
            if status_of(error) != NOT_IMPLEMENTED:
                raise self._mapped("restore", key, error) from error
        if not kept or self._size(key, "restore") is None:
            raise NotKept(f"restore {key} at {self._address}: the bucket keeps no version of it", key=key)

    def address(self) -> str:
        """See Blob."""
        return self._address

    def close(self) -> None:
        """See Blob. Calls in progress finish normally."""
        self._closed = True
        pid, client = self._opened
        if pid in (os.getpid(), _NO_PROCESS):
            client.close()

    def probe(self) -> None:
        """Races conditional puts for one new key. Raises UnsafeStore unless exactly one wins, the object has its bytes, and the server
        encrypts as requested.

        This process does not probe a location again after it passed. The object is deleted in any case.
        """
        location = f"{self._address} {dict(self._encryption)}"
        with _probed_lock:
            if location in _probed:
                return
        key = f"{PROBE_FOLDER}{self._env.random_bytes(16).hex()}"
        try:
            for _ in range(PROBE_ROUNDS_MAX):
                outcomes = race(lambda racer: self._put_if_absent(key, racer), PROBE_RACERS)
                winners = [racer for racer, outcome in enumerate(outcomes) if outcome == "won"]
                if winners:
                    break
            if len(winners) != 1 or self._kept_at(key) != b"%d" % winners[0]:
                raise UnsafeStore(
                    f"{self._address}: conditional writes (If-None-Match: *) do not exclude each other, "
                    f"{len(winners)} of {PROBE_RACERS} racing puts won; {_WHAT_TO_CHANGE}"
                )
        finally:
            self._forget_probe(key)
        with _probed_lock:
            _probed.add(location)

    @property
    def _client(self) -> S3Client:
        """The client of this process. A forked child needs another one: over copied connections, parent and child would receive
        each other's answers. The client reads the files of credentials and CAs only once. So it is recreated, at most every
        CREDENTIALS_S, after its credentials or the server's certificate were refused.
        """
        if self._closed:
            # This is not a store error, because retry loops would repeat it without end.
            raise InvalidUsage(f"{self._address}: the store was closed")
        pid, client = self._opened
        if pid != os.getpid():
            client = self._connect()
            self._opened = os.getpid(), client
        return client

    def _at(self, key: str) -> _Place:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _body(self, value: bytes) -> Any:
        """The arguments of a put for its bytes, with their checksum. Otherwise, if the server has TLS, boto3 would send the bytes in chunks
        with its own checksum behind them. Not every server understands that, and a server that refuses early breaks the connection.
        """
        return {"Body": value, "ChecksumCRC32": b64encode(zlib.crc32(value).to_bytes(4)).decode(), **self._encryption}

    def _run(self, verb: str, call: Callable[[S3Client, Allowance], T], *, byte_count: int = 0) -> T:
        """Runs one request, including its whole answer, within the time allowed for its bytes."""
        client = self._client
        return self._deadlines.run(verb, lambda allowance: call(client, allowance), byte_count=byte_count)

    def _pages(
        self, operation: Literal["list_objects_v2", "list_object_versions"], verb: str, prefix: str
    ) -> Iterator[Any]:
        pages = iter(self._client.get_paginator(operation).paginate(Bucket=self._bucket, Prefix=prefix))
        while (page := self._run(verb, lambda *_: next(pages, None))) is not None:
            yield page

    def _unmark(self, key: str, marker: str) -> None:
        self._run("restore", lambda client, _: client.delete_object(**self._at(key), VersionId=marker))

    def _put_if_absent(self, key: str, racer: int) -> str:
        at, body = self._at(key), b"%d" % racer
        try:
            answer = self._run("probe", lambda client, _: client.put_object(**at, IfNoneMatch="*", **self._body(body)))
        except _DRIVER_ERRORS as error:
            if status_of(error) in (409, 412):
                return "lost"
            if status_of(error) == 501:
                raise UnsafeStore(
                    f"{self._address}: conditional writes (If-None-Match: *) are not implemented; {_WHAT_TO_CHANGE}"
                ) from error
            raise self._mapped("probe", "", error) from error
        if (asked := self._encryption.get("ServerSideEncryption")) and answer.get("ServerSideEncryption") != asked:
            raise UnsafeStore(
                f"{self._address}: the server does not say that it encrypts what it is asked to encrypt ({asked}); "
                "use a server that does, or no encryption parameter"
            )
        return "won"

    def _kept_at(self, key: str) -> bytes:
        try:
            return self._read(key, "probe")
        except _DRIVER_ERRORS as error:
            raise self._mapped("probe", "", error) from error

    def _forget_probe(self, key: str) -> None:
        try:
            self._run("probe", lambda client, _: client.delete_object(**self._at(key)))
        except _DRIVER_ERRORS:
            return  # a few bytes remain; the result of the probe matters more

    def _fetch(self, key: str, read: Callable[[], bytes]) -> bytes | None:
        try:
            return read()
        except botocore.exceptions.FlexibleChecksumError:
            raise
        except _DRIVER_ERRORS as error:
            if code_of(error) in _MISSING_CODES:
                return None
            if status_of(error) == NOT_IN_OBJECT:
                return b""
            raise self._mapped("get", key, error) from error

    def _read(self, key: str, verb: str) -> bytes:
        def read(client: S3Client, allowance: Allowance) -> bytes:
            found = from_s3(client.get_object(**self._at(key)))
            allowance.add(found.get("ContentLength", 0))
            return found["Body"].read()

        return self._run(verb, read)

    def _size(self, key: str, verb: str) -> int | None:
        at = self._at(key)

        def looked_at(client: S3Client, _: Allowance) -> int:
            found = from_s3(client.get_object(**at))
            found["Body"].close()
            return found.get("ContentLength", 0)

        try:
            try:
                return self._run(verb, lambda client, _: from_s3(client.head_object(**at))).get("ContentLength", 0)
            except botocore.exceptions.ClientError as error:
                if status_of(error) != 404:
                    raise
            # An answer to HEAD has no body, so only a GET distinguishes a missing object from a missing bucket.
            return self._run(verb, looked_at)
        except _DRIVER_ERRORS as error:
            if code_of(error) in _MISSING_CODES:
                return None
            raise self._mapped(verb, key, error) from error

    def _check_whole(self, page: Mapping[str, Any], next_page: str, verb: str, key: str) -> None:
        """Raises Indeterminate if the driver would not list everything. The driver takes an answer that was cut off before its
        first byte for an empty page, and an answer without the start of the next page for the last page.
        """
        says_nothing = "IsTruncated" not in page and "Name" not in page
        if says_nothing or (page.get("IsTruncated") and not page.get(next_page)):
            text = f"{verb} {key}".rstrip() + f" at {self._address}: the listing of bucket {self._bucket} is incomplete"
            raise Indeterminate(text, key=key)

    def _mapped(self, verb: str, key: str, error: Exception) -> PersistError:
        text = f"{verb} {key}".rstrip() + f" at {self._address}"
        if code_of(error) in _REFUSED_CREDENTIALS or isinstance(error, _NO_CREDENTIALS) or is_untrusted(error):
            now_s = self._env.monotonic_s()
            if now_s - self._renewed_s >= CREDENTIALS_S:
                self._renewed_s = now_s
                self._opened = _NO_PROCESS, self._opened[1]  # other threads may still use it
        if isinstance(error, botocore.exceptions.ClientError):
            status, code = status_of(error), code_of(error)
            text += f": bucket {self._bucket}: {code} ({status}): {error.response.get('Error', {}).get('Message', '')}"
            refused = 400 <= status < 500 and status != REQUEST_TIMEOUT and code not in UNDECIDED_CODES
            return (Determinate if refused else Indeterminate)(text, key=key, code=code)
        if isinstance(error, RecursionError):  # the driver follows redirects by recursion
            return Indeterminate(f"{text}: the endpoint redirects without end", key=key)
        kind = Determinate if isinstance(error, _NEVER_SENT) else Indeterminate
        return kind(f"{text}: {error}", key=key)


_WHAT_TO_CHANGE = (
    "use a server that honours them (AWS S3, MinIO, versitygw, Ceph), without a proxy that drops the header"
)
#: No process has this id.
_NO_PROCESS = -1
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
)
#: The codes for which other credentials may help. "403" and "400" are answers without a body; "400" is that to an expired token.
_REFUSED_CREDENTIALS = ("400", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
_DRIVER_ERRORS = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    botocore.parsers.ResponseParserError,
    OSError,
    RecursionError,
)
#: The errors that are raised before a request is sent. The error of a failing proxy is not one of them: if the proxy resets a
#: connection after the request, the driver reports it as a connection that was never made.
_NEVER_SENT = (
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ConnectTimeoutError,
    NotBegun,
    *_NO_CREDENTIALS,
)
_MISSING_CODES = ("NoSuchKey",)


def _needs_https(endpoint: str | None) -> bool:
    """Whether the server at an endpoint with http:// speaks TLS."""
    split = urlsplit(endpoint or "")
    return split.scheme == "http" and split.hostname is not None and speaks_tls(split.hostname, split.port or 80)


def _host_of(endpoint: str) -> str:
    return endpoint.partition("://")[2].partition("/")[0]
