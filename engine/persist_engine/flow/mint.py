"""Mint: chooses the times at which a running sink writes. One machine per sink, regardless of the number of workers (spec
17.2). Pure: events in, instructions out.

      desired frontier ─┐                        ┌─▶ RaiseUpper(to)         only while the shard is behind as_of
                        ├─▶ persist < desired? ──┤
     the shard's upper ─┘     lower is new?      └─▶ Describe(lower, upper)  to every worker, and to append

Mint follows the shard's upper, not the frontier that was read back. The two differ while reading lags, and if the shard's since
is beyond its upper, nothing can be read at all.

Invariants: lowers rise strictly and uppers never fall, so only the newest description can still be appended.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import check
from persist_engine.flow.desired import DesiredFrontiers, Stream
from persist_engine.model.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain


@dataclass(frozen=True, slots=True)
class Describe:
    """Write the changes needed in [lower, upper). Supersedes every earlier description."""

    lower: Antichain
    upper: Antichain

    def __str__(self) -> str:
        return f"describe [{self.lower}, {self.upper})"


@dataclass(frozen=True, slots=True)
class RaiseUpper:
    """Raise the shard's upper to `to` by an empty append, unless it is already there. Idempotent.

    After that, no process can write below `to`, and reading back reaches it (spec 17.9).
    """

    to: Antichain

    def __str__(self) -> str:
        return f"raise upper to {self.to}"


MintInstruction = Describe | RaiseUpper


class Mint:
    """State: the two frontiers, the last minted lower, and whether writing is allowed."""

    def __init__(self, desired: DesiredFrontiers, *, as_of: Antichain, read_only: bool) -> None:
        """Nothing is written before `as_of`. Desired updates at earlier times count as updates at `as_of`."""
        check(not as_of.is_empty(), "a sink without a time to begin at has nothing to write")
        self._desired = desired
        self._as_of = as_of
        self._shard_upper = MINIMUM
        self._last_lower: Antichain | None = None
        self._read_only = read_only

    @property
    def persist_frontier(self) -> Antichain:
        """The lower of the next batch: the shard's upper, or `as_of` while that is beyond it."""
        return self._as_of.join(self._shard_upper)

    @property
    def output_frontier(self) -> Antichain:
        """The frontier before which no future description has its lower."""
        return (
            self.persist_frontier if self._last_lower is None else self.persist_frontier.join(after(self._last_lower))
        )

    def on_desired_frontier(self, stream: Stream, frontier: Antichain) -> list[MintInstruction]:
        """`stream` has no more desired updates before `frontier`. Raises InvalidUsage if it goes back."""
        self._desired.advance(stream, frontier)
        return self._mint()

    def on_shard_upper(self, upper: Antichain) -> list[MintInstruction]:
        """The shard's upper was `upper` at some time. An older upper than the last one has no effect."""
        self._shard_upper = self._shard_upper.join(upper)
        return self._mint()

    def allow_writes(self) -> list[MintInstruction]:
        """Allow descriptions from now on, permanently. Idempotent."""
        self._read_only = False
        return self._mint()

    def _mint(self) -> list[MintInstruction]:
        lower, upper = self.persist_frontier, self._desired.frontier
        is_new = self._last_lower is None or self._last_lower < lower
        if self._read_only or not is_new or not lower < upper:
            return []
        self._last_lower = lower
        described = Describe(lower, upper)
        return [described] if self._shard_upper == lower else [RaiseUpper(lower), described]


def after(frontier: Antichain) -> Antichain:
    """Return the next frontier: one past the time, or closed after the last possible time."""
    return EMPTY if frontier.time is None or frontier.time == TIME_MAX else Antichain.of(frontier.time + 1)
