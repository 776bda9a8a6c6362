"""Converts the records in a shard's state to protobuf and back: readers, writers, schemas, claims, rollups, the flat trace's entries.

As in `codec.batch`, `*_from_pb` raise errors for bytes that no encoder wrote, and must run within `envelope.decoding`.
"""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import Message

from persist_engine.base.errors import check
from persist_engine.base.versioned import TAG_BYTES, SeqNo
from persist_engine.codec.batch import antichain_from_pb, antichain_to_pb, description_from_pb, description_to_pb
from persist_engine.model.batch import HollowRollup
from persist_engine.model.ids import IdempotencyToken
from persist_engine.model.spine.flat import SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.state import (
    Claim,
    CriticalReader,
    DebugInfo,
    LeasedReader,
    SchemaPair,
    SourceProgress,
    Writer,
)
from persist_engine.pb import state_pb2 as pb

#: The number of random bytes in a birth.
BIRTH_BYTES = 16


def need(message: Message, *names: str) -> None:
    """Raises InvariantViolated unless the message fields `names` are present. An absent field is not an empty one."""
    for name in names:
        check(message.HasField(name), f"{message.DESCRIPTOR.name} without {name}")


def birth_from_pb(raw: bytes) -> bytes:
    check(len(raw) == BIRTH_BYTES, f"a birth of {len(raw)} bytes")
    return raw


def tag_from_pb(raw: bytes) -> bytes:
    check(len(raw) in {0, TAG_BYTES}, f"a tag of {len(raw)} bytes")
    return raw


def debug_to_pb(debug: DebugInfo) -> pb.DebugInfo:
    """Equal values share the message, so it may be read or copied, but never changed. Every diff of a writer holds the same value."""
    return _debug_to_pb(debug.hostname, debug.purpose)


@lru_cache(maxsize=1024)
def _debug_to_pb(hostname: str, purpose: str) -> pb.DebugInfo:
    return pb.DebugInfo(hostname=hostname, purpose=purpose)


def debug_from_pb(message: pb.DebugInfo) -> DebugInfo:
    return DebugInfo(message.hostname, message.purpose)


def leased_reader_to_pb(reader: LeasedReader) -> pb.LeasedReader:
    return pb.LeasedReader(
        since=antichain_to_pb(reader.since),
        seqno=reader.seqno,
        last_heartbeat_ms=reader.last_heartbeat_ms,
        lease_ms=reader.lease_ms,
        debug=debug_to_pb(reader.debug),
    )


def leased_reader_from_pb(message: pb.LeasedReader) -> LeasedReader:
    need(message, "since", "debug")
    return LeasedReader(
        seqno=SeqNo(message.seqno),
        since=antichain_from_pb(message.since),
        last_heartbeat_ms=message.last_heartbeat_ms,
        lease_ms=message.lease_ms,
        debug=debug_from_pb(message.debug),
    )


def critical_reader_to_pb(reader: CriticalReader) -> pb.CriticalReader:
    return pb.CriticalReader(since=antichain_to_pb(reader.since), opaque=reader.opaque, debug=debug_to_pb(reader.debug))


def critical_reader_from_pb(message: pb.CriticalReader) -> CriticalReader:
    need(message, "since", "debug")
    return CriticalReader(antichain_from_pb(message.since), message.opaque, debug_from_pb(message.debug))


def writer_to_pb(writer: Writer) -> pb.Writer:
    return pb.Writer(
        last_heartbeat_ms=writer.last_heartbeat_ms,
        lease_ms=writer.lease_ms,
        most_recent_write_token=writer.most_recent_write_token.to_bytes(),
        most_recent_write_upper=antichain_to_pb(writer.most_recent_write_upper),
        debug=debug_to_pb(writer.debug),
    )


def writer_from_pb(message: pb.Writer) -> Writer:
    need(message, "most_recent_write_upper", "debug")
    return Writer(
        last_heartbeat_ms=message.last_heartbeat_ms,
        lease_ms=message.lease_ms,
        debug=debug_from_pb(message.debug),
        most_recent_write_token=IdempotencyToken.from_bytes(message.most_recent_write_token),
        most_recent_write_upper=antichain_from_pb(message.most_recent_write_upper),
    )


def schema_to_pb(schema: SchemaPair) -> pb.SchemaPair:
    return pb.SchemaPair(key=schema.key, val=schema.val)


def schema_from_pb(message: pb.SchemaPair) -> SchemaPair:
    return SchemaPair(message.key, message.val)


def claim_to_pb(claim: Claim) -> pb.Claim:
    return pb.Claim(seqno=claim.seqno, start_ms=claim.start_ms)


def claim_from_pb(message: pb.Claim) -> Claim:
    return Claim(SeqNo(message.seqno), message.start_ms)


def progress_to_pb(progress: SourceProgress) -> pb.SourceProgress:
    return pb.SourceProgress(token=progress.token, upper=antichain_to_pb(progress.upper))


def progress_from_pb(message: pb.SourceProgress) -> SourceProgress:
    need(message, "upper")
    return SourceProgress(message.token, antichain_from_pb(message.upper))


def rollup_to_pb(rollup: HollowRollup) -> pb.HollowRollup:
    return pb.HollowRollup(key=rollup.key, size_bytes=rollup.size_bytes)


def rollup_from_pb(message: pb.HollowRollup) -> HollowRollup:
    return HollowRollup(message.key, message.size_bytes if message.HasField("size_bytes") else None)


def spine_id_to_pb(spine_id: SpineId) -> pb.SpineId:
    """Equal ids share the message, so it may be read or copied, but never changed."""
    return _spine_id_to_pb(spine_id.lo, spine_id.hi)


@lru_cache(maxsize=4096)
def _spine_id_to_pb(lo: int, hi: int) -> pb.SpineId:
    return pb.SpineId(lo=lo, hi=hi)


def spine_id_from_pb(message: pb.SpineId) -> SpineId:
    """Equal messages share the value."""
    return _spine_id(message.lo, message.hi)


_spine_id = lru_cache(maxsize=16_384)(SpineId)


def spine_batch_to_pb(batch: ThinSpineBatch) -> pb.ThinSpineBatch:
    return pb.ThinSpineBatch(
        level=batch.level,
        desc=description_to_pb(batch.desc),
        parts=[spine_id_to_pb(part) for part in batch.parts],
        descs=[description_to_pb(desc) for desc in batch.descs],
    )


def spine_batch_from_pb(message: pb.ThinSpineBatch) -> ThinSpineBatch:
    need(message, "desc")
    return ThinSpineBatch(
        level=message.level,
        desc=description_from_pb(message.desc),
        parts=tuple([_spine_id(part.lo, part.hi) for part in message.parts]),
        descs=tuple(map(description_from_pb, message.descs)),
    )


def merge_to_pb(merge: ThinMerge) -> pb.ThinMerge:
    return pb.ThinMerge(
        since=antichain_to_pb(merge.since),
        remaining_work=merge.remaining_work,
        active_compaction_start_ms=merge.active_compaction_start_ms,
    )


def merge_from_pb(message: pb.ThinMerge) -> ThinMerge:
    need(message, "since")
    start = message.active_compaction_start_ms if message.HasField("active_compaction_start_ms") else None
    return ThinMerge(antichain_from_pb(message.since), message.remaining_work, start)
