"""Append of a batch run: what a refused append of its batches means. Pure. A lost append is normal: somebody else
wrote; nothing of ours was linked.

The staged batches may still be right (their rows are all at or past the new upper): then they are appended again,
joined there. Or they are not, and the run is computed anew or ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage, check
from persist_engine.flow.mint_run import AlreadyDone, Superseded
from persist_engine.model.frontier import Antichain
from persist_engine.model.state import SourceProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The batches that the write tasks staged, as one. `least_time` is None when they hold no update."""

    lower: Antichain
    upper: Antichain
    least_time: int | None
    reads_back: bool
    """Their contents depend on what the shard held below `lower`."""
    own_times: bool
    """Their times come from the rows: a new time cannot be chosen for them."""


@dataclass(frozen=True, slots=True)
class AppendAgain:
    """The same batches fit at [lower, upper)."""

    lower: Antichain
    upper: Antichain


@dataclass(frozen=True, slots=True)
class Recompute:
    """Delete the batches, mint and write again."""


@dataclass(frozen=True, slots=True)
class Late:
    """Rows carry times before the shard's upper: they can never be written. Delete the batches, tell the user."""

    current: Antichain


def after_upper_mismatch(staged: Staged, current: Antichain) -> AppendAgain | Recompute | Late:
    """The shard's upper was `current`, not the batches' lower."""
    if current.is_empty():
        raise InvalidUsage("the shard was closed while the sink was writing: nothing can be appended any more")
    check(
        staged.lower < current,
        f"the shard's upper went back from {staged.lower} to {current}",
        lower=staged.lower,
        current=current,
    )
    if staged.reads_back:
        return Recompute()
    if current < staged.upper and (staged.least_time is None or current.less_equal(staged.least_time)):
        return AppendAgain(current, staged.upper)
    return Late(current) if staged.own_times and staged.least_time is not None else Recompute()


def after_progress_mismatch(current: SourceProgress | None, *, run: bytes) -> AlreadyDone | Superseded:
    """The sink's committed progress is `current`, not what it was when the run began."""
    if current is not None and current.token == run:
        return AlreadyDone(current.upper)
    return Superseded(current)
