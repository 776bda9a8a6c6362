"""Append of a batch run: decides what to do after a refused append. Pure. A lost append is normal: another writer was faster,
and none of the run's batches was linked.

Staged batches stay valid, because staging may take minutes while other writers commit many times a second. A run that staged
again after each lost append would never succeed. Instead:

- batches that still fit are appended again, starting where the shard now ends;
- if the run chose the time, the time moves to where the shard now ends, as metadata (`model.batch.rewritten`);
- a run that corrects what the shard held also retracts what arrived since its last look, with additional batches;
- rows with times of their own cannot move: they fit or they are late.

Corrections are recomputed only if the shard's earlier contents are no longer distinguishable.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage, check
from persist_engine.flow.mint_run import AlreadyDone, RunToken, Superseded
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain
from persist_engine.model.state import SourceProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The batches that the write tasks staged, as one, registered under [lower, upper)."""

    lower: Antichain
    upper: Antichain
    time: int | None
    """The time of all their updates, chosen by the run. None: the rows carry their own times."""
    least_time: int | None
    """The least time of their updates; None if there are no updates."""
    reads_back: bool = False
    """Whether their contents are the difference to what the shard held up to `as_of`."""
    as_of: int | None = None
    """None means the difference to the empty collection, because the shard was never written."""


@dataclass(frozen=True, slots=True)
class AppendAgain:
    """Append the same batches under [lower, upper), where they fit."""

    lower: Antichain
    upper: Antichain


@dataclass(frozen=True, slots=True)
class Move:
    """Advance the times of all batches to `time`, then append them at `lower`."""

    lower: Antichain
    time: int

    @property
    def upper(self) -> Antichain:
        """The new upper of the batches."""
        return Antichain.of(self.time + 1)


@dataclass(frozen=True, slots=True)
class Correct:
    """Stage, at `time`, the negation of what the shard holds after `after` (None: of all that it holds) and before `lower`, as far as the
    run corrects it. Advance the times of the other batches to `time`. Append all of it at `lower`.
    """

    lower: Antichain
    time: int
    after: int | None

    @property
    def upper(self) -> Antichain:
        """The new upper of the batches."""
        return Antichain.of(self.time + 1)

    @property
    def upto(self) -> int:
        """The last time to correct."""
        return self.lower.newest_complete


@dataclass(frozen=True, slots=True)
class Recompute:
    """Delete the batches, then mint and write again."""


@dataclass(frozen=True, slots=True)
class Late:
    """Rows carry times before the shard's upper and can never be written. Delete the batches and report this to the user."""

    current: Antichain


AfterMismatch = AppendAgain | Move | Correct | Recompute | Late


def after_upper_mismatch(
    staged: Staged, current: Antichain, *, now_ms: int, since: Antichain = MINIMUM
) -> AfterMismatch:
    """Decide after an append found the shard's upper at `current` instead of the batches' lower. `since`: the first time whose
    contents the run's reader can still read; empty if it can read none.

    Raises InvalidUsage if the shard is closed or leaves no time to write at. A chosen time is kept while it fits and never moves back.
    """
    if current.time is None:
        raise InvalidUsage("the shard was closed while the sink was writing: nothing more can be appended")
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
        # With as_of None, the run needs the contents at the last time; otherwise it needs what came after `as_of`.
        read_from = current.newest_complete if staged.as_of is None else staged.as_of
        return Correct(current, time, staged.as_of) if since.less_equal(read_from) else Recompute()
    return AppendAgain(current, staged.upper) if fits else Move(current, time)


def after_progress_mismatch(current: SourceProgress | None, *, run: bytes) -> AlreadyDone | Superseded:
    """Decide after the sink's committed progress was `current` instead of its value at the start of the run."""
    if current is not None and RunToken.decode(current.token).run == run:
        return AlreadyDone(current.upper)
    return Superseded(current)
