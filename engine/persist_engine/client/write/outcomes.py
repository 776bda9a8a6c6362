"""The outcomes of an append."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.refusal import Refusal
from persist_engine.model.frontier import Antichain
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.state import SourceProgress
from persist_engine.shard.applier import NO_MAINTENANCE


@dataclass(frozen=True, slots=True)
class Appended:
    """The updates are part of the shard; `upper` is its upper after the append. `maintenance` is the work that fell due."""

    upper: Antichain
    maintenance: Maintenance = NO_MAINTENANCE


@dataclass(frozen=True, slots=True)
class UpperMismatch(Refusal):
    """Nothing was appended: the shard's upper is `current`, not `expected`."""

    current: Antichain
    expected: Antichain

    @property
    def meaning(self) -> str:
        """See Refusal."""
        text = f"nothing was appended, the upper of the shard is {self.current}, not {self.expected}"
        if self.current.is_empty():
            return f"{text}; the shard is closed and takes no more appends"
        return f"{text}; another writer appended first: read what it wrote, then append at {self.current}"


@dataclass(frozen=True, slots=True)
class ProgressMismatch(Refusal):
    """Nothing was appended: the stored progress of the sink is `current`."""

    current: SourceProgress | None

    @property
    def meaning(self) -> str:
        """See Refusal."""
        stored = "none" if self.current is None else f"another one, of upper {self.current.upper}"
        return f"nothing was appended, the stored progress is {stored}; continue from there"


AppendOutcome = Appended | UpperMismatch | ProgressMismatch
