"""Inline storage (`spec.storage`): typed store addresses, checked against the allow-lists of the installation. Pure.

Invariant: an accepted address names a server of an allow-list (or AWS, which needs no endpoint) and Secrets of an allow-list. The check
compares field by field; no text of one field becomes a part of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.addresses import (
    REDIS_CA_FILE,
    REDIS_CERT_FILE,
    REDIS_KEY_FILE,
    REDIS_PASSWORD_FILE,
    REDIS_USERNAME_FILE,
    S3_CA_FILE,
    S3_CREDENTIALS_FILE,
    RedisAddress,
    S3Address,
)

from persist_operator.settings import InlineStorage

_SCHEME_PORTS = {"http": 80, "https": 443}
_REDIS_PORT = 6379
_BUCKET_CHARACTERS_MAX = 63


@dataclass(frozen=True, slots=True)
class SecretFiles:
    """A Secret that a field of `spec.storage` names. Pods mount some of its keys as files of the credentials' folder."""

    field: str
    name: str
    files: tuple[tuple[str, str], ...]
    """Pairs of a key and a file."""
    optional: bool = False
    """Whether pods start without the Secret, or without some of the keys."""


class InlineRefused(InvalidUsage):
    """A resource names stores or a Secret that it may not use. `reason` becomes the reason of its Stalled condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineAddresses:
    """The two stores, and the Secrets of the resource's namespace that pods mount."""

    blob: S3Address
    consensus: RedisAddress
    secrets: tuple[SecretFiles, ...]


def inline_addresses(storage: Mapping[str, Any], allowed: InlineStorage) -> InlineAddresses:
    """The addresses in `storage`. Raises InlineRefused when inline storage is off, when a field is invalid, and when an address or a Secret
    is not on an allow-list.
    """
    if not allowed.enabled:
        raise InlineRefused(
            "InlineStorageOff",
            "spec.storage is not accepted: this operator uses the stores of its own configuration only; create the resource again "
            "with spec.storageProfile, or set storage.inline.enabled to true in the operator's values",
        )
    try:
        blob, consensus = _blob(storage["blob"]), _consensus(storage["consensus"])
        secrets = tuple(_secrets(storage["blob"], storage["consensus"]))
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
    for secret in secrets:
        if secret.name not in allowed.allowed_secrets:
            raise InlineRefused(
                "SecretNotAllowed",
                f"spec.storage.{secret.field} {secret.name!r} is not among storage.inline.allowedSecrets of the operator's values, which "
                f"lists: {', '.join(allowed.allowed_secrets) or 'none'}",
            )
    return InlineAddresses(blob=blob, consensus=consensus, secrets=secrets)


def _secrets(blob: Mapping[str, Any], consensus: Mapping[str, Any]) -> Iterator[SecretFiles]:
    """The mounts of pods, in the order of the files. A pod waits for a missing Secret or key that is not optional."""
    auth, bundle = blob.get("auth"), blob.get("caSecretRef")
    if auth is not None and auth["type"] == "Secret":
        yield SecretFiles("blob.auth.secretName", auth["secretName"], ((S3_CREDENTIALS_FILE, S3_CREDENTIALS_FILE),))
    if bundle is not None:
        yield SecretFiles("blob.caSecretRef.name", bundle["name"], ((bundle["key"], S3_CA_FILE),))
    if (name := consensus.get("authSecretName")) is not None:
        yield SecretFiles("consensus.authSecretName", name, ((REDIS_PASSWORD_FILE, REDIS_PASSWORD_FILE),))
        user = (REDIS_USERNAME_FILE, REDIS_USERNAME_FILE)
        yield SecretFiles("consensus.authSecretName", name, (user,), optional=True)
    if (name := consensus.get("tlsSecretName")) is not None:
        files = (("ca.crt", REDIS_CA_FILE), ("tls.crt", REDIS_CERT_FILE), ("tls.key", REDIS_KEY_FILE))
        yield SecretFiles("consensus.tlsSecretName", name, files, optional=True)


def _blob(found: Mapping[str, Any]) -> S3Address:
    bucket, path_style, encryption = found["bucket"], found.get("pathStyle", False), found.get("encryption") or {}
    # With virtual hosts, the bucket becomes a part of the server's name.
    if len(bucket) > _BUCKET_CHARACTERS_MAX or bucket != bucket.lower() or not isinstance(path_style, bool):
        raise InvalidUsage("blob.bucket is not the name of a bucket, or blob.pathStyle is neither true nor false")
    return S3Address(
        bucket=bucket,
        prefix=found.get("prefix", ""),
        region=found.get("region"),
        endpoint=found.get("endpoint"),
        path_style=path_style,
        encryption=None if encryption.get("type", "None") == "None" else encryption["type"],
        kms_key_id=encryption.get("kmsKeyId"),
    )


def _consensus(found: Mapping[str, Any]) -> RedisAddress:
    host, _, port = found["address"].rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise InvalidUsage(f"consensus.address {found['address']!r} is not host:port")
    if not isinstance(tls := found.get("tls", False), bool) or (found.get("tlsSecretName") is not None and not tls):
        raise InvalidUsage("consensus.tls is neither true nor false, or it is not true and there is a tlsSecretName")
    database, prefix = int(found.get("database", 0)), found.get("keyPrefix", "")
    return RedisAddress(host=host, port=int(port), database=database, prefix=prefix, tls=tls)


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
