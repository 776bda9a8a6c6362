"""UpsertFollower: keeps upsert state equal to the contents of a shard (spec 16.9).

This module owns the leased reader, the listener and the life of the state. It hydrates the state from a snapshot at a readable time,
follows appends, and takes in this process's own appends. If one of these failed half way, it starts over. It decides nothing, and writes
nothing except the frontier, when necessary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import Fenced, InvalidUsage, InvariantViolated, MissingBlob, PersistError
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.listen import Listen, Updates
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.write.handle import WriteHandle
from persist_engine.dataflow.upsert.rows import HASH_TYPE, UpsertRows
from persist_engine.dataflow.upsert.stores import MeteredStore, OpenStore
from persist_engine.flow.upsert import Emission, UpsertMachine, hashes_of
from persist_engine.flow.upsert_state import MergeStats, UpsertState, group
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.nested.values import python_values

_log = logging.getLogger(__name__)

#: The limit for a key in an error message, because a key may have megabytes.
_NAME_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Hydration:
    """The progress of rebuilding the state at `as_of`, or of reading the keys of a call: `rows` of at most `rows_max` rows were merged."""

    as_of: int
    rows: int
    rows_max: int
    fetched_bytes: int = 0
    """The bytes fetched from the blob store so far to read the keys of a call."""


class UpsertFollower:
    """The upsert state of one shard and the machine on it. Not thread-safe."""

    keeps_all = True
    """Whether the state has all keys, and not only those of the commands."""

    def __init__(
        self,
        writer: WriteHandle,
        open_reader: Callable[[], ReadHandle],
        open_store: OpenStore,
        rows: UpsertRows,
        *,
        on_hydration: Callable[[Hydration], None] | None,
    ) -> None:
        self._writer = writer
        self._open_reader = open_reader
        self._open_store = open_store
        self._rows = rows
        self._on_hydration = on_hydration
        self._reader: ReadHandle | None = None
        self._listen: Listen | None = None
        self._store: MeteredStore | None = None
        self._state: UpsertState | None = None
        self._machine: UpsertMachine | None = None

    @property
    def shard_id(self) -> ShardId:
        """The id of the shard."""
        return self._writer.shard_id

    @property
    def upper(self) -> Antichain:
        """The frontier before which the state has everything; {0} without a state."""
        machine = self._machine
        return MINIMUM if machine is None else machine.persisted_frontier

    @property
    def state_bytes(self) -> int:
        """The size of the state, by its store's estimate; 0 without a state."""
        store = self._store
        return 0 if store is None else store.size_bytes

    def current(self, target: Antichain, _commands: pa.Table | None) -> UpsertMachine:
        """The machine, with everything persisted before `target` in its state, whatever the commands are. Raises SchemaMismatch when the
        shard's schema has evolved past the writer's. Raises InvariantViolated when the shard was not written by upserts only.
        """
        if self._reader is not None and self._reader.since.is_empty():
            self._forget_reader()
        while True:
            machine = self._machine
            if machine is None or (self._listen is None and machine.persisted_frontier < target):
                machine = self._hydrate()
            try:
                if target <= machine.persisted_frontier:
                    self._let_go(machine)
                    self._writer.check_newest_schema()  # this process knows the schemas of everything received so far
                    return machine
                self._follow(machine)
            except (Fenced, InvariantViolated, MissingBlob) as error:
                # A lease that expired unnoticed looks like this, and is not an error. If there is another cause, the new reader raises it.
                text = "following the shard from %s ended, hydrating again: %s"
                _log.info(text, machine.persisted_frontier, error, extra={"shard": self.shard_id})
                self._forget_reader()
                self._hydrate()

    def take_in(self, emission: Emission) -> None:
        """Takes in this process's own append at the machine's frontier without reading it back."""
        machine = self._machine
        assert machine is not None
        self._merge(partial(machine.on_appended, emission))
        if emission.upper.time is None:
            return
        if self._listen is None:
            self._listen = self._listen_from(emission.upper.newest_complete)
        self._listen.skip_to(emission.upper)

    def tidy_up(self) -> None:
        """Cleans up after a failed call: forgets its commands, and drops the state when it is incomplete or its store failed."""
        machine, store = self._machine, self._store
        if machine is None or store is None or store.has_failed or not machine.is_whole:
            self.drop_state()
        else:
            machine.forget_commands()

    def drop_state(self) -> None:
        """Drops the state. The next use hydrates it again."""
        machine, store, listen = self._machine, self._store, self._listen
        self._machine = self._state = self._store = self._listen = None
        if listen is not None:
            listen.close()
        if machine is not None:
            machine.forget_commands()
        if store is not None:
            store.close()

    def expire(self) -> None:
        """Drops the state and expires the reader. Idempotent."""
        self._forget_reader()

    # -- hydrating and following --------------------------------------------------------------------------------------

    def _let_go(self, machine: UpsertMachine) -> None:
        """Lets since advance to the last persisted time. A handle that only writes does not read further, and must not block compaction
        (spec 20, bug 9).
        """
        upper = machine.persisted_frontier
        if self._reader is not None and upper.time:
            self._reader.maybe_downgrade_since(Antichain.of(upper.newest_complete))

    def _forget_reader(self) -> None:
        """Drops the state and expires the reader. When the lease lapsed, since may have moved past the reader's, or the blobs that it was
        about to read may have been collected.
        """
        self.drop_state()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.expire()

    def _hydrate(self) -> UpsertMachine:
        """Makes a new state from the shard's contents at a readable time."""
        began_s = self._writer.machine.env.monotonic_s()
        self.drop_state()
        try:
            machine = self._hydrated()
        except Fenced:
            self._forget_reader()
            machine = self._hydrated()
        self._machine = machine
        env = self._writer.machine.env
        self._writer.machine.metrics.observe_s("upsert_rehydration", env.monotonic_s() - began_s)
        return machine

    def _hydrated(self) -> UpsertMachine:
        if self._reader is None:
            self._reader = self._open_reader()
        as_of = readable_time(self._writer, self._reader, self._writer.fetch_recent_upper())
        self._store = self._open_store("state")
        self._state = UpsertState(self._store, seed=self._rows.seed)
        machine = UpsertMachine(self._state, frontier=MINIMUM, provisional=self._provisional_state)
        if as_of is not None:
            self._read_snapshot(machine, self._reader, as_of)
            self._listen = self._listen_from(as_of)
        return machine

    def _read_snapshot(self, machine: UpsertMachine, reader: ReadHandle, as_of: int) -> None:
        snapshot = reader.snapshot(as_of)
        if isinstance(snapshot, SinceAhead):
            raise Fenced(f"shard {self.shard_id} can no longer be read at {as_of}: its since is {snapshot.since}")
        with snapshot:
            rows, rows_max = 0, snapshot.rows_estimate
            self._report(Hydration(as_of, rows, rows_max))
            for batch in snapshot.to_batches():
                updates = self._rows.updates(pa.Table.from_batches([batch]))
                self._merge(partial(machine.on_snapshot, updates, completed=False))
                rows += batch.num_rows
                self._report(Hydration(as_of, rows, rows_max))
        nothing = self._rows.updates(self._writer.schema.updates_schema.empty_table())
        self._merge(partial(machine.on_snapshot, nothing, completed=True))
        try:
            machine.on_persisted_frontier(Antichain.of(as_of + 1))
        except InvariantViolated as error:
            raise self._named(error, reader, as_of) from error

    def _named(self, error: InvariantViolated, reader: ReadHandle, as_of: int) -> InvariantViolated:
        """`error`, with the shard and with some of the bad keys in the form that users know. Reads the keys again, because hashes mean
        nothing outside this handle.
        """
        wanted = pa.array(error.detail.get("hashes", ()), HASH_TYPE)
        names: list[str] = []
        try:
            snapshot = reader.snapshot(as_of)
            if isinstance(snapshot, SinceAhead):
                return error
            with snapshot:
                for batch in snapshot.to_batches() if len(wanted) else ():
                    updates = self._rows.updates(pa.Table.from_batches([batch]))
                    bad = updates.filter(pc.is_in(updates.column("hash"), wanted))
                    firsts, _ = group(hashes_of(bad))
                    bad = bad if firsts is None else bad.take(pa.array(firsts))
                    names += (str(key)[:_NAME_CHARS_MAX] for key in python_values(bad.column("key")))
        except PersistError:
            _log.warning("could not read the bad keys again", exc_info=True, extra={"shard": self.shard_id})
        keys_text = "; ".join(dict.fromkeys(names)) or "not found again"
        text = (
            f"{error} (shard {self.shard_id} at {as_of}; keys: {keys_text}); append updates that give each of these keys one "
            "value or none"
        )
        return InvariantViolated(text, **error.detail)

    def _listen_from(self, as_of: int) -> Listen:
        assert self._reader is not None
        listen = self._reader.listen(as_of)
        if isinstance(listen, SinceAhead):
            raise Fenced(f"shard {self.shard_id} can no longer be followed from {as_of}: its since is {listen.since}")
        return listen

    def _follow(self, machine: UpsertMachine) -> None:
        """Takes in the next appended batch, from any process."""
        assert self._listen is not None
        events = self._listen.next_batch(timeout_s=None)
        assert events is not None, "waiting without a limit ends with a batch"
        for event in events:
            if isinstance(event, Updates):
                self._merge(partial(machine.on_persisted, self._rows.updates(event.table)))
            else:
                machine.on_persisted_frontier(event.frontier.join(machine.persisted_frontier))

    def _provisional_state(self) -> UpsertState:
        return UpsertState(self._open_store("provisional"), seed=self._rows.seed)

    def _merge(self, merge: Callable[[], MergeStats]) -> None:
        """Calls `merge`, which merges into the state, and records its counts and its time."""
        env, metrics, shard = self._writer.machine.env, self._writer.machine.metrics, str(self.shard_id)
        began_s = env.monotonic_s()
        stats = merge()
        metrics.observe_s("upsert_merge", env.monotonic_s() - began_s)
        metrics.count("upsert_merged_updates", stats.updates)
        metrics.count("upsert_merged_inserts", stats.inserts)
        metrics.count("upsert_merged_deletes", stats.deletes)
        if self._store is not None:
            metrics.gauge("upsert_state_bytes", self._store.size_bytes, shard=shard)
            metrics.gauge("upsert_spilled", self._store.is_spilled, shard=shard)

    def _report(self, hydration: Hydration) -> None:
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


def readable_time(writer: WriteHandle, reader: ReadHandle, recent: Antichain) -> int | None:
    """The last time written before `recent`, an upper just fetched, or the reader's since if that is later. None when nothing was ever
    written. Raises InvalidUsage for a closed shard.
    """
    while True:
        upper, since = recent.time, reader.since.time
        if upper is None or since is None:
            reader.check_open()
            end = "upper" if upper is None else "since"
            raise InvalidUsage(f"shard {writer.shard_id} cannot be upserted into: its {end} is empty")
        if upper == since == 0:
            return None
        as_of = max(since, Antichain(upper).newest_complete)
        if as_of < upper:
            return as_of
        # SUBTLE: since is at or past upper. Times before since are indistinguishable, so the contents can only be read at since, once upper
        # is past it. So append the frontier alone (spec 20, bug 31).
        writer.compare_and_append([], expected_upper=Antichain.of(upper), new_upper=Antichain.of(as_of + 1))
        recent = writer.fetch_recent_upper()
