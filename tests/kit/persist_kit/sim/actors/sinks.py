"""Runs sinks in a simulated history: several with the same input, with crashes and lapsed leases, beside independent writers. Defines their
input, and the rule that every time below a sink's upper shows exactly that input.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from persist_engine.base.errors import (
    BatchExpired,
    Fenced,
    ForkedLog,
    InvalidUsage,
    MissingBlob,
    SinkFailed,
    Unavailable,
)
from persist_engine.client.client import PersistClient
from persist_engine.dataflow.open import open_sink as open_plain_sink
from persist_engine.dataflow.sink.handle import Sink, SinkInput
from persist_engine.flow.refresh import Refresh
from persist_engine.model.frontier import Antichain
from persist_engine.testing.oracle import Oracle, Update
from persist_engine.work.perform import perform

from persist_kit.sim.actors.actor import WAIT_S, Actor
from persist_kit.sim.actors.schemas import Data
from persist_kit.sim.calls import CLOSED
from persist_kit.sim.decided import Decided
from persist_kit.world import SCHEMA, row

if TYPE_CHECKING:
    from persist_kit.sim.actors.actor import Host
    from persist_kit.sim.simulation import History

#: The desired collection changes before this time, then never again.
_END = 24
#: The share of the histories whose sinks show their input only at refreshes.
_REFRESHED = 0.3
#: The time limit of the last sink of a history, in calm weather.
_PATIENCE_S = 60
#: The errors that may end a sink: the store was unavailable for too long; the sink missed history; an orphan scan deleted its staged parts.
_ENDS = (Unavailable, Fenced, MissingBlob, BatchExpired)


class DesiredCollection:
    """The input of all sinks of a history: a function of its seed."""

    def __init__(self, seed: int, *, errs: bool) -> None:
        rng = random.Random(f"desired {seed}")  # noqa: S311 - repeatable on purpose
        self.updates: list[Update] = []
        there: list[Data] = []
        for time in range(_END):
            for _ in range(rng.choice([0, 0, 1, 2])):
                if there and rng.random() < 0.4:
                    self.updates.append((there.pop(rng.randrange(len(there))), time, -1))
                else:
                    there.append((rng.randrange(5), rng.choice("ab")))
                    if errs:
                        there[-1] = rng.choice([(None, "broken"), (there[-1][0], None, there[-1][1])])
                    self.updates.append((there[-1], time, 1))

        self.refresh: Refresh | None = None
        if rng.random() < _REFRESHED:
            self.refresh = Refresh(
                every=rng.choice([2, 3, 5]), aligned_to=rng.randrange(3), at=tuple(rng.sample(range(_END), 1))
            )

    def between(self, lower: int, upper: int) -> list[Update]:
        """The changes at times in [lower, upper)."""
        return [update for update in self.updates if lower <= update[1] < upper]

    def contents(self, time: int) -> Counter[Hashable]:
        """The number of each row that the shard must show at `time`: what is desired or, with refreshes, was so at the last one."""
        shown = time if self.refresh is None else self.refresh.last_before(time + 1)
        sums: Counter[Hashable] = Counter()
        for data, at, diff in self.updates:
            if shown is not None and at <= shown:
                sums[data] += diff
        return +sums


class Correcting(Decided):
    """The appends of one sink. From as_of on, the shard must be as desired at every time that they cover, regardless of earlier writes."""

    def __init__(self, desired: DesiredCollection, as_of: int) -> None:
        self._desired, self._as_of = desired, as_of
        self.commits = 0

    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """See Decided."""
        self.commits += 1
        for time in sorted({*range(max(lower, self._as_of), min(upper, _END + 1)), min(upper, CLOSED) - 1}):
            found, wanted = oracle.contents(time), self._desired.contents(time)
            if self._as_of <= time and found != wanted:
                return f"at {time} there is {dict(found)}, desired is {dict(wanted)}"
        return None

    def __repr__(self) -> str:
        return f"sink from {self._as_of}"


class Sinker(Actor):
    """A sink that gets the desired collection piece by piece, and all of it again after it ended or crashed."""

    sink: Sink

    def __init__(self, history: History, name: str, operations: int) -> None:
        super().__init__(history, name, operations)
        self.frontier = 0

    def open(self) -> None:
        as_of = self.rng.choice([0, 0, 0, 3])
        read_only = self.rng.random() < 0.15
        self.fed_upto = 0
        workers = self.rng.randint(1, 2)
        self.sink = open_sink(self.history, self.client, workers=workers, as_of=as_of, read_only=read_only)

    def operate(self) -> None:
        ways = [self.feed, self.wait, self.maintain, self.promote, self.restart, self.oversleep]
        try:
            self.rng.choices(ways, weights=[6, 4, 2, 1, 1, 10 if self.history.plan.sleepy else 3])[0]()
            self.sink.status()
        except SinkFailed as error:
            self.ended(error)
            self.sink.close()
            self._open()

    def close(self) -> None:
        try:
            self.sink.close()
        except SinkFailed as error:
            self.ended(error)

    def feed(self) -> None:
        """Inserts the desired changes up to a later time."""
        self.frontier += self.rng.randint(1, 6)
        feed(self.history, self.sink, self.fed_upto, self.frontier, rng=self.rng)
        self.fed_upto = self.frontier

    def wait(self) -> None:
        self.sink.wait_for_upper(Antichain.of(self.fed_upto), timeout_s=self.rng.choice([1, 4, 10]) * WAIT_S)

    def maintain(self) -> None:
        perform(self.client.machine(self.history.shard_id), self.sink.take_maintenance())

    def promote(self) -> None:
        self.sink.allow_writes()

    def restart(self) -> None:
        self.close()
        self._open()

    def oversleep(self) -> None:
        """Lets its machine sleep past the lease while other processes continue, possibly including a replacement."""
        scheduler = self.history.scheduler
        scheduler.note(f"{self.name} oversleeps")
        if self.history.plan.sleepy or self.rng.random() < 0.5:
            self.frontier += self.rng.randint(2, 6)
            replaced = self.history.visit(f"{self.name}'", self._replace)
            self.host.process.frozen_until_ms = scheduler.now_ms + 2 * self.history.plan.lease_ms
            replaced.wait()
        else:
            self.host.process.frozen_until_ms = scheduler.now_ms + 2 * self.history.plan.lease_ms
            scheduler.pause(0)
        self.feed()
        self.wait()

    def _replace(self, host: Host) -> None:
        """Brings the shard to the goal of this sink, then releases all earlier times."""
        self.history.scheduler.pause(1.5 * self.history.plan.lease_ms)
        try:
            sink = open_sink(self.history, host.client, workers=1, as_of=0, read_only=False)
            feed(self.history, sink, 0, self.frontier, rng=self.rng)
            sink.wait_for_upper(Antichain.of(self.frontier), timeout_s=20 * WAIT_S)
            sink.close()
            reader = host.client.open_leased_reader(self.history.shard_id, self.history.schema, purpose="replacement")
            upper = self.history.client_upper(host.client)
            reader.downgrade_since(upper if not upper.time else Antichain.of(upper.time - 1))
            reader.expire()
        except (Unavailable, Fenced) as error:
            self.history.scheduler.note(f"the replacement of {self.name} gives up: {error}")
        except SinkFailed as error:
            self.ended(error)
        except ForkedLog as error:
            self.history.astray(error)

    def ended(self, error: SinkFailed) -> None:
        """Checks that the sink ended by one of the allowed errors."""
        if isinstance(error.__cause__, ForkedLog):
            self.history.astray(error.__cause__)
        past = isinstance(error.__cause__, InvalidUsage) and self.history.witness.is_past()
        if not (isinstance(error.__cause__, _ENDS) or past):
            self.history.scheduler.fail(f"{self.name}: {error} ({type(error.__cause__).__name__})")
        self.history.sinks_ended += 1
        self.history.scheduler.note(f"{error}")


def open_sink(history: History, client: PersistClient, *, workers: int, as_of: int, read_only: bool) -> Sink:
    """Opens a sink. Its appends are judged by Correcting."""
    correcting = Correcting(history.desired, as_of)
    history.correcting.append(correcting)
    with history.scheduler.doing(correcting):
        return open_plain_sink(
            client,
            history.shard_id,
            SCHEMA,
            workers=workers,
            as_of=as_of,
            read_only=read_only,
            errors=history.plan.errs,
            refresh=history.desired.refresh,
        )


def feed(history: History, sink: Sink, lower: int, upper: int, *, rng: random.Random) -> None:
    """Inserts the desired changes in [lower, upper), each through a random input."""
    ways = [(rng.choice(sink.inputs), update) for update in history.desired.between(lower, upper)]
    for each in sink.inputs:
        updates: list[tuple[Any, int, int]] = [update for way, update in ways if way is each]
        has_errors_last = history.plan.errs and rng.random() < 0.5
        if history.plan.errs and not has_errors_last:
            _feed_errors(each, updates, upper)
        each.insert([row(data[0], data[-1], time, diff) for data, time, diff in updates if data[0] is not None])
        each.advance(Antichain.of(upper))
        if has_errors_last:
            history.scheduler.pause(rng.choice([0, 10]))
            _feed_errors(each, updates, upper)


def _feed_errors(each: SinkInput, updates: list[tuple[Any, int, int]], upper: int) -> None:
    each.insert_errors([(data[1], time, diff) for data, time, diff in updates if data[0] is None])
    each.advance_errors(Antichain.of(upper))


def settle_sink(history: History, host: Host) -> None:
    """In calm weather, a last sink must make the shard as desired, and report that."""
    upper = history.client_upper(host.client)
    if upper.time is None:
        return
    frontier = max(upper.time, _END) + 2
    machine = host.client.machine(history.shard_id)
    behind_ms = (machine.refresh().staging_floor_ms or 0) - machine.env.now_ms()
    if behind_ms >= 0:
        # A scan ran with a clock ahead of ours. Parts staged before its floor would be refused.
        history.scheduler.pause(behind_ms + 1)
    sink = open_sink(history, host.client, workers=2, as_of=0, read_only=False)
    feed(history, sink, 0, frontier, rng=random.Random(history.plan.seed))  # noqa: S311 - repeatable
    if not sink.wait_for_upper(Antichain.of(frontier), timeout_s=_PATIENCE_S):
        history.scheduler.fail(f"a sink did not bring the shard to {frontier}: {sink.status()}")
    sink.close()
    if history.witness.oracle.contents(frontier - 1) != history.desired.contents(frontier - 1):
        history.scheduler.fail("a sink has finished, and the shard is not as desired")
