"""Maintenance: work that a committed command leaves for later, as a value. Its receiver does it, or it falls due again."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.settings import MaintenanceSettings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowRollup
from persist_engine.model.leases import is_live
from persist_engine.model.queries import is_tombstone, latest_rollup, rollup_at_or_below, rollup_seqnos, seqno_since
from persist_engine.model.spine.trace import MergeReq
from persist_engine.model.state import ShardState


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Work that fell due. `rollup`: write a rollup of a state at or past this seqno. `gc`: collect and truncate up to at most
    this seqno. `requests`: compactions, claimed for the receiver.
    """

    rollup: SeqNo | None = None
    gc: SeqNo | None = None
    requests: tuple[MergeReq, ...] = ()

    def merge(self, other: Maintenance) -> Maintenance:
        """Return both combined: the later rollup, the later gc, and all requests without duplicates."""
        new = tuple(request for request in other.requests if request not in self.requests)
        return Maintenance(_later(self.rollup, other.rollup), _later(self.gc, other.gc), self.requests + new)

    def is_empty(self) -> bool:
        """Whether no work is due."""
        return self == Maintenance()


def _later(one: SeqNo | None, other: SeqNo | None) -> SeqNo | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def rollup_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int) -> SeqNo | None:
    """Return the state's seqno if a rollup is due and no live claim covers it (spec 14.1), else None.

    On a tombstone, a rollup is due after any change but the link of the previous rollup.
    """
    newest, _ = latest_rollup(state)
    passed = state.seqno - newest
    if is_tombstone(state):
        return state.seqno if passed > 1 else None
    if passed <= settings.rollup_threshold or is_live(state.active_rollup, now_ms, settings.rollup_claim_ms):
        return None
    return state.seqno


def gc_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int, is_write: bool) -> SeqNo | None:
    """Return the seqno up to which to collect garbage now, or None (spec 14.3).

    Due if at least `gc_versions_min` versions can be truncated, which are those between the oldest rollup and the newest rollup
    that no reader holds back. A smaller request would find nothing removable and leave a claim behind. While writers exist,
    only writes get the work. Not repeated while a live claim covers it, and bounded relative to the last request. Always due on
    tombstones.
    """
    rollups = rollup_seqnos(state)
    # Reach at least the next rollup. Otherwise nothing would ever be due again if rollups lie further apart than the bound, or
    # if another process collected past it.
    bound = max(SeqNo(state.last_gc_req + settings.gc_versions_max), *rollups[1:2], rollups[0])
    upto = min(seqno_since(state), bound)
    if is_tombstone(state):
        return max(upto, state.last_gc_req)
    if (state.writers and not is_write) or is_live(state.active_gc, now_ms, settings.gc_claim_ms):
        return None
    keep = rollup_at_or_below(state, upto)
    if keep is None or keep - rollups[0] < settings.gc_versions_min:
        return None
    return max(upto, state.last_gc_req)


def removable_rollups(state: ShardState, upto: SeqNo) -> tuple[tuple[SeqNo, HollowRollup], ...]:
    """Return the rollups that a collection up to `upto` makes superfluous, ascending: those at or below it, except the newest
    of them.
    """
    keep = rollup_at_or_below(state, upto)
    if keep is None:
        return ()
    return tuple((seqno, state.rollups[seqno]) for seqno in rollup_seqnos(state) if seqno < keep)


def rollup_wanted(state: ShardState, settings: MaintenanceSettings) -> bool:
    """Whether `rollup_threshold` versions have passed since the newest rollup; on a tombstone, whether anything but its link followed."""
    newest, _ = latest_rollup(state)
    return state.seqno - newest >= (2 if is_tombstone(state) else settings.rollup_threshold)


def collection_target(state: ShardState) -> SeqNo | None:
    """Return the version to which the log may be truncated; None if, as far as state shows, the log already begins there. A
    tombstone keeps two rollups of its own, which say nothing about where its log begins.
    """
    target, oldest = rollup_at_or_below(state, seqno_since(state)), rollup_seqnos(state)[0]
    if is_tombstone(state) and oldest >= state.last_gc_req and len(state.rollups) <= 2:
        return None
    return target if target is not None and target > oldest else None
