"""The upsert operator, fed back (spec 16.9): turns timed commands (key, value or nothing, order) into updates of the shard,
decided against what the shard itself holds. Pure: events in, emissions out. A thread, a Spark task and a test are three shells
around it.

State comes only from the persisted output of all writers. It is exact for the contents before the persisted frontier, and an
emission changes nothing until it comes back. An emission covers [persisted frontier, input frontier) and must be appended at
exactly its lower, or not at all. If another writer was faster, its output arrives, commands at the times that it wrote are
dropped, and the rest is decided anew. So replicas of one input may run side by side, restarts need no recovery of their own, and
hydrating is the same as catching up.

Partial mode (spec 16.8): if one time has too many commands to wait for, `drain_partially` decides those that have arrived while
the time is still open. These decisions are provisional. They are kept apart, with order keys and tombstones, so that a later
command of that time with a lower or equal order key changes nothing, and are discarded when the time is written.

Columns: `hash` (32 bytes, the hash of the key), `key` (any type; passed through), `value` (whole words; null deletes), `time`,
and `order` (int64; a null sorts lowest) for commands or `diff` for updates. A typed shard has no place for errors as values
(spec 16.10): a key or value that does not fit the schema is refused before it reaches this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.flow.upsert_state import Kind, MergeStats, Records, UpsertState
from persist_engine.flow.upsert_store import KEY_WORDS
from persist_engine.flow.word_rows import Bools, Int64s, UInt64s, Words
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.rows.nested.values import python_value


@dataclass(frozen=True, slots=True)
class Emission:
    """The updates of the commands in [lower, upper). Append it at `lower`, or not at all. `updates` may be empty: then only the
    frontier moves. `outcome` is for `UpsertMachine.on_appended`.
    """

    lower: Antichain
    upper: Antichain
    updates: pa.Table
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of the distinct `keys` before an emission (settled) and their values after it (null: none)."""

    keys: UInt64s
    before: Records
    after: pa.LargeBinaryArray


