"""Planted bugs: each removes one safety rule from the engine, and the simulation must detect it within its seeds.

A simulation that no longer detects one of them has a gap. Most are bugs that similar stores have shipped (spec 20); the number in
parentheses says which. While a mutant is planted, its code is replaced in the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import persist_engine.model.append
import persist_engine.model.transitions
import persist_engine.work.audit.verify
import persist_engine.work.compact
import persist_engine.work.gc
import persist_engine.work.merging
import pyarrow as pa
import pyarrow.compute as pc
from persist_engine.client.read.listen import Progress
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.dataflow.sink.readback import ReadBack
from persist_engine.dataflow.upsert.follow import UpsertFollower
from persist_engine.flow import upsert as flow_upsert
from persist_engine.flow.append import Append
from persist_engine.flow.upsert import UpsertMachine
from persist_engine.flow.write import Stage, Write
from persist_engine.model import commands
from persist_engine.model.batch import HollowBatch, HollowPart
from persist_engine.model.commands import Applied
from persist_engine.model.diff.state_diff import deleted_blobs, inserted_blobs
from persist_engine.model.frontier import EMPTY
from persist_engine.model.ids import IdempotencyToken
from persist_engine.model.spine.trace import MergeOutcome
from persist_engine.model.state import ShardState
from persist_engine.parts.fetch import ListenFilter
from persist_engine.parts.write import delete_parts
from persist_engine.shard.applier import NO_MAINTENANCE, Applier, UnknownOutcome
from persist_engine.shard.creation import Creation
from persist_engine.shard.log_reader import LogReader
from persist_engine.shard.machine import Machine
from persist_engine.shard.versions import StateVersions
from persist_engine.storage.consensus_mem import MemConsensus

from persist_kit.sim.mutants_of_callers import OF_CALLERS

Planting = Callable[[Callable[[object, str, object], None]], None]
"""Called with a function `put(owner, name, value)`, the effects of which are undone afterwards."""


@contextmanager
def planted(mutant: str) -> Iterator[None]:
    """In the block, the engine has the bug `mutant`."""
    with planting(MUTANTS[mutant]):
        yield


@contextmanager
def planting(plant: Planting) -> Iterator[None]:
    """In the block, the replacements of `plant` are in place."""
    undo: list[tuple[Any, str, object]] = []

    def put(owner: Any, name: str, value: object) -> None:
        undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    plant(put)
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _no_token(put: Callable[[object, str, object], None]) -> None:
    """A retried append counts as a new one (2)."""
    original = Applier.apply

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        if isinstance(command, commands.CompareAndAppend):
            fresh = IdempotencyToken.from_bytes(self.versions.env.random_bytes(16))
            command = replace(command, token=fresh)
        return original(self, command, is_write=is_write)

    put(Applier, "apply", apply)
    put(Machine, "_check_surely_refused", lambda *_: None)


def _no_refetch(put: Callable[[object, str, object], None]) -> None:
    """The cached state decides an upper mismatch (3)."""
    original = Machine.compare_and_append

    def compare_and_append(self: Machine, *args: Any, **kwargs: Any) -> Any:
        stale = Machine(self._applier)
        stale.refresh = lambda: stale.state  # type: ignore[method-assign]  # this is the planted bug
        return original(stale, *args, **kwargs)

    put(Machine, "compare_and_append", compare_and_append)
    put(Machine, "_mismatch", refuse_anyway)


def refuse_anyway(self: Machine, command: commands.CompareAndAppend) -> commands.UpperMismatch:
    """Replaces Machine._mismatch, so that every refusal is final."""
    upper = self.state.trace.upper
    return commands.UpperMismatch(current=upper, expected=command.batch.desc.lower, writer_upper=upper)


def _rollup_deleted_when_unknown(put: Callable[[object, str, object], None]) -> None:
    """A rollup counts as not linked when the outcome of its link is unknown (1c)."""

    def add_rollup(self: Machine, seqno: Any, rollup: Any) -> Any:
        try:
            return self._applier.apply(commands.AddRollup(seqno=seqno, rollup=rollup), is_write=False)
        except UnknownOutcome:
            return commands.RollupAdded(applied=False), NO_MAINTENANCE

    put(Machine, "add_rollup", add_rollup)


def _output_deleted_when_unknown(put: Callable[[object, str, object], None]) -> None:
    """A compaction counts as not applied when the outcome of its result is unknown (1b)."""

    def apply_merge_res(self: Machine, res: Any) -> Any:
        try:
            answer, maintenance = self._applier.apply(commands.ApplyMergeRes(res=res), is_write=False)
        except UnknownOutcome:
            return MergeOutcome.NOT_APPLIED_NO_MATCH, NO_MAINTENANCE
        assert isinstance(answer, commands.MergeApplied)
        return answer.outcome, maintenance

    put(Machine, "apply_merge_res", apply_merge_res)


def _only_the_last_attempt_counts(put: Callable[[object, str, object], None]) -> None:
    """The possible effect of an attempt with an unknown outcome is ignored. Only the next attempt's answer counts (1)."""
    original = Machine._take
    put(Machine, "_take", lambda self, command, expected, _: original(self, command, expected, lambda _, known: known))


