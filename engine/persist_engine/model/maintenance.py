"""Work that a committed command leaves for later, as a value. Whoever gets it does it, or lets it be offered again."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.versioned import SeqNo
from persist_engine.model.spine.trace import MergeReq


@dataclass(frozen=True, slots=True)
class Maintenance:
    """`rollup`: write one, for a state at or past this seqno. `gc`: collect and truncate up to at most this seqno.
    `requests`: batches that may become one, claimed for the receiver.
    """

    rollup: SeqNo | None = None
    gc: SeqNo | None = None
    requests: tuple[MergeReq, ...] = ()

    def merge(self, other: Maintenance) -> Maintenance:
        """Both: of rollup and gc the later, of requests all, each once."""
        new = tuple(request for request in other.requests if request not in self.requests)
        return Maintenance(_later(self.rollup, other.rollup), _later(self.gc, other.gc), self.requests + new)

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self == Maintenance()


def _later(one: SeqNo | None, other: SeqNo | None) -> SeqNo | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
