"""Who is expired at a moment. Critical readers never are.

SUBTLE: expiry leaves since alone: two readers lapsing at once, because a machine slept, once moved it past what the
restarted process still needed (spec 9.9; section 20, bug 22).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import Claim, LeasedReader, ShardState, Writer

_Id = TypeVar("_Id", bound=str)
_Leased = TypeVar("_Leased", LeasedReader, Writer)


def expires_after_ms(holder: LeasedReader | Writer) -> int:
    """The last moment at which the lease still holds."""
    return holder.last_heartbeat_ms + holder.lease_ms


def held_until_ms(holder: LeasedReader | Writer | None) -> int:
    """`expires_after_ms`; before all times for nobody."""
    return 0 if holder is None else expires_after_ms(holder)


def expire_at(state: ShardState, now_ms: int) -> ShardState:
    """Without the leased readers and writers whose lease ended before `now_ms`; the same state when there is none.

    Costs what ends, not what is held.
    """
    readers = _unexpired(state.leased_readers, now_ms)
    writers = _unexpired(state.writers, now_ms)
    if readers is state.leased_readers and writers is state.writers:
        return state
    return replace(state, leased_readers=readers, writers=writers)


def _unexpired(holders: SharedMap[_Id, _Leased], now_ms: int) -> SharedMap[_Id, _Leased]:
    return holders.edited(dict.fromkeys(holders.keys_below(expires_after_ms, now_ms)))


def is_live(claim: Claim | None, now_ms: int, claim_ms: int) -> bool:
    """Whether somebody is believed to be at the claimed work, for less than `claim_ms`: with 0 nobody ever is. A start far
    in the future is some broken clock, not a claim.
    """
    return claim is not None and abs(now_ms - claim.start_ms) < claim_ms
