"""The actors of a simulated history that write and read data (`upkeep` has the others).

Each actor uses public handles only, reports their answers to the witness, and draws all its actions from the seed. It lives on a `Host`.
When the host crashes, the actor continues on the next incarnation with new handles. It ends after its last operation.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from persist_engine.base.errors import (
    AmbiguousAppend,
    BatchExpired,
    Fenced,
    ForkedLog,
    InvalidUsage,
    InvariantViolated,
    MissingBlob,
    ShardLost,
    ShardNotFound,
    Unavailable,
)
from persist_engine.client.client import PersistClient
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.listen import Listen, Progress, Updates
from persist_engine.client.read.snapshot import SinceAhead, Snapshot
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.model.commands import SchemaEvolved
from persist_engine.model.frontier import Antichain
from persist_engine.model.maintenance import Maintenance
from persist_engine.rows.schema import Schema
from persist_engine.testing.oracle import Update
from persist_engine.work.perform import perform

from persist_kit.sim.scheduler import Process
from persist_kit.sim.witness import CLOSED, Append, frontier_of
from persist_kit.world import SCHEMA, row

if TYPE_CHECKING:
    from persist_kit.sim.simulation import History

WAIT_S = 0.05
#: The schema that SCHEMA evolves to in some histories. Contents are compared by the fields of SCHEMA.
WIDER = Schema(key=SCHEMA.key, val=pa.schema([*SCHEMA.val, ("note", pa.string())]))
#: The first id of rows that several writers share. The ids of one append's own rows are below.
_AGREED = 1_000_000


@dataclass
class Host:
    """One incarnation of a process. Its actors share its client, and lose it together."""

    process: Process
    client: PersistClient


@dataclass(frozen=True)
class Letter:
    """A staged batch that one process sends to another."""

    lower: int
    upper: int
    updates: list[Update]
    data: bytes


class Actor(ABC):
    """Does `operations` operations, one after another, even if its hosts crash."""

    def __init__(self, history: History, name: str, operations: int) -> None:
        self.history = history
        self.name = name
        self.left = operations
        self.rng = random.Random(f"{history.plan.seed} {name}")  # noqa: S311 - repeatable on purpose
        self.is_finished = False

    def live(self, host: Host) -> None:
        """The body of the actor's task on `host`. Killed when the host dies; the next host does the remaining operations."""
        self.host = host
        try:
            self._live()
        except MissingBlob as error:
            if not self.history.branches.lost_blobs:
                raise
            self.history.scheduler.note(f"lost with what is lost: {error}")
        except (ShardLost, ShardNotFound) as error:
            if self.history.branches.wiped() is None:
                raise
            self.history.scheduler.note(f"nothing to work on: {error}")
        self.is_finished = True
        self.history.finished()

    def _live(self) -> None:
        self._open()
        while self.left:
            self.left -= 1
            self.history.scheduler.pause(self.rng.choice([0, 0, 5, 30, 100]))
            self._surviving(self.operate)
        self._surviving(self.close)  # if the store is unavailable, the lease lapses in the end

    def _open(self) -> None:
        while not self._surviving(self.open):
            pass

    def _surviving(self, act: Callable[[], None]) -> bool:
        """Whether `act` succeeded. Notes a store that fails for long. A log that lost versions ends the process."""
        self.history.branches.begins(self.history.scheduler.current)
        try:
            act()
        except Unavailable as error:
            self.history.scheduler.note(f"unavailable: {error}")
            return False
        except ForkedLog as error:
            self.history.astray(error)
        return True

    @abstractmethod
    def open(self) -> None:
        """Opens handles on a new host."""

    @abstractmethod
    def operate(self) -> None:
        """Does one operation."""

    def close(self) -> None:
        """Called after the last operation. Most actors let their handles lapse."""
        return

    @property
    def client(self) -> PersistClient:
        """The client of the host."""
        return self.host.client


