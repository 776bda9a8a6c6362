"""The envelope of every durable protobuf message: its kind, its format version and a checksum.

    4 bytes magic "PST" + kind | 2 bytes format version | 4 bytes CRC-32 of everything else | payload
    (little-endian)

Protobuf accepts many bytes that no encoder wrote. With the checksum, a damaged message is an error. With the kind, a diff is
never read as a rollup. The head is the same in every format version, so that a decoder can distinguish another format from
damage.
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

#: The format version of every kind of message. This code writes it and reads no other.
FORMAT_VERSION = 1

_MAGIC = b"PST"
_FRONT = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _FRONT.size + _CRC.size

M = TypeVar("M", bound=Message)


class Kind(enum.Enum):
    """The kind of message in an envelope: the last byte of its magic. Append-only."""

    ROLLUP = b"R"
    STATE_DIFF = b"D"
    BATCH = b"B"
    TRANSMITTABLE_BATCH = b"T"
    RUN_LISTING = b"L"
    STORE_IDENTITY = b"I"
    SHARD_OWNER = b"O"
    REGISTERED_NAME = b"N"
    DELETIONS = b"X"
    STAGING_NOTE = b"S"


def sealed(kind: Kind, message: Message) -> bytes:
    """The message in its envelope. Equal messages give equal bytes. Raises InvariantViolated when a value does not fit the
    format.
    """
    try:
        payload = message.SerializeToString(deterministic=True)
    except EncodeError as error:
        raise InvariantViolated(f"a {kind.name.lower()} does not encode: {error}") from error
    front = _FRONT.pack(_MAGIC + kind.value, FORMAT_VERSION)
    return front + _CRC.pack(zlib.crc32(payload, zlib.crc32(front))) + payload


def opened(kind: Kind, data: bytes, message: M, key: str) -> M:
    """Fills `message` from its envelope and returns it. Raises CorruptData with `key` and what is wrong. Raises Incompatible
    with `key` for another format version, newer or older.
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
    if version != FORMAT_VERSION:
        raise Incompatible(f"{key}: the {what} has format {version}, this code reads format {FORMAT_VERSION}", key=key)
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise CorruptData(f"{key}: the {what} does not decode: {error}", key=key) from error
    return message


@contextmanager
def decoding(what: str, key: str) -> Iterator[None]:
    """A context in which a broken rule of the model becomes CorruptData with `key` and `what`, and Incompatible gets the key."""
    try:
        yield
    except Incompatible as error:
        if "key" in error.detail:
            raise
        raise Incompatible(f"{key}: {what} holds {error}", key=key) from error
    except (InvalidUsage, InvariantViolated, DecodeError, ValueError, OverflowError) as error:
        raise CorruptData(f"{key}: {what} breaks a rule: {error}", key=key) from error
