"""Who owns which shard of a store, and under which name a shard is found again.

Two logs in consensus, of which only the newest entry counts: a shard's owner, and an owner's shard. A shard has one owner
at a time, whatever names lead to it; what was owned is told by the shard's log alone. Each step of a change is one
compare-and-set on one log, and a change cut off between two is finished by its repetition.
"""

from __future__ import annotations

from collections.abc import Iterator

from persist_engine.base.errors import Unavailable
from persist_engine.base.retry import Retry
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.codec.registry import (
    NAMES_PREFIX,
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

#: A step is lost only to one that another process won, and owners do not change that often.
_STEPS_MAX = 64


class Registry:
    """The owners of one location. Thread-safe. Linearized, idempotent; retries as settings.retry says (Unavailable)."""

    def __init__(self, consensus: Consensus, retry: Retry) -> None:
        self._consensus, self._retry = consensus, retry

    def owner_of(self, shard_id: ShardId) -> Owner | None:
        """The owner of the shard, which need not exist; None when it has none."""
        return self._owner(shard_id)[1]

    def registered(self, owner: Owner) -> ShardId | None:
        """The shard that the owner's name leads to, whose owner may be another by now; None when there is none."""
        return self._named(owner)[1]

    def names(self) -> Iterator[tuple[Owner, ShardId]]:
        """Every name and its shard, in no particular order. Reads the whole listing of the store."""
        keys = self._retry.external("list names", lambda: list(self._consensus.list_keys()))
        for key in keys:
            head = self._head(key) if key.startswith(NAMES_PREFIX) else None
            if head is not None:
                owner, shard_id = decode_name(head.data, key=key)
                if shard_id is not None:
                    yield owner, shard_id

    def adopt(self, owner: Owner, *, wanted: ShardId | None, proposed: ShardId, take_over: bool = False) -> Adoption:
        """Make the shard the owner's: `wanted`, else the one its name leads to, else `proposed`; afterwards its name leads
        there.

        The first to claim a shard that does not exist has it. OwnedElsewhere for another's, and Unowned for one that
        exists without an owner and that the name does not lead to, are values; with `take_over` both are adopted.
        """
        is_new = False
        for _ in range(_STEPS_MAX):
            name_tip, named = self._named(owner)
            shard_id = wanted or named or proposed
            owner_tip, held = self._owner(shard_id)
            if held == owner and named == shard_id:
                return Adopted(shard_id, is_new)
            if held not in {None, owner} and not take_over:
                assert held is not None
                return OwnedElsewhere(shard_id, held)
            if held is None and named != shard_id and not take_over and self._head(shard_id) is not None:
                return Unowned(shard_id)
            is_new = is_new or held != owner
            # A proposed id is drawn anew after a crash, so that its name has to be there first. A wanted one is asked for
            # again: the name must not lead to a shard that is another's.
            if held == owner or (wanted is None and named is None):
                self._put(name_key(owner), name_tip, encode_name(owner, shard_id))
            else:
                self._put(owner_key(shard_id), owner_tip, encode_shard_owner(shard_id, owner))
        raise Unavailable(f"the owner of shard {proposed if wanted is None else wanted} changes all the time")

    def disown(self, shard_id: ShardId) -> Owner | None:
        """Let the shard have no owner, and its owner's name lead to no shard; who it was, None when there was none."""
        was: Owner | None = None
        for _ in range(_STEPS_MAX):
            owner_tip, held = self._owner(shard_id)
            if held is None:
                return was
            was = held
            name_tip, named = self._named(held)
            # The name first: the owner alone tells which name it was.
            if named == shard_id:
                self._put(name_key(held), name_tip, encode_name(held, None))
            else:
                self._put(owner_key(shard_id), owner_tip, encode_shard_owner(shard_id, None))
        raise Unavailable(f"the owner of shard {shard_id} changes all the time")

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

    def _put(self, key: str, expected: Tip | None, data: bytes) -> None:
        """Append the entry, unless another process was faster: the caller looks again."""
        new = VersionedData(SeqNo(1) if expected is None else expected.seqno.next(), data)
        result = self._retry.external("compare and set", lambda: self._consensus.compare_and_set(key, expected, new))
        if result is CasResult.COMMITTED:
            self._retry.external("truncate", lambda: self._consensus.truncate(key, new.tip))
