"""The blobs that a shard's live versions name, and the classification of the other blobs (spec 14.11).

The newest version names a blob, or only older live versions do (it is garbage for a later collection), or none does. In the last case the
blob is leaked if no future version can name it either; otherwise a process may be about to link it.

SUBTLE: list first, then refresh. Then a blob that is linked between the two counts as named. In the other order it would look unnamed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from itertools import islice

from persist_engine.base.errors import MissingBlob
from persist_engine.base.version import may_write
from persist_engine.codec.keys import PartKey, RollupKey, blob_key
from persist_engine.model.diff.state_diff import BlobRef, StateDiff, inserted_blobs, live_blobs
from persist_engine.model.queries import is_tombstone, rollup_seqnos, seqno_since
from persist_engine.model.state import ShardState
from persist_engine.parts.listings import with_nested
from persist_engine.shard.machine import Machine
from persist_engine.storage.blob import Blob, BlobInfo
from persist_engine.work.audit.walk import VersionWalk, WalkEnd

#: The number of rows of a listing that are in memory at once.
CHUNK_BLOBS = 10_000


class Bucket(enum.StrEnum):
    """The ways in which the versions of a shard refer to a blob."""

    CURRENT = "current"
    """A part that the newest version names."""
    ROLLUPS = "rollups"
    """A rollup that the newest version names."""
    RECORDS = "records"
    """A record of deletions, which no version names."""
    REFERENCED_NOT_CURRENT = "referenced_not_current"
    """A blob that only older live versions name: readers hold them, or collection has not run yet."""
    NOT_LEAKED_NOT_REFERENCED = "not_leaked_not_referenced"
    """A blob that no version names, but that a process may be about to link."""
    LEAKED = "leaked"
    """A blob that no version names and that can never be linked."""


class References:
    """The blobs named by any version that was live since this object was made. Not thread-safe."""

    def __init__(self, machine: Machine) -> None:
        """Walks all live versions. Raises MissingBlob when the earliest has no readable rollup."""
        self._machine = machine
        self._any: set[str] = set()
        self._readable: set[str] = set()
        self._current: set[str] = set()
        self._below: dict[str, frozenset[str]] = {}
        self._missing: dict[str, str] = {}
        """For each listing that is missing, or has a missing listing below it: the key of the missing one."""
        self._begin()
        self.refresh()

    @property
    def newest(self) -> ShardState:
        """The newest version as of the last refresh."""
        return self._walk.state

    def refresh(self) -> None:
        """Adds every version committed before the call. Linearized."""
        while True:
            diff = self._walk.advance()
            if isinstance(diff, StateDiff):
                added = self._keys(inserted_blobs(diff))
                self._any |= added
                if self._walk.seqno == self._floor:
                    self._readable = self._keys(live_blobs(self._walk.state))
                elif self._walk.seqno > self._floor:
                    self._readable |= added
            elif diff is WalkEnd.OVERTAKEN:
                self._begin()
            else:
                break
        self._current = self._keys(live_blobs(self._walk.state))

    def bucket(self, key: PartKey | RollupKey) -> Bucket:
        """The bucket of a blob that was listed before the last refresh."""
        if key.partial in self._current:
            return Bucket.ROLLUPS if isinstance(key, RollupKey) else Bucket.CURRENT
        if key.partial in self._any:
            return Bucket.REFERENCED_NOT_CURRENT
        return Bucket.LEAKED if looks_leaked(key, self.newest) else Bucket.NOT_LEAKED_NOT_REFERENCED

    def is_named(self, partial_key: str) -> bool:
        """Whether a version that was live at any time from the construction of this object to the last refresh names the blob."""
        return partial_key in self._any

    def is_needed(self, partial_key: str) -> bool:
        """Whether a readable version names the blob. Other live versions may already lack blobs: an interrupted collection deleted them,
        and truncates these versions when it is repeated.
        """
        return partial_key in self._readable

    def check_listings(self) -> None:
        """Raises MissingBlob when a listing that the newest version needs is missing, because the blobs that it lists would look unnamed. A
        collection may have deleted the listings of older versions, after the blobs that they list.
        """
        for key in sorted(self._current & self._missing.keys()):
            whole_key = blob_key(self._machine.shard_id, self._missing[key])
            raise MissingBlob(
                f"run listing {whole_key}, which the newest version needs, is missing: the blobs that it lists cannot be "
                "distinguished from orphans; restore it first",
                key=whole_key,
            )

    def _begin(self) -> None:
        # This is read before the walk begins, because the readable range only moves forward.
        self._floor = seqno_since(self._machine.refresh())
        self._walk = VersionWalk(self._machine)
        named = self._keys(live_blobs(self._walk.state))
        self._any |= named
        self._readable = named if self._walk.seqno >= self._floor else set()

    def _keys(self, blobs: Iterable[BlobRef]) -> set[str]:
        """Partial keys of `blobs` and of all blobs that listings among them name. Each listing is fetched once."""
        keys: set[str] = set()
        for blob in blobs:
            keys.add(blob.partial_key)
            if blob.kind == "run":
                if blob.partial_key not in self._below:
                    missing: list[str] = []
                    below = with_nested(self._machine, [blob], missing.append)
                    self._below[blob.partial_key] = frozenset(each.partial_key for each in below)
                    self._missing.update((blob.partial_key, key) for key in missing)
                keys |= self._below[blob.partial_key]
        return keys


def is_fenced(key: PartKey | RollupKey, state: ShardState) -> bool:
    """Whether no command on `state` or on any later state can name the blob, given that `state` does not. Every command keeps the rules
    that this relies on, so it is a proof: a fenced and unnamed blob may be deleted.

    A rollup is fenced when another rollup of its version is linked, or when it is older than all linked rollups. A part is fenced when it
    was staged before the floor, or when the shard is a tombstone.
    """
    if isinstance(key, RollupKey):
        return key.seqno in state.rollups or key.seqno < rollup_seqnos(state)[0]
    return is_tombstone(state) or key.part_id.staged_ms < (state.staging_floor_ms or 0)


def looks_leaked(key: PartKey | RollupKey, state: ShardState) -> bool:
    """Whether an unnamed blob is fenced, or is unlikely to be named because the code that wrote it can no longer open the shard. This is
    for reports only; it is not sufficient for deletion.
    """
    if is_fenced(key, state):
        return True
    if isinstance(key, RollupKey) or key.is_staging_note:
        return False
    return not may_write(key.version, state.applier_version)


def listed_in_chunks(blob: Blob, prefix: str) -> Iterator[list[BlobInfo]]:
    """The listing, `CHUNK_BLOBS` rows at a time. Storage errors surface, because only the whole listing can be restarted."""
    listing = blob.list_prefix(prefix)
    while chunk := list(islice(listing, CHUNK_BLOBS)):
        yield chunk
