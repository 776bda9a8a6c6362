"""Upserts in a simulated history: several handles on one shard, with all their methods and with or without values of their own. Defines
the rule that each commit applies its commands to the shard's values, exactly once.

Feeds are upserted by the process that owns their range of keys. Several processes may believe this of themselves: each stores the number of
the batch as the progress of the feed, and expects the number before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
from persist_engine.base.errors import AmbiguousAppend, BatchExpired, Fenced, InvalidUsage, MissingBlob, SchemaMismatch
from persist_engine.client.write.outcomes import ProgressMismatch, UpperMismatch
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import Upserted, UpsertHandle
from persist_engine.dataflow.upsert.stores import Backend
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.rows.schema import Schema
from persist_engine.testing.oracle import Oracle

from persist_kit.sim.actors.actor import Actor
from persist_kit.sim.actors.schemas import LARGE, SCHEMAS, SMALL, Data, cut, position_of
from persist_kit.sim.calls import CLOSED
from persist_kit.sim.decided import Decided
from persist_kit.world import SCHEMA

_KEYS = 5
#: The feeds, each with its range of keys.
_FEEDS = {"feed1": range(3), "feed2": range(3, _KEYS)}
_NAMES: tuple[Data | None, ...] = (("a",), ("b",), ("c",), None)
Values = dict[int, Data]


@dataclass(frozen=True)
class Command:
    """One command. `value`, the name and the columns of newer schemas, is None to delete. Among the commands of one key at one time, the
    greatest order wins.
    """

    key: int
    value: Data | None
    order: int
    time: int = 0


def _after(values: Mapping[int, Data], commands: list[Command], *, time: int | None) -> Values:
    """`values` after all commands, or after those up to `time`."""
    out = dict(values)
    for command in sorted(commands, key=lambda command: (command.time, command.order)):
        if time is None or command.time <= time:
            if command.value is None:
                out.pop(command.key, None)
            else:
                out[command.key] = command.value
    return out


@dataclass
class _Fate:
    """The outcome of a call. `late`: the number of commands that were too late for its commit; None before the commit."""

    late: int | None = None
    changes: int = 0


class Upserting(Decided):
    """One call. `upper`: its end, for commands with their own times. None: the handle chooses one time."""

    moves_alone = True

    def __init__(
        self,
        commands: list[Command],
        upper: int | None = None,
        *,
        progress: tuple[str, bytes] | None = None,
        expected: bytes | None = None,
    ) -> None:
        self.commands = commands
        self.upper = upper
        self.progress, self.expected_progress = progress, expected
        self._fates: dict[int, _Fate] = {}

    def fate(self, oracle: Oracle) -> _Fate:
        """The outcome of the call in the log of `oracle`."""
        return self._fates.setdefault(id(oracle), _Fate())

    def forked(self, oracle: Oracle, copy: Oracle) -> None:
        """See Decided."""
        self._fates[id(copy)] = replace(self.fate(oracle))

    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """See Decided. A commit may also only advance the frontier, to a time for a read or a write."""
        before = _values(oracle, lower - 1)
        if before is None:
            return "a key had several values"
        timely = [command for command in self.commands if self.upper is None or lower <= command.time]
        marks = {lower, upper - 2, upper - 1, *(command.time for command in timely if self.upper is not None)}
        times = sorted(time for time in marks if lower <= time < min(upper, CLOSED))
        found = [_values(oracle, time) for time in times]
        wanted = [self._wanted(before, timely, time, upper) for time in times]
        is_decided = upper == self.upper or self.upper is None
        if is_decided and found == wanted:
            fate = self.fate(oracle)
            fate.late = len(self.commands) - len(timely)
            fate.changes += any(values != before for values in wanted)
            return "the commands are applied once more" if fate.changes > 1 else None
        if all(values == before for values in found):
            return None
        return f"of {before} and {timely} comes {found[-1]}, not {wanted[-1]}"

    def _wanted(self, before: Values, timely: list[Command], time: int, upper: int) -> Values:
        if self.upper is None:
            return _after(before, timely, time=None) if time == upper - 1 else before
        return _after(before, timely, time=time)

    def __repr__(self) -> str:
        return f"upsert of {self.commands} to {self.upper} with {self.progress}"


def _values(oracle: Oracle, time: int) -> Values | None:
    """The value of each key at `time`. None when a key has several values."""
    rows = oracle.contents(time)
    values: Values = {data[0]: data[1:] for data in rows}  # type: ignore[index]  # a row
    return values if len(values) == len(rows) and all(count == 1 for count in rows.values()) else None


class Upserter(Actor):
    """Upserts: in some histories at times of the clock, in others the same commands as all other upserters, at given times."""

    handle: UpsertHandle

    def open(self) -> None:
        self._backend: Backend = self.rng.choice(["memory", "shard"])
        self._positions: dict[str, bytes | None] = {}
        """The progress of each feed after the last batch that this process upserted, or found."""
        shard_id = self.history.shard_id
        self.client.initialise(shard_id, SCHEMA)
        self.schema = self.client.schema(shard_id)
        self.handle = open_upsert(self.client, shard_id, self.schema, backend=self._backend, purpose=self.name)

    def close(self) -> None:
        if self.rng.random() < 0.7:
            self.handle.expire()

    def operate(self) -> None:
        by_clock = self.history.plan.seed % 2 == 0
        stream = self.upsert if self._backend == "shard" else self.stream
        ways = [self.upsert, stream, self.feed] if by_clock else [self.agree] * 3
        try:
            others = [self.upsert_at, self.hydrate, self.evolve if self.history.plan.evolves else self.restart]
            self.rng.choices([*ways, *others], weights=[3, 2, 5, 3, 1, 2])[0]()
        except SchemaMismatch as error:
            if self.client.schema(self.history.shard_id) == self.schema:
                raise
            self.history.scheduler.note(f"{self.name} must begin again: {error}")
            self._open()
        except (Fenced, MissingBlob) as error:
            self.history.scheduler.note(f"{self.name} hydrates next time: {error}")
        except AmbiguousAppend:
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
            self._open()
        except BatchExpired:
            self.history.staged_too_early += 1
        except InvalidUsage:
            head = self.history.witness.head
            if not self.history.witness.is_past() and (head is None or not head.trace.upper.is_empty()):
                raise

    def upsert(self) -> None:
        """Upserts at a time that the handle chooses."""
        commands = self._commands(0, 1)
        self._carry_out(Upserting(commands), lambda: self.handle.upsert(_table(commands, self.schema, has_time=False)))

    def stream(self) -> None:
        """Upserts in two tables, of which the later wins."""
        commands = self._commands(0, 1)
        cut = self.rng.randint(0, len(commands))
        tables = [
            _table(part, self.schema, has_time=False).drop_columns(["order"])
            for part in (commands[:cut], commands[cut:])
        ]
        self._carry_out(Upserting(commands), lambda: self.handle.upsert_stream(tables))

    def feed(self) -> None:
        """Upserts the batch of a feed that follows the last one that this process knows. If another process has continued the feed
        meanwhile, nothing may be written.
        """
        name = self.rng.choice(list(_FEEDS))
        if name not in self._positions or self.rng.random() < 0.2:
            self._positions[name] = self._stored(name)
        stored = self._positions.pop(name)  # unknown until the call answers
        number = 0 if stored is None else int(stored) + 1
        drawn = random.Random(f"{name} {number} {self.history.plan.seed}")  # noqa: S311 - repeatable on purpose
        commands = [
            Command(drawn.choice(_FEEDS[name]), drawn.choice(_NAMES), order) for order in range(drawn.randint(1, 3))
        ]
        call = Upserting(commands, progress=(name, str(number).encode()), expected=stored)
        table = _table(commands, self.schema, has_time=False)
        if self._carry_out(
            call,
            lambda: self.handle.upsert(table, progress=call.progress, expected_progress=call.expected_progress),
        ):
            self._positions[name] = str(number).encode()

    def _stored(self, feed: str) -> bytes | None:
        begun = self.history.witness.seqno
        stored = self.client.progress(self.history.shard_id, feed)
        token = None if stored is None else stored.token
        self.history.witness.saw_progress(feed, token, since_seqno=begun)
        return token

    def upsert_at(self) -> None:
        """Upserts own commands at times around the upper."""
        upper = self.history.client_upper(self.client).time
        if upper is None or upper >= DATA_TIME_MAX - 10:
            return
        lower = max(0, upper - self.rng.choice([0, 0, 2]))
        end = lower + self.rng.randint(1, 5)
        self._at(self._commands(lower, end), end)

    def agree(self) -> None:
        """Upserts the input that all replicas share, from its beginning to some time."""
        rng = random.Random(f"agreed {self.history.plan.seed}")  # noqa: S311 - repeatable on purpose
        commands = [
            Command(rng.randrange(_KEYS), rng.choice(_NAMES), order, time)
            for time in range(24)
            for order in range(rng.choice([0, 1, 2]))
        ]
        end = self.rng.randint(1, 24)
        begin = self.rng.choice([0, max(0, end - 8)])
        upper = self.history.client_upper(self.client).time
        begin = begin if upper is None else min(begin, upper)  # a replica must not skip times
        progress, expected = None, None
        if self.rng.random() < 0.4:
            expected = self._stored("agreed")
            progress = ("agreed", f"{end} by {self.name} {self.left}".encode())
        self._at([command for command in commands if begin <= command.time < end], end, progress, expected)

    def hydrate(self) -> None:
        with self.history.scheduler.doing(Upserting([])):
            self.handle.hydrate()

    def evolve(self) -> None:
        """Evolves the schema. This handle, and those of other processes, must not retract rows under their schema any more."""
        step = position_of(self.client.schema(self.history.shard_id)) + 1
        if step < len(SCHEMAS):
            self.client.evolve_schema(self.history.shard_id, SCHEMAS[step])

    def restart(self) -> None:
        try:
            self.handle.expire()
        finally:
            self._open()

    def _commands(self, lower: int, upper: int) -> list[Command]:
        """Random commands with rising orders, except for some that are out of order on purpose."""
        return [
            Command(
                self.rng.randrange(_KEYS),
                self._value(),
                order,
                self.rng.randrange(lower, upper),
            )
            for order in range(self.rng.randint(1, 4))
        ]

    def _value(self) -> Data | None:
        """A value of the handle's schema."""
        value = self.rng.choice(_NAMES)
        sizes = [None, SMALL, *([LARGE] if self.schema == SCHEMAS[-1] else [])]
        added = [self.rng.choice(each) for each in ([None, "x", "x"], sizes)][: len(self.schema.val) - 1]
        return None if value is None else cut((*value, *added))

    def _at(
        self,
        commands: list[Command],
        end: int,
        progress: tuple[str, bytes] | None = None,
        expected: bytes | None = None,
    ) -> None:
        shuffled = self.rng.sample(commands, len(commands))
        table = _table(shuffled, self.schema, has_time=True)
        self._carry_out(
            Upserting(commands, end, progress=progress, expected=expected),
            lambda: self.handle.upsert_at(
                table, upper=Antichain.of(end), progress=progress, expected_progress=expected
            ),
        )

    def _carry_out(self, call: Upserting, run: Callable[[], Upserted | UpperMismatch | ProgressMismatch]) -> bool:
        """Makes the call and judges its answer. Returns whether the commands were applied."""
        scheduler, begun = self.history.scheduler, self.history.witness.seqno
        try:
            with scheduler.doing(call):
                answer = run()
        except BatchExpired:
            if call.fate(self.history.witness.oracle).changes:
                scheduler.fail(f"{call} was refused, and has happened")
            raise
        fate = call.fate(self.history.witness.oracle)
        match answer:
            case Upserted(late=late):
                self.history.upserts += 1
                scheduler.note(f"{call} is done, {late} late")
                is_all_late = call.upper is not None and late == len(call.commands)
                if fate.late != late and not is_all_late:
                    scheduler.fail(
                        f"{call} is done, {late} commands came too late: {fate.late} were, in what is committed"
                    )
                if call.progress is not None:
                    self.history.witness.saw_progress(*call.progress, since_seqno=begun)
            case UpperMismatch():
                if fate.changes:
                    scheduler.fail(f"{call} was refused, and has happened")
            case ProgressMismatch(current=stored) if call.progress is not None:
                if fate.changes:
                    scheduler.fail(f"{call} was refused, and has happened")
                token = None if stored is None else stored.token
                if token == call.expected_progress:
                    scheduler.fail(f"{call} is refused for progress {token!r}, which it expects")
                self.history.witness.saw_progress(call.progress[0], token, since_seqno=begun)
            case _:
                scheduler.fail(f"{call} answered {answer}")
        return isinstance(answer, Upserted)


def _table(commands: list[Command], schema: Schema, *, has_time: bool) -> pa.Table:
    key = pa.array([{"id": command.key} for command in commands], schema.key_type)
    values = [
        None if each.value is None else dict(zip(schema.val.names, each.value, strict=False)) for each in commands
    ]
    val = pa.array(values, schema.val_type)
    columns = {"key": key, "val": val, "order": pa.array([command.order for command in commands], pa.int64())}
    if has_time:
        columns["time"] = pa.array([command.time for command in commands], pa.int64())
    return pa.table(columns)
