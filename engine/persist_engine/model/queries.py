"""Answers questions about a state from the state alone. Each answer costs O(levels), or the map that it comes from caches it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

from persist_engine.base.errors import Incompatible, InvariantViolated
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowRollup
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import CLOCK, Clock, CriticalReader, LeasedReader, ShardState

#: Retention moves since in steps of this fraction of `retain_ms`; a shard keeps up to one step more than `retain_ms`.
RETENTION_STEPS = 100

_Rollups = SharedMap[SeqNo, HollowRollup]


def sealed(state: ShardState) -> ShardState:
    """Return the same state as a base for edits: a later diff against it costs only what is edited from here on."""
    return replace(state, **sealed_maps(state))


def sealed_maps(state: ShardState) -> dict[str, Any]:
    """Return the state's maps, sealed as bases for edits, by field name."""
    return {
        "rollups": state.rollups.sealed(),
        "leased_readers": state.leased_readers.sealed(),
        "critical_readers": state.critical_readers.sealed(),
        "writers": state.writers.sealed(),
        "schemas": state.schemas.sealed(),
        "progress": state.progress.sealed(),
    }


def seqno_since(state: ShardState) -> SeqNo:
    """Return the lowest version that a reader may still need: the least seqno held by a leased reader, or the current seqno."""
    hold = state.leased_readers.least(_hold)
    return state.seqno if hold is None else min(hold, state.seqno)


def _hold(reader: LeasedReader) -> SeqNo:
    return reader.seqno


def held_since(state: ShardState) -> Antichain | None:
    """Return the meet of what readers and retention hold; None if nothing holds since."""
    leased: Antichain | None = state.leased_readers.least(_since)
    return _meet(leased, durable_since(state))


def durable_since(state: ShardState) -> Antichain | None:
    """Return the meet of what holds since without a lease: critical readers and retention. None if neither does."""
    critical: Antichain | None = state.critical_readers.least(_since)
    return _meet(critical, retained_since(state))


def retained_since(state: ShardState) -> Antichain | None:
    """Return where retention holds since: `retain_ms` before upper, rounded down so that it moves in a hundred steps per window,
    and few appends have to record a move. Return since if it is already later, or if upper is closed. None without retention.
    """
    since, upper = state.trace.since, state.trace.upper
    if state.retain_ms is None:
        return None
    if upper.time is None:
        return since
    # Never past the last time that data can have: if upper lies past that time, a read there gives the final contents.
    held = min(max(0, upper.time - state.retain_ms), DATA_TIME_MAX)
    return since.join(Antichain(held - held % max(1, state.retain_ms // RETENTION_STEPS)))


def _meet(one: Antichain | None, other: Antichain | None) -> Antichain | None:
    if one is None or other is None:
        return other if one is None else one
    return one.meet(other)


def _since(reader: LeasedReader | CriticalReader) -> Antichain:
    return reader.since


def is_tombstone(state: ShardState) -> bool:
    """Whether the shard can never be read or written again (spec 1.9)."""
    closed = state.trace.upper.is_empty() and state.trace.since.is_empty()
    return closed and not (state.writers or state.leased_readers or state.critical_readers)


def is_finalized(state: ShardState) -> bool:
    """Whether the shard is a tombstone without data."""
    if not is_tombstone(state) or state.trace.batch_count > 1:
        return False
    return all(batch.is_empty() for batch in state.trace.batches())


def rollup_seqnos(state: ShardState) -> tuple[SeqNo, ...]:
    """Return the seqnos of all rollups, ascending."""
    return state.rollups.derived(_seqnos)


def _seqnos(rollups: _Rollups) -> tuple[SeqNo, ...]:
    return tuple(rollups)


def latest_rollup(state: ShardState) -> tuple[SeqNo, HollowRollup]:
    """Return the newest rollup. Invariant: there is always one."""
    seqnos = rollup_seqnos(state)
    if not seqnos:
        raise InvariantViolated(f"state {state.seqno} of {state.shard_id} names no rollup")
    return seqnos[-1], state.rollups[seqnos[-1]]


def rollup_at_or_below(state: ShardState, seqno: SeqNo) -> SeqNo | None:
    """Return the newest rollup not past `seqno`. Consensus may be truncated to it once no reader needs versions below `seqno`."""
    seqnos = rollup_seqnos(state)
    index = bisect_right(seqnos, seqno)
    return seqnos[index - 1] if index else None


def written_upper(state: ShardState) -> Antichain:
    """Return the upper that appends of rows left. It is the minimum while only the time 0 is complete and there are no rows: a correction
    of a shard that was never written completes that time, so that it can read it.
    """
    upper = state.trace.upper
    return Antichain.minimum() if upper.time == 1 and not state.trace.sizes.rows else upper


def clock_of(state: ShardState) -> Clock:
    """Return the clock of the writes of a table (spec 17.15). Raises Incompatible for a clock of newer code."""
    stored = state.progress.get(CLOCK)
    if stored is None:
        return "ms"
    if stored.token != b"counter":
        raise Incompatible(
            f"shard {state.shard_id} has the clock {stored.token[:40]!r}, which this code does not know: upgrade it",
            shard_id=state.shard_id,
        )
    return "counter"


def clock_time(state: ShardState, now_ms: int) -> int:
    """Return the time that the clock of a table shows now. A write is at this time, or at upper if that is later. A counter begins at 1."""
    return now_ms if clock_of(state) == "ms" else 1
