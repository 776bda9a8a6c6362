"""Converts the records of deleted blobs to bytes and back (docs/adr/0026-deletions.md). They hold keys and no rows.

<shard>/d<expires>/d<uuid>      one record of at most KEYS_MAX blobs that one run deleted
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from persist_engine.base.errors import Incompatible, check
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.envelope import Kind, decoding, opened, sealed
from persist_engine.model.ids import ShardId
from persist_engine.pb import deletions_pb2 as pb

#: The limit on the blobs that one record names. A full record has half a MiB.
KEYS_MAX = 10_000


class Cause(enum.StrEnum):
    """Why blobs were deleted."""

    COLLECTION = "Collection"
    """No live version names them any more."""
    ORPHAN_SCAN = "OrphanScan"
    """No version named them, and none ever will."""
    COMPACTION = "Compaction"
    """The output of a compaction that was not linked."""
    ROLLUP = "Rollup"
    """A rollup that was not linked."""


_CAUSES = {
    Cause.COLLECTION: pb.DELETION_CAUSE_COLLECTION,
    Cause.ORPHAN_SCAN: pb.DELETION_CAUSE_ORPHAN_SCAN,
    Cause.COMPACTION: pb.DELETION_CAUSE_COMPACTION,
    Cause.ROLLUP: pb.DELETION_CAUSE_ROLLUP,
}
_CAUSES_BY_NUMBER = {number: cause for cause, number in _CAUSES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletions:
    """Blobs that one run deleted. Times are milliseconds since 1970, by the clock of the run."""

    shard_id: ShardId
    cause: Cause
    seqno: SeqNo
    """The version that the run worked on; for a collection, the version to which it collected."""
    hostname: str
    begun_ms: int
    """The run had deleted none of them before this time."""
    gone_ms: int | None
    """All of them were gone at this time. None means an intention: the run wanted to delete them, and it is unknown which it deleted."""
    keys: tuple[str, ...]
    """The partial keys of the blobs."""


def encode_deletions(record: Deletions) -> bytes:
    """The record as a blob. Raises InvariantViolated when a value does not fit."""
    check(len(record.keys) <= KEYS_MAX, f"a record of {len(record.keys)} deletions")
    message = pb.Deletions(
        shard_id=record.shard_id.to_bytes(),
        cause=_CAUSES[record.cause],
        seqno=record.seqno,
        hostname=record.hostname,
        begun_ms=record.begun_ms,
        gone_ms=record.gone_ms,
        keys=record.keys,
    )
    return sealed(Kind.DELETIONS, message)


def decode_deletions(data: bytes, *, key: str, shard_id: ShardId) -> Deletions:
    """Inverse of `encode_deletions`. Raises CorruptData (also for the record of another shard) or Incompatible with `key`."""
    message = opened(Kind.DELETIONS, data, pb.Deletions(), key)
    with decoding("the record of deletions", key):
        found = ShardId.from_bytes(message.shard_id)
        check(found == shard_id, f"it is of shard {found}")
        cause = _CAUSES_BY_NUMBER.get(message.cause)
        if cause is None:
            raise Incompatible(f"an unknown cause, {message.cause}")
        return Deletions(
            shard_id=found,
            cause=cause,
            seqno=SeqNo(message.seqno),
            hostname=message.hostname,
            begun_ms=message.begun_ms,
            gone_ms=message.gone_ms if message.HasField("gone_ms") else None,
            keys=tuple(message.keys),
        )