class UpsertMachine:
    """One instance per shard and shell. Not thread-safe. `frontier` is where `state` starts: the state holds all updates before
    it, or none. `provisional` opens a state for partial mode.
    """

    def __init__(
        self, state: UpsertState, *, frontier: Antichain, provisional: Callable[[], UpsertState] | None = None
    ) -> None:
        self._state = state
        self._persisted = self._input = frontier
        self._is_whole = True
        self._stash: list[pa.Table] = []
        self._open_provisional = provisional
        self._provisional: UpsertState | None = None
        """Decisions at the time of the persisted frontier."""

    @property
    def persisted_frontier(self) -> Antichain:
        """The frontier before which the state holds all persisted updates."""
        return self._persisted

    @property
    def is_whole(self) -> bool:
        """Whether the state is exact at the persisted frontier: no updates past it were received."""
        return self._is_whole

    @property
    def stashed(self) -> int:
        """The number of waiting commands."""
        return sum(int(table.num_rows) for table in self._stash)

    @property
    def output_frontier(self) -> Antichain:
        """The frontier before which no future emission has an update: the least stashed time, or the input frontier."""
        times = (int(pc.min(table.column("time")).as_py()) for table in self._stash)
        return self._input.meet(Antichain.of(least)) if (least := min(times, default=-1)) >= 0 else self._input

    # -- persisted updates --------------------------------------------------------------------------------------------

    def on_persisted(self, updates: pa.Table) -> MergeStats:
        """Receive updates of the shard at or past the persisted frontier. No command is decided until `on_persisted_frontier`
        moves past all of them.
        """
        self._is_whole = False
        return self._state.merge(*columns_of(updates))

    def on_snapshot(self, updates: pa.Table, *, completed: bool) -> MergeStats:
        """Like `on_persisted`, for the snapshot with which hydrating starts."""
        self._is_whole = False
        return self._state.merge_snapshot_chunk(*columns_of(updates), completed=completed)

    def on_persisted_frontier(self, frontier: Antichain) -> int:
        """All updates before `frontier` were received. Returns the number of commands dropped because their time is already written.

        Raises InvariantViolated if a key then has neither one value nor none, because not only upserts wrote the shard.
        """
        check(self._persisted <= frontier, f"the persisted frontier went back from {self._persisted} to {frontier}")
        self._state.check_settled()
        self._is_whole = True
        if frontier == self._persisted:
            return 0
        self._persisted = frontier
        self._input = self._input.join(frontier)
        self._forget_provisional()
        before = self.stashed
        self._stash = _not_before(self._stash, frontier)
        return before - self.stashed

    def on_appended(self, emission: Emission) -> MergeStats:
        """`emission`, the last one drained, was persisted unchanged and no other writer committed in between. Equivalent to
        `on_persisted` with its updates and `on_persisted_frontier` with its upper, but takes the keys' contents from the
        outcome instead of adding them up.
        """
        check(
            self._is_whole and self._persisted == emission.lower,
            f"an emission from {emission.lower} was appended where the state is at {self._persisted}",
        )
        outcome = emission.outcome
        self._is_whole = False
        if outcome is None:
            stats = self._state.merge(*columns_of(emission.updates))
        else:
            put = self._state.settle(outcome.keys, outcome.after, outcome.before)
            diffs = emission.updates.column("diff").to_numpy()
            inserts = int((diffs > 0).sum())
            stats = MergeStats(len(diffs), inserts, len(diffs) - inserts, put.values_diff, put.size_diff)
        self.on_persisted_frontier(emission.upper)
        return stats

    # -- input --------------------------------------------------------------------------------------------------------

    def on_commands(self, commands: pa.Table) -> int:
        """Receive commands at times not yet closed. Among equal (key, time, order), the first one received counts. Returns the
        number of commands dropped because their time is already written.
        """
        kept = _not_before([commands], self._persisted)
        self._stash += kept
        return int(commands.num_rows - sum(table.num_rows for table in kept))

    def values(self, commands: pa.Table) -> pa.LargeBinaryArray:
        """The value of each command's key in the state; null if it has none. Requires `is_whole`. Raises InvariantViolated as `drain`
        does.
        """
        check(self._is_whole, "values are read while persisted updates are partly received")
        keys = hashes_of(commands)
        return self._decoded(keys, self._state.multi_get(keys), commands, np.arange(len(keys)))

    def on_input_frontier(self, frontier: Antichain) -> None:
        """No more commands arrive before `frontier`. An older frontier is ignored, because replicas may be slower."""
        self._input = self._input.join(frontier)

    def forget_commands(self) -> None:
        """Drop stashed and provisional commands and reset the input frontier. None of them will be appended."""
        self._stash = []
        self._input = self._persisted
        self._forget_provisional()

    # -- output -------------------------------------------------------------------------------------------------------

    def drain(self) -> Emission | None:
        """Return the emission of all complete commands; None while nothing is complete or persisted updates are partly received.

        Changes nothing, so it may be called again. Commands are dropped when their time comes back as written.
        """
        if not self._is_whole or self._input <= self._persisted:
            return None
        ready = _before(self._stash, self._input)
        if ready is None:
            return Emission(self._persisted, self._input, _NO_UPDATES)
        _, updates, outcome = self._decide(ready)
        return Emission(self._persisted, self._input, updates, outcome)

    def drain_partially(self) -> pa.Table | None:
        """Return the updates of the commands received so far at the persisted frontier, while more may arrive at that time. These
        commands leave the stash. The caller must append their updates together with those of later drains of this time. None if
        persisted updates are partly received or there is nothing to decide.
        """
        check(self._open_provisional is not None, "partial draining needs a provisional state")
        time = self._persisted.time
        if not self._is_whole or time is None or self._input != self._persisted:
            return None
        now = Antichain.of(time + 1)
        ready = _before(self._stash, now)
        if ready is None:
            return None
        self._stash = _not_before(self._stash, now)
        if self._provisional is None:
            assert self._open_provisional is not None
            self._provisional = self._open_provisional()
        decided, updates, _ = self._decide(ready)
        self._remember(decided)
        return updates

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self, commands: pa.Table) -> tuple[pa.Table, pa.Table, Outcome | None]:
        """Return (the commands that count, by (key, time); their updates; the outcome for their keys, if it follows from the
        state alone).
        """
        winners, first_of_key = _winners(commands)
        if winners is not None:
            commands = commands.take(pa.array(winners))
        heads = np.flatnonzero(first_of_key)
        keys = hashes_of(commands)
        distinct = keys if len(heads) == len(keys) else keys[heads]
        before = self._state.multi_get(distinct)
        known = self._decoded(distinct, before, commands, heads)
        if self._provisional is None:
            last_of_key = np.append(first_of_key[1:], True)
            after = commands.column("value").combine_chunks()
            if len(heads) < len(keys):
                after = after.take(pa.array(np.flatnonzero(last_of_key)))
            return commands, _corrections(commands, first_of_key, known), Outcome(distinct, before, after)
        known, outdated = self._overlaid(self._provisional.multi_get(distinct), known, heads, commands)
        if outdated.any():
            # The key's later commands start from the known value. So drop the row, and the key's next row becomes its head.
            kept = np.flatnonzero(~outdated)
            numbers = (np.cumsum(first_of_key) - 1)[kept]
            commands = commands.take(pa.array(kept))
            first_of_key = np.append(True, numbers[1:] != numbers[:-1])[: len(kept)]
            known = known.take(pa.array(numbers[first_of_key]))
        return commands, _corrections(commands, first_of_key, known), None

    def _overlaid(
        self, provisional: Records, known: pa.LargeBinaryArray, heads: Int64s, commands: pa.Table
    ) -> tuple[pa.LargeBinaryArray, Bools]:
        """Apply decisions at the open time. Returns (the known value of each head's key, whether each command is outdated)."""
        outdated = np.zeros(commands.num_rows, np.bool_)
        at_open_time = commands.column("time").to_numpy()[heads] == self._persisted.time
        orders, ordered = _orders(commands)
        outdated[heads] = at_open_time & provisional.present & _at_least(provisional, orders[heads], ordered[heads])
        values = provisional.payloads.to_arrow(provisional.kinds == Kind.VALUE)
        return pc.if_else(pa.array(provisional.present), values, known), outdated

    def _decoded(self, keys: UInt64s, records: Records, commands: pa.Table, heads: Int64s) -> pa.LargeBinaryArray:
        try:
            return self._state.decode(keys, records)
        except InvariantViolated as error:
            rows = [int(heads[row]) for row in error.detail.get("rows", ())]
            names = "; ".join(str(python_value(commands.column("key")[row])) for row in rows)
            raise InvariantViolated(f"{error} (keys {names})", **error.detail) from error

    def _forget_provisional(self) -> None:
        if self._provisional is not None:
            self._provisional.store.close()
            self._provisional = None

    def _remember(self, decided: pa.Table) -> None:
        assert self._provisional is not None
        keys = hashes_of(decided)
        orders, ordered = _orders(decided)
        records = self._provisional.ordered_records(decided.column("value").combine_chunks(), orders, ordered)
        self._provisional.multi_put(keys, records, self._provisional.multi_get(keys))


