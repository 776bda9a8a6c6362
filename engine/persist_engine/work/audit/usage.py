"""Storage usage: which blobs exist, to which shard they belong, and whether they are needed (spec 14.11, B.7).

`referenced_usage` reads metadata only; its result is the usage to bill for. `audit_usage` lists the store and therefore also finds leaked
blobs. Neither changes anything. Memory grows with the number of shards and with the metadata of a few, not with the number of blobs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, InvariantViolated, PersistError
from persist_engine.base.metrics import Metrics
from persist_engine.base.retry import Retry
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import RollupKey, blob_key, created_key, parse_blob_key, parse_deletions_key
from persist_engine.codec.registry import IDENTITY_KEY
from persist_engine.model.ids import ShardId
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine
from persist_engine.storage.blob import Blob, BlobInfo
from persist_engine.work.audit.references import Bucket, References, listed_in_chunks

#: The number of shards whose references are in memory at once. A few are enough, because most stores list shard by shard.
TRACKERS_MAX = 8
_PAGE = 1000

#: The Machine of a shard; None for a shard that consensus does not know.
MachineOf = Callable[[ShardId], Machine | None]
#: Receives the blobs and bytes listed so far; for progress bars.
OnListed = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReferencedUsage:
    """The bytes of the blobs that a shard's newest version names, as this version records them, and of its log in consensus."""

    shard_id: ShardId
    parts_bytes: int
    rollups_bytes: int
    inline_bytes: int
    consensus_bytes: int


def referenced_usage(machine: Machine) -> ReferencedUsage:
    """The bytes of the blobs that the newest version names, and of the log. Linearized. Reads the log but no blob. If no version records
    the size of a rollup, looks it up with a listing; a shard's first rollup is linked before its size is known.
    """
    state = machine.refresh()
    sizes = state.trace.sizes
    return ReferencedUsage(
        machine.shard_id,
        sizes.blob_bytes,
        _rollups_bytes(machine, state),
        sizes.inline_bytes,
        _consensus_bytes(machine),
    )


def _rollups_bytes(machine: Machine, state: ShardState) -> int:
    total = 0
    for rollup in state.rollups.values():
        if rollup.size_bytes is None:
            key = blob_key(machine.shard_id, rollup.key)
            found = partial(_listed_bytes, machine.blob, key)
            total += machine.retry.external("list rollup", found, shard=machine.shard_id)
        else:
            total += rollup.size_bytes
    return total


def _listed_bytes(blob: Blob, key: str) -> int:
    """The size of the blob; 0 when it is gone, as after a concurrent collection."""
    return sum(info.size_bytes for info in blob.list_prefix(key) if info.key == key)


def _consensus_bytes(machine: Machine) -> int:
    """Bytes of all live versions in consensus, without keys and the store's overhead. Holds one page in memory."""
    total, last = 0, SeqNo(0)
    while page := machine.versions.fetch_diffs_after(machine.shard_id, last, limit=_PAGE):
        total += sum(len(entry.data) for entry in page)
        last = page[-1].seqno
    return total


@dataclass(slots=True)
class ShardUsage:
    """The blobs of one shard. `exists` says whether consensus knows the shard; if it does not, all blobs are leaked (spec 20, bug 26).
    `problem` is the reason why its live versions could not be read; its blobs then count as not leaked. `writers` holds bytes by the
    writer's key prefix, with rollups under `rollups`, and records of deletions under `records`.
    """

    shard_id: ShardId
    exists: bool = True
    problem: str | None = None
    blobs: Counter[Bucket] = field(default_factory=Counter)
    bytes: Counter[Bucket] = field(default_factory=Counter)
    writers: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """The bytes of all its blobs."""
        return self.bytes.total()

    def to_json(self) -> dict[str, Any]:
        """A JSON object in which every bucket is present."""
        return {
            "shard_id": str(self.shard_id),
            "exists": self.exists,
            "problem": self.problem,
            "total_blobs": self.blobs.total(),
            "total_bytes": self.total_bytes,
            "blobs": {bucket.value: self.blobs[bucket] for bucket in Bucket},
            "bytes": {bucket.value: self.bytes[bucket] for bucket in Bucket},
            "writers": dict(sorted(self.writers.items())),
        }


