"""What decoding damaged bytes may raise, in one place: every decoder of parts and of what is sent between processes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from persist_engine.base.errors import CorruptData, InvalidUsage, InvariantViolated, SchemaMismatch

#: What Arrow, JSON and struct raise over bytes that are none of theirs.
UNDECODABLE = (
    pa.ArrowException,
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


@contextmanager
def decoding(key: str) -> Iterator[None]:
    """What the libraries raise over damaged bytes, as CorruptData naming `key`."""
    try:
        yield
    except SchemaMismatch:
        raise
    except (InvalidUsage, InvariantViolated, *UNDECODABLE) as error:
        raise CorruptData(f"part {key} does not decode: {error}", key=key) from error
