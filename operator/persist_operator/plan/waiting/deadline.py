"""When the deletion deadline of a shard makes work due. Pure.

A retraction that was written, or took effect, at T is owed a deletion until the stores no longer hold the data that it retracts. The data
must be gone at most `compaction.deadlineSeconds` later. In between, since must pass the retraction (not before `retention.sinceLagSeconds`
are over), one merge of all batches must cancel it, and a collection must delete the data that the merge released. The work begins `lead_ms`
before the deadline, which leaves room for runs that fail. It does not begin earlier, because each merge rewrites the shard.

The engine bounds T from below (persist_engine.model.spine.owed), so work may begin early, but never late.
"""

from __future__ import annotations

from collections.abc import Mapping

from persist_engine.base.wording import iso_text
from persist_engine.model.inspection import Inspection, ReaderInfo
from persist_engine.model.tending import since_target_ms

from persist_operator.api import times
from persist_operator.api.names import AUDIT_KINDS, MaintenanceKind
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import Upkeep

#: The lead of work before its deadline is at least the deadline divided by the first number, and at least the second number, so that runs
#: can fail and be repeated.
_LEAD_SHARE, _FAILURES_S = 4, 1800
#: The lead has room for this number of runs as long as the last run of each kind.
_REPEATS = 4
#: The least time by which a merge must bring the oldest retraction forward. Otherwise a shard that is always written would always be
#: merged.
_GAIN_S_MIN = 60
#: No deadline makes collections more frequent than this.
_COLLECTION_S_MIN = 60


def lead_ms(shard: Shard, blocks: Mapping[MaintenanceKind, Upkeep]) -> int:
    """How long before a deadline its work begins. At most the time that the deadline leaves after `retention.sinceLagSeconds`."""
    share_ms = 1000 * (shard.spec.deadline_seconds // _LEAD_SHARE)
    return min(max(share_ms, _runs_ms(shard, blocks)), _spare_ms(shard))


def cannot_wait(
    shard: Shard, owed_from_ms: int, blocks: Mapping[MaintenanceKind, Upkeep], until_ms: int | None
) -> bool:
    """Whether the deletion that is owed since `owed_from_ms` cannot wait until `until_ms` (None: for ever). It cannot if too little time
    would be left before the deadline for its runs, including failed ones.
    """
    room_ms = min(_runs_ms(shard, blocks), _spare_ms(shard))
    return until_ms is None or until_ms + room_ms > deadline_ms(shard, owed_from_ms)


def _runs_ms(shard: Shard, blocks: Mapping[MaintenanceKind, Upkeep]) -> int:
    runs_s = sum(block.last_duration_seconds or 0 for kind, block in blocks.items() if kind not in AUDIT_KINDS)
    return 1000 * (_REPEATS * runs_s + collection_interval_s(shard) + _FAILURES_S)


def collection_interval_s(shard: Shard) -> int:
    """The wait after a collection: `gc.intervalSeconds`, or a quarter of the time that the deadline leaves, if that is shorter. A longer
    wait could begin after a collection of other data, and end after the deadline.
    """
    return min(shard.spec.gc_interval_seconds, max(_COLLECTION_S_MIN, _spare_ms(shard) // 4000))


def _spare_ms(shard: Shard) -> int:
    """The time that the deadline leaves after the retention."""
    return 1000 * (shard.spec.deadline_seconds - shard.spec.since_lag_seconds)


def deadline_ms(shard: Shard, owed_from_ms: int) -> int:
    """The deadline of the deletion that is owed since `owed_from_ms`."""
    return owed_from_ms + 1000 * shard.spec.deadline_seconds


def is_due(shard: Shard, owed_from_ms: int | None, blocks: Mapping[MaintenanceKind, Upkeep], now_ms: int) -> bool:
    """Whether the work for the deletion that is owed since `owed_from_ms` must begin."""
    return owed_from_ms is not None and now_ms >= deadline_ms(shard, owed_from_ms) - lead_ms(shard, blocks)


def is_missed(shard: Shard, owed_from_ms: int | None, now_ms: int) -> bool:
    """Whether the deadline of the deletion that is owed since `owed_from_ms` has passed."""
    return owed_from_ms is not None and now_ms > deadline_ms(shard, owed_from_ms)


def compaction_reason(
    shard: Shard, inspection: Inspection, blocks: Mapping[MaintenanceKind, Upkeep], horizon_ms: int
) -> str | None:
    """The reason why a merge of all batches is due for the deadline until `horizon_ms` (waiting.windows). None when it is not due, or would
    cancel too little at the present since.
    """
    owed_ms, left_ms = inspection.waits_from_ms, inspection.waits_after_merge_ms
    if owed_ms is None or not is_due(shard, owed_ms, blocks, horizon_ms):
        return None
    spare_s = shard.spec.deadline_seconds - shard.spec.since_lag_seconds
    gain_ms = 1000 * max(_GAIN_S_MIN, spare_s // 4)
    if left_ms is not None and left_ms < owed_ms + gain_ms:
        return None
    return f"updates retracted since {iso_text(owed_ms) or owed_ms} must be gone by {times.to_text(deadline_ms(shard, owed_ms))}"


def collection_reason(
    shard: Shard, inspection: Inspection, blocks: Mapping[MaintenanceKind, Upkeep], now_ms: int
) -> str | None:
    """The reason why a collection of all released data is due for the deadline. None when it is not due, or when readers hold every version
    back.
    """
    owed_ms = inspection.uncollected_from_ms
    if owed_ms is None or not is_due(shard, owed_ms, blocks, now_ms) or version_holders(inspection):
        return None
    return f"content released since {iso_text(owed_ms) or owed_ms} must be gone by {times.to_text(deadline_ms(shard, owed_ms))}"


def version_holders(inspection: Inspection) -> list[ReaderInfo]:
    """The leased readers whose held version is so old that a collection can truncate nothing, and that a later rollup would not help."""
    if inspection.gc_seqnos > 0 or inspection.latest_rollup_seqno <= inspection.seqno_since:
        return []
    return [one for one in inspection.readers if one.seqno is not None and one.seqno <= inspection.seqno_since]


def since_target(
    shard: Shard,
    inspection: Inspection,
    blocks: Mapping[MaintenanceKind, Upkeep],
    *,
    upper_seen_ms: int | None,
    now_ms: int,
    horizon_ms: int | None = None,
) -> int | None:
    """The target of the operator's hold: `sinceLagSeconds` behind upper. None when the upper is closed.

    While the deadline makes work due until `horizon_ms` (None: now), a shard without writes follows the clock: an upper that has not moved
    since `upper_seen_ms` counts as if it had moved with the clock. So since also passes the newest retraction when that is
    `sinceLagSeconds` old.
    """
    lag_ms = shard.spec.since_lag_seconds * 1000
    target = since_target_ms(inspection.upper, lag_ms)
    if target is None or inspection.upper is None or upper_seen_ms is None:
        return target
    if not is_due(shard, inspection.waits_from_ms, blocks, now_ms if horizon_ms is None else horizon_ms):
        return target
    idle_ms = max(0, now_ms - upper_seen_ms)
    return max(target, min(inspection.upper - 1, inspection.upper + idle_ms - lag_ms))