class Writer(Actor):
    """Appends in all supported ways."""

    handle: WriteHandle

    def open(self) -> None:
        self.schema = SCHEMA
        if self.history.plan.evolves and self.rng.random() < 0.5:
            self.client.initialise(self.history.shard_id, SCHEMA)
            if isinstance(self._evolved(), SchemaEvolved):
                self.schema = WIDER
        self.handle = self.client.open_writer(self.history.shard_id, self.schema, purpose=self.name)

    def _evolved(self) -> SchemaEvolved | None:
        """Evolves the schema. None when that is no longer possible."""
        try:
            answer = self.client.evolve_schema(self.history.shard_id, WIDER)
        except InvalidUsage:
            if not self.history.witness.is_past():
                raise
            return None
        if not isinstance(answer, SchemaEvolved):
            self.history.scheduler.fail(f"a wider schema is refused: {answer}")
        return answer

    def close(self) -> None:
        if self.rng.random() < 0.5:
            self.handle.expire()

    def operate(self) -> None:
        if self._upper() == CLOSED:
            return
        ways = [self.compare_and_append, self.append, self.stage, self.take, self.advance, self.ask_upper, self.expire]
        try:
            self.rng.choices(ways, weights=[6, 4, 2, 4, 3, 1, 1])[0]()
        except InvariantViolated:
            # The one case in which the outcome of an append stays unknown. As documented, the process restarts.
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
            self._open()
        self.history.witness.installed(self.handle.machine.state)

    def compare_and_append(self) -> None:
        known = self._upper()
        if known == CLOSED:
            return
        lower = max(0, known + self.rng.choice([0, 0, 0, 0, -1, 1]))
        self.append_exactly(lower, lower + self.rng.randint(1, 4))

    def append_exactly(
        self, lower: int, upper: int, *, progress: tuple[str, bytes] | None = None, expected: bytes | None = None
    ) -> None:
        """Appends own rows in [lower, upper); CLOSED is a valid upper."""
        if lower >= CLOSED:
            return
        updates = self._own_rows(lower, min(upper, lower + 4))
        append = self.history.witness.begin(updates, lower=lower, upper=upper, is_exact=True)
        append.progress, append.expected_progress = progress, expected
        self._conclude(
            append,
            lambda: self.handle.compare_and_append(
                self._rows(append.updates),
                expected_upper=frontier_of(lower),
                new_upper=frontier_of(upper),
                progress=progress,
                expected_progress=expected,
            ),
        )

    def advance(self) -> None:
        """Appends as a sink does, with its source progress in the same compare-and-set."""
        begun = self.history.witness.seqno
        sink = self.rng.choice(["sink1", "sink2"])
        stored = self.client.progress(self.history.shard_id, sink)
        token = None if stored is None else stored.token
        self.history.witness.saw_progress(sink, token, since_seqno=begun)
        lower = self._upper()
        progress = (sink, f"{self.name} {self.history.rows_written}".encode())
        expected = token if self.rng.random() < 0.8 else b"a value never stored"
        self.append_exactly(lower, lower + self.rng.randint(1, 3), progress=progress, expected=expected)

    def append(self) -> None:
        known = self._upper()
        if known == CLOSED:
            return
        lower = max(0, known - self.rng.randint(0, 4))
        upper = lower + self.rng.randint(1, 6)
        agreed: list[Update] = [((_AGREED + time, "agreed"), time, 1) for time in range(lower, upper)]
        append = self.history.witness.begin(agreed, lower=lower, upper=upper, is_exact=False)
        rows = self._rows(agreed)
        bounds = Antichain.of(lower), Antichain.of(upper)
        self._conclude(append, lambda: self.handle.append(rows, lower=bounds[0], upper=bounds[1]))

    def stage(self) -> None:
        """Stages a batch for another process to append."""
        lower = self._upper()
        if lower == CLOSED:
            return
        upper = lower + self.rng.randint(1, 6)
        updates = self._own_rows(lower, upper)
        try:
            batch = self.handle.batch(self._rows(updates), lower=Antichain.of(lower), upper=Antichain.of(upper))
        except BatchExpired:
            self.history.staged_too_early += 1
            return
        self.history.mail.append(Letter(lower, upper, updates, batch.to_transmittable()))

    def take(self) -> None:
        """Appends all staged batches that fit, in one step, perhaps truncated."""
        letters, self.history.mail[:] = list(self.history.mail), []
        if not letters:
            return self.compare_and_append()
        lower = self._upper()
        fitting = [letter for letter in letters if letter.lower <= lower < letter.upper]
        batches = [self.handle.batch_from_transmittable(letter.data) for letter in fitting]
        if not fitting:
            return None
        upper = min(letter.upper for letter in fitting)
        upper = self.rng.randint(lower + 1, upper)
        updates = [update for letter in fitting for update in letter.updates if lower <= update[1] < upper]
        append = self.history.witness.begin(updates, lower=lower, upper=upper, is_exact=True)

        def attempt() -> AppendOutcome:
            try:
                return self.handle.compare_and_append_batch(
                    batches, expected_upper=Antichain.of(lower), new_upper=Antichain.of(upper)
                )
            except (Unavailable, AmbiguousAppend):
                self.handle.delete_batches(batches)  # clean up, even while the append may still be under way
                raise

        if not self._conclude(append, attempt):
            self.handle.delete_batches(batches)
        return None

    def ask_upper(self) -> None:
        begun = self.history.scheduler.steps
        if self.rng.random() < 0.5:
            known = self.handle.upper
            if not known.is_empty():
                self.handle.wait_for_upper_past(known, timeout=WAIT_S)
            return
        upper = self.history.client_upper(self.client)
        self.history.witness.saw_upper(upper, since_step=begun, what="fetch_recent_upper")

    def expire(self) -> None:
        try:
            self.handle.expire()
        finally:
            self._open()

    def maintain(self, maintenance: Maintenance) -> None:
        """Performs the maintenance that an own append returned."""
        perform(self.handle.machine, maintenance)

    def _upper(self) -> int:
        upper = self.handle.fetch_recent_upper() if self.rng.random() < 0.5 else self.handle.shared_upper()
        return CLOSED if upper.time is None else upper.time

    def _own_rows(self, lower: int, upper: int) -> list[Update]:
        """Rows of this append alone and, sometimes, one that many appends share, to be consolidated."""
        rows_max = self.history.plan.rows_max
        self.history.rows_written += rows_max + 10
        first = self.history.rows_written
        updates: list[Update] = [
            ((first + index, "own"), self.rng.randrange(lower, upper), 1)
            for index in range(self.rng.randint(0, rows_max))
        ]
        if self.rng.random() < 0.4:
            updates.append(((0, "shared"), self.rng.randrange(lower, upper), self.rng.choice([-1, 1, 2])))
        return updates

    def _rows(self, updates: list[Update]) -> list[Any]:
        """The updates as rows of the handle's schema."""
        rows = [row(data[0], data[1], time, diff) for data, time, diff in updates]  # type: ignore[index]  # (id, name)
        if self.schema is SCHEMA:
            return rows
        return [((key, (*val, self.rng.choice([None, "x"]))), time, diff) for (key, val), time, diff in rows]

    def _conclude(self, append: Append, call: Callable[[], AppendOutcome]) -> bool:
        """Carries `append` out and reports it to the witness. Returns whether it was appended."""
        try:
            with self.history.scheduler.doing(append):
                outcome = call()
        except BatchExpired:
            self.history.staged_too_early += 1
            self.history.witness.expired(append)
            return False
        witness = self.history.witness
        match outcome:
            case Appended(maintenance=maintenance):
                witness.acknowledged(append)
                if self.rng.random() < self.history.plan.writers_maintain:
                    self.maintain(maintenance)
            case UpperMismatch(current=current):
                witness.refused(append, current=current)
            case ProgressMismatch(current=stored):
                witness.outdated(append, None if stored is None else stored.token)
            case _:
                self.history.scheduler.fail(f"{append} answered {outcome}")
        return isinstance(outcome, Appended)


