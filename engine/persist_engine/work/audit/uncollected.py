"""Determines since when content that the newest version no longer names may hold updates that are owed a deletion (spec 14.13).

A compaction replaces batches, and a collection unlinks rollups. Both stay in the stores until a collection passes the version that
released them. Log entries and rollups hold bounds of the rows of batches, and inline rows; a rollup also contains the entries since the
rollup before. This module bounds how long the oldest retraction has been waiting in any version from the earliest live one on, and in any
older rollup that still exists. It reads no parts. Orphans belong to no version: only a listing finds them (`proof`).

Cost: the first call for a shard, and the first one after each collection, reads the earliest rollup and the live log. Other calls read what
was committed since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from persist_engine.base.errors import CorruptData, Incompatible, MissingBlob
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import blob_key
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.batch import NOTHING_WAITS
from persist_engine.model.diff.field_diff import Delete
from persist_engine.model.diff.state_diff import StateDiff, named_batches, removes_content
from persist_engine.model.frontier import MINIMUM
from persist_engine.model.ids import ShardId
from persist_engine.model.spine.owed import waits_from_ms
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.walk import VersionWalk, WalkEnd

#: The number of shards whose summaries are kept. A summary is a few numbers.
SUMMARIES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class _Summary:
    """A summary of the log from `earliest` to `seqno`. `oldest_ms` is when the oldest retraction in these versions began to wait."""

    birth: bytes
    earliest: int
    seqno: int
    released: bool
    oldest_ms: int

    def after(self, diff: StateDiff) -> _Summary:
        named_ms = min((batch.waits_from_ms for batch in named_batches(diff)), default=NOTHING_WAITS)
        return replace(
            self,
            seqno=int(diff.seqno_to),
            released=self.released or removes_content(diff),
            oldest_ms=min(self.oldest_ms, named_ms),
        )


class Uncollected:
    """The answers for the shards of one client. Thread-safe: two threads may compute the same answer twice."""

    def __init__(self) -> None:
        self._summaries: dict[ShardId, _Summary] = {}

    def from_ms(self, machine: Machine, *, earliest: int) -> int | None:
        """The time since which released content may hold an update that is owed a deletion; None when there is no such update. `earliest`
        is the earliest live version. Covers at least the versions up to the machine's state. Retries storage errors. Returns 0 when the
        earliest version, or an older rollup that still exists, cannot be read: then there is no bound on what it holds.
        """
        state, known = machine.state, self._summaries.get(machine.shard_id)
        if state.trace.upper == MINIMUM:
            return None  # nothing was ever appended, so there is nothing to read
        if known is None or known.birth != state.birth or known.earliest != earliest or known.seqno > state.seqno:
            found = _walked(machine)
        else:
            found = _followed(machine, known) or _walked(machine)
        if found is None:
            return 0
        if len(self._summaries) >= SUMMARIES_MAX:
            self._summaries.clear()
        self._summaries[machine.shard_id] = found
        return found.oldest_ms if found.released and found.oldest_ms != NOTHING_WAITS else None


def _followed(machine: Machine, known: _Summary) -> _Summary | None:
    """`known`, extended by what was committed since; None when the log no longer continues from it."""
    if known.seqno == machine.state.seqno:
        return known
    live = machine.versions.fetch_diffs_after(machine.shard_id, SeqNo(known.seqno))
    for diff in machine.versions.decode_diffs_after(machine.shard_id, SeqNo(known.seqno), live):
        if diff.seqno_to != known.seqno + 1:
            return None
        known = known.after(diff)
    return known


def _walked(machine: Machine) -> _Summary | None:
    while True:
        try:
            walk = VersionWalk(machine)
        except (MissingBlob, CorruptData, Incompatible):
            return None
        earliest = walk.seqno
        found = _Summary(
            walk.state.birth, int(earliest), int(earliest), released=False, oldest_ms=_waits(walk.state)
        ).after(walk.initial_diff)  # the log entry still holds what its diff removed
        rollups = set(_unlinked(walk.initial_diff, earliest))
        while isinstance(diff := walk.advance(), StateDiff):
            found = found.after(diff)
            rollups |= set(_unlinked(diff, earliest))
        if diff is WalkEnd.NEWEST:
            rollups |= {rollup.key for seqno, rollup in walk.state.rollups.items() if seqno <= earliest}
            for key in rollups:
                found = _with_rollup(machine, found, key)
            return found


def _unlinked(diff: StateDiff, earliest: SeqNo) -> list[str]:
    """Partial keys of the rollups that `diff` unlinks and that may hold more than the live log does."""
    return [change.old.key for change in diff.rollups if isinstance(change, Delete) and change.key <= earliest]


def _with_rollup(machine: Machine, found: _Summary, key: str) -> _Summary:
    """`found`, extended by what the blob of a rollup holds: a state, and the entries that led to it from the rollup before. No version
    needs this blob. So a blob that cannot be read does not make the call fail: it counts as holding retractions since time 0.
    """
    whole = blob_key(machine.shard_id, key)
    data = machine.retry.external("get rollup", lambda: machine.blob.get(whole), shard=machine.shard_id)
    if data is None:
        return found
    try:
        rollup = decode_rollup(data, key=whole)
        diffs = [decode_state_diff(entry.data, key=whole) for entry in rollup.diffs]
    except (CorruptData, Incompatible):
        return replace(found, released=True, oldest_ms=0)
    for diff in diffs:
        found = replace(found.after(diff), seqno=found.seqno)
    return replace(found, oldest_ms=min(found.oldest_ms, _waits(rollup.state)))


def rollup_waits_from_ms(data: bytes, *, key: str) -> int:
    """The time since which the oldest retraction in a rollup's blob waits; NOTHING_WAITS if none does. Raises CorruptData, Incompatible."""
    rollup = decode_rollup(data, key=key)
    named = (batch for entry in rollup.diffs for batch in named_batches(decode_state_diff(entry.data, key=key)))
    return min(_waits(rollup.state), NOTHING_WAITS, *(batch.waits_from_ms for batch in named))


def _waits(state: ShardState) -> int:
    oldest_ms = waits_from_ms(state.trace)
    return NOTHING_WAITS if oldest_ms is None else oldest_ms
