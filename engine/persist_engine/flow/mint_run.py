"""Mint of a batch run: choose the times it writes at. Pure: facts in, a decision out. The shell (Spark driver, thread,
test) does the rest.

A run of a batch sink goes mint -> write -> append. Here the run is given its lower (the shard's upper: where its
batch must join) and its time; `append_run.py` decides what a refusal of the append means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.state import SourceProgress

#: `<series>-<number>`; more digits than these are no number of a run.
_NUMBERED = re.compile(rb"(.*)-([0-9]{1,19})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """What the driver saw of the shard, from one state."""

    since: Antichain
    upper: Antichain
    progress: SourceProgress | None
    """What this sink committed last."""


@dataclass(frozen=True, slots=True)
class Minted:
    """Write at `time`, join at `lower`; the batch covers [lower, time + 1) unless its rows carry their own times.

    `as_of` is the time at which the persisted collection must be read to be corrected; None: nothing was ever
    written, it is empty.
    """

    lower: Antichain
    time: int
    as_of: int | None

    @property
    def upper(self) -> Antichain:
        """The end of the batch when all its updates are at `time`."""
        return Antichain.of(self.time + 1)


@dataclass(frozen=True, slots=True)
class RaiseUpper:
    """First append nothing at [lower, upper), then look again: the persisted collection is not readable before (see
    `mint`).
    """

    lower: Antichain
    upper: Antichain


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The very same run was appended before; its data end at `upper`."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another run of this sink committed: a newer one before this began, or any meanwhile. Delete the batches, stop."""

    current: SourceProgress | None


def mint(
    view: ShardView, *, run: bytes, now_ms: int, reads_back: bool
) -> Minted | RaiseUpper | AlreadyDone | Superseded:
    """Choose for the run named `run`; `reads_back` when it corrects the persisted collection instead of adding to it.

    Runs named `<series>-<number>` follow each other: once a newer one committed an older one is over, whatever became of
    it, for the shard remembers the last one only.

    Raises InvalidUsage when the shard is closed. Never chooses a time before the shard's upper, whatever the clock
    says.
    """
    if view.progress is not None and view.progress.token == run:
        return AlreadyDone(view.progress.upper)
    if view.progress is not None and _is_older(run, view.progress.token):
        return Superseded(view.progress)
    lower = view.upper.time
    if lower is None:
        raise InvalidUsage("the shard is closed: its upper is empty, nothing can be written any more")
    time = max(now_ms, lower)
    if time >= DATA_TIME_MAX:
        raise InvalidUsage(f"the shard's upper {view.upper} leaves no time to write at")
    if not reads_back:
        return Minted(view.upper, time, None)
    if view.since.time is None:
        raise InvalidUsage(
            "the shard's since is empty: its contents can no longer be read, so they cannot be corrected"
        )
    if lower == 0:
        return Minted(view.upper, time, None)
    as_of = lower - 1
    if view.since.time > as_of:
        # SUBTLE: since may be at or beyond upper. Times below since are no longer distinguishable, so the last
        # written time cannot be read;
        # since can, once upper is past it. Nothing but the frontier changes: there is no data at [upper, since].
        return RaiseUpper(view.upper, Antichain.of(view.since.time + 1))
    return Minted(view.upper, time, as_of)


def _is_older(run: bytes, committed: bytes) -> bool:
    ours, theirs = _NUMBERED.fullmatch(run), _NUMBERED.fullmatch(committed)
    return bool(ours and theirs and ours[1] == theirs[1] and int(ours[2]) < int(theirs[2]))
