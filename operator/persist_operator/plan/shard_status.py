"""The blocks of a PersistShard's status that only report what an inspection found: frontiers, sizes, holds, debt."""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.secrets import shown_url
from persist_engine.base.wording import is_instant
from persist_engine.model.inspection import Inspection, ReaderInfo

from persist_operator.api import times
from persist_operator.api.redact import redact
from persist_operator.api.shard import StoreLocation
from persist_operator.api.shard_status import Debt, Frontiers, Holder, Holds, ShardStatus, Storage, Stores
from persist_operator.plan import shard_log

_BLOCKING_MAX = 5


def stores(location: StoreLocation) -> Stores:
    """The stores' URLs for people, without credentials and parameters."""
    return Stores(blob=shown_url(location.blob)[:1024], consensus=shown_url(location.consensus)[:1024])


def with_numbers(
    status: ShardStatus,
    inspection: Inspection,
    *,
    now_ms: int,
    critical_id: str,
    since_advanced: str | None,
    left_out: tuple[int, int] = (0, 0),
) -> ShardStatus:
    """`status` with frontiers, storage, holds, debt and log of `inspection`. `left_out` are the numbers of readers and writers that the
    inspection does not list.
    """
    oldest_ms = inspection.oldest_uncompacted_ms
    return replace(
        status,
        frontiers=_frontiers(inspection, now_ms, since_advanced),
        storage=Storage(
            batches=inspection.batches,
            uncompacted_batches=inspection.uncompacted_batches,
            runs=inspection.runs,
            parts=inspection.parts,
            updates=inspection.updates,
            live_bytes=inspection.live_bytes,
            inline_bytes=inspection.inline_bytes,
            rollups=inspection.rollups,
            latest_rollup_seqno=int(inspection.latest_rollup_seqno),
            live_diffs=inspection.live_diffs,
        ),
        holds=Holds(
            readers=len(inspection.readers) + left_out[0],
            writers=len(inspection.writers) + left_out[1],
            blocking=tuple(_holder(one) for one in blocking_readers(inspection, critical_id)) or None,
        ),
        debt=Debt(
            compaction_bytes=inspection.compaction_bytes,
            gc_seqnos=inspection.gc_seqnos,
            oldest_uncompacted_seconds=None if oldest_ms is None else max(0, (now_ms - oldest_ms) // 1000),
        ),
        log=shard_log.entry(inspection),
    )


def blocking_readers(inspection: Inspection, critical_id: str) -> list[ReaderInfo]:
    """Readers beside the operator's own that hold since exactly where it is, at most five."""
    held = [
        one
        for one in inspection.readers
        if one.id != critical_id and one.since is not None and one.since == inspection.since
    ]
    return held[:_BLOCKING_MAX]


def own_since_ms(inspection: Inspection, critical_id: str) -> int | None:
    """The since of the operator's critical reader; None when the reader is not registered."""
    return next((one.since for one in inspection.readers if one.id == critical_id and one.since is not None), None)


def frontier_text(time: int | None) -> str:
    """The text of a frontier in a status: the time, or the empty text when the frontier is closed."""
    return "" if time is None else str(time)


def _frontiers(inspection: Inspection, now_ms: int, since_advanced: str | None) -> Frontiers:
    upper, since = inspection.upper, inspection.since
    wall_clock = upper is not None and is_instant(upper)
    return Frontiers(
        since=frontier_text(since),
        upper=frontier_text(upper),
        seqno=int(inspection.seqno),
        upper_lag_seconds=(now_ms - upper) // 1000 if upper is not None and wall_clock else None,
        since_lag_seconds=(upper - since) // 1000 if upper is not None and since is not None and wall_clock else None,
        observed_time=times.to_text(now_ms),
        since_advanced_time=since_advanced,
    )


def _holder(reader: ReaderInfo) -> Holder:
    return Holder(
        id=reader.id,
        purpose=redact(reader.purpose)[:256],
        kind=reader.kind,
        hostname=reader.hostname[:253],
        since=frontier_text(reader.since),
    )


def engine_version(inspection: Inspection) -> str:
    """The version of the engine that wrote the newest state."""
    return inspection.applier_version[:64]
