"""Append of a batch run: what a refused append of its batches means. Pure. A lost append is normal: somebody else
wrote; nothing of ours was linked.

What was staged stays good, for staging may take minutes and other writers commit many times a second: a run that staged
anew after each lost append would never append anything. So

- batches that still fit are appended again, joined where the shard ends now;
- a time that the run chose moves on to where the shard ends now, as metadata (`model.rewrite`);
- a run that corrects what the shard held also takes back what came since it looked last, by more batches;
- rows at times of their own cannot move: they are late, or they fit.

Only corrections of what can no longer be told apart are computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage, check
from persist_engine.flow.mint_run import AlreadyDone, Superseded
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain
from persist_engine.model.state import SourceProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The batches that the write tasks staged, as one, registered under [lower, upper)."""

    lower: Antichain
    upper: Antichain
    time: int | None
    """The time of all their updates, chosen by the run; None: the rows carry their own, and none can be chosen for them."""
    least_time: int | None
    """The least time of their updates; None when they hold none."""
    reads_back: bool = False
    """Their contents are the difference to what the shard held up to `as_of`."""
    as_of: int | None = None
    """None: the difference to nothing, for the shard was never written."""


@dataclass(frozen=True, slots=True)
class AppendAgain:
    """The same batches fit at [lower, upper)."""

    lower: Antichain
    upper: Antichain


@dataclass(frozen=True, slots=True)
class Move:
    """Advance the times of all batches to `time`, then append them at `lower`."""

    lower: Antichain
    time: int

    @property
    def upper(self) -> Antichain:
        """The end of the batches then."""
        return Antichain.of(self.time + 1)


@dataclass(frozen=True, slots=True)
class Correct:
    """Stage, at `time`, the negation of all that the shard holds after `after` (None: of all that it holds) and before
    `lower`; advance the times of the other batches to `time`; append all of it at `lower`.
    """

    lower: Antichain
    time: int
    after: int | None

    @property
    def upper(self) -> Antichain:
        """The end of the batches then."""
        return Antichain.of(self.time + 1)

    @property
    def upto(self) -> int:
        """The last time that is corrected."""
        return self.lower.newest_complete


@dataclass(frozen=True, slots=True)
class Recompute:
    """Delete the batches, mint and write again."""


@dataclass(frozen=True, slots=True)
class Late:
    """Rows carry times before the shard's upper: they can never be written. Delete the batches, tell the user."""

    current: Antichain


AfterMismatch = AppendAgain | Move | Correct | Recompute | Late


def after_upper_mismatch(
    staged: Staged, current: Antichain, *, now_ms: int, since: Antichain = MINIMUM
) -> AfterMismatch:
    """The shard's upper was `current`, not the batches' lower. `since`: the first time at which the run's reader can still
    be told what the shard held; empty when it can no more.

    Raises InvalidUsage when the shard was closed or leaves no time to write at. A time once chosen is kept while it fits,
    and never moves back.
    """
    if current.time is None:
        raise InvalidUsage("the shard was closed while the sink was writing: nothing can be appended any more")
    check(
        staged.lower < current,
        f"the shard's upper went back from {staged.lower} to {current}",
        lower=staged.lower,
        current=current,
    )
    if staged.time is None:
        if current < staged.upper and (staged.least_time is None or current.less_equal(staged.least_time)):
            return AppendAgain(current, staged.upper)
        return Recompute() if staged.least_time is None else Late(current)
    fits = current.less_equal(staged.time)
    time = staged.time if fits else max(now_ms, current.time)
    if time >= DATA_TIME_MAX:
        raise InvalidUsage(f"the shard's upper {current} leaves no time to write at")
    if staged.reads_back:
        # From nothing on, what is asked for are the contents at the last time; else what came after `as_of`.
        asked = current.newest_complete if staged.as_of is None else staged.as_of
        return Correct(current, time, staged.as_of) if since.less_equal(asked) else Recompute()
    return AppendAgain(current, staged.upper) if fits else Move(current, time)


def after_progress_mismatch(current: SourceProgress | None, *, run: bytes) -> AlreadyDone | Superseded:
    """The sink's committed progress is `current`, not what it was when the run began."""
    if current is not None and current.token == run:
        return AlreadyDone(current.upper)
    return Superseded(current)
