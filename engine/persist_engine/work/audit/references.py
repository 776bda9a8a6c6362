"""Which blobs a shard's live versions name, and what is to be thought of a blob that none of them names (spec 14.11).

A blob belongs to the newest version, to older live versions only (garbage for a later collection), or to none: then it
is leaked when no version to come can name it either, or it may still be on its way into the shard.

SUBTLE: list first, refresh then. A blob that is linked between the two is found named; the other way round it would
look as if nobody named it.
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

#: Rows of a listing held at once.
CHUNK_BLOBS = 10_000


class Bucket(enum.StrEnum):
    """What a blob is to its shard."""

    CURRENT = "current"
    """A part that the newest version names."""
    ROLLUPS = "rollups"
    """A rollup that the newest version names."""
    REFERENCED_NOT_CURRENT = "referenced_not_current"
    """Named by older live versions only: readers hold them, or collection has not come by yet."""
    NOT_LEAKED_NOT_REFERENCED = "not_leaked_not_referenced"
    """Named by nobody, but somebody may be about to."""
    LEAKED = "leaked"
    """Named by nobody, and nobody can any more."""


class References:
    """The blobs that any version names which was live since this was opened. Not thread-safe."""

    def __init__(self, machine: Machine) -> None:
        """Walks all live versions. MissingBlob when the earliest has no readable rollup."""
        self._machine = machine
        self._any: set[str] = set()
        self._readable: set[str] = set()
        self._current: set[str] = set()
        self._below: dict[str, frozenset[str]] = {}
        self._missing: dict[str, str] = {}
        """A listing that is gone, by the one that leads to it (or is it)."""
        self._begin()
        self.refresh()

    @property
    def newest(self) -> ShardState:
        """The newest version as of the last refresh."""
        return self._walk.state

    def refresh(self) -> None:
        """Take in every version committed before the call. Linearized."""
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
        """What the blob listed before the last refresh is."""
        if key.partial in self._current:
            return Bucket.ROLLUPS if isinstance(key, RollupKey) else Bucket.CURRENT
        if key.partial in self._any:
            return Bucket.REFERENCED_NOT_CURRENT
        return Bucket.LEAKED if looks_leaked(key, self.newest) else Bucket.NOT_LEAKED_NOT_REFERENCED

    def is_named(self, partial_key: str) -> bool:
        """Whether a version live at the last refresh, or since this was opened, names it."""
        return partial_key in self._any

    def is_needed(self, partial_key: str) -> bool:
        """Whether a version names it that somebody may read. Others may lack their blobs already: a collection that was
        cut short deletes first, and takes the versions out of the log when it is repeated.
        """
        return partial_key in self._readable

    def check_listings(self) -> None:
        """MissingBlob when a listing is gone that the newest version needs: what it lists looks as if nobody named it. Of
        older versions a collection may have taken it, after what it listed.
        """
        for key in sorted(self._current & self._missing.keys()):
            whole_key = blob_key(self._machine.shard_id, self._missing[key])
            raise MissingBlob(
                f"run listing {whole_key}, which the newest version needs, is missing: what it lists cannot be told from "
                "blobs that nobody names, restore it first",
                key=whole_key,
            )

    def _begin(self) -> None:
        # Taken before the walk begins: what may be read only moves on.
        self._floor = seqno_since(self._machine.refresh())
        self._walk = VersionWalk(self._machine)
        named = self._keys(live_blobs(self._walk.state))
        self._any |= named
        self._readable = named if self._walk.seqno >= self._floor else set()

    def _keys(self, blobs: Iterable[BlobRef]) -> set[str]:
        """Partial keys of `blobs` and of all that listings among them name; each listing is looked into once."""
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
    """Whether no command on `state` or on any later state can name the blob, given that `state` does not: a proof, by
    rules that every command keeps. What is fenced and unnamed may be deleted.

    A rollup: another one of its version is linked, or it is older than all there are. A part: it was staged before the
    floor, or the shard is a tombstone.
    """
    if isinstance(key, RollupKey):
        return key.seqno in state.rollups or key.seqno < rollup_seqnos(state)[0]
    return is_tombstone(state) or key.part_id.staged_ms < (state.staging_floor_ms or 0)


def looks_leaked(key: PartKey | RollupKey, state: ShardState) -> bool:
    """Whether the blob, which nobody names, is fenced, or will hardly be named any more: the code that wrote it can no
    longer open the shard. For reports: no reason to delete anything.
    """
    if is_fenced(key, state):
        return True
    if isinstance(key, RollupKey):
        return False
    return not may_write(key.version, state.applier_version)


def listed_in_chunks(blob: Blob, prefix: str) -> Iterator[list[BlobInfo]]:
    """The listing, `CHUNK_BLOBS` rows at a time. Storage errors surface: only the whole can be begun again."""
    listing = blob.list_prefix(prefix)
    while chunk := list(islice(listing, CHUNK_BLOBS)):
        yield chunk
