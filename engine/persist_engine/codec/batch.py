"""Converts hollow batches and their parts to protobuf and back: alone, within listings and between processes.

`*_to_pb` build messages. `*_from_pb` build values, and raise InvariantViolated or InvalidUsage for bytes that no encoder
wrote. They must run within `envelope.decoding`, which turns these errors into CorruptData.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from persist_engine.base.errors import CorruptData, Incompatible, InvariantViolated, check
from persist_engine.base.version import APPLIER_VERSION, check_readable
from persist_engine.codec.envelope import Kind, decoding, opened, sealed
from persist_engine.model.batch import (
    ColumnStats,
    Footing,
    HollowBatch,
    HollowPart,
    HollowRun,
    InlinePart,
    PartStats,
    RunKind,
    RunMeta,
    RunOrder,
    RunPart,
)
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import RunId, ShardId
from persist_engine.pb import batch_pb2 as pb

_ORDERS = {
    RunOrder.UNORDERED: pb.RUN_ORDER_UNORDERED,
    RunOrder.CODEC: pb.RUN_ORDER_CODEC,
    RunOrder.STRUCTURED: pb.RUN_ORDER_STRUCTURED,
}
_ORDERS_BACK = {number: order for order, number in _ORDERS.items()}
_KINDS = {
    RunKind.ANY: pb.RUN_KIND_ANY,
    RunKind.DISTINCT: pb.RUN_KIND_DISTINCT,
    RunKind.BALANCED: pb.RUN_KIND_BALANCED,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def encode_batch(batch: HollowBatch) -> bytes:
    """The bytes of a batch alone, without its shard."""
    return sealed(Kind.BATCH, batch_to_pb(batch))


def decode_batch(data: bytes, *, key: str = "batch") -> HollowBatch:
    """Inverse of `encode_batch`. Raises CorruptData or Incompatible with `key`."""
    message = opened(Kind.BATCH, data, pb.HollowBatch(), key)
    with decoding("the batch", key):
        return batch_from_pb(message)


def encode_transmittable(shard_id: ShardId, version: str, batch: HollowBatch) -> bytes:
    """The bytes of a batch for another process, with its shard and the version of the code that made it."""
    message = pb.TransmittableBatch(shard_id=shard_id.to_bytes(), applier_version=version, batch=batch_to_pb(batch))
    return sealed(Kind.TRANSMITTABLE_BATCH, message)


def decode_transmittable(data: bytes, *, key: str = "transmittable batch") -> tuple[ShardId, str, HollowBatch]:
    """Returns (shard, version, batch). Inverse of `encode_transmittable`. Raises CorruptData or Incompatible (also for newer
    code) with `key`.
    """
    message = opened(Kind.TRANSMITTABLE_BATCH, data, pb.TransmittableBatch(), key)
    check_readable(message.applier_version, key)
    with decoding("the transmittable batch", key):
        return ShardId.from_bytes(message.shard_id), message.applier_version, batch_from_pb(message.batch)


def encode_run_listing(shard_id: ShardId, parts: Sequence[RunPart], *, version: str = APPLIER_VERSION) -> bytes:
    """The blob of a hollow run. It holds the shard, the version of the code that wrote it, and `parts` in order."""
    listing = pb.RunListing(shard_id=shard_id.to_bytes(), applier_version=version, parts=map(_part_to_pb, parts))
    return sealed(Kind.RUN_LISTING, listing)


def decode_run_listing(data: bytes, *, key: str, shard_id: ShardId) -> tuple[RunPart, ...]:
    """The listed parts, at least one. Inverse of `encode_run_listing`. Raises CorruptData (also for another shard's listing)
    or Incompatible (also for newer code) with `key`.
    """
    message = opened(Kind.RUN_LISTING, data, pb.RunListing(), key)
    check_readable(message.applier_version, key)
    with decoding("the run listing", key):
        owner = ShardId.from_bytes(message.shard_id)
        parts = tuple(_part_from_pb(part) for part in message.parts)
        check(bool(parts), "a run of no parts")
    if owner != shard_id:
        raise CorruptData(f"{key}: the run listing is of shard {owner}, not of {shard_id}", key=key)
    return parts


def antichain_to_pb(frontier: Antichain) -> pb.Antichain:
    """Equal frontiers share the message, so it may be read or copied, but never changed."""
    return _antichain_to_pb(frontier.time)


@lru_cache(maxsize=1024)
def _antichain_to_pb(time: int | None) -> pb.Antichain:
    return pb.Antichain(elements=() if time is None else (time,))


def antichain_from_pb(message: pb.Antichain) -> Antichain:
    """The frontier of a message with at most one element. The caller must check that the message is present."""
    elements = message.elements
    if len(elements) > 1:
        raise InvariantViolated(f"a frontier of {len(elements)} times")
    return _antichain(elements[0] if elements else None)


#: A cache, because a state has few different frontiers, and many batches share each.
_antichain = lru_cache(maxsize=4096)(Antichain)


def description_to_pb(desc: Description) -> pb.Description:
    """Equal descriptions share the message, so it may be read or copied, but never changed. A diff repeats those of its spine batches."""
    return _description_to_pb(desc.lower.time, desc.upper.time, desc.since.time)


@lru_cache(maxsize=4096)
def _description_to_pb(lower: int | None, upper: int | None, since: int | None) -> pb.Description:
    return pb.Description(lower=_antichain_to_pb(lower), upper=_antichain_to_pb(upper), since=_antichain_to_pb(since))


def description_from_pb(message: pb.Description) -> Description:
    """Equal messages share the value, because a diff names the same batches again at every level into which they merge."""
    return _description(message.SerializeToString())


@lru_cache(maxsize=16_384)
def _description(raw: bytes) -> Description:
    """The description in these bytes, from a cache: the lookup takes a tenth of the time of reading the fields."""
    message = pb.Description()
    message.ParseFromString(raw)
    for name in ("lower", "upper", "since"):
        if not message.HasField(name):
            raise InvariantViolated(f"a description without {name}")
    return Description(*(antichain_from_pb(each) for each in (message.lower, message.upper, message.since)))


def batch_to_pb(batch: HollowBatch) -> pb.HollowBatch:
    return pb.HollowBatch(
        desc=description_to_pb(batch.desc),
        rows=batch.rows,
        parts=[_part_to_pb(part) for part in batch.parts],
        run_splits=batch.run_splits,
        run_metas=[_run_to_pb(meta) for meta in batch.run_metas],
    )


def batch_from_pb(message: pb.HollowBatch) -> HollowBatch:
    check(message.HasField("desc"), "a batch without a description")
    return HollowBatch(
        desc=description_from_pb(message.desc),
        rows=message.rows,
        parts=tuple(_part_from_pb(part) for part in message.parts),
        run_splits=tuple(message.run_splits),
        run_metas=tuple(_run_from_pb(meta) for meta in message.run_metas),
    )


def _part_to_pb(part: RunPart) -> pb.Part:
    rewrite = None if part.ts_rewrite is None else antichain_to_pb(part.ts_rewrite)
    if isinstance(part, InlinePart):
        inline = pb.InlinePart(
            data=part.data,
            rows=part.rows,
            diffs_sum=part.diffs_sum,
            ts_rewrite=rewrite,
            schema_id=part.schema_id,
            format=part.format,
            sum_wraps=part.sum_wraps,
        )
        return pb.Part(inline=inline)
    if isinstance(part, HollowRun):
        return pb.Part(run=_run_ref_to_pb(part))
    footer = part.footer
    hollow = pb.HollowPart(
        key=part.key,
        size_bytes=part.size_bytes,
        rows=part.rows,
        diffs_sum=part.diffs_sum,
        checksum=part.checksum,
        key_lower=part.key_lower,
        stats=None if part.stats is None else _stats_to_pb(part.stats),
        ts_rewrite=rewrite,
        schema_id=part.schema_id,
        format=part.format,
        sum_wraps=part.sum_wraps,
        footer=None if footer is None else _footing_to_pb(footer),
    )
    return pb.Part(hollow=hollow)


def _run_ref_to_pb(run: HollowRun) -> pb.HollowRun:
    return pb.HollowRun(
        key=run.key,
        size_bytes=run.size_bytes,
        checksum=run.checksum,
        rows=run.rows,
        diffs_sum=run.diffs_sum,
        parts_bytes=run.parts_bytes,
        part_bytes_max=run.part_bytes_max,
        part_count=run.part_count,
        blob_count=run.blob_count,
        oldest_key=run.oldest_key,
        schema_id=run.schema_id,
        key_lower=run.key_lower,
        ts_rewrite=None if run.ts_rewrite is None else antichain_to_pb(run.ts_rewrite),
        sum_wraps=run.sum_wraps,
    )


def _run_ref_from_pb(message: pb.HollowRun) -> HollowRun:
    return HollowRun(
        key=message.key,
        size_bytes=message.size_bytes,
        checksum=message.checksum,
        rows=message.rows,
        diffs_sum=message.diffs_sum if message.HasField("diffs_sum") else None,
        parts_bytes=message.parts_bytes,
        part_bytes_max=message.part_bytes_max,
        part_count=message.part_count,
        blob_count=message.blob_count,
        oldest_key=message.oldest_key,
        schema_id=message.schema_id if message.HasField("schema_id") else None,
        key_lower=message.key_lower,
        ts_rewrite=antichain_from_pb(message.ts_rewrite) if message.HasField("ts_rewrite") else None,
        sum_wraps=message.sum_wraps,
    )


def _part_from_pb(message: pb.Part) -> RunPart:
    which = message.WhichOneof("part")
    if which == "inline":
        inline = message.inline
        return InlinePart(
            data=inline.data,
            rows=inline.rows,
            diffs_sum=inline.diffs_sum if inline.HasField("diffs_sum") else None,
            ts_rewrite=antichain_from_pb(inline.ts_rewrite) if inline.HasField("ts_rewrite") else None,
            schema_id=inline.schema_id if inline.HasField("schema_id") else None,
            format=inline.format,
            sum_wraps=inline.sum_wraps,
        )
    if which == "run":
        return _run_ref_from_pb(message.run)
    if which is None and message.ByteSize():  # newer code wrote a field that this code does not know
        raise Incompatible("a part of a kind that this code does not know: upgrade this binary")
    check(which == "hollow", "a part of no kind")
    hollow = message.hollow
    return HollowPart(
        key=hollow.key,
        size_bytes=hollow.size_bytes,
        rows=hollow.rows,
        diffs_sum=hollow.diffs_sum if hollow.HasField("diffs_sum") else None,
        checksum=hollow.checksum,
        key_lower=hollow.key_lower,
        stats=_stats_from_pb(hollow.stats) if hollow.HasField("stats") else None,
        ts_rewrite=antichain_from_pb(hollow.ts_rewrite) if hollow.HasField("ts_rewrite") else None,
        schema_id=hollow.schema_id if hollow.HasField("schema_id") else None,
        format=hollow.format,
        sum_wraps=hollow.sum_wraps,
        footer=_footing_from_pb(hollow.footer) if hollow.HasField("footer") else None,
    )


def _footing_to_pb(footer: Footing) -> pb.Footing:
    return pb.Footing(
        size_bytes=footer.size_bytes,
        checksum=footer.checksum,
        filters_bytes=footer.filters_bytes,
        filtered=footer.filtered,
    )


def _footing_from_pb(footer: pb.Footing) -> Footing:
    return Footing(footer.size_bytes, footer.checksum, footer.filters_bytes, tuple(footer.filtered))


def _stats_to_pb(stats: PartStats) -> pb.PartStats:
    columns = [
        pb.ColumnStats(column=name, null_count=each.null_count, lower=each.lower, upper=each.upper)
        for name, each in stats.columns
    ]
    return pb.PartStats(columns=columns, time_min=stats.time_min, time_max=stats.time_max, diff_min=stats.diff_min)


def _stats_from_pb(message: pb.PartStats) -> PartStats:
    columns = tuple(
        (
            each.column,
            ColumnStats(
                each.null_count,
                each.lower if each.HasField("lower") else None,
                each.upper if each.HasField("upper") else None,
            ),
        )
        for each in message.columns
    )
    return PartStats(
        columns,
        message.time_min if message.HasField("time_min") else None,
        message.time_max if message.HasField("time_max") else None,
        message.diff_min if message.HasField("diff_min") else None,
    )


def _run_to_pb(meta: RunMeta) -> pb.RunMeta:
    return pb.RunMeta(
        order=_ORDERS[meta.order],
        run_id=None if meta.run_id is None else meta.run_id.to_bytes(),
        schema_id=meta.schema_id,
        rows=meta.rows,
        truncated=meta.truncated,
        waits_from_ms=meta.waits_from_ms,
        kind=_KINDS[meta.kind],
    )


def _run_from_pb(message: pb.RunMeta) -> RunMeta:
    order = _ORDERS_BACK.get(message.order)
    if order is None:
        raise InvariantViolated(f"unknown order of a run: {message.order}")
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise InvariantViolated(f"unknown kind of a run: {message.kind}")
    return RunMeta(
        order=order,
        run_id=RunId.from_bytes(message.run_id) if message.HasField("run_id") else None,
        schema_id=message.schema_id if message.HasField("schema_id") else None,
        rows=message.rows if message.HasField("rows") else None,
        truncated=message.truncated,
        waits_from_ms=message.waits_from_ms if message.HasField("waits_from_ms") else None,
        kind=kind,
    )
