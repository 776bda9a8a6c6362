"""Words that the consensus port and the core share: sequence numbers, versioned bytes, the answer of a compare-and-set."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage

#: At most as many digits as 2**63 - 1 has.
_SEQNO = re.compile(r"v(0|[1-9]\d{0,18})", re.ASCII)


class SeqNo(int):
    """Version of a shard's state, an int in [0, 2**63 - 1]; prints as `v7`. Every committed command takes previous + 1."""

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
        """Inverse of str(); InvalidUsage on anything else."""
        if _SEQNO.fullmatch(text) is None:
            raise InvalidUsage(f"not a seqno: {text[:40]!r}")
        return cls(int(text[1:]))

    def __str__(self) -> str:
        return f"v{int(self)}"

    def __repr__(self) -> str:
        return f"v{int(self)}"


SEQNO_MAX = 2**63 - 1
#: As the `limit` of a scan: everything.
SCAN_ALL = SEQNO_MAX


@dataclass(frozen=True, slots=True)
class VersionedData:
    """One entry of a consensus log."""

    seqno: SeqNo
    data: bytes

    def __repr__(self) -> str:
        return f"{self.seqno}({len(self.data)} B)"


class CasResult(enum.Enum):
    """The two answers of a compare-and-set; the third end, unknown, is the error Indeterminate."""

    COMMITTED = "committed"
    EXPECTATION_MISMATCH = "expectation mismatch"
