"""Ids with their letters: one letter (or two) and a UUID, printed and stored as text.

s shard, w writer, r leased reader (and, in key paths, rollup), c critical reader, p part, ri run, i idempotency token,
store- pair of stores.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self

from persist_engine.base.env import system_random_bytes
from persist_engine.base.errors import InvalidUsage

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class _Id(str):
    """A validated id; compares, sorts and hashes as its text."""

    __slots__ = ()
    letters: ClassVar[str]
    what: ClassVar[str]

    def __new__(cls, text: str) -> Self:
        if not isinstance(text, str):
            raise InvalidUsage(f"a {cls.what} id is made of a text, not of a {type(text).__name__}")
        if not text.startswith(cls.letters) or not _UUID.fullmatch(text, len(cls.letters)):
            raise InvalidUsage(f"not a {cls.what} id: {text!r}, expected {cls.letters!r} followed by a lower-case UUID")
        return super().__new__(cls, text)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The id made of 16 (random) bytes; no bit of them is changed."""
        digits = raw.hex()
        if len(digits) != 32:
            raise InvalidUsage(f"a {cls.what} id is made of 16 bytes, not {len(raw)}")
        # Valid by the way it is made.
        text = f"{cls.letters}{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        return super().__new__(cls, text)

    def to_bytes(self) -> bytes:
        """The 16 bytes; inverse of `from_bytes`."""
        return bytes.fromhex(self[len(self.letters) :].replace("-", ""))

    @classmethod
    def new(cls) -> Self:
        """A fresh random id, for users and command lines. The rooms draw from their Env instead, so that simulations repeat."""
        return cls.from_bytes(system_random_bytes(16))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str.__repr__(self)})"


class ShardId(_Id):
    """One durable, definite, time-varying collection."""

    __slots__ = ()
    letters = "s"
    what = "shard"


class StoreId(_Id):
    """One blob store and one consensus store that belong together, however their addresses are spelled."""

    __slots__ = ()
    letters = "store-"
    what = "store"


class WriterId(_Id):
    """Somebody who may append."""

    __slots__ = ()
    letters = "w"
    what = "writer"


class LeasedReaderId(_Id):
    """A reader that holds since while it heartbeats."""

    __slots__ = ()
    letters = "r"
    what = "leased reader"


class CriticalReaderId(_Id):
    """A reader that holds since until told otherwise."""

    __slots__ = ()
    letters = "c"
    what = "critical reader"


class PartId(_Id):
    """One blob of updates. Its first six bytes tell when it was staged: the floor below which nothing is linked any
    more (`ShardState.staging_floor_ms`) is compared with them and with nothing else.
    """

    __slots__ = ()
    letters = "p"
    what = "part"

    @classmethod
    def staged_at(cls, at_ms: int, random: bytes) -> Self:
        """The id of a part staged at `at_ms`, told apart by 10 random bytes."""
        return cls.from_bytes(min(max(at_ms, 0), STAGED_MS_MAX).to_bytes(6, "big") + random)

    @property
    def staged_ms(self) -> int:
        """When it was staged."""
        return staged_ms(self)


#: What six bytes hold; the year 10889.
STAGED_MS_MAX = 2**48 - 1


def staged_ms(part_key: str) -> int:
    """When the part whose id or (partial) key this is was staged."""
    at = part_key.rindex(PartId.letters) + 1
    return int(part_key[at : at + 8] + part_key[at + 9 : at + 13], 16)


class RollupId(_Id):
    """One full copy of state in blob."""

    __slots__ = ()
    letters = "r"
    what = "rollup"


class RunId(_Id):
    """Parts sorted together."""

    __slots__ = ()
    letters = "ri"
    what = "run"


class IdempotencyToken(_Id):
    """Names one logical append, so that a retry finds itself."""

    __slots__ = ()
    letters = "i"
    what = "idempotency token"


#: The token of a writer that has not appended yet.
SENTINEL_TOKEN = IdempotencyToken.from_bytes(b"\x11" * 16)
