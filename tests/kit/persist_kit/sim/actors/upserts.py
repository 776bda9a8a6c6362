"""Upserts in a simulated history: several handles on one shard, with all their methods. Defines the rule that each commit applies its
commands to the shard's values, exactly once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
from persist_engine.base.errors import AmbiguousAppend, BatchExpired, Fenced, InvalidUsage, MissingBlob
from persist_engine.client.write.outcomes import ProgressMismatch, UpperMismatch
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import Upserted, UpsertHandle
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.testing.oracle import Oracle

from persist_kit.sim.actors.actor import Actor
from persist_kit.sim.calls import CLOSED
from persist_kit.sim.decided import Decided
from persist_kit.world import SCHEMA

_KEYS = 5
Values = dict[int, str]


@dataclass(frozen=True)
class Command:
    """One command. `name` None deletes. Among the commands of one key at one time, the greatest order wins."""

    key: int
    name: str | None
    order: int
    time: int = 0


def _after(values: Mapping[int, str], commands: list[Command], *, time: int | None) -> Values:
    """`values` after all commands, or after those up to `time`."""
    out = dict(values)
    for command in sorted(commands, key=lambda command: (command.time, command.order)):
        if time is None or command.time <= time:
            if command.name is None:
                out.pop(command.key, None)
            else:
                out[command.key] = command.name
    return out


@dataclass
class _Fate:
    """The outcome of a call. `late`: the number of commands that were too late for its commit; None before the commit."""

    late: int | None = None
    changes: int = 0


class Upserting(Decided):
    """One call. `upper`: its end, for commands with their own times. None: the handle chooses one time."""

    def __init__(self, commands: list[Command], upper: int | None = None) -> None:
        self.commands = commands
        self.upper = upper
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
        return f"upsert of {self.commands} to {self.upper}"


def _values(oracle: Oracle, time: int) -> Values | None:
    """The value of each key at `time`. None when a key has several values."""
    rows = oracle.contents(time)
    values: Values = dict(list(rows))  # type: ignore[arg-type]  # (id, name)
    return values if len(values) == len(rows) and all(count == 1 for count in rows.values()) else None


class Upserter(Actor):
    """Upserts: in some histories at times of the clock, in others the same commands as all other upserters, at given times."""

    handle: UpsertHandle

    def open(self) -> None:
        self.handle = open_upsert(self.client, self.history.shard_id, SCHEMA, purpose=self.name)

    def close(self) -> None:
        if self.rng.random() < 0.7:
            self.handle.expire()

    def operate(self) -> None:
        by_clock = self.history.plan.seed % 2 == 0
        ways = [self.upsert, self.stream] if by_clock else [self.agree, self.agree]
        try:
            self.rng.choices([*ways, self.upsert_at, self.hydrate, self.restart], weights=[4, 2, 3, 1, 1])[0]()
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
        self._carry_out(Upserting(commands), lambda: self.handle.upsert(_table(commands, has_time=False)))

    def stream(self) -> None:
        """Upserts in two tables, of which the later wins."""
        commands = self._commands(0, 1)
        cut = self.rng.randint(0, len(commands))
        tables = [_table(part, has_time=False).drop_columns(["order"]) for part in (commands[:cut], commands[cut:])]
        self._carry_out(Upserting(commands), lambda: self.handle.upsert_stream(tables))

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
            Command(rng.randrange(_KEYS), rng.choice(["a", "b", "c", None]), order, time)
            for time in range(24)
            for order in range(rng.choice([0, 1, 2]))
        ]
        end = self.rng.randint(1, 24)
        begin = self.rng.choice([0, max(0, end - 8)])
        upper = self.history.client_upper(self.client).time
        begin = begin if upper is None else min(begin, upper)  # a replica must not skip times
        self._at([command for command in commands if begin <= command.time < end], end)

    def hydrate(self) -> None:
        with self.history.scheduler.doing(Upserting([])):
            self.handle.hydrate()

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
                self.rng.choice(["a", "b", "c", None]),
                order,
                self.rng.randrange(lower, upper),
            )
            for order in range(self.rng.randint(1, 4))
        ]

    def _at(self, commands: list[Command], end: int) -> None:
        shuffled = self.rng.sample(commands, len(commands))
        table = _table(shuffled, has_time=True)
        self._carry_out(Upserting(commands, end), lambda: self.handle.upsert_at(table, upper=Antichain.of(end)))

    def _carry_out(self, call: Upserting, run: Callable[[], Upserted | UpperMismatch | ProgressMismatch]) -> None:
        scheduler = self.history.scheduler
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
            case UpperMismatch():
                if fate.changes:
                    scheduler.fail(f"{call} was refused, and has happened")
            case _:
                scheduler.fail(f"{call} answered {answer}")


def _table(commands: list[Command], *, has_time: bool) -> pa.Table:
    key = pa.array([{"id": command.key} for command in commands], SCHEMA.key_type)
    val = pa.array([None if command.name is None else {"name": command.name} for command in commands], SCHEMA.val_type)
    columns = {"key": key, "val": val, "order": pa.array([command.order for command in commands], pa.int64())}
    if has_time:
        columns["time"] = pa.array([command.time for command in commands], pa.int64())
    return pa.table(columns)
