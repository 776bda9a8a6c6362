"""Restores every missing blob that a live version names, oldest version first (spec 14.10).

This works even when no state can be opened: it begins with the log itself, whose diffs name the rollups. The result
depends on the store: a bucket that keeps versions can undelete a blob, other stores cannot. It deletes nothing and changes
nothing else, so it may be repeated and may run concurrently with anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from persist_engine.base.errors import NotKept, ShardNotFound, StorageError
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import blob_key, shard_prefix
from persist_engine.model.diff.state_diff import StateDiff, inserted_blobs, live_blobs
from persist_engine.model.ids import ShardId
from persist_engine.parts.listings import with_nested
from persist_engine.shard.applier import Applier
from persist_engine.shard.machine import Machine
from persist_engine.shard.versions import StateVersions
from persist_engine.work.audit.walk import PAGE_DIFFS, VersionWalk, WalkEnd

#: Receives the blobs examined and the blobs in all, as far as known; for progress bars.
OnLooked = Callable[[int, int], None]


@dataclass(slots=True)
class Restored:
    """The result of a restoration. `named` counts the blobs that live versions name; those in `missing` did not exist. Those in
    `restored` were restored; those in `lost` could not be (key and reason). After a dry run both are empty.
    """

    shard_id: ShardId
    named: int = 0
    missing: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        lost = [{"key": key, "reason": reason} for key, reason in self.lost]
        return {
            "shard_id": str(self.shard_id),
            "named": self.named,
            "missing": self.missing,
            "restored": self.restored,
            "lost": lost,
        }


def restore_shard(
    versions: StateVersions, shard_id: ShardId, *, commit: bool, on_looked: OnLooked | None = None
) -> Restored:
    """Finds missing blobs and, with `commit`, restores them. Reports a blob that cannot be restored, and still tries the
    others. Raises ShardNotFound when the shard does not exist. Raises MissingBlob when the states cannot be read because a
    rollup is missing: without `commit` it was not restored, with `commit` it could not be.
    """
    restoring = _Restoring(versions, shard_id, commit=commit, on_looked=on_looked)
    restoring.rollups_of_the_log()
    restoring.everything_named()
    return restoring.report


class _Restoring:
    def __init__(self, versions: StateVersions, shard_id: ShardId, *, commit: bool, on_looked: OnLooked | None) -> None:
        self.report = Restored(shard_id)
        self._versions = versions
        self._shard_id = shard_id
        self._commit = commit
        self._on_looked = on_looked
        self._seen: set[str] = set()
        prefix = shard_prefix(shard_id)
        listing = versions.retry.external("list", lambda: list(versions.blob.list_prefix(prefix)), shard=shard_id)
        self._existing = {info.key.removeprefix(prefix) for info in listing}

    def rollups_of_the_log(self) -> None:
        """Restores the newest rollup, without which no state can be opened, and the other rollups that live diffs
        added.
        """
        newest: str | None = None
        last = SeqNo(0)
        while page := self._versions.fetch_diffs_after(self._shard_id, last, limit=PAGE_DIFFS):
            for diff in self._versions.decode_diffs_after(self._shard_id, last, page):
                newest = diff.latest_rollup_key
                for blob in inserted_blobs(diff):
                    if blob.kind == "rollup":
                        self._look(blob.partial_key)
            last = page[-1].seqno
        if newest is None:
            text = f"shard {self._shard_id} does not exist in {self._versions.consensus.address()}"
            raise ShardNotFound(text, shard_id=self._shard_id)
        self._look(newest)

    def everything_named(self) -> None:
        """Restores the newest state's rollups first, so that the earliest state can be read. Then restores all blobs, state by
        state, oldest first.
        """
        state = self._versions.fetch_current_state(self._shard_id)
        for rollup in state.rollups.values():
            self._look(rollup.key)
        machine = Machine(Applier(state, self._versions))
        for partial_key in _named(machine):
            self._look(partial_key)

    def _look(self, partial_key: str) -> None:
        if partial_key in self._seen:
            return
        self._seen.add(partial_key)
        self.report.named += 1
        if self._on_looked is not None:
            self._on_looked(self.report.named, max(self.report.named, len(self._existing)))
        if partial_key in self._existing:
            return
        key = blob_key(self._shard_id, partial_key)
        self.report.missing.append(key)
        if self._commit:
            self._restore(key)

    def _restore(self, key: str) -> None:
        backoff = None
        while True:
            try:
                self._versions.blob.restore(key)
            except NotKept as error:
                self.report.lost.append((key, str(error)))
                return
            except StorageError as error:
                backoff = backoff or self._versions.retry.backoff("restore", shard=self._shard_id)
                backoff.wait(error)
            else:
                self.report.restored.append(key)
                return


def _named(machine: Machine) -> Iterator[str]:
    """The blobs that live versions name, oldest first. Each listing comes before its entries, and is fetched only after it was
    yielded. Ends early when a collection overtakes it, because the rest is then no longer named.
    """
    walk = VersionWalk(machine)
    yield from (blob.partial_key for blob in with_nested(machine, live_blobs(walk.state)))
    while not isinstance(diff := walk.advance(), WalkEnd):
        assert isinstance(diff, StateDiff)
        yield from (blob.partial_key for blob in with_nested(machine, inserted_blobs(diff)))