def _initial_rollup_deleted(put: Callable[[object, str, object], None]) -> None:
    """A process that finds the shard initialised deletes the rollup it wrote, although its own attempt may have won (1a)."""
    original, original_set = StateVersions._try_init_shard, StateVersions._set_blob
    written: dict[int, str] = {}

    def set_blob(self: StateVersions, shard_id: Any, key: str, data: bytes) -> None:
        written[id(self)] = key
        original_set(self, shard_id, key, data)

    def try_init(self: StateVersions, shard_id: Any, *rest: Any, **more: Any) -> Any:
        created = original(self, shard_id, *rest, **more)
        if created is None:
            self.delete_rollup(shard_id, written[id(self)])
        return created

    put(StateVersions, "_set_blob", set_blob)
    put(StateVersions, "_try_init_shard", try_init)


def _gc_takes_live_parts(put: Callable[[object, str, object], None]) -> None:
    """Every part that a diff adds or removes counts as garbage, live or not (6)."""
    gc = persist_engine.work.gc
    put(gc, "deleted_blobs", lambda diff: [*deleted_blobs(diff), *inserted_blobs(diff)])
    put(gc, "live_keys", lambda _: set())


def _gc_truncates_first(put: Callable[[object, str, object], None]) -> None:
    """Versions are truncated before the blobs that only they name are deleted (spec 14.6)."""
    collection: Any = persist_engine.work.gc._Collection
    original_delete, original_step = collection._delete, collection._step

    def delete(self: Any, keys: Any, *, kind: str) -> None:
        self._machine.versions.truncate_diffs(self._mutant_walk.seqno, self._mutant_walk.state)
        original_delete(self, keys, kind=kind)

    def step(self: Any, live: Any, to: Any, needed: Any) -> Any:
        self._mutant_walk = live
        return original_step(self, live, to, needed)

    put(collection, "_delete", delete)
    put(collection, "_step", step)


def _gc_ignores_holds(put: Callable[[object, str, object], None]) -> None:
    """Versions that readers hold are collected."""
    put(persist_engine.work.gc, "seqno_since", lambda state: state.seqno)


def _gc_unlinks_rollups_first(put: Callable[[object, str, object], None]) -> None:
    """Rollups are removed from state before the versions that begin with them are truncated (spec 14.6)."""
    original = Machine.remove_rollups
    collection: Any = persist_engine.work.gc._Collection
    original_step = collection._step

    def step(self: Any, live: Any, to: Any, needed: Any) -> Any:
        state = self._machine.state
        original(self._machine, [(seqno, rollup) for seqno, rollup in state.rollups.items() if seqno < to])
        for seqno, rollup in state.rollups.items():
            if seqno < to:
                self._machine.versions.delete_rollup(self._machine.shard_id, rollup.key)
        return original_step(self, live, to, needed)

    put(collection, "_step", step)


def _expiry_moves_since(put: Callable[[object, str, object], None]) -> None:
    """The expiry of a reader advances since (22)."""
    original = persist_engine.model.transitions._expired

    def expired(state: ShardState, after: ShardState, *, existed: bool) -> Any:
        outcome = original(state, after, existed=existed)
        if not isinstance(outcome, Applied):
            return outcome
        moved = persist_engine.model.append.with_held_since(outcome.state)
        return Applied(moved, outcome.answer)

    put(persist_engine.model.transitions, "_expired", expired)


def _listen_without_lower(put: Callable[[object, str, object], None]) -> None:
    """A listener returns updates again that compaction merged into its next batch (19)."""
    original = ListenFilter.apply
    put(ListenFilter, "apply", lambda self, table: original(ListenFilter(self.as_of, 0), table))


