"""The client of one location in S3: time-outs, credentials, trusted CAs, and the arguments that request encryption."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import boto3.session
import botocore.credentials
import botocore.exceptions
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.handlers import add_expect_header

from persist_engine.storage.addresses import S3_CA_FILE, S3_CREDENTIALS_FILE, S3Address
from persist_engine.storage.refusals import TRUST, is_untrusted

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: Enough for one round trip and for one or two lost SYNs.
CONNECT_TIMEOUT_S = 5.0
#: Bounds silence, not duration. S3's slowest first bytes take about 1 s; a put's answer may wait for a gateway's slow disk.
READ_TIMEOUT_S = 30.0
#: GC makes 32 deletes at once. Writers upload two parts each at once, and readers fetch in addition.
CONNECTIONS_MAX = 64
#: A fixed name. boto3 would build a longer one for each request, which takes a tenth of the time of a small request.
USER_AGENT = "persist-engine"
#: The arguments without an encryption parameter: the bucket decides how its objects are encrypted.
NOT_ENCRYPTED: Mapping[str, str] = MappingProxyType({})


def encryption_of(at: S3Address) -> Mapping[str, str]:
    """The arguments of every put to `at`."""
    if at.encryption is None:
        return NOT_ENCRYPTED
    if at.encryption == "SSE-S3":
        return {"ServerSideEncryption": "AES256"}
    key = {} if at.kms_key_id is None else {"SSEKMSKeyId": at.kms_key_id}
    return {"ServerSideEncryption": "aws:kms", **key}


def s3_client(at: S3Address) -> S3Client:
    """A client for `at`. It uses the credentials and the CA bundle of the address's folder if they exist. Its errors are those of boto3."""
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=CONNECTIONS_MAX,
        tcp_keepalive=True,
        retries={"total_max_attempts": 1, "mode": "standard"},
        user_agent=USER_AGENT,
        s3={"addressing_style": "path" if at.path_style else "auto"},
    )
    client: S3Client = boto3.session.Session(botocore_session=_session(at.credentials_dir)).client(
        "s3", region_name=at.region, endpoint_url=at.endpoint, verify=trusted(at), config=config
    )
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


def remedy(cause: BaseException | None) -> str:
    """What a person must do about a server that refuses a location."""
    if is_untrusted(cause):
        return TRUST
    match cause:
        case botocore.exceptions.NoCredentialsError() | botocore.exceptions.PartialCredentialsError():
            return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or credentials_dir of the location"
        case botocore.exceptions.ClientError():
            code = str(cause.response.get("Error", {}).get("Code", ""))
            return _REMEDIES.get(code, "correct endpoint, bucket, region and credentials of the location")
    return "no S3 answers there: correct the endpoint"


_RIGHTS = "give these credentials the right to list the bucket, and to get, put and delete below the prefix"
_KEY = "correct the access key and its secret, or the endpoint"
#: The remedies by the code of the answer.
_REMEDIES = {
    "NoSuchBucket": "create the bucket, or correct its name or the endpoint",
    "AccessDenied": _RIGHTS,
    "403": _RIGHTS,
    "InvalidAccessKeyId": _KEY,
    "SignatureDoesNotMatch": _KEY,
    "ExpiredToken": "renew the credentials",
    "InvalidToken": "renew the credentials",
    "PermanentRedirect": "correct the region of the location",
    "AuthorizationHeaderMalformed": "correct the region of the location",
}


def _session(credentials_dir: str | None) -> botocore.session.Session:
    """A session with the location's own credentials if it has any, otherwise with those of the process. They are never mixed."""
    session = botocore.session.get_session()
    session.register_component("data_loader", _descriptions())
    file = Path(credentials_dir or "", S3_CREDENTIALS_FILE)
    if credentials_dir and file.exists():
        # Accept static keys only: other contents of such a file (a command to run, a role) must not take effect.
        provider = botocore.credentials.SharedCredentialProvider(str(file), profile_name="default")
        session.register_component("credential_provider", botocore.credentials.CredentialResolver([provider]))
    return session


@functools.cache
def _descriptions() -> botocore.loaders.Loader:
    """A loader that caches boto3's descriptions of services. Reading them takes five sixths of the time to create a client."""
    loader: botocore.loaders.Loader = botocore.session.get_session().get_component("data_loader")
    return loader


def trusted(at: S3Address) -> str | None:
    """The file with the CAs that may sign the server's certificate. None means the CAs of boto3, or of AWS_CA_BUNDLE."""
    file = Path(at.credentials_dir or "", S3_CA_FILE)
    return at.ca_file or (str(file) if at.credentials_dir and file.exists() else None)
