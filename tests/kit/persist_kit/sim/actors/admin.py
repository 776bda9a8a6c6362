"""The actor for the work of administrators and operators beside other processes: commands, and the repeated work of the operator."""

from __future__ import annotations

from collections.abc import Callable

from persist_engine.base.errors import AmbiguousAppend, InvalidUsage
from persist_engine.client.reclaiming import reclaim
from persist_engine.client.tend import hold_since
from persist_engine.model.ownership import Adopted, Owner
from persist_engine.shard.machine import Machine
from persist_engine.testing.oracle import Oracle
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.repair.force import collect_fully, force_compaction, force_gc, plan_gc

from persist_kit.sim.actors.actor import Actor
from persist_kit.sim.actors.upkeep import CRITICAL_ID
from persist_kit.sim.calls import CLOSED, OPERATED_ID
from persist_kit.sim.decided import Decided

_OWNER = Owner("operator", "default", "table")


class Closing(Decided):
    """An append that ends the shard, and adds no rows."""

    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """See Decided."""
        if upper != CLOSED or oracle.contents(CLOSED) != oracle.contents(lower - 1):
            return "it is to close the shard, and to change nothing"
        return None


class Administrator(Actor):
    """Does the work of administrators and operators beside other processes: commands, and the repeated work of the operator."""

    def open(self) -> None:
        self.client.initialise(self.history.shard_id, self.history.schema)

    def operate(self) -> None:
        machine = self.client.machine(self.history.shard_id)
        ways: list[Callable[[Machine], object]] = [
            lambda each: force_compaction(each, full=self.rng.random() < 0.7),
            force_gc,
            collect_fully,
            plan_gc,
            self.hold,
            self.inspect,
            self.filter,
            self.verify,
            self.expire,
        ]
        if self.history.plan.retain_ms is not None:
            ways += [self.retain] * 2
        if self.history.plan.is_purged and self.left < 2:
            ways = [self.purge]
        self.rng.choice(ways)(machine)

    def hold(self, machine: Machine) -> None:
        """Moves since as one of two operators, each of which takes the hold from the other."""
        state = machine.refresh()
        upper, since = state.trace.upper.time, state.trace.since.time
        if upper is None or since is None or upper <= since:
            return
        begun = self.history.witness.seqno
        target, token = self.rng.randrange(since, upper), self.rng.choice([b"operator1", b"operator2"])
        try:
            held = hold_since(
                self.client, machine.shard_id, OPERATED_ID, token=token, purpose=self.name, since_ms=target
            )
        except InvalidUsage as error:
            if "was taken over" not in str(error):
                raise
            self.history.scheduler.note(f"{self.name}: {error}")
            return
        if held is not None and held < target:
            self.history.scheduler.fail(f"{self.name} holds {held}, and asked for {target}")
        self.history.witness.saw_opaque(OPERATED_ID, token, since_seqno=begun)

    def inspect(self, machine: Machine) -> None:
        self.client.inspect(machine.shard_id)
        for table in ("batches", "runs", "parts", "versions", "holds", "usage"):
            self.client.metadata(machine.shard_id, table)

    def filter(self, machine: Machine) -> None:
        try:
            self.client.set_filtered(machine.shard_id, self.rng.choice([["val.name"], ["key.id"], []]))
        except AmbiguousAppend:
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
        except InvalidUsage:
            head = self.history.witness.head
            if head is None or not head.trace.upper.is_empty():
                raise

    def verify(self, machine: Machine) -> None:
        """An audit beside writers, compactions and collections finds nothing, unless consensus loses versions or a recovery ran."""
        found = verify_shard(machine).findings
        if found and self.history.plan.disaster is None and not self.history.witness.reborn:
            self.history.scheduler.fail(f"verification finds {found[:3]}")

    def expire(self, machine: Machine) -> None:
        """Ends the hold of a reader, like the command for a reader whose process is gone."""
        readers = sorted(machine.refresh().leased_readers)
        if readers:
            machine.expire_leased_reader(self.rng.choice(readers))

    def retain(self, machine: Machine) -> None:
        self.client.set_retention(machine.shard_id, self.rng.choice([None, 1, 3, 20]))

    def purge(self, machine: Machine) -> None:
        """Purges the shard. It is repeated until no reader holds the shard."""
        adopted = self.client.adopt(_OWNER, machine.shard_id, machine.shard_id)
        if not isinstance(adopted, Adopted):
            adopted = self.client.adopt(_OWNER, machine.shard_id, machine.shard_id, take_over=True)
        with self.history.scheduler.doing(Closing()):
            found = reclaim(self.client, machine.shard_id, _OWNER, own_hold=CRITICAL_ID, purge=True, max_deletes=1000)
        self.history.scheduler.note(f"{self.name}: {found.verdict} {found.message}")
        if found.verdict == "Reclaimed" and not self.client.is_finalized(machine.shard_id):
            self.history.scheduler.fail(f"{found}, and the shard is not finalized")