def _inputs_deleted(put: Callable[[object, str, object], None]) -> None:
    """A compaction deletes its inputs as soon as its result is applied, although readers and older versions still name them."""
    original = Machine.apply_merge_res

    def apply_merge_res(self: Machine, res: Any) -> Any:
        before = [part for batch in self.state.trace.batches() for part in batch.parts]
        outcome, maintenance = original(self, res)
        now = {key for batch in self.state.trace.batches() for key in batch.blob_keys()}
        if outcome.applied:
            delete_parts(self, [part for part in before if isinstance(part, HollowPart) and part.key not in now])
        return outcome, maintenance

    put(Machine, "apply_merge_res", apply_merge_res)


def _stopped_compaction_is_applied(put: Callable[[object, str, object], None]) -> None:
    """A stopped compaction applies its incomplete result."""
    original = persist_engine.work.merging._checked

    def checked(tables: Any, check: Any) -> Any:
        try:
            yield from original(tables, check)
        except persist_engine.work.compact._GivenUp:
            return

    put(persist_engine.work.merging, "_checked", checked)


def _asks_what_stands(put: Callable[[object, str, object], None]) -> None:
    """A sink's progress is replaced without a comparison."""
    original = Applier.apply

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        if isinstance(command, commands.CompareAndAppend) and command.progress is not None:
            stored = self.state.progress.get(command.progress[0])
            command = replace(command, expected_progress=None if stored is None else stored.token)
        return original(self, command, is_write=is_write)

    put(Applier, "apply", apply)


def _takes_over_without_token(put: Callable[[object, str, object], None]) -> None:
    """A process may take over a critical reader without its token."""
    original = Applier.apply

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        if isinstance(command, commands.CompareAndDowngradeSince):
            reader = self.state.critical_readers.get(command.reader_id)
            command = command if reader is None else replace(command, expected_opaque=reader.opaque)
        return original(self, command, is_write=is_write)

    put(Applier, "apply", apply)


def _finalizes_under_readers(put: Callable[[object, str, object], None]) -> None:
    """A closed shard is emptied although a reader still holds its since."""
    transitions = persist_engine.model.transitions
    original = transitions._become_tombstone

    def become_tombstone(state: ShardState) -> Any:
        if state.trace.upper.is_empty():
            state = replace(state, trace=state.trace.downgrade_since(EMPTY))
        return original(state)

    put(transitions, "_become_tombstone", become_tombstone)


def _old_stages_are_linked(put: Callable[[object, str, object], None]) -> None:
    """Parts are linked without a check that the orphan scan has not deleted them."""
    put(HollowBatch, "staged_before", lambda self, floor_ms: None)


def _lost_append_joins_later(put: Callable[[object, str, object], None]) -> None:
    """A sink that lost an append repeats its corrections after the winner, which made them too (30)."""
    original = Append.on_mismatch

    def on_mismatch(self: Append[Any], current: Any) -> Any:
        lost = self._committing
        if lost is None or not lost.lower < current < lost.upper:
            return original(self, current)
        self._committing = replace(lost, lower=current)
        return [self._committing]

    put(Append, "on_mismatch", on_mismatch)


def _stages_before_it_read_back(put: Callable[[object, str, object], None]) -> None:
    """A worker stages corrections before it has read the persisted side."""

    def stage(self: Write) -> Any:
        described = self._pending
        if described is None or not described.upper <= self._desired.frontier:
            return []
        return [Stage(described.lower, described.upper), *self._give_up()]

    put(Write, "_stage", stage)


def _own_appends_are_not_read(put: Callable[[object, str, object], None]) -> None:
    """A sink treats new updates as its own appends, and only advances its frontier."""

    def listened(self: ReadBack, listen: Any) -> Any:
        for event in listen.next_batch(timeout_s=0) or ():
            if isinstance(event, Progress):
                yield self._progress(event.frontier)

    put(ReadBack, "_listened", listened)


def _lapsed_sink_skips_history(put: Callable[[object, str, object], None]) -> None:
    """After its lease lapsed, a sink continues at the earliest readable time, and ignores what it missed."""

    def listen_from(self: ReadBack, as_of: int) -> Any:
        listen = self.reader.listen(as_of)
        return self.reader.listen(listen.since) if isinstance(listen, SinceAhead) else listen

    put(ReadBack, "_listen_from", listen_from)


def _upsert_does_not_follow(put: Callable[[object, str, object], None]) -> None:
    """Appends of others advance an upsert's frontier, but do not change its values."""

    def follow(self: UpsertFollower, machine: UpsertMachine) -> None:
        assert self._listen is not None
        for event in self._listen.next_batch(timeout_s=None) or ():
            if isinstance(event, Progress):
                machine.on_persisted_frontier(event.frontier.join(machine.persisted_frontier))

    put(UpsertFollower, "_follow", follow)


