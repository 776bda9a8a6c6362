"""Tracks how far the desired collection is known. It arrives in two streams, rows and errors, and is known only as far as both are known.
Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import MappingProxyType

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import EMPTY, MINIMUM, Antichain


class Stream(enum.Enum):
    """The two halves of a desired collection."""

    OK = "ok"
    ERR = "err"


@dataclass(slots=True)
class DesiredFrontiers:
    """A frontier per stream. `frontier` is the lesser of the two (spec 17.1). Invariant: neither goes back.

    A missing stream counts as ended: its frontier is empty from the start.
    """

    _of: dict[Stream, Antichain] = field(default_factory=lambda: dict.fromkeys(Stream, MINIMUM))

    @classmethod
    def without_errors(cls) -> DesiredFrontiers:
        """A tracker for a collection without errors."""
        return cls({Stream.OK: MINIMUM, Stream.ERR: EMPTY})

    @property
    def frontier(self) -> Antichain:
        """The frontier before which all desired updates of both streams are known."""
        return self._of[Stream.OK].meet(self._of[Stream.ERR])

    @property
    def by_stream(self) -> MappingProxyType[Stream, Antichain]:
        """A read-only view of the two frontiers."""
        return MappingProxyType(self._of)

    def advance(self, stream: Stream, frontier: Antichain) -> bool:
        """Record that `stream` has no more updates before `frontier`. Returns whether that moved the common frontier. Raises
        InvalidUsage if the stream's frontier goes back. Idempotent.
        """
        current = self._of[stream]
        if not current <= frontier:
            raise InvalidUsage(f"the {stream.value} frontier of a sink goes back from {current} to {frontier}")
        before = self.frontier
        self._of[stream] = frontier
        return self.frontier != before
