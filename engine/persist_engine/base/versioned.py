"""Types shared by the consensus port and the core: sequence numbers, versioned bytes, the result of a compare-and-set."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field

from persist_engine.base.errors import InvalidUsage

#: The text of a seqno, with as many digits as 2**63 - 1 has.
_SEQNO = re.compile(r"v(0|[1-9]\d{0,18})", re.ASCII)


class SeqNo(int):
    """Version of a shard's state: an int in [0, 2**63 - 1], printed as `v7`. Each committed command increments it by one."""

    __slots__ = ()

    def __new__(cls, value: int) -> SeqNo:
        if not 0 <= value <= SEQNO_MAX:
            raise InvalidUsage(f"seqno {int(value)} outside [0, {SEQNO_MAX}]")
        return super().__new__(cls, value)

    def next(self) -> SeqNo:
        """The successor."""
        return SeqNo(self + 1)

    @classmethod
    def parse(cls, text: str) -> SeqNo:
        """Inverse of str(). Raises InvalidUsage for any other text."""
        if _SEQNO.fullmatch(text) is None:
            raise InvalidUsage(f"not a seqno: {text[:40]!r}")
        return cls(int(text[1:]))

    def __str__(self) -> str:
        return f"v{int(self)}"

    def __repr__(self) -> str:
        return f"v{int(self)}"


SEQNO_MAX = 2**63 - 1
#: A `limit` for scans that means no limit.
SCAN_ALL = SEQNO_MAX


#: The length of a tag. It is so long that two different entries never share a tag.
TAG_BYTES = 16


def tag_of(data: bytes) -> bytes:
    """Return the tag of a log entry: a hash of its bytes. Entries with different bytes have different tags."""
    return hashlib.blake2b(data, digest_size=TAG_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Tip:
    """Identifies the last entry of a log: its seqno and the tag of its bytes."""

    seqno: SeqNo
    tag: bytes

    def __repr__(self) -> str:
        return f"{self.seqno}:{self.tag.hex()[:8]}"


@dataclass(frozen=True, slots=True)
class VersionedData:
    """One entry of a consensus log."""

    seqno: SeqNo
    data: bytes
    _tip: Tip | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def tip(self) -> Tip:
        """The tip of a log that ends with this entry. The first call hashes the data."""
        tip = self._tip
        if tip is None:
            # Several rooms need the tip for one commit. Threads that race here write the same value.
            tip = Tip(self.seqno, tag_of(self.data))
            object.__setattr__(self, "_tip", tip)
        return tip

    def __repr__(self) -> str:
        return f"{self.seqno}({len(self.data)} B)"


class CasResult(enum.Enum):
    """The two results of a compare-and-set. The third possibility, an unknown outcome, is the error Indeterminate."""

    COMMITTED = "committed"
    EXPECTATION_MISMATCH = "expectation mismatch"
