"""What a shard that nobody maintains needs now: decisions only, made from its state and settings.

Unlike `model.plans`, which hands work to the commit at hand, this looks at no claims: whoever asks means to do the
work, and doing it beside somebody else is harmless.
"""

from __future__ import annotations

from persist_engine.base.settings import MaintenanceSettings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.queries import is_tombstone, latest_rollup, rollup_at_or_below, rollup_seqnos, seqno_since
from persist_engine.model.state import ShardState


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
