"""The actors that read: contents, repeatedly at the same times, changes, and parts that other processes fetch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

import pyarrow as pa
from persist_engine.base.errors import Fenced, MissingBlob, SchemaMismatch, Unavailable
from persist_engine.client.read.changes import Changes
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.leased import LeasedPart
from persist_engine.client.read.listen import Listen, Progress, Updates
from persist_engine.client.read.snapshot import SinceAhead, Snapshot
from persist_engine.model.frontier import Antichain
from persist_engine.work.repair.force import collect_fully, force_compaction

from persist_kit.sim.actors.actor import WAIT_S, Actor, Host
from persist_kit.sim.actors.schemas import SCHEMAS, data_of, narrowed, width_of


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
        self.client.initialise(self.history.shard_id, self.history.schema)
        schema = self.rng.choice([self.history.schema, self.client.schema(self.history.shard_id), None])
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
            self.lost(error)
        except SchemaMismatch as error:
            self.outgrown(error)

    def outgrown(self, error: SchemaMismatch) -> None:
        """Checks that the reader met a size that its narrower column does not hold. It continues with the newest schema."""
        if self.handle.schema != SCHEMAS[-2] or self.client.schema(self.history.shard_id) != SCHEMAS[-1]:
            raise error
        self.history.scheduler.note(f"{self.name} must begin again: {error}")
        self._open()

    @property
    def width(self) -> int:
        """The number of columns that its handle reads."""
        return width_of(self.handle.schema)

    def lost(self, error: Fenced | MissingBlob) -> None:
        """Checks that the reader lost its data only together with its lease."""
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
                what = f"snapshot of {self.name}"
                self.history.witness.read(self._contents(answer), as_of=as_of, what=what, width=self.width)

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
        self.history.witness.read(found, as_of=as_of, what=f"subscription of {self.name}", width=self.width)

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
                    listening.found[data_of(update), update["time"]] += update["diff"]
                continue
            found = Counter({key: diff for key, diff in listening.found.items() if diff})
            self.history.witness.listened(
                found,
                as_of=listening.as_of,
                frontier=event.frontier,
                what=f"listener of {self.name}",
                width=self.width,
            )


class Examiner(Reader):
    """Reads the changes between two times, rows that satisfy a condition, and parts that another process fetches."""

    def operate(self) -> None:
        ways = [self.changes, self.filtered, self.lend, self.expire]
        try:
            self.rng.choices(ways, weights=[5, 3, 4, 1])[0]()
        except (Fenced, MissingBlob) as error:
            self.lost(error)
        except SchemaMismatch as error:
            self.outgrown(error)

    def stir(self) -> None:
        """Releases times that no reader holds, then compacts and collects, as other processes may do at any time."""
        self.history.scheduler.pause(self.rng.choice([0, 0, 50, 300]))
        if self.rng.random() < 0.7:
            machine = self.client.machine(self.history.shard_id)
            self.handle.downgrade_since(self.handle.since)
            force_compaction(machine, full=True)
            # Otherwise its own lease would hold the versions before the compaction, and with them every input of it.
            self.handle.downgrade_since(self.handle.since)
            collect_fully(machine)

    def changes(self) -> None:
        after, upto = self._time(), self._time()
        if after is None or upto is None:
            return
        after, upto = min(after, upto), max(after, upto)
        answer = self.handle.changes(after, upto, timeout_s=WAIT_S)
        if isinstance(answer, SinceAhead):
            self._too_late(answer)
            return
        with answer:
            for _ in range(self.rng.randint(1, 2)):
                self.stir()
                found = self._changed(answer)
                self.history.witness.listened(
                    found,
                    as_of=after,
                    frontier=Antichain.of(upto + 1),
                    what=f"changes of {self.name}",
                    width=self.width,
                )

    def _changed(self, changes: Changes) -> Counter[tuple[Hashable, int]]:
        if self.rng.random() < 0.6:
            tables = [changes.to_table()]
        else:
            retry = self.client.machine(self.history.shard_id).retry
            batches = [
                batch for split in changes.splits(2) for batch in split.to_batches(self.handle.blob, retry=retry)
            ]
            tables = [pa.Table.from_batches([batch]) for batch in batches]
        found: Counter[tuple[Hashable, int]] = Counter()
        for update in (update for table in tables for update in table.to_pylist()):
            found[data_of(update), update["time"]] += update["diff"]
        return Counter({key: diff for key, diff in found.items() if diff})

    def filtered(self) -> None:
        as_of, name = self._time(), self.rng.choice(["own", "shared", "a"])
        keys = len(self.history.schema.key)
        if as_of is None:
            return
        answer = self.handle.snapshot(as_of, where=[("val.name", "=", name)], timeout_s=WAIT_S)
        if isinstance(answer, SinceAhead):
            self._too_late(answer)
            return
        with answer:
            self.stir()
            found = contents(answer.to_table())
        truth = narrowed(self.history.witness.oracle.contents(as_of), self.width)
        wanted = Counter(
            {data: count for data, count in truth.items() if len(data) == keys or data[keys] == name}  # type: ignore[index,arg-type]  # rows
        )  # a condition keeps errors
        if found != wanted:
            self.history.scheduler.fail(f"{self.name} reads {dict(found)} of {name} at {as_of}, not {dict(wanted)}")

    def lend(self) -> None:
        """Leases the parts of a snapshot, which it closes. Another process fetches them, while this one renews the lease."""
        as_of = self._time()
        if as_of is None:
            return None
        answer = self.handle.snapshot(as_of, timeout_s=WAIT_S)
        if isinstance(answer, SinceAhead):
            self._too_late(answer)
            return None
        with answer:
            parts = answer.lease_parts()
        for _ in range(self.rng.randint(1, 3)):
            self.stir()
        found: Counter[Hashable] = Counter()
        failed: list[MissingBlob] = []

        def fetch(host: Host) -> None:
            self.history.scheduler.pause(self.rng.choice([0, 100, 400]))
            retry = host.client.versions.retry
            try:
                for part in parts:
                    for table in LeasedPart.from_bytes(part.to_bytes()).fetch(host.client._blob, retry=retry):
                        found.update(contents(table))
            except MissingBlob as error:
                failed.append(error)
            except Unavailable as error:
                self.history.scheduler.note(f"parts of {self.name} are not fetched: {error}")
                return
            fetched.append(host)

        fetched: list[Host] = []
        self.history.visit(f"{self.name}'", fetch).wait()
        if failed:
            return self.lost(failed[0])
        if fetched:
            held = Counter({data: count for data, count in found.items() if count})
            self.history.witness.read(held, as_of=as_of, what=f"parts of {self.name}", width=self.width)
        for part in parts:
            self.handle.return_part(part)
        return None


def contents(table: pa.Table) -> Counter[Hashable]:
    """The number of each row, without zeros."""
    found: Counter[Hashable] = Counter()
    for update in table.to_pylist():
        found[data_of(update)] += update["diff"]
    return found
