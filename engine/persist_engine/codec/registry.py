"""Converts the identity of a pair of stores and the registry of owners to bytes and back, and makes their consensus keys.

    store-identity                               the id of the pair; in blob under the same key
    owner/<shard>                                the owner of the shard
    name/<operator>/<namespace>/<name>           the shard of the owner; each field is quoted

None of these keys is a shard id, so a listing of shards leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import check
from persist_engine.codec.envelope import Kind, decoding, opened, sealed
from persist_engine.codec.records import need
from persist_engine.model.ids import ShardId, StoreId
from persist_engine.model.ownership import Owner
from persist_engine.pb import registry_pb2 as pb

IDENTITY_KEY = "store-identity"
NAMES_PREFIX, OWNERS_PREFIX = "name/", "owner/"


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of the pair, as one store holds it. `is_bound` matters in consensus only: it records that the blob store holds the same id."""

    store_id: StoreId
    is_bound: bool = True


def owner_key(shard_id: ShardId) -> str:
    """The consensus key of the shard's owner."""
    return f"{OWNERS_PREFIX}{shard_id}"


def name_key(owner: Owner) -> str:
    """The consensus key of the owner's shard."""
    return f"{NAMES_PREFIX}{owner}"


def encode_identity(identity: Identity) -> bytes:
    """The bytes of the identity, in the same form for both stores."""
    message = pb.StoreIdentity(store_id=identity.store_id.to_bytes(), bound=identity.is_bound)
    return sealed(Kind.STORE_IDENTITY, message)


def decode_identity(data: bytes, *, key: str) -> Identity:
    """Inverse of `encode_identity`. Raises CorruptData or Incompatible with `key`."""
    message = opened(Kind.STORE_IDENTITY, data, pb.StoreIdentity(), key)
    with decoding("the store's identity", key):
        return Identity(StoreId.from_bytes(message.store_id), message.bound)


def encode_shard_owner(shard_id: ShardId, owner: Owner | None) -> bytes:
    """One entry of the shard's log of owners. `owner` None means that the shard has no owner any more."""
    return sealed(Kind.SHARD_OWNER, pb.ShardOwner(shard_id=shard_id.to_bytes(), owner=_owner_to_pb(owner)))


def decode_shard_owner(data: bytes, *, key: str, shard_id: ShardId) -> Owner | None:
    """Inverse of `encode_shard_owner`. Raises CorruptData (also for the owner of another shard) or Incompatible with `key`."""
    message = opened(Kind.SHARD_OWNER, data, pb.ShardOwner(), key)
    with decoding("the shard's owner", key):
        found = ShardId.from_bytes(message.shard_id)
        check(found == shard_id, f"it is the owner of shard {found}")
        return _owner_from_pb(message.owner) if message.HasField("owner") else None


def encode_name(owner: Owner, shard_id: ShardId | None) -> bytes:
    """One entry of the log of the owner's name. `shard_id` None means that the name has no shard any more."""
    message = pb.RegisteredName(owner=_owner_to_pb(owner))
    if shard_id is not None:
        message.shard_id = shard_id.to_bytes()
    return sealed(Kind.REGISTERED_NAME, message)


def decode_name(data: bytes, *, key: str) -> tuple[Owner, ShardId | None]:
    """Inverse of `encode_name`, for the owner in `key`. Raises CorruptData (also for another owner) or Incompatible with `key`."""
    message = opened(Kind.REGISTERED_NAME, data, pb.RegisteredName(), key)
    with decoding("the registered name", key):
        need(message, "owner")
        owner = _owner_from_pb(message.owner)
        check(name_key(owner) == key, f"it is the name of {owner}")
        return owner, ShardId.from_bytes(message.shard_id) if message.HasField("shard_id") else None


def _owner_to_pb(owner: Owner | None) -> pb.Owner | None:
    if owner is None:
        return None
    return pb.Owner(operator_id=owner.operator_id, namespace=owner.namespace, name=owner.name)


def _owner_from_pb(message: pb.Owner) -> Owner:
    return Owner(message.operator_id, message.namespace, message.name)
