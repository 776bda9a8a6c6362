"""The actors of a simulated history that compact, collect garbage, write rollups, move a critical since, or close the shard."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from persist_engine.base.errors import AmbiguousAppend, FinalizationError, ShardLost
from persist_engine.client.since import SinceHandle
from persist_engine.client.write.outcomes import Appended, UpperMismatch
from persist_engine.model.commands import OpaqueMismatch
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import CriticalReaderId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.spine.flat import SpineId
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.background import BackgroundMaintenance
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.perform import perform
from persist_engine.work.rollup import write_rollup

from persist_kit.sim.actors.actor import WAIT_S, Actor
from persist_kit.sim.actors.writer import Writer
from persist_kit.sim.calls import CLOSED, Takeover, frontier_of

CRITICAL_ID = CriticalReaderId.from_bytes(b"\xcc" * 16)


class Maintainer(Actor):
    """Performs one kind of maintenance from time to time, when it is due."""

    def open(self) -> None:
        self.client.initialise(self.history.shard_id, self.history.schema)

    def operate(self) -> None:
        machine = self.client.machine(self.history.shard_id)
        self.history.scheduler.pause(self.rng.choice([0, 20, 100]))
        match self.name.rstrip("0123456789"):
            case "compactor" if self.rng.random() < 0.4:
                self.compact_a_piece(machine)
            case "compactor":
                compact_due(machine, self.rng.choice([1, 10]))
            case "collector":
                gc_and_truncate(machine)
            case "sweeper":
                self.sweep(machine)
            case _ if self.rng.random() < 0.3:
                perform(machine, machine.spine_exert(self.rng.choice([1, 100]))[1])
            case _:
                write_rollup(machine)
        self.history.witness.installed(machine.state)

    def sweep(self, machine: Machine) -> None:
        talks_to = partial(self.history.branches.talks_to, self.host.process)
        began_with = talks_to()
        try:
            scan_orphans(machine, older_than_ms=self.rng.choice([0, 0, 20, 300]), commit=self.rng.random() < 0.9)
        except ShardLost as error:
            # Another branch of the log wrote this rollup. No blob counts as an orphan then.
            key = error.detail["key"]
            if not (began_with.is_ruin(key) or talks_to().is_ruin(key)):
                raise
            self.history.scheduler.note(f"not swept: {error}")

    def compact_a_piece(self, machine: Machine) -> None:
        """Merges only some adjacent inputs of a merge request, so that the result replaces a part of its spine batch."""
        machine.refresh()
        claimed, _ = machine.claim_compactions(max_requests=1)
        for request in claimed.requests:
            first = self.rng.randrange(len(request.inputs))
            inputs = request.inputs[first : first + self.rng.randint(1, 3)]
            (low, oldest), (high, newest) = inputs[0], inputs[-1]
            desc = Description(oldest.desc.lower, newest.desc.upper, request.desc.since)
            compact(machine, replace(request, id=SpineId(low.lo, high.hi), desc=desc, inputs=inputs))


class BackgroundWriter(Writer):
    """A writer with maintenance in background threads. It waits for them, or stops them before or during their work."""

    background: BackgroundMaintenance

    def open(self) -> None:
        super().open()
        self._start()

    def close(self) -> None:
        self._stop()
        super().close()

    def expire(self) -> None:
        self._stop()
        super().expire()

    def maintain(self, maintenance: Maintenance) -> None:
        self.upkeep.offer(maintenance)
        if maintenance.requests and self.rng.random() < 0.5:
            self.history.scheduler.pause(self.rng.choice([0, 5, 10, 20]))
            self._stop()
            self._start()

    def _start(self) -> None:
        self.background = self.client.background_maintenance()
        self.upkeep = self.background.of(self.handle.machine)

    def _stop(self) -> None:
        if self.rng.random() < 0.3:
            self.background.drain(WAIT_S)
        self.background.close()


class Downgrader(Actor):
    """Moves a critical since, and takes the fencing token from its rival."""

    handle: SinceHandle

    def open(self) -> None:
        self.client.initialise(self.history.shard_id, self.history.schema)
        opaque = f"{self.name}-{self.left}".encode()
        self.handle = self.client.open_critical_since(
            self.history.shard_id, CRITICAL_ID, opaque=opaque, purpose=self.name
        )

    def operate(self) -> None:
        expected, new = self.handle.opaque, f"{self.name}-{self.left}".encode()
        upper, since = self.history.client_upper(self.client), self.handle.since
        if since.time is None or upper <= since:
            return
        begun = self.history.witness.seqno
        if upper.time is None:
            target = self.rng.choice([Antichain.empty(), Antichain.of(since.time + 1)])
        else:
            target = Antichain.of(self.rng.randrange(since.time, upper.time))
        with self.history.scheduler.doing(Takeover(expected, new)):
            answer = self.handle.compare_and_downgrade_since(expected, (new, target))
        stored = answer.opaque if isinstance(answer, OpaqueMismatch) else new
        if isinstance(answer, OpaqueMismatch) and stored in {expected, new}:
            self.history.scheduler.fail(f"{self.name} is fenced by its own token {stored!r}")
        self.history.witness.saw_opaque(CRITICAL_ID, stored, since_seqno=begun)


class Closer(Downgrader):
    """Ends the shard while others still use it: closes it, releases its history, finalizes it."""

    def open(self) -> None:
        self.history.scheduler.pause(self.rng.choice([100, 400, 1000]))
        super().open()
        self._open_writer()

    def _open_writer(self) -> None:
        self.writer = self.client.open_writer(self.history.shard_id, self.history.schema, purpose=self.name)

    def operate(self) -> None:
        upper = self.history.client_upper(self.client)
        if upper.time is not None:
            return self.close_at(upper.time)
        if self.handle.since.time is not None:
            return super().operate()
        try:
            self.client.finalize(self.history.shard_id)
        except FinalizationError as error:
            self.history.scheduler.note(f"not yet: {error}")
        return None

    def close_at(self, lower: int) -> None:
        """Appends with the closed frontier as upper."""
        append = self.history.witness.begin([], lower=lower, upper=CLOSED, is_exact=True)
        try:
            with self.history.scheduler.doing(append):
                outcome = self.writer.compare_and_append(
                    [], expected_upper=frontier_of(lower), new_upper=Antichain.empty()
                )
        except AmbiguousAppend:
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
            self._open_writer()
            return
        match outcome:
            case Appended():
                self.history.witness.acknowledged(append)
            case UpperMismatch(current=current):
                self.history.witness.refused(append, current=current)
            case _:
                self.history.scheduler.fail(f"{append} answered {outcome}")
