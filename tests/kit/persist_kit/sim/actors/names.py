"""Names of tables in a simulated history: several processes create, rename, drop and take over the same few names. An interrupted call is
repeated by its actor, or left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Adopted, OwnedElsewhere, Owner, Unowned

from persist_kit.sim.actors.actor import Actor
from persist_kit.sim.named import Naming

if TYPE_CHECKING:
    from persist_kit.sim.actors.actor import Host
    from persist_kit.sim.simulation import History

OWNERS = tuple(Owner("sql", "default", name) for name in "abc")
_ANY: frozenset[Owner | None] = frozenset({None, *OWNERS})


class Registrar(Actor):
    """Uses the registry as databases and operators do."""

    def __init__(self, history: History, name: str, operations: int) -> None:
        super().__init__(history, name, operations)
        self._unsettled: Callable[[], None] | None = None

    def open(self) -> None:
        self.names = self.history.witness.names
        self.names.is_judged = True

    def operate(self) -> None:
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or self.rng.random() < 0.3:
            ways = [self.create, self.create, self.rename, self.rename, self.drop, self.take_over, self.free]
            owner, other = self.rng.sample(OWNERS, 2)
            chosen = self.rng.choice(ways)
            unsettled = lambda: chosen(owner, other)  # noqa: E731 - of this draw
        self._unsettled = unsettled
        unsettled()
        self._unsettled = None

    def create(self, owner: Owner, _: Owner) -> None:
        """As `Database.create`."""
        client, found = self.client, self.client.registered(owner)
        if found is not None and client.owner_of(found) == owner and client.has_log(found):
            return
        if found is not None:
            call = self._begin(f"free {owner}")
            with self.history.scheduler.doing(call):
                is_free = client.free_name(owner)
            if is_free:
                self.names.saw(call, lambda at: owner not in at.names, "free")
        proposed = ShardId.from_bytes(self.rng.randbytes(16))
        call = self._begin(f"create {owner}", takes=(owner, frozenset({None})))
        with self.history.scheduler.doing(call):
            answer = client.adopt(owner, None, proposed)
        self._adopted(call, owner, answer)
        if isinstance(answer, Adopted) and not client.has_log(answer.shard_id):
            key, new = str(answer.shard_id), VersionedData(SeqNo(1), b"a log")
            client.versions.retry.external("create", lambda: client.versions.consensus.compare_and_set(key, None, new))

    def take_over(self, owner: Owner, _: Owner) -> None:
        shards = sorted(self.names.now.owners)
        if not shards:
            return
        wanted, is_asked = self.rng.choice(shards), self.rng.random() < 0.6
        takes = _ANY if is_asked else frozenset({None})
        call = self._begin(f"take {wanted} over for {owner}", takes=(owner, takes))
        with self.history.scheduler.doing(call):
            answer = self.client.adopt(owner, wanted, wanted, take_over=is_asked)
        self._adopted(call, owner, answer)

    def rename(self, owner: Owner, other: Owner) -> None:
        shard_id = self.client.registered(owner)
        if shard_id is None or self.client.owner_of(shard_id) != owner:
            return
        call = self._begin(
            f"rename {owner} to {other}", takes=(other, frozenset({owner})), renames=(shard_id, owner, other)
        )
        try:
            with self.history.scheduler.doing(call):
                self.client.rename(shard_id, old=owner, new=other)
        except InvalidUsage as error:
            self.history.scheduler.note(f"{call}: {error}")
            return
        self.names.saw(call, lambda at: at.owners.get(shard_id) == other, "done")  # at three moments, perhaps, as below
        self.names.saw(call, lambda at: at.names.get(other) == shard_id, "done")
        self.names.saw(call, lambda at: at.names.get(owner) != shard_id, "done")

    def drop(self, owner: Owner, _: Owner) -> None:
        shard_id = self.client.registered(owner)
        if shard_id is None or self.client.owner_of(shard_id) != owner:
            return
        only = owner if self.rng.random() < 0.5 else None
        call = self._begin(f"drop {owner}", drops=frozenset({owner} if only else OWNERS))
        with self.history.scheduler.doing(call):
            self.client.disown(shard_id, only=only)
        self.names.saw(call, lambda at: at.owners.get(shard_id) != owner, "dropped")

    def free(self, owner: Owner, _: Owner) -> None:
        call = self._begin(f"free {owner}")
        with self.history.scheduler.doing(call):
            is_free = self.client.free_name(owner)
        self.names.saw(call, lambda at: (owner not in at.names) == is_free, is_free)

    def _begin(self, what: str, **allowed: object) -> Naming:
        return Naming(f"{what} by {self.name}", begun=len(self.names.moments) - 1, **allowed)  # type: ignore[arg-type]

    def _adopted(self, call: Naming, owner: Owner, answer: object) -> None:
        match answer:
            case Adopted(shard_id):
                # These may be two moments, because another process may take the shard over between the steps.
                self.names.saw(call, lambda at: at.owners.get(shard_id) == owner, answer)
                self.names.saw(call, lambda at: at.names.get(owner) == shard_id, answer)
            case OwnedElsewhere(shard_id, held):
                self.names.saw(call, lambda at: at.owners.get(shard_id) == held, answer)
            case Unowned(shard_id):
                self.names.saw(call, lambda at: shard_id not in at.owners, answer)
            case _:
                self.history.scheduler.fail(f"{call} answers {answer}")


def settle_names(history: History, host: Host) -> None:
    """Checks, in calm weather, that every name leads to its own shard, or can be freed, or can get a new shard."""
    names = history.witness.names
    for owner in OWNERS:
        shard_id = names.now.names.get(owner)
        if shard_id is not None and names.now.owners.get(shard_id) != owner:
            host.client.free_name(owner)
        proposed = ShardId.from_bytes(bytes([OWNERS.index(owner)]) * 16)
        with history.scheduler.doing(Naming(f"create {owner}", takes=(owner, frozenset({None})))):
            answer = host.client.adopt(owner, None, proposed)
        if not isinstance(answer, Adopted) or not names.now.leads_to(owner, answer.shard_id):
            history.scheduler.fail(f"the name {owner} cannot be used any more: {answer} of {names.now}")
    lost = [
        (shard_id, owner)
        for shard_id, owner in names.now.owners.items()
        if not names.now.leads_to(owner, shard_id) and shard_id not in names.left
    ]
    if lost:
        history.scheduler.fail(f"nothing leads to {lost}")
