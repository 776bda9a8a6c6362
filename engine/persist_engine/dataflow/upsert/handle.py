"""UpsertHandle: commands (key, value or nothing, order) in, updates of a shard out; the current value of every key is
rebuilt from the shard itself (spec 16).

Owns the pieces and the order in which they talk: a reader that hydrates and follows, the machine that decides
(flow.upsert), a writer that appends. Knows nothing of how values are consolidated, nor how stores keep them.

    commands ──▶ UpsertRows ──▶ UpsertMachine ──drain──▶ WriteHandle.compare_and_append ──▶ shard
                                     ▲                             │ acknowledged: what was written is known
                                     └── snapshot, listen ─────────┴─ lost the race: read what was written instead
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
from persist_engine.client.arguments import expect, expect_progress
from persist_engine.client.expiring import Expiring
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.dataflow.upsert.follow import Hydration, UpsertFollower
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
    """The commands are decided and what they came to is part of the shard, whose upper was then `upper`.

    `late`: commands that were dropped, because their time was already written when they came or by somebody faster.
    `maintenance`: what should be done soon.
    """

    upper: Antichain
    inserted: int
    retracted: int
    late: int = 0
    maintenance: Maintenance = NO_MAINTENANCE


class UpsertHandle(Expiring):
    """Upserts into one shard. Thread-safe: calls take turns. A context manager: leaving it expires reader and writer and
    throws the state away.

    Any number of handles, in any processes, may upsert into one shard; each key has one value or none at every time. The
    state is hydrated when first needed, and again after a failure that left it half way or a lease that ran out: a handle
    that raised Unavailable, Fenced or MissingBlob may be used on. Every call raises SchemaMismatch once the shard's schema
    has evolved past the handle's.

    Its reader follows what is written and lets since go up to the last time written: where neither the shard's retention nor
    another reader holds it, since moves on, and earlier times can no longer be told apart.
    """

    def __init__(
        self,
        writer: WriteHandle,
        open_reader: Callable[[], ReadHandle],
        open_store: OpenStore,
        *,
        on_hydration: Callable[[Hydration], None] | None = None,
    ) -> None:
        seed = np.frombuffer(writer.machine.env.random_bytes(32), np.uint64)
        self._writer = writer
        self._rows = UpsertRows(writer.schema, seed)
        self._shard = UpsertFollower(writer, open_reader, open_store, self._rows, seed=seed, on_hydration=on_hydration)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def shard_id(self) -> ShardId:
        """The shard."""
        return self._writer.shard_id

    @property
    def upper(self) -> Antichain:
        """Everything before it is in the handle's state; no round trip. {0} before the first hydration."""
        return self._shard.upper

    @property
    def state_bytes(self) -> int:
        """What the state takes, by its store's estimate; 0 before the first hydration."""
        return self._shard.state_bytes

    def hydrate(self) -> Antichain:
        """Bring the state up to all that was acknowledged before the call; the shard's upper. Every other call does so by
        itself: this one tells when the waiting is over. InvariantViolated, with the number of bad keys and their sums,
        when the shard was not written by upserts only.
        """
        with self._turn():
            return self._shard.current(self._writer.fetch_recent_upper()).persisted_frontier

    def upsert(
        self, commands: Any, *, progress: tuple[str, bytes] | None = None, expected_progress: bytes | None = None
    ) -> Upserted | ProgressMismatch:
        """Set each key to its value, or delete it where `val` is null, all at one time that the handle chooses: the clock's,
        unless the shard is further. A lost race is decided anew at a later time, so the commands always come to pass.

        Of several commands of one key the one with the greatest `order` counts, of equal ones the first; without that column
        the last.
        Linearized: the shard's contents after Upserted are those before with exactly these commands applied. `progress` as
        in `WriteHandle.compare_and_append`; ProgressMismatch: nothing was written.
        """
        expect_progress(progress, expected_progress)
        rows = self._rows.commands(commands, has_time=False)
        with self._turn():
            return self._write(rows, None, progress, expected_progress)

    def upsert_at(
        self,
        commands: Any,
        *,
        upper: TimeLike,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | None = None,
    ) -> Upserted | ProgressMismatch:
        """As `upsert`, at the times of the column `time`, all before `upper`, to which the shard's upper is moved. For
        replicas of one input and for replays: whoever is first writes a time, and commands at times that are written are
        dropped (`late`), so doing it again changes nothing. `progress` is stored also when all of it was written before.

        Within one time order keys decide, as in `upsert`; a later time wins whatever its order. UpdateBeyondUpper.
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
        """As `upsert` of all tables or batches of `commands` at one time, holding one of them at a time: for what does not
        fit in memory. Nothing is seen before all of it is.

        UpperMismatch: somebody else wrote meanwhile, and nothing was; the commands were consumed, so bring them again.
        Without an `order` column each table counts after those before it. InvalidUsage when orders of two tables do not
        compare: in one whole numbers, in another instants, or of another unit, or none.
        """
        expect(commands, Iterable, "commands", "an iterable of Arrow tables or record batches")
        with self._turn():
            return self._write_stream(commands)

    def expire(self) -> None:
        """Give up reader, writer and state. Idempotent."""
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
        """One call at a time, none after the end, and nothing left behind by one that fails."""
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
    ) -> Upserted | ProgressMismatch:
        shared = self._writer.shared_upper()
        while True:
            machine = self._shard.current(shared)
            machine.forget_commands()
            if upper is None:
                time = self._choose_time(machine)
                late = machine.on_commands(_at(rows, time))
                machine.on_input_frontier(Antichain.of(time + 1))
            else:
                late = machine.on_commands(rows)
                machine.on_input_frontier(upper)
            emission = machine.drain()
            if emission is None:
                outcome = self._store_progress(machine.persisted_frontier, progress, expected_progress)
            else:
                outcome = self._append(emission, progress, expected_progress)
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
        self, emission: Emission, progress: tuple[str, bytes] | None = None, expected_progress: bytes | None = None
    ) -> AppendOutcome:
        """Append at exactly the emission's lower. What is acknowledged is what was persisted: it need not be read."""
        outcome = self._writer.compare_and_append(
            self._rows.to_updates(emission.updates),
            expected_upper=emission.lower,
            new_upper=emission.upper,
            progress=progress,
            expected_progress=expected_progress,
        )
        if isinstance(outcome, Appended):
            try:
                self._shard.take_in(emission)
            except PersistError as error:  # the append stands: only the state has to be made anew
                text = "upsert state did not take in what was appended, it will be hydrated again: %s"
                _log.warning(text, error, extra={"shard": self.shard_id})
                self._shard.drop_state()
        return outcome

    def _store_progress(
        self, at: Antichain, progress: tuple[str, bytes] | None, expected_progress: bytes | None
    ) -> AppendOutcome:
        """What the commands come to was written before, up to `at`: only their progress may be missing."""
        if progress is None:
            return Appended(at)
        stored = self._writer.machine.refresh().progress.get(progress[0])
        if stored is not None and stored.token == progress[1]:
            return Appended(at)  # all of it is a repetition
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
        assert isinstance(outcome, UpperMismatch), "no progress was asked for"
        self._writer.discard(batch)
        return outcome

    def _open_time(self) -> tuple[UpsertMachine, Antichain]:
        """A time to write at, to which the shard's upper was brought."""
        # Fetched, not guessed: a stream is consumed before its append would tell that others had written before.
        shared = self._writer.fetch_recent_upper()
        at = MINIMUM
        while True:
            machine = self._shard.current(shared)
            machine.forget_commands()
            # Chosen once: the clock moves on while the frontier is brought there.
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
            raise InvalidUsage(f"shard {self.shard_id} is closed: its upper is empty, nothing can be upserted any more")
        time = max(self._writer.machine.env.now_ms(), lower)
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
