"""Write: decides what one worker of a sink stages (spec 17.3). Pure: events in, instructions out.

     desired rows  ──▶ ┌────────────┐   advance since to the frontier read back
     persisted rows ─▶ │ correction │ ◀──────────────────────────────────────── frontier read back
     (negated)         │ buffer     │
                       └─────┬──────┘   Stage when  lower == read back  and  upper <= desired
                             ▼
                 desired - persisted before `upper`, at the lower or later

Desired and persisted rows of one (key, value) must reach the same worker, where they cancel.

SUBTLE: a worker gives up a description when the frontier read back passed its lower, although other workers may have staged it.
It can no longer be appended: the frontier read back is never past the shard's upper, so the upper is past that lower, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from persist_engine.base.errors import check
from persist_engine.flow.correction import CorrectionBuffer
from persist_engine.flow.desired import DesiredFrontiers, Stream
from persist_engine.flow.mint import Describe, after
from persist_engine.model.frontier import MINIMUM, Antichain


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `corrections(upper)` as one batch of [lower, upper) and send it to append. If there are no corrections, stage no batch."""

    lower: Antichain
    upper: Antichain

    def __str__(self) -> str:
        return f"stage [{self.lower}, {self.upper})"


@dataclass(frozen=True, slots=True)
class Staged:
    """Inform append: this worker will stage no batch with a lower before `before`."""

    before: Antichain

    def __str__(self) -> str:
        return f"staged before {self.before}"


WriteInstruction = Stage | Staged


class Write:
    """State: the buffer, the two frontiers, and the description that waits for them."""

    def __init__(self, desired: DesiredFrontiers, buffer: CorrectionBuffer) -> None:
        """`buffer` begins at the sink's as_of."""
        self._desired = desired
        self._buffer = buffer
        self._persisted = MINIMUM
        self._pending: Describe | None = None

    @property
    def buffer(self) -> CorrectionBuffer:
        """Desired minus persisted."""
        return self._buffer

    @property
    def persisted(self) -> Antichain:
        """The frontier before which everything in the shard was read back."""
        return self._persisted

    def on_desired(self, updates: pa.Table) -> None:
        """Add updates of the desired collection."""
        self._buffer.insert(updates)

    def on_persisted(self, updates: pa.Table) -> None:
        """Add updates of the persisted collection."""
        self._buffer.insert_negated(updates)

    def on_desired_frontier(self, stream: Stream, frontier: Antichain) -> list[WriteInstruction]:
        """`stream` has no more desired updates before `frontier`. Raises InvalidUsage if it goes back."""
        self._desired.advance(stream, frontier)
        instructions = self._stage()
        if not instructions:
            # Desired updates may arrive after everything was read back, for example after a restart. Then no further frontier of
            # the shard triggers consolidation.
            self._buffer.consolidate_at_since()
        return instructions

    def on_persisted_frontier(self, frontier: Antichain) -> list[WriteInstruction]:
        """`on_persisted` received everything the shard holds before `frontier`. Remaining differences at earlier times are
        therefore still wrong now, and are corrected at `frontier`. `frontier` is never beyond the shard's upper.
        """
        check(self._persisted <= frontier, f"reading back goes back from {self._persisted} to {frontier}")
        self._persisted = frontier
        self._buffer.advance_since(self._buffer.since.join(frontier))
        # Consolidate here, too, and not only before staging: a read-only sink stages nothing and must not grow (spec 17.5, bug 30).
        self._buffer.consolidate_at_since()
        if self._pending is not None and self._pending.lower < frontier:
            return self._give_up()
        return self._stage()

    def on_description(self, described: Describe) -> list[WriteInstruction]:
        """Mint described a batch."""
        if described.lower < (self._persisted if self._pending is None else self._pending.lower):
            # The description is stale. Lowers rise, so it is also the last description with its lower.
            return [Staged(after(described.lower))] if self._pending is None else []
        newer = self._pending is not None and self._pending.lower < described.lower
        self._pending = described
        return [*([Staged(described.lower)] if newer else []), *self._stage()]

    def corrections(self, stage: Stage) -> Iterator[pa.Table]:
        """Return what to stage: consolidated updates with times in [lower, upper). They stay in the buffer and cancel when they
        are read back.
        """
        return self._buffer.updates_before(stage.upper)

    def _stage(self) -> list[WriteInstruction]:
        described = self._pending
        if described is None or described.lower != self._persisted or not described.upper <= self._desired.frontier:
            return []
        return [Stage(described.lower, described.upper), *self._give_up()]

    def _give_up(self) -> list[WriteInstruction]:
        assert self._pending is not None
        lower, self._pending = self._pending.lower, None
        return [Staged(after(lower))]
