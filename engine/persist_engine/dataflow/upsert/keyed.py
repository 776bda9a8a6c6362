"""KeyedReads: what a shard holds of the keys of one call, read from the shard at that call (spec 16.12).

This is the alternative to `follow`, with the same machine: nothing is hydrated and nothing is kept, so upserts into any shard may begin at
once. Each call reads the row groups of parts that can hold one of its keys. This module decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import Fenced, InvalidUsage, InvariantViolated, MissingBlob
from persist_engine.base.settings import MIB
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.key_condition import condition_of
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.write.handle import WriteHandle
from persist_engine.dataflow.upsert.follow import Hydration, readable_time
from persist_engine.dataflow.upsert.rows import UpsertRows
from persist_engine.dataflow.upsert.stores import OpenStore
from persist_engine.flow.upsert import Emission, UpsertMachine
from persist_engine.flow.upsert_state import UpsertState
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.rows.nested.values import python_values
from persist_engine.rows.predicate import Predicate

_log = logging.getLogger(__name__)

#: The memory for the parts that a call reads. Only the rows with its keys stay in memory.
_READ_BYTES = 64 * MIB


@dataclass(slots=True)
class _Asked:
    """The keys of one call, and the machine that knows what the shard holds of them."""

    commands: pa.Table
    where: Predicate | None
    machine: UpsertMachine


class KeyedReads:
    """Like `UpsertFollower`, but for the keys of one call at a time. Not thread-safe."""

    keeps_all = False

    def __init__(
        self,
        writer: WriteHandle,
        open_reader: Callable[[], ReadHandle],
        open_store: OpenStore,
        rows: UpsertRows,
        *,
        on_hydration: Callable[[Hydration], None] | None,
    ) -> None:
        self._writer, self._open_reader, self._open_store = writer, open_reader, open_store
        self._rows, self._on_hydration = rows, on_hydration
        self._reader: ReadHandle | None = None
        self._asked: _Asked | None = None
        self.upper = MINIMUM
        """The frontier before which everything was known at the last call."""
        self.state_bytes = 0

    def current(self, target: Antichain, commands: pa.Table | None) -> UpsertMachine:
        """The machine, with everything that was persisted before `target` for the keys of `commands` (None: for no keys). Raises the errors
        of `UpsertFollower.current`, but InvariantViolated only for keys of `commands`.
        """
        asked = self._asked
        wanted = self._rows.no_commands() if commands is None else commands
        try:
            machine = self._read(wanted) if asked is None or asked.commands is not commands else asked.machine
            while machine.persisted_frontier < target:
                machine = self._followed(target)
            self._let_go(machine.persisted_frontier)
        except (Fenced, MissingBlob) as error:
            # A lease that expired unnoticed looks like this, and is not an error. If there is another cause, the new reader raises it.
            _log.info("reading the keys again: %s", error, extra={"shard": self._writer.shard_id})
            self.expire()
            machine = self._read(wanted)
        self.upper = machine.persisted_frontier
        self._writer.check_newest_schema()
        return machine

    def take_in(self, emission: Emission) -> None:
        """Notes this process's own append. Its updates are read when a later call needs them."""
        self.drop_state()
        self.upper = emission.upper
        self._let_go(self.upper)

    def tidy_up(self) -> None:
        """Forgets the keys of a failed call."""
        self.drop_state()

    def drop_state(self) -> None:
        """Forgets the keys of the last call."""
        self._asked = None

    def expire(self) -> None:
        """Forgets the keys and expires the reader. Idempotent."""
        self.drop_state()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.expire()

    def _let_go(self, upper: Antichain) -> None:
        """Lets since advance to the last time written."""
        if self._reader is not None and upper.time:
            self._reader.maybe_downgrade_since(Antichain.of(upper.newest_complete))

    def _read(self, commands: pa.Table) -> UpsertMachine:
        """A machine that knows the keys of `commands` at a readable time."""
        if self._reader is not None and self._reader.since.is_empty():
            self.expire()
        if self._reader is None:
            self._reader = self._open_reader()
        state = UpsertState(self._open_store("keys"), seed=self._rows.seed)
        if (upper := self._writer.fetch_recent_upper()).is_empty():  # every time is written
            self._asked = _Asked(commands, None, UpsertMachine(state, frontier=upper))
            return self._asked.machine
        as_of = readable_time(self._writer, self._reader, upper)
        where = condition_of(commands.column("key"), self._writer.schema) if commands.num_rows else None
        self._asked = None
        if as_of is None:
            machine = UpsertMachine(state, frontier=MINIMUM)
        elif not commands.num_rows:
            machine = UpsertMachine(state, frontier=Antichain.of(as_of + 1))
        else:
            machine = UpsertMachine(state, frontier=MINIMUM)
            self._read_snapshot(machine, self._reader, as_of, commands, where)
        self._asked = _Asked(commands, where, machine)
        return machine

    def _read_snapshot(
        self, machine: UpsertMachine, reader: ReadHandle, as_of: int, commands: pa.Table, where: Predicate | None
    ) -> None:
        snapshot = reader.snapshot(as_of, where=where)
        if isinstance(snapshot, SinceAhead):
            raise Fenced(
                f"shard {self._writer.shard_id} can no longer be read at {as_of}: its since is {snapshot.since}"
            )
        with snapshot:
            rows, rows_max, fetched = 0, snapshot.rows_estimate, list[int]()
            wanted = self._rows.hashes_to_find(commands)
            self._report(Hydration(as_of, rows, rows_max))
            for batch in snapshot.to_batches(memory_bytes=_READ_BYTES, on_fetched=fetched.append):
                machine.on_snapshot(self._rows.updates_among(pa.Table.from_batches([batch]), wanted), completed=False)
                rows += batch.num_rows
                self._report(Hydration(as_of, rows, rows_max, sum(fetched)))
        self._reach(machine, Antichain.of(as_of + 1), commands)

    def _followed(self, target: Antichain) -> UpsertMachine:
        """The machine of the last call, extended by what was written before `target`. Avoids another read of its keys if possible."""
        asked, reader = self._asked, self._reader
        assert asked is not None
        assert reader is not None
        known, last = asked.machine.persisted_frontier, target.time
        if not known.time or last is None or not asked.commands.num_rows:
            return self._read(asked.commands)
        changes = reader.changes(known.newest_complete, target.newest_complete, where=asked.where)
        if isinstance(changes, SinceAhead):
            return self._read(asked.commands)
        asked.machine.forget_commands()
        wanted = self._rows.hashes_to_find(asked.commands)
        with changes:
            for batch in changes.to_batches():
                rows = self._rows.updates_among(pa.Table.from_batches([batch]), wanted)
                asked.machine.on_persisted(rows)
        self._reach(asked.machine, target, asked.commands)
        return asked.machine

    def _reach(self, machine: UpsertMachine, frontier: Antichain, commands: pa.Table) -> None:
        try:
            machine.on_persisted_frontier(frontier)
        except InvariantViolated as error:
            wanted = pa.array(error.detail.get("hashes", ()), commands.column("hash").type)
            bad = commands.filter(pc.is_in(commands.column("hash"), wanted)).column("key")
            names = "; ".join(dict.fromkeys(str(key)[:200] for key in python_values(bad)))
            raise InvariantViolated(
                f"{error} (shard {self._writer.shard_id} before {frontier}; keys: {names}); append updates that give each of "
                "these keys one value or none",
                **error.detail,
            ) from error

    def _report(self, hydration: Hydration) -> None:
        if self._on_hydration is not None:
            self._on_hydration(hydration)


def refuse_streams(shard: object) -> InvalidUsage:
    """The error of a stream on a handle that keeps no values."""
    return InvalidUsage(
        f"shard {shard}: the upsert backend shard reads the keys of one table at a time, and keeps none for the next table of a "
        "stream: use memory, rocksdb or auto"
    )