@dataclass(slots=True)
class Usage:
    """All shards by id, and the blobs under keys of other applications."""

    shards: dict[ShardId, ShardUsage] = field(default_factory=dict)
    foreign_blobs: int = 0
    foreign_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The audit as one JSON object."""
        shards = [self.shards[shard_id].to_json() for shard_id in sorted(self.shards)]
        return {
            "shards": shards,
            "total_bytes": sum(shard["total_bytes"] for shard in shards) + self.foreign_bytes,
            "foreign_blobs": self.foreign_blobs,
            "foreign_bytes": self.foreign_bytes,
        }


def audit_usage(
    blob: Blob,
    machine_of: MachineOf,
    *,
    retry: Retry,
    metrics: Metrics,
    prefix: str = "",
    on_listed: OnListed | None = None,
) -> Usage:
    """Sorts every blob under `prefix` ("" for all shards, `<shard>/` for one) into its bucket.

    May run concurrently with writers and collectors. A storage error restarts the audit, until the retries give up.
    """
    usage = retry.external("usage audit", lambda: _Audit(machine_of, on_listed).run(blob, prefix))
    for shard in usage.shards.values():
        for bucket in Bucket:
            metrics.gauge("usage_bytes", shard.bytes[bucket], shard=shard.shard_id, bucket=bucket.value)
    return usage


class _Audit:
    """One pass over a listing."""

    def __init__(self, machine_of: MachineOf, on_listed: OnListed | None) -> None:
        self._machine_of = machine_of
        self._on_listed = on_listed
        self._usage = Usage()
        self._trackers: OrderedDict[ShardId, References] = OrderedDict()

    def run(self, blob: Blob, prefix: str) -> Usage:
        blobs = byte_count = 0
        for chunk in listed_in_chunks(blob, prefix):
            for shard_id, rows in groupby(sorted(chunk, key=lambda row: row.key), key=_shard_of):
                self._add(shard_id, list(rows))
            blobs += len(chunk)
            byte_count += sum(row.size_bytes for row in chunk)
            if self._on_listed is not None:
                self._on_listed(blobs, byte_count)
        return self._usage

    def _add(self, shard_id: ShardId | None, rows: list[BlobInfo]) -> None:
        if shard_id is None:
            self._count_foreign([row for row in rows if row.key != IDENTITY_KEY])
            return
        shard = self._usage.shards.setdefault(shard_id, ShardUsage(shard_id))
        references = self._references(shard)
        for row in rows:
            if row.key == created_key(shard_id):
                shard.blobs[Bucket.ROLLUPS if shard.exists else Bucket.LEAKED] += 1
                continue
            if parse_deletions_key(row.key) is not None:
                bucket = Bucket.RECORDS if shard.exists else Bucket.LEAKED
                shard.blobs[bucket] += 1
                shard.bytes[bucket] += row.size_bytes
                shard.writers["records"] += row.size_bytes
                continue
            try:
                key = parse_blob_key(row.key)
            except InvalidUsage:
                self._count_foreign([row])
                continue
            if references is not None:
                bucket = references.bucket(key)
            else:
                bucket = Bucket.NOT_LEAKED_NOT_REFERENCED if shard.exists else Bucket.LEAKED
            shard.blobs[bucket] += 1
            shard.bytes[bucket] += row.size_bytes
            shard.writers["rollups" if isinstance(key, RollupKey) else key.partial.split("/")[0]] += row.size_bytes

    def _count_foreign(self, rows: list[BlobInfo]) -> None:
        self._usage.foreign_blobs += len(rows)
        self._usage.foreign_bytes += sum(row.size_bytes for row in rows)

    def _references(self, shard: ShardUsage) -> References | None:
        """The shard's references, refreshed after the current rows were listed; None when they cannot be read."""
        if not shard.exists or shard.problem is not None:
            return None
        references = self._trackers.pop(shard.shard_id, None)
        try:
            if references is None:
                machine = self._machine_of(shard.shard_id)
                if machine is None:
                    shard.exists = False
                    return None
                references = References(machine)
            else:
                references.refresh()
            references.check_listings()
        except (CorruptData, Incompatible, InvariantViolated) as error:
            shard.problem = _problem_text(error)
            return None
        self._trackers[shard.shard_id] = references
        if len(self._trackers) > TRACKERS_MAX:
            self._trackers.popitem(last=False)
        return references


def _shard_of(row: BlobInfo) -> ShardId | None:
    try:
        return ShardId(row.key.partition("/")[0])
    except InvalidUsage:
        return None


def _problem_text(error: PersistError) -> str:
    return f"{error.kind.value}: {error}"
