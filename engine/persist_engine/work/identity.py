"""The identity of a pair of stores: drawn at first use, stored in both, and compared whenever the pair is opened.

It is created in the order below. If a crash interrupts it, the next opener completes it. Concurrent first openers agree on one id.

    1  consensus   the id, not bound         the one compare-and-set that decides
    2  blob        the id
    3  consensus   the id, bound             from here on a blob store without it is another store

If the blob store has the id and consensus does not, consensus has lost its data or belongs to another pair. If consensus has the id, bound,
and the blob store does not, the same holds for the blob store. An id in a store is never overwritten.
"""

from __future__ import annotations

from persist_engine.base.errors import InvariantViolated, StoreLost, StoreMismatch
from persist_engine.base.versioned import SeqNo, Tip, VersionedData
from persist_engine.codec.registry import IDENTITY_KEY, Identity, decode_identity, encode_identity
from persist_engine.model.ids import StoreId
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus

#: All openers together do each step at most once, so this limit is never reached.
_STEPS_MAX = 16
_ADVICE = (
    "check both addresses; if they are right, restore the lost data (docs/operations.md, Pairs of stores): "
    "nothing is written until the two agree"
)


def identify(blob: Blob, consensus: Consensus, *, fresh: StoreId, create: bool) -> StoreId | None:
    """Returns the id of the pair. If the pair has none, the id becomes `fresh`. Without `create`, writes nothing, and returns None for a
    pair without an id.

    Raises StoreLost and StoreMismatch, which name both addresses. Makes two or three small reads. Idempotent and linearized. Retries
    nothing.
    """
    for _ in range(_STEPS_MAX):
        # SUBTLE: read blob first. The id is written to consensus before blob, so an id found in blob was in consensus before.
        in_blob = _in_blob(blob)
        head = consensus.head(IDENTITY_KEY)
        if head is None:
            if in_blob is not None:
                raise _lost(f"the consensus store {consensus.address()} does not know it", in_blob, blob, consensus)
            if not create:
                return None
            _say(consensus, None, Identity(fresh, is_bound=False))
            continue
        known = decode_identity(head.data, key=IDENTITY_KEY)
        if in_blob is None and known.is_bound:
            in_blob = _in_blob(blob)  # bound since the first read
            if in_blob is None:
                raise _lost(f"the blob store {blob.address()} does not know it", known.store_id, blob, consensus)
        if in_blob not in {None, known.store_id}:
            raise StoreMismatch(
                f"the consensus store {consensus.address()} belongs to {known.store_id}, the blob store {blob.address()} to "
                f"{in_blob}: they are of two pairs; {_ADVICE}",
                store_id=known.store_id,
                blob_store_id=in_blob,
                consensus=consensus.address(),
                blob=blob.address(),
            )
        if known.is_bound or not create:
            return known.store_id
        if in_blob is None:
            blob.set(IDENTITY_KEY, encode_identity(Identity(known.store_id)))
        else:
            _say(consensus, head.tip, Identity(known.store_id))
    raise InvariantViolated(f"the identity of {consensus.address()} changed {_STEPS_MAX} times while it was read")


def _in_blob(blob: Blob) -> StoreId | None:
    data = blob.get(IDENTITY_KEY)
    return None if data is None else decode_identity(data, key=IDENTITY_KEY).store_id


def _say(consensus: Consensus, expected: Tip | None, identity: Identity) -> None:
    """Tries to write the identity. The next read shows which opener won."""
    seqno = SeqNo(1) if expected is None else expected.seqno.next()
    consensus.compare_and_set(IDENTITY_KEY, expected, VersionedData(seqno, encode_identity(identity)))


def _lost(what: str, store_id: StoreId, blob: Blob, consensus: Consensus) -> StoreLost:
    pair = f"{store_id} (consensus {consensus.address()}, blob {blob.address()})"
    text = f"{what}: data of the pair {pair} is lost, or an address is that of another store; {_ADVICE}"
    return StoreLost(text, store_id=store_id, consensus=consensus.address(), blob=blob.address())
