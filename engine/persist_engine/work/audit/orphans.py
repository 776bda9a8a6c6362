"""The orphan scan: finds blobs that no version names and none ever will, and deletes them on request (docs/adr/0005-orphans.md).

Deleting is safe because of a fence in state, not because of age. The scan first commits a floor. From that version on, no command links a
part that was staged before the floor (`ShardState.staging_floor_ms`). Then the scan lists the blobs, and only after that it reads which
versions are live and what they name:

    floor F committed ──▶ list ──▶ read all live versions ──▶ delete what is staged before F and unnamed

A writer or compactor that is slower gets a refusal, never a batch with missing parts. Blobs of shards that consensus does not know are
reported and never deleted, because a wrong consensus URL would look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.deletions import Cause
from persist_engine.codec.keys import (
    PartKey,
    RollupKey,
    parse_blob_key,
    parse_deletions_key,
    rollups_prefix,
    shard_prefix,
)
from persist_engine.model.ids import ShardId
from persist_engine.model.queries import is_tombstone
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.references import CHUNK_BLOBS, Bucket, References, is_fenced, listed_in_chunks
from persist_engine.work.audit.ruins import Ruin, claims_any, ruined, ruins_among
from persist_engine.work.deletions import DeletionRecords

#: Receives the blobs listed and the orphans deleted so far; for progress bars.
OnListed = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Orphan:
    """A blob that no live version names and none ever will. `staged_ms` is None for rollups: their version decides, not their age."""

    key: str
    kind: str
    size_bytes: int
    staged_ms: int | None


@dataclass(slots=True)
class Orphans:
    """The result for one shard. `orphans` holds the first `REPORTED_MAX` orphans by key; `found` and `found_bytes` count all of them.
    `young` counts unnamed blobs that are not old enough. `deleted` counts the deleted orphans, and `deletion_record` is the partial key of
    the last record that names them. `is_complete` is false when the scan stopped at the limit of deletes. `floor_ms` is the committed
    floor; None in a dry run.
    """

    shard_id: ShardId
    floor_ms: int | None = None
    listed: int = 0
    found: int = 0
    found_bytes: int = 0
    young: int = 0
    young_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    deletion_record: str = ""
    is_complete: bool = True
    orphans: list[Orphan] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        out = {name: getattr(self, name) for name in self.__slots__ if name not in {"shard_id", "orphans"}}
        return {"shard_id": str(self.shard_id), **out, "orphans": [asdict(orphan) for orphan in self.orphans]}


#: The limit on orphans in a report. People read the report, and a leak may have millions of orphans.
REPORTED_MAX = 1000


def scan_orphans(
    machine: Machine,
    *,
    older_than_ms: int,
    commit: bool,
    max_deletes: int | None = None,
    on_listed: OnListed | None = None,
) -> Orphans:
    """Reports the shard's orphans that were staged more than `older_than_ms` ago. With `commit`, deletes at most `max_deletes` of them
    (None: all).

    May be repeated, raced and killed at any point. A repetition continues, because deleted blobs are no longer listed. A storage error
    restarts the listing. Writers whose batches were staged before the floor get BatchExpired. Deletes nothing when the named blobs cannot
    be determined: raises MissingBlob when a rollup, or a listing that the newest version needs, is missing, and ShardLost when an existing
    rollup does not belong to the log's history.
    """
    if older_than_ms < 0:
        raise InvalidUsage("the age of orphans must not be negative")
    return _Scan(machine, older_than_ms, max_deletes, on_listed).run(commit=commit)


class _Scan:
    """One run of the scan."""

    def __init__(
        self, machine: Machine, older_than_ms: int, max_deletes: int | None, on_listed: OnListed | None
    ) -> None:
        self._machine = machine
        self._older_than_ms = older_than_ms
        self._max_deletes = max_deletes
        self._on_listed = on_listed
        self._found = Orphans(machine.shard_id)
        self._records = DeletionRecords(machine, Cause.ORPHAN_SCAN)
        self._claims: dict[str, Ruin] = {}
        """By key, the rollups of versions that are no longer live. No live version names these rollups."""

    def run(self, *, commit: bool) -> Orphans:
        machine = self._machine
        newest = machine.refresh()
        # The floor is bounded by this process's clock and by that of the last committer. Otherwise one clock that runs far ahead would
        # cause the batches of all writers to be refused.
        floor_ms = max(0, min(machine.env.now_ms(), newest.walltime_ms) - self._older_than_ms)
        if commit:
            answer, _ = machine.raise_staging_floor(floor_ms)
            self._found.floor_ms = answer.floor_ms

        def attempt() -> None:
            # A failed listing is restarted. Blobs that were deleted stay counted, because they are not listed again.
            kept = self._found
            self._found = Orphans(machine.shard_id, floor_ms=kept.floor_ms, deleted=kept.deleted)
            self._found.found, self._found.found_bytes = kept.deleted, kept.deleted_bytes
            self._found.deleted_bytes = kept.deleted_bytes
            self._list(floor_ms, commit=commit)

        machine.retry.external("list orphans", attempt, shard=machine.shard_id)
        self._records.prune()
        self._found.deletion_record = self._records.last
        return self._found

    def _list(self, floor_ms: int, *, commit: bool) -> None:
        machine, found = self._machine, self._found
        references: References | None = None
        for chunk in listed_in_chunks(machine.blob, shard_prefix(machine.shard_id)):
            found.listed += sum(parse_deletions_key(info.key) is None for info in chunk)
            candidates = {info.key: (info.size_bytes, key) for info in chunk if (key := _parsed(info.key)) is not None}
            if candidates:
                # The log is read only now, after the listing, so that every blob linked up to here counts as named.
                rollups = [key for _, key in candidates.values() if isinstance(key, RollupKey)]
                if references is None:
                    # List the rollups before the log is read. When this chunk is not the whole listing, the rollups may come in a later
                    # chunk than the parts that they protect.
                    rollups = self._rollups() if len(chunk) == CHUNK_BLOBS else rollups
                    references = References(machine)
                else:
                    references.refresh()
                references.check_listings()
                self._check_log(rollups, references)
                orphans = list(self._orphans(candidates, references, floor_ms))
                doomed = {orphan.key for orphan in orphans}
                for ruin in self._claims.values():
                    if claims_any(machine, ruin, doomed):
                        raise ruined(machine.shard_id, ruin)
                self._report(orphans)
                if commit and not self._delete(orphans):
                    found.is_complete = False
                    return
            if self._on_listed is not None:
                self._on_listed(found.listed, found.deleted)

    def _rollups(self) -> list[RollupKey]:
        listed = self._machine.blob.list_prefix(rollups_prefix(self._machine.shard_id))
        return [key for info in listed if isinstance(key := _parsed(info.key), RollupKey)]

    def _check_log(self, rollups: Iterable[RollupKey], references: References) -> None:
        """Raises ShardLost when a rollup does not belong to the log's history: blobs that the lost versions name would look like orphans.
        Records the rollups of unknown history, which may claim blobs.
        """
        for ruin in ruins_among(self._machine, rollups, references.is_named):
            if ruin.names is None:
                raise ruined(self._machine.shard_id, ruin)
            self._claims[ruin.key] = ruin

    def _orphans(
        self, candidates: dict[str, tuple[int, PartKey | RollupKey]], references: References, floor_ms: int
    ) -> Iterator[Orphan]:
        unnamed = (Bucket.LEAKED, Bucket.NOT_LEAKED_NOT_REFERENCED)
        for whole, (size_bytes, key) in candidates.items():
            if references.bucket(key) not in unnamed:
                continue
            if _would_be_fenced(key, references.newest, floor_ms):
                kind = "rollup" if isinstance(key, RollupKey) else "part"
                yield Orphan(whole, kind, size_bytes, key.part_id.staged_ms if isinstance(key, PartKey) else None)
            else:
                self._found.young += 1
                self._found.young_bytes += size_bytes

    def _report(self, orphans: Sequence[Orphan]) -> None:
        found = self._found
        found.found += len(orphans)
        found.found_bytes += sum(orphan.size_bytes for orphan in orphans)
        found.orphans = sorted([*found.orphans, *orphans], key=lambda orphan: orphan.key)[:REPORTED_MAX]

    def _delete(self, orphans: Sequence[Orphan]) -> bool:
        """Deletes up to the limit. Returns whether all were deleted."""
        machine, found = self._machine, self._found
        left = len(orphans) if self._max_deletes is None else max(self._max_deletes - found.deleted, 0)

        def delete(orphan: Orphan) -> None:
            call = lambda: machine.blob.delete(orphan.key)  # noqa: E731 - bound to this orphan
            machine.retry.external("delete orphan", call, shard=machine.shard_id)

        chosen = orphans[:left]
        if not chosen:
            return not orphans
        # Only the listing shows an orphan. Without this intention, no record would name what a killed scan deleted.
        partial_keys = [orphan.key.removeprefix(shard_prefix(machine.shard_id)) for orphan in chosen]
        with (
            self._records.intended(partial_keys, seqno=machine.state.seqno),
            ThreadPoolExecutor(
                machine.settings.maintenance.gc_delete_concurrency, thread_name_prefix="persist-orphans"
            ) as pool,
        ):
            for orphan, _ in zip(chosen, pool.map(delete, chosen), strict=True):
                found.deleted += 1
                found.deleted_bytes += orphan.size_bytes
        machine.metrics.count("orphans_deleted_blobs", len(chosen))
        return len(chosen) == len(orphans)


def _would_be_fenced(key: PartKey | RollupKey, state: ShardState, floor_ms: int) -> bool:
    """Whether the blob will be fenced once `floor_ms` is committed. If it is committed already, whether the blob is fenced."""
    if isinstance(key, RollupKey) or is_tombstone(state):
        return is_fenced(key, state)
    return key.part_id.staged_ms < floor_ms


def _parsed(key: str) -> PartKey | RollupKey | None:
    try:
        return parse_blob_key(key)
    except InvalidUsage:
        return None
