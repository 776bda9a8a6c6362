"""Planted bugs in the code above the log: tables, upserts of feeds, reads for other processes, and operators. `mutants` plants them, and
has the other bugs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import persist_engine.model.append
import persist_engine.parts.listings
import persist_engine.shard.rebirth
import persist_engine.table.writing
import persist_engine.work.compact
import persist_engine.work.repair.recover
from persist_engine.base.versioned import SeqNo
from persist_engine.client.read.changes import Changes
from persist_engine.client.read.leased import PartLeases
from persist_engine.client.since import SinceHandle
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.dataflow.upsert.keyed import KeyedReads
from persist_engine.flow.desired import DesiredFrontiers, Stream
from persist_engine.flow.refresh import Refresh
from persist_engine.model.commands import CompareAndAppend
from persist_engine.model.diff.state_diff import between
from persist_engine.model.queries import held_since, retained_since
from persist_engine.model.rebirth import reborn
from persist_engine.shard.applier import Applier
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.table.corrections import Correction, LeftRows
from persist_engine.table.feed import ChangeFeed
from persist_engine.table.notes.transactions import ticket_of
from persist_engine.table.readers import Shared
from persist_engine.table.writing import TableWriter
from persist_engine.work.registry import Registry

Put = Callable[[object, str, object], None]


def _transactions_repeat(put: Put) -> None:
    """A write whose transaction was committed before is done again."""
    put(persist_engine.table.writing, "ticket_of", lambda *args: replace(ticket_of(*args), is_repeat=False))


def _expected_time_is_not_asked(put: Put) -> None:
    """An overwrite that expects a time replaces any contents."""
    original = TableWriter._corrected

    def corrected(self: TableWriter, plan: Any, **options: Any) -> Any:
        return original(self, plan, **{**options, "expected": None})

    put(TableWriter, "_corrected", corrected)


def _correction_follows_nothing(put: Put) -> None:
    """A correction that lost a race moves to a later time, and leaves the winner's rows."""

    def follow(self: Correction, _reader: Any, upper: Any, time: int, **_: Any) -> bool:
        self._restage([], upper, time)
        return True

    put(Correction, "follow", follow)


def _left_rows_are_of_any_time(put: Put) -> None:
    """An overwrite uses the rows that the last overwrite left as the contents, although other writers wrote since."""
    put(LeftRows, "at", lambda self, _time, _schema: None if self._left is None else self._left[1])


def _retention_passes_holds(put: Put) -> None:
    """Since follows the retention past the holds of readers."""
    put(persist_engine.model.append, "held_since", lambda state: retained_since(state) or held_since(state))


def _leased_parts_end_with_their_snapshot(put: Put) -> None:
    """Parts that other processes fetch are held only as long as their snapshot."""
    original = PartLeases._lease

    def lease(self: PartLeases, pin: Any, *args: Any, **options: Any) -> Any:
        leased = original(self, pin, *args, **options)
        self._out[leased.number].release()
        return leased

    put(PartLeases, "_lease", lease)


def _keyed_reads_do_not_follow(put: Put) -> None:
    """An upsert that keeps no values and lost a race decides against the values from before the winner."""

    def followed(self: KeyedReads, target: Any) -> Any:
        machine = self._asked.machine  # type: ignore[union-attr]  # it was asked
        machine.forget_commands()
        machine.on_persisted_frontier(target)
        return machine

    put(KeyedReads, "_followed", followed)


def _upserts_replace_any_progress(put: Put) -> None:
    """An upsert that another process fenced replaces the progress that this process stored."""
    original = UpsertHandle._append

    def append(self: UpsertHandle, emission: Any, progress: Any = None, _: Any = None, info: Any = None) -> Any:
        stored = None if progress is None else self._writer.machine.state.progress.get(progress[0])
        return original(self, emission, progress, None if stored is None else stored.token, info)

    put(UpsertHandle, "_append", append)


def _progress_of_nothing_is_not_stored(put: Put) -> None:
    """Upserts whose commands were all written before do not store their progress."""
    put(UpsertHandle, "_store_progress", lambda self, at, *_: Appended(at))


def _positions_alone_are_not_compared(put: Put) -> None:
    """A driver that takes over replaces any position, also one of a commit that it has not seen."""
    original = Applier.apply

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        is_append = isinstance(command, CompareAndAppend) and command.progress is not None
        if is_append and command.batch.desc.lower == command.batch.desc.upper:
            stored = self.state.progress.get(command.progress[0])
            command = replace(command, expected_progress=stored)
        return original(self, command, is_write=is_write)

    put(Applier, "apply", apply)


