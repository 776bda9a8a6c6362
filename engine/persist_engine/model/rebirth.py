"""The first version of a log that is begun anew from an older state, after consensus lost the later versions.

Owns the choice of birth and seqno. A process that knows the lost log must notice: the birth differs, and the seqno lies far
beyond any seqno that the lost log can have reached.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowRollup
from persist_engine.model.diff.state_diff import StateDiff, between
from persist_engine.model.invariants import check_invariants
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import ShardState

#: The seqnos skipped between the last known version and the new log's first version. It is more than can have been lost unseen.
SEQNOS_LEFT_OUT = 1_000_000
#: Number of random bytes in a birth. The other bytes are a hash of them and of the previous birth.
RANDOM_BYTES = 8


def recovered_birth(old: bytes, random: bytes) -> bytes:
    """Return the birth of a log that replaces the log born as `old`. `random` has RANDOM_BYTES bytes."""
    return random + hashlib.blake2b(old + random, digest_size=RANDOM_BYTES).digest()


def is_recovered_from(birth: bytes, old: bytes) -> bool:
    """Whether `birth` belongs to a log that a recovery began anew in place of the log born as `old`."""
    return bool(old) and birth == recovered_birth(old, birth[:RANDOM_BYTES])


def reborn(
    state: ShardState,
    *,
    seqno: SeqNo,
    birth: bytes,
    base_key: str,
    rollup_key: str,
    existing: frozenset[str],
    now_ms: int,
    hostname: str,
    applier_version: str,
) -> tuple[ShardState, StateDiff]:
    """Return the contents of `state` as version `seqno`, the first of a log with `birth`, and the diff that records it.

    Leases end: leased readers and writers are gone. Critical readers, retention, schemas, progress and contents stay. Rollups
    that are not `existing` (partial keys) are no longer named. The rollup of `state` itself, `base_key`, is named, so that
    garbage collection removes it later. No part that was staged before can be linked: an orphan scan, of which the lost versions
    knew, may have deleted it.
    """
    walltime_ms = max(now_ms, state.walltime_ms + 1)
    kept = {at: rollup for at, rollup in state.rollups.items() if rollup.key in existing}
    kept[state.seqno] = HollowRollup(base_key, None)
    before = replace(state, seqno=SeqNo(seqno - 1), tag=b"")
    first = replace(
        before,
        applier_version=applier_version,
        seqno=seqno,
        walltime_ms=walltime_ms,
        hostname=hostname,
        active_rollup=None,
        active_gc=None,
        rollups=SharedMap({**kept, seqno: HollowRollup(rollup_key, None)}),
        leased_readers=SharedMap(),
        writers=SharedMap(),
        birth=birth,
        staging_floor_ms=max(walltime_ms, state.staging_floor_ms or 0),
    )
    check_invariants(None, first, deep=True)
    return first, between(before, first)
