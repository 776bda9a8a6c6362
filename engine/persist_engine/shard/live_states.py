"""A walk over the live states of a shard, oldest first, one diff at a time. Owns no I/O: `shard.versions` fetched it
all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from persist_engine.base.errors import check
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.model.diff.state_diff import StateDiff, check_same_entry
from persist_engine.model.diff.state_diff import apply as apply_state_diff
from persist_engine.model.state import ShardState


class LiveStates:
    """Stands on one state at a time: first on the earliest. ForkedLog for entries that do not follow one another, the
    earliest state's among them. Not thread-safe.
    """

    def __init__(
        self, earliest: ShardState, diffs: Sequence[tuple[VersionedData, StateDiff]], *, count: Callable[[str], None]
    ) -> None:
        check(
            diffs[0][1].seqno_to == earliest.seqno,
            f"live diffs begin at {diffs[0][1].seqno_to}, not at {earliest.seqno}",
        )
        check_same_entry(earliest, diffs[0][1].tag)
        self._state = earliest
        self._count = count
        self.initial_diff = diffs[0][1]
        """The diff that led to the earliest state; already part of it."""
        self._diffs = [diff for _, diff in diffs[1:]]
        self._encoded_bytes = sum(len(entry.data) for entry, _ in diffs)
        self._next = 0

    @property
    def state(self) -> ShardState:
        """Where the walk stands."""
        return self._state

    @property
    def seqno(self) -> SeqNo:
        """Version where the walk stands."""
        return self._state.seqno

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all the diffs that were fetched."""
        return self._encoded_bytes

    def advance(self) -> StateDiff | None:
        """Go one version on; the diff that led there, or None (and nothing changes) at the end."""
        if self._next == len(self._diffs):
            return None
        diff = self._diffs[self._next]
        self._next += 1
        self._state = apply_state_diff(self._state, diff, count=self._count)
        return diff
