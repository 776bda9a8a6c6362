"""Inline storage (`spec.storage`): typed store addresses, checked against the allow-lists of the installation. Pure.

Invariant: an accepted address names a server of an allow-list (or AWS, which needs no endpoint) and a Secret of an allow-list. The check
compares field by field; no text of one field becomes a part of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.addresses import RedisAddress, S3Address

from persist_operator.settings import InlineStorage

_SCHEME_PORTS = {"http": 80, "https": 443}
_REDIS_PORT = 6379
_BUCKET_CHARACTERS_MAX = 63


class InlineRefused(InvalidUsage):
    """A resource names stores or a Secret that it may not use. `reason` becomes the reason of its Stalled condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineAddresses:
    """The two stores, and the Secret with their credentials (if any) in the resource's namespace."""

    blob: S3Address
    consensus: RedisAddress
    secret_name: str | None


def inline_addresses(storage: Mapping[str, Any], allowed: InlineStorage) -> InlineAddresses:
    """The addresses in `storage`. InlineRefused when inline storage is off, when a field is invalid, and when an address or the Secret is
    on no allow-list.
    """
    if not allowed.enabled:
        raise InlineRefused(
            "InlineStorageOff",
            "spec.storage is not accepted: this operator uses the stores of its own configuration only; create the resource again "
            "with spec.storageProfile, or set storage.inline.enabled to true in the operator's values",
        )
    try:
        blob, consensus = _blob(storage["blob"]), _consensus(storage["consensus"])
    except (InvalidUsage, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InlineRefused("InvalidStorage", f"spec.storage: {error}") from error
    if blob.endpoint is not None:
        split = urlsplit(blob.endpoint)
        own_port = _SCHEME_PORTS[split.scheme]
        server = (_host(split.netloc), split.port or own_port)
        if not _is_among(allowed.allowed_endpoints, server, own_port):
            raise _not_allowed("blob.endpoint", server, "allowedEndpoints", allowed.allowed_endpoints)
    server = (consensus.host, consensus.port)
    if not _is_among(allowed.allowed_consensus, server, _REDIS_PORT):
        raise _not_allowed("consensus.address", server, "allowedConsensus", allowed.allowed_consensus)
    secret = storage.get("secretName")
    if secret is not None and secret not in allowed.allowed_secrets:
        raise InlineRefused(
            "SecretNotAllowed",
            f"spec.storage.secretName {secret!r} is not among storage.inline.allowedSecrets of the operator's values, which lists: "
            f"{', '.join(allowed.allowed_secrets) or 'none'}",
        )
    return InlineAddresses(blob=blob, consensus=consensus, secret_name=secret)


def _blob(found: Mapping[str, Any]) -> S3Address:
    bucket, path_style = found["bucket"], found.get("pathStyle", False)
    # With virtual hosts, the bucket becomes a part of the server's name.
    if len(bucket) > _BUCKET_CHARACTERS_MAX or bucket != bucket.lower() or not isinstance(path_style, bool):
        raise InvalidUsage("blob.bucket is not the name of a bucket, or blob.pathStyle is neither true nor false")
    return S3Address(
        bucket=bucket,
        prefix=found.get("prefix", ""),
        region=found.get("region"),
        endpoint=found.get("endpoint"),
        path_style=path_style,
    )


def _consensus(found: Mapping[str, Any]) -> RedisAddress:
    host, _, port = found["address"].rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise InvalidUsage(f"consensus.address {found['address']!r} is not host:port")
    return RedisAddress(
        host=host, port=int(port), database=int(found.get("database", 0)), prefix=found.get("keyPrefix", "")
    )


def _host(netloc: str) -> str:
    """The host without its port. An IPv6 address keeps its brackets."""
    host, colon, port = netloc.rpartition(":")
    return host if colon and not port.endswith("]") else netloc


def _not_allowed(field: str, server: tuple[str, int], name: str, patterns: tuple[str, ...]) -> InlineRefused:
    host, port = server
    return InlineRefused(
        "EndpointNotAllowed",
        f"spec.storage.{field} names {host}:{port}, which is not among storage.inline.{name} of the operator's values; they allow: "
        f"{', '.join(patterns) or 'none'}",
    )


def _is_among(patterns: tuple[str, ...], server: tuple[str, int], own_port: int) -> bool:
    return any(_matches(one, server, own_port) for one in patterns)


def _matches(pattern: str, server: tuple[str, int], own_port: int) -> bool:
    host, port = server[0].lower(), server[1]
    wanted = _host(pattern).lower()
    wanted_port = int(pattern[len(wanted) + 1 :] or own_port)
    is_host = host.endswith(wanted[1:]) and len(host) >= len(wanted) if wanted.startswith("*.") else host == wanted
    return is_host and port == wanted_port
