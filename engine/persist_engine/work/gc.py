"""Garbage collection: delete blobs that no version will name again, then the versions themselves (spec 14.5 to 14.7).

    consensus   v1 .. [r1] ........ [r2] ............ current     rollups r1 < r2 <= seqno_since
                       |-- a step --|                             1. blobs that diffs up to r2 deleted, not live at r2
                                                                  2. the diffs below r2    3. the entry of r1 in state

Why this order: blobs go before the diffs that name them, so that a crash leaves their names; diffs go before the
rollup entries, so that state always names a rollup at the earliest version. Every step may be repeated, and others
may do the same at once. Invariant: a blob is deleted only if a diff at or below the truncation point deleted it and
neither the state there nor the newest known state names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from persist_engine.base.errors import InvalidUsage, check
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import RollupKey, blob_key, parse_blob_key
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.state import ShardState
from persist_engine.model.state_diff import BlobRef, deleted_blobs, live_blobs
from persist_engine.model.views import rollup_seqnos, seqno_since
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.live_states import LiveStates
from persist_engine.shard.machine import Machine
from persist_engine.shard.runs import deletion_waves
from persist_engine.work.outcome import Ending, GcOutcome

#: Told versions done, versions in all, and blobs deleted so far; for progress bars.
OnProgress = Callable[[int, int, int], None]


def gc_and_truncate(machine: Machine, upto: SeqNo | None = None, *, on_progress: OnProgress | None = None) -> GcOutcome:
    """Collect everything below the newest rollup at or below `upto` (None: seqno_since, the oldest version a reader
    holds).

    Safe to repeat, to race and to kill at any point: the next run completes what this one left. A request that is
    behind what was already collected does nothing (spec 20, bug 5). InvalidUsage when `upto` is past seqno_since:
    readers are still there.
    """
    return _Collection(machine, on_progress).run(upto)


class _Collection:
    """One run and what it has done so far."""

    def __init__(self, machine: Machine, on_progress: OnProgress | None) -> None:
        self._machine = machine
        self._on_progress = on_progress
        self._started_s = machine.env.monotonic_s()
        self._blobs_deleted = 0
        self._diffs_truncated = 0
        self._bytes_read = 0
        self._truncated_to: SeqNo | None = None

    def run(self, upto: SeqNo | None) -> GcOutcome:
        machine = self._machine
        state = machine.refresh()
        held = seqno_since(state)
        if upto is None:
            upto = held
        if upto > held:
            text = f"cannot collect {machine.shard_id} up to {upto}: readers hold {held}"
            raise InvalidUsage(text, seqno=upto, held=held)
        rollups = [seqno for seqno in rollup_seqnos(state) if seqno <= upto]
        removable = rollups[:-1]
        if not removable:
            return self._ended(state, Ending.SKIPPED, f"no rollup at or below {upto} beyond the earliest version", 0)
        live = machine.versions.fetch_all_live_states(machine.shard_id, through=rollups[-1])
        check(live is not None, f"shard {machine.shard_id} vanished from consensus")
        assert live is not None
        self._bytes_read = live.encoded_bytes
        first = live.seqno
        needed = {blob.partial_key for blob in live_blobs(state)}
        for seqno in rollups:
            if live.seqno < seqno:
                self._step(live, seqno, needed)
                if self._on_progress is not None:
                    self._on_progress(seqno - first, max(1, rollups[-1] - first), self._blobs_deleted)
        entries = [(seqno, state.rollups[seqno]) for seqno in removable]
        answer, maintenance = machine.remove_rollups(entries)
        message = f"truncated to {live.seqno}: {self._diffs_truncated} versions, {self._blobs_deleted} blobs deleted"
        return self._ended(state, Ending.SUCCEEDED, message, len(answer.seqnos), maintenance)

    def _step(self, live: LiveStates, to: SeqNo, needed: set[str]) -> None:
        """Advance from one rollup to the next, delete what the diffs between let go of, then those diffs."""
        machine = self._machine
        # What the earliest diff itself deleted is gone: whoever truncated to it collected through it first.
        gone: set[BlobRef] = set()
        while live.seqno < to:
            diff = live.advance()
            check(diff is not None, f"diffs of {machine.shard_id} end at {live.seqno}, before rollup {to}")
            assert diff is not None
            gone.update(deleted_blobs(diff))
        gone.difference_update(live_blobs(live.state))
        # What listings name goes with them, and before them: a crash in between leaves their names (spec 20, bug 35).
        runs = [blob.partial_key for blob in gone if blob.kind == "run"]
        below = deletion_waves(machine, runs)
        waves = [{blob.partial_key for blob in gone if blob.kind != "run"}, *map(set, below)]
        garbage = set().union(*waves)
        text = f"GC of {machine.shard_id} to {to} would delete"
        check(garbage.isdisjoint(needed), f"{text} blobs that the newest state names: {sorted(garbage & needed)[:3]}")
        for key in garbage:
            parsed = parse_blob_key(blob_key(machine.shard_id, key))
            early = not isinstance(parsed, RollupKey) or parsed.seqno < to
            check(early, f"{text} rollup {key}, which is not behind it")
        for wave in waves:
            self._delete(wave)
        self._diffs_truncated += machine.versions.truncate_diffs(machine.shard_id, to)
        self._truncated_to = to

    def _delete(self, partial_keys: Iterable[str]) -> None:
        """Delete blobs, a few at a time; every one is gone when it returns. What was gone already counts too."""
        machine = self._machine

        def delete(partial_key: str) -> None:
            key = blob_key(machine.shard_id, partial_key)
            machine.versions.retry.external("delete_garbage", lambda: machine.blob.delete(key), shard=machine.shard_id)

        keys = sorted(partial_keys)
        if not keys:
            return
        workers = min(len(keys), machine.settings.maintenance.gc_delete_concurrency)
        with ThreadPoolExecutor(workers, thread_name_prefix="persist-gc") as pool:
            for _ in pool.map(delete, keys):
                self._blobs_deleted += 1
        machine.metrics.count("gc_deleted_blobs", len(keys))

    def _ended(
        self,
        state: ShardState,
        ending: Ending,
        message: str,
        rollups_removed: int,
        maintenance: Maintenance = NO_MAINTENANCE,
    ) -> GcOutcome:
        env = self._machine.env
        return GcOutcome(
            shard_id=self._machine.shard_id,
            seqno=state.seqno,
            ending=ending,
            message=message,
            duration_ms=round((env.monotonic_s() - self._started_s) * 1000),
            bytes_read=self._bytes_read,
            blobs_deleted=self._blobs_deleted,
            diffs_truncated=self._diffs_truncated,
            truncated_to=self._truncated_to,
            rollups_removed=rollups_removed,
            maintenance=maintenance,
        )
