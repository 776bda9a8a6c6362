"""Work that a committed command leaves for later, as a value, and the rules by which work is due.

The rules (`is_rollup_due`, `collectable_versions`, `is_collection_due`, `is_compaction_due`) take numbers and thresholds. The functions
below them apply the rules to a state. The operator applies the same rules to an inspection.
The component that receives a `Maintenance` does the work or drops it. Dropped work is offered again.
"""

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
    this seqno. `requests`: compactions that are claimed for the receiver.
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


#: The versions after which a tombstone gets a rollup: the link of its last rollup is one version, so another version must have followed.
_TOMBSTONE_EVERY = 2


def is_rollup_due(*, seqno: int, rollup_seqno: int, every: int) -> bool:
    """Whether at least `every` versions have passed since the newest rollup."""
    return seqno - rollup_seqno >= every


def collectable_versions(keep: int | None, *, earliest: int) -> int:
    """The number of versions that a collection truncates from a log that begins at `earliest`. `keep` is the newest rollup that no reader
    holds back; None if there is none.
    """
    return 0 if keep is None else max(keep - earliest, 0)


def is_collection_due(versions: int, *, at_least: int) -> bool:
    """Whether a collection that would truncate `versions` versions is worth a run."""
    return versions >= at_least


def is_compaction_due(uncompacted_batches: int, *, at_least: int) -> bool:
    """Whether `uncompacted_batches` hollow batches that no compaction has merged are worth a run."""
    return uncompacted_batches >= at_least


def rollup_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int) -> SeqNo | None:
    """Return the state's seqno if a rollup is due and no live claim covers it (spec 14.1), else None.

    On a tombstone, a rollup is due after any change except the link of the previous rollup.
    """
    newest, _ = latest_rollup(state)
    every = _TOMBSTONE_EVERY if is_tombstone(state) else settings.rollup_threshold + 1
    if not is_rollup_due(seqno=state.seqno, rollup_seqno=newest, every=every):
        return None
    is_claimed = is_live(state.active_rollup, now_ms, settings.rollup_claim_ms)
    return state.seqno if is_tombstone(state) or not is_claimed else None


def gc_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int, is_write: bool) -> SeqNo | None:
    """Return the seqno up to which to collect garbage now, or None (spec 14.3).

    It is due if at least `gc_versions_min` versions can be truncated: those between the oldest rollup and the newest rollup that
    no reader holds back. A smaller request would find nothing removable and leave a claim behind. While writers exist, only
    writes get the work. It is not due while a live claim covers it, and each request is bounded relative to the last one. It is
    always due on tombstones.
    """
    rollups = rollup_seqnos(state)
    # Reach at least the next rollup. Otherwise collection would never be due again if rollups lie further apart than the bound,
    # or if another process collected past it.
    bound = max(SeqNo(state.last_gc_req + settings.gc_versions_max), *rollups[1:2], rollups[0])
    upto = min(seqno_since(state), bound)
    if is_tombstone(state):
        return max(upto, state.last_gc_req)
    if (state.writers and not is_write) or is_live(state.active_gc, now_ms, settings.gc_claim_ms):
        return None
    keep = rollup_at_or_below(state, upto)
    versions = collectable_versions(keep, earliest=rollups[0])
    if keep is None or not is_collection_due(versions, at_least=settings.gc_versions_min):
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
    """Whether `rollup_threshold` versions have passed since the newest rollup; on a tombstone, whether any version but its link has."""
    newest, _ = latest_rollup(state)
    every = _TOMBSTONE_EVERY if is_tombstone(state) else settings.rollup_threshold
    return is_rollup_due(seqno=state.seqno, rollup_seqno=newest, every=every)


def collection_target(state: ShardState) -> SeqNo | None:
    """Return the version to which the log may be truncated. Return None if, as far as state shows, the log already begins there. A
    tombstone keeps two rollups of its own, which do not show where its log begins.
    """
    target, oldest = rollup_at_or_below(state, seqno_since(state)), rollup_seqnos(state)[0]
    if is_tombstone(state) and oldest >= state.last_gc_req and len(state.rollups) <= 2:
        return None
    return target if is_collection_due(collectable_versions(target, earliest=oldest), at_least=1) else None
