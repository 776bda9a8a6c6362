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
from typing import Any, Self

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import (
    Fenced,
    InvalidUsage,
    InvariantViolated,
    MissingBlob,
    PersistError,
    Unavailable,
    UpdateBeyondUpper,
)
from persist_engine.client.listen import Listen, Updates
from persist_engine.client.read import ReadHandle
from persist_engine.client.snapshot import SinceAhead
from persist_engine.client.upsert_rows import UpsertRows
from persist_engine.client.upsert_stores import OpenStore
from persist_engine.client.write import Appended, AppendOutcome, ProgressMismatch, UpperMismatch, WriteHandle
from persist_engine.flow.upsert import Emission, UpsertMachine
from persist_engine.flow.upsert_state import MergeStats, UpsertState
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.shard.applier import NO_MAINTENANCE

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hydration:
    """How far rebuilding the state has come: of at most `rows_max` rows at `as_of`, `rows` are merged."""

    as_of: int
    rows: int
    rows_max: int


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


class UpsertHandle:
    """Upserts into one shard. Thread-safe: calls take turns. A context manager: leaving it expires reader and writer and
    throws the state away.

    Any number of handles, in any processes, may upsert into one shard; each key has one value or none at every time. The
    state is hydrated when first needed, and again after a failure that left it half way or a lease that ran out: a handle
    that raised Unavailable, Fenced or MissingBlob may be used on.
    """

    def __init__(
        self,
        writer: WriteHandle,
        open_reader: Callable[[], ReadHandle],
        open_store: OpenStore,
        *,
        on_hydration: Callable[[Hydration], None] | None = None,
    ) -> None:
        env = writer.machine.env
        self._writer = writer
        self._open_reader = open_reader
        self._open_store = open_store
        self._on_hydration = on_hydration
        self._seed = np.frombuffer(env.random_bytes(32), np.uint64)
        self._rows = UpsertRows(writer.schema, self._seed)
        self._lock = threading.Lock()
        self._reader: ReadHandle | None = None
        self._listen: Listen | None = None
        self._state: UpsertState | None = None
        self._machine: UpsertMachine | None = None
        self._closed = False

    @property
    def shard_id(self) -> ShardId:
        """The shard."""
        return self._writer.shard_id

    @property
    def upper(self) -> Antichain:
        """Everything before it is in the handle's state; no round trip. {0} before the first hydration."""
        machine = self._machine
        return MINIMUM if machine is None else machine.persisted_frontier

    @property
    def state_bytes(self) -> int:
        """What the state takes, by its store's estimate; 0 before the first hydration."""
        state = self._state
        return 0 if state is None else state.store.size_bytes

    def hydrate(self) -> Antichain:
        """Bring the state up to all that was acknowledged before the call; the shard's upper. Every other call does so by
        itself: this one tells when the waiting is over. InvariantViolated, with the number of bad keys and their sums,
        when the shard was not written by upserts only.
        """
        with self._lock, self._undone_on_error():
            return self._current(self._writer.fetch_recent_upper()).persisted_frontier

    def upsert(
        self, commands: Any, *, progress: tuple[str, bytes] | None = None, expected_progress: bytes | None = None
    ) -> Upserted | ProgressMismatch:
        """Set each key to its value, or delete it where `val` is null, all at one time that the handle chooses: the clock's,
        unless the shard is further. A lost race is decided anew at a later time, so the commands always come to pass.

        Of several commands of one key the one with the greatest `order` counts, without that column the last.
        Linearized: the shard's contents after Upserted are those before with exactly these commands applied. `progress` as
        in `WriteHandle.compare_and_append`; ProgressMismatch: nothing was written.
        """
        rows = self._rows.commands(commands, has_time=False)
        with self._lock, self._undone_on_error():
            return self._write(rows, None, progress, expected_progress)

    def upsert_at(
        self,
        commands: Any,
        *,
        upper: Antichain,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | None = None,
    ) -> Upserted | ProgressMismatch:
        """As `upsert`, at the times of the column `time`, all before `upper`, to which the shard's upper is moved. For
        replicas of one input and for replays: whoever is first writes a time, and commands at times that are written are
        dropped (`late`), so doing it again changes nothing.

        Within one time order keys decide, as in `upsert`; a later time wins whatever its order. UpdateBeyondUpper.
        """
        rows = self._rows.commands(commands, has_time=True)
        last = max(rows.column("time").to_numpy().max(initial=-1), -1)
        if upper.less_equal(int(last)):
            raise UpdateBeyondUpper(f"command at time {last} is beyond upper {upper}", ts=int(last), upper=upper)
        with self._lock, self._undone_on_error():
            return self._write(rows, upper, progress, expected_progress)

    def upsert_stream(self, commands: Iterable[Any]) -> Upserted | UpperMismatch:
        """As `upsert` of all tables or batches of `commands` at one time, holding one of them at a time: for what does not
        fit in memory. Nothing is seen before all of it is.

        UpperMismatch: somebody else wrote meanwhile, and nothing was; the commands were consumed, so bring them again.
        Without an `order` column each table counts after those before it.
        """
        with self._lock, self._undone_on_error():
            return self._write_stream(commands)

    def expire(self) -> None:
        """Give up reader, writer and state. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_state()
            if self._reader is not None:
                self._reader.expire()
                self._reader = None
            self._writer.expire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.expire()
        except Unavailable as unavailable:
            if error is None:
                raise
            text = (
                "could not expire the upsert handle: %s"  # its leases will lapse; what matters is the error under way
            )
            _log.warning(text, unavailable, extra={"shard": self.shard_id})

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
            machine = self._current(shared)
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
                return Upserted(machine.persisted_frontier, 0, 0, late)
            outcome = self._append(emission, progress, expected_progress)
            match outcome:
                case Appended(maintenance=maintenance):
                    retracted = _retractions(emission.updates)
                    inserted = emission.updates.num_rows - retracted
                    return Upserted(emission.upper, inserted, retracted, late, maintenance)
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
                self._take_in(emission)
            except PersistError as error:  # the append stands: only the state has to be made anew
                text = "upsert state did not take in what was appended, it will be hydrated again: %s"
                _log.warning(text, error, extra={"shard": self.shard_id})
                self._drop_state()
        return outcome

    def _write_stream(self, commands: Iterable[Any]) -> Upserted | UpperMismatch:
        machine, at = self._open_time()
        rows = inserted = retracted = 0
        with self._writer.builder(at) as builder:
            for given in commands:
                table = self._rows.commands(given, has_time=False, first_row=rows)
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
        batch.delete()
        return outcome

    def _open_time(self) -> tuple[UpsertMachine, Antichain]:
        """A time to write at, to which the shard's upper was brought."""
        shared = self._writer.shared_upper()
        while True:
            machine = self._current(shared)
            machine.forget_commands()
            at = Antichain.of(self._choose_time(machine))
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

    # -- following the shard ------------------------------------------------------------------------------------------

    def _current(self, target: Antichain) -> UpsertMachine:
        """The machine, with all that was persisted before `target` in its state."""
        if self._closed:
            raise InvalidUsage(f"the upsert handle of shard {self.shard_id} was expired by its owner")
        if self._reader is not None and self._reader.since.is_empty():
            self._forget_reader()
        while True:
            machine = self._machine
            if machine is None or (self._listen is None and machine.persisted_frontier < target):
                machine = self._hydrate()
            if target <= machine.persisted_frontier:
                return machine
            try:
                self._follow(machine)
            except (Fenced, InvariantViolated, MissingBlob) as error:
                # What a lease that ran out unnoticed looks like. If it is something else, a new reader finds it too.
                text = "following the shard from %s failed, hydrating again: %s"
                _log.warning(text, machine.persisted_frontier, error, extra={"shard": self.shard_id})
                self._forget_reader()
                self._hydrate()

    def _forget_reader(self) -> None:
        """The lease ran out: others may have moved since past us, or collected what we were to read."""
        self._drop_state()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.expire()

    def _hydrate(self) -> UpsertMachine:
        """A new state from the shard's contents at a time at which they can be read."""
        self._drop_state()
        try:
            machine = self._hydrated()
        except Fenced:
            self._forget_reader()
            machine = self._hydrated()
        self._machine = machine
        return machine

    def _hydrated(self) -> UpsertMachine:
        if self._reader is None:
            self._reader = self._open_reader()
        as_of = self._readable_time(self._reader)
        self._state = state = self._open_state("state")
        machine = UpsertMachine(state, frontier=MINIMUM, provisional=lambda: self._open_state("provisional"))
        if as_of is not None:
            self._read_snapshot(machine, self._reader, as_of)
            self._listen = self._listen_from(as_of)
        return machine

    def _readable_time(self, reader: ReadHandle) -> int | None:
        """The last time written, or since when that is later; None when nothing was ever written."""
        while True:
            upper, since = self._writer.fetch_recent_upper().time, reader.since.time
            if upper is None or since is None:
                end = "upper" if upper is None else "since"
                raise InvalidUsage(f"shard {self.shard_id} cannot be upserted into: its {end} is empty")
            if upper == since == 0:
                return None
            as_of = max(since, upper - 1)
            if as_of < upper:
                return as_of
            # SUBTLE: since is at or past upper. Times before since cannot be told apart, so the contents are read at since,
            # once upper is past it: nothing but the frontier is appended (spec 20, bug 31).
            self._writer.compare_and_append([], expected_upper=Antichain.of(upper), new_upper=Antichain.of(as_of + 1))

    def _read_snapshot(self, machine: UpsertMachine, reader: ReadHandle, as_of: int) -> None:
        snapshot = reader.snapshot(as_of)
        if isinstance(snapshot, SinceAhead):
            raise Fenced(f"shard {self.shard_id} can no longer be read at {as_of}: its since is {snapshot.since}")
        with snapshot:
            rows, rows_max = 0, snapshot.rows_estimate
            self._tell(Hydration(as_of, rows, rows_max))
            for batch in snapshot.to_batches():
                self._count(machine.on_snapshot(self._rows.updates(pa.Table.from_batches([batch])), completed=False))
                rows += batch.num_rows
                self._tell(Hydration(as_of, rows, rows_max))
        nothing = self._rows.updates(self._writer.schema.updates_schema.empty_table())
        self._count(machine.on_snapshot(nothing, completed=True))
        machine.on_persisted_frontier(Antichain.of(as_of + 1))

    def _listen_from(self, as_of: int) -> Listen:
        assert self._reader is not None
        listen = self._reader.listen(as_of)
        if isinstance(listen, SinceAhead):
            raise Fenced(f"shard {self.shard_id} can no longer be followed from {as_of}: its since is {listen.since}")
        return listen

    def _follow(self, machine: UpsertMachine) -> None:
        """Take in the next batch that was appended, by whomever."""
        assert self._listen is not None
        events = self._listen.next_batch(timeout_s=None)
        assert events is not None, "waiting without a limit ends with a batch"
        for event in events:
            if isinstance(event, Updates):
                self._count(machine.on_persisted(self._rows.updates(event.table)))
            else:
                machine.on_persisted_frontier(event.frontier.join(machine.persisted_frontier))

    def _take_in(self, emission: Emission) -> None:
        """What this handle has just appended at the machine's frontier."""
        machine = self._machine
        assert machine is not None
        if emission.updates.num_rows:
            self._count(machine.on_persisted(emission.updates))
        machine.on_persisted_frontier(emission.upper)
        if emission.upper.time is None:
            return
        if self._listen is None:
            self._listen = self._listen_from(emission.upper.time - 1)
        self._listen.skip_to(emission.upper)

    # -- state --------------------------------------------------------------------------------------------------------

    def _open_state(self, name: str) -> UpsertState:
        return UpsertState(self._open_store(name), seed=self._seed)

    def _drop_state(self) -> None:
        machine, state = self._machine, self._state
        self._machine = self._state = self._listen = None
        if machine is not None:
            machine.forget_commands()
        if state is not None:
            state.store.close()

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Leave no command behind when a call fails, and no state that took in half of something."""
        try:
            yield
        except BaseException:
            machine = self._machine
            if machine is None or not machine.is_whole:
                self._drop_state()
            else:
                machine.forget_commands()
            raise

    def _count(self, stats: MergeStats) -> None:
        metrics, shard = self._writer.machine.metrics, str(self.shard_id)
        metrics.count("upsert_merged_updates", stats.updates)
        metrics.count("upsert_merged_inserts", stats.inserts)
        metrics.count("upsert_merged_deletes", stats.deletes)
        if self._state is not None:
            metrics.gauge("upsert_state_bytes", self._state.store.size_bytes, shard=shard)

    def _tell(self, hydration: Hydration) -> None:
        if self._state is not None:
            totals, shard = self._state.totals, str(self.shard_id)
            if totals.clamped:
                text = "hydrating at %s has come to less than nothing: the shard retracts what it never held"
                _log.warning(text, hydration.as_of, extra={"shard": self.shard_id})
            metrics = self._writer.machine.metrics
            metrics.gauge("upsert_rehydration_updates", totals.updates, shard=shard)
            metrics.gauge("upsert_rehydration_values", totals.values, shard=shard)
            metrics.gauge("upsert_rehydration_bytes", totals.size_bytes, shard=shard)
        if self._on_hydration is not None:
            self._on_hydration(hydration)


def _at(rows: pa.Table, time: int) -> pa.Table:
    return rows.append_column("time", pa.array(np.full(rows.num_rows, time, np.int64)))


def _time_of(frontier: Antichain) -> int:
    assert frontier.time is not None
    return frontier.time


def _retractions(updates: pa.Table) -> int:
    return int((updates.column("diff").to_numpy() < 0).sum())
