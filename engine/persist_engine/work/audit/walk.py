"""A walk over the live versions of a shard, oldest first, in bounded memory: one state and one page of diffs.

Garbage collection and all audits use it. This module does not know what they look for. Other processes may truncate or
append meanwhile. A walk reports when a truncation overtook it. A walk at the newest version may continue later.
"""

from __future__ import annotations

import enum
from collections import deque

from persist_engine.base.versioned import SeqNo
from persist_engine.model.diff.state_diff import StateDiff, forked_log, live_blobs
from persist_engine.model.diff.state_diff import apply as apply_state_diff
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine

#: The number of diffs that are fetched at once. A walk never holds more, however long a reader held collection back (spec 20, bug 7).
PAGE_DIFFS = 1024


class WalkEnd(enum.Enum):
    """Why a walk does not advance."""

    NEWEST = "newest"
    """The walk stands on the newest version, or on the given bound."""
    OVERTAKEN = "overtaken"
    """Another process truncated the next version. The walk is now useless, because the versions that it saw are no
    longer live.
    """


class VersionWalk:
    """Stands on one live version, at first on the earliest. Not thread-safe."""

    def __init__(self, machine: Machine) -> None:
        """Fetches the earliest live state. Raises MissingBlob when it has no readable rollup. Retries storage errors."""
        self._machine = machine
        # `through` 0 makes the walk reach exactly the earliest version.
        live = machine.versions.fetch_all_live_states(machine.shard_id, through=SeqNo(0), known=machine.state)
        if live is None:
            raise forked_log(machine.state, f"{machine.versions.consensus.address()} has none")
        self.state: ShardState = live.state
        self.initial_diff: StateDiff = live.initial_diff
        """The diff that led to the earliest state, which already includes it."""
        self.encoded_bytes = live.encoded_bytes
        """The bytes of the diffs read so far."""
        self._page: deque[StateDiff] = deque()

    @property
    def seqno(self) -> SeqNo:
        """The version at which the walk stands."""
        return self.state.seqno

    def advance(self, through: SeqNo | None = None) -> StateDiff | WalkEnd:
        """Advances by one version, not past `through`, and returns the diff that led there. If it cannot advance, it returns the
        reason and changes nothing.
        """
        if through is not None and self.seqno >= through:
            return WalkEnd.NEWEST
        if not self._page and not self._fetch(through):
            return WalkEnd.NEWEST
        if self._page[0].seqno_to != self.seqno + 1:
            return WalkEnd.OVERTAKEN
        diff = self._page.popleft()
        self.state = apply_state_diff(self.state, diff, count=self._machine.versions.count_apply)
        return diff

    def _fetch(self, through: SeqNo | None) -> bool:
        limit = PAGE_DIFFS if through is None else min(PAGE_DIFFS, through - self.seqno)
        versions, shard_id = self._machine.versions, self._machine.shard_id
        live = versions.fetch_diffs_after(shard_id, self.seqno, limit=limit)
        self.encoded_bytes += sum(len(entry.data) for entry in live)
        self._page.extend(versions.decode_diffs_after(shard_id, self.seqno, live))
        return bool(self._page)


def live_keys(state: ShardState) -> set[str]:
    """Partial keys of every blob that `state` names."""
    return {blob.partial_key for blob in live_blobs(state)}
