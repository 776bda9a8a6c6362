"""UpsertHandle: turns commands (key, value or nothing, order) into updates of a shard. The current value of every key is rebuilt from the
shard itself (spec 16).

This module owns the parts and the order of their work: a reader that hydrates and follows, the machine that decides (flow.upsert), and a
writer that appends. It does not know how values are consolidated or stored.

    commands ──▶ UpsertRows ──▶ UpsertMachine ──drain──▶ WriteHandle.compare_and_append ──▶ shard
                                     ▲                             │ acknowledged: the written updates are known
                                     └── snapshot, listen ─────────┴─ race lost: read what the winner wrote
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import (
    InvalidUsage,
    PersistError,
    UpdateBeyondUpper,
)
from persist_engine.client.arguments import expect, expect_commit_info, expect_progress, unexpected
from persist_engine.client.expiring import Expiring
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.dataflow.upsert.follow import Hydration, UpsertFollower
from persist_engine.dataflow.upsert.keyed import KeyedReads, refuse_streams
from persist_engine.dataflow.upsert.rows import UpsertRows
from persist_engine.dataflow.upsert.stores import OpenStore
from persist_engine.flow.upsert import Emission, UpsertMachine
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain, TimeLike, frontier_of
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.shard.applier import NO_MAINTENANCE

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upserted:
    """The commands are decided, and their effect is part of the shard; `upper` is its upper after the call.

    `late` counts dropped commands: their time was already written, before the call or by a faster process. `maintenance` is the work that
    fell due.
    """

    upper: Antichain
    inserted: int
    retracted: int
    late: int = 0
    maintenance: Maintenance = NO_MAINTENANCE


class UpsertHandle(Expiring):
    """Upserts into one shard. Thread-safe: calls are serialized. A context manager that expires reader and writer and drops the state on
    exit.

    Any number of handles, in any processes, may upsert into one shard. Each key has one value or none at every time. The state is hydrated
    at first use, and again after a failure that left it incomplete or a lapsed lease. A handle that raised Unavailable, Fenced or
    MissingBlob can therefore be used again. Every call raises SchemaMismatch once the shard's schema has evolved past the handle's.

    The handle's reader follows the writes and lets since advance to the last time written. Where neither the shard's retention nor another
    reader holds it, since moves on, and earlier times become indistinguishable.
    """

    def __init__(
        self,
        writer: WriteHandle,
        open_reader: Callable[[], ReadHandle],
        open_store: OpenStore,
        *,
        keeps_all: bool = True,
        on_hydration: Callable[[Hydration], None] | None = None,
    ) -> None:
        """`keeps_all` says whether the handle keeps the current value of every key, or reads only those of the commands of each call."""
        seed = np.frombuffer(writer.machine.env.random_bytes(32), np.uint64)
        self._writer = writer
        self._rows = UpsertRows(writer.schema, seed)
        kind = UpsertFollower if keeps_all else KeyedReads
        self._shard = kind(writer, open_reader, open_store, self._rows, on_hydration=on_hydration)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def shard_id(self) -> ShardId:
        """The id of the shard."""
        return self._writer.shard_id

    @property
    def schema_id(self) -> int:
        """The id of the schema with which the handle was opened."""
        return self._writer.schema_id

    @property
    def upper(self) -> Antichain:
        """The frontier before which the handle's state has everything; {0} before the first hydration. Makes no round trip."""
        return self._shard.upper

    @property
    def state_bytes(self) -> int:
        """The size of the state, by its store's estimate; 0 before the first hydration."""
        return self._shard.state_bytes

    def hydrate(self) -> Antichain:
        """Updates the state with everything that was acknowledged before the call, and returns the shard's upper. Every other call does
        this, too; call this one to know when the wait is over. Raises InvariantViolated, with the number of bad keys and their sums, when
        the shard was not written by upserts only.
        """
        with self._turn():
            return self._shard.current(self._writer.fetch_recent_upper(), None).persisted_frontier

    def upsert(
        self,
        commands: Any,
        *,
        keeps_greater: str | None = None,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | None = None,
        commit_info: bytes | None = None,
    ) -> Upserted | ProgressMismatch:
        """Sets each key to its value, or deletes it where `val` is null, all at one time that the handle chooses: that of the clock, or the
        shard's upper if it is later. After a lost race the commands are decided anew at a later time, so they always take effect.

        Among several commands for one key, the greatest `order` wins, and among equal orders the first. Without that column, the last
        command wins. `keeps_greater` names a field of the value, of integers, dates or instants: a key keeps its value if this field is
        greater than the command's `order`, which must have the same kind and unit. Raises InvalidUsage for other fields and orders.

        Linearized: the shard's contents after Upserted are the contents before, with exactly these commands applied. `progress` and
        `commit_info` are as in `WriteHandle.compare_and_append`. Returns ProgressMismatch when nothing was written.
        """
        expect_progress(progress, expected_progress)
        expect_commit_info(commit_info)
        rows = self._rows.commands(commands, has_time=False)
        if not isinstance(keeps_greater, str | None):
            raise unexpected(keeps_greater, "keeps_greater", "the name of a field, or None")
        rank = None if keeps_greater is None else self._rows.rank_field(keeps_greater, commands)
        with self._turn():
            return self._write(rows, None, progress, expected_progress, rank=rank, commit_info=commit_info)

    def upsert_at(
        self,
        commands: Any,
        *,
        upper: TimeLike,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | None = None,
    ) -> Upserted | ProgressMismatch:
        """Like `upsert`, but at the times in the column `time`, all before `upper`, to which the shard's upper advances. This is for
        replicas of one input and for replays: the first process writes a time. Commands at written times are dropped (`late`), so a
        repetition changes nothing. `progress` is stored even when all commands were written before.

        Within one time, orders decide as in `upsert`. A later time wins, whatever its order. Raises UpdateBeyondUpper.
        """
        upper = frontier_of(upper, "upper")
        expect_progress(progress, expected_progress)
        rows = self._rows.commands(commands, has_time=True)
        last = max(rows.column("time").to_numpy().max(initial=-1), -1)
        if upper.less_equal(int(last)):
            raise UpdateBeyondUpper(f"command at time {last} is beyond upper {upper}", ts=int(last), upper=upper)
        with self._turn():
            return self._write(rows, upper, progress, expected_progress)

    def upsert_stream(self, commands: Iterable[Any]) -> Upserted | UpperMismatch:
        """Like `upsert` of all tables or batches of `commands` at one time, but holds only one of them in memory. This is for input that
        does not fit into memory. All of it becomes visible at once.

        Returns UpperMismatch when another process wrote meanwhile; then nothing was written. The commands were consumed, so the caller must
        supply them again. Without an `order` column, each table comes after those before it. Raises InvalidUsage when the orders of two
        tables do not compare: one has integers, and the other has instants, another unit, or none.
        """
        expect(commands, Iterable, "commands", "an iterable of Arrow tables or record batches")
        if not self._shard.keeps_all:
            raise refuse_streams(self.shard_id)
        with self._turn():
            return self._write_stream(commands)

    def expire(self) -> None:
        """Expires reader and writer and drops the state. Idempotent."""
        with self._lock:
            self._closed = True
            try:
                self._shard.expire()
            finally:
                self._writer.expire()

    def __repr__(self) -> str:
        return f"UpsertHandle({self._writer.writer_id} of {self.shard_id})"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Serializes calls, refuses calls after `expire`, and cleans up after a failed call."""
        with self._lock:
            if self._closed:
                raise InvalidUsage(f"the upsert handle of shard {self.shard_id} was expired by its owner")
            try:
                yield
            except BaseException:
                self._shard.tidy_up()
                raise

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(
        self,
        rows: pa.Table,
        upper: Antichain | None,
        progress: tuple[str, bytes] | None,
        expected_progress: bytes | None,
        *,
        rank: int | None = None,
        commit_info: bytes | None = None,
    ) -> Upserted | ProgressMismatch:
        shared = self._writer.shared_upper()
        while True:
            machine = self._shard.current(shared, rows)
            machine.forget_commands()
            if upper is None:
                time = self._choose_time(machine)
                # Do this again after a lost race, because the winner may have written a greater value.
                kept = rows if rank is None else self._rows.not_surpassed(rows, machine.values(rows), rank)
                late = machine.on_commands(_at(kept, time))
                machine.on_input_frontier(Antichain.of(time + 1))
            else:
                late = machine.on_commands(rows)
                machine.on_input_frontier(upper)
            emission = machine.drain()
            if emission is None:
                outcome = self._store_progress(machine.persisted_frontier, progress, expected_progress)
            else:
                outcome = self._append(emission, progress, expected_progress, commit_info)
            match outcome:
                case Appended(reached, maintenance):
                    retracted = 0 if emission is None else _retractions(emission.updates)
                    inserted = 0 if emission is None else emission.updates.num_rows - retracted
                    return Upserted(reached, inserted, retracted, late, maintenance)
                case UpperMismatch(current=current):
                    shared = current
                case ProgressMismatch():
                    machine.forget_commands()
                    return outcome

    def _append(
        self,
        emission: Emission,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | None = None,
        commit_info: bytes | None = None,
    ) -> AppendOutcome:
        """Appends at exactly the emission's lower. The acknowledged updates are known, so they are not read back."""
        outcome = self._writer.compare_and_append(
            self._rows.to_updates(emission.updates),
            expected_upper=emission.lower,
            new_upper=emission.upper,
            progress=progress,
            expected_progress=expected_progress,
            commit_info=commit_info,
        )
        if isinstance(outcome, Appended):
            try:
                self._shard.take_in(emission)
            except PersistError as error:  # the append is committed; only the state must be rebuilt
                text = "upsert state did not take in what was appended, it will be hydrated again: %s"
                _log.warning(text, error, extra={"shard": self.shard_id})
                self._shard.drop_state()
        return outcome

    def _store_progress(
        self, at: Antichain, progress: tuple[str, bytes] | None, expected_progress: bytes | None
    ) -> AppendOutcome:
        """The effect of the commands was written before, up to `at`. Only their progress may be missing."""
        if progress is None:
            return Appended(at)
        stored = self._writer.machine.refresh().progress.get(progress[0])
        if stored is not None and stored.token == progress[1]:
            return Appended(at)  # a full repetition
        if at.is_empty():
            raise InvalidUsage(
                f"shard {self.shard_id} is closed: the progress of {progress[0]} cannot be stored any more"
            )
        return self._writer.compare_and_append(
            [], expected_upper=at, new_upper=at, progress=progress, expected_progress=expected_progress
        )

    def _write_stream(self, commands: Iterable[Any]) -> Upserted | UpperMismatch:
        machine, at = self._open_time()
        rows = inserted = retracted = 0
        order_kind: str | None = None
        with self._writer.builder(at) as builder:
            for given in commands:
                table = self._rows.commands(given, has_time=False, first_row=rows)
                kind = self._rows.order_kind(given)
                if None not in (order_kind, kind) and order_kind != kind:
                    raise InvalidUsage(f"orders of a stream do not compare: {order_kind} in one table, then {kind}")
                order_kind = kind or order_kind
                rows += table.num_rows
                machine.on_commands(_at(table, _time_of(at)))
                updates = machine.drain_partially()
                if updates is not None:
                    builder.add(self._rows.to_updates(updates))
                    retracted += _retractions(updates)
                    inserted += updates.num_rows
            upper = Antichain.of(_time_of(at) + 1)
            batch = builder.finish(upper)
        outcome = self._writer.compare_and_append_batch([batch], expected_upper=at, new_upper=upper)
        machine.forget_commands()
        if isinstance(outcome, Appended):
            return Upserted(upper, inserted - retracted, retracted, 0, outcome.maintenance)
        assert isinstance(outcome, UpperMismatch), "the append had no progress"
        self._writer.discard(batch)
        return outcome

    def _open_time(self) -> tuple[UpsertMachine, Antichain]:
        """A time to write at, after advancing the shard's upper to it."""
        # The upper must be a fetched one, because the stream is consumed before its append could report other writers.
        shared = self._writer.fetch_recent_upper()
        at = MINIMUM
        while True:
            machine = self._shard.current(shared, None)
            machine.forget_commands()
            # Choose the time once, because the clock moves on while the frontier advances to it.
            at = machine.persisted_frontier.join(at if at > MINIMUM else Antichain.of(self._choose_time(machine)))
            machine.on_input_frontier(at)
            ahead = machine.drain()
            if ahead is None:
                return machine, at
            outcome = self._append(ahead)
            shared = outcome.current if isinstance(outcome, UpperMismatch) else at

    def _choose_time(self, machine: UpsertMachine) -> int:
        lower = machine.persisted_frontier.time
        if lower is None:
            raise InvalidUsage(f"shard {self.shard_id} is closed: its upper is empty, so nothing more can be upserted")
        time = max(self._writer.clock_time(self._writer.machine.env.now_ms()), lower)
        if time >= DATA_TIME_MAX:
            raise InvalidUsage(f"the upper {{{lower}}} of shard {self.shard_id} leaves no time to upsert at")
        return time


def _at(rows: pa.Table, time: int) -> pa.Table:
    return rows.append_column("time", pa.array(np.full(rows.num_rows, time, np.int64)))


def _time_of(frontier: Antichain) -> int:
    assert frontier.time is not None
    return frontier.time


def _retractions(updates: pa.Table) -> int:
    return int((updates.column("diff").to_numpy() < 0).sum())
