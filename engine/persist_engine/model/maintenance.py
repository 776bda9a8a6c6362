"""Work that a committed command leaves for later, as a value. Whoever gets it does it, or lets it be offered again."""

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
    """`rollup`: write one, for a state at or past this seqno. `gc`: collect and truncate up to at most this seqno.
    `requests`: batches that may become one, claimed for the receiver.
    """

    rollup: SeqNo | None = None
    gc: SeqNo | None = None
    requests: tuple[MergeReq, ...] = ()

    def merge(self, other: Maintenance) -> Maintenance:
        """Both: of rollup and gc the later, of requests all, each once."""
        new = tuple(request for request in other.requests if request not in self.requests)
        return Maintenance(_later(self.rollup, other.rollup), _later(self.gc, other.gc), self.requests + new)

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self == Maintenance()


def _later(one: SeqNo | None, other: SeqNo | None) -> SeqNo | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def rollup_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int) -> SeqNo | None:
    """The state's seqno when a rollup should be written now and nobody is believed to be at it (spec 14.1).

    A tombstone rolls up at once, as soon as something but the last rollup's own link happened.
    """
    newest, _ = latest_rollup(state)
    passed = state.seqno - newest
    if is_tombstone(state):
        return state.seqno if passed > 1 else None
    if passed <= settings.rollup_threshold or is_live(state.active_rollup, now_ms, settings.rollup_claim_ms):
        return None
    return state.seqno


def gc_due(state: ShardState, settings: MaintenanceSettings, *, now_ms: int, is_write: bool) -> SeqNo | None:
    """Up to which seqno to collect garbage now, or None (spec 14.3).

    Due when `gc_versions_min` versions could be truncated, that is lie between the oldest rollup and the newest that
    no reader holds back: a request without that would find nothing removable and leave a claim behind. Left to
    writers while there are any, not repeated while somebody is believed to be at it, and bounded beyond the last
    request. Always due on tombstones.
    """
    rollups = rollup_seqnos(state)
    # At least to the next rollup: where rollups lie further apart than the bound, or others collected past it, nothing
    # would ever be due again.
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
    """Rollups that a collection up to `upto` makes superfluous, ascending: all at or below it but the newest of
    those.
    """
    keep = rollup_at_or_below(state, upto)
    if keep is None:
        return ()
    return tuple((seqno, state.rollups[seqno]) for seqno in rollup_seqnos(state) if seqno < keep)


def rollup_wanted(state: ShardState, settings: MaintenanceSettings) -> bool:
    """Whether `rollup_threshold` versions have passed since the newest; on a tombstone, anything but its own link."""
    newest, _ = latest_rollup(state)
    return state.seqno - newest >= (2 if is_tombstone(state) else settings.rollup_threshold)


def collection_target(state: ShardState) -> SeqNo | None:
    """The version that the log may be truncated to; None when it begins there already, as far as state tells. A
    tombstone goes on naming two rollups of its own: they tell nothing.
    """
    target, oldest = rollup_at_or_below(state, seqno_since(state)), rollup_seqnos(state)[0]
    if is_tombstone(state) and oldest >= state.last_gc_req and len(state.rollups) <= 2:
        return None
    return target if target is not None and target > oldest else None
