"""Tables in a simulated history: several databases, some shared by the threads of a process, that write, read and change one table.

Defines the rules: each call changes the contents that its commit finds exactly as specified, at one time and at most once; a transaction
happens once, however often it is repeated; and `expected` is the time of the write before.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from persist_engine.base.errors import (
    AmbiguousAppend,
    BatchExpired,
    Conflict,
    Fenced,
    InvalidUsage,
    MissingBlob,
    SchemaMismatch,
)
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.queries import retained_since
from persist_engine.model.state import Clock
from persist_engine.table.database import Database
from persist_engine.table.feed import ChangeFeed
from persist_engine.table.notes.transactions import SINK_PREFIX
from persist_engine.table.table import Table
from persist_engine.table.writing import Written
from persist_engine.testing.oracle import Oracle

from persist_kit.sim.actors.actor import Actor
from persist_kit.sim.actors.schemas import ALTERATIONS, LARGE, SMALL, Data, added_names, cut, narrowed, position_of
from persist_kit.sim.calls import CLOSED
from persist_kit.sim.decided import Decided
from persist_kit.sim.locks import SimThread
from persist_kit.world import SCHEMA

if TYPE_CHECKING:
    from persist_kit.sim.simulation import History

_KEYS, _NAMES = 4, "ab"
_APP = "loader"
#: How long a feed follows before another thread closes it.
_FOLLOWED_MS = (50, 300, 900)
Contents = Counter[Hashable]


@dataclass
class Fate:
    """The part of a call, or of a transaction, that a log holds. `net`: the rows that the commit added and removed."""

    commits: int = 0
    time: int | None = None
    net: tuple[int, int] = (0, 0)


class Fates:
    """The fate in each log, because consensus may be copied meanwhile."""

    def __init__(self) -> None:
        self._fates: dict[int, Fate] = {}

    def of(self, oracle: Oracle) -> Fate:
        """The fate in the log of `oracle`."""
        return self._fates.setdefault(id(oracle), Fate())

    def forked(self, oracle: Oracle, copied: Oracle) -> None:
        """See Decided."""
        self._fates[id(copied)] = replace(self.of(oracle))


@dataclass(frozen=True)
class Transaction:
    """One version of the application that all actors represent, and its call."""

    version: int
    rows: tuple[Data, ...]
    fates: Fates


class Tabling(Decided):
    """One call. `wanted`: the contents that it makes from the contents that it finds."""

    def __init__(
        self,
        what: str,
        wanted: Callable[[Contents], Contents],
        *,
        expected: int | None = None,
        txn: Transaction | None = None,
    ) -> None:
        self._what, self.wanted, self._expected, self.txn = what, wanted, expected, txn
        self.fates = Fates()

    def forked(self, oracle: Oracle, copy: Oracle) -> None:
        """See Decided."""
        self.fates.forked(oracle, copy)
        if self.txn is not None:
            self.txn.fates.forked(oracle, copy)

    def moves(self, sink: str, stored: bytes | None, token: bytes) -> bool:
        """See Decided."""
        if self.txn is None or sink != SINK_PREFIX + _APP:
            return False
        return int(token) == self.txn.version > (-1 if stored is None else int(stored))

    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """See Decided. A commit may also only complete times, before which nothing could be read."""
        last = min(upper, CLOSED) - 1
        before, after = oracle.contents(lower - 1), oracle.contents(last)
        if oracle.contents(last - 1) != before and last > lower:
            return f"rows change before {last}, the time of the write"
        if after == before:
            return None
        wanted = self.wanted(before)
        if after != wanted:
            return f"of {dict(before)} comes {dict(after)}, not {dict(wanted)}"
        if self._expected is not None and max(lower - 1, 0) != max(self._expected, 0):
            return f"the last write was expected at {self._expected}, and everything before {lower} was written"
        added, removed = after - before, before - after
        for fate in (self.fates.of(oracle), *(() if self.txn is None else (self.txn.fates.of(oracle),))):
            fate.commits, fate.time = fate.commits + 1, last
            fate.net = added.total(), removed.total()
            if fate.commits > 1:
                return "it is done once more"
        return None

    def __repr__(self) -> str:
        return self._what


class Tabler(Actor):
    """Writes to a table in every way, reads it, follows it, alters it and maintains it."""

    table: Table

    def __init__(self, history: History, name: str, operations: int) -> None:
        super().__init__(history, name, operations)
        self._unsettled: Transaction | None = None

    def open(self) -> None:
        history = self.history
        clock: Clock = "counter" if history.plan.seed % 3 == 0 else "ms"
        self.client.initialise(history.shard_id, SCHEMA, retain_ms=history.plan.retain_ms or 0, clock=clock)
        is_shared = self.rng.random() < 0.5
        database = self.host.databases[0] if is_shared and self.host.databases else None
        self._owned = None
        if database is None:
            database = Database(self.client, maintain=self.rng.random() < 0.5)
            if is_shared:
                self.host.databases.append(database)
            else:
                self._owned = database
        self.table = database.table(history.shard_id)

    def close(self) -> None:
        if self._owned is not None and self.rng.random() < 0.5:
            self._owned.drain(1.0)
        if self._owned is not None:
            self._owned.close()

    def operate(self) -> None:
        writes = [self.append, self.upsert, self.delete, self.overwrite]
        # In most histories all actors prefer the same write, so that conflicts are often with writes of the same kind.
        preferred = random.Random(f"preferred {self.history.plan.seed}").randrange(len(writes) + 1)  # noqa: S311 - repeatable on purpose
        writes += writes[preferred : preferred + 1] * 5
        others = [self.scan, self.scan, self.follow, self.changes, self.look_after, self.alter]
        try:
            self.rng.choice(writes if self.rng.random() < 0.6 else others)()
        except (Fenced, MissingBlob) as error:
            self.history.scheduler.note(f"{self.name} lost its lease: {error}")
        except BatchExpired:
            self.history.staged_too_early += 1
        except AmbiguousAppend:
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
        except SchemaMismatch as error:
            if not self.history.plan.evolves:
                raise
            self.history.scheduler.note(f"{self.name} must begin again: {error}")
        except InvalidUsage:
            head = self.history.witness.head
            if head is None or not head.trace.upper.is_empty():
                raise

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self) -> None:
        unsettled, self._unsettled = self._unsettled, None
        rows = self._rows() if unsettled is None else list(unsettled.rows)
        txn = self._transaction(rows) if unsettled is None else unsettled
        given = None if txn is None else (_APP, txn.version)
        call = Tabling(f"append of {rows}", lambda before: before + Counter(rows), txn=txn)
        self._unsettled = txn  # until the call answers, because an application repeats a call with an unknown outcome
        self._carry_out(call, lambda: self.table.append(self._frame(rows), txn=given))
        self._unsettled = None

    def upsert(self) -> None:
        rows = [self._row(key) for key in self.rng.sample(range(_KEYS), self.rng.randint(1, 3))]
        keys = {row[0] for row in rows}

        def wanted(before: Contents) -> Contents:
            return _only(before, lambda key, _: key not in keys) + Counter(rows)

        self._carry_out(Tabling(f"upsert of {rows}", wanted), lambda: self.table.upsert(self._frame(rows)))

    def delete(self) -> None:
        where, fulfils = self._condition()
        call = Tabling(f"delete where {where}", lambda before: _only(before, lambda *data: not fulfils(*data)))
        self._carry_out(call, lambda: self.table.delete(where))

    def overwrite(self) -> None:
        rows = self._rows()
        expected: Any = "any"
        if self.rng.random() < 0.5:
            expected = self.table.last_time
            self.history.scheduler.pause(self.rng.choice([0, 10, 100]))
        known = None if expected == "any" else -1 if expected is None else expected
        call = Tabling(f"overwrite with {rows}, expected {expected}", lambda _: Counter(rows), expected=known)
        try:
            self._carry_out(call, lambda: self.table.overwrite(self._frame(rows), expected=expected))
        except Conflict as error:
            self.history.scheduler.note(f"{self.name}: {error}")
            if call.fates.of(self.history.witness.oracle).commits:
                self.history.scheduler.fail(f"{call} is refused, and has happened")
            if known is None or error.detail.get("current") == known:
                self.history.scheduler.fail(f"{call} is refused: {error}")

    def _carry_out(self, call: Tabling, write: Callable[[], Written]) -> None:
        scheduler = self.history.scheduler
        begun = scheduler.steps
        try:
            with scheduler.doing(call):
                written = write()
        except (BatchExpired, InvalidUsage) as error:
            if call.fates.of(self.history.witness.oracle).commits and not isinstance(error, AmbiguousAppend):
                scheduler.fail(f"{call} was refused, and has happened: {error}")
            raise
        self.history.table_writes += 1
        witness = self.history.witness
        fate = call.fates.of(witness.oracle)
        scheduler.note(f"{call}: {written}")
        if fate.commits != (written.time is not None) or fate.time != written.time:
            scheduler.fail(f"{call} answers {written}, and committed {fate}")
        if written.time is not None and (written.inserted, written.deleted) != fate.net:
            scheduler.fail(f"{call} says {written}, and changed {fate.net}")
        if written.is_repeat or call.txn is not None:
            self._check_done(call)
        elif written.time is None and self.history.plan.disaster is None:
            found = witness.contents_since(begun)
            if all(call.wanted(before) != before for before in found):
                scheduler.fail(f"{call} changed nothing; meanwhile the contents were {[dict(each) for each in found]}")

    def _check_done(self, call: Tabling) -> None:
        """The log must have the version of the transaction, or a later one."""
        head = self.history.witness.head
        assert head is not None
        stored = head.progress.get(SINK_PREFIX + _APP)
        if call.txn is None or stored is None or int(stored.token) < call.txn.version:
            self.history.scheduler.fail(f"{call} counts as done, and {stored} is stored")

    def _transaction(self, rows: list[Data]) -> Transaction | None:
        if self.rng.random() < 0.5:
            return None
        known = self.history.transactions
        if known and self.rng.random() < 0.3:
            return known[-1]  # another process repeats it
        known.append(Transaction(len(known), tuple(rows), Fates()))
        return known[-1]

    def _rows(self) -> list[Data]:
        return [self._row(self.rng.randrange(_KEYS)) for _ in range(self.rng.randint(1, 4))]

    def _row(self, key: int) -> Data:
        """A row of the newest schema that this process knows."""
        fields = self.table.schema
        sizes = [None, SMALL]
        if "size" in fields.names and fields.field("size").type == pa.int64():
            sizes.append(LARGE)
        added: dict[str, list[Any]] = {"note": [None, "x"], "size": sizes}
        return cut((key, self.rng.choice(_NAMES), *(self.rng.choice(added[name]) for name in fields.names[2:])))

    def _frame(self, rows: list[Data]) -> Any:
        """The rows as a frame, with all columns of the newest schema that this process, or the one that made the rows, knows."""
        width = max(len(self.table.schema.names), *(len(each) for each in rows))
        names = ("id", "name", *added_names(width))
        columns = [[*each, *[None] * (len(names) - len(each))] for each in rows]
        frame = pa.table({name: [each[index] for each in columns] for index, name in enumerate(names)})
        return frame.to_reader(max_chunksize=2) if self.rng.random() < 0.3 else frame

    # -- reading ------------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        begun = self.history.scheduler.steps
        where, fulfils = self._condition() if self.rng.random() < 0.5 else (None, lambda *_: True)
        scan = self.table.scan(where)
        if scan.time is None:
            return
        upper = Antichain.empty() if scan.time == DATA_TIME_MAX else Antichain.of(scan.time + 1)
        self.history.witness.saw_upper(upper, since_step=begun, what="scan")
        for _ in range(self.rng.randint(1, 2)):
            self.history.scheduler.pause(self.rng.choice([0, 0, 50, 300]))
            try:
                found = scan.to_arrow()
            except InvalidUsage:
                if self._is_readable(scan.time):
                    raise
                return
            truth = narrowed(_only(self.history.witness.oracle.contents(scan.time), fulfils), found.num_columns)
            rows = Counter(cut(each.values()) for each in found.to_pylist())
            if rows != truth:
                self.history.scheduler.fail(f"scan at {scan.time} where {where}: {rows} instead of {dict(truth)}")

    def changes(self) -> None:
        """The changes between two times that were written."""
        upto = self.table.last_time
        since = self.history.witness.head.trace.since.time if self.history.witness.head else None
        if upto is None or since is None or upto < since:
            return
        since = self.rng.choice([since, max(since, upto - self.rng.randint(0, 3))])
        feed = self.table.changes(since, upto=upto)
        try:
            found = feed.to_arrow()
        except InvalidUsage:
            if self._is_readable(since):
                raise
            return
        self._judge([found], since=since, upto=upto, what="changes")

    def follow(self) -> None:
        """Follows new writes until another thread closes the feed."""
        since = self.table.last_time
        if since is None:
            return
        feed = self.table.changes(since, follow=True)
        closer = SimThread(self.history.scheduler, target=lambda: self._close_later(feed), name="closer")
        closer.start()
        rows: list[pa.Table] = []
        try:
            for batch in feed.to_batches():
                rows.append(pa.Table.from_batches([batch]))
        except InvalidUsage:
            if self._is_readable(since):
                raise
            return
        finally:
            feed.close()
        if rows and rows[-1].num_rows:
            self._judge(rows, since=since, upto=rows[-1].column("_time")[-1].as_py(), what="feed that follows")

    def _close_later(self, feed: ChangeFeed) -> None:
        self.history.scheduler.pause(self.rng.choice(_FOLLOWED_MS))
        feed.close()

    def _judge(self, tables: list[pa.Table], *, since: int, upto: int, what: str) -> None:
        found: Counter[tuple[Hashable, int]] = Counter()
        width = min(table.schema.field("_after").type.num_fields for table in tables)
        for each in (each for table in tables for each in table.to_pylist()):
            self.history.table_changes += 1
            for row, diff in ((each["_before"], -1), (each["_after"], 1)):
                if row is not None:
                    found[cut(row.values(), width), each["_time"]] += diff
        found = Counter({key: diff for key, diff in found.items() if diff})
        what = f"{what} of {self.name}"
        self.history.witness.listened(found, as_of=since, frontier=Antichain.of(upto + 1), what=what, width=width)

    # -- looking after it ---------------------------------------------------------------------------------------------

    def look_after(self) -> None:
        self.rng.choice([self.table.optimize, self.table.vacuum, self.table.describe, self.table.history])()

    def alter(self) -> None:
        ways: list[dict[str, Any]] = [{"bloom": ["name"]}, {"bloom": []}]
        if self.history.plan.retain_ms is not None:
            ways.append({"retain": self.rng.choice(["none", 1, 20])})
        step = position_of(self.client.schema(self.history.shard_id))
        if self.history.plan.evolves and step < len(ALTERATIONS):
            ways += [ALTERATIONS[step]] * 4
        chosen = self.rng.choice(ways)
        try:
            self.table.alter(**chosen)
        except InvalidUsage:  # another process has added it
            if "add" not in chosen or position_of(self.client.schema(self.history.shard_id)) <= step:
                raise

    def _condition(self) -> tuple[str, Callable[[int, str], bool]]:
        key, name = self.rng.randrange(_KEYS), self.rng.choice(_NAMES)
        return self.rng.choice(
            [
                (f"id = {key}", lambda each, _: each == key),
                (f"id >= {key}", lambda each, _: each >= key),
                (f"name = '{name}'", lambda _, each: each == name),
            ]
        )

    def _is_readable(self, time: int) -> bool:
        """Whether a table must still be able to read the time: neither since nor the retention has passed it."""
        head = self.history.witness.head
        if head is None:
            return False
        return (retained_since(head) or head.trace.since).less_equal(time)


def _only(before: Contents, is_kept: Callable[[int, str], bool]) -> Contents:
    return Counter({data: count for data, count in before.items() if is_kept(data[0], data[1])})  # type: ignore[index]  # a row