@dataclass
class _Listening:
    listen: Listen
    as_of: int
    found: Counter[tuple[Hashable, int]] = field(default_factory=Counter)


class Reader(Actor):
    """Takes snapshots, repeatedly at the same times, and listens, under a lease that it may lose."""

    handle: ReadHandle

    def open(self) -> None:
        plan = self.history.plan
        self.listening: _Listening | None = None
        self.client.initialise(self.history.shard_id, SCHEMA)
        schema = self.rng.choice([SCHEMA, None])
        self.handle = self.client.open_leased_reader(
            self.history.shard_id, schema, purpose=self.name, lease_ms=plan.lease_ms
        )

    def close(self) -> None:
        if self.rng.random() < 0.7:
            self.handle.expire()

    def operate(self) -> None:
        ways = [self.snapshot, self.listen, self.downgrade, self.subscribe, self.expire]
        try:
            self.rng.choices(ways, weights=[5, 5, 2, 2, 1])[0]()
        except (Fenced, MissingBlob) as error:
            if self.history.witness.is_leased(self.handle.reader_id) and not self.history.branches.lost_blobs:
                self.history.scheduler.fail(f"{self.name} has its lease, but: {error}")
            self.history.scheduler.note(f"lease lost: {error}")
            self._open()

    def snapshot(self) -> None:
        as_of = self._time()
        if as_of is None:
            return
        answer = self.handle.snapshot(as_of, timeout_s=WAIT_S)
        if isinstance(answer, SinceAhead):
            self._too_late(answer)
            return
        with answer:
            for _ in range(self.rng.randint(1, 2)):
                self.history.scheduler.pause(self.rng.choice([0, 0, 50, 300]))
                self.history.witness.read(self._contents(answer), as_of=as_of, what=f"snapshot of {self.name}")

    def listen(self) -> None:
        """Starts to listen, or continues for a few batches."""
        if self.listening is not None and self.listening.listen.frontier.is_empty():
            self.listening = None  # the shard is closed, and the listener has received all
        if self.listening is None:
            as_of = self._time(earliest=0.6)
            if as_of is None:
                return
            answer = self.handle.listen(as_of)
            if isinstance(answer, SinceAhead):
                self._too_late(answer)
                return
            self.listening = _Listening(answer, as_of)
        for _ in range(self.rng.randint(1, 3)):
            if self.listening.listen.frontier.is_empty():
                return
            events = self.listening.listen.next_batch(timeout_s=WAIT_S)
            if events is None:
                return
            self._hear(self.listening, list(events))

    def subscribe(self) -> None:
        """The first half of a subscription: contents, then Progress. The rest is the same as `listen`."""
        as_of = self._time()
        if as_of is None or self.listening is not None:
            return
        events = self.handle.subscribe(as_of, timeout_s=WAIT_S)
        if isinstance(events, SinceAhead):
            self._too_late(events)
            return
        found: Counter[Hashable] = Counter()
        for event in events:
            if isinstance(event, Progress):
                break
            found.update(contents(event.table))
        self.history.witness.read(found, as_of=as_of, what=f"subscription of {self.name}")

    def downgrade(self) -> None:
        as_of = self._time()
        if self.listening is not None and as_of is not None and self.listening.listen.frontier.time is not None:
            as_of = min(as_of, max(0, self.listening.listen.frontier.time - 1))  # so that it can continue
        if as_of is not None:
            self.handle.downgrade_since(Antichain.of(as_of))

    def expire(self) -> None:
        try:
            self.handle.expire()
        finally:
            self._open()

    def _time(self, earliest: float = 0.2) -> int | None:
        """A time that this reader should be able to read, with probability `earliest` its since. None before the first write."""
        since = self.handle.since
        upper = self.history.client_upper(self.client)
        if since.time is None:
            if self.history.witness.is_leased(self.handle.reader_id) and self.history.witness.is_past():
                return None
            raise Fenced("the handle has lost its lease")
        end = since.time + 10 if upper.time is None else upper.time
        if end <= since.time:
            return None
        if self.rng.random() < earliest:
            return since.time
        return self.rng.choice([end - 1, self.rng.randrange(since.time, end)])

    def _too_late(self, answer: SinceAhead) -> None:
        if self.history.witness.is_leased(self.handle.reader_id):
            self.history.scheduler.fail(f"{self.name} holds its since, but reading at {answer.as_of} is {answer}")
        raise Fenced("the lease is lost")

    def _contents(self, snapshot: Snapshot) -> Counter[Hashable]:
        if self.rng.random() < 0.7:
            return contents(snapshot.to_table())
        found: Counter[Hashable] = Counter()
        retry = self.client.machine(self.history.shard_id).retry
        for split in snapshot.splits(2):
            for batch in split.to_batches(self.handle.blob, retry=retry):
                found.update(contents(pa.Table.from_batches([batch])))
        return found

    def _hear(self, listening: _Listening, events: list[Updates | Progress]) -> None:
        """Records one complete batch of events."""
        for event in events:
            if isinstance(event, Updates):
                for update in event.table.to_pylist():
                    data = update["key"]["id"], update["val"]["name"]
                    listening.found[data, update["time"]] += update["diff"]
                continue
            found = Counter({key: diff for key, diff in listening.found.items() if diff})
            self.history.witness.listened(
                found, as_of=listening.as_of, frontier=event.frontier, what=f"listener of {self.name}"
            )


def contents(table: pa.Table) -> Counter[Hashable]:
    """The rows as an Oracle counts them: the number of each (id, name)."""
    found: Counter[Hashable] = Counter()
    for update in table.to_pylist():
        found[update["key"]["id"], update["val"]["name"]] += update["diff"]
    return found
