"""Ownership: which shard a PersistShard claims, when it may take a shard from another owner, and the message of a refused claim. Pure.

The store decides (persist_engine.work.registry), for all its addresses and all operators. A resource takes a shard from another
owner only in two cases. Without the annotation `persistshard.io/take-over: <shard id>`, the owner must be a resource of the same namespace
that is gone. With the annotation, the owner must be a resource of the same namespace, or the storage profile must allow the take-over.
A shard that its owner ends is not taken over, because the data of the new owner would end with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from persist_engine.model.ownership import Owner

from persist_operator.api import names
from persist_operator.api.shard import Shard
from persist_operator.plan import shard_log
from persist_operator.plan.hints import TakeOver, Words
from persist_operator.plan.observed import Claim, NotOwned, OwnerState
from persist_operator.settings import OperatorSettings


def owner_of(shard: Shard, settings: OperatorSettings) -> Owner:
    """The owner that represents this resource in the store. It stays the same when the resource is deleted and applied again."""
    return Owner(settings.operator_id, shard.meta.namespace, shard.meta.name)


def claim_of(shard: Shard, settings: OperatorSettings) -> Claim:
    """The claim of the resource. The store uses the resource's name to find its former shard. The id of a new shard comes from the uid."""
    return Claim(
        owner=owner_of(shard, settings),
        wanted=shard.spec.shard_id,
        proposed=str(shard.known.shard_id or names.shard_id_of(shard.meta.uid)),
        known_seqno=shard_log.known_seqno(shard),
    )


def with_owner_state(
    shard: Shard, found: NotOwned, settings: OperatorSettings, owner_state: Callable[[Owner], OwnerState]
) -> NotOwned:
    """`found` with the `owner_state` of its owner, if that is a resource of this operator from which `shard` might take the shard."""
    owner = found.owner
    if owner is None or owner.operator_id != settings.operator_id:
        return found
    may_matter = _is_neighbour(shard, owner, settings) or _take_over(shard, settings) == "Any"
    return replace(found, owner_state=owner_state(owner)) if may_matter else found


def may_take_over(shard: Shard, found: NotOwned, settings: OperatorSettings) -> bool:
    """Whether the resource may take over the shard in `found`. `found` must have the state of its owner."""
    neighbour = _is_neighbour(shard, found.owner, settings)
    if found.owner_state == "Gone" and neighbour:
        return True
    if found.owner_state == "Ends" or shard.meta.annotations.get(names.ANNOTATION_TAKE_OVER) != found.shard_id:
        return False
    allowed = _take_over(shard, settings)
    return neighbour or allowed == "Any" or (allowed == "Unowned" and found.owner is None)


def refusal(shard: Shard, found: NotOwned, settings: OperatorSettings, words: Words) -> tuple[str, str]:
    """Reason and message of the condition of a resource that does not own its claimed shard."""
    mine = owner_of(shard, settings)
    if found.owner is None:
        ways = words(TakeOver(found.shard_id, mine, by_annotation=_take_over(shard, settings) != "SameNamespace"))
        return "ShardUnowned", f"shard {found.shard_id} exists and has no owner; to adopt it {ways}"
    theirs = found.owner
    conflict = f"{theirs.namespace}/{theirs.name} of operator {theirs.operator_id} owns shard {found.shard_id}"
    if found.owner_state == "Ends":
        ways = "name another shardId, or set its spec.reclaimPolicy to Retain to keep what is still there"
        return "ShardIdConflict", f"{conflict}, and is being deleted, which ends the shard; {ways}"
    easy = _is_neighbour(shard, theirs, settings) or _take_over(shard, settings) == "Any"
    ways = words(TakeOver(found.shard_id, mine, by_annotation=easy))
    return "ShardIdConflict", f"{conflict}; name another shardId, or to take it over {ways}"


def _is_neighbour(shard: Shard, owner: Owner | None, settings: OperatorSettings) -> bool:
    """Whether `owner` is a resource of this operator in the namespace of `shard`."""
    mine = (settings.operator_id, shard.meta.namespace)
    return owner is not None and (owner.operator_id, owner.namespace) == mine


def _take_over(shard: Shard, settings: OperatorSettings) -> str:
    """The `take_over` of the resource's storage profile. Inline storage allows the least, SameNamespace."""
    profile = settings.storage_profiles.get(shard.spec.storage_profile or settings.default_profile)
    return "SameNamespace" if profile is None or shard.spec.storage is not None else profile.take_over
