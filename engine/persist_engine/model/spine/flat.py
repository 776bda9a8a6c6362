"""The trace in the form that is diffed and stored: five flat collections instead of a tree (spec 2.6).

Plain data; `Trace.flatten` and `Trace.unflatten` (model.spine.trace) convert. The spine structure is stored so that every
replica groups batches the same way. Deriving it on each replica caused most historical bugs (spec 11.13, bug 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from persist_engine.base.errors import InvariantViolated
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import MINIMUM, Antichain, Description


@dataclass(frozen=True, slots=True, order=True, repr=False)
class SpineId:
    """Half-open interval [lo, hi) of batch numbers in order of arrival. A merge spans its inputs. Prints as `0-4`."""

    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo < self.hi:
            raise InvariantViolated(f"spine id {self.lo}-{self.hi} is empty")

    def covers(self, other: SpineId) -> bool:
        """Whether `other` lies within this interval."""
        return self.lo <= other.lo and other.hi <= self.hi

    def __repr__(self) -> str:
        return f"{self.lo}-{self.hi}"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class ThinSpineBatch:
    """A spine batch without its hollow batches: its level, the times it covers, and the ids of its parts."""

    level: int
    desc: Description
    parts: tuple[SpineId, ...]
    descs: tuple[Description, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.descs):
            raise InvariantViolated(f"{len(self.parts)} ids for {len(self.descs)} descriptions of parts")


@dataclass(frozen=True, slots=True)
class ThinMerge:
    """A merge in progress at a level (`remaining_work` at least 0), or a claimed compaction of one spine batch."""

    since: Antichain
    remaining_work: int
    active_compaction_start_ms: int | None = None


@dataclass(frozen=True, slots=True)
class FlatTrace:
    """A whole trace. `legacy_batches` are ordered by description. Without `spine_batches`, they are the complete trace."""

    since: Antichain = MINIMUM
    legacy_batches: tuple[HollowBatch, ...] = ()
    hollow_batches: Mapping[SpineId, HollowBatch] = field(default_factory=dict)
    spine_batches: Mapping[SpineId, ThinSpineBatch] = field(default_factory=dict)
    merges: Mapping[SpineId, ThinMerge] = field(default_factory=dict)
