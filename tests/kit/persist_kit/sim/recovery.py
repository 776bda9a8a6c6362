"""Recovery in a simulated history: a log is begun anew from a rollup, beside processes that know the replaced log. Judges the recovery.
After that, the witness of the new log judges.
"""

from __future__ import annotations

import random

from persist_engine.base.versioned import VersionedData
from persist_engine.codec.keys import blob_key, parse_blob_key
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.rebirth import is_recovered_from
from persist_engine.model.state import ShardState

from persist_kit.sim.calls import Recovering
from persist_kit.sim.scheduler import Scheduler
from persist_kit.sim.witness import Witness

_KEPT = ("codecs", "schemas", "critical_readers", "progress", "retain_ms")

#: The shares of the histories of writers with recoveries, and the greatest number of operations of each actor.
_RECOVERED, _RECOVERED_AFTER_DISASTER, _OPERATIONS_MAX = 0.06, 0.5, 5


def recoverers_of(seed: int, *, is_after_disaster: bool) -> tuple[list[tuple[str, int]], bool]:
    """The actors that recover, with their operations, and whether the blob store keeps deleted blobs for them. There are none in odd seeds,
    so that these seeds show what happens after a disaster without a recovery.
    """
    rng = random.Random(f"recovered {seed}")  # noqa: S311 - repeatable on purpose
    if seed % 2 or rng.random() > (_RECOVERED_AFTER_DISASTER if is_after_disaster else _RECOVERED):
        return [], False
    names = [f"recoverer{index}" for index in range(1, rng.choice([1, 1, 2]) + 1)]
    return [(name, rng.randint(2, _OPERATIONS_MAX)) for name in names], rng.random() < 0.7


class Recoveries:
    """Judges all recoveries of a history."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def begin_anew(self, new: VersionedData, replaced: Witness, logs: list[Witness]) -> Witness:
        """A recovery has replaced the log of `replaced` by `new`. Returns the witness of the new log. `logs`: all logs, including
        former ones.
        """
        call, blob, shard_id, fail = self._scheduler.acting, replaced.blob, replaced.shard_id, self._scheduler.fail
        assert isinstance(call, Recovering)
        key = blob_key(shard_id, decode_state_diff(new.data, key=f"log {new.seqno}").latest_rollup_key)
        data = blob.get(key)
        if data is None:
            fail(f"a recovered log begins with rollup {key}, which is not there")
        first = decode_rollup(data, key=key).state
        if first.tip != new.tip:
            fail(f"a recovered log begins at {new.tip}, its rollup is of {first.tip}")
        base_key = _base_key(first)
        if (data := blob.get(base_key)) is not None:  # a collection may have deleted it since
            self._check_copy(first, decode_rollup(data, key=base_key).state, logs)
        origin_key = base_key
        while parse_blob_key(origin_key).partial in replaced.reborn and (data := blob.get(origin_key)) is not None:
            origin_key = _base_key(decode_rollup(data, key=origin_key).state)
        tip = replaced.rollup_tip(origin_key)
        known = next((log for log in logs if tip is not None and log.has(tip)), None)
        if call.rollup is None:
            if tip is not None and replaced.head is not None and replaced.has(tip):
                fail(f"a recovery gives up a log at {replaced.seqno}, which has all of {tip.seqno}")
            least = 0 if tip is None else tip.seqno
            alike = logs if known is None else [known]
            newer = [each for log in alike for each in log.rollups_among(call.there) if each.seqno > least]
            if newer:
                fail(f"a recovery begins anew from {origin_key}, although there are rollups of {newer}")
        return replaced.anew(first, known)

    def _check_copy(self, first: ShardState, base: ShardState, logs: list[Witness]) -> None:
        fail = self._scheduler.fail
        if wrong := [name for name in _KEPT if getattr(first, name) != getattr(base, name)]:
            fail(f"a recovered log has other {wrong} than {base.seqno}, which it begins anew")
        if (first.trace.since, first.trace.upper) != (base.trace.since, base.trace.upper):
            fail(f"a recovered log begins with {first.trace.since} to {first.trace.upper}")
        if (first.staging_floor_ms or 0) < first.walltime_ms:
            fail(f"a recovered log takes what was staged before it, from {first.staging_floor_ms} on")
        if first.leased_readers or first.writers:
            fail("a recovered log begins with readers or writers that have leases")
        if any(first.seqno <= log.seqno for log in logs):
            fail(f"a recovered log begins at {first.seqno}, which another log has reached")
        if not is_recovered_from(first.birth, base.birth):
            fail(f"a recovered log is born as {first.birth.hex()}, in the place of {base.birth.hex()}")


def _base_key(first: ShardState) -> str:
    """The whole key of the rollup from which a recovered log, whose first version is `first`, was begun anew."""
    base = max(seqno for seqno in first.rollups if seqno != first.seqno)
    return blob_key(first.shard_id, first.rollups[base].key)
