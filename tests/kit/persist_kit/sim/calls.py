"""Calls that the witness judges, and frontiers as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.model.frontier import Antichain
from persist_engine.testing.oracle import Update

#: The closed frontier as a number: beyond every time.
CLOSED = 1 << 64


def frontier_of(time: int) -> Antichain:
    """The frontier of `time`; CLOSED is the closed one."""
    return Antichain.empty() if time >= CLOSED else Antichain.of(time)


def time_of(frontier: Antichain) -> int:
    """Inverse of `frontier_of`."""
    return CLOSED if frontier.time is None else frontier.time


@dataclass(frozen=True)
class Takeover:
    """One call that replaces the fencing token of the critical reader."""

    expected: bytes
    new: bytes


@dataclass(eq=False)
class Append:
    """One call that appends, recorded from its invocation on."""

    number: int
    updates: list[Update]
    lower: int
    upper: int
    is_exact: bool
    """Compare-and-append: all or nothing. Otherwise `append`: the part that others have not written, piece by piece."""
    invoked_at: int
    answer: str = ""
    progress: tuple[str, bytes] | None = None
    expected_progress: bytes | None = None
    invoked_seqno: int = 0

    def __repr__(self) -> str:
        return f"append {self.number} [{self.lower},{self.upper})"
