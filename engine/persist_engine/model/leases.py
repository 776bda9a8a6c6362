"""Expiry of leases. Critical readers have no lease and never expire.

SUBTLE: expiry does not move since. Two readers once lapsed together because their machine slept; since moved past what the
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
    """Return the last moment at which the lease still holds."""
    return holder.last_heartbeat_ms + holder.lease_ms


def held_until_ms(holder: LeasedReader | Writer | None) -> int:
    """Return `expires_after_ms`, or 0 for None."""
    return 0 if holder is None else expires_after_ms(holder)


def expire_at(state: ShardState, now_ms: int) -> ShardState:
    """Return `state` without the leased readers and writers whose lease ended before `now_ms`; the same object if there are none.

    The cost grows with the number of expired leases, not with the number of leases.
    """
    readers = _unexpired(state.leased_readers, now_ms)
    writers = _unexpired(state.writers, now_ms)
    if readers is state.leased_readers and writers is state.writers:
        return state
    return replace(state, leased_readers=readers, writers=writers)


def _unexpired(holders: SharedMap[_Id, _Leased], now_ms: int) -> SharedMap[_Id, _Leased]:
    return holders.edited(dict.fromkeys(holders.keys_below(expires_after_ms, now_ms)))


def is_live(claim: Claim | None, now_ms: int, claim_ms: int) -> bool:
    """Whether a worker is presumed to be doing the claimed work, because the claim is younger than `claim_ms`. With `claim_ms` 0
    no claim is live. A start far in the future comes from a broken clock and does not count as a claim.
    """
    return claim is not None and abs(now_ms - claim.start_ms) < claim_ms
