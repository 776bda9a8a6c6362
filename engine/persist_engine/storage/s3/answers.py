"""Classifies answers of a server: which errors they are, and whether S3 gave them. A proxy that asks to sign in answers 200, with a
page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import botocore.exceptions
import botocore.parsers

from persist_engine.storage.refusals import is_untrusted

#: The answer of a gateway that did not receive the whole request in time. It may have forwarded a part of it.
REQUEST_TIMEOUT = 408
#: The 4xx answers after which the request may still have taken effect.
UNDECIDED_CODES = ("RequestTimeout", "OperationAborted")
#: The 4xx answers for which a retry may help.
_TRANSIENT_STATUSES = (REQUEST_TIMEOUT, 409, 412, 425, 429)
_CLIENT_ERROR = botocore.exceptions.ClientError
#: The type of a page. No blob has it, because puts name no type.
_PAGE = "text/html"
#: The bytes of a page that an error shows. They are enough to recognise the server that made it.
_SHOWN_BYTES = 120

A = TypeVar("A", bound=Mapping[str, Any])


class ForeignAnswer(OSError):
    """Another server answered in place of S3."""


def from_s3(answer: A) -> A:
    """Returns the answer to a GET or a HEAD if S3 gave it, which names the ETag of each object. Otherwise raises ForeignAnswer, which says
    what came.
    """
    kind = str(answer.get("ContentType", "")).partition(";")[0].strip().lower()
    if answer.get("ETag") and kind != _PAGE:
        return answer
    server = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("server", "")
    text = f"S3 did not give this answer: {'' if answer.get('ETag') else 'no ETag, '}{answer.get('ContentLength', 0)} bytes"
    text += f" of type {kind[:40]!a}" * bool(kind) + f" from server {str(server)[:40]!a}" * bool(server)
    if "Body" in answer:
        begin = answer["Body"].read(_SHOWN_BYTES) if kind.startswith("text/") else b""  # other bytes may be rows
        answer["Body"].close()
        text += f", which begin with {' '.join(begin.decode('utf-8', 'replace').split())!a}" * bool(begin)
    raise ForeignAnswer(f"{text}; look for a proxy, and check the endpoint")


def code_of(error: Exception) -> str:
    """The error code of an answer; empty if it is not an error."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, _CLIENT_ERROR) else ""


def status_of(error: Exception) -> int:
    """The HTTP status of an answer that is an error; 0 if it is not an error."""
    if not isinstance(error, _CLIENT_ERROR):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_refusal(cause: BaseException | None) -> bool:
    """Whether bucket, credentials or endpoint are wrong, so that a retry would not help."""
    match cause:
        case botocore.exceptions.ClientError():
            is_final = 300 <= status_of(cause) < 500 and status_of(cause) not in _TRANSIENT_STATUSES
            return is_final and code_of(cause) not in UNDECIDED_CODES
        case botocore.exceptions.NoCredentialsError() | botocore.exceptions.PartialCredentialsError():
            return True
        case botocore.parsers.ResponseParserError():  # the answering server is not S3
            return True
    return is_untrusted(cause)