def hashes_of(table: pa.Table) -> UInt64s:
    """Return the column `hash` as four words per row, without a copy if it is contiguous."""
    column = table.column("hash").combine_chunks()
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros((0, KEY_WORDS), np.uint64)
    words = np.frombuffer(buffer, np.uint64, count=(column.offset + len(column)) * KEY_WORDS)
    return words.reshape(-1, KEY_WORDS)[column.offset :]


def columns_of(updates: pa.Table) -> tuple[UInt64s, Words, Int64s]:
    """Return updates in the form that `UpsertState.merge` takes."""
    values = Words.from_arrow(updates.column("value").combine_chunks())
    return hashes_of(updates), values, updates.column("diff").to_numpy()


_NO_UPDATES = pa.table(
    {
        "hash": pa.nulls(0, pa.binary(KEY_WORDS * 8)),
        "key": pa.nulls(0, pa.null()),
        "value": pa.nulls(0, pa.large_binary()),
        "time": pa.nulls(0, pa.int64()),
        "diff": pa.nulls(0, pa.int64()),
    }
)


def _winners(commands: pa.Table) -> tuple[Int64s | None, Bools]:
    """Return (the rows that count, in order of (key, time); whether each begins a key). Among the rows of one key and time, the one
    with the greatest order counts or, among equal orders, the first. The rows are None if all keys are distinct, so that every row
    counts in its place.
    """
    keys, times = hashes_of(commands), commands.column("time").to_numpy()
    lead = np.sort(keys[:, 0])
    if not (lead[1:] == lead[:-1]).any():
        return None, np.ones(len(keys), np.bool_)
    orders, ordered = _orders(commands)
    by_rank = (~orders, ~ordered, times)  # greatest first, nulls last; lexsort is stable
    order = np.lexsort((*by_rank, keys[:, 0]))
    ranked = keys[order]
    new_key = np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1))
    if (new_key[1:] & (ranked[1:, 0] == ranked[:-1, 0])).any():
        order = np.lexsort((*by_rank, *keys.T))
        ranked = keys[order]
        new_key = np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1))
    new_time = np.append(True, times[order][1:] != times[order][:-1])
    wins = new_key | new_time
    return order[wins], new_key[wins]


