"""Addresses of servers as typed fields. A URL is the text form of an address, for people and for arguments.

Every field is checked when an address is created and quoted when it is printed. `parse(url)` restores the address exactly, so
text in one field can never become another field. The settings of a resource reach a store only through these types.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args
from urllib.parse import quote, urlencode, urlsplit

from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.urls import StoreUrl, absolute_path, parse_url

S3_PARAMS = frozenset(
    {"region", "endpoint", "path_style", "ca_file", "probe", "credentials_dir", "encryption", "kms_key_id"}
)
REDIS_PARAMS = frozenset(
    {"prefix", "password_file", "credentials_dir", "ca_file", "cert_file", "key_file", "unsafe", "ack", "push"}
)
#: The files of a `credentials_dir`, named like the keys of the mounted Secret. Each is used if it exists. A CA bundle replaces the CAs of
#: the system. The certificate and its key identify this client. If an address names a file itself, that file is used instead.
S3_CREDENTIALS_FILE, S3_CA_FILE = "aws-credentials", "s3-ca.crt"
REDIS_USERNAME_FILE, REDIS_PASSWORD_FILE = "redis-username", "redis-password"
REDIS_CA_FILE, REDIS_CERT_FILE, REDIS_KEY_FILE = "redis-ca.crt", "redis-tls.crt", "redis-tls.key"

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_KMS_KEY = re.compile(r"[A-Za-z0-9:/_.-]{1,2048}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


Encryption = Literal["SSE-S3", "SSE-KMS"]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Address:
    """A location in a bucket. Raises InvalidUsage for invalid fields. Holds no credentials."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint: str | None = None
    path_style: bool = False
    ca_file: str | None = None
    probe: bool = True
    credentials_dir: str | None = None
    encryption: Encryption | None = None
    """How the server must encrypt each object at rest. With None, the bucket's own setting applies."""
    kms_key_id: str | None = None
    """The key for SSE-KMS. None means the account's own key for S3."""

    def __post_init__(self) -> None:
        _matches("bucket", self.bucket, _BUCKET)
        _plain("prefix", self.prefix)
        if self.prefix != self.prefix.strip("/"):
            raise InvalidUsage(f"s3: prefix {self.prefix!r} begins or ends with a slash")
        if self.region is not None:
            _matches("region", self.region, _REGION)
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
            if self.ca_file is not None and self.endpoint.startswith("http:"):
                raise InvalidUsage("s3: ca_file needs an endpoint with https://")
        for name, path in (("ca_file", self.ca_file), ("credentials_dir", self.credentials_dir)):
            _check_path(name, path)
        if self.encryption not in (None, *get_args(Encryption)):
            raise InvalidUsage(f"s3: encryption {self.encryption!r} is not known; use SSE-S3 or SSE-KMS")
        if self.kms_key_id is not None:
            _matches("kms_key_id", self.kms_key_id, _KMS_KEY)
            if self.encryption != "SSE-KMS":
                raise InvalidUsage("s3: kms_key_id needs encryption=SSE-KMS")

    @property
    def url(self) -> str:
        """The address on one line; `parse` restores it."""
        path = f"/{quote(self.prefix)}" if self.prefix else ""
        return f"s3://{self.bucket}{path}" + _query(
            region=self.region,
            endpoint=self.endpoint,
            path_style="true" if self.path_style else None,
            ca_file=self.ca_file,
            probe=None if self.probe else "false",
            credentials_dir=self.credentials_dir,
            encryption=self.encryption,
            kms_key_id=self.kms_key_id,
        )

    @classmethod
    def parse(cls, url: str) -> S3Address:
        """Parse `s3://bucket/prefix?...`. Raises InvalidUsage when the URL is not one of these."""
        return cls.of(parse_url(url, allowed={"s3": S3_PARAMS}))

    @classmethod
    def of(cls, url: StoreUrl) -> S3Address:
        """Build from a parsed URL. Raises InvalidUsage when the URL is not the address of such a store."""
        if not url.host or url.port is not None or url.user or url.password:
            raise InvalidUsage(
                f"{url.shown}: expected s3://bucket/prefix?endpoint=...; a URL cannot hold S3 credentials"
            )
        return cls(
            bucket=url.host,
            prefix=url.path.strip("/"),
            region=url.params.get("region"),
            endpoint=url.params.get("endpoint"),
            path_style=url.flag("path_style", default=False),
            ca_file=url.params.get("ca_file"),
            probe=url.flag("probe", default=True),
            credentials_dir=url.params.get("credentials_dir"),
            encryption=cast("Encryption | None", url.params.get("encryption")),
            kms_key_id=url.params.get("kms_key_id"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A database of a Redis primary, and the prefix of this location's keys in it. Raises InvalidUsage for invalid fields.

    No repr shows the password. `url` does, so print it only where the password may be known.
    """

    host: str
    """A name, an IPv4 address, or an IPv6 address in brackets."""
    port: int = 6379
    database: int = 0
    prefix: str = ""
    tls: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    credentials_dir: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    """The certificate of this client. `key_file` is its private key."""
    key_file: str | None = None
    unsafe: bool = False
    ack: Literal["redis"] | None = None
    push: bool = True

    def __post_init__(self) -> None:
        _matches("host", self.host, _HOST)
        if not 0 < self.port < 65536:
            raise InvalidUsage(f"redis: {self.port} is not a port (1 to 65535)")
        if self.database < 0:
            raise InvalidUsage(f"redis: {self.database} is not a database number (0 or more)")
        _plain("prefix", self.prefix)
        if "{" in self.prefix or "}" in self.prefix:
            raise InvalidUsage(f"redis: prefix {self.prefix!r} must not contain braces")
        for name, text in (("user", self.user), ("password", self.password)):
            if text is not None and (not text or _CONTROL.search(text)):
                raise InvalidUsage(f"redis: the {name} is empty or has control characters")
        for name, path in (
            ("ca_file", self.ca_file),
            ("cert_file", self.cert_file),
            ("key_file", self.key_file),
            ("password_file", self.password_file),
            ("credentials_dir", self.credentials_dir),
        ):
            _check_path(name, path)
        if sum(one is not None for one in (self.password, self.password_file, self.credentials_dir)) > 1:
            raise InvalidUsage("redis: give the password in the URL, in password_file or in credentials_dir, only once")
        if (self.ca_file or self.cert_file or self.key_file) and not self.tls:
            raise InvalidUsage("redis: ca_file, cert_file and key_file need rediss://")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidUsage("redis: cert_file and key_file belong together; give both or none")

    @property
    def url(self) -> str:
        """The address on one line, including a password; `parse` restores it."""
        user = quote(self.user or "", safe="") + ("" if self.password is None else f":{quote(self.password, safe='')}")
        return (
            f"{'rediss' if self.tls else 'redis'}://{user}{'@' if user else ''}{self.host}:{self.port}/{self.database}"
        ) + _query(
            prefix=self.prefix or None,
            password_file=self.password_file,
            credentials_dir=self.credentials_dir,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
            unsafe="true" if self.unsafe else None,
            ack=self.ack,
            push=None if self.push else "off",
        )

    @property
    def shown(self) -> str:
        """The address for messages, without credentials and parameters."""
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse `redis[s]://[user[:password]@]host[:port][/database]?...`. Raises InvalidUsage when the URL is not one of these."""
        return cls.of(parse_url(url, allowed={"redis": REDIS_PARAMS, "rediss": REDIS_PARAMS}))

    @classmethod
    def of(cls, url: StoreUrl) -> RedisAddress:
        """Build from a parsed URL. Raises InvalidUsage when the URL is not the address of such a store."""
        database, ack, push = url.path.strip("/") or "0", url.params.get("ack"), url.params.get("push", "on")
        if not url.host or re.fullmatch("[0-9]{1,9}", database) is None:
            raise InvalidUsage(f"{url.shown}: expected {url.scheme}://host[:port][/database number]")
        if push not in ("on", "off"):
            raise InvalidUsage(f"{url.shown}: parameter push must be on or off")
        if ack not in (None, "redis"):
            raise InvalidUsage(f"{url.shown}: acknowledgement mode {ack!r} is not known; use ack=redis")
        return cls(
            host=url.host,
            port=6379 if url.port is None else url.port,
            database=int(database),
            prefix=url.params.get("prefix", ""),
            tls=url.scheme == "rediss",
            user=url.user,
            password=url.password,
            password_file=url.params.get("password_file"),
            credentials_dir=url.params.get("credentials_dir"),
            ca_file=url.params.get("ca_file"),
            cert_file=url.params.get("cert_file"),
            key_file=url.params.get("key_file"),
            unsafe=url.flag("unsafe", default=False),
            ack="redis" if ack else None,
            push=push == "on",
        )


def with_credentials(url: str, folder: str | None) -> str:
    """Return the `url` of a store, changed so that its credentials come only from `folder` (None: unchanged). URLs of stores
    that need no credentials stay unchanged.

    Raises InvalidUsage for a URL that already specifies credentials or their location, because one of the two would be ignored.
    """
    address: S3Address | RedisAddress
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        address = S3Address.parse(url)
        says_where = address.credentials_dir
    elif scheme in ("redis", "rediss"):
        address = RedisAddress.parse(url)
        says_where = address.credentials_dir or address.password_file or address.password or address.key_file
    else:
        return url
    if says_where:
        raise InvalidUsage(f"{scheme}: the URL has credentials or names their location; name a Secret instead")
    return replace(address, credentials_dir=folder).url if folder else url


def folder_of(url: str) -> Path | None:
    """The folder of a blob store on files: the blob `key` is the file `folder / key`. None for other stores."""
    if urlsplit(url).scheme != "file":
        return None
    return Path(absolute_path(parse_url(url, allowed={"file": frozenset()})))


def _matches(name: str, text: str, pattern: re.Pattern[str]) -> None:
    if pattern.fullmatch(text) is None or ".." in text:
        raise InvalidUsage(f"{name} {text!r} has characters that a {name} cannot have")


def _plain(name: str, text: str) -> None:
    if _CONTROL.search(text):
        raise InvalidUsage(f"{name} {text!r} has control characters")


def _check_path(name: str, path: str | None) -> None:
    if path is not None and (not path or _CONTROL.search(path)):
        raise InvalidUsage(f"{name} {path!r} is not a path")


def _check_endpoint(endpoint: str) -> None:
    """Allows only an address: the driver would send credentials or a query along, or show them in errors."""
    if "@" in endpoint:
        # The endpoint is not shown, because the text before the @ may be a password.
        raise InvalidUsage("s3: the endpoint has an @; credentials come from the environment or a credentials_dir")
    shown = f"s3: endpoint {endpoint!r}"
    if _CONTROL.search(endpoint) or re.search(r"[\s?#\\]", endpoint):
        raise InvalidUsage(f"{shown} has a query, spaces or control characters")
    try:
        split = urlsplit(endpoint)
        port = split.port
    except ValueError:
        raise InvalidUsage(f"{shown} does not parse") from None
    host = split.netloc.removesuffix(f":{port}") if port is not None else split.netloc
    if split.scheme not in ("http", "https") or port == 0 or _HOST.fullmatch(host) is None:
        raise InvalidUsage(f"{shown}: expected http[s]://host[:port]")


def _query(**params: str | None) -> str:
    given = {name: value for name, value in params.items() if value is not None}
    return f"?{urlencode(given, safe='/:', quote_via=quote)}" if given else ""
