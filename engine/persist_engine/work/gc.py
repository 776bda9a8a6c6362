"""Garbage collection: deletes blobs that no version will name again, then the versions themselves (spec 14.5 to 14.7).

    consensus   v1 .. [r1] ........ [r2] ............ current     rollups r1 < r2 <= seqno_since
                       |-- a step --|                             1. blobs that diffs up to r2 deleted, not live at r2
                                                                  2. a record of these     3. the diffs below r2
                                                                  4. the entry of r1 in state

The reason for the order: blobs are deleted, and recorded as gone, before the diffs that name them, so that a crash leaves their names.
Diffs are deleted before the rollup entries, so that state always names a rollup at the earliest version. Every step may be repeated, also
concurrently. Invariant: a blob is deleted only if a diff at or below the truncation point deleted it and neither the state there nor the
newest known state names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage, check
from persist_engine.base.versioned import SeqNo
from persist_engine.base.wording import counted
from persist_engine.codec.deletions import Cause
from persist_engine.codec.keys import RollupKey, blob_key, parse_blob_key
from persist_engine.codec.stored_spine import stored_form
from persist_engine.model.diff.state_diff import BlobRef, StateDiff, blobs_of, deleted_blobs
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.queries import rollup_seqnos, seqno_since
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState
from persist_engine.parts.listings import with_nested
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.walk import VersionWalk, live_keys
from persist_engine.work.deletions import DeletionRecords
from persist_engine.work.outcome import Ending, GcOutcome

_log = logging.getLogger(__name__)

#: Receives the versions done, the versions in all, and the blobs deleted so far; for progress bars.
OnProgress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class GcStep:
    """What one step would delete: the versions below `to`, and the blobs listed here."""

    to: SeqNo
    versions: int
    blobs: tuple[BlobRef, ...]


def gc_and_truncate(machine: Machine, upto: SeqNo | None = None, *, on_progress: OnProgress | None = None) -> GcOutcome:
    """Collects everything below the newest rollup at or below `upto` (None: seqno_since, the oldest version that a reader holds).

    Safe to repeat, to race and to kill at any point: the next run completes the work. A request behind an earlier collection does nothing
    (spec 20, bug 5). A run that another one overtakes stops and does no harm. Memory is bounded by the versions between two rollups,
    however long ago the last collection was. Raises InvalidUsage when `upto` is past seqno_since: readers hold those versions.
    """
    try:
        outcome = _Collection(machine, on_progress).run(upto)
    except BaseException:
        machine.metrics.count("gc", outcome=Ending.FAILED.value)
        raise
    machine.metrics.count("gc", outcome=outcome.ending.value)
    return outcome


def collectable(machine: Machine, to: SeqNo) -> Iterator[GcStep]:
    """The steps that a collection up to version `to` would take if there were a rollup at it. Changes nothing."""
    state = machine.refresh()
    stops = [seqno for seqno in rollup_seqnos(state) if seqno < to]
    walk = VersionWalk(machine)
    for stop in [*stops, to]:
        if walk.seqno < stop:
            first = walk.seqno
            garbage = _garbage(machine, walk, stop, newest=state)
            if garbage is None:
                return
            yield GcStep(stop, stop - first, tuple(sorted(garbage.values(), key=lambda blob: blob.partial_key)))


def _garbage(machine: Machine, walk: VersionWalk, to: SeqNo, *, newest: ShardState) -> dict[str, BlobRef] | None:
    """Advances to `to`. Returns the blobs that the diffs on the way released and that neither the state there nor `newest` names again. If
    only the newest state names a blob, a later diff releases it, and it is garbage of that diff. Returns None when overtaken.
    """
    # The blobs that the earliest diff released are gone: the process that truncated the log to it collected them first.
    garbage: dict[str, BlobRef] = {}
    while walk.seqno < to:
        diff = walk.advance(through=to)
        if not isinstance(diff, StateDiff):
            return None
        garbage.update((blob.partial_key, blob) for blob in deleted_blobs(diff))
    # A late merge result may have linked a blob again that an earlier diff deleted (spec 20, bug 6).
    for key in _named(garbage, walk.state) | _named(garbage, newest):
        del garbage[key]
    # The blobs that listings name are garbage too. Each listing comes before its entries.
    garbage = {blob.partial_key: blob for blob in with_nested(machine, garbage.values())}
    found = sorted(_named(garbage, walk.state) | _named(garbage, newest))
    check(not found, f"GC of {machine.shard_id} to {to} would delete blobs that live states name: {found[:3]}")
    return garbage


def _named(blobs: Mapping[str, BlobRef], state: ShardState) -> Set[str]:
    """The keys of `blobs` that `state` names. Batches name no rollups, so if `blobs` holds rollups only, as without compactions, the live
    batches are not examined, however many there are.
    """
    if all(blob.kind == "rollup" for blob in blobs.values()):
        return blobs.keys() & {rollup.key for rollup in state.rollups.values()}
    return blobs.keys() & live_keys(state)


class _Collection:
    """One run and its progress."""

    def __init__(self, machine: Machine, on_progress: OnProgress | None) -> None:
        self._machine = machine
        self._on_progress = on_progress
        self._started_s = machine.env.monotonic_s()
        self._blobs_deleted = 0
        self._records = DeletionRecords(machine, Cause.COLLECTION)
        self._diffs_truncated = 0
        self._bytes_read = 0
        self._truncated_to: SeqNo | None = None

    def run(self, upto: SeqNo | None) -> GcOutcome:
        machine = self._machine
        with self._timed("find_rollups"):
            state = machine.state
            if upto is None or upto > seqno_since(state):
                state = machine.refresh()
            held = seqno_since(state)
            upto = held if upto is None else upto
            if upto > held:
                text = f"cannot collect {machine.shard_id} up to {upto}: readers hold {held}"
                raise InvalidUsage(text, seqno=upto, held=held)
            rollups = self._existing(state, [seqno for seqno in rollup_seqnos(state) if seqno <= upto])
        removable = [seqno for seqno in rollup_seqnos(state) if seqno < rollups[-1]] if rollups else []
        if not removable:
            return self._ended(state, Ending.SKIPPED, f"no rollup at or below {upto} beyond the earliest version", 0)
        reached = self._collect(state, rollups)
        self._records.prune()
        if reached < rollups[-1]:
            return self._ended(state, self._ending(0), f"others collect: they are past {reached}", 0)
        with self._timed("remove_rollups"):
            answer, maintenance = machine.remove_rollups([(seqno, state.rollups[seqno]) for seqno in removable])
        message = (
            f"truncated to {reached}: {counted(self._diffs_truncated, 'version')}, "
            f"{counted(self._blobs_deleted, 'blob')} deleted"
        )
        removed = len(answer.seqnos)
        return self._ended(state, self._ending(removed), message, removed, maintenance)

    def _existing(self, state: ShardState, rollups: Sequence[SeqNo]) -> list[SeqNo]:
        """The rollups at which the log can begin. The first one is where it begins already, and the walk reads it.

        A missing rollup is passed over: without it, no process could read the versions from there to the next one.
        """
        machine, existing = self._machine, list(rollups[:1])
        for seqno in rollups[1:]:
            key = blob_key(machine.shard_id, state.rollups[seqno].key)
            if self._exists(key):
                existing.append(seqno)
            elif (bounds := machine.versions.live_diff_bounds(machine.shard_id)) and bounds.earliest <= seqno:
                # Otherwise a collection went past it, and has truncated the log before the blob was deleted.
                text = "rollup %s of shard %s is missing: the log is not truncated to it; `persist admin restore` may bring it back"
                _log.error(text, key, machine.shard_id, extra={"shard": machine.shard_id})
        return existing

    def _exists(self, key: str) -> bool:
        machine = self._machine
        found = machine.retry.external(
            "look for rollup", lambda: machine.blob.get_range(key, 0, 1), shard=machine.shard_id
        )
        return found is not None

    def _ending(self, rollups_removed: int) -> Ending:
        did = self._diffs_truncated or self._blobs_deleted or rollups_removed
        return Ending.SUCCEEDED if did else Ending.SKIPPED

    def _collect(self, state: ShardState, rollups: Sequence[SeqNo]) -> SeqNo:
        """Steps from rollup to rollup. Returns the version at which the log now begins, or at which another collector overtook."""
        with self._timed("find_blobs"):
            walk = VersionWalk(self._machine)
        first, last = walk.seqno, rollups[-1]
        if first not in state.rollups and first not in self._machine.refresh().rollups and self._begins_at(first):
            text = "the earliest version %s of shard %s has no rollup in its newest state"
            _log.error(text, first, self._machine.shard_id, extra={"shard": self._machine.shard_id})
        for seqno in rollups:
            if walk.seqno < seqno:
                # The state is refreshed for every step, so that blobs linked meanwhile are kept.
                newest = self._machine.refresh()
                if not self._step(walk, seqno, newest):
                    return walk.seqno
                if self._on_progress is not None:
                    self._on_progress(seqno - first, max(1, last - first), self._blobs_deleted)
        if walk.seqno == last:
            self._count_held(walk.state)
        return walk.seqno

    def _begins_at(self, seqno: SeqNo) -> bool:
        """Whether the log still begins at `seqno`. A collector removes the older rollups only after it truncates."""
        bounds = self._machine.versions.live_diff_bounds(self._machine.shard_id)
        return bounds is not None and bounds.earliest == seqno

    def _step(self, walk: VersionWalk, to: SeqNo, newest: ShardState) -> bool:
        """Advances from one rollup to the next. Deletes the blobs that the diffs between them released, and then those diffs. Returns False
        when overtaken; then it deleted nothing.
        """
        machine = self._machine
        with self._timed("find_blobs"):
            garbage = _garbage(machine, walk, to, newest=newest)
        self._bytes_read = walk.encoded_bytes
        if garbage is None:
            return False
        text = f"GC of {machine.shard_id} to {to} would delete"
        parts, listings, rollups = [], [], []
        for key, blob in garbage.items():
            if blob.kind == "rollup":
                parsed = parse_blob_key(blob_key(machine.shard_id, key))
                check(isinstance(parsed, RollupKey) and parsed.seqno < to, f"{text} rollup {key}, not behind it")
                rollups.append(key)
            elif blob.kind == "run":
                listings.append(key)
            else:
                parts.append(key)
        begun_ms = machine.env.now_ms()
        with self._timed("delete_rollups"):
            self._delete(rollups, kind="rollup")
        with self._timed("delete_parts"):
            self._delete(parts, kind="part")
            # Delete the entries of a listing before the listing, so that a repeated deletion finds what remains (spec 20, bug 35).
            for key in reversed(listings):
                self._delete([key], kind="part")
        self._records.gone(sorted(garbage), seqno=to, begun_ms=begun_ms)
        with self._timed("truncate"):
            truncated = machine.versions.truncate_diffs(to, newest)
        machine.metrics.count("gc_truncated_diffs", truncated)
        self._diffs_truncated += truncated
        self._truncated_to = to
        return True

    def _delete(self, partial_keys: Sequence[str], *, kind: str) -> None:
        """Deletes blobs, a few at a time. All are gone when this returns. A blob that was already gone counts as deleted."""
        machine = self._machine

        def delete(partial_key: str) -> None:
            key = blob_key(machine.shard_id, partial_key)
            machine.versions.retry.external("delete_garbage", lambda: machine.blob.delete(key), shard=machine.shard_id)

        if not partial_keys:
            return
        workers = min(len(partial_keys), machine.settings.maintenance.gc_delete_concurrency)
        with ThreadPoolExecutor(workers, thread_name_prefix="persist-gc") as pool:
            for _ in pool.map(delete, sorted(partial_keys)):
                self._blobs_deleted += 1
        machine.metrics.count("gc_deleted_blobs", len(partial_keys), kind=kind)

    def _count_held(self, reached: ShardState) -> None:
        """Sets the metric of what readers of older versions still keep: the parts that the earliest version names and the newest does
        not.
        """
        machine = self._machine
        newest = machine.state
        machine.metrics.gauge("gc_held_parts", _held_parts(reached.trace, newest.trace), shard=machine.shard_id)
        machine.metrics.gauge("gc_live_diffs", newest.seqno - reached.seqno + 1, shard=machine.shard_id)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        started_s = self._machine.env.monotonic_s()
        try:
            yield
        finally:
            self._machine.metrics.observe_s("gc_step", self._machine.env.monotonic_s() - started_s, step=step)

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
            deletion_record=self._records.last,
            rollups_removed=rollups_removed,
            maintenance=maintenance,
        )


def _held_parts(old: Trace, new: Trace) -> int:
    """The number of blobs of batches that `old` names and `new` does not. Its cost is proportional to the difference: spine batches with
    equal stored forms are skipped, because hollow batches have fixed places in the order of arrival.
    """
    then, now = ({batch.id: batch for batch in trace.spine_batches()} for trace in (old, new))
    same = {key for key in then.keys() & now.keys() if stored_form(then[key]) == stored_form(now[key])}
    held, kept = (
        {blob.partial_key for key in batches.keys() - same for _, part in batches[key].parts for blob in blobs_of(part)}
        for batches in (then, now)
    )
    return len(held - kept)
