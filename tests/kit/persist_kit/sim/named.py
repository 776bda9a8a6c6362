"""Judges the registry: every step of a call on owners and names, and the answers. It knows the present owner of each shard and the shard of
each name only from the committed entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from persist_engine.base.versioned import VersionedData
from persist_engine.codec.registry import NAMES_PREFIX, decode_name, decode_shard_owner
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner

from persist_kit.sim.scheduler import Scheduler

_OWNERS_PREFIX = "owner/"


@dataclass(frozen=True)
class Names:
    """All owners and names at one moment."""

    owners: dict[ShardId, Owner]
    names: dict[Owner, ShardId]

    def leads_to(self, owner: Owner, shard_id: ShardId) -> bool:
        """Whether the name leads to the shard, and the shard has this owner."""
        return self.names.get(owner) == shard_id and self.owners.get(shard_id) == owner


@dataclass(eq=False)
class Naming:
    """One call. `takes`: the owner that it may give to a shard, and the owners that it may replace (None: the shard has none). `drops`: the
    owners whose shard it may leave without an owner.
    """

    what: str
    takes: tuple[Owner, frozenset[Owner | None]] | None = None
    drops: frozenset[Owner] = frozenset()
    renames: tuple[ShardId, Owner, Owner] | None = None
    begun: int = 0

    def __repr__(self) -> str:
        return self.what


class NamesWitness:
    """The true history of the registry."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.is_judged = False
        """Whether all commits to the registry come from calls that it knows."""
        self.moments: list[Names] = [Names({}, {})]
        self.left: set[ShardId] = set()
        """Shards whose owner's name does not lead to them, because a call may end before its last step: a call that gave the name to
        another shard, a drop before it removes the owner, or a take-over before it writes the name.
        """

    @property
    def now(self) -> Names:
        """The present entries."""
        return self.moments[-1]

    def committed(self, key: str, new: VersionedData) -> None:
        """A compare-and-set has committed `new`."""
        if not self.is_judged:
            return
        owners, names = dict(self.now.owners), dict(self.now.names)
        call = self._scheduler.acting
        if key.startswith(_OWNERS_PREFIX):
            shard_id = ShardId(key.removeprefix(_OWNERS_PREFIX))
            was, owner = owners.pop(shard_id, None), decode_shard_owner(new.data, key=key, shard_id=shard_id)
            if owner is not None:
                owners[shard_id] = owner
            self._check_owner(call, shard_id, was, owner)
            if owner is not None and owner != was and self.now.names.get(owner) != shard_id:
                self.left.add(shard_id)  # until the next step of this call
        elif key.startswith(NAMES_PREFIX):
            name, named = decode_name(new.data, key=key)
            was_named = names.pop(name, None)
            is_asked = isinstance(call, Naming) and call.renames is None
            is_dropped = named is None and isinstance(call, Naming) and bool(call.drops)
            if was_named is not None and (is_dropped or (is_asked and named not in {None, was_named})):
                self.left.add(was_named)
            if named is not None:
                names[name] = named
                if owners.get(named) == name:
                    self.left.discard(named)
        else:
            return
        before, after = self.now, Names(owners, names)
        self.moments.append(after)
        self._scheduler.note(f"-> {key} {new.seqno}")
        if isinstance(call, Naming) and call.renames is not None:
            shard_id, *both = call.renames
            if any(before.leads_to(each, shard_id) for each in both) and not any(
                after.names.get(each) == shard_id for each in both
            ):
                self._scheduler.fail(f"{call} leaves {shard_id} without a name")

    def saw(self, call: Naming, is_true: Callable[[Names], bool], answer: object) -> None:
        """`call` returned `answer`, so `is_true` must hold at some moment during the call."""
        if not any(map(is_true, self.moments[call.begun :])):
            self._scheduler.fail(f"{call} answers {answer}; meanwhile there was {self.moments[call.begun :]}")

    def _check_owner(self, call: object, shard_id: ShardId, was: Owner | None, owner: Owner | None) -> None:
        if was == owner:
            return
        if not isinstance(call, Naming):
            self._scheduler.fail(f"{shard_id} goes from {was} to {owner} by no call")
        is_dropped = owner is None and was in call.drops
        is_taken = owner is not None and call.takes is not None and call.takes[0] == owner and was in call.takes[1]
        if not (is_dropped or is_taken):
            self._scheduler.fail(f"{call} takes {shard_id} from {was} and gives it to {owner}")
