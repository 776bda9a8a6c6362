"""Mint of a batch run: chooses the times at which it writes. Pure: facts in, a decision out. The shell (Spark driver, thread, test) acts.

A run of a batch sink goes mint -> write -> append. Mint gives the run its time and its lower, the shard's upper, where its
batch must start. `append_run.py` decides what to do after a refused append.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.state import SourceProgress

#: A run name of the form `<series>-<number>`. Longer digit sequences are not run numbers.
_NUMBERED = re.compile(rb"(.*)-([0-9]{1,19})", re.DOTALL)


#: A token with a digest. Any other token is a run's name as a whole.
_WITH_ROWS = re.compile(rb"(.+)\nrows-1:([0-9a-f]{32})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RunToken:
    """The progress that a run commits with its data: its name and, if the run corrects all of the shard's contents, the digest of the
    rows that the shard then holds.

    This is a durable format. A token without a digest is the name alone, as before digests existed. A release that knows no digests takes
    the token for the name of another run and repeats the run, which then finds nothing to correct.
    """

    run: bytes
    rows: bytes | None = None
    """32 hexadecimal digits."""

    def encode(self) -> bytes:
        """The token. `RunToken.decode(t.encode()) == t`."""
        return self.run if self.rows is None else self.run + b"\nrows-1:" + self.rows

    @classmethod
    def decode(cls, token: bytes) -> RunToken:
        """Inverse of `encode`, for any bytes: `RunToken.decode(b).encode() == b`."""
        found = _WITH_ROWS.fullmatch(token)
        return cls(token) if found is None else cls(found[1], found[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """The driver's view of the shard, from one state."""

    since: Antichain
    upper: Antichain
    progress: SourceProgress | None
    """The last progress that this sink committed."""


@dataclass(frozen=True, slots=True)
class Minted:
    """Write at `time`, append at `lower`. The batch covers [lower, time + 1), unless its rows carry their own times.

    `as_of` is the time at which to read the persisted collection that the run corrects. None: the collection is empty, because
    nothing was ever written.
    """

    lower: Antichain
    time: int
    as_of: int | None

    @property
    def upper(self) -> Antichain:
        """The upper of the batch if all its updates are at `time`."""
        return Antichain.of(self.time + 1)


@dataclass(frozen=True, slots=True)
class RaiseUpper:
    """First append an empty batch at [lower, upper), then mint again. Until then, the persisted collection is not readable (see `mint`)."""

    lower: Antichain
    upper: Antichain


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """An earlier attempt of this same run was appended; its data ends at `upper`."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another run of this sink committed: a newer one before this run began, or any run since. Delete the batches and stop."""

    current: SourceProgress | None


def mint(
    view: ShardView, *, run: bytes, now_ms: int, reads_back: bool
) -> Minted | RaiseUpper | AlreadyDone | Superseded:
    """Choose the times for the run named `run`. `reads_back` means that the run corrects the persisted collection and does not add to it.

    Runs named `<series>-<number>` form a sequence. Once a newer run committed, an older one is superseded, whatever its own
    outcome, because the shard remembers only the last run.

    Raises InvalidUsage if the shard is closed. The chosen time is never before the shard's upper, regardless of the clock.
    """
    if view.progress is not None:
        committed = RunToken.decode(view.progress.token).run
        if committed == run:
            return AlreadyDone(view.progress.upper)
        if _is_older(run, committed):
            return Superseded(view.progress)
    lower = view.upper.time
    if lower is None:
        raise InvalidUsage("the shard is closed: its upper is empty, nothing more can be written")
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
        # SUBTLE: since may be at or beyond upper. Times before since are not distinguishable, so the last written time cannot
        # be read. Since itself can, once upper is past it. The empty append moves only the frontier: there is no data at
        # [upper, since].
        return RaiseUpper(view.upper, Antichain.of(view.since.time + 1))
    return Minted(view.upper, time, as_of)


def _is_older(run: bytes, committed: bytes) -> bool:
    ours, theirs = _NUMBERED.fullmatch(run), _NUMBERED.fullmatch(committed)
    return bool(ours and theirs and ours[1] == theirs[1] and int(ours[2]) < int(theirs[2]))