def _positions_end_before_their_rows(put: Put) -> None:
    """Progress is stored with the upper before its append, so copies of the batch seem never to have been appended."""
    original = Applier.apply

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        if isinstance(command, CompareAndAppend) and command.progress is not None:
            sink, stored = command.progress
            command = replace(command, progress=(sink, replace(stored, upper=command.batch.desc.lower)))
        return original(self, command, is_write=is_write)

    put(Applier, "apply", apply)


def _copies_are_deleted_whole(put: Put) -> None:
    """A deletion of a copy deletes blobs that the shard names, because another driver appended its copy."""
    put(WriteHandle, "_named_keys", lambda *_: frozenset())


def _compactions_forget_columns(put: Put) -> None:
    """A compaction writes the rows of its inputs under the oldest of their schemas."""

    def oldest(request: Any) -> int:
        metas = [meta for _, batch in request.inputs for meta, _ in batch.runs()]
        return min((meta.schema_id or 0 for meta in metas), default=0)

    put(persist_engine.work.compact, "newest_schema_id", oldest)


def _older_schemas_retract(put: Put) -> None:
    """A handle under an older schema retracts rows, which lack the columns that it does not know."""
    put(WriteHandle, "check_newest_schema", lambda _: None)


def _refreshes_come_early(put: Put) -> None:
    """A sink shows updates at the refresh before them."""
    original = Refresh._rounded

    def rounded(self: Refresh, times: Any) -> Any:
        shown = [self.last_before(int(time) + 1) for time in times]
        return np.array(
            [late if early is None else early for early, late in zip(shown, original(self, times), strict=True)]
        )

    put(Refresh, "_rounded", rounded)


def _errors_are_not_awaited(put: Put) -> None:
    """A sink writes times for which it knows all rows, although errors may still come."""
    put(DesiredFrontiers, "frontier", property(lambda self: self.by_stream[Stream.OK]))


def _changes_hold_nothing(put: Put) -> None:
    """Changes read a version that a collection may delete meanwhile."""
    original = Changes.__init__

    def init(self: Changes, **options: Any) -> None:
        options["pin"].release()
        original(self, **options)

    put(Changes, "__init__", init)


def _feed_skips_what_it_waited_for(put: Put) -> None:
    """A feed that waited for a write continues after it."""
    original_wait, original_ordered = ChangeFeed._wait_past, ChangeFeed._ordered
    reached: dict[int, int] = {}

    def wait_past(self: ChangeFeed, since: int | None) -> None:
        original_wait(self, since)
        reached[id(self)] = self._machine.state.trace.upper.newest_complete

    def ordered(self: ChangeFeed, reader: Any, since: Any, upto: Any) -> Any:
        return original_ordered(self, reader, reached.pop(id(self), since), upto)

    put(ChangeFeed, "_wait_past", wait_past)
    put(ChangeFeed, "_ordered", ordered)


def _idle_handles_end_in_use(put: Put) -> None:
    """The timer of an idle handle expires it although it is in use again."""

    def on_timer(self: Shared[Any]) -> None:
        with self._lock:
            self._timer, handle, self._handle = None, self._handle, None
        if handle is not None:
            self._expire(handle)

    put(Shared, "_on_timer", on_timer)


def _operator_does_not_take_over(put: Put) -> None:
    """An operator whose since is reached leaves the hold to its rival, and believes that it has it."""
    original = SinceHandle.compare_and_downgrade_since

    def move(self: SinceHandle, expected: bytes, new: Any) -> Any:
        return original(self, expected, (expected if new[0].startswith(b"operator") else new[0], new[1]))

    put(SinceHandle, "compare_and_downgrade_since", move)


def _freed_names_come_back(put: Put) -> None:
    """A name is freed without a new entry of the shard's owner, so a renaming that still runs does not notice."""
    original_free, original_put = Registry.free, Registry._put
    freeing: list[Registry] = []

    def free(self: Registry, owner: Any) -> bool:
        freeing.append(self)
        try:
            return original_free(self, owner)
        finally:
            freeing.remove(self)

    def put_entry(self: Registry, key: str, expected: Any, data: bytes) -> Any:
        if self in freeing and key.startswith("owner/"):
            return expected or SeqNo(0)
        return original_put(self, key, expected, data)

    put(Registry, "free", free)
    put(Registry, "_put", put_entry)