def _late_commands_come_to_pass(put: Callable[[object, str, object], None]) -> None:
    """Commands at already written times are applied at the current time (a replay flips values, 32)."""
    original = UpsertMachine.on_commands

    def on_commands(self: UpsertMachine, given: Any) -> int:
        index = given.schema.get_field_index("time")
        open_time = self.persisted_frontier.time or 0
        times = pc.max_element_wise(given.column(index), pa.scalar(open_time, pa.int64()))
        return original(self, given.set_column(index, "time", times))

    put(UpsertMachine, "on_commands", on_commands)


def _order_is_not_asked(put: Callable[[object, str, object], None]) -> None:
    """Among several commands of a key, the least order wins."""
    original = flow_upsert._orders

    def orders(commands: pa.Table) -> Any:
        numbers, ordered = original(commands)
        return -numbers, ordered

    put(flow_upsert, "_orders", orders)


def _own_entry_is_not_looked_at(put: Callable[[object, str, object], None]) -> None:
    """A refresh fetches the entries after its version, and does not check its own entry."""

    def fetch_diffs_from(self: LogReader, known: ShardState, *, limit: int) -> Any:
        live = self.fetch_diffs_after(known.shard_id, known.seqno, limit=limit)
        return None if live and live[0].seqno != known.seqno + 1 else live

    put(LogReader, "fetch_diffs_from", fetch_diffs_from)


def _seqnos_are_compared_only(put: Callable[[object, str, object], None]) -> None:
    """Consensus appends if the seqno fits, without comparing the entry."""
    original = MemConsensus.compare_and_set

    def compare_and_set(self: MemConsensus, key: str, expected: Any, new: Any) -> Any:
        head = self.head(key)
        fits = head is not None and expected is not None and head.seqno == expected.seqno
        return original(self, key, head.tip if fits and head is not None else expected, new)

    put(MemConsensus, "compare_and_set", compare_and_set)


def _any_log_is_truncated(put: Callable[[object, str, object], None]) -> None:
    """Consensus truncates to the seqno, without looking for the known entry."""
    original = MemConsensus.truncate

    def truncate(self: MemConsensus, key: str, before: Any, known: Any) -> Any:
        found = self.scan(key, before, 1)
        return original(self, key, before, found[0].tip if found else known)

    put(MemConsensus, "truncate", truncate)


def _ruins_are_built_over(put: Callable[[object, str, object], None]) -> None:
    """A shard that is not in consensus is created, although blobs prove that it existed."""
    put(Creation, "first_ruin", lambda *_: None)


def _verification_sees_no_ruins(put: Callable[[object, str, object], None]) -> None:
    """Verification does not check to which log unnamed rollups belong."""
    put(persist_engine.work.audit.verify, "ruins_among", lambda *_: ())


MUTANTS: dict[str, Planting] = {
    "no token": _no_token,
    "no refetch before a mismatch": _no_refetch,
    "initial rollup deleted when not surely lost": _initial_rollup_deleted,
    "rollup deleted when unknown": _rollup_deleted_when_unknown,
    "compaction output deleted when unknown": _output_deleted_when_unknown,
    "only the last attempt counts": _only_the_last_attempt_counts,
    "compaction deletes its inputs": _inputs_deleted,
    "a stopped compaction is applied": _stopped_compaction_is_applied,
    "gc does not subtract live parts": _gc_takes_live_parts,
    "gc truncates before it deletes": _gc_truncates_first,
    "gc ignores holds": _gc_ignores_holds,
    "gc unlinks rollups before it truncates": _gc_unlinks_rollups_first,
    "expiry moves since": _expiry_moves_since,
    "listen without lower filter": _listen_without_lower,
    "progress is not compared": _asks_what_stands,
    "fencing token is not compared": _takes_over_without_token,
    "finalize under readers": _finalizes_under_readers,
    "stages older than the floor are linked": _old_stages_are_linked,
    "a sink's lost append joins later": _lost_append_joins_later,
    "a sink stages before it has read back": _stages_before_it_read_back,
    "a sink does not read what is appended": _own_appends_are_not_read,
    "a lapsed sink skips history": _lapsed_sink_skips_history,
    "an upsert does not follow": _upsert_does_not_follow,
    "late commands come to pass": _late_commands_come_to_pass,
    "order keys are not asked": _order_is_not_asked,
    "a refresh takes its own entry for granted": _own_entry_is_not_looked_at,
    "consensus compares seqnos only": _seqnos_are_compared_only,
    "consensus truncates at any entry": _any_log_is_truncated,
    "a lost shard is created anew": _ruins_are_built_over,
    "verification sees no lost versions": _verification_sees_no_ruins,
    **OF_CALLERS,
}
