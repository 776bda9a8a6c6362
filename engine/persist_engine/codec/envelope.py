"""What stands around every durable protobuf message: what it is, in which format, and that it is whole.

    4 bytes magic "PST" + kind | 2 bytes format version | 4 bytes CRC-32 of everything else | payload
    (little-endian)

Protobuf accepts much that was never written; the checksum makes a damaged message an error and the kind keeps a diff
from being read as a rollup. This head never changes, whatever the format version says, so that newer bytes are told
from damaged ones.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message

from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, InvariantViolated

FORMAT_VERSION = 1
#: Format of state diffs that name the entry they follow: older code would drop that.
CHAINED_VERSION = 2
#: Format of state diffs that change the retention: older code would refuse them for damaged.
RETAINED_DIFF_VERSION = 3
#: Format of rollups that store a spine batch's hollow batches as bytes (codec.stored_spine).
STORED_SPINE_VERSION = 2
#: Format of rollups that hold some of those bytes compressed.
PACKED_SPINE_VERSION = 3
#: Format of rollups of a shard with retention: older code would let since pass what is retained.
RETAINED_ROLLUP_VERSION = 4

_MAGIC = b"PST"
_FRONT = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _FRONT.size + _CRC.size

M = TypeVar("M", bound=Message)


class Kind(enum.Enum):
    """What an envelope holds; the last byte of its magic. Append-only."""

    ROLLUP = b"R"
    STATE_DIFF = b"D"
    BATCH = b"B"
    TRANSMITTABLE_BATCH = b"T"
    RUN_LISTING = b"L"
    STORE_IDENTITY = b"I"
    SHARD_OWNER = b"O"
    REGISTERED_NAME = b"N"


_NEWEST = {Kind.ROLLUP: RETAINED_ROLLUP_VERSION, Kind.STATE_DIFF: RETAINED_DIFF_VERSION}


def sealed(kind: Kind, message: Message, *, format_version: int | None = None) -> bytes:
    """The message in its envelope; the same bytes for the same message. InvariantViolated when a value does not fit
    the format. `format_version` is the oldest that explains the message (None: FORMAT_VERSION); code that knows only
    older ones refuses it.
    """
    try:
        payload = message.SerializeToString(deterministic=True)
    except EncodeError as error:
        raise InvariantViolated(f"a {kind.name.lower()} does not encode: {error}") from error
    front = _FRONT.pack(_MAGIC + kind.value, FORMAT_VERSION if format_version is None else format_version)
    return front + _CRC.pack(zlib.crc32(payload, zlib.crc32(front))) + payload


def opened(kind: Kind, data: bytes, message: M, key: str) -> M:
    """`message` filled from its envelope. CorruptData names `key` and what is wrong; Incompatible for a newer format
    version.
    """
    what = kind.name.lower().replace("_", " ")
    if len(data) < _HEAD_BYTES or data[:3] != _MAGIC:
        raise CorruptData(f"{key}: {len(data)} bytes that are no {what}", key=key)
    magic, version = _FRONT.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _FRONT.size)
    payload = data[_HEAD_BYTES:]
    if zlib.crc32(payload, zlib.crc32(data[: _FRONT.size])) != crc:
        raise CorruptData(f"{key}: the {what} does not match its checksum", key=key)
    if magic[3:] != kind.value:
        raise CorruptData(f"{key}: expected a {what}, found the kind {magic[3:]!r}", key=key)
    newest = _NEWEST.get(kind, FORMAT_VERSION)
    if version > newest:
        raise Incompatible(f"{key}: {what} in format {version}, this code reads up to {newest}", key=key)
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise CorruptData(f"{key}: the {what} does not decode: {error}", key=key) from error
    return message


@contextmanager
def decoding(what: str, key: str) -> Iterator[None]:
    """Within it, whatever rule of the model the decoded values break becomes CorruptData naming `key` and `what`."""
    try:
        yield
    except (InvalidUsage, InvariantViolated, DecodeError, ValueError, OverflowError) as error:
        raise CorruptData(f"{key}: {what} breaks a rule: {error}", key=key) from error