def _rename_takes_any_name(put: Put) -> None:
    """A renaming takes a name that leads to another shard."""
    original_rename, original_named = Registry.rename, Registry._named
    renaming: dict[int, Any] = {}

    def rename(self: Registry, shard_id: Any, *, old: Any, new: Any) -> None:
        renaming[id(self)] = shard_id
        try:
            original_rename(self, shard_id, old=old, new=new)
        finally:
            renaming.pop(id(self), None)

    def named(self: Registry, owner: Any) -> Any:
        tip, found = original_named(self, owner)
        return (tip, found) if renaming.get(id(self), found) == found else (tip, None)

    put(Registry, "rename", rename)
    put(Registry, "_named", named)


def _recovered_log_has_the_old_birth(put: Put) -> None:
    """A recovered log has the birth of the replaced log, so that processes that know the replaced log continue."""
    put(persist_engine.shard.rebirth, "recovered_birth", lambda old, _: old)


def _recovery_takes_the_oldest(put: Put) -> None:
    """A recovery begins from the oldest rollup."""
    original = persist_engine.work.repair.recover._Recovery.base

    def base(self: Any, wanted: str | None) -> Any:
        found = original(self, wanted)
        return found if wanted is not None else (*self.readable[-1], self.readable[-1][0])

    put(persist_engine.work.repair.recover._Recovery, "base", base)


def _recovered_log_takes_old_stages(put: Put) -> None:
    """A recovered log links parts that were staged before it, which an orphan scan in the lost versions may have deleted."""

    def with_old_floor(base: Any, **options: Any) -> Any:
        first, _ = reborn(base, **options)
        first = replace(first, staging_floor_ms=base.staging_floor_ms)
        return first, between(replace(base, seqno=SeqNo(first.seqno - 1), tag=b""), first)

    put(persist_engine.shard.rebirth, "reborn", with_old_floor)


def _recovered_log_leaves_no_gap(put: Put) -> None:
    """A recovered log goes on right after the known versions, so the lost log may have versions with the same seqnos."""
    put(persist_engine.shard.rebirth, "SEQNOS_LEFT_OUT", 0)


def _listings_are_deleted_alone(put: Put) -> None:
    """A collection deletes listings, and leaves the blobs below them (35)."""
    put(persist_engine.parts.listings, "_below", lambda *_: ())


def _recovery_replaces_any_log(put: Put) -> None:
    """A recovery replaces the present log, even if that is not the log that it inspected."""
    original = MemConsensus.replace
    put(MemConsensus, "replace", lambda self, key, _, new: original(self, key, self.head(key).tip, new))


OF_CALLERS: dict[str, Callable[[Put], None]] = {
    "a transaction is done again": _transactions_repeat,
    "the expected time is not asked": _expected_time_is_not_asked,
    "a correction follows nothing": _correction_follows_nothing,
    "rows that an overwrite left are of any time": _left_rows_are_of_any_time,
    "retention passes holds": _retention_passes_holds,
    "leased parts end with their snapshot": _leased_parts_end_with_their_snapshot,
    "keyed reads do not follow": _keyed_reads_do_not_follow,
    "upserts replace any progress": _upserts_replace_any_progress,
    "progress of nothing is not stored": _progress_of_nothing_is_not_stored,
    "positions alone are not compared": _positions_alone_are_not_compared,
    "positions end before their rows": _positions_end_before_their_rows,
    "copies are deleted whole": _copies_are_deleted_whole,
    "compactions forget columns": _compactions_forget_columns,
    "older schemas retract": _older_schemas_retract,
    "refreshes come early": _refreshes_come_early,
    "errors are not awaited": _errors_are_not_awaited,
    "changes hold no version": _changes_hold_nothing,
    "a feed skips what it waited for": _feed_skips_what_it_waited_for,
    "idle handles end in use": _idle_handles_end_in_use,
    "an operator does not take over": _operator_does_not_take_over,
    "freed names come back": _freed_names_come_back,
    "a renaming takes any name": _rename_takes_any_name,
    "a recovered log has the old birth": _recovered_log_has_the_old_birth,
    "a recovery takes the oldest rollup": _recovery_takes_the_oldest,
    "a recovery replaces any log": _recovery_replaces_any_log,
    "a recovered log takes old stages": _recovered_log_takes_old_stages,
    "a recovered log leaves no gap": _recovered_log_leaves_no_gap,
    "listings are deleted alone": _listings_are_deleted_alone,
}
