"""Who owns a shard, and the answers to a wish to own one.

An owner is a resource of one operator. Its name is known before its shard: the registry of a store leads from the one to
the other.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from urllib.parse import quote, unquote

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId

_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Owner:
    """A resource: `operator_id` tells apart the operators that share a store. Prints as OPERATOR/NAMESPACE/NAME, quoted so
    that any text comes back. InvalidUsage for an empty field, or one that is no text.
    """

    operator_id: str
    namespace: str
    name: str

    def __post_init__(self) -> None:
        for field in astuple(self):
            try:
                field.encode()
            except UnicodeEncodeError:
                raise InvalidUsage(f"not an owner: {field!r} is not valid unicode") from None
        if not all(astuple(self)):
            raise InvalidUsage(f"not an owner: {self!r}, its operator, namespace and name must not be empty")

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Inverse of str(); InvalidUsage for anything else."""
        fields = text.split("/")
        if len(fields) != _FIELDS:
            raise InvalidUsage(
                f"not an owner: {text[:200]!r}, expected OPERATOR/NAMESPACE/NAME, a / within one written %2F"
            )
        return cls(*map(unquote, fields))

    def __str__(self) -> str:
        return "/".join(quote(field, safe="") for field in astuple(self))


@dataclass(frozen=True, slots=True)
class Adopted:
    """The shard is the owner's. `is_new`: it was not before the call."""

    shard_id: ShardId
    is_new: bool


@dataclass(frozen=True, slots=True)
class OwnedElsewhere:
    """Another owner has the shard; nothing was changed."""

    shard_id: ShardId
    owner: Owner


@dataclass(frozen=True, slots=True)
class Unowned:
    """The shard exists and has no owner: to adopt it takes an explicit word. Nothing was changed."""

    shard_id: ShardId


Adoption = Adopted | OwnedElsewhere | Unowned
