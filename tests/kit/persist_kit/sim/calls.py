"""Calls that the witness judges, the changes that a commit may make in each call, and frontiers as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId
from persist_engine.model.state import COMMIT_INFO, FILTERED, ShardState
from persist_engine.testing.oracle import Update

from persist_kit.sim.decided import Decided

#: The hold that two operators take from each other, with any token.
OPERATED_ID = CriticalReaderId.from_bytes(b"\xdd" * 16)
#: The commands by which readers advance since.
_DOWNGRADES = frozenset({"DowngradeSince", "CompareAndDowngradeSince"})
#: Entries of progress that no sink owns: a commit's information about itself, and the columns with filters. The clock never changes.
_OF_THE_ENGINE = frozenset({COMMIT_INFO, FILTERED})
#: The closed frontier as a number: beyond every time.
CLOSED = 1 << 64


def frontier_of(time: int) -> Antichain:
    """The frontier of `time`; CLOSED is the closed one."""
    return Antichain.empty() if time >= CLOSED else Antichain.of(time)


def time_of(frontier: Antichain) -> int:
    """Inverse of `frontier_of`."""
    return CLOSED if frontier.time is None else frontier.time


@dataclass(frozen=True)
class Takeover:
    """One call that replaces the fencing token of the critical reader."""

    expected: bytes
    new: bytes


@dataclass(eq=False)
class Append:
    """One call that appends, recorded from its invocation on."""

    number: int
    updates: list[Update]
    lower: int
    upper: int
    is_exact: bool
    """True: compare-and-append, all or nothing. False: `append`, which appends the part that others have not written, piece by piece."""
    invoked_at: int
    answer: str = ""
    progress: tuple[str, bytes] | None = None
    expected_progress: bytes | None = None
    invoked_seqno: int = 0

    def __repr__(self) -> str:
        return f"append {self.number} [{self.lower},{self.upper})"


@dataclass(frozen=True)
class Recovering:
    """One call that recovers the log from a rollup: the newest, or the one with this whole key. `there`: the rollups that existed when
    it began.
    """

    rollup: str | None
    there: frozenset[str]


def wrong_since(before: ShardState | None, after: ShardState, *, command: str) -> str | None:
    """The error in the since after `command`; None when it is right. Since advances only when a remaining reader acts, and may then pass
    the holds of readers that have left. It never advances because a reader left (spec 9.9). A reader that repeats a downgrade with an
    unknown outcome may stay unchanged. With a retention, since also advances with upper, which it follows at that distance.
    """
    if before is None or before.trace.since == after.trace.since:
        return None
    since, upper = after.trace.since, after.trace.upper
    retained = after.retain_ms
    if retained is not None and upper.time is not None and time_of(since) > max(0, upper.time - retained):
        return f"since went to {since} at {after.seqno}, less than {retained} before upper {upper}"
    if command == "SetRetention" or (command == "CompareAndAppend" and retained is not None):
        return None
    leased = [(before.leased_readers.get(key), reader) for key, reader in after.leased_readers.items()]
    critical = [(before.critical_readers.get(key), reader) for key, reader in after.critical_readers.items()]
    acted = any(old is not None and old != new for old, new in leased) or any(
        held is not None and held != now for held, now in critical
    )
    if not acted and command not in _DOWNGRADES:
        return f"since went to {since} at {after.seqno} although no reader acted"
    return None


def wrong_tokens(before: ShardState | None, after: ShardState, *, acting: object) -> str | None:
    """The error in the fencing tokens and the progress of sinks; None when they are right. Only a call that expected the stored value may
    change them.
    """
    if before is None:
        return None
    if before.critical_readers is not after.critical_readers:
        for reader_id, reader in after.critical_readers.items():
            held = before.critical_readers.get(reader_id)
            fits = isinstance(acting, Takeover) and held is not None and acting.expected == held.opaque
            is_disputed = reader_id == OPERATED_ID
            if held is not None and held.opaque != reader.opaque and not fits and not is_disputed:
                return f"{acting} takes {reader_id} over from {held.opaque!r} at {after.seqno}"
    if before.progress is after.progress:
        return None
    for sink, progress in after.progress.items():
        stored = before.progress.get(sink)
        token = None if stored is None else stored.token
        if token == progress.token or sink in _OF_THE_ENGINE:
            continue
        if isinstance(acting, Append):
            fits = (acting.progress, acting.expected_progress) == ((sink, progress.token), token)
        else:
            fits = isinstance(acting, Decided) and acting.moves(sink, token, progress.token)
        moves_alone = isinstance(acting, Decided) and acting.moves_alone
        if not fits or (before.trace.upper == after.trace.upper and not moves_alone):
            return f"{acting} moves progress of {sink} from {token!r} at {after.seqno}"
        if progress.upper != after.trace.upper:
            return f"{acting} stores progress of {sink} up to {progress.upper} at {after.seqno}, whose upper is {after.trace.upper}"
    return None


def missed_progress(before: ShardState | None, after: ShardState, call: Append | Decided) -> str | None:
    """The error in the progress after a commit of rows by `call`, which must replace the progress that the call expects by its own, in the
    same commit. None when it is right.
    """
    if call.progress is None:
        return None
    sink, token = call.progress
    was = None if before is None else before.progress.get(sink)
    now = after.progress.get(sink)
    if (None if was is None else was.token) != call.expected_progress or now is None or now.token != token:
        return f"progress of {sink} was {was}, is {now}; it expects {call.expected_progress!r}, and stores {token!r}"
    return None
