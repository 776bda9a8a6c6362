"""Owners of shards, and the names under which owners find their shards.

A shard's owner and an owner's shard are each a log in consensus, of which only the newest entry counts. A shard has at most one owner at a
time, whatever names lead to it. The log of its owner alone decides ownership. Each step of a change is one compare-and-set on one log.
Repeating a change that was interrupted between two steps completes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from persist_engine.base.errors import InvalidUsage, ShardNotFound, Unavailable
from persist_engine.base.retry import Retry
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.codec.registry import (
    NAMES_PREFIX,
    OWNERS_PREFIX,
    decode_name,
    decode_shard_owner,
    encode_name,
    encode_shard_owner,
    name_key,
    owner_key,
)
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Adopted, Adoption, OwnedElsewhere, Owner, Unowned
from persist_engine.storage.consensus import Consensus

_NEAR_MAX = 5
_SHOWN_CHARS = 200
#: The limit on attempts. A step is lost only when another process wins one, and owners do not change that often.
_STEPS_MAX = 64


class Registry:
    """The owners in one location. Thread-safe. Methods are linearized and idempotent. They retry as `settings.retry` says, and then raise
    Unavailable.
    """

    def __init__(self, consensus: Consensus, retry: Retry) -> None:
        self._consensus, self._retry = consensus, retry

    def owner_of(self, shard_id: ShardId) -> Owner | None:
        """The owner of the shard, which need not exist; None when it has none."""
        return self._owner(shard_id)[1]

    def registered(self, owner: Owner) -> ShardId | None:
        """The shard that the owner's name leads to; None when there is none. The shard may have another owner by now."""
        return self._named(owner)[1]

    def names(self) -> Iterator[tuple[Owner, ShardId]]:
        """Every name and its shard, in no particular order. Lists all keys of the store."""
        for key in self._listed(NAMES_PREFIX):
            if (head := self._head(key)) is not None:
                owner, shard_id = decode_name(head.data, key=key)
                if shard_id is not None:
                    yield owner, shard_id

    def left_by(self, owner: Owner) -> list[ShardId]:
        """The shards of the owner to which its name does not lead: their disowning was interrupted. Lists all keys of the store."""
        shards = [ShardId(key.removeprefix(OWNERS_PREFIX)) for key in self._listed(OWNERS_PREFIX)]
        owned = [shard_id for shard_id in shards if self.owner_of(shard_id) == owner]
        # The name is read last: it leads to a shard that gets this owner meanwhile.
        return [shard_id for shard_id in owned if self.registered(owner) != shard_id]

    def shard_named(self, name: str) -> ShardId:
        """The shard whose owner has this name: NAME, NAMESPACE/NAME, NAMESPACE.NAME or OPERATOR/NAMESPACE/NAME. Lists all keys of the
        store. Raises ShardNotFound, with near names, when there is none. Raises InvalidUsage, with all of them, when several shards have
        the name.
        """
        owned = {owner: shard_id for owner, shard_id in self.names() if self.owner_of(shard_id) == owner}
        found = [owner for owner in owned if name in _forms(owner)]
        if len(found) == 1:
            return owned[found[0]]
        if found:
            text = ", ".join(sorted(map(str, found)))
            raise InvalidUsage(f"{len(found)} shards are named {name[:_SHOWN_CHARS]}: choose one of {text}")
        known = _shown_forms(owned, name)
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=_NEAR_MAX)
        shown = near or known[:_NEAR_MAX]
        hint = (
            f"; {'near names are' if near else 'there are'} {', '.join(shown)}" if shown else "; there are no names yet"
        )
        raise ShardNotFound(f"no shard of this store is named {name[:_SHOWN_CHARS]}{hint}", shard_id=name)

    def adopt(self, owner: Owner, *, wanted: ShardId | None, proposed: ShardId, take_over: bool = False) -> Adoption:
        """Makes `owner` the owner of a shard: of `wanted`, else of the one that its name leads to, else of `proposed`. Afterwards its name
        leads to that shard.

        If an interrupted rename left the name at a shard without an owner, the name leads to `proposed` afterwards, so that the rows of a
        dropped table come back under no name. A shard that does not exist belongs to the first owner that claims it. Returns OwnedElsewhere
        when the shard has another owner, and Unowned when it exists without an owner and the name does not lead to it. With `take_over`,
        both are adopted.
        """
        is_new = False
        name_read: tuple[Tip | None, ShardId | None] | None = None
        owner_read: tuple[Tip | None, Owner | None] | None = None
        for _ in range(_STEPS_MAX):
            # After a step that committed, its entry is known. After a step that was lost, both logs are read again.
            name_tip, named = name_read or self._named(owner)
            shard_id = wanted or named or proposed
            owner_tip, held = owner_read or self._owner(shard_id)
            if held == owner and named == shard_id:
                return Adopted(shard_id, is_new)
            if held not in {None, owner} and not take_over:
                assert held is not None
                return OwnedElsewhere(shard_id, held)
            if held is None and named != shard_id and not take_over and self._head(shard_id) is not None:
                return Unowned(shard_id)
            is_claimed = wanted is not None or take_over or held is not None or named in {None, proposed}
            if not is_claimed and self._is_left(shard_id):
                self._put(name_key(owner), name_tip, encode_name(owner, proposed))
                name_read = owner_read = None
                continue
            is_new = is_new or held != owner
            # After a crash, a proposed id is drawn anew, so its name must be written first. A wanted id is requested again, so its owner is
            # written first: the name must never lead to the shard of another owner.
            # SUBTLE: a name that leads here already is written anew, before the owner, because `free` may be removing it, as in `rename`.
            is_named_before = named == shard_id and name_read is None
            if held == owner or is_named_before or (wanted is None and named is None):
                tip = self._put(name_key(owner), name_tip, encode_name(owner, shard_id))
                name_read, owner_read = (None, None) if tip is None else ((tip, shard_id), (owner_tip, held))
            else:
                tip = self._put(owner_key(shard_id), owner_tip, encode_shard_owner(shard_id, owner))
                name_read, owner_read = (None, None) if tip is None else ((name_tip, named), (tip, owner))
        raise Unavailable(
            f"other processes keep changing the owner of shard {proposed if wanted is None else wanted}: try again"
        )

    def disown(self, shard_id: ShardId, *, only: Owner | None = None) -> Owner | None:
        """Removes the shard's owner, and makes the owner's name lead nowhere. Returns the former owner; None when there was none. With
        `only`, any other owner stays.
        """
        was: Owner | None = None
        for _ in range(_STEPS_MAX):
            owner_tip, held = self._owner(shard_id)
            if held is None or only not in {None, held}:
                return was
            was = held
            name_tip, named = self._named(held)
            # Remove the name first: after a crash, only the owner's entry says which name it was.
            if named == shard_id:
                self._put(name_key(held), name_tip, encode_name(held, None))
            else:
                self._put(owner_key(shard_id), owner_tip, encode_shard_owner(shard_id, None))
        raise Unavailable(f"other processes keep changing the owner of shard {shard_id}: try again")

    def rename(self, shard_id: ShardId, *, old: Owner, new: Owner) -> None:
        """Gives the shard of `old` to `new`, whose name then leads to it. The name of `old` then leads nowhere. A repetition completes an
        interrupted call; until then, at least one of the two names leads to the shard.

        Raises InvalidUsage when the name of `new` leads to another shard, or when neither `old` nor `new` owns this one. In the second case
        neither name leads to it afterwards.
        """
        for _ in range(_STEPS_MAX):
            new_tip, new_named = self._named(new)
            old_tip, old_named = self._named(old)
            owner_tip, held = self._owner(shard_id)
            if new_named not in {None, shard_id}:
                if self.free(new):
                    continue
                raise InvalidUsage(f"the name {new} leads to shard {new_named} already", owner=str(new))
            if held not in {old, new}:
                entries = ((new, new_tip, new_named), (old, old_tip, old_named))
                left = [(name, tip) for name, tip, named in entries if named == shard_id]
                if left:  # names that this call, or an interrupted one, left at the shard
                    for name, tip in left:
                        self._put(name_key(name), tip, encode_name(name, None))
                    continue  # one of them may own the shard by now, and then its name must lead there again
                raise InvalidUsage(f"shard {shard_id} belongs to {held or 'no owner'}, not to {old}", owner=str(old))
            # Write the new name first and remove the old one last, so that a crash leaves no shard without a name.
            if new_named is None or held == old:
                # SUBTLE: a name that leads here already is written anew, too. `free` may be removing it. Then either its entry loses its
                # race, or the owner's entry written below, which was read before, does.
                tip = self._put(name_key(new), new_tip, encode_name(new, shard_id))
                if tip is not None and held == old:
                    self._put(owner_key(shard_id), owner_tip, encode_shard_owner(shard_id, new))
            elif old_named == shard_id:
                self._put(name_key(old), old_tip, encode_name(old, None))
            else:
                return
        raise Unavailable(f"other processes keep changing the owner of shard {shard_id}: try again")

    def free(self, owner: Owner) -> bool:
        """Makes the owner's name lead nowhere if it leads to a shard that the owner does not own: an unfinished renaming left it there, or
        another owner took the shard over. Returns whether the name leads nowhere afterwards.
        """
        for _ in range(_STEPS_MAX):
            name_tip, named = self._named(owner)
            if named is None:
                return True
            owner_tip, held = self._owner(named)
            is_being_created = held is None and not self._is_left(named)
            if held == owner or is_being_created:
                return False
            # SUBTLE: the entry of the shard's owner is written anew, unchanged. Otherwise a renaming that still runs could make `owner` the
            # owner of the shard a moment later, without a name.
            if self._put(owner_key(named), owner_tip, encode_shard_owner(named, held)) is not None:
                self._put(name_key(owner), name_tip, encode_name(owner, None))
        raise Unavailable(f"other processes keep changing the name {owner}: try again")

    def _listed(self, prefix: str) -> list[str]:
        """The keys that begin so, in no particular order."""
        keys = self._retry.external("list names", lambda: list(self._consensus.list_keys()))
        return [key for key in keys if key.startswith(prefix)]

    def _is_left(self, shard_id: ShardId) -> bool:
        """Whether the shard exists without an owner. SUBTLE: the owner is read last, since a new shard gets its owner before it exists."""
        return self._head(shard_id) is not None and self._owner(shard_id)[1] is None

    def _owner(self, shard_id: ShardId) -> tuple[Tip | None, Owner | None]:
        key = owner_key(shard_id)
        head = self._head(key)
        return (None, None) if head is None else (head.tip, decode_shard_owner(head.data, key=key, shard_id=shard_id))

    def _named(self, owner: Owner) -> tuple[Tip | None, ShardId | None]:
        key = name_key(owner)
        head = self._head(key)
        return (None, None) if head is None else (head.tip, decode_name(head.data, key=key)[1])

    def _head(self, key: str) -> VersionedData | None:
        return self._retry.external("head", lambda: self._consensus.head(key))

    def _put(self, key: str, expected: Tip | None, data: bytes) -> Tip | None:
        """Appends the entry unless another process was faster. Returns its tip; None when the caller must read again."""
        new = VersionedData(SeqNo(1) if expected is None else expected.seqno.next(), data)
        result = self._retry.external("compare and set", lambda: self._consensus.compare_and_set(key, expected, new))
        if result is not CasResult.COMMITTED:
            return None
        if expected is not None:
            self._retry.external("truncate", lambda: self._consensus.truncate(key, new.seqno, new.tip))
        return new.tip


def _shown_forms(owners: Iterable[Owner], asked: str) -> list[str]:
    """One text for each owner that leads to its shard alone, in the form of `asked`. It is the shortest form that is unambiguous."""
    forms = [_forms(owner) for owner in owners]
    shortest = 1 if "/" in asked else 2 if "." in asked else 0
    counts = Counter(each for some in forms for each in set(some))
    return sorted(next((each for each in some[shortest:] if counts[each] == 1), some[-1]) for some in forms)


def _forms(owner: Owner) -> tuple[str, ...]:
    """The texts that name the owner's shard, the short ones first."""
    namespace, name = owner.namespace, owner.name
    return name, f"{namespace}/{name}", f"{namespace}.{name}", str(owner)
