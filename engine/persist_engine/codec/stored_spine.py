"""Converts a trace to protobuf and back: each spine batch is a head and its hollow batches as bytes, compressed when they are
many. A trace without structure is stored as its hollow batches alone.

Opening a shard reads the heads, of which there are O(log n). The hollow batches of a spine batch are decoded on first use
(`LazyParts`). While they stay unchanged, they are written again as the same bytes. So the cost of an opening, and of the next
rollup, depends on what changed, not on the number of live batches.
"""

from __future__ import annotations

import pyarrow as pa

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.codec import records
from persist_engine.codec.batch import (
    antichain_from_pb,
    antichain_to_pb,
    batch_from_pb,
    batch_to_pb,
    description_from_pb,
    description_to_pb,
)
from persist_engine.codec.envelope import decoding
from persist_engine.model.spine.flat import FlatTrace, SpineId, ThinMerge
from persist_engine.model.spine.flatten import assemble, thin_merges
from persist_engine.model.spine.lazy_parts import EncodedParts, JoinedParts, LazyParts, Outline
from persist_engine.model.spine.spine import IdBatch, Parts, Sizes, Spine, SpineBatch, validate_parts
from persist_engine.model.spine.trace import Trace
from persist_engine.pb import state_pb2 as pb

#: Fewer bytes are not compressed.
PACK_BYTES_MIN = 4096
#: The codec cannot expand a byte to more than this (128 KiB from one block of repeats), so a larger stated size is refused unread.
_UNPACKED_PER_BYTE_MAX = 1 << 15
#: The codec, at level 1, Arrow's default: descriptors of parts shrink to a quarter, at a gigabyte per second.
_PACKER = "zstd"


def trace_to_pb(trace: Trace) -> pb.Trace:
    """The message of `trace`. Encodes only the spine batches that changed since this process last wrote them; without structure, all hollow
    batches.
    """
    if not trace.structured:
        flat = trace.flatten()
        return pb.Trace(
            since=antichain_to_pb(flat.since), legacy_batches=[batch_to_pb(batch) for batch in flat.legacy_batches]
        )
    merges = thin_merges(trace.spine.levels)
    return pb.Trace(
        since=antichain_to_pb(trace.since),
        merges=[
            pb.MergeEntry(id=records.spine_id_to_pb(key), merge=records.merge_to_pb(merges[key]))
            for key in sorted(merges)
        ],
        stored=[_stored(batch) for batch in trace.spine_batches()],
    )


def trace_from_pb(message: pb.Trace, *, key: str) -> Trace:
    """Inverse of `trace_to_pb`. `key` names the rollup in errors, both now and when hollow batches are loaded. A trace without
    batches has structure.
    """
    records.need(message, "since")
    if message.legacy_batches:
        check(not (message.stored or message.merges), "batches are stored in two ways")
        legacy = tuple(batch_from_pb(batch) for batch in message.legacy_batches)
        return Trace.unflatten(FlatTrace(antichain_from_pb(message.since), legacy))
    merges: dict[SpineId, ThinMerge] = {}
    for entry in message.merges:
        records.need(entry, "id", "merge")
        spine_id = records.spine_id_from_pb(entry.id)
        check(spine_id not in merges, f"{spine_id} comes twice")
        merges[spine_id] = records.merge_from_pb(entry.merge)
    batches = [_opened(stored, key) for stored in message.stored]
    spine: Spine = assemble(antichain_from_pb(message.since), batches, merges)
    spine.validate()
    return Trace(spine, structured=True)


def stored_form(batch: SpineBatch) -> EncodedParts:
    """The hollow batches of `batch` as the next rollup will hold them. Equal batches have equal forms. The result is kept, so
    that the rollup need not encode them again.
    """
    return batch.encoded_parts(_encode)


def _stored(batch: SpineBatch) -> pb.StoredSpineBatch:
    sizes = batch.sizes
    encoded = stored_form(batch)
    return pb.StoredSpineBatch(
        id=records.spine_id_to_pb(batch.id),
        level=batch.level,
        desc=description_to_pb(batch.desc),
        rows=sizes.rows,
        parts=sizes.parts,
        runs=sizes.runs,
        blob_bytes=sizes.blob_bytes,
        inline_bytes=sizes.inline_bytes,
        count=len(batch.parts),
        batches=encoded.data,
        unpacked_bytes=encoded.unpacked_bytes,
    )


def _encode(parts: Parts) -> EncodedParts:
    if isinstance(parts, LazyParts) and (parts.source.unpacked_bytes or len(parts.source.data) < PACK_BYTES_MIN):
        return parts.source
    data = _unpacked_message(parts).SerializeToString(deterministic=True)
    if len(data) < PACK_BYTES_MIN:
        return EncodedParts(data)
    return EncodedParts(pa.compress(data, codec=_PACKER, asbytes=True), len(data))


def _unpacked_message(parts: Parts) -> pb.StoredBatches:
    if isinstance(parts, LazyParts):
        return pb.StoredBatches.FromString(_unpacked(parts.source))
    if isinstance(parts, JoinedParts):
        message = pb.StoredBatches()
        for piece in parts.pieces:
            message.MergeFrom(_unpacked_message(piece))  # appends to both lists
        return message
    ids = [records.spine_id_to_pb(part_id) for part_id, _ in parts]
    return pb.StoredBatches(ids=ids, batches=[batch_to_pb(batch) for _, batch in parts])


def _unpacked(encoded: EncodedParts) -> bytes:
    """The bytes before compression. Raises InvariantViolated when they do not have the stated size."""
    data, size = encoded.data, encoded.unpacked_bytes
    if not size:
        return data
    check(size <= len(data) * _UNPACKED_PER_BYTE_MAX, f"{len(data)} bytes do not hold {size}")
    try:
        return bytes(pa.decompress(data, decompressed_size=size, codec=_PACKER, asbytes=True))
    except OSError as error:
        raise InvariantViolated(f"{len(data)} bytes do not unpack to {size}: {error}") from error


def _opened(stored: pb.StoredSpineBatch, key: str) -> SpineBatch:
    records.need(stored, "id", "desc")
    spine_id, desc = records.spine_id_from_pb(stored.id), description_from_pb(stored.desc)
    sizes = Sizes(stored.rows, stored.parts, stored.runs, stored.blob_bytes, stored.inline_bytes)
    level, count = stored.level, stored.count
    check(count > 0, f"spine batch {spine_id} holds nothing")

    def read(source: EncodedParts) -> pb.StoredBatches:
        message = pb.StoredBatches.FromString(_unpacked(source))
        check(
            len(message.ids) == len(message.batches) == count,
            f"{len(message.batches)} batches with {len(message.ids)} ids, where {count} belong",
        )
        return message

    def load(source: EncodedParts) -> tuple[IdBatch, ...]:
        with decoding(f"spine batch {spine_id}", key):
            message = read(source)
            parts = tuple(
                (records.spine_id_from_pb(part_id), batch_from_pb(batch))
                for part_id, batch in zip(message.ids, message.batches, strict=True)
            )
            validate_parts(SpineBatch(spine_id, desc, level, parts, sizes))
            return parts

    def outline(source: EncodedParts) -> Outline:
        with decoding(f"spine batch {spine_id}", key):
            message = read(source)
            ids = tuple(records.spine_id_from_pb(part_id) for part_id in message.ids)
            return ids, tuple(description_from_pb(batch.desc) for batch in message.batches)

    source = EncodedParts(stored.batches, stored.unpacked_bytes)
    return SpineBatch(spine_id, desc, level, LazyParts(count, source, load, outline), sizes)