def _orders(commands: pa.Table) -> tuple[Int64s, Bools]:
    column = commands.column("order").combine_chunks()
    ordered = column.is_valid().to_numpy(zero_copy_only=False)
    return pc.fill_null(column, 0).to_numpy(zero_copy_only=False), ordered


def _at_least(known: Records, orders: Int64s, ordered: Bools) -> Bools:
    """Whether the known order key is greater than or equal to the command's. Equal ones are skipped; otherwise a replay would
    flip values (spec 20, bug 32).
    """
    known_order, known_ordered = known.header(1), known.ordered
    return (
        (known_ordered & ~ordered) | (known_ordered & ordered & (known_order >= orders)) | (~known_ordered & ~ordered)
    )


def _corrections(commands: pa.Table, first_of_key: Bools, known: pa.LargeBinaryArray) -> pa.Table:
    """Retract what each command replaces (the known value of its key, or the value of the previous command) and insert its own
    value. If both are equal, emit nothing. `known` has one entry for each row that begins a key.
    """
    values = commands.column("value").combine_chunks()
    replaced = known
    if len(known) < len(values):
        before = np.arange(-1, len(values) - 1) + len(known)
        before[first_of_key] = np.arange(len(known))
        replaced = pa.concat_arrays([known, values]).take(pa.array(before))
    same = pc.fill_null(pc.equal(replaced, values), False)  # noqa: FBT003
    parts = []
    for value, diff in ((replaced, -1), (values, 1)):
        rows = pc.indices_nonzero(pc.and_not(value.is_valid(), same))
        picked = commands.select(["hash", "key", "time"]).take(rows)
        diffs = pa.array(np.full(len(rows), diff, np.int64))
        parts.append(picked.add_column(2, "value", value.take(rows)).append_column("diff", diffs))
    return pa.concat_tables(parts)


def _before(tables: list[pa.Table], frontier: Antichain) -> pa.Table | None:
    """Return the rows with times before `frontier` as one table; None if there are none."""
    if not tables:
        return None
    table = pa.concat_tables(tables).combine_chunks()
    if _is_past_all(frontier):
        return table
    early = pc.less(table.column("time"), pa.scalar(frontier.time, pa.int64()))
    if not pc.all(early).as_py():
        table = table.filter(early)
    return table if table.num_rows else None


def _not_before(tables: list[pa.Table], frontier: Antichain) -> list[pa.Table]:
    """Return the rows with times at or past `frontier`."""
    if _is_past_all(frontier):
        return []
    bound = frontier.time
    kept = []
    for table in tables:
        late = table.column("time").to_numpy() >= bound
        if late.any():
            kept.append(table if late.all() else table.filter(pa.array(late)))
    return kept


def _is_past_all(frontier: Antichain) -> bool:
    return frontier.time is None or frontier.time > DATA_TIME_MAX
