"""Checks that every adapter makes before it touches its store, so that a call that works on one store works on all."""

from __future__ import annotations

import re

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.versioned import SeqNo, Tip, VersionedData

#: S3 limits keys to 1024 bytes. The rest is reserved for a location's prefix.
KEY_BYTES_MAX = 768
#: The longest file name on common file systems.
COMPONENT_BYTES_MAX = 255
#: S3's limit for one put. Larger values would need several requests, which together are not atomic (ADR 2).
VALUE_BYTES_MAX = 5 << 30
#: Redis's limit for one argument (`proto-max-bulk-len`). It drops connections that send more.
ENTRY_BYTES_MAX = 512 << 20
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_blob_key(key: str) -> None:
    """Raises InvalidUsage unless `key` is a relative path that every store can hold and that cannot lead out of any store.

    Names that start with a dot are reserved for adapters (temporary files, probes).
    """
    _check_text(key)
    components = key.split("/")
    if not key or "" in components or "." in components or ".." in components:
        raise InvalidUsage(f"blob key {key!r} must be components joined by single slashes, none of them '.' or '..'")
    if key.startswith("."):
        raise InvalidUsage(f"blob key {key!r} must not start with a dot")
    if max(len(component.encode()) for component in components) > COMPONENT_BYTES_MAX:
        raise InvalidUsage(f"blob key {key[:40]!r}... has a component longer than {COMPONENT_BYTES_MAX} bytes")


def check_range(key: str, start: int, size_bytes: int) -> None:
    """Raises InvalidUsage unless a store can return `size_bytes` bytes of `key` from `start` on."""
    check_blob_key(key)
    if start < 0 or size_bytes < 1:
        raise InvalidUsage(f"blob {key}: no range of {size_bytes} bytes from {start} on", key=key)


def check_blob_value(key: str, value: bytes) -> None:
    """Raises InvalidUsage unless every store can hold `value` under `key`."""
    check_blob_key(key)
    if len(value) > VALUE_BYTES_MAX:
        text = f"blob {key} has {len(value)} bytes, more than the {VALUE_BYTES_MAX} that one put takes"
        raise InvalidUsage(f"{text}: make its parts smaller (batch.target_part_bytes)", key=key)


def check_prefix(prefix: str) -> None:
    """Raises InvalidUsage unless `prefix` can begin a blob key; "" can."""
    _check_text(prefix)
    components = prefix.split("/")[:-1]
    if "" in components or "." in components or ".." in components:
        raise InvalidUsage(f"prefix {prefix!r} is not the beginning of any blob key")


def check_log_key(key: str) -> None:
    """Raises InvalidUsage unless `key` can name a log."""
    _check_text(key)
    if not key:
        raise InvalidUsage("consensus key must not be empty")


def check_truncate(key: str, before: SeqNo, known: Tip) -> None:
    """Raises InvalidUsage if `before` is past the entry `known`."""
    check_log_key(key)
    if before > known.seqno:
        raise InvalidUsage(f"truncate {key}: {before} is past the known entry {known.seqno}", key=key)


def check_append(key: str, expected: Tip | None, new: VersionedData) -> None:
    """Raises InvalidUsage unless `new` may follow `expected` (the first entry may have any seqno, a later one only the next) and
    every store can hold it.
    """
    check_log_key(key)
    if expected is not None and new.seqno != expected.seqno + 1:
        text = f"compare_and_set {key}: new seqno {new.seqno} is not the successor of expected {expected.seqno}"
        raise InvalidUsage(text)
    if len(new.data) > ENTRY_BYTES_MAX:
        text = f"compare_and_set {key}: entry {new.seqno} has {len(new.data)} bytes, more than {ENTRY_BYTES_MAX}"
        raise InvalidUsage(f"{text}: commit less data at once", key=key)


def check_replace(key: str, expected: Tip, new: VersionedData) -> None:
    """Raises InvalidUsage unless `new` has a higher seqno than `expected`, and every store can hold it."""
    if new.seqno <= expected.seqno:
        raise InvalidUsage(f"replace {key}: new seqno {new.seqno} is not past {expected.seqno}", key=key)
    check_append(key, None, new)


def check_scan(key: str, limit: int) -> None:
    """Raises InvalidUsage for a negative limit or an invalid key."""
    check_log_key(key)
    if limit < 0:
        raise InvalidUsage(f"scan {key}: limit {limit} is negative")


def _check_text(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidUsage(f"key {text!r} is not valid unicode") from None
    if size > KEY_BYTES_MAX:
        raise InvalidUsage(f"key {text[:40]!r}... has {size} bytes, at most {KEY_BYTES_MAX} fit")
    if _CONTROL.search(text):
        raise InvalidUsage(f"key {text!r} contains control characters")
