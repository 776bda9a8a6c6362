"""Typed ids: a prefix of letters and a UUID, printed and stored as text.

s shard, w writer, r leased reader (and, in key paths, rollup), c critical reader, p part, ri run, i idempotency token,
d record of deletions, store- pair of stores.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self

from persist_engine.base.env import system_random_bytes
from persist_engine.base.errors import InvalidUsage

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class _Id(str):
    """A validated id. It compares, sorts and hashes as its text."""

    __slots__ = ()
    letters: ClassVar[str]
    what: ClassVar[str]

    def __new__(cls, text: str) -> Self:
        if not isinstance(text, str):
            raise InvalidUsage(f"a {cls.what} id must be text, not {type(text).__name__}")
        if not cls.is_valid(text):
            raise InvalidUsage(f"not a {cls.what} id: {text!r}, expected {cls.letters!r} followed by a lower-case UUID")
        return super().__new__(cls, text)

    @classmethod
    def is_valid(cls, text: str) -> bool:
        """Whether `text` is an id of this kind."""
        return text.startswith(cls.letters) and _UUID.fullmatch(text, len(cls.letters)) is not None

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Return the id of 16 bytes (usually random), which it keeps unchanged."""
        digits = raw.hex()
        if len(digits) != 32:
            raise InvalidUsage(f"a {cls.what} id needs 16 bytes, not {len(raw)}")
        # This skips the validation, because the text is valid by construction.
        text = f"{cls.letters}{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        return super().__new__(cls, text)

    def to_bytes(self) -> bytes:
        """Return the 16 bytes; inverse of `from_bytes`."""
        return bytes.fromhex(self[len(self.letters) :].replace("-", ""))

    @classmethod
    def new(cls) -> Self:
        """Return a fresh random id, for users and command lines. The rooms draw ids from their Env, so that simulations are repeatable."""
        return cls.from_bytes(system_random_bytes(16))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str.__repr__(self)})"


class ShardId(_Id):
    """One durable, definite, time-varying collection."""

    __slots__ = ()
    letters = "s"
    what = "shard"


class StoreId(_Id):
    """One pair of a blob store and a consensus store that belong together. It does not depend on how their addresses are spelled."""

    __slots__ = ()
    letters = "store-"
    what = "store"


class WriterId(_Id):
    """A writer: it may append."""

    __slots__ = ()
    letters = "w"
    what = "writer"


class LeasedReaderId(_Id):
    """A reader that holds since while it heartbeats."""

    __slots__ = ()
    letters = "r"
    what = "leased reader"


class CriticalReaderId(_Id):
    """A reader that holds since until it is downgraded or expired explicitly."""

    __slots__ = ()
    letters = "c"
    what = "critical reader"


class PartId(_Id):
    """One blob of updates. The first six bytes record when it was staged. Only these bytes are compared with the staging floor
    (`ShardState.staging_floor_ms`), below which no part is linked.
    """

    __slots__ = ()
    letters = "p"
    what = "part"

    @classmethod
    def staged_at(cls, at_ms: int, random: bytes) -> Self:
        """Return the id of a part staged at `at_ms`; 10 random bytes make it unique."""
        return cls.from_bytes(min(max(at_ms, 0), STAGED_MS_MAX).to_bytes(6, "big") + random)

    @property
    def staged_ms(self) -> int:
        """When the part was staged."""
        return staged_ms(self)


#: The largest six-byte time, in the year 10889.
STAGED_MS_MAX = 2**48 - 1


def staged_ms(part_key: str) -> int:
    """Return when a part was staged, given its id or its (partial) key."""
    at = part_key.rindex(PartId.letters) + 1
    return int(part_key[at : at + 8] + part_key[at + 9 : at + 13], 16)


class RollupId(_Id):
    """One full copy of state in blob."""

    __slots__ = ()
    letters = "r"
    what = "rollup"


class RunId(_Id):
    """A sequence of parts sorted together."""

    __slots__ = ()
    letters = "ri"
    what = "run"


class DeletionId(_Id):
    """One record of deletions. The first six bytes are the time at which it was written."""

    __slots__ = ()
    letters = "d"
    what = "record of deletions"

    @classmethod
    def written_at(cls, at_ms: int, random: bytes) -> Self:
        """Return the id of a record written at `at_ms`; 10 random bytes make it unique."""
        return cls.from_bytes(min(max(at_ms, 0), STAGED_MS_MAX).to_bytes(6, "big") + random)

    @property
    def written_ms(self) -> int:
        """When the record was written."""
        return int.from_bytes(self.to_bytes()[:6], "big")


class IdempotencyToken(_Id):
    """Names one logical append, so that a retry recognizes its own earlier success."""

    __slots__ = ()
    letters = "i"
    what = "idempotency token"


#: The token of a writer that has not appended yet.
SENTINEL_TOKEN = IdempotencyToken.from_bytes(b"\x11" * 16)
